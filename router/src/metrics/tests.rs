//! Checks the page by the rules of Prometheus' own linter, and that the documentation contains every family.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use baton_connector::exchange::{Outcome, Phase, SettlementCause};

use super::*;
use crate::config::limits::MEMBERS_MAX;

/// Metrics with every kind of value counted once.
fn full() -> (Metrics, ModelMetrics, EngineMetrics) {
    let metrics = Metrics::new();
    let (model, engine) = (metrics.model("m\"\n"), metrics.engine("10.0.0.1:8000"));
    model.count_end(RequestOutcome::Exchange(Outcome::Completed), 200);
    model.count_end(RequestOutcome::Rejected, 404);
    model.first_token(true).record(Duration::from_millis(3));
    model.first_token(false).record(Duration::from_secs(3000));
    model.count_tokens(10, 4, 2);
    metrics.requests.count_disconnect(Phase::Gap);
    metrics.legs.count_release(SettlementCause::Late, ReleaseMethod::Abort);
    engine.count_failure(Leg::Decode, AttemptFailure::Died);
    let tenant = metrics.tenants.tenant("t");
    tenant.requests.increment(1);
    (metrics, model, engine)
}

fn page(metrics: &Metrics, format: PageFormat) -> String {
    metrics.page(format, |scrape| {
        scrape.put(&IN_FLIGHT, &["10.0.0.1:8000"], 3.0);
        scrape.put(&POOL, &["m", "decode"], 1.0);
        scrape.put(&READY, &["m", "decode"], 1.0);
        scrape.put(&STALE, &["dns:engines:8000"], 0.0);
    })
}

/// A sample's name, labels and value; as strict as a scraper.
fn parsed(line: &str) -> (String, BTreeMap<String, String>, f64) {
    let is_name = |text: &str| {
        !text.is_empty()
            && !text.starts_with(|c: char| c.is_ascii_digit())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let at = line.find(['{', ' ']).unwrap_or_else(|| panic!("no value: {line}"));
    let (name, mut rest) = line.split_at(at);
    assert!(is_name(name), "{line}");
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, after) = rest.split_once("=\"").unwrap_or_else(|| panic!("no label: {line}"));
            assert!(is_name(label), "{line}");
            let (mut value, mut chars) = (String::new(), after.char_indices());
            let end = loop {
                match chars.next().unwrap_or_else(|| panic!("an open label: {line}")) {
                    (_, '\\') => match chars.next() {
                        Some((_, 'n')) => value.push('\n'),
                        Some((_, c @ ('\\' | '"'))) => value.push(c),
                        other => panic!("{other:?} is escaped: {line}"),
                    },
                    (at, '"') => break at,
                    (_, c) => value.push(c),
                }
            };
            assert!(labels.insert(label.to_owned(), value).is_none(), "a label twice: {line}");
            match after[end + 1..].strip_prefix(',') {
                Some(more) => rest = more,
                None => {
                    rest = after[end + 1..].strip_prefix('}').unwrap_or_else(|| panic!("no end: {line}"));
                    break;
                }
            }
        }
    }
    let value = rest.strip_prefix(' ').unwrap_or_else(|| panic!("no space: {line}"));
    let value =
        if value == "+Inf" { f64::INFINITY } else { value.parse().unwrap_or_else(|_| panic!("{line}")) };
    (name.to_owned(), labels, value)
}

/// Performs the checks of `promtool check metrics` and of the OpenMetrics validator.
fn lint(page: &str, format: PageFormat) {
    let (mut family, mut kind) = (String::new(), String::new());
    let (mut families, mut seen) = (BTreeSet::new(), BTreeSet::new());
    let mut buckets: (String, f64, f64) = Default::default();
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        if line == "# EOF" {
            assert_eq!(format, PageFormat::OpenMetrics);
            assert!(lines.peek().is_none(), "something after the end");
            continue;
        }
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, text) = help.split_once(' ').expect("a help text");
            assert!(text.len() > 5 && text.ends_with('.'), "{line}");
            assert!(families.insert(name.to_owned()), "{name} is there twice");
            family = name.to_owned();
            let next = lines.next().expect("a type follows");
            kind =
                next.strip_prefix(&format!("# TYPE {name} ")).unwrap_or_else(|| panic!("{next}")).to_owned();
            let is_total = name.ends_with("_total");
            assert_eq!(is_total, kind == "counter" && format == PageFormat::Prometheus, "{name} is a {kind}");
            for bad in ["_count", "_sum", "_bucket", "milliseconds", "_ms", "_us", "_kb", "minutes"] {
                assert!(!name.ends_with(bad) && !name.contains(&format!("{bad}_")), "{name}: {bad}");
            }
            assert!(
                kind != "histogram" || name.ends_with("_seconds") || name.ends_with("_bytes"),
                "{name}: a unit"
            );
            continue;
        }
        if let Some(unit) = line.strip_prefix("# UNIT ") {
            let (name, unit) = unit.split_once(' ').expect("a unit");
            assert!(format == PageFormat::OpenMetrics && name == family && name.ends_with(unit), "{line}");
            continue;
        }
        let (name, labels, value) = parsed(line);
        assert!(seen.insert((name.clone(), labels.clone())), "a series twice: {line}");
        let suffix = name.strip_prefix(&family).unwrap_or_else(|| panic!("{line} is not of {family}"));
        let right = match (kind.as_str(), format) {
            ("counter", PageFormat::OpenMetrics) => suffix == "_total",
            ("histogram", _) => matches!(suffix, "_bucket" | "_sum" | "_count"),
            _ => suffix.is_empty(),
        };
        assert!(right, "{line}: a {kind}");
        assert!(kind == "gauge" || value >= 0.0, "{line}");
        if suffix == "_bucket" {
            let le: f64 = match labels["le"].as_str() {
                "+Inf" => f64::INFINITY,
                bound => bound.parse().expect("a bound"),
            };
            let mut others = labels.clone();
            others.remove("le");
            let series = format!("{name}{others:?}");
            let rises = buckets.0 != series || (le > buckets.1 && value >= buckets.2);
            assert!(rises, "buckets must rise: {line}");
            buckets = (series, le, value);
        } else if suffix == "_count" {
            assert_eq!((buckets.1, buckets.2), (f64::INFINITY, value), "the last bucket is all: {line}");
        }
    }
    assert_eq!(page.ends_with("# EOF\n"), format == PageFormat::OpenMetrics);
}

#[test]
fn the_page_is_valid_in_both_formats_and_has_every_family() {
    let (metrics, _model, _engine) = full();
    let _source = metrics.discovery("dns:engines:8000");
    let tls = metrics.listener_tls("clients");
    tls.files.set_expiry(Some(0));
    for format in [PageFormat::Prometheus, PageFormat::OpenMetrics] {
        let page = page(&metrics, format);
        lint(&page, format);
        for family in families() {
            // Without a series, a counter's family has its OpenMetrics name.
            let name = match format {
                PageFormat::Prometheus => family.name,
                PageFormat::OpenMetrics => family.name.strip_suffix("_total").unwrap_or(family.name),
            };
            assert!(page.contains(&format!("# TYPE {name} ")), "{name}");
        }
    }
    assert_eq!(
        PageFormat::accepted("application/openmetrics-text;version=1.0.0;q=0.5,*/*"),
        PageFormat::OpenMetrics
    );
    assert_eq!(PageFormat::accepted("text/plain"), PageFormat::Prometheus);
}

#[test]
fn families_are_named_once_and_their_buckets_rise() {
    let mut names = BTreeSet::new();
    for family in families() {
        assert!(names.insert(family.name), "{} is there twice", family.name);
        assert!(family.buckets.is_sorted_by(|a, b| a < b), "{}", family.name);
        assert_eq!(
            family.buckets.is_empty(),
            family.kind != registry::MetricKind::Histogram,
            "{}",
            family.name
        );
        assert!(!family.labels.contains(&"le"), "{}", family.name);
    }
}

#[test]
fn every_engine_of_two_full_pools_is_counted_under_its_own_name() {
    let metrics = Metrics::new();
    let leg = |n| if n < MEMBERS_MAX { Leg::Prefill } else { Leg::Decode };
    let engines = (0..2 * MEMBERS_MAX).map(|n| (metrics.engine(&format!("e{n}:1")), leg(n)));
    let engines: Vec<_> = engines.collect();
    engines.iter().for_each(|(engine, leg)| engine.count_failure(*leg, AttemptFailure::Died));
    let text = metrics.page(PageFormat::Prometheus, |_| {});
    let last = 2 * MEMBERS_MAX - 1;
    let counted = format!("engine_errors_total{{engine=\"e{last}:1\",leg=\"decode\",reason=\"died\"}} 1");
    assert!(text.contains(&counted) && !text.contains("engine=\"other\""));
}

#[test]
fn series_of_an_engine_and_a_model_go_away_with_them() {
    let (metrics, model, engine) = full();
    assert!(page(&metrics, PageFormat::Prometheus).contains("engine_errors_total{engine=\"10.0.0.1:8000\""));
    drop((model, engine));
    let text = metrics.page(PageFormat::Prometheus, |_| {});
    assert!(!text.contains("10.0.0.1:8000") && !text.contains("model=\"m"), "{text}");
}

/// The table of `docs/reference/metrics.md`.
fn table() -> String {
    let mut rows = String::from("| metric | kind | labels | what |\n|---|---|---|---|\n");
    let sorted: BTreeMap<_, _> = families().map(|family| (family.name, family)).collect();
    for family in sorted.values() {
        let labels: Vec<_> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        let kind = format!("{:?}", family.kind).to_lowercase();
        rows += &format!("| `{}` | {kind} | {} | {} |\n", family.name, labels.join(", "), family.help);
    }
    rows
}

/// `BATON_WRITE_DOCS=1` writes the table instead of comparing it.
#[test]
fn the_documented_metrics_are_those_of_the_router() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/metrics.md");
    let page = std::fs::read_to_string(&path).expect("docs/reference/metrics.md is there");
    let (begin, end) = ("<!-- table: begin -->\n", "<!-- table: end -->");
    let (before, rest) = page.split_once(begin).expect("the table begins");
    let (old, after) = rest.split_once(end).expect("the table ends");
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        let new = format!("{before}{begin}{}{end}{after}", table());
        std::fs::write(&path, new).expect("docs/reference/metrics.md can be written");
    } else {
        assert_eq!(old, table(), "run this test with BATON_WRITE_DOCS=1 to write the table");
    }
}

/// Prints nanoseconds per operation; run with `--release --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn counter_cost() {
    const TIMES: u32 = 2_000_000;
    let (metrics, model, engine) = full();
    let timed = |what: &str, work: &dyn Fn(u32)| {
        let begun = Instant::now();
        (0..TIMES).for_each(work);
        eprintln!("{what}: {:.1} ns", begun.elapsed().as_secs_f64() * 1e9 / f64::from(TIMES));
    };
    timed("counter", &|_| engine.leg(Leg::Decode).requests.increment(1));
    timed("gauge", &|_| metrics.requests.in_flight.increment(1.0));
    timed("histogram", &|n| model.inter_token.record(Duration::from_millis(u64::from(n % 1000))));
    timed("request by outcome", &|_| model.count_end(RequestOutcome::Exchange(Outcome::Completed), 200));
    let piece = format!(
        "data: {{\"choices\":[{{\"text\":\"{}\",\"finish_reason\":null}}],\"usage\":null}}\n\n",
        "t".repeat(140)
    );
    timed("looking at a piece of 200 bytes", &|_| {
        let (mut frames, mut seen) =
            (crate::message::sse::FrameBuffer::default(), crate::message::usage::UsageScan::default());
        let whole = frames.pass(std::hint::black_box(bytes::Bytes::copy_from_slice(piece.as_bytes())));
        std::hint::black_box(frames.read(whole, &mut seen));
    });
    timed("reading the clock", &|_| {
        std::hint::black_box(Instant::now());
    });
}

#[test]
fn every_metric_that_an_alert_names_exists() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/alerts/router.yaml");
    let text = std::fs::read_to_string(path).expect("the alerts are there");
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let named: BTreeSet<_> =
        words.filter(|word| word.starts_with("baton_router_") || word.starts_with("process_")).collect();
    assert!(named.len() >= 10, "{named:?}");
    let known: BTreeSet<_> = families().map(|family| family.name).collect();
    for name in named {
        let name = name.strip_suffix("_bucket").unwrap_or(name);
        assert!(known.contains(name), "{name} is in an alert and not on the page");
    }
}
