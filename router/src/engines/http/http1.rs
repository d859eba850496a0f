//! The client side of HTTP/1.1 to an engine: one request, then one reply.
//!
//! ```text
//! Idle ─ begin ─▶ sending, waiting for a head ─ head ─▶ body ─ its end ─▶ Idle   (or unusable)
//!                                                         └ error, end of the connection ─▶ unusable
//! ```
//!
//! It is written by hand because it is on the router's hottest path. The waiting task drives the connection, so
//! there is no task, channel or timer between the socket and the client. A request is one vectored write of pieces
//! that are not copied. All data of one read is forwarded as one piece, in memory of exactly its size. No buffer
//! is held during a wait.
//!
//! Invariants:
//! - A reply whose length can be read in two ways is refused: two lengths, a length with a coding, any coding but
//!   `chunked`. The bytes behind it could be read as the next reply.
//! - A connection with any irregularity is never reused.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::chunks::{ChunkDecoder, ReplyChunkError};
use super::connection_error::ConnectionError;
use super::reply_head::{self, ReplyHead, ReplyHeadError, ReplyLength};

/// Size of one read of the socket.
const READ_BYTES: usize = 16 << 10;
/// Maximum pieces of a request in one write.
const PIECES_MAX: usize = 16;

/// A connection. `S` is its byte stream, plain or TLS.
#[derive(Debug)]
pub(super) struct Http1<S> {
    stream: S,
    /// Bytes that were read and are incomplete: half a head, the line of a chunk, or bytes behind a head.
    waiting: BytesMut,
    /// The head of a request, and how many of its bytes are sent. It is freed with the last one.
    head: Vec<u8>,
    head_sent: usize,
    /// Pieces that are not yet sent, last piece first.
    unsent: Vec<Bytes>,
    /// Written bytes may still be buffered, as in TLS.
    flushing: bool,
    body: ReplyFraming,
    /// Whether another request may follow the reply.
    reusable: bool,
}

/// The unread part of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplyFraming {
    Head,
    Length(u64),
    Chunked(ChunkDecoder),
    /// Until the engine closes the connection.
    ToEnd,
    Done,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Http1<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream,
            waiting: BytesMut::new(),
            head: Vec::new(),
            head_sent: 0,
            unsent: Vec::new(),
            flushing: false,
            body: ReplyFraming::Done,
            reusable: true,
        }
    }

    /// The byte stream, for queries of the socket.
    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    /// Stores a request: the bytes of its head and of its body. [`Self::poll_head`] sends it.
    pub(super) fn begin(&mut self, head: Vec<u8>, body: &[Bytes]) {
        self.drop_unsent();
        self.unsent.extend(body.iter().rev().filter(|piece| !piece.is_empty()).cloned());
        self.head = head;
        self.flushing = true;
        self.body = ReplyFraming::Head;
    }

    /// Sends the request, and reads until the head of the reply has arrived. An engine may reply before it has
    /// read the whole request.
    pub(super) fn poll_head(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<ReplyHead, ConnectionError>> {
        let unsent = match self.poll_send(context) {
            Poll::Ready(Ok(())) => None,
            Poll::Pending => Some(None),
            // The engine may have sent the reason before it closed.
            Poll::Ready(Err(error)) => Some(Some(error)),
        };
        let mut head = if self.waiting.is_empty() { None } else { self.of_waiting(Self::head)? };
        loop {
            if let Some(head) = head {
                if unsent.is_some() {
                    self.drop_unsent();
                    self.flushing = false;
                    self.reusable = false;
                }
                return Poll::Ready(Ok(head));
            }
            let read = match (self.poll_read(context, Self::head), &unsent) {
                (Poll::Pending, Some(Some(_))) => Poll::Ready(Ok(None)),
                (read, _) => read,
            };
            head = match ready!(read) {
                Ok(None) | Err(_) if self.waiting.is_empty() => {
                    self.reusable = false;
                    return Poll::Ready(Err(ConnectionError::Unanswered));
                }
                Ok(None) => return Poll::Ready(Err(self.fail(ConnectionError::Ended))),
                Ok(Some(head)) => head?,
                Err(error) => return Poll::Ready(Err(self.fail(error.into()))),
            };
        }
    }

    /// The next piece of the reply's body: all bytes that have arrived. `None` at its end.
    pub(super) fn poll_piece(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, ConnectionError>>> {
        let mut piece = self.waiting_piece();
        loop {
            match piece {
                Ok(piece) if !piece.is_empty() => return Poll::Ready(Some(Ok(piece))),
                Ok(_) if self.body == ReplyFraming::Done => return Poll::Ready(None),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
            piece = match ready!(self.poll_read(context, Self::piece)) {
                Ok(Some(piece)) => piece,
                Ok(None) if self.body == ReplyFraming::ToEnd => {
                    self.body = ReplyFraming::Done;
                    Ok(Bytes::new())
                }
                Ok(None) => Err(self.fail(ConnectionError::Ended)),
                Err(error) => Err(self.fail(error.into())),
            };
        }
    }

    /// Whether the whole reply was read.
    pub(super) fn is_ended(&self) -> bool {
        self.body == ReplyFraming::Done
    }

    /// Whether another request can be sent: the last reply was read, and the engine has neither closed the
    /// connection nor sent anything unrequested.
    pub(super) fn is_ready(&mut self) -> bool {
        let quiet = self.reusable && self.is_ended() && self.waiting.is_empty();
        quiet && self.poll_read(&mut Context::from_waker(Waker::noop()), |_, _| ((), 0)).is_pending()
    }

    fn fail(&mut self, error: ConnectionError) -> ConnectionError {
        self.reusable = false;
        self.body = ReplyFraming::Done;
        error
    }

    fn drop_unsent(&mut self) {
        self.unsent.clear();
        (self.head, self.head_sent) = (Vec::new(), 0);
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.flushing {
            return Poll::Ready(Ok(()));
        }
        while !self.head.is_empty() || !self.unsent.is_empty() {
            let mut slices = [IoSlice::new(&[]); PIECES_MAX];
            let mut count = 0;
            let head = Some(&self.head[self.head_sent..]).filter(|head| !head.is_empty());
            let pieces = head.into_iter().chain(self.unsent.iter().rev().map(|piece| &piece[..]));
            for (slice, piece) in slices.iter_mut().zip(pieces) {
                *slice = IoSlice::new(piece);
                count += 1;
            }
            let stream = Pin::new(&mut self.stream);
            let mut sent = ready!(stream.poll_write_vectored(context, &slices[..count]))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            let of_head = sent.min(self.head.len() - self.head_sent);
            sent -= of_head;
            self.head_sent += of_head;
            if self.head_sent == self.head.len() {
                (self.head, self.head_sent) = (Vec::new(), 0);
            }
            while let Some(piece) = self.unsent.last_mut() {
                if sent < piece.len() {
                    piece.advance(sent);
                    break;
                }
                sent -= piece.len();
                self.unsent.pop();
            }
        }
        // TLS buffers bytes until a flush.
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        self.flushing = false;
        Poll::Ready(Ok(()))
    }

    /// Reads once, into a buffer on the stack, and passes the bytes to `make`. `make` returns its result and the
    /// number of bytes it has used; the rest is kept. `None` at the end of the connection.
    fn poll_read<T>(
        &mut self,
        context: &mut Context<'_>,
        make: impl FnOnce(&mut Self, &mut [u8]) -> (T, usize),
    ) -> Poll<io::Result<Option<T>>> {
        let mut buffer = [const { MaybeUninit::<u8>::uninit() }; READ_BYTES];
        let mut buffer = ReadBuf::uninit(&mut buffer);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut buffer))?;
        let read = buffer.filled_mut();
        if read.is_empty() {
            return Poll::Ready(Ok(None));
        }
        if !self.waiting.is_empty() {
            self.waiting.extend_from_slice(read);
            return Poll::Ready(Ok(Some(self.of_waiting(make))));
        }
        let (made, used) = make(self, read);
        self.waiting = BytesMut::from(&read[used..]);
        Poll::Ready(Ok(Some(made)))
    }

    /// As [`Self::poll_read`], with the bytes that are waiting already.
    fn of_waiting<T>(&mut self, make: impl FnOnce(&mut Self, &mut [u8]) -> (T, usize)) -> T {
        let mut waiting = std::mem::take(&mut self.waiting);
        let (made, used) = make(self, &mut waiting);
        if used < waiting.len() {
            waiting.advance(used);
            self.waiting = waiting;
        }
        made
    }

    /// The head, once it is complete.
    fn head(&mut self, bytes: &mut [u8]) -> (Result<Option<ReplyHead>, ConnectionError>, usize) {
        match reply_head::read(bytes) {
            Ok(None) => (Ok(None), 0),
            Ok(Some(read)) => {
                self.body = match read.extent {
                    ReplyLength::Length(0) => ReplyFraming::Done,
                    ReplyLength::Length(bytes) => ReplyFraming::Length(bytes),
                    ReplyLength::Chunked => ReplyFraming::Chunked(ChunkDecoder::Size),
                    ReplyLength::ToEnd => ReplyFraming::ToEnd,
                };
                self.reusable &= read.reusable;
                (Ok(Some(read.head)), read.bytes)
            }
            Err(ReplyHeadError(reason)) => (Err(self.fail(ConnectionError::Malformed(reason))), 0),
        }
    }

    /// The waiting bytes of the body.
    fn waiting_piece(&mut self) -> Result<Bytes, ConnectionError> {
        match &mut self.body {
            // Only bytes of the body are waiting, so they need no copy.
            ReplyFraming::Length(left) if *left >= self.waiting.len() as u64 => {
                *left -= self.waiting.len() as u64;
                if *left == 0 {
                    self.body = ReplyFraming::Done;
                }
                Ok(std::mem::take(&mut self.waiting).freeze())
            }
            _ => self.of_waiting(Self::piece),
        }
    }

    /// The available bytes of the body; empty if they are only framing.
    fn piece(&mut self, bytes: &mut [u8]) -> (Result<Bytes, ConnectionError>, usize) {
        match &mut self.body {
            ReplyFraming::Length(left) => {
                let here = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= here as u64;
                if *left == 0 {
                    self.body = ReplyFraming::Done;
                }
                (Ok(Bytes::copy_from_slice(&bytes[..here])), here)
            }
            ReplyFraming::Chunked(chunks) => match chunks.decode(bytes) {
                Ok(decoded) => {
                    if *chunks == ChunkDecoder::Done {
                        self.body = ReplyFraming::Done;
                    }
                    (Ok(Bytes::copy_from_slice(&bytes[decoded.from..decoded.to])), decoded.consumed)
                }
                Err(ReplyChunkError) => (Err(self.fail(ConnectionError::Malformed("the chunks"))), 0),
            },
            ReplyFraming::ToEnd => (Ok(Bytes::copy_from_slice(bytes)), bytes.len()),
            ReplyFraming::Head | ReplyFraming::Done => (Ok(Bytes::new()), 0),
        }
    }
}

#[cfg(test)]
#[path = "tests/http1.rs"]
mod tests;
