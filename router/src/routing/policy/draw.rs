//! What is drawn for one decision: a turn and a random number. Policies get it as an argument.

use std::cell::Cell;

/// What one decision may use instead of a counter and a generator of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Draw {
    /// One more with each decision of the pool.
    pub turn: u64,
    /// 64 random bits.
    pub random: u64,
}

thread_local!(static STATE: Cell<u64> = Cell::new(seed()));

impl Draw {
    /// What is drawn on this thread from now on follows from `seed`.
    pub(crate) fn reseed(seed: u64) {
        STATE.with(|state| state.set(seed));
    }

    /// With this turn and fresh random bits.
    pub(crate) fn at(turn: u64) -> Self {
        STATE.with(|state| {
            let (next, random) = step(state.get());
            state.set(next);
            Self { turn, random }
        })
    }

    /// A number below `below`, of the bits from `shift` on. `below` is small against 2^32.
    pub(crate) fn number(self, below: u64, shift: u32) -> u64 {
        ((self.random.rotate_right(shift) & 0xffff_ffff) * below) >> 32
    }
}

#[cfg(test)]
impl Draw {
    /// The first of a series that is always the same.
    pub(crate) fn seeded(seed: u64) -> Self {
        Self { turn: 0, random: step(seed).1 }
    }

    /// Moves on in the series; gives what it moved to.
    pub(crate) fn next(&mut self) -> Self {
        *self = Self { turn: self.turn + 1, random: step(self.random).1 };
        *self
    }
}

/// Not a secret: it only has to differ between threads and routers.
fn seed() -> u64 {
    let mut bytes = [0; 8];
    // Without a source of randomness draws repeat from run to run, and that is all.
    let _ = getrandom::fill(&mut bytes);
    u64::from_ne_bytes(bytes)
}

/// SplitMix64: the next state and its output.
fn step(state: u64) -> (u64, u64) {
    let next = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = next;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (next, mixed ^ (mixed >> 31))
}
