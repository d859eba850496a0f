//! HTTP/1.1 to an engine, from our side: one request, one answer, nothing in between.
//!
//! ```text
//! Idle ─ begin ─▶ sending, waiting for a head ─ head ─▶ body ─ its end ─▶ Idle   (or spent: never again)
//!                                                         └ error, end of the connection ─▶ spent
//! ```
//!
//! Written by hand because it is what the router does most: whoever waits for the engine drives the connection, so that
//! no task, channel or timer is between the socket and the client; a request is one vectored write of pieces that are
//! not copied; what one read brings of an answer is passed on as one piece, in memory of exactly its size; and while
//! nothing comes, no buffer is held.
//!
//! Invariants:
//! - An answer whose length can be read in two ways is refused (two lengths, a length with a coding, any coding but
//!   `chunked`): what follows it would be taken for the next answer.
//! - A connection on which anything is out of the ordinary is never used again.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::chunks::{Chunks, NotChunks};
use super::lost::Lost;
use super::reply_head::{self, Extent, Head, NotHead};

/// One read of the socket.
const READ_BYTES: usize = 16 << 10;
/// Pieces of a request that go into one write.
const PIECES_MAX: usize = 16;

/// A connection. `S` is its bytes, plain or in TLS.
#[derive(Debug)]
pub(super) struct Http1<S> {
    stream: S,
    /// What was read and could not be used yet: half a head, the line of a chunk, or what followed a head.
    waiting: BytesMut,
    /// What is not yet sent, last piece first.
    unsent: Vec<Bytes>,
    /// What was written may still be held back, as TLS does.
    flushing: bool,
    body: Framing,
    /// Whether another request may follow the answer.
    reusable: bool,
}

/// How much of an answer is still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Head,
    Length(u64),
    Chunked(Chunks),
    /// Until the engine closes the connection.
    ToEnd,
    Done,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Http1<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream,
            waiting: BytesMut::new(),
            unsent: Vec::new(),
            flushing: false,
            body: Framing::Done,
            reusable: true,
        }
    }

    /// Its bytes, for what is asked of the socket.
    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    /// Takes a request: the bytes of its head and of its body. [`Self::poll_head`] sends it.
    pub(super) fn begin(&mut self, head: Vec<u8>, body: &[Bytes]) {
        self.unsent.clear();
        self.unsent.extend(body.iter().rev().filter(|piece| !piece.is_empty()).cloned());
        self.unsent.push(head.into());
        self.flushing = true;
        self.body = Framing::Head;
    }

    /// Sends what is to be sent, and reads until the head of the answer is here. An engine may answer before it has
    /// read the whole request.
    pub(super) fn poll_head(&mut self, context: &mut Context<'_>) -> Poll<Result<Head, Lost>> {
        let unsent = match self.poll_send(context) {
            Poll::Ready(Ok(())) => None,
            Poll::Pending => Some(None),
            // It may have said why before it closed.
            Poll::Ready(Err(error)) => Some(Some(error)),
        };
        let mut head = self.of_waiting(Self::head)?;
        loop {
            if let Some(head) = head {
                if unsent.is_some() {
                    self.unsent.clear();
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
                    return Poll::Ready(Err(Lost::Unanswered));
                }
                Ok(None) => return Poll::Ready(Err(self.lost(Lost::Ended))),
                Ok(Some(head)) => head?,
                Err(error) => return Poll::Ready(Err(self.lost(error.into()))),
            };
        }
    }

    /// The next piece of the answer's body: everything that is here of it. `None` at its end.
    pub(super) fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Lost>>> {
        let mut piece = self.waiting_piece();
        loop {
            match piece {
                Ok(piece) if !piece.is_empty() => return Poll::Ready(Some(Ok(piece))),
                Ok(_) if self.body == Framing::Done => return Poll::Ready(None),
                Ok(_) => {}
                Err(lost) => return Poll::Ready(Some(Err(lost))),
            }
            piece = match ready!(self.poll_read(context, Self::piece)) {
                Ok(Some(piece)) => piece,
                Ok(None) if self.body == Framing::ToEnd => {
                    self.body = Framing::Done;
                    Ok(Bytes::new())
                }
                Ok(None) => Err(self.lost(Lost::Ended)),
                Err(error) => Err(self.lost(error.into())),
            };
        }
    }

    /// Whether the whole answer was read.
    pub(super) fn is_ended(&self) -> bool {
        self.body == Framing::Done
    }

    /// Whether another request can be sent: the last answer was read, and the engine has neither closed the connection
    /// nor said anything that nobody asked for.
    pub(super) fn is_ready(&mut self) -> bool {
        let quiet = self.reusable && self.is_ended() && self.waiting.is_empty();
        quiet && self.poll_read(&mut Context::from_waker(Waker::noop()), |_, _| ((), 0)).is_pending()
    }

    fn lost(&mut self, lost: Lost) -> Lost {
        self.reusable = false;
        self.body = Framing::Done;
        lost
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.flushing {
            return Poll::Ready(Ok(()));
        }
        while !self.unsent.is_empty() {
            let mut slices = [IoSlice::new(&[]); PIECES_MAX];
            let mut count = 0;
            for (slice, piece) in slices.iter_mut().zip(self.unsent.iter().rev()) {
                *slice = IoSlice::new(piece);
                count += 1;
            }
            let stream = Pin::new(&mut self.stream);
            let mut sent = ready!(stream.poll_write_vectored(context, &slices[..count]))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
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
        // TLS holds bytes back until it is told.
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        self.flushing = false;
        Poll::Ready(Ok(()))
    }

    /// Reads once, by way of the stack, and has `make` make something of what is here; it says how many bytes are done
    /// with, and the others wait. `None` at the end of the connection.
    fn poll_read<T>(
        &mut self,
        context: &mut Context<'_>,
        make: impl FnOnce(&mut Self, &mut [u8]) -> (T, usize),
    ) -> Poll<io::Result<Option<T>>> {
        let mut room = [const { MaybeUninit::<u8>::uninit() }; READ_BYTES];
        let mut room = ReadBuf::uninit(&mut room);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut room))?;
        let read = room.filled_mut();
        if read.is_empty() {
            return Poll::Ready(Ok(None));
        }
        if !self.waiting.is_empty() {
            self.waiting.extend_from_slice(read);
            return Poll::Ready(Ok(Some(self.of_waiting(make))));
        }
        let (made, taken) = make(self, read);
        self.waiting = BytesMut::from(&read[taken..]);
        Poll::Ready(Ok(Some(made)))
    }

    /// As [`Self::poll_read`], of what waits already.
    fn of_waiting<T>(&mut self, make: impl FnOnce(&mut Self, &mut [u8]) -> (T, usize)) -> T {
        let mut waiting = std::mem::take(&mut self.waiting);
        let (made, taken) = make(self, &mut waiting);
        if taken < waiting.len() {
            waiting.advance(taken);
            self.waiting = waiting;
        }
        made
    }

    /// The head, once it is whole.
    fn head(&mut self, bytes: &mut [u8]) -> (Result<Option<Head>, Lost>, usize) {
        match reply_head::read(bytes) {
            Ok(None) => (Ok(None), 0),
            Ok(Some(read)) => {
                self.body = match read.extent {
                    Extent::Length(0) => Framing::Done,
                    Extent::Length(bytes) => Framing::Length(bytes),
                    Extent::Chunked => Framing::Chunked(Chunks::Size),
                    Extent::ToEnd => Framing::ToEnd,
                };
                self.reusable &= read.reusable;
                (Ok(Some(read.head)), read.bytes)
            }
            Err(NotHead(why)) => (Err(self.lost(Lost::Malformed(why))), 0),
        }
    }

    /// What waits of the body.
    fn waiting_piece(&mut self) -> Result<Bytes, Lost> {
        match &mut self.body {
            // Nothing but the body waits: it need not be copied.
            Framing::Length(left) if *left >= self.waiting.len() as u64 => {
                *left -= self.waiting.len() as u64;
                if *left == 0 {
                    self.body = Framing::Done;
                }
                Ok(std::mem::take(&mut self.waiting).freeze())
            }
            _ => self.of_waiting(Self::piece),
        }
    }

    /// What is here of the body; empty when that is only framing.
    fn piece(&mut self, bytes: &mut [u8]) -> (Result<Bytes, Lost>, usize) {
        match &mut self.body {
            Framing::Length(left) => {
                let here = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= here as u64;
                if *left == 0 {
                    self.body = Framing::Done;
                }
                (Ok(Bytes::copy_from_slice(&bytes[..here])), here)
            }
            Framing::Chunked(chunks) => match chunks.decode(bytes) {
                Ok(decoded) => {
                    if *chunks == Chunks::Done {
                        self.body = Framing::Done;
                    }
                    (Ok(Bytes::copy_from_slice(&bytes[decoded.from..decoded.to])), decoded.taken)
                }
                Err(NotChunks) => (Err(self.lost(Lost::Malformed("the chunks"))), 0),
            },
            Framing::ToEnd => (Ok(Bytes::copy_from_slice(bytes)), bytes.len()),
            Framing::Head | Framing::Done => (Ok(Bytes::new()), 0),
        }
    }
}

#[cfg(test)]
#[path = "http1_tests.rs"]
mod tests;
