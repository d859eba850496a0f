//! Requests that are aborted by name in every phase, and clients that leave.

use std::thread;
use std::time::Duration;

use baton_engine::run::options::Role;
use serde_json::{Value, json};

use super::harness::cluster::{
    Cluster, LLAMA, Node, greedy, options, prefill_leg, prompt, same_choices, with,
};
use super::harness::http;

fn abort(node: &Node, id: &str) -> Value {
    node.post("/abort_requests", &json!({"request_ids": [id]})).ok()["results"][id].clone()
}

fn paced(role: Role) -> Node {
    let mut options = options(LLAMA, role);
    (options.pace, options.max_num_batched_tokens) = (Some(Duration::from_millis(50)), 16);
    Node::start(options)
}

#[track_caller]
fn ended_without_a_lease(reply: &http::Reply) {
    let reply = reply.ok();
    assert_eq!(reply["choices"][0]["finish_reason"], "abort", "{reply}");
    assert!(reply["kv_transfer_params"].is_null(), "{reply}");
}

#[test]
fn an_abort_while_p_computes_ends_the_request_without_a_lease() {
    let p = paced(Role::Prefill);
    // Eight steps of 50 ms.
    let body = greedy(&prompt(1, 120), 4);
    thread::scope(|scope| {
        let call = scope.spawn(|| p.prefill("leaving", &body));
        p.wait_until("it does not run", |kv| kv["requests"]["running"] == 1);
        abort(&p, "leaving");
        ended_without_a_lease(&call.join().expect("an answer"));
    });
    assert_eq!(p.kv()["leases"]["opened"], 0);
    p.is_clean();
}

#[test]
fn an_abort_that_overtakes_its_request_wins() {
    let cluster = Cluster::of(LLAMA);
    let body = greedy(&prompt(1, 40), 4);
    assert_eq!(abort(&cluster.p, "overtaken"), "unknown");
    ended_without_a_lease(&cluster.p.prefill("overtaken", &body));
    assert_eq!(cluster.p.kv()["leases"]["opened"], 0);
    cluster.agrees(&body);
    cluster.is_clean();
}

#[test]
fn an_abort_of_a_decode_leg_that_has_not_arrived_releases_its_lease() {
    let cluster = Cluster::of(LLAMA);
    let body = greedy(&prompt(1, 40), 4);
    let handoff = cluster.p.open_lease(&body);
    abort(&cluster.d, "overtaken");
    ended_without_a_lease(&cluster.d.generate("overtaken", &with(&body, "kv_transfer_params", handoff)));
    cluster.is_clean();
}

#[test]
fn an_abort_after_p_has_answered_closes_the_lease_by_the_requests_name() {
    let cluster = Cluster::of(LLAMA);
    let body = greedy(&prompt(1, 40), 4);
    let reply = cluster.p.prefill("held", &body).ok();
    assert_eq!(cluster.p.kv()["leases"]["live"], 1);
    assert_eq!(abort(&cluster.p, "held"), "released");
    cluster.p.is_clean();
    let alone = cluster.one.generate("alone", &body).ok();
    let decoded = cluster.d.decode(&body, &reply["kv_transfer_params"]).ok();
    same_choices(&decoded, &alone);
    assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 1.0);
    cluster.is_clean();
}

#[test]
fn an_abort_during_the_stream_ends_stream_and_sequence() {
    let (p, d) = (Node::start(options(LLAMA, Role::Prefill)), paced(Role::Decode));
    let body = with(&greedy(&prompt(1, 40), 100), "stream", json!(true));
    let body = with(&body, "kv_transfer_params", p.open_lease(&body));
    thread::scope(|scope| {
        let call = scope.spawn(|| d.generate("streaming", &body));
        d.wait_until("it does not run", |kv| kv["requests"]["running"] == 1);
        abort(&d, "streaming");
        let reply = call.join().expect("an answer");
        assert!(reply.text.contains("\"finish_reason\":\"abort\""), "{}", reply.text);
        assert!(reply.text.trim_end().ends_with("data: [DONE]"), "{}", reply.text);
    });
    for node in [&p, &d] {
        node.is_clean();
    }
}

#[test]
fn a_cancel_while_p_computes_or_d_decodes_frees_every_block() {
    let (p, d) = (paced(Role::Prefill), paced(Role::Decode));
    let body = greedy(&prompt(1, 120), 30);
    let text = prefill_leg(&body).to_string();
    let call = http::send(p.http, "POST", "/v1/completions", &[], &text);
    p.wait_until("it does not run", |kv| kv["requests"]["running"] == 1);
    drop(call);
    p.is_clean();
    assert_eq!(p.kv()["leases"]["opened"], 0);

    let text = with(&body, "kv_transfer_params", p.open_lease(&body)).to_string();
    let call = http::send(d.http, "POST", "/v1/completions", &[], &text);
    d.wait_until("it does not run", |kv| kv["requests"]["running"] == 1);
    drop(call);
    for node in [&p, &d] {
        node.is_clean();
    }
}
