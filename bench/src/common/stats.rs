//! Statistics of samples. Pure, exact, and the same for every benchmark.
//!
//! | word | means |
//! |---|---|
//! | percentile p | nearest rank: of n samples in order, the one with rank ⌈p/100 × n⌉, and the first for p = 0. The result is always one of the samples |
//! | mean, deviation | arithmetic; the deviation is the sample's, with n − 1, and 0 for one sample |
//! | median of runs | the middle one, or halfway between the middle two; beside it the least and the greatest |

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// The percentile of samples that are in order; `None` without samples.
pub(crate) fn percentile(sorted: &[f64], p: f64) -> Option<f64> {
    let count = sorted.len() as f64;
    // 99.9 % of 1,000 is exactly 999. Floats round up.
    let rank = (p / 100.0 * count - 1e-9).ceil().clamp(1.0, count.max(1.0)) as usize;
    sorted.get(rank - 1).copied()
}

/// Statistics of a set of samples.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SampleSummary {
    pub(crate) count: usize,
    pub(crate) mean: f64,
    pub(crate) deviation: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
    /// Each percentile and its value.
    pub(crate) percentiles: Vec<(f64, f64)>,
}

impl SampleSummary {
    /// `None` without samples. Samples must not be NaN.
    pub(crate) fn of(mut samples: Vec<f64>, percentiles: &[f64]) -> Option<Self> {
        samples.sort_by(f64::total_cmp);
        let (min, max) = (*samples.first()?, *samples.last()?);
        let count = samples.len();
        let mean = samples.iter().sum::<f64>() / count as f64;
        let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
        let deviation = if count > 1 { (squares / (count - 1) as f64).sqrt() } else { 0.0 };
        let percentiles = percentiles.iter().filter_map(|&p| Some((p, percentile(&samples, p)?))).collect();
        Some(Self { count, mean, deviation, min, max, percentiles })
    }

    /// One of the percentiles given to [`Self::of`].
    pub(crate) fn percentile(&self, p: f64) -> Option<f64> {
        self.percentiles.iter().find(|(which, _)| (which - p).abs() < 1e-9).map(|(_, value)| *value)
    }
}

impl Serialize for SampleSummary {
    /// `{"count", "mean", "std", "min", "max", "p50", …}`
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(5 + self.percentiles.len()))?;
        map.serialize_entry("count", &self.count)?;
        map.serialize_entry("mean", &rounded(self.mean))?;
        map.serialize_entry("std", &rounded(self.deviation))?;
        map.serialize_entry("min", &rounded(self.min))?;
        map.serialize_entry("max", &rounded(self.max))?;
        for (p, value) in &self.percentiles {
            map.serialize_entry(&format!("p{p}"), &rounded(*value))?;
        }
        map.end()
    }
}

/// A number over repeated runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Spread {
    #[serde(serialize_with = "write_rounded")]
    pub(crate) median: f64,
    #[serde(serialize_with = "write_rounded")]
    pub(crate) min: f64,
    #[serde(serialize_with = "write_rounded")]
    pub(crate) max: f64,
    /// The value of each run.
    pub(crate) runs: Vec<f64>,
}

impl Spread {
    /// `None` without runs.
    pub(crate) fn of(runs: Vec<f64>) -> Option<Self> {
        let min = runs.iter().copied().min_by(f64::total_cmp)?;
        let max = runs.iter().copied().max_by(f64::total_cmp)?;
        Some(Self { median: median(runs.clone())?, min, max, runs })
    }
}

/// The middle value, or halfway between the middle two; `None` without values.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len() % 2 == 1 { upper } else { f64::midpoint(values[middle - 1], upper) })
}

/// Rounds to a millionth. No measurement is more precise, and people read the reports.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

/// Rounds to a thousandth: a ratio, or a measurement in a coarse unit.
pub(crate) fn thousandths(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn write_rounded<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(rounded(*value))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERCENTILES: [f64; 2] = [50.0, 99.0];
    use crate::load::rng::Rng;

    /// The definition by counting, without sorting: the least sample such that at least p % of all are not greater.
    fn by_counting(samples: &[f64], p: u32) -> Option<f64> {
        let enough = |candidate: f64| {
            let not_greater = samples.iter().filter(|sample| **sample <= candidate).count();
            // In tenths of a percent, by whole numbers.
            1_000 * not_greater >= p as usize * samples.len() && not_greater > 0
        };
        samples.iter().copied().filter(|candidate| enough(*candidate)).reduce(f64::min)
    }

    /// Welford's algorithm: mean and deviation in one pass.
    fn in_one_pass(samples: &[f64]) -> (f64, f64) {
        let (mut mean, mut squares) = (0.0, 0.0);
        for (before, sample) in samples.iter().enumerate() {
            let off = sample - mean;
            mean += off / (before + 1) as f64;
            squares += off * (sample - mean);
        }
        let deviation = if samples.len() > 1 { (squares / (samples.len() - 1) as f64).sqrt() } else { 0.0 };
        (mean, deviation)
    }

    #[test]
    fn every_statistic_matches_a_second_computation() {
        let mut rng = Rng::new(1);
        for round in 0..400 {
            let count = usize::try_from(rng.below(if round % 4 == 0 { 4 } else { 1_100 })).expect("small");
            // Every second round has many ties.
            let ties = round % 2 == 0;
            let draw = |rng: &mut Rng| if ties { rng.below(7) as f64 } else { rng.normal() * 100.0 };
            let samples: Vec<f64> = (0..count).map(|_| draw(&mut rng)).collect();
            let tenths: Vec<u32> = vec![0, 1, 250, 500, 501, 900, 950, 990, 999, 1_000];
            let percentiles: Vec<f64> = tenths.iter().map(|p| f64::from(*p) / 10.0).collect();
            let Some(summary) = SampleSummary::of(samples.clone(), &percentiles) else {
                assert_eq!(count, 0);
                continue;
            };
            for (tenth, p) in tenths.iter().zip(&percentiles) {
                assert_eq!(
                    summary.percentile(*p),
                    by_counting(&samples, *tenth),
                    "p{p} of {count}: {samples:?}"
                );
            }
            let (mean, deviation) = in_one_pass(&samples);
            assert!((summary.mean - mean).abs() < 1e-9 && (summary.deviation - deviation).abs() < 1e-9);
            assert_eq!(Some(summary.min), samples.iter().copied().reduce(f64::min));
            assert_eq!(Some(summary.max), samples.iter().copied().reduce(f64::max));
        }
    }

    #[test]
    fn few_samples_are_what_they_are() {
        assert_eq!((percentile(&[], 50.0), median(Vec::new())), (None, None));
        assert!(SampleSummary::of(Vec::new(), &PERCENTILES).is_none() && Spread::of(Vec::new()).is_none());
        let one = SampleSummary::of(vec![3.0], &PERCENTILES).expect("a sample");
        assert_eq!((one.mean, one.deviation, one.percentile(99.0)), (3.0, 0.0, Some(3.0)));
        assert_eq!(percentile(&[1.0, 2.0, 3.0, 4.0], 50.0), Some(2.0));
        assert_eq!(percentile(&[1.0, 2.0, 3.0, 4.0], 50.1), Some(3.0));
        let thousand: Vec<f64> = (1..=1_000).map(f64::from).collect();
        assert_eq!(percentile(&thousand, 99.9), Some(999.0));
        let spread = Spread::of(vec![4.0, 1.0, 3.0, 2.0]).expect("runs");
        assert_eq!((spread.median, spread.min, spread.max), (2.5, 1.0, 4.0));
        assert_eq!(Spread::of(vec![4.0, 1.0, 3.0]).expect("runs").median, 3.0);
    }

    #[test]
    fn a_summary_is_written_with_its_percentiles_by_name() {
        let summary = SampleSummary::of(vec![1.0, 4.0], &[50.0, 99.9]).expect("samples");
        let json = serde_json::to_value(&summary).expect("JSON");
        assert_eq!(
            json,
            serde_json::json!({"count": 2, "mean": 2.5, "std": 2.12132, "min": 1.0, "max": 4.0, "p50": 1.0, "p99.9": 4.0})
        );
    }
}
