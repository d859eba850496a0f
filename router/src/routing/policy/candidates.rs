//! The engines that a policy chooses from, with the queries of policies: a list, or a pool's load index, which answers
//! without a walk over all engines (`routing/pool/load_index.rs`).

use super::Candidate;
use crate::config::LoadUnit;

/// Engines stored per hash slot. With a tenth of the engines full or unavailable, one choice in ten thousand needs
/// another engine.
pub(crate) const FIRST: usize = 4;

/// Engines that can be chosen.
pub(crate) trait Candidates {
    /// Number of candidates.
    fn count(&self) -> usize;

    /// The weight of every candidate, if all are known to be equal.
    fn even_weight(&self) -> Option<u32>;

    /// Sum of the weights; 0 only without candidates.
    fn weights(&self) -> u64;

    /// Sum of the requests.
    fn requests(&self) -> u64;

    /// The candidate at a position below the sum of the weights, and the position at which that candidate begins. A
    /// candidate covers as many positions as its weight.
    fn at(&self, position: u64) -> Option<(Candidate, u64)>;

    /// The least loaded candidate; among equals `turn` selects one.
    fn least(&self, by: LoadUnit, turn: u64) -> Option<Candidate>;

    /// The candidate with this cache.
    fn with_cache(&self, cache_id: u32) -> Option<Candidate>;

    /// Those candidates among the engines with the highest ranks of a slot, highest first, if they are stored. An
    /// engine's `rank` for a slot never changes. `None`: the caller has to rank every candidate.
    fn first_of_slot(
        &self,
        slot: u16,
        rank: &dyn Fn(&Candidate) -> f64,
    ) -> Option<[Option<Candidate>; FIRST]>;

    /// Calls `visit` for every candidate.
    fn each(&self, visit: &mut dyn FnMut(&Candidate));
}

/// Ordered by cache id.
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
        // Without turns an idle system would send every request to the first engine.
        let turn = usize::try_from(turn.checked_rem(equals)?).expect("below a length");
        self.iter().filter(|c| c.load(by) == least).nth(turn).copied()
    }

    fn with_cache(&self, cache_id: u32) -> Option<Candidate> {
        self.binary_search_by_key(&cache_id, |c| c.cache_id).ok().map(|at| self[at])
    }

    fn first_of_slot(&self, _: u16, _: &dyn Fn(&Candidate) -> f64) -> Option<[Option<Candidate>; FIRST]> {
        None
    }

    fn each(&self, visit: &mut dyn FnMut(&Candidate)) {
        self.iter().for_each(visit);
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
