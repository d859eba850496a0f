//! The router's internal fields in a client's request reach no engine, on any path of a request.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::harness::client::Client;
use crate::harness::engine::{Action, FakeEngine, ReceivedRequest};
use crate::harness::system::TestRouter;
use crate::harness::tokens;
use crate::input::hostile_bodies::{HostileBody, TestRng, hostile, is_marked, resumable};

/// Number of bodies on each path.
const BODIES: usize = 400;

/// The reaction of a leg's engines to a request; the flag is true if one of them has received it before.
type ActionFn = fn(&ReceivedRequest, bool) -> Action;

/// One path of a request.
struct RequestPath {
    name: &'static str,
    prefill: ActionFn,
    decode: ActionFn,
    bodies: fn(&mut TestRng) -> HostileBody,
    /// Least number of 100 bodies for which a second engine of the leg is used: prefill, decode.
    again: (usize, usize),
}

fn down() -> Action {
    Action::Refuse(503, json!({}))
}

fn lease_reply(_: &ReceivedRequest, _: bool) -> Action {
    Action::Lease(Some(1))
}

fn whole(_: &ReceivedRequest, _: bool) -> Action {
    Action::Whole(1)
}

/// A stream that breaks off after its second piece; the engine of the continuation completes it.
fn breaks_off(request: &ReceivedRequest, _: bool) -> Action {
    let answer = tokens::answer(request, "d");
    match (answer, request.body["prompt"].is_array()) {
        (Action::Frames(mut frames, _), false) => {
            frames.truncate(4);
            Action::Frames(frames, false)
        }
        (answer, _) => answer,
    }
}

const PATHS: [RequestPath; 9] = [
    RequestPath {
        name: "lent and decoded",
        prefill: lease_reply,
        decode: whole,
        bodies: hostile,
        again: (0, 0),
    },
    RequestPath {
        name: "lent by a stock engine, and streamed",
        prefill: |_, _| Action::Lease(None),
        decode: |_, _| Action::Stream(2),
        bodies: hostile,
        again: (0, 0),
    },
    RequestPath {
        name: "nothing lent",
        prefill: |_, _| Action::Reply(Value::Null),
        decode: whole,
        bodies: hostile,
        again: (0, 0),
    },
    RequestPath {
        name: "prefill down",
        prefill: |_, _| down(),
        decode: whole,
        bodies: hostile,
        again: (40, 0),
    },
    RequestPath {
        name: "the first prefill engine closes",
        prefill: |_, again| if again { Action::Lease(Some(2)) } else { Action::Close },
        decode: whole,
        bodies: hostile,
        again: (40, 0),
    },
    RequestPath {
        name: "prefill's reply is damaged",
        prefill: |_, _| Action::Reply(json!({"do_remote_prefill": true})),
        decode: whole,
        bodies: hostile,
        again: (40, 0),
    },
    RequestPath {
        name: "the first decode engine refuses",
        prefill: lease_reply,
        decode: |_, again| if again { Action::Whole(1) } else { down() },
        bodies: hostile,
        again: (0, 80),
    },
    RequestPath {
        name: "the handoff is spent, and computed again",
        prefill: lease_reply,
        decode: |request, _| match &request.body["kv_transfer_params"] {
            Value::Null => Action::Whole(1),
            _ => Action::Refuse(503, json!({"error": {"code": "kv_gone", "message": "x"}})),
        },
        bodies: hostile,
        again: (0, 40),
    },
    RequestPath {
        name: "the stream breaks off, and another engine goes on",
        prefill: lease_reply,
        decode: breaks_off,
        bodies: resumable,
        again: (0, 95),
    },
];

/// Two engines of one leg that share the set of received requests.
async fn pair(does: ActionFn) -> [FakeEngine; 2] {
    let known = Arc::new(Mutex::new(HashSet::new()));
    let engine = async || {
        let known = Arc::clone(&known);
        FakeEngine::always(Action::Hang).await.with_rule(move |request| {
            let id = request.headers.get("x-request-id")?.to_str().unwrap().to_owned();
            let is_verb = request.path == "/kv/release" || request.path == "/abort_requests";
            (!is_verb).then(|| does(request, !known.lock().unwrap().insert(id)))
        })
    };
    [engine().await, engine().await]
}

#[tokio::test]
async fn thousands_of_hostile_bodies_over_sockets_add_no_internal_field() {
    let mut rng = TestRng(20_261_120);
    for path in PATHS {
        let name = path.name;
        let (p, d) = (pair(path.prefill).await, pair(path.decode).await);
        // Engines stay in rotation despite failures, so that each body takes the whole path.
        let top = "retries: {budget_percent: 1000, min_per_second: 1000000}\n\
                   health: {active: {interval_ms: 0}, outlier: {interval_ms: 0}, breaker: {failures: 1000, \
                   cool_down_ms: 1, cool_down_max_ms: 1}}";
        let system = TestRouter::with(
            &[&p[0], &p[1]],
            &[&d[0], &d[1]],
            "    resume: true\n    responses: native",
            top,
        )
        .await;
        let mut client = Client::connect(system.address).await;
        let (mut arrive, mut stay) = (Vec::new(), Vec::new());
        let mut served = 0;
        for _ in 0..BODIES {
            let HostileBody { path, body, expected_texts, refused } = (path.bodies)(&mut rng);
            let headers = "x-data-parallel-rank: 902109021\r\nx-baton-MARKER: 1\r\n";
            client.post_bytes(path, headers, body.as_bytes()).await;
            let answer = client.answer().await;
            assert_eq!(answer.status >= 400, refused, "{name}: {path} {body}: {}", answer.text());
            assert!(answer.status < 500, "{name}: {path} {body}: {}", answer.text());
            served += usize::from(!refused);
            if refused { stay.extend(expected_texts) } else { arrive.extend(expected_texts) }
        }
        assert!(served * 100 >= BODIES * 90, "{name}: {served} were served");
        let all: Vec<ReceivedRequest> = p.iter().chain(&d).flat_map(FakeEngine::all).collect();
        let sent: Vec<_> = all.iter().map(|request| request.raw.clone()).collect();
        let sent = String::from_utf8(sent.concat()).expect("JSON is text");
        let found: HashSet<&str> = sent.match_indices("keep").map(|(at, _)| &sent[at..at + 16]).collect();
        assert_eq!(arrive.iter().find(|text| !found.contains(text.as_str())), None, "{name}: is missing");
        assert_eq!(stay.iter().find(|text| found.contains(text.as_str())), None, "{name}: was sent");
        for request in &all {
            assert!(
                !is_marked(&request.raw),
                "{name}: {}: {}",
                request.path,
                String::from_utf8_lossy(&request.raw)
            );
            for (header, value) in &request.headers {
                let line =
                    format!("{header}: {}", String::from_utf8_lossy(value.as_bytes())).to_ascii_uppercase();
                assert!(!line.contains("MARKER") && !line.contains("902109021"), "{name}: {line}");
            }
        }
        for (leg, engines, least) in [("prefill", &p, path.again.0), ("decode", &d, path.again.1)] {
            let requests: usize = engines.iter().map(count_requests).sum();
            let mut once: HashSet<_> =
                engines.iter().flat_map(FakeEngine::all).map(|request| root(&request)).collect();
            once.remove("");
            let again = requests - once.len();
            assert!(again * 100 >= BODIES * least, "{name}: {again} were repeated at {leg}");
        }
    }
}

fn count_requests(engine: &FakeEngine) -> usize {
    engine.all().iter().filter(|request| !root(request).is_empty()).count()
}

/// The original id of a request; empty for verbs.
fn root(request: &ReceivedRequest) -> String {
    if request.path == "/kv/release" || request.path == "/abort_requests" {
        return String::new();
    }
    let id = request.headers.get("x-request-id").map_or("", |id| id.to_str().unwrap());
    id.trim_end_matches("-2").to_owned()
}
