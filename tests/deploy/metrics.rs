//! Alerts and dashboard, compared with the metrics of a router and engines after every kind of event.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::harness::{Cluster, Engine, GenerateRequest, HangUp, PATIENCE, eventually};
use crate::promql::{NamedSeries, named};
use crate::{files_below, installed, ours, read, run, skipped};

/// The used part of a rule file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    name: String,
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rule {
    pub(crate) alert: String,
    expr: String,
    #[serde(rename = "for")]
    _for: Option<String>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

/// Metrics with their labels.
type Metrics = BTreeMap<String, BTreeSet<String>>;

/// Labels that Prometheus adds to everything it scrapes.
const OF_SCRAPES: [&str; 2] = ["job", "instance"];

/// Counters that only stock vLLM has, or names differently. Baton's engines use vLLM's name without the ending that
/// Python's client adds.
const STOCK_VLLM: [&str; 3] = [
    "vllm:nixl_num_kv_expired_reqs_total",
    "vllm:nixl_num_notifications_after_expiry_total",
    "vllm:nixl_num_failed_transfers_total",
];

/// The dashboard's variables.
const VARIABLES: [&str; 3] = ["$model", "$router_job", "$instance"];

/// Every rule.
pub(crate) fn rules() -> Vec<Rule> {
    let mut all = Vec::new();
    for file in files_below(&ours("deploy/alerts")) {
        let rules: Rules = serde_saphyr::from_str(&read(&file))
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        for group in rules.groups {
            assert!(group.name.starts_with("baton-"), "{}", group.name);
            all.extend(group.rules);
        }
    }
    all
}

/// The dashboard's content.
fn dashboard() -> Value {
    let text = read(&ours("deploy/dashboards/baton.json"));
    serde_json::from_str(&text).expect("a board is JSON")
}

/// The queries of every panel, with its title. Variables match everything.
fn queries() -> Vec<(String, String)> {
    let dashboard = dashboard();
    let mut found = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().expect("a query").replace("$__rate_interval", "5m");
            let query = VARIABLES.iter().fold(query, |query, variable| query.replace(variable, ".*"));
            assert!(!query.contains('$'), "{query}");
            found.push((panel["title"].as_str().expect("a title").to_owned(), query));
        }
    }
    for variable in dashboard["templating"]["list"].as_array().expect("variables") {
        if let Some(labels) =
            variable["definition"].as_str().and_then(|text| text.strip_prefix("label_values("))
        {
            let (metric, label) = labels.trim_end_matches(')').split_once(", ").expect("METRIC, LABEL");
            found.push((variable["name"].to_string(), format!("count by ({label}) ({metric})")));
        }
    }
    found
}

/// Adds the metrics of a page of `/metrics`.
fn add_metrics(page: &str, metrics: &mut Metrics) {
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let Some((series, _)) = line.rsplit_once(' ') else { continue };
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let known = metrics.entry(name.to_owned()).or_default();
        // A label's name stands before `="`, after a comma or the beginning.
        let names =
            labels.split("=\"").map(|before| before.rsplit(['"', ',', '{']).next().unwrap_or_default());
        known.extend(names.filter(|name| !name.is_empty() && *name != "}").map(str::to_owned));
    }
}

/// The metrics of live processes.
struct LiveMetrics {
    /// Before the first request.
    fresh: String,
    metrics: Metrics,
    /// Families with their kinds.
    router: BTreeMap<String, String>,
    engines: BTreeMap<String, String>,
}

static LIVE: LazyLock<LiveMetrics> = LazyLock::new(live);

/// Makes every kind of event happen to a router, a prefill engine and a decode engine, then reads their metrics.
fn live() -> LiveMetrics {
    let tier = tempfile::tempdir().expect("a temporary folder");
    let tiers = format!(
        "--kv-offload-host-mib 8 --kv-offload-disk {} --kv-offload-disk-mib 8 --kv-events-config {} {}",
        tier.path().display(),
        r#"{"enable_kv_cache_events":true,"endpoint":"tcp://*:0"}"#,
        r#"--speculative-config {"method":"ngram","num_speculative_tokens":2}"#
    );
    let cluster =
        Cluster::new().prefill("--kv-lease-duration 0.3").decode(&tiers).decode("--pace-ms 20").start();
    let engines = || cluster.prefill.iter().chain(&cluster.decode).map(Engine::metrics).collect::<String>();
    let fresh = cluster.router_metrics() + &engines();
    let usage = json!({"include_usage": true});
    for _ in 0..4 {
        let mut stream = cluster
            .send(&GenerateRequest::fresh(200).tokens(4).streamed().with("stream_options", usage.clone()))
            .stream();
        while stream.event().is_some() {}
    }
    // A client disconnects during its stream.
    let leaves = || {
        let mut stream = cluster.send(&GenerateRequest::fresh(100).tokens(400).streamed()).stream();
        stream.event().expect("an event");
        stream.hang_up(HangUp::Fin);
    };
    leaves();
    leaves();
    // A decode engine refuses one handoff, one is released, and one expires.
    let refused = GenerateRequest::fresh(64);
    let handoff = cluster.prefill[0].open_lease(&refused);
    let body = refused.with("kv_transfer_params", handoff).with("temperature", json!(-1)).body;
    assert_eq!(cluster.decode[0].send("POST", "/v1/completions", &body).reply().status, 400);
    let handoff = cluster.prefill[0].open_lease(&GenerateRequest::fresh(64));
    assert_eq!(cluster.prefill[0].release(&handoff), "released");
    let late = GenerateRequest::fresh(64);
    let handoff = cluster.prefill[0].open_lease(&late);
    let expired = || match cluster.prefill[0].metric("vllm:nixl_num_kv_expired_reqs", "") {
        count if count >= 1.0 => Ok(()),
        _ => Err("nothing has expired".to_owned()),
    };
    eventually(PATIENCE, "the unread lease ends", expired);
    // Its decode engine is too late, and computes the prompt.
    let body = late.with("kv_transfer_params", handoff).body;
    assert_eq!(cluster.decode[0].send("POST", "/v1/completions", &body).reply().status, 200);

    let router = cluster.router_metrics();
    let engines = engines();
    let mut metrics = Metrics::new();
    add_metrics(&router, &mut metrics);
    add_metrics(&engines, &mut metrics);
    assert!(metrics.len() > 100, "{metrics:?}");
    LiveMetrics { fresh, metrics, router: kinds(&router), engines: kinds(&engines) }
}

/// The families of a page of `/metrics`, with their kinds.
fn kinds(page: &str) -> BTreeMap<String, String> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
}

/// The metrics of one table of `docs/reference/metrics.md`, with their kinds.
fn rows(table: &str) -> BTreeMap<String, String> {
    let page = read(&ours("docs/reference/metrics.md"));
    let (_, rest) = page.split_once(&format!("<!-- {table}: begin -->\n")).expect("the table begins");
    let (rows, _) = rest.split_once(&format!("<!-- {table}: end -->")).expect("the table ends");
    let rows = rows.lines().filter_map(|line| line.strip_prefix("| `"));
    let cells = rows.map(|row| row.split(" | ").map(str::to_owned).collect::<Vec<_>>());
    cells.map(|cells| (cells[0].trim_end_matches('`').to_owned(), cells[1].clone())).collect()
}

/// Metrics that only the table or only the live processes have.
fn differences(table: &BTreeMap<String, String>, live: &BTreeMap<String, String>) -> Vec<String> {
    let unlisted = live.iter().filter(|(name, kind)| table.get(*name) != Some(*kind));
    let missing = table.iter().filter(|(name, kind)| live.get(*name) != Some(*kind));
    let unlisted =
        unlisted.map(|(name, kind)| format!("docs/reference/metrics.md has no row for the {kind} {name}"));
    unlisted.chain(missing.map(|(name, kind)| format!("no process has the {kind} {name}"))).collect()
}

/// Metrics of engines whose pool is in a device's memory. `tests/e2e/transports/` reads them.
const OF_DEVICES: [&str; 2] = ["baton_kv_mirror_blocks_total", "baton_kv_mirror_bytes"];

#[test]
fn every_metric_of_live_processes_has_a_row_and_every_row_a_metric() {
    let mut engine = rows("engine");
    for name in OF_DEVICES {
        assert!(engine.remove(name).is_some(), "docs/reference/metrics.md has no row for {name}");
    }
    let wrong = [differences(&rows("table"), &LIVE.router), differences(&engine, &LIVE.engines)].concat();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(LIVE.router.len() > 60 && LIVE.engines.len() > 40, "{:?}", LIVE.engines);
}

/// The tables of `docs/reference/metrics.md`, which tests of router and engine compare with their code.
pub(crate) fn documented() -> Metrics {
    let page = read(&ours("docs/reference/metrics.md"));
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .map(|line| line.split(" | ").collect::<Vec<_>>());
    let mut metrics = Metrics::new();
    for row in rows {
        let name = row[0].trim_end_matches('`');
        let labels: BTreeSet<String> = row[2].split('`').skip(1).step_by(2).map(str::to_owned).collect();
        match row[1] {
            "histogram" => {
                for part in ["_sum", "_count"] {
                    metrics.insert(format!("{name}{part}"), labels.clone());
                }
                let with_bound = labels.into_iter().chain(["le".to_owned()]).collect();
                metrics.insert(format!("{name}_bucket"), with_bound);
            }
            _ => drop(metrics.insert(name.to_owned(), labels)),
        }
    }
    metrics
}

/// The errors in the names of an expression.
fn problems(
    names: &NamedSeries,
    live: &Metrics,
    documented: &Metrics,
    unseen: &mut BTreeSet<String>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut there: BTreeSet<&str> = OF_SCRAPES.into();
    for (metric, selected) in &names.metrics {
        let labels: BTreeSet<&str> = match (live.get(metric), documented.get(metric)) {
            (Some(labels), _) => labels.iter().map(String::as_str).collect(),
            // The event has not happened to this router, or the feature is not configured.
            (None, Some(labels)) => {
                unseen.insert(metric.clone());
                labels.iter().map(String::as_str).collect()
            }
            (None, None) if metric == "up" => BTreeSet::new(),
            // Prometheus' own metric: the states of the rules.
            (None, None) if metric == "ALERTS" => {
                ["alertname", "alertstate", "severity", "model", "engine", "leg"].into()
            }
            (None, None) if STOCK_VLLM.contains(&metric.as_str()) => ["model_name", "engine"].into(),
            (None, None) => {
                wrong.push(format!("no process has {metric}"));
                continue;
            }
        };
        let known = |label: &&String| labels.contains(label.as_str()) || OF_SCRAPES.contains(&label.as_str());
        wrong.extend(
            selected.iter().filter(|label| !known(label)).map(|label| format!("{metric} has no {label}")),
        );
        there.extend(labels);
    }
    let grouped = names.grouped.iter().filter(|label| !there.contains(label.as_str()));
    wrong.extend(grouped.map(|label| format!("no metric has the label {label}")));
    wrong
}

#[test]
fn every_metric_and_label_of_a_rule_or_panel_exists() {
    let (live, documented) = (&LIVE.metrics, documented());
    let mut unseen = BTreeSet::new();
    let mut wrong = Vec::new();
    for rule in rules() {
        let names = named(&rule.expr);
        let found = problems(&names, live, &documented, &mut unseen);
        wrong.extend(found.into_iter().map(|problem| format!("{}: {problem}", rule.alert)));
        // A summary uses labels that the result has.
        let shown = rule.annotations["summary"].split("$labels.").skip(1);
        for label in shown.map(|rest| rest.split([' ', '}']).next().unwrap_or_default()) {
            let kept = if names.grouped.is_empty() {
                let of_metric = |name: &String| {
                    live.get(name).or(documented.get(name)).is_some_and(|l| l.contains(label))
                };
                OF_SCRAPES.contains(&label) || names.metrics.iter().any(|(name, _)| of_metric(name))
            } else {
                names.grouped.contains(label)
            };
            if !kept {
                wrong.push(format!("{}: its result has no label {label}", rule.alert));
            }
        }
    }
    for (title, query) in queries() {
        let found = problems(&named(&query), live, &documented, &mut unseen);
        wrong.extend(found.into_iter().map(|problem| format!("{title}: {problem}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("in docs/reference/metrics.md, and not told by the live router: {unseen:?}");
    // The live router has no TLS, no discovery and no shared limits.
    assert!(unseen.len() <= 5, "{unseen:?}");
}

/// The series of a page that a selector matches: `NAME` or `NAME{LABEL="VALUE", …}`, with the operators that rules use.
fn meant<'a>(page: &'a str, selector: &str) -> Vec<&'a str> {
    let (name, wanted) = selector.trim_end_matches('}').split_once('{').unwrap_or((selector, ""));
    let wanted: Vec<_> = wanted.split(", ").filter(|pair| !pair.is_empty()).collect();
    let fits = |labels: &str| {
        wanted.iter().all(|pair| {
            let (label, value) = pair
                .trim_end_matches('"')
                .split_once("=\"")
                .or_else(|| pair.trim_end_matches('"').split_once("=~\""))
                .expect("LABEL OPERATOR VALUE");
            let (label, differs) = label.strip_suffix('!').map_or((label, false), |label| (label, true));
            let found =
                labels.split_once(&format!("{label}=\"")).and_then(|(_, rest)| rest.split('"').next());
            let is = |one: &str| match one.strip_prefix(".*") {
                Some(end) => found.is_some_and(|found| found.ends_with(end)),
                None => found == Some(one),
            };
            value.split('|').any(is) != differs
        })
    };
    let series = page.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '));
    let named = series.filter(|(series, _)| series.split('{').next() == Some(name));
    named.map(|(series, _)| series).filter(|series| fits(series)).collect()
}

/// Prometheus does not count a series' first value as growth. An alarm on the first or only expired lease would not
/// fire if the series began with that event.
#[test]
fn a_counter_of_an_alarm_exists_before_it_grows() {
    // Series of an engine and a leg begin with the first attempt there, those of an outcome with its first request.
    // Alarms on them use shares and rates over minutes.
    let later = ["baton_router_engine_errors_total", "baton_router_requests_total"];
    let (mut missing, mut seen) = (Vec::new(), 0);
    for rule in rules() {
        for rest in rule.expr.split("increase(").skip(1).chain(rule.expr.split("rate(").skip(1)) {
            let (selector, _) = rest.split_once('[').expect("a range");
            let name = selector.split('{').next().unwrap_or_default();
            seen += 1;
            if STOCK_VLLM.contains(&name) || later.contains(&name) {
                continue;
            }
            if meant(&LIVE.fresh, selector).is_empty() {
                missing.push(format!("{}: {selector}", rule.alert));
            }
        }
    }
    assert!(seen > 15, "only {seen} were seen");
    assert!(missing.is_empty(), "not there before the first event: {missing:#?}");
    assert!(meant(&LIVE.fresh, "baton_kv_blocks{state=\"lent\"}").is_empty(), "no such state");
}

#[test]
fn rules_have_unique_names_and_a_severity() {
    let mut names = BTreeSet::new();
    for rule in rules() {
        assert!(names.insert(rule.alert.clone()), "{} twice", rule.alert);
        assert!(["page", "ticket"].contains(&rule.labels["severity"].as_str()), "{}", rule.alert);
        assert_eq!((rule.labels.len(), rule.annotations.len()), (1, 1), "{}", rule.alert);
    }
    assert!(names.len() >= 20, "{names:?}");
}

#[test]
fn on_a_bad_day_every_alert_fires_and_on_a_good_one_none_does() {
    let days = ours("tests/peers/alerts.yaml");
    let expected = read(&days);
    for rule in rules() {
        assert!(
            expected.contains(&format!("alertname=\"{}\"", rule.alert)),
            "{} has no unit test",
            rule.alert
        );
    }
    if !installed("promtool") {
        return skipped("promtool is not installed (Debian: prometheus): no rule was evaluated");
    }
    let (fine, said) =
        run(Command::new("promtool").args(["check", "rules"]).args(files_below(&ours("deploy/alerts"))));
    assert!(fine, "{said}");
    let (fine, said) = run(Command::new("promtool").args(["test", "rules"]).arg(days));
    assert!(fine, "{said}");
}

#[test]
fn the_dashboard_is_valid() {
    let dashboard = dashboard();
    let panels = dashboard["panels"].as_array().expect("panels");
    let mut ids = BTreeSet::new();
    let mut cells = BTreeMap::new();
    let mut rows = 0;
    for panel in panels {
        let title = panel["title"].as_str().expect("a title");
        assert!(ids.insert(panel["id"].as_u64().expect("a number")), "{title}");
        let grid = |key: &str| panel["gridPos"][key].as_u64().unwrap_or_else(|| panic!("{title}: {key}"));
        assert!(grid("x") + grid("w") <= 24, "{title}");
        for x in grid("x")..grid("x") + grid("w") {
            for y in grid("y")..grid("y") + grid("h") {
                let other = cells.insert((x, y), title);
                assert!(other.is_none(), "{title} lies on {other:?}");
            }
        }
        if panel["type"] == "row" {
            assert!(title.ends_with('?') || title == "The routers themselves", "rows are questions: {title}");
            rows += 1;
            continue;
        }
        assert!(panel["description"].as_str().is_some_and(|text| !text.is_empty()), "{title}");
        let shown = &panel["fieldConfig"]["defaults"];
        assert!(shown["unit"].is_string(), "{title} has no unit");
        // A single number shows by its colour whether it is good, and in words that there is nothing to count.
        let steps = shown["thresholds"]["steps"].as_array().map_or(0, Vec::len);
        assert!(panel["type"] != "stat" || steps >= 2 && shown["noValue"].is_string(), "{title}");
        let overridden = panel["fieldConfig"]["overrides"].as_array().expect("a list");
        for matcher in overridden.iter().map(|one| &one["matcher"]).filter(|one| one["id"] == "byName") {
            let text = panel["targets"].to_string();
            assert!(text.contains(matcher["options"].as_str().expect("a name")), "{title}: {matcher}");
        }
        let targets = panel["targets"].as_array().expect("queries");
        let references: BTreeSet<_> = targets.iter().map(|target| target["refId"].as_str()).collect();
        assert!(!targets.is_empty() && references.len() == targets.len(), "{title}");
        for target in targets {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
            // A legend uses labels that the result has.
            let legend = target["legendFormat"].as_str().unwrap_or_default();
            let grouped = named(&target["expr"].as_str().expect("a query").replace('$', "")).grouped;
            for label in legend.split("{{").skip(1).map(|rest| rest.split('}').next().unwrap_or_default()) {
                assert!(grouped.contains(label) || label == "instance", "{title}: {label} in {grouped:?}");
            }
        }
    }
    assert!(rows == 5 && panels.len() > 40, "{rows} rows, {} panels", panels.len());
    let chosen = dashboard["templating"]["list"].as_array().expect("variables").iter();
    let chosen: BTreeSet<_> =
        chosen.map(|one| format!("${}", one["name"].as_str().expect("a name"))).collect();
    let used = dashboard["panels"].to_string();
    assert!(VARIABLES.iter().all(|one| chosen.contains(*one) && used.contains(one)), "{chosen:?}");
}
