//! Clients behind proxies: their addresses, which only trusted proxies can set.

use std::net::{IpAddr, Ipv4Addr};

use serde_json::{Value, json};

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::system::TestRouter;

/// The access-log lines of requests with these heads, sent from 127.0.0.2.
async fn logged(top: &str, heads: &[&str]) -> (Vec<Value>, FakeEngine) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let d = FakeEngine::always(Action::Whole(1)).await;
    let log = format!("{top}\naccess_log: {{enabled: true, path: '{}'}}", path.display());
    let log = if top.contains("client: false") {
        format!("access_log: {{enabled: true, client: false, path: '{}'}}", path.display())
    } else {
        log
    };
    let system = TestRouter::with(&[], &[&d], "", &log).await;
    for head in heads {
        let from = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
        let mut client = Client::connect_from(from, system.address).await;
        client.post_bytes("/v1/completions", head, completion(false).to_string().as_bytes()).await;
        assert_eq!(client.answer().await.status, 200);
    }
    let lines = || std::fs::read_to_string(&path).unwrap_or_default().lines().count();
    eventually("the lines are written", || lines() == heads.len()).await;
    let text = std::fs::read_to_string(&path).unwrap();
    (text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), d)
}

#[tokio::test]
async fn a_trusted_proxy_sets_the_client_address_and_engines_do_not_receive_it() {
    let heads = [
        "X-Forwarded-For: 1.1.1.1, 203.0.113.9\r\n",
        "x-forwarded-for: 1.1.1.1\r\nx-forwarded-for: 203.0.113.8, 127.0.0.3\r\n",
        "",
    ];
    let (lines, d) = logged("trusted_proxies: [127.0.0.0/8, '::1']", &heads).await;
    let clients: Vec<_> = lines.iter().map(|line| line["client"].as_str().unwrap()).collect();
    assert_eq!(clients, ["203.0.113.9", "203.0.113.8", "127.0.0.2"]);
    for request in d.all() {
        assert!(!request.headers.contains_key("x-forwarded-for"), "{:?}", request.headers);
    }
}

#[tokio::test]
async fn headers_of_an_untrusted_peer_do_not_change_its_address() {
    let heads =
        ["X-Forwarded-For: 203.0.113.9\r\n", "Forwarded: for=203.0.113.9\r\nX-Real-IP: 203.0.113.9\r\n"];
    for top in ["trusted_proxies: [10.0.0.0/8, 127.0.0.1]", ""] {
        let (lines, d) = logged(top, &heads).await;
        assert!(lines.iter().all(|line| line["client"] == "127.0.0.2"), "{lines:?}");
        assert!(d.all().iter().all(|request| !request.headers.contains_key("x-forwarded-for")));
    }
    let (lines, _d) = logged("client: false", &heads).await;
    assert!(lines.iter().all(|line| line.get("client").is_none()), "{lines:?}");
}

/// Posts from one address on behalf of another.
async fn post_for(system: &TestRouter, client: &str) -> u16 {
    let mut connection = Client::connect(system.address).await;
    let head = format!("x-forwarded-for: {client}\r\n");
    connection.post_bytes("/v1/completions", &head, completion(false).to_string().as_bytes()).await;
    connection.answer().await.status
}

#[tokio::test]
async fn clients_behind_one_proxy_are_several_sources_to_the_breaker() {
    for (top, out) in [("trusted_proxies: ['127.0.0.1']", true), ("", false)] {
        // Alone in its pool: no other engine can show that this engine is at fault.
        let d = FakeEngine::always(Action::Refuse(500, json!({}))).await;
        let health = "health: {active: {interval_ms: 0}, all_out: refuse, breaker: {failures: 3, \
                      cool_down_ms: 3600000, cool_down_max_ms: 3600000}}";
        let system = TestRouter::with(&[], &[&d], "", &format!("{top}\n{health}")).await;
        for client in 1..=12 {
            post_for(&system, &format!("203.0.113.{client}")).await;
        }
        let requests = d.received().len();
        assert_eq!(requests < 12, out, "{top}: it received {requests} requests");
    }
}

#[tokio::test]
async fn a_load_balancer_sees_on_the_clients_listener_whether_there_is_an_engine() {
    let d = FakeEngine::always(Action::Refuse(500, json!({}))).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let ready = get(system.address, "/ready").await;
    assert_eq!((ready.status, &ready.json()["status"]), (200, &json!("ready")));
    let drain = format!("/engines/{}/drain", d.address);
    assert_eq!(post(system.admin, &drain, &Value::Null).await.status, 200);
    let ready = get(system.address, "/ready").await;
    assert_eq!((ready.status, &ready.json()["status"]), (503, &json!("no engine")));
    assert_eq!(get(system.address, "/health").await.status, 200, "it lives");
    let wrong = post(system.address, "/ready", &Value::Null).await;
    assert_eq!((wrong.status, wrong.header("allow")), (405, Some("GET, HEAD, OPTIONS")));
    let wrong = get(system.address, "/v1/completions").await;
    assert_eq!((wrong.status, wrong.header("allow")), (405, Some("POST, OPTIONS")));
}
