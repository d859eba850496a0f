//! The HTTP port, over sockets.

use std::io::Write;
use std::sync::mpsc;

use serde_json::{Value, json};

use super::{TestCore, until};
use crate::http::WAITS_MAX;
use crate::signals::POOL;

fn code(answer: &str) -> Value {
    serde_json::from_str::<Value>(answer).map_or(Value::Null, |answer| answer["error"]["code"].clone())
}

#[test]
fn malformed_requests_get_the_envelope_of_the_engine() {
    let core = TestCore::start(&json!({}));
    let post = |path: &str, body: &str| core.http("POST", path, body);
    for (path, body) in [
        ("/kv/release", ""),
        ("/kv/release", "[]"),
        ("/kv/release", "{}"),
        ("/kv/release", r#"{"handle": "00"}"#),
        ("/kv/release", r#"{"handle": 7, "request_id": "r"}"#),
        ("/kv/release", r#"{"request_id": "a b"}"#),
        ("/kv/release", r#"{"request_id": "r", "reason": "no spaces"}"#),
        ("/kv/release", r#"{"request_id": "r", "reason": 7}"#),
        ("/abort_requests", r#"{"request_ids": []}"#),
        ("/abort_requests", r#"{"request_ids": ["a", 1]}"#),
        ("/abort_requests", r#"{"request_ids": ["a"], "leg": "both"}"#),
        ("/kv/refused", r#"{"params": {}}"#),
        ("/kv/refused", "{}"),
    ] {
        let (status, answer) = post(path, body);
        assert_eq!(status, 400, "{path} {body}: {answer}");
        assert!(serde_json::from_str::<Value>(&answer).is_ok_and(|answer| answer["error"].is_object()));
    }
    let (status, answer) = core.http("GET", "/kv/release", "");
    assert_eq!((status, code(&answer)), (405, json!("method_not_allowed")));
    let (status, answer) = core.http("GET", "/nothing", "");
    assert_eq!((status, code(&answer)), (404, json!("not_found")));
    let (status, answer) = core.http("GET", "/debug/kv/events?wait_ms=x", "");
    assert_eq!(status, 400, "{answer}");
    let unknown = format!(r#"{{"handle": "{}"}}"#, "0".repeat(32));
    assert_eq!(post("/kv/release", &unknown), (200, r#"{"result":"unknown"}"#.into()));
    let head = "POST /kv/release HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2000000\r\n\r\n";
    assert_eq!(core.raw(head.as_bytes()).0, 413);
    assert_eq!(core.http("GET", "/health", "").0, 200);
}

#[test]
fn health_reports_the_drain() {
    let core = TestCore::start(&json!({}));
    assert_eq!(core.http("GET", "/health?wait_ms=1", "").0, 200);
    assert_eq!(core.http("GET", "/health?wait_ms=10001", "").0, 400);
    core.call(&json!({"op": "draining"}));
    let (status, answer) = core.http("GET", "/health?wait_ms=10000", "");
    assert_eq!((status, code(&answer)), (503, json!("draining")));
    assert_eq!(core.http("GET", "/health", "").0, 503);
    // What has begun goes on, and leases end as before.
    assert_eq!(core.http("POST", "/kv/release", r#"{"request_id": "r"}"#).0, 200);
}

#[test]
fn waits_for_the_drain_and_for_events_share_a_limit() {
    let core = TestCore::start(&json!({}));
    let (answered, answers) = mpsc::sync_channel(WAITS_MAX + 1);
    std::thread::scope(|scope| {
        for caller in 0..=WAITS_MAX {
            let path = ["/health?wait_ms=10000", "/debug/kv/events?wait_ms=10000"][caller % 2];
            let (core, answered) = (&core, answered.clone());
            scope.spawn(move || answered.send(core.http("GET", path, "")).expect("the test receives it"));
        }
        let (status, body) = answers.recv().expect("one caller does not wait");
        assert!(status == 200 && !body.contains("queued"), "{body}");
        core.queued("cmpl-x-0-0a1b2c3d", "r", "whole");
        core.call(&json!({"op": "draining"}));
    });
    let waited = answers.try_iter().filter(|(status, body)| *status == 503 || body.contains("queued"));
    assert_eq!(waited.count(), WAITS_MAX);
}

#[test]
fn a_core_with_a_secret_answers_only_its_callers() {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    writeln!(file, "a secret of this cluster").expect("it is written");
    let core = TestCore::start(&json!({"secret_file": file.path().to_str().expect("UTF-8")}));
    let body = r#"{"request_id": "r"}"#;
    let wrong = "x-baton-cluster-secret: a secret of that cluster\r\n";
    for headers in ["", wrong] {
        let (status, answer) = core.http_with("POST", "/kv/release", headers, body);
        assert_eq!((status, code(&answer)), (401, json!("invalid_cluster_secret")));
        assert_eq!(core.http_with("GET", "/debug/kv", headers, "").0, 401);
        assert_eq!(core.http_with("GET", "/debug/kv/events", headers, "").0, 401);
    }
    let right = "x-baton-cluster-secret: a secret of this cluster\r\n";
    assert_eq!(core.http_with("POST", "/kv/release", right, body).0, 200);
    assert_eq!(core.http_with("GET", "/debug/kv", right, "").0, 200);
    assert_eq!(core.http("GET", "/metrics", "").0, 200);
    assert_eq!(core.http("GET", "/health", "").0, 200);
    assert_eq!(core.http("GET", "/health?wait_ms=1", "").0, 401);
}

#[test]
fn the_state_has_fresh_counts_that_add_up() {
    let core = TestCore::start(&json!({}));
    core.queued("cmpl-x-0-0a1b2c3d", "r", "prefill");
    core.offer("cmpl-x-0-0a1b2c3d", &json!([[1, 2, 3]]), 2);
    let state = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            loop {
                let (status, body) = core.http("GET", "/debug/kv", "");
                assert_eq!(status, 200, "{body}");
                let state: Value = serde_json::from_str(&body).expect("JSON");
                if state["blocks"]["cached"] == 20 {
                    return state;
                }
            }
        });
        until("a reader asks", || core.pending() & POOL == POOL);
        core.call(&json!({"op": "pool", "free": 30, "cached": 20, "active": 6, "landing": 4, "waiting": 1,
            "running": 2}));
        reader.join().expect("no panic")
    });
    let blocks =
        json!({"total": 63, "free": 30, "cached": 20, "active": 6, "leased": 3, "landing": 4, "storing": 0});
    assert_eq!(state["blocks"], blocks);
    assert_eq!(state["cores"][0]["blocks"], blocks);
    assert_eq!((&state["requests"]["waiting"], &state["requests"]["running"]), (&json!(1), &json!(2)));
    assert_eq!((&state["engine"]["epoch"], &state["leases"]["live"]), (&json!(core.epoch), &json!(1)));
    let lease = &state["oldest_leases"][0];
    assert_eq!((&lease["request_id"], &lease["state"]), (&json!("r"), &json!("offered")));
    assert_eq!((&lease["blocks"], &lease["readers_expected"]), (&json!(3), &json!(2)));
}

#[test]
fn a_state_without_an_answer_of_the_scheduler_has_the_last_counts() {
    let core = TestCore::start(&json!({}));
    until("the first counts are old", || {
        let (_, body) = core.http("GET", "/debug/kv", "");
        let state: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!((&state["blocks"]["free"], &state["blocks"]["active"]), (&json!(63), &json!(0)));
        state["blocks_age_ms"].as_u64() > Some(200)
    });
}

#[test]
fn a_reader_of_events_waits_for_the_next_one() {
    let core = TestCore::start(&json!({"rank": 3}));
    let (_, body) = core.http("GET", "/debug/kv/events?after=latest", "");
    let page: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((&page["next"], &page["engine"]["model"]), (&json!(0), &json!("m")));
    let body = std::thread::scope(|scope| {
        let reader = scope.spawn(|| core.http("GET", "/debug/kv/events?after=0&wait_ms=10000", "").1);
        core.queued("2_chatcmpl-x-0a1b2c3d", "r", "whole");
        reader.join().expect("no panic")
    });
    let page: Value = serde_json::from_str(&body).expect("JSON");
    let event = &page["events"][0];
    let fields = [&event["kind"], &event["leg"], &event["tag"], &event["request_id"]];
    assert_eq!(fields, [&json!("queued"), &json!("whole"), &json!("me"), &json!("r")]);
    assert_eq!((&event["rank"], &event["index"], &event["prompt"]), (&json!(3), &json!(2), &json!(33)));
}

#[test]
fn words_outside_of_the_lists_are_other() {
    let core = TestCore::start(&json!({}));
    core.queued("cmpl-x-0-0a1b2c3d", "r", "sideways");
    core.events(&json!([
        {"id": "cmpl-x-0-0a1b2c3d", "kind": "started", "cached": 1},
        {"id": "cmpl-x-0-0a1b2c3d", "kind": "fetched", "result": "eaten"},
        {"id": "cmpl-x-0-0a1b2c3d", "kind": "abort", "how": "disconnect"},
        {"id": "cmpl-x-0-0a1b2c3d", "kind": "ended", "outcome": "bliss", "generated": 1, "computed": 2, "blocks": 0},
        {"id": "cmpl-x-0-0a1b2c3d", "kind": "freed", "blocks": 0},
        {"id": "cmpl-y-0-0a1b2c3d", "kind": "refused", "reason": "queue_full"},
    ]));
    let (_, body) = core.http("GET", "/debug/kv/events", "");
    let page: Value = serde_json::from_str(&body).expect("JSON");
    let events = page["events"].as_array().expect("a list");
    assert_eq!((&events[0]["leg"], &events[2]["result"]), (&json!("other"), &json!("other")));
    assert_eq!((&events[3]["how"], &events[4]["outcome"]), (&json!("disconnect"), &json!("other")));
    assert_eq!((&events[5]["kind"], &events[5]["request_id"]), (&json!("refused"), &json!("y")));
    let stats = core.stats();
    assert_eq!((&stats["requests"], &stats["late_events"]), (&json!(0), &json!(1)));
}
