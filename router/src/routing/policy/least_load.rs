//! The engine with the least load for its weight, in requests or in prompt tokens; equal engines take turns.

use super::{Candidate, Candidates, Choice, Draw, Policy};
use crate::config::LoadUnit;
use crate::message::features::RoutingFeatures;
use crate::metrics::routing::ChoiceReason;

/// Chooses the least loaded engine.
#[derive(Debug)]
pub(crate) struct LeastLoad(pub LoadUnit);

impl Policy for LeastLoad {
    fn choose(&self, _: &RoutingFeatures<'_>, candidates: &dyn Candidates, draw: Draw) -> Option<Choice> {
        let index = candidates.least(self.0, draw.turn)?.index;
        Some(Choice { index, reason: ChoiceReason::LeastLoaded })
    }

    fn score(&self, _: &RoutingFeatures<'_>, candidate: &Candidate) -> f64 {
        -(candidate.load(self.0) as f64 / 65_536.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_loads;
    use super::*;

    fn chosen(policy: &LeastLoad, candidates: &Vec<Candidate>, turn: u64) -> Option<usize> {
        policy.choose(&RoutingFeatures::default(), candidates, Draw { turn, random: 0 }).map(|c| c.index)
    }

    #[test]
    fn the_least_loaded_is_chosen_and_equals_take_turns() {
        let policy = LeastLoad(LoadUnit::Requests);
        assert_eq!(chosen(&policy, &with_loads(&[2, 1, 3]), 0), Some(1));
        let mut taken: Vec<_> =
            (0..4).filter_map(|turn| chosen(&policy, &with_loads(&[1, 5, 1]), turn)).collect();
        taken.sort_unstable();
        assert_eq!(taken, [0, 0, 2, 2]);
        assert_eq!(chosen(&policy, &Vec::new(), 0), None);
    }

    #[test]
    fn an_engine_of_twice_the_weight_bears_twice_the_load() {
        let mut candidates = with_loads(&[0, 0]);
        candidates[1].weight = 2;
        for turn in 0..300 {
            let index = chosen(&LeastLoad(LoadUnit::Requests), &candidates, turn).expect("a candidate");
            candidates[index].requests += 1;
        }
        assert_eq!([candidates[0].requests, candidates[1].requests], [100, 200]);
    }

    #[test]
    fn by_tokens_one_long_prompt_weighs_more_than_many_short_ones() {
        let mut candidates = with_loads(&[1, 20]);
        (candidates[0].tokens, candidates[1].tokens) = (30_000, 20 * 50);
        assert_eq!(chosen(&LeastLoad(LoadUnit::Requests), &candidates, 0), Some(0));
        assert_eq!(chosen(&LeastLoad(LoadUnit::Tokens), &candidates, 0), Some(1));
    }
}
