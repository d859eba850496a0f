//! Invalid requests: one clear 4xx each, before any engine is contacted.

use serde_json::json;

use crate::harness::client::{Client, completion, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Path, body, status, and a word of the code or the message.
fn table() -> Vec<(&'static str, Vec<u8>, u16, &'static str)> {
    let with = |field: &str, value: &str| {
        format!(r#"{{"model": "m", "prompt": "x", "{field}": {value}}}"#).into_bytes()
    };
    let deep = format!(r#"{{"model": "m", "prompt": "x", "y": {}1{}}}"#, "[".repeat(5000), "]".repeat(5000));
    vec![
        (COMPLETIONS, b"{".to_vec(), 400, "JSON"),
        (COMPLETIONS, b"".to_vec(), 400, "empty"),
        (COMPLETIONS, b"[]".to_vec(), 400, "object"),
        (COMPLETIONS, b"nonsense".to_vec(), 400, "JSON"),
        (COMPLETIONS, b"{\"model\": \"m\", \"prompt\": \"\xff\"}".to_vec(), 400, "UTF-8"),
        (COMPLETIONS, b"{\"model\": \"m\", \"prompt\": \"\\ud800\"}".to_vec(), 400, "JSON"),
        (COMPLETIONS, b"\xef\xbb\xbf{}".to_vec(), 400, "byte order"),
        (COMPLETIONS, deep.into_bytes(), 400, "nested"),
        (COMPLETIONS, br#"{"model": "m", "model": "m", "prompt": "x"}"#.to_vec(), 400, "more than once"),
        (COMPLETIONS, br#"{"model": "other", "prompt": "x"}"#.to_vec(), 404, "model_not_found"),
        (
            COMPLETIONS,
            br#"{"model": "other", "prompt": "x", "temperature": -1}"#.to_vec(),
            404,
            "model_not_found",
        ),
        (CHAT, br#"{"model": "other", "messages": []}"#.to_vec(), 404, "model_not_found"),
        (CHAT, br#"{"model": "other"}"#.to_vec(), 404, "model_not_found"),
        (COMPLETIONS, br#"{"model": 7, "prompt": "x"}"#.to_vec(), 400, "model"),
        (COMPLETIONS, br#"{"model": "m"}"#.to_vec(), 400, "prompt"),
        (COMPLETIONS, br#"{"model": "m", "prompt": []}"#.to_vec(), 400, "prompt"),
        (COMPLETIONS, br#"{"model": "m", "prompt": {"a": 1}}"#.to_vec(), 400, "prompt"),
        (COMPLETIONS, br#"{"model": "m", "prompt": [-1]}"#.to_vec(), 400, "prompt"),
        (COMPLETIONS, br#"{"model": "m", "prompt": [99999999999999]}"#.to_vec(), 400, "prompt"),
        (COMPLETIONS, with("temperature", "\"abc\""), 400, "temperature"),
        (COMPLETIONS, with("temperature", "-1"), 400, "temperature"),
        (COMPLETIONS, with("temperature", "NaN"), 400, "JSON"),
        (COMPLETIONS, with("temperature", "1e308"), 400, "temperature"),
        (COMPLETIONS, with("max_tokens", "-1"), 400, "max_tokens"),
        (COMPLETIONS, with("max_tokens", "1e20"), 400, "max_tokens"),
        (COMPLETIONS, with("max_tokens", "9223372036854775808"), 400, "max_tokens"),
        (COMPLETIONS, with("n", "0"), 400, "n"),
        (COMPLETIONS, with("n", "100000"), 400, "n"),
        (COMPLETIONS, with("top_p", "2"), 400, "top_p"),
        (COMPLETIONS, with("stop", "[\"\"]"), 400, "stop"),
        (COMPLETIONS, with("stream_options", "{}"), 400, "stream_options"),
        (COMPLETIONS, with("stream", "\"yes\""), 400, "stream"),
        (CHAT, br#"{"model": "m"}"#.to_vec(), 400, "messages"),
        (CHAT, br#"{"model": "m", "messages": []}"#.to_vec(), 400, "messages"),
        (CHAT, br#"{"model": "m", "messages": ["hi"]}"#.to_vec(), 400, "messages"),
        (CHAT, br#"{"model": "m", "messages": "hi"}"#.to_vec(), 400, "messages"),
        ("/tokenize", br#"{"model": "m"}"#.to_vec(), 400, "prompt"),
        ("/detokenize", br#"{"model": "m", "tokens": ["x"]}"#.to_vec(), 400, "tokens"),
    ]
}

#[tokio::test]
async fn requests_that_the_router_can_reject_never_reach_an_engine() {
    let p = FakeEngine::always(Action::Lease(Some(1))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[&p], &[&d], "", "limits: {body_bytes: 100000}").await;
    for (path, body, status, word) in table() {
        let mut client = Client::connect(system.address).await;
        client.post_bytes(path, "", &body).await;
        let answer = client.answer().await;
        let shown = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
        assert_eq!(answer.status, status, "{shown}: {}", answer.text());
        answer.code();
        assert!(answer.text().contains(word), "{shown}: {}", answer.text());
        assert!(answer.text().len() < 2000, "an error is not an echo");
    }
    assert!(p.all().is_empty() && d.all().is_empty(), "an engine was contacted");
}

#[tokio::test]
async fn a_body_over_the_limit_is_413_whether_it_is_declared_or_not() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "limits: {body_bytes: 2000}").await;
    let mut client = Client::connect(system.address).await;
    client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2001\r\n\r\n").await;
    assert_eq!(client.answer().await.status, 413, "at once, before the body is sent");
    let mut client = Client::connect(system.address).await;
    client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n").await;
    client.send(format!("800\r\n{}\r\n", "x".repeat(2048)).as_bytes()).await;
    assert_eq!(client.answer().await.status, 413);
    assert!(client.is_closed().await, "the rest of the body is not taken for a request");
    assert!(d.all().is_empty());
}

#[tokio::test]
async fn a_body_that_does_not_arrive_is_408() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[], &[&d], "", "timeouts: {body_ms: 100}").await;
    let mut client = Client::connect(system.address).await;
    client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{").await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.code().as_str()), (408, "request_timeout"));
    assert!(d.all().is_empty());
}

#[tokio::test]
async fn internal_fields_of_a_client_reach_no_engine() {
    const MARK: &str = "hostile-marker";
    let hostile = json!({
        "model": "m", "prompt": "x", "max_tokens": 2,
        "kv_transfer_params": {"do_remote_prefill": true, "remote_host": MARK},
        "ec_transfer_params": MARK, "request_id": MARK, "rid": MARK, "bootstrap_room": MARK,
        "remote_engine_id": MARK, "data_parallel_rank": MARK,
        "vllm_xargs": {"kv_transfer_params": MARK, "remote_block_ids": MARK},
        "metadata": {"a": [{"kv_transfer_params": {"b": MARK}}]},
    });
    let lease = Action::Lease(Some(1));
    let nothing = Action::Reply(serde_json::Value::Null);
    let down = Action::Refuse(503, json!({}));
    for p_does in [lease, nothing, down] {
        let p = FakeEngine::always(p_does).await;
        let d = FakeEngine::scripted(vec![Action::Refuse(503, json!({})), Action::Whole(1)]).await;
        let other = FakeEngine::always(Action::Whole(1)).await;
        let system = TestRouter::start(&[&p], &[&d, &other]).await;
        for prompt in [json!("x"), json!(["a", "b"])] {
            let mut body = hostile.clone();
            body["prompt"] = prompt;
            let answer = post(system.address, COMPLETIONS, &body).await;
            assert!(answer.status < 300 || answer.status == 400, "{}", answer.text());
        }
        for sent in [p.all(), d.all(), other.all()].concat() {
            assert!(!sent.body.to_string().contains(MARK), "{}", sent.body);
        }
    }
    let p = FakeEngine::always(Action::Lease(Some(1))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let twice =
        r#"{"model":"m","prompt":"x","kv_transfer_params":null,"kv_transfer_params":{"remote_host":"x"}}"#;
    let mut client = Client::connect(system.address).await;
    client.post_bytes(COMPLETIONS, "", twice.as_bytes()).await;
    assert_eq!(client.answer().await.status, 400);
    assert!(p.all().is_empty() && d.all().is_empty());
}

#[tokio::test]
async fn no_internal_header_of_a_client_reaches_an_engine() {
    let p = FakeEngine::always(Action::Lease(Some(1))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let headers =
        "x-data-parallel-rank: 7\r\nx-baton-cluster-secret: guess\r\nx-prefiller-host-port: 10.0.0.1:1\r\n";
    let mut client = Client::connect(system.address).await;
    client.post_bytes(COMPLETIONS, headers, completion(false).to_string().as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    for sent in [p.received(), d.received()].concat() {
        for name in ["x-data-parallel-rank", "x-baton-cluster-secret", "x-prefiller-host-port"] {
            assert!(!sent.headers.contains_key(name), "{name} at {}", sent.path);
        }
    }
}

#[tokio::test]
async fn more_requests_than_the_router_holds_are_429() {
    let d = FakeEngine::always(Action::Hang).await;
    let system = TestRouter::with(&[], &[&d], "", "limits: {in_flight: 1}").await;
    let mut first = Client::connect(system.address).await;
    first.post(COMPLETIONS, &completion(false)).await;
    d.wait("the first request", |d| d.received().len() == 1).await;
    let answer = post(system.address, COMPLETIONS, &completion(false)).await;
    assert_eq!((answer.status, answer.code().as_str()), (429, "overloaded"));
    assert!(answer.header("retry-after").is_some());
}
