//! A client that controls its socket: partial requests, disconnects by FIN or RST, one event at a time.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde_json::{Value, json};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

const TIMEOUT: Duration = Duration::from_secs(10);

/// How a client disconnects.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DisconnectKind {
    /// `close()`.
    Fin,
    /// `close()` with `SO_LINGER` 0.
    Rst,
}

pub(crate) const DISCONNECT_KINDS: [DisconnectKind; 2] = [DisconnectKind::Fin, DisconnectKind::Rst];

/// One connection to the router.
pub(crate) struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// Received events that are not yet read.
    events: Vec<u8>,
}

/// One response, read to its end.
#[derive(Clone, Debug)]
pub(crate) struct ClientResponse {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl ClientResponse {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// `error.code` of an OpenAI error envelope.
    pub(crate) fn code(&self) -> String {
        let body = self.json();
        let error = body["error"].as_object().unwrap_or_else(|| panic!("no envelope: {}", self.text()));
        for field in ["message", "type", "param", "code"] {
            assert!(error.contains_key(field), "no {field}: {body}");
        }
        error["code"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let of = |line: &'_ str| line.split_once(':').is_some_and(|(n, _)| n.eq_ignore_ascii_case(name));
        self.head.lines().find(|line| of(line)).and_then(|line| line.split_once(": ")).map(|(_, v)| v)
    }
}

pub(crate) fn completion(stream: bool) -> Value {
    json!({"model": "m", "prompt": "hello", "max_tokens": 8, "stream": stream})
}

/// Posts and reads the whole response on a new connection.
pub(crate) async fn post(address: SocketAddr, path: &str, body: &Value) -> ClientResponse {
    let mut client = Client::connect(address).await;
    client.post(path, body).await;
    client.answer().await
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> ClientResponse {
    let mut client = Client::connect(address).await;
    client.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes()).await;
    client.answer().await
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).await.unwrap())
    }

    /// Connects from one of this machine's loopback addresses.
    pub(crate) async fn connect_from(from: IpAddr, address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::new(from, 0)).unwrap();
        Self::over(socket.connect(address).await.unwrap())
    }

    fn over(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        Self { stream, buffer: Vec::new(), events: Vec::new() }
    }

    pub(crate) async fn post(&mut self, path: &str, body: &Value) {
        self.post_bytes(path, "", body.to_string().as_bytes()).await;
    }

    /// `headers` are whole lines.
    pub(crate) async fn post_bytes(&mut self, path: &str, headers: &str, body: &[u8]) {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n",
            body.len()
        );
        self.send(head.as_bytes()).await;
        self.send(body).await;
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// Reads one response to its end; the connection can be used again.
    pub(crate) async fn answer(&mut self) -> ClientResponse {
        tokio::time::timeout(TIMEOUT, self.read_answer()).await.expect("an answer in time")
    }

    async fn read_answer(&mut self) -> ClientResponse {
        let (status, head) = self.head().await;
        let lower = head.to_ascii_lowercase();
        let mut body = Vec::new();
        if lower.contains("transfer-encoding: chunked") {
            while let Some(chunk) = self.chunk().await {
                body.extend_from_slice(&chunk);
            }
        } else if let Some(length) = lower.split("content-length: ").nth(1) {
            let length: usize = length.lines().next().unwrap().trim().parse().unwrap();
            while self.buffer.len() < length {
                assert!(self.more().await, "the answer ended early");
            }
            body = self.buffer.drain(..length).collect();
        }
        ClientResponse { status, head, body }
    }

    /// Reads the head of a response.
    pub(crate) async fn head(&mut self) -> (u16, String) {
        loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                let head: Vec<u8> = self.buffer.drain(..at + 4).collect();
                let head = String::from_utf8(head).unwrap();
                let status: u16 = head.split(' ').nth(1).unwrap().parse().unwrap();
                if status == 100 {
                    continue;
                }
                return (status, head);
            }
            assert!(self.more().await, "the connection ended before an answer");
        }
    }

    /// One chunk of a chunked response; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> Option<Vec<u8>> {
        let read = async {
            let line = loop {
                if let Some(at) = self.buffer.windows(2).position(|w| w == b"\r\n") {
                    break self.buffer.drain(..at + 2).collect::<Vec<u8>>();
                }
                assert!(self.more().await, "the connection ended in the middle of an answer");
            };
            let size = usize::from_str_radix(std::str::from_utf8(&line).unwrap().trim(), 16).unwrap();
            while self.buffer.len() < size + 2 {
                assert!(self.more().await, "the connection ended in the middle of a chunk");
            }
            let chunk: Vec<u8> = self.buffer.drain(..size).collect();
            self.buffer.drain(..2);
            (size > 0).then_some(chunk)
        };
        tokio::time::timeout(TIMEOUT, read).await.expect("a chunk in time")
    }

    /// One event of a stream, independent of the chunks; `None` at the end.
    pub(crate) async fn event(&mut self) -> Option<String> {
        loop {
            if let Some(at) = self.events.windows(2).position(|window| window == b"\n\n") {
                return Some(String::from_utf8(self.events.drain(..at + 2).collect()).unwrap());
            }
            let Some(chunk) = self.chunk().await else {
                assert!(self.events.is_empty(), "the stream ended inside an event");
                return None;
            };
            self.events.extend_from_slice(&chunk);
        }
    }

    /// Whether the router closed the connection without another byte.
    pub(crate) async fn is_closed(&mut self) -> bool {
        self.buffer.is_empty() && !tokio::time::timeout(TIMEOUT, self.more()).await.expect("an end in time")
    }

    /// Whether the connection ends in the middle of a chunked response.
    pub(crate) async fn is_cut(&mut self) -> bool {
        !self.rest().await.ends_with(b"0\r\n\r\n")
    }

    /// All bytes up to the connection's end, unchanged.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        let end = async { while self.more().await {} };
        tokio::time::timeout(TIMEOUT, end).await.expect("an end in time");
        std::mem::take(&mut self.buffer)
    }

    pub(crate) fn hang_up(self, how: DisconnectKind) {
        if matches!(how, DisconnectKind::Rst) {
            SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
        drop(self.stream);
    }

    async fn more(&mut self) -> bool {
        let mut piece = [0_u8; 16 * 1024];
        match self.stream.read(&mut piece).await {
            Ok(0) | Err(_) => false,
            Ok(read) => {
                self.buffer.extend_from_slice(&piece[..read]);
                true
            }
        }
    }
}
