//! The server side of one HTTP/1.1 connection, for requests with a `content-length` or chunked bodies, one after the
//! other. Every simulated engine reads with it.

use std::io::{self, ErrorKind};

use memchr::{memchr_iter, memmem};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Maximum bytes of a request. A larger one ends its connection.
pub(super) const REQUEST_BYTES_MAX: usize = 64 << 20;

/// The interim response to a caller that expects permission to send its body.
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// Maximum bytes that a caller may send while its request is being answered.
const AHEAD_BYTES_MAX: usize = 64 << 10;

/// The properties of a request that matter to an instant engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestFlags {
    /// A POST below `/v1/`, which requests tokens.
    pub generates: bool,
    /// An abort or a release.
    pub verb: bool,
    /// Requests the list of models.
    pub models: bool,
    /// Requests a stream.
    pub stream: bool,
}

/// A connection and the bytes that were read from it.
pub(crate) struct ServerConnection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl ServerConnection {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    /// The next request. `None` when the caller sends no more.
    pub(super) async fn request(&mut self) -> io::Result<Option<RequestFlags>> {
        self.next(|head, body, _| RequestFlags::of(head, body)).await
    }

    /// Passes the next request's head and body to `reads`, and whether the body was chunked. `None` when the caller
    /// sends no more.
    ///
    /// # Cancel safety
    /// No bytes are lost.
    pub(crate) async fn next<T>(
        &mut self,
        reads: impl FnOnce(&[u8], &[u8], bool) -> T,
    ) -> io::Result<Option<T>> {
        let (mut wanted, mut continued) = (None, false);
        loop {
            if wanted.is_none() {
                wanted = head_bytes(&self.buffer).map(|head| (head, framing(&self.buffer[..head])));
            }
            if let Some((head, framing)) = wanted {
                if let Some(end) = framing.end(&self.buffer, head) {
                    let chunked = framing == Framing::Chunked;
                    let read = reads(&self.buffer[..head], &self.buffer[head..end], chunked);
                    self.buffer.drain(..end);
                    return Ok(Some(read));
                }
                if !continued && header(&self.buffer[..head], b"expect").is_some() {
                    self.stream.write_all(CONTINUE).await?;
                }
                continued = true;
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

    /// Waits until the caller has disconnected: its end, a reset, or too many bytes for a waiting caller.
    ///
    /// # Cancel safety
    /// No bytes are lost: bytes that arrive meanwhile begin the next request.
    pub(crate) async fn wait_until_closed(&mut self) {
        while self.buffer.len() < AHEAD_BYTES_MAX {
            self.buffer.reserve(256);
            if matches!(self.stream.read_buf(&mut self.buffer).await, Ok(0) | Err(_)) {
                return;
            }
        }
    }

    /// As [`Self::send`], unless the caller disconnects meanwhile.
    ///
    /// # Errors
    /// If the caller has disconnected.
    pub(crate) async fn send_or_gone(&mut self, bytes: &[u8]) -> io::Result<()> {
        // There is almost always room.
        match self.stream.try_write(bytes) {
            Ok(sent) if sent == bytes.len() => Ok(()),
            Ok(sent) => self.send_rest(&bytes[sent..]).await,
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.send_rest(bytes).await,
            Err(error) => Err(error),
        }
    }

    async fn send_rest(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (mut read, mut write) = self.stream.split();
        let buffer = &mut self.buffer;
        let left = async {
            while buffer.len() < AHEAD_BYTES_MAX {
                buffer.reserve(256);
                if matches!(read.read_buf(buffer).await, Ok(0) | Err(_)) {
                    break;
                }
            }
        };
        tokio::select! {
            sent = write.write_all(bytes) => sent,
            () = left => Err(ErrorKind::ConnectionAborted.into()),
        }
    }

    /// One write.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// Waits for the caller's end and ignores received bytes.
    pub(super) async fn drain_until_closed(&mut self) {
        let mut ignored = [0; 64];
        while !matches!(self.stream.read(&mut ignored).await, Ok(0) | Err(_)) {}
    }

    /// Sends the same piece until the caller disconnects. If the writing side is stuck, the reading side detects
    /// this first.
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

/// How a body is delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Length(usize),
    Chunked,
}

impl Framing {
    /// Where the request ends in the buffer, if it is complete.
    fn end(self, buffer: &[u8], head: usize) -> Option<usize> {
        match self {
            Self::Length(bytes) => (buffer.len() >= head + bytes).then_some(head + bytes),
            // One request at a time: the last chunk ends the received bytes.
            Self::Chunked => buffer[head..].ends_with(b"0\r\n\r\n").then_some(buffer.len()),
        }
    }
}

impl RequestFlags {
    pub(super) fn of(head: &[u8], body: &[u8]) -> Self {
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

/// The content of a chunked body.
pub(crate) fn unchunked(mut chunks: &[u8]) -> Vec<u8> {
    let mut content = Vec::with_capacity(chunks.len());
    while let Some(line) = memmem::find(chunks, b"\r\n") {
        let size = chunks[..line].split(|&byte| byte == b';').next().unwrap_or_default();
        let size =
            std::str::from_utf8(size).ok().and_then(|size| usize::from_str_radix(size.trim(), 16).ok());
        let rest = &chunks[line + 2..];
        let Some(size) = size.filter(|&size| size > 0 && size <= rest.len()) else { break };
        content.extend_from_slice(&rest[..size]);
        chunks = rest[size..].strip_prefix(b"\r\n").unwrap_or_default();
    }
    content
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    memmem::find(bytes, part).is_some()
}

/// Bytes of the head, including its empty line.
pub(crate) fn head_bytes(buffer: &[u8]) -> Option<usize> {
    memmem::find(buffer, b"\r\n\r\n").map(|at| at + 4)
}

/// The value of a header, if present. The name is in lower case.
pub(crate) fn header<'a>(head: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    // The first line is no header.
    let mut lines = memchr_iter(b'\n', head).zip(memchr_iter(b'\n', head).skip(1));
    lines.find_map(|(before, end)| {
        let line = &head[before + 1..end];
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_put_together() {
        assert_eq!(unchunked(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"), b"abcde");
        for broken in [&b""[..], b"zz\r\nabc", b"ffffffffffffffff\r\nabc\r\n0\r\n\r\n", b"-1\r\na\r\n"] {
            assert_eq!(unchunked(broken), b"", "{broken:?}");
        }
    }
}
