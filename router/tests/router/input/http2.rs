//! Requests over HTTP/2: the same answers, the same requests at the engines and the same disconnects as over HTTP/1.

use std::net::SocketAddr;

use bytes::Bytes;
use hyper::Request;
use hyper::header::HeaderMap;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::client::{Client, completion, get, post};
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::http2::{Http2Client, PREFACE, head, piece, whole};
use crate::harness::system::{TestRouter, await_requests};

const HANDLE: u128 = 0xabc;

/// The request's headers without those that differ from request to request.
fn stable(headers: &HeaderMap) -> Vec<String> {
    let changes = ["x-request-id", "traceparent"];
    let stable = headers.iter().filter(|(name, _)| !changes.contains(&name.as_str()));
    let mut lines: Vec<_> = stable.map(|(name, value)| format!("{name}: {value:?}")).collect();
    lines.sort();
    lines
}

#[tokio::test]
async fn engines_and_clients_get_the_same_as_over_http_1() {
    for stream in [false, true] {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let reply = if stream { Action::Stream(3) } else { Action::Whole(100) };
        let d = FakeEngine::always(reply).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        let body = completion(stream);
        let first = post(system.address, "/v1/completions", &body).await;
        let mut client = Http2Client::connect(system.address).await;
        let second = client.answer("/v1/completions", &body).await;
        assert_eq!((second.status, second.text()), (first.status, first.text()));
        for name in ["content-type", "content-length", "cache-control", "transfer-encoding", "connection"] {
            let over_http1 =
                first.header(name).filter(|_| !matches!(name, "transfer-encoding" | "connection"));
            assert_eq!(second.header(name), over_http1, "{name}");
        }
        for name in ["x-request-id", "date"] {
            assert!(second.header(name).is_some() && first.header(name).is_some(), "{name}");
        }
        for engine in [&p, &d] {
            let requests = engine.received();
            assert_eq!(requests.len(), 2);
            assert_eq!(stable(&requests[0].headers), stable(&requests[1].headers));
            assert_eq!(requests[0].path, requests[1].path);
            let [first, second] = [&requests[0], &requests[1]].map(|request| {
                let id = request.headers["x-request-id"].to_str().unwrap();
                String::from_utf8_lossy(&request.raw).replace(id, "ID")
            });
            assert_eq!(first, second);
        }
        system.settled().await;
    }
}

#[tokio::test]
async fn one_streams_reset_cancels_its_request_only() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::StreamGated(2)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = Http2Client::connect(system.address).await;
    let (stays, _stays) = client.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 1).await;
    let (leaves, mut reset) = client.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 2).await;
    reset.send_reset(h2::Reason::CANCEL);
    d.wait("one is cut", |d| d.cut() == 1 && d.aborts().len() == 1).await;
    let cancelled = d.received()[1].headers["x-request-id"].to_str().unwrap().to_owned();
    assert_eq!(d.aborts(), [cancelled]);
    drop(leaves);
    d.open_gate();
    d.open_gate();
    assert!(whole(stays).await.text().ends_with("data: [DONE]\n\n"));
    system.settled().await;
    assert_eq!(d.cut(), 1);
    system.counts("baton_router_requests_total{outcome=\"completed\"}", 1.0).await;
    system.counts("baton_router_requests_total{outcome=\"client_gone\"}", 1.0).await;
}

#[tokio::test]
async fn a_reset_is_a_disconnect_in_every_phase() {
    for (phase, p, d) in [
        ("prefill", Action::Hang, Action::Hang),
        ("decode_pre_first", Action::Lease(Some(HANDLE)), Action::Hang),
        ("decode_stream", Action::Lease(Some(HANDLE)), Action::StreamGated(9)),
    ] {
        let (p, d) = (FakeEngine::always(p).await, FakeEngine::always(d).await);
        let system = TestRouter::with(&[&p], &[&d], "", "timeouts: {settle_ms: 300}").await;
        let mut client = Http2Client::connect(system.address).await;
        let (response, mut stream) = client.post("/v1/completions", &completion(true)).await;
        let last = if phase == "prefill" { &p } else { &d };
        await_requests(last, 1).await;
        if phase == "decode_stream" {
            d.open_gate();
            assert!(piece(head(response).await.body_mut()).await.is_some());
        }
        stream.send_reset(h2::Reason::CANCEL);
        last.wait("the cut", |engine| engine.cut() == 1).await;
        system.settled().await;
        system.counts(&format!("baton_router_disconnects_total{{phase=\"{phase}\"}}"), 1.0).await;
        assert_eq!(client.get("/health").await.status, 200, "the connection stays");
    }
}

#[tokio::test]
async fn the_end_of_a_connection_cancels_all_its_requests() {
    let d = FakeEngine::always(Action::StreamGated(5)).await;
    let system = TestRouter::with(&[], &[&d], "", "").await;
    let mut client = Http2Client::connect(system.address).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        open.push(client.post("/v1/completions", &completion(true)).await);
    }
    await_requests(&d, 3).await;
    client.hang_up().await;
    d.wait("all are cut", |d| d.cut() == 3 && d.aborts().len() == 3).await;
    system.settled().await;
    system.counts("baton_router_requests_total{outcome=\"client_gone\"}", 3.0).await;
    system.counts("baton_router_connections_open", 0.0).await;
}

#[tokio::test]
async fn large_bodies_and_answers_cross_the_windows_whole() {
    let d = FakeEngine::scripted(vec![Action::Whole(3_000_000), Action::Whole(1)]).await;
    let system = TestRouter::with(&[], &[&d], "", "limits: {body_bytes: 4000000}").await;
    let mut client = Http2Client::connect(system.address).await;
    let mut body = completion(false);
    body["prompt"] = Value::from("x".repeat(3_000_000));
    let answer = client.answer("/v1/completions", &body).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["choices"][0]["text"].as_str().unwrap().len(), 3_000_000);
    assert_eq!(d.received()[0].body["prompt"].as_str().unwrap().len(), 3_000_000);
    // A body over the limit is refused at once if it is declared, and as it arrives otherwise.
    let refused = |declared: bool| {
        let mut request = Http2Client::completion("/v1/completions");
        if declared {
            request = request.header("content-length", 5_000_000);
        }
        request.body(()).unwrap()
    };
    for declared in [true, false] {
        let (response, mut stream) = client.send(refused(declared), false).await;
        if !declared {
            stream.send_data(Bytes::from(vec![b' '; 5_000_000]), true).unwrap();
        }
        assert_eq!(whole(response).await.json()["error"]["code"], "payload_too_large", "{declared}");
    }
    assert_eq!(client.answer("/v1/completions", &body).await.status, 200, "the windows are free");
    system.settled().await;
    system.counts("baton_router_body_bytes", 0.0).await;
}

#[tokio::test]
async fn paths_methods_and_errors_are_those_of_http_1() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let top = "cors: {origins: ['https://a.b']}";
    let system = TestRouter::with(&[], &[&d], "", top).await;
    let mut client = Http2Client::connect(system.address).await;
    assert_eq!(client.get("/v1/models").await.json()["data"][0]["id"], "m");
    let missing = client.get("/nowhere").await;
    let expected = get(system.address, "/nowhere").await;
    assert_eq!((missing.status, missing.json()), (expected.status, expected.json()));
    let request = |method: &str| {
        let request = Request::builder().method(method).uri("https://localhost/v1/completions");
        let request = request.header("origin", "https://a.b").header("access-control-request-method", "POST");
        request.body(()).unwrap()
    };
    let (preflight, _stream) = client.send(request("OPTIONS"), true).await;
    let preflight = whole(preflight).await;
    assert_eq!(preflight.status, 200);
    assert_eq!(preflight.header("access-control-allow-origin"), Some("https://a.b"));
    let health = Request::head("http://localhost/health").body(()).unwrap();
    let (health, _stream) = client.send(health, true).await;
    let health = whole(health).await;
    assert_eq!((health.status, health.header("content-length"), health.body.len()), (200, Some("15"), 0));
    let expecting = Http2Client::completion("/v1/completions").header("expect", "100-continue");
    let (mut response, mut stream) = client.send(expecting.body(()).unwrap(), false).await;
    let interim = std::future::poll_fn(|context| response.poll_informational(context)).await;
    assert_eq!(interim.unwrap().unwrap().status(), 100);
    stream.send_data(completion(false).to_string().into(), true).unwrap();
    assert_eq!(whole(response).await.status, 200);
    system.settled().await;
}

#[tokio::test]
async fn a_waiting_stream_gets_comments_and_its_error_as_an_event() {
    let d = FakeEngine::always(Action::StreamGated(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "timeouts: {sse_keepalive_ms: 100}").await;
    let mut client = Http2Client::connect(system.address).await;
    let (response, _stream) = client.post("/v1/completions", &completion(true)).await;
    let mut response = head(response).await;
    assert_eq!((response.status().as_u16(), d.cut()), (200, 0));
    assert_eq!(piece(response.body_mut()).await.unwrap(), ": ka\n");
    d.open_gate();
    let mut rest = Vec::new();
    while let Some(piece) = piece(response.body_mut()).await {
        rest.extend_from_slice(&piece);
    }
    assert!(rest.ends_with(b"data: {\"token\":0}\n\ndata: [DONE]\n\n"), "{}", rest.escape_ascii());
    system.settled().await;
}

#[tokio::test]
async fn a_broken_answer_is_no_complete_one() {
    let d = FakeEngine::always(Action::PartAndDie(4 << 20)).await;
    let top = "limits: {body_bytes_total: 1048576}";
    let system = TestRouter::with(&[], &[&d], "", top).await;
    let mut client = Http2Client::connect(system.address).await;
    let (response, _stream) = client.post("/v1/completions", &completion(false)).await;
    let mut response = head(response).await;
    let end = loop {
        match response.body_mut().data().await {
            Some(Ok(piece)) => response.body_mut().flow_control().release_capacity(piece.len()).unwrap(),
            Some(Err(error)) => break Some(error),
            None => break None,
        }
    };
    assert_eq!(end.and_then(|error| error.reason()), Some(h2::Reason::INTERNAL_ERROR));
    system.settled().await;
}

#[tokio::test]
async fn a_drain_announces_its_end_and_lets_streams_finish() {
    let d = FakeEngine::always(Action::StreamGated(1)).await;
    let mut system = TestRouter::with(&[], &[&d], "", "").await;
    let mut client = Http2Client::connect(system.address).await;
    let mut idle = Http2Client::connect(system.address).await;
    assert_eq!(idle.get("/health").await.status, 200);
    let (response, _stream) = client.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 1).await;
    system.shut_down();
    assert!(idle.ended().await.is_ok(), "GOAWAY without an error");
    assert_eq!(d.cut(), 0);
    d.open_gate();
    assert!(whole(response).await.text().ends_with("data: [DONE]\n\n"));
    assert!(client.ended().await.is_ok());
    system.stopped().await;
    assert_eq!((d.received().len(), d.cut()), (1, 0));
}

#[tokio::test]
async fn a_drain_that_takes_too_long_cuts_streams_and_settles_them() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::Hang).await;
    let mut system = TestRouter::with(&[&p], &[&d], "", "drain_timeout_ms: 100").await;
    let mut client = Http2Client::connect(system.address).await;
    let (response, _stream) = client.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 1).await;
    system.shut_down();
    system.stopped().await;
    assert!(response.await.is_err());
    assert_eq!((d.aborts().len(), p.releases().len()), (1, 1), "settled before the router ends");
}

#[tokio::test]
async fn responses_during_the_drain_delay_close_the_connection() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "drain_delay_ms: 20000").await;
    let mut client = Http2Client::connect(system.address).await;
    assert_eq!(client.answer("/v1/completions", &completion(false)).await.status, 200);
    system.shut_down();
    while client.get("/ready").await.status != 503 {}
    assert!(client.ended().await.is_ok());
}

#[tokio::test]
async fn an_idle_connection_is_closed_and_a_busy_one_is_not() {
    let d = FakeEngine::always(Action::StreamGated(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "timeouts: {client_idle_ms: 200}").await;
    let idle = Http2Client::connect(system.address).await;
    let mut busy = Http2Client::connect(system.address).await;
    let (response, _stream) = busy.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 1).await;
    assert!(idle.ended().await.is_ok());
    d.open_gate();
    assert!(whole(response).await.text().ends_with("data: [DONE]\n\n"));
    assert!(busy.ended().await.is_ok());
    system.settled().await;
}

#[tokio::test]
async fn the_access_log_has_the_protocol_and_the_client_behind_a_proxy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let d = FakeEngine::always(Action::Whole(1)).await;
    let top =
        format!("trusted_proxies: [127.0.0.0/8]\naccess_log: {{enabled: true, path: '{}'}}", path.display());
    let system = TestRouter::with(&[], &[&d], "", &top).await;
    let mut client = Http2Client::connect(system.address).await;
    let request = Http2Client::completion("/v1/completions").header("x-forwarded-for", "203.0.113.9");
    let (response, mut stream) = client.send(request.body(()).unwrap(), false).await;
    stream.send_data(completion(false).to_string().into(), true).unwrap();
    assert_eq!(whole(response).await.status, 200);
    post(system.address, "/v1/completions", &completion(false)).await;
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    };
    eventually("two lines", || lines().len() == 2).await;
    assert_eq!((&lines()[0]["protocol"], &lines()[0]["client"]), (&json!("HTTP/2"), &json!("203.0.113.9")));
    assert_eq!(lines()[0]["request_bytes"], completion(false).to_string().len());
    assert_eq!(lines()[1]["protocol"], "HTTP/1.1");
}

#[tokio::test]
async fn http_2_can_be_disabled() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "http2: off").await;
    assert!(response(system.address, PREFACE).await.starts_with("HTTP/1.1 505 "));
    // The preface begins a connection only.
    let system = TestRouter::with(&[], &[&d], "", "").await;
    let late = [b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", PREFACE].concat();
    let text = response(system.address, &late).await;
    assert!(text.starts_with("HTTP/1.1 200 ") && text.contains("HTTP/1.1 505 "), "{text}");
    assert_eq!(system.metric("baton_router_http2_connections_total").await, 0.0);
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(false)).await;
    assert_eq!(client.answer().await.status, 200);
}

/// Everything that the router answers to these bytes.
async fn response(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut all = Vec::new();
    let read = tokio::time::timeout(std::time::Duration::from_secs(10), stream.read_to_end(&mut all));
    let _ = read.await.expect("it is closed");
    String::from_utf8_lossy(&all).into_owned()
}
