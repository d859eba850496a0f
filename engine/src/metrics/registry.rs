//! The series of one engine: a few atomics each, behind the handles of the `metrics` crate.
//!
//! Every series has its full size when it is created, so that neither counting nor a scrape changes the memory use.
//! The number of series is bounded by the label values: constants of this crate, the model's name and the ranks.
//!
//! The registry's lock is taken when a handle is created and when a page is written, never when an event is counted
//! through a handle.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use metrics::{Counter, Gauge, Histogram, HistogramFn, Label};

/// A distribution: counts by bucket, and the sum.
struct HistogramBuckets {
    /// Upper bounds, ascending.
    bounds: &'static [f64],
    /// One per bound, and one beyond the last.
    counts: Box<[AtomicU64]>,
    /// The bits of an `f64`.
    sum: AtomicU64,
}

impl HistogramBuckets {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum: AtomicU64::new(0.0_f64.to_bits()) }
    }
}

impl HistogramFn for HistogramBuckets {
    fn record(&self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let add = |bits: u64| Some((f64::from_bits(bits) + value).to_bits());
        // Never `Err`: the closure always returns a value.
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}

enum Series {
    Counter(Arc<AtomicU64>),
    /// The bits of an `f64`.
    Gauge(Arc<AtomicU64>),
    Histogram(Arc<HistogramBuckets>),
}

struct MetricFamily {
    kind: &'static str,
    help: &'static str,
    /// By the labels in their exposition format.
    series: BTreeMap<String, Series>,
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Registry {
    families: Mutex<BTreeMap<&'static str, MetricFamily>>,
}

impl Registry {
    /// The counter with this name and these labels.
    pub(super) fn counter<'a>(
        &self,
        name: &'static str,
        help: &'static str,
        labels: impl Iterator<Item = &'a Label>,
    ) -> Counter {
        let mut families = self.lock();
        let series = series(&mut families, name, "counter", help, labels, || Series::Counter(Arc::default()));
        match series {
            Series::Counter(value) => Counter::from_arc(Arc::clone(value)),
            Series::Gauge(_) | Series::Histogram(_) => unreachable!("{name} is one kind of metric"),
        }
    }

    /// The gauge with this name and these labels.
    pub(super) fn gauge<'a>(
        &self,
        name: &'static str,
        help: &'static str,
        labels: impl Iterator<Item = &'a Label>,
    ) -> Gauge {
        let zero = || Series::Gauge(Arc::new(AtomicU64::new(0.0_f64.to_bits())));
        let mut families = self.lock();
        match series(&mut families, name, "gauge", help, labels, zero) {
            Series::Gauge(value) => Gauge::from_arc(Arc::clone(value)),
            Series::Counter(_) | Series::Histogram(_) => unreachable!("{name} is one kind of metric"),
        }
    }

    /// The histogram with this name and these labels.
    pub(super) fn histogram<'a>(
        &self,
        name: &'static str,
        help: &'static str,
        bounds: &'static [f64],
        labels: impl Iterator<Item = &'a Label>,
    ) -> Histogram {
        let empty = || Series::Histogram(Arc::new(HistogramBuckets::new(bounds)));
        let mut families = self.lock();
        match series(&mut families, name, "histogram", help, labels, empty) {
            Series::Histogram(buckets) => Histogram::from_arc(Arc::clone(buckets)),
            Series::Counter(_) | Series::Gauge(_) => unreachable!("{name} is one kind of metric"),
        }
    }

    /// All series, in Prometheus' text format.
    pub(super) fn render(&self) -> String {
        let mut page = String::new();
        for (name, family) in &*self.lock() {
            let MetricFamily { kind, help, series } = family;
            let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, series) in series {
                match series {
                    Series::Counter(value) => {
                        let _ = writeln!(page, "{name}{{{labels}}} {}", value.load(Ordering::Relaxed));
                    }
                    Series::Gauge(value) => {
                        let value = f64::from_bits(value.load(Ordering::Relaxed));
                        let _ = writeln!(page, "{name}{{{labels}}} {value}");
                    }
                    Series::Histogram(buckets) => write_histogram(&mut page, name, labels, buckets),
                }
            }
            page.push('\n');
        }
        page
    }

    /// Holds the lock, for tests.
    #[cfg(test)]
    pub(super) fn lock_for_test(&self) -> impl Drop + '_ {
        self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, MetricFamily>> {
        self.families.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The existing series, or a new one.
fn series<'f, 'a>(
    families: &'f mut BTreeMap<&'static str, MetricFamily>,
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    labels: impl Iterator<Item = &'a Label>,
    new: impl FnOnce() -> Series,
) -> &'f Series {
    let family = families.entry(name).or_insert_with(|| MetricFamily { kind, help, series: BTreeMap::new() });
    family.series.entry(shown(labels)).or_insert_with(new)
}

/// Labels in exposition format, without braces.
fn shown<'a>(labels: impl Iterator<Item = &'a Label>) -> String {
    let shown = labels.map(|label| {
        let value = label.value().replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        format!("{}=\"{value}\"", label.key())
    });
    shown.collect::<Vec<_>>().join(",")
}

fn write_histogram(page: &mut String, name: &str, labels: &str, buckets: &HistogramBuckets) {
    let separator = if labels.is_empty() { "" } else { "," };
    let mut count = 0;
    for (at, of_bucket) in buckets.counts.iter().enumerate() {
        count += of_bucket.load(Ordering::Relaxed);
        let _ = match buckets.bounds.get(at) {
            Some(bound) => writeln!(page, "{name}_bucket{{{labels}{separator}le=\"{bound}\"}} {count}"),
            None => writeln!(page, "{name}_bucket{{{labels}{separator}le=\"+Inf\"}} {count}"),
        };
    }
    let sum = f64::from_bits(buckets.sum.load(Ordering::Relaxed));
    let _ = writeln!(page, "{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {count}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_cumulative_buckets_and_escaped_labels() {
        let registry = Registry::default();
        let labels = [Label::new("model_name", "a \"b\"\\c\nd")];
        let histogram = registry.histogram("t_seconds", "Time.", &[0.5, 2.0], labels.iter());
        for value in [0.25, 0.5, 1.0, 8.0] {
            histogram.record(value);
        }
        registry.counter("t_total", "Things.", labels.iter()).increment(2);
        registry.counter("t_total", "Things.", labels.iter()).increment(3);
        registry.gauge("t_level", "Level.", [].iter()).set(0.5);
        let escaped = r#"model_name="a \"b\"\\c\nd""#;
        let wanted = format!(
            "# HELP t_level Level.\n# TYPE t_level gauge\nt_level{{}} 0.5\n\n\
             # HELP t_seconds Time.\n# TYPE t_seconds histogram\n\
             t_seconds_bucket{{{escaped},le=\"0.5\"}} 2\nt_seconds_bucket{{{escaped},le=\"2\"}} 3\n\
             t_seconds_bucket{{{escaped},le=\"+Inf\"}} 4\n\
             t_seconds_sum{{{escaped}}} 9.75\nt_seconds_count{{{escaped}}} 4\n\n\
             # HELP t_total Things.\n# TYPE t_total counter\nt_total{{{escaped}}} 5\n\n"
        );
        assert_eq!(registry.render(), wanted);
    }
}
