//! A prefill engine with early handoffs: the decode attempt starts at once, and the rest of the prefill is tracked.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use crate::harness::client::{Client, DISCONNECT_KINDS, completion, get, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;

const PATH: &str = "/v1/completions";
const HANDLE: u128 = 0xea1;
/// The end of a successful response.
const END: &str = "data: {\"id\":\"p\"}\n\ndata: [DONE]\n\n";

fn released(cause: &str) -> Vec<(String, String)> {
    vec![(format!("{HANDLE:032x}"), cause.to_owned())]
}

#[tokio::test]
async fn an_early_handoff_starts_decode_while_prefill_computes() {
    let p = FakeEngine::always(Action::LeaseEarly(HANDLE, Some(END))).await;
    let d = FakeEngine::always(Action::WholeGated(3)).await;
    let system = TestRouter::start(&[&p], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.post(PATH, &completion(false)).await;
    d.wait("the decode leg", |d| d.received().len() == 1).await;
    assert_eq!(p.received()[0].headers["x-baton-early-handoff"], "1");
    assert_eq!(d.received()[0].body["kv_transfer_params"]["remote_handle"], format!("{HANDLE:032x}"));
    let engines = get(system.admin, "/engines").await.text();
    assert!(engines.contains("\"in_flight\":1"), "its place at the prefill engine is taken: {engines}");
    p.open_gate();
    d.open_gate();
    assert_eq!(client.answer().await.status, 200);
    system.settled().await;
    assert!(p.releases().is_empty() && p.aborts().is_empty() && p.cut() == 0);
    assert_eq!(p.received().len(), 1);
}

#[tokio::test]
async fn no_engine_gets_an_early_handoff_if_disabled() {
    let p = FakeEngine::always(Action::Lease(Some(HANDLE))).await;
    let d = FakeEngine::always(Action::Whole(3)).await;
    let system = TestRouter::with(&[&p], &[&d], "    early_handoff: false", "").await;
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    assert!(!p.received()[0].headers.contains_key("x-baton-early-handoff"));
}

#[tokio::test]
async fn a_cancel_ends_prefill_and_decode() {
    for how in DISCONNECT_KINDS {
        let p = FakeEngine::always(Action::LeaseEarly(HANDLE, Some(END))).await;
        let d = FakeEngine::always(Action::Hang).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        let mut client = Client::connect(system.address).await;
        client.post(PATH, &completion(true)).await;
        d.wait("the decode leg", |d| d.received().len() == 1).await;
        client.hang_up(how);
        p.wait("the release", |p| p.releases() == released("client_gone")).await;
        p.wait("the end of its answer", |p| p.cut() == 1).await;
        d.wait("the abort", |d| d.aborts().len() == 1).await;
        system.settled().await;
    }
}

#[tokio::test]
async fn a_prefill_failure_after_an_early_handoff_is_recovered_at_once() {
    let error_frame =
        "data: {\"error\":{\"message\":\"x\",\"type\":\"service_unavailable_error\"}}\n\ndata: [DONE]\n\n";
    for end in [None, Some(error_frame), Some("data: half")] {
        let p = FakeEngine::always(Action::LeaseEarly(HANDLE, end)).await;
        let d = FakeEngine::scripted(vec![Action::Hang, Action::Whole(3)]).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        let mut client = Client::connect(system.address).await;
        client.post(PATH, &completion(false)).await;
        d.wait("the decode leg", |d| d.received().len() == 1).await;
        p.open_gate();
        assert_eq!(client.answer().await.status, 200, "{end:?}");
        assert!(d.received()[1].body.get("kv_transfer_params").is_none(), "computed again");
        p.wait("the release", |p| p.releases() == released("unusable_handoff")).await;
        system.settled().await;
        assert_eq!((p.received().len(), d.aborts().len()), (1, 1));
    }
}

#[tokio::test]
async fn a_prefill_failure_after_an_early_handoff_moves_to_another_engine() {
    let requests = Arc::new(AtomicUsize::new(0));
    let engine = || async {
        let requests = Arc::clone(&requests);
        FakeEngine::always(Action::Hang).await.with_rule(move |request| {
            let first = request.path == PATH && requests.fetch_add(1, Ordering::SeqCst) == 0;
            let action = if first { Action::LeaseEarly(HANDLE, None) } else { Action::Lease(Some(7)) };
            (request.path == PATH).then_some(action)
        })
    };
    let (p, q) = (engine().await, engine().await);
    let d = FakeEngine::scripted(vec![Action::Hang, Action::Whole(3)]).await;
    let system = TestRouter::start(&[&p, &q], &[&d]).await;
    let mut client = Client::connect(system.address).await;
    client.post(PATH, &completion(false)).await;
    d.wait("the decode leg", |d| d.received().len() == 1).await;
    p.open_gate();
    q.open_gate();
    assert_eq!(client.answer().await.status, 200);
    assert_eq!((p.received().len(), q.received().len()), (1, 1), "the failed engine gets no second request");
    assert_eq!(d.received()[1].body["kv_transfer_params"]["remote_handle"], format!("{:032x}", 7));
    system.settled().await;
}

#[tokio::test]
async fn a_prefill_that_never_ends_is_given_up() {
    let p = FakeEngine::always(Action::LeaseEarly(HANDLE, Some(END))).await;
    let d = FakeEngine::scripted(vec![Action::Hang, Action::Whole(3)]).await;
    let system = TestRouter::with(&[&p], &[&d], "", "timeouts: {prefill_silence_ms: 300}").await;
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    p.wait("the release", |p| p.releases() == released("unusable_handoff")).await;
    p.wait("the end of its answer", |p| p.cut() == 1).await;
    system.settled().await;
}

#[tokio::test]
async fn a_failed_decode_engine_is_replaced_while_prefill_continues() {
    let p = FakeEngine::always(Action::LeaseEarly(HANDLE, Some(END))).await;
    let first = FakeEngine::always(Action::Refuse(503, json!({"error": {"message": "x"}}))).await;
    let second = FakeEngine::always(Action::WholeGated(5)).await;
    let system = TestRouter::start(&[&p], &[&first, &second]).await;
    let mut client = Client::connect(system.address).await;
    client.post(PATH, &completion(false)).await;
    second.wait("the decode leg", |d| d.received().len() == 1).await;
    p.open_gate();
    second.open_gate();
    assert_eq!(client.answer().await.status, 200);
    assert_eq!(p.received().len(), 1, "no second prefill");
    system.settled().await;
    assert!(p.releases().is_empty());
}

#[tokio::test]
async fn a_stream_that_does_not_begin_with_a_handoff_is_no_prefill() {
    for frames in
        ["data: {\"id\":\"p\"}\n\n", "data: [DONE]\n\n", "data: {\"kv_transfer_params\":{}}\n\n", ": x\n\n"]
    {
        let p = FakeEngine::always(Action::Frames(vec![frames.to_owned()], true)).await;
        let d = FakeEngine::always(Action::Whole(3)).await;
        let system = TestRouter::start(&[&p], &[&d]).await;
        assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200, "{frames}");
        assert!(d.received()[0].body.get("kv_transfer_params").is_none());
        system.settled().await;
    }
}
