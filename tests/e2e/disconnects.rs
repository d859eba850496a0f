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
fn all_left_in(cluster: &Cluster, phase: &str, count: u32) {
    let seen = |labels: &str| cluster.router_metric("baton_router_disconnects_total", labels);
    assert_eq!(seen(&format!("phase=\"{phase}\"")), f64::from(count), "left in phase {phase}");
    assert_eq!(seen(""), f64::from(count), "left at all");
}

#[test]
fn a_client_leaves_while_its_request_is_queued_at_the_prefill_engine() {
    let slow_and_narrow = "--max-num-batched-tokens 64 --max-num-seqs 1 --pace-ms 60";
    let cluster = Cluster::new().prefill(slow_and_narrow).start();
    let p = &cluster.prefill[0];
    for (people, how) in [(100, HangUp::Fin), (101, HangUp::Rst)] {
        let uncancelled = GenerateRequest::recall(people);
        let undisturbed = cluster.send(&uncancelled);
        p.shows("the uncancelled request computes", |snapshot| snapshot.running == 1);
        let leaving = cluster.send(&GenerateRequest::fresh(LONG));
        p.shows("one request waits", |snapshot| snapshot.running == 1 && snapshot.waiting == 1);
        let left = Instant::now();
        leaving.hang_up(how);
        p.shows_within(AT_ONCE, "none waits", |snapshot| snapshot.waiting == 0);
        report("queued at P", how, left);
        assert!(undisturbed.is_unanswered(), "the uncancelled request still computes");
        let answer = undisturbed.reply().text();
        cluster.settled(PATIENCE);
        assert_eq!(cluster.ask(&uncancelled).text(), answer, "the uncancelled request's text changed");
        cluster.settled(PATIENCE);
    }
    all_left_in(&cluster, "prefill", 2);
}

#[test]
fn a_client_leaves_while_the_prefill_engine_computes() {
    let cluster = Cluster::new().prefill(SLOW_PREFILL).not_early().start();
    let p = &cluster.prefill[0];
    for how in HangUp::BOTH {
        let steps = p.snapshot().steps;
        let leaving = cluster.send(&GenerateRequest::fresh(LONG));
        p.shows("two chunks of it are computed", |snapshot| {
            snapshot.running == 1 && snapshot.steps >= steps + 2
        });
        let left = Instant::now();
        leaving.hang_up(how);
        cluster.settled(AT_ONCE);
        report("P computes", how, left);
        assert!(p.snapshot().steps < steps + 16, "it was computed to its end");
        assert_eq!(p.snapshot().leases_opened, 0, "a lease was opened");
    }
    all_left_in(&cluster, "prefill", 2);
    cluster.still_serves();
}

#[test]
fn a_client_leaves_between_the_prefill_engines_reply_and_the_decode_engines() {
    for how in HangUp::BOTH {
        let mut cluster = Cluster::new().start();
        cluster.decode[0].pause();
        let leaving = cluster.send(&GenerateRequest::fresh(100));
        cluster.prefill[0].shows("the blocks are leased", |snapshot| snapshot.leases == 1);
        cluster.decode[0].is_sent_something();
        let left = Instant::now();
        leaving.hang_up(how);
        cluster.prefill[0].settled(AT_ONCE);
        report("between P and D", how, left);
        let on = Instant::now();
        cluster.decode[0].go_on();
        cluster.settled(AT_ONCE);
        report("between P and D, D after its pause", how, on);
        all_left_in(&cluster, "decode_pre_first", 1);
        cluster.still_serves();
    }
}

#[test]
fn a_client_leaves_while_the_decode_engine_fetches() {
    for how in HangUp::BOTH {
        let mut cluster = Cluster::new().start();
        cluster.decode[0].pause();
        let leaving = cluster.send(&GenerateRequest::fresh(LONG));
        cluster.prefill[0].shows("the blocks are leased", |snapshot| snapshot.leases == 1);
        cluster.decode[0].is_sent_something();
        cluster.prefill[0].pause();
        cluster.decode[0].go_on();
        cluster.decode[0].shows("it fetches", |snapshot| snapshot.fetching == 1 && snapshot.landing > 0);
        let left = Instant::now();
        leaving.hang_up(how);
        cluster.decode[0].shows_within(AT_ONCE, "no fetch runs", |snapshot| snapshot.fetching == 0);
        report("D fetches, D", how, left);
        let on = Instant::now();
        cluster.prefill[0].go_on();
        cluster.settled(AT_ONCE);
        report("D fetches, P after its pause", how, on);
        all_left_in(&cluster, "decode_pre_first", 1);
        cluster.still_serves();
    }
}

#[test]
fn a_client_leaves_before_the_first_token() {
    let cluster = Cluster::new().decode("--pace-ms 250").start();
    for how in HangUp::BOTH {
        let leaving = cluster.send(&GenerateRequest::fresh(100).tokens(50).streamed());
        cluster.decode[0].shows("its first step", |snapshot| snapshot.running == 1);
        assert!(leaving.is_unanswered());
        let left = Instant::now();
        leaving.hang_up(how);
        cluster.settled(AT_ONCE);
        report("before the first token", how, left);
    }
    all_left_in(&cluster, "decode_pre_first", 2);
    cluster.still_serves();
}

#[test]
fn a_client_leaves_in_mid_stream_and_a_bystander_gets_its_whole_answer() {
    let cluster = Cluster::new().decode("--pace-ms 30").start();
    let uncancelled = GenerateRequest::recall(20);
    let alone = cluster.ask(&uncancelled).text();
    for how in HangUp::BOTH {
        let mut leaving = cluster.send(&GenerateRequest::fresh(100).tokens(400).streamed()).stream();
        assert_eq!(leaving.status, 200);
        for _ in 0..3 {
            leaving.event().expect("an event");
        }
        let staying = cluster.send(&uncancelled);
        cluster.decode[0].shows("both run", |snapshot| snapshot.running == 2);
        let left = Instant::now();
        leaving.hang_up(how);
        cluster.decode[0]
            .shows_within(AT_ONCE, "only the uncancelled request is left", |snapshot| snapshot.running <= 1);
        report("mid-stream", how, left);
        assert_eq!(staying.reply().text(), alone);
        cluster.settled(AT_ONCE);

        let mut leaving = cluster.send(&GenerateRequest::fresh(100).tokens(400).streamed()).stream();
        leaving.event().expect("an event");
        let left = Instant::now();
        leaving.hang_up(how);
        cluster.settled(AT_ONCE);
        report("mid-stream, alone", how, left);
    }
    all_left_in(&cluster, "decode_stream", 4);
    cluster.still_serves();
}

#[test]
fn a_client_leaves_an_answer_that_is_not_streamed() {
    let cluster = Cluster::new().decode("--pace-ms 30").start();
    let d = &cluster.decode[0];
    for how in HangUp::BOTH {
        let before = d.metric("vllm:generation_tokens_total", "");
        let leaving = cluster.send(&GenerateRequest::fresh(100).tokens(400));
        let generates = || {
            let generated = d.metric("vllm:generation_tokens_total", "") - before;
            if generated >= 3.0 { Ok(()) } else { Err(format!("{generated} tokens")) }
        };
        eventually(PATIENCE, "some tokens are there", generates);
        assert!(leaving.is_unanswered());
        let left = Instant::now();
        leaving.hang_up(how);
        cluster.settled(AT_ONCE);
        report("not streamed, decoding", how, left);
        let generated = d.metric("vllm:generation_tokens_total", "") - before;
        assert!(generated < 100.0, "{generated} tokens for no client");
    }
    all_left_in(&cluster, "decode_pre_first", 2);
    cluster.still_serves();
}

#[test]
fn a_client_leaves_while_the_prefill_engine_stands_still() {
    let mut cluster = Cluster::new().start();
    for how in [HangUp::Fin, HangUp::Rst, HangUp::Fin, HangUp::Rst] {
        cluster.prefill[0].pause();
        let leaving = cluster.send(&GenerateRequest::fresh(100));
        router_is_busy(&cluster, "baton_router_requests_in_flight");
        leaving.hang_up(how);
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
fn a_client_leaves_before_its_body_is_complete() {
    let cluster = Cluster::new().start();
    for how in HangUp::BOTH {
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{\"model\":";
        let leaving = PendingCall::raw(&cluster.url, head.as_bytes());
        router_is_busy(&cluster, "baton_router_requests_in_flight");
        leaving.hang_up(how);
        cluster.settled(AT_ONCE);
    }
    assert_eq!(cluster.prefill[0].snapshot().steps, 0);
    cluster.still_serves();
}

#[test]
fn a_client_leaves_an_answer_of_several_choices() {
    let cluster = Cluster::new().decode("--pace-ms 30").start();
    for how in HangUp::BOTH {
        let ask = GenerateRequest::fresh(100).tokens(400).with("n", json!(3));
        for ask in [ask.clone().streamed(), ask] {
            let leaving = cluster.send(&ask);
            cluster.decode[0].shows("all choices run", |snapshot| snapshot.running == 3);
            let left = Instant::now();
            leaving.hang_up(how);
            cluster.settled(AT_ONCE);
            report("three choices", how, left);
        }
    }
    cluster.still_serves();
}

#[test]
fn a_client_leaves_an_engine_that_it_asked_itself() {
    let cluster = Cluster::new().prefill(SLOW_PREFILL).decode("--pace-ms 30").start();
    let (p, d) = (&cluster.prefill[0], &cluster.decode[0]);
    let lending = json!({"do_remote_decode": true, "do_remote_prefill": false});
    for how in HangUp::BOTH {
        let decoding = GenerateRequest::fresh(40).tokens(400);
        let prefilling = GenerateRequest::fresh(LONG).with("kv_transfer_params", lending.clone());
        for (engine, ask) in [(d, decoding.clone()), (d, decoding.streamed()), (p, prefilling)] {
            let leaving = engine.send("POST", ask.path, &ask.body);
            engine.shows("it runs", |snapshot| snapshot.running == 1);
            let left = Instant::now();
            leaving.hang_up(how);
            engine.settled(AT_ONCE);
            report("at the engine itself", how, left);
        }
    }
    assert_eq!(p.snapshot().leases_opened, 0);
    cluster.still_serves();
}
