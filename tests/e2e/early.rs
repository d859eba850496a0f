//! Early handoffs, through the router: the decode engine fetches while the prefill engine computes. If a client
//! disconnects or an engine dies meanwhile, nothing stays held and no text is wrong.

use std::time::Instant;

use serde_json::{Value, json};

use crate::harness::{AT_ONCE, Cluster, GenerateRequest, HangUp, PATIENCE};

/// A prefill engine that computes 64 tokens per step, and the time of each step.
const SLOW_PREFILL: &str = "--max-num-batched-tokens 64 --max-num-seqs 8 --pace-ms 60";

/// Prompt tokens that keep this engine busy for 16 steps.
const LONG: usize = 1000;

/// A request, and the choices of a single engine.
fn ask(cluster: &Cluster) -> (GenerateRequest, Value) {
    let ask = GenerateRequest::fresh(LONG).tokens(8).with("logprobs", json!(1));
    let alone = cluster.decode.last().expect("an engine").send("POST", ask.path, &ask.body).reply();
    assert_eq!(alone.status, 200);
    (ask, alone.json()["choices"].take())
}

/// Waits until D fetches while P computes.
fn both_work(cluster: &Cluster) {
    cluster.prefill[0].shows("P computes", |snapshot| snapshot.running == 1 && snapshot.leases == 1);
    cluster.decode[0].shows("D fetches", |snapshot| snapshot.fetching == 1 && snapshot.landing > 0);
    cluster.prefill[0].shows("P still computes", |snapshot| snapshot.running == 1);
}

#[test]
fn blocks_are_read_while_they_are_computed_and_the_answer_is_the_same() {
    let cluster = Cluster::new().prefill(SLOW_PREFILL).decode("").decode("--kv-transport tcp").start();
    for _ in 0..2 {
        // The router may choose either decode engine. The result is the same.
        let (ask, alone) = ask(&cluster);
        let call = cluster.send(&ask);
        cluster.prefill[0]
            .shows("P computes and lends", |snapshot| snapshot.running == 1 && snapshot.leases == 1);
        let reply = call.reply();
        assert_eq!((reply.status, &reply.json()["choices"]), (200, &alone));
    }
    assert_eq!(cluster.prefill[0].metric("baton_kv_early_leases_total", ""), 2.0);
    for engine in &cluster.decode {
        assert_eq!(engine.metric("baton_kv_load_failures_total", ""), 0.0);
    }
    cluster.settled(PATIENCE);
}

#[test]
fn a_cancel_during_an_early_handoff_frees_its_blocks() {
    let cluster = Cluster::new().prefill(SLOW_PREFILL).start();
    for how in HangUp::BOTH {
        let steps = cluster.prefill[0].snapshot().steps;
        let cancelled = cluster.send(&GenerateRequest::fresh(LONG));
        both_work(&cluster);
        let cancelled_at = Instant::now();
        cancelled.hang_up(how);
        cluster.settled(AT_ONCE);
        println!(
            "P computes, D fetches, {how:?}: back after {:.1} ms",
            cancelled_at.elapsed().as_secs_f64() * 1000.0
        );
        assert!(cluster.prefill[0].snapshot().steps < steps + 16, "it was computed to its end");
    }
    cluster.prefill[0].expired_nothing();
    cluster.still_serves();
}

#[test]
fn the_death_of_a_prefill_engine_during_an_early_handoff_changes_no_token() {
    for policy in ["recompute", "fail"] {
        let decode = format!("--kv-load-failure-policy {policy}");
        let mut cluster = Cluster::new().prefill(SLOW_PREFILL).decode(&decode).start();
        let (ask, alone) = ask(&cluster);
        cluster.decode[0].send("POST", "/reset_prefix_cache", &json!({})).reply();
        let call = cluster.send(&ask);
        both_work(&cluster);
        cluster.prefill[0].kill();
        let reply = call.reply();
        assert_eq!((reply.status, &reply.json()["choices"]), (200, &alone), "{policy}");
        cluster.decode[0].settled(PATIENCE);
    }
}

#[test]
fn another_decode_engine_takes_the_handoff_after_a_death_in_the_fetch() {
    let mut cluster = Cluster::new().prefill(SLOW_PREFILL).decode("").decode("").start();
    let (ask, alone) = ask(&cluster);
    for engine in &cluster.decode {
        engine.send("POST", "/reset_prefix_cache", &json!({})).reply();
    }
    let call = cluster.send(&ask);
    cluster.prefill[0].shows("P lends", |snapshot| snapshot.running == 1 && snapshot.leases == 1);
    let fetches = |at: usize| cluster.decode[at].snapshot().fetching == 1;
    let until = Instant::now() + PATIENCE;
    let chosen = loop {
        if let Some(at) = (0..2).find(|&at| fetches(at)) {
            break at;
        }
        assert!(Instant::now() < until, "no fetch runs");
    };
    cluster.decode[chosen].kill();
    let reply = call.reply();
    assert_eq!((reply.status, &reply.json()["choices"]), (200, &alone));
    cluster.prefill[0].settled(PATIENCE);
    assert_eq!(cluster.prefill[0].snapshot().leases_opened, 1, "the prompt was computed once");
}
