//! Admission: which waiting sequences get blocks, and in what order.
//!
//! The queue is served in order. A prompt needs budget of the step; a fetch or a load needs none, and passes prompts that
//! wait for it, so that a long prefill holds neither a handoff's lease nor a tier's blocks. What loads has a rest to compute:
//! those that pass one prompt have together no more than a step computes, and the prompt's turn comes.

use super::offloading::{HANDOFF, OFFLOAD};
use super::{Planned, Scheduler};
use crate::blocks::pool::Hold;
use crate::scheduler::sequence::{Phase, Purpose, SeqId};

/// Sequences that wait for budget and are passed by fetches and loads, in one step: a look at each may cost a look at its
/// whole prefix.
const PASSED_MAX: usize = 16;

/// Admission leaves at most one block in so many of the pool to those that run, as vLLM's watermark does.
const RESERVE_SHARE: usize = 100;

/// What has passed the first sequence that waits for budget.
#[derive(Debug, Default)]
pub(super) struct Passed {
    head: Option<SeqId>,
    /// Left to compute once they are loaded.
    tokens: usize,
}

/// What became of a sequence whose turn it was.
pub(super) enum Admission {
    /// It runs; so many of its tokens are computed in this step.
    Run(usize),
    /// It waits for a transfer; of a load, so many tokens are left to compute then.
    Fetch(usize),
    /// It waits for the sequence that it follows.
    Gated,
    /// It is to be computed, and the step is full. It will take at most so many blocks.
    NoBudget(usize),
    /// It waits for blocks.
    NoRoom {
        /// There would be room if no block were held for a store.
        but_for_stores: bool,
    },
}

impl Scheduler {
    /// Admits from the queue; says whether stores were given up for its head.
    ///
    /// A sequence that waits for budget keeps its turn: those that pass it leave it a place and its blocks.
    pub(super) fn admit_waiting(&mut self, planned: &mut Vec<Planned>, budget: &mut usize) -> bool {
        let (mut at, mut passed, mut kept) = (0, 0, 0);
        let mut head = None;
        while at < self.waiting.len()
            && passed < PASSED_MAX
            && self.running.len() + self.fetching + self.loading + passed < self.config.max_num_seqs
        {
            let id = self.waiting[at];
            let may_pass = match head {
                None => usize::MAX,
                Some(_) => self.config.max_num_batched_tokens.saturating_sub(self.passed.tokens),
            };
            match self.admit(id, (*budget, may_pass), kept) {
                Admission::Run(count) => {
                    self.waiting.remove(at);
                    self.running.push(id);
                    if count > 0 {
                        planned.push(self.part(id, count));
                        *budget -= count;
                    }
                }
                Admission::Fetch(left) => {
                    self.waiting.remove(at);
                    self.passed.tokens += head.map_or(0, |_| left);
                }
                Admission::Gated => at += 1,
                Admission::NoBudget(blocks) => {
                    if head.is_none() && self.passed.head != Some(id) {
                        self.passed = Passed { head: Some(id), tokens: 0 };
                    }
                    head = head.or(Some(id));
                    passed += 1;
                    kept += blocks;
                    at += 1;
                }
                // Stores are given up only for a sequence that this would admit.
                Admission::NoRoom { but_for_stores } => return but_for_stores && self.yield_stores(),
            }
        }
        false
    }

    /// Blocks that admission leaves to those that run, up to one each: without any, the next one that fills a block would
    /// preempt what was admitted just before.
    fn reserve(&self) -> usize {
        let holders = self.running.len() + self.fetching + self.loading;
        holders.min(self.pool.usage().total.div_ceil(RESERVE_SHARE))
    }

    /// Finds blocks for a waiting sequence's tokens: all of them, so that no prompt is stuck half-way.
    /// `kept` blocks are others'; a load that passes others leaves at most `may_pass` tokens to compute.
    fn admit(&mut self, id: SeqId, (budget, may_pass): (usize, usize), kept: usize) -> Admission {
        let block_tokens = self.config.block_tokens;
        let kept = kept + self.reserve();
        let gate = self.sequences[&id].follows.and_then(|leader| self.sequences.get(&leader));
        if gate.is_some_and(|leader| leader.computed < leader.prompt_len) {
            return Admission::Gated;
        }
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence is known");
        let fetches = matches!(sequence.purpose, Purpose::Consume(_));
        let most = sequence.tokens.len().div_ceil(block_tokens);
        if budget == 0 && !fetches && self.offload.is_none() {
            return Admission::NoBudget(most);
        }
        sequence.extend_hashes(block_tokens);
        // At least one token is computed, so that there are logits to sample from. Of a prompt that is lent it is one of
        // the prompt's: no other sequence has the last block of a lease.
        let computed_here = if sequence.is_producer() { sequence.prompt_len } else { sequence.tokens.len() };
        let matchable = (computed_here - 1) / block_tokens;
        let chain = &sequence.hashes[..matchable.min(sequence.hashes.len())];
        let prefix = self.pool.match_prefix(chain);
        let in_tiers = self.offload.as_ref().map_or(0, |offload| offload.run(&chain[prefix.len()..]));
        let left = sequence.tokens.len() - (prefix.len() + in_tiers) * block_tokens;
        if budget == 0 && !fetches && (in_tiers == 0 || left > may_pass) {
            return Admission::NoBudget(most);
        }
        let fresh = most - prefix.len();
        let wanted = fresh + self.pool.idle_among(&prefix) + kept;
        if wanted > self.pool.available() {
            // What is stored of its own prefix would be idle then, and taken.
            let wanted = wanted + self.pool.stored_only_among(&prefix);
            let but_for_stores = wanted <= self.pool.available() + self.pool.usage().storing;
            return Admission::NoRoom { but_for_stores };
        }
        let cached = prefix.len() * block_tokens;
        self.pool.share(&prefix);
        sequence.shared = prefix.len();
        sequence.registered = prefix.len();
        sequence.blocks = prefix;
        if sequence.preemptions == 0 {
            sequence.cached = cached.min(sequence.prompt_len);
        }
        match self.choose_connector(id, in_tiers) {
            Some(HANDOFF) => return self.begin_fetch(id, fresh),
            Some(OFFLOAD) => return self.begin_load(id, in_tiers, fresh),
            Some(_) | None => {}
        }
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence is known");
        let taken = self.pool.allocate(fresh, Hold::Active).expect("room was checked");
        sequence.blocks.extend(taken);
        sequence.computed = cached;
        sequence.phase = Phase::Running;
        Admission::Run((sequence.tokens.len() - cached).min(budget))
    }
}
