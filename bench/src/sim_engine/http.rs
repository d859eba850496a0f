//! The server's side of one HTTP/1.1 connection, just enough of it: requests with a `content-length` or chunked,
//! one after the other.

use std::io::{self, ErrorKind};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A request is never larger than this; one that is ends its connection.
const REQUEST_BYTES_MAX: usize = 64 << 20;

/// What an engine must know of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// It asks for tokens: a POST below `/v1/`.
    pub generates: bool,
    /// It is an abort or a release.
    pub verb: bool,
    /// It asks for the list of models.
    pub models: bool,
    /// It wants a stream.
    pub stream: bool,
}

/// A connection and what has been read from it.
pub(super) struct Inbox {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Inbox {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    /// The next request; `None` when the caller has none.
    pub(super) async fn request(&mut self) -> io::Result<Option<Seen>> {
        let mut wanted = None;
        loop {
            if wanted.is_none() {
                wanted = head_bytes(&self.buffer).map(|head| (head, framing(&self.buffer[..head])));
            }
            if let Some((head, framing)) = wanted
                && let Some(end) = framing.end(&self.buffer, head)
            {
                let seen = Seen::of(&self.buffer[..head], &self.buffer[head..end]);
                self.buffer.drain(..end);
                return Ok(Some(seen));
            }
            if self.buffer.len() > REQUEST_BYTES_MAX {
                return Err(ErrorKind::InvalidData.into());
            }
            if self.buffer.capacity() == self.buffer.len() {
                self.buffer.reserve(4096);
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return if self.buffer.is_empty() { Ok(None) } else { Err(ErrorKind::UnexpectedEof.into()) };
            }
        }
    }

    /// One write.
    pub(super) async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Waits for the caller's end, and takes no notice of anything else.
    pub(super) async fn left(&mut self) {
        let mut ignored = [0; 64];
        while !matches!(self.stream.read(&mut ignored).await, Ok(0) | Err(_)) {}
    }

    /// Sends the same piece until the caller leaves, which the reading side notices first when the writing side
    /// is stuck.
    pub(super) async fn flood(&mut self, piece: &[u8]) {
        let (mut read, mut write) = self.stream.split();
        let mut ignored = [0; 64];
        let left = async { while !matches!(read.read(&mut ignored).await, Ok(0) | Err(_)) {} };
        let sends = async { while write.write_all(piece).await.is_ok() {} };
        tokio::select! {
            () = left => {}
            () = sends => {}
        }
    }
}

/// How a body's end is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Length(usize),
    Chunked,
}

impl Framing {
    /// Where the request ends in the buffer, once it does.
    fn end(self, buffer: &[u8], head: usize) -> Option<usize> {
        match self {
            Self::Length(bytes) => (buffer.len() >= head + bytes).then_some(head + bytes),
            // One request at a time: the last chunk is the end of what was sent.
            Self::Chunked => buffer[head..].ends_with(b"0\r\n\r\n").then_some(buffer.len()),
        }
    }
}

impl Seen {
    fn of(head: &[u8], body: &[u8]) -> Self {
        let line = head.split(|&byte| byte == b'\r').next().unwrap_or_default();
        let path = line.split(|&byte| byte == b' ').nth(1).unwrap_or_default();
        let posts = line.starts_with(b"POST ");
        Self {
            generates: posts && path.starts_with(b"/v1/"),
            verb: posts && (path.starts_with(b"/abort_requests") || path.starts_with(b"/kv/release")),
            models: path.starts_with(b"/v1/models"),
            stream: contains(body, b"\"stream\":true") || contains(body, b"\"stream\": true"),
        }
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Bytes of the head, with its empty line.
pub(crate) fn head_bytes(buffer: &[u8]) -> Option<usize> {
    buffer.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4)
}

/// The value of a header, if the head has it; the name in lower case.
pub(crate) fn header<'a>(head: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    head.split(|&byte| byte == b'\n').find_map(|line| {
        let (found, value) = line.split_at_checked(name.len())?;
        let value = value.strip_prefix(b":")?;
        found.eq_ignore_ascii_case(name).then(|| value.trim_ascii())
    })
}

fn framing(head: &[u8]) -> Framing {
    if header(head, b"transfer-encoding").is_some() {
        return Framing::Chunked;
    }
    let length = header(head, b"content-length").and_then(|value| std::str::from_utf8(value).ok());
    Framing::Length(length.and_then(|text| text.parse().ok()).unwrap_or(0))
}
