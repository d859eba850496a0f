//! Distributions of durations: number, mean and percentiles, and how many durations did not end.

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use crate::common::stats::percentile;

/// Milliseconds; serialized as `{"n": 0}` without samples. Percentiles are by nearest rank: the smallest sample that at
/// least this share of all samples does not exceed. A duration that did not end is longer than all others. A number
/// that falls on it is infinite here and `null` in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Dist {
    pub(crate) n: usize,
    /// Samples that did not end while they were watched.
    pub(crate) never: usize,
    /// The shortest time that such a sample was watched, ms.
    pub(crate) watched_ms: f64,
    pub(crate) min: f64,
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

/// Durations that are measured until they end, or until the watch ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct DurationSamples {
    ended: Vec<f64>,
    watched: Vec<f64>,
}

impl DurationSamples {
    pub(crate) fn add_ended(&mut self, ms: f64) {
        self.ended.push(ms);
    }

    /// Adds a duration that did not end while it was watched.
    pub(crate) fn add_unended(&mut self, watched_ms: f64) {
        self.watched.push(watched_ms);
    }

    pub(crate) fn dist(&self) -> Dist {
        let mut all = self.ended.clone();
        all.resize(self.ended.len() + self.watched.len(), f64::INFINITY);
        let watched_ms = self.watched.iter().copied().reduce(f64::min).unwrap_or_default();
        Dist { never: self.watched.len(), watched_ms, ..Dist::of(&all) }
    }
}

impl Dist {
    /// The distribution of samples in any order.
    pub(crate) fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let Some((&min, &max)) = sorted.first().zip(sorted.last()) else { return Self::default() };
        let at = |p: f64| percentile(&sorted, p).expect("there are samples");
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        let (p50, p90, p99) = (at(50.0), at(90.0), at(99.0));
        Self { n: sorted.len(), min, mean, p50, p90, p99, max, ..Self::default() }
    }
}

impl Serialize for Dist {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { n, never, watched_ms, min, mean, p50, p90, p99, max } = *self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("n", &n)?;
        if never > 0 {
            map.serialize_entry("never", &never)?;
            map.serialize_entry("watched_ms", &watched_ms)?;
        }
        if n > 0 {
            for (name, value) in
                [("min", min), ("mean", mean), ("p50", p50), ("p90", p90), ("p99", p99), ("max", max)]
            {
                map.serialize_entry(name, &Some(value).filter(|value| value.is_finite()))?;
            }
        }
        map.end()
    }
}
