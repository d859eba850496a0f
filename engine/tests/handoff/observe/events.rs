//! `GET /debug/kv/events`: the observable events of a request on both engines, from its arrival to its last freed
//! block.

use std::time::Duration;

use baton_engine::run::options::Role;
use serde_json::{Value, json};

use crate::early::Early;
use crate::harness::cluster::{Cluster, LLAMA, Node, greedy, options, prefill_leg, prompt, with};
use crate::harness::http;

/// The events of a tag, in order, over all pages.
fn events_of(node: &Node, tag: &str) -> Vec<Value> {
    let (mut after, mut events) = (0, Vec::new());
    loop {
        let page = node.get(&format!("/debug/kv/events?after={after}&limit=7")).ok();
        assert_eq!(page["lost"], 0);
        let shown = page["events"].as_array().expect("events").clone();
        after = page["next"].as_u64().expect("a number");
        if shown.is_empty() {
            return events.into_iter().filter(|event: &Value| event["tag"] == tag).collect();
        }
        events.extend(shown);
    }
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["kind"].as_str().expect("a kind")).collect()
}

#[test]
fn events_cover_both_legs_from_arrival_to_the_last_freed_block() {
    let cluster = Cluster::with(LLAMA, |options| options.max_num_batched_tokens = 64);
    let body = with(&greedy(&prompt(1, 100), 4), "user", json!("me"));
    cluster.hand_over(&body);
    cluster.is_clean();
    let (p, d) = (events_of(&cluster.p, "me"), events_of(&cluster.d, "me"));
    let of_p = [
        "queued",
        "started",
        "computed",
        "computed",
        "first_token",
        "ended",
        "lease_opened",
        "replied",
        "lease_ended",
        "freed",
    ];
    assert_eq!(kinds(&p), of_p);
    let of_d = ["queued", "fetching", "fetched", "started", "computed", "first_token", "ended", "freed"];
    assert_eq!(kinds(&d), of_d);
    assert_eq!((&p[0]["leg"], &p[0]["prompt"]), (&json!("prefill"), &json!(100)));
    assert_eq!((&p[2]["tokens"], &p[3]["tokens"]), (&json!(64), &json!(100)));
    assert_eq!(p[5]["computed"], 100);
    assert_eq!(
        (&p[6]["blocks"], &p[8]["reason"], &p[9]["blocks"]),
        (&json!(13), &json!("transfer_done"), &json!(13))
    );
    assert_eq!(p[7]["result"], "sent");
    assert_eq!((&d[0]["leg"], &d[2]["result"]), (&json!("decode"), &json!("landed")));
    assert_eq!((&d[6]["outcome"], &d[6]["generated"]), (&json!("length"), &json!(4)));
    for events in [&p, &d] {
        assert!(events.windows(2).all(|two| two[0]["at_us"].as_u64() <= two[1]["at_us"].as_u64()));
        assert!(events.windows(2).all(|two| two[0]["seq"].as_u64() < two[1]["seq"].as_u64()));
    }
    // Both engines use one clock: the lease is read after it was opened.
    assert!(d[1]["at_us"].as_u64() >= p[6]["at_us"].as_u64());
}

#[test]
fn events_contain_the_cancel_and_the_last_freed_block() {
    let mut slow = options(LLAMA, Role::Prefill);
    (slow.pace, slow.max_num_batched_tokens) = (Some(Duration::from_millis(50)), 16);
    let p = Node::start(slow);
    let leaving = with(&greedy(&prompt(1, 120), 4), "user", json!("leaves"));
    let connection = http::send(
        p.http,
        "POST",
        "/v1/completions",
        &[("x-request-id", "a")],
        &prefill_leg(&leaving).to_string(),
    );
    p.wait_until("it does not run", |kv| kv["requests"]["running"] == 1);
    drop(connection);
    p.is_clean();
    let named = with(&greedy(&prompt(2, 120), 4), "user", json!("named"));
    std::thread::scope(|scope| {
        let call = scope.spawn(|| p.prefill("b", &named));
        p.wait_until("it does not run", |kv| kv["requests"]["running"] == 1);
        p.post("/abort_requests", &json!({"request_ids": ["b"]})).ok();
        call.join().expect("an answer").ok();
    });
    p.is_clean();
    for (tag, how) in [("leaves", "disconnect"), ("named", "verb")] {
        let events = events_of(&p, tag);
        let at = |kind: &str| kinds(&events).iter().position(|found| *found == kind);
        let abort = at("abort").unwrap_or_else(|| panic!("no abort in {events:?}"));
        assert_eq!(events[abort]["how"], how);
        assert!(
            at("started") < Some(abort) && Some(abort) < at("ended") && at("ended") < at("freed"),
            "{events:?}"
        );
        assert_eq!(events[at("ended").expect("it ended")]["outcome"], "abort");
        assert_eq!(kinds(&events).iter().filter(|kind| **kind == "freed").count(), 1, "{events:?}");
    }
}

#[test]
fn the_handoff_in_an_event_stream_has_no_replied_event() {
    let p = Node::start(options(LLAMA, Role::Prefill));
    let early = Early::begin(&p, &with(&greedy(&prompt(1, 96), 4), "user", json!("early")));
    let handle = early.params["remote_handle"].clone();
    early.end();
    p.post("/kv/release", &json!({"handle": handle})).ok();
    p.is_clean();
    let events = events_of(&p, "early");
    assert!(kinds(&events).contains(&"lease_ended") && !kinds(&events).contains(&"replied"), "{events:?}");
}

#[test]
fn an_event_query_waits_for_events_and_an_invalid_one_is_refused() {
    let node = Node::start(options(LLAMA, Role::Both));
    let latest = node.get("/debug/kv/events?after=latest").ok();
    assert_eq!((&latest["next"], &latest["events"]), (&json!(0), &json!([])));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| node.get("/debug/kv/events?after=0&wait_ms=10000").ok());
        let long = with(&greedy(&prompt(1, 40), 2), "user", json!("x".repeat(65)));
        node.generate("a", &long).ok();
        let first = waiting.join().expect("an answer");
        assert_eq!(
            (&first["events"][0]["kind"], &first["events"][0]["tag"]),
            (&json!("queued"), &Value::Null)
        );
    });
    for wrong in ["after=x", "wait_ms=10001", "limit=-1", "limit=10001"] {
        let reply = node.get(&format!("/debug/kv/events?{wrong}"));
        assert_eq!(reply.status, 400, "{wrong}: {}", reply.text);
    }
}
