//! Bytes that RFC 9112 permits before and after a request, and disconnects among them.

use serde_json::json;

use crate::harness::client::{Client, DISCONNECT_KINDS, completion};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::{TestRouter, await_requests};

/// A request to generate from this prompt.
fn request(prompt: &str) -> String {
    let body = json!({"model": "m", "prompt": prompt, "max_tokens": 8}).to_string();
    let length = body.len();
    format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}")
}

fn prompts(engine: &FakeEngine) -> Vec<String> {
    engine.received().iter().map(|request| request.body["prompt"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn requests_in_one_write_are_answered_one_after_the_other() {
    let p = FakeEngine::always(Action::Lease(Some(1))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    let others = "GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n";
    client.send([&request("one"), others, &request("two"), &request("three")].concat().as_bytes()).await;
    for status in [200, 404, 200, 200, 200] {
        assert_eq!(client.answer().await.status, status);
    }
    assert_eq!(prompts(&d), ["one", "two", "three"]);
    // A pipelined request larger than the buffer: the response shows the client that the request was not served.
    let long = "x".repeat(60_000);
    client.send([request("four"), request(&long)].concat().as_bytes()).await;
    let last = client.answer().await;
    assert_eq!((last.status, last.header("connection")), (200, Some("close")));
    assert!(client.is_closed().await);
    assert_eq!(prompts(&d).len(), 4);
}

#[tokio::test]
async fn a_request_that_comes_while_another_is_answered_waits_for_its_turn() {
    let p = FakeEngine::always(Action::LeaseGated(Some(1))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.send(request("one").as_bytes()).await;
    await_requests(&p, 1).await;
    let second = request("two");
    let (begin, end) = second.split_at(30);
    client.send(begin.as_bytes()).await;
    p.open_gate();
    assert_eq!(client.answer().await.status, 200);
    client.send(end.as_bytes()).await;
    await_requests(&p, 2).await;
    p.open_gate();
    assert_eq!(client.answer().await.status, 200);
    assert_eq!(prompts(&d), ["one", "two"]);
    assert!(p.aborts().is_empty() && p.cut() == 0, "no client has left");
}

#[tokio::test]
async fn the_last_request_of_a_connection_hides_none() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    let last = request("one").replacen("host: x", "host: x\r\nconnection: close", 1);
    client.send([last, request("hidden")].concat().as_bytes()).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    assert!(client.is_closed().await);
    assert_eq!(prompts(&d), ["one"]);
}

#[tokio::test]
async fn an_empty_line_behind_a_body_or_before_a_request_is_skipped() {
    let p = FakeEngine::always(Action::LeaseGated(Some(1))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    for times in 1..=3 {
        client.send(request("hello").as_bytes()).await;
        await_requests(&p, times).await;
        client.send(b"\r\n").await;
        p.open_gate();
        assert_eq!(client.answer().await.status, 200);
    }
    client.send(b"\r").await;
    client.send(b"\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    // The status belongs to the second request: one byte follows the last body.
    assert_eq!(client.answer().await.status, 400);
    let mut client = Client::connect(system.address).await;
    client.send(b"\r").await;
    client.send(b"\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(client.answer().await.status, 200);
    assert!(p.aborts().is_empty(), "no client has left");
}

#[tokio::test]
async fn an_empty_line_does_not_begin_a_request() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "timeouts: {head_ms: 100, client_idle_ms: 300}").await;
    let mut client = Client::connect(system.address).await;
    client.send([&request("hello"), "\r\n"].concat().as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    assert!(client.is_closed().await, "idle, and no late head");
}

#[tokio::test]
async fn extensions_and_trailers_of_chunks_are_read_and_no_engine_gets_them() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    let body = completion(false).to_string();
    let (first, second) = body.split_at(10);
    for _ in 0..2 {
        let chunks = format!(
            "{:x};sign=\"a\\\"b\"\r\n{first}\r\n{:x} ; a\r\n{second}\r\n0;last\r\nx-checksum: 1\r\nauthorization: Bearer k\r\n\r\n",
            first.len(),
            second.len()
        );
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntrailer: x-checksum\r\n\r\n";
        client.send([head, &chunks].concat().as_bytes()).await;
        assert_eq!(client.answer().await.status, 200);
    }
    for request in d.received() {
        assert_eq!(request.body["prompt"], "hello");
        for name in ["x-checksum", "authorization", "trailer"] {
            assert!(!request.headers.contains_key(name), "{name}");
        }
    }
}

#[tokio::test]
async fn a_cancel_after_a_pipelined_request_is_detected() {
    for how in DISCONNECT_KINDS {
        // The longer request is not read completely: its end is behind the data in the system's buffers.
        for next in [request("two"), request(&"x".repeat(50_000))] {
            let p = FakeEngine::always(Action::Hang).await;
            let d = FakeEngine::always(Action::Whole(1)).await;
            let system = TestRouter::with(&[&p], &[&d], "", "timeouts: {settle_ms: 300}").await;
            let mut client = Client::connect(system.address).await;
            client.send(request("one").as_bytes()).await;
            await_requests(&p, 1).await;
            client.send(next.as_bytes()).await;
            client.hang_up(how);
            p.wait("the abort", |p| !p.aborts().is_empty()).await;
            system.settled().await;
            assert_eq!(prompts(&p), ["one"], "{how:?}");
            assert!(d.all().is_empty(), "{how:?}");
            system.counts("baton_router_disconnects_total{phase=\"prefill\"}", 1.0).await;
        }
    }
}
