//! The turn and the random number of one decision. Policies receive them as an argument.

use std::cell::Cell;

use crate::message::random;

/// Replaces a counter and a generator in the policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Draw {
    /// Increases with each decision of the pool.
    pub turn: u64,
    /// 64 random bits.
    pub random: u64,
}

// Without a source of randomness, draws repeat from run to run; this is acceptable.
thread_local!(static STATE: Cell<u64> = Cell::new(random::seed()));

impl Draw {
    /// Makes this thread's later draws depend on `seed` only.
    pub(crate) fn reseed(seed: u64) {
        STATE.with(|state| state.set(seed));
    }

    /// A draw with this turn and new random bits.
    pub(crate) fn at(turn: u64) -> Self {
        STATE.with(|state| {
            let (next, random) = step(state.get());
            state.set(next);
            Self { turn, random }
        })
    }

    /// A number below `below`, from the bits at `shift`. `below` must be small compared with 2^32.
    pub(crate) fn number(self, below: u64, shift: u32) -> u64 {
        ((self.random.rotate_right(shift) & 0xffff_ffff) * below) >> 32
    }
}

#[cfg(test)]
impl Draw {
    /// The first draw of a series that depends on `seed` only.
    pub(crate) fn seeded(seed: u64) -> Self {
        Self { turn: 0, random: step(seed).1 }
    }

    /// Advances the series and returns the new draw.
    pub(crate) fn next(&mut self) -> Self {
        *self = Self { turn: self.turn + 1, random: step(self.random).1 };
        *self
    }
}

/// SplitMix64: the next state and its output.
fn step(state: u64) -> (u64, u64) {
    let next = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = next;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (next, mixed ^ (mixed >> 31))
}
