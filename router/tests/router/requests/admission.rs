//! Full decode engines: waiting requests, their order, and the responses to refused ones.

use serde_json::json;

use crate::harness::client::{Client, DISCONNECT_KINDS, completion, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::{TestRouter, await_requests};

/// A decode engine that accepts one request at a time, and further lines of YAML.
async fn one_at_a_time(prefill: &[&FakeEngine], d: &FakeEngine, top: &str) -> TestRouter {
    let p: Vec<_> = prefill.iter().map(|p| format!("{{url: '{}'}}", p.url())).collect();
    TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - name: m\n    \
         prefill: {{engines: [{}]}}\n    decode: {{engines: [{{url: '{}', max_in_flight: 1}}]}}\n{top}\n",
        p.join(", "),
        d.url()
    ))
    .await
}

/// A client that has posted a completion.
async fn posted(system: &TestRouter, headers: &str) -> Client {
    let mut client = Client::connect(system.address).await;
    client.post_bytes("/v1/completions", headers, completion(false).to_string().as_bytes()).await;
    client
}

async fn waiting(system: &TestRouter, priority: &str, requests: f64) {
    system.counts(&format!("baton_router_queue_requests{{priority=\"{priority}\"}}"), requests).await;
}

fn outcome(label: &str) -> String {
    format!("baton_router_queue_outcomes_total{{outcome=\"{label}\"}}")
}

#[tokio::test]
async fn a_request_waits_for_a_decode_engine_and_no_prefill_is_spent_on_it_meanwhile() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::WholeGated(5)).await;
    let system = one_at_a_time(&[&p], &d, "").await;
    let mut first = posted(&system, "").await;
    await_requests(&d, 1).await;
    let mut second = posted(&system, "").await;
    waiting(&system, "normal", 1.0).await;
    assert_eq!((p.received().len(), d.received().len()), (1, 1));
    d.open_gate();
    assert_eq!(first.answer().await.status, 200);
    await_requests(&d, 2).await;
    d.open_gate();
    assert_eq!(second.answer().await.status, 200);
    assert_eq!(p.received().len(), 2);
    waiting(&system, "normal", 0.0).await;
    system.counts(&outcome("dispatched"), 1.0).await;
    system.settled().await;
}

#[tokio::test]
async fn a_cancel_in_the_queue_reaches_no_engine() {
    for how in DISCONNECT_KINDS {
        let p = FakeEngine::always(Action::Lease(Some(7))).await;
        let d = FakeEngine::always(Action::WholeGated(5)).await;
        let system = one_at_a_time(&[&p], &d, "").await;
        let mut first = posted(&system, "").await;
        await_requests(&d, 1).await;
        let second = posted(&system, "").await;
        waiting(&system, "normal", 1.0).await;
        let mut third = posted(&system, "").await;
        waiting(&system, "normal", 2.0).await;
        second.hang_up(how);
        waiting(&system, "normal", 1.0).await;
        system.counts(&outcome("client_gone"), 1.0).await;
        d.open_gate();
        d.open_gate();
        assert_eq!(first.answer().await.status, 200);
        assert_eq!(third.answer().await.status, 200, "the next one is not held up");
        assert_eq!((p.received().len(), d.received().len()), (2, 2));
        system.counts("baton_router_disconnects_total{phase=\"queue\"}", 1.0).await;
        system.settled().await;
        assert!(p.releases().is_empty() && p.aborts().is_empty() && d.aborts().is_empty());
    }
}

#[tokio::test]
async fn a_full_queue_is_429_with_retry_after() {
    let d = FakeEngine::always(Action::WholeGated(5)).await;
    let system = one_at_a_time(&[], &d, "queue: {requests: 1}").await;
    let mut first = posted(&system, "").await;
    await_requests(&d, 1).await;
    let mut second = posted(&system, "").await;
    waiting(&system, "normal", 1.0).await;
    let refused = post(system.address, "/v1/completions", &completion(false)).await;
    assert_eq!((refused.status, refused.code()), (429, "overloaded".to_owned()));
    let after: u64 = refused.header("retry-after-ms").unwrap().parse().unwrap();
    assert!((1..=60_000).contains(&after) && refused.header("retry-after").is_some());
    assert_eq!(refused.json()["error"]["type"], "overloaded_error");
    system.counts(&outcome("rejected_full"), 1.0).await;
    d.open_gate();
    d.open_gate();
    assert_eq!((first.answer().await.status, second.answer().await.status), (200, 200));
}

#[tokio::test]
async fn deadlines_come_from_the_configuration_and_from_the_clients_headers() {
    let d = FakeEngine::always(Action::WholeGated(5)).await;
    for (top, headers) in [
        ("queue: {timeout_ms: 50}", ""),
        ("", "x-stainless-read-timeout: 0.05\r\n"),
        ("", "x-request-timeout-ms: 50\r\n"),
    ] {
        let system = one_at_a_time(&[], &d, top).await;
        let before = d.received().len();
        let mut first = posted(&system, "").await;
        await_requests(&d, before + 1).await;
        let refused = posted(&system, headers).await.answer().await;
        assert_eq!((refused.status, refused.code()), (429, "queue_timeout".to_owned()), "{top} {headers}");
        assert!(refused.header("retry-after-ms").is_some());
        system.counts(&outcome("expired"), 1.0).await;
        d.open_gate();
        assert_eq!(first.answer().await.status, 200);
    }
    let system = one_at_a_time(&[], &d, "").await;
    let mut first = posted(&system, "").await;
    await_requests(&d, 4).await;
    let refused = posted(&system, "x-request-timeout-ms: 0\r\n").await.answer().await;
    assert_eq!((refused.status, refused.code()), (429, "overloaded".to_owned()), "at once");
    d.open_gate();
    assert_eq!(first.answer().await.status, 200);
}

#[tokio::test]
async fn a_high_priority_by_header_or_body_overtakes() {
    let d = FakeEngine::always(Action::WholeGated(5)).await;
    let system = one_at_a_time(&[], &d, "").await;
    let mut first = posted(&system, "").await;
    await_requests(&d, 1).await;
    let mut batch = posted(&system, "x-priority: low\r\n").await;
    waiting(&system, "low", 1.0).await;
    let mut urgent = Client::connect(system.address).await;
    let body = json!({"model": "m", "prompt": "urgent", "max_tokens": 8, "priority": -1});
    urgent.post("/v1/completions", &body).await;
    waiting(&system, "high", 1.0).await;
    d.open_gate();
    await_requests(&d, 2).await;
    assert_eq!(d.received()[1].body["prompt"], "urgent");
    d.open_gate();
    d.open_gate();
    for client in [&mut first, &mut batch, &mut urgent] {
        assert_eq!(client.answer().await.status, 200);
    }
}

#[tokio::test]
async fn bodies_are_bounded_in_sum_by_received_bytes() {
    let d = FakeEngine::always(Action::WholeGated(5)).await;
    let system = one_at_a_time(&[], &d, "limits: {body_bytes_total: 1048576}").await;
    let body = |bytes: usize| json!({"model": "m", "prompt": "x".repeat(bytes), "max_tokens": 1}).to_string();
    // Announced, hardly begun: it holds next to nothing.
    let mut slow = Client::connect(system.address).await;
    let large = body(700 << 10);
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", large.len());
    slow.send(head.as_bytes()).await;
    slow.send(&large.as_bytes()[..1000]).await;
    let mut first = Client::connect(system.address).await;
    first.post_bytes("/v1/completions", "", large.as_bytes()).await;
    await_requests(&d, 1).await;
    // The first body is held until its engine responds, so another one does not fit.
    let refused = {
        let mut third = Client::connect(system.address).await;
        let head =
            format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", large.len());
        third.send(head.as_bytes()).await;
        third.answer().await
    };
    assert_eq!((refused.status, refused.code()), (429, "overloaded".to_owned()), "before its body is read");
    assert!(refused.header("retry-after").is_some());
    d.open_gate();
    assert_eq!(first.answer().await.status, 200);
    slow.send(&large.as_bytes()[1000..]).await;
    d.open_gate();
    assert_eq!(slow.answer().await.status, 200);
    system.counts("baton_router_body_bytes", 0.0).await;
}

#[tokio::test]
async fn passthrough_requests_queue_like_others() {
    let d = FakeEngine::always(Action::WholeGated(5)).await;
    let system = one_at_a_time(&[], &d, "queue: {requests: 1}").await;
    let passed = async || {
        let mut client = Client::connect(system.address).await;
        client.post("/v1/embeddings", &json!({"model": "m", "input": "x"})).await;
        client
    };
    let mut first = posted(&system, "").await;
    await_requests(&d, 1).await;
    let mut second = passed().await;
    waiting(&system, "normal", 1.0).await;
    let third = passed().await.answer().await;
    assert_eq!((third.status, third.header("retry-after").is_some()), (429, true));
    d.open_gate();
    assert_eq!(first.answer().await.status, 200);
    await_requests(&d, 2).await;
    d.open_gate();
    assert_eq!(second.answer().await.status, 200);
    system.settled().await;
}

/// A prefill and a decode pool of these engines with `max_in_flight: 1`, and further lines of a model and of YAML.
async fn of_one(prefill: &[&FakeEngine], decode: &[&FakeEngine], model: &str, top: &str) -> TestRouter {
    let pool = |engines: &[&FakeEngine]| {
        let urls: Vec<_> = engines.iter().map(|e| format!("{{url: '{}'}}", e.url())).collect();
        format!("{{policy: round_robin, capacity: {{max_in_flight: 1}}, engines: [{}]}}", urls.join(", "))
    };
    TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\nmodels:\n  - name: m\n    \
         prefill: {}\n    decode: {}\n{model}\n{top}\n",
        pool(prefill),
        pool(decode)
    ))
    .await
}

#[tokio::test]
async fn a_full_prefill_pool_is_waited_for_and_no_decode_engine_prefills_instead() {
    let p = FakeEngine::always(Action::LeaseGated(Some(7))).await;
    let (d, e) = (FakeEngine::always(Action::Whole(5)).await, FakeEngine::always(Action::Whole(5)).await);
    let system = of_one(&[&p], &[&d, &e], "", "").await;
    let mut first = posted(&system, "").await;
    await_requests(&p, 1).await;
    let mut second = posted(&system, "").await;
    waiting(&system, "normal", 1.0).await;
    assert_eq!((d.received().len(), e.received().len()), (0, 0));
    p.open_gate();
    assert_eq!(first.answer().await.status, 200);
    await_requests(&p, 2).await;
    p.open_gate();
    assert_eq!(second.answer().await.status, 200);
    for engine in [&d, &e] {
        assert_eq!(engine.received()[0].body["kv_transfer_params"]["do_remote_prefill"], true);
    }
    system.counts("baton_router_disagg_decisions_total{decision=\"prefill_decode\"}", 2.0).await;
    system.settled().await;
}

#[tokio::test]
async fn a_full_prefill_pool_whose_queue_is_full_is_429_and_counts_as_not_admitted() {
    for fallback in ["", "    fallback: none"] {
        let p = FakeEngine::always(Action::LeaseGated(Some(7))).await;
        let (d, e) = (FakeEngine::always(Action::Whole(5)).await, FakeEngine::always(Action::Whole(5)).await);
        let system = of_one(&[&p], &[&d, &e], fallback, "queue: {requests: 0}").await;
        let mut first = posted(&system, "").await;
        await_requests(&p, 1).await;
        let refused = posted(&system, "").await.answer().await;
        assert_eq!((refused.status, refused.code()), (429, "overloaded".to_owned()), "{}", refused.text());
        assert!(refused.header("retry-after").is_some());
        system.counts("baton_router_requests_total{outcome=\"not_admitted\",code=\"4xx\"}", 1.0).await;
        p.open_gate();
        assert_eq!(first.answer().await.status, 200);
        assert_eq!((p.received().len(), d.received().len() + e.received().len()), (1, 1));
        system.settled().await;
    }
}

#[tokio::test]
async fn a_leg_that_has_no_engine_at_all_is_503_and_counts_as_no_engine() {
    for leg in ["decode", "prefill"] {
        let p = FakeEngine::always(Action::Lease(Some(7))).await;
        let d = FakeEngine::always(Action::Whole(5)).await;
        let system = of_one(&[&p], &[&d], "    fallback: none", "").await;
        let drained = if leg == "decode" { d.address } else { p.address };
        let order = format!("/engines/{drained}/drain");
        assert_eq!(post(system.admin, &order, &json!({})).await.status, 200);
        let refused = posted(&system, "").await.answer().await;
        assert_eq!((refused.status, refused.code()), (503, "unavailable".to_owned()), "{}", refused.text());
        assert!(refused.header("retry-after").is_some());
        system.counts("baton_router_requests_total{outcome=\"no_engine\",code=\"5xx\"}", 1.0).await;
        system.counts("baton_router_requests_total{outcome=\"not_admitted\"}", 0.0).await;
        assert_eq!((p.received().len(), d.received().len()), (0, 0), "{leg}");
        system.settled().await;
    }
}

#[tokio::test]
async fn an_engine_that_is_full_because_it_is_set_aside_to_decode_is_not_waited_for() {
    for (fallback, status) in [("", 200), ("    fallback: none", 429)] {
        let both = FakeEngine::always(Action::Whole(5)).await;
        let system = of_one(&[&both], &[&both], fallback, "").await;
        let answer = posted(&system, "").await.answer().await;
        assert_eq!(answer.status, status, "at once: {}", answer.text());
        let outcome = if status == 200 { "completed" } else { "not_admitted" };
        system.counts(&format!("baton_router_requests_total{{outcome=\"{outcome}\"}}"), 1.0).await;
        system.counts("baton_router_disagg_decisions_total", 1.0).await;
        system.settled().await;
    }
}

#[tokio::test]
async fn after_a_failure_a_full_decode_engine_is_awaited_with_the_same_handoff() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let full = FakeEngine::always(Action::WholeGated(5)).await;
    let broken = FakeEngine::always(Action::Refuse(503, json!({"error": {"message": "x"}}))).await;
    let system =
        of_one(&[&p, &FakeEngine::always(Action::Lease(Some(8))).await], &[&full, &broken], "", "").await;
    let mut first = posted(&system, "").await;
    await_requests(&full, 1).await;
    let mut second = posted(&system, "").await;
    await_requests(&broken, 1).await;
    waiting(&system, "normal", 1.0).await;
    full.open_gate();
    assert_eq!(first.answer().await.status, 200);
    await_requests(&full, 2).await;
    full.open_gate();
    assert_eq!(second.answer().await.status, 200);
    assert_eq!(full.received()[1].body, broken.received()[0].body, "the same handoff");
    system.settled().await;
}

fn busy() -> Action {
    Action::Refuse(503, json!({"error": {"message": "x"}}))
}

#[tokio::test]
async fn requests_overtake_a_retry_that_waits_for_a_busy_engine() {
    for with_lease in [true, false] {
        let p = FakeEngine::always(Action::Lease(Some(7))).await;
        let full = FakeEngine::always(Action::WholeGated(5)).await;
        // The engine refuses once, and serves the others.
        let idle =
            FakeEngine::scripted([busy()].into_iter().chain((0..20).map(|_| Action::Whole(5))).collect())
                .await;
        let prefill: &[&FakeEngine] = if with_lease { &[&p] } else { &[] };
        let system = of_one(prefill, &[&full, &idle], "", "").await;
        let mut first = posted(&system, "").await;
        await_requests(&full, 1).await;
        let mut again = posted(&system, "").await;
        await_requests(&idle, 1).await;
        waiting(&system, "normal", 1.0).await;
        for n in 0..20 {
            let answer = posted(&system, "").await.answer().await;
            assert_eq!(answer.status, 200, "{n}: {}", answer.text());
        }
        assert_eq!((full.received().len(), idle.received().len()), (1, 21));
        waiting(&system, "normal", 1.0).await;
        full.open_gate();
        assert_eq!(first.answer().await.status, 200);
        await_requests(&full, 2).await;
        full.open_gate();
        assert_eq!(again.answer().await.status, 200);
        system.settled().await;
    }
}

#[tokio::test]
async fn a_finished_prefill_has_the_whole_queue_timeout() {
    let p = FakeEngine::always(Action::LeaseGated(Some(7))).await;
    let full = FakeEngine::always(Action::WholeGated(5)).await;
    let broken = FakeEngine::always(busy()).await;
    let free = FakeEngine::always(Action::Lease(Some(8))).await;
    let system = of_one(&[&free, &p], &[&full, &broken], "", "queue: {timeout_ms: 1500}").await;
    let mut first = posted(&system, "").await;
    await_requests(&full, 1).await;
    let mut second = posted(&system, "").await;
    await_requests(&p, 1).await;
    // Longer than the limit on a wait; this is no wait.
    tokio::time::sleep(std::time::Duration::from_millis(1600)).await;
    p.open_gate();
    await_requests(&broken, 1).await;
    waiting(&system, "normal", 1.0).await;
    full.open_gate();
    assert_eq!(first.answer().await.status, 200);
    await_requests(&full, 2).await;
    full.open_gate();
    assert_eq!(second.answer().await.status, 200);
    assert_eq!((p.received().len(), p.releases().len()), (1, 0), "computed once, and used");
    system.settled().await;
}

#[tokio::test]
async fn a_release_for_busy_engines_has_that_reason() {
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let full = FakeEngine::always(Action::WholeGated(5)).await;
    let broken = FakeEngine::always(busy()).await;
    let free = FakeEngine::always(Action::Lease(Some(8))).await;
    let system = of_one(&[&free, &p], &[&full, &broken], "", "queue: {timeout_ms: 100}").await;
    let mut first = posted(&system, "").await;
    await_requests(&full, 1).await;
    let refused = posted(&system, "").await.answer().await;
    assert_eq!((refused.status, refused.code()), (429, "queue_timeout".to_owned()), "{}", refused.text());
    p.wait("the release", |p| p.releases() == [(format!("{:032x}", 7), "decode_busy".to_owned())]).await;
    full.open_gate();
    assert_eq!(first.answer().await.status, 200);
    system.settled().await;
}

#[tokio::test]
async fn a_request_has_no_longer_for_its_queue_and_its_body_than_for_itself() {
    let d = FakeEngine::always(Action::WholeGated(5)).await;
    let decode = format!("decode: {{engines: [{{url: '{}', max_in_flight: 1}}]}}", d.url());
    let system = TestRouter::of(&format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels:\n  - {{name: m, {decode}, \
         timeouts: {{request_ms: 100}}}}\n  - {{name: patient, {decode}}}\n"
    ))
    .await;
    let mut first = Client::connect(system.address).await;
    first.post("/v1/completions", &json!({"model": "patient", "prompt": "x"})).await;
    await_requests(&d, 1).await;
    let refused = posted(&system, "").await.answer().await;
    assert_eq!((refused.status, refused.code()), (429, "queue_timeout".to_owned()), "{}", refused.text());
    d.open_gate();
    assert_eq!(first.answer().await.status, 200);
    for (top, headers) in [("timeouts: {request_ms: 100}", ""), ("", "x-request-timeout-ms: 100\r\n")] {
        let system = one_at_a_time(&[], &d, top).await;
        let mut slow = Client::connect(system.address).await;
        slow.send(
            format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\n{headers}content-length: 100\r\n\r\n{{")
                .as_bytes(),
        )
        .await;
        let refused = slow.answer().await;
        assert_eq!(refused.status, 408, "{top}{headers}: {}", refused.text());
    }
}
