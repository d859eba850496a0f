//! Engines that are stopped and started all the time, under load: every answer is whole, or a typed error that says
//! that trying again is worth it, before anything was sent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::harness::client::post;
use crate::harness::engine::{Act, FakeEngine, eventually};
use crate::harness::system::System;
use crate::harness::tokens;
use crate::harness::tokens::{Read, read};

const CLIENTS: usize = 6;
const HANDLE: u128 = 0xabc;

fn request(client: usize, streamed: bool) -> Value {
    json!({"model": "m", "prompt": format!("client {client}"), "max_tokens": 6, "temperature": 0, "stream": streamed})
}

async fn decoder(at: Option<SocketAddr>) -> FakeEngine {
    let engine = match at {
        Some(at) => FakeEngine::back_at(at, Act::Hang).await,
        None => FakeEngine::always(Act::Hang).await,
    };
    engine.ruled(|seen| seen.path.starts_with("/v1/").then(|| tokens::answer(seen, "d")))
}

async fn lender(at: Option<SocketAddr>) -> FakeEngine {
    match at {
        Some(at) => FakeEngine::back_at(at, Act::Lend(Some(HANDLE))).await,
        None => FakeEngine::always(Act::Lend(Some(HANDLE))).await,
    }
}

#[derive(Default)]
struct Tally {
    whole: AtomicUsize,
    /// Typed, retryable, before the head.
    refused: AtomicUsize,
    /// Typed, in the stream.
    broken: AtomicUsize,
}

/// Asks again and again; whatever is neither whole nor a typed error fails the test.
async fn client(
    address: SocketAddr,
    number: usize,
    expected: String,
    tally: Arc<Tally>,
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
            let Read { text, finishes, dones, errors, .. } = read(&answer.text());
            assert_eq!(dones, 1);
            if errors == 0 {
                assert_eq!((text.as_str(), finishes), (expected.as_str(), 1));
                &tally.whole
            } else {
                // An engine may be stopped between the last piece of its answer and `[DONE]`.
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
    let system = System::start(&[], &[&d]).await;
    read(&post(system.address, "/v1/completions", &request(number, true)).await.text()).text
}

/// As the 1,000 restarts need it: every attempt that is allowed to one request is allowed to all.
const GENEROUS: &str = "attempts: {prefill: 3, decode: 6}\nretries: {budget_percent: 1000, min_per_second: 100000, \
                        pause_ms: 2, pause_max_ms: 20}\nhealth: {active: {interval_ms: 0}, breaker: {cool_down_ms: \
                        2, cool_down_max_ms: 10}}";

async fn storm(restarts: usize, resume: bool, top: &str) -> Arc<Tally> {
    let mut p = vec![lender(None).await, lender(None).await];
    let mut d = vec![decoder(None).await, decoder(None).await, decoder(None).await];
    let engines = |engines: &[FakeEngine]| engines.iter().map(FakeEngine::url).collect::<Vec<_>>();
    let all = [engines(&p), engines(&d)].concat();
    let model = format!("    resume: {resume}");
    let system =
        System::with(&p.iter().collect::<Vec<_>>(), &d.iter().collect::<Vec<_>>(), &model, top).await;
    let (tally, stop) = (Arc::<Tally>::default(), Arc::new(AtomicBool::new(false)));
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        let expected = expected(number).await;
        clients.spawn(client(system.address, number, expected, Arc::clone(&tally), Arc::clone(&stop)));
    }
    let answers = |tally: &Tally| {
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
            p.push(lender(Some(at)).await);
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
async fn with_the_defaults_an_answer_is_whole_or_one_typed_error_however_many_engines_are_restarted() {
    // The budget of second attempts runs out in such a storm: what is refused then is refused with a time to come back,
    // and a stream that nobody may go on with ends in one typed error.
    let tally = storm(60, true, "health: {}").await;
    let [whole, refused, broken] =
        [&tally.whole, &tally.refused, &tally.broken].map(|count| count.load(Ordering::SeqCst));
    println!("{whole} whole, {refused} typed errors before the head, {broken} after it");
    assert!(whole > 60, "{whole} whole, {refused} refused, {broken} broken");
}
