//! Time limits of requests.

use serde_json::{Value, json};

use crate::harness::client::{Client, completion, post};
use crate::harness::engine::{Action, FakeEngine, event};
use crate::harness::system::TestRouter;
use crate::operations::health::standing;

const HANDLE: u128 = 0xabc;

#[tokio::test]
async fn a_request_that_takes_too_long_ends_in_504_or_in_a_typed_error() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::Hang).await;
    let system = TestRouter::with(&[&p], &[&d], "", "timeouts: {request_ms: 200}").await;
    let answer = post(system.address, "/v1/completions", &completion(true)).await;
    assert_eq!((answer.status, answer.code().as_str()), (504, "request_timeout"));
    p.wait("the release", |p| p.releases().len() == 1).await;
    d.wait("the abort", |d| d.aborts().len() == 1 && d.cut() == 1).await;

    let hangs = FakeEngine::always(Action::Hang).await;
    let system = TestRouter::with(&[&hangs], &[&d], "", "timeouts: {request_ms: 200}").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(true)).await.status, 504);
    hangs.wait("the abort", |p| p.aborts().len() == 1).await;

    let d = FakeEngine::always(Action::StreamGated(9)).await;
    let system = TestRouter::with(&[&p], &[&d], "", "timeouts: {request_ms: 1500}").await;
    d.open_gate();
    let text = post(system.address, "/v1/completions", &completion(true)).await.text();
    assert!(text.starts_with(&event(0)) && text.ends_with("data: [DONE]\n\n"), "{text}");
    let error = text.lines().find(|line| line.contains("\"error\"")).expect("a typed error");
    let error: Value = serde_json::from_str(error.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "request_timeout");
    d.wait("the abort", |d| d.aborts().len() == 1 && d.cut() == 1).await;
    system.settled().await;
}

#[tokio::test]
async fn no_engine_is_blamed_for_a_request_that_takes_too_long() {
    for (action, stream) in [(Action::StreamGated(9), true), (Action::StreamGated(9), false)] {
        let d = FakeEngine::always(action).await;
        let breaker = "{failures: 2, cool_down_ms: 600000, cool_down_max_ms: 600000}";
        let health = format!("health: {{active: {{interval_ms: 0}}, breaker: {breaker}}}");
        let top = format!("timeouts: {{request_ms: 200}}\n{health}");
        let system = TestRouter::with(&[], &[&d], "", &top).await;
        for source in ["a", "b", "c", "d"] {
            let mut client = Client::connect(system.address).await;
            let body = completion(stream).to_string();
            let key = format!("Authorization: Bearer {source}\r\n");
            client.post_bytes("/v1/completions", &key, body.as_bytes()).await;
            assert!(client.answer().await.text().contains("request_timeout"));
        }
        system.settled().await;
        assert_eq!(standing(&system, &d, "decode").await, "usable");
    }
}

#[tokio::test]
async fn a_models_own_bounds_go_before_the_routers() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let top = "timeouts: {prefill_silence_ms: 60000, decode_first_byte_ms: 60000, stream_silence_ms: 60000}";
    let d = FakeEngine::always(Action::Hang).await;
    let first_byte = TestRouter::with(&[&p], &[&d], "    timeouts: {decode_first_byte_ms: 100}", top).await;
    let answer = post(first_byte.address, "/v1/completions", &completion(true)).await;
    assert_eq!((answer.status, answer.json()["error"]["type"].as_str()), (504, Some("timeout_error")));
    let request = TestRouter::with(&[&p], &[&d], "    timeouts: {request_ms: 100}", top).await;
    assert_eq!(post(request.address, "/v1/completions", &completion(true)).await.code(), "request_timeout");
    let stream = FakeEngine::always(Action::StreamGated(2)).await;
    let silence = TestRouter::with(&[&p], &[&stream], "    timeouts: {stream_silence_ms: 100}", top).await;
    stream.open_gate();
    let text = post(silence.address, "/v1/completions", &completion(true)).await.text();
    assert!(text.contains("\"timeout_error\""), "{text}");
    let hangs = FakeEngine::always(Action::Hang).await;
    let live = FakeEngine::always(Action::Whole(1)).await;
    let prefill = TestRouter::with(&[&hangs], &[&live], "    timeouts: {prefill_silence_ms: 100}", top).await;
    assert_eq!(
        post(prefill.address, "/v1/completions", &completion(false)).await.status,
        200,
        "D computes all"
    );
}

#[tokio::test]
async fn a_client_that_reads_slowly_and_steadily_gets_all_of_it() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    const BYTES: usize = 24 << 20;
    let d = FakeEngine::always(Action::Whole(BYTES)).await;
    let system = TestRouter::with(&[], &[&d], "", "timeouts: {client_stall_ms: 1000}").await;
    let mut client = tokio::net::TcpStream::connect(system.address).await.unwrap();
    let body = r#"{"model":"m","input":"x"}"#;
    let head = format!(
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all((head + body).as_bytes()).await.unwrap();
    let (mut room, mut read) = (vec![0; 128 << 10], 0);
    loop {
        match client.read(&mut room).await.unwrap() {
            0 => break,
            bytes => read += bytes,
        }
        // Longer in total than a client may stall.
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert!(read > BYTES, "{read} of {BYTES}");
}

#[tokio::test]
async fn engines_get_the_time_that_is_left() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let body = completion(false).to_string();
    for headers in ["X-Request-Timeout-Ms: 60000\r\nX-First-Token-Timeout-Ms: 30000\r\n", ""] {
        let mut client = Client::connect(system.address).await;
        client.post_bytes("/v1/completions", headers, body.as_bytes()).await;
        assert_eq!(client.answer().await.status, 200);
    }
    let (to_p, to_d) = (p.received(), d.received());
    for (name, most) in [("x-request-timeout-ms", 60_000_u64), ("x-first-token-timeout-ms", 30_000)] {
        let [prefill, decode] =
            [&to_p[0], &to_d[0]].map(|sent| sent.headers[name].to_str().unwrap().parse::<u64>().unwrap());
        assert!(decode <= prefill && prefill <= most && decode > most / 2, "{name}: {prefill}, {decode}");
        assert!(to_p[1].headers.get(name).is_none() && to_d[1].headers.get(name).is_none(), "{name}");
    }
}

#[tokio::test]
async fn an_engine_that_ends_a_request_at_its_deadline_is_the_last_one() {
    let late = json!({"error": {"message": "late", "type": "timeout_error", "code": "request_timeout"}});
    let (one, two) = (
        FakeEngine::always(Action::Refuse(504, late.clone())).await,
        FakeEngine::always(Action::Refuse(504, late)).await,
    );
    let system = TestRouter::start(&[], &[&one, &two]).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!((answer.status, answer.code().as_str()), (504, "request_timeout"));
    assert_eq!(one.received().len() + two.received().len(), 1);
    system.settled().await;
}
