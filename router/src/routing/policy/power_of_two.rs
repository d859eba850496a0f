//! The less loaded of two random engines. Several routers that do not know each other's requests spread their load with
//! it; with the least load, all of them would choose the same engine. (Mitzenmacher, The Power of Two Choices in
//! Randomized Load Balancing, 2001.)

use super::{Candidate, Candidates, Choice, Draw, Policy};
use crate::config::LoadUnit;
use crate::message::features::RoutingFeatures;
use crate::metrics::routing::ChoiceReason;

/// Draws two engines.
#[derive(Debug)]
pub(crate) struct PowerOfTwo(pub LoadUnit);

impl Policy for PowerOfTwo {
    fn choose(&self, _: &RoutingFeatures<'_>, candidates: &dyn Candidates, draw: Draw) -> Option<Choice> {
        let total = candidates.weights();
        let (first, begins) = candidates.at(draw.number(total, 0))?;
        // The second engine is drawn from the others, so the comparison is always between two engines.
        let weight = u64::from(first.weight);
        let second = draw.number(total - weight, 32);
        let second = candidates.at(if second < begins { second } else { second + weight }).map(|(c, _)| c);
        let chosen = second.filter(|second| second.load(self.0) < first.load(self.0)).unwrap_or(first);
        Some(Choice { index: chosen.index, reason: ChoiceReason::LessLoadedOfTwo })
    }

    fn score(&self, _: &RoutingFeatures<'_>, candidate: &Candidate) -> f64 {
        -(candidate.load(self.0) as f64 / 65_536.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_loads;
    use super::*;

    #[test]
    fn the_busier_of_two_and_the_busiest_of_many_are_never_chosen() {
        let mut draw = Draw::seeded(3);
        let policy = PowerOfTwo(LoadUnit::Requests);
        for _ in 0..1_000 {
            let choice = policy.choose(&RoutingFeatures::default(), &with_loads(&[5, 4]), draw.next());
            assert_eq!(choice.map(|c| c.index), Some(1));
            let choice = policy.choose(&RoutingFeatures::default(), &with_loads(&[1, 2, 9, 3]), draw.next());
            assert_ne!(choice.map(|c| c.index), Some(2));
        }
    }

    #[test]
    fn every_engine_but_the_busiest_gets_requests() {
        let mut draw = Draw::seeded(4);
        let policy = PowerOfTwo(LoadUnit::Requests);
        let mut taken = [0; 4];
        for _ in 0..1_000 {
            let choice = policy.choose(&RoutingFeatures::default(), &with_loads(&[1, 2, 3, 4]), draw.next());
            taken[choice.expect("a candidate").index] += 1;
        }
        assert!(taken[0] > taken[1] && taken[1] > taken[2] && taken[2] > 50, "{taken:?}");
        assert_eq!(taken[3], 0);
    }
}
