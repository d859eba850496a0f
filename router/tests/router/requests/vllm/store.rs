//! Engines that share KV blocks through a store, and decode engines that decline prompts which they have not cached.

use serde_json::{Value, json};

use crate::harness::client::{Client, completion, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::{TestRouter, await_requests};

const STORE: &str = "    protocol: vllm_store\n";
const CONDITIONAL: &str = "    protocol: vllm_store\n    disaggregate: {cache_hit_threshold: 0.75}\n";

/// A prefill engine's reply: one token, without transfer parameters.
fn saved() -> Action {
    Action::Json(json!({"id": "p", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}))
}

async fn engine(actions: Vec<Action>) -> FakeEngine {
    FakeEngine::scripted(actions).await.without_verbs()
}

/// What a decode engine sends that has cached too little of the prompt.
fn declined(stream: bool) -> Action {
    let choice = json!({"index": 0, "text": "", "finish_reason": "cache_threshold"});
    let reply = json!({"id": "d", "choices": [choice]});
    match stream {
        false => Action::Json(reply),
        true => Action::Frames(vec![format!("data: {reply}\n\n"), "data: [DONE]\n\n".into()], true),
    }
}

#[tokio::test]
async fn the_legs_through_a_store_follow_each_other_without_a_handoff() {
    let (p, d) = (engine(vec![saved()]).await, engine(vec![Action::Stream(2)]).await);
    let system = TestRouter::with(&[&p], &[&d], STORE, "").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(true)).await.status, 200);
    system.settled().await;
    let (p_leg, d_leg) = (&p.received()[0].body, &d.received()[0].body);
    assert_eq!((&p_leg["max_tokens"], &p_leg["stream"]), (&json!(1), &json!(false)));
    assert_eq!(d_leg["stream"], true);
    for leg in [p_leg, d_leg] {
        assert_eq!((leg.get("kv_transfer_params"), leg.get("cache_hit_threshold")), (None, None));
    }
}

#[tokio::test]
async fn a_store_without_a_prefill_engine_leaves_the_prompt_to_the_decode_engine() {
    let p = engine(vec![Action::Refuse(503, json!({"error": {"message": "down"}}))]).await;
    let d = engine(vec![Action::Whole(1)]).await;
    let system = TestRouter::with(&[&p], &[&d], STORE, "").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    system.settled().await;
}

#[tokio::test]
async fn a_cancelled_leg_through_a_store_ends_and_nothing_is_released() {
    let (p, d) = (engine(vec![Action::Hang]).await, engine(vec![Action::Whole(1)]).await);
    let system = TestRouter::with(&[&p], &[&d], STORE, "").await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(false)).await;
    await_requests(&p, 1).await;
    drop(client);
    p.wait("the end of the prefill leg", |p| p.cut() == 1).await;
    system.settled().await;
    assert_eq!(d.received().len(), 0);
}

#[tokio::test]
async fn a_decode_engine_with_the_prefix_serves_the_request_alone() {
    for stream in [false, true] {
        let answer = if stream { Action::Stream(2) } else { Action::Whole(1) };
        let (p, d) = (engine(vec![saved()]).await, engine(vec![answer]).await);
        let system = TestRouter::with(&[&p], &[&d], CONDITIONAL, "").await;
        assert_eq!(post(system.address, "/v1/completions", &completion(stream)).await.status, 200);
        system.settled().await;
        assert_eq!(d.received()[0].body["cache_hit_threshold"], 0.75);
        assert_eq!(p.received().len(), 0);
        system
            .counts(
                "baton_router_disagg_decisions_total{decision=\"decode_only\",reason=\"decoded_first\"}",
                1.0,
            )
            .await;
    }
}

#[tokio::test]
async fn a_prefill_follows_if_the_decode_engine_declines() {
    let answer = |stream| if stream { Action::Stream(2) } else { Action::Whole(1) };
    for (first, stream) in [
        (declined(false), false),
        (declined(true), true),
        (Action::Refuse(412, json!({"error": {"message": "no cached prefix"}})), true),
        (Action::Refuse(503, json!({"error": {"message": "busy"}})), false),
    ] {
        let (p, d) = (engine(vec![saved()]).await, engine(vec![first, answer(stream)]).await);
        let system = TestRouter::with(&[&p], &[&d], CONDITIONAL, "").await;
        let response = post(system.address, "/v1/completions", &completion(stream)).await;
        assert_eq!(response.status, 200, "{}", response.text());
        assert!(!response.text().contains("cache_threshold"), "{}", response.text());
        system.settled().await;
        let thresholds = |engine: &FakeEngine| -> Vec<Value> {
            engine.received().iter().map(|one| one.body["cache_hit_threshold"].clone()).collect()
        };
        assert_eq!((thresholds(&p), thresholds(&d)), (vec![json!(0)], vec![json!(0.75), json!(0)]));
    }
}

#[tokio::test]
async fn a_client_that_leaves_a_conditional_decode_ends_it() {
    let (p, d) = (engine(vec![saved()]).await, engine(vec![Action::Hang]).await);
    let system = TestRouter::with(&[&p], &[&d], CONDITIONAL, "").await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    await_requests(&d, 1).await;
    drop(client);
    d.wait("the end of the decode leg", |d| d.cut() == 1).await;
    system.settled().await;
    assert_eq!(p.received().len(), 0);
}
