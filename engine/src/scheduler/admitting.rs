//! Admission: which waiting sequences get blocks, and in what order.
//!
//! The queue is served in order. A prompt needs a part of the step's budget; a fetch or a load needs none, and
//! passes prompts that wait for budget. Thus a long prefill delays neither a handoff's lease nor a tier's blocks. A
//! fetch passes any number of prompts, and begins in the step after its submission if a place and blocks are free. A
//! loaded sequence still has tokens to compute. Loads that pass one prompt have together at most one step's tokens,
//! so the prompt is not starved.
//!
//! Admission leaves blocks to running sequences: one each, up to a share of the pool, and with a growth reserve as
//! many as they are predicted to need soon (`growth.rs`). Where none is left, a sequence waits, and so do those behind
//! it.

use baton_connector::BlockId;

use super::drafting::Drafting;
use super::offloading::{HANDOFF, OFFLOAD};
use super::order::{AdmissionDemand, QueueBypass};
use super::prompts::short_tokens;
use super::step_budget::StepBudget;
use super::{Scheduler, StepPart};
use crate::blocks::pool::Hold;
use crate::scheduler::sequence::{Phase, Purpose, SeqId};

/// Limit of the waiting prompts that loads pass in one step, and for which fetches leave places and blocks: a look at
/// one may cost a look at its whole prefix.
const BYPASS_MAX: usize = 16;

/// Admission leaves one of so many blocks of the pool to running sequences, as vLLM's watermark does.
const RESERVE_SHARE: usize = 100;

/// The sequences that have been admitted and have not ended.
#[derive(Debug, Default)]
pub(super) struct AdmittedSequences {
    /// Those that take part in steps: by priority, if the scheduler orders by it, then in the order in which they began.
    pub(super) running: Vec<SeqId>,
    /// How many wait for a transfer.
    pub(super) fetching: usize,
    /// How many wait for blocks from a tier.
    pub(super) loading: usize,
    /// The drafts of those that decode. A waiting sequence keeps its own.
    pub(super) drafting: Drafting,
}

impl AdmittedSequences {
    pub(super) fn count(&self) -> usize {
        self.running.len() + self.fetching + self.loading
    }
}

/// The limits of one admission.
struct AdmissionLimits {
    /// Tokens that this step can still compute.
    budget: usize,
    /// A load that passes others, or long prompts that run, leaves at most so many tokens to compute.
    bypass_tokens: usize,
    /// Blocks that belong to others.
    reserved_blocks: usize,
}

/// The result of an attempt to admit a sequence.
pub(super) enum Admission {
    /// Runs; a part of its tokens is computed in this step.
    Run,
    /// Waits for a transfer. After a load so many tokens are left to compute.
    Fetch(usize),
    /// Waits for the sequence that it follows.
    Gated,
    /// Waits for budget: the step is full. It will need at most so many blocks.
    NoBudget(usize),
    /// Waits for blocks.
    NoBlocks {
        /// The pool would have enough if no block were held for a store.
        but_for_stores: bool,
    },
}

impl Scheduler {
    /// Admits sequences from the queue. Returns whether stores were cancelled for its head.
    ///
    /// A sequence that waits for budget keeps its turn: sequences that pass it leave a place and enough blocks for
    /// it.
    pub(super) fn admit_waiting(&mut self, planned: &mut Vec<StepPart>, budget: &mut StepBudget) -> bool {
        let (mut at, mut passed, mut reserved) = (0, 0, 0);
        let mut head = None;
        while at < self.waiting.len() && self.admitted.count() + passed < self.config.max_num_seqs {
            let id = self.waiting[at];
            if passed == BYPASS_MAX && !matches!(self.sequences[&id].purpose, Purpose::Consume(_)) {
                at += 1;
                continue;
            }
            let passing_tokens = match head {
                None => usize::MAX,
                Some(_) => self.config.max_num_batched_tokens.saturating_sub(self.admission.bypass.tokens),
            };
            let found = budget.most(0);
            // Where a long prompt waits for others, one that is short after its load may begin.
            let (tokens, load_tokens) =
                if self.may_begin(id, budget) { (found, usize::MAX) } else { (0, short_tokens(found)) };
            let bypass_tokens = passing_tokens.min(load_tokens);
            let limits = AdmissionLimits { budget: tokens, bypass_tokens, reserved_blocks: reserved };
            match self.admit(id, &limits) {
                Admission::Run => {
                    self.waiting.remove(at);
                    self.admitted.running.push(id);
                    let behind = at < self.waiting.len();
                    self.schedule_chunk(id, behind, planned, budget);
                }
                Admission::Fetch(left) => {
                    self.waiting.remove(at);
                    self.admission.bypass.tokens += head.map_or(0, |_| left);
                }
                Admission::Gated => at += 1,
                Admission::NoBudget(blocks) => {
                    if head.is_none() && self.admission.bypass.head != Some(id) {
                        self.admission.bypass = QueueBypass { head: Some(id), tokens: 0 };
                    }
                    head = head.or(Some(id));
                    passed += 1;
                    reserved += blocks;
                    at += 1;
                }
                // Stores are cancelled only for a sequence that this would admit.
                Admission::NoBlocks { but_for_stores } => return but_for_stores && self.cancel_stores(),
            }
        }
        false
    }

    /// Blocks that admission leaves to running sequences, at most one each. Without them, the next sequence that
    /// fills a block would preempt the newly admitted one.
    pub(super) fn reserved_blocks(&self) -> usize {
        self.admitted.count().min(self.pool.usage().total.div_ceil(RESERVE_SHARE))
    }

    /// Whether a sequence waits for the prompt of the one that it follows.
    pub(super) fn is_gated(&self, id: SeqId) -> bool {
        let leader = self.sequences[&id].turn.follows.and_then(|leader| self.sequences.get(&leader));
        leader.is_some_and(|leader| leader.computed < leader.prompt_len)
    }

    /// The cached blocks that a waiting sequence begins with, and the number of the following ones in the tiers.
    pub(super) fn find_prefix(&mut self, id: SeqId) -> (Vec<BlockId>, usize) {
        let block_tokens = self.config.block_tokens;
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence is known");
        sequence.extend_hashes(block_tokens);
        // At least one token is computed, so that there are logits to sample from. If the prompt is leased, that
        // token belongs to the prompt: no other sequence has the last block of a lease.
        let computed_here = if sequence.is_producer() { sequence.prompt_len } else { sequence.tokens.len() };
        // Positions whose logits are wanted are computed too.
        let matchable = (computed_here - 1).min(sequence.reuse.scoring.reusable()) / block_tokens;
        let chain = &sequence.blocks.hashes[..matchable.min(sequence.blocks.hashes.len())];
        let prefix = self.pool.match_prefix(chain);
        let in_tiers = self.offload.as_ref().map_or(0, |offload| offload.prefix_len(&chain[prefix.len()..]));
        (prefix, in_tiers)
    }

    /// Allocates blocks for all tokens of a waiting sequence, so that no prompt stops half-way.
    fn admit(&mut self, id: SeqId, limits: &AdmissionLimits) -> Admission {
        let AdmissionLimits { budget, bypass_tokens, reserved_blocks } = *limits;
        let block_tokens = self.config.block_tokens;
        if self.is_gated(id) {
            return Admission::Gated;
        }
        let sequence = &self.sequences[&id];
        let (tokens, fetches) = (sequence.tokens.len(), matches!(sequence.purpose, Purpose::Consume(_)));
        let most = tokens.div_ceil(block_tokens);
        if budget == 0 && !fetches && self.offload.is_none() {
            return Admission::NoBudget(most);
        }
        let (prefix, in_tiers) = self.find_prefix(id);
        let found = (prefix.len() + in_tiers) * block_tokens;
        if budget == 0 && !fetches && (in_tiers == 0 || tokens - found > bypass_tokens) {
            return Admission::NoBudget(most);
        }
        let fresh = most - prefix.len();
        let taken = fresh + self.pool.count_idle(&prefix) + reserved_blocks;
        let (wanted, available) = (taken + self.reserved_blocks(), self.pool.available());
        if wanted > available {
            // Blocks of its own prefix that are held only for a store would then be idle, and taken.
            let wanted = wanted + self.pool.count_only_storing(&prefix);
            let but_for_stores = wanted <= available + self.pool.usage().storing;
            return Admission::NoBlocks { but_for_stores };
        }
        if !self.leaves_growth(&AdmissionDemand { id, most, fresh }, available - taken) {
            return Admission::NoBlocks { but_for_stores: false };
        }
        let cached = prefix.len() * block_tokens;
        self.count_recomputed(id, found);
        self.pool.share(&prefix);
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence is known");
        sequence.blocks.begin_with(prefix);
        let recorded = sequence.record_found(&mut self.pool, block_tokens);
        sequence.reuse.set_cached(cached.min(sequence.prompt_len));
        self.announce_copies_of(&recorded);
        match self.choose_connector(id, in_tiers) {
            Some(HANDOFF) => return self.begin_fetch(id, fresh),
            Some(OFFLOAD) => return self.begin_load(id, in_tiers, fresh),
            Some(_) | None => {}
        }
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence is known");
        let taken = self.pool.allocate(fresh, Hold::Active).expect("room was checked");
        sequence.blocks.table.extend(taken);
        sequence.computed = cached;
        sequence.phase = Phase::Running;
        Admission::Run
    }
}
