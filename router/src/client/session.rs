//! One request of a client: its head, its body, and its response.
//!
//! Over HTTP/1, pingora's session reads the head and writes the response's, with its version, date and connection rules.
//! The session is dropped after that, because a stream may last for minutes and needs neither. The body is written
//! here: each piece with its frame in one system call, and the first with the head. Over HTTP/2 a request is a stream of
//! its connection ([`Http2Exchange`]).
//!
//! ```text
//!  begin ─▶ head read ─▶ write_head ─▶ send … ─▶ send(last) ─▶ the connection's next request
//!                └▶ dropped: no response, the connection is closed (HTTP/2: the stream is reset)
//! ```

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::FutureExt as _;
use hyper::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use hyper::{Method, Version};
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::protocols::http::v1::server::HttpSession;
use tokio::time::{Instant, Sleep};

use crate::client::http::{BodyError, ClientConnection};
use crate::client::http2::Http2Exchange;
use crate::client::stall::ClientStall;
use crate::client::stream_comments::{DueComment, StreamComments};
use crate::engines::body_budget::BudgetShare;

/// The largest size in hexadecimal digits, and a line end.
const SIZE_LINE_BYTES: usize = 18;

/// One request of a client.
pub(crate) struct Session {
    transport: ClientTransport,
    framing: ResponseFraming,
    stall: ClientStall,
    body_bytes: u64,
    /// The whole response was sent.
    is_complete: bool,
    /// Sent while the response waits; `None` if it is not streamed or comments are not configured.
    comments: Option<Box<StreamComments>>,
}

/// The request's share of its connection.
enum ClientTransport {
    Http1(Http1Exchange),
    Http2(Box<Http2Exchange>),
}

/// A request that has the connection for itself.
struct Http1Exchange {
    connection: ClientConnection,
    /// Set until the response's head is written.
    http: Option<Box<HttpSession>>,
    /// Whether the client and the router keep the connection alive.
    keep_alive: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponseFraming {
    /// The response has no body, because of `HEAD` or its status.
    None,
    Chunked,
    /// Unframed: the body ends after the length in the head, or with the connection or stream.
    Plain,
}

/// How the length of a response's body is indicated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResponseLength {
    Known(usize),
    /// By the last chunk. HTTP/1.0 has no chunks: there by the connection's end.
    Unknown,
}

impl Session {
    /// Begins a request with this head, as returned by [`ClientConnection::head`]. `None` if pingora refuses it.
    pub(crate) async fn begin(
        connection: &ClientConnection,
        head: BytesMut,
        stall: Duration,
    ) -> Option<Self> {
        let mut http = Box::new(HttpSession::new(Box::new(connection.clone())));
        http.set_pipelined_prefix(head);
        http.read_request().await.ok().flatten()?;
        let exchange = Http1Exchange { connection: connection.clone(), http: Some(http), keep_alive: false };
        Some(Self::over(ClientTransport::Http1(exchange), stall))
    }

    /// A request over HTTP/2.
    pub(crate) fn over_http2(exchange: Box<Http2Exchange>, stall: Duration) -> Self {
        Self::over(ClientTransport::Http2(exchange), stall)
    }

    fn over(transport: ClientTransport, stall: Duration) -> Self {
        let framing = ResponseFraming::Plain;
        let stall = ClientStall::new(stall);
        Self { transport, framing, stall, body_bytes: 0, is_complete: false, comments: None }
    }

    /// The head of the request, until the response has begun.
    pub(crate) fn req_header(&self) -> &RequestHeader {
        let head = match &self.transport {
            ClientTransport::Http1(http1) => http1.http.as_ref().map(|http| http.req_header()),
            ClientTransport::Http2(http2) => http2.head(),
        };
        head.expect("no answer has begun")
    }

    pub(crate) fn req_header_mut(&mut self) -> &mut RequestHeader {
        let head = match &mut self.transport {
            ClientTransport::Http1(http1) => http1.http.as_mut().map(|http| http.req_header_mut()),
            ClientTransport::Http2(http2) => http2.head_mut(),
        };
        head.expect("no answer has begun")
    }

    pub(crate) fn client_addr(&self) -> SocketAddr {
        match &self.transport {
            ClientTransport::Http1(http1) => http1.connection.peer(),
            ClientTransport::Http2(http2) => http2.peer(),
        }
    }

    /// The names in the client's certificate; `None` without TLS.
    pub(crate) fn certificate_names(&self) -> Option<Arc<[String]>> {
        match &self.transport {
            ClientTransport::Http1(http1) => http1.connection.certificate_names(),
            ClientTransport::Http2(http2) => http2.certificate_names(),
        }
    }

    /// Bytes of the response's body that were sent.
    pub(crate) fn body_bytes(&self) -> u64 {
        self.body_bytes
    }

    /// Bytes of the request's body that were read.
    pub(crate) fn request_bytes(&self) -> u64 {
        match &self.transport {
            ClientTransport::Http1(http1) => http1.connection.body_bytes(),
            ClientTransport::Http2(http2) => http2.body_bytes(),
        }
    }

    /// Closes the connection after this response. Over HTTP/2, requests in flight finish before.
    pub(crate) fn close_after(&mut self) {
        match &mut self.transport {
            ClientTransport::Http1(Http1Exchange { http: Some(http), .. }) => http.set_server_keepalive(None),
            ClientTransport::Http1(_) => {}
            ClientTransport::Http2(http2) => http2.close_after(),
        }
    }

    /// Whether the connection can be reused for a next request of HTTP/1: the whole response was sent.
    pub(crate) fn is_reusable(&self) -> bool {
        match &self.transport {
            ClientTransport::Http1(http1) => http1.keep_alive && self.is_complete,
            ClientTransport::Http2(_) => false,
        }
    }

    /// The length of the request's body, if the client declared it.
    pub(crate) fn declared(&self) -> Option<u64> {
        match &self.transport {
            ClientTransport::Http1(http1) => http1.connection.declared(),
            ClientTransport::Http2(http2) => http2.declared(),
        }
    }

    /// Reads the whole body, once.
    ///
    /// # Errors
    /// [`BodyError`]. Over HTTP/1 the connection is then unusable.
    pub(crate) async fn read_body(
        &mut self,
        limit_bytes: usize,
        budget: &mut BudgetShare<'_>,
    ) -> Result<Bytes, BodyError> {
        match &mut self.transport {
            ClientTransport::Http1(http1) => http1.connection.body(limit_bytes, budget).await,
            ClientTransport::Http2(http2) => http2.body(limit_bytes, budget).await,
        }
    }

    /// Sends `100 Continue` if the client waits for it.
    pub(crate) async fn send_continue(&mut self) -> Result<(), ClientGone> {
        match &mut self.transport {
            ClientTransport::Http1(http1) if http1.connection.expects_continue() => {
                if let Some(http) = &mut http1.http {
                    http.write_continue_response().await.map_err(|_| ClientGone)?;
                }
                self.send_pieces(&mut [], &mut 0, BodyPiece::Inner).await.map(drop)
            }
            ClientTransport::Http1(_) => Ok(()),
            ClientTransport::Http2(http2) => http2.send_continue().map_err(|_| ClientGone),
        }
    }

    /// Sends comments while the response waits. The first one begins the response.
    pub(crate) fn send_comments(&mut self, comments: Option<StreamComments>) {
        self.comments = comments.map(Box::new);
    }

    /// Holds comments back while a part of an event was sent.
    pub(crate) fn set_inside_event(&mut self, is_inside: bool) {
        if let Some(comments) = &mut self.comments {
            comments.set_inside_event(is_inside);
        }
    }

    /// Whether the response has begun.
    pub(crate) fn has_begun(&self) -> bool {
        match &self.transport {
            ClientTransport::Http1(http1) => http1.http.is_none(),
            ClientTransport::Http2(http2) => http2.head().is_none(),
        }
    }

    /// Begins the response, unless a comment has begun it. The head is sent with the first bytes of its body.
    pub(crate) async fn write_head(
        &mut self,
        head: ResponseHeader,
        length: ResponseLength,
    ) -> Result<(), ClientGone> {
        if self.has_begun() {
            return self.comments.as_ref().map(drop).ok_or(ClientGone);
        }
        self.framing = match &mut self.transport {
            ClientTransport::Http1(http1) => http1.write_head(head, length).await?,
            ClientTransport::Http2(http2) => {
                let length = match length {
                    ResponseLength::Known(bytes) => Some(bytes),
                    ResponseLength::Unknown => None,
                };
                match http2.write_head(head, length).map_err(|_| ClientGone)? {
                    true => ResponseFraming::Plain,
                    false => ResponseFraming::None,
                }
            }
        };
        Ok(())
    }

    /// Sends a piece of the body. Returns whether the send had to wait for the client.
    ///
    /// # Errors
    /// The client has disconnected or reads too slowly. The connection is then unusable.
    pub(crate) async fn send(&mut self, data: &[u8], piece: BodyPiece) -> Result<bool, ClientGone> {
        let last = piece == BodyPiece::Last;
        let mut line = [0; SIZE_LINE_BYTES];
        let (size, data, end): (&[u8], &[u8], &[u8]) = match self.framing {
            ResponseFraming::None => (b"", b"", b""),
            ResponseFraming::Plain => (b"", data, b""),
            ResponseFraming::Chunked => match (data.is_empty(), last) {
                (true, true) => (b"", b"", b"0\r\n\r\n"),
                (true, false) => (b"", b"", b""),
                (false, true) => (size_line(data.len(), &mut line), data, b"\r\n0\r\n\r\n"),
                (false, false) => (size_line(data.len(), &mut line), data, b"\r\n"),
            },
        };
        let mut pieces = [size, data, end].map(IoSlice::new);
        let mut sent = 0;
        let waited = self.send_pieces(&mut pieces, &mut sent, piece).await;
        self.body_bytes += sent.saturating_sub(size.len()).min(data.len()) as u64;
        if let Some(comments) = &mut self.comments {
            comments.sent();
        }
        self.is_complete = last && waited.is_ok();
        waited
    }

    /// Sends the unsent bytes and `pieces`, and counts the sent bytes of `pieces`. Returns whether it had to wait.
    async fn send_pieces(
        &mut self,
        mut pieces: &mut [IoSlice<'_>],
        sent: &mut usize,
        place: BodyPiece,
    ) -> Result<bool, ClientGone> {
        let Self { transport, stall, .. } = self;
        // Nearly always the socket has capacity, and no timer is needed.
        let (mut stalled, mut waited): (Option<Pin<Box<Sleep>>>, _) = (None, false);
        poll_fn(|context| {
            loop {
                match transport.poll_send(context, pieces, place) {
                    Poll::Ready(Ok(0)) => {
                        if !waited {
                            stall.restart();
                        } else if stall.has_waited() {
                            stall.took(0, Instant::now());
                        }
                        return Poll::Ready(Ok(waited));
                    }
                    Poll::Ready(Ok(out)) => {
                        stalled = None;
                        if stall.has_waited() {
                            stall.took(out, Instant::now());
                        }
                        *sent += out;
                        IoSlice::advance_slices(&mut pieces, out);
                    }
                    Poll::Ready(Err(_)) => return Poll::Ready(Err(ClientGone)),
                    Poll::Pending => {
                        waited = true;
                        let due = stall.wait(Instant::now());
                        let stalled = stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
                        return stalled.as_mut().poll(context).map(|()| Err(ClientGone));
                    }
                }
            }
        })
        .await
    }

    /// Ready once the client has disconnected. Until then it sends the comments that are due.
    pub(crate) fn poll_gone(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let gone = match &mut self.transport {
            ClientTransport::Http1(http1) => http1.connection.poll_gone(context),
            ClientTransport::Http2(http2) => http2.poll_gone(context),
        };
        if gone.is_ready() {
            return Poll::Ready(());
        }
        self.poll_comments(context)
    }

    /// Ready if a comment cannot be sent, because the client has disconnected.
    fn poll_comments(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Some(mut comments) = self.comments.take() else { return Poll::Pending };
        let mut result = Ok(());
        while let Poll::Ready(due) = comments.poll_due(context) {
            result = result.and_then(|()| self.queue_comment(due));
        }
        if result.is_ok() && comments.is_sending() {
            match self.transport.poll_send(context, &[], BodyPiece::Inner) {
                Poll::Ready(Ok(_)) => comments.sent(),
                Poll::Ready(Err(_)) => result = Err(ClientGone),
                Poll::Pending => {}
            }
        }
        self.comments = Some(comments);
        if result.is_ok() { Poll::Pending } else { Poll::Ready(()) }
    }

    /// Queues a comment behind the response's head.
    fn queue_comment(&mut self, DueComment { head, line }: DueComment) -> Result<(), ClientGone> {
        if let Some(head) = head.filter(|_| !self.has_begun()) {
            // The connection buffers the head, so this never waits.
            self.write_head(*head, ResponseLength::Unknown).now_or_never().unwrap_or(Err(ClientGone))?;
        }
        let mut size = [0; SIZE_LINE_BYTES];
        match self.framing {
            ResponseFraming::None => {}
            ResponseFraming::Plain => self.transport.queue(&[line]),
            ResponseFraming::Chunked => {
                self.transport.queue(&[size_line(line.len(), &mut size), line, b"\r\n"]);
            }
        }
        self.body_bytes += line.len() as u64;
        Ok(())
    }
}

impl ClientTransport {
    /// Sends the unsent bytes and then `pieces`. Returns how many bytes of `pieces` were sent.
    fn poll_send(
        &mut self,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
        place: BodyPiece,
    ) -> Poll<io::Result<usize>> {
        match self {
            Self::Http1(http1) => http1.connection.poll_send(context, pieces),
            Self::Http2(http2) => http2.poll_send(context, pieces, place == BodyPiece::Last),
        }
    }

    /// Adds bytes to the unsent ones.
    fn queue(&mut self, pieces: &[&[u8]]) {
        match self {
            Self::Http1(http1) => http1.connection.queue(pieces),
            Self::Http2(http2) => http2.queue(pieces),
        }
    }
}

impl Http1Exchange {
    async fn write_head(
        &mut self,
        mut head: ResponseHeader,
        length: ResponseLength,
    ) -> Result<ResponseFraming, ClientGone> {
        let mut http = self.http.take().ok_or(ClientGone)?;
        // The rest of an unread body would be parsed as the next request.
        if self.connection.is_unread() {
            http.set_server_keepalive(None);
        }
        let mut framing = ResponseFraming::Plain;
        let request = http.req_header();
        let bare = matches!(head.status.as_u16(), 204 | 304);
        let length_header = match length {
            _ if bare => Ok(()),
            ResponseLength::Known(bytes) => head.insert_header(CONTENT_LENGTH, bytes),
            ResponseLength::Unknown if request.version == Version::HTTP_11 => {
                framing = ResponseFraming::Chunked;
                head.insert_header(TRANSFER_ENCODING, "chunked")
            }
            ResponseLength::Unknown => Ok(()),
        };
        if bare || request.method == Method::HEAD {
            framing = ResponseFraming::None;
        }
        if length == ResponseLength::Unknown && framing == ResponseFraming::Plain {
            http.set_server_keepalive(None);
        }
        length_header.map_err(|_| ClientGone)?;
        http.write_response_header(Box::new(head)).await.map_err(|_| ClientGone)?;
        self.keep_alive = http.will_keepalive();
        Ok(framing)
    }
}

/// The first line of a chunk of this size.
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

/// The place of a piece of a response's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyPiece {
    /// Other pieces follow.
    Inner,
    /// The piece ends the response.
    Last,
}

/// The client disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientGone;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_size_is_written_in_hexadecimal() {
        for size in [0, 1, 15, 16, 255, 4096, usize::MAX] {
            assert_eq!(size_line(size, &mut [0; SIZE_LINE_BYTES]), format!("{size:x}\r\n").as_bytes());
        }
    }
}
