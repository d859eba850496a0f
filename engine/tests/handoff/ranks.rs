//! KV caches with different shards of heads and different blocks on the two engines of a handoff. Also several
//! consumers of one handoff, and ranks that do not answer.

use std::net::TcpListener;

use baton_connector::fetch::LoadFailurePolicy;
use baton_engine::engine::Engine;
use baton_engine::run::options::{Role, StartError};
use serde_json::{Value, json};

use super::harness::cluster::{
    LLAMA, Node, fresh_id, greedy, options, prefill_leg, prompt, same_choices, with,
};
use super::harness::wide::wide;
use super::observe::digests::same_bytes;

/// An engine with `ranks` KV ranks and blocks of `block_tokens` tokens.
fn node(role: Role, ranks: usize, block_tokens: usize) -> Node {
    let mut options = options(wide(), role);
    (options.kv_ranks, options.block_tokens, options.kv_blocks) = (ranks, block_tokens, Some(64));
    (options.fetch_workers, options.max_num_seqs) = (1, 8);
    Node::start(options)
}

fn reference() -> Node {
    Node::start(options(wide(), Role::Both))
}

fn fetched(d: &Node) -> f64 {
    d.metric("vllm:external_prefix_cache_hits_total")
}

/// Hands a request over and compares the answer with one engine's. Returns how many tokens were read.
#[track_caller]
fn agrees(p: &Node, d: &Node, one: &Node, body: &Value) -> f64 {
    let before = fetched(d);
    let handoff = p.open_lease(body);
    let (two, alone) = (d.decode(body, &handoff).ok(), one.generate(&fresh_id(), body).ok());
    same_choices(&two, &alone);
    assert_eq!(d.metric("baton_kv_load_failures_total"), 0.0, "nothing was computed a second time");
    fetched(d) - before
}

#[test]
fn any_ranks_hand_over_to_any_ranks_and_any_blocks_to_any_blocks_bit_by_bit() {
    let all = || [1, 2, 4].into_iter().flat_map(|ranks| [8, 16, 32].map(|block| (ranks, block)));
    let nodes =
        |role| all().map(|(ranks, block)| ((ranks, block), node(role, ranks, block))).collect::<Vec<_>>();
    let (producers, consumers, one) = (nodes(Role::Prefill), nodes(Role::Decode), reference());
    let mut seed = 0;
    for (theirs, p) in &producers {
        for (ours, d) in &consumers {
            // Partial last blocks on both sides, and more than one of the larger blocks.
            seed += 1;
            let prompt = prompt(seed, 69);
            let read = agrees(p, d, &one, &greedy(&prompt, 6));
            assert_eq!(read, 69.0, "from {theirs:?} to {ours:?} (ranks, tokens of a block)");
            if theirs.1 == 8 && ours.1 == 8 {
                same_bytes(p, d, &prompt);
            }
        }
    }
    for (_, node) in producers.iter().chain(&consumers) {
        node.is_clean();
    }
}

#[test]
fn a_prefix_that_ends_inside_a_foreign_block_is_not_read_twice() {
    let one = reference();
    for (theirs, ours) in [((2, 32), (4, 8)), ((4, 16), (1, 8)), ((1, 8), (2, 32)), ((2, 16), (2, 16))] {
        let (p, d) = (node(Role::Prefill, theirs.0, theirs.1), node(Role::Decode, ours.0, ours.1));
        for (seed, warm) in [(1, 8), (2, 24), (3, 40), (4, 64)] {
            let prompt = prompt(seed + 100 * theirs.1 as u64, 75);
            d.generate("warm", &greedy(&prompt[..warm], 1)).ok();
            let cached = warm / ours.1 * ours.1;
            let read = agrees(&p, &d, &one, &greedy(&prompt, 6));
            assert_eq!(read, (75 - cached) as f64, "{theirs:?} to {ours:?}, {warm} tokens were here");
        }
        p.is_clean();
        d.is_clean();
    }
}

#[test]
fn one_handoff_over_several_links_serves_all_choices_of_a_request() {
    let (p, d, one) = (node(Role::Prefill, 4, 16), node(Role::Decode, 2, 8), reference());
    let body = json!({
        "prompt": prompt(7, 45), "max_tokens": 8, "temperature": 1.0, "seed": 11, "n": 4,
        "ignore_eos": true, "return_token_ids": true, "logprobs": 2,
    });
    assert_eq!(agrees(&p, &d, &one, &body), 45.0, "read once, for four choices");
    p.is_clean();
    d.is_clean();
}

/// The handoff of a producer with a lease for `consumers` consumers.
#[track_caller]
fn open_lease_for(p: &Node, body: &Value, consumers: usize) -> Value {
    let mut leg = prefill_leg(body);
    leg["kv_transfer_params"]["remote_consumers"] = json!(consumers);
    let handoff = p.generate(&fresh_id(), &leg).ok()["kv_transfer_params"].clone();
    assert_eq!(handoff["remote_consumers"], consumers, "{handoff}");
    handoff
}

#[test]
fn several_decode_engines_read_one_handoff_and_the_last_ends_the_lease() {
    let p = node(Role::Prefill, 2, 16);
    let consumers = [node(Role::Decode, 1, 16), node(Role::Decode, 4, 8), node(Role::Decode, 2, 16)];
    let one = reference();
    let body = greedy(&prompt(8, 50), 8);
    let alone = one.generate(&fresh_id(), &body).ok();
    let handoff = open_lease_for(&p, &body, 3);
    for (n, d) in consumers.iter().enumerate() {
        assert_eq!(p.kv()["leases"]["live"], 1, "{n} of 3 have read");
        same_choices(&d.decode(&body, &handoff).ok(), &alone);
        assert_eq!(fetched(d), 50.0);
        d.is_clean();
    }
    p.is_clean();
}

#[test]
fn a_refusal_of_a_shared_handoff_leaves_the_lease_to_the_others() {
    let p = node(Role::Prefill, 2, 16);
    let (refuses, takes, one) = (node(Role::Decode, 2, 16), node(Role::Decode, 4, 16), reference());
    let body = greedy(&prompt(9, 50), 8);
    let handoff = open_lease_for(&p, &body, 3);
    for bad in [with(&body, "temperature", json!(-1)), with(&body, "model", json!("another"))] {
        assert!(refuses.decode(&bad, &handoff).status >= 400);
    }
    refuses.is_clean();
    same_choices(&takes.decode(&body, &handoff).ok(), &one.generate(&fresh_id(), &body).ok());
    assert_eq!(fetched(&takes), 50.0);
    // Two have left and one has read: the lease waits for no other consumer.
    p.is_clean();
    takes.is_clean();
}

/// The handoff with the port of one of its ranks replaced.
fn with_port(handoff: &Value, rank: usize, port: u16) -> Value {
    let mut ports = handoff["remote_rank_ports"].clone();
    ports[rank] = json!(port);
    let first = ports[0].clone();
    with(&with(handoff, "remote_rank_ports", ports), "remote_port", first)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port").port()
}

/// D computes the correct answer itself, and all blocks are free on both sides.
#[track_caller]
fn recomputed(p: &Node, d: &Node, one: &Node, body: &Value, handoff: &Value) {
    let before = d.metric("baton_kv_load_failures_total");
    same_choices(&d.decode(body, handoff).ok(), &one.generate(&fresh_id(), body).ok());
    assert_eq!(d.metric("baton_kv_load_failures_total") - before, 1.0);
    d.is_clean();
    p.is_clean();
}

#[test]
fn a_dead_rank_of_the_producer_fails_the_handoff_and_frees_every_block() {
    let (p, d, one) = (node(Role::Prefill, 4, 16), node(Role::Decode, 2, 16), reference());
    // Heartbeats and releases go to rank 0 first.
    for (seed, rank) in [(10, 0), (11, 1), (12, 3)] {
        let body = greedy(&prompt(seed, 50), 8);
        recomputed(&p, &d, &one, &body, &with_port(&p.open_lease(&body), rank, free_port()));
    }
}

#[test]
fn a_silent_rank_of_the_producer_is_an_error_within_the_bound() {
    let (p, d, one) = (node(Role::Prefill, 2, 16), node(Role::Decode, 4, 16), reference());
    // Accepts connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let body = greedy(&prompt(13, 50), 8);
    let handoff = with_port(&p.open_lease(&body), 1, silent.local_addr().expect("bound").port());
    recomputed(&p, &d, &one, &body, &handoff);
}

#[test]
fn a_dead_rank_is_a_typed_error_under_policy_fail() {
    let p = node(Role::Prefill, 2, 16);
    let mut strict = options(wide(), Role::Decode);
    strict.kv_ranks = 2;
    strict.kv_load_failure_policy = LoadFailurePolicy::Fail;
    let d = Node::start(strict);
    let body = greedy(&prompt(14, 50), 8);
    let reply = d.decode(&body, &with_port(&p.open_lease(&body), 1, free_port()));
    assert_eq!((reply.status, reply.code().as_deref()), (503, Some("kv_handshake_failed")), "{}", reply.text);
    d.is_clean();
    p.is_clean();
}

#[test]
fn a_handoff_that_lies_about_its_cut_is_refused_before_a_byte_is_read() {
    let (p, d, one) = (node(Role::Prefill, 2, 16), node(Role::Decode, 2, 16), reference());
    let swapped = |handoff: &Value| {
        let ports = json!([handoff["remote_rank_ports"][1], handoff["remote_rank_ports"][0]]);
        let first = ports[0].clone();
        with(&with(handoff, "remote_rank_ports", ports), "remote_port", first)
    };
    let half = |handoff: &Value| with(handoff, "remote_block_size", json!(32));
    let lies: [&dyn Fn(&Value) -> Value; 2] = [&swapped, &half];
    for (seed, lie) in (15..).zip(lies) {
        let body = greedy(&prompt(seed, 30), 8);
        let handoff = p.open_lease(&body);
        same_choices(&d.decode(&body, &lie(&handoff)).ok(), &one.generate(&fresh_id(), &body).ok());
        assert_eq!(fetched(&d), 0.0, "{}", lie(&handoff));
        // The producer does not recognise these ranks in a release either: the test releases the lease itself.
        p.post("/kv/release", &json!({"handle": handoff["remote_handle"]})).ok();
        d.is_clean();
    }
    p.is_clean();
}

#[test]
fn ranks_that_do_not_divide_the_heads_are_an_error_at_the_start() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _inside = runtime.enter();
    for (model, ranks, says) in [(wide(), 3, "4 KV heads"), (LLAMA, 4, "2 KV heads"), (LLAMA, 0, "1 to 64")] {
        let mut options = options(model, Role::Both);
        options.kv_ranks = ranks;
        match Engine::start(options, &mut |_| {}) {
            Err(StartError::Options(why)) => assert!(why.contains(says), "{why}"),
            other => panic!("{ranks} ranks: {:?}", other.map(|engine| engine.http())),
        }
    }
}
