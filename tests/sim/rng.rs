//! The random numbers of a run, from its seed: splitmix64.

/// A stream of numbers. Runs split off one stream per purpose, so that a change in one does not affect the others.
#[derive(Clone, Debug)]
pub struct SimRng(u64);

impl SimRng {
    pub fn new(seed: u64, purpose: u64) -> Self {
        let mut dice = Self(seed ^ purpose.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        dice.roll();
        dice
    }

    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Below `n`, which is positive.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.roll()) * u128::from(n)) >> 64) as u64
    }

    /// From `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True in `percent` of a hundred cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// True in one of `n` cases.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }

    /// A time that is mostly short and sometimes long: from `low` to `high`, evenly in its logarithm.
    pub fn stretch(&mut self, low: u64, high: u64) -> u64 {
        let octaves = (high / low.max(1)).max(1).ilog2() as u64;
        let base = low << self.below(octaves + 1);
        (base + self.below(base.max(1))).min(high)
    }
}

pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
