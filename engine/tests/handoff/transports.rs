//! The same handoffs over shared memory and over TCP, and the choice between them. The other tests use the automatic
//! choice: shared memory.

use baton_connector::fetch::LoadFailurePolicy;
use baton_engine::handoff::transport::KvTransport;
use baton_engine::run::options::Role;
use serde_json::json;

use super::harness::cluster::{
    BLOCK, Cluster, LLAMA, Node, QWEN2, fresh_id, greedy, options, prompt, same_choices,
};
use super::observe::digests::same_bytes;

/// Fetches that a transport completed.
pub(crate) fn carried(node: &Node, transport: &str) -> u64 {
    let label = format!("transport=\"{transport}\"");
    let text = node.get("/metrics").text;
    let line = text.lines().find(|l| l.starts_with("baton_kv_transfers_total{") && l.contains(&label));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
}

fn cluster(p: KvTransport, d: KvTransport, policy: LoadFailurePolicy) -> Cluster {
    Cluster::each(LLAMA, |options| {
        options.kv_load_failure_policy = policy;
        match options.role {
            Role::Prefill => options.kv_transport = p,
            Role::Decode => options.kv_transport = d,
            Role::Both | Role::Standalone => {}
        }
    })
}

fn both_legs_agree(cluster: &Cluster, transport: &str) {
    let lengths = [2, BLOCK, BLOCK + 1, 3 * BLOCK + 1, 104, 121];
    for (seed, len) in lengths.into_iter().enumerate() {
        let prompt = prompt(seed as u64 + 1, len);
        cluster.agrees(&greedy(&prompt, 12));
        same_bytes(&cluster.p, &cluster.d, &prompt);
    }
    assert_eq!(carried(&cluster.d, transport), lengths.len() as u64, "over {transport}");
    let other = if transport == "shm" { "tcp" } else { "shm" };
    assert_eq!(carried(&cluster.d, other), 0, "over {other}");
    assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 0.0);
    cluster.is_clean();
}

#[test]
fn engines_on_one_host_read_shared_memory_and_match_a_single_engine() {
    both_legs_agree(&cluster(KvTransport::Auto, KvTransport::Auto, LoadFailurePolicy::Fail), "shm");
    both_legs_agree(&cluster(KvTransport::Shm, KvTransport::Shm, LoadFailurePolicy::Fail), "shm");
}

#[test]
fn an_engine_with_transport_tcp_neither_offers_nor_reads_shared_memory() {
    both_legs_agree(&cluster(KvTransport::Tcp, KvTransport::Auto, LoadFailurePolicy::Fail), "tcp");
    both_legs_agree(&cluster(KvTransport::Auto, KvTransport::Tcp, LoadFailurePolicy::Fail), "tcp");
}

#[test]
fn every_model_is_the_same_over_tcp_and_shared_memory() {
    for transport in [KvTransport::Tcp, KvTransport::Auto] {
        let cluster = Cluster::with(QWEN2, |options| options.kv_transport = transport);
        let body = json!({
            "prompt": prompt(3, 50), "max_tokens": 12, "temperature": 0.9, "seed": 7, "n": 2, "logprobs": 3,
            "ignore_eos": true, "return_token_ids": true,
        });
        cluster.agrees(&body);
        cluster.is_clean();
    }
}

#[test]
fn without_shared_memory_at_the_producer_transport_shm_is_an_error() {
    let cluster = cluster(KvTransport::Tcp, KvTransport::Shm, LoadFailurePolicy::Fail);
    let body = greedy(&prompt(1, 45), 4);
    let handoff = cluster.p.open_lease(&body);
    let reply = cluster.d.decode(&body, &handoff);
    assert_eq!(reply.status, 503, "{}", reply.text);
    assert_eq!(carried(&cluster.d, "tcp") + carried(&cluster.d, "shm"), 0);
    cluster.p.post("/kv/release", &json!({"handle": handoff["remote_handle"], "reason": "test"})).ok();
    cluster.is_clean();
}

/// A handoff whose blocks were reallocated to another prompt before D reads, on each transport.
#[test]
fn reallocated_blocks_are_never_used_on_any_transport() {
    for transport in [KvTransport::Auto, KvTransport::Shm, KvTransport::Tcp] {
        let cluster = Cluster::with(LLAMA, |options| {
            options.kv_blocks = Some(20);
            options.kv_transport = transport;
        });
        let body = greedy(&prompt(3, 120), 8);
        let handoff = cluster.p.open_lease(&body);
        let release = |handoff: &serde_json::Value| {
            let body = json!({"handle": handoff["remote_handle"], "reason": "test"});
            assert_eq!(cluster.p.post("/kv/release", &body).ok()["result"], "released");
        };
        release(&handoff);
        let other = cluster.p.open_lease(&greedy(&prompt(4, 120), 8));
        let alone = cluster.one.generate(&fresh_id(), &body).ok();
        same_choices(&cluster.d.decode(&body, &handoff).ok(), &alone);
        assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 1.0, "computed again");
        release(&other);
        cluster.is_clean();
    }
}

/// The producer ends and another engine starts on its port: D chooses the transport of each again, and finds shared
/// memory again.
#[test]
fn a_producer_that_was_started_again_is_found_by_shared_memory_again() {
    let mut cluster = cluster(KvTransport::Auto, KvTransport::Auto, LoadFailurePolicy::Recompute);
    let body = greedy(&prompt(5, 45), 6);
    cluster.hand_over(&body);
    let mut again = options(LLAMA, Role::Prefill);
    again.side_channel = cluster.p.side_channel();
    std::mem::replace(&mut cluster.p, Node::start(options(LLAMA, Role::Prefill))).stop();
    cluster.p = Node::start(again);
    cluster.d.forget();
    cluster.agrees(&body);
    assert_eq!((carried(&cluster.d, "shm"), carried(&cluster.d, "tcp")), (2, 0));
    assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 0.0);
    cluster.is_clean();
}
