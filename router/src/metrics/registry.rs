//! Counters, gauges and histograms: a few atomics each, behind cheap handles.
//!
//! A [`Family`] is a constant: name, kind, help, label names and buckets are defined next to the code that counts. A
//! series exists exactly as long as a handle on it. When the last request and the last generation with an engine are
//! dropped, its series end. The registry's lock is taken when a handle is created or a page is written, never when a
//! value is counted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::config::limits::MEMBERS_MAX;

/// Limit on the series of a family without engines; further ones are counted under the label `other`. The value is that
/// of llm-d's endpoint picker.
const SERIES_MAX: usize = 4096;
/// Limit on pairs of engine and leg with their own series: those of a model with two full pools.
const ENGINES_MAX: usize = 2 * MEMBERS_MAX;
/// The label value for series beyond [`Family::series_max`].
const OTHER: &str = "other";

/// The kind of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MetricKind {
    /// Never decreases.
    Counter,
    /// Increases and decreases.
    Gauge,
    /// Counts values by bucket.
    Histogram,
}

/// One metric family.
#[derive(Debug)]
pub(crate) struct Family {
    pub name: &'static str,
    pub kind: MetricKind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
    /// Upper bounds of a histogram's buckets, ascending.
    pub buckets: &'static [f64],
    /// Limit on the series; further ones are counted under the label `other`.
    series_max: usize,
}

impl Family {
    pub(crate) const fn counter(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self { name, kind: MetricKind::Counter, labels, help, buckets: &[], series_max: SERIES_MAX }
    }

    pub(crate) const fn gauge(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self { name, kind: MetricKind::Gauge, labels, help, buckets: &[], series_max: SERIES_MAX }
    }

    pub(crate) const fn histogram(
        name: &'static str,
        labels: &'static [&'static str],
        buckets: &'static [f64],
        help: &'static str,
    ) -> Self {
        Self { name, kind: MetricKind::Histogram, labels, help, buckets, series_max: SERIES_MAX }
    }

    /// Sets the limit to `each` series per engine and leg.
    pub(crate) const fn of_engines(self, each: usize) -> Self {
        Self { series_max: ENGINES_MAX * each, ..self }
    }

    /// The labels in the format between braces.
    pub(super) fn labelled(&self, values: &[&str]) -> String {
        assert_eq!(self.labels.len(), values.len(), "{}: a value per label", self.name);
        let mut text = String::new();
        for (name, value) in self.labels.iter().zip(values) {
            if !text.is_empty() {
                text.push(',');
            }
            text.push_str(name);
            text.push_str("=\"");
            for c in value.chars() {
                match c {
                    '\\' => text.push_str("\\\\"),
                    '"' => text.push_str("\\\""),
                    '\n' => text.push_str("\\n"),
                    c => text.push(c),
                }
            }
            text.push('"');
        }
        text
    }
}

/// Defines the families of a part, and `FAMILIES` with all of them. A row: kind, constant, the metric's name, its labels,
/// a histogram's buckets, and the help.
macro_rules! families {
    ($(
        $(#[$attribute:meta])*
        $vis:vis $kind:ident $family:ident(
            $name:literal, [$($label:literal),*] $(, $buckets:ident)?
        ) $(.of_engines($each:expr))?: $help:literal;
    )+) => {
        $(
            $(#[$attribute])*
            $vis static $family: $crate::metrics::Family =
                $crate::metrics::Family::$kind($name, &[$($label),*], $($buckets,)? $help)
                $(.of_engines($each))?;
        )+

        /// The families of this part.
        pub(super) static FAMILIES: &[&$crate::metrics::Family] = &[$(&$family),+];
    };
}
pub(super) use families;

/// A value that never decreases.
#[derive(Clone, Debug)]
pub(crate) struct Counter(Arc<AtomicU64>);

/// A value that increases and decreases.
#[derive(Clone, Debug)]
pub(crate) struct Gauge(Arc<AtomicU64>);

/// Values counted by bucket.
#[derive(Clone, Debug)]
pub(crate) struct Histogram(Arc<HistogramBuckets>);

#[derive(Debug)]
pub(super) struct HistogramBuckets {
    pub bounds: &'static [f64],
    /// One per bound, and one beyond the last.
    pub counts: Box<[AtomicU64]>,
    /// The bits of an `f64`.
    sum: AtomicU64,
}

impl HistogramBuckets {
    pub(super) fn sum(&self) -> f64 {
        f64::from_bits(self.sum.load(Ordering::Relaxed))
    }
}

impl Counter {
    pub(crate) fn increment(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Gauge {
    pub(crate) fn set(&self, to: f64) {
        self.0.store(to.to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn increment(&self, by: f64) {
        add(&self.0, by);
    }

    pub(crate) fn decrement(&self, by: f64) {
        add(&self.0, -by);
    }
}

impl Histogram {
    pub(crate) fn record(&self, value: Duration) {
        let value = value.as_secs_f64();
        let bucket = self.0.bounds.partition_point(|bound| *bound < value);
        self.0.counts[bucket].fetch_add(1, Ordering::Relaxed);
        add(&self.0.sum, value);
    }
}

fn add(bits: &AtomicU64, by: f64) {
    let sum = |bits: u64| Some((f64::from_bits(bits) + by).to_bits());
    // Never `Err`: the closure always returns a value.
    let _ = bits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
}

/// One series, alive while a handle on it exists.
#[derive(Debug)]
pub(super) enum Series {
    Counter(Weak<AtomicU64>),
    Gauge(Weak<AtomicU64>),
    Histogram(Weak<HistogramBuckets>),
}

impl Series {
    fn is_alive(&self) -> bool {
        match self {
            Self::Counter(value) | Self::Gauge(value) => value.strong_count() > 0,
            Self::Histogram(value) => value.strong_count() > 0,
        }
    }

    /// The current value; `None` without a handle.
    fn value(&self) -> Option<SeriesValue> {
        let load = |value: &Weak<AtomicU64>| Some(value.upgrade()?.load(Ordering::Relaxed));
        Some(match self {
            Self::Counter(value) => SeriesValue::Counter(load(value)?),
            Self::Gauge(value) => SeriesValue::Gauge(f64::from_bits(load(value)?)),
            Self::Histogram(value) => SeriesValue::Histogram(value.upgrade()?),
        })
    }
}

/// The series of one family, by their labels.
type SeriesMap = BTreeMap<String, Series>;

/// All series of one router.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    families: Mutex<BTreeMap<&'static str, SeriesMap>>,
}

impl Registry {
    /// The counter with these label values, one per label name of the family.
    pub(crate) fn counter(&self, family: &'static Family, values: &[&str]) -> Counter {
        assert_eq!(family.kind, MetricKind::Counter, "{}", family.name);
        let old = |series: &Series| match series {
            Series::Counter(value) => value.upgrade(),
            Series::Gauge(_) | Series::Histogram(_) => None,
        };
        Counter(self.series(family, values, old, Series::Counter, || Arc::new(AtomicU64::new(0))))
    }

    /// The gauge with these label values.
    pub(crate) fn gauge(&self, family: &'static Family, values: &[&str]) -> Gauge {
        assert_eq!(family.kind, MetricKind::Gauge, "{}", family.name);
        let old = |series: &Series| match series {
            Series::Gauge(value) => value.upgrade(),
            Series::Counter(_) | Series::Histogram(_) => None,
        };
        Gauge(self.series(family, values, old, Series::Gauge, || Arc::new(AtomicU64::new(0.0_f64.to_bits()))))
    }

    /// The histogram with these label values.
    pub(crate) fn histogram(&self, family: &'static Family, values: &[&str]) -> Histogram {
        assert_eq!(family.kind, MetricKind::Histogram, "{}", family.name);
        let old = |series: &Series| match series {
            Series::Histogram(value) => value.upgrade(),
            Series::Counter(_) | Series::Gauge(_) => None,
        };
        let new = || {
            Arc::new(HistogramBuckets {
                bounds: family.buckets,
                counts: (0..=family.buckets.len()).map(|_| AtomicU64::new(0)).collect(),
                sum: AtomicU64::new(0.0_f64.to_bits()),
            })
        };
        Histogram(self.series(family, values, old, Series::Histogram, new))
    }

    /// The existing series, or a new one.
    fn series<T>(
        &self,
        family: &'static Family,
        values: &[&str],
        old: impl Fn(&Series) -> Option<Arc<T>>,
        wrap: impl Fn(Weak<T>) -> Series,
        new: impl Fn() -> Arc<T>,
    ) -> Arc<T> {
        let mut families = self.lock();
        let series = families.entry(family.name).or_default();
        let mut labels = family.labelled(values);
        if !series.contains_key(&labels) && series.len() >= family.series_max {
            series.retain(|_, one| one.is_alive());
            if series.len() >= family.series_max {
                labels = family.labelled(&vec![OTHER; values.len()]);
            }
        }
        if let Some(value) = series.get(&labels).and_then(old) {
            return value;
        }
        let value = new();
        series.insert(labels, wrap(Arc::downgrade(&value)));
        value
    }

    /// Calls `each` for every living series of a family.
    pub(super) fn for_each(&self, family: &Family, mut each: impl FnMut(&str, SeriesValue)) {
        let mut families = self.lock();
        let Some(series) = families.get_mut(family.name) else { return };
        series.retain(|labels, one| {
            let Some(value) = one.value() else { return false };
            each(labels, value);
            true
        });
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, SeriesMap>> {
        self.families.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The current value of a series.
pub(super) enum SeriesValue {
    Counter(u64),
    Gauge(f64),
    Histogram(Arc<HistogramBuckets>),
}

#[cfg(test)]
mod tests {
    use super::*;

    static REQUESTS: Family = Family::counter("t_requests_total", &["engine"], "Requests.");
    static SECONDS: Family = Family::histogram("t_seconds", &[], &[0.1, 1.0], "Time.");

    fn series(registry: &Registry, family: &Family) -> Vec<String> {
        let mut found = Vec::new();
        registry.for_each(family, |labels, _| found.push(labels.to_owned()));
        found
    }

    #[test]
    fn a_series_lives_as_long_as_a_handle_on_it_and_its_count_with_it() {
        let registry = Registry::default();
        let first = registry.counter(&REQUESTS, &["a"]);
        first.increment(2);
        let second = registry.counter(&REQUESTS, &["a"]);
        drop(first);
        second.increment(1);
        registry.for_each(&REQUESTS, |_, value| assert!(matches!(value, SeriesValue::Counter(3))));
        assert_eq!(series(&registry, &REQUESTS), ["engine=\"a\""]);
        drop(second);
        assert!(series(&registry, &REQUESTS).is_empty());
    }

    #[test]
    fn series_beyond_the_cap_are_counted_as_other() {
        let registry = Registry::default();
        let kept: Vec<_> = (0..SERIES_MAX).map(|n| registry.counter(&REQUESTS, &[&n.to_string()])).collect();
        let (one, two) = (registry.counter(&REQUESTS, &["x"]), registry.counter(&REQUESTS, &["y"]));
        one.increment(1);
        two.increment(1);
        let found = series(&registry, &REQUESTS);
        assert_eq!(found.len(), SERIES_MAX + 1);
        assert!(found.contains(&"engine=\"other\"".to_owned()));
        drop(kept);
        let named = registry.counter(&REQUESTS, &["z"]);
        assert!(series(&registry, &REQUESTS).contains(&"engine=\"z\"".to_owned()));
        drop(named);
    }

    #[test]
    fn a_family_of_engines_has_series_for_two_full_pools_and_is_bounded_too() {
        static ERRORS: Family =
            Family::counter("t_errors_total", &["engine", "reason"], "Errors.").of_engines(3);
        let registry = Registry::default();
        let count = |n: usize| registry.counter(&ERRORS, &[&(n / 3).to_string(), &(n % 3).to_string()]);
        let most = 2 * MEMBERS_MAX * 3;
        let kept: Vec<_> = (0..most).map(count).collect();
        assert_eq!(series(&registry, &ERRORS).len(), most);
        let _more = (count(most), count(most + 1));
        let found = series(&registry, &ERRORS);
        assert_eq!((found.len(), kept.len()), (most + 1, most));
        assert!(found.contains(&"engine=\"other\",reason=\"other\"".to_owned()));
    }

    #[test]
    fn a_sample_is_in_the_first_bucket_that_holds_it() {
        let registry = Registry::default();
        let histogram = registry.histogram(&SECONDS, &[]);
        for ms in [50, 100, 500, 7_000, 500] {
            histogram.record(Duration::from_millis(ms));
        }
        registry.for_each(&SECONDS, |_, value| {
            let SeriesValue::Histogram(buckets) = value else { unreachable!("it is one") };
            let counts: Vec<_> = buckets.counts.iter().map(|c| c.load(Ordering::Relaxed)).collect();
            assert_eq!(counts, [2, 2, 1]);
            assert!((buckets.sum() - 8.15).abs() < 1e-9);
        });
    }

    #[test]
    fn hostile_label_values_cannot_break_out() {
        assert_eq!(REQUESTS.labelled(&["a\"} 1\n\\"]), "engine=\"a\\\"} 1\\n\\\\\"");
    }
}
