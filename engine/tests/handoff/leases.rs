//! Leases and time: heartbeats keep what is wanted, expiry takes back what is not.

use std::thread;
use std::time::{Duration, Instant};

use baton_engine::server::Role;
use serde_json::json;

use super::cluster::{LLAMA, Node, fresh_id, greedy, options, prompt, same_choices};

const LEASE: Duration = Duration::from_millis(500);

fn short_leases() -> Node {
    let mut options = options(LLAMA, Role::Prefill);
    options.kv_lease_duration = LEASE;
    Node::start(options)
}

#[test]
fn a_busy_decode_engine_keeps_a_short_lease_alive_while_the_request_waits() {
    let mut slow = options(LLAMA, Role::Decode);
    (slow.max_num_seqs, slow.pace) = (1, Some(Duration::from_millis(50)));
    let (p, d, one) = (short_leases(), Node::start(slow), Node::start(options(LLAMA, Role::Both)));
    let body = greedy(&prompt(1, 45), 4);
    thread::scope(|scope| {
        // 50 steps of 50 ms: five leases long.
        let busy = scope.spawn(|| d.generate(&fresh_id(), &greedy(&prompt(2, 10), 50)).ok());
        d.wait_until("the engine is not busy", |kv| kv["requests"]["running"] == 1);
        let started = Instant::now();
        let lent = p.lend(&body);
        let reply = d.decode(&body, &lent).ok();
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
fn a_lease_that_nobody_comes_for_expires_once_and_its_blocks_come_home() {
    let p = short_leases();
    let lent = p.lend(&greedy(&prompt(1, 45), 4));
    assert!(lent["remote_lease_left_ms"].as_u64().expect("milliseconds") <= 500);
    p.is_home();
    assert_eq!(p.metric("vllm:nixl_num_kv_expired_reqs"), 1.0);
    let late = p.post("/kv/release", &json!({"handle": lent["remote_handle"]})).ok();
    assert_eq!(late["result"], "already");
}

/// Leases are served off the step loop: a step of any length delays no reader.
#[test]
fn blocks_are_fetched_from_an_engine_in_the_middle_of_a_long_step() {
    let mut slow = options(LLAMA, Role::Prefill);
    slow.pace = Some(Duration::from_millis(1_500));
    let (p, d) = (Node::start(slow), Node::start(options(LLAMA, Role::Decode)));
    let body = greedy(&prompt(1, 20), 4);
    let lent = p.lend(&body);
    thread::scope(|scope| {
        // Three steps long. It is seen to run when the first of them is over and the second has begun.
        let busy = scope.spawn(|| p.generate(&fresh_id(), &greedy(&prompt(2, 60), 1)).ok());
        p.wait_until("nothing runs", |kv| kv["requests"]["running"] == 1);
        let steps = p.kv()["steps"].clone();
        let reply = d.decode(&body, &lent).ok();
        assert_eq!(reply["choices"][0]["token_ids"].as_array().expect("ids").len(), 4);
        assert_eq!(p.kv()["leases"]["live"], 0, "D has told P that it has everything");
        assert_eq!(p.kv()["steps"], steps, "no step has ended meanwhile");
        busy.join().expect("an answer");
    });
    assert_eq!(d.metric("vllm:external_prefix_cache_hits_total"), 20.0);
    for node in [&p, &d] {
        node.is_clean();
    }
}
