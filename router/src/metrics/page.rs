//! `/metrics` as text: Prometheus' format 0.0.4, or OpenMetrics 1.0 if the scraper accepts it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use super::registry::{Family, MetricKind, Registry, SeriesValue};

/// The format of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageFormat {
    /// `text/plain; version=0.0.4`.
    Prometheus,
    /// `application/openmetrics-text; version=1.0.0`.
    OpenMetrics,
}

impl PageFormat {
    /// The format that a scraper's `Accept` requests.
    pub(crate) fn accepted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Prometheus }
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Samples that are looked up at each scrape, instead of being counted as they occur.
#[derive(Debug, Default)]
pub(crate) struct Scrape {
    samples: BTreeMap<&'static str, Vec<(String, f64)>>,
}

impl Scrape {
    /// Adds the current value of a counter or gauge, with one value per label.
    pub(crate) fn put(&mut self, family: &'static Family, values: &[&str], value: f64) {
        assert_ne!(family.kind, MetricKind::Histogram, "{}: looked-up samples are numbers", family.name);
        self.samples.entry(family.name).or_default().push((family.labelled(values), value));
    }
}

/// Writes every family, each with its help and type even without a series.
pub(super) fn write<'a>(
    families: impl Iterator<Item = &'a Family>,
    registry: &Registry,
    scrape: &Scrape,
    format: PageFormat,
) -> String {
    let mut page = String::with_capacity(64 * 1024);
    let sorted: BTreeMap<_, _> = families.map(|family| (family.name, family)).collect();
    for family in sorted.values() {
        head(&mut page, family, format);
        if let Some(samples) = scrape.samples.get(family.name) {
            for (labels, value) in samples {
                sample(&mut page, family.name, "", labels, *value);
            }
        }
        registry.for_each(family, |labels, value| match value {
            SeriesValue::Counter(value) => {
                let _ = writeln!(page, "{}{} {value}", family.name, BracedLabels(labels, ""));
            }
            SeriesValue::Gauge(value) => sample(&mut page, family.name, "", labels, value),
            SeriesValue::Histogram(buckets) => {
                let mut count = 0;
                for (n, bucket) in buckets.counts.iter().enumerate() {
                    count += bucket.load(Ordering::Relaxed);
                    let bound = buckets.bounds.get(n);
                    let le = bound.map_or("le=\"+Inf\"".to_owned(), |bound| format!("le=\"{bound:?}\""));
                    let _ = writeln!(page, "{}_bucket{} {count}", family.name, BracedLabels(labels, &le));
                }
                sample(&mut page, family.name, "_sum", labels, buckets.sum());
                let _ = writeln!(page, "{}_count{} {count}", family.name, BracedLabels(labels, ""));
            }
        });
    }
    if format == PageFormat::OpenMetrics {
        page.push_str("# EOF\n");
    }
    page
}

/// The unit in a family's name.
pub(super) fn unit(family: &Family) -> Option<&'static str> {
    let name = family.name.strip_suffix("_total").unwrap_or(family.name);
    ["seconds", "bytes"].into_iter().find(|unit| name.ends_with(&format!("_{unit}")))
}

fn head(page: &mut String, family: &Family, format: PageFormat) {
    let kind = match family.kind {
        MetricKind::Counter => "counter",
        MetricKind::Gauge => "gauge",
        MetricKind::Histogram => "histogram",
    };
    // OpenMetrics names a counter's family without the suffix of its samples.
    let name = match (format, family.kind) {
        (PageFormat::OpenMetrics, MetricKind::Counter) => {
            family.name.strip_suffix("_total").unwrap_or(family.name)
        }
        _ => family.name,
    };
    let _ = writeln!(page, "# HELP {name} {}", family.help.replace('\\', "\\\\"));
    let _ = writeln!(page, "# TYPE {name} {kind}");
    if let (PageFormat::OpenMetrics, Some(unit)) = (format, unit(family)) {
        let _ = writeln!(page, "# UNIT {name} {unit}");
    }
}

fn sample(page: &mut String, name: &str, suffix: &str, labels: &str, value: f64) {
    let _ = writeln!(page, "{name}{suffix}{} {value}", BracedLabels(labels, ""));
}

/// Labels in braces; empty without labels.
struct BracedLabels<'a>(&'a str, &'a str);

impl std::fmt::Display for BracedLabels<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.0, self.1) {
            ("", "") => Ok(()),
            ("", one) | (one, "") => write!(f, "{{{one}}}"),
            (labels, more) => write!(f, "{{{labels},{more}}}"),
        }
    }
}
