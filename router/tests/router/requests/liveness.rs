//! Liveness of engines: received bytes count, and one probe serves all waiting requests.

use std::time::{Duration, Instant};

use crate::harness::client::{Client, completion, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::{TestRouter, await_requests};
use crate::operations::health::{standing, stands};

const PATH: &str = "/v1/completions";

/// Answers requests for a stream, and no others.
async fn busy() -> FakeEngine {
    FakeEngine::always(Action::Hang)
        .await
        .with_rule(|request| (request.body["stream"] == true).then_some(Action::StreamGated(100_000)))
        .unresponsive()
}

#[tokio::test]
async fn an_engine_with_flowing_streams_is_alive_despite_unanswered_probes() {
    let d = busy().await;
    let top = "timeouts: {liveness_probe_ms: 20}\nhealth: {active: {interval_ms: 50, timeout_ms: 1000}}";
    let system = TestRouter::with(&[], &[&d], "", top).await;
    let mut streaming = Client::connect(system.address).await;
    streaming.post(PATH, &completion(true)).await;
    d.open_gate();
    let address = system.address;
    let waiting = tokio::spawn(async move { post(address, PATH, &completion(false)).await.status });
    await_requests(&d, 2).await;
    // Longer than two probes of a request, which end after 2 s each, and many of the router's own.
    for _ in 0..500 {
        d.open_gate();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!waiting.is_finished(), "a request was given up at a busy engine");
    assert!(d.probes() > 2, "it is probed all the while");
    assert_eq!(standing(&system, &d, "decode").await, "usable");
    waiting.abort();
    // No bytes arrive from here on.
    stands(&system, &d, "decode", "ejected").await;
}

#[tokio::test]
async fn one_liveness_probe_serves_all_waiting_requests() {
    const PAUSE: Duration = Duration::from_millis(50);
    const QUESTIONS: usize = 10;
    let d = FakeEngine::always(Action::Hang).await;
    let top = "timeouts: {liveness_probe_ms: 50}\nhealth: {active: {interval_ms: 0}}";
    let system = TestRouter::with(&[], &[&d], "", top).await;
    let begun = Instant::now();
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = Client::connect(system.address).await;
        client.post(PATH, &completion(false)).await;
        clients.push(client);
    }
    await_requests(&d, 20).await;
    d.wait("it is probed", |d| d.probes() > QUESTIONS).await;
    let (took, least) = (begun.elapsed(), PAUSE * QUESTIONS as u32);
    assert!(took >= least, "{QUESTIONS} questions within {took:?}");
}

#[tokio::test]
async fn a_liveness_probe_takes_no_idle_connection() {
    let d = FakeEngine::always(Action::Whole(1)).await;
    let top = "timeouts: {engine_idle_ms: 3600000}\nhealth: {active: {interval_ms: 10}}";
    let system = TestRouter::with(&[], &[&d], "", top).await;
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    let questions = d.probes();
    d.wait("it is probed repeatedly", |d| d.probes() > questions + 5).await;
    let kept = d.open();
    assert!(kept >= 1, "the kept connection was used for a question and closed");
}
