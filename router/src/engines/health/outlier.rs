//! Which engines of a pool are so much worse than the others that they are left out for a while. Pure.
//!
//! Every interval each engine's answers are compared with those of the others together:
//!
//! - *failures*: its rate is over `failure_percent` and at least twice the others';
//! - *latency*: its mean time to the first byte is over `latency_factor` times the others' median.
//!
//! A pool in which everybody fails alike has no outlier: it is the requests, or something that all depend on.
//!
//! Invariants: at most `max_ejected_percent` of a pool is left out at once, and never its last engine.

/// When an engine is an outlier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Terms {
    /// Answers in an interval below which nothing is concluded.
    pub requests_min: u64,
    /// Of its answers.
    pub failure_percent: u64,
    /// Times the others' median; 0: not looked at.
    pub latency_factor: f64,
    /// Of a pool.
    pub max_ejected_percent: usize,
}

/// What one engine did in one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sample {
    pub answers: u64,
    pub failures: u64,
    /// Sum over its good answers.
    pub latency_us: u64,
    /// It is left out already, for this or for another reason.
    pub out: bool,
}

impl Sample {
    fn mean_latency_us(&self) -> Option<u64> {
        self.latency_us.checked_div(self.answers - self.failures)
    }
}

/// The pool's outliers, worst first, by index.
pub(crate) fn outliers(pool: &[Sample], terms: &Terms) -> Vec<usize> {
    let out = pool.iter().filter(|sample| sample.out).count();
    let allowed = (pool.len() * terms.max_ejected_percent / 100).max(1).min(pool.len().saturating_sub(1));
    let all = All::of(pool);
    let mut found: Vec<(u64, usize)> =
        (0..pool.len()).filter_map(|at| Some((score(pool[at], &all, terms)?, at))).collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    found.truncate(allowed.saturating_sub(out));
    found.into_iter().map(|(_, at)| at).collect()
}

/// What all engines of a pool did that are not left out, so that each is compared with the others at no cost of theirs.
struct All {
    answers: u64,
    failures: u64,
    /// Of each that has one, ascending.
    means: Vec<u64>,
}

impl All {
    fn of(pool: &[Sample]) -> Self {
        let of = || pool.iter().filter(|sample| !sample.out);
        let (answers, failures) = of().fold((0, 0), |sum, s| (sum.0 + s.answers, sum.1 + s.failures));
        let mut means: Vec<u64> = of().filter_map(Sample::mean_latency_us).collect();
        means.sort_unstable();
        Self { answers, failures, means }
    }

    /// The median of the means but for one of them.
    fn median_without(&self, mean: u64) -> Option<u64> {
        let own = self.means.partition_point(|one| *one < mean);
        let median = self.means.len().checked_sub(1)? / 2;
        self.means.get(if median < own { median } else { median + 1 }).copied()
    }
}

/// How bad it is, in thousandths of failures; `None` when it is no outlier.
fn score(one: Sample, all: &All, terms: &Terms) -> Option<u64> {
    if one.out || one.answers < terms.requests_min.max(1) {
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
    // Slower than failing, whatever the factor: failures are worse than waiting.
    slow.then_some(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms =
        Terms { requests_min: 10, failure_percent: 30, latency_factor: 4.0, max_ejected_percent: 50 };

    fn sample(answers: u64, failures: u64) -> Sample {
        Sample { answers, failures, latency_us: (answers - failures) * 1000, out: false }
    }

    #[test]
    fn the_one_that_fails_while_the_others_do_not_is_left_out() {
        assert_eq!(outliers(&[sample(100, 0), sample(100, 60), sample(100, 1)], &TERMS), [1]);
        assert_eq!(
            outliers(&[sample(100, 0), sample(5, 5), sample(100, 1)], &TERMS),
            Vec::<usize>::new(),
            "too few to say"
        );
    }

    #[test]
    fn nobody_is_an_outlier_where_everybody_fails() {
        assert_eq!(
            outliers(&[sample(100, 60), sample(100, 70), sample(100, 65)], &TERMS),
            Vec::<usize>::new()
        );
    }

    #[test]
    fn the_one_that_is_far_slower_than_the_others_is_left_out_only_if_asked_for() {
        let slow = Sample { latency_us: 100 * 9000, ..sample(100, 0) };
        let pool = [sample(100, 0), sample(100, 0), slow];
        assert_eq!(outliers(&pool, &TERMS), [2]);
        assert_eq!(outliers(&pool, &Terms { latency_factor: 0.0, ..TERMS }), Vec::<usize>::new());
    }

    #[test]
    fn the_median_of_the_others_is_that_of_a_list_without_the_one() {
        for means in [vec![5], vec![1, 2], vec![1, 1, 3], vec![1, 2, 2, 9], vec![4, 4, 4, 4, 7]] {
            let all = All { answers: 0, failures: 0, means: means.clone() };
            for at in 0..means.len() {
                let mut others = means.clone();
                let own = others.remove(at);
                assert_eq!(all.median_without(own), others.get(others.len() / 2).copied(), "{means:?} {at}");
            }
        }
    }

    #[test]
    fn never_more_than_its_share_of_a_pool_and_never_the_last_engine_is_left_out() {
        for size in 1..7_usize {
            for kinds in 0..3_usize.pow(u32::try_from(size).expect("small")) {
                let kind = |at: usize| kinds / 3_usize.pow(u32::try_from(at).expect("small")) % 3;
                let pool: Vec<Sample> = (0..size)
                    .map(|at| match kind(at) {
                        0 => sample(100, 0),
                        1 => sample(100, 100),
                        _ => Sample { out: true, ..sample(100, 100) },
                    })
                    .collect();
                for max_ejected_percent in [0, 10, 50, 100] {
                    let chosen = outliers(&pool, &Terms { max_ejected_percent, ..TERMS });
                    let before = pool.iter().filter(|s| s.out).count();
                    let after = before + chosen.len();
                    assert!(chosen.is_empty() || after < size, "{pool:?}: the last one");
                    let most = (size * max_ejected_percent / 100).max(1);
                    assert!(chosen.is_empty() || after <= most, "{pool:?}: {chosen:?}");
                    assert!(chosen.iter().all(|at| !pool[*at].out && pool[*at].failures > 0));
                }
            }
        }
    }
}
