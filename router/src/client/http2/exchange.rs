//! One stream of an HTTP/2 connection: a request with its response, the counterpart of a request over HTTP/1.
//!
//! ```text
//!  head checked ─▶ body read ─▶ write_head ─▶ poll_send … ─▶ poll_send(last) ─▶ END_STREAM
//!       └▶ refused: one response, END_STREAM      └▶ dropped: RST_STREAM
//! ```
//!
//! Invariants:
//! - A stream's reset, and the end of its connection, are the client's disconnect of this request only.
//! - A dropped stream without a complete response is reset: no client takes a part for the whole.
//! - A response waits for the client's windows here, so the stall of one stream never holds another stream.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::SystemTime;

use bytes::{BufMut, Bytes, BytesMut};
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, DATE, EXPECT, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};
use pingora::http::{RequestHeader, ResponseHeader};

use super::socket::SharedConnection;
use crate::client::http::{BODY_CAPACITY_INITIAL, BodyError, HeadError};
use crate::engines::body_budget::BudgetShare;
use crate::message::request_id;

/// Bytes that one step passes to `h2`: one frame of the usual size.
const SEND_BYTES_MAX: usize = 16 << 10;

/// One request of a client and its response.
pub(crate) struct Http2Exchange {
    connection: Arc<SharedConnection>,
    /// Set until the response's head is written.
    head: Option<Box<RequestHeader>>,
    body: RecvStream,
    body_bytes: u64,
    respond: SendResponse<Bytes>,
    /// Written, and sent with the first bytes of the body.
    response: Option<Box<Response<()>>>,
    /// Set once the response's head is sent.
    stream: Option<SendStream<Bytes>>,
    /// Bytes that are sent before those of the next [`Self::poll_send`].
    unsent: BytesMut,
    /// `END_STREAM` is sent.
    is_ended: bool,
}

impl Http2Exchange {
    pub(super) fn new(
        connection: Arc<SharedConnection>,
        head: Parts,
        body: RecvStream,
        respond: SendResponse<Bytes>,
    ) -> Self {
        Self {
            connection,
            head: Some(Box::new(head.into())),
            body,
            body_bytes: 0,
            respond,
            response: None,
            stream: None,
            unsent: BytesMut::new(),
            is_ended: false,
        }
    }

    /// The head of the request, until the response has begun.
    pub(crate) fn head(&self) -> Option<&RequestHeader> {
        self.head.as_deref()
    }

    pub(crate) fn head_mut(&mut self) -> Option<&mut RequestHeader> {
        self.head.as_deref_mut()
    }

    pub(crate) fn peer(&self) -> std::net::SocketAddr {
        self.connection.peer
    }

    /// The names in the client's certificate; `None` without TLS.
    pub(crate) fn certificate_names(&self) -> Option<Arc<[String]>> {
        self.connection.certificate_names.clone()
    }

    /// Takes no further requests on the connection.
    pub(crate) fn close_after(&self) {
        self.connection.close();
    }

    /// The length of the body, if the client declared it.
    pub(crate) fn declared(&self) -> Option<u64> {
        if self.body.is_end_stream() {
            return Some(0);
        }
        let length = self.head.as_ref()?.headers.get(CONTENT_LENGTH)?;
        length.to_str().ok()?.parse().ok()
    }

    /// Bytes of the request's body that were read.
    pub(crate) fn body_bytes(&self) -> u64 {
        self.body_bytes
    }

    /// Sends `100 Continue` if the client waits for it.
    pub(crate) fn send_continue(&mut self) -> io::Result<()> {
        let expects = self.head.as_ref().is_some_and(|head| head.headers.contains_key(EXPECT));
        if !expects || self.body.is_end_stream() {
            return Ok(());
        }
        let mut response = Response::new(());
        *response.status_mut() = StatusCode::CONTINUE;
        self.respond.send_informational(response).map_err(io::Error::other)
    }

    /// Reads the whole body, once. Trailers are dropped. The client may send more once the bytes fit the budget.
    ///
    /// # Errors
    /// [`BodyError`].
    pub(crate) async fn body(
        &mut self,
        limit_bytes: usize,
        budget: &mut BudgetShare<'_>,
    ) -> Result<Bytes, BodyError> {
        let declared = self.declared().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0);
        let mut body = BytesMut::with_capacity(declared.min(BODY_CAPACITY_INITIAL).min(limit_bytes));
        while let Some(piece) = self.body.data().await {
            let piece = piece.map_err(|_| BodyError::Ended)?;
            if body.len() + piece.len() > limit_bytes {
                return Err(BodyError::TooLarge);
            }
            budget.take(piece.len())?;
            // Copied, so that the body holds no memory of other streams' frames.
            body.extend_from_slice(&piece);
            // Fails only if the stream has ended, which the next read reports.
            let _ = self.body.flow_control().release_capacity(piece.len());
        }
        self.body_bytes = body.len() as u64;
        Ok(body.freeze())
    }

    /// Ready once the client has reset the stream or ended the connection.
    pub(crate) fn poll_gone(&mut self, context: &mut Context<'_>) -> Poll<()> {
        match &mut self.stream {
            Some(stream) => stream.poll_reset(context).map(drop),
            None => self.respond.poll_reset(context).map(drop),
        }
    }

    /// Writes the response's head, which is sent with the first bytes of its body. Returns whether it has a body.
    pub(crate) fn write_head(&mut self, mut head: ResponseHeader, length: Option<usize>) -> io::Result<bool> {
        let request = self.head.take().ok_or(io::ErrorKind::AlreadyExists)?;
        let is_bare = matches!(head.status.as_u16(), 204 | 304);
        if let Some(bytes) = length.filter(|_| !is_bare) {
            head.insert_header(CONTENT_LENGTH, bytes).map_err(io::Error::other)?;
        }
        let mut response = Response::from_parts(head.into(), ());
        response.headers_mut().insert(DATE, date());
        self.response = Some(Box::new(response));
        Ok(!is_bare && request.method != Method::HEAD)
    }

    /// Adds bytes to those that the next [`Self::poll_send`] sends first.
    pub(crate) fn queue(&mut self, pieces: &[&[u8]]) {
        pieces.iter().for_each(|piece| self.unsent.extend_from_slice(piece));
    }

    /// Sends the head, the queued bytes and then `pieces`, as far as the client's windows and a bounded buffer permit.
    /// Returns how many bytes of `pieces` were sent; 0 once all are. With `is_last` the stream ends behind them.
    pub(crate) fn poll_send(
        &mut self,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
        is_last: bool,
    ) -> Poll<io::Result<usize>> {
        loop {
            let left = self.unsent.len() + pieces.iter().map(|piece| piece.len()).sum::<usize>();
            let Some(stream) = &mut self.stream else {
                // Without a head this sends nothing: `100 Continue` is sent by itself.
                let Some(response) = self.response.take() else { return Poll::Ready(Ok(0)) };
                let is_end = is_last && left == 0;
                let stream = self.respond.send_response(*response, is_end).map_err(io::Error::other)?;
                self.stream = Some(stream);
                self.ended(is_end);
                continue;
            };
            if left == 0 {
                if is_last && !self.is_ended {
                    stream.send_data(Bytes::new(), true).map_err(io::Error::other)?;
                    self.ended(true);
                }
                return Poll::Ready(Ok(0));
            }
            let wanted = left.min(SEND_BYTES_MAX);
            stream.reserve_capacity(wanted);
            if stream.capacity() == 0 {
                match ready!(stream.poll_capacity(context)) {
                    Some(Ok(_)) => continue,
                    Some(Err(error)) => return Poll::Ready(Err(io::Error::other(error))),
                    None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
                }
            }
            let size = stream.capacity().min(wanted);
            let from_queue = size.min(self.unsent.len());
            let data = data(&mut self.unsent, pieces, size);
            let is_end = is_last && size == left;
            stream.send_data(data, is_end).map_err(io::Error::other)?;
            self.connection.count_data_frame();
            self.ended(is_end);
            if size > from_queue {
                return Poll::Ready(Ok(size - from_queue));
            }
        }
    }

    fn ended(&mut self, is_end: bool) {
        if is_end && !self.is_ended {
            self.is_ended = true;
            self.connection.count_response();
        }
    }

    /// Answers a request whose head is refused, and ends the stream.
    pub(super) fn refuse(error: HeadError, respond: &mut SendResponse<Bytes>) {
        let error = error.error();
        let body = error.to_bytes();
        let response = Response::builder()
            .status(error.status)
            .header(CONTENT_TYPE, "application/json")
            .header(CONTENT_LENGTH, body.len())
            .header("x-request-id", request_id::generate().as_str())
            .header(DATE, date())
            .body(());
        // The body waits in `h2` for the client's window. An error means that the client has disconnected.
        let sent = response.ok().and_then(|response| respond.send_response(response, false).ok());
        if let Some(mut stream) = sent {
            let _ = stream.send_data(body, true);
        }
    }
}

impl Drop for Http2Exchange {
    fn drop(&mut self) {
        if !self.is_ended {
            // Has no effect on a stream that the client has ended.
            self.respond.send_reset(Reason::INTERNAL_ERROR);
        }
    }
}

/// The next `size` bytes: queued ones first.
fn data(unsent: &mut BytesMut, pieces: &[IoSlice<'_>], size: usize) -> Bytes {
    if unsent.len() >= size {
        return unsent.split_to(size).freeze();
    }
    let mut data = std::mem::take(unsent);
    data.reserve(size - data.len());
    for piece in pieces {
        let bytes = piece.len().min(size - data.len());
        data.put_slice(&piece[..bytes]);
    }
    data.freeze()
}

fn date() -> HeaderValue {
    let text = httpdate::fmt_http_date(SystemTime::now());
    HeaderValue::try_from(text).expect("a date is printable ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_taken_from_the_queue_first_and_then_from_the_pieces() {
        let pieces = [&b""[..], b"abc", b"de"].map(IoSlice::new);
        for (queued, size, taken, left) in [
            (&b""[..], 5, &b"abcde"[..], &b""[..]),
            (b"", 4, b"abcd", b""),
            (b"xy", 2, b"xy", b""),
            (b"xy", 1, b"x", b"y"),
            (b"xy", 6, b"xyabcd", b""),
        ] {
            let mut unsent = BytesMut::from(queued);
            assert_eq!(data(&mut unsent, &pieces, size), taken, "{queued:?} {size}");
            assert_eq!(unsent, left, "{queued:?} {size}");
        }
    }
}
