//! A client disconnects, by FIN and by RST, in every phase of a request. Within [`AT_ONCE`] the engines hold only what
//! they held before the request, and no lease has expired. Each test prints the time that this took.

use std::time::Instant;

use serde_json::json;

use crate::harness::{AT_ONCE, Cluster, GenerateRequest, HangUp, PATIENCE, PendingCall, eventually};

/// A prefill engine that computes 64 tokens per step, and the time of each step.
const SLOW_PREFILL: &str = "--max-num-batched-tokens 64 --max-num-seqs 8 --pace-ms 60";

/// Prompt tokens that keep a slow prefill engine busy for 16 steps.
const LONG: usize = 1000;

fn report(phase: &str, how: HangUp, since: Instant) {
    println!("{phase}, {how:?}: back after {:.1} ms", since.elapsed().as_secs_f64() * 1000.0);
}

/// The router counted this many disconnects, all in the phase of the test.
fn assert_cancelled_in(cluster: &Cluster, phase: &str, count: u32) {
    let seen = |labels: &str| cluster.router_metric("baton_router_disconnects_total", labels);
    assert_eq!(seen(&format!("phase=\"{phase}\"")), f64::from(count), "left in phase {phase}");
    assert_eq!(seen(""), f64::from(count), "left at all");
}

#[test]
fn a_cancel_in_the_prefill_queue_frees_its_blocks() {
    let slow_and_narrow = "--max-num-batched-tokens 64 --max-num-seqs 1 --pace-ms 60";
    let cluster = Cluster::new().prefill(slow_and_narrow).start();
    let p = &cluster.prefill[0];
    for (people, how) in [(100, HangUp::Fin), (101, HangUp::Rst)] {
        let uncancelled = GenerateRequest::recall(people);
        let undisturbed = cluster.send(&uncancelled);
        p.shows("the uncancelled request computes", |snapshot| snapshot.running == 1);
        let cancelled = cluster.send(&GenerateRequest::fresh(LONG));
        p.shows("one request waits", |snapshot| snapshot.running == 1 && snapshot.waiting == 1);
        let cancelled_at = Instant::now();
        cancelled.hang_up(how);
        p.shows_within(AT_ONCE, "none waits", |snapshot| snapshot.waiting == 0);
        report("queued at P", how, cancelled_at);
        assert!(undisturbed.is_unanswered(), "the uncancelled request still computes");
        let answer = undisturbed.reply().text();
        cluster.settled(PATIENCE);
        assert_eq!(cluster.ask(&uncancelled).text(), answer, "the uncancelled request's text changed");
        cluster.settled(PATIENCE);
    }
    assert_cancelled_in(&cluster, "prefill", 2);
}

#[test]
fn a_cancel_during_prefill_frees_its_blocks() {
    let cluster = Cluster::new().prefill(SLOW_PREFILL).not_early().start();
    let p = &cluster.prefill[0];
    for how in HangUp::BOTH {
        let steps = p.snapshot().steps;
        let cancelled = cluster.send(&GenerateRequest::fresh(LONG));
        p.shows("two chunks of it are computed", |snapshot| {
            snapshot.running == 1 && snapshot.steps >= steps + 2
        });
        let cancelled_at = Instant::now();
        cancelled.hang_up(how);
        cluster.settled(AT_ONCE);
        report("P computes", how, cancelled_at);
        assert!(p.snapshot().steps < steps + 16, "it was computed to its end");
        assert_eq!(p.snapshot().leases_opened, 0, "a lease was opened");
    }
    assert_cancelled_in(&cluster, "prefill", 2);
    cluster.still_serves();
}

#[test]
fn a_cancel_in_the_gap_frees_its_blocks() {
    for how in HangUp::BOTH {
        let mut cluster = Cluster::new().start();
        cluster.decode[0].pause();
        let cancelled = cluster.send(&GenerateRequest::fresh(100));
        cluster.prefill[0].shows("the blocks are leased", |snapshot| snapshot.leases == 1);
        cluster.decode[0].is_sent_something();
        let cancelled_at = Instant::now();
        cancelled.hang_up(how);
        cluster.prefill[0].settled(AT_ONCE);
        report("between P and D", how, cancelled_at);
        let on = Instant::now();
        cluster.decode[0].go_on();
        cluster.settled(AT_ONCE);
        report("between P and D, D after its pause", how, on);
        assert_cancelled_in(&cluster, "decode_pre_first", 1);
        cluster.still_serves();
    }
}

#[test]
fn a_cancel_during_the_fetch_frees_its_blocks() {
    for how in HangUp::BOTH {
        let mut cluster = Cluster::new().start();
        cluster.decode[0].pause();
        let cancelled = cluster.send(&GenerateRequest::fresh(LONG));
        cluster.prefill[0].shows("the blocks are leased", |snapshot| snapshot.leases == 1);
        cluster.decode[0].is_sent_something();
        cluster.prefill[0].pause();
        cluster.decode[0].go_on();
        cluster.decode[0].shows("it fetches", |snapshot| snapshot.fetching == 1 && snapshot.landing > 0);
        let cancelled_at = Instant::now();
        cancelled.hang_up(how);
        cluster.decode[0].shows_within(AT_ONCE, "no fetch runs", |snapshot| snapshot.fetching == 0);
        report("D fetches, D", how, cancelled_at);
        let on = Instant::now();
        cluster.prefill[0].go_on();
        cluster.settled(AT_ONCE);
        report("D fetches, P after its pause", how, on);
        assert_cancelled_in(&cluster, "decode_pre_first", 1);
        cluster.still_serves();
    }
}

#[test]
fn a_cancel_before_the_first_token_frees_its_blocks() {
    let cluster = Cluster::new().decode("--pace-ms 250").start();
    for how in HangUp::BOTH {
        let cancelled = cluster.send(&GenerateRequest::fresh(100).tokens(50).streamed());
        cluster.decode[0].shows("its first step", |snapshot| snapshot.running == 1);
        assert!(cancelled.is_unanswered());
        let cancelled_at = Instant::now();
        cancelled.hang_up(how);
        cluster.settled(AT_ONCE);
        report("before the first token", how, cancelled_at);
    }
    assert_cancelled_in(&cluster, "decode_pre_first", 2);
    cluster.still_serves();
}

#[test]
fn a_cancel_during_the_stream_does_not_affect_an_uncancelled_request() {
    let cluster = Cluster::new().decode("--pace-ms 30").start();
    let uncancelled = GenerateRequest::recall(20);
    let alone = cluster.ask(&uncancelled).text();
    for how in HangUp::BOTH {
        let mut cancelled = cluster.send(&GenerateRequest::fresh(100).tokens(400).streamed()).stream();
        assert_eq!(cancelled.status, 200);
        for _ in 0..3 {
            cancelled.event().expect("an event");
        }
        let staying = cluster.send(&uncancelled);
        cluster.decode[0].shows("both run", |snapshot| snapshot.running == 2);
        let cancelled_at = Instant::now();
        cancelled.hang_up(how);
        cluster.decode[0]
            .shows_within(AT_ONCE, "only the uncancelled request is left", |snapshot| snapshot.running <= 1);
        report("mid-stream", how, cancelled_at);
        assert_eq!(staying.reply().text(), alone);
        cluster.settled(AT_ONCE);

        let mut cancelled = cluster.send(&GenerateRequest::fresh(100).tokens(400).streamed()).stream();
        cancelled.event().expect("an event");
        let cancelled_at = Instant::now();
        cancelled.hang_up(how);
        cluster.settled(AT_ONCE);
        report("mid-stream, alone", how, cancelled_at);
    }
    assert_cancelled_in(&cluster, "decode_stream", 4);
    cluster.still_serves();
}

#[test]
fn a_cancel_of_an_unstreamed_response_frees_its_blocks() {
    let cluster = Cluster::new().decode("--pace-ms 30").start();
    let d = &cluster.decode[0];
    for how in HangUp::BOTH {
        let before = d.metric("vllm:generation_tokens_total", "");
        let cancelled = cluster.send(&GenerateRequest::fresh(100).tokens(400));
        let generates = || {
            let generated = d.metric("vllm:generation_tokens_total", "") - before;
            if generated >= 3.0 { Ok(()) } else { Err(format!("{generated} tokens")) }
        };
        eventually(PATIENCE, "some tokens are there", generates);
        assert!(cancelled.is_unanswered());
        let cancelled_at = Instant::now();
        cancelled.hang_up(how);
        cluster.settled(AT_ONCE);
        report("not streamed, decoding", how, cancelled_at);
        let generated = d.metric("vllm:generation_tokens_total", "") - before;
        assert!(generated < 100.0, "{generated} tokens for no client");
    }
    assert_cancelled_in(&cluster, "decode_pre_first", 2);
    cluster.still_serves();
}

#[test]
fn a_cancel_while_the_prefill_engine_is_stopped_frees_its_blocks() {
    let mut cluster = Cluster::new().start();
    for how in [HangUp::Fin, HangUp::Rst, HangUp::Fin, HangUp::Rst] {
        cluster.prefill[0].pause();
        let cancelled = cluster.send(&GenerateRequest::fresh(100));
        router_is_busy(&cluster, "baton_router_requests_in_flight");
        cancelled.hang_up(how);
        // The abort and the request are in different connections: the engine may read either first.
        router_is_busy(&cluster, "baton_router_settlements_in_flight");
        let on = Instant::now();
        cluster.prefill[0].go_on();
        cluster.settled(AT_ONCE);
        report("P stands still, after its pause", how, on);
    }
    cluster.still_serves();
}

fn router_is_busy(cluster: &Cluster, gauge: &str) {
    let busy = || match cluster.router_metric(gauge, "") {
        0.0 => Err(format!("{gauge} is 0")),
        _ => Ok(()),
    };
    eventually(PATIENCE, gauge, busy);
}

#[test]
fn a_cancel_before_the_body_is_complete_reaches_no_engine() {
    let cluster = Cluster::new().start();
    for how in HangUp::BOTH {
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{\"model\":";
        let cancelled = PendingCall::raw(&cluster.url, head.as_bytes());
        router_is_busy(&cluster, "baton_router_requests_in_flight");
        cancelled.hang_up(how);
        cluster.settled(AT_ONCE);
    }
    assert_eq!(cluster.prefill[0].snapshot().steps, 0);
    cluster.still_serves();
}

#[test]
fn a_cancel_of_a_response_of_several_choices_frees_its_blocks() {
    let cluster = Cluster::new().decode("--pace-ms 30").start();
    for how in HangUp::BOTH {
        let ask = GenerateRequest::fresh(100).tokens(400).with("n", json!(3));
        for ask in [ask.clone().streamed(), ask] {
            let cancelled = cluster.send(&ask);
            cluster.decode[0].shows("all choices run", |snapshot| snapshot.running == 3);
            let cancelled_at = Instant::now();
            cancelled.hang_up(how);
            cluster.settled(AT_ONCE);
            report("three choices", how, cancelled_at);
        }
    }
    cluster.still_serves();
}

#[test]
fn a_cancel_at_an_engine_without_a_router_frees_its_blocks() {
    let cluster = Cluster::new().prefill(SLOW_PREFILL).decode("--pace-ms 30").start();
    let (p, d) = (&cluster.prefill[0], &cluster.decode[0]);
    let lending = json!({"do_remote_decode": true, "do_remote_prefill": false});
    for how in HangUp::BOTH {
        let decoding = GenerateRequest::fresh(40).tokens(400);
        let prefilling = GenerateRequest::fresh(LONG).with("kv_transfer_params", lending.clone());
        for (engine, ask) in [(d, decoding.clone()), (d, decoding.streamed()), (p, prefilling)] {
            let cancelled = engine.send("POST", ask.path, &ask.body);
            engine.shows("it runs", |snapshot| snapshot.running == 1);
            let cancelled_at = Instant::now();
            cancelled.hang_up(how);
            engine.settled(AT_ONCE);
            report("at the engine itself", how, cancelled_at);
        }
    }
    assert_eq!(p.snapshot().leases_opened, 0);
    cluster.still_serves();
}
