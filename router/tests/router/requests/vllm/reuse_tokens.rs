//! Token ids of the prefill engine's reply, which the decode engine uses instead of the chat's text.

use serde_json::{Value, json};

use crate::harness::client::post;
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;

fn reply(ids: &Value) -> Action {
    Action::Json(json!({
        "id": "p", "prompt_token_ids": ids, "choices": [{"token_ids": [9], "message": {"content": "x"}}],
        "kv_transfer_params": {
            "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "e-1",
            "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "remote_request_id": "chatcmpl-x",
            "remote_block_ids": [[1]],
        },
    }))
}

fn chat(content: Value) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": content}]})
}

/// What both legs of a request were sent.
async fn legs(setting: &str, ids: &Value, path: &str, body: &Value) -> (Value, Value) {
    let p = FakeEngine::scripted(vec![reply(ids)]).await.without_verbs();
    let d = FakeEngine::scripted(vec![Action::Whole(1)]).await.without_verbs();
    let system = TestRouter::with(&[&p], &[&d], setting, "").await;
    let answer = post(system.address, path, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    system.settled().await;
    (p.received()[0].body.clone(), d.received()[0].body.clone())
}

const CHAT: &str = "/v1/chat/completions";
const ON: &str = "    reuse_tokens: true\n";

#[tokio::test]
async fn the_decode_engine_gets_the_token_ids_of_a_chat_from_the_prefill_engine() {
    let (p, d) = legs(ON, &json!([1, 2, 70_000]), CHAT, &chat(json!("hello"))).await;
    assert_eq!(p["return_token_ids"], true);
    assert_eq!(d["kv_transfer_params"]["prompt_token_ids"], json!([1, 2, 70_000]));
    assert_eq!(d["kv_transfer_params"]["remote_request_id"], "chatcmpl-x");
    assert_eq!((d.get("return_token_ids"), &d["messages"]), (None, &chat(json!("hello"))["messages"]));
}

#[tokio::test]
async fn only_valid_ids_are_passed_on() {
    for ids in [
        json!([]),
        json!([-1]),
        json!([5_000_000_000_u64]),
        json!(["1"]),
        json!([1.5]),
        json!("1"),
        json!(null),
    ] {
        let (_, d) = legs(ON, &ids, CHAT, &chat(json!("hello"))).await;
        assert!(d["kv_transfer_params"].get("prompt_token_ids").is_none(), "{ids}");
        assert_eq!(d["kv_transfer_params"]["remote_request_id"], "chatcmpl-x", "{ids}");
    }
}

#[tokio::test]
async fn media_echo_completions_and_the_default_do_not_ask_for_ids() {
    let image = json!([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]);
    let mut echo = chat(json!("hello"));
    echo["echo"] = json!(true);
    let long = chat(json!("x".repeat(600 << 10)));
    let completion = json!({"model": "m", "prompt": "hello"});
    for (setting, path, body) in [
        (ON, CHAT, chat(image)),
        (ON, CHAT, echo),
        (ON, CHAT, long),
        (ON, "/v1/completions", completion),
        ("", CHAT, chat(json!("hello"))),
    ] {
        let (p, _) = legs(setting, &json!(null), path, &body).await;
        assert!(p.get("return_token_ids").is_none());
    }
}
