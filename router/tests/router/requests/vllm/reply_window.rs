//! The reply window of a stock prefill engine: it drops a finished reply once it has seen the half-close, and its blocks
//! stay pinned. The router waits for a reply that is due, and half-closes at once if none is due.

use std::time::Duration;

use crate::harness::client::{Client, DISCONNECT_KINDS, completion, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;
use crate::requests::vllm::stock_engine::{PinnedBlocks, config, consume, produce, refusable};

const WAITS: &str = "baton_router_abandon_waits_total";

/// A pair whose P drops the reply of a half-closed connection. Each reply needs an opened gate.
async fn pair(pins: &PinnedBlocks) -> (FakeEngine, FakeEngine) {
    let p = FakeEngine::always(Action::Hang).await.without_verbs().with_rule(produce(pins, true));
    let d = FakeEngine::always(Action::Hang).await.without_verbs().with_rule(consume(pins, Action::Whole(1)));
    (p, d)
}

async fn router(p: &FakeEngine, d: &FakeEngine, release: &str, wait_ms: u64) -> TestRouter {
    TestRouter::of(&format!("{}\ntimeouts: {{abandon_wait_ms: {wait_ms}}}\n", config(p, d, release))).await
}

/// One complete request, from whose prefill the router learns its time.
async fn learn(system: &TestRouter, p: &FakeEngine) {
    p.open_gate();
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
}

/// Sends a request and disconnects during its prefill.
async fn abandon(system: &TestRouter, p: &FakeEngine) {
    let before = p.received().len();
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(false)).await;
    p.wait("it prefills", |p| p.received().len() == before + 1).await;
    client.hang_up(DISCONNECT_KINDS[0]);
    system.counts("baton_router_disconnects_total{phase=\"prefill\"}", 1.0).await;
}

#[tokio::test]
async fn a_reply_that_is_due_is_awaited_instead_of_lost_by_a_half_close() {
    for release in ["auto", "refused_decode"] {
        let pins = PinnedBlocks::default();
        let (p, d) = pair(&pins).await;
        let system = router(&p, &d, release, 10_000).await;
        learn(&system, &p).await;
        abandon(&system, &p).await;
        assert_eq!((p.cut(), pins.held()), (0, 1), "{release}: its connection is open");
        p.open_gate();
        d.wait("the refusal has freed it", |_| pins.held() == 0).await;
        system.settled().await;
        assert_eq!((p.cut(), refusable(&d).len()), (0, 1), "{release}");
        let series = "baton_router_releases_total{cause=\"late_reply\",via=\"refused_decode\"}";
        system.counts(series, 1.0).await;
        assert_eq!(system.metric(&format!("{WAITS}{{result=\"timeout\"}}")).await, 0.0);
        if release == "refused_decode" {
            // With `auto`, the reply may arrive before the answer to the first abort.
            system.counts(&format!("{WAITS}{{result=\"reply\"}}"), 1.0).await;
            system.counts("baton_router_abandon_wait_seconds_count", 1.0).await;
        }
    }
}

#[tokio::test]
async fn a_wait_for_a_reply_ends_at_its_bound_with_the_half_close() {
    for release in ["auto", "refused_decode"] {
        let pins = PinnedBlocks::default();
        let (p, d) = pair(&pins).await;
        let system = router(&p, &d, release, 300).await;
        learn(&system, &p).await;
        abandon(&system, &p).await;
        p.wait("the engine sees the end", |p| p.cut() == 1).await;
        system.counts(&format!("{WAITS}{{result=\"timeout\"}}"), 1.0).await;
        system.settled().await;
        assert!(system.metric("baton_router_abandon_wait_seconds_sum").await >= 0.3, "{release}");
        assert_eq!(system.metric(&format!("{WAITS}{{result=\"reply\"}}")).await, 0.0);
        system.counts("baton_router_abandon_wait_bound_seconds", 0.3).await;
    }
}

#[tokio::test]
async fn without_an_estimate_or_with_a_bound_of_zero_the_half_close_follows_at_once() {
    for (learns, wait_ms) in [(false, 10_000), (true, 0)] {
        let pins = PinnedBlocks::default();
        let (p, d) = pair(&pins).await;
        let system = router(&p, &d, "refused_decode", wait_ms).await;
        if learns {
            learn(&system, &p).await;
        }
        abandon(&system, &p).await;
        p.wait("the engine sees the end", |p| p.cut() == 1).await;
        system.settled().await;
        assert_eq!(system.metric(WAITS).await, 0.0, "{learns} {wait_ms}");
    }
}

#[tokio::test]
async fn a_prefill_whose_reply_is_far_is_aborted_at_once() {
    let pins = PinnedBlocks::default();
    let (p, d) = pair(&pins).await;
    let system = router(&p, &d, "refused_decode", 1_000).await;
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(false)).await;
    p.wait("it prefills", |p| p.received().len() == 1).await;
    // The prefill takes this time: longer than half of the bound, and not so long that the first estimate is in doubt.
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    p.open_gate();
    assert_eq!(client.answer().await.status, 200);
    abandon(&system, &p).await;
    p.wait("the engine sees the end", |p| p.cut() == 1).await;
    system.settled().await;
    assert_eq!(system.metric(WAITS).await, 0.0);
}

#[tokio::test]
async fn the_error_of_an_estimate_is_a_metric_of_stock_prefill_engines_only() {
    let series = "baton_router_prefill_estimate_error_seconds_count";
    let pins = PinnedBlocks::default();
    let (p, d) = pair(&pins).await;
    let system = router(&p, &d, "auto", 20).await;
    for times in 0..3_u32 {
        learn(&system, &p).await;
        system.counts(series, f64::from(times)).await;
    }
    let p = FakeEngine::always(Action::Lease(Some(7))).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    for _ in 0..3 {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    }
    assert_eq!(system.metric(series).await, 0.0, "its leases have handles");
}

#[tokio::test]
async fn an_engine_with_the_abort_verb_is_aborted_by_it_without_a_wait() {
    // A stock form of its replies, so that the router knows their times.
    let p = FakeEngine::scripted(vec![Action::Lease(None), Action::Hang]).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system =
        TestRouter::with(&[&p], &[&d], "", "timeouts: {settle_ms: 300, abandon_wait_ms: 10000}").await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 200);
    abandon(&system, &p).await;
    p.wait("the abort", |p| p.aborts().len() == 1).await;
    p.wait("the connection is cut after the bounded wait", |p| p.cut() == 1).await;
    system.settled().await;
    assert_eq!(system.metric(WAITS).await, 0.0);
    system.counts("baton_router_settlements_total{result=\"confirmed\"}", 1.0).await;
}

#[tokio::test]
async fn an_engine_that_has_only_the_release_verb_gets_a_release_by_request_id() {
    let p = FakeEngine::scripted(vec![Action::Lease(Some(7)), Action::Hang]).await;
    let p = p.with_rule(|request| {
        let error = serde_json::json!({"error": {"message": "not found"}});
        (request.path == "/abort_requests").then_some(Action::Refuse(404, error))
    });
    let refuses = Action::Refuse(400, serde_json::json!({"error": {"message": "x"}}));
    let d = FakeEngine::always(refuses).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 400);
    system.counts("baton_router_settlements_total{result=\"confirmed\"}", 1.0).await;
    abandon(&system, &p).await;
    p.wait("the engine sees the end", |p| p.cut() == 1).await;
    system.settled().await;
    let releases: Vec<_> = p.all().into_iter().filter(|request| request.path == "/kv/release").collect();
    let id = p.received()[1].headers["x-request-id"].clone();
    assert_eq!(
        (releases.len(), &releases[1].body["request_id"]),
        (2, &serde_json::json!(id.to_str().unwrap()))
    );
    system.counts("baton_router_settlements_total{result=\"confirmed\"}", 2.0).await;
}

#[tokio::test]
async fn a_prefill_engine_replaced_by_another_kind_is_settled_in_the_new_way() {
    const HANDLE: u128 = 0xabc;
    let refuses = Action::Refuse(400, serde_json::json!({"error": {"message": "x"}}));
    let leases = [None, Some(HANDLE), None].map(Action::Lease);
    let p = FakeEngine::scripted(leases.into());
    let (p, d) = (p.await.without_verbs(), FakeEngine::always(refuses).await);
    let system = TestRouter::start(&[&p], &[&d]).await;
    let ask = async || {
        assert_eq!(post(system.address, "/v1/completions", &completion(false)).await.status, 400);
        system.settled().await;
    };
    let released = |via: &str| format!("baton_router_releases_total{{via=\"{via}\"}}");
    // A stock engine: the abort by request id is missing, and a decode engine refuses the handoff.
    ask().await;
    system.counts(&released("refused_decode"), 1.0).await;
    // An engine with handles: the release verb is used although a verb was missing a moment ago.
    p.verbs_answer(0);
    ask().await;
    assert_eq!(p.releases().len(), 1);
    system.counts(&released("release"), 1.0).await;
    // A stock engine again: one missing verb is enough, although the engine had a verb before.
    p.verbs_answer(404);
    ask().await;
    system.counts(&released("refused_decode"), 2.0).await;
    assert_eq!((p.aborts().len(), p.releases().len()), (2, 1), "each verb is tried once");
}
