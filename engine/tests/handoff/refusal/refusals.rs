//! The refusals of D: a clear 400 or 404, and the lease is released at P without a request for it.

use baton_connector::layout::KvDtype;
use baton_engine::compute::cpu::WeightMode;
use baton_engine::run::options::{EngineOptions, Role};
use serde_json::{Value, json};

use crate::harness::cluster::{Cluster, LLAMA, Node, QWEN3, greedy, options, prompt, with};
use crate::harness::http::Reply;

/// Leases a prompt, lets D refuse the decode leg, and waits until P's blocks are free.
#[track_caller]
fn refused(p: &Node, d: &Node, body: &Value, change: impl Fn(&Value) -> Value, status: u16) -> Reply {
    let handoff = p.open_lease(body);
    assert_eq!(p.kv()["leases"]["live"], 1);
    let reply = d.decode(&change(body), &handoff);
    assert_eq!(reply.status, status, "{}", reply.text);
    assert!(reply.json()["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{}", reply.text);
    p.is_clean();
    d.is_clean();
    reply
}

#[test]
fn every_refused_request_releases_its_lease() {
    let cluster = Cluster::of(LLAMA);
    let body = greedy(&prompt(1, 40), 8);
    let cases: [(&str, Value, u16); 9] = [
        ("model", json!("another"), 404),
        ("temperature", json!(-1), 400),
        ("temperature", json!("warm"), 400),
        ("max_tokens", json!(100_000), 400),
        ("max_tokens", json!(-3), 400),
        ("n", json!(0), 400),
        ("prompt", json!(prompt(2, 40)), 400),
        ("prompt", json!(prompt(1, 39)), 400),
        ("prompt", json!([prompt(1, 40), prompt(1, 40)]), 400),
    ];
    for (field, value, status) in cases {
        refused(&cluster.p, &cluster.d, &body, |body| with(body, field, value.clone()), status);
    }
    cluster.agrees(&body);
    cluster.is_clean();
}

#[test]
fn a_handoff_of_another_model_is_refused_and_released() {
    let (p, d) = (Node::start(options(LLAMA, Role::Prefill)), Node::start(options(QWEN3, Role::Decode)));
    let reply = refused(&p, &d, &greedy(&prompt(1, 40), 8), Value::clone, 400);
    assert!(reply.text.contains("another model"), "{}", reply.text);
}

#[test]
fn a_handoff_of_another_precision_is_refused_and_released() {
    let changes: [&dyn Fn(&mut EngineOptions); 7] = [
        &|options| options.kv_dtype = KvDtype::F16,
        &|options| options.kv_dtype = KvDtype::Bf16,
        &|options| options.weights = WeightMode::Int8,
        &|options| options.weights = WeightMode::Bf16,
        &|options| options.weights = WeightMode::Integers,
        &|options| options.weights = WeightMode::Integers8,
        &|options| options.weights = WeightMode::Integers4,
    ];
    for change in changes {
        let mut coarse = options(LLAMA, Role::Decode);
        change(&mut coarse);
        let (p, d) = (Node::start(options(LLAMA, Role::Prefill)), Node::start(coarse));
        refused(&p, &d, &greedy(&prompt(1, 40), 8), Value::clone, 400);
    }
}

#[test]
fn a_handoff_with_incompatible_block_slices_is_refused_and_released() {
    let mut larger = options(LLAMA, Role::Decode);
    larger.block_tokens = 12;
    let (p, d) = (Node::start(options(LLAMA, Role::Prefill)), Node::start(larger));
    refused(&p, &d, &greedy(&prompt(1, 40), 8), Value::clone, 400);
}

#[test]
fn an_engine_serves_only_the_leg_of_its_role() {
    let cluster = Cluster::of(LLAMA);
    let body = greedy(&prompt(1, 40), 8);
    assert_eq!(cluster.d.prefill("leg", &body).status, 400);
    let handoff = cluster.p.open_lease(&body);
    assert_eq!(cluster.p.decode(&body, &handoff).status, 400);
    cluster.is_clean();
}

#[test]
fn a_malformed_handoff_is_named_and_changes_no_state() {
    let cluster = Cluster::of(LLAMA);
    let body = greedy(&prompt(1, 40), 8);
    let handoff = cluster.p.open_lease(&body);
    let needed = [
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "remote_num_tokens",
        "remote_block_size",
        "remote_handle",
        "remote_epoch",
        "remote_layout",
        "remote_prompt",
    ];
    let mut broken: Vec<(Value, &str)> = vec![
        (json!("x"), "kv_transfer_params"),
        (json!([1]), "kv_transfer_params"),
        (json!({"do_remote_decode": true, "do_remote_prefill": true}), "do_remote_decode"),
        (json!({"do_remote_prefill": "yes"}), "do_remote_prefill"),
        (with(&handoff, "remote_port", json!(70_000)), "remote_port"),
        (with(&handoff, "remote_block_ids", json!([[1, -2]])), "remote_block_ids"),
        (with(&handoff, "remote_num_tokens", json!(0)), "remote_num_tokens"),
        (with(&handoff, "remote_handle", json!("0x12")), "remote_handle"),
        (with(&handoff, "tp_size", json!(2)), "remote_rank_ports"),
        (with(&handoff, "tp_size", json!(65)), "tp_size"),
        (with(&handoff, "remote_rank_ports", json!([1, 2])), "remote_rank_ports"),
        (with(&handoff, "remote_rank_ports", json!([1])), "remote_rank_ports"),
        (with(&handoff, "remote_block_size", json!(4)), "remote_block_ids"),
        (with(&handoff, "remote_consumers", json!(17)), "remote_consumers"),
        (with(&handoff, "remote_lease_left_ms", json!(-1)), "remote_lease_left_ms"),
    ];
    for field in needed {
        broken.push((with(&handoff, field, Value::Null), field));
        broken.push((with(&handoff, field, json!({"a": 1})), field));
    }
    for (params, named) in broken {
        let reply = cluster.d.decode(&body, &params);
        let code = reply.code();
        assert_eq!((reply.status, code.as_deref()), (400, Some("invalid_kv_transfer_params")), "{params}");
        assert!(reply.text.contains(named), "{named}: {}", reply.text);
        assert_eq!(reply.json()["error"]["type"], "invalid_request_error");
    }
    assert_eq!(cluster.p.kv()["leases"]["live"], 1, "nothing was mutated");
    assert_eq!(
        cluster.d.decode(&body, &handoff).ok()["choices"],
        cluster.one.generate("alone", &body).ok()["choices"],
    );
    cluster.is_clean();
}

#[test]
fn a_prompt_that_fills_the_context_is_refused_with_the_requested_max_tokens() {
    let node = Node::start(options(LLAMA, Role::Both));
    let context = 160;
    let message = |tokens: usize, max_tokens: Option<u32>| {
        let body = json!({"prompt": prompt(1, tokens), "max_tokens": max_tokens});
        let reply = node.generate("long", &body);
        assert_eq!((reply.status, reply.code().as_deref()), (400, Some("context_length_exceeded")));
        reply.json()["error"]["message"].as_str().expect("a message").to_owned()
    };
    let full = message(context, None);
    assert_eq!(
        full,
        "This model's maximum context length is 160 tokens, and the prompt is too long: it has 160, and a response at \
         least 1"
    );
    let asked = message(context, Some(7));
    assert!(asked.ends_with("the prompt has 160 and max_tokens asks for 7"), "{asked}");
    node.is_clean();
}
