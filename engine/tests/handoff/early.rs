//! A handoff that begins before the prefill has finished: the decode engine reads blocks while they are computed. The
//! joint answer equals that of one engine. If the prefill ends in its middle, none of its blocks is used, and all of
//! them are freed.

use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use baton_connector::fetch::LoadFailurePolicy;
use baton_engine::handoff::transport::KvTransport;
use baton_engine::run::options::{EngineOptions, Role};
use serde_json::Value;

use super::harness::cluster::{
    Cluster, LLAMA, Node, QWEN2, QWEN3, fresh_id, greedy, options, prefill_leg, prompt, same_choices,
};
use super::harness::http;
use super::observe::digests::same_bytes;

const PATH: &str = "/v1/completions";

/// A prefill leg with a lease before its end.
pub(crate) struct Early {
    pub(crate) params: Value,
    rest: TcpStream,
    read: String,
}

impl Early {
    /// Sends the request as a router does, and waits for the handoff.
    #[track_caller]
    pub(crate) fn begin(p: &Node, body: &Value) -> Self {
        let headers = [("x-request-id", &*fresh_id()), ("x-baton-early-handoff", "1")];
        let mut rest = http::send(p.http, "POST", PATH, &headers, &prefill_leg(body).to_string());
        let mut read = String::new();
        let mut byte = [0];
        while read.matches("\r\n\r\n").count() == 0 || !read.contains("}}\n\n") {
            assert_eq!(rest.read(&mut byte).expect("an event"), 1, "the answer ended: {read}");
            read.push(char::from(byte[0]));
        }
        let event = read.split_once("data: ").expect("an event").1;
        let event: Value = serde_json::from_str(event.trim_end()).expect("JSON");
        let params = event["kv_transfer_params"].clone();
        assert_eq!(params["remote_growing"], true, "{event}");
        Self { params, rest, read }
    }

    /// The rest of the answer.
    pub(crate) fn end(mut self) -> String {
        self.rest.read_to_string(&mut self.read).expect("the rest of an answer");
        self.read
    }
}

fn agrees(model: &str, whole_blocks: bool, change: impl Fn(&mut EngineOptions)) {
    let cluster = Cluster::with(model, change);
    for (seed, len) in [(1, 49), (2, 96), (3, 121), (4, 144)] {
        let prompt = prompt(seed, len);
        let body = greedy(&prompt, 12);
        let early = Early::begin(&cluster.p, &body);
        let two = cluster.d.decode(&body, &early.params).ok();
        let stream_text = early.end();
        assert!(
            stream_text.contains("\"finish_reason\":\"length\"") && stream_text.contains("[DONE]"),
            "{stream_text}"
        );
        same_choices(&two, &cluster.one.generate(&fresh_id(), &body).ok());
        if whole_blocks {
            same_bytes(&cluster.p, &cluster.d, &prompt);
        }
    }
    assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 0.0);
    assert_eq!(cluster.p.metric("baton_kv_early_leases_total"), 4.0);
    cluster.is_clean();
}

#[test]
fn llama_early_handoff_matches_a_single_engine() {
    agrees(LLAMA, true, |_| {});
}

#[test]
fn qwen3_early_handoff_over_tcp_matches_a_single_engine() {
    agrees(QWEN3, true, |options| options.kv_transport = KvTransport::Tcp);
}

#[test]
fn qwen2_early_handoff_in_slices_matches_a_single_engine() {
    agrees(QWEN2, false, |options| {
        if options.role == Role::Decode {
            options.kv_ranks = 2;
            options.block_tokens = 16;
        }
    });
}

#[test]
fn a_prompt_of_one_step_or_from_the_cache_is_leased_after_its_prefill() {
    let cluster = Cluster::of(LLAMA);
    for len in [20, 20] {
        let headers = [("x-request-id", &*fresh_id()), ("x-baton-early-handoff", "1")];
        let body = greedy(&prompt(7, len), 4);
        let reply = http::call(cluster.p.http, "POST", PATH, &headers, &prefill_leg(&body).to_string()).ok();
        assert_eq!(reply["kv_transfer_params"]["remote_growing"], false);
        cluster.d.decode(&body, &reply["kv_transfer_params"]).ok();
    }
    assert_eq!(cluster.p.metric("baton_kv_early_leases_total"), 0.0);
    cluster.is_clean();
}

/// Steps so small and so slow that a prefill takes a second.
fn slow(options: &mut EngineOptions) {
    (options.max_num_batched_tokens, options.max_num_seqs) = (4, 4);
    options.pace = Some(Duration::from_millis(30));
}

/// A prompt that takes dozens of such steps, and its early handoff.
fn in_its_middle(p: &Node, seed: u64) -> (Value, Early) {
    let body = greedy(&prompt(seed, 140), 6);
    let early = Early::begin(p, &body);
    (body, early)
}

fn slow_producer(model: &str, policy: LoadFailurePolicy) -> Cluster {
    let node = |role| {
        let mut options = options(model, role);
        options.kv_load_failure_policy = policy;
        if role == Role::Prefill {
            slow(&mut options);
        }
        Node::start(options)
    };
    Cluster { p: node(Role::Prefill), d: node(Role::Decode), one: node(Role::Both) }
}

#[test]
fn a_cancelled_prefill_ends_and_the_decode_engine_recomputes() {
    let cluster = slow_producer(LLAMA, LoadFailurePolicy::Recompute);
    let (body, early) = in_its_middle(&cluster.p, 11);
    let (d, params, asked) = (cluster.d.http, early.params.clone(), body.clone());
    let answer = std::thread::spawn(move || {
        let body = super::harness::cluster::with(&asked, "kv_transfer_params", params);
        http::call(d, "POST", PATH, &[("x-request-id", &fresh_id())], &body.to_string())
    });
    cluster.d.wait_until("D fetches", |kv| kv["requests"]["fetching"] == 1);
    drop(early);
    let two = answer.join().expect("an answer").ok();
    same_choices(&two, &cluster.one.generate(&fresh_id(), &body).ok());
    assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 1.0);
    cluster.is_clean();
}

#[test]
fn a_cancelled_prefill_fails_its_decode_under_policy_fail() {
    let cluster = slow_producer(QWEN3, LoadFailurePolicy::Fail);
    let (body, early) = in_its_middle(&cluster.p, 12);
    let (d, params) = (cluster.d.http, early.params.clone());
    let answer = std::thread::spawn(move || {
        let body = super::harness::cluster::with(&body, "kv_transfer_params", params);
        http::call(d, "POST", PATH, &[("x-request-id", &fresh_id())], &body.to_string())
    });
    cluster.d.wait_until("D fetches", |kv| kv["requests"]["fetching"] == 1);
    drop(early);
    let refused = answer.join().expect("an answer");
    assert_eq!((refused.status, refused.code().as_deref()), (503, Some("kv_gone")));
    cluster.is_clean();
}

#[test]
fn a_lease_that_is_released_or_whose_request_is_aborted_ends_its_prefill() {
    let cluster = slow_producer(LLAMA, LoadFailurePolicy::Fail);
    for by_name in [false, true] {
        let (_, early) = in_its_middle(&cluster.p, 13 + u64::from(by_name));
        cluster.p.wait_until("P computes", |kv| kv["requests"]["running"] == 1);
        if by_name {
            let ids =
                serde_json::json!({ "request_ids": [early.params["remote_request_id"]], "leg": "prefill" });
            cluster.p.post("/abort_requests", &ids).ok();
        } else {
            let handle = serde_json::json!({ "handle": early.params["remote_handle"] });
            cluster.p.post("/kv/release", &handle).ok();
        }
        let stream_text = early.end();
        assert!(stream_text.contains("\"finish_reason\":\"abort\""), "{stream_text}");
        cluster.p.is_clean();
    }
}

#[test]
fn a_cancelled_decode_leg_ends_the_prefill_that_it_awaits() {
    let cluster = slow_producer(LLAMA, LoadFailurePolicy::Recompute);
    let (body, early) = in_its_middle(&cluster.p, 15);
    let body = super::harness::cluster::with(&body, "kv_transfer_params", early.params.clone());
    let decode =
        http::send(cluster.d.http, "POST", PATH, &[("x-request-id", &fresh_id())], &body.to_string());
    cluster.d.wait_until("D fetches", |kv| kv["requests"]["fetching"] == 1);
    drop(decode);
    let stream_text = early.end();
    assert!(stream_text.contains("\"finish_reason\":\"abort\""), "{stream_text}");
    cluster.is_clean();
}

/// More concurrent prefills than the decode engine has workers for, and one handoff of computed blocks.
#[test]
fn reads_that_wait_for_a_prefill_do_not_delay_other_reads() {
    // One engine computes one prompt at a time, so each prefill has its own engine.
    let behind = [(); 2].map(|()| {
        let mut options = options(LLAMA, Role::Prefill);
        slow(&mut options);
        Node::start(options)
    });
    let quick = Node::start(options(LLAMA, Role::Prefill));
    let mut decode = options(LLAMA, Role::Decode);
    decode.fetch_workers = 1;
    let (d, one) = (Node::start(decode), Node::start(options(LLAMA, Role::Both)));
    let bodies = [30, 31].map(|seed| greedy(&prompt(seed, 140), 4));
    let early: Vec<Early> = behind.iter().zip(&bodies).map(|(p, body)| Early::begin(p, body)).collect();
    let answers: Vec<_> = bodies
        .iter()
        .zip(&early)
        .map(|(body, early)| {
            let body = super::harness::cluster::with(body, "kv_transfer_params", early.params.clone());
            http::send(d.http, "POST", PATH, &[("x-request-id", &fresh_id())], &body.to_string())
        })
        .collect();
    d.wait_until("D fetches both", |kv| kv["requests"]["fetching"] == 2);
    let body = greedy(&prompt(40, 100), 4);
    let handoff = quick.open_lease(&body);
    same_choices(&d.decode(&body, &handoff).ok(), &one.generate(&fresh_id(), &body).ok());
    for (answer, body) in answers.into_iter().zip(&bodies) {
        same_choices(&http::receive(answer).ok(), &one.generate(&fresh_id(), body).ok());
    }
    early.into_iter().for_each(|early| drop(early.end()));
    assert_eq!(d.metric("baton_kv_load_failures_total"), 0.0);
    for node in behind.iter().chain([&quick, &d, &one]) {
        node.is_clean();
    }
}
