//! The number of turns that the tenants of a queue have waiting, as sums that are read in a fixed number of steps.
//! Pure.
//!
//! A tenant with `n` requests and the weight `w` has `n / w` turns waiting. Before a request that comes after `t`
//! turns of its own tenant, another tenant is served `min(n, t·w)` requests, and at least one. Tenants are grouped
//! by the power of two of their turns. In the classes below that of `t`, all requests count. In the classes above,
//! the tenants' shares count. Only the class of `t` itself is estimated, from above.

/// Fraction of a turn that is counted, so that a weight of 1,000 still distinguishes one request from none.
const PART_BITS: u32 = 10;
/// A queue has at most 1,000,000 requests, 2^20, each at least one part.
const CLASSES: usize = 20 + PART_BITS as usize + 1;

/// Sums of all classes.
#[derive(Debug, Default)]
pub(crate) struct TurnTotals([ClassTotals; CLASSES]);

/// Sums of the tenants of one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ClassTotals {
    tenants: usize,
    requests: usize,
    weight: u64,
}

impl TurnTotals {
    /// Adds a tenant with so many waiting requests. Does nothing if it has none.
    pub(crate) fn add(&mut self, requests: usize, weight: u32) {
        if let Some(class) = class(requests, weight) {
            let sum = &mut self.0[class];
            sum.tenants += 1;
            sum.requests += requests;
            sum.weight += u64::from(weight);
        }
    }

    /// Removes a tenant that was added with these values.
    pub(crate) fn subtract(&mut self, requests: usize, weight: u32) {
        if let Some(class) = class(requests, weight) {
            self.0[class].subtract(requests, weight);
        }
    }

    /// Requests of other tenants that are served before the last of so many `turns` of a tenant of this weight.
    /// `own`: its requests and weight that are among the sums.
    pub(crate) fn ahead(&self, turns: usize, weight: u32, own: Option<(usize, u32)>) -> usize {
        let own = own.and_then(|(requests, weight)| Some((class(requests, weight)?, requests, weight)));
        let of_class = |(at, sum): (usize, &ClassTotals)| {
            let mut sum = *sum;
            if let Some((_, requests, weight)) = own.filter(|(class, ..)| *class == at) {
                sum.subtract(requests, weight);
            }
            let share = (turns as u64).saturating_mul(sum.weight).div_ceil(u64::from(weight.max(1)));
            sum.requests.min(usize::try_from(share).unwrap_or(usize::MAX).max(sum.tenants))
        };
        self.0.iter().enumerate().map(of_class).sum()
    }
}

impl ClassTotals {
    fn subtract(&mut self, requests: usize, weight: u32) {
        self.tenants -= 1;
        self.requests -= requests;
        self.weight -= u64::from(weight);
    }
}

fn class(requests: usize, weight: u32) -> Option<usize> {
    let parts = ((requests as u64) << PART_BITS) / u64::from(weight.max(1));
    (requests > 0).then(|| (parts.max(1).ilog2() as usize).min(CLASSES - 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same by a walk over the tenants.
    fn walked(tenants: &[(usize, u32)], turns: usize, weight: u32) -> usize {
        let of = |(requests, tenant_weight): &(usize, u32)| {
            let share = (turns as u64 * u64::from(*tenant_weight)).div_ceil(u64::from(weight)).max(1);
            (*requests).min(share as usize)
        };
        tenants.iter().map(of).sum()
    }

    fn sums(tenants: &[(usize, u32)]) -> TurnTotals {
        let mut turns = TurnTotals::default();
        tenants.iter().for_each(|(requests, weight)| turns.add(*requests, *weight));
        turns
    }

    #[test]
    fn tenants_with_little_and_with_much_go_with_what_they_have_and_with_their_share() {
        let mut tenants = vec![(1, 1); 99];
        tenants.push((100, 1));
        assert_eq!(sums(&tenants).ahead(10, 1, None), 109);
        assert_eq!(sums(&tenants).ahead(1, 1, Some((100, 1))), 99);
        assert_eq!(sums(&[(1000, 1)]).ahead(1, 1, None), 1);
        assert_eq!(sums(&[]).ahead(7, 1, None), 0);
    }

    proptest! {
        #[test]
        fn the_sums_estimate_what_a_walk_counts_at_most_twice_and_never_less(
            tenants in proptest::collection::vec((1..2000_usize, 1..1000_u32), 0..50),
            turns in 1..2000_usize,
            weight in 1..1000_u32,
        ) {
            let (walked, estimated) = (walked(&tenants, turns, weight), sums(&tenants).ahead(turns, weight, None));
            prop_assert!(estimated <= 2 * walked + tenants.len(), "{estimated} of {walked}");
            prop_assert!(walked <= estimated + tenants.len(), "{estimated} of {walked}");
        }

        #[test]
        fn subtracting_every_tenant_leaves_zero_totals(tenants in proptest::collection::vec((0..1_000_001_usize, 1..1001_u32), 0..50)) {
            let mut turns = sums(&tenants);
            tenants.iter().for_each(|(requests, weight)| turns.subtract(*requests, *weight));
            prop_assert!(turns.0.iter().all(|sum| *sum == ClassTotals::default()));
        }
    }
}
