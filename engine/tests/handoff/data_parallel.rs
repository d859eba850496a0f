//! Several engine cores in one process: each rank has its own pool, leases and side channel. A request and a control
//! request reach their rank. A notice reaches the rank with the lease, wherever it arrives.

use std::thread;
use std::time::Duration;

use baton_engine::run::options::Role;
use serde_json::{Value, json};

use super::harness::cluster::{
    LLAMA, Node, fresh_id, greedy, options, prefill_leg, prompt, same_choices, with,
};
use super::harness::http;
use super::harness::http::Reply;

const RANK: &str = "x-data-parallel-rank";

fn two_ranks(role: Role) -> Node {
    let mut options = options(LLAMA, role);
    options.data_parallel_size = 2;
    Node::start(options)
}

pub(crate) fn at(node: &Node, rank: &str, path: &str, body: &Value) -> Reply {
    http::call(node.http, "POST", path, &[(RANK, rank)], &body.to_string())
}

pub(crate) fn open_lease_at(p: &Node, rank: &str, body: &Value) -> Value {
    at(p, rank, "/v1/completions", &prefill_leg(body)).ok()["kv_transfer_params"].clone()
}

/// Live leases by rank.
fn leases(node: &Node) -> [u64; 2] {
    let kv = node.kv();
    [0, 1].map(|rank| kv["cores"][rank]["leases"]["live"].as_u64().expect("a count"))
}

#[test]
fn a_handoff_between_any_ranks_matches_a_single_engine() {
    let (p, d, one) =
        (two_ranks(Role::Prefill), two_ranks(Role::Decode), Node::start(options(LLAMA, Role::Both)));
    for (seed, (from, to)) in [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")].into_iter().enumerate() {
        let body = greedy(&prompt(seed as u64, 45), 8);
        let handoff = open_lease_at(&p, from, &body);
        assert!(
            handoff["remote_engine_id"].as_str().expect("an id").ends_with(&format!("-dp{from}")),
            "{handoff}"
        );
        let mut expected = [0, 0];
        expected[from.parse::<usize>().expect("a rank")] = 1;
        assert_eq!(leases(&p), expected);
        let answer = at(&d, to, "/v1/completions", &with(&body, "kv_transfer_params", handoff)).ok();
        same_choices(&answer, &one.generate(&fresh_id(), &body).ok());
    }
    assert_eq!(d.metric("vllm:external_prefix_cache_hits_total"), 4.0 * 45.0, "fetched, not computed");
    for rank in [0, 1] {
        let fetched =
            format!("vllm:external_prefix_cache_hits_total{{model_name=\"{LLAMA}\",engine=\"{rank}\"}} 90");
        let text = d.get("/metrics").text;
        assert!(text.contains(&fetched), "{fetched} is not in\n{text}");
    }
    for node in [&p, &d, &one] {
        node.is_clean();
    }
}

#[test]
fn a_notice_to_another_rank_reaches_the_rank_of_the_lease() {
    let (p, d) = (two_ranks(Role::Prefill), two_ranks(Role::Decode));
    let body = greedy(&prompt(1, 45), 8);
    let (at_0, at_1) = (open_lease_at(&p, "0", &body), open_lease_at(&p, "1", &body));
    assert_ne!(at_0["remote_port"], at_1["remote_port"], "a side channel each");
    assert_eq!(leases(&p), [1, 1]);
    // The second lease's notice is sent to the first rank's side channel.
    let astray = with(&at_1, "remote_port", at_0["remote_port"].clone());
    let refused = with(&body, "temperature", json!(-1));
    assert_eq!(d.decode(&refused, &astray).status, 400);
    p.wait_until("the lease of rank 1 is not released", |kv| kv["cores"][1]["leases"]["live"] == 0);
    assert_eq!(leases(&p), [1, 0], "and nothing else");
    assert_eq!(d.decode(&refused, &at_0).status, 400);
    for node in [&p, &d] {
        node.is_clean();
    }
}

#[test]
fn a_verb_is_for_the_named_rank_or_for_whichever_knows() {
    let p = two_ranks(Role::Prefill);
    let body = greedy(&prompt(1, 45), 8);
    let handoff = open_lease_at(&p, "1", &body);
    let release = json!({"handle": handoff["remote_handle"]});
    assert_eq!(at(&p, "0", "/kv/release", &release).ok()["result"], "unknown");
    assert_eq!(leases(&p), [0, 1]);
    assert_eq!(p.post("/kv/release", &release).ok()["result"], "released");
    assert_eq!(p.post("/kv/release", &release).ok()["result"], "already");
    // By name, and before the request is known: every rank remembers it.
    assert_eq!(
        p.post("/abort_requests", &json!({"request_ids": ["early"]})).ok()["results"]["early"],
        "unknown"
    );
    for rank in ["0", "1"] {
        let headers = [(RANK, rank), ("x-request-id", "early")];
        let reply =
            http::call(p.http, "POST", "/v1/completions", &headers, &prefill_leg(&body).to_string()).ok();
        assert_eq!(reply["choices"][0]["finish_reason"], "abort", "rank {rank}: {reply}");
    }
    assert_eq!(at(&p, "1", "/abort_requests", &json!({"request_ids": ["one"]})).status, 200);
    let headers = [(RANK, "0"), ("x-request-id", "one")];
    let leg = prefill_leg(&body).to_string();
    let reply = http::call(p.http, "POST", "/v1/completions", &headers, &leg).ok();
    assert_eq!(
        reply["kv_transfer_params"]["do_remote_prefill"], true,
        "only the other rank remembers: {reply}"
    );
    assert_eq!(
        p.post("/abort_requests", &json!({"request_ids": ["one"]})).ok()["results"]["one"],
        "released"
    );
    p.is_clean();
}

#[test]
fn requests_without_a_rank_are_shared_out_by_load() {
    let mut slow = options(LLAMA, Role::Both);
    (slow.data_parallel_size, slow.pace) = (2, Some(Duration::from_millis(20)));
    let node = Node::start(slow);
    let ask = |seed| greedy(&prompt(seed, 10), 40);
    thread::scope(|scope| {
        let calls = [1, 2].map(|seed| {
            scope.spawn({
                let node = &node;
                move || node.generate(&fresh_id(), &ask(seed)).ok()
            })
        });
        node.wait_until("they do not run side by side", |kv| {
            [0, 1].iter().all(|rank| kv["cores"][rank]["requests"]["running"] == 1)
        });
        for call in calls {
            call.join().expect("an answer");
        }
    });
    node.is_clean();
}

#[test]
fn an_unknown_rank_is_a_400_and_its_handoff_is_released() {
    let (p, d) = (two_ranks(Role::Prefill), two_ranks(Role::Decode));
    let body = greedy(&prompt(1, 45), 8);
    for rank in ["2", "-1", "", "one", "0, 1", "+1", "99999999999999999999"] {
        let handoff = p.open_lease(&body);
        let reply = at(&d, rank, "/v1/completions", &with(&body, "kv_transfer_params", handoff));
        let code = reply.code();
        assert_eq!((reply.status, code.as_deref()), (400, Some("invalid_data_parallel_rank")), "{rank:?}");
        p.is_clean();
    }
    d.is_clean();
}
