//! One attempt of the prefill leg. It outlives the request that began it: whoever gives it up hands it to the
//! settler, which reads on, because the reply is the only copy of the handle.

mod computing;

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use baton_connector::Handle;
use baton_connector::exchange::{Attempt, Event, Failure};
use baton_connector::handoff::ReplyFacts;
use baton_openai::{ParseLimits, RawBody, salvage_member};
use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use serde_json::Value;

use super::{Blame, Refusal, Verdict, note_lack, unreadable};
use crate::engines::http::{CallError, Engine, InFlight, Lost, Outgoing, ReadShare, Reply, Socket, Whole};
use crate::engines::redact::Hosts;
use crate::message::error_inside::ErrorInside;
use crate::message::sse;
use crate::message::usage::Skim;

/// A reply is one token and a block table: 65,536 ids of at most 11 digits, with room for log-probabilities.
const REPLY_BYTES_MAX: usize = 8 << 20;

/// Where a reply has the handoff.
const HANDOFF: &str = "kv_transfer_params";

pub(crate) use computing::{Computing, Patience, Rest, unless_failed};

type Answering = dyn Future<Output = Result<Answered, CallError>> + Send;

/// What an engine says first.
enum Answered {
    Whole(Whole),
    /// The first event of a stream, as if it were a whole answer, and what follows it.
    Event(Whole, Box<Reply>),
}

/// An attempt in flight.
pub(crate) struct PrefillCall {
    attempt: Attempt,
    load: InFlight,
    /// The socket that the request was put on, once it was.
    socket: Arc<Mutex<Option<Arc<Socket>>>>,
    /// Never locked: the mutex only makes the future shareable, which pingora asks of a context.
    answer: Mutex<Pin<Box<Answering>>>,
}

/// What an attempt came to.
#[derive(Debug)]
pub(crate) enum Prefilled {
    /// The engine lends: its `kv_transfer_params`, as it wrote them, checked; and what still comes, where it computes
    /// on.
    Lent(Arc<str>, Option<Handle>, Option<Rest>),
    /// The engine answered and lends nothing.
    Empty,
    /// The engine refused the request itself.
    Refused(Refusal),
    /// The engine failed.
    Failed(Failure, Refusal, Blame),
}

impl PrefillCall {
    pub(crate) fn start(attempt: Attempt, load: InFlight, outgoing: Outgoing) -> Self {
        let socket = Arc::<Mutex<Option<Arc<Socket>>>>::default();
        let (on, at) = (Arc::clone(&socket), Arc::clone(load.engine()));
        let answer = async move {
            let sent = |socket| *on.lock().unwrap_or_else(PoisonError::into_inner) = Some(socket);
            let reply = at.call(&outgoing, sent).await?;
            if reply.is_stream() && reply.status().is_success() {
                return first_event(reply).await;
            }
            match reply.status().is_success() {
                true => reply.whole(REPLY_BYTES_MAX).await,
                // A refusal whose words cannot be read is judged by its status.
                false => reply.whole_or_bare(REPLY_BYTES_MAX).await,
            }
            .map(Answered::Whole)
        };
        Self { attempt, load, socket, answer: Mutex::new(Box::pin(answer)) }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        self.load.engine()
    }

    /// The place at the engine that it takes.
    pub(crate) fn into_load(self) -> InFlight {
        self.load
    }

    /// Whether the engine may have seen the request.
    pub(crate) fn was_sent(&self) -> bool {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// From now on the request is not sent anew when its connection breaks.
    pub(crate) fn abandon(&self) {
        if let Some(socket) = self.socket.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            socket.abandon();
        }
    }

    /// Tells the engine that nothing more comes from here, and goes on listening.
    pub(crate) fn half_close(&self) {
        if let Some(socket) = self.socket.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            socket.half_close();
        }
    }

    /// Waits for the engine's answer.
    ///
    /// # Cancel safety
    /// Nothing is lost; call it again. Not after it has answered.
    pub(crate) async fn prefilled(&mut self) -> Prefilled {
        let answer = self.answer.get_mut().unwrap_or_else(PoisonError::into_inner);
        match answer.as_mut().await {
            Ok(Answered::Whole(whole)) => {
                let prefilled = understand(&whole, self.engine().hosts());
                if let Prefilled::Refused(refusal) = &prefilled {
                    note_lack(self.engine(), refusal);
                }
                prefilled
            }
            Ok(Answered::Event(event, reply)) => match understand(&event, self.engine().hosts()) {
                Prefilled::Lent(params, handle, _) => Prefilled::Lent(params, handle, Some(Rest(reply))),
                // Only a handoff comes first.
                Prefilled::Empty => {
                    Prefilled::Failed(Failure::Unusable(None), Refusal::broken(), Blame::Engine)
                }
                other => other,
            },
            Err(CallError::NotReached | CallError::NoSocket(_)) => {
                Prefilled::Failed(Failure::NotReached, Refusal::unreachable(), Blame::Nobody)
            }
            Err(error @ CallError::Broken(_)) => {
                tracing::debug!(engine = self.engine().authority(), %error, "prefill failed");
                Prefilled::Failed(Failure::Unknown, Refusal::broken(), Blame::Engine)
            }
            Err(CallError::Unreadable(why)) => {
                let (refusal, blame) = unreadable(self.engine(), why);
                Prefilled::Failed(Failure::Unusable(None), refusal, blame)
            }
            Err(CallError::Spent) => {
                Prefilled::Failed(Failure::Unusable(None), Refusal::spent(), Blame::Nobody)
            }
            Err(error @ CallError::TooLarge(_)) => {
                tracing::debug!(engine = self.engine().authority(), %error, "prefill failed");
                Prefilled::Failed(Failure::Unusable(None), Refusal::broken(), Blame::Engine)
            }
        }
    }

    /// Which of the exchange's attempts it is.
    pub(crate) fn attempt(&self) -> Attempt {
        self.attempt
    }
}

impl Prefilled {
    /// What it means to the exchange.
    pub(crate) fn event(&self, attempt: Attempt) -> Event {
        match self {
            Self::Lent(_, handle, _) => Event::PrefillLent(attempt, *handle),
            Self::Empty => Event::PrefillEmpty(attempt),
            Self::Refused(_) => Event::PrefillRefused(attempt),
            Self::Failed(failure, ..) => Event::PrefillFailed(attempt, *failure),
        }
    }
}

/// The first event of a stream that is an engine's answer to a prefill.
async fn first_event(mut reply: Reply) -> Result<Answered, CallError> {
    let (mut held, mut first) = (BytesMut::new(), sse::FirstEvent::default());
    let mut share = ReadShare::default();
    let end = loop {
        let chunk = reply.chunk().await.unwrap_or(Err(CallError::Broken(Lost::Unanswered)))?;
        held.extend_from_slice(&chunk);
        if let Some(end) = first.end(&held) {
            break end;
        }
        share.grow_to(held.capacity())?;
        if held.len() > REPLY_BYTES_MAX {
            return Err(CallError::TooLarge(REPLY_BYTES_MAX));
        }
    };
    let event = held.split_to(end).freeze();
    if !held.is_empty() {
        reply.put_back(held.freeze());
    }
    if let Some(told) = sse::first_error(&event) {
        return Ok(Answered::Whole(reply.told(told.status, told.error)));
    }
    let status = reply.status();
    let event = reply.told(status, sse::data_of(&event).unwrap_or_default());
    Ok(Answered::Event(event, Box::new(reply)))
}

/// `hosts` are those of all engines.
fn understand(whole: &Whole, hosts: &Hosts) -> Prefilled {
    if !whole.status.is_success() {
        let verdict = Verdict::of(whole, hosts);
        let (failure, refusal) = (verdict.failure(), verdict.refusal.of_prefill());
        return match failure {
            Some(failure) => Prefilled::Failed(failure, refusal, verdict.blame),
            None => Prefilled::Refused(refusal),
        };
    }
    // Only the handoff is kept: the reply's one token is computed again, by the engine that goes on from it.
    let limits = ParseLimits { body_bytes: REPLY_BYTES_MAX, ..ParseLimits::default() };
    let Ok(reply) = RawBody::any(whole.body.clone(), &limits, &()) else {
        let handle = salvage_member(&whole.body, HANDOFF).as_ref().and_then(handle);
        return Prefilled::Failed(Failure::Unusable(handle), Refusal::broken(), Blame::Engine);
    };
    let params = reply.field(HANDOFF).map(|params| std::str::from_utf8(params).expect("JSON text is UTF-8"));
    let Some(params) = params.filter(|params| *params != "null") else {
        return match ErrorInside::of(whole.body.clone(), &Skim::of(&whole.body)) {
            Some(ErrorInside { status, error }) => {
                understand(&Whole { status, body: error, retry_after: None, own_key: whole.own_key }, hosts)
            }
            None => Prefilled::Empty,
        };
    };
    match ReplyFacts::check(params) {
        // A copy: a slice would keep the whole reply for as long as the answer lasts.
        Ok(facts) => Prefilled::Lent(params.into(), facts.handle, None),
        Err(error) => {
            tracing::debug!(%error, "prefill engine's response not usable");
            let handle = serde_json::from_str(params).ok().as_ref().and_then(handle);
            Prefilled::Failed(Failure::Unusable(handle), Refusal::broken(), Blame::Engine)
        }
    }
}

/// The handoff of a reply, where it has a complete one.
pub(crate) fn lent(status: StatusCode, body: Bytes) -> Option<Arc<str>> {
    let whole = Whole { status, retry_after: None, body, own_key: false };
    match understand(&whole, &Hosts::default()) {
        Prefilled::Lent(params, ..) => Some(params),
        Prefilled::Empty | Prefilled::Refused(_) | Prefilled::Failed(..) => None,
    }
}

/// What to release of a reply that cannot be handed on.
fn handle(params: &Value) -> Option<Handle> {
    params.get("remote_handle").and_then(Value::as_str).and_then(|text| text.parse().ok())
}

#[cfg(test)]
mod tests;
