//! Generates the engine's table in `docs/reference/metrics.md` from the metrics of [`EngineMetrics`] after every
//! event.
//!
//! ```text
//! BATON_WRITE_DOCS=1 cargo test -p baton-engine the_documented_metrics
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use baton_connector::{Handle, RequestId};

use super::*;
use crate::offload::OffloadCounts;

/// One family, as a scraper parses it.
#[derive(Default)]
struct ScrapedFamily {
    kind: String,
    help: String,
    labels: BTreeSet<String>,
}

/// The page after each event has occurred once.
fn everything() -> String {
    let metrics = EngineMetrics::new("demo");
    let moment = Duration::from_millis(3);
    metrics.publish(BlockUsage { total: 4, free: 4, ..BlockUsage::default() }, SchedulerLoad::default(), 0);
    metrics.first_token(moment, 10, 4, 2);
    metrics.handed_off(10);
    metrics.next_token(moment);
    metrics.step_target(moment);
    metrics.step(StepTiming { took: moment, expected: Some(moment) });
    metrics.finished(FinishReason::Stop, moment);
    metrics.transfer(moment, 4096);
    metrics.transfer_failed();
    metrics.carried("tcp", 4096);
    metrics.nixl("disabled", "");
    metrics.copy_counters().to_host.increment(1);
    metrics.mirror_bytes(4096);
    metrics.load_failed("recompute");
    metrics.lease_opened(2);
    metrics.early_lease();
    metrics.lease_settled(&ClosedLease {
        handle: Handle(1),
        request: RequestId::new("r").expect("a name"),
        blocks: Vec::new(),
        cause: CloseCause::Expired,
        reason: CloseCause::Expired.label().into(),
        lifetime: moment,
        readers: (0, 1),
    });
    metrics.notice("aborted", "released");
    metrics.early_rejection("invalid");
    metrics.timed_out("waiting");
    metrics.cache_config(16, 4);
    metrics.tiers(4096).publish(&OffloadCounts::default());
    metrics.drafts(1).verified(1, 1);
    metrics.kv_events().published.increment(1);
    metrics.render()
}

fn families() -> BTreeMap<String, ScrapedFamily> {
    let page = everything();
    let mut families: BTreeMap<String, ScrapedFamily> = BTreeMap::new();
    for line in page.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            families.entry(name.to_owned()).or_default().help = help.to_owned();
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            families.entry(name.to_owned()).or_default().kind = kind.to_owned();
        } else if let Some((name, labels)) = line.split_once('{') {
            let parts = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part));
            let name = parts.filter(|name| families.contains_key(*name)).unwrap_or(name);
            let family = families.get_mut(name).unwrap_or_else(|| panic!("{line} comes before its type"));
            // A label's name precedes `="`, after a comma or the beginning.
            let names =
                labels.split("=\"").map(|before| before.rsplit([',', '{']).next().unwrap_or_default());
            let names = names.filter(|name| !name.contains(['"', '}', ' ']) && *name != "le");
            family.labels.extend(names.map(str::to_owned));
        }
    }
    families
}

fn table(families: &BTreeMap<String, ScrapedFamily>) -> String {
    let mut rows = "| metric | kind | labels | what |\n|---|---|---|---|\n".to_owned();
    for (name, family) in families {
        let labels: Vec<_> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        let _ = writeln!(rows, "| `{name}` | {} | {} | {} |", family.kind, labels.join(", "), family.help);
    }
    rows
}

fn ours(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// `BATON_WRITE_DOCS=1` writes the table instead of comparing it.
#[test]
fn the_documented_metrics_are_those_of_an_engine() {
    let path = ours("../docs/reference/metrics.md");
    let page = std::fs::read_to_string(&path).expect("docs/reference/metrics.md is there");
    let (begin, end) = ("<!-- engine: begin -->\n", "<!-- engine: end -->");
    let (before, rest) = page.split_once(begin).expect("the table begins");
    let (old, after) = rest.split_once(end).expect("the table ends");
    let new = table(&families());
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{begin}{new}{end}{after}"))
            .expect("docs/reference/metrics.md can be written");
    } else {
        assert_eq!(old, new, "run this test with BATON_WRITE_DOCS=1 to write the table");
    }
}

#[test]
fn every_metric_of_the_sources_has_type_help_and_common_labels() {
    let families = families();
    for (name, family) in &families {
        assert!(["counter", "gauge", "histogram"].contains(&family.kind.as_str()), "{name}: {}", family.kind);
        assert!(family.help.ends_with('.'), "{name}: {}", family.help);
        assert!(family.labels.contains("model_name") && family.labels.contains("engine"), "{name}");
    }
    // Names in the sources, so that none is missing above.
    let files = ["mod", "drafts", "pressure", "steps", "tiers"].map(|name| format!("src/metrics/{name}.rs"));
    let sources = files.map(|file| {
        let text = std::fs::read_to_string(ours(&file)).expect("a source is text");
        text.split("mod tests {").next().unwrap_or_default().to_owned()
    });
    let text = sources.concat();
    let literals = text.split('"').skip(1).step_by(2);
    let named: BTreeSet<_> =
        literals.filter(|word| word.starts_with("vllm:") || word.starts_with("baton_")).collect();
    let exported: BTreeSet<_> = families.keys().map(String::as_str).collect();
    assert_eq!(named, exported);
}
