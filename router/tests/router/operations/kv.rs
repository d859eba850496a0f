//! `GET /debug/kv` on the admin listener: every engine's blocks and leases, joined with the router's requests in
//! flight; and the page that shows them.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::client::{Client, DisconnectKind, completion, get};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest};
use crate::harness::system::{TestRouter, await_requests};

fn lease(id: &str, blocks: u64, state: &str) -> Value {
    json!({"request_id": id, "blocks": blocks, "state": state, "age_ms": 10_000, "left_ms": 20_000,
        "readers_done": 0, "readers_expected": 1})
}

fn debug_kv(leases: &[Value]) -> Action {
    let leased: u64 = leases.iter().filter_map(|lease| lease["blocks"].as_u64()).sum();
    Action::Json(json!({
        "blocks": {"total": 100, "free": 100 - leased, "cached": 0, "active": 0, "leased": leased, "landing": 0,
            "storing": 0},
        "requests": {"waiting": 1, "running": 2}, "leases": {"live": leases.len(), "opened": 7},
        "oldest_leases": leases, "steps": 3, "failed": null,
        "engine": {"role": "prefill", "model": "m", "epoch": "e", "data_parallel_size": 1},
    }))
}

fn missing() -> Action {
    Action::Refuse(404, json!({"error": {"message": "not found"}}))
}

/// Polls until the condition holds: a snapshot is cached for a second.
async fn until(system: &TestRouter, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let begun = Instant::now();
    loop {
        let answer = get(system.admin, "/debug/kv").await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let snapshot = answer.json();
        if is_so(&snapshot) {
            return snapshot;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "waited in vain: {what}: {snapshot:#}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_lease_is_held_for_its_request_and_stranded_after_a_cancel() {
    let id = Arc::new(Mutex::new("none".to_owned()));
    let known = Arc::clone(&id);
    let rule = move |request: &ReceivedRequest| match request.path.as_str() {
        "/debug/kv" => Some(debug_kv(&[
            lease(&known.lock().unwrap(), 5, "offered"),
            lease("a-strangers", 7, "offered"),
            lease("read-now", 2, "reading"),
        ])),
        "/metrics" => Some(Action::Text("baton_kv_release_total{cause=\"transfer_done\"} 41\n")),
        _ => None,
    };
    let p = FakeEngine::always(Action::Lease(Some(1))).await.with_rule(rule);
    let stock = "vllm:num_requests_running 4\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.5\n\
        vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"400\"} 1\n";
    let d = FakeEngine::always(Action::Hang).await.with_rule(move |request| match request.path.as_str() {
        "/debug/kv" => Some(missing()),
        "/metrics" => Some(Action::Text(stock)),
        _ => None,
    });
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 1).await;
    d.received()[0].headers["x-request-id"].to_str().unwrap().clone_into(&mut id.lock().unwrap());

    let snapshot =
        until(&system, "the request's lease", |snapshot| snapshot["requests"]["in_flight"] == 1).await;
    assert_eq!(snapshot["requests"]["phases"], json!({"decode_pre_first": 1}));
    assert_eq!(
        (&snapshot["stranded_leases"], &snapshot["stranded_blocks"]),
        (&json!(1), &json!(7)),
        "{snapshot:#}"
    );
    let engine = |snapshot: &Value, of: &FakeEngine| {
        let engines = snapshot["engines"].as_array().unwrap();
        engines.iter().find(|engine| engine["engine"] == of.address.to_string()).unwrap().clone()
    };
    let producer = engine(&snapshot, &p);
    assert_eq!(
        (&producer["source"], &producer["role"], &producer["epoch"]),
        (&json!("debug_kv"), &json!("prefill"), &json!("e"))
    );
    assert_eq!((&producer["blocks"]["stranded"], &producer["blocks"]["leased"]), (&json!(7), &json!(14)));
    assert_eq!(producer["releases"], json!({"transfer_done": 41}));
    let stock = engine(&snapshot, &d);
    assert_eq!(
        (&stock["source"], &stock["blocks"], &stock["kv_usage"]),
        (&json!("metrics"), &Value::Null, &json!(0.5))
    );
    assert_eq!(
        (&stock["blocks_total"], &stock["role"], &stock["error"]),
        (&json!(400), &json!("decode"), &Value::Null)
    );
    let of = |snapshot: &Value, id: &str| {
        snapshot["leases"].as_array().unwrap().iter().find(|lease| lease["request_id"] == id).unwrap().clone()
    };
    let mine = id.lock().unwrap().clone();
    assert_eq!(of(&snapshot, &mine)["request"], json!({"known": "in_flight", "phase": "decode_pre_first"}));
    assert_eq!(of(&snapshot, &mine)["stranded"], false);
    assert_eq!(
        (&of(&snapshot, "a-strangers")["stranded"], &of(&snapshot, "read-now")["stranded"]),
        (&json!(true), &json!(false))
    );

    client.hang_up(DisconnectKind::Rst);
    system.settled().await;
    let snapshot = until(&system, "it is stranded", |snapshot| snapshot["stranded_leases"] == 2).await;
    let mine = of(&snapshot, &mine);
    assert_eq!(
        (&mine["request"]["known"], &mine["request"]["outcome"]),
        (&json!("over"), &json!("client_gone"))
    );
    assert!(mine["why"].as_str().unwrap().contains("client gone"), "{mine}");
}

#[tokio::test]
async fn many_open_pages_cost_an_engine_one_question() {
    let d = FakeEngine::always(Action::Whole(1))
        .await
        .with_rule(|request| (request.path == "/debug/kv").then(|| debug_kv(&[])));
    let system = TestRouter::start(&[], &[&d]).await;
    let begun = Instant::now();
    let all = (0..20).map(|_| get(system.admin, "/debug/kv"));
    let answers = futures::future::join_all(all).await;
    assert!(answers.iter().all(|answer| answer.json()["engines"][0]["source"] == "debug_kv"));
    let queries = d.all().iter().filter(|request| request.path == "/debug/kv").count();
    // On a machine that stalls, a cached snapshot may expire meanwhile.
    assert!(queries as u64 <= 1 + begun.elapsed().as_secs(), "{queries}");
}

#[tokio::test]
async fn a_silent_or_refusing_engine_is_shown_as_such_beside_the_others() {
    let hangs = FakeEngine::always(Action::Whole(1))
        .await
        .with_rule(|request| (request.path == "/debug/kv").then_some(Action::Hang));
    let refuses = FakeEngine::always(Action::Whole(1)).await.with_rule(|request| {
        (request.path == "/debug/kv")
            .then(|| Action::Refuse(401, json!({"error": {"code": "invalid_cluster_secret"}})))
    });
    let odd = FakeEngine::always(Action::Whole(1)).await.with_rule(|request| {
        (request.path == "/debug/kv").then(|| Action::Bytes(vec![], b"\xff\x00<html>".to_vec()))
    });
    let well = FakeEngine::always(Action::Whole(1))
        .await
        .with_rule(|request| (request.path == "/debug/kv").then(|| debug_kv(&[])));
    let dead = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&hangs, &refuses, &odd, &well, &dead]).await;
    let dead_address = dead.address.to_string();
    dead.die().await;
    let snapshot = get(system.admin, "/debug/kv").await.json();
    let error = |of: &str| {
        let engine = snapshot["engines"].as_array().unwrap().iter().find(|engine| engine["engine"] == of);
        engine.unwrap()["error"].as_str().unwrap_or_default().to_owned()
    };
    assert!(error(&hangs.address.to_string()).contains("no answer within"), "{snapshot:#}");
    assert!(error(&refuses.address.to_string()).contains("secret"));
    assert!(error(&odd.address.to_string()).contains("not that of a Baton engine"));
    assert_eq!(error(&well.address.to_string()), "");
    assert!(error(&dead_address).contains("cannot be reached"));
    assert_eq!(snapshot["engines"].as_array().unwrap().len(), 5);
}

#[tokio::test]
async fn a_request_is_followed_through_the_router_and_its_engines() {
    let logs = |kinds: &'static [&'static str]| {
        move |request: &ReceivedRequest| {
            if request.path != "/debug/kv/events" {
                return None;
            }
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            let now_us = u64::try_from(now.as_micros()).unwrap();
            let id = ID.lock().unwrap().clone();
            let event = |(seq, kind): (usize, &&str)| {
                json!({"seq": seq, "at_us": now_us, "rank": 0, "request_id": id, "tag": null, "index": 0,
                    "kind": kind, "blocks": 3})
            };
            let mut events: Vec<Value> = kinds.iter().enumerate().map(event).collect();
            events.push(json!({"seq": 9, "at_us": now_us, "request_id": "another", "kind": "freed"}));
            Some(Action::Json(
                json!({"engine": {"epoch": "e"}, "now_us": now_us, "next": 9, "lost": 0, "events": events}),
            ))
        }
    };
    static ID: Mutex<String> = Mutex::new(String::new());
    let p = FakeEngine::always(Action::Lease(Some(1))).await.with_rule(logs(&[
        "queued",
        "lease_opened",
        "freed",
    ]));
    let d = FakeEngine::always(Action::Whole(1))
        .await
        .with_rule(|request| (request.path == "/debug/kv/events").then(missing));
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    let body = completion(false).to_string();
    client.post_bytes("/v1/completions", "x-request-id: mine\r\n", body.as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    system.settled().await;
    d.received()[0].headers["x-request-id"].to_str().unwrap().clone_into(&mut ID.lock().unwrap());
    let line = get(system.admin, "/debug/kv/requests/mine").await.json();
    assert_eq!((&line["request_id"], &line["client_id"]), (&json!(*ID.lock().unwrap()), &json!("mine")));
    let moments: Vec<(String, String)> = line["moments"]
        .as_array()
        .unwrap()
        .iter()
        .map(|moment| {
            (moment["who"].as_str().unwrap().to_owned(), moment["kind"].as_str().unwrap().to_owned())
        })
        .collect();
    let has = |who: &str, kind: &str| {
        moments.iter().filter(|moment| *moment == &(who.to_owned(), kind.to_owned())).count()
    };
    let at = p.address.to_string();
    assert_eq!((has("router", "arrived"), has("router", "over")), (1, 1), "{line:#}");
    assert_eq!(
        (has(&at, "queued"), has(&at, "lease_opened"), has(&at, "freed")),
        (1, 1, 1),
        "each once, and not another's"
    );
    assert!(line["notes"][0].as_str().unwrap().contains("no event log"), "{line:#}");
    assert_eq!(get(system.admin, "/debug/kv/requests/unknown").await.status, 404);
}

#[tokio::test]
async fn the_page_is_one_file_under_a_strict_policy_and_holds_no_data() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "a token of many bytes\n").unwrap();
    let system = TestRouter::start(&[], &[&d]).await;
    let page = get(system.admin, "/top").await;
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let policy = page.header("content-security-policy").unwrap();
    for part in ["default-src 'none'", "script-src 'sha256-", "connect-src 'self'", "frame-ancestors 'none'"]
    {
        assert!(policy.contains(part), "{policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    let asks = async |admin, path: &str, lines: &str| {
        let mut client = Client::connect(admin).await;
        client.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n").as_bytes()).await;
        client.answer().await
    };
    let browser = asks(system.admin, "/", "accept: text/html,*/*\r\n").await;
    assert_eq!(browser.text(), page.text(), "a browser gets the page, any other client the list");
    assert!(get(system.admin, "/").await.text().contains("/debug/kv"));
    assert_eq!(asks(system.admin, "/debug/kv", "sec-fetch-site: same-origin\r\n").await.status, 200);
    assert_eq!(asks(system.admin, "/debug/kv", "sec-fetch-site: cross-site\r\n").await.status, 403);
    assert_eq!(asks(system.admin, "/debug/kv", "origin: https://evil.test\r\n").await.status, 403);

    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0', token_file: '{}'}}\n\
         models: [{{name: m, decode: {{engines: [{{url: '{}'}}]}}}}]\n",
        token.display(),
        d.url()
    );
    let guarded = TestRouter::of(&yaml).await;
    assert_eq!(get(guarded.admin, "/top").await.text(), page.text(), "it asks for the token itself");
    for path in ["/debug/kv", "/debug/kv/requests/x", "/"] {
        assert_eq!(get(guarded.admin, path).await.status, 401, "{path}");
    }
    let shown = asks(guarded.admin, "/debug/kv", "authorization: Bearer a token of many bytes\r\n").await;
    assert_eq!(shown.status, 200);
}
