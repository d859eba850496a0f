//! The least loaded engine for its weight, in requests or in prompt tokens; engines that are equal take turns.

use super::{Candidate, Choice, Draw, Policy, Reason, Wanted};
use crate::config::LoadUnit;

/// Takes the least loaded.
#[derive(Debug)]
pub(crate) struct LeastLoad(pub LoadUnit);

impl Policy for LeastLoad {
    fn choose(&self, _: &Wanted<'_>, candidates: &[Candidate], draw: Draw) -> Option<Choice> {
        let index = least(candidates, self.0, draw)?.index;
        Some(Choice { index, reason: Reason::LeastLoaded })
    }

    fn score(&self, _: &Wanted<'_>, candidate: &Candidate) -> f64 {
        -(candidate.load(self.0) as f64 / 65_536.0)
    }
}

/// The least loaded; one of them where several are.
pub(super) fn least(candidates: &[Candidate], by: LoadUnit, draw: Draw) -> Option<&Candidate> {
    let (mut least, mut equals) = (u64::MAX, 0_u64);
    for candidate in candidates {
        let load = candidate.load(by);
        if load < least {
            (least, equals) = (load, 1);
        } else if load == least {
            equals += 1;
        }
    }
    // Without turns an idle system would send everything to the first engine.
    let turn = usize::try_from(draw.turn.checked_rem(equals)?).expect("below a length");
    candidates.iter().filter(|c| c.load(by) == least).nth(turn)
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_loads;
    use super::*;

    fn chosen(policy: &LeastLoad, candidates: &[Candidate], turn: u64) -> Option<usize> {
        policy.choose(&Wanted::default(), candidates, Draw { turn, random: 0 }).map(|c| c.index)
    }

    #[test]
    fn the_least_loaded_is_chosen_and_equals_take_turns() {
        let policy = LeastLoad(LoadUnit::Requests);
        assert_eq!(chosen(&policy, &with_loads(&[2, 1, 3]), 0), Some(1));
        let mut taken: Vec<_> =
            (0..4).filter_map(|turn| chosen(&policy, &with_loads(&[1, 5, 1]), turn)).collect();
        taken.sort_unstable();
        assert_eq!(taken, [0, 0, 2, 2]);
        assert_eq!(chosen(&policy, &[], 0), None);
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
