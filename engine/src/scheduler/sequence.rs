//! One sequence: the tokens of one choice of a request, its blocks, and its progress.

use std::ops::Range;
use std::sync::Arc;

use baton_connector::fetch::{Fetch, LoadFailurePolicy};
use baton_connector::multi::{Children, MultiConnectorRequest};
use baton_connector::{BlockId, RequestId};
pub use baton_openai::FinishReason;

use crate::blocks::adapter::BlockAdapter;
use crate::blocks::hash::{self, BlockHash};
use crate::blocks::pool::BlockPool;

/// Limit of a salt's bytes in KV events. Blocks with a longer salt are cached, but not reported.
const REPORTED_SALT_MAX: usize = 1_024;

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
    /// Compute the prompt's hidden states, and no token.
    Pool(Pooling),
}

/// How hidden states of a prompt become an embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Those of the last token.
    Last,
    /// The mean over all tokens.
    Mean,
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
    /// The adapter that computes it; `None` for the model alone.
    pub adapter: Option<Arc<BlockAdapter>>,
    /// Number of alternatives with the log-probabilities of the prompt's tokens; `None` for none.
    pub prompt_logprobs: Option<u32>,
    /// Lower is served first (vLLM's `priority`), if the scheduler orders by priority.
    pub priority: i32,
}

/// The phase of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Holds no blocks.
    Waiting,
    /// A transfer writes its blocks; holds all its prompt's blocks.
    Fetching,
    /// Some of its blocks are being loaded from a tier; holds all its blocks.
    Loading(TierLoadProgress),
    /// Takes part in steps.
    Running,
}

/// The progress of a sequence's load from the tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TierLoadProgress {
    /// Index of the first of its blocks that is loaded.
    pub(crate) first: usize,
    /// Blocks whose load has not ended.
    pub(crate) left: usize,
    /// The first block that could not be loaded, or the one after the last.
    pub(crate) loaded_until: usize,
}

/// The blocks of a sequence, and which of them the prefix cache contains.
#[derive(Debug)]
pub(crate) struct SequenceBlocks {
    /// In the order of the tokens.
    pub(crate) table: Vec<BlockId>,
    /// Of `table`, how many leading ones were found in the cache (the rest are landing while fetching).
    pub(crate) shared: usize,
    /// Hashes of the full blocks.
    pub(crate) hashes: Vec<BlockHash>,
    /// Of `table`, how many leading ones have been found in the cache or entered into it.
    pub(crate) registered: usize,
    /// Of `table`, how many leading ones are no longer held, because no position sees them.
    passed: usize,
    salt: Option<Box<str>>,
    adapter: Option<Arc<BlockAdapter>>,
}

impl SequenceBlocks {
    fn new(salt: Option<Box<str>>, adapter: Option<Arc<BlockAdapter>>) -> Self {
        Self { table: Vec::new(), shared: 0, hashes: Vec::new(), registered: 0, passed: 0, salt, adapter }
    }

    /// The blocks that the sequence holds.
    pub(crate) fn held(&self) -> &[BlockId] {
        &self.table[self.passed..]
    }

    /// Removes all blocks from the table.
    pub(crate) fn clear(&mut self) {
        self.table.clear();
        self.passed = 0;
    }

    /// Gives up the blocks before `passed`, and returns those that were held. The block at `passed` takes their places
    /// in the table, so that no table names a block that another sequence may write.
    pub(crate) fn pass(&mut self, passed: usize) -> Vec<BlockId> {
        if passed <= self.passed {
            return Vec::new();
        }
        let given_up = self.table[self.passed..passed].to_vec();
        let next = self.table[passed];
        self.table[..passed].fill(next);
        self.passed = passed;
        given_up
    }

    /// Replaces the table by blocks of the prefix cache.
    pub(crate) fn begin_with(&mut self, prefix: Vec<BlockId>) {
        self.shared = prefix.len();
        self.registered = prefix.len();
        self.table = prefix;
    }

    /// Enters the blocks before `full` into the prefix cache. Their hashes are known.
    fn register(&mut self, pool: &mut BlockPool, full: usize, tokens: &[u32], block_tokens: usize) {
        let mut first = self.registered;
        for index in self.registered..full {
            if !pool.register(self.table[index], self.hashes[index]) {
                // Another block has this hash, and was recorded with it.
                self.record(pool, first..index, tokens, block_tokens);
                first = index + 1;
            }
        }
        self.record(pool, first..full, tokens, block_tokens);
        self.registered = full;
    }

    /// Records that these blocks entered the prefix cache, if the pool records its changes. A subscriber that does not
    /// know the block before them cannot use the event, so they are recorded again with it.
    fn record(&self, pool: &mut BlockPool, blocks: Range<usize>, tokens: &[u32], block_tokens: usize) {
        let salt = self.salt.as_deref();
        let parent = blocks.start.checked_sub(1).map(|before| self.hashes[before]);
        let follows_known = parent.is_none_or(|parent| pool.is_known(parent));
        let Some(events) = pool.events_mut() else { return };
        if salt.is_none_or(|salt| salt.len() <= REPORTED_SALT_MAX) {
            let tokens = &tokens[blocks.start * block_tokens..blocks.end * block_tokens];
            events.stored(&self.hashes[blocks.clone()], parent, tokens, salt, self.adapter.as_ref());
            if follows_known {
                pool.mark_announced(&self.table[blocks]);
            }
        }
    }
}

/// Tokens of a prompt that were not computed for its request, and those that must be.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PromptReuse {
    /// From the prefix cache or from a tier, before the first preemption.
    cached: usize,
    /// From a prefill engine.
    pub(crate) fetched: usize,
    preempted: bool,
    /// Positions that may not be skipped, because their logits are wanted.
    pub(crate) scoring: PromptScoring,
}

/// The positions of a prompt whose logits are wanted, for the log-probabilities of the tokens after them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PromptScoring {
    /// The first position whose logits are still missing.
    done: usize,
    /// The position after the last wanted one; 0 if none is wanted.
    end: usize,
    /// Hidden states are wanted, not logits.
    pools: bool,
}

impl PromptScoring {
    /// For the log-probabilities of all tokens of a prompt but the first.
    fn of(prompt_len: usize, prompt_logprobs: Option<u32>) -> Self {
        Self { done: 0, end: if prompt_logprobs.is_some() { prompt_len - 1 } else { 0 }, pools: false }
    }

    /// For the positions that a sequence with this purpose may not skip.
    fn for_purpose(self, purpose: &Purpose, prompt_len: usize) -> Self {
        match purpose {
            Purpose::Pool(Pooling::Mean) => Self { done: 0, end: prompt_len, pools: true },
            Purpose::Pool(Pooling::Last) | Purpose::Plain | Purpose::Produce { .. } | Purpose::Consume(_) => {
                self
            }
        }
    }

    /// Rows of logits of a chunk: all of its positions, if those of any are missing.
    pub(crate) fn rows(self, start: usize, count: usize) -> usize {
        if !self.pools && start < self.end && start + count > self.done { count } else { 0 }
    }

    /// Positions that may be taken from a cache: those before the first whose logits are missing.
    pub(crate) fn reusable(self) -> usize {
        if self.done < self.end { self.done } else { usize::MAX }
    }

    /// The logits of the positions before `computed` are known.
    fn advance(&mut self, computed: usize) {
        self.done = self.done.max(computed);
    }
}

impl PromptReuse {
    /// Records tokens from the prefix cache or from a tier. After a preemption they may be the sequence's own.
    pub(crate) fn set_cached(&mut self, tokens: usize) {
        if !self.preempted {
            self.cached = tokens;
        }
    }

    /// The sequence was preempted: `cached` is final.
    pub(crate) fn mark_preempted(&mut self) {
        self.preempted = true;
    }
}

/// What decides when a sequence is admitted, and what it has lost by preemptions.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SequenceTurn {
    /// Starts only when that sequence has computed its prompt.
    pub(crate) follows: Option<SeqId>,
    /// Lower is served first.
    pub(crate) priority: i32,
    /// Handoffs of the same priority that came later and go before it.
    pub(crate) passed: u8,
    /// Preemptions for a more urgent sequence.
    pub(crate) yielded: u8,
    /// Tokens whose KV the last preemption took.
    pub(crate) lost: usize,
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
    pub(crate) reuse: PromptReuse,
    pub(crate) blocks: SequenceBlocks,
    pub(crate) phase: Phase,
    /// The handoff and the offload connector, as one.
    pub(crate) connectors: MultiConnectorRequest,
    pub(crate) purpose: Purpose,
    pub(crate) stop: StopRule,
    pub(crate) turn: SequenceTurn,
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
            reuse: PromptReuse {
                scoring: PromptScoring::of(prompt_len, new.prompt_logprobs)
                    .for_purpose(&new.purpose, prompt_len),
                ..PromptReuse::default()
            },
            blocks: SequenceBlocks::new(new.cache_salt, new.adapter),
            phase: Phase::Waiting,
            connectors: connectors_of(&new.purpose),
            purpose: new.purpose,
            stop: new.stop,
            turn: SequenceTurn { follows: new.follows, priority: new.priority, ..SequenceTurn::default() },
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
        (self.reuse.cached, self.reuse.fetched)
    }

    /// Whether the logits of all positions of a chunk are wanted, for the log-probabilities of the prompt.
    #[must_use]
    pub fn scores_prompt(&self, start: usize, count: usize) -> bool {
        self.reuse.scoring.rows(start, count) > 0
    }

    /// Whether the hidden states of a chunk are wanted. `is_last`: the chunk ends the prompt.
    #[must_use]
    pub fn pools(&self, is_last: bool) -> bool {
        match self.purpose {
            Purpose::Pool(Pooling::Mean) => true,
            Purpose::Pool(Pooling::Last) => is_last,
            Purpose::Plain | Purpose::Produce { .. } | Purpose::Consume(_) => false,
        }
    }

    /// The KV of its first `computed` tokens is in its blocks, and the logits were available.
    pub(crate) fn advance(&mut self, computed: usize) {
        self.computed = computed;
        self.reuse.scoring.advance(computed);
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
            Purpose::Plain | Purpose::Consume(_) | Purpose::Pool(_) => 0,
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

    /// The blocks that hold its KV, in order. The first entries may all be one of its later blocks, if no position of the
    /// sequence sees their keys.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks.table
    }

    /// Number of blocks that it holds.
    #[must_use]
    pub fn held_blocks(&self) -> usize {
        self.blocks.held().len()
    }

    /// The adapter that computes it; `None` for the model alone.
    #[must_use]
    pub fn adapter(&self) -> Option<&BlockAdapter> {
        self.blocks.adapter.as_deref()
    }

    /// Hashes of all full blocks of its tokens so far.
    pub(crate) fn extend_hashes(&mut self, block_tokens: usize) {
        let SequenceBlocks { hashes, salt, adapter, .. } = &mut self.blocks;
        let adapter = adapter.as_ref().map(|adapter| &adapter.digest);
        hash::extend_with(hashes, &self.tokens, block_tokens, salt.as_deref(), adapter);
    }

    /// Enters the full blocks among the computed ones into the prefix cache.
    pub(crate) fn register(&mut self, pool: &mut BlockPool, block_tokens: usize) {
        let full = self.computed / block_tokens;
        if full > self.blocks.registered {
            self.extend_hashes(block_tokens);
            self.blocks.register(pool, full, &self.tokens, block_tokens);
        }
    }

    /// Records blocks that were found in the prefix cache again, from the first on that some subscriber may not know.
    /// Returns their hashes.
    pub(crate) fn record_found(&self, pool: &mut BlockPool, block_tokens: usize) -> Vec<BlockHash> {
        let found = &self.blocks.table[..self.blocks.shared];
        let Some(first) = found.iter().position(|block| !pool.is_announced(*block)) else {
            return Vec::new();
        };
        self.blocks.record(pool, first..found.len(), &self.tokens, block_tokens);
        self.blocks.hashes[first..found.len()].to_vec()
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
        Purpose::Plain | Purpose::Produce { .. } | Purpose::Pool(_) => LoadFailurePolicy::Recompute,
    };
    MultiConnectorRequest::new(Children::first(2), policy)
}
