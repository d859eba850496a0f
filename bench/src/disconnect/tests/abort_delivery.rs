//! The load in the reports, and the documentation of all keys of `summary.json`.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use super::super::record::rate::{CalibratedRate, RateSource};
use super::*;

fn rate() -> CalibratedRate {
    CalibratedRate {
        able_per_s: 4.2,
        rate_per_s: 2.1,
        chosen: RateSource::Half,
        stall_ms: 152.0,
        stall_max_tokens: 1_818,
    }
}

#[test]
fn the_report_contains_load_capacity_and_lateness() {
    let mut script = storm();
    assert!(script.summary().load.is_none(), "older files do not say");
    let rate = rate();
    script.0.push(Record::Load(rate));
    let summary = script.summary();
    let load = summary.load.as_ref().expect("the load");
    // Each calm request and the uncancelled storm request began 1 ms after its due time.
    assert_eq!((load.rate, load.late_calm_ms.n, load.late_storm_ms.n), (rate, 6, 6));
    assert_eq!((load.late_calm_ms.min, load.late_calm_ms.max), (1.0, 1.0));
    assert_eq!((load.late_storm_ms.p50, load.late_storm_ms.max), (0.0, 1.0));
    let shown =
        "reach 4.2 requests/s; calm and storm send 2.1 requests/s, half of that; start after the due time";
    assert!(report::text(&summary).contains(shown), "{}", report::text(&summary));
    assert!(report::page(&summary).contains(shown));
    let written = serde_json::to_value(&summary).expect("JSON");
    assert_eq!(written["load"]["rate_per_s"], 2.1);
    assert_eq!(written["load"]["chosen"], "half");
}

#[test]
fn an_uncompared_response_does_not_count_as_correct() {
    let summary = storm().summary();
    assert_eq!(summary.texts.compared, 0);
    let page = report::page(&summary);
    assert!(page.contains("<b class=\"\">0 of 0</b><span>responses differ"), "{page}");
}

/// All keys of a value and of the values within it, except within `skip`.
fn keys(value: &Value, skip: &[&str], into: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                into.insert(key.clone());
                if !skip.contains(&key.as_str()) {
                    keys(value, skip, into);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| keys(value, skip, into)),
        _ => {}
    }
}

#[test]
fn every_key_of_a_summary_is_documented() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page =
        std::fs::read_to_string(root.join("docs/reference/disconnect-report.md")).expect("the documentation");
    let (_, table) = page.split_once("\n## summary.json\n").expect("its table");
    let (table, _) = table.split_once("\n## ").expect("what comes after it");
    let sample = root.join("bench/results/disconnect/2026-11-23-zen5/summary.json");
    let sample: Value = serde_json::from_slice(&std::fs::read(sample).expect("a sample")).expect("JSON");
    // A run without defects has no finding, no duration without end, and no samples of metrics.
    let mut script = storm();
    script.0.push(Record::Load(rate()));
    script.0.push(Record::Failed { at_us: 3_500_000, why: "no more room".into() });
    script.segment("phase gap", SegmentKind::Phase, 2_000, 5_000, |script, segment| {
        script.cancelled(segment, "held", 1_021, CancelKind::Fin, Phase::Gap, 0);
    });
    script.engine_events(P, "held", &prefill_leg("", 0)[..6]);
    script.engine_state(P, 6_021, 7, 2, 0);
    let written = serde_json::to_value(script.summary()).expect("JSON");
    assert!(!written["findings"].as_array().expect("an array").is_empty());
    let mut used = BTreeSet::new();
    // Keys of another command are documented there, options in the command line, and phases on the page.
    keys(&sample, &["compared_with", "options", "in_flight"], &mut used);
    keys(&written, &["options", "in_flight"], &mut used);
    keys(
        &serde_json::to_value(super::super::analyse::summary::SampledSummary::default()).expect("JSON"),
        &[],
        &mut used,
    );
    let phases = serde_json::to_value(Phase::ALL).expect("JSON");
    let is_phase = |key: &str| phases.as_array().is_some_and(|all| all.contains(&key.into()));
    let is_explained = |key: &str| table.contains(&format!("`{key}`"));
    let unexplained: Vec<_> = used.iter().filter(|key| !is_phase(key) && !is_explained(key)).collect();
    assert!(used.len() > 80, "{used:?}");
    assert_eq!(
        unexplained,
        Vec::<&String>::new(),
        "keys that docs/reference/disconnect-report.md does not explain"
    );
}
