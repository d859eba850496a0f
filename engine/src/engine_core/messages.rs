//! Messages between an engine core and its front ends.

use std::sync::Arc;
use std::time::Instant;

use baton_connector::fetch::FailureKind;
use baton_connector::{EngineId, Handoff};
use tokio::sync::mpsc::Sender;

use crate::engine_core::fetch_target::FetchTarget;
use crate::grammar::TokenGate;
use crate::sampling::{SampledLogprobs, SampledToken, SamplingParams};
use crate::scheduler::Refusal;
use crate::scheduler::sequence::{FinishReason, NewSequence};

/// The submission of one sequence: its prompt, its sampling parameters, and the receiver of its events.
#[derive(Debug)]
pub struct Submission {
    /// The scheduler's part.
    pub sequence: NewSequence,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// The tokens that its request permits, before the first one.
    pub grammar: Option<TokenGate>,
    /// Which choice of its request it is.
    pub index: u32,
    /// The request's tag in the event log.
    pub tag: Option<Arc<str>>,
    /// Receives every event of the sequence. It has capacity for all of them (`max_new + 3`).
    pub outbox: Sender<(u32, SeqEvent)>,
    /// The handoff that contains its blocks.
    pub target: Option<FetchTarget>,
    /// When the request arrived.
    pub arrived: Instant,
    /// Until when its client waits.
    pub deadlines: Deadlines,
}

/// Until when a client waits for a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadlines {
    /// For its first token.
    pub first_token: Option<Instant>,
    /// For all of it.
    pub whole: Option<Instant>,
}

/// What was not there at a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeadlineKind {
    /// The first token.
    FirstToken,
    /// The whole response.
    Whole,
}

impl Deadlines {
    /// Each deadline with its kind.
    pub(crate) fn each(self) -> impl Iterator<Item = (Instant, DeadlineKind)> {
        let first = self.first_token.map(|at| (at, DeadlineKind::FirstToken));
        first.into_iter().chain(self.whole.map(|at| (at, DeadlineKind::Whole)))
    }
}

/// An event of a sequence, for its front end.
#[derive(Debug)]
pub enum SeqEvent {
    /// Before the first token: how many of the prompt's tokens were not computed for this request. They come from
    /// this engine's prefix cache, or from the producer's if the prompt came from there. Fetched tokens alone do not
    /// count.
    Started {
        /// That many.
        cached: usize,
        /// The log-probabilities of the prompt's tokens but the first, if the sequence wants them.
        prompt_logprobs: Vec<SampledLogprobs>,
    },
    /// The prompt is being computed, and its blocks can be read as they become final. Sent at most once, before all
    /// other events.
    EarlyHandoff(Box<Handoff>),
    /// One more token, and what it has decided about drafts.
    Token(SampledToken, DraftOutcome),
    /// The end.
    Finished(Box<SeqEnd>),
    /// The end: it was not accepted.
    Refused(Refusal),
    /// The end: its blocks could not be fetched, and the policy is to fail.
    LoadFailed(FailureKind),
    /// The end: no token is left that its constraint permits. Another engine would end it at the same token.
    DeadEnd(&'static str),
    /// The end: its deadline passed.
    TimedOut(DeadlineKind),
    /// The end: the engine is shutting down or its device failed.
    Unavailable(&'static str),
}

/// What a chosen token has decided about the drafts of its step. Drafts that a later step computes again have no
/// outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftOutcome {
    /// Whether the token is an accepted draft.
    pub accepted: bool,
    /// Drafts that it rejects: the one in its place, and those behind that.
    pub rejected: usize,
}

impl DraftOutcome {
    /// Of a token that was chosen where the step has these drafts for it and the tokens behind it.
    pub(super) fn of(drafts: &[u32], chosen: u32) -> Self {
        match drafts.first() {
            Some(draft) if *draft == chosen => Self { accepted: true, rejected: 0 },
            _ => Self { accepted: false, rejected: drafts.len() },
        }
    }
}

/// How a sequence ended.
#[derive(Debug)]
pub struct SeqEnd {
    /// Why.
    pub reason: FinishReason,
    /// For a producer that has not sent an early handoff: the handoff. Its handle releases the lease.
    pub handoff: Option<Box<Handoff>>,
    /// For a sequence whose hidden states are pooled: its embedding, of unit length.
    pub embedding: Option<Vec<f32>>,
}

/// What identifies a producer in its handoffs.
#[derive(Clone, Debug)]
pub struct ProducerAddress {
    /// The engine's id.
    pub engine_id: EngineId,
    /// Host of the side channel, as peers reach it.
    pub host: String,
    /// The port of each rank of the KV cache.
    pub ports: Vec<u16>,
    /// Tokens of a block.
    pub block_tokens: usize,
}
