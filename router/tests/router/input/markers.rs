//! What a client says in the router's words reaches no engine, on any path that a request can take.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::harness::client::Client;
use crate::harness::engine::{Act, FakeEngine, Seen};
use crate::harness::system::System;
use crate::harness::tokens;
use crate::input::hostile::{Dice, Hostile, hostile, is_marked, resumable};

/// Bodies on each path.
const BODIES: usize = 400;

/// What engines of one leg do with a request, by whether one of them has seen it before.
type Does = fn(&Seen, bool) -> Act;

/// A way in which a request can go.
struct Path {
    name: &'static str,
    prefill: Does,
    decode: Does,
    bodies: fn(&mut Dice) -> Hostile,
    /// Of 100 bodies, that a second engine of the leg was asked for, at least: prefill, decode.
    again: (usize, usize),
}

fn down() -> Act {
    Act::Refuse(503, json!({}))
}

fn lend(_: &Seen, _: bool) -> Act {
    Act::Lend(Some(1))
}

fn whole(_: &Seen, _: bool) -> Act {
    Act::Whole(1)
}

/// A stream that breaks off after its second piece; whoever is asked to go on does.
fn breaks_off(seen: &Seen, _: bool) -> Act {
    let answer = tokens::answer(seen, "d");
    match (answer, seen.body["prompt"].is_array()) {
        (Act::Frames(mut frames, _), false) => {
            frames.truncate(4);
            Act::Frames(frames, false)
        }
        (answer, _) => answer,
    }
}

const PATHS: [Path; 9] = [
    Path { name: "lent and decoded", prefill: lend, decode: whole, bodies: hostile, again: (0, 0) },
    Path {
        name: "lent by a stock engine, and streamed",
        prefill: |_, _| Act::Lend(None),
        decode: |_, _| Act::Stream(2),
        bodies: hostile,
        again: (0, 0),
    },
    Path {
        name: "nothing lent",
        prefill: |_, _| Act::Reply(Value::Null),
        decode: whole,
        bodies: hostile,
        again: (0, 0),
    },
    Path { name: "prefill down", prefill: |_, _| down(), decode: whole, bodies: hostile, again: (40, 0) },
    Path {
        name: "the first prefill engine closes",
        prefill: |_, again| if again { Act::Lend(Some(2)) } else { Act::Close },
        decode: whole,
        bodies: hostile,
        again: (40, 0),
    },
    Path {
        name: "prefill's reply is damaged",
        prefill: |_, _| Act::Reply(json!({"do_remote_prefill": true})),
        decode: whole,
        bodies: hostile,
        again: (40, 0),
    },
    Path {
        name: "the first decode engine refuses",
        prefill: lend,
        decode: |_, again| if again { Act::Whole(1) } else { down() },
        bodies: hostile,
        again: (0, 80),
    },
    Path {
        name: "the handoff is spent, and computed anew",
        prefill: lend,
        decode: |seen, _| match &seen.body["kv_transfer_params"] {
            Value::Null => Act::Whole(1),
            _ => Act::Refuse(503, json!({"error": {"code": "kv_gone", "message": "x"}})),
        },
        bodies: hostile,
        again: (0, 40),
    },
    Path {
        name: "the stream breaks off, and another engine goes on",
        prefill: lend,
        decode: breaks_off,
        bodies: resumable,
        again: (0, 95),
    },
];

/// Two engines of one leg that share what they have seen.
async fn pair(does: Does) -> [FakeEngine; 2] {
    let known = Arc::new(Mutex::new(HashSet::new()));
    let engine = async || {
        let known = Arc::clone(&known);
        FakeEngine::always(Act::Hang).await.ruled(move |seen| {
            let id = seen.headers.get("x-request-id")?.to_str().unwrap().to_owned();
            let is_verb = seen.path == "/kv/release" || seen.path == "/abort_requests";
            (!is_verb).then(|| does(seen, !known.lock().unwrap().insert(id)))
        })
    };
    [engine().await, engine().await]
}

#[tokio::test]
async fn thousands_of_hostile_bodies_over_sockets_leave_no_trace_at_any_engine() {
    let mut dice = Dice(20_261_120);
    for path in PATHS {
        let name = path.name;
        let (p, d) = (pair(path.prefill).await, pair(path.decode).await);
        // Engines stay in use whatever they do, so that each body goes the whole way.
        let top = "retries: {budget_percent: 1000, min_per_second: 1000000}\n\
                   health: {active: {interval_ms: 0}, outlier: {interval_ms: 0}, breaker: {failures: 1000, \
                   cool_down_ms: 1, cool_down_max_ms: 1}}";
        let system = System::with(&[&p[0], &p[1]], &[&d[0], &d[1]], "    resume: true", top).await;
        let mut client = Client::connect(system.address).await;
        let (mut arrive, mut stay) = (Vec::new(), Vec::new());
        let mut served = 0;
        for _ in 0..BODIES {
            let Hostile { path, body, kept, refused } = (path.bodies)(&mut dice);
            let headers = "x-data-parallel-rank: 902109021\r\nx-baton-MARKER: 1\r\n";
            client.post_bytes(path, headers, body.as_bytes()).await;
            let answer = client.answer().await;
            assert_eq!(answer.status >= 400, refused, "{name}: {path} {body}: {}", answer.text());
            assert!(answer.status < 500, "{name}: {path} {body}: {}", answer.text());
            served += usize::from(!refused);
            if refused { stay.extend(kept) } else { arrive.extend(kept) }
        }
        assert!(served * 100 >= BODIES * 90, "{name}: {served} were served");
        let all: Vec<Seen> = p.iter().chain(&d).flat_map(FakeEngine::all).collect();
        let sent: Vec<_> = all.iter().map(|seen| seen.raw.clone()).collect();
        let sent = String::from_utf8(sent.concat()).expect("JSON is text");
        let found: HashSet<&str> = sent.match_indices("keep").map(|(at, _)| &sent[at..at + 16]).collect();
        assert_eq!(arrive.iter().find(|text| !found.contains(text.as_str())), None, "{name}: is missing");
        assert_eq!(stay.iter().find(|text| found.contains(text.as_str())), None, "{name}: was sent");
        for seen in &all {
            assert!(!is_marked(&seen.raw), "{name}: {}: {}", seen.path, String::from_utf8_lossy(&seen.raw));
            for (header, value) in &seen.headers {
                let line =
                    format!("{header}: {}", String::from_utf8_lossy(value.as_bytes())).to_ascii_uppercase();
                assert!(!line.contains("MARKER") && !line.contains("902109021"), "{name}: {line}");
            }
        }
        for (leg, engines, least) in [("prefill", &p, path.again.0), ("decode", &d, path.again.1)] {
            let asked: usize = engines.iter().map(answers_asked).sum();
            let mut once: HashSet<_> =
                engines.iter().flat_map(FakeEngine::all).map(|seen| root(&seen)).collect();
            once.remove("");
            let again = asked - once.len();
            assert!(again * 100 >= BODIES * least, "{name}: {again} were asked for again at {leg}");
        }
    }
}

fn answers_asked(engine: &FakeEngine) -> usize {
    engine.all().iter().filter(|seen| !root(seen).is_empty()).count()
}

/// The name under which a request came first; empty for verbs.
fn root(seen: &Seen) -> String {
    if seen.path == "/kv/release" || seen.path == "/abort_requests" {
        return String::new();
    }
    let id = seen.headers.get("x-request-id").map_or("", |id| id.to_str().unwrap());
    id.trim_end_matches("-2").to_owned()
}
