//! One engine after the other, regardless of load; an engine with twice the weight is chosen twice as often.

use super::{Candidate, Candidates, Choice, Draw, Policy};
use crate::message::features::RoutingFeatures;
use crate::metrics::routing::ChoiceReason;

/// Takes turns.
#[derive(Debug)]
pub(crate) struct RoundRobin;

impl Policy for RoundRobin {
    fn choose(&self, _: &RoutingFeatures<'_>, candidates: &dyn Candidates, draw: Draw) -> Option<Choice> {
        let position = match candidates.even_weight() {
            Some(weight) => draw.turn.checked_rem(candidates.count() as u64)? * u64::from(weight),
            None => {
                let total = candidates.weights();
                draw.turn.checked_rem(total)?.wrapping_mul(stride(total)) % total
            }
        };
        candidates.at(position).map(|(c, _)| Choice { index: c.index, reason: ChoiceReason::Turn })
    }

    fn score(&self, _: &RoutingFeatures<'_>, _: &Candidate) -> f64 {
        0.0
    }
}

/// Steps of this many positions visit each of `total` once before they repeat, and never stay at one engine. The value
/// is the golden section of `total`, increased until the two are coprime.
fn stride(total: u64) -> u64 {
    let golden = (total * 618 / 1000).max(1);
    (golden..golden + total).find(|&step| coprime(step, total)).unwrap_or(1)
}

fn coprime(mut a: u64, mut b: u64) -> bool {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}

#[cfg(test)]
mod tests {
    use super::super::tests::with_loads;
    use super::*;

    fn turns(candidates: &Vec<Candidate>, count: u64) -> Vec<usize> {
        let choose =
            |turn| RoundRobin.choose(&RoutingFeatures::default(), candidates, Draw { turn, random: 0 });
        (0..count).filter_map(choose).map(|c| c.index).collect()
    }

    #[test]
    fn every_engine_gets_its_turn() {
        assert_eq!(turns(&with_loads(&[97, 93, 91]), 6), [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn weights_are_turns_and_the_heavy_ones_are_not_all_at_once() {
        let mut candidates = with_loads(&[0, 0, 0]);
        (candidates[0].weight, candidates[1].weight) = (6, 3);
        let taken = turns(&candidates, 1000);
        let of = |index| taken.iter().filter(|&&i| i == index).count();
        assert_eq!((of(0), of(1), of(2)), (600, 300, 100));
        let in_a_row = taken.windows(5).filter(|five| five.iter().all(|&i| i == 0)).count();
        assert_eq!(in_a_row, 0, "six turns of ten, but never five in a row");
    }
}
