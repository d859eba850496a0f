//! HTTP/1.1 on a bare socket: tests send any bytes and choose how the client disconnects.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;
use socket2::SockRef;

/// A read fails after this long without a byte. Longer than any pause of a test.
const SILENCE: Duration = Duration::from_secs(30);

/// How a client disconnects.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HangUp {
    /// The client closes: the peer reads an end.
    Fin,
    /// The client resets: the peer reads an error.
    Rst,
}

impl HangUp {
    /// Both ways to disconnect.
    pub(crate) const BOTH: [Self; 2] = [Self::Fin, Self::Rst];
}

/// A sent request whose response has not been read.
pub(crate) struct PendingCall {
    stream: TcpStream,
}

/// See [`PendingCall::kept`].
pub(crate) struct KeptConnection {
    address: String,
    stream: TcpStream,
}

/// A whole response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

/// A response, streamed or not.
pub(crate) enum Response {
    /// The whole response.
    Whole(Reply),
    /// Its head. The events follow.
    Streamed(Stream),
}

/// A streamed response whose head has been read.
pub(crate) struct Stream {
    pub(crate) status: u16,
    reader: BufReader<TcpStream>,
    /// Decoded bytes of an incomplete event.
    pending: Vec<u8>,
    ended: bool,
}

impl PendingCall {
    /// Sends these bytes unchanged.
    pub(crate) fn raw(address: &str, bytes: &[u8]) -> Self {
        Self::try_raw(address, bytes).expect("it listens")
    }

    /// As [`Self::raw`], for a server that may not listen.
    pub(crate) fn try_raw(address: &str, bytes: &[u8]) -> std::io::Result<Self> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_nodelay(true).expect("a socket option");
        stream.set_read_timeout(Some(SILENCE)).expect("a socket option");
        // A server that refuses by the head alone may close before it has read the body.
        let _ = stream.write_all(bytes);
        Ok(Self { stream })
    }

    /// Sends one request with a JSON body of these bytes.
    pub(crate) fn new(address: &str, method: &str, path: &str, body: &[u8]) -> Self {
        Self::try_new(address, method, path, body).expect("it listens")
    }

    /// As [`Self::new`], for a server that may not listen.
    pub(crate) fn try_new(address: &str, method: &str, path: &str, body: &[u8]) -> std::io::Result<Self> {
        Self::try_with(address, method, path, "", body)
    }

    /// As [`Self::try_new`], with more headers as whole lines with their ends.
    pub(crate) fn try_with(
        address: &str,
        method: &str,
        path: &str,
        headers: &str,
        body: &[u8],
    ) -> std::io::Result<Self> {
        Self::try_raw(address, &request(address, method, path, headers, body))
    }

    /// A connection that has served one request already.
    pub(crate) fn kept(address: &str) -> KeptConnection {
        let mut reader = BufReader::new(Self::new(address, "GET", "/health", b"").stream);
        let (status, head) = read_head(&mut reader).expect("a head");
        read_body(&mut reader, status, head).expect("a whole answer");
        KeptConnection { address: address.to_owned(), stream: reader.into_inner() }
    }

    /// Disconnects.
    pub(crate) fn hang_up(self, how: HangUp) {
        disconnect(self.stream, how);
    }

    /// Whether no byte of the response has arrived.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.stream.set_nonblocking(true).expect("a socket option");
        let nothing =
            matches!(self.stream.peek(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        self.stream.set_nonblocking(false).expect("a socket option");
        nothing
    }

    /// Waits for the whole response.
    pub(crate) fn reply(self) -> Reply {
        self.try_reply().expect("a whole answer")
    }

    /// Waits for the whole response of a server that may fail.
    pub(crate) fn try_reply(self) -> std::io::Result<Reply> {
        let mut reader = BufReader::new(self.stream);
        let (status, head) = read_head(&mut reader)?;
        read_body(&mut reader, status, head)
    }

    /// Waits for the head of the response of a server that may fail. Reads a response without a stream to its end.
    pub(crate) fn answer(self) -> std::io::Result<Response> {
        let mut reader = BufReader::new(self.stream);
        let (status, head) = read_head(&mut reader)?;
        let streamed =
            header(&head, "content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
        if streamed {
            return Ok(Response::Streamed(Stream { status, reader, pending: Vec::new(), ended: false }));
        }
        read_body(&mut reader, status, head).map(Response::Whole)
    }

    /// Waits for the head of a streamed response.
    pub(crate) fn stream(self) -> Stream {
        let mut reader = BufReader::new(self.stream);
        let (status, head) = read_head(&mut reader).expect("a head");
        assert_eq!(header(&head, "transfer-encoding").as_deref(), Some("chunked"), "{head}");
        Stream { status, reader, pending: Vec::new(), ended: false }
    }
}

impl KeptConnection {
    /// Sends one more request.
    pub(crate) fn send(mut self, path: &str, body: &Value) -> PendingCall {
        let bytes = request(&self.address, "POST", path, "", body.to_string().as_bytes());
        self.stream.write_all(&bytes).expect("it is open");
        PendingCall { stream: self.stream }
    }
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    pub(crate) fn header(&self, name: &str) -> Option<String> {
        header(&self.head, name)
    }

    /// The text of the first choice of a successful response.
    pub(crate) fn text(&self) -> String {
        let body = self.json();
        assert_eq!(self.status, 200, "{body}");
        let choice = &body["choices"][0];
        let text = choice["text"].as_str().or_else(|| choice["message"]["content"].as_str());
        text.unwrap_or_else(|| panic!("no text: {body}")).to_owned()
    }
}

impl Stream {
    /// The next event's data; `None` at the end of the response.
    pub(crate) fn event(&mut self) -> Option<String> {
        self.try_event().expect("a chunk")
    }

    /// As [`Self::event`], for a response that may break off.
    pub(crate) fn try_event(&mut self) -> std::io::Result<Option<String>> {
        loop {
            if let Some(end) = self.pending.windows(2).position(|pair| pair == b"\n\n") {
                let rest = self.pending.split_off(end + 2);
                let event = std::mem::replace(&mut self.pending, rest);
                let event = String::from_utf8(event).expect("events are text");
                let data = event.trim_end().strip_prefix("data: ");
                return Ok(Some(data.unwrap_or_else(|| panic!("not a data line: {event:?}")).to_owned()));
            }
            if self.ended {
                assert!(self.pending.is_empty(), "half an event at the end");
                return Ok(None);
            }
            match read_chunk(&mut self.reader)? {
                Some(chunk) => self.pending.extend(chunk),
                None => self.ended = true,
            }
        }
    }

    /// Disconnects.
    pub(crate) fn hang_up(self, how: HangUp) {
        disconnect(self.reader.into_inner(), how);
    }
}

fn request(address: &str, method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

pub(super) fn disconnect(mut stream: TcpStream, how: HangUp) {
    match how {
        // Closing a socket with unread bytes would reset the connection.
        HangUp::Fin => {
            stream.set_nonblocking(true).expect("a socket option");
            while matches!(stream.read(&mut [0; 4096]), Ok(1..)) {}
        }
        HangUp::Rst => {
            SockRef::from(&stream).set_linger(Some(Duration::ZERO)).expect("a socket option");
        }
    }
    drop(stream);
}

fn read_head(reader: &mut impl BufRead) -> std::io::Result<(u16, String)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| std::io::Error::other(head.clone()))?;
    if status == 100 { read_head(reader) } else { Ok((status, head)) }
}

fn read_body(reader: &mut impl BufRead, status: u16, head: String) -> std::io::Result<Reply> {
    let mut body = Vec::new();
    if let Some(length) = header(&head, "content-length") {
        body.resize(length.parse().map_err(std::io::Error::other)?, 0);
        reader.read_exact(&mut body)?;
    } else if header(&head, "transfer-encoding").is_some() {
        while let Some(chunk) = read_chunk(reader)? {
            body.extend(chunk);
        }
    } else {
        reader.read_to_end(&mut body)?;
    }
    Ok(Reply { status, head, body })
}

fn header(head: &str, name: &str) -> Option<String> {
    head.lines().skip(1).find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
    })
}

/// One chunk of a chunked body; `None` after the last.
fn read_chunk(reader: &mut impl BufRead) -> std::io::Result<Option<Vec<u8>>> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let length = usize::from_str_radix(line.trim(), 16).map_err(std::io::Error::other)?;
    let mut chunk = vec![0; length + 2];
    reader.read_exact(&mut chunk)?;
    chunk.truncate(length);
    Ok((length > 0).then_some(chunk))
}
