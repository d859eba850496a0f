//! Engines that are stopped and started continuously under load: every response is complete, or a typed error before
//! the first byte that recommends a retry.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::harness::client::post;
use crate::harness::engine::{Action, FakeEngine, eventually};
use crate::harness::system::TestRouter;
use crate::harness::tokens;
use crate::harness::tokens::{StreamContent, read};

const CLIENTS: usize = 6;
const HANDLE: u128 = 0xabc;

fn request(client: usize, streamed: bool) -> Value {
    json!({"model": "m", "prompt": format!("client {client}"), "max_tokens": 6, "temperature": 0, "stream": streamed})
}

async fn decoder(at: Option<SocketAddr>) -> FakeEngine {
    let engine = match at {
        Some(at) => FakeEngine::back_at(at, Action::Hang).await,
        None => FakeEngine::always(Action::Hang).await,
    };
    engine.with_rule(|request| request.path.starts_with("/v1/").then(|| tokens::answer(request, "d")))
}

async fn leasing_engine(at: Option<SocketAddr>) -> FakeEngine {
    match at {
        Some(at) => FakeEngine::back_at(at, Action::Lease(Some(HANDLE))).await,
        None => FakeEngine::always(Action::Lease(Some(HANDLE))).await,
    }
}

#[derive(Default)]
struct OutcomeCounts {
    whole: AtomicUsize,
    /// Typed and retryable, before the head.
    refused: AtomicUsize,
    /// Typed, in the stream.
    broken: AtomicUsize,
}

/// Sends requests repeatedly; a response that is neither complete nor a typed error fails the test.
async fn client(
    address: SocketAddr,
    number: usize,
    expected: String,
    tally: Arc<OutcomeCounts>,
    stop: Arc<AtomicBool>,
) {
    let mut streamed = false;
    while !stop.load(Ordering::SeqCst) {
        streamed = !streamed;
        let answer = post(address, "/v1/completions", &request(number, streamed)).await;
        if answer.status != 200 {
            assert!(matches!(answer.status, 429 | 502 | 503 | 504), "{}: {}", answer.status, answer.text());
            assert!(!answer.code().is_empty());
            tally.refused.fetch_add(1, Ordering::SeqCst);
            continue;
        }
        let counted = if streamed {
            let StreamContent { text, finishes, dones, errors, .. } = read(&answer.text());
            assert_eq!(dones, 1);
            if errors == 0 {
                assert_eq!((text.as_str(), finishes), (expected.as_str(), 1));
                &tally.whole
            } else {
                // An engine may be stopped between the last piece of its response and `[DONE]`.
                assert!(errors == 1 && finishes <= 1, "{errors} errors, {finishes} ends");
                assert!(expected.starts_with(&text), "{text} is no part of {expected}");
                &tally.broken
            }
        } else {
            assert_eq!(answer.json()["choices"][0]["text"], expected.as_str());
            &tally.whole
        };
        counted.fetch_add(1, Ordering::SeqCst);
    }
}

async fn expected(number: usize) -> String {
    let d = decoder(None).await;
    let system = TestRouter::start(&[], &[&d]).await;
    read(&post(system.address, "/v1/completions", &request(number, true)).await.text()).text
}

/// Required for 1,000 restarts: the retry budget never refuses an attempt.
const GENEROUS: &str = "attempts: {prefill: 3, decode: 6}\nretries: {budget_percent: 1000, min_per_second: 100000, \
                        pause_ms: 2, pause_max_ms: 20}\nhealth: {active: {interval_ms: 0}, breaker: {cool_down_ms: \
                        2, cool_down_max_ms: 10}}";

async fn storm(restarts: usize, resume: bool, top: &str) -> Arc<OutcomeCounts> {
    let mut p = vec![leasing_engine(None).await, leasing_engine(None).await];
    let mut d = vec![decoder(None).await, decoder(None).await, decoder(None).await];
    let engines = |engines: &[FakeEngine]| engines.iter().map(FakeEngine::url).collect::<Vec<_>>();
    let all = [engines(&p), engines(&d)].concat();
    let model = format!("    resume: {resume}");
    let system =
        TestRouter::with(&p.iter().collect::<Vec<_>>(), &d.iter().collect::<Vec<_>>(), &model, top).await;
    let (tally, stop) = (Arc::<OutcomeCounts>::default(), Arc::new(AtomicBool::new(false)));
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        let expected = expected(number).await;
        clients.spawn(client(system.address, number, expected, Arc::clone(&tally), Arc::clone(&stop)));
    }
    let answers = |tally: &OutcomeCounts| {
        [&tally.whole, &tally.refused, &tally.broken]
            .map(|count| count.load(Ordering::SeqCst))
            .iter()
            .sum::<usize>()
    };
    for restart in 0..restarts {
        let before = answers(&tally);
        if restart % 5 < 2 {
            let one = p.remove(0);
            let at = one.address;
            one.die().await;
            p.push(leasing_engine(Some(at)).await);
        } else {
            let one = d.remove(0);
            let at = one.address;
            one.die().await;
            d.push(decoder(Some(at)).await);
        }
        eventually("the clients get answers", || answers(&tally) > before || clients.is_empty()).await;
    }
    stop.store(true, Ordering::SeqCst);
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    system.settled().await;
    assert_eq!(all.len(), 5);
    tally
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_restarts_under_load_leave_whole_answers_and_typed_errors_before_the_head() {
    let tally = storm(1000, true, GENEROUS).await;
    let [whole, refused, broken] =
        [&tally.whole, &tally.refused, &tally.broken].map(|count| count.load(Ordering::SeqCst));
    println!("{whole} whole, {refused} typed errors before the head, {broken} after it");
    assert_eq!(broken, 0, "no error after the head");
    assert!(whole > 1000 && refused * 10 < whole, "{whole} whole, {refused} refused");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_resuming_a_stream_whose_engine_is_restarted_ends_in_one_typed_error() {
    let tally = storm(100, false, GENEROUS).await;
    assert!(tally.whole.load(Ordering::SeqCst) > 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_the_defaults_a_response_is_whole_or_one_typed_error_under_engine_restarts() {
    // The retry budget is exhausted in such a storm. A request refused then gets a time for a retry, and a stream that
    // cannot be continued ends with one typed error.
    let tally = storm(60, true, "health: {}").await;
    let [whole, refused, broken] =
        [&tally.whole, &tally.refused, &tally.broken].map(|count| count.load(Ordering::SeqCst));
    println!("{whole} whole, {refused} typed errors before the head, {broken} after it");
    assert!(whole > 60, "{whole} whole, {refused} refused, {broken} broken");
}
