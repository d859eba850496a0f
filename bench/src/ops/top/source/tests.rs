//! Routers with scripted responses, queried by the same code as in the program.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::super::history::History;
use super::*;

/// An admin listener with a list of responses. The last is repeated.
async fn admin(status: u16, answers: Vec<Value>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let place = listener.local_addr().expect("an address").to_string();
    let answers = Arc::new(Mutex::new(VecDeque::from(answers)));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream, status, Arc::clone(&answers)));
        }
    });
    place
}

async fn answer(mut stream: TcpStream, status: u16, answers: Arc<Mutex<VecDeque<Value>>>) {
    let mut asked = Vec::new();
    while let Ok(1..) = stream.read_buf(&mut asked).await {
        if !asked.ends_with(b"\r\n\r\n") {
            continue;
        }
        asked.clear();
        let body = {
            let mut answers = answers.lock().expect("no thread panics");
            let next = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
            next.unwrap_or_default().to_string()
        };
        let response = format!("HTTP/1.1 {status} OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        if stream.write_all(response.as_bytes()).await.is_err() {
            return;
        }
    }
}

fn sources(admins: &[&str]) -> Sources {
    let admins: Vec<String> = admins.iter().map(|&admin| admin.to_owned()).collect();
    Sources::new(&admins, &[], None, None).expect("addresses")
}

/// A router's observation of one engine, with the number of leases ended so far.
fn look(engine: &str, at_us: u64, ended: u64) -> Value {
    json!({"at_us": at_us, "routers": [{}], "engines": [{"engine": engine, "at_us": at_us, "epoch": "e",
        "source": "debug_kv", "releases": {"transfer_done": ended}}]})
}

/// As of routers that do not report observation times of engines.
fn older(mut look: Value) -> Value {
    look["engines"][0].as_object_mut().expect("an engine").remove("at_us");
    look
}

/// The rate that is shown after each snapshot.
async fn rates(sources: &Sources, looks: usize) -> Vec<f64> {
    let mut history = History::default();
    let mut rates = Vec::new();
    for _ in 0..looks {
        history.look(&sources.snapshot().await);
        rates.push(history.ended_per_second());
    }
    rates
}

#[tokio::test]
async fn a_repeated_sample_keeps_the_rate() {
    // 40 per second. The router observes when its observation is older than a second: at every second query.
    let at = |seconds: u64| look("p:1", 1_763_812_345_000_000 + seconds * 1_000_000, 1_000 + 40 * seconds);
    let observed = vec![at(0), at(0), at(2), at(2), at(3), at(5), at(5), at(5)];
    let expected = [0.0, 0.0, 40.0, 40.0, 40.0, 40.0, 40.0, 40.0];
    for answers in [observed.clone(), observed.into_iter().map(older).collect()] {
        let place = admin(200, answers).await;
        assert_eq!(rates(&sources(&[&place]), expected.len()).await, expected);
    }
}

#[tokio::test]
async fn each_router_has_its_own_samples_and_clock() {
    // 40 per second at one engine, 10 at the other, whose clock is an hour behind and whose observations are at
    // other times.
    let p = |seconds: u64| look("p:1", 9_000_000_000 + seconds * 1_000_000, 40 * seconds);
    let q = |seconds: u64| look("p:2", 5_400_500_000 + seconds * 1_000_000, 10 * seconds);
    let one = admin(200, vec![p(0), p(0), p(2), p(2), p(4), p(4)]).await;
    let two = admin(200, vec![q(0), q(1), q(1), q(3), q(3), q(3)]).await;
    let sources = sources(&[&one, &two]);
    assert_eq!(rates(&sources, 6).await, [0.0, 10.0, 50.0, 50.0, 50.0, 50.0]);
    let snapshot = sources.snapshot().await;
    let seen: Vec<_> = snapshot.engines.iter().map(|e| (e.at_us, e.observed_by.as_str())).collect();
    assert_eq!(seen, [(9_004_000_000, one.as_str()), (5_403_500_000, two.as_str())]);
}

#[tokio::test]
async fn an_engine_from_another_router_starts_a_new_rate() {
    // The first router loses the engine. The other router's clock is half a second behind.
    let silent = |at_us: u64| json!({"at_us": at_us, "routers": [{}], "engines": [{"engine": "p:1", "at_us": at_us, "error": "late"}]});
    let one =
        admin(200, vec![look("p:1", 10_000_000, 400), look("p:1", 11_000_000, 440), silent(12_000_000)])
            .await;
    let two = vec![look("p:1", 9_500_000, 400), look("p:1", 10_500_000, 440), look("p:1", 11_500_000, 480)];
    let two = admin(200, [two, vec![look("p:1", 12_500_000, 530)]].concat()).await;
    assert_eq!(rates(&sources(&[&one, &two]), 5).await, [0.0, 40.0, 40.0, 50.0, 50.0]);
}

#[tokio::test]
async fn a_request_timeline_comes_from_its_router() {
    let events = [EngineEvents {
        engine: "p:1".to_owned(),
        events: vec![json!({"seq": 1, "at_us": 1_000_400, "request_id": "a", "kind": "queued", "prompt": 4})],
        ..EngineEvents::default()
    }];
    let account = json!({"id": "a", "began_us": 1_000_000, "took_us": 9_000, "status": 200, "outcome": "ok", "steps": []});
    let whole = Timeline::join("a", Some(&account), &events);
    let engines_only = Timeline::join("a", None, &events);
    let page = |line: &Timeline| vec![serde_json::to_value(line).expect("JSON")];
    let stranger = admin(200, page(&engines_only)).await;
    let owner = admin(200, page(&whole)).await;
    let forgot = admin(404, vec![json!({})]).await;
    for admins in [[&stranger, &owner], [&owner, &stranger], [&forgot, &owner]] {
        let line = sources(&admins.map(String::as_str)).timeline("a").await;
        assert_eq!(line.as_ref(), Ok(&whole), "{admins:?}");
    }
    let line = sources(&[&forgot, &stranger]).timeline("a").await;
    assert_eq!(line.as_ref(), Ok(&engines_only), "better than nothing");
    let broken = admin(500, vec![json!({})]).await;
    let line = sources(&[&broken, &stranger]).timeline("a").await.expect("what engines know");
    assert_eq!((line.moments.len(), line.notes.len()), (1, 1), "the router that may have the steps is named");
    assert!(line.notes[0].contains(&broken), "{:?}", line.notes);
    let line = sources(&[&forgot, &forgot]).timeline("a").await;
    assert_eq!(line, Err("no known router has this request".to_owned()));
}
