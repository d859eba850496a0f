//! What a step costs: an estimate of its duration from its composition, learned from the durations of earlier steps.
//! Pure: durations come from the caller.
//!
//! ```text
//!  step without a chunk = fixed + rows · per row + contexts · per pair          (rows: decoded tokens and drafts)
//!  step with chunks     = the above + fixed + tokens · per token + pairs · per pair
//! ```
//!
//! A pair is a token and a position that its attention reads. At a context of 32,768 tokens the pairs of a chunk cost
//! several times its tokens. The two lines are fitted apart: a long time without prompts does not replace what is known
//! about chunks.
//!
//! Each fit is a least-squares fit of relative errors in which older steps count less and less. Its coefficients are
//! never negative, so a larger chunk never costs less. A step that took much longer or shorter than expected counts as
//! four times or a quarter of the expected duration: one pause of the process does not change the estimate much, and a
//! slower machine does within a few steps.

use std::time::Duration;

/// The weight of earlier steps with each new one: about ten steps count.
const KEEP: f64 = 0.9;
/// Passes over the coefficients per observation. Each pass begins with the latest ones.
const PASSES: usize = 8;
/// Steps after which an unexpected duration is limited.
const WARM_UP: u32 = 8;
/// The limit of an unexpected duration, as a factor.
const UNEXPECTED: f64 = 4.0;
/// The range of durations, in seconds. A device that computes nothing takes less, a stopped process more.
const SECONDS: (f64, f64) = (1e-6, 600.0);
/// A sum of squares below this is of observations that no longer count.
const FORGOTTEN: f64 = 1e-200;

/// The composition of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct StepWork {
    /// Tokens of sequences that decode, drafts included.
    pub(super) rows: f64,
    /// Pairs of those tokens with the positions before them.
    pub(super) row_pairs: f64,
    /// Tokens of chunks of prompts.
    pub(super) tokens: f64,
    /// Pairs of those tokens.
    pub(super) pairs: f64,
}

/// The pairs of `count` tokens from position `start` on.
pub(super) fn pairs(start: usize, count: usize) -> f64 {
    let (start, count) = (start as f64, count as f64);
    count * start + count * (count + 1.0) / 2.0
}

/// What the tokens of a chunk, or drafts, add to a step, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct TokenPrice {
    per_token: f64,
    per_pair: f64,
}

impl TokenPrice {
    /// Of `count` tokens from position `start` on.
    pub(super) fn of(self, start: usize, count: usize) -> f64 {
        self.per_token * count as f64 + self.per_pair * pairs(start, count)
    }
}

/// A fitted sum of three terms, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct CostFit {
    /// Weighted sums of products of the terms.
    squares: [[f64; 3]; 3],
    /// Weighted sums of products of the terms and the durations.
    products: [f64; 3],
    coefficients: [f64; 3],
    observed: u32,
}

impl CostFit {
    fn expected(&self, terms: [f64; 3]) -> f64 {
        self.coefficients.iter().zip(terms).map(|(coefficient, term)| coefficient * term).sum()
    }

    /// Adds an observation. Terms that come first in `order` explain what the others do not, if several could.
    fn observe(&mut self, terms: [f64; 3], seconds: f64, weight: f64, order: [usize; 3]) {
        for ((squares, product), term) in self.squares.iter_mut().zip(&mut self.products).zip(terms) {
            for (square, other) in squares.iter_mut().zip(terms) {
                *square = *square * KEEP + weight * term * other;
            }
            *product = *product * KEEP + weight * term * seconds;
        }
        for _ in 0..PASSES {
            for at in order {
                let scale = self.squares[at][at];
                if scale <= FORGOTTEN {
                    continue;
                }
                let left = self.products[at] - self.expected_product(at);
                let better = self.coefficients[at] + left / scale;
                if better.is_finite() {
                    self.coefficients[at] = better.clamp(0.0, SECONDS.1);
                }
            }
        }
        self.observed = self.observed.saturating_add(1);
    }

    fn expected_product(&self, at: usize) -> f64 {
        self.expected(self.squares[at])
    }

    /// From now on the durations are shorter by `seconds`: the coefficients stay but for the constant one, and earlier
    /// observations no longer count.
    fn shorten(&mut self, seconds: f64) {
        let [constant, first, second] = self.coefficients;
        *self = Self {
            coefficients: [(constant - seconds).max(0.0), first, second],
            observed: self.observed.min(1),
            ..Self::default()
        };
    }
}

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepCost {
    /// One, rows, pairs of rows.
    rows: CostFit,
    /// One, tokens, pairs.
    chunks: CostFit,
    /// The most tokens and pairs of one step's chunks so far.
    tokens_max: f64,
    pairs_max: f64,
    /// The most rows of one step without chunks so far.
    rows_max: f64,
}

impl StepCost {
    /// Learns from a step that took so long.
    pub(super) fn learn(&mut self, work: &StepWork, took: Duration) {
        let mut seconds = took.as_secs_f64().clamp(SECONDS.0, SECONDS.1);
        let observed = if work.tokens > 0.0 { self.chunks.observed } else { self.rows.observed };
        let expected = if observed == 0 { seconds } else { self.expected(work).max(SECONDS.0) };
        if observed >= WARM_UP {
            seconds = seconds.clamp(expected / UNEXPECTED, expected * UNEXPECTED);
        }
        // The error is relative to the shorter of the two, so that a slower machine is noticed as soon as a faster one.
        let weight = seconds.min(expected).powi(-2);
        let rows = [1.0, work.rows, work.row_pairs];
        let only_chunks = self.rows.observed == 0;
        // Each step reads the weights, which explains its duration first of all.
        let constant_first = [0, 1, 2];
        if work.tokens <= 0.0 {
            self.rows.observe(rows, seconds, weight, constant_first);
            self.rows_max = self.rows_max.max(work.rows);
            if only_chunks {
                self.chunks.shorten(self.rows.expected(rows));
            }
            return;
        }
        let of_chunks = (seconds - self.rows.expected(rows)).max(0.0);
        // Where that is known already, tokens explain the rest first: the next chunk is then rather too small.
        let order = if only_chunks { constant_first } else { [1, 2, 0] };
        self.chunks.observe([1.0, work.tokens, work.pairs], of_chunks, weight, order);
        self.tokens_max = self.tokens_max.max(work.tokens);
        self.pairs_max = self.pairs_max.max(work.pairs);
    }

    /// The expected duration of a step, in seconds.
    pub(super) fn expected(&self, work: &StepWork) -> f64 {
        let rows = self.rows.expected([1.0, work.rows, work.row_pairs]);
        if work.tokens <= 0.0 { rows } else { rows + self.chunks.expected([1.0, work.tokens, work.pairs]) }
    }

    /// The expected duration, in seconds, of a step with these rows and a chunk, without what the chunk's size adds.
    pub(super) fn before_chunks(&self, rows: &StepWork) -> f64 {
        self.rows.expected([1.0, rows.rows, rows.row_pairs]) + self.chunks.coefficients[0]
    }

    /// What chunks add.
    pub(super) fn chunk_price(&self) -> TokenPrice {
        TokenPrice { per_token: self.chunks.coefficients[1], per_pair: self.chunks.coefficients[2] }
    }

    /// What further tokens of sequences that decode add.
    pub(super) fn row_price(&self) -> TokenPrice {
        TokenPrice { per_token: self.rows.coefficients[1], per_pair: self.rows.coefficients[2] }
    }

    /// The most tokens of sequences that decode that were seen so far in a step without chunks.
    pub(super) fn most_rows_seen(&self) -> f64 {
        self.rows_max
    }

    /// Whether a step of this composition has been observed.
    pub(super) fn knows(&self, work: &StepWork) -> bool {
        let fit = if work.tokens > 0.0 { &self.chunks } else { &self.rows };
        fit.observed > 0
    }

    /// The most tokens and pairs of a step with chunks that were seen so far.
    pub(super) fn largest_seen(&self) -> (f64, f64) {
        (self.tokens_max, self.pairs_max)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn work(rows: usize, context: usize, start: usize, count: usize) -> StepWork {
        StepWork {
            rows: rows as f64,
            row_pairs: rows as f64 * pairs(context, 1),
            tokens: count as f64,
            pairs: pairs(start, count),
        }
    }

    /// A machine: 10 ms for the weights, 0.25 ms per token, 0.15 µs per pair.
    fn duration(work: &StepWork) -> Duration {
        let seconds = 0.010 + 250e-6 * work.tokens + 0.15e-6 * work.pairs + 0.05e-6 * work.row_pairs;
        Duration::from_secs_f64(seconds)
    }

    fn learned() -> StepCost {
        let mut cost = StepCost::default();
        for step in 0..40 {
            let one = work(2, 100 + step, 0, 0);
            cost.learn(&one, duration(&one));
            let chunk = work(2, 100 + step, 200 * step, 64 + 32 * (step % 7));
            cost.learn(&chunk, duration(&chunk));
        }
        cost
    }

    #[test]
    fn durations_of_any_context_are_learned() {
        let cost = learned();
        for case in [work(2, 140, 0, 0), work(2, 140, 0, 200), work(2, 140, 4_000, 128)] {
            let (expected, took) = (cost.expected(&case), duration(&case).as_secs_f64());
            assert!((expected / took - 1.0).abs() < 0.15, "{case:?}: {expected} s, not {took} s");
        }
        let price = cost.chunk_price();
        assert!(price.of(32_768, 64) > 3.0 * price.of(0, 64), "{price:?}");
    }

    #[test]
    fn a_pause_changes_little_and_a_slower_machine_is_noticed_within_a_few_steps() {
        let (mut cost, case) = (learned(), work(2, 140, 4_000, 128));
        let before = cost.expected(&case);
        cost.learn(&case, Duration::from_secs(60));
        assert!(cost.expected(&case) < 1.6 * before, "{} s after one pause", cost.expected(&case));
        let mut cost = learned();
        for _ in 0..24 {
            cost.learn(&case, 3 * duration(&case));
        }
        assert!((cost.expected(&case) / (3.0 * before) - 1.0).abs() < 0.2, "{} s", cost.expected(&case));
    }

    #[test]
    fn a_long_time_without_prompts_keeps_what_is_known_about_chunks() {
        let mut cost = learned();
        let before = cost.chunk_price();
        for step in 0..100_000 {
            let one = work(2, 140 + step % 100, 0, 0);
            cost.learn(&one, duration(&one));
        }
        assert_eq!(cost.chunk_price(), before);
    }

    proptest! {
        /// Any durations: the estimate stays finite, and a larger or later chunk never costs less.
        #[test]
        fn the_price_is_finite_and_grows_with_the_chunk(
            steps in prop::collection::vec((0_usize..64, 0_usize..5_000, 0_usize..131_072, 0_usize..4_096, 0_u64..1 << 40), 1..200)
        ) {
            let mut cost = StepCost::default();
            for (rows, context, start, count, nanoseconds) in steps {
                cost.learn(&work(rows, context, start, count), Duration::from_nanos(nanoseconds));
                let price = cost.chunk_price();
                prop_assert!(price.of(0, 1) <= price.of(0, 2) && price.of(5, 9) <= price.of(6, 9));
                prop_assert!(price.of(131_072, 4_096).is_finite());
                prop_assert!(cost.expected(&work(rows, context, start, count)) >= 0.0);
                prop_assert!(cost.before_chunks(&work(rows, context, 0, 0)).is_finite());
            }
        }
    }
}
