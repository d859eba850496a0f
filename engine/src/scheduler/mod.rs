//! The scheduler: decides which sequences take part in the next step, and which blocks they get. It is pure: no
//! clock, no threads, no I/O. The step loop and the simulator drive the same code.
//!
//! ```text
//!  submit ─▶ Waiting ── admitted ──────────────▶ Running ── finish ─▶ removed
//!               │  ▲                               ▲  │
//!               │  └──── preempted (recompute) ────┼──┘
//!               ├─ admitted with a handoff ─▶ Fetching ─ landed
//!               │                                 └ failed: Waiting again, or finish(Error)
//!               └─ admitted, a tier has its next blocks ─▶ Loading ─ loaded, in whole or in part: Running
//! ```
//!
//! Continuous batching with chunked prefill. Each step first serves running sequences that need one token. They may
//! add drafts of their next tokens (`drafting.rs`), which the step verifies. The next chunks of running prompts follow
//! (`prompts.rs`). Then it admits sequences from the queue in order, while the budget lasts: of tokens, and of time if
//! there is a target (`step_budget.rs`). Fetches and loads need no budget: they also begin behind prompts that wait for
//! it. When no block is free, the youngest running sequence is preempted: its blocks are released and it is recomputed
//! later. Admission leaves blocks to running sequences (`growth.rs`). Sequences can have priorities (`order.rs`).
//!
//! Invariants:
//! - 1, 2, 3: as kept by [`BlockPool`].
//! - 7: [`Scheduler::finish`] returns `Some` exactly once per sequence.
//! - Only computed or verified, full blocks enter the prefix cache.
//! - An admitted sequence can always finish once others have left: a sequence that does not fit the pool at its
//!   longest is refused.

mod admitting;
mod cache_events;
mod drafting;
mod fetching;
mod growth;
mod leasing;
mod offloading;
mod order;
mod pending_releases;
mod prompts;
pub mod sequence;
mod step_budget;
mod step_cost;
mod windows;

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use baton_connector::BlockId;
use baton_connector::fetch::{FailureKind, LoadFailurePolicy, ReleaseReason};
use baton_connector::multi::{self, Children, MultiConnectorRequest};
use baton_connector::offload::TransferId;

use self::admitting::{Admission, AdmittedSequences};
pub use self::drafting::{DRAFTS_MAX, LOOKUP_MAX, PromptLookup};
use self::offloading::{HANDOFF, OFFLOAD, TierOffload};
use self::order::AdmissionState;
pub use self::order::SchedulingPolicy;
use self::pending_releases::PendingReleases;
pub use self::pending_releases::{OutsideStep, StepSequences};
use self::step_budget::StepPacing;
pub use self::step_budget::StepTiming;
use crate::blocks::hash::BlockHash;
use crate::blocks::pool::{BlockPool, BlockUsage, Hold};
use crate::offload::{OffloadCounts, OffloadOrder};
use crate::scheduler::sequence::{FinishReason, NewSequence, Phase, Purpose, SeqId, Sequence};

/// Rows of logits of one step for log-probabilities of prompts: 39 MB for a vocabulary of 152,000. A step with more
/// would hold as many rows as tokens, and wait for the host to read them.
const SCORED_ROWS_MAX: usize = 64;

/// The scheduler's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Tokens of one block.
    pub block_tokens: usize,
    /// Sequences that run or fetch at once.
    pub max_num_seqs: usize,
    /// Tokens of one step, over all its sequences.
    pub max_num_batched_tokens: usize,
    /// Limit of the waiting sequences. At this limit the next request is refused. An accepted request may add all of
    /// its sequences.
    pub max_waiting: usize,
    /// Tokens of one sequence, prompt and output.
    pub max_model_len: usize,
    /// Keys that a position sees, its own included, if every layer has a window.
    pub window: Option<usize>,
}

/// One sequence's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepPart {
    /// Which sequence.
    pub id: SeqId,
    /// First position to compute.
    pub start: usize,
    /// Positions to compute. Those behind the sequence's tokens are drafts ([`Scheduler::take_drafted`]).
    pub count: usize,
    /// Whether a token is sampled from the last of them; with drafts, from each that is reached.
    pub samples: bool,
}

/// An action of the scheduler outside the step, for the shell to carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Read entries `first ..` of the handoff's block table into these landing blocks.
    StartRead {
        /// For which sequence.
        id: SeqId,
        /// First entry of the producer's table.
        first: usize,
        /// Landing blocks, in order.
        into: Vec<BlockId>,
    },
    /// Raise the stop flag of the sequence's read.
    StopRead(SeqId),
    /// Release the sequence's handoff at its producer.
    ReleaseAtProducer(SeqId, ReleaseReason),
    /// Stop renewing the sequence's handoff.
    StopHeartbeat(SeqId),
    /// The fetch failed and the policy is to fail: finish the sequence with this error.
    FetchFailed(SeqId, FailureKind),
    /// The fetch failed and the prompt is computed here instead.
    Recomputing(SeqId),
    /// Lease the blocks of this sequence's prompt as they become final ([`Scheduler::open_lease_early`]).
    OpenLeaseEarly(SeqId),
    /// Hand this to the offload workers. If they refuse it, it has ended with
    /// [`OffloadFault::Refused`](crate::offload::OffloadFault::Refused).
    Offload(OffloadOrder),
    /// Ask the offload workers to drop an order. [`Scheduler::offload_revoked`] takes their answer.
    Revoke(TransferId),
}

/// What becomes of a finished sequence's blocks: the only result of `request_finished`.
#[derive(Debug, PartialEq, Eq)]
pub enum FinishOutcome {
    /// They are free (or will be when a transfer into them has stopped).
    Freed,
    /// The lease now holds those of the prompt.
    Leased(Vec<BlockId>),
    /// The early lease holds those of the prompt, and all of them are final.
    Sealed(Vec<BlockId>),
    /// The early lease holds those of the prompt, which will not be computed: the lease must end.
    Unfinished,
}

/// Why a sequence is not accepted. Nothing was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue is at its bound.
    #[error("{waiting} requests are waiting already")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
    },
    /// The sequence does not fit even alone.
    #[error("{tokens} tokens do not fit a context of {capacity}")]
    TooLong {
        /// Prompt and output at their longest.
        tokens: usize,
        /// The limit of the model and the pool.
        capacity: usize,
    },
    /// The queue takes longer than the request may wait.
    #[error("{ahead} requests wait before this one, for about {} ms: longer than it may wait", .wait.as_millis())]
    TooLate {
        /// Requests before it.
        ahead: usize,
        /// The time that they are expected to take.
        wait: Duration,
    },
}

/// Requests by phase, and counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerLoad {
    /// In the queue.
    pub waiting: usize,
    /// Waiting for a transfer.
    pub fetching: usize,
    /// Waiting for blocks from a tier.
    pub loading: usize,
    /// Taking part in steps.
    pub running: usize,
    /// Aborted, waiting for a transfer to stop.
    pub stopping: usize,
    /// Preemptions since the start.
    pub preemptions: u64,
    /// Tokens computed again after preemptions, since the start.
    pub recomputed_tokens: u64,
    /// Late or repeated events since the start.
    pub ignored: u64,
    /// Orders to the offload workers that have not ended.
    pub offloading: usize,
    /// Finished requests of which a connector still holds blocks.
    pub pending_release: usize,
    /// Contents and counts of the tiers, if there are any.
    pub tiers: Option<OffloadCounts>,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: BlockPool,
    sequences: HashMap<SeqId, Sequence>,
    waiting: VecDeque<SeqId>,
    admission: AdmissionState,
    admitted: AdmittedSequences,
    pacing: StepPacing,
    /// Finished while a transfer was still writing into their landing blocks.
    stopping: HashMap<SeqId, Sequence>,
    pending_releases: PendingReleases,
    offload: Option<TierOffload>,
    effects: Vec<Effect>,
    ignored: u64,
}

impl Scheduler {
    /// An empty scheduler over a pool of `blocks`.
    #[must_use]
    pub fn new(config: SchedulerConfig, blocks: usize) -> Self {
        Self {
            config,
            pool: BlockPool::new(blocks),
            sequences: HashMap::new(),
            waiting: VecDeque::new(),
            admission: AdmissionState::default(),
            admitted: AdmittedSequences::default(),
            pacing: StepPacing::default(),
            stopping: HashMap::new(),
            pending_releases: PendingReleases::default(),
            offload: None,
            effects: Vec::new(),
            ignored: 0,
        }
    }

    /// The token limit of one sequence: the context, or the pool if that is smaller.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.config.max_model_len.min(self.pool.usage().total * self.config.block_tokens)
    }

    /// Queues a sequence.
    ///
    /// # Errors
    /// [`Refusal`], with the sequence.
    pub fn submit(&mut self, new: NewSequence) -> Result<(), (Box<NewSequence>, Refusal)> {
        let (tokens, capacity) = (new.prompt.len() + new.stop.max_new, self.capacity());
        if tokens > capacity {
            return Err((Box::new(new), Refusal::TooLong { tokens, capacity }));
        }
        if self.waiting.len() >= self.config.max_waiting && !new.admitted_with_first {
            return Err((Box::new(new), Refusal::QueueFull { waiting: self.waiting.len() }));
        }
        assert!(!new.prompt.is_empty() && new.stop.max_new > 0, "the front end checks this");
        let id = new.id;
        let clash = self.sequences.insert(id, Sequence::new(new));
        assert!(clash.is_none(), "sequence ids are never reused");
        self.enqueue(id);
        Ok(())
    }

    /// Chooses the next step. Empty when nothing can run.
    pub fn schedule(&mut self) -> Vec<StepPart> {
        self.order_running();
        let mut planned = Vec::with_capacity(self.admitted.running.len() + 1);
        let mut tokens = self.config.max_num_batched_tokens;
        let mut short = self.schedule_running(&mut planned, &mut tokens);
        let decoding = planned.len();
        let mut budget = self.prompt_budget(&planned, tokens);
        let guaranteed = self.schedule_prompts(&mut planned, &mut budget);
        short = short || self.admit_waiting(&mut planned, &mut budget);
        if let Some(chunk) = guaranteed {
            self.schedule_guaranteed(chunk, &mut planned, &mut budget);
        }
        if !short {
            self.resume_stores();
        }
        self.pacing.planned(&planned, decoding);
        self.record_step(&planned);
        planned
    }

    /// Records the results of one planned part: `sampled` where the plan asks for a token. Returns whether the
    /// sequence has ended; the caller then calls [`Self::finish`].
    pub fn commit(&mut self, part: &StepPart, sampled: Option<u32>) -> Option<FinishReason> {
        let Some(sequence) = self.sequences.get_mut(&part.id) else {
            self.ignored += 1;
            return None;
        };
        sequence.advance(part.start + part.count);
        self.register(part.id);
        self.release_passed(part.id);
        let sequence = self.sequences.get_mut(&part.id).expect("it was there just now");
        sequence.tokens.push(sampled?);
        sequence.finish_reason()
    }

    /// Removes a sequence: `request_finished`. `None` when the scheduler does not have it.
    ///
    /// Only the blocks of a producer's complete prompt are leased; all others are freed.
    pub fn finish(&mut self, id: SeqId, reason: FinishReason) -> Option<FinishOutcome> {
        let Some(mut sequence) = self.sequences.remove(&id) else {
            self.ignored += 1;
            return None;
        };
        self.admitted.drafting.forget(id);
        match sequence.phase {
            Phase::Waiting => self.waiting.retain(|&other| other != id),
            Phase::Running => self.admitted.running.retain(|&other| other != id),
            Phase::Fetching => {}
            Phase::Loading(_) => self.admitted.loading -= 1,
        }
        self.record_length(&sequence, reason);
        let none = MultiConnectorRequest::new(Children::NONE, LoadFailurePolicy::Recompute);
        let mut connectors = std::mem::replace(&mut sequence.connectors, none);
        let mut finished = FinishOutcome::Freed;
        self.touch_tiers(&sequence.blocks.hashes[..sequence.blocks.registered]);
        let mut finishing = Some(sequence);
        for action in connectors.apply(multi::Event::Finish) {
            let multi::Action::FinishChild(child) = action else { continue };
            let answer = match child {
                HANDOFF => {
                    finished = self.handoff_finished(finishing.take().expect("asked once"), reason);
                    let holds = finished != FinishOutcome::Freed || self.stopping.contains_key(&id);
                    if holds { multi::ChildReply::Holds } else { multi::ChildReply::Nothing }
                }
                OFFLOAD => self.offload_finished(id, reason),
                _ => multi::ChildReply::Nothing,
            };
            connectors.apply(multi::Event::Replied(child, answer));
        }
        self.pending_releases.add(id, connectors);
        Some(finished)
    }

    /// The P/D connector's `request_finished`.
    fn handoff_finished(&mut self, sequence: Sequence, reason: FinishReason) -> FinishOutcome {
        if let Purpose::Consume(_) = sequence.purpose {
            self.abandon_fetch(sequence);
            return FinishOutcome::Freed;
        }
        let complete = matches!(reason, FinishReason::Stop | FinishReason::Length)
            && sequence.is_producer()
            && sequence.computed >= sequence.prompt_len;
        if sequence.leased_early {
            return self.finish_early_lease(&sequence, complete);
        }
        if complete {
            let leased_count = sequence.prompt_len.div_ceil(self.config.block_tokens);
            let mut blocks = sequence.blocks.table;
            let rest = blocks.split_off(leased_count);
            self.pool.release(&rest, Hold::Active);
            self.pool.lease(&blocks);
            self.pending_releases.add_lease(&blocks, sequence.id);
            return FinishOutcome::Leased(blocks);
        }
        // Blocks that a load still writes are released at the end of that load.
        let mut blocks = sequence.blocks.held().to_vec();
        blocks.retain(|&block| !self.pool.is_landing(block));
        self.pool.release(&blocks, Hold::Active);
        FinishOutcome::Freed
    }

    /// Actions for the shell outside the step; in order, each once.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// A sequence that has not finished.
    #[must_use]
    pub fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    /// Whether a finished sequence's transfer has not stopped yet.
    #[must_use]
    pub fn is_stopping(&self, id: SeqId) -> bool {
        self.stopping.contains_key(&id)
    }

    /// Whether a transfer may write into this block.
    #[must_use]
    pub fn is_landing(&self, block: BlockId) -> bool {
        self.pool.is_landing(block)
    }

    /// Blocks by state.
    #[must_use]
    pub fn usage(&self) -> BlockUsage {
        self.pool.usage()
    }

    /// Whether sequences wait and none takes part in a step or a transfer. No block is free then, and only the end of
    /// a lease can free one.
    #[must_use]
    pub fn waits_for_leases(&self) -> bool {
        let idle = self.admitted.count() == 0 && self.stopping.is_empty();
        !self.waiting.is_empty()
            && idle
            && self.offload.as_ref().is_none_or(|offload| offload.in_flight() == 0)
    }

    /// The first waiting sequence with a handoff.
    #[must_use]
    pub fn first_waiting_consumer(&self) -> Option<SeqId> {
        let consumes = |id: &&SeqId| matches!(self.sequences[*id].purpose, Purpose::Consume(_));
        self.waiting.iter().find(consumes).copied()
    }

    /// Requests by phase.
    #[must_use]
    pub fn load(&self) -> SchedulerLoad {
        SchedulerLoad {
            waiting: self.waiting.len(),
            fetching: self.admitted.fetching,
            loading: self.admitted.loading,
            running: self.admitted.running.len(),
            stopping: self.stopping.len(),
            preemptions: self.admission.preemptions,
            recomputed_tokens: self.admission.recomputed,
            ignored: self.ignored + self.offload.as_ref().map_or(0, TierOffload::ignored),
            offloading: self.offload.as_ref().map_or(0, TierOffload::in_flight),
            pending_release: self.pending_releases.len(),
            tiers: self.offload.as_ref().map(TierOffload::counts),
        }
    }

    /// Clears the prefix cache. Held blocks stay held, and the tiers keep their blocks ([`Self::reset_tiers`]).
    pub fn reset_prefix_cache(&mut self) {
        self.pool.reset_cache();
        if let Some(index) = self.tier_index_mut() {
            index.forget_announcements();
        }
    }

    /// Up to `limit` blocks of the prefix cache with a hash above `after`, in the order of their hashes.
    #[must_use]
    pub fn cached_blocks(&self, after: Option<BlockHash>, limit: usize) -> Vec<(BlockHash, BlockId)> {
        self.pool.cached_after(after, limit)
    }

    /// Plans running sequences that need one token. Returns whether there were too few blocks. A sequence that decodes,
    /// or whose blocks have just landed, does not wait for a prompt: prompts take the rest of the step.
    fn schedule_running(&mut self, planned: &mut Vec<StepPart>, budget: &mut usize) -> bool {
        let mut preempted = false;
        let mut at = 0;
        'running: while at < self.admitted.running.len() && *budget > 0 {
            let id = self.admitted.running[at];
            let sequence = &self.sequences[&id];
            if sequence.uncomputed() > 1 {
                at += 1;
                continue;
            }
            let end = sequence.tokens.len();
            while !self.grow(id, end) {
                if self.cancel_stores() {
                    // Stores release blocks soon: no sequence is preempted and recomputed for this.
                    return true;
                }
                preempted = true;
                let candidate = self.preemption_candidate(at);
                self.preempt(candidate);
                self.record_shortage();
                if candidate == id {
                    // Later sequences have all their blocks: the step continues with them.
                    continue 'running;
                }
            }
            planned.push(self.part(id, 1));
            *budget -= 1;
            at += 1;
        }
        if !preempted {
            self.plan_drafts(planned, budget);
        }
        preempted
    }

    /// Tokens of a sequence's next chunk, at most `budget`. Rows of logits for log-probabilities of prompts are bounded
    /// over the step.
    fn chunk(&self, id: SeqId, planned: &[StepPart], budget: usize) -> usize {
        let sequence = &self.sequences[&id];
        let count = sequence.uncomputed().min(budget);
        if !sequence.scores_prompt(sequence.computed, count) {
            return count;
        }
        let rows = |part: &StepPart| self.sequences[&part.id].reuse.scoring.rows(part.start, part.count);
        count.min(SCORED_ROWS_MAX.saturating_sub(planned.iter().map(rows).sum()))
    }

    fn part(&mut self, id: SeqId, count: usize) -> StepPart {
        let sequence = &self.sequences[&id];
        let samples = sequence.computed + count == sequence.tokens.len();
        if !samples && sequence.wants_early_lease() {
            self.effects.push(Effect::OpenLeaseEarly(id));
        }
        StepPart { id, start: sequence.computed, count, samples }
    }

    /// Allocates blocks for positions up to `end`.
    fn grow(&mut self, id: SeqId, end: usize) -> bool {
        let sequence = self.sequences.get_mut(&id).expect("a running sequence is known");
        let missing = end.div_ceil(self.config.block_tokens).saturating_sub(sequence.blocks.table.len());
        match self.pool.allocate(missing, Hold::Active) {
            Ok(taken) => {
                sequence.blocks.table.extend(taken);
                true
            }
            Err(_) => false,
        }
    }

    /// The sequence to preempt for the one at `at`: the youngest of the least urgent running sequences without an early
    /// lease.
    fn preemption_candidate(&self, at: usize) -> SeqId {
        let growing = |id: &&SeqId| self.sequences[*id].leased_early;
        let younger = self.admitted.running[at..].iter().rev().find(|id| !growing(id));
        *younger.expect("a sequence that wants a block has no lease yet")
    }
}

#[cfg(test)]
mod offload_tests;
#[cfg(test)]
mod order_tests;
#[cfg(test)]
mod prompts_tests;
#[cfg(test)]
mod tests;
