//! A handoff that begins before its prefill has finished, through the router: the decode engine fetches while the
//! prefill engine computes, and whoever leaves or dies meanwhile, nothing is held and no text is wrong.

use std::time::Instant;

use serde_json::{Value, json};

use crate::harness::{AT_ONCE, Ask, Cluster, HangUp, PATIENCE};

/// A prefill engine that takes 64 tokens a step, and its time for each.
const SLOW_PREFILL: &str = "--max-num-batched-tokens 64 --max-num-seqs 8 --pace-ms 60";

/// Prompt tokens that keep it busy for 16 steps.
const LONG: usize = 1000;

/// An ask, and the choices of an engine that computes it alone.
fn ask(cluster: &Cluster) -> (Ask, Value) {
    let ask = Ask::fresh(LONG).tokens(8).with("logprobs", json!(1));
    let alone = cluster.decode.last().expect("an engine").send("POST", ask.path, &ask.body).reply();
    assert_eq!(alone.status, 200);
    (ask, alone.json()["choices"].take())
}

/// It fetches while the other computes.
fn both_work(cluster: &Cluster) {
    cluster.prefill[0].shows("P computes", |books| books.running == 1 && books.leases == 1);
    cluster.decode[0].shows("D fetches", |books| books.fetching == 1 && books.landing > 0);
    cluster.prefill[0].shows("P still computes", |books| books.running == 1);
}

#[test]
fn blocks_are_read_while_they_are_computed_and_the_answer_is_the_same() {
    let cluster = Cluster::new().prefill(SLOW_PREFILL).decode("").decode("--kv-transport tcp").start();
    for _ in 0..2 {
        // Either decode engine may be chosen; both end alike.
        let (ask, alone) = ask(&cluster);
        let call = cluster.send(&ask);
        cluster.prefill[0].shows("P computes and lends", |books| books.running == 1 && books.leases == 1);
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
fn a_client_leaves_while_one_engine_computes_and_the_other_fetches() {
    let cluster = Cluster::new().prefill(SLOW_PREFILL).start();
    for how in HangUp::BOTH {
        let steps = cluster.prefill[0].books().steps;
        let leaving = cluster.send(&Ask::fresh(LONG));
        both_work(&cluster);
        let left = Instant::now();
        leaving.hang_up(how);
        cluster.settled(AT_ONCE);
        println!(
            "P computes, D fetches, {how:?}: back after {:.1} ms",
            left.elapsed().as_secs_f64() * 1000.0
        );
        assert!(cluster.prefill[0].books().steps < steps + 16, "it was computed to its end");
    }
    cluster.prefill[0].expired_nothing();
    cluster.still_serves();
}

#[test]
fn a_prefill_engine_that_dies_in_the_middle_costs_time_and_no_wrong_word() {
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
fn a_decode_engine_that_dies_in_its_fetch_gives_way_to_another_with_the_same_handoff() {
    let mut cluster = Cluster::new().prefill(SLOW_PREFILL).decode("").decode("").start();
    let (ask, alone) = ask(&cluster);
    for engine in &cluster.decode {
        engine.send("POST", "/reset_prefix_cache", &json!({})).reply();
    }
    let call = cluster.send(&ask);
    cluster.prefill[0].shows("P lends", |books| books.running == 1 && books.leases == 1);
    let fetches = |at: usize| cluster.decode[at].books().fetching == 1;
    let until = Instant::now() + PATIENCE;
    let chosen = loop {
        if let Some(at) = (0..2).find(|&at| fetches(at)) {
            break at;
        }
        assert!(Instant::now() < until, "nobody fetches");
    };
    cluster.decode[chosen].kill();
    let reply = call.reply();
    assert_eq!((reply.status, &reply.json()["choices"]), (200, &alone));
    cluster.prefill[0].settled(PATIENCE);
    assert_eq!(cluster.prefill[0].books().leases_opened, 1, "the prompt was computed once");
}
