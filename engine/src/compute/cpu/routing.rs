//! Which experts compute which rows of a step.
//!
//! ```text
//!   choose   each row: its experts, in the order of their numbers, and their weights
//!   group    once: the experts in use, and a place for each row of each of them, side by side
//! ```
//!
//! Workers may join a step in the middle, so the number of items of a phase must not depend on the choice. A phase over
//! experts has an item for every [`Routes::slots`], and those beyond the experts in use do nothing.
#![allow(
    unsafe_code,
    reason = "tables shared by the workers through raw pointers, with a barrier between phases"
)]

use super::rows::SharedPtr;

/// Sizes of a step's routing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RoutingSizes {
    /// Rows of the step.
    pub(super) rows: usize,
    /// Experts of a row.
    pub(super) per_token: usize,
    /// Experts of a layer.
    pub(super) experts: usize,
    /// The rows of an expert begin at multiples of this number.
    pub(super) align: usize,
}

impl RoutingSizes {
    /// Pairs of a row and one of its experts.
    pub(super) fn pairs(&self) -> usize {
        self.rows * self.per_token
    }

    /// Most experts in use.
    pub(super) fn slots(&self) -> usize {
        self.experts.min(self.pairs())
    }

    /// Most places of rows.
    pub(super) fn places(&self) -> usize {
        (self.pairs() + self.slots() * (self.align - 1)).next_multiple_of(self.align)
    }

    /// Numbers of the tables.
    pub(super) fn numbers(&self) -> usize {
        2 * self.pairs() + 3 * self.slots() + 1
    }
}

/// The rows of one expert: places `first .. first + count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpertRun {
    pub(super) expert: usize,
    pub(super) first: usize,
    pub(super) count: usize,
}

/// The tables of one layer: for each pair its expert and its place, and the runs of the experts in use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Routes {
    pub(super) sizes: RoutingSizes,
    /// [`RoutingSizes::numbers`] numbers: experts, places, runs, and the number of runs.
    pub(super) numbers: SharedPtr<u32>,
    /// The weight of each pair.
    pub(super) weights: SharedPtr<f32>,
}

impl Routes {
    /// Most experts in use.
    pub(super) fn slots(&self) -> usize {
        self.sizes.slots()
    }

    /// Chooses the experts of a row: those with the largest probabilities, the first of equal ones. `numerators` are
    /// the softmax numerators of all experts, `sum` is their sum. A weight is a probability, or with `normalized` its
    /// share of the chosen ones.
    ///
    /// # Safety
    /// No other code uses this row of the tables meanwhile.
    pub(super) unsafe fn choose(&self, row: usize, numerators: &mut [f32], sum: f32, normalized: bool) {
        let count = self.sizes.per_token;
        // SAFETY: the row is inside the tables; the caller's contract.
        let (experts, weights) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.numbers.at(row * count), count),
                std::slice::from_raw_parts_mut(self.weights.at(row * count), count),
            )
        };
        let mut chosen_sum = 0.0;
        for slot in 0..count {
            let mut best = 0;
            for (expert, numerator) in numerators.iter().enumerate() {
                if *numerator > numerators[best] {
                    best = expert;
                }
            }
            let probability = numerators[best] / sum;
            chosen_sum += probability;
            // Below every numerator.
            numerators[best] = f32::NEG_INFINITY;
            // Sorted by number, so that the results of the experts are added in that order.
            let best = u32::try_from(best).expect("few experts");
            let at = experts[..slot].iter().position(|expert| *expert > best).unwrap_or(slot);
            experts.copy_within(at..slot, at + 1);
            weights.copy_within(at..slot, at + 1);
            (experts[at], weights[at]) = (best, probability);
        }
        if normalized {
            weights.iter_mut().for_each(|weight| *weight /= chosen_sum);
        }
    }

    /// Gives the pairs of each expert places side by side, in the order of the rows.
    ///
    /// # Safety
    /// All rows have chosen, and no other code uses the tables meanwhile.
    pub(super) unsafe fn group(&self) {
        let RoutingSizes { experts, align, .. } = self.sizes;
        let (pairs, slots) = (self.sizes.pairs(), self.slots());
        // SAFETY: the tables have this many numbers; the caller's contract.
        let numbers = unsafe { std::slice::from_raw_parts_mut(self.numbers.at(0), self.sizes.numbers()) };
        let (chosen, rest) = numbers.split_at_mut(pairs);
        let (places, rest) = rest.split_at_mut(pairs);
        let (runs, count_of_runs) = rest.split_at_mut(3 * slots);
        let mut next = vec![0_u32; experts];
        chosen.iter().for_each(|expert| next[*expert as usize] += 1);
        let (mut place, mut used) = (0_usize, 0);
        for (expert, next) in next.iter_mut().enumerate().filter(|(_, count)| **count > 0) {
            let number = |number: usize| u32::try_from(number).expect("rows and experts of a step are few");
            runs[3 * used..3 * used + 3].copy_from_slice(&[number(expert), number(place), *next]);
            let count = *next as usize;
            *next = number(place);
            place = (place + count).next_multiple_of(align);
            used += 1;
        }
        for (expert, place) in chosen.iter().zip(places) {
            let next = &mut next[*expert as usize];
            *place = *next;
            *next += 1;
        }
        count_of_runs[0] = u32::try_from(used).expect("few experts");
    }

    /// The run of a slot, if it is in use.
    ///
    /// # Safety
    /// The tables are grouped, and no other code writes them meanwhile.
    pub(super) unsafe fn run(&self, slot: usize) -> Option<ExpertRun> {
        let (start, slots) = (2 * self.sizes.pairs(), self.slots());
        // SAFETY: inside the tables; the caller's contract.
        unsafe {
            if slot >= *self.numbers.at(start + 3 * slots) as usize {
                return None;
            }
            let number = |index: usize| *self.numbers.at(start + 3 * slot + index) as usize;
            Some(ExpertRun { expert: number(0), first: number(1), count: number(2) })
        }
    }

    /// The places of a row and the weights of its experts, in the order of the experts.
    ///
    /// # Safety
    /// As [`Self::run`].
    pub(super) unsafe fn of_row(&self, row: usize) -> impl Iterator<Item = (usize, f32)> {
        let (first, this) = (row * self.sizes.per_token, *self);
        (first..first + this.sizes.per_token).map(move |pair| {
            // SAFETY: inside the tables; the caller's contract.
            unsafe { (*this.numbers.at(this.sizes.pairs() + pair) as usize, *this.weights.at(pair)) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tables in which each row has chosen by its numerators.
    fn routed(
        sizes: RoutingSizes,
        rows: &[&[f32]],
        normalized: bool,
    ) -> (Vec<u32>, Vec<f32>, Vec<ExpertRun>) {
        let (mut numbers, mut weights) = (vec![7; sizes.numbers()], vec![f32::NAN; sizes.pairs()]);
        let routes = Routes {
            sizes,
            numbers: SharedPtr(numbers.as_mut_ptr()),
            weights: SharedPtr(weights.as_mut_ptr()),
        };
        // SAFETY: only this test uses the tables.
        let runs = unsafe {
            for (row, numerators) in rows.iter().enumerate() {
                let sum = numerators.iter().sum();
                routes.choose(row, &mut numerators.to_vec(), sum, normalized);
            }
            routes.group();
            (0..routes.slots()).filter_map(|slot| routes.run(slot)).collect()
        };
        (numbers, weights, runs)
    }

    #[test]
    fn a_row_gets_its_most_probable_experts_in_the_order_of_their_numbers() {
        let sizes = RoutingSizes { rows: 2, per_token: 2, experts: 4, align: 1 };
        let rows: [&[f32]; 2] = [&[1.0, 2.0, 1.0, 4.0], &[3.0, 0.0, 3.0, 3.0]];
        let (numbers, weights, runs) = routed(sizes, &rows, false);
        // Of equal ones the first.
        assert_eq!(numbers[..4], [1, 3, 0, 2]);
        assert_eq!(weights, [0.25, 0.5, 1.0 / 3.0, 1.0 / 3.0]);
        assert_eq!(
            runs.iter().map(|run| (run.expert, run.count)).collect::<Vec<_>>(),
            [(0, 1), (1, 1), (2, 1), (3, 1)]
        );
        let (_, weights, _) = routed(sizes, &rows, true);
        assert_eq!(weights, [0.25 / 0.75, 0.5 / 0.75, 0.5, 0.5]);
    }

    #[test]
    fn the_rows_of_an_expert_are_side_by_side_and_begin_where_the_unit_wants_them() {
        let sizes = RoutingSizes { rows: 3, per_token: 1, experts: 8, align: 4 };
        let rows: [&[f32]; 3] = [
            &[0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
            &[0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            &[0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
        ];
        let (numbers, _, runs) = routed(sizes, &rows, true);
        assert_eq!(
            runs,
            [ExpertRun { expert: 2, first: 0, count: 1 }, ExpertRun { expert: 5, first: 4, count: 2 }]
        );
        assert_eq!(numbers[3..6], [4, 0, 5]);
        assert!(sizes.places() >= 6 && sizes.places().is_multiple_of(4));
    }

    #[test]
    fn normalized_weights_are_a_softmax_over_the_chosen_experts() {
        let sizes = RoutingSizes { rows: 1, per_token: 2, experts: 4, align: 1 };
        let numerators = [0.3_f32, 2.0, -1.0, 1.2].map(|logit| (logit - 2.0).exp());
        let (numbers, weights, _) = routed(sizes, &[&numerators[..]], true);
        assert_eq!(numbers[..2], [1, 3]);
        let first = 1.0 / (1.0 + (-0.8_f32).exp());
        assert!(
            (weights[0] - first).abs() < 1e-6 && (weights[1] - (1.0 - first)).abs() < 1e-6,
            "{weights:?}"
        );
    }

    #[test]
    fn rows_without_numbers_have_experts_too() {
        let sizes = RoutingSizes { rows: 1, per_token: 2, experts: 3, align: 1 };
        let (numbers, _, runs) = routed(sizes, &[&[f32::NAN; 3]], true);
        assert!(numbers[..2].iter().all(|expert| *expert < 3));
        assert_eq!(runs.iter().map(|run| run.count).sum::<usize>(), 2);
    }
}
