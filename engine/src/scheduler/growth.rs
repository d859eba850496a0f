//! The growth of admitted sequences: admission leaves them the blocks that they will soon need.
//!
//! Few responses are as long as their request permits. [`OutputLengths`] counts the lengths of ended responses, for
//! each size of `max_new`, and predicts from them how long a running one will be, given the tokens it already has.
//! Different sequences get different quantiles of one distribution, so together their predictions have its spread.
//!
//! A prompt that is not computed yet generates, and ends, after the steps of its prefill: at least as many as its tokens
//! need if all chunks are as large as possible.
//!
//! [`fits`] looks [`HORIZON`] steps ahead. At each predicted end it adds up the blocks that the remaining sequences
//! will have taken, less those that ended ones have freed. A look further ahead would leave blocks unused for long,
//! and computing a sequence again costs less than that.
//!
//! A preemption shows that predictions were too short: all of them move to higher quantiles, which wears off with the
//! steps that follow. Everything is integer arithmetic: equal events lead to equal decisions.
//!
//! Sources: the look ahead is that of LightLLM's past-future scheduler (Gong et al., ASPLOS 2025). The feedback has the
//! purpose of SGLang's `new_token_ratio`, which jumps at a retraction and decays with steps. vLLM has neither.

use crate::scheduler::sequence::SeqId;

/// Steps that a prediction covers.
const HORIZON: usize = 32;

/// Classes of `max_new`, by its number of bits.
const CLASSES: usize = 32;

/// Buckets of lengths: exact below 8, then four per doubling, up to 32 bits.
const BUCKETS: usize = 124;

/// The weight of an observed length. The lengths that are assumed in the beginning have a weight of 1.
const OBSERVED_WEIGHT: u16 = 4;

/// Assumed lengths of each class in the beginning, evenly spread up to [`ASSUMED_MAX`].
const ASSUMED: usize = 8;
const ASSUMED_MAX: usize = 1_024;

/// At this weight all counts of a class are halved, so that recent lengths count more: 256 observations.
const WEIGHT_MAX: u32 = 1_024;

/// Quantiles, and caution, are parts of so many.
const PARTS: usize = 256;

/// A preemption adds so much caution.
const CAUTION_PER_PREEMPTION: usize = 16;

/// So many steps without a preemption take a part of the caution away.
const STEPS_PER_CAUTION: u32 = 4;

/// A sequence that outlives all observed ones is expected to generate half as many tokens again, and at least so many.
const UNOBSERVED_MIN: usize = 16;

/// The lengths of the responses whose `max_new` has the same number of bits.
#[derive(Clone, Debug)]
struct LengthClass {
    counts: [u16; BUCKETS],
    weight: u32,
}

/// The lengths of ended responses. See the module's documentation.
#[derive(Debug)]
pub(super) struct OutputLengths {
    classes: Vec<LengthClass>,
    /// How far predictions move from their own quantile to the longest length: parts of [`PARTS`].
    caution: usize,
    /// Steps since caution changed.
    calm_steps: u32,
}

/// What an admitted sequence has, and how long it is predicted to run.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceGrowth {
    /// Steps that compute its prompt and no token.
    pub(super) prefill: usize,
    /// Steps after these until it ends; at least 1.
    pub(super) steps: usize,
    /// Its tokens, prompt and output; at least 1.
    pub(super) tokens: usize,
    /// The blocks it has.
    pub(super) blocks: usize,
    /// Of those, the ones that are free after its end.
    pub(super) freed: usize,
}

impl SequenceGrowth {
    /// Steps until its end.
    fn end(&self) -> usize {
        self.prefill + self.steps
    }

    /// Blocks that it takes in the next `steps` steps.
    fn wants(&self, steps: usize, block_tokens: usize) -> usize {
        let generated = self.steps.min(steps.saturating_sub(self.prefill));
        let tokens = self.tokens + generated.saturating_sub(1);
        tokens.div_ceil(block_tokens).saturating_sub(self.blocks)
    }
}

/// Whether `available` blocks suffice for the growth of these sequences up to the horizon.
pub(super) fn fits(mut sequences: Vec<SequenceGrowth>, available: usize, block_tokens: usize) -> bool {
    let wanted = |sequences: &[SequenceGrowth], steps: usize| -> usize {
        sequences.iter().map(|sequence| sequence.wants(steps, block_tokens)).sum()
    };
    if wanted(&sequences, HORIZON) <= available {
        return true;
    }
    sequences.sort_unstable_by_key(SequenceGrowth::end);
    let (mut freed, mut checked) = (0, 0);
    for (at, sequence) in sequences.iter().enumerate() {
        let moment = sequence.end().min(HORIZON);
        // Of the sequences that end together, the first has the fewest freed blocks.
        if moment > checked && wanted(&sequences[at..], moment) > available + freed {
            return false;
        }
        if moment == HORIZON {
            break;
        }
        checked = moment;
        freed += sequence.freed;
    }
    true
}

impl Default for OutputLengths {
    fn default() -> Self {
        let class = |bits: usize| {
            let longest = ((1_usize << bits) - 1).clamp(1, ASSUMED_MAX);
            let mut class = LengthClass { counts: [0; BUCKETS], weight: 0 };
            (1..=ASSUMED).for_each(|part| class.add((longest * part / ASSUMED).max(1), 1));
            class
        };
        Self { classes: (0..CLASSES).map(class).collect(), caution: 0, calm_steps: 0 }
    }
}

impl LengthClass {
    fn add(&mut self, length: usize, weight: u16) {
        self.counts[bucket(length)] += weight;
        self.weight += u32::from(weight);
        if self.weight >= WEIGHT_MAX {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.weight = self.counts.iter().copied().map(u32::from).sum();
        }
    }
}

impl OutputLengths {
    /// A response of a request with this `max_new` has ended at this length.
    pub(super) fn observe(&mut self, max_new: usize, length: usize) {
        self.classes[class_of(max_new)].add(length, OBSERVED_WEIGHT);
    }

    /// A sequence was preempted.
    pub(super) fn preempted(&mut self) {
        self.caution = (self.caution + CAUTION_PER_PREEMPTION).min(PARTS);
        self.calm_steps = 0;
    }

    /// A step was planned.
    pub(super) fn stepped(&mut self) {
        self.calm_steps += 1;
        if self.calm_steps >= STEPS_PER_CAUTION {
            self.caution = self.caution.saturating_sub(1);
            self.calm_steps = 0;
        }
    }

    /// The predicted steps until the end of a sequence: at least 1, and at most as many as it may generate.
    pub(super) fn steps_left(&self, id: SeqId, max_new: usize, generated: usize) -> usize {
        let most = max_new.saturating_sub(generated).max(1);
        let counts = &self.classes[class_of(max_new)].counts;
        let longer = || {
            let from = bucket(generated);
            (from..).zip(&counts[from..]).filter(move |&(at, _)| longest_in(at) > generated)
        };
        let weight: usize = longer().map(|(_, count)| usize::from(*count)).sum();
        if weight == 0 {
            return (generated / 2).max(UNOBSERVED_MIN).min(most);
        }
        let mut rank = weight * self.quantile(id) / PARTS;
        for (at, count) in longer() {
            let count = usize::from(*count);
            if rank < count {
                return (longest_in(at) - generated).clamp(1, most);
            }
            rank -= count;
        }
        most
    }

    /// The quantile of a sequence, below [`PARTS`].
    fn quantile(&self, id: SeqId) -> usize {
        // Multiples of the golden ratio are spread evenly, whatever their number.
        let own = (id.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize;
        own + (PARTS - 1 - own) * self.caution / PARTS
    }
}

fn class_of(max_new: usize) -> usize {
    ((usize::BITS - max_new.leading_zeros()) as usize).min(CLASSES - 1)
}

fn bucket(length: usize) -> usize {
    if length < 4 {
        return length;
    }
    let bits = length.ilog2() as usize;
    (4 * (bits - 1) + ((length >> (bits - 2)) & 3)).min(BUCKETS - 1)
}

/// The longest length in a bucket.
fn longest_in(bucket: usize) -> usize {
    if bucket < 4 {
        return bucket;
    }
    let bits = bucket / 4 + 1;
    ((4 + bucket % 4 + 1) << (bits - 2)) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 16;

    fn row(steps: usize, tokens: usize) -> SequenceGrowth {
        let blocks = tokens.div_ceil(BLOCK);
        SequenceGrowth { prefill: 0, steps, tokens, blocks, freed: blocks }
    }

    #[test]
    fn buckets_cover_all_lengths_in_order() {
        let mut last = 0;
        for length in (0..5_000).chain([1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]) {
            let at = bucket(length);
            assert!(at >= last && at < BUCKETS, "{length} is in {at}, after {last}");
            assert!(longest_in(at) >= length && (at == 0 || longest_in(at - 1) < length), "{length} in {at}");
            last = at;
        }
        assert_eq!(bucket(usize::MAX), BUCKETS - 1);
        assert_eq!((class_of(0), class_of(1), class_of(usize::MAX)), (0, 1, CLASSES - 1));
    }

    #[test]
    fn predictions_have_the_spread_of_what_was_observed() {
        let mut lengths = OutputLengths::default();
        for at in 0..2_000 {
            lengths.observe(512, if at % 10 < 7 { 40 } else { 400 });
        }
        let predicted = |generated| -> Vec<usize> {
            (0..1_000).map(|id| lengths.steps_left(SeqId(id), 512, generated)).collect()
        };
        let long = predicted(0).iter().filter(|steps| **steps > 200).count();
        assert!((250..350).contains(&long), "{long} of 1000 are predicted to be long, as 300 are");
        // What has outlived the short ones is long, and never longer than its request permits.
        assert!(predicted(60).iter().all(|steps| (300..=452).contains(steps)));
        assert!(predicted(511).iter().all(|steps| *steps == 1));
        // Other sizes of `max_new` have lengths of their own.
        assert!((0..1_000).all(|id| lengths.steps_left(SeqId(id), 8, 0) <= 8));
    }

    #[test]
    fn old_lengths_are_forgotten() {
        let mut lengths = OutputLengths::default();
        (0..5_000).for_each(|_| lengths.observe(512, 20));
        (0..3_000).for_each(|_| lengths.observe(512, 300));
        let short = (0..1_000).filter(|id| lengths.steps_left(SeqId(*id), 512, 0) < 100).count();
        assert!(short <= 10, "{short} of 1000 predictions are of the old kind");
    }

    #[test]
    fn caution_rises_with_preemptions_and_wears_off() {
        let mut lengths = OutputLengths::default();
        let sum = |lengths: &OutputLengths| -> usize {
            (0..256).map(|id| lengths.steps_left(SeqId(id), 512, 0)).sum()
        };
        let usual = sum(&lengths);
        (0..100).for_each(|_| lengths.preempted());
        assert_eq!(sum(&lengths), 256 * 512, "at most the longest permitted");
        (0..512).for_each(|_| lengths.stepped());
        let later = sum(&lengths);
        assert!(usual < later && later < 256 * 512);
        (0..512).for_each(|_| lengths.stepped());
        assert_eq!(sum(&lengths), usual);
    }

    #[test]
    fn blocks_of_sequences_that_end_before_count() {
        // One block each is full, so each takes a second one with its second token.
        let two = vec![row(20, 16), row(20, 16)];
        assert!(fits(two.clone(), 4, BLOCK) && !fits(two, 3, BLOCK));
        // The first ends after one step and frees its block.
        assert!(fits(vec![row(1, 16), row(17, 16)], 1, BLOCK));
        assert!(fits(vec![row(1, 16), row(18, 16)], 1, BLOCK));
        assert!(!fits(vec![row(3, 16), row(17, 16)], 1, BLOCK));
        // Growth beyond the horizon does not count.
        assert!(fits(vec![row(100_000, 16)], HORIZON / BLOCK, BLOCK));
        assert!(fits(Vec::new(), 0, BLOCK));
    }

    #[test]
    fn a_prompt_ends_and_grows_after_its_prefill() {
        // Its last block has a place for its tokens. The other one takes a second block in its second step, and a third
        // one in its 18th.
        let frees = |prefill| {
            let prompt = SequenceGrowth { prefill, ..row(4, 630) };
            fits(vec![prompt, row(20, 16)], 1, BLOCK)
        };
        assert!(frees(0) && frees(13));
        assert!(!frees(14) && !frees(58), "its blocks are free too late");
        // It takes another block with its second token.
        let grows = |prefill| !fits(vec![SequenceGrowth { prefill, ..row(4, 640) }], 0, BLOCK);
        assert!(grows(0) && grows(30) && !grows(31), "within the horizon of 32 steps");
    }
}
