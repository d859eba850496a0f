//! Bidirectional KV: a decode engine that keeps the blocks of its response for the conversation's next turn.

use serde_json::{Value, json};

use crate::harness::client::{ClientResponse, post};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest};
use crate::harness::system::TestRouter;

const KEPT: &str = "    bidirectional_kv: {idle_ms: 450000}\n";

fn lease() -> Action {
    Action::Reply(json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "p-1", "remote_host": "127.0.0.1",
        "remote_port": 5600, "tp_size": 1, "remote_request_id": "cmpl-p-0", "remote_block_ids": [[1]],
    }))
}

fn kept(tokens: usize) -> Value {
    json!({
        "do_remote_prefill": false, "do_remote_decode": true, "remote_engine_id": "d-1", "remote_host": "127.0.0.1",
        "remote_port": 5601, "tp_size": 1, "remote_request_id": "cmpl-d-0", "remote_block_ids": [[3, 4]],
        "remote_num_tokens": tokens, "remote_blocks_expiry_time": 12.5,
    })
}

/// A decode engine's reply to a prompt of the tokens below 20.
fn reply() -> Action {
    let prompt: Vec<u32> = (0..20).collect();
    let choice = json!({
        "index": 0, "text": "ab", "finish_reason": "stop", "prompt_token_ids": prompt, "token_ids": [100, 101],
    });
    Action::Json(json!({"id": "d", "choices": [choice], "kv_transfer_params": kept(21)}))
}

async fn engines(decode: Vec<Action>) -> (FakeEngine, FakeEngine) {
    let p = FakeEngine::scripted(vec![lease()]).await.without_verbs();
    (p, FakeEngine::scripted(decode).await.without_verbs())
}

async fn turn(system: &TestRouter, prompt: &[u32], more: Value) -> ClientResponse {
    let mut body = json!({"model": "m", "prompt": prompt, "max_tokens": 8});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    let response = post(system.address, "/v1/completions", &body).await;
    assert_eq!(response.status, 200, "{}", response.text());
    response
}

/// The prompt of a turn that follows the response of [`reply`].
fn next_prompt() -> Vec<u32> {
    (0..20).chain([100, 101, 7, 8, 9]).collect()
}

fn params(engine: &FakeEngine, number: usize) -> Value {
    engine.received()[number].body["kv_transfer_params"].clone()
}

#[tokio::test]
async fn the_prefill_engine_of_the_next_turn_reads_the_kept_blocks_once() {
    let (p, d) = engines(vec![reply(), Action::Whole(1)]).await;
    let system = TestRouter::with(&[&p], &[&d], KEPT, "").await;
    let response = turn(&system, &(0..20).collect::<Vec<_>>(), json!({})).await;
    assert_eq!(d.received()[0].body["return_token_ids"], true);
    for internal in ["token_ids", "remote_", "d-1"] {
        assert!(!response.text().contains(internal), "{}", response.text());
    }
    system.counts("baton_router_kept_turns", 1.0).await;
    turn(&system, &next_prompt(), json!({})).await;
    let second = params(&p, 1);
    for (name, value) in kept(21).as_object().expect("an object") {
        assert_eq!(second[name], *value, "{name}");
    }
    assert!(second["router_request_id"].is_string());
    turn(&system, &next_prompt(), json!({})).await;
    assert!(params(&p, 2)["remote_engine_id"].is_null(), "the blocks are freed by the first read");
    system.counts("baton_router_kept_turns_ended_total{end=\"used\"}", 1.0).await;
    system.settled().await;
}

#[tokio::test]
async fn a_prompt_that_differs_in_one_token_reads_no_kept_blocks() {
    for (at, more) in [(0, json!({})), (19, json!({})), (20, json!({})), (24, json!({"cache_salt": "other"}))]
    {
        let (p, d) = engines(vec![reply(), Action::Whole(1)]).await;
        let system = TestRouter::with(&[&p], &[&d], KEPT, "").await;
        turn(&system, &(0..20).collect::<Vec<_>>(), json!({})).await;
        let mut prompt = next_prompt();
        prompt[at] += 1_000;
        turn(&system, &prompt, more).await;
        assert!(params(&p, 1)["remote_engine_id"].is_null(), "{at}");
        system.counts("baton_router_kept_turns", 1.0).await;
        system.settled().await;
    }
}

#[tokio::test]
async fn the_token_behind_the_kept_blocks_may_differ() {
    let (p, d) = engines(vec![reply(), Action::Whole(1)]).await;
    let system = TestRouter::with(&[&p], &[&d], KEPT, "").await;
    turn(&system, &(0..20).collect::<Vec<_>>(), json!({})).await;
    let mut prompt = next_prompt();
    prompt[21] += 1_000;
    turn(&system, &prompt, json!({})).await;
    assert_eq!(params(&p, 1)["remote_engine_id"], "d-1");
    system.settled().await;
}

#[tokio::test]
async fn a_failed_prefill_reads_the_kept_blocks_at_no_other_engine() {
    let fails = |request: &ReceivedRequest| {
        (request.body["kv_transfer_params"]["remote_engine_id"] == "d-1").then_some(Action::Close)
    };
    let p = FakeEngine::scripted(vec![lease()]).await.without_verbs().with_rule(fails);
    let other = FakeEngine::scripted(vec![lease()]).await.without_verbs().with_rule(fails);
    let d = FakeEngine::scripted(vec![reply(), Action::Whole(1)]).await.without_verbs();
    let system = TestRouter::with(&[&p, &other], &[&d], KEPT, "").await;
    turn(&system, &(0..20).collect::<Vec<_>>(), json!({})).await;
    turn(&system, &next_prompt(), json!({})).await;
    let all = [p.received(), other.received()].concat();
    let read = all.iter().filter(|one| one.body["kv_transfer_params"]["remote_engine_id"] == "d-1").count();
    assert_eq!((read, all.len()), (1, 3));
    system.settled().await;
}

#[tokio::test]
async fn kept_blocks_without_a_next_turn_are_released_by_a_refused_request() {
    let p = FakeEngine::scripted(vec![
        lease(),
        Action::Refuse(400, json!({"error": {"message": "temperature"}})),
    ])
    .await
    .without_verbs();
    let d = FakeEngine::scripted(vec![reply()]).await.without_verbs();
    let system = TestRouter::with(&[&p], &[&d], "    bidirectional_kv: {idle_ms: 1000}\n", "").await;
    turn(&system, &(0..20).collect::<Vec<_>>(), json!({})).await;
    p.wait("the release of the kept blocks", |p| p.received().len() == 2).await;
    let release = p.received()[1].body.clone();
    let sent = &release["kv_transfer_params"];
    assert_eq!((&sent["do_remote_prefill"], &sent["do_remote_decode"]), (&json!(true), &json!(false)));
    assert_eq!((&sent["remote_request_id"], &release["temperature"]), (&json!("cmpl-d-0"), &json!(-1)));
    system.counts("baton_router_kept_turns_ended_total{end=\"expired\"}", 1.0).await;
    system.settled().await;
}

#[tokio::test]
async fn a_client_that_asks_for_token_ids_gets_them_and_no_parameters() {
    let (p, d) = engines(vec![reply()]).await;
    let system = TestRouter::with(&[&p], &[&d], KEPT, "").await;
    let response = turn(&system, &(0..20).collect::<Vec<_>>(), json!({"return_token_ids": true})).await;
    assert!(response.text().contains("token_ids") && !response.text().contains("d-1"), "{}", response.text());
    system.counts("baton_router_kept_turns", 1.0).await;
    system.settled().await;
}

/// Engines whose prefill engine reads no kept blocks: it answers so to a request that names them.
async fn unread(answer: Action) -> (FakeEngine, FakeEngine) {
    let rule = move |request: &ReceivedRequest| {
        let params = &request.body["kv_transfer_params"];
        if params["remote_engine_id"] != "d-1" {
            return None;
        }
        // The release is refused.
        let refusal = Action::Refuse(400, json!({"error": {"message": "temperature"}}));
        Some(if params["do_remote_prefill"] == true { refusal } else { answer.clone() })
    };
    let p = FakeEngine::scripted(vec![lease()]).await.without_verbs().with_rule(rule);
    (p, FakeEngine::scripted(vec![reply(), Action::Whole(1)]).await.without_verbs())
}

fn releases(p: &FakeEngine) -> usize {
    p.received().iter().filter(|one| one.body["kv_transfer_params"]["remote_host"] == "127.0.0.1").count()
}

#[tokio::test]
async fn kept_blocks_are_released_if_the_prefill_engine_refuses_the_request() {
    let (p, d) = unread(Action::Refuse(400, json!({"error": {"message": "no"}}))).await;
    let system = TestRouter::with(&[&p], &[&d], KEPT, "").await;
    turn(&system, &(0..20).collect::<Vec<_>>(), json!({})).await;
    let body = json!({"model": "m", "prompt": next_prompt(), "max_tokens": 8});
    assert_eq!(post(system.address, "/v1/completions", &body).await.status, 400);
    p.wait("the release of the kept blocks", |p| releases(p) == 2).await;
    system.counts("baton_router_kept_turns_ended_total{end=\"unread\"}", 1.0).await;
    system.settled().await;
}

/// The decode engine that kept the blocks may have ended. That is no fault of the prefill engine.
#[tokio::test]
async fn a_prefill_engine_that_cannot_read_kept_blocks_gets_the_request_without_them() {
    let (p, d) = unread(Action::Refuse(500, json!({"error": {"message": "load failed"}}))).await;
    let system = TestRouter::with(&[&p], &[&d], "    bidirectional_kv: {idle_ms: 1000}\n", "").await;
    turn(&system, &(0..20).collect::<Vec<_>>(), json!({})).await;
    turn(&system, &next_prompt(), json!({})).await;
    assert!(params(&p, 2)["remote_engine_id"].is_null(), "the same engine computes the prompt");
    system.counts("baton_router_engine_faults_total", 0.0).await;
    // A read may still run, so the release follows after the time of a kept turn.
    p.wait("the release of the kept blocks", |p| releases(p) == 2).await;
    system.counts("baton_router_kept_turns_ended_total{end=\"expired\"}", 1.0).await;
    system.settled().await;
}

#[tokio::test]
async fn a_prompt_that_is_truncated_or_has_a_suffix_reads_no_kept_blocks() {
    for more in [json!({"truncate_prompt_tokens": 3, "truncation_side": "left"}), json!({"suffix": "end"})] {
        let (p, d) = engines(vec![reply(), Action::Whole(1)]).await;
        let system = TestRouter::with(&[&p], &[&d], KEPT, "").await;
        turn(&system, &(0..20).collect::<Vec<_>>(), json!({})).await;
        turn(&system, &next_prompt(), more.clone()).await;
        assert!(params(&p, 1)["remote_engine_id"].is_null(), "{more}");
        system.counts("baton_router_kept_turns", 1.0).await;
        system.settled().await;
    }
}

/// A decode engine keeps the blocks of every response that had a handoff.
#[tokio::test]
async fn blocks_that_no_turn_can_read_are_released_at_once() {
    let output = json!([{"type": "message", "role": "assistant", "content": []}]);
    let response = json!({
        "id": "resp_1", "object": "response", "status": "completed", "output": output,
        "kv_transfer_params": kept(21),
    });
    let p = FakeEngine::scripted(vec![
        lease(),
        Action::Refuse(400, json!({"error": {"message": "temperature"}})),
    ])
    .await
    .without_verbs();
    let d = FakeEngine::scripted(vec![Action::Json(response)]).await.without_verbs();
    let system = TestRouter::with(&[&p], &[&d], &format!("{KEPT}    responses: native"), "").await;
    let body = json!({"model": "m", "input": "Hello", "max_output_tokens": 8});
    let answer = post(system.address, "/v1/responses", &body).await;
    assert_eq!((answer.status, answer.text().contains("d-1")), (200, false), "{}", answer.text());
    p.wait("the release of the kept blocks", |p| releases(p) == 1).await;
    system.counts("baton_router_kept_turns_ended_total{end=\"unknown\"}", 1.0).await;
    system.settled().await;
}
