//! One request of a client: its head, and the way to answer it.
//!
//! pingora's HTTP/1 session reads the head and writes the answer's (its version, date and connection rules). It is let go
//! with that: a stream may last for minutes and needs neither. The body is written here, each piece with its frame in one
//! system call, and the first with the head.
//!
//! ```text
//!  begin ─▶ head read ─▶ write_head ─▶ send … ─▶ send(last) ─▶ the connection's next request
//!                 └▶ dropped: nothing was answered, the connection is closed
//! ```

use std::future::poll_fn;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use hyper::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use hyper::{Method, Version};
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::protocols::http::v1::server::HttpSession;
use tokio::time::Sleep;

use crate::client::http::Wire;

/// The largest size in hexadecimal digits, and a line end.
const SIZE_LINE_BYTES: usize = 18;

/// One request of a client.
pub(crate) struct Session {
    wire: Wire,
    /// Until the answer's head is written.
    http: Option<Box<HttpSession>>,
    framing: Framing,
    /// A client that takes nothing for so long is given up.
    stall: Duration,
    body_bytes: u64,
    /// Whether the client and the router want to keep the connection.
    keeps: bool,
    /// The answer was sent whole.
    over: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    /// The answer has no body: it is one to `HEAD`, or its status says so.
    None,
    Chunked,
    /// As it is: the head says how long it is, or the connection's end does.
    Plain,
}

/// How the end of an answer's body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Known(usize),
    /// By the last chunk; to a client of HTTP/1.0, which knows no chunks, by the connection's end.
    Unknown,
}

impl Session {
    /// The request with this head, as [`Wire::head`] gave it. `None` where pingora refuses it.
    pub(crate) async fn begin(wire: &Wire, head: BytesMut, stall: Duration) -> Option<Self> {
        let mut http = Box::new(HttpSession::new(Box::new(wire.clone())));
        http.set_pipelined_prefix(head);
        http.read_request().await.ok().flatten()?;
        let framing = Framing::Plain;
        Some(Self {
            wire: wire.clone(),
            http: Some(http),
            framing,
            stall,
            body_bytes: 0,
            keeps: false,
            over: false,
        })
    }

    /// The head of the request, until an answer has begun.
    pub(crate) fn req_header(&self) -> &RequestHeader {
        self.http.as_ref().expect("no answer has begun").req_header()
    }

    pub(crate) fn req_header_mut(&mut self) -> &mut RequestHeader {
        self.http.as_mut().expect("no answer has begun").req_header_mut()
    }

    /// The connection that it came by.
    pub(crate) fn wire(&self) -> &Wire {
        &self.wire
    }

    pub(crate) fn client_addr(&self) -> SocketAddr {
        self.wire.peer()
    }

    /// Bytes of the answer's body that were sent.
    pub(crate) fn body_bytes(&self) -> u64 {
        self.body_bytes
    }

    /// The answer is the connection's last.
    pub(crate) fn close_after(&mut self) {
        if let Some(http) = &mut self.http {
            http.set_server_keepalive(None);
        }
    }

    /// Whether the connection is good for another request: this one was answered whole.
    pub(crate) fn is_reusable(&self) -> bool {
        self.keeps && self.over
    }

    /// Tells a client that waits for it to send its body.
    pub(crate) async fn go_on(&mut self) -> Result<(), ClientGone> {
        if let Some(http) = &mut self.http {
            http.write_continue_response().await.map_err(|_| ClientGone)?;
        }
        self.out(&mut [], &mut 0).await.map(drop)
    }

    /// Begins the answer. The head leaves with the first bytes of its body.
    pub(crate) async fn write_head(
        &mut self,
        mut head: ResponseHeader,
        length: Length,
    ) -> Result<(), ClientGone> {
        let Some(mut http) = self.http.take() else { return Err(ClientGone) };
        // The rest of a body that was not read would be taken for the next request.
        if self.wire.is_unread() {
            http.set_server_keepalive(None);
        }
        let request = http.req_header();
        let bare = matches!(head.status.as_u16(), 204 | 304);
        let told = match length {
            _ if bare => Ok(()),
            Length::Known(bytes) => head.insert_header(CONTENT_LENGTH, bytes),
            Length::Unknown if request.version == Version::HTTP_11 => {
                self.framing = Framing::Chunked;
                head.insert_header(TRANSFER_ENCODING, "chunked")
            }
            Length::Unknown => Ok(()),
        };
        if bare || request.method == Method::HEAD {
            self.framing = Framing::None;
        }
        if length == Length::Unknown && self.framing == Framing::Plain {
            http.set_server_keepalive(None);
        }
        told.map_err(|_| ClientGone)?;
        http.write_response_header(Box::new(head)).await.map_err(|_| ClientGone)?;
        self.keeps = http.will_keepalive();
        Ok(())
    }

    /// Sends a piece of the body; with `last` the answer is over. Whether it had to wait for the client.
    ///
    /// # Errors
    /// The client has left, or takes nothing: the connection is of no further use.
    pub(crate) async fn send(&mut self, data: &[u8], last: bool) -> Result<bool, ClientGone> {
        let mut line = [0; SIZE_LINE_BYTES];
        let (size, data, end): (&[u8], &[u8], &[u8]) = match self.framing {
            Framing::None => (b"", b"", b""),
            Framing::Plain => (b"", data, b""),
            Framing::Chunked => match (data.is_empty(), last) {
                (true, true) => (b"", b"", b"0\r\n\r\n"),
                (true, false) => (b"", b"", b""),
                (false, true) => (size_line(data.len(), &mut line), data, b"\r\n0\r\n\r\n"),
                (false, false) => (size_line(data.len(), &mut line), data, b"\r\n"),
            },
        };
        let mut pieces = [size, data, end].map(IoSlice::new);
        let mut sent = 0;
        let waited = self.out(&mut pieces, &mut sent).await;
        self.body_bytes += sent.saturating_sub(size.len()).min(data.len()) as u64;
        self.over = last && waited.is_ok();
        waited
    }

    /// Sends what is held and `pieces`, and counts what of them is out. Whether it had to wait.
    async fn out(&self, mut pieces: &mut [IoSlice<'_>], sent: &mut usize) -> Result<bool, ClientGone> {
        // Nearly always there is room, and no clock is needed.
        let (mut stalled, mut waited): (Option<Pin<Box<Sleep>>>, _) = (None, false);
        poll_fn(|context| {
            loop {
                match self.wire.poll_send(context, pieces) {
                    Poll::Ready(Ok(0)) => return Poll::Ready(Ok(waited)),
                    Poll::Ready(Ok(out)) => {
                        // It takes something: however slowly, it is there.
                        stalled = None;
                        *sent += out;
                        IoSlice::advance_slices(&mut pieces, out);
                    }
                    Poll::Ready(Err(_)) => return Poll::Ready(Err(ClientGone)),
                    Poll::Pending => {
                        waited = true;
                        let stalled = stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.stall)));
                        return stalled.as_mut().poll(context).map(|()| Err(ClientGone));
                    }
                }
            }
        })
        .await
    }

    /// Ready once the client has left.
    pub(crate) fn poll_gone(&self, context: &mut Context<'_>) -> Poll<()> {
        self.wire.poll_gone(context)
    }
}

/// The size of a chunk as its first line.
fn size_line(mut size: usize, line: &mut [u8; SIZE_LINE_BYTES]) -> &[u8] {
    let mut at = SIZE_LINE_BYTES - 2;
    line[at..].copy_from_slice(b"\r\n");
    loop {
        at -= 1;
        line[at] = b"0123456789abcdef"[size % 16];
        size /= 16;
        if size == 0 {
            return &line[at..];
        }
    }
}

/// The client closed its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientGone;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_told_in_hexadecimal_digits() {
        for size in [0, 1, 15, 16, 255, 4096, usize::MAX] {
            assert_eq!(size_line(size, &mut [0; SIZE_LINE_BYTES]), format!("{size:x}\r\n").as_bytes());
        }
    }
}
