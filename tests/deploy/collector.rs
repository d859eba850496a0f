//! `deploy/otel`: the collector's configuration by itself, and together with the router's.
//!
//! The types below are the used part of the collector's schema (`config.schema.yaml` and the documentation of each
//! component). A misspelt or misplaced key is an error. `tests/peers/otel.sh` runs the configuration on a real
//! collector.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

use crate::{ours, read};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    extensions: Extensions,
    receivers: Receivers,
    processors: Processors,
    exporters: Exporters,
    service: Service,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Extensions {
    file_storage: Storage,
    health_check: Listens,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Storage {
    directory: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Listens {
    endpoint: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Receivers {
    otlp: Otlp,
    #[serde(rename = "filelog/access")]
    access: FileLog,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Otlp {
    protocols: Protocols,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Protocols {
    http: OtlpHttp,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OtlpHttp {
    endpoint: String,
    max_request_body_size: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLog {
    include: Vec<String>,
    start_at: String,
    storage: String,
    operators: Vec<Operator>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, tag = "type", rename_all = "snake_case")]
enum Operator {
    JsonParser {
        timestamp: Timestamp,
        severity: Severity,
    },
    TraceParser {
        #[serde(rename = "if")]
        when: String,
        trace_id: From,
    },
    Add {
        field: String,
        value: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Timestamp {
    parse_from: String,
    layout_type: String,
    layout: String,
    location: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Severity {
    parse_from: String,
    mapping: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct From {
    parse_from: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Processors {
    memory_limiter: MemoryLimiter,
    k8sattributes: Option<K8s>,
    tail_sampling: TailSampling,
    batch: Batch,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryLimiter {
    check_interval: String,
    limit_mib: u32,
    spike_limit_mib: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct K8s {
    auth_type: String,
    extract: Extract,
    pod_association: Vec<Sources>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Extract {
    metadata: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sources {
    sources: Vec<Source>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Source {
    from: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TailSampling {
    decision_wait: String,
    num_traces: u64,
    policies: Vec<NamedPolicy>,
}

#[derive(Deserialize)]
struct NamedPolicy {
    name: String,
    #[serde(flatten)]
    policy: Policy,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Policy {
    StatusCode { status_code: StatusCodes },
    Latency { latency: Latency },
    NumericAttribute { numeric_attribute: NumericAttribute },
    Probabilistic { probabilistic: Probabilistic },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StatusCodes {
    status_codes: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Latency {
    threshold_ms: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NumericAttribute {
    key: String,
    min_value: i64,
    max_value: i64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Probabilistic {
    sampling_percentage: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Batch {
    timeout: String,
    send_batch_size: u32,
    send_batch_max_size: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Exporters {
    otlphttp: OtlpExporter,
    debug: Debug,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OtlpExporter {
    endpoint: String,
    compression: String,
    sending_queue: Queue,
    retry_on_failure: Retry,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Queue {
    enabled: bool,
    queue_size: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Retry {
    enabled: bool,
    max_elapsed_time: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Debug {
    verbosity: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Service {
    extensions: Vec<String>,
    pipelines: BTreeMap<String, Pipeline>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pipeline {
    receivers: Vec<String>,
    processors: Vec<String>,
    exporters: Vec<String>,
}

fn text() -> String {
    read(&ours("deploy/otel/collector.yaml"))
}

/// The file as it is, and with its Kubernetes parts enabled.
fn both() -> [String; 2] {
    let plain = text();
    let uncommented = plain.replace("#k8s ", "");
    assert_ne!(plain, uncommented);
    [plain, uncommented]
}

fn parsed(text: &str) -> Config {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("deploy/otel/collector.yaml: {error}"))
}

fn router() -> Value {
    crate::parsed(&read(&ours("deploy/otel/router.yaml")), "router.yaml".as_ref())
}

#[test]
fn every_part_of_the_collector_is_used_and_every_part_that_is_used_is_there() {
    for text in both() {
        let config = parsed(&text);
        let whole: Value = serde_saphyr::from_str(&text).expect("it was read before");
        let defined = |section: &str| -> BTreeSet<String> {
            whole[section].as_object().expect("a section").keys().cloned().collect()
        };
        let used = |of: fn(&Pipeline) -> &Vec<String>| -> BTreeSet<String> {
            config.service.pipelines.values().flat_map(|pipeline| of(pipeline).clone()).collect()
        };
        assert_eq!(defined("receivers"), used(|pipeline| &pipeline.receivers));
        assert_eq!(defined("processors"), used(|pipeline| &pipeline.processors));
        assert_eq!(defined("exporters"), used(|pipeline| &pipeline.exporters));
        assert_eq!(defined("extensions"), config.service.extensions.iter().cloned().collect());
        assert_eq!(config.receivers.access.storage, "file_storage");
        assert_eq!(config.service.pipelines.keys().collect::<Vec<_>>(), ["logs", "traces"]);
        for (name, pipeline) in &config.service.pipelines {
            // Required order: the memory limiter is first, and batching is last.
            assert_eq!(pipeline.processors.first().map(String::as_str), Some("memory_limiter"), "{name}");
            assert_eq!(pipeline.processors.last().map(String::as_str), Some("batch"), "{name}");
        }
        // Tail sampling loses the connection that `k8sattributes` needs.
        let place =
            |of: &str| config.service.pipelines["traces"].processors.iter().position(|name| name == of);
        assert!(place("k8sattributes") < place("tail_sampling"));
        assert_eq!(place("k8sattributes").is_some(), config.processors.k8sattributes.is_some());
    }
}

#[test]
fn the_settings_of_the_collector_are_consistent() {
    let seconds = |text: &str| -> u64 {
        text.strip_suffix('s').and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{text}"))
    };
    for text in both() {
        let Config { extensions, receivers, processors, exporters, service: _ } = parsed(&text);
        assert!(extensions.file_storage.directory.starts_with("/var/lib/"));
        assert!(extensions.health_check.endpoint.starts_with("127.0.0.1:"));
        let limiter = processors.memory_limiter;
        assert!(limiter.spike_limit_mib < limiter.limit_mib && seconds(&limiter.check_interval) >= 1);
        let batch = processors.batch;
        assert!(batch.send_batch_size <= batch.send_batch_max_size && seconds(&batch.timeout) >= 1);
        // The router sends batches of 512 spans of a kilobyte each (`router/src/observe/telemetry.rs`).
        assert!(receivers.otlp.protocols.http.max_request_body_size >= 4 * 512 * 1024);
        assert_eq!(receivers.access.start_at, "end");
        let sampling = processors.tail_sampling;
        assert!(sampling.num_traces >= 1_000 * seconds(&sampling.decision_wait));
        let names: BTreeSet<_> = sampling.policies.iter().map(|policy| policy.name.as_str()).collect();
        assert_eq!(names.len(), sampling.policies.len());
        let kept: Vec<_> = sampling.policies.iter().map(|policy| &policy.policy).collect();
        let [
            Policy::StatusCode { status_code },
            Policy::Latency { latency },
            Policy::NumericAttribute { numeric_attribute },
            Policy::Probabilistic { probabilistic },
        ] = kept.as_slice()
        else {
            panic!("policies: {names:?}");
        };
        // A cancelled request has this status, as the test in `traces` shows.
        assert_eq!(status_code.status_codes, ["ERROR"]);
        assert!(latency.threshold_ms > 0 && (0.0..=100.0).contains(&probabilistic.sampling_percentage));
        assert!(numeric_attribute.min_value == 2 && numeric_attribute.max_value > 2);
        let page = read(&ours("docs/reference/traces.md"));
        assert!(page.contains(&format!("`{}`", numeric_attribute.key)), "a span's attribute");
        assert_eq!(
            (exporters.debug.verbosity.as_str(), exporters.otlphttp.compression.as_str()),
            ("basic", "gzip")
        );
        assert_eq!(exporters.otlphttp.endpoint, "${env:OTLP_BACKEND}");
        assert!(text.contains("OTLP_BACKEND=https://"), "the file's head describes it");
        let (queue, retry) = (exporters.otlphttp.sending_queue, exporters.otlphttp.retry_on_failure);
        assert!(
            queue.enabled && queue.queue_size > 0 && retry.enabled && seconds(&retry.max_elapsed_time) > 0
        );
        if let Some(k8s) = processors.k8sattributes {
            assert!(k8s.auth_type == "serviceAccount" && k8s.extract.metadata.len() == 4);
            assert_eq!(k8s.pod_association[0].sources[0].from, "connection");
        }
    }
}

#[test]
fn the_router_sends_to_where_the_collector_listens_and_writes_where_it_reads() {
    let (config, router) = (parsed(&text()), router());
    // `${env:NAME:-DEFAULT}`
    let endpoint = &config.receivers.otlp.protocols.http.endpoint;
    let listens = endpoint.strip_prefix("${env:OTLP_LISTEN:-").and_then(|rest| rest.strip_suffix('}'));
    let sends = router["telemetry"]["otlp"]["endpoint"].as_str().expect("it sends traces");
    // Without a path of its own the exporter adds /v1/traces, the default path of receivers.
    assert_eq!(sends.strip_prefix("http://"), listens);
    assert_eq!(router["access_log"]["enabled"], true);
    assert_eq!(config.receivers.access.include, [router["access_log"]["path"].as_str().expect("a path")]);
    // Log lines and spans belong to one service.
    let named = config.receivers.access.operators.iter().find_map(|operator| match operator {
        Operator::Add { field, value } if field == "resource[\"service.name\"]" => Some(value.as_str()),
        _ => None,
    });
    assert_eq!(named, router["telemetry"]["otlp"]["service_name"].as_str());
}

/// The fields of the access log from the page's table, which a test of the router compares with its code.
fn fields() -> BTreeSet<String> {
    let page = read(&ours("docs/reference/access-log.md"));
    let (_, rest) = page.split_once("<!-- fields: begin -->").expect("the table begins");
    let (table, _) = rest.split_once("<!-- fields: end -->").expect("the table ends");
    table.lines().filter_map(|line| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned())).collect()
}

/// The severity that the mapping assigns to a status.
fn severity(mapping: &BTreeMap<String, Value>, status: u64) -> Vec<&str> {
    let is = |value: &Value| match value {
        Value::Number(number) => number.as_u64() == Some(status),
        Value::String(range) => {
            let hundreds = range.strip_suffix("xx").and_then(|digit| digit.parse::<u64>().ok());
            hundreds.unwrap_or_else(|| panic!("{range}")) == status / 100
        }
        other => panic!("{other}"),
    };
    let fits = |value: &Value| value.as_array().map_or_else(|| is(value), |list| list.iter().any(is));
    mapping.iter().filter(|(_, values)| fits(values)).map(|(name, _)| name.as_str()).collect()
}

/// Checks that the collector parses a line of the access log. `traces` has one of a live router.
pub(crate) fn reads_line(line: &Value) {
    let config = parsed(&text());
    let field = |from: &str| {
        let name = from.strip_prefix("attributes.").unwrap_or_else(|| panic!("{from}")).to_owned();
        assert!(fields().contains(&name), "no field is called {name}");
        line[&name].clone()
    };
    let [
        Operator::JsonParser { timestamp, severity: of },
        Operator::TraceParser { when, trace_id },
        Operator::Add { .. },
    ] = config.receivers.access.operators.as_slice()
    else {
        panic!("other operators");
    };
    assert_eq!((timestamp.layout_type.as_str(), timestamp.location.as_str()), ("strptime", "UTC"));
    let shape: String =
        [("%Y", "0000"), ("%m", "00"), ("%d", "00"), ("%H", "00"), ("%M", "00"), ("%S", "00")]
            .iter()
            .fold(timestamp.layout.replace("%f", "000000"), |shape, (word, digits)| {
                shape.replace(word, digits)
            });
    let time = field(&timestamp.parse_from);
    let time = time.as_str().expect("a time is text");
    let seen: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    assert_eq!(seen, shape, "{time}");
    let status = field(&of.parse_from).as_u64().expect("a status is a number");
    assert_eq!(severity(&of.mapping, status).len(), 1, "{status}");
    assert_eq!(when, &format!("{} != nil", trace_id.parse_from));
    let trace = field(&trace_id.parse_from);
    let trace = trace.as_str().expect("a trace's id is text");
    assert!(trace.len() == 32 && trace.bytes().all(|byte| byte.is_ascii_hexdigit()), "{trace}");
}

#[test]
fn every_status_of_the_log_has_one_severity() {
    let config = parsed(&text());
    let Some(Operator::JsonParser { severity: of, .. }) = config.receivers.access.operators.first() else {
        panic!("lines are JSON");
    };
    let page = read(&ours("docs/reference/errors.md"));
    let documented = page.lines().filter(|line| line.starts_with("| `")).skip(1).flat_map(|line| {
        let statuses = line.split(" | ").nth(1).expect("a status").split(", ");
        statuses.map(|status| status.parse::<u64>().expect("a number")).collect::<Vec<_>>()
    });
    let statuses: BTreeSet<u64> = documented.chain([0, 200]).collect();
    assert!(statuses.len() > 15 && statuses.contains(&499), "{statuses:?}");
    for status in statuses {
        let expected = match status {
            200..=299 => "info",
            400..=499 => "warn",
            _ => "error",
        };
        assert_eq!(severity(&of.mapping, status), [expected], "{status}");
    }
}
