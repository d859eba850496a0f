//! Two engines that behave like stock vLLM 0.32 with the NixlConnector: no verbs, no handles. P pins the blocks of a
//! reply until one of three events: D has read them, D's handler refuses a request that names them, or the lease
//! expires. No test waits for the expiry. The behaviour is the observed one, with its pitfalls.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::harness::client::{Client, DISCONNECT_KINDS, completion, post};
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest};
use crate::harness::system::TestRouter;

/// Blocks that P pins, by its own id of the request.
#[derive(Clone, Default)]
pub(super) struct PinnedBlocks(Arc<Mutex<BTreeSet<String>>>);

impl PinnedBlocks {
    pub(super) fn held(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn freed_by(&self, params: &Value) {
        self.0.lock().unwrap().remove(params["remote_request_id"].as_str().unwrap_or_default());
    }
}

fn refuse(status: u16, message: &str) -> Action {
    let body =
        json!({"error": {"message": message, "type": "BadRequestError", "param": null, "code": status}});
    Action::Refuse(status, body)
}

/// The requests that parsers and handlers of both legs refuse.
fn refused(body: &Value) -> Option<Action> {
    let max = body["max_completion_tokens"].as_u64().or(body["max_tokens"].as_u64()).unwrap_or(16);
    if body["min_tokens"].as_u64().unwrap_or(0) > max {
        return Some(refuse(400, "min_tokens must be less than or equal to max_tokens"));
    }
    if body["stream"] != true && !body["stream_options"].is_null() {
        return Some(refuse(400, "Stream options can only be defined when `stream=True`."));
    }
    if body["temperature"].as_f64().is_some_and(|t| t < 0.0) {
        return Some(refuse(400, "temperature must be non-negative"));
    }
    None
}

/// P: pins, and answers at once or when the test opens the gate.
pub(super) fn produce(
    pins: &PinnedBlocks,
    gated: bool,
) -> impl Fn(&ReceivedRequest) -> Option<Action> + Send + 'static {
    let (pins, count) = (pins.clone(), AtomicUsize::new(0));
    move |request| {
        if !request.path.starts_with("/v1/") {
            return None;
        }
        if let Some(refusal) = refused(&request.body) {
            return Some(refusal);
        }
        assert_eq!(request.body["kv_transfer_params"]["do_remote_decode"], true);
        let id = format!(
            "cmpl-{}-0-{}",
            request.headers["x-request-id"].to_str().unwrap(),
            count.fetch_add(1, Ordering::SeqCst)
        );
        pins.0.lock().unwrap().insert(id.clone());
        let mut params = crate::harness::engine::handoff(None);
        params.as_object_mut().unwrap().remove("remote_handle");
        params["remote_request_id"] = json!(id);
        Some(if gated { Action::ReplyGated(params) } else { Action::Reply(params) })
    }
}

/// D: releases at P the blocks that it reads or that its handler refuses.
pub(super) fn consume(
    pins: &PinnedBlocks,
    then: Action,
) -> impl Fn(&ReceivedRequest) -> Option<Action> + Send + 'static {
    let pins = pins.clone();
    move |request| {
        if !request.path.starts_with("/v1/") {
            return None;
        }
        let refusal = refused(&request.body);
        pins.freed_by(&request.body["kv_transfer_params"]);
        Some(refusal.unwrap_or_else(|| then.clone()))
    }
}

async fn pair(pins: &PinnedBlocks, gated: bool, then: Action) -> (FakeEngine, FakeEngine) {
    let p = FakeEngine::always(Action::Hang).await.without_verbs().crossing().with_rule(produce(pins, gated));
    let d = FakeEngine::always(Action::Hang).await.without_verbs().with_rule(consume(pins, then));
    (p, d)
}

pub(super) fn config(p: &FakeEngine, d: &FakeEngine, release: &str) -> String {
    format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\n\
         models: [{{name: m, prefill: {{engines: [{{url: '{}', release: {release}}}]}}, \
         decode: {{engines: [{{url: '{}'}}]}}}}]",
        p.url(),
        d.url()
    )
}

fn verbs(engine: &FakeEngine) -> usize {
    engine
        .all()
        .iter()
        .filter(|request| request.path == "/kv/release" || request.path == "/abort_requests")
        .count()
}

/// Requests to generate that were meant to be refused.
pub(super) fn refusable(d: &FakeEngine) -> Vec<ReceivedRequest> {
    d.received().into_iter().filter(|request| request.body["temperature"] == json!(-1)).collect()
}

#[tokio::test]
async fn the_legs_adapt_parameters_that_stock_engines_reject() {
    let pins = PinnedBlocks::default();
    let (p, d) = pair(&pins, false, Action::Whole(1)).await;
    let system = TestRouter::of(&config(&p, &d, "auto")).await;
    let body = json!({
        "model": "m", "messages": [{"role": "user", "content": "x"}], "stream": true,
        "stream_options": {"include_usage": true}, "max_tokens": 64, "max_completion_tokens": 64, "min_tokens": 5,
        "n": 2, "stop": ["END"], "stop_token_ids": [7], "ignore_eos": true,
    });
    let answer = post(system.address, "/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let (first, second) = (&p.received()[0].body, &d.received()[0].body);
    for (field, expected) in [
        ("max_tokens", json!(1)),
        ("max_completion_tokens", json!(1)),
        ("n", json!(1)),
        ("stream", json!(false)),
    ] {
        assert_eq!(first[field], expected, "{field}");
    }
    for gone in ["min_tokens", "stream_options", "stop", "stop_token_ids", "ignore_eos"] {
        assert!(first.get(gone).is_none(), "{gone} on the prefill leg");
    }
    for field in ["n", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "max_tokens", "stream_options"] {
        assert_eq!(second[field], body[field], "{field} on the decode leg");
    }
    let id = p.received()[0].headers["x-request-id"].clone();
    assert_eq!(id, d.received()[0].headers["x-request-id"]);
    assert_eq!(first["kv_transfer_params"]["router_request_id"], id.to_str().unwrap());
    assert_eq!(pins.held(), 0);
}

#[tokio::test]
async fn an_unread_lease_is_ended_by_a_decode_request_that_must_be_refused() {
    for release in ["auto", "refused_decode"] {
        let pins = PinnedBlocks::default();
        let (p, d) = pair(&pins, true, Action::Whole(1)).await;
        let system = TestRouter::of(&config(&p, &d, release)).await;
        let mut client = Client::connect(system.address).await;
        client.post("/v1/completions", &completion(true)).await;
        p.wait("it prefills", |p| !p.received().is_empty() && pins.held() == 1).await;
        client.hang_up(DISCONNECT_KINDS[0]);
        // The reply crosses the half-close: its only copy of the handoff is used.
        system.counts("baton_router_disconnects_total{phase=\"prefill\"}", 1.0).await;
        p.open_gate();
        d.wait("the refusal has freed it", |_| pins.held() == 0).await;
        system.settled().await;
        let sent = &refusable(&d)[0];
        assert!(sent.body["kv_transfer_params"]["remote_request_id"].is_string());
        assert_eq!(sent.body["max_tokens"], 1);
        let series = "baton_router_releases_total{cause=\"late_reply\",via=\"refused_decode\"}";
        system.counts(series, 1.0).await;
        // The abort, and a release if the reply arrived before the abort's answer.
        let allowed = if release == "auto" { 1..=2 } else { 0..=0 };
        assert!(allowed.contains(&verbs(&p)), "{release}: {}", verbs(&p));
    }
}

#[tokio::test]
async fn a_reply_that_comes_when_its_settlement_is_over_still_frees_its_blocks() {
    for release in ["auto", "refused_decode"] {
        let pins = PinnedBlocks::default();
        let (p, d) = pair(&pins, true, Action::Whole(1)).await;
        let config = config(&p, &d, release) + "\ntimeouts: {settle_ms: 20}\n";
        let system = TestRouter::of(&config).await;
        let mut client = Client::connect(system.address).await;
        client.post("/v1/completions", &completion(true)).await;
        p.wait("it prefills", |p| !p.received().is_empty() && pins.held() == 1).await;
        client.hang_up(DISCONNECT_KINDS[0]);
        system.counts("baton_router_disconnects_total{phase=\"prefill\"}", 1.0).await;
        system.counts("baton_router_settlements_total{result=\"unsupported\"}", 1.0).await;
        system.settled().await;
        assert_eq!((p.cut(), pins.held()), (0, 1), "it prefills on, and is still read");
        p.open_gate();
        d.wait("the refusal has freed it", |_| pins.held() == 0).await;
        system.counts("baton_router_releases_total{cause=\"late_reply\",via=\"refused_decode\"}", 1.0).await;
    }
}

#[tokio::test]
async fn a_reply_beyond_the_awaited_limit_is_one_settlement() {
    let pins = PinnedBlocks::default();
    let (p, d) = pair(&pins, true, Action::Whole(1)).await;
    let config = config(&p, &d, "auto") + "\ntimeouts: {settle_ms: 20}\nlimits: {settlements: 1}\n";
    let system = TestRouter::of(&config).await;
    for gone in 1..=2_u32 {
        let mut client = Client::connect(system.address).await;
        client.post("/v1/completions", &completion(true)).await;
        p.wait("it prefills", |_| pins.held() == gone as usize).await;
        client.hang_up(DISCONNECT_KINDS[0]);
        system.counts("baton_router_disconnects_total{phase=\"prefill\"}", gone.into()).await;
        system.settled().await;
        assert_eq!(system.metric("baton_router_settlements_total").await, f64::from(gone));
    }
    assert_eq!(system.metric("baton_router_settlements_total{result=\"refused\"}").await, 1.0);
}

#[tokio::test]
async fn a_shutdown_waits_for_an_abandoned_prefills_reply_no_longer_than_for_one_try() {
    let pins = PinnedBlocks::default();
    let (p, d) = pair(&pins, true, Action::Whole(1)).await;
    // The wait for settlements could take 24 s, longer than this test.
    let config = config(&p, &d, "auto") + "\ntimeouts: {settle_ms: 1500}\n";
    let mut system = TestRouter::of(&config).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    p.wait("it prefills", |_| pins.held() == 1).await;
    client.hang_up(DISCONNECT_KINDS[0]);
    system.counts("baton_router_disconnects_total{phase=\"prefill\"}", 1.0).await;
    system.settled().await;
    system.shut_down();
    system.stopped().await;
    assert_eq!(pins.held(), 1, "it is left to the lease's end");
}

#[tokio::test]
async fn a_shutdown_releases_the_late_lease_of_an_abandoned_prefill() {
    let pins = PinnedBlocks::default();
    let (p, d) = pair(&pins, true, Action::Whole(1)).await;
    let config = config(&p, &d, "auto") + "\ntimeouts: {settle_ms: 1500}\n";
    let mut system = TestRouter::of(&config).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    p.wait("it prefills", |_| pins.held() == 1).await;
    client.hang_up(DISCONNECT_KINDS[0]);
    system.counts("baton_router_disconnects_total{phase=\"prefill\"}", 1.0).await;
    system.settled().await;
    system.shut_down();
    p.open_gate();
    system.stopped().await;
    assert_eq!(pins.held(), 0, "the refusal has freed it");
}

#[tokio::test]
async fn a_missing_abort_verb_is_tried_once_and_then_replaced_by_a_half_close() {
    replaced_by_a_half_close(404).await;
}

#[tokio::test]
async fn an_abort_path_that_is_not_the_contracts_is_a_missing_verb() {
    replaced_by_a_half_close(200).await;
}

async fn replaced_by_a_half_close(status: u16) {
    let pins = PinnedBlocks::default();
    let (p, d) = pair(&pins, true, Action::Whole(1)).await;
    p.verbs_answer(status);
    let system = TestRouter::of(&config(&p, &d, "auto")).await;
    let mut verbs_sent = 0;
    for round in 1..=4 {
        let mut client = Client::connect(system.address).await;
        client.post("/v1/completions", &completion(true)).await;
        p.wait("it prefills", |p| p.received().len() == round).await;
        client.hang_up(DISCONNECT_KINDS[round % 2]);
        let gone = f64::from(u32::try_from(round).unwrap());
        system.counts("baton_router_disconnects_total{phase=\"prefill\"}", gone).await;
        p.open_gate();
        d.wait("the refusal has freed it", |d| refusable(d).len() == round && pins.held() == 0).await;
        system.settled().await;
        if round == 1 {
            verbs_sent = verbs(&p);
        }
    }
    assert_eq!(verbs(&p), verbs_sent, "later rounds send no further verb");
    assert!((1..=2).contains(&verbs_sent), "{verbs_sent}");
}

#[tokio::test]
async fn a_lease_is_left_to_its_expiry_if_configured() {
    for release in ["lease", "verb"] {
        let pins = PinnedBlocks::default();
        let (p, d) = pair(&pins, false, refuse(400, "no")).await;
        // This D refuses without notifying P: a parser, or vLLM's Rust front end.
        let d = d.with_rule(|request| request.path.starts_with("/v1/").then(|| refuse(400, "no")));
        let system = TestRouter::of(&config(&p, &d, release)).await;
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 400);
        let series = "baton_router_releases_total{cause=\"decode_refused\",via=\"lease\"}";
        system.counts(series, 1.0).await;
        system.settled().await;
        assert_eq!((pins.held(), refusable(&d).len()), (1, 0), "{release}");
        assert_eq!(verbs(&p), usize::from(release == "verb"));
    }
}

#[tokio::test]
async fn a_release_by_refusal_goes_to_another_decode_engine_when_one_does_not_answer() {
    let pins = PinnedBlocks::default();
    let (p, d) = pair(&pins, false, Action::Whole(1)).await;
    let dead = FakeEngine::always(Action::Close).await;
    let sick = FakeEngine::always(refuse(500, "dead engine")).await;
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\nattempts: {{decode: 1}}\n\
         models: [{{name: m, prefill: {{engines: [{{url: '{}'}}]}}, \
         decode: {{policy: round_robin, engines: [{{url: '{}'}}, {{url: '{}'}}, {{url: '{}'}}]}}}}]",
        p.url(),
        dead.url(),
        sick.url(),
        d.url()
    );
    let system = TestRouter::of(&yaml).await;
    let answer = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!(answer.status, 502, "{}", answer.text());
    d.wait("it is freed all the same", |_| pins.held() == 0).await;
    system.settled().await;
    assert_eq!(refusable(&d).len(), 1);
}

#[tokio::test]
async fn a_release_by_refusal_is_retried_at_the_only_decode_engine() {
    let pins = PinnedBlocks::default();
    let (p, d) = pair(&pins, true, Action::Whole(1)).await;
    let (frees, tries) = (consume(&pins, Action::Whole(1)), AtomicUsize::new(0));
    // Like a decode engine with a delayed step, one before a restart, and one that read too slowly.
    let d = d.with_rule(move |request| match tries.load(Ordering::SeqCst) {
        _ if request.body["temperature"] != json!(-1) => frees(request),
        count @ 0..=2 => {
            tries.store(count + 1, Ordering::SeqCst);
            Some([Action::Hang, Action::Close, refuse(408, "slow")][count].clone())
        }
        _ => frees(request),
    });
    let yaml = format!("timeouts: {{settle_ms: 2000}}\n{}", config(&p, &d, "refused_decode"));
    let system = TestRouter::of(&yaml).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(true)).await;
    p.wait("it prefills", |p| !p.received().is_empty() && pins.held() == 1).await;
    client.hang_up(DISCONNECT_KINDS[0]);
    p.open_gate();
    d.wait("it is freed at the fourth try", |_| pins.held() == 0).await;
    system.settled().await;
    assert_eq!(refusable(&d).len(), 4);
    system.counts("baton_router_settlements_total{result=\"failed\"}", 0.0).await;
}

#[tokio::test]
async fn a_lease_is_ended_by_a_decode_engine_that_is_full() {
    let pins = PinnedBlocks::default();
    let (p, d) = pair(&pins, true, Action::Whole(1)).await;
    let yaml =
        config(&p, &d, "refused_decode").replace("decode: {", "decode: {capacity: {max_in_flight: 1}, ");
    let system = TestRouter::of(&yaml).await;
    let mut first = Client::connect(system.address).await;
    first.post("/v1/completions", &completion(true)).await;
    p.wait("it prefills", |p| p.received().len() == 1).await;
    let mut second = Client::connect(system.address).await;
    second.post("/v1/completions", &completion(false)).await;
    system.counts("baton_router_queue_requests{priority=\"normal\"}", 1.0).await;
    first.hang_up(DISCONNECT_KINDS[0]);
    p.wait("the second has the only place", |p| p.received().len() == 2).await;
    p.open_gate();
    d.wait("the first one's lease has ended", |d| refusable(d).len() == 1).await;
    p.open_gate();
    assert_eq!(second.answer().await.status, 200);
    system.settled().await;
    assert_eq!(pins.held(), 0);
}

#[tokio::test]
async fn after_the_loss_of_the_producer_the_prompt_is_recomputed_without_a_fault() {
    let (p, d, other) = {
        let pins = PinnedBlocks::default();
        let (p, d) = pair(&pins, false, Action::Whole(1)).await;
        let other = FakeEngine::always(Action::Hang).await.without_verbs();
        // The response of vLLM 0.32 after its producer was killed.
        let gone = |request: &ReceivedRequest| {
            let remote = request.body["kv_transfer_params"]["do_remote_prefill"] == true;
            let error = json!({"error": {"message": "Internal server error", "type": "InternalServerError",
                "param": null, "code": 500}});
            let action = if remote { Action::Refuse(500, error) } else { Action::Whole(1) };
            request.path.starts_with("/v1/").then_some(action)
        };
        (p, d.with_rule(gone), other.with_rule(gone))
    };
    for fallback in ["aggregate", "none"] {
        let yaml = format!(
            "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\n\
             health: {{active: {{interval_ms: 0}}, breaker: {{failures: 2}}}}\n\
             models: [{{name: m, fallback: {fallback}, prefill: {{engines: [{{url: '{}', release: lease}}]}}, \
             decode: {{policy: round_robin, engines: [{{url: '{}'}}, {{url: '{}'}}]}}}}]",
            p.url(),
            d.url(),
            other.url()
        );
        let system = TestRouter::of(&yaml).await;
        let decode_requests = || d.received().len() + other.received().len();
        for round in 1..=4 {
            let before = decode_requests();
            let answer = post(system.address, "/v1/completions", &completion(false)).await;
            let (times, text) = (decode_requests() - before, answer.text());
            if fallback == "aggregate" {
                assert_eq!((answer.status, times), (200, 2), "the dead handoff is sent to one: {text}");
            } else if round == 1 {
                // A second handoff fails as well, so the handoffs are not at fault.
                assert_eq!((answer.status, times), (502, 3), "{text}");
            }
        }
        system.settled().await;
        if fallback == "aggregate" {
            system.counts("baton_router_recomputes_total", 4.0).await;
            for engine in [&d, &other] {
                assert_eq!(crate::operations::health::standing(&system, engine, "decode").await, "usable");
            }
        }
    }
}

#[tokio::test]
async fn an_engine_of_both_pools_uses_the_prefill_pools_release_mode() {
    let pins = PinnedBlocks::default();
    let (p, d) = pair(&pins, false, refuse(400, "no")).await;
    let d = d.with_rule(|request| request.path.starts_with("/v1/").then(|| refuse(400, "no")));
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\n\
         models: [{{name: m, prefill: {{engines: [{{url: '{}', release: lease}}]}}, \
         decode: {{prefer: {{use: it}}, engines: [{{url: '{}', labels: {{use: it}}}}, {{url: '{}'}}]}}}}]",
        p.url(),
        d.url(),
        p.url()
    );
    let system = TestRouter::of(&yaml).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 400);
    system.counts("baton_router_releases_total{cause=\"decode_refused\",via=\"lease\"}", 1.0).await;
    system.settled().await;
    assert_eq!(verbs(&p), 0);
}
