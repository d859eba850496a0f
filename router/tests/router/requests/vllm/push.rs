//! Two engines that behave like stock vLLM 0.32 with the NixlPushConnector: the prefill engine writes the blocks, and the
//! decode engine's blocks are free only after the write.

use serde_json::{Value, json};

use crate::harness::client::{Client, completion, post};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest};
use crate::harness::system::{TestRouter, await_requests};

fn reply() -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "transfer_mode": "push",
        "remote_engine_id": "e-1", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "pp_size": 1,
        "dcp_size": 1, "remote_num_tokens": 16, "remote_request_id": "cmpl-x-0-1234abcd",
        "remote_block_ids": [[1]], "remote_prefill_cached_tokens": 0,
    })
}

async fn prefill(action: Action) -> FakeEngine {
    FakeEngine::scripted(vec![Action::Reply(reply()), action]).await.without_verbs()
}

async fn decode(actions: Vec<Action>) -> FakeEngine {
    FakeEngine::scripted(actions).await.without_verbs()
}

/// A router whose prefill engine has shown its identity in a first request.
async fn learned(p: &FakeEngine, d: &[&FakeEngine]) -> TestRouter {
    let system = TestRouter::start(&[p], d).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    let first = &d[0].received()[0].body["kv_transfer_params"];
    assert_eq!(first["remote_request_id"], "cmpl-x-0-1234abcd", "the first handoff is that of the reply");
    system
}

fn id(request: &ReceivedRequest) -> &str {
    request.headers["x-request-id"].to_str().expect("an id")
}

#[tokio::test]
async fn after_the_first_reply_both_legs_of_a_push_are_sent_at_once() {
    let p = prefill(Action::ReplyGated(reply())).await;
    let d = decode(vec![Action::Whole(1), Action::StreamGated(2)]).await;
    let system = learned(&p, &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    await_requests(&p, 2).await;
    await_requests(&d, 2).await;
    let (p_leg, d_leg) = (p.received()[1].clone(), d.received()[1].clone());
    assert_eq!(id(&p_leg), id(&d_leg), "the engines match the legs by this id");
    let (p_params, d_params) = (&p_leg.body["kv_transfer_params"], &d_leg.body["kv_transfer_params"]);
    assert_eq!((&p_params["do_remote_decode"], &p_leg.body["max_tokens"]), (&json!(true), &json!(1)));
    assert_eq!(p_params["transfer_id"], d_params["transfer_id"]);
    for (name, value) in [
        ("do_remote_prefill", json!(true)),
        ("remote_engine_id", json!("e-1")),
        ("remote_port", json!(5600)),
        // Without this field the engine ends.
        ("tp_size", json!(1)),
    ] {
        assert_eq!(d_params[name], value, "{name}");
    }
    assert!(d_params.get("remote_block_ids").is_none());
    p.open_gate();
    (0..2).for_each(|_| d.open_gate());
    assert_eq!(client.answer().await.status, 200);
    system.settled().await;
}

#[tokio::test]
async fn the_prefill_of_a_cancelled_push_runs_to_its_end() {
    let p = prefill(Action::ReplyGated(reply())).await;
    let d = decode(vec![Action::Whole(1), Action::Hang]).await;
    let system = learned(&p, &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    await_requests(&p, 2).await;
    await_requests(&d, 2).await;
    drop(client);
    d.wait("the end of the decode leg", |d| d.cut() == 1).await;
    assert_eq!(p.cut(), 0, "its write frees the decode engine's blocks");
    p.open_gate();
    system.settled().await;
    system.counts("baton_router_releases_total{via=\"lease\"}", 1.0).await;
    assert_eq!((p.cut(), d.received().len()), (0, 2), "no release precedes the write");
}

/// `BatonPushConnector` ends the decode engine's wait when its own request is aborted.
#[tokio::test]
async fn the_prefill_of_a_cancelled_push_is_aborted_if_its_engine_ends_writes() {
    let mut ending = reply();
    ending["remote_ends_writes"] = json!(true);
    let p = FakeEngine::scripted(vec![Action::Reply(ending), Action::Hang]).await.without_verbs();
    let d = decode(vec![Action::Whole(1), Action::Hang]).await;
    let system = learned(&p, &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    await_requests(&p, 2).await;
    await_requests(&d, 2).await;
    let params = &d.received()[1].body["kv_transfer_params"];
    assert!(params.get("remote_ends_writes").is_none(), "{params}");
    drop(client);
    d.wait("the end of the decode leg", |d| d.cut() == 1).await;
    p.wait("the end of the prefill leg", |p| p.cut() == 1).await;
    system.settled().await;
}

#[tokio::test]
async fn a_failed_push_forgets_the_identity() {
    let p = prefill(Action::Reply(reply())).await;
    let failure = Action::Refuse(500, json!({"error": {"message": "wrong engine"}}));
    let d = decode(vec![Action::Whole(1), failure.clone(), failure]).await;
    let other = decode(vec![Action::Whole(1)]).await;
    let system = learned(&p, &[&d, &other]).await;
    // The round robin may choose the other engine first.
    for _ in 0..2 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    system.settled().await;
    let all = [d.received(), other.received()].concat();
    let sequential = all
        .iter()
        .filter(|request| request.body["kv_transfer_params"]["remote_request_id"] == "cmpl-x-0-1234abcd");
    assert!(sequential.count() >= 2, "the next pair waits for a reply");
}

#[tokio::test]
async fn a_reply_of_another_process_ends_the_pair() {
    let mut other = reply();
    other["remote_engine_id"] = json!("e-2");
    let p = FakeEngine::scripted(vec![
        Action::Reply(reply()),
        Action::Reply(other.clone()),
        Action::Reply(other),
    ])
    .await
    .without_verbs();
    let d = decode(vec![Action::Whole(1), Action::Hang, Action::Whole(1)]).await;
    let system = learned(&p, &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    d.wait("the end of the first decode leg", |d| d.cut() == 1).await;
    assert_eq!(d.received()[2].body["kv_transfer_params"]["remote_request_id"], "cmpl-x-0-1234abcd");
    system.settled().await;
}

#[tokio::test]
async fn a_prefill_without_blocks_ends_the_pair() {
    let empty = Action::Json(json!({"id": "p", "choices": [{"text": "", "finish_reason": "abort"}]}));
    let p = FakeEngine::scripted(vec![Action::Reply(reply()), empty, Action::Reply(reply())])
        .await
        .without_verbs();
    let d = decode(vec![Action::Whole(1), Action::Hang, Action::Whole(1)]).await;
    let system = learned(&p, &[&d]).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    system.settled().await;
}

#[tokio::test]
async fn several_choices_and_responses_are_not_pushed() {
    let p = prefill(Action::Reply(reply())).await;
    let d = decode(vec![Action::Whole(1)]).await;
    let system = learned(&p, &[&d]).await;
    let mut choices = completion(false);
    choices["n"] = json!(2);
    assert_eq!(post(system.address, "/v1/completions", &choices).await.status, 200);
    let body = json!({"model": "m", "input": "x"});
    assert_eq!(post(system.address, "/v1/responses", &body).await.status, 200);
    assert_eq!(p.received().len(), 1, "only the first request has a prefill leg");
    assert!(d.received()[1..].iter().all(|leg| leg.body.get("kv_transfer_params").is_none()));
    system.settled().await;
}

#[tokio::test]
async fn without_a_prefill_engine_a_push_falls_back_to_the_decode_engine() {
    let p = prefill(Action::Reply(reply())).await;
    let d = decode(vec![Action::Whole(1)]).await;
    let system = learned(&p, &[&d]).await;
    p.die().await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    system.settled().await;
}

/// The request itself is the one prefill in flight.
#[tokio::test]
async fn a_failed_push_is_prefilled_again_within_a_limit_of_one_prefill() {
    let p = prefill(Action::Reply(reply())).await;
    let failure = Action::Refuse(500, json!({"error": {"message": "wrong engine"}}));
    let d = decode(vec![Action::Whole(1), failure, Action::Whole(1)]).await;
    let limit = "    disaggregate: {max_prefill_in_flight: 1}\n";
    let system = TestRouter::with(&[&p], &[&d], limit, "").await;
    for _ in 0..2 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    let last = d.received()[2].body["kv_transfer_params"].clone();
    assert_eq!((p.received().len(), &last["remote_request_id"]), (3, &json!("cmpl-x-0-1234abcd")));
    let remote = "baton_router_disagg_decisions_total{decision=\"prefill_decode\"}";
    system.counts(remote, 2.0).await;
    system.settled().await;
}
