//! How prompts share what a step has left for them, with a time target:
//!
//! 1. The oldest running prompt has half of it: of the most urgent ones, if the scheduler orders by priority. That is a
//!    guarantee: it ends after a bounded number of steps, and the next one is the oldest. Each prompt becomes the oldest,
//!    but for those before which more urgent ones keep arriving.
//! 2. If sequences wait in the queue, half of the rest is kept for them.
//! 3. The other running prompts follow, the most urgent first, and of these the one with the fewest tokens left. A prompt
//!    that does not end with this step leaves half of what it finds to those behind it.
//! 4. Prompts of the queue are admitted in their order, by the same rule. A long prompt waits while four others run, and
//!    short ones pass it: an admitted prompt holds all of its blocks. A prompt that is long even after its load from a
//!    tier waits as well.
//! 5. The oldest takes what is left.
//!
//! A short prompt thus ends within a few steps beside any number of long ones. A long one at the head of the queue waits
//! only for running long ones, of which the oldest always ends. Without a time target each prompt takes the rest of the
//! step, in the order in which they began.

use std::time::{Duration, Instant};

use super::step_budget::{CHUNK_MIN, StepBudget, StepPacing, StepTiming};
use super::{Scheduler, StepPart};
use crate::scheduler::sequence::{Phase, SeqId, Sequence};

/// Long prompts that run at once.
const LONG_PROMPTS_MAX: usize = 4;
/// A prompt is short if it ends within this many steps as large as what the queue finds in this one.
const SHORT_STEPS: usize = 4;

/// The tokens of the longest prompt that is short, if the queue finds so many in this step.
pub(super) fn short_tokens(for_queue: usize) -> usize {
    for_queue.max(CHUNK_MIN).saturating_mul(SHORT_STEPS)
}

/// A chunk of the oldest prompt that is not planned yet. Its tokens are taken from the budget.
#[derive(Clone, Copy, Debug)]
pub(super) struct GuaranteedChunk {
    id: SeqId,
    start: usize,
    count: usize,
}

impl Scheduler {
    /// With a time target for steps; zero is none. [`Self::begin_step`] must then be called before each step.
    #[must_use]
    pub fn with_step_target(mut self, target: Duration) -> Self {
        self.pacing = StepPacing::new(target);
        self
    }

    /// The step before has ended, and the next call of [`Self::schedule`] plans one that begins now. Returns the
    /// duration of the step before, if it computed anything.
    pub fn begin_step(&mut self, now: Instant) -> Option<StepTiming> {
        self.pacing.begin(now)
    }

    /// What the step has left for chunks beside these parts of sequences that decode.
    pub(super) fn prompt_budget(&self, decoding: &[StepPart], tokens: usize) -> StepBudget {
        let alone = self.admitted.count() + self.waiting.len() + self.stopping.len() <= 1;
        self.pacing.budget(decoding, tokens, alone)
    }

    /// Plans chunks of running prompts, but for that of the oldest if it depends on what the others leave.
    pub(super) fn schedule_prompts(
        &mut self,
        planned: &mut Vec<StepPart>,
        budget: &mut StepBudget,
    ) -> Option<GuaranteedChunk> {
        let running = self.admitted.running.iter().copied();
        let mut prompts: Vec<SeqId> = running.filter(|id| self.sequences[id].uncomputed() > 1).collect();
        if !budget.is_timed() {
            for id in prompts {
                self.schedule_chunk(id, false, planned, budget);
            }
            return None;
        }
        if prompts.is_empty() {
            return None;
        }
        let oldest = prompts.remove(0);
        let guaranteed = self.guarantee(oldest, !prompts.is_empty(), planned, budget);
        // Of prompts with as many tokens left, the older one is first.
        prompts.sort_by_key(|id| (self.rank(*id), self.sequences[id].uncomputed()));
        let for_queue = if self.waiting.is_empty() { 0 } else { budget.share(0, usize::MAX, true) };
        budget.take(0, for_queue);
        let count = prompts.len();
        for (at, id) in prompts.into_iter().enumerate() {
            let behind = at + 1 < count || !self.waiting.is_empty();
            self.schedule_chunk(id, behind, planned, budget);
        }
        budget.put_back(0, for_queue);
        guaranteed
    }

    /// Whether a waiting prompt may begin beside the long prompts that run.
    pub(super) fn may_begin(&self, id: SeqId, budget: &StepBudget) -> bool {
        let short = short_tokens(budget.most(0));
        if !budget.is_timed() || self.sequences[&id].uncomputed() <= short {
            return true;
        }
        let is_long = |id: &&SeqId| self.sequences[*id].uncomputed() > short;
        self.admitted.running.iter().filter(is_long).count() < LONG_PROMPTS_MAX
    }

    /// Whether a step has tokens left for a waiting prompt beside these running sequences, in their order.
    pub(super) fn leaves_budget(&self, beside: &[&Sequence], waiting: &Sequence) -> bool {
        let tokens = self.config.max_num_batched_tokens;
        if !self.pacing.has_target() {
            return beside.iter().map(|sequence| sequence.uncomputed()).sum::<usize>() < tokens;
        }
        let (prompts, decoding): (Vec<&Sequence>, Vec<&Sequence>) =
            beside.iter().copied().partition(|sequence| sequence.uncomputed() > 1);
        let part = |sequence: &&Sequence| StepPart {
            id: sequence.id,
            start: sequence.computed,
            count: 1,
            samples: true,
        };
        let parts: Vec<StepPart> = decoding.iter().map(part).collect();
        let mut budget = self.prompt_budget(&parts, tokens.saturating_sub(parts.len()));
        if let Some(oldest) = prompts.first() {
            let count = budget.guaranteed(oldest.computed, oldest.uncomputed(), true);
            budget.take(oldest.computed, count);
        }
        // Half of the rest is kept for the queue. The other prompts take no more than the other half.
        let for_queue = budget.share(0, usize::MAX, true);
        let short = short_tokens(for_queue);
        let is_long = |sequence: &&&Sequence| sequence.uncomputed() > short;
        let may_begin =
            waiting.uncomputed() <= short || prompts.iter().filter(is_long).count() < LONG_PROMPTS_MAX;
        for_queue > 0 && may_begin
    }

    /// The most tokens of prompts that a step computes from now on; at least one.
    pub(super) fn prompt_tokens_max(&self) -> usize {
        self.prompt_budget(&[], self.config.max_num_batched_tokens).most(0).max(1)
    }

    /// Takes the guaranteed chunk of the oldest prompt from the budget. Returns it if it may become larger, otherwise
    /// it is planned.
    fn guarantee(
        &mut self,
        id: SeqId,
        others: bool,
        planned: &mut Vec<StepPart>,
        budget: &mut StepBudget,
    ) -> Option<GuaranteedChunk> {
        let sequence = &self.sequences[&id];
        let (start, wanted) = (sequence.computed, sequence.uncomputed());
        let others = others || !self.waiting.is_empty();
        let count = budget.guaranteed(start, wanted, others);
        // Rows of logits are limited as well: others must not take them first.
        if !others || count == wanted || sequence.scores_prompt(start, wanted) {
            self.add_chunk(id, count, planned, budget);
            return None;
        }
        budget.take(start, count);
        Some(GuaranteedChunk { id, start, count })
    }

    /// Plans the oldest prompt's chunk with all that is left.
    pub(super) fn schedule_guaranteed(
        &mut self,
        chunk: GuaranteedChunk,
        planned: &mut Vec<StepPart>,
        budget: &mut StepBudget,
    ) {
        let GuaranteedChunk { id, start, count } = chunk;
        budget.put_back(start, count);
        // Admission may have preempted it.
        let Some(sequence) = self.sequences.get(&id).filter(|sequence| sequence.phase == Phase::Running)
        else {
            return;
        };
        let most = budget.share(start, sequence.uncomputed(), false).max(count);
        self.add_chunk(id, most, planned, budget);
    }

    /// Plans the next chunk of a prompt. `behind`: other prompts follow.
    pub(super) fn schedule_chunk(
        &mut self,
        id: SeqId,
        behind: bool,
        planned: &mut Vec<StepPart>,
        budget: &mut StepBudget,
    ) {
        let sequence = &self.sequences[&id];
        let most = budget.share(sequence.computed, sequence.uncomputed(), behind);
        self.add_chunk(id, most, planned, budget);
    }

    /// Plans a chunk of at most `most` tokens. The sequence has all of its blocks since its admission.
    fn add_chunk(&mut self, id: SeqId, most: usize, planned: &mut Vec<StepPart>, budget: &mut StepBudget) {
        let count = self.chunk(id, planned, most);
        if count > 0 {
            budget.take(self.sequences[&id].computed, count);
            planned.push(self.part(id, count));
        }
    }
}
