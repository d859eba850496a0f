//! One attempt of the decode leg, up to the engine's acceptance of the request. The pump passes on the response.
//!
//! The head of a stream proves nothing: stock vLLM sends it before it begins, and reports missing blocks and its own
//! failure within the stream. A streamed request therefore counts as accepted at its first event. If that event
//! contains an error, it counts as a refusal: the client has received nothing yet, so another engine can use the same
//! handoff. The same holds for a reply that only reports the engine's own abort (`message/engine_abort.rs`).

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::exchange::Failure;
use baton_openai::ApiError;
use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use memchr::memmem;

use super::{ErrorClass, Fault, Refusal, Verdict, classify_unreadable, log_unsupported_endpoint};
use crate::engines::http::{CallError, ConnectionError, Engine, EngineRequest, Reply, Support, WholeReply};
use crate::legs::liveness::wait_while_alive;
use crate::message::embedded_error::ABORT_ERROR;
use crate::message::engine_abort::ReplyStart;
use crate::message::path::Dialect;
use crate::message::payload::Payload;
use crate::message::sse;
use crate::metrics::log_span::request_span;
use crate::routing::models::Model;

/// Limit on the body of a refusal; a larger one is classified by its status.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;
/// Longest wait for the part of a reply that shows whether the engine aborted the request. Engines write it together
/// with the part before.
const START_TIMEOUT: Duration = Duration::from_millis(10);

/// The result of an attempt.
pub(crate) enum DecodeResult {
    /// The engine accepted the request: the head of a successful response has arrived, and of a stream its first event.
    Accepted(Box<Reply>),
    /// The engine refused the request itself.
    Refused(Refusal),
    /// The engine failed before it accepted the request.
    Failed(Failure, Refusal, ErrorClass, Fault),
}

impl DecodeResult {
    /// The same for a request whose model only the client has named: an engine without it refuses the request.
    pub(crate) fn with_clients_model(self, model: &Model) -> Self {
        match self {
            result if !model.name_in_bodies.is_of_client() => result,
            Self::Failed(_, _, ErrorClass::WrongModel, _) => {
                Self::Refused(Refusal(ApiError::model_not_found(&model.name)))
            }
            other => other,
        }
    }
}

/// Sends a request to an engine and waits at most `first_byte` for its acceptance, while the engine is alive. A
/// liveness probe follows each `pause`. `admitted` is called with the head of a successful response: from then on the
/// consumer releases the lease itself, and it may still fail.
///
/// `plain` is a body without the option for usage, set if only the router requests usage. If the engine refuses the
/// request, possibly because of that option, the plain body is sent once. The second response counts unless it is a
/// refusal too.
///
/// # Cancel safety
/// Dropping the future closes the connection, which aborts the request.
pub(crate) async fn ask(
    engine: &Arc<Engine>,
    outgoing: &EngineRequest,
    first_byte: Duration,
    pause: Duration,
    plain: Option<PlainBody<'_>>,
    admitted: impl FnOnce(),
) -> DecodeResult {
    let call = pin!(async {
        // Boxed at once: the steps after the head would each have memory for it.
        let mut reply = Box::new(engine.call(outgoing, |_| {}).await?);
        if let Some(plain) = plain {
            if is_refusal(reply.status()) {
                let refused = reply.read_whole_or_head(REFUSAL_BYTES_MAX).await?;
                if !may_be_for_usage(engine, &refused) {
                    return Ok(Err(refused));
                }
                // Boxed: few engines need this, so it should not enlarge every call.
                let again = EngineRequest { body: plain(), ..outgoing.clone() };
                *reply = Box::pin(engine.call(&again, |_| {})).await?;
                if is_refusal(reply.status()) {
                    return Ok(Err(refused));
                }
                if reply.status().is_success() {
                    engine.usage_option.learn(Support::Missing);
                }
            } else if reply.status().is_success() {
                engine.usage_option.learn(Support::Present);
            }
        }
        if !reply.status().is_success() {
            return reply.read_whole_or_head(REFUSAL_BYTES_MAX).await.map(Err);
        }
        admitted();
        check_start(reply, &outgoing.path).await
    });
    match wait_while_alive(engine, pause, first_byte, call).await {
        Ok(Ok(Ok(reply))) => DecodeResult::Accepted(reply),
        Ok(Ok(Err(whole))) => {
            let verdict = Verdict::of(&whole, engine.redactor());
            log_unsupported_endpoint(engine, &verdict.refusal);
            match verdict.failure() {
                Some(failure) => DecodeResult::Failed(failure, verdict.refusal, verdict.class, verdict.fault),
                None => DecodeResult::Refused(verdict.refusal),
            }
        }
        Ok(Err(CallError::NotConnected | CallError::OutOfResources(_))) => DecodeResult::Failed(
            Failure::NotReached,
            Refusal::unreachable(),
            ErrorClass::Retryable,
            Fault::None,
        ),
        Ok(Err(CallError::Undecodable(error))) => {
            let (refusal, fault) = classify_unreadable(engine, error);
            DecodeResult::Failed(Failure::Unknown, refusal, ErrorClass::Retryable, fault)
        }
        Ok(Err(CallError::BudgetExhausted)) => {
            DecodeResult::Failed(Failure::Unknown, Refusal::no_memory(), ErrorClass::Retryable, Fault::None)
        }
        Ok(Err(error)) => {
            tracing::debug!(
                parent: request_span!(&outgoing.id), event = "decode_failed",
                engine = engine.authority(), %error, "decode failed"
            );
            DecodeResult::Failed(Failure::Unknown, Refusal::broken(), ErrorClass::Retryable, Fault::Engine)
        }
        Err(error) => {
            DecodeResult::Failed(Failure::Unknown, Refusal::timed_out(), ErrorClass::Retryable, error.fault())
        }
    }
}

/// A successful reply, if its start shows that the engine serves the request. Else the engine's refusal.
async fn check_start(mut reply: Box<Reply>, path: &str) -> Result<Result<Box<Reply>, WholeReply>, CallError> {
    let mut start = Bytes::new();
    if reply.is_stream() {
        start = first_frames(&mut reply).await?;
        if let Some(embedded) = sse::first_error(&start) {
            return Ok(Err(reply.error_reply(embedded.status, embedded.error)));
        }
    }
    Ok(match reply_start(&mut reply, path, start).await {
        ReplyStart::Usual | ReplyStart::Role => Ok(reply),
        ReplyStart::Aborted => Err(reply.error_reply(StatusCode::SERVICE_UNAVAILABLE, ABORT_ERROR.into())),
        ReplyStart::PrefixMissing => Err(reply.error_reply(StatusCode::PRECONDITION_FAILED, Bytes::new())),
    })
}

/// Builds the body for an engine that does not accept `stream_options`.
pub(crate) type PlainBody<'a> = &'a (dyn Fn() -> Payload + Sync);

/// Whether the engine refuses the request's content.
fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY)
}

/// Whether an engine may have refused a request because of the usage option: the response names the option, or the
/// engine is not known to accept it. Errors about the handoff are classified separately.
fn may_be_for_usage(engine: &Engine, refusal: &WholeReply) -> bool {
    let names = |name: &str| memmem::find(&refusal.body, name.as_bytes()).is_some();
    names("stream_options")
        || names("include_usage")
        || engine.usage_option.is_taken() != Some(true)
            && Verdict::of(refusal, engine.redactor()).class == ErrorClass::Refused
}

/// What the start of a successful reply shows. `start` is the part that was read; it is put back with what is read
/// here.
async fn reply_start(reply: &mut Reply, path: &str, mut start: Bytes) -> ReplyStart {
    let mut result = ReplyStart::Usual;
    if let Some(dialect) = Dialect::at(path) {
        let bytes_max = ReplyStart::bytes_max(dialect);
        if reply.is_stream() {
            let is_enough = |bytes: &[u8]| ReplyStart::of_stream(dialect, bytes) != ReplyStart::Role;
            start = read_on(reply, start, bytes_max, is_enough).await;
            result = ReplyStart::of_stream(dialect, &start);
        } else {
            start = read_on(reply, start, bytes_max, |bytes| bytes.trim_ascii_end().ends_with(b"}")).await;
            result = ReplyStart::of_whole(dialect, &start);
        }
    }
    if !start.is_empty() {
        reply.put_back(start);
    }
    result
}

/// Reads until the start of a reply is long enough to be judged, or for a short time. An error is put back.
async fn read_on(
    reply: &mut Reply,
    mut start: Bytes,
    bytes_max: usize,
    is_enough: impl Fn(&[u8]) -> bool,
) -> Bytes {
    let until = tokio::time::Instant::now() + START_TIMEOUT;
    while start.len() <= bytes_max && !is_enough(&start) {
        match tokio::time::timeout_at(until, reply.chunk()).await {
            Ok(Some(Ok(piece))) if start.is_empty() => start = piece,
            Ok(Some(Ok(piece))) => start = [start, piece].concat().into(),
            Ok(Some(Err(error))) => {
                reply.put_back_error(error);
                break;
            }
            Ok(None) | Err(_) => break,
        }
    }
    start
}

/// Everything up to the first end of an event, or the part received when it exceeds the limit of a refusal.
async fn first_frames(reply: &mut Reply) -> Result<Bytes, CallError> {
    let (mut held, mut first) = (BytesMut::new(), sse::FirstEvent::default());
    loop {
        let chunk = reply.chunk().await.unwrap_or(Err(CallError::Broken(ConnectionError::Unanswered)))?;
        let mut enough = |bytes: &[u8]| first.end(bytes).is_some() || bytes.len() > REFUSAL_BYTES_MAX;
        // Usually one chunk is enough, and it is not copied.
        if held.is_empty() && enough(&chunk) {
            return Ok(chunk);
        }
        held.extend_from_slice(&chunk);
        if enough(&held) {
            return Ok(held.freeze());
        }
    }
}
