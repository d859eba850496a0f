//! The order of waiting and running sequences, and what they know of each other: priorities, predictions, losses.
//!
//! With [`SchedulingPolicy::Fcfs`] the queue has the order of arrival, and a preempted sequence goes to its head. With
//! [`SchedulingPolicy::Priority`] the queue is sorted by priority, and inside a priority:
//!
//! - A sequence that was admitted before goes first.
//! - A handoff goes before other sequences, because a prefill engine holds its blocks. At most [`PASSED_MAX`] pass the
//!   same sequence.
//! - The others have the order of arrival.
//!
//! Running sequences are sorted by priority too, so that the preempted one is the youngest of the least urgent. If the
//! head of the queue finds no room, less urgent running sequences are preempted for it, but only if it can then be
//! admitted. A sequence yields in this way at most [`YIELDS_MAX`] times. Equals never yield to each other. A sequence
//! that waits for the prompt of its leader is not the head: the next one is.

use std::collections::HashSet;

use baton_connector::BlockId;

use super::growth::{self, OutputLengths, SequenceGrowth};
use super::{Scheduler, StepPart};
use crate::blocks::pool::Hold;
use crate::scheduler::sequence::{FinishReason, Phase, Purpose, SeqId, Sequence};

/// Limit of the later handoffs that pass one sequence of their priority.
const PASSED_MAX: u8 = 16;

/// Limit of the preemptions of one sequence for more urgent ones. Each costs the tokens that it had computed.
const YIELDS_MAX: u8 = 3;

baton_connector::labelled! {
    /// The order in which waiting sequences are served (vLLM's `--scheduling-policy`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum SchedulingPolicy {
        /// The order of arrival.
        #[default]
        Fcfs => "fcfs",
        /// The order of `priority`, then that of arrival.
        Priority => "priority",
    }
}

/// The sequences that passed the first one that waits for budget.
#[derive(Debug, Default)]
pub(super) struct QueueBypass {
    pub(super) head: Option<SeqId>,
    /// Tokens left to compute after their loads.
    pub(super) tokens: usize,
}

/// What admission remembers between steps.
#[derive(Debug, Default)]
pub(super) struct AdmissionState {
    pub(super) bypass: QueueBypass,
    pub(super) policy: SchedulingPolicy,
    /// The lengths of responses, if admission leaves blocks for the growth of running sequences.
    pub(super) lengths: Option<OutputLengths>,
    /// Preemptions since the start.
    pub(super) preemptions: u64,
    /// Tokens that were computed again after preemptions.
    pub(super) recomputed: u64,
}

/// A waiting sequence that asks for blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdmissionDemand {
    pub(super) id: SeqId,
    /// Blocks of all of its tokens.
    pub(super) most: usize,
    /// Of those, the ones that it takes from the free ones, and that no other sequence uses.
    pub(super) fresh: usize,
}

impl Scheduler {
    /// The same scheduler with another order of sequences.
    #[must_use]
    pub fn with_policy(mut self, policy: SchedulingPolicy) -> Self {
        self.admission.policy = policy;
        self
    }

    /// The same scheduler, whose admission leaves blocks for the growth of running sequences.
    #[must_use]
    pub fn with_growth_reserve(mut self) -> Self {
        self.admission.lengths = Some(OutputLengths::default());
        self
    }

    fn priority(&self, id: SeqId) -> i32 {
        self.sequences[&id].turn.priority
    }

    /// The priority of a sequence, if the scheduler orders by it.
    pub(super) fn rank(&self, id: SeqId) -> i32 {
        match self.admission.policy {
            SchedulingPolicy::Fcfs => 0,
            SchedulingPolicy::Priority => self.priority(id),
        }
    }

    /// The number of waiting sequences that a new one with this priority would have before it. Those that wait for the
    /// prompt of their leader do not count: they begin together, as soon as it is computed.
    #[must_use]
    pub fn waiting_ahead(&self, priority: i32) -> usize {
        let before = self.waiting.iter().take(self.place_of(priority));
        before.filter(|id| !self.is_gated(**id)).count()
    }

    /// Whether a sequence waits for its turn, and not only for the prompt of its leader.
    #[must_use]
    pub fn has_queue(&self) -> bool {
        self.waiting.iter().any(|&id| !self.is_gated(id))
    }

    /// The place in the queue of a new sequence with this priority.
    fn place_of(&self, priority: i32) -> usize {
        match self.admission.policy {
            SchedulingPolicy::Fcfs => self.waiting.len(),
            SchedulingPolicy::Priority => {
                self.waiting.partition_point(|other| self.sequences[other].turn.priority <= priority)
            }
        }
    }

    /// Queues a new sequence.
    pub(super) fn enqueue(&mut self, id: SeqId) {
        let mut at = self.waiting.len();
        if self.admission.policy == SchedulingPolicy::Priority {
            let priority = self.priority(id);
            at = self.place_of(priority);
            while matches!(self.sequences[&id].purpose, Purpose::Consume(_)) && at > 0 {
                let before = self.waiting[at - 1];
                let other = self.sequences.get_mut(&before).expect("a waiting sequence is known");
                let is_passed = other.turn.priority == priority
                    && other.turn.passed < PASSED_MAX
                    && !matches!(other.purpose, Purpose::Consume(_));
                if !is_passed {
                    break;
                }
                other.turn.passed += 1;
                at -= 1;
            }
        }
        self.waiting.insert(at, id);
    }

    /// Queues a sequence that was admitted before: it is the first of its priority, and stays that.
    pub(super) fn enqueue_again(&mut self, id: SeqId) {
        self.sequences.get_mut(&id).expect("the sequence is known").turn.passed = PASSED_MAX;
        let at = match self.admission.policy {
            SchedulingPolicy::Fcfs => 0,
            SchedulingPolicy::Priority => {
                let priority = self.priority(id);
                self.waiting.partition_point(|other| self.sequences[other].turn.priority < priority)
            }
        };
        self.waiting.insert(at, id);
    }

    /// Orders the running sequences for a step, and makes room for the head of the queue.
    pub(super) fn order_running(&mut self) {
        if self.admission.policy == SchedulingPolicy::Priority {
            let sequences = &self.sequences;
            self.admitted.running.sort_by_key(|id| sequences[id].turn.priority);
            self.yield_to_head();
        }
    }

    /// Preempts running sequences that are less urgent than the head of the queue, if it can then be admitted, and not
    /// otherwise.
    fn yield_to_head(&mut self) {
        let Some(head) = self.waiting.iter().copied().find(|&id| !self.is_gated(id)) else { return };
        let priority = self.priority(head);
        let may_yield = |id: &&SeqId| {
            let sequence = &self.sequences[*id];
            let turn = &sequence.turn;
            turn.priority > priority && turn.yielded < YIELDS_MAX && !sequence.leased_early
        };
        let candidates: Vec<SeqId> = self.admitted.running.iter().rev().filter(may_yield).copied().collect();
        if candidates.is_empty() {
            return;
        }
        let (prefix, _) = self.find_prefix(head);
        let most = self.sequences[&head].tokens.len().div_ceil(self.config.block_tokens);
        let demand = AdmissionDemand { id: head, most, fresh: most - prefix.len() };
        let taken = demand.fresh + self.pool.count_idle(&prefix);
        // As admission does, once the first of them has yielded.
        let missing = (taken + self.reserved_blocks()).saturating_sub(self.pool.available());
        let lacks_place = self.admitted.count() >= self.config.max_num_seqs;
        if (missing == 0 && !lacks_place) || (missing > 0 && missing <= self.pool.usage().storing) {
            return;
        }
        // The head shares the blocks of its prefix with them: those are not free for it.
        let prefix: HashSet<BlockId> = prefix.into_iter().collect();
        let (mut freed, mut yielding) = (0, Vec::new());
        for id in candidates {
            let wants_place = lacks_place && yielding.is_empty();
            if freed >= missing && !wants_place {
                break;
            }
            let own = self.pool.count_freed(self.sequences[&id].blocks.held(), &prefix);
            if own > 0 || wants_place {
                freed += own;
                yielding.push(id);
            }
        }
        let left = (self.pool.available() + freed).checked_sub(taken);
        let fits = freed >= missing && left.is_some_and(|left| self.leaves_growth(&demand, left));
        if fits && self.has_budget_without(&yielding, head) {
            for id in yielding {
                self.sequences.get_mut(&id).expect("a running sequence is known").turn.yielded += 1;
                self.preempt(id);
            }
        }
    }

    /// Whether a step has tokens left for a waiting sequence, if these running ones take no part in it. A fetch needs
    /// none.
    fn has_budget_without(&self, yielding: &[SeqId], waiting: SeqId) -> bool {
        let running = self.admitted.running.iter().filter(|id| !yielding.contains(id));
        let beside: Vec<&Sequence> = running.map(|id| &self.sequences[id]).collect();
        let waiting = &self.sequences[&waiting];
        matches!(waiting.purpose, Purpose::Consume(_)) || self.leaves_budget(&beside, waiting)
    }

    /// Whether so many blocks suffice for the predicted growth of the admitted sequences and a new one. Less urgent
    /// ones do not count, because they yield. The first sequence may always grow.
    pub(super) fn leaves_growth(&self, demand: &AdmissionDemand, available: usize) -> bool {
        let Some(lengths) = &self.admission.lengths else { return true };
        if self.admitted.count() == 0 {
            return true;
        }
        let priority = self.priority(demand.id);
        let counts = |sequence: &&Sequence| {
            let is_admitted = sequence.phase != Phase::Waiting;
            let yields =
                self.admission.policy == SchedulingPolicy::Priority && sequence.turn.priority > priority;
            is_admitted && !yields
        };
        let step_tokens = self.prompt_tokens_max();
        let predicted =
            |sequence: &Sequence, uncomputed: usize, blocks: usize, freed: usize| SequenceGrowth {
                prefill: uncomputed.div_ceil(step_tokens).saturating_sub(1),
                steps: lengths.steps_left(sequence.id, sequence.stop.max_new, sequence.generated()),
                tokens: sequence.tokens.len(),
                blocks,
                freed: if sequence.is_producer() { 0 } else { freed },
            };
        let of_admitted = |sequence: &Sequence| {
            let blocks = &sequence.blocks;
            // After a transfer little is left to compute.
            let uncomputed = if sequence.phase == Phase::Running { sequence.uncomputed() } else { 0 };
            predicted(sequence, uncomputed, blocks.table.len(), self.pool.count_own(blocks.held()))
        };
        let mut sequences: Vec<SequenceGrowth> = if self.admitted.fetching + self.admitted.loading == 0 {
            let running = self.admitted.running.iter().map(|id| &self.sequences[id]);
            running.filter(counts).map(of_admitted).collect()
        } else {
            self.sequences.values().filter(counts).map(of_admitted).collect()
        };
        let waiting = &self.sequences[&demand.id];
        let uncomputed = match waiting.purpose {
            Purpose::Consume(_) => 0,
            // Those of its cached blocks are computed.
            Purpose::Plain | Purpose::Produce { .. } | Purpose::Pool(_) => {
                waiting.uncomputed().min(demand.fresh * self.config.block_tokens)
            }
        };
        sequences.push(predicted(waiting, uncomputed, demand.most, demand.fresh));
        growth::fits(sequences, available, self.config.block_tokens)
    }

    /// Moves a sequence to the queue, for its prompt and generated tokens to be recomputed.
    pub(super) fn preempt(&mut self, id: SeqId) {
        self.admitted.running.retain(|&other| other != id);
        let sequence = self.sequences.get_mut(&id).expect("a running sequence is known");
        self.pool.release(sequence.blocks.held(), Hold::Active);
        sequence.blocks.clear();
        sequence.turn.lost = std::mem::take(&mut sequence.computed);
        sequence.reuse.mark_preempted();
        sequence.connectors.apply(baton_connector::multi::Event::Preempted);
        sequence.phase = Phase::Waiting;
        self.enqueue_again(id);
        self.admission.preemptions += 1;
    }

    /// Counts what a sequence computes again, after `found` of its tokens were found when it was admitted.
    pub(super) fn count_recomputed(&mut self, id: SeqId, found: usize) {
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence is known");
        let lost = std::mem::take(&mut sequence.turn.lost);
        self.admission.recomputed += lost.saturating_sub(found) as u64;
    }

    /// The predictions learn from a preemption for want of blocks.
    pub(super) fn record_shortage(&mut self) {
        if let Some(lengths) = &mut self.admission.lengths {
            lengths.preempted();
        }
    }

    /// The predictions learn from a planned step.
    pub(super) fn record_step(&mut self, planned: &[StepPart]) {
        if let Some(lengths) = self.admission.lengths.as_mut().filter(|_| !planned.is_empty()) {
            lengths.stepped();
        }
    }

    /// The predictions learn from the length of a complete response.
    pub(super) fn record_length(&mut self, sequence: &Sequence, reason: FinishReason) {
        let is_complete = matches!(reason, FinishReason::Stop | FinishReason::Length);
        let generates = match sequence.purpose {
            Purpose::Plain | Purpose::Consume(_) => sequence.generated() > 0,
            Purpose::Produce { .. } | Purpose::Pool(_) => false,
        };
        if let Some(lengths) = self.admission.lengths.as_mut().filter(|_| is_complete && generates) {
            lengths.observe(sequence.stop.max_new, sequence.generated());
        }
    }
}
