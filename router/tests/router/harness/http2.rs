//! HTTP/2 clients: one that follows the protocol (`h2`), and one that writes frames by hand.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use hyper::header::HeaderMap;
use hyper::{Request, Response};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const PRIORITY: u8 = 2;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
pub(crate) const ACK: u8 = 1;

/// A connection of a client that follows the protocol.
pub(crate) struct Http2Client {
    send: SendRequest<Bytes>,
    connection: JoinHandle<Result<(), h2::Error>>,
}

/// A response, read to its end.
pub(crate) struct Http2Response {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Http2Response {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}

impl Http2Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self::over(stream).await
    }

    pub(crate) async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        let (send, connection) = h2::client::handshake(stream).await.unwrap();
        Self { send, connection: tokio::spawn(connection) }
    }

    /// A request to generate, as a JSON body.
    pub(crate) fn completion(path: &str) -> hyper::http::request::Builder {
        Request::post(format!("http://localhost{path}")).header("content-type", "application/json")
    }

    pub(crate) async fn send(
        &mut self,
        request: Request<()>,
        is_end: bool,
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let mut send = self.send.clone().ready().await.unwrap();
        send.send_request(request, is_end).unwrap()
    }

    /// Posts a body; the response is read by the caller. Dropping both results resets the stream.
    pub(crate) async fn post(&mut self, path: &str, body: &Value) -> (ResponseFuture, SendStream<Bytes>) {
        let request = Self::completion(path).body(()).unwrap();
        let (response, mut stream) = self.send(request, false).await;
        stream.send_data(body.to_string().into(), true).unwrap();
        (response, stream)
    }

    pub(crate) async fn answer(&mut self, path: &str, body: &Value) -> Http2Response {
        let (response, _stream) = self.post(path, body).await;
        whole(response).await
    }

    pub(crate) async fn get(&mut self, path: &str) -> Http2Response {
        let request = Request::get(format!("http://localhost{path}")).body(()).unwrap();
        let (response, _stream) = self.send(request, true).await;
        whole(response).await
    }

    /// Closes the connection without a word.
    pub(crate) async fn hang_up(self) {
        self.connection.abort();
        let _ = self.connection.await;
    }

    /// Waits until the router has ended the connection.
    pub(crate) async fn ended(self) -> Result<(), h2::Error> {
        // Without a handle the client itself would end the connection.
        let _send = self.send;
        tokio::time::timeout(TIMEOUT, self.connection).await.expect("an end in time").unwrap()
    }
}

/// Reads a response to its end.
pub(crate) async fn whole(response: ResponseFuture) -> Http2Response {
    let read = async {
        let (head, mut body) = response.await.unwrap().into_parts();
        let mut bytes = Vec::new();
        while let Some(piece) = piece(&mut body).await {
            bytes.extend_from_slice(&piece);
        }
        Http2Response { status: head.status.as_u16(), headers: head.headers, body: bytes.into() }
    };
    tokio::time::timeout(TIMEOUT, read).await.expect("a response in time")
}

/// The head of a response.
pub(crate) async fn head(response: ResponseFuture) -> Response<RecvStream> {
    tokio::time::timeout(TIMEOUT, response).await.expect("a head in time").unwrap()
}

/// One `DATA` frame; `None` at the end.
pub(crate) async fn piece(body: &mut RecvStream) -> Option<Bytes> {
    let piece = tokio::time::timeout(TIMEOUT, body.data()).await.expect("data in time")?;
    let piece = piece.unwrap();
    body.flow_control().release_capacity(piece.len()).unwrap();
    Some(piece)
}

/// A received frame.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Frame {
    /// The error code of `RST_STREAM` or `GOAWAY`.
    pub(crate) fn error(&self) -> u32 {
        let at = if self.kind == GOAWAY { 4 } else { 0 };
        u32::from_be_bytes(self.payload[at..at + 4].try_into().unwrap())
    }
}

/// One connection whose frames a test writes.
pub(crate) struct FrameClient {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// The bytes of a frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// A block of headers, each as a literal that is not indexed.
pub(crate) fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in fields {
        bytes.push(0);
        for text in [name, value] {
            length(text.len(), &mut bytes);
            bytes.extend_from_slice(text.as_bytes());
        }
    }
    bytes
}

/// A length as an integer with a prefix of 7 bits (RFC 7541, section 5.1).
fn length(mut length: usize, bytes: &mut Vec<u8>) {
    if length < 127 {
        return bytes.push(u8::try_from(length).unwrap());
    }
    bytes.push(127);
    length -= 127;
    while length >= 128 {
        bytes.push(u8::try_from(length % 128).unwrap() | 128);
        length /= 128;
    }
    bytes.push(u8::try_from(length).unwrap());
}

/// The fields of a request to generate.
pub(crate) const COMPLETION: [(&str, &str); 5] = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "localhost"),
    (":path", "/v1/completions"),
    ("content-type", "application/json"),
];

impl FrameClient {
    /// Connects, and sends the preface and these settings.
    pub(crate) async fn connect(address: SocketAddr, settings: &[(u16, u32)]) -> Self {
        let mut client = Self::silent(address).await;
        let pair = |(id, value): &(u16, u32)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat();
        let settings: Vec<_> = settings.iter().flat_map(pair).collect();
        client.write(&[PREFACE, &frame(SETTINGS, 0, 0, &settings)].concat()).await;
        client
    }

    /// Connects, and sends nothing.
    pub(crate) async fn silent(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, buffer: Vec::new() }
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// Writes until the router has closed the connection, or all is written.
    pub(crate) async fn flood(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes).await;
    }

    pub(crate) async fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.write(&frame(kind, flags, stream, payload)).await;
    }

    /// A whole request with this body.
    pub(crate) async fn post(&mut self, stream: u32, body: &Value) {
        self.frame(HEADERS, END_HEADERS, stream, &block(&COMPLETION)).await;
        self.frame(DATA, END_STREAM, stream, body.to_string().as_bytes()).await;
    }

    /// The next frame; `None` at the connection's end.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        let read = async {
            loop {
                if let Some(head) = self.buffer.first_chunk::<9>() {
                    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
                    let stream = u32::from_be_bytes(head[5..9].try_into().unwrap());
                    if self.buffer.len() >= 9 + length {
                        let bytes: Vec<_> = self.buffer.drain(..9 + length).collect();
                        let payload = bytes[9..].to_vec();
                        return Some(Frame { kind: bytes[3], flags: bytes[4], stream, payload });
                    }
                }
                let mut piece = [0; 16 << 10];
                match self.stream.read(&mut piece).await {
                    Ok(0) | Err(_) => return None,
                    Ok(read) => self.buffer.extend_from_slice(&piece[..read]),
                }
            }
        };
        tokio::time::timeout(TIMEOUT, read).await.expect("a frame in time")
    }

    /// The next frame of this kind.
    pub(crate) async fn until(&mut self, kind: u8) -> Frame {
        loop {
            let frame = self.next().await.unwrap_or_else(|| panic!("the connection ended before {kind}"));
            if frame.kind == kind {
                return frame;
            }
        }
    }

    /// The error code of the `GOAWAY` frame before the connection's end.
    pub(crate) async fn go_away(&mut self) -> Option<u32> {
        let mut error = None;
        while let Some(frame) = self.next().await {
            if frame.kind == GOAWAY {
                error = Some(frame.error());
            }
        }
        error
    }

    /// Reads a stream to its end: its data, and the code of its reset.
    pub(crate) async fn rest(&mut self, stream: u32) -> (Vec<u8>, Option<u32>) {
        let mut data = Vec::new();
        while let Some(frame) = self.next().await {
            if frame.stream != stream {
                continue;
            }
            match frame.kind {
                RST_STREAM => return (data, Some(frame.error())),
                DATA => data.extend_from_slice(&frame.payload),
                _ => {}
            }
            if frame.flags & END_STREAM != 0 && matches!(frame.kind, DATA | HEADERS) {
                return (data, None);
            }
        }
        panic!("the connection ended before stream {stream}")
    }
}
