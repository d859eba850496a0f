//! The load client's side of one HTTP/1.1 connection, written by hand so that the client is never the bottleneck:
//! one write per request, one growing buffer per connection, no copy, and no parser except for the end of a
//! response.

use std::net::SocketAddr;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::RouterBenchError;
use crate::load::Streaming;
use crate::sim::instant::{head_bytes, header};

/// About 64 tokens.
const PROMPT: &str = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen \
                      sixteen seventeen eighteen nineteen twenty one two three four five six seven eight nine ten";
/// Maximum bytes of a response.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// A kept connection.
pub(crate) struct KeptConnection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// A complete response of status 200.
pub(crate) struct WireResponse<'a> {
    /// When the first byte of the body arrived.
    pub first: Instant,
    /// The body as received, including chunk headers.
    pub bytes: &'a [u8],
}

/// How the end of a response is recognized.
#[derive(Clone, Copy)]
enum ResponseEnd {
    At(usize),
    LastChunk,
}

pub(super) fn failed(error: impl std::fmt::Display) -> RouterBenchError {
    RouterBenchError::Request(error.to_string())
}

/// The request body for every gateway.
pub(super) fn body(streaming: Streaming) -> String {
    let stream = streaming != Streaming::Whole;
    format!(r#"{{"model":"sim","prompt":"{PROMPT}","max_tokens":64,"stream":{stream}}}"#)
}

/// A request with this body, for one write.
pub(crate) fn request(body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// The default request, for one write.
pub(crate) fn default_request(streaming: Streaming) -> Vec<u8> {
    request(&body(streaming))
}

impl KeptConnection {
    pub(crate) async fn connect(address: SocketAddr) -> Result<Self, RouterBenchError> {
        let stream = TcpStream::connect(address).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        Ok(Self { stream, buffer: Vec::with_capacity(32 << 10) })
    }

    /// Sends the default request without waiting for the response.
    pub(crate) async fn send(&mut self, streaming: Streaming) -> Result<(), RouterBenchError> {
        self.stream.write_all(&default_request(streaming)).await.map_err(failed)
    }

    /// Waits for the first byte of a body.
    pub(super) async fn first_byte(&mut self) -> Result<(), RouterBenchError> {
        self.buffer.clear();
        while head_bytes(&self.buffer).is_none_or(|head| self.buffer.len() == head) {
            self.read().await?;
        }
        Ok(())
    }

    /// Makes a later close send a reset instead of an orderly end.
    pub(super) fn reset_on_close(&self) -> Result<(), RouterBenchError> {
        socket2::SockRef::from(&self.stream).set_linger(Some(std::time::Duration::ZERO)).map_err(failed)
    }

    /// Sends a request and reads the whole response.
    pub(crate) async fn post(&mut self, request: &[u8]) -> Result<WireResponse<'_>, RouterBenchError> {
        self.buffer.clear();
        self.stream.write_all(request).await.map_err(failed)?;
        let head = loop {
            self.read().await?;
            if let Some(head) = head_bytes(&self.buffer) {
                break head;
            }
        };
        let end = match header(&self.buffer[..head], b"content-length") {
            Some(text) => {
                let text = std::str::from_utf8(text).map_err(failed)?;
                ResponseEnd::At(head + text.parse::<usize>().map_err(failed)?)
            }
            None => ResponseEnd::LastChunk,
        };
        let mut first = (self.buffer.len() > head).then(Instant::now);
        while !end.is_here(&self.buffer, head) {
            self.read().await?;
            first.get_or_insert_with(Instant::now);
        }
        let (head, bytes) = self.buffer.split_at(head);
        match first {
            Some(first) if head.starts_with(b"HTTP/1.1 200") => Ok(WireResponse { first, bytes }),
            _ => Err(failed(String::from_utf8_lossy(&self.buffer))),
        }
    }

    async fn read(&mut self) -> Result<(), RouterBenchError> {
        if self.buffer.len() > ANSWER_BYTES_MAX {
            return Err(failed("an answer without an end"));
        }
        if self.buffer.capacity() == self.buffer.len() {
            self.buffer.reserve(32 << 10);
        }
        match self.stream.read_buf(&mut self.buffer).await {
            Ok(0) => Err(failed("the connection ended in the middle of an answer")),
            Ok(_) => Ok(()),
            Err(error) => Err(failed(error)),
        }
    }
}

impl ResponseEnd {
    fn is_here(self, buffer: &[u8], head: usize) -> bool {
        match self {
            Self::At(end) => buffer.len() >= end,
            // One request at a time: the last chunk ends the received bytes.
            Self::LastChunk => buffer[head..].ends_with(b"0\r\n\r\n"),
        }
    }
}
