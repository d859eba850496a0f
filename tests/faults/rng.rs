//! Choices from a seed: the same seed gives the same choices on every machine.

use std::time::Duration;

/// A stream of choices (SplitMix64, public domain by S. Vigna).
#[derive(Clone, Debug)]
pub(crate) struct FaultRng(u64);

impl FaultRng {
    /// The choices of one round of a run.
    pub(crate) fn new(seed: u64, round: u64) -> Self {
        let mut dice = Self(seed ^ round.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        dice.next();
        dice
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// One of `from..=to`.
    pub(crate) fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from + 1)
    }

    /// A time of `from..=to` milliseconds.
    pub(crate) fn ms(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.between(from, to))
    }

    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        let at = self.next() % choices.len() as u64;
        choices[usize::try_from(at).expect("an index")]
    }

    /// True once in `n` draws.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }
}
