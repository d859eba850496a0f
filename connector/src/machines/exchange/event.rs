//! The vocabulary of an exchange: its events, phases, outcomes and causes.

use super::Attempt;
use crate::Handle;

/// What can happen to an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The router does not admit the request: its queue is full, or the wait too long.
    NotAdmitted,
    /// A leg of the request has no usable engine, and waiting would not help.
    NoEngine,
    /// The prefill is sent to an engine.
    PrefillSent(Attempt),
    /// The prefill engine opened a lease.
    PrefillLeased(Attempt, Option<Handle>),
    /// The prefill engine replied and holds nothing. If its leg was sent before the decode leg, the decode engine
    /// computes everything.
    PrefillEmpty(Attempt),
    /// The prefill engine refused the request because of its content.
    PrefillRefused(Attempt),
    /// The prefill attempt failed.
    PrefillFailed(Attempt, Failure),
    /// No prefill is sent, or no further one.
    PrefillSkipped,
    /// The request is sent to a decode engine. While a prefill engine works, both legs are sent at once.
    DecodeSent(Attempt),
    /// The decode engine accepted the request: the head of a successful response is here.
    DecodeAccepted(Attempt),
    /// The decode engine refused the request because of its content.
    DecodeRefused(Attempt),
    /// The prefill that opened the current lease before its end has ended normally.
    PrefillEnded(Attempt),
    /// The decode attempt failed before the first byte of the response.
    DecodeFailed(Attempt, Failure),
    /// The decode engine has cached too little of the prompt and computes nothing. A prefill follows.
    DecodeDeclined(Attempt),
    /// The first byte of the response.
    FirstChunk(Attempt),
    /// The response is complete.
    StreamEnded(Attempt),
    /// The decode engine died, or fell silent, in the middle of the response.
    StreamBroken(Attempt),
    /// As `StreamBroken`, but another decode engine continues. It recomputes everything it needs.
    StreamCut(Attempt),
    /// No decode engine can use the handoff: the lease is released, and the prompt is recomputed.
    HandoffUnusable,
    /// No engine is left to try, or the retry budget is spent.
    Exhausted,
    /// As `Exhausted`, with the cause that the release carries.
    ExhaustedFor(SettlementCause),
    /// The client closed its connection.
    ClientGone,
    /// The router's context of this request was dropped.
    Dropped,
}

crate::labelled! {
    /// Why a lease is released: the `reason` of `POST /kv/release`, and a metric label.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum SettlementCause {
        /// The client disconnected.
        ClientGone => "client_gone",
        /// A decode engine refused the request because of its content.
        DecodeRefused => "decode_refused",
        /// No decode engine could be reached.
        DecodeUnreachable => "decode_unreachable",
        /// Every decode attempt failed, and no decode engine is left.
        DecodeFailed => "decode_failed",
        /// The remaining decode engines had no capacity for as long as the request could wait.
        DecodeBusy => "decode_busy",
        /// The deadline of the request passed.
        OutOfTime => "out_of_time",
        /// The decode engine failed in the middle of the response.
        DecodeBroken => "decode_broken",
        /// The handoff could not be handed on.
        Unusable => "unusable_handoff",
        /// The reply arrived after the router had aborted the attempt.
        Late => "late_reply",
        /// The router dropped the request.
        RouterShutdown => "router_shutdown",
    }
}

crate::labelled! {
    /// The phase of a request, as metrics name it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Phase {
        /// Before the prefill is sent.
        Queue => "queue",
        /// While a prefill engine works.
        Prefill => "prefill",
        /// Between the prefill engine's reply and the decode request.
        Gap => "gap",
        /// While a decode engine works, before the first byte of the response.
        DecodePreFirst => "decode_pre_first",
        /// While the response is forwarded.
        DecodeStream => "decode_stream",
    }
}

/// How an exchange ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The complete response was forwarded.
    Completed,
    /// A prefill engine refused the request because of its content; any other engine would too.
    PrefillRefused,
    /// The router did not admit the request: its queue was full, or the wait too long.
    NotAdmitted,
    /// A leg had no usable engine: none is known, or all are drained or ejected.
    NoEngine,
    /// Every prefill attempt failed, and recomputing on the decode engine is not configured.
    PrefillExhausted,
    /// A decode engine refused the request because of its content; any other engine would too.
    DecodeRefused,
    /// No decode engine accepted the request.
    DecodeExhausted,
    /// The decode engine failed in the middle of the response.
    StreamBroken,
    /// The client disconnected.
    ClientGone(Phase),
    /// The router dropped the request: shutdown, or a defect of the router.
    Dropped(Phase),
}

/// How a leg failed, and therefore what the engine may still be doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The engine never received the request.
    NotReached,
    /// The engine responded with an error. It keeps nothing.
    Answered,
    /// Silence or a broken connection. The engine may still be working.
    Unknown,
    /// A prefill reply without a usable handoff, with its handle if that could be read.
    Unusable(Option<Handle>),
}

impl Outcome {
    /// The metric label, without the phase.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::NotAdmitted => "not_admitted",
            Self::NoEngine => "no_engine",
            Self::PrefillRefused => "prefill_refused",
            Self::PrefillExhausted => "prefill_exhausted",
            Self::DecodeRefused => "decode_refused",
            Self::DecodeExhausted => "decode_exhausted",
            Self::StreamBroken => "stream_broken",
            Self::ClientGone(_) => "client_gone",
            Self::Dropped(_) => "dropped",
        }
    }
}
