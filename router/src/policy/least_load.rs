//! The engine with the fewest requests of this router in flight; engines that are equal take turns.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Candidate, Policy, Wanted};

/// Takes the least loaded.
#[derive(Debug, Default)]
pub(crate) struct LeastLoad {
    turn: AtomicUsize,
}

impl Policy for LeastLoad {
    fn choose(&self, _: &Wanted<'_>, candidates: &[Candidate]) -> Option<usize> {
        let least = candidates.iter().map(|c| c.in_flight).min()?;
        let equals = || candidates.iter().filter(|c| c.in_flight == least);
        // Without turns an idle system would send everything to the first engine.
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % equals().count();
        equals().nth(turn).map(|c| c.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_loaded_is_chosen_and_equals_take_turns() {
        let policy = LeastLoad::default();
        let load = |loads: [usize; 3]| {
            [0, 1, 2].map(|index| Candidate { index, in_flight: loads[index], weight: 1 })
        };
        assert_eq!(policy.choose(&Wanted::default(), &load([2, 1, 3])), Some(1));
        let mut chosen: Vec<_> =
            (0..4).filter_map(|_| policy.choose(&Wanted::default(), &load([1, 5, 1]))).collect();
        chosen.sort_unstable();
        assert_eq!(chosen, [0, 0, 2, 2]);
        assert_eq!(policy.choose(&Wanted::default(), &[]), None);
    }
}
