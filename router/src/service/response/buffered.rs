//! Relays a response that is not streamed. It is buffered until it is complete, or sent in parts if the buffer is too
//! small.
//!
//! A 200 with an error, with a page, cut off or empty is no valid response. A buffered one becomes an error with its
//! own status. Of an unbuffered one the beginning is checked before anything is sent; after that the router can only
//! close the connection.

use bytes::{Bytes, BytesMut};
use pingora::http::ResponseHeader;

use super::stream::{ResponsePump, StreamError};
use crate::client::session::{BodyPiece, ResponseLength};
use crate::engines::body_budget::BodyReservation;
use crate::legs::Refusal;
use crate::legs::request_error::RequestError;
use crate::message::embedded_error::{ERROR_BYTES_MAX, EmbeddedError, InvalidReply, check_reply};
use crate::message::engine_abort::is_aborted;
use crate::message::handoff_params::without_params;
use crate::message::usage::JsonScanner;

/// Limit on one buffered response, within the budget of all of them. It is enough for the tokens of the longest context
/// with their texts. An engine sends such a response only when it is complete, so buffering delays nothing. The buffer
/// also frees the engine's capacity at once, however slowly the client reads.
const BUFFERED_BYTES_MAX: usize = 64 << 20;

impl ResponsePump<'_> {
    pub(super) async fn relay_buffered(&mut self, head: ResponseHeader) -> Result<(), RequestError> {
        let mut buffered = Bytes::new();
        // Held until the client has received everything.
        let mut reservation = None;
        loop {
            let capacity = match self.next_chunk().await? {
                // A response usually arrives in one chunk, which is neither copied nor counted.
                Ok(Some(chunk)) if buffered.is_empty() => {
                    buffered = chunk;
                    continue;
                }
                Ok(Some(chunk)) => {
                    let joined = joined(buffered, &chunk);
                    let capacity = joined.capacity();
                    buffered = joined.freeze();
                    capacity
                }
                Ok(None) => break,
                Err(error) => return Err(self.refuse(error)),
            };
            if buffered.len() > BUFFERED_BYTES_MAX
                || self.driver.reserve_response_memory(&mut reservation, capacity).is_err()
            {
                // Boxed: few responses are so large, so this should not enlarge every one.
                return Box::pin(self.relay_unbuffered(head, buffered, reservation)).await;
            }
        }
        let scanner = JsonScanner::of(&buffered);
        if let Some(error) = self.body_error(&buffered, &scanner) {
            return Err(self.refuse(error));
        }
        let buffered = self.driver.record_reply(buffered);
        let buffered = match self.format.translation.as_ref().map(|translation| translation.reply(&buffered))
        {
            None if self.format.dialect.generates() => without_params(buffered),
            None => buffered,
            Some(Ok(translated)) => translated,
            Some(Err(error)) => return Err(self.refuse(StreamError::Refused(Refusal(error)))),
        };
        self.complete();
        self.commit(head, ResponseLength::Known(buffered.len())).await?;
        self.write(buffered, BodyPiece::Last).await
    }

    /// Relays a response that is too large to buffer. A failure in the middle is signalled by the connection only: the
    /// last chunk is not sent, and the connection is closed.
    async fn relay_unbuffered(
        &mut self,
        head: ResponseHeader,
        mut begun: Bytes,
        reservation: Option<BodyReservation>,
    ) -> Result<(), RequestError> {
        if self.format.translation.is_some() {
            return Err(self.refuse(StreamError::Refused(Refusal::no_memory())));
        }
        let mut scanner = Box::new(JsonScanner::of(&begun));
        // An error is short, and is buffered in any case.
        while scanner.begins_error() && begun.len() <= ERROR_BYTES_MAX {
            match self.next_chunk().await? {
                Ok(Some(chunk)) => {
                    scanner.feed(&chunk);
                    begun = joined(begun, &chunk).freeze();
                }
                Ok(None) => break,
                Err(error) => return Err(self.refuse(error)),
            }
        }
        if scanner.begins_error() || self.format.dialect.generates() && scanner.is_no_object() {
            let error = self.body_error(&begun, &scanner).unwrap_or(StreamError::EngineDied);
            return Err(self.refuse(error));
        }
        self.commit(head, ResponseLength::Unknown).await?;
        self.write(begun, BodyPiece::Inner).await?;
        // The buffered part has been sent.
        drop(reservation);
        loop {
            match self.next_chunk().await? {
                Ok(Some(chunk)) => {
                    scanner.feed(&chunk);
                    if scanner.begins_error() {
                        break;
                    }
                    self.write(chunk, BodyPiece::Inner).await?;
                }
                Ok(None) => break,
                Err(error) => {
                    self.apply_error(&error);
                    return Ok(());
                }
            }
        }
        // The text of an error is not needed here, because the client has received the head of a response.
        let error = self
            .body_error(&Bytes::new(), &scanner)
            .or_else(|| scanner.begins_error().then_some(StreamError::EngineDied));
        if let Some(error) = error {
            self.apply_error(&error);
            return Ok(());
        }
        self.complete();
        self.write(Bytes::new(), BodyPiece::Last).await
    }

    /// Returns an error if a whole response is invalid or is an error; records its usage.
    fn body_error(&mut self, body: &Bytes, scanner: &JsonScanner) -> Option<StreamError> {
        self.driver.progress.usage_scan.note(scanner);
        let kind = self.reply.as_ref().and_then(|reply| reply.content_type());
        match check_reply(body, scanner, kind, self.format.dialect.generates()) {
            Some(InvalidReply::Error(error)) => Some(self.stream_error(error)),
            Some(InvalidReply::Broken) => Some(StreamError::EngineDied),
            None if is_aborted(self.format.dialect, scanner) => {
                Some(self.stream_error(EmbeddedError::of_abort()))
            }
            None => None,
        }
    }

    /// Ends the exchange with an error of which the client has received nothing.
    fn refuse(&mut self, error: StreamError) -> RequestError {
        self.apply_error(&error);
        RequestError::Refused(error.refusal())
    }
}

/// Joins two chunks.
fn joined(first: Bytes, second: &[u8]) -> BytesMut {
    let mut joined = first.try_into_mut().unwrap_or_else(|first| BytesMut::from(&*first));
    joined.extend_from_slice(second);
    joined
}
