//! When requests arrive. The times are fixed before the run, so that a slow endpoint does not delay the next
//! request.

use std::time::Duration;

use crate::load::rng::Rng;

/// Maximum requests of one run.
pub(crate) const REQUESTS_MAX: usize = 10_000_000;

/// Distribution of arrivals.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Arrivals {
    /// Requests per second. `None`: all are due at once.
    pub(crate) rate: Option<ArrivalRate>,
    /// The shape of the gamma distribution of intervals. 1 is a Poisson process, less is burstier, infinite is a
    /// constant interval (as vLLM's `--burstiness`).
    pub(crate) burstiness: f64,
    /// Arrivals only in the first of these two durations, repeatedly.
    pub(crate) waves: Option<(Duration, Duration)>,
}

/// Requests per second during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ArrivalRate {
    Constant(f64),
    /// From the first value to the second, by the same amount with each request.
    Linear(f64, f64),
    /// From the first value to the second, by the same factor with each request.
    Exponential(f64, f64),
}

impl ArrivalRate {
    /// The rate at request `index` of `count`.
    fn at(self, index: usize, count: usize) -> f64 {
        let progress = index as f64 / count.saturating_sub(1).max(1) as f64;
        match self {
            Self::Constant(rate) => rate,
            Self::Linear(from, to) => from + (to - from) * progress,
            Self::Exponential(from, to) => from * (to / from).powf(progress),
        }
    }
}

impl Arrivals {
    /// When each of `count` requests is due, after the beginning. The first is due after one interval.
    pub(crate) fn times(&self, count: usize, rng: &mut Rng) -> Vec<Duration> {
        let Some(rate) = self.rate else { return vec![Duration::ZERO; count] };
        let mut at = 0.0;
        let times = (0..count).map(|index| {
            let interval = if self.burstiness.is_infinite() {
                1.0
            } else {
                rng.gamma(self.burstiness) / self.burstiness
            };
            at += interval / rate.at(index, count);
            self.spread(at)
        });
        times.collect()
    }

    /// Inserts the times without arrivals.
    fn spread(&self, at: f64) -> Duration {
        let at = Duration::try_from_secs_f64(at).unwrap_or(Duration::MAX);
        let Some((on, off)) = self.waves else { return at };
        let passed = at.as_secs_f64() / on.as_secs_f64();
        at.saturating_add(
            Duration::try_from_secs_f64(off.as_secs_f64() * passed.floor()).unwrap_or(Duration::MAX),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at_once() -> Arrivals {
        Arrivals { rate: None, burstiness: 1.0, waves: None }
    }

    fn poisson(rate: f64) -> Arrivals {
        Arrivals { rate: Some(ArrivalRate::Constant(rate)), ..at_once() }
    }

    /// Seconds between arrivals.
    fn gaps(arrivals: &Arrivals, count: usize) -> Vec<f64> {
        let times = arrivals.times(count, &mut Rng::new(11));
        assert!(times.is_sorted() && times.len() == count);
        let from = std::iter::once(&Duration::ZERO).chain(&times);
        from.zip(&times).map(|(from, to)| (*to - *from).as_secs_f64()).collect()
    }

    fn mean_and_cv(gaps: &[f64]) -> (f64, f64) {
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn arrivals_have_their_rate_and_burstiness() {
        for (burstiness, expected) in [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (f64::INFINITY, 0.0)] {
            let arrivals = Arrivals { burstiness, ..poisson(50.0) };
            let (mean, cv) = mean_and_cv(&gaps(&arrivals, 50_000));
            assert!((mean - 0.02).abs() < 0.001, "{burstiness}: {mean}");
            assert!((cv - expected).abs() < 0.06, "{burstiness}: {cv}");
        }
        assert!(at_once().times(3, &mut Rng::new(1)).iter().all(Duration::is_zero));
    }

    #[test]
    fn a_ramp_changes_from_the_first_rate_to_the_second() {
        for rate in [ArrivalRate::Linear(10.0, 100.0), ArrivalRate::Exponential(10.0, 100.0)] {
            let arrivals = Arrivals { rate: Some(rate), ..at_once() };
            let gaps = gaps(&arrivals, 20_000);
            let (first, _) = mean_and_cv(&gaps[..1_000]);
            let (last, _) = mean_and_cv(&gaps[19_000..]);
            assert!(
                (first * 10.0 - 0.9).abs() < 0.15 && (last * 100.0 - 1.04).abs() < 0.15,
                "{rate:?}: {first} {last}"
            );
        }
        assert!((ArrivalRate::Linear(10.0, 100.0).at(5, 11) - 55.0).abs() < 1e-9);
        assert!((ArrivalRate::Exponential(1.0, 100.0).at(5, 11) - 10.0).abs() < 1e-9);
        assert!((ArrivalRate::Linear(1.0, 2.0).at(0, 1) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn waves_add_gaps_and_keep_the_rate() {
        let (on, off) = (Duration::from_secs(1), Duration::from_secs(3));
        let arrivals = Arrivals { waves: Some((on, off)), ..poisson(100.0) };
        let times = arrivals.times(1_000, &mut Rng::new(2));
        assert!(
            times.iter().all(|at| at.as_secs_f64() % 4.0 < 1.0 + 1e-9),
            "only in the first second of four"
        );
        let calm = poisson(100.0).times(1_000, &mut Rng::new(2));
        let folded = times.iter().map(|at| (at.as_secs_f64() / 4.0).floor().mul_add(-3.0, at.as_secs_f64()));
        assert!(folded.zip(&calm).all(|(at, calm)| (at - calm.as_secs_f64()).abs() < 1e-6));
    }
}
