//! The tokens of a tenant, from the usage of its responses.

use baton_router::NewKey;
use serde_json::{Value, json};

use crate::harness::client::{Client, DISCONNECT_KINDS, completion, post};
use crate::harness::engine::{Action, FakeEngine, event};
use crate::harness::system::TestRouter;

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";

/// A router with a tenant `t`, a prefill engine, and one decode engine.
struct Billed {
    system: TestRouter,
    authorization: String,
    decode: FakeEngine,
    _prefill: FakeEngine,
}

impl Billed {
    async fn start(decode: FakeEngine, model: &str) -> Self {
        let key = NewKey::make();
        let top = format!("auth: {{keys: [{{id: a, hash: '{}', tenant: t}}]}}", key.hash);
        let prefill = FakeEngine::always(Action::Lease(Some(0xb111))).await;
        let system = TestRouter::with(&[&prefill], &[&decode], model, &top).await;
        Self {
            system,
            authorization: format!("Authorization: Bearer {}\r\n", key.key),
            decode,
            _prefill: prefill,
        }
    }

    async fn send(&self, path: &str, body: &Value) -> Client {
        let mut client = Client::connect(self.system.address).await;
        client.post_bytes(path, &self.authorization, body.to_string().as_bytes()).await;
        client
    }

    /// Waits for the tenant's tokens: prompt, cached prompt, completion.
    async fn counts(&self, tokens: [u32; 3]) {
        for (kind, tokens) in ["prompt", "cached_prompt", "completion"].into_iter().zip(tokens) {
            let series = format!("baton_router_tenant_tokens_total{{tenant=\"t\",kind=\"{kind}\"}}");
            self.system.counts(&series, tokens.into()).await;
        }
    }
}

fn usage() -> Value {
    json!({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4}})
}

fn chat(stream: bool) -> Value {
    json!({"model": "m", "max_tokens": 8, "stream": stream, "messages": [{"role": "user", "content": "x"}]})
}

fn named(data: &Value) -> String {
    format!("event: {}\ndata: {data}\n\n", data["type"].as_str().expect("a type"))
}

#[tokio::test]
async fn whole_responses_and_streams_count_the_usage_of_the_decode_engine() {
    let reply = json!({"choices": [{"index": 0, "text": "abc", "finish_reason": "stop"}], "usage": usage()});
    let decode = FakeEngine::always(Action::Json(reply)).await.with_rule(|request| {
        let asked = request.body["stream_options"]["include_usage"] == true;
        asked.then(|| {
            let mut frames: Vec<String> = (0..3).map(event).collect();
            frames.push(format!("data: {}\n\n", json!({"choices": [], "usage": usage()})));
            frames.push("data: [DONE]\n\n".to_owned());
            Action::Frames(frames, true)
        })
    });
    let billed = Billed::start(decode, "").await;
    billed.counts([0, 0, 0]).await;
    let whole = billed.send("/v1/completions", &completion(false)).await.answer().await;
    assert_eq!(whole.status, 200, "{}", whole.text());
    billed.counts([7, 4, 3]).await;
    let streamed = billed.send("/v1/completions", &completion(true)).await.answer().await;
    assert!(streamed.status == 200 && !streamed.text().contains("usage"), "the client did not ask for it");
    billed.counts([14, 8, 6]).await;
    let embedding = json!({"data": [], "usage": {"prompt_tokens": 5, "total_tokens": 5}});
    let engine = FakeEngine::always(Action::Json(embedding)).await;
    let embedded = Billed::start(engine, "").await;
    let body = json!({"model": "m", "input": "x"});
    assert_eq!(embedded.send("/v1/embeddings", &body).await.answer().await.status, 200);
    embedded.counts([5, 0, 0]).await;
    let refused = post(billed.system.address, "/v1/completions", &completion(false)).await;
    assert_eq!(refused.status, 401);
    billed.counts([14, 8, 6]).await;
}

#[tokio::test]
async fn a_cancelled_stream_counts_what_was_seen_and_a_cancelled_whole_response_nothing() {
    for kind in DISCONNECT_KINDS {
        let billed = Billed::start(FakeEngine::always(Action::StreamGated(10)).await, "").await;
        let mut client = billed.send("/v1/completions", &completion(true)).await;
        (0..2).for_each(|_| billed.decode.open_gate());
        assert_eq!(client.head().await.0, 200);
        for _ in 0..2 {
            client.event().await.expect("an event");
        }
        client.hang_up(kind);
        billed.counts([0, 0, 2]).await;
    }
    let billed = Billed::start(FakeEngine::always(Action::WholeGated(9)).await, "").await;
    let client = billed.send("/v1/completions", &completion(false)).await;
    billed.decode.wait("it has the request", |decode| !decode.received().is_empty()).await;
    client.hang_up(DISCONNECT_KINDS[0]);
    billed.system.counts("baton_router_requests_total{model=\"m\"}", 1.0).await;
    billed.counts([0, 0, 0]).await;
}

#[tokio::test]
async fn messages_count_alike_native_and_translated_and_broken_ones_by_their_first_event() {
    let chat_usage = json!({"choices": [], "usage": usage()});
    let chunk = json!({"choices": [{"index": 0, "delta": {"content": "abc"}, "finish_reason": "stop"}]});
    let chunks = [format!("data: {chunk}\n\n"), format!("data: {chat_usage}\n\n"), "data: [DONE]\n\n".into()];
    let decode = FakeEngine::always(Action::Frames(chunks.to_vec(), true)).await;
    let translated = Billed::start(decode, "    messages: translate").await;
    assert_eq!(translated.send(MESSAGES, &chat(true)).await.answer().await.status, 200);
    assert_eq!(translated.decode.received()[0].path, CHAT);
    translated.counts([7, 4, 3]).await;

    let begun = json!({"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 0});
    let frames: Vec<_> = [
        json!({"type": "message_start", "message": {"id": "x", "content": [], "usage": begun}}),
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "abc"}}),
        json!({"type": "content_block_stop", "index": 0}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}),
        json!({"type": "message_stop"}),
    ]
    .iter()
    .map(named)
    .collect();
    let engine = |frames: &[String], ends| FakeEngine::always(Action::Frames(frames.to_vec(), ends));
    let native = Billed::start(engine(&frames, true).await, "    messages: native").await;
    assert_eq!(native.send(MESSAGES, &chat(true)).await.answer().await.status, 200);
    assert_eq!(native.decode.received()[0].path, MESSAGES);
    native.counts([7, 4, 3]).await;
    let broken = Billed::start(engine(&frames[..3], false).await, "    messages: native").await;
    broken.send(MESSAGES, &chat(true)).await.answer().await;
    broken.counts([7, 4, 1]).await;
}
