//! Whether an engine lives: what flows counts, and it is asked once for all who wait.

use std::time::{Duration, Instant};

use crate::harness::client::{Client, completion, post};
use crate::harness::engine::{Act, FakeEngine};
use crate::harness::system::{System, asked};
use crate::operations::health::{standing, stands};

const PATH: &str = "/v1/completions";

/// Answers a request for a stream, and no other.
async fn busy() -> FakeEngine {
    FakeEngine::always(Act::Hang)
        .await
        .ruled(|seen| (seen.body["stream"] == true).then_some(Act::StreamWhenTold(100_000)))
        .deaf()
}

#[tokio::test]
async fn an_engine_whose_streams_flow_is_alive_although_it_leaves_questions_unanswered() {
    let d = busy().await;
    let top = "timeouts: {liveness_probe_ms: 20}\nhealth: {active: {interval_ms: 50, timeout_ms: 1000}}";
    let system = System::with(&[], &[&d], "", top).await;
    let mut streaming = Client::connect(system.address).await;
    streaming.post(PATH, &completion(true)).await;
    d.go_on();
    let address = system.address;
    let waiting = tokio::spawn(async move { post(address, PATH, &completion(false)).await.status });
    asked(&d, 2).await;
    // Longer than two questions of a request, which end after 2 s each, and many of the router's own.
    for _ in 0..500 {
        d.go_on();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!waiting.is_finished(), "a request was given up at a busy engine");
    assert!(d.health_asked() > 2, "it is asked for its health all the while");
    assert_eq!(standing(&system, &d, "decode").await, "usable");
    waiting.abort();
    // Nothing flows from here on.
    stands(&system, &d, "decode", "ejected").await;
}

#[tokio::test]
async fn an_engine_is_asked_once_for_all_requests_that_wait_for_it() {
    const PAUSE: Duration = Duration::from_millis(50);
    const QUESTIONS: usize = 10;
    let d = FakeEngine::always(Act::Hang).await;
    let top = "timeouts: {liveness_probe_ms: 50}\nhealth: {active: {interval_ms: 0}}";
    let system = System::with(&[], &[&d], "", top).await;
    let begun = Instant::now();
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut client = Client::connect(system.address).await;
        client.post(PATH, &completion(false)).await;
        clients.push(client);
    }
    asked(&d, 20).await;
    d.wait("it is asked", |d| d.health_asked() > QUESTIONS).await;
    let (took, least) = (begun.elapsed(), PAUSE * QUESTIONS as u32);
    assert!(took >= least, "{QUESTIONS} questions within {took:?}");
}

#[tokio::test]
async fn a_question_takes_no_kept_connection_from_the_requests() {
    let d = FakeEngine::always(Act::Whole(1)).await;
    let top = "timeouts: {engine_idle_ms: 3600000}\nhealth: {active: {interval_ms: 10}}";
    let system = System::with(&[], &[&d], "", top).await;
    assert_eq!(post(system.address, PATH, &completion(false)).await.status, 200);
    let questions = d.health_asked();
    d.wait("it is asked again and again", |d| d.health_asked() > questions + 5).await;
    let kept = d.open();
    assert!(kept >= 1, "the kept connection was used for a question and closed");
}
