//! The router is killed, or told to stop; an engine is told to stop. Whoever goes on holds nothing for the one
//! that is gone, and whoever is told to stop finishes what it has begun.

use std::net::TcpStream;

use serde_json::{Value, json};

use crate::harness::{AT_ONCE, Ask, Cluster, PATIENCE};

#[test]
fn a_router_that_is_killed_while_the_prefill_engine_computes_leaves_nothing_held() {
    let mut cluster =
        Cluster::new().prefill("--max-num-batched-tokens 64 --max-num-seqs 8 --pace-ms 60").start();
    let _waiting = cluster.send(&Ask::fresh(1000));
    cluster.prefill[0].shows("two chunks are computed", |books| books.running == 1 && books.steps >= 2);
    cluster.kill_router();
    cluster.settled(AT_ONCE);
    assert_eq!(cluster.prefill[0].books().leases_opened, 0, "it was lent to nobody");
}

#[test]
fn a_router_that_is_killed_in_mid_stream_leaves_nothing_held() {
    let mut cluster = Cluster::new().decode("--pace-ms 30").start();
    let mut stream = cluster.send(&Ask::fresh(100).tokens(400).streamed()).stream();
    stream.event().expect("an event");
    let _waiting = cluster.send(&Ask::fresh(100).tokens(400));
    cluster.decode[0].shows("both run", |books| books.running == 2);
    cluster.kill_router();
    cluster.settled(AT_ONCE);
}

#[test]
fn a_router_that_is_killed_between_the_engines_leaves_nothing_held() {
    let mut cluster = Cluster::new().start();
    cluster.decode[0].pause();
    let _waiting = cluster.send(&Ask::fresh(100));
    cluster.prefill[0].shows("the blocks are lent", |books| books.leases == 1);
    cluster.decode[0].is_sent_something();
    cluster.kill_router();
    // The handoff is in the decode engine's socket: it fetches it or gives it back, well before its expiry.
    cluster.decode[0].go_on();
    cluster.settled(AT_ONCE);
}

#[test]
fn a_router_that_is_told_to_stop_finishes_what_it_has_begun() {
    let mut cluster = Cluster::new().decode("--pace-ms 20").start();
    let usage = json!({"include_usage": true});
    let ask = Ask::fresh(100).tokens(40).streamed().with("stream_options", usage);
    let mut stream = cluster.send(&ask).stream();
    stream.event().expect("an event");
    let whole = cluster.send(&Ask::fresh(100).tokens(40));
    cluster.decode[0].shows("both run", |books| books.running == 2);
    cluster.interrupt_router();
    let reply = whole.reply();
    assert_eq!(reply.json()["usage"]["completion_tokens"], 40, "{}", reply.json());
    let events: Vec<String> = std::iter::from_fn(|| stream.event()).collect();
    let [.., usage, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done, "[DONE]");
    let usage: Value = serde_json::from_str(usage).expect("JSON");
    assert_eq!(usage["usage"]["completion_tokens"], 40, "{usage}");
    cluster.router_ends_well();
    assert!(TcpStream::connect(&cluster.url).is_err(), "nobody listens any more");
    cluster.settled(AT_ONCE);
}

#[test]
fn a_decode_engine_that_is_told_to_stop_finishes_what_it_has_begun() {
    let mut cluster = Cluster::new().decode("--pace-ms 20").start();
    let call = cluster.send(&Ask::fresh(100).tokens(40));
    cluster.decode[0].shows("it decodes", |books| books.running == 1);
    cluster.decode[0].interrupt();
    assert_eq!(call.reply().json()["usage"]["completion_tokens"], 40);
    cluster.decode[0].ends_well();
    cluster.settled(AT_ONCE);
}

#[test]
fn a_prefill_engine_that_is_told_to_stop_keeps_what_it_has_lent_until_it_is_fetched() {
    let mut cluster = Cluster::new().start();
    cluster.decode[0].pause();
    let call = cluster.send(&Ask::fresh(100));
    cluster.prefill[0].shows("the blocks are lent", |books| books.leases == 1);
    cluster.decode[0].is_sent_something();
    cluster.prefill[0].interrupt();
    cluster.decode[0].go_on();
    assert_eq!(call.reply().status, 200);
    let fetched = cluster.decode[0].metric("vllm:external_prefix_cache_hits_total", "");
    assert!(fetched >= 96.0, "only {fetched} tokens were fetched");
    cluster.prefill[0].ends_well();
    cluster.settled(PATIENCE);
}
