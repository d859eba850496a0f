//! Requests that share connections: each ends alone, and none waits for another.

use std::collections::HashSet;

use hyper::Version;
use serde_json::{Value, json};

use crate::harness::client::{Client, DISCONNECT_KINDS, completion, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::{TestRouter, await_requests};

const PATH: &str = "/v1/completions";
const ON: &str = "    http2: on";
/// Without a query for the protocol, which has a connection of its own.
const ON_VLLM: &str = "    http2: on\n    protocol: vllm";
const HANDLE: u128 = 0xabc;

/// Two clients whose streams have each sent their first event.
async fn two_streams(system: &TestRouter, d: &FakeEngine) -> [Client; 2] {
    let mut clients = [Client::connect(system.address).await, Client::connect(system.address).await];
    for (at, client) in clients.iter_mut().enumerate() {
        client.post(PATH, &completion(true)).await;
        await_requests(d, at + 1).await;
    }
    // Each of them waits at the gate, so each gets one permit.
    (0..2).for_each(|_| d.open_gate());
    for client in &mut clients {
        assert_eq!(client.head().await.0, 200);
        client.event().await.expect("an event");
    }
    clients
}

#[tokio::test]
async fn both_legs_use_one_connection_per_engine() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::scripted(vec![Action::Whole(5), Action::Stream(3)]).await;
    let system = TestRouter::with(&[&p], &[&d], ON_VLLM, "").await;
    for stream in [false, true, true] {
        let answer = post(system.address, PATH, &completion(stream)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(!stream || answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
    }
    for engine in [&p, &d] {
        let received = engine.received();
        assert_eq!(received.len(), 3);
        assert!(received.iter().all(|request| request.version == Version::HTTP_2));
        let ids: HashSet<_> =
            received.iter().map(|request| request.headers["x-request-id"].clone()).collect();
        assert_eq!(ids.len(), 3);
        assert_eq!((engine.open(), engine.connections()), (1, 1));
    }
    assert_eq!(d.received()[0].body["kv_transfer_params"]["remote_port"], 5600);
}

#[tokio::test]
async fn concurrent_requests_share_connections() {
    let d = FakeEngine::always(Action::StreamGated(1)).await;
    let system = TestRouter::with(&[], &[&d], ON_VLLM, "").await;
    d.open_gate();
    assert_eq!(post(system.address, PATH, &completion(true)).await.status, 200);
    let clients: Vec<_> = (0..30)
        .map(|_| {
            let address = system.address;
            tokio::spawn(async move { post(address, PATH, &completion(true)).await })
        })
        .collect();
    await_requests(&d, 31).await;
    assert_eq!(d.connections(), 1);
    (0..30).for_each(|_| d.open_gate());
    for client in clients {
        assert!(client.await.unwrap().text().ends_with("data: [DONE]\n\n"));
    }
    system.settled().await;
}

#[tokio::test]
async fn a_cancel_resets_its_stream_and_no_other() {
    for how in DISCONNECT_KINDS {
        let d = FakeEngine::always(Action::StreamGated(3)).await;
        let system = TestRouter::with(&[], &[&d], ON_VLLM, "").await;
        let [mut stays, leaves] = two_streams(&system, &d).await;
        let mut waits = Client::connect(system.address).await;
        waits.post(PATH, &completion(false)).await;
        await_requests(&d, 3).await;
        assert_eq!((d.cut(), d.connections()), (0, 1), "they share a connection");
        leaves.hang_up(how);
        d.wait("the reset", |d| d.cut() == 1).await;
        waits.hang_up(how);
        d.wait("the other reset", |d| d.cut() == 2).await;
        (0..2).for_each(|_| d.open_gate());
        assert!(stays.event().await.is_some() && stays.event().await.is_some());
        assert_eq!(stays.event().await.as_deref(), Some("data: [DONE]\n\n"));
        system.settled().await;
        assert_eq!(d.cut(), 2);
        system.counts("baton_router_requests_total{outcome=\"client_gone\"}", 2.0).await;
    }
}

#[tokio::test]
async fn a_cancelled_prefill_is_aborted_although_the_engine_allows_one_stream() {
    let p = FakeEngine::always(Action::LeaseGated(Some(HANDLE))).await.with_streams(1);
    let d = FakeEngine::always(Action::Stream(1)).await;
    let system = TestRouter::with(&[&p], &[&d], ON, "").await;
    let mut client = Client::connect(system.address).await;
    client.post(PATH, &completion(true)).await;
    await_requests(&p, 1).await;
    client.hang_up(DISCONNECT_KINDS[0]);
    p.wait("the abort", |p| p.aborts().len() == 1).await;
    assert_eq!(p.cut(), 0, "the abort does not wait for the stream of the prefill");
    // The reply of the aborted prefill is still read, and its lease released.
    p.open_gate();
    p.wait("the release", |p| p.releases().len() == 1).await;
    system.settled().await;
}

#[tokio::test]
async fn requests_beyond_an_engines_stream_limit_open_connections() {
    let d = FakeEngine::always(Action::StreamGated(1)).await.with_streams(1);
    let system = TestRouter::with(&[], &[&d], ON_VLLM, "").await;
    let mut clients = Vec::new();
    for n in 1..=4 {
        let mut client = Client::connect(system.address).await;
        client.post(PATH, &completion(true)).await;
        await_requests(&d, n).await;
        clients.push(client);
    }
    assert_eq!(d.open(), 4);
    (0..4).for_each(|_| d.open_gate());
    for mut client in clients {
        assert!(client.answer().await.text().ends_with("data: [DONE]\n\n"));
    }
    d.open_gate();
    assert_eq!(post(system.address, PATH, &completion(true)).await.status, 200);
    assert_eq!(d.connections(), 4, "an idle connection is used again");
}

#[tokio::test]
async fn a_client_that_stops_reading_holds_no_other_stream() {
    const FRAMES: usize = 400;
    let frame = format!("data: {{\"text\":\"{}\"}}\n\n", "x".repeat(64 << 10));
    let d = FakeEngine::always(Action::Whole(100_000)).await.with_rule(move |request| {
        let frames = || vec![frame.clone(); FRAMES];
        (request.body["stream"] == true).then(|| Action::Frames(frames(), true))
    });
    let system = TestRouter::with(&[], &[&d], ON_VLLM, "").await;
    let mut slow = Client::connect(system.address).await;
    slow.post(PATH, &completion(true)).await;
    assert_eq!(slow.head().await.0, 200);
    for _ in 0..100 {
        let answer = post(system.address, PATH, &completion(false)).await;
        assert_eq!((answer.status, answer.body.len() > 100_000), (200, true));
    }
    assert_eq!((d.connections(), d.cut()), (1, 0));
    assert_eq!(system.metric("baton_router_requests_in_flight").await, 1.0, "it has not read its stream");
    for n in 0..FRAMES {
        assert!(slow.event().await.is_some_and(|event| event.len() > 64 << 10), "{n}");
    }
    system.settled().await;
}

#[tokio::test]
async fn checks_queries_and_other_endpoints_use_http2() {
    let d = FakeEngine::always(Action::Json(json!({"data": [], "usage": {}}))).await;
    let top = "health: {active: {interval_ms: 20}}";
    let system = TestRouter::with(&[], &[&d], ON, top).await;
    d.wait("checks", |d| d.probes() > 1).await;
    let answer = post(system.address, "/v1/embeddings", &json!({"model": "m", "input": "a"})).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(d.all().iter().all(|request| request.version == Version::HTTP_2));
    assert!(d.all().iter().any(|request| request.path == "/v1/embeddings"));
}

#[tokio::test]
async fn compressed_replies_are_decoded() {
    use std::io::Write;
    let text = json!({"id": "d", "choices": [{"text": "t".repeat(1000)}]}).to_string();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(text.as_bytes()).unwrap();
    let headers = vec![("content-type", "application/json"), ("content-encoding", "gzip")];
    let d = FakeEngine::always(Action::Bytes(headers, gzip.finish().unwrap())).await;
    let system = TestRouter::with(&[], &[&d], ON, "").await;
    let answer = post(system.address, PATH, &completion(false)).await;
    assert_eq!((answer.status, answer.json()), (200, serde_json::from_str::<Value>(&text).unwrap()));
}

#[tokio::test]
async fn idle_connections_are_closed_in_time() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let top = "timeouts: {engine_idle_ms: 200}";
    let system = TestRouter::with(&[], &[&d], ON, top).await;
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    d.wait("the end of the connection", |d| d.open() == 0).await;
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    assert_eq!(d.cut(), 0);
}
