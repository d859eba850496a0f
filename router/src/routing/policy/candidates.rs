//! The engines that a policy chooses from, as far as policies ask: a list, or a pool's board, which answers without a walk
//! over all of them (`routing/pool/board.rs`).

use super::Candidate;
use crate::config::LoadUnit;

/// Engines that are kept for each slot of keys: with a tenth of the engines full or away, one choice of ten thousand needs
/// another one.
pub(crate) const FIRST: usize = 4;

/// Engines that can be chosen.
pub(crate) trait Candidates {
    /// How many there are.
    fn count(&self) -> usize;

    /// What each of them weighs, where it is known that all weigh the same.
    fn even_weight(&self) -> Option<u32>;

    /// All weights together; 0 only without candidates.
    fn weights(&self) -> u64;

    /// All their requests together.
    fn requests(&self) -> u64;

    /// The candidate at a position below the sum of the weights, each taking as many positions as it weighs; and the
    /// position at which it begins.
    fn at(&self, position: u64) -> Option<(Candidate, u64)>;

    /// The least loaded; one of them where several are.
    fn least(&self, by: LoadUnit, turn: u64) -> Option<Candidate>;

    /// The one that has this cache.
    fn of_holder(&self, holder: u32) -> Option<Candidate>;

    /// Of all engines whose ranks for a slot are the highest those that can be chosen, the highest first, where that is kept:
    /// `rank` of an engine never changes. `None`: every candidate has to be asked.
    fn first_of(&self, slot: u16, rank: &dyn Fn(&Candidate) -> f64) -> Option<[Option<Candidate>; FIRST]>;

    /// Every candidate.
    fn each(&self, see: &mut dyn FnMut(&Candidate));
}

/// In the order of their caches' numbers.
impl Candidates for Vec<Candidate> {
    fn count(&self) -> usize {
        self.len()
    }

    fn even_weight(&self) -> Option<u32> {
        let first = self.first()?.weight;
        self.iter().all(|c| c.weight == first).then_some(first)
    }

    fn weights(&self) -> u64 {
        self.iter().map(|c| u64::from(c.weight)).sum()
    }

    fn requests(&self) -> u64 {
        self.iter().map(|c| u64::from(c.requests)).sum()
    }

    fn at(&self, position: u64) -> Option<(Candidate, u64)> {
        let mut begins = 0;
        let found = self.iter().find(|candidate| {
            let here = position - begins < u64::from(candidate.weight);
            begins += if here { 0 } else { u64::from(candidate.weight) };
            here
        });
        found.map(|candidate| (*candidate, begins))
    }

    fn least(&self, by: LoadUnit, turn: u64) -> Option<Candidate> {
        let (mut least, mut equals) = (u64::MAX, 0_u64);
        for candidate in self {
            let load = candidate.load(by);
            if load < least {
                (least, equals) = (load, 1);
            } else if load == least {
                equals += 1;
            }
        }
        // Without turns an idle system would send everything to the first engine.
        let turn = usize::try_from(turn.checked_rem(equals)?).expect("below a length");
        self.iter().filter(|c| c.load(by) == least).nth(turn).copied()
    }

    fn of_holder(&self, holder: u32) -> Option<Candidate> {
        self.binary_search_by_key(&holder, |c| c.holder).ok().map(|at| self[at])
    }

    fn first_of(&self, _: u16, _: &dyn Fn(&Candidate) -> f64) -> Option<[Option<Candidate>; FIRST]> {
        None
    }

    fn each(&self, see: &mut dyn FnMut(&Candidate)) {
        self.iter().for_each(see);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_loads;
    use super::*;

    #[test]
    fn a_position_belongs_to_a_candidate_as_often_as_it_weighs() {
        let mut candidates = with_loads(&[0, 0, 0]);
        (candidates[0].weight, candidates[2].weight) = (2, 3);
        let found: Vec<_> = (0..candidates.weights()).filter_map(|p| candidates.at(p)).collect();
        assert_eq!(
            found.iter().map(|(c, begins)| (c.index, *begins)).collect::<Vec<_>>(),
            [(0, 0), (0, 0), (1, 2), (2, 3), (2, 3), (2, 3)]
        );
        assert_eq!(candidates.at(6), None);
    }
}
