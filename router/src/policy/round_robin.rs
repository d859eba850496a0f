//! One engine after the other, whatever they are doing.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Candidate, Policy, Wanted};

/// Takes turns.
#[derive(Debug, Default)]
pub(crate) struct RoundRobin {
    turn: AtomicUsize,
}

impl Policy for RoundRobin {
    fn choose(&self, _: &Wanted<'_>, candidates: &[Candidate]) -> Option<usize> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        candidates.get(turn.checked_rem(candidates.len())?).map(|c| c.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_engine_gets_its_turn() {
        let policy = RoundRobin::default();
        let candidates = [3, 7, 9].map(|index| Candidate { index, in_flight: 100 - index, weight: 1 });
        let chosen: Vec<_> = (0..6).map(|_| policy.choose(&Wanted::default(), &candidates)).collect();
        assert_eq!(chosen, [3, 7, 9, 3, 7, 9].map(Some));
        assert_eq!(policy.choose(&Wanted::default(), &[]), None);
    }
}
