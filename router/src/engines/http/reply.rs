//! An engine's reply, read piece by piece or whole.

use std::future::poll_fn;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use hyper::header::HeaderValue;

use super::connection::{Connection, IdleConnections};
use super::content_coding::Decoder;
use super::reply_head::ReplyHead;
use super::{CallError, Engine};
use crate::engines::body_budget::{BodyBudget, BodyReservation};

/// Maximum memory of all replies that the router reads whole for itself: a hundred thousand handoffs of 10 KiB,
/// but not thousands of the largest.
const READ_BYTES_TOTAL: usize = 1 << 30;
static READ: LazyLock<Arc<BodyBudget>> = LazyLock::new(Arc::default);

/// The part of [`READ_BYTES_TOTAL`] that one whole reply reserves. A reply of one piece reserves nothing.
#[derive(Debug, Default)]
pub(crate) struct ReplyReservation(Option<BodyReservation>);

impl ReplyReservation {
    /// Grows the reservation to `bytes` in total.
    ///
    /// # Errors
    /// [`CallError::BudgetExhausted`]: other replies have reserved the rest.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> Result<(), CallError> {
        let reservation = self.0.get_or_insert_with(|| READ.new_reservation());
        reservation.grow_to(bytes, READ_BYTES_TOTAL).map_err(|_| CallError::BudgetExhausted)
    }
}

/// A reply whose head has arrived. Dropping it before its end cuts the connection.
pub(crate) struct Reply {
    head: ReplyHead,
    /// A piece that was put back.
    ahead: Option<Bytes>,
    /// An error that was put back behind it.
    error_ahead: Option<CallError>,
    connection: Connection,
    /// Set if the reply is compressed.
    decoder: Option<Box<Decoder>>,
    engine: Arc<Engine>,
    /// Where the connection is kept, if not at the engine.
    pool: Option<Arc<IdleConnections>>,
}

/// A whole reply.
#[derive(Debug)]
pub(crate) struct WholeReply {
    pub status: StatusCode,
    /// The engine's `Retry-After`.
    pub retry_after: Option<Duration>,
    pub body: Bytes,
    /// The request had a key of the router's own, not the client's.
    pub own_key: bool,
}

impl Reply {
    pub(super) fn new(head: ReplyHead, connection: Connection, engine: Arc<Engine>) -> Self {
        let decoder = Decoder::of(head.coding);
        Self { head, ahead: None, error_ahead: None, connection, decoder, engine, pool: None }
    }

    /// Returns the connection to this pool instead of the engine's.
    pub(super) fn with_pool(self, pool: Arc<IdleConnections>) -> Self {
        Self { pool: Some(pool), ..self }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.head.status
    }

    pub(crate) fn content_type(&self) -> Option<&HeaderValue> {
        self.head.content_type.as_ref()
    }

    /// Metadata that some engines send with a binary reply.
    pub(crate) fn metadata(&self) -> Option<&HeaderValue> {
        self.head.metadata.as_ref()
    }

    /// Whether every byte of the body has been read.
    pub(crate) fn is_ended(&self) -> bool {
        let decoded = self.decoder.as_ref().is_none_or(|decoder| decoder.is_done());
        let is_held = self.ahead.is_some() || self.error_ahead.is_some();
        !is_held && self.connection.is_ended() && decoded
    }

    /// Whether the reply is a stream of server-sent events.
    pub(crate) fn is_stream(&self) -> bool {
        self.head.is_stream()
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Puts a piece back. It becomes the next one.
    pub(crate) fn put_back(&mut self, piece: Bytes) {
        self.ahead = Some(piece);
    }

    /// Puts an error back, behind a piece that is put back.
    pub(crate) fn put_back_error(&mut self, error: CallError) {
        self.error_ahead = Some(error);
    }

    /// The error of an event, as a reply in place of the stream.
    pub(crate) fn error_reply(&self, status: StatusCode, body: Bytes) -> WholeReply {
        WholeReply { status, body, ..self.without_body() }
    }

    /// The next piece of the body; `None` at its end.
    ///
    /// # Cancel safety
    /// No piece is lost.
    pub(crate) async fn chunk(&mut self) -> Option<Result<Bytes, CallError>> {
        poll_fn(|context| self.poll_chunk(context)).await
    }

    /// Whether the body's end has arrived already, without a wait.
    pub(crate) fn ends_now(&mut self) -> bool {
        matches!(self.try_chunk(), Some(None))
    }

    /// The reply without its body.
    fn without_body(&self) -> WholeReply {
        WholeReply {
            status: self.head.status,
            retry_after: self.head.retry_after,
            body: Bytes::new(),
            own_key: self.engine.has_own_key(),
        }
    }

    /// As [`Self::chunk`], without a wait; `None` if no piece has arrived.
    pub(crate) fn try_chunk(&mut self) -> Option<Option<Result<Bytes, CallError>>> {
        match self.poll_chunk(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(chunk) => Some(chunk),
            Poll::Pending => None,
        }
    }

    /// As [`Self::chunk`].
    pub(crate) fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, CallError>>> {
        let Self { ahead, error_ahead, connection, decoder, .. } = self;
        if let Some(ahead) = ahead.take() {
            return Poll::Ready(Some(Ok(ahead)));
        }
        if let Some(error) = error_ahead.take() {
            return Poll::Ready(Some(Err(error)));
        }
        match decoder {
            None => connection.poll_piece(context).map_err(CallError::Broken),
            Some(decoder) => decoder.poll_piece(context, |context| connection.poll_piece(context)),
        }
    }

    /// Returns the connection to the pool after the end of the body.
    pub(crate) fn finish(self) {
        match self.pool {
            Some(pool) => pool.store(self.connection),
            None => self.engine.store_idle(self.connection),
        }
    }

    /// As [`Self::read_whole`]. A reply that is too large, or cannot be decoded, is returned without its body.
    pub(crate) async fn read_whole_or_head(self, limit_bytes: usize) -> Result<WholeReply, CallError> {
        let head_only = self.without_body();
        match self.read_whole(limit_bytes).await {
            Err(CallError::TooLarge(_) | CallError::Undecodable(_) | CallError::BudgetExhausted) => {
                Ok(head_only)
            }
            result => result,
        }
    }

    /// Reads the rest of the reply, up to a bound, and closes the connection. Returns whether the status is a
    /// success.
    pub(crate) async fn read_health(mut self, limit_bytes: usize) -> Result<bool, CallError> {
        let mut read = 0;
        while let Some(chunk) = self.chunk().await {
            read += chunk?.len();
            if read > limit_bytes {
                return Err(CallError::TooLarge(limit_bytes));
            }
        }
        Ok(self.head.status.is_success())
    }

    /// Reads the rest of the reply, up to a bound, and returns the connection to the pool.
    pub(crate) async fn read_whole(mut self, limit_bytes: usize) -> Result<WholeReply, CallError> {
        let mut first = Bytes::new();
        let mut rest = BytesMut::new();
        let mut reservation = ReplyReservation::default();
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
                reservation.grow_to(rest.capacity())?;
            }
        }
        let body = if rest.is_empty() { first } else { rest.freeze() };
        let ReplyHead { status, retry_after, .. } = self.head;
        let own_key = self.engine.has_own_key();
        self.finish();
        Ok(WholeReply { status, retry_after, body, own_key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_that_are_read_whole_are_bounded_in_sum() {
        let (mut first, mut second) = (ReplyReservation::default(), ReplyReservation::default());
        assert!(first.grow_to(READ_BYTES_TOTAL / 2).is_ok());
        assert!(matches!(second.grow_to(READ_BYTES_TOTAL / 2 + 1), Err(CallError::BudgetExhausted)));
        drop(first);
        assert!(second.grow_to(READ_BYTES_TOTAL / 2 + 1).is_ok());
        assert!(second.grow_to(1).is_ok(), "what is held already is not taken twice");
    }
}
