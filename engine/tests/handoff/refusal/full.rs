//! A decode engine that cannot take a request releases the lease, or leaves it to a router that settles. Another
//! engine then gets the same, still live handoff.

use std::io::Write;
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use baton_connector::fetch::LoadFailurePolicy;
use baton_engine::run::options::Role;
use serde_json::{Value, json};

use crate::harness::cluster::{Cluster, LLAMA, Node, fresh_id, greedy, options, prompt, same_choices, with};
use crate::harness::http;
use crate::harness::http::Reply;

const SETTLES: (&str, &str) = ("x-baton-router-settles", "1");

fn decode(d: &Node, body: &Value, handoff: &Value, headers: &[(&str, &str)]) -> Reply {
    let leg = with(body, "kv_transfer_params", handoff.clone()).to_string();
    http::call(d.http, "POST", "/v1/completions", headers, &leg)
}

/// The router's next decode engine takes the request.
#[track_caller]
fn taken_by_another(cluster: &Cluster, body: &Value, handoff: &Value) {
    assert_eq!(cluster.p.kv()["leases"]["live"], 1, "the lease is still there");
    let answer = cluster.d.decode(body, handoff).ok();
    same_choices(&answer, &cluster.one.generate(&fresh_id(), body).ok());
    assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 0.0);
    assert_eq!(cluster.p.metric("baton_kv_leases_opened_total"), 1.0, "there was no second prefill");
}

fn a_full_engine(check: impl FnOnce(&Cluster, &Node, Value, Value)) {
    let mut small = options(LLAMA, Role::Decode);
    (small.max_num_seqs, small.max_waiting, small.pace) = (1, 1, Some(Duration::from_millis(50)));
    let (cluster, full) = (Cluster::of(LLAMA), Node::start(small));
    let body = greedy(&prompt(1, 45), 8);
    let handoff = cluster.p.open_lease(&body);
    let long = |seed| greedy(&prompt(seed, 10), 40);
    thread::scope(|scope| {
        let first = scope.spawn(|| full.generate(&fresh_id(), &long(2)).ok());
        full.wait_until("nothing runs", |kv| kv["requests"]["running"] == 1);
        let second = scope.spawn(|| full.generate(&fresh_id(), &long(3)).ok());
        full.wait_until("nothing waits", |kv| kv["requests"]["waiting"] == 1);
        check(&cluster, &full, body, handoff);
        drop((first.join().expect("an answer"), second.join().expect("an answer")));
    });
    full.is_clean();
    cluster.is_clean();
}

#[test]
fn a_full_engine_releases_the_lease_without_a_settling_router() {
    a_full_engine(|cluster, full, body, handoff| {
        let reply = decode(full, &body, &handoff, &[]);
        assert_eq!(reply.status, 429, "{}", reply.text);
        cluster.p.is_clean();
    });
}

#[test]
fn a_full_engine_leaves_the_lease_to_a_settling_router() {
    a_full_engine(|cluster, full, body, handoff| {
        let reply = decode(full, &body, &handoff, &[SETTLES]);
        assert_eq!(reply.status, 429, "{}", reply.text);
        taken_by_another(cluster, &body, &handoff);
    });
}

#[test]
fn a_draining_engine_releases_the_lease() {
    let mut slow = options(LLAMA, Role::Decode);
    (slow.pace, slow.shutdown_timeout) = (Some(Duration::from_millis(50)), Duration::from_secs(30));
    let (p, d) = (Node::start(options(LLAMA, Role::Prefill)), Node::start(slow));
    let body = greedy(&prompt(1, 45), 8);
    let handoff = p.open_lease(&body);
    thread::scope(|scope| {
        let running = scope.spawn(|| d.generate(&fresh_id(), &greedy(&prompt(2, 10), 40)).ok());
        d.wait_until("nothing runs", |kv| kv["requests"]["running"] == 1);
        d.begin_to_stop();
        // Another thread handles the signal.
        while d.get("/health").status == 200 {
            thread::yield_now();
        }
        let reply = decode(&d, &body, &handoff, &[]);
        assert_eq!((reply.status, reply.code().as_deref()), (503, Some("draining")), "{}", reply.text);
        p.is_clean();
        let answer = running.join().expect("an answer");
        assert_eq!(answer["choices"][0]["finish_reason"], "length", "what runs may finish");
    });
}

#[test]
fn a_failed_fetch_leaves_the_lease_to_a_settling_router() {
    let mut strict = options(LLAMA, Role::Decode);
    strict.kv_load_failure_policy = LoadFailurePolicy::Fail;
    let (cluster, strict) = (Cluster::of(LLAMA), Node::start(strict));
    let body = greedy(&prompt(1, 45), 8);
    let handoff = cluster.p.open_lease(&body);
    // A port without a listener: P cannot be reached there.
    let vacant =
        std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("a port").port();
    let reply = decode(&strict, &body, &with(&handoff, "remote_port", json!(vacant)), &[SETTLES]);
    assert_eq!((reply.status, reply.code().as_deref()), (503, Some("kv_handshake_failed")), "{}", reply.text);
    strict.is_clean();
    taken_by_another(&cluster, &body, &handoff);
    cluster.is_clean();
}

/// An engine whose body budget is used up, and a decode leg as a router writes it, with the handoff first.
fn an_engine_full_of_bodies(check: impl FnOnce(&Cluster, &dyn Fn(&[(&str, &str)]) -> Reply, Value, Value)) {
    const BUDGET: usize = 64 << 10;
    let mut small = options(LLAMA, Role::Decode);
    small.body_bytes_total = BUDGET;
    let (cluster, full) = (Cluster::of(LLAMA), Node::start(small));
    let body = greedy(&prompt(1, 45), 8);
    let handoff = cluster.p.open_lease(&body);
    let mut slow = TcpStream::connect(full.http).expect("the engine listens");
    let head = format!("POST /tokenize HTTP/1.1\r\nhost: d\r\ncontent-length: {}\r\n\r\n", 2 * BUDGET);
    slow.write_all(&[head.into_bytes(), vec![b' '; BUDGET - 64]].concat()).expect("the engine reads");
    let ask =
        |headers: &[(&str, &str)], leg: &str| http::call(full.http, "POST", "/v1/completions", headers, leg);
    let plain = with(&body, "user", json!("u".repeat(2048))).to_string();
    full.wait_until("there is room", |_| ask(&[], &plain).status == 429);
    let leg = format!("{{\"kv_transfer_params\":{handoff},{}", &plain[1..]);
    check(&cluster, &|headers| ask(headers, &leg), body, handoff);
    drop(slow);
    full.is_clean();
    cluster.is_clean();
}

#[test]
fn an_engine_without_body_budget_releases_the_lease_that_it_refuses() {
    an_engine_full_of_bodies(|cluster, ask, _, _| {
        let reply = ask(&[]);
        assert_eq!((reply.status, reply.code().as_deref()), (429, Some("overloaded")), "{}", reply.text);
        cluster.p.is_clean();
    });
}

#[test]
fn an_engine_without_body_budget_leaves_the_lease_to_a_settling_router() {
    an_engine_full_of_bodies(|cluster, ask, body, handoff| {
        let reply = ask(&[SETTLES]);
        assert_eq!(reply.status, 429, "{}", reply.text);
        taken_by_another(cluster, &body, &handoff);
    });
}
