//! Handoffs whose blocks no longer exist: never a wrong answer, never a hang.

use std::time::Duration;

use baton_connector::fetch::LoadFailurePolicy;
use baton_engine::run::options::Role;
use serde_json::{Value, json};

use crate::harness::cluster::{Cluster, LLAMA, Node, fresh_id, greedy, options, prompt, same_choices};
use crate::harness::http::Reply;

/// A cluster whose decode engine has this policy, and whose prefill engine ends quickly.
fn cluster(policy: LoadFailurePolicy) -> Cluster {
    Cluster::with(LLAMA, |options| {
        options.kv_load_failure_policy = policy;
        options.shutdown_timeout = Duration::from_millis(200);
    })
}

fn release(p: &Node, handoff: &Value) {
    let reply = p.post("/kv/release", &json!({"handle": handoff["remote_handle"], "reason": "test"})).ok();
    assert_eq!(reply["result"], "released");
    p.is_clean();
}

#[track_caller]
fn recomputed(cluster: &Cluster, body: &Value, reply: &Reply) {
    let alone = cluster.one.generate(&fresh_id(), body).ok();
    same_choices(&reply.ok(), &alone);
    assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 1.0);
    cluster.d.is_clean();
}

#[track_caller]
fn failed(cluster: &Cluster, reply: &Reply) {
    assert_eq!((reply.status, reply.code().as_deref()), (503, Some("kv_gone")), "{}", reply.text);
    cluster.d.is_clean();
}

#[test]
fn a_released_handoff_is_recomputed_under_policy_recompute() {
    let cluster = cluster(LoadFailurePolicy::Recompute);
    let body = greedy(&prompt(1, 45), 12);
    let handoff = cluster.p.open_lease(&body);
    release(&cluster.p, &handoff);
    recomputed(&cluster, &body, &cluster.d.decode(&body, &handoff));
    cluster.is_clean();
}

#[test]
fn a_released_handoff_is_a_typed_error_under_policy_fail() {
    let cluster = cluster(LoadFailurePolicy::Fail);
    let body = greedy(&prompt(2, 45), 12);
    let handoff = cluster.p.open_lease(&body);
    release(&cluster.p, &handoff);
    failed(&cluster, &cluster.d.decode(&body, &handoff));
    cluster.agrees(&body);
    cluster.is_clean();
}

/// P's blocks of a prompt are reallocated to another prompt before D reads them: their bytes belong to the other
/// prompt.
#[test]
fn released_blocks_of_another_prompt_are_never_used() {
    let cluster = Cluster::with(LLAMA, |options| options.kv_blocks = Some(20));
    let body = greedy(&prompt(3, 120), 8);
    let handoff = cluster.p.open_lease(&body);
    release(&cluster.p, &handoff);
    let other = cluster.p.open_lease(&greedy(&prompt(4, 120), 8));
    assert_ne!(other["remote_handle"], handoff["remote_handle"]);
    let alone = cluster.one.generate(&fresh_id(), &body).ok();
    same_choices(&cluster.d.decode(&body, &handoff).ok(), &alone);
    release(&cluster.p, &other);
    cluster.is_clean();
}

/// Another engine on the same port: its blocks are not the leased ones.
fn restarted(policy: LoadFailurePolicy, check: impl Fn(&Cluster, &Value, &Reply)) {
    let mut cluster = cluster(policy);
    let body = greedy(&prompt(5, 45), 12);
    let handoff = cluster.p.open_lease(&body);
    let mut again = options(LLAMA, Role::Prefill);
    again.side_channel = cluster.p.side_channel();
    std::mem::replace(&mut cluster.p, Node::start(options(LLAMA, Role::Prefill))).stop();
    cluster.p = Node::start(again);
    let fresh = cluster.p.open_lease(&body);
    assert_eq!(fresh["remote_port"], handoff["remote_port"]);
    assert_ne!(fresh["remote_epoch"], handoff["remote_epoch"]);
    check(&cluster, &body, &cluster.d.decode(&body, &handoff));
    // The new engine's own handoff is still good.
    let alone = cluster.one.generate(&fresh_id(), &body).ok();
    same_choices(&cluster.d.decode(&body, &fresh).ok(), &alone);
    cluster.is_clean();
}

#[test]
fn a_handoff_from_before_a_restart_is_recomputed_under_policy_recompute() {
    restarted(LoadFailurePolicy::Recompute, recomputed);
}

#[test]
fn a_handoff_from_before_a_restart_fails_under_policy_fail() {
    restarted(LoadFailurePolicy::Fail, |cluster, _, reply| failed(cluster, reply));
}

#[test]
fn a_handoff_from_a_dead_engine_is_recomputed() {
    let mut cluster = cluster(LoadFailurePolicy::Recompute);
    let body = greedy(&prompt(6, 45), 12);
    let handoff = cluster.p.open_lease(&body);
    std::mem::replace(&mut cluster.p, Node::start(options(LLAMA, Role::Prefill))).stop();
    recomputed(&cluster, &body, &cluster.d.decode(&body, &handoff));
}

#[test]
fn a_handoff_serves_one_reader_and_then_ends() {
    let cluster = cluster(LoadFailurePolicy::Fail);
    let body = greedy(&prompt(7, 45), 12);
    let handoff = cluster.p.open_lease(&body);
    cluster.d.decode(&body, &handoff).ok();
    cluster.d.forget();
    failed(&cluster, &cluster.d.decode(&body, &handoff));
    cluster.is_clean();
}
