//! The scheduler: which sequences take part in the next step, and who gets which blocks. Pure: no clock, no
//! threads, no I/O; the step loop and the simulator drive the same code.
//!
//! ```text
//!  submit ─▶ Waiting ── admitted ──────────────▶ Running ── finish ─▶ off the books
//!               │  ▲                               ▲  │
//!               │  └──── preempted (recompute) ────┼──┘
//!               ├─ admitted with a handoff ─▶ Fetching ─ landed
//!               │                                 └ failed: Waiting again, or finish(Error)
//!               └─ admitted, a tier has its next blocks ─▶ Loading ─ loaded, in whole or in part: Running
//! ```
//!
//! Continuous batching with chunked prefill: each step serves running sequences that need one token first, then the next
//! chunks of running prompts, then admits from the queue in order while the token budget lasts. What needs no budget, a
//! fetch or a load, also begins behind prompts that wait for it. When blocks run out the youngest running sequence is
//! preempted: its blocks go back and it is computed again later. Admission leaves a few blocks to those that run.
//!
//! Invariants:
//! - 1, 2, 3: as kept by [`BlockPool`].
//! - 7: [`Scheduler::finish`] answers `Some` exactly once per sequence.
//! - Only computed or verified, full blocks enter the prefix cache.
//! - A sequence that was admitted can always finish once others have left: nobody is accepted whose longest
//!   form does not fit the pool.

mod admitting;
mod fetching;
mod lending;
mod offloading;
mod pending_release;
pub mod sequence;

use std::collections::{HashMap, VecDeque};

use baton_connector::BlockId;
use baton_connector::fetch::{FailureKind, LoadFailurePolicy, Reason};
use baton_connector::multi::{self, Children, Multi};
use baton_connector::offload::TransferId;

use self::admitting::{Admission, Passed};
use self::offloading::{HANDOFF, OFFLOAD, Offload};
pub use self::pending_release::Beside;
use self::pending_release::Departures;
use crate::blocks::hash::BlockHash;
use crate::blocks::pool::{BlockPool, BlockUsage, Hold};
use crate::offload::{OffloadCounts, Order};
use crate::scheduler::sequence::{FinishReason, NewSequence, Phase, Purpose, SeqId, Sequence};

/// The scheduler's bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Tokens of one block.
    pub block_tokens: usize,
    /// Sequences that run or fetch at once.
    pub max_num_seqs: usize,
    /// Tokens of one step, over all its sequences.
    pub max_num_batched_tokens: usize,
    /// Sequences that wait. With this many the next request is refused; one that is accepted may add as many
    /// sequences as it has.
    pub max_waiting: usize,
    /// Tokens of one sequence, prompt and output.
    pub max_model_len: usize,
}

/// One sequence's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Which sequence.
    pub id: SeqId,
    /// First position to compute.
    pub start: usize,
    /// Positions to compute.
    pub count: usize,
    /// Whether a token is sampled from the last of them.
    pub samples: bool,
}

/// What the scheduler asks of the shell, beside the step itself.
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
    ReleaseAtProducer(SeqId, Reason),
    /// Renew the sequence's handoff no longer.
    StopHeartbeat(SeqId),
    /// The fetch failed and the policy is to fail: finish the sequence with this error.
    FetchFailed(SeqId, FailureKind),
    /// The fetch failed and the prompt is computed here instead.
    Recomputing(SeqId),
    /// Lend the blocks of this sequence's prompt as they become final ([`Scheduler::lend_early`]).
    LendEarly(SeqId),
    /// Hand this to the offload workers. One that they refuse has ended with [`crate::offload::Fault::Refused`].
    Offload(Order),
    /// Ask the offload workers to forget an order; [`Scheduler::offload_revoked`] takes their answer.
    Revoke(TransferId),
}

/// What becomes of a finished sequence's blocks. The one answer of `request_finished`.
#[derive(Debug, PartialEq, Eq)]
pub enum Finished {
    /// They are back in the pool (or will be when a transfer into them is quiet).
    FreeNow,
    /// Those of the prompt are lent and now belong to the lease.
    Lent(Vec<BlockId>),
    /// Those of the prompt belong to the lease that was opened early, and all of them are final.
    Sealed(Vec<BlockId>),
    /// Those of the prompt belong to the lease that was opened early, and they will not be computed: it must end.
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
    /// It would not fit even alone.
    #[error("{tokens} tokens do not fit a context of {capacity}")]
    TooLong {
        /// Prompt and output at their longest.
        tokens: usize,
        /// What the model and the pool can hold.
        capacity: usize,
    },
}

/// Requests by phase, and what happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// In the queue.
    pub waiting: usize,
    /// Waiting for a transfer.
    pub fetching: usize,
    /// Waiting for blocks from a tier.
    pub loading: usize,
    /// Taking part in steps.
    pub running: usize,
    /// Given up, waiting for a transfer to be quiet.
    pub stopping: usize,
    /// Preemptions since the start.
    pub preemptions: u64,
    /// Late or repeated events since the start.
    pub ignored: u64,
    /// Orders to the offload workers that are not over.
    pub offloading: usize,
    /// Requests that are over and of whose blocks a connector still holds some.
    pub held: usize,
    /// What the tiers hold and did, if there are any.
    pub tiers: Option<OffloadCounts>,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: BlockPool,
    sequences: HashMap<SeqId, Sequence>,
    waiting: VecDeque<SeqId>,
    running: Vec<SeqId>,
    fetching: usize,
    loading: usize,
    passed: Passed,
    /// Finished while a transfer was still writing into their landing blocks.
    stopping: HashMap<SeqId, Sequence>,
    departures: Departures,
    offload: Option<Offload>,
    effects: Vec<Effect>,
    preemptions: u64,
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
            running: Vec::new(),
            fetching: 0,
            loading: 0,
            passed: Passed::default(),
            stopping: HashMap::new(),
            departures: Departures::default(),
            offload: None,
            effects: Vec::new(),
            preemptions: 0,
            ignored: 0,
        }
    }

    /// Tokens that one sequence can have: the context, or the pool if that is smaller.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.config.max_model_len.min(self.pool.usage().total * self.config.block_tokens)
    }

    /// Queues a sequence.
    ///
    /// # Errors
    /// [`Refusal`], with the sequence given back.
    pub fn submit(&mut self, new: NewSequence) -> Result<(), (Box<NewSequence>, Refusal)> {
        let (tokens, capacity) = (new.prompt.len() + new.stop.max_new, self.capacity());
        if tokens > capacity {
            return Err((Box::new(new), Refusal::TooLong { tokens, capacity }));
        }
        if self.waiting.len() >= self.config.max_waiting && !new.rides {
            return Err((Box::new(new), Refusal::QueueFull { waiting: self.waiting.len() }));
        }
        assert!(!new.prompt.is_empty() && new.stop.max_new > 0, "the front end checks this");
        let id = new.id;
        self.waiting.push_back(id);
        let clash = self.sequences.insert(id, Sequence::new(new));
        assert!(clash.is_none(), "sequence ids are never reused");
        Ok(())
    }

    /// Chooses the next step. Empty when nothing can run.
    pub fn schedule(&mut self) -> Vec<Planned> {
        let mut planned = Vec::with_capacity(self.running.len() + 1);
        let mut budget = self.config.max_num_batched_tokens;
        let short =
            self.schedule_running(&mut planned, &mut budget) || self.admit_waiting(&mut planned, &mut budget);
        if !short {
            self.resume_stores();
        }
        planned
    }

    /// Books the results of one planned part: `sampled` where the plan said so. Says whether the sequence is at
    /// its end; the caller then calls [`Self::finish`].
    pub fn commit(&mut self, part: &Planned, sampled: Option<u32>) -> Option<FinishReason> {
        let Some(sequence) = self.sequences.get_mut(&part.id) else {
            self.ignored += 1;
            return None;
        };
        sequence.computed = part.start + part.count;
        self.register(part.id);
        let sequence = self.sequences.get_mut(&part.id).expect("it was there just now");
        sequence.tokens.push(sampled?);
        sequence.finish_reason()
    }

    /// Takes a sequence off the books: `request_finished`. `None` when it is not on them (any more).
    ///
    /// Only a producer's sequence that ended by itself is lent; whatever ended early is freed.
    pub fn finish(&mut self, id: SeqId, reason: FinishReason) -> Option<Finished> {
        let Some(mut sequence) = self.sequences.remove(&id) else {
            self.ignored += 1;
            return None;
        };
        match sequence.phase {
            Phase::Waiting => self.waiting.retain(|&other| other != id),
            Phase::Running => self.running.retain(|&other| other != id),
            Phase::Fetching => {}
            Phase::Loading => self.loading -= 1,
        }
        let none = Multi::new(Children::NONE, LoadFailurePolicy::Recompute);
        let mut connectors = std::mem::replace(&mut sequence.connectors, none);
        let mut finished = Finished::FreeNow;
        self.touch_tiers(&sequence.hashes[..sequence.registered]);
        let mut leaving = Some(sequence);
        for asked in connectors.apply(multi::Event::Finish) {
            let multi::Action::Ask(child) = asked else { continue };
            let answer = match child {
                HANDOFF => {
                    finished = self.handoff_finished(leaving.take().expect("asked once"), reason);
                    let holds = finished != Finished::FreeNow || self.stopping.contains_key(&id);
                    if holds { multi::Answer::Holds } else { multi::Answer::Nothing }
                }
                OFFLOAD => self.offload_finished(id, reason),
                _ => multi::Answer::Nothing,
            };
            connectors.apply(multi::Event::Answered(child, answer));
        }
        self.departures.finished(id, connectors);
        Some(finished)
    }

    /// The P/D connector's `request_finished`.
    fn handoff_finished(&mut self, mut sequence: Sequence, reason: FinishReason) -> Finished {
        if let Purpose::Consume(_) = sequence.purpose {
            self.abandon_fetch(sequence);
            return Finished::FreeNow;
        }
        let complete = matches!(reason, FinishReason::Stop | FinishReason::Length)
            && sequence.is_producer()
            && sequence.computed >= sequence.prompt_len;
        if sequence.lent_early {
            return self.early_lease_finished(&sequence, complete);
        }
        if complete {
            let lent_count = sequence.prompt_len.div_ceil(self.config.block_tokens);
            let rest = sequence.blocks.split_off(lent_count);
            self.pool.give_back(&rest, Hold::Active);
            self.pool.lend(&sequence.blocks);
            self.departures.lent(&sequence.blocks, sequence.id);
            return Finished::Lent(sequence.blocks);
        }
        // What a load still writes into comes back with the end of that load.
        sequence.blocks.retain(|&block| !self.pool.is_landing(block));
        self.pool.give_back(&sequence.blocks, Hold::Active);
        Finished::FreeNow
    }

    /// What the shell must do beside the step; in order, each once.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// A sequence on the books.
    #[must_use]
    pub fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    /// Whether a finished sequence's transfer has not come to rest yet.
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

    /// Whether sequences wait and none takes part in anything: there is no room, and only a lease that ends can make
    /// some.
    #[must_use]
    pub fn waits_for_leases(&self) -> bool {
        let idle = self.running.is_empty() && self.fetching + self.loading == 0 && self.stopping.is_empty();
        !self.waiting.is_empty()
            && idle
            && self.offload.as_ref().is_none_or(|offload| offload.in_flight() == 0)
    }

    /// The first of the queue that has a handoff.
    #[must_use]
    pub fn first_waiting_consumer(&self) -> Option<SeqId> {
        let consumes = |id: &&SeqId| matches!(self.sequences[*id].purpose, Purpose::Consume(_));
        self.waiting.iter().find(consumes).copied()
    }

    /// Requests by phase.
    #[must_use]
    pub fn load(&self) -> Load {
        Load {
            waiting: self.waiting.len(),
            fetching: self.fetching,
            loading: self.loading,
            running: self.running.len(),
            stopping: self.stopping.len(),
            preemptions: self.preemptions,
            ignored: self.ignored + self.offload.as_ref().map_or(0, Offload::ignored),
            offloading: self.offload.as_ref().map_or(0, Offload::in_flight),
            held: self.departures.held(),
            tiers: self.offload.as_ref().map(Offload::counts),
        }
    }

    /// Forgets the prefix cache; held blocks stay held, and so does what is in the tiers ([`Self::reset_tiers`]).
    pub fn reset_prefix_cache(&mut self) {
        self.pool.reset_cache();
    }

    /// Up to `limit` blocks of the prefix cache with a hash above `after`, in the order of their hashes.
    #[must_use]
    pub fn cached_blocks(&self, after: Option<BlockHash>, limit: usize) -> Vec<(BlockHash, BlockId)> {
        self.pool.findable(after, limit)
    }

    /// Plans running sequences; says whether there were too few blocks. A sequence that decodes, or whose blocks have just
    /// landed, does not wait for a prompt: a prompt takes what those leave of the step.
    fn schedule_running(&mut self, planned: &mut Vec<Planned>, budget: &mut usize) -> bool {
        let mut preempted = false;
        let mut at = 0;
        'running: while at < self.running.len() && *budget > 0 {
            let id = self.running[at];
            let sequence = &self.sequences[&id];
            if sequence.uncomputed() > 1 {
                at += 1;
                continue;
            }
            let end = sequence.tokens.len();
            while !self.grow(id, end) {
                if self.yield_stores() {
                    // Blocks come back in a moment; nobody is computed again for that.
                    return true;
                }
                preempted = true;
                let victim = self.victim(at);
                self.preempt(victim);
                if victim == id {
                    // Those that come after it have all their blocks: they go on.
                    continue 'running;
                }
            }
            planned.push(self.part(id, 1));
            *budget -= 1;
            at += 1;
        }
        for at in 0..self.running.len() {
            let id = self.running[at];
            let count = self.sequences[&id].uncomputed().min(*budget);
            if count == 0 {
                break;
            }
            if self.sequences[&id].uncomputed() > 1 {
                // It has had all of its blocks since its admission.
                planned.push(self.part(id, count));
                *budget -= count;
            }
        }
        preempted
    }

    fn part(&mut self, id: SeqId, count: usize) -> Planned {
        let sequence = &self.sequences[&id];
        let samples = sequence.computed + count == sequence.tokens.len();
        if !samples && sequence.wants_early_lease() {
            self.effects.push(Effect::LendEarly(id));
        }
        Planned { id, start: sequence.computed, count, samples }
    }

    /// Makes room for positions up to `end`.
    fn grow(&mut self, id: SeqId, end: usize) -> bool {
        let sequence = self.sequences.get_mut(&id).expect("a running sequence is known");
        let missing = end.div_ceil(self.config.block_tokens).saturating_sub(sequence.blocks.len());
        match self.pool.allocate(missing, Hold::Active) {
            Ok(taken) => {
                sequence.blocks.extend(taken);
                true
            }
            Err(_) => false,
        }
    }

    /// Back to the head of the queue, to be computed again: prompt and what was generated.
    fn preempt(&mut self, id: SeqId) {
        self.running.retain(|&other| other != id);
        let sequence = self.sequences.get_mut(&id).expect("a running sequence is known");
        self.pool.give_back(&sequence.blocks, Hold::Active);
        sequence.blocks.clear();
        sequence.computed = 0;
        sequence.preemptions += 1;
        sequence.connectors.apply(multi::Event::Preempted);
        sequence.phase = Phase::Waiting;
        self.waiting.push_front(id);
        self.preemptions += 1;
    }
}

impl Sequence {
    /// Makes the full blocks among the computed ones findable.
    fn register(&mut self, pool: &mut BlockPool, block_tokens: usize) {
        let full = self.computed / block_tokens;
        if full > self.registered {
            self.extend_hashes(block_tokens);
            for index in self.registered..full {
                pool.register(self.blocks[index], self.hashes[index]);
            }
            self.registered = full;
        }
    }
}

#[cfg(test)]
mod offload_tests;
#[cfg(test)]
mod tests;
