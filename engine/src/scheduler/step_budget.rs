//! What a step may still compute: tokens, and with a time target the time that is left for chunks of prompts.
//!
//! A time target limits a step where others wait for its end: sequences that decode, other prompts, transfers. A step
//! for the only sequence of the engine may take [`ALONE`] times the target: chunks are then large enough for full
//! speed, and a request that arrives meanwhile waits for so many targets at most.
//!
//! The time for chunks is what the rest of the step leaves of the target. It is at least a quarter of the target, and of
//! the rest: where decoding alone takes longer than the target, prompts proceed all the same. The first chunk of a step
//! has at least [`CHUNK_MIN`] tokens.
//!
//! Drafts take no more time than one-token parts leave of one target, half of it while a prompt needs tokens. With no
//! time left there are none. Their price is that of measured rows: before any was measured a step has no drafts, and
//! after that it has at most twice as many rows as any such step before.
//!
//! Before chunks have been measured, a step has few of their tokens. After that it has at most twice as many tokens, and
//! pairs, as any step before.

use std::time::{Duration, Instant};

use super::StepPart;
use super::step_cost::{StepCost, StepWork, TokenPrice, pairs};

/// Tokens of the first chunk of a step, whatever they cost.
pub(super) const CHUNK_MIN: usize = 16;
/// Tokens of the first chunk that an engine computes while others wait.
const FIRST_TOKENS: f64 = 64.0;
/// Pairs of that chunk: a context of about a thousand tokens.
const FIRST_PAIRS: f64 = FIRST_TOKENS * 1024.0;
/// The factor on all limits for the only sequence of an engine.
pub(super) const ALONE: u32 = 4;
/// The share of a step that is always left for chunks.
const CHUNKS_SHARE: f64 = 0.25;
/// The share that drafts may take of what is left of a step, while a prompt needs a part of it.
const CONTENDED_DRAFTS_SHARE: f64 = 0.5;

/// What is left of the step's time.
#[derive(Clone, Copy, Debug)]
struct TimeLeft {
    seconds: f64,
    pairs: f64,
    price: TokenPrice,
}

/// See the module's documentation.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepBudget {
    tokens: usize,
    /// With a time target.
    time: Option<TimeLeft>,
    /// No chunk has been taken yet.
    untouched: bool,
}

impl StepBudget {
    /// Only a number of tokens.
    pub(super) fn of_tokens(tokens: usize) -> Self {
        Self { tokens, time: None, untouched: true }
    }

    /// Whether time limits the step.
    pub(super) fn is_timed(&self) -> bool {
        self.time.is_some()
    }

    /// The largest chunk that fits, from position `start` on.
    pub(super) fn most(&self, start: usize) -> usize {
        let Some(time) = &self.time else { return self.tokens };
        let fits = |count| pairs(start, count) <= time.pairs && time.price.of(start, count) <= time.seconds;
        let (mut low, mut high) = (0, self.tokens);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        if self.untouched { low.max(CHUNK_MIN.min(self.tokens)) } else { low }
    }

    /// The chunk of a prompt that has `wanted` tokens to compute from position `start` on. A prompt that does not end
    /// with this step leaves half of it to the prompts behind it, if there are any.
    pub(super) fn share(&self, start: usize, wanted: usize, behind: bool) -> usize {
        let most = self.most(start);
        if wanted <= most || !behind || self.time.is_none() {
            return wanted.min(most);
        }
        CHUNK_MIN.max(most / 2).min(most)
    }

    /// The guaranteed chunk of the oldest prompt, before all others have been planned: half of the step if there are
    /// others.
    pub(super) fn guaranteed(&self, start: usize, wanted: usize, others: bool) -> usize {
        let most = self.most(start);
        let share = if others { CHUNK_MIN.max(most / 2).min(most) } else { most };
        share.min(wanted)
    }

    /// Takes a chunk.
    pub(super) fn take(&mut self, start: usize, count: usize) {
        self.tokens -= count;
        self.untouched &= count == 0;
        if let Some(time) = &mut self.time {
            time.seconds -= time.price.of(start, count);
            time.pairs -= pairs(start, count);
        }
    }

    /// Returns a chunk that was taken.
    pub(super) fn put_back(&mut self, start: usize, count: usize) {
        self.tokens += count;
        if let Some(time) = &mut self.time {
            time.seconds += time.price.of(start, count);
            time.pairs += pairs(start, count);
        }
    }
}

/// What drafts may still add to a step, or one sequence's share of that.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftBudget {
    tokens: usize,
    /// Infinite without a time target, negative if the step takes longer than its target as it is.
    seconds: f64,
    price: TokenPrice,
}

impl DraftBudget {
    /// The same share for each of `count` sequences: at least one draft.
    pub(super) fn share_of(&self, count: usize) -> Self {
        let count = count.max(1);
        Self { tokens: (self.tokens / count).max(1), seconds: self.seconds / count as f64, ..*self }
    }

    /// The most drafts from position `start` on that fit a sequence's share, or one, if the step has room for them.
    pub(super) fn most(&self, share: &Self, start: usize) -> usize {
        share.within(start).max(1).min(self.within(start))
    }

    fn within(&self, start: usize) -> usize {
        (1..=self.tokens).take_while(|count| self.price.of(start, *count) <= self.seconds).count()
    }

    /// Takes drafts.
    pub(super) fn take(&mut self, start: usize, count: usize) {
        self.tokens -= count;
        self.seconds -= self.price.of(start, count);
    }
}

/// The duration of a step, until the next one begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTiming {
    /// As measured.
    pub took: Duration,
    /// As planned. `None` without a time target, and before the engine has measured such a step.
    pub expected: Option<Duration>,
}

/// A step whose duration is measured.
#[derive(Clone, Copy, Debug)]
struct PlannedStep {
    work: StepWork,
    /// In seconds; `None` before such a step was measured.
    expected: Option<f64>,
}

/// The time target of steps, and what they cost.
#[derive(Debug, Default)]
pub(super) struct StepPacing {
    /// In seconds; `None` if only tokens limit a step.
    target: Option<f64>,
    cost: StepCost,
    began: Option<Instant>,
    planned: Option<PlannedStep>,
}

impl StepPacing {
    /// With a target; none if it is zero.
    pub(super) fn new(target: Duration) -> Self {
        Self { target: (!target.is_zero()).then_some(target.as_secs_f64()), ..Self::default() }
    }

    /// Whether time limits a step.
    pub(super) fn has_target(&self) -> bool {
        self.target.is_some()
    }

    /// A step begins now, and the one before has ended. Returns the duration of that one, if it computed anything.
    pub(super) fn begin(&mut self, now: Instant) -> Option<StepTiming> {
        let (began, planned) = (self.began.replace(now), self.planned.take());
        let (began, planned) = (began?, planned?);
        let took = now.saturating_duration_since(began);
        if self.target.is_some() {
            self.cost.learn(&planned.work, took);
        }
        let expected = planned.expected.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        Some(StepTiming { took, expected })
    }

    /// The budget for chunks beside the planned parts. `alone`: the engine has one sequence.
    pub(super) fn budget(&self, planned: &[StepPart], tokens: usize, alone: bool) -> StepBudget {
        let Some(target) = self.target else { return StepBudget::of_tokens(tokens) };
        let factor = if alone { f64::from(ALONE) } else { 1.0 };
        let before = self.cost.before_chunks(&work_of(planned, planned.len()));
        let limit = target * factor;
        let seconds = (limit - before).max(limit.max(before) * CHUNKS_SHARE);
        let (seen_tokens, seen_pairs) = self.cost.largest_seen();
        let tokens_max = (2.0 * seen_tokens).max(FIRST_TOKENS * factor);
        let time = TimeLeft {
            seconds,
            pairs: (2.0 * seen_pairs).max(FIRST_PAIRS * factor),
            price: self.cost.chunk_price(),
        };
        StepBudget { tokens: tokens.min(tokens_max as usize), time: Some(time), untouched: true }
    }

    /// What drafts may add to these parts, which have one token each: at most `tokens`. `is_contended`: a prompt needs
    /// a part of the step.
    pub(super) fn draft_budget(
        &self,
        planned: &[StepPart],
        tokens: usize,
        is_contended: bool,
    ) -> DraftBudget {
        let Some(target) = self.target else {
            return DraftBudget { tokens, seconds: f64::INFINITY, price: TokenPrice::default() };
        };
        let rows = work_of(planned, planned.len());
        let left = if is_contended {
            (target - self.cost.before_chunks(&rows)) * CONTENDED_DRAFTS_SHARE
        } else {
            target - self.cost.expected(&rows)
        };
        let rows_max = (2.0 * self.cost.most_rows_seen()) as usize;
        DraftBudget {
            tokens: tokens.min(rows_max.saturating_sub(planned.len())),
            seconds: left,
            price: self.cost.row_price(),
        }
    }

    /// The step is planned: `decoding` parts of sequences that decode, then chunks.
    pub(super) fn planned(&mut self, parts: &[StepPart], decoding: usize) {
        let work = work_of(parts, decoding);
        let known = self.target.is_some() && self.cost.knows(&work);
        let expected = known.then(|| self.cost.expected(&work));
        self.planned = (!parts.is_empty()).then_some(PlannedStep { work, expected });
    }
}

/// The composition of a step: `decoding` parts of sequences that decode, with their drafts, then chunks.
fn work_of(parts: &[StepPart], decoding: usize) -> StepWork {
    let (rows, chunks) = parts.split_at(decoding.min(parts.len()));
    let tokens = |parts: &[StepPart]| parts.iter().map(|part| part.count as f64).sum::<f64>();
    let all_pairs = |parts: &[StepPart]| parts.iter().map(|part| pairs(part.start, part.count)).sum::<f64>();
    StepWork {
        rows: tokens(rows),
        row_pairs: all_pairs(rows),
        tokens: tokens(chunks),
        pairs: all_pairs(chunks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::sequence::SeqId;

    fn rows(count: usize, start: usize) -> Vec<StepPart> {
        (0..count).map(|id| StepPart { id: SeqId(id as u64), start, count: 1, samples: true }).collect()
    }

    /// A target of 100 ms, and a machine that takes 10 ms for a step and 11 ms for each token.
    fn learned() -> StepPacing {
        let (mut pacing, mut now) = (StepPacing::new(Duration::from_millis(100)), Instant::now());
        for step in 0..60 {
            let mut parts = rows(1 + step % 8, 20 + step);
            let decoding = parts.len();
            if step % 2 == 1 {
                let count = 1 + step % 7;
                parts.push(StepPart { id: SeqId(99), start: 10 * step, count, samples: false });
            }
            pacing.begin(now);
            pacing.planned(&parts, decoding);
            let tokens: usize = parts.iter().map(|part| part.count).sum();
            now += Duration::from_millis(10 + 11 * tokens as u64);
        }
        pacing.begin(now);
        pacing
    }

    #[test]
    fn drafts_take_the_time_that_is_left_and_half_of_it_beside_a_prompt() {
        let pacing = learned();
        let most = |decoding: usize, tokens: usize, is_contended: bool| {
            let budget = pacing.draft_budget(&rows(decoding, 80), tokens, is_contended);
            budget.most(&budget.share_of(1), 81)
        };
        assert_eq!((most(1, 64, false), most(1, 64, true)), (7, 3), "79 ms are left, or 39");
        assert_eq!((most(3, 64, false), most(3, 64, true)), (5, 2), "57 ms are left, or 28");
        assert_eq!(most(1, 2, false), 2, "tokens bound drafts as well");
        assert_eq!((most(8, 64, false), most(9, 64, false)), (0, 0), "2 ms are left, or none");
    }

    #[test]
    fn each_sequence_has_a_share_and_one_draft_where_the_step_has_room() {
        let pacing = learned();
        let mut budget = pacing.draft_budget(&rows(2, 80), 64, false);
        let share = budget.share_of(2);
        assert_eq!(budget.most(&share, 81), 3, "34 ms of 68");
        budget.take(81, 3);
        assert_eq!(budget.most(&share, 81), 3);
        budget.take(81, 3);
        assert_eq!(budget.most(&share, 81), 0, "2 ms are left");
        let budget = pacing.draft_budget(&rows(5, 80), 64, false);
        assert_eq!(budget.most(&budget.share_of(5), 81), 1, "35 ms are left, 7 ms each");
    }

    #[test]
    fn drafts_wait_for_measured_rows_and_then_grow_by_doubling() {
        let mut pacing = StepPacing::new(Duration::from_secs(3_600));
        let now = Instant::now();
        let tokens = |pacing: &StepPacing| pacing.draft_budget(&rows(1, 80), 64, false).tokens;
        assert_eq!(tokens(&pacing), 0);
        for (step, most) in (1..).zip([1, 3, 7, 15, 31, 63, 64]) {
            pacing.begin(now);
            let mut parts = rows(1, 80);
            parts[0].count += if step == 1 { 0 } else { tokens(&pacing) };
            pacing.planned(&parts, 1);
            pacing.begin(now + Duration::from_millis(10));
            assert_eq!(tokens(&pacing), most, "step {step}");
        }
    }
}
