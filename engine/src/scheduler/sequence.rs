//! One sequence: the tokens of one choice of a request, its blocks, and its progress.

use baton_connector::fetch::{Fetch, LoadFailurePolicy};
use baton_connector::multi::{Children, MultiConnectorRequest};
use baton_connector::{BlockId, RequestId};

use crate::blocks::hash::{self, BlockHash};

/// A sequence's name inside one engine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

/// The purpose of a sequence.
#[derive(Debug)]
pub enum Purpose {
    /// Prefill and decode here.
    Plain,
    /// Prefill here, then lease the blocks to a decode engine.
    Produce {
        /// Number of consumers.
        consumers: u16,
        /// Whether to lease to a single consumer while the prompt is still computed, if that takes more than one
        /// step.
        early: bool,
    },
    /// Fetch the prompt's blocks from a prefill engine, then decode here.
    Consume(Fetch),
}

/// When generation stops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopRule {
    /// At most this many new tokens; at least 1.
    pub max_new: usize,
    /// Tokens that end the text: the model's end-of-sequence tokens (unless ignored) and the request's own.
    pub stop_ids: Vec<u32>,
    /// None of them counts before this many new tokens.
    pub min_new: usize,
}

impl StopRule {
    /// Whether `token`, the last of `generated` new ones, ends the text.
    #[must_use]
    pub fn stops_at(&self, token: u32, generated: usize) -> bool {
        generated >= self.min_new.max(1) && self.stop_ids.contains(&token)
    }
}

/// The part of a client's request that scheduling needs.
#[derive(Debug)]
pub struct NewSequence {
    /// Its name.
    pub id: SeqId,
    /// The request it belongs to.
    pub request: RequestId,
    /// The prompt; at least one token.
    pub prompt: Vec<u32>,
    /// When to stop.
    pub stop: StopRule,
    /// What it is for.
    pub purpose: Purpose,
    /// Starts only when that sequence has computed its prompt, to share its blocks (`n > 1`).
    pub follows: Option<SeqId>,
    /// Not the first of its request. A sequence that is not the first enters even a full queue, so that a request is
    /// accepted whole or not at all.
    pub admitted_with_first: bool,
    /// Separates this tenant's prefix cache from all others.
    pub cache_salt: Option<Box<str>>,
}

/// The phase of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Holds no blocks.
    Waiting,
    /// A transfer writes its blocks; holds all its prompt's blocks.
    Fetching,
    /// Some of its blocks are being loaded from a tier; holds all its blocks.
    Loading,
    /// Takes part in steps.
    Running,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop token, or a stop string that the front end found.
    Stop,
    /// `max_tokens`, or the context is full.
    Length,
    /// The client left, or an abort named the request.
    Abort,
    /// The engine could not continue it.
    Error,
}

impl FinishReason {
    /// The word in responses and metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// The progress of a sequence's load from the tiers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TierLoadProgress {
    /// Index of the first of its blocks that is loaded.
    pub(crate) first: usize,
    /// Blocks whose load has not ended.
    pub(crate) left: usize,
    /// The first block that could not be loaded, or the one after the last.
    pub(crate) loaded_until: usize,
}

/// A sequence of an engine's scheduler.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) id: SeqId,
    /// The prompt, then the generated tokens.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// Tokens whose KV is in `blocks`.
    pub(crate) computed: usize,
    /// Prompt tokens that came from the prefix cache or from a tier, at the first admission.
    pub(crate) cached: usize,
    /// Prompt tokens that came from a prefill engine.
    pub(crate) fetched: usize,
    pub(crate) blocks: Vec<BlockId>,
    /// Of `blocks`, how many leading ones were found in the cache (the rest are landing while fetching).
    pub(crate) shared: usize,
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) registered: usize,
    pub(crate) phase: Phase,
    pub(crate) load: Option<TierLoadProgress>,
    /// The handoff and the offload connector, as one.
    pub(crate) connectors: MultiConnectorRequest,
    pub(crate) purpose: Purpose,
    pub(crate) stop: StopRule,
    pub(crate) follows: Option<SeqId>,
    pub(crate) salt: Option<Box<str>>,
    pub(crate) preemptions: u32,
    /// A growing lease was opened for it; that lease may have ended since.
    pub(crate) leased_early: bool,
}

impl Sequence {
    pub(crate) fn new(new: NewSequence) -> Self {
        let prompt_len = new.prompt.len();
        Self {
            id: new.id,
            tokens: new.prompt,
            prompt_len,
            computed: 0,
            cached: 0,
            fetched: 0,
            blocks: Vec::new(),
            shared: 0,
            hashes: Vec::new(),
            registered: 0,
            phase: Phase::Waiting,
            load: None,
            connectors: connectors_of(&new.purpose),
            purpose: new.purpose,
            stop: new.stop,
            follows: new.follows,
            salt: new.cache_salt,
            preemptions: 0,
            leased_early: false,
        }
    }

    /// Prompt and generated tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Length of the prompt.
    #[must_use]
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// New tokens so far.
    #[must_use]
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens of the prompt that were not computed for this request: cached here, and fetched.
    #[must_use]
    pub fn reused(&self) -> (usize, usize) {
        (self.cached, self.fetched)
    }

    /// Tokens whose KV is not in its blocks.
    pub(crate) fn uncomputed(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// The number of consumers of its blocks.
    #[must_use]
    pub fn consumers(&self) -> u16 {
        match self.purpose {
            Purpose::Produce { consumers, .. } => consumers,
            Purpose::Plain | Purpose::Consume(_) => 0,
        }
    }

    /// Whether to lease its blocks before they are computed. Only possible if the sequence needs no block beyond its
    /// prompt's.
    pub(crate) fn wants_early_lease(&self) -> bool {
        let asked = matches!(self.purpose, Purpose::Produce { consumers: 1, early: true });
        asked && !self.leased_early && self.stop.max_new == 1
    }

    /// Whether its blocks are for a decode engine.
    #[must_use]
    pub fn is_producer(&self) -> bool {
        matches!(self.purpose, Purpose::Produce { .. })
    }

    /// The blocks that hold its KV, in order.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Hashes of all full blocks of its tokens so far.
    pub(crate) fn extend_hashes(&mut self, block_tokens: usize) {
        hash::extend(&mut self.hashes, &self.tokens, block_tokens, self.salt.as_deref());
    }

    /// Whether the token just appended ends the sequence.
    pub(crate) fn finish_reason(&self) -> Option<FinishReason> {
        let generated = self.generated();
        let last = self.tokens.last()?;
        if self.stop.stops_at(*last, generated) {
            return Some(FinishReason::Stop);
        }
        (generated >= self.stop.max_new).then_some(FinishReason::Length)
    }
}

/// The connectors of a new sequence.
pub(crate) fn connectors_of(purpose: &Purpose) -> MultiConnectorRequest {
    let policy = match purpose {
        Purpose::Consume(fetch) => fetch.policy(),
        Purpose::Plain | Purpose::Produce { .. } => LoadFailurePolicy::Recompute,
    };
    MultiConnectorRequest::new(Children::first(2), policy)
}
