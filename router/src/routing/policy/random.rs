//! A random engine, with probabilities by weight.

use super::{Candidate, Candidates, Choice, Draw, Policy};
use crate::message::features::RoutingFeatures;
use crate::metrics::routing::ChoiceReason;

/// Draws one engine.
#[derive(Debug)]
pub(crate) struct Random;

impl Policy for Random {
    fn choose(&self, _: &RoutingFeatures<'_>, candidates: &dyn Candidates, draw: Draw) -> Option<Choice> {
        let (drawn, _) = candidates.at(draw.number(candidates.weights(), 0))?;
        Some(Choice { index: drawn.index, reason: ChoiceReason::Drawn })
    }

    fn score(&self, _: &RoutingFeatures<'_>, candidate: &Candidate) -> f64 {
        f64::from(candidate.weight)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_loads;
    use super::*;

    #[test]
    fn engines_are_drawn_in_proportion_to_their_weights() {
        let mut candidates = with_loads(&[9, 0, 4]);
        candidates[2].weight = 2;
        let mut draw = Draw::seeded(1);
        let mut taken = [0_u32; 3];
        for _ in 0..40_000 {
            let choice =
                Random.choose(&RoutingFeatures::default(), &candidates, draw.next()).expect("a candidate");
            taken[choice.index] += 1;
        }
        // Six standard deviations of a draw are 520 and 600.
        assert!(taken[0].abs_diff(10_000) < 520 && taken[2].abs_diff(20_000) < 600, "{taken:?}");
    }
}
