//! Leases and time: heartbeats keep the needed leases, and expiry ends the others.

use std::thread;
use std::time::{Duration, Instant};

use baton_engine::run::options::Role;
use serde_json::json;

use super::harness::cluster::{BLOCK, LLAMA, Node, fresh_id, greedy, options, prompt, same_choices};

const LEASE: Duration = Duration::from_millis(500);

fn short_leases() -> Node {
    let mut options = options(LLAMA, Role::Prefill);
    options.kv_lease_duration = LEASE;
    Node::start(options)
}

#[test]
fn a_busy_decode_engine_renews_the_lease_of_a_waiting_request() {
    let mut slow = options(LLAMA, Role::Decode);
    (slow.max_num_seqs, slow.pace) = (1, Some(Duration::from_millis(50)));
    let (p, d, one) = (short_leases(), Node::start(slow), Node::start(options(LLAMA, Role::Both)));
    let body = greedy(&prompt(1, 45), 4);
    thread::scope(|scope| {
        // 50 steps of 50 ms, five times the lease.
        let busy = scope.spawn(|| d.generate(&fresh_id(), &greedy(&prompt(2, 10), 50)).ok());
        d.wait_until("the engine is not busy", |kv| kv["requests"]["running"] == 1);
        let started = Instant::now();
        let handoff = p.open_lease(&body);
        let reply = d.decode(&body, &handoff).ok();
        assert!(started.elapsed() > 3 * LEASE, "it did not have to wait: {:?}", started.elapsed());
        same_choices(&reply, &one.generate(&fresh_id(), &body).ok());
        busy.join().expect("an answer");
    });
    assert_eq!(d.metric("baton_kv_load_failures_total"), 0.0);
    assert_eq!(d.metric("vllm:external_prefix_cache_hits_total"), 45.0, "fetched, not computed again");
    for node in [&p, &d, &one] {
        node.is_clean();
    }
}

#[test]
fn a_handoff_that_waited_for_sixteen_leases_is_recomputed() {
    let mut short = options(LLAMA, Role::Prefill);
    short.kv_lease_duration = Duration::from_millis(100);
    let mut slow = options(LLAMA, Role::Decode);
    (slow.max_num_seqs, slow.pace) = (1, Some(Duration::from_millis(60)));
    let (p, d, one) = (Node::start(short), Node::start(slow), Node::start(options(LLAMA, Role::Both)));
    let body = greedy(&prompt(1, 45), 4);
    thread::scope(|scope| {
        let busy = scope.spawn(|| d.generate(&fresh_id(), &greedy(&prompt(2, 10), 90)).ok());
        d.wait_until("the engine is not busy", |kv| kv["requests"]["running"] == 1);
        let handoff = p.open_lease(&body);
        let (d, body) = (&d, &body);
        let waits = scope.spawn(move || d.decode(body, &handoff).ok());
        // Long before the engine has a free place.
        p.all_free();
        assert_eq!(d.kv()["requests"]["running"], 1, "it had a free place before");
        same_choices(&waits.join().expect("an answer"), &one.generate(&fresh_id(), body).ok());
        busy.join().expect("an answer");
    });
    assert_eq!(d.metric("baton_kv_load_failures_total"), 1.0);
    assert_eq!(p.metric("vllm:nixl_num_kv_expired_reqs"), 0.0, "it was released before its expiry");
}

/// All blocks are leased to requests that wait for blocks. The simulator found this case.
#[test]
fn an_engine_that_waits_for_its_own_leases_gives_one_up() {
    let mut tight = options(LLAMA, Role::Both);
    tight.kv_blocks = Some(6);
    let (tight, one) = (Node::start(tight), Node::start(options(LLAMA, Role::Both)));
    let bodies = [1, 2].map(|seed| greedy(&prompt(seed, 3 * BLOCK - 3), 4));
    let handoff = bodies.each_ref().map(|body| tight.open_lease(body));
    tight.wait_until("blocks are left", |kv| kv["blocks"]["leased"] == 6);
    thread::scope(|scope| {
        let calls: Vec<_> = (0..2)
            .map(|n| {
                let (tight, body, handoff) = (&tight, &bodies[n], &handoff[n]);
                scope.spawn(move || tight.decode(body, handoff).ok())
            })
            .collect();
        for (call, body) in calls.into_iter().zip(&bodies) {
            let reply = call.join().expect("an answer");
            same_choices(&reply, &one.generate(&fresh_id(), body).ok());
        }
    });
    assert!(tight.metric("baton_kv_load_failures_total") > 0.0, "nothing was given up");
    tight.all_free();
}

#[test]
fn an_unclaimed_lease_expires_once_and_frees_its_blocks() {
    let p = short_leases();
    let handoff = p.open_lease(&greedy(&prompt(1, 45), 4));
    assert!(handoff["remote_lease_left_ms"].as_u64().expect("milliseconds") <= 500);
    p.all_free();
    assert_eq!(p.metric("vllm:nixl_num_kv_expired_reqs"), 1.0);
    let late = p.post("/kv/release", &json!({"handle": handoff["remote_handle"]})).ok();
    assert_eq!(late["result"], "already");
}

/// Leases are served off the step loop: a step of any length delays no reader. On a loaded machine D may take longer
/// than a step by chance. An engine that served leases between steps would delay D every time.
#[test]
fn blocks_are_fetched_from_an_engine_in_the_middle_of_a_long_step() {
    const ATTEMPTS: u64 = 6;
    let mut slow = options(LLAMA, Role::Prefill);
    slow.pace = Some(Duration::from_millis(1_500));
    let (p, d) = (Node::start(slow), Node::start(options(LLAMA, Role::Decode)));
    let in_one_step = |attempt: u64| {
        let body = greedy(&prompt(attempt, 20), 4);
        let handoff = p.open_lease(&body);
        thread::scope(|scope| {
            // Three steps long. It is observed as running after the first step, during the second one.
            let busy = scope.spawn(|| p.generate(&fresh_id(), &greedy(&prompt(100 + attempt, 60), 1)).ok());
            p.wait_until("nothing runs", |kv| kv["requests"]["running"] == 1);
            let steps = p.kv()["steps"].clone();
            let reply = d.decode(&body, &handoff).ok();
            assert_eq!(reply["choices"][0]["token_ids"].as_array().expect("ids").len(), 4);
            let after = p.kv();
            assert_eq!(after["leases"]["live"], 0, "D has finished its read at P");
            busy.join().expect("an answer");
            after["steps"] == steps
        })
    };
    let attempts = (1..=ATTEMPTS).find(|&attempt| in_one_step(attempt));
    let attempts = attempts.expect("in some attempt no step has ended meanwhile");
    assert_eq!(d.metric("vllm:external_prefix_cache_hits_total"), 20.0 * attempts as f64);
    for node in [&p, &d] {
        node.is_clean();
    }
}
