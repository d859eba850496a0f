//! A minimal client: one request per connection, no code shared with the engine's own HTTP code.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Longer than any request takes on a loaded machine.
const READ_TIMEOUT: Duration = Duration::from_secs(120);

/// An answer.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    /// Status line and headers, in lower case.
    pub(crate) head: String,
    pub(crate) text: String,
}

impl Reply {
    /// Its JSON; null when it is not JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_default()
    }

    /// Its `error.code`.
    pub(crate) fn code(&self) -> Option<String> {
        self.json()["error"]["code"].as_str().map(str::to_owned)
    }

    /// The value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// Its JSON, if it is a success.
    #[track_caller]
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }
}

/// Sends a request and does not wait for the answer.
pub(crate) fn send(
    to: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> TcpStream {
    let mut stream = TcpStream::connect(to).expect("the engine listens");
    stream.set_read_timeout(Some(READ_TIMEOUT)).expect("a timeout");
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    head += &format!("content-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + body).as_bytes()).expect("the engine reads");
    stream
}

/// Reads the answer to the end of the connection.
pub(crate) fn receive(mut stream: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("an answer");
    let text = String::from_utf8(bytes).expect("UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    let head = head.to_ascii_lowercase();
    let chunked = head.contains("transfer-encoding: chunked");
    Reply { status, text: if chunked { unchunked(body) } else { body.to_owned() }, head }
}

/// Sends a request and waits for the answer.
pub(crate) fn call(to: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Reply {
    receive(send(to, method, path, headers, body))
}

fn unchunked(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).expect("a chunk's size");
        text += &rest[..size];
        body = rest[size..].trim_start_matches("\r\n");
    }
    text
}
