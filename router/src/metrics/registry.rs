//! Counters, gauges and histograms: a few atomics each, behind handles that cost nothing to use.
//!
//! A [`Family`] is a constant: name, kind, help, label names and buckets stand beside the code that counts. A series
//! lives exactly as long as some handle on it does: when the last request and the last generation that know an engine
//! are gone, so are its series. The registry's lock is taken when a handle is made and when a page is written, never
//! when something is counted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::config::limits::MEMBERS_MAX;

/// Series of one family that knows no engines; one more is counted under the label `other`. As llm-d's endpoint picker
/// bounds them.
const SERIES_MAX: usize = 4096;
/// Engines in a leg, each of which has its series: those of a model both of whose pools are full.
const ENGINES_MAX: usize = 2 * MEMBERS_MAX;
/// What stands for the values beyond [`Family::most`].
const OTHER: &str = "other";

/// What a family counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// A distribution.
    Histogram,
}

/// One metric family.
#[derive(Debug)]
pub(crate) struct Family {
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
    /// Upper bounds, rising; of histograms only.
    pub buckets: &'static [f64],
    /// Series, at most; one more is counted under the label `other`.
    most: usize,
}

impl Family {
    pub(crate) const fn counter(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self { name, kind: Kind::Counter, labels, help, buckets: &[], most: SERIES_MAX }
    }

    pub(crate) const fn gauge(
        name: &'static str,
        labels: &'static [&'static str],
        help: &'static str,
    ) -> Self {
        Self { name, kind: Kind::Gauge, labels, help, buckets: &[], most: SERIES_MAX }
    }

    pub(crate) const fn histogram(
        name: &'static str,
        labels: &'static [&'static str],
        buckets: &'static [f64],
        help: &'static str,
    ) -> Self {
        Self { name, kind: Kind::Histogram, labels, help, buckets, most: SERIES_MAX }
    }

    /// With so many series for each engine in each leg.
    pub(crate) const fn of_engines(self, each: usize) -> Self {
        Self { most: ENGINES_MAX * each, ..self }
    }

    /// Its labels as they stand between braces.
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

/// Only grows.
#[derive(Clone, Debug)]
pub(crate) struct Counter(Arc<AtomicU64>);

/// Goes up and down.
#[derive(Clone, Debug)]
pub(crate) struct Gauge(Arc<AtomicU64>);

/// A distribution.
#[derive(Clone, Debug)]
pub(crate) struct Histogram(Arc<Buckets>);

#[derive(Debug)]
pub(super) struct Buckets {
    pub bounds: &'static [f64],
    /// One per bound, and one beyond the last.
    pub counts: Box<[AtomicU64]>,
    /// The bits of an `f64`.
    sum: AtomicU64,
}

impl Buckets {
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
    // Never `Err`: the closure always gives a value.
    let _ = bits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
}

/// One series, as long as somebody counts in it.
#[derive(Debug)]
pub(super) enum Series {
    Counter(Weak<AtomicU64>),
    Gauge(Weak<AtomicU64>),
    Histogram(Weak<Buckets>),
}

impl Series {
    fn lives(&self) -> bool {
        match self {
            Self::Counter(value) | Self::Gauge(value) => value.strong_count() > 0,
            Self::Histogram(value) => value.strong_count() > 0,
        }
    }
}

/// The series of one family, by their labels.
type Known = BTreeMap<String, Series>;

/// Every series of one router.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    families: Mutex<BTreeMap<&'static str, Known>>,
}

impl Registry {
    /// The counter with these label values, one per label name of the family.
    pub(crate) fn counter(&self, family: &'static Family, values: &[&str]) -> Counter {
        assert_eq!(family.kind, Kind::Counter, "{}", family.name);
        let old = |series: &Series| match series {
            Series::Counter(value) => value.upgrade(),
            Series::Gauge(_) | Series::Histogram(_) => None,
        };
        Counter(self.series(family, values, old, Series::Counter, || Arc::new(AtomicU64::new(0))))
    }

    /// The gauge with these label values.
    pub(crate) fn gauge(&self, family: &'static Family, values: &[&str]) -> Gauge {
        assert_eq!(family.kind, Kind::Gauge, "{}", family.name);
        let old = |series: &Series| match series {
            Series::Gauge(value) => value.upgrade(),
            Series::Counter(_) | Series::Histogram(_) => None,
        };
        Gauge(self.series(family, values, old, Series::Gauge, || Arc::new(AtomicU64::new(0.0_f64.to_bits()))))
    }

    /// The histogram with these label values.
    pub(crate) fn histogram(&self, family: &'static Family, values: &[&str]) -> Histogram {
        assert_eq!(family.kind, Kind::Histogram, "{}", family.name);
        let old = |series: &Series| match series {
            Series::Histogram(value) => value.upgrade(),
            Series::Counter(_) | Series::Gauge(_) => None,
        };
        let new = || {
            Arc::new(Buckets {
                bounds: family.buckets,
                counts: (0..=family.buckets.len()).map(|_| AtomicU64::new(0)).collect(),
                sum: AtomicU64::new(0.0_f64.to_bits()),
            })
        };
        Histogram(self.series(family, values, old, Series::Histogram, new))
    }

    /// The series that lives, or a new one.
    fn series<T>(
        &self,
        family: &'static Family,
        values: &[&str],
        old: impl Fn(&Series) -> Option<Arc<T>>,
        wrap: impl Fn(Weak<T>) -> Series,
        new: impl Fn() -> Arc<T>,
    ) -> Arc<T> {
        let mut families = self.lock();
        let known = families.entry(family.name).or_default();
        let mut labels = family.labelled(values);
        if !known.contains_key(&labels) && known.len() >= family.most {
            known.retain(|_, series| series.lives());
            if known.len() >= family.most {
                labels = family.labelled(&vec![OTHER; values.len()]);
            }
        }
        if let Some(value) = known.get(&labels).and_then(old) {
            return value;
        }
        let value = new();
        known.insert(labels, wrap(Arc::downgrade(&value)));
        value
    }

    /// The series of a family that live.
    pub(super) fn each(&self, family: &Family, mut each: impl FnMut(&str, Value<'_>)) {
        let mut families = self.lock();
        let Some(known) = families.get_mut(family.name) else { return };
        known.retain(|labels, series| match series {
            Series::Counter(value) => match value.upgrade() {
                Some(value) => {
                    each(labels, Value::Counter(value.load(Ordering::Relaxed)));
                    true
                }
                None => false,
            },
            Series::Gauge(value) => match value.upgrade() {
                Some(value) => {
                    each(labels, Value::Gauge(f64::from_bits(value.load(Ordering::Relaxed))));
                    true
                }
                None => false,
            },
            Series::Histogram(value) => match value.upgrade() {
                Some(value) => {
                    each(labels, Value::Histogram(&value));
                    true
                }
                None => false,
            },
        });
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Known>> {
        self.families.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a series says at one moment.
pub(super) enum Value<'a> {
    Counter(u64),
    Gauge(f64),
    Histogram(&'a Buckets),
}

#[cfg(test)]
mod tests {
    use super::*;

    static REQUESTS: Family = Family::counter("t_requests_total", &["engine"], "Requests.");
    static SECONDS: Family = Family::histogram("t_seconds", &[], &[0.1, 1.0], "Time.");

    fn series(registry: &Registry, family: &Family) -> Vec<String> {
        let mut found = Vec::new();
        registry.each(family, |labels, _| found.push(labels.to_owned()));
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
        registry.each(&REQUESTS, |_, value| assert!(matches!(value, Value::Counter(3))));
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
            Family::counter("t_errors_total", &["engine", "why"], "Errors.").of_engines(3);
        let registry = Registry::default();
        let count = |n: usize| registry.counter(&ERRORS, &[&(n / 3).to_string(), &(n % 3).to_string()]);
        let most = 2 * MEMBERS_MAX * 3;
        let kept: Vec<_> = (0..most).map(count).collect();
        assert_eq!(series(&registry, &ERRORS).len(), most);
        let _more = (count(most), count(most + 1));
        let found = series(&registry, &ERRORS);
        assert_eq!((found.len(), kept.len()), (most + 1, most));
        assert!(found.contains(&"engine=\"other\",why=\"other\"".to_owned()));
    }

    #[test]
    fn a_sample_is_in_the_first_bucket_that_holds_it() {
        let registry = Registry::default();
        let histogram = registry.histogram(&SECONDS, &[]);
        for ms in [50, 100, 500, 7_000, 500] {
            histogram.record(Duration::from_millis(ms));
        }
        registry.each(&SECONDS, |_, value| {
            let Value::Histogram(buckets) = value else { unreachable!("it is one") };
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
