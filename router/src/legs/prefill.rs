//! One attempt of the prefill leg. It can outlive its request: an abandoned attempt goes to the settler, which keeps
//! reading, because the reply is the only copy of the handle.

mod tail;

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::Handle;
use baton_connector::exchange::{Attempt, Event, Failure};
use baton_connector::handoff::ReplyFacts;
use baton_openai::{ApiError, ParseLimits, RawBody, recover_member};
use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use serde_json::Value;
use tokio::sync::Notify;

use super::{Fault, Refusal, Verdict, classify_unreadable, log_unsupported_endpoint};
use crate::engines::http::{
    CallError, ConnectionError, ConnectionHandle, Engine, EngineRequest, EngineRequestGuard, LeaseIdentity,
    Reply, ReplyReservation, WholeReply,
};
use crate::engines::redact::AddressRedactor;
use crate::message::embedded_error::EmbeddedError;
use crate::message::handoff_params::{PROMPT_IDS, with_prompt_ids};
use crate::message::sse;
use crate::message::usage::JsonScanner;
use crate::metrics::log_span::request_span;
use crate::routing::models::Model;

/// A reply has one token and a block table: 65,536 ids of at most 11 digits, with space for log probabilities.
const REPLY_BYTES_MAX: usize = 8 << 20;

/// The member of a reply that contains the handoff.
const HANDOFF: &str = "kv_transfer_params";

pub(crate) use tail::{PrefillTail, PrefillTimeouts, ReplyTail, unless_failed};

type ResponseFuture = dyn Future<Output = Result<FirstResponse, CallError>> + Send;

/// The first part of an engine's response.
enum FirstResponse {
    Whole(WholeReply),
    /// The first event of a stream, converted to a whole response, and the rest of the stream.
    Event(WholeReply, Box<Reply>),
}

/// An attempt in flight.
pub(crate) struct PrefillCall {
    attempt: Attempt,
    load: EngineRequestGuard,
    sent_at: Instant,
    /// The size of its body.
    bytes: usize,
    /// How far the request has come.
    sending: Arc<PrefillSending>,
    /// Never locked: the mutex only makes the future `Sync`, which pingora requires of a context.
    answer: Mutex<Pin<Box<ResponseFuture>>>,
}

/// What the call and its future share.
#[derive(Default)]
struct PrefillSending {
    /// The socket of the request, once it is sent.
    socket: Mutex<Option<Arc<ConnectionHandle>>>,
    /// Notified when it is sent.
    sent: Notify,
}

impl PrefillSending {
    fn socket(&self) -> MutexGuard<'_, Option<Arc<ConnectionHandle>>> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The handoff of a reply.
#[derive(Debug)]
pub(crate) struct ReceivedHandoff {
    /// The checked `kv_transfer_params`, unchanged.
    pub params: Arc<str>,
    /// The same with the prompt's token ids, if the reply has them.
    with_prompt: Option<Arc<str>>,
}

impl ReceivedHandoff {
    /// The transfer parameters of the decode leg.
    pub(crate) fn into_decode_params(self) -> Arc<str> {
        self.with_prompt.unwrap_or(self.params)
    }
}

/// The result of an attempt.
#[derive(Debug)]
pub(crate) enum PrefillResult {
    /// The engine opened a lease. With the rest of its reply if it still computes.
    Leased(ReceivedHandoff, LeaseIdentity, Option<ReplyTail>),
    /// The engine responded without a lease.
    NoLease,
    /// The engine refused the request itself.
    Refused(Refusal),
    /// The engine failed.
    Failed(Failure, Refusal, Fault),
}

impl PrefillCall {
    pub(crate) fn start(
        attempt: Attempt,
        load: EngineRequestGuard,
        outgoing: EngineRequest,
        sent_at: Instant,
    ) -> Self {
        let sending = Arc::<PrefillSending>::default();
        let (on, at) = (Arc::clone(&sending), Arc::clone(load.engine()));
        let bytes = outgoing.body.pieces().iter().map(Bytes::len).sum();
        let answer = async move {
            let sent = |socket| {
                *on.socket() = Some(socket);
                on.sent.notify_one();
            };
            let response = first_response(&at, &outgoing, sent).await;
            if let Err(error @ (CallError::Broken(_) | CallError::TooLarge(_))) = &response {
                tracing::debug!(
                    parent: request_span!(&outgoing.id), event = "prefill_failed",
                    engine = at.authority(), %error, "prefill failed"
                );
            }
            response
        };
        Self { attempt, load, sent_at, bytes, sending, answer: Mutex::new(Box::pin(answer)) }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        self.load.engine()
    }

    /// Returns the guard that counts the request at the engine.
    pub(crate) fn into_load(self) -> EngineRequestGuard {
        self.load
    }

    /// Whether the engine may have received the request.
    pub(crate) fn was_sent(&self) -> bool {
        self.sending.socket().is_some()
    }

    /// Disables the replay of the request after a broken connection.
    pub(crate) fn disable_replay(&self) {
        if let Some(socket) = self.sending.socket().as_ref() {
            socket.abandon();
        }
    }

    /// Closes the sending side of the connection and keeps reading.
    pub(crate) fn half_close(&self) {
        if let Some(socket) = self.sending.socket().as_ref() {
            socket.half_close();
        }
    }

    /// Whether the sending side of the connection is closed.
    pub(crate) fn is_half_closed(&self) -> bool {
        self.sending.socket().as_ref().is_some_and(|socket| socket.is_half_closed())
    }

    /// Waits until the request is on its way, or has failed before: then the response, as
    /// [`Self::receive_response`] returns it.
    ///
    /// # Cancel safety
    /// Cancel-safe; [`Self::receive_response`] follows.
    pub(crate) async fn wait_until_sent(&mut self) -> Option<PrefillResult> {
        let sending = Arc::clone(&self.sending);
        tokio::select! {
            biased;
            () = sending.sent.notified() => None,
            response = self.receive_response() => Some(response),
        }
    }

    /// Waits for the engine's response.
    ///
    /// # Cancel safety
    /// Cancel-safe; may be called again until it has returned.
    pub(crate) async fn receive_response(&mut self) -> PrefillResult {
        let answer = self.answer.get_mut().unwrap_or_else(PoisonError::into_inner);
        match answer.as_mut().await {
            Ok(FirstResponse::Whole(whole)) => {
                let prefilled = interpret(&whole, self.engine().redactor());
                match &prefilled {
                    PrefillResult::Leased(_, lease, _) => self.record_lease(*lease),
                    PrefillResult::Refused(refusal) => log_unsupported_endpoint(self.engine(), refusal),
                    PrefillResult::NoLease | PrefillResult::Failed(..) => {}
                }
                prefilled
            }
            Ok(FirstResponse::Event(event, reply)) => match interpret(&event, self.engine().redactor()) {
                PrefillResult::Leased(params, lease, _) => {
                    self.engine().verbs().received_handoff(lease);
                    PrefillResult::Leased(params, lease, Some(ReplyTail(reply)))
                }
                // The first event must contain a handoff.
                PrefillResult::NoLease => {
                    PrefillResult::Failed(Failure::Unusable(None), Refusal::broken(), Fault::Engine)
                }
                other => other,
            },
            Err(CallError::NotConnected | CallError::OutOfResources(_)) => {
                PrefillResult::Failed(Failure::NotReached, Refusal::unreachable(), Fault::None)
            }
            Err(CallError::Broken(_)) => {
                PrefillResult::Failed(Failure::Unknown, Refusal::broken(), Fault::Engine)
            }
            Err(CallError::Undecodable(error)) => {
                let (refusal, fault) = classify_unreadable(self.engine(), error);
                PrefillResult::Failed(Failure::Unusable(None), refusal, fault)
            }
            Err(CallError::BudgetExhausted) => {
                PrefillResult::Failed(Failure::Unusable(None), Refusal::no_memory(), Fault::None)
            }
            Err(CallError::TooLarge(_)) => {
                PrefillResult::Failed(Failure::Unusable(None), Refusal::broken(), Fault::Engine)
            }
        }
    }

    /// Whether the engine's reply is due within `bound`, by the times of its earlier prefills.
    pub(crate) fn is_reply_due(&self, bound: Duration) -> bool {
        let estimate = self.engine().prefill_times().estimate(self.bytes);
        estimate.is_some_and(|estimate| estimate.is_worth_wait(self.sent_at.elapsed(), bound))
    }

    /// The attempt's number in the exchange.
    pub(crate) fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// Records what a whole reply with a lease shows of its engine. Times are needed of stock engines only.
    fn record_lease(&self, lease: LeaseIdentity) {
        let engine = self.engine();
        engine.verbs().received_handoff(lease);
        if lease.handle.is_none() {
            let took = self.sent_at.elapsed();
            if let Some(estimate) = engine.prefill_times().record(self.bytes, took) {
                engine.metrics.record_estimate_error(estimate.error(took));
            }
        }
    }
}

impl PrefillResult {
    /// As [`DecodeResult::with_clients_model`](crate::legs::decode::DecodeResult::with_clients_model).
    pub(crate) fn with_clients_model(self, model: &Model) -> Self {
        match self {
            result if !model.name_in_bodies.is_of_client() => result,
            Self::Failed(_, refusal, _) if refusal == Refusal::wrong_model() => {
                Self::Refused(Refusal(ApiError::model_not_found(&model.name)))
            }
            other => other,
        }
    }

    /// The event for the exchange.
    pub(crate) fn exchange_event(&self, attempt: Attempt) -> Event {
        match self {
            Self::Leased(_, lease, _) => Event::PrefillLeased(attempt, lease.handle),
            Self::NoLease => Event::PrefillEmpty(attempt),
            Self::Refused(_) => Event::PrefillRefused(attempt),
            Self::Failed(failure, ..) => Event::PrefillFailed(attempt, *failure),
        }
    }
}

/// Sends a prefill and reads the first part of the response.
async fn first_response(
    engine: &Arc<Engine>,
    outgoing: &EngineRequest,
    sent: impl Fn(Arc<ConnectionHandle>),
) -> Result<FirstResponse, CallError> {
    let reply = engine.call(outgoing, sent).await?;
    if reply.is_stream() && reply.status().is_success() {
        return first_event(reply).await;
    }
    match reply.status().is_success() {
        true => reply.read_whole(REPLY_BYTES_MAX).await,
        // A refusal whose body cannot be read is classified by its status.
        false => reply.read_whole_or_head(REPLY_BYTES_MAX).await,
    }
    .map(FirstResponse::Whole)
}

/// Reads the first event of a stream that answers a prefill.
async fn first_event(mut reply: Reply) -> Result<FirstResponse, CallError> {
    let (mut held, mut first) = (BytesMut::new(), sse::FirstEvent::default());
    let mut reservation = ReplyReservation::default();
    let end = loop {
        let chunk = reply.chunk().await.unwrap_or(Err(CallError::Broken(ConnectionError::Unanswered)))?;
        held.extend_from_slice(&chunk);
        if let Some(end) = first.end(&held) {
            break end;
        }
        reservation.grow_to(held.capacity())?;
        if held.len() > REPLY_BYTES_MAX {
            return Err(CallError::TooLarge(REPLY_BYTES_MAX));
        }
    };
    let event = held.split_to(end).freeze();
    if !held.is_empty() {
        reply.put_back(held.freeze());
    }
    if let Some(embedded) = sse::first_error(&event) {
        return Ok(FirstResponse::Whole(reply.error_reply(embedded.status, embedded.error)));
    }
    let status = reply.status();
    let event = reply.error_reply(status, sse::data_of(&event).unwrap_or_default());
    Ok(FirstResponse::Event(event, Box::new(reply)))
}

/// Interprets a whole response. `hosts` contains the addresses of all engines.
fn interpret(reply: &WholeReply, hosts: &AddressRedactor) -> PrefillResult {
    if !reply.status.is_success() {
        let verdict = Verdict::of(reply, hosts);
        let (failure, refusal) = (verdict.failure(), verdict.refusal.of_prefill());
        return match failure {
            Some(failure) => PrefillResult::Failed(failure, refusal, verdict.fault),
            None => PrefillResult::Refused(refusal),
        };
    }
    // Only the handoff is used: the decode engine computes the reply's one token again.
    let limits = ParseLimits { body_bytes: REPLY_BYTES_MAX, ..ParseLimits::default() };
    let Ok(body) = RawBody::any(reply.body.clone(), &limits, &()) else {
        let handle = recover_member(&reply.body, HANDOFF).as_ref().and_then(find_handle);
        return PrefillResult::Failed(Failure::Unusable(handle), Refusal::broken(), Fault::Engine);
    };
    let params = body.field(HANDOFF).map(|params| std::str::from_utf8(params).expect("JSON text is UTF-8"));
    let Some(params) = params.filter(|params| *params != "null") else {
        return match EmbeddedError::of(reply.body.clone(), &JsonScanner::of(&reply.body)) {
            Some(EmbeddedError { status, error }) => interpret(
                &WholeReply { status, body: error, retry_after: None, own_key: reply.own_key },
                hosts,
            ),
            None => PrefillResult::NoLease,
        };
    };
    match ReplyFacts::check(params) {
        // A copy, because a slice would keep the whole reply until the response ends.
        Ok(ReplyFacts { handle, epoch, .. }) => {
            let ids = body.field(PROMPT_IDS).and_then(|ids| serde_json::from_slice::<Vec<u32>>(ids).ok());
            let with_prompt = ids.and_then(|ids| with_prompt_ids(params, &ids)).map(Arc::from);
            let handoff = ReceivedHandoff { params: params.into(), with_prompt };
            PrefillResult::Leased(handoff, LeaseIdentity { handle, epoch }, None)
        }
        Err(error) => {
            tracing::debug!(
                event = "prefill_response_unusable", %error,
                "prefill engine's response not usable"
            );
            let handle = serde_json::from_str(params).ok().as_ref().and_then(find_handle);
            PrefillResult::Failed(Failure::Unusable(handle), Refusal::broken(), Fault::Engine)
        }
    }
}

/// The handoff of a reply, if it is complete.
pub(crate) fn handoff_params(status: StatusCode, body: Bytes) -> Option<Arc<str>> {
    let reply = WholeReply { status, retry_after: None, body, own_key: false };
    match interpret(&reply, &AddressRedactor::default()) {
        PrefillResult::Leased(handoff, ..) => Some(handoff.params),
        PrefillResult::NoLease | PrefillResult::Refused(_) | PrefillResult::Failed(..) => None,
    }
}

/// The handle to release from a reply with an unusable handoff.
fn find_handle(params: &Value) -> Option<Handle> {
    params.get("remote_handle").and_then(Value::as_str).and_then(|text| text.parse().ok())
}

#[cfg(test)]
mod tests;
