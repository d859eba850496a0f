//! Clients that disconnect in every phase, by FIN and by RST: engines receive exactly the required aborts and releases.

use serde_json::json;

use crate::harness::client::{Client, DISCONNECT_KINDS, DisconnectKind, completion, get};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::{TestRouter, await_requests};

const HANDLE: u128 = 0xabc;

fn handle() -> String {
    format!("{HANDLE:032x}")
}

async fn begin(system: &TestRouter, stream: bool) -> Client {
    let mut client = Client::connect(system.address).await;
    client.post("/v1/completions", &completion(stream)).await;
    client
}

fn id(engine: &FakeEngine) -> String {
    engine.received()[0].headers["x-request-id"].to_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_cancel_during_prefill_aborts_the_prefill_engine_only() {
    for how in DISCONNECT_KINDS {
        let p = FakeEngine::always(Action::Hang).await;
        let d = FakeEngine::always(Action::Whole(1)).await;
        let top = "timeouts: {settle_ms: 300}";
        let system = TestRouter::with(&[&p], &[&d], "", top).await;
        let client = begin(&system, true).await;
        await_requests(&p, 1).await;
        client.hang_up(how);
        p.wait("the abort", |p| !p.aborts().is_empty()).await;
        assert_eq!(p.aborts(), [id(&p)]);
        p.wait("the connection is cut after the bounded wait", |p| p.cut() == 1).await;
        system.settled().await;
        assert!(p.releases().is_empty() && d.all().is_empty(), "{how:?}");
        system.counts("baton_router_disconnects_total{phase=\"prefill\"}", 1.0).await;
    }
}

#[tokio::test]
async fn a_handle_that_crosses_the_abort_is_released() {
    for how in DISCONNECT_KINDS {
        let p = FakeEngine::always(Action::LeaseGated(Some(HANDLE))).await;
        let d = FakeEngine::always(Action::Whole(1)).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        let client = begin(&system, true).await;
        await_requests(&p, 1).await;
        client.hang_up(how);
        p.wait("the abort", |p| !p.aborts().is_empty()).await;
        p.open_gate();
        p.wait("the release", |p| !p.releases().is_empty()).await;
        assert_eq!(p.releases(), [(handle(), "late_reply".to_owned())]);
        system.settled().await;
        assert_eq!((p.aborts().len(), p.releases().len(), p.cut()), (1, 1, 0), "{how:?}");
        assert!(d.all().is_empty());
    }
}

#[tokio::test]
async fn a_prefill_engine_without_the_verbs_sees_a_half_close_and_is_read_on() {
    let p = FakeEngine::always(Action::Hang).await.without_verbs();
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let client = begin(&system, true).await;
    await_requests(&p, 1).await;
    let begun = std::time::Instant::now();
    client.hang_up(DisconnectKind::Fin);
    // hyper treats a half-close as the end, as vLLM's server does; the bounded wait alone is 5 s.
    p.wait("the engine sees the end", |p| p.cut() == 1).await;
    assert!(begun.elapsed().as_secs() < 2);
    system.settled().await;
    assert_eq!(p.aborts().len(), 1, "an engine without the verb gets no second abort");
    system.counts("baton_router_settlements_total{result=\"unsupported\"}", 1.0).await;
}

#[tokio::test]
async fn a_cancel_before_acceptance_is_settled_at_both_engines() {
    for how in DISCONNECT_KINDS {
        let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
        let d = FakeEngine::always(Action::Hang).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        let client = begin(&system, true).await;
        await_requests(&d, 1).await;
        client.hang_up(how);
        d.wait("the decode engine is cut", |d| d.cut() == 1).await;
        d.wait("the abort", |d| !d.aborts().is_empty()).await;
        p.wait("the release", |p| !p.releases().is_empty()).await;
        system.settled().await;
        assert_eq!(p.releases(), [(handle(), "client_gone".to_owned())]);
        assert_eq!((d.aborts(), p.aborts().len()), (vec![id(&d)], 0), "{how:?}");
        system.counts("baton_router_disconnects_total{phase=\"decode_pre_first\"}", 1.0).await;
    }
}

#[tokio::test]
async fn a_cancel_after_acceptance_is_settled_at_the_decode_engine_only() {
    for how in DISCONNECT_KINDS {
        for events in [0, 2] {
            let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
            let d = FakeEngine::always(Action::StreamGated(10)).await;
            let system = TestRouter::start(&[&p], &[&d]).await;
            let mut client = begin(&system, true).await;
            for n in 0..events {
                d.open_gate();
                if n == 0 {
                    assert_eq!(client.head().await.0, 200);
                }
                client.chunk().await.unwrap();
            }
            // Before the first event the client has received nothing.
            await_requests(&d, 1).await;
            let account = format!("/explain/{}", id(&d));
            while !get(system.admin, &account).await.text().contains("\"accepted\"") {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            client.hang_up(how);
            d.wait("the decode engine is cut", |d| d.cut() == 1).await;
            d.wait("the abort", |d| d.aborts().len() == 1).await;
            system.settled().await;
            assert!(p.aborts().is_empty() && p.releases().is_empty(), "the decode engine settles with P");
            let phase = if events == 0 { "decode_pre_first" } else { "decode_stream" };
            let series = format!("baton_router_disconnects_total{{phase=\"{phase}\"}}");
            system.counts(&series, 1.0).await;
        }
    }
}

#[tokio::test]
async fn an_answer_that_is_not_streamed_is_aborted_too() {
    for how in DISCONNECT_KINDS {
        let p = FakeEngine::always(Action::Lease(None)).await;
        let d = FakeEngine::always(Action::WholeGated(1)).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        let client = begin(&system, false).await;
        await_requests(&d, 1).await;
        client.hang_up(how);
        d.wait("the decode engine is cut", |d| d.cut() == 1).await;
        d.wait("the abort", |d| d.aborts().len() == 1).await;
        // A stock engine returned no handle: only the request's id identifies the lease.
        p.wait("the abort at P", |p| p.aborts().len() == 1).await;
        system.settled().await;
        assert!(p.releases().is_empty(), "{how:?}");
    }
}

#[tokio::test]
async fn a_cancel_between_the_legs_or_at_random_moments_is_fully_settled() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::Stream(50)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    for n in 0..200_u64 {
        let client = begin(&system, true).await;
        // 0 to 2 ms in steps of 10 µs: the whole duration of such a request.
        tokio::time::sleep(std::time::Duration::from_micros(n * 10)).await;
        client.hang_up(if n % 2 == 0 { DisconnectKind::Fin } else { DisconnectKind::Rst });
    }
    system.settled().await;
    let total: f64 = {
        let mut sum = 0.0;
        for outcome in ["completed", "client_gone"] {
            sum += system.metric(&format!("baton_router_requests_total{{outcome=\"{outcome}\"}}")).await;
        }
        sum
    };
    assert!(total > 0.0);
    // Every lease was used by a decode engine that accepted the request, or was released.
    let leased = p.received().len();
    let given_back = p.releases().len() + p.aborts().len();
    assert!(
        given_back + d.received().len() >= leased,
        "{leased} lent, {given_back} back, {} taken",
        d.received().len()
    );
}

#[tokio::test]
async fn a_cancel_of_a_connections_second_request_is_detected() {
    let p = FakeEngine::scripted(vec![Action::Lease(Some(1)), Action::Hang]).await;
    let d = FakeEngine::always(Action::Whole(1)).await;
    let system = TestRouter::with(&[&p], &[&d], "", "timeouts: {settle_ms: 200}").await;
    let mut client = begin(&system, false).await;
    assert_eq!(client.answer().await.status, 200);
    client
        .post("/v1/chat/completions", &json!({"model": "m", "messages": [{"role": "user", "content": "x"}]}))
        .await;
    await_requests(&p, 2).await;
    client.hang_up(DisconnectKind::Fin);
    p.wait("the abort", |p| p.aborts().len() == 1).await;
    system.settled().await;
}

#[tokio::test]
async fn a_prefill_that_was_given_up_on_a_kept_connection_is_not_sent_again() {
    for verbs in [true, false] {
        let p = FakeEngine::scripted(vec![Action::Lease(Some(HANDLE)), Action::Hang]).await;
        let p = if verbs { p } else { p.without_verbs() };
        let d = FakeEngine::always(Action::Whole(1)).await;
        let system = TestRouter::with(&[&p], &[&d], "", "timeouts: {settle_ms: 300}").await;
        let mut client = begin(&system, false).await;
        assert_eq!(client.answer().await.status, 200);
        assert_eq!(p.connections(), 1);
        client.post("/v1/completions", &completion(true)).await;
        await_requests(&p, 2).await;
        assert_eq!(p.connections(), 1, "the second request came on the kept connection");
        client.hang_up(DisconnectKind::Fin);
        // The engine treats a half-close as the end: it closes the connection without an answer.
        p.wait("the engine sees the end", |p| p.cut() == 1).await;
        system.settled().await;
        assert_eq!(p.received().len(), 2, "with the verbs: {verbs}");
    }
}
