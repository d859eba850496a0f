//! The access log's lines, and the handling of its file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use baton_router::{Router, RouterConfig};
use serde_json::{Value, json};

use crate::harness::client::{Client, DisconnectKind, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::system::{TestRouter, await_requests};

struct TempLog {
    folder: tempfile::TempDir,
}

impl TempLog {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("access.log")
    }

    fn yaml(&self, more: &str) -> String {
        format!("access_log: {{enabled: true, path: '{}'{more}}}", self.path().display())
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

async fn has(path: &Path, count: usize) -> Vec<Value> {
    eventually(&format!("{count} lines"), || lines(path).len() >= count).await;
    lines(path)
}

fn usage() -> Action {
    Action::Refuse(
        200,
        json!({"id": "d", "choices": [{"text": "SECRET ANSWER", "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}}),
    )
}

/// The fields in the documentation.
fn documented() -> BTreeSet<String> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/access-log.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, table) = page.split_once("<!-- fields: begin -->").unwrap();
    let (table, _) = table.split_once("<!-- fields: end -->").unwrap();
    let name = |row: &str| row.strip_prefix("| `")?.split('`').next().map(str::to_owned);
    table.lines().filter_map(name).collect()
}

#[tokio::test]
async fn a_log_line_contains_the_outcome_and_no_secret() {
    let log = TempLog::new();
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::scripted(vec![usage(), Action::StreamGated(9)]).await;
    let system = TestRouter::with(&[&p], &[&d], "", &log.yaml("")).await;
    let mut client = Client::connect(system.address).await;
    let headers = "x-request-id: mine-1\r\nauthorization: Bearer SECRET KEY\r\nuser-agent: evil\"\\\u{e9}\r\n\
         traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n";
    let body = json!({"model": "alias", "prompt": "SECRET PROMPT", "max_tokens": 2}).to_string();
    client.post_bytes("/v1/completions?key=SECRET", headers, body.as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    let line = has(&log.path(), 1).await.remove(0);
    for (field, value) in [
        ("client_request_id", json!("mine-1")),
        ("trace_id", json!("0af7651916cd43dd8448eb211c80319c")),
        ("method", json!("POST")),
        ("path", json!("/v1/completions")),
        ("model", json!("m")),
        ("status", json!(200)),
        ("outcome", json!("completed")),
        ("prefill_engine", json!(p.address.to_string())),
        ("decode_engine", json!(d.address.to_string())),
        ("retries", json!(0)),
        ("streamed", json!(false)),
        ("request_bytes", json!(body.len())),
        ("prompt_tokens", json!(7)),
        ("cached_tokens", json!(4)),
        ("completion_tokens", json!(2)),
        ("finish_reason", json!("stop")),
    ] {
        assert_eq!(line[field], value, "{field}: {line}");
    }
    assert_eq!(line["request_id"], p.received()[0].headers["x-request-id"].to_str().unwrap());
    let ms = |field: &str| line[field].as_f64().unwrap_or_else(|| panic!("{field}: {line}"));
    let phases = ["queue_ms", "prefill_ms", "gap_ms", "accept_ms", "first_byte_ms", "stream_ms"];
    let sum: f64 = phases.map(ms).iter().sum();
    assert!(sum <= ms("total_ms") + 0.01, "{line}");
    let agent = line["user_agent"].as_str().unwrap();
    assert!(agent.starts_with("evil\"") && agent.contains('\\'), "{agent}");
    let time = line["time"].as_str().unwrap();
    assert!(time.len() == 27 && time.starts_with("20") && time.ends_with('Z'), "{time}");
    let text = std::fs::read_to_string(log.path()).unwrap();
    assert!(!text.contains("SECRET"), "{text}");

    client.post("/v1/completions", &completion(true)).await;
    d.open_gate();
    assert_eq!(client.head().await.0, 200);
    client.chunk().await.unwrap();
    client.hang_up(DisconnectKind::Rst);
    let cancelled = has(&log.path(), 2).await.remove(1);
    assert_eq!(
        (&cancelled["outcome"], &cancelled["disconnect_phase"]),
        (&json!("client_gone"), &json!("decode_stream"))
    );
    assert_eq!((&cancelled["streamed"], cancelled["status"].as_u64()), (&json!(true), Some(499)));

    let mut known: BTreeSet<String> = BTreeSet::from(["tenant".to_owned()]);
    known.extend([&line, &cancelled].into_iter().flat_map(|line| line.as_object().unwrap().keys().cloned()));
    assert_eq!(known, documented(), "docs/reference/access-log.md explains every field");
}

#[tokio::test]
async fn failed_requests_are_logged_at_any_sample_rate() {
    let log = TempLog::new();
    let d = FakeEngine::scripted(vec![Action::Whole(1), Action::Whole(1), Action::Hang]).await;
    let system = TestRouter::with(&[], &[&d], "", &log.yaml(", sample: 0.0")).await;
    for _ in 0..2 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    for own in ["/health", "/version", "/v1/models"] {
        assert_eq!(get(system.address, own).await.status, 200);
    }
    assert_eq!(
        post(system.address, "/v1/completions", &json!({"model": "none", "prompt": "x"})).await.status,
        404
    );
    assert_eq!(get(system.address, &format!("/{}", "x".repeat(3000))).await.status, 404);
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(false)).await;
    await_requests(&d, 3).await;
    client.hang_up(DisconnectKind::Fin);
    system.counts("baton_router_disconnects_total", 1.0).await;
    system.counts("baton_router_access_log_lines_total", 3.0).await;
    let lines = has(&log.path(), 3).await;
    let outcomes: Vec<_> = lines.iter().map(|line| line["outcome"].as_str().unwrap_or("none")).collect();
    assert_eq!(outcomes, ["rejected", "rejected", "client_gone"], "{lines:#?}");
    assert!(lines.iter().all(|line| line["path"].as_str().unwrap().len() <= 256));
}

#[tokio::test]
async fn a_sample_of_a_half_is_every_other_request() {
    let log = TempLog::new();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let mut system = TestRouter::with(&[], &[&d], "", &log.yaml(", sample: 0.5")).await;
    let mut client = Client::connect(system.address).await;
    for _ in 0..100 {
        client.post("/v1/completions", &completion(false)).await;
        assert_eq!(client.answer().await.status, 200);
    }
    drop(client);
    system.shut_down();
    system.stopped().await;
    let logged = lines(&log.path()).len();
    assert!((48..=52).contains(&logged), "{logged}: the queue is written out at the end");
}

#[tokio::test]
async fn a_renamed_log_file_is_reopened_without_losing_a_line() {
    let log = TempLog::new();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", &log.yaml("")).await;
    let ask = || async { post(system.address, "/v1/completions", &completion(false)).await };
    ask().await;
    has(&log.path(), 1).await;
    let old = log.folder.path().join("access.log.1");
    std::fs::rename(log.path(), &old).unwrap();
    let mut sent = 1;
    while !log.path().exists() {
        ask().await;
        sent += 1;
        assert!(sent < 100_000, "the file is never opened again");
    }
    ask().await;
    sent += 1;
    system.counts("baton_router_access_log_lines_total", f64::from(sent)).await;
    let total = || lines(&old).len() + lines(&log.path()).len();
    eventually("every line is in one of the two", || total() == sent as usize).await;
    assert!(!lines(&log.path()).is_empty());
}

#[tokio::test]
async fn a_log_that_cannot_be_written_drops_lines_and_counts_them() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system =
        TestRouter::with(&[], &[&d], "", "access_log: {enabled: true, path: /dev/full, queue: 1}").await;
    let dropped = "baton_router_access_log_dropped_total";
    let mut requests = 0;
    // Lines are buffered, so the write error occurs when the buffer is full.
    while system.metric(dropped).await == 0.0 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
        requests += 1;
        assert!(requests < 5000, "nothing is dropped");
    }
}

#[tokio::test]
async fn a_log_that_cannot_be_opened_is_refused_at_the_start() {
    let yaml = "listen: 127.0.0.1:0\nadmin: {listen: '127.0.0.1:0'}\nmodels: [{name: m, decode: {engines: \
        [{url: 'http://127.0.0.1:1'}]}}]\naccess_log: {enabled: true, path: /no/such/folder/access.log}\n";
    let config = RouterConfig::from_yaml(yaml, "test.yaml").unwrap();
    let message = Router::bind(config).await.err().unwrap().to_string();
    assert!(message.contains("/no/such/folder/access.log"), "{message}");
}

#[tokio::test]
async fn a_reload_turns_the_log_on_and_off_and_a_signal_does_not_end_the_router() {
    let (log, other) = (TempLog::new(), TempLog::new());
    let d = FakeEngine::always(Action::Whole(1)).await;
    let config = |more: &str| {
        let yaml = format!(
            "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\n\
             models: [{{name: m, decode: {{engines: [{{url: '{}'}}]}}}}]\n{more}\n",
            d.url()
        );
        RouterConfig::from_yaml(&yaml, "test.yaml").unwrap_or_else(|e| panic!("{e}\n{yaml}"))
    };
    let router = Router::bind(config("")).await.unwrap();
    let (address, reload) = (router.local_addr(), router.reload());
    let running = tokio::spawn(router.run(tokio_util::sync::CancellationToken::new()));
    let ask = || async { assert_eq!(post(address, "/v1/completions", &completion(false)).await.status, 200) };
    ask().await;
    reload.install(config(&log.yaml(""))).unwrap();
    ask().await;
    has(&log.path(), 1).await;
    // The same configuration again: the file is kept.
    reload.install(config(&log.yaml(""))).unwrap();
    let signal = format!("kill -USR1 {}", std::process::id());
    assert!(std::process::Command::new("sh").args(["-c", &signal]).status().unwrap().success());
    ask().await;
    has(&log.path(), 2).await;
    let unusable = config("access_log: {enabled: true, path: /no/such/folder/access.log}");
    assert!(reload.install(unusable).is_err());
    ask().await;
    has(&log.path(), 3).await;
    reload.install(config(&other.yaml(""))).unwrap();
    ask().await;
    has(&other.path(), 1).await;
    reload.install(config("")).unwrap();
    ask().await;
    assert_eq!((lines(&log.path()).len(), lines(&other.path()).len()), (3, 1));
    running.abort();
}

#[tokio::test]
async fn a_line_names_the_tenant_and_never_the_key() {
    let log = TempLog::new();
    let key = baton_router::NewKey::make();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let top = format!("auth: {{keys: [{{id: a, hash: '{}', tenant: acme}}]}}\n{}", key.hash, log.yaml(""));
    let system = TestRouter::with(&[], &[&d], "", &top).await;
    let mut client = Client::connect(system.address).await;
    let headers = format!("authorization: Bearer {}\r\n", key.key);
    client.post_bytes("/v1/completions", &headers, completion(false).to_string().as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 401);
    let lines = has(&log.path(), 2).await;
    assert_eq!((&lines[0]["tenant"], lines[1].get("tenant")), (&json!("acme"), None));
    let text = std::fs::read_to_string(log.path()).unwrap();
    assert!(!text.contains(&key.key) && !text.contains(&key.hash), "{text}");
}
