//! HTTP/1.1 to an engine, from our side: one request, one answer, nothing in between.
//!
//! ```text
//! Idle ─ begin ─▶ sending, waiting for a head ─ head ─▶ body ─ its end ─▶ Idle   (or spent: never again)
//!                                                         └ error, end of the connection ─▶ spent
//! ```
//!
//! Written by hand because it is what the router does most: whoever waits for the engine drives the connection, so that
//! no task, channel or timer is between the socket and the client; a request is one vectored write of pieces that are
//! not copied; what one read brings of an answer is passed on as one piece; and while nothing comes, no buffer is held.
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
use hyper::StatusCode;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::chunks::Chunks;

/// One read of the socket.
const READ_BYTES: usize = 16 << 10;
/// Bytes of the head of an answer, and of all heads of 1xx before it.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Header fields of an answer.
const FIELDS_MAX: usize = 100;
/// Pieces of a request that go into one write.
const PIECES_MAX: usize = 16;

/// A connection. `S` is its bytes, plain or in TLS.
#[derive(Debug)]
pub(super) struct Http1<S> {
    stream: S,
    /// What was read and not yet passed on.
    waiting: BytesMut,
    /// What is not yet sent, last piece first.
    unsent: Vec<Bytes>,
    /// What was written may still be held back, as TLS does.
    flushing: bool,
    body: Framing,
    /// Whether another request may follow the answer.
    reusable: bool,
}

/// The head of an answer.
#[derive(Debug)]
pub(crate) struct Head {
    pub status: StatusCode,
    pub headers: HeaderMap,
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

/// Why a connection is of no further use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Lost {
    /// Before any byte of an answer: an idle connection may have been closed meanwhile.
    #[error("it ended before an answer")]
    Unanswered,
    /// In the middle of an answer.
    #[error("it ended in the middle of an answer")]
    Ended,
    /// The socket said so in the middle of an answer.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// What came is not an answer that can be read in one way only.
    #[error("the answer is malformed: {0}")]
    Malformed(&'static str),
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
        loop {
            if !self.waiting.is_empty()
                && let Some(head) = self.head()?
            {
                if unsent.is_some() {
                    self.unsent.clear();
                    self.flushing = false;
                    self.reusable = false;
                }
                return Poll::Ready(Ok(head));
            }
            let read = self.poll_read(context);
            let read = match (read, &unsent) {
                (Poll::Pending, Some(Some(_))) => Poll::Ready(Ok(0)),
                (read, _) => read,
            };
            match ready!(read) {
                Ok(0) | Err(_) if self.waiting.is_empty() => {
                    self.reusable = false;
                    return Poll::Ready(Err(Lost::Unanswered));
                }
                Ok(0) => return Poll::Ready(Err(self.lost(Lost::Ended))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Err(self.lost(error.into()))),
            }
        }
    }

    /// The next piece of the answer's body: everything that is here of it. `None` at its end.
    pub(super) fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Lost>>> {
        loop {
            if self.body == Framing::Done {
                return Poll::Ready(None);
            }
            if !self.waiting.is_empty() {
                match self.piece() {
                    Ok(piece) if !piece.is_empty() => return Poll::Ready(Some(Ok(piece))),
                    Ok(_) if self.body == Framing::Done => return Poll::Ready(None),
                    Ok(_) => {}
                    Err(lost) => return Poll::Ready(Some(Err(lost))),
                }
            }
            match ready!(self.poll_read(context)) {
                Ok(0) if self.body == Framing::ToEnd => self.body = Framing::Done,
                Ok(0) => return Poll::Ready(Some(Err(self.lost(Lost::Ended)))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(self.lost(error.into())))),
            }
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
        quiet && self.poll_read(&mut Context::from_waker(Waker::noop())).is_pending()
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

    /// Reads once, by way of the stack: while nothing comes, no buffer waits for it.
    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut room = [MaybeUninit::<u8>::uninit(); READ_BYTES];
        let mut room = ReadBuf::uninit(&mut room);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut room))?;
        self.waiting.extend_from_slice(room.filled());
        Poll::Ready(Ok(room.filled().len()))
    }

    /// The head, once it is whole; what is behind it stays.
    fn head(&mut self) -> Result<Option<Head>, Lost> {
        loop {
            let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
            let mut parsed = httparse::Response::new(&mut fields);
            let bytes = match parsed.parse(&self.waiting) {
                Ok(httparse::Status::Complete(bytes)) => bytes,
                Ok(httparse::Status::Partial) if self.waiting.len() < HEAD_BYTES_MAX => return Ok(None),
                Ok(httparse::Status::Partial) => return Err(self.lost(Lost::Malformed("an endless head"))),
                Err(_) => return Err(self.lost(Lost::Malformed("no head"))),
            };
            let (code, is_1_0) = (parsed.code.unwrap_or_default(), parsed.version == Some(0));
            let base = self.waiting.as_ptr().addr();
            let mut headers = HeaderMap::with_capacity(parsed.headers.len());
            let mut values = Vec::with_capacity(parsed.headers.len());
            for field in parsed.headers.iter() {
                let name = HeaderName::from_bytes(field.name.as_bytes());
                let from = field.value.as_ptr().addr() - base;
                values.push((name.map_err(|_| Lost::Malformed("a header's name"))?, from, field.value.len()));
            }
            let head = self.waiting.split_to(bytes).freeze();
            for (name, from, len) in values {
                let value = HeaderValue::from_maybe_shared(head.slice(from..from + len));
                headers.append(name, value.map_err(|_| Lost::Malformed("a header's value"))?);
            }
            match code {
                100 | 102..200 => {}
                101 => return Err(self.lost(Lost::Malformed("a switch of protocols"))),
                _ => {
                    let status = StatusCode::from_u16(code);
                    let status = status.map_err(|_| self.lost(Lost::Malformed("a status")))?;
                    self.body = framing(status, &headers, is_1_0).map_err(|lost| self.lost(lost))?;
                    self.reusable &= self.body != Framing::ToEnd && !is_1_0 && !says_close(&headers);
                    return Ok(Some(Head { status, headers }));
                }
            }
        }
    }

    /// What is here of the body; empty when that is only framing.
    fn piece(&mut self) -> Result<Bytes, Lost> {
        match &mut self.body {
            Framing::Length(left) => {
                let here = usize::try_from(*left).unwrap_or(usize::MAX).min(self.waiting.len());
                *left -= here as u64;
                if *left == 0 {
                    self.body = Framing::Done;
                }
                Ok(self.take(here))
            }
            Framing::Chunked(chunks) => {
                let decoded = chunks.decode(&mut self.waiting);
                let done = *chunks == Chunks::Done;
                let decoded = decoded.map_err(|_| self.lost(Lost::Malformed("the chunks")))?;
                if done {
                    self.body = Framing::Done;
                }
                self.waiting.advance(decoded.from);
                let piece = self.take(decoded.to - decoded.from);
                self.waiting.advance(decoded.taken - decoded.to);
                if self.waiting.is_empty() {
                    self.waiting = BytesMut::new();
                }
                Ok(piece)
            }
            Framing::ToEnd => Ok(self.take(self.waiting.len())),
            Framing::Head | Framing::Done => Ok(Bytes::new()),
        }
    }

    /// The first bytes of what was read; all of it leaves no buffer behind.
    fn take(&mut self, bytes: usize) -> Bytes {
        if bytes == self.waiting.len() {
            return std::mem::take(&mut self.waiting).freeze();
        }
        self.waiting.split_to(bytes).freeze()
    }
}

/// How long the body of an answer is: RFC 9112, section 6.3, without what it tolerates.
fn framing(status: StatusCode, headers: &HeaderMap, is_1_0: bool) -> Result<Framing, Lost> {
    let mut codings = headers.get_all("transfer-encoding").iter();
    let mut lengths = headers.get_all("content-length").iter();
    let (coding, length) = (codings.next(), lengths.next());
    if codings.next().is_some() || lengths.next().is_some() || (coding.is_some() && length.is_some()) {
        return Err(Lost::Malformed("a length that is told twice"));
    }
    if let Some(coding) = coding {
        return match coding.as_bytes().eq_ignore_ascii_case(b"chunked") && !is_1_0 {
            true => Ok(Framing::Chunked(Chunks::Size)),
            false => Err(Lost::Malformed("a transfer coding other than chunked")),
        };
    }
    let length =
        length.map(|text| length_of(text.as_bytes()).ok_or(Lost::Malformed("a length"))).transpose()?;
    Ok(match length {
        _ if matches!(status.as_u16(), 204 | 304) => Framing::Done,
        Some(0) => Framing::Done,
        Some(bytes) => Framing::Length(bytes),
        None => Framing::ToEnd,
    })
}

/// Plain digits, at most 18 of them.
fn length_of(text: &[u8]) -> Option<u64> {
    let plain = (1..=18).contains(&text.len()) && text.iter().all(u8::is_ascii_digit);
    plain.then(|| text.iter().fold(0, |length, digit| length * 10 + u64::from(digit - b'0')))
}

fn says_close(headers: &HeaderMap) -> bool {
    headers.get_all("connection").iter().any(|value| {
        value
            .as_bytes()
            .split(|&byte| byte == b',')
            .any(|word| word.trim_ascii().eq_ignore_ascii_case(b"close"))
    })
}

#[cfg(test)]
#[path = "http1_tests.rs"]
mod tests;
