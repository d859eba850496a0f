//! Every endpoint: what engines are sent, byte for byte where it is the client's, and what is not served.

use serde_json::json;

use crate::client::{Client, completion, get, post};
use crate::engine::{Act, FakeEngine, event};
use crate::system::System;

#[tokio::test]
async fn a_response_is_prefilled_and_decoded_streamed_or_not() {
    let p = FakeEngine::always(Act::Lend(Some(7))).await;
    let d = FakeEngine::scripted(vec![Act::Whole(5), Act::Stream(3)]).await;
    let system = System::start(&[&p], &[&d]).await;
    let mut body = json!({"model": "alias", "input": "hello", "max_output_tokens": 8, "store": true, "own": {"x": 1.50}});
    assert_eq!(post(system.address, "/v1/responses", &body).await.status, 200);
    body["stream"] = json!(true);
    let mut client = Client::connect(system.address).await;
    client.post("/v1/responses", &body).await;
    assert_eq!(client.head().await.0, 200);
    let mut all = String::new();
    while let Some(chunk) = client.chunk().await {
        all.push_str(&String::from_utf8(chunk).unwrap());
    }
    assert!(all.starts_with(&event(0)) && !all.contains("error"), "{all}");
    for sent in p.asked() {
        assert_eq!((sent.path.as_str(), &sent.body["max_output_tokens"]), ("/v1/responses", &json!(1)));
        assert_eq!((&sent.body["stream"], &sent.body["store"]), (&json!(false), &json!(false)));
        assert_eq!((&sent.body["model"], sent.body.get("max_tokens")), (&json!("m"), None));
        assert_eq!(sent.body["kv_transfer_params"]["do_remote_decode"], true);
    }
    for sent in d.asked() {
        assert_eq!((&sent.body["max_output_tokens"], &sent.body["own"]), (&json!(8), &json!({"x": 1.5})));
        assert_eq!(sent.body["kv_transfer_params"]["do_remote_prefill"], true);
    }
    let missing = post(system.address, "/v1/responses", &json!({"model": "m"})).await;
    assert_eq!((missing.status, missing.json()["error"]["param"].as_str()), (400, Some("input")));
    let long = post(system.address, "/v1/responses", &json!({"input": "x", "max_output_tokens": -1})).await;
    assert!(long.text().contains("max_output_tokens"), "{}", long.text());
}

#[tokio::test]
async fn embeddings_and_scores_go_to_one_engine_with_every_field() {
    let d = FakeEngine::always(Act::Whole(1)).await;
    let system = System::start(&[], &[&d]).await;
    for path in ["/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"] {
        let body =
            r#"{"model":"alias","input":["a","b"],"dimensions":3,"number":0.10000000000000000555,"rid":"x"}"#;
        let mut client = Client::connect(system.address).await;
        client.post_bytes(path, "", body.as_bytes()).await;
        assert_eq!(client.answer().await.status, 200, "{path}");
        let sent = d.asked().pop().unwrap();
        assert_eq!(sent.path, path);
        assert_eq!(
            String::from_utf8(sent.raw.to_vec()).unwrap(),
            r#"{"model":"m","input":["a","b"],"dimensions":3,"number":0.10000000000000000555}"#
        );
    }
    let odd = post(system.address, "/v1/embeddings", &json!({"model": 7, "input": "x"})).await;
    assert_eq!(odd.status, 400);
    let other = post(system.address, "/v1/embeddings", &json!({"model": "other", "input": "x"})).await;
    assert_eq!((other.status, other.code().as_str()), (404, "model_not_found"));
}

#[tokio::test]
async fn what_the_client_wrote_is_sent_on_digit_for_digit() {
    let p = FakeEngine::always(Act::Lend(Some(7))).await;
    let d = FakeEngine::always(Act::Whole(1)).await;
    let system = System::start(&[&p], &[&d]).await;
    let body = r#"{"model":"m","prompt":"a\u00e9\/","temperature":0.10000000000000000555,"x": [1E2, 12345678901234567890123]}"#;
    let mut client = Client::connect(system.address).await;
    client.post_bytes("/v1/completions", "", body.as_bytes()).await;
    assert_eq!(client.answer().await.status, 200);
    for sent in [p.asked(), d.asked()].concat() {
        let raw = String::from_utf8(sent.raw.to_vec()).unwrap();
        let as_it_came = r#""prompt":"a\u00e9\/","temperature":0.10000000000000000555,"x": [1E2, 12345678901234567890123]}"#;
        assert!(raw.ends_with(as_it_came), "{raw}");
        assert_eq!(sent.headers["content-length"], raw.len().to_string().as_str());
    }
}

#[tokio::test]
async fn heads_and_options_are_answered_and_unknown_paths_are_not() {
    let d = FakeEngine::always(Act::Whole(1)).await;
    let system = System::start(&[], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.send(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let (status, head) = client.head().await;
    assert_eq!(status, 200);
    assert!(head.to_ascii_lowercase().contains("content-length: 15"), "{head}");
    client.send(b"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.header("allow")), (200, Some("POST, OPTIONS")));
    for path in [
        "/",
        "/v1",
        "/v1/completions/",
        "/V1/completions",
        "/v1//completions",
        "/kv/release",
        "/abort_requests",
    ] {
        let answer = get(system.address, path).await;
        assert_eq!((answer.status, answer.code().as_str()), (404, "not_found"), "{path}");
    }
    client.post("/v1/completions", &completion(false)).await;
    assert_eq!(client.answer().await.status, 200, "the connection lives on");
}
