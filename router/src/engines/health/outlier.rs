//! Detection of outliers: engines that are so much worse than their pool that they are ejected for a time. Pure.
//!
//! Every interval each engine's replies are compared with those of all others together:
//!
//! - *failures*: its rate exceeds `failure_percent` and is at least twice the others';
//! - *latency*: its mean time to the first byte exceeds `latency_factor` times the others' median.
//!
//! A pool in which all engines fail alike has no outlier: the cause is the requests, or a shared dependency.
//!
//! Invariants: at most `max_ejected_percent` of a pool is ejected at once, and never its last engine.

/// Criteria of an outlier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct OutlierTerms {
    /// Minimum replies in an interval for a conclusion.
    pub requests_min: u64,
    /// Maximum share of failures.
    pub failure_percent: u64,
    /// Multiple of the others' median; 0: disabled.
    pub latency_factor: f64,
    /// Maximum share of a pool.
    pub max_ejected_percent: usize,
}

/// Outcomes of one engine in one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OutlierSample {
    pub answers: u64,
    pub failures: u64,
    /// Sum over its successful replies.
    pub latency_us: u64,
    /// The engine is out of rotation already, for any reason.
    pub is_excluded: bool,
}

impl OutlierSample {
    fn mean_latency_us(&self) -> Option<u64> {
        self.latency_us.checked_div(self.answers - self.failures)
    }
}

/// The indexes of the pool's outliers, worst first.
pub(crate) fn outliers(pool: &[OutlierSample], terms: &OutlierTerms) -> Vec<usize> {
    let out = pool.iter().filter(|sample| sample.is_excluded).count();
    let allowed = (pool.len() * terms.max_ejected_percent / 100).max(1).min(pool.len().saturating_sub(1));
    let all = PoolTotals::of(pool);
    let mut found: Vec<(u64, usize)> =
        (0..pool.len()).filter_map(|at| Some((score(pool[at], &all, terms)?, at))).collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    found.truncate(allowed.saturating_sub(out));
    found.into_iter().map(|(_, at)| at).collect()
}

/// Sums over all engines in rotation, so that each engine is compared with the others in constant time.
struct PoolTotals {
    answers: u64,
    failures: u64,
    /// The means of all engines that have one, ascending.
    means: Vec<u64>,
}

impl PoolTotals {
    fn of(pool: &[OutlierSample]) -> Self {
        let of = || pool.iter().filter(|sample| !sample.is_excluded);
        let (answers, failures) = of().fold((0, 0), |sum, s| (sum.0 + s.answers, sum.1 + s.failures));
        let mut means: Vec<u64> = of().filter_map(OutlierSample::mean_latency_us).collect();
        means.sort_unstable();
        Self { answers, failures, means }
    }

    /// The median of all means without one of them.
    fn median_without(&self, mean: u64) -> Option<u64> {
        let own = self.means.partition_point(|one| *one < mean);
        let median = self.means.len().checked_sub(1)? / 2;
        self.means.get(if median < own { median } else { median + 1 }).copied()
    }
}

/// How bad an engine is, in thousandths of failures; `None` if it is no outlier.
fn score(one: OutlierSample, all: &PoolTotals, terms: &OutlierTerms) -> Option<u64> {
    if one.is_excluded || one.answers < terms.requests_min.max(1) {
        return None;
    }
    let (answers, failures) = (all.answers - one.answers, all.failures - one.failures);
    if answers < terms.requests_min.max(1) {
        return None;
    }
    let permille = |failures: u64, answers: u64| failures.saturating_mul(1000) / answers.max(1);
    let (its, theirs) = (permille(one.failures, one.answers), permille(failures, answers));
    if its > terms.failure_percent * 10 && its >= 2 * theirs {
        return Some(its);
    }
    if terms.latency_factor <= 0.0 {
        return None;
    }
    let mean = one.mean_latency_us()?;
    let slow = mean as f64 > terms.latency_factor * all.median_without(mean)?.max(1) as f64;
    // A slow engine ranks below all failing ones, whatever the factor.
    slow.then_some(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: OutlierTerms =
        OutlierTerms { requests_min: 10, failure_percent: 30, latency_factor: 4.0, max_ejected_percent: 50 };

    fn sample(answers: u64, failures: u64) -> OutlierSample {
        OutlierSample { answers, failures, latency_us: (answers - failures) * 1000, is_excluded: false }
    }

    #[test]
    fn an_engine_that_fails_while_others_succeed_is_ejected() {
        assert_eq!(outliers(&[sample(100, 0), sample(100, 60), sample(100, 1)], &TERMS), [1]);
        assert_eq!(
            outliers(&[sample(100, 0), sample(5, 5), sample(100, 1)], &TERMS),
            Vec::<usize>::new(),
            "too few to say"
        );
    }

    #[test]
    fn no_engine_is_an_outlier_when_all_fail() {
        assert_eq!(
            outliers(&[sample(100, 60), sample(100, 70), sample(100, 65)], &TERMS),
            Vec::<usize>::new()
        );
    }

    #[test]
    fn a_much_slower_engine_is_ejected_only_if_configured() {
        let slow = OutlierSample { latency_us: 100 * 9000, ..sample(100, 0) };
        let pool = [sample(100, 0), sample(100, 0), slow];
        assert_eq!(outliers(&pool, &TERMS), [2]);
        assert_eq!(outliers(&pool, &OutlierTerms { latency_factor: 0.0, ..TERMS }), Vec::<usize>::new());
    }

    #[test]
    fn the_median_of_the_others_excludes_the_engine() {
        for means in [vec![5], vec![1, 2], vec![1, 1, 3], vec![1, 2, 2, 9], vec![4, 4, 4, 4, 7]] {
            let all = PoolTotals { answers: 0, failures: 0, means: means.clone() };
            for at in 0..means.len() {
                let mut others = means.clone();
                let own = others.remove(at);
                assert_eq!(all.median_without(own), others.get(others.len() / 2).copied(), "{means:?} {at}");
            }
        }
    }

    #[test]
    fn ejections_stay_within_the_pools_share_and_spare_the_last_engine() {
        for size in 1..7_usize {
            for kinds in 0..3_usize.pow(u32::try_from(size).expect("small")) {
                let kind = |at: usize| kinds / 3_usize.pow(u32::try_from(at).expect("small")) % 3;
                let pool: Vec<OutlierSample> = (0..size)
                    .map(|at| match kind(at) {
                        0 => sample(100, 0),
                        1 => sample(100, 100),
                        _ => OutlierSample { is_excluded: true, ..sample(100, 100) },
                    })
                    .collect();
                for max_ejected_percent in [0, 10, 50, 100] {
                    let chosen = outliers(&pool, &OutlierTerms { max_ejected_percent, ..TERMS });
                    let before = pool.iter().filter(|s| s.is_excluded).count();
                    let after = before + chosen.len();
                    assert!(chosen.is_empty() || after < size, "{pool:?}: the last one");
                    let most = (size * max_ejected_percent / 100).max(1);
                    assert!(chosen.is_empty() || after <= most, "{pool:?}: {chosen:?}");
                    assert!(chosen.iter().all(|at| !pool[*at].is_excluded && pool[*at].failures > 0));
                }
            }
        }
    }
}
