//! An engine that writes single frames of HTTP/2 (RFC 9113), for ends that a library does not produce.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const TIMEOUT: Duration = Duration::from_secs(20);
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Kinds of frames.
pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;

/// A connection of the router.
pub(crate) struct RawHttp2(TcpStream);

/// A frame that the router sent.
#[derive(Debug)]
pub(crate) struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl RawHttp2 {
    /// Accepts a connection and sends these settings.
    pub(crate) async fn accept(listener: &TcpListener, settings: &[(u16, u32)]) -> Self {
        let accepted = tokio::time::timeout(TIMEOUT, listener.accept()).await.expect("a connection in time");
        let mut stream = accepted.unwrap().0;
        stream.set_nodelay(true).unwrap();
        let mut preface = [0; 24];
        stream.read_exact(&mut preface).await.unwrap();
        assert_eq!(&preface, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        let mut connection = Self(stream);
        let payload: Vec<u8> = settings
            .iter()
            .flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat())
            .collect();
        connection.send(SETTINGS, 0, 0, &payload).await;
        connection
    }

    pub(crate) async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
        frame.extend_from_slice(&[kind, flags]);
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(payload);
        self.0.write_all(&frame).await.unwrap();
    }

    /// The next frame; `None` at the end of the connection.
    pub(crate) async fn frame(&mut self) -> Option<Frame> {
        let read = async {
            let mut head = [0; 9];
            self.0.read_exact(&mut head).await.ok()?;
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; length as usize];
            self.0.read_exact(&mut payload).await.ok()?;
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            Some(Frame { kind: head[3], flags: head[4], stream, payload })
        };
        tokio::time::timeout(TIMEOUT, read).await.expect("a frame in time")
    }

    /// Reads frames up to the first of a kind, and acknowledges settings.
    pub(crate) async fn until(&mut self, kind: u8) -> Frame {
        loop {
            let frame = self.frame().await.expect("the connection is open");
            if frame.kind == SETTINGS && frame.flags == 0 {
                self.send(SETTINGS, 1, 0, &[]).await;
            }
            if frame.kind == kind {
                return frame;
            }
        }
    }

    /// Reads to the end of a request with a body, and returns its stream.
    pub(crate) async fn request(&mut self) -> u32 {
        loop {
            let frame = self.until(DATA).await;
            if frame.flags & END_STREAM != 0 {
                return frame.stream;
            }
        }
    }

    /// Sends the head of a stream of events.
    pub(crate) async fn head(&mut self, stream: u32) {
        let mut block = vec![0x88, 0x0f, 0x10, 17];
        block.extend_from_slice(b"text/event-stream");
        self.send(HEADERS, END_HEADERS, stream, &block).await;
    }

    /// Sends a head of 72 KiB in five frames. `h2` ends the connection after a few more.
    pub(crate) async fn long_head(&mut self, stream: u32) {
        // A literal field `x` whose value has 0x12000 bytes.
        let mut block = vec![0x88, 0x00, 1, b'x', 0x7f, 0x81, 0xbf, 0x04];
        block.resize(block.len() + 0x12000, b'y');
        let mut frames = block.chunks(16 << 10).enumerate().peekable();
        while let Some((at, part)) = frames.next() {
            let kind = if at == 0 { HEADERS } else { CONTINUATION };
            let flags = if frames.peek().is_none() { END_HEADERS } else { 0 };
            self.send(kind, flags, stream, part).await;
        }
    }

    /// Sends a 103.
    pub(crate) async fn early_hints(&mut self, stream: u32) {
        self.send(HEADERS, END_HEADERS, stream, &[0x08, 3, b'1', b'0', b'3']).await;
    }

    pub(crate) async fn data(&mut self, stream: u32, text: &str, ends: bool) {
        self.send(DATA, u8::from(ends), stream, text.as_bytes()).await;
    }

    /// Ends a stream by trailers.
    pub(crate) async fn trailers(&mut self, stream: u32) {
        let block = [&[0x00, 1][..], b"t", &[1], b"v"].concat();
        self.send(HEADERS, END_HEADERS | END_STREAM, stream, &block).await;
    }

    pub(crate) async fn reset(&mut self, stream: u32, reason: u32) {
        self.send(RST_STREAM, 0, stream, &reason.to_be_bytes()).await;
    }

    /// Announces the end of the connection: later streams than `last` are not processed.
    pub(crate) async fn go_away(&mut self, last: u32) {
        self.send(GOAWAY, 0, 0, &[&last.to_be_bytes()[..], &[0; 4]].concat()).await;
    }
}
