//! An engine's answer: piece by piece as it comes, or whole.

use std::future::poll_fn;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use hyper::header::HeaderValue;

use super::coding::Decoder;
use super::connection::Connection;
use super::reply_head::Head;
use super::{CallError, Engine};
use crate::engines::body_budget::{BodyBudget, Held};

/// What all replies together may take that the router reads whole for itself: a hundred thousand handoffs of 10 KiB, and
/// not thousands of the largest.
const READ_BYTES_TOTAL: usize = 1 << 30;
static READ: LazyLock<Arc<BodyBudget>> = LazyLock::new(Arc::default);

/// What one reply that is read whole takes of [`READ_BYTES_TOTAL`]. One of one piece takes nothing.
#[derive(Debug, Default)]
pub(crate) struct ReadShare(Option<Held>);

impl ReadShare {
    /// Takes so many bytes in all.
    ///
    /// # Errors
    /// [`CallError::Spent`]: other replies have the rest.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> Result<(), CallError> {
        let share = self.0.get_or_insert_with(|| READ.begin());
        share.grow_to(bytes, READ_BYTES_TOTAL).map_err(|_| CallError::Spent)
    }
}

/// An answer whose head has arrived. Dropping it before its end cuts the connection.
pub(crate) struct Reply {
    head: Head,
    /// Read and put back.
    ahead: Option<Bytes>,
    connection: Connection,
    /// Of an answer that is compressed.
    decoder: Option<Box<Decoder>>,
    engine: Arc<Engine>,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Whole {
    pub status: StatusCode,
    /// When the engine wants to be asked again.
    pub retry_after: Option<Duration>,
    pub body: Bytes,
    /// Its engine was shown a key of the router's own, not the client's.
    pub own_key: bool,
}

impl Reply {
    pub(super) fn new(head: Head, connection: Connection, engine: Arc<Engine>) -> Self {
        let decoder = Decoder::of(head.coding);
        Self { head, ahead: None, connection, decoder, engine }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.head.status
    }

    pub(crate) fn content_type(&self) -> Option<&HeaderValue> {
        self.head.content_type.as_ref()
    }

    /// What some engines say of an answer that is not text.
    pub(crate) fn metadata(&self) -> Option<&HeaderValue> {
        self.head.metadata.as_ref()
    }

    /// Whether every byte of the body has been read.
    pub(crate) fn is_ended(&self) -> bool {
        let decoded = self.decoder.as_ref().is_none_or(|decoder| decoder.is_done());
        self.ahead.is_none() && self.connection.is_ended() && decoded
    }

    /// Whether it is a stream of server-sent events.
    pub(crate) fn is_stream(&self) -> bool {
        self.head.is_stream()
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Puts a piece back: it is the next one.
    pub(crate) fn put_back(&mut self, piece: Bytes) {
        self.ahead = Some(piece);
    }

    /// What an engine says in a stream, as if it had said it instead of the stream.
    pub(crate) fn told(&self, status: StatusCode, body: Bytes) -> Whole {
        Whole { status, body, ..self.bare() }
    }

    /// The next piece of the body, as it came; `None` at its end.
    ///
    /// # Cancel safety
    /// No piece is lost.
    pub(crate) async fn chunk(&mut self) -> Option<Result<Bytes, CallError>> {
        poll_fn(|context| self.poll_chunk(context)).await
    }

    /// Whether the body's end is here already, without waiting for it.
    pub(crate) fn ends_now(&mut self) -> bool {
        matches!(self.here(), Some(None))
    }

    /// The answer without its body, when that is more than can be used.
    fn bare(&self) -> Whole {
        Whole {
            status: self.head.status,
            retry_after: self.head.retry_after,
            body: Bytes::new(),
            own_key: self.engine.has_own_key(),
        }
    }

    /// As [`Self::chunk`], of what is here already; `None` when one must wait.
    pub(crate) fn here(&mut self) -> Option<Option<Result<Bytes, CallError>>> {
        match self.poll_chunk(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(chunk) => Some(chunk),
            Poll::Pending => None,
        }
    }

    /// As [`Self::chunk`].
    pub(crate) fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, CallError>>> {
        let Self { ahead, connection, decoder, .. } = self;
        match (ahead.take(), decoder) {
            (Some(ahead), _) => Poll::Ready(Some(Ok(ahead))),
            (None, None) => connection.poll_piece(context).map_err(CallError::Broken),
            (None, Some(decoder)) => decoder.poll_piece(context, |context| connection.poll_piece(context)),
        }
    }

    /// Gives the connection back after the end of the body.
    pub(crate) fn finish(self) {
        self.engine.keep(self.connection);
    }

    /// As [`Self::whole`]; an answer that is larger, or cannot be decoded, is given without its body.
    pub(crate) async fn whole_or_bare(self, limit_bytes: usize) -> Result<Whole, CallError> {
        let bare = self.bare();
        match self.whole(limit_bytes).await {
            Err(CallError::TooLarge(_) | CallError::Unreadable(_) | CallError::Spent) => Ok(bare),
            whole => whole,
        }
    }

    /// Reads the rest of the answer, up to a bound, and closes the connection; whether the answer is good.
    pub(crate) async fn judged(mut self, limit_bytes: usize) -> Result<bool, CallError> {
        let mut read = 0;
        while let Some(chunk) = self.chunk().await {
            read += chunk?.len();
            if read > limit_bytes {
                return Err(CallError::TooLarge(limit_bytes));
            }
        }
        Ok(self.head.status.is_success())
    }

    /// Reads the rest of the answer, up to a bound, and gives the connection back.
    pub(crate) async fn whole(mut self, limit_bytes: usize) -> Result<Whole, CallError> {
        let mut first = Bytes::new();
        let mut rest = BytesMut::new();
        let mut share = ReadShare::default();
        while let Some(chunk) = self.chunk().await {
            let chunk = chunk?;
            if first.len() + rest.len() + chunk.len() > limit_bytes {
                return Err(CallError::TooLarge(limit_bytes));
            }
            match (first.is_empty(), rest.is_empty()) {
                (true, true) => first = chunk,
                (_, true) => {
                    rest.extend_from_slice(&std::mem::take(&mut first));
                    rest.extend_from_slice(&chunk);
                }
                (_, false) => rest.extend_from_slice(&chunk),
            }
            if !rest.is_empty() {
                share.grow_to(rest.capacity())?;
            }
        }
        let body = if rest.is_empty() { first } else { rest.freeze() };
        let Head { status, retry_after, .. } = self.head;
        let own_key = self.engine.has_own_key();
        self.finish();
        Ok(Whole { status, retry_after, body, own_key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_that_are_read_whole_are_bounded_in_sum() {
        let (mut first, mut second) = (ReadShare::default(), ReadShare::default());
        assert!(first.grow_to(READ_BYTES_TOTAL / 2).is_ok());
        assert!(matches!(second.grow_to(READ_BYTES_TOTAL / 2 + 1), Err(CallError::Spent)));
        drop(first);
        assert!(second.grow_to(READ_BYTES_TOTAL / 2 + 1).is_ok());
        assert!(second.grow_to(1).is_ok(), "what is held already is not taken twice");
    }
}
