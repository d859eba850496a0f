//! Two cores in one process, as producer and consumer.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{LAYOUT, PROMPT, TestCore, until};
use crate::signals::VERDICTS;

const P: &str = "cmpl-x-0-0a1b2c3d";
const D: &str = "cmpl-x-0-1a1b2c3d";

/// A core whose side channel is served.
fn core(settings: &Value) -> TestCore {
    let core = TestCore::start(settings);
    core.call(&json!({"op": "layout", "layout": LAYOUT}));
    core
}

fn pair() -> (TestCore, TestCore) {
    (core(&json!({})), core(&json!({})))
}

/// Lends blocks 5, 6 and 7 of a producer, and returns its handoff.
fn lend(producer: &TestCore, id: &str, consumers: u64) -> Value {
    producer.queued(id, "r", "prefill");
    let lease = producer.offer(id, &json!([[5, 6, 7]]), consumers);
    assert!(lease["handle"].is_string(), "{lease}");
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[5, 6, 7]],
        "remote_engine_id": "e", "remote_request_id": id, "remote_host": "127.0.0.1", "remote_port": 5600,
        "tp_size": 1, "remote_num_tokens": 33, "remote_handle": lease["handle"],
        "remote_epoch": lease["epoch"], "remote_lease_left_ms": lease["left_ms"],
        "remote_channel_port": producer.channel_port, "remote_layout": LAYOUT, "remote_prompt": PROMPT[..16],
        "remote_block_size": 16, "remote_consumers": consumers,
    })
}

fn admit(consumer: &TestCore, id: &str, params: &Value) -> Value {
    consumer.call(&json!({"op": "admit", "id": id, "params": params, "prompt": PROMPT,
        "tokens": params["remote_num_tokens"], "block_tokens": 16, "groups": 1}))
}

fn begin(consumer: &TestCore, id: &str) {
    consumer.call(&json!({"op": "begin", "id": id, "count": 3}));
}

fn leave(consumer: &TestCore, id: &str, reason: &str) {
    consumer.call(&json!({"op": "leave", "id": id, "reason": reason}));
}

fn state(consumer: &TestCore, id: &str) -> Value {
    consumer.call(&json!({"op": "state", "id": id}))["state"].clone()
}

/// The final verdicts on some loads.
fn done(consumer: &TestCore, ids: &[&str]) -> Vec<(String, String)> {
    let reply = consumer.call(&json!({"op": "done", "ids": ids, "wait_us": 2_000}));
    let mut verdicts = reply["verdicts"].as_array().expect("a list").clone();
    let is_pending = |verdict: &Value| verdict["verdict"] == "pending";
    until("every verdict arrives", || {
        if verdicts.iter().any(is_pending) {
            let taken = consumer.take()["verdicts"].as_array().expect("a list").clone();
            for verdict in &mut verdicts {
                if let Some(taken) = taken.iter().find(|taken| taken["id"] == verdict["id"]) {
                    *verdict = taken.clone();
                }
            }
        }
        !verdicts.iter().any(is_pending)
    });
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    verdicts.iter().map(|verdict| (text(&verdict["verdict"]), text(&verdict["reason"]))).collect()
}

fn valid() -> (String, String) {
    ("valid".into(), "live".into())
}

fn gone(reason: &str) -> (String, String) {
    ("gone".into(), reason.into())
}

#[test]
fn a_read_is_verified_and_ends_the_lease() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    let admitted = admit(&consumer, D, &params);
    assert_eq!((&admitted["load"], &admitted["params"]["remote_request_id"]), (&json!(true), &json!(P)));
    until("the producer is asked", || state(&consumer, D) == "live");
    begin(&consumer, D);
    assert_eq!(done(&consumer, &[D]), [valid()]);
    assert_eq!(producer.ended()[0]["cause"], "transfer_done");
    assert_eq!(consumer.stats()["loads"], 0);
    assert_eq!((state(&consumer, D), done(&consumer, &[D])), (json!("none"), vec![gone("unknown")]));
    let (_, metrics) = consumer.http("GET", "/metrics", "");
    let transfers = "baton_kv_transfers_total{model_name=\"m\",engine=\"0\",transport=\"nixl\"} 1";
    assert!(metrics.contains(transfers), "{metrics}");
}

#[test]
fn many_blocks_are_compared_in_batches() {
    let (producer, consumer) = pair();
    let blocks: Vec<u32> = (1..30_000).collect();
    producer.queued(P, "r", "prefill");
    let lease = producer.offer(P, &json!([blocks]), 1);
    let mut params = lend(&producer, "cmpl-other-0-0a1b2c3d", 1);
    for (key, of_lease) in [("remote_handle", "handle"), ("remote_epoch", "epoch")] {
        params[key] = lease[of_lease].clone();
    }
    params["remote_block_ids"] = json!([blocks]);
    params["remote_num_tokens"] = json!(16 * blocks.len());
    params["remote_request_id"] = json!(P);
    assert_eq!(admit(&consumer, D, &params)["load"], true);
    begin(&consumer, D);
    assert_eq!(done(&consumer, &[D]), [valid()]);
    // Only the last id differs.
    let lease = {
        let id = "cmpl-third-0-0a1b2c3d";
        producer.queued(id, "r", "prefill");
        producer.offer(id, &json!([blocks]), 1)
    };
    let mut other = blocks;
    *other.last_mut().expect("an id") = 0;
    params["remote_handle"] = lease["handle"].clone();
    params["remote_request_id"] = json!("cmpl-third-0-0a1b2c3d");
    params["remote_block_ids"] = json!([other]);
    assert_eq!(admit(&consumer, D, &params)["load"], true);
    begin(&consumer, D);
    assert_eq!(done(&consumer, &[D]), [gone("forged")]);
}

#[test]
fn a_lease_that_is_released_before_the_read_is_gone() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    producer.verb("/kv/release", &json!({"handle": params["remote_handle"]}));
    assert_eq!(admit(&consumer, D, &params)["load"], true);
    until("the producer has answered", || state(&consumer, D) == "gone");
    assert_eq!(consumer.call(&json!({"op": "state", "id": D}))["reason"], "lease_over");
    consumer.queued(D, "r", "decode");
    begin(&consumer, D);
    assert_eq!(done(&consumer, &[D]), [gone("lease_over")]);
    consumer.events(&json!([{"id": D, "kind": "fetched", "result": "gone", "reason": "lease_over"}]));
    let (_, metrics) = consumer.http("GET", "/metrics", "");
    let labels = "model_name=\"m\",engine=\"0\",policy=\"recompute\",reason=\"gone\"";
    let failures = format!("baton_kv_load_failures_total{{{labels}}} 1\n");
    assert!(metrics.contains(&failures), "once, by the report of the Python half:\n{metrics}");
}

#[test]
fn a_producer_that_never_answers_is_given_up_when_its_lease_has_expired() {
    let (producer, consumer) = pair();
    let mut params = lend(&producer, P, 1);
    let closed = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    params["remote_channel_port"] = json!(closed.expect("a free port").port());
    params["remote_lease_left_ms"] = json!(300);
    admit(&consumer, D, &params);
    until("the load is given up", || state(&consumer, D) == "gone");
    assert_eq!(consumer.call(&json!({"op": "state", "id": D}))["reason"], "unreachable");
}

#[test]
fn a_lease_that_is_released_in_mid_read_drains_and_its_read_is_valid() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    admit(&consumer, D, &params);
    begin(&consumer, D);
    until("the read is open", || producer.stats()["channel"]["reads"] == 1);
    let release = json!({"handle": params["remote_handle"]});
    assert_eq!(producer.verb("/kv/release", &release)["result"], "draining");
    assert_eq!(done(&consumer, &[D]), [valid()]);
    assert_eq!(producer.ended()[0]["cause"], "transfer_done");
}

#[test]
fn a_lease_that_ended_during_the_read_is_gone() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    admit(&consumer, D, &params);
    until("the producer is asked", || state(&consumer, D) == "live");
    // The read was not begun: the release ends the lease at once.
    producer.verb("/kv/release", &json!({"handle": params["remote_handle"]}));
    assert_eq!(done(&consumer, &[D]), [gone("lease_over")]);
}

#[test]
fn a_verdict_that_is_late_arrives_by_the_signal() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    admit(&consumer, D, &params);
    begin(&consumer, D);
    let reply = consumer.call(&json!({"op": "done", "ids": [D], "wait_us": 0}));
    if reply["verdicts"][0]["verdict"] == "pending" {
        until("the signal is raised", || consumer.pending() & VERDICTS == VERDICTS);
        let verdict = json!([{"id": D, "verdict": "valid", "reason": "live"}]);
        assert_eq!(consumer.take()["verdicts"], verdict);
    }
    assert_eq!(consumer.take()["verdicts"], json!([]));
    assert_eq!(consumer.pending() & VERDICTS, 0);
}

#[test]
fn a_producer_that_has_ended_gives_no_verdict() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    admit(&consumer, D, &params);
    begin(&consumer, D);
    until("the read is open", || producer.stats()["channel"]["reads"] == 1);
    drop(producer);
    let begun = Instant::now();
    let verdicts = done(&consumer, &[D]);
    assert!(verdicts[0].0 == "gone", "{verdicts:?}");
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    assert_eq!(consumer.stats()["loads"], 0);
}

#[test]
fn a_producer_that_started_again_has_no_lease_of_before() {
    let (producer, consumer) = pair();
    let mut params = lend(&producer, P, 1);
    params["remote_epoch"] = json!("0123456789abcdef");
    admit(&consumer, D, &params);
    until("the producer has answered", || state(&consumer, D) == "gone");
    leave(&consumer, D, "lease_gone");
    assert_eq!(consumer.stats()["loads"], 0);
}

#[test]
fn forged_block_ids_fail_the_load_and_free_the_lease() {
    let (producer, consumer) = pair();
    let mut params = lend(&producer, P, 1);
    params["remote_block_ids"] = json!([[5, 6, 8]]);
    admit(&consumer, D, &params);
    begin(&consumer, D);
    assert_eq!(done(&consumer, &[D]), [gone("forged")]);
    assert_eq!(producer.ended()[0]["reason"], "load_failed");
    // A second request cannot change the ids either.
    let mut params = lend(&producer, "cmpl-y-0-0a1b2c3d", 1);
    admit(&consumer, "0_cmpl-y-0-1a1b2c3d", &params);
    params["remote_block_ids"] = json!([[5, 6, 8]]);
    let second = admit(&consumer, "1_cmpl-y-0-1a1b2c3d", &params);
    assert!(second["invalid"].as_str().is_some_and(|why| why.contains("remote_block_ids")), "{second}");
}

#[test]
fn a_handoff_that_names_another_engine_to_nixl_is_gone_before_a_read() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    for (field, value) in [
        ("remote_engine_id", json!("another producer of this host")),
        ("remote_port", json!(5601)),
        ("tp_size", json!(2)),
    ] {
        let mut forged = params.clone();
        forged[field] = value;
        assert_eq!(admit(&consumer, D, &forged)["load"], true);
        let reply = consumer.call(&json!({"op": "state", "id": D, "wait_us": 10_000_000}));
        assert_eq!(reply["state"], "gone", "{field}");
        begin(&consumer, D);
        assert_eq!(done(&consumer, &[D])[0].0, "gone", "{field}");
    }
    // The lease is untouched.
    assert_eq!(admit(&consumer, D, &params)["load"], true);
    let reply = consumer.call(&json!({"op": "state", "id": D, "wait_us": 10_000_000}));
    assert_eq!(reply["state"], "live");
}

#[test]
fn handoffs_that_do_not_fit_are_refused_by_name() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    // An engine that computes the prompt itself gives the lease back.
    let mut other = lend(&producer, "cmpl-z-0-0a1b2c3d", 1);
    other["remote_prompt"] = json!("00000000000000cd");
    assert!(admit(&consumer, D, &other)["invalid"].is_string());
    assert_eq!(producer.ended()[0]["reason"], "consumer_rejected");
    for (field, value) in [
        ("remote_layout", json!("00000000000000bc")),
        ("remote_prompt", json!("00000000000000cd")),
        ("remote_epoch", json!("aa")),
        ("remote_handle", json!(5)),
        ("remote_channel_port", json!(null)),
    ] {
        let mut wrong = params.clone();
        wrong[field] = value;
        let reply = admit(&consumer, D, &wrong);
        assert!(reply["invalid"].as_str().is_some_and(|why| why.contains(field)), "{field}: {reply}");
        assert_eq!(reply["stock"], false);
    }
    let mut stock = params;
    stock["remote_handle"] = json!(null);
    assert_eq!(admit(&consumer, D, &stock)["stock"], true);
    assert_eq!(consumer.stats()["loads"], 0);
    // Another layout cannot be set any more.
    let other = crate::abi::tests::call(consumer.number, r#"{"op":"layout","layout":"00000000000000bc"}"#);
    assert!(other["error"].is_string());
}

#[test]
fn children_of_one_request_are_each_verified_and_the_lease_ends_after_the_last() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    let children = ["0_cmpl-x-0-1a1b2c3d", "1_cmpl-x-0-1a1b2c3d", "2_cmpl-x-0-1a1b2c3d"];
    for child in children {
        assert_eq!(admit(&consumer, child, &params)["load"], true);
        begin(&consumer, child);
    }
    assert_eq!(done(&consumer, &children[..1]), [valid()]);
    assert_eq!(producer.stats()["leases"], 1, "the others still read");
    assert_eq!(done(&consumer, &children[1..2]), [valid()]);
    // The last one leaves: the lease was read by this engine all the same. Its workers read on.
    leave(&consumer, children[2], "request_ended");
    let left = Instant::now();
    until("a Done would have arrived", || left.elapsed() > Duration::from_millis(600));
    assert_eq!(producer.stats()["leases"], 1, "the last one still reads");
    leave(&consumer, children[2], "load_failed");
    assert_eq!(producer.ended()[0]["cause"], "transfer_done");
    assert_eq!(producer.stats()["channel"]["reads"], 1, "one read for all");
    assert_eq!(consumer.stats()["loads"], 0);
}

#[test]
fn a_lease_drains_until_the_last_read_of_an_ended_request_is_over() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    let children = ["0_cmpl-x-0-1a1b2c3d", "1_cmpl-x-0-1a1b2c3d"];
    for child in children {
        admit(&consumer, child, &params);
        begin(&consumer, child);
    }
    // The read may not be open yet.
    children.iter().for_each(|child| leave(&consumer, child, "request_ended"));
    let is_draining = || producer.http("GET", "/debug/kv", "").1.contains("\"draining\"");
    until("the lease drains", is_draining);
    leave(&consumer, children[0], "load_failed");
    until("no notice waits", || consumer.stats()["notices"] == 0);
    assert!(is_draining(), "the second one still reads");
    assert_eq!(
        consumer.call(&json!({"op": "done", "ids": [children[1]], "wait_us": 0}))["verdicts"][0]["verdict"],
        "gone"
    );
    assert_eq!(producer.ended()[0]["reason"], "consumer_aborted");
}

#[test]
fn requests_that_share_a_handoff_do_not_end_it_below_each_other() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    let (first, second) = ("resp_1-1a1b2c3d", "resp_2-1a1b2c3d");
    for id in [first, second] {
        admit(&consumer, id, &params);
        begin(&consumer, id);
    }
    assert_eq!(done(&consumer, &[first]), [valid()]);
    assert_eq!(producer.stats()["leases"], 1);
    producer.verb("/kv/release", &json!({"handle": params["remote_handle"]}));
    let verdicts = done(&consumer, &[second]);
    assert_eq!(verdicts, [gone("lease_over")], "the second read is not verified by the first");
    assert_eq!(producer.ended().len(), 1);
}

#[test]
fn a_load_that_does_not_happen_releases_its_lease() {
    let (producer, consumer) = pair();
    for (at, reason, at_producer) in [
        (0, "request_ended", "consumer_aborted"),
        (1, "cached", "not_needed"),
        (2, "refused_404", "refused_404"),
    ] {
        let params = lend(&producer, &format!("cmpl-{at}-0-0a1b2c3d"), 1);
        admit(&consumer, D, &params);
        leave(&consumer, D, reason);
        assert_eq!(producer.ended()[0]["reason"], at_producer);
    }
    until("every notice is answered", || consumer.stats()["notices"] == 0);
}

#[test]
fn a_read_that_is_not_used_frees_its_lease_at_once() {
    let (producer, consumer) = pair();
    // The workers have reported a failure.
    let params = lend(&producer, P, 1);
    admit(&consumer, D, &params);
    begin(&consumer, D);
    until("the read is open", || producer.stats()["channel"]["reads"] == 1);
    let begun = Instant::now();
    leave(&consumer, D, "load_failed");
    assert_eq!(producer.ended()[0]["reason"], "load_failed");
    // The request ends while the workers read, and later they have read.
    let params = lend(&producer, "cmpl-y-0-0a1b2c3d", 1);
    admit(&consumer, D, &params);
    begin(&consumer, D);
    until("the read is open", || producer.stats()["channel"]["reads"] == 2);
    leave(&consumer, D, "request_ended");
    until("the lease drains", || {
        let (_, body) = producer.http("GET", "/debug/kv", "");
        body.contains("\"draining\"")
    });
    leave(&consumer, D, "request_ended");
    assert_eq!(producer.ended()[0]["reason"], "consumer_aborted");
    assert!(begun.elapsed() < Duration::from_secs(5), "not by the drain deadline");
}

#[test]
fn one_of_two_engines_leaves_and_the_other_reads() {
    let (producer, first) = pair();
    let second = core(&json!({}));
    let params = lend(&producer, P, 2);
    admit(&first, D, &params);
    admit(&second, D, &params);
    leave(&first, D, "request_ended");
    until("the notice is answered", || first.stats()["notices"] == 0);
    assert_eq!(producer.stats()["leases"], 1);
    begin(&second, D);
    assert_eq!(done(&second, &[D]), [valid()]);
    assert_eq!(producer.ended().len(), 1);
}

#[test]
fn a_held_lease_outlives_its_duration() {
    let producer = core(&json!({"lease_s": 1.5}));
    let consumer = core(&json!({}));
    let params = lend(&producer, P, 1);
    admit(&consumer, D, &params);
    let begun = Instant::now();
    until("two durations pass", || begun.elapsed() > Duration::from_millis(3_200));
    assert_eq!(state(&consumer, D), "live");
    begin(&consumer, D);
    assert_eq!(done(&consumer, &[D]), [valid()]);
}

#[test]
fn a_handoff_that_the_front_end_refused_is_given_back() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    let body = json!({"params": params, "reason": "refused_404"});
    assert_eq!(consumer.verb("/kv/refused", &body)["result"], "accepted");
    assert_eq!(producer.ended()[0]["reason"], "consumer_rejected");
    let (_, metrics) = consumer.http("GET", "/metrics", "");
    let rejections = "baton_early_rejections_total{model_name=\"m\",engine=\"0\",reason=\"refused_404\"} 1";
    assert!(metrics.contains(rejections), "{metrics}");
    // vLLM's own notice of the same refusal adds nothing. Without the plugin it is the only one.
    let notices = || {
        until("every notice is answered", || consumer.stats()["notices"] == 0);
        let (_, metrics) = consumer.http("GET", "/metrics", "");
        let counts = metrics.lines().filter(|line| line.contains("consumer_rejected"));
        counts.map(str::to_owned).collect::<Vec<_>>()
    };
    let before = notices();
    consumer.call(&json!({"op": "give_back", "params": params}));
    assert_eq!(notices(), before);
    assert!(before.iter().any(|line| line.ends_with("result=\"released\"} 1")), "{before:?}");
    let params = lend(&producer, "cmpl-v-0-0a1b2c3d", 1);
    consumer.call(&json!({"op": "give_back", "params": params}));
    assert_eq!(producer.ended()[0]["reason"], "consumer_rejected");
    // A request of this engine has another one: a refusal that the front end reports later ends no lease.
    let params = lend(&producer, "cmpl-z-0-0a1b2c3d", 2);
    admit(&consumer, D, &params);
    begin(&consumer, D);
    assert_eq!(done(&consumer, &[D]), [valid()]);
    let body = json!({"params": params, "reason": "refused_499"});
    assert_eq!(consumer.verb("/kv/refused", &body)["result"], "accepted");
    assert_eq!(
        (consumer.stats()["notices"].as_u64(), producer.stats()["leases"].as_u64()),
        (Some(0), Some(1))
    );
    let (_, metrics) = consumer.http("GET", "/metrics", "");
    assert!(!metrics.contains("refused_499"), "it was not refused early:\n{metrics}");
}

#[test]
fn a_stop_leaves_every_load() {
    let (producer, consumer) = pair();
    let params = lend(&producer, P, 1);
    admit(&consumer, D, &params);
    until("the producer is asked", || state(&consumer, D) == "live");
    drop(consumer);
    assert_eq!(producer.ended()[0]["reason"], "consumer_aborted");
}

#[test]
fn unknown_ids_are_counted_and_change_nothing() {
    let consumer = core(&json!({}));
    begin(&consumer, "x");
    leave(&consumer, "x", "cached");
    assert_eq!((state(&consumer, "x"), done(&consumer, &["x"])), (json!("none"), vec![gone("unknown")]));
    assert_eq!(consumer.stats()["late_events"], 4);
}
