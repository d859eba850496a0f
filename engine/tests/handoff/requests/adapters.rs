//! LoRA adapters as models: their names, their caches, and their handoffs.

use std::path::{Path, PathBuf};

use baton_engine::engine::Engine;
use baton_engine::model::config::ModelConfig;
use baton_engine::model::lora::LoraAdapter;
use baton_engine::run::options::{EngineOptions, Role};
use serde_json::{Value, json};

use crate::harness::cluster::{
    BLOCK, Cluster, LLAMA, Node, fresh_id, greedy, options, prompt, same_choices, with,
};
use crate::harness::http;

/// Adapters of [`LLAMA`]: of every projection, and of two.
const ALL: &str = "llama3-all";
const OTHER: &str = "llama3-other";

fn folder(adapter: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lora").join(adapter)
}

/// Serves these adapters, each with its name.
pub(crate) fn serve(options: &mut EngineOptions, adapters: &[(&str, &str)]) {
    options.served.adapters =
        adapters.iter().map(|(name, adapter)| ((*name).to_owned(), folder(adapter))).collect();
}

/// The digest of an adapter of this model.
pub(crate) fn digest(model: &str, adapter: &str) -> [u8; 32] {
    let config = ModelConfig::read(&options(model, Role::Both).model).expect("a sound configuration");
    LoraAdapter::open(&folder(adapter), &config).expect("a sound adapter").digest
}

const SQL_AND_CHAT: [(&str, &str); 2] = [("sql", ALL), ("chat", OTHER)];

fn node(adapters: &[(&str, &str)]) -> Node {
    node_of(Role::Both, adapters)
}

fn node_of(role: Role, adapters: &[(&str, &str)]) -> Node {
    let mut options = options(LLAMA, role);
    serve(&mut options, adapters);
    Node::start(options)
}

fn by(model: &str, body: &Value) -> Value {
    with(body, "model", json!(model))
}

fn cached(reply: &Value) -> &Value {
    &reply["usage"]["prompt_tokens_details"]["cached_tokens"]
}

#[test]
fn each_adapter_is_a_model_of_its_own() {
    let engine = node(&SQL_AND_CHAT);
    let list = engine.get("/v1/models").ok();
    let cards = list["data"].as_array().expect("a list");
    let fields = |field: &str| cards.iter().map(|card| card[field].clone()).collect::<Vec<_>>();
    assert_eq!(fields("id"), [LLAMA, "sql", "chat"]);
    assert_eq!(fields("parent"), [Value::Null, LLAMA.into(), LLAMA.into()]);
    assert_eq!(fields("root"), [Value::Null, ALL.into(), OTHER.into()]);
    assert!(cards.iter().all(|card| card["max_model_len"] == cards[0]["max_model_len"]));
    assert_eq!(engine.get("/v1/models/chat").ok(), cards[2]);
    assert_eq!(engine.get("/v1/models/law").status, 404);
    let body = greedy(&prompt(1, 40), 12);
    let without = engine.generate(&fresh_id(), &body).ok();
    same_choices(&engine.generate(&fresh_id(), &by(LLAMA, &body)).ok(), &without);
    assert_eq!(without["model"], LLAMA);
    let mut texts = vec![without["choices"][0]["token_ids"].clone()];
    for name in ["sql", "chat"] {
        let reply = engine.generate(&fresh_id(), &by(name, &body)).ok();
        assert_eq!(reply["model"], name);
        texts.push(reply["choices"][0]["token_ids"].clone());
        let tokens = engine.post("/tokenize", &json!({"model": name, "prompt": "a text"})).ok();
        assert!(tokens["count"].as_u64().is_some_and(|count| count > 0), "{tokens}");
    }
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2], "{texts:?}");
    let unknown = engine.generate(&fresh_id(), &by("law", &body));
    assert_eq!((unknown.status, unknown.code().as_deref()), (404, Some("model_not_found")));
    engine.is_clean();
}

#[test]
fn adapters_beside_each_other_change_no_bit() {
    let plain = Node::start(options(LLAMA, Role::Both));
    let engine = node(&SQL_AND_CHAT);
    let bodies: Vec<Value> = (0..9_usize)
        .map(|at| {
            let body = greedy(&prompt(at as u64, 10 + 9 * at), 16);
            by(["sql", LLAMA, "chat"][at % 3], &body)
        })
        .collect();
    let alone: Vec<Value> = bodies.iter().map(|body| engine.generate(&fresh_id(), body).ok()).collect();
    for at in [1, 4, 7] {
        same_choices(&alone[at], &plain.generate(&fresh_id(), &bodies[at]).ok());
    }
    engine.forget();
    let asked_of = &engine;
    let together: Vec<Value> = std::thread::scope(|scope| {
        let asked: Vec<_> = bodies
            .iter()
            .map(|body| scope.spawn(move || asked_of.generate(&fresh_id(), body).ok()))
            .collect();
        asked.into_iter().map(|asked| asked.join().expect("answered")).collect()
    });
    for (together, alone) in together.iter().zip(&alone) {
        same_choices(together, alone);
    }
    engine.is_clean();
}

#[test]
fn no_cache_is_shared_between_adapters_and_the_model() {
    let engine = node(&[("sql", ALL), ("chat", OTHER), ("copy", ALL)]);
    let body = greedy(&prompt(5, 5 * BLOCK + 1), 6);
    let all = 5 * BLOCK;
    let mut first = Vec::new();
    for (name, reused) in [(LLAMA, 0), ("sql", 0), ("chat", 0), ("copy", all)] {
        let reply = engine.generate(&fresh_id(), &by(name, &body)).ok();
        assert_eq!(cached(&reply), reused, "{name}: {reply}");
        first.push((name, reply));
    }
    // The same folder under another name is the same adapter.
    same_choices(&first[3].1, &first[1].1);
    for (name, reply) in &first {
        let again = engine.generate(&fresh_id(), &by(name, &body)).ok();
        assert_eq!(cached(&again), all, "{name}");
        same_choices(&again, reply);
    }
    let salted = engine.generate(&fresh_id(), &with(&by("sql", &body), "cache_salt", json!("tenant"))).ok();
    assert_eq!(cached(&salted), 0, "a salt separates the blocks of an adapter too");
    engine.is_clean();
}

#[test]
fn prompts_of_an_adapter_handed_off_match_a_single_engine() {
    let cluster = Cluster::each(LLAMA, |options| serve(options, &SQL_AND_CHAT));
    for (seed, len) in [1, BLOCK, 3 * BLOCK + 1, 50, 104].into_iter().enumerate() {
        for name in ["sql", "chat", LLAMA] {
            cluster.agrees(&by(name, &greedy(&prompt(seed as u64, len), 12)));
        }
    }
    let fetched = cluster.d.metric("vllm:external_prefix_cache_hits_total");
    assert!(fetched > 0.0, "D has fetched nothing");
    assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 0.0);
    cluster.is_clean();
}

#[test]
fn a_handoff_of_another_adapter_is_refused_and_released() {
    let cluster = Cluster::each(LLAMA, |options| match options.role {
        Role::Prefill | Role::Both | Role::Standalone => serve(options, &SQL_AND_CHAT),
        // The same names for other adapters.
        Role::Decode => serve(options, &[("chat", ALL), ("sql", OTHER)]),
    });
    let body = greedy(&prompt(3, 40), 4);
    for (at_p, at_d, status) in [
        ("sql", "sql", 400),
        ("chat", "chat", 400),
        ("sql", LLAMA, 400),
        (LLAMA, "sql", 400),
        ("sql", "law", 404),
        // The same adapter under another name is the same.
        ("sql", "chat", 200),
        (LLAMA, LLAMA, 200),
    ] {
        let handoff = cluster.p.open_lease(&by(at_p, &body));
        let reply = cluster.d.decode(&by(at_d, &body), &handoff);
        assert_eq!(reply.status, status, "{at_p}, {at_d}: {}", reply.text);
        if status == 400 {
            assert_eq!(reply.code().as_deref(), Some("kv_prompt_mismatch"));
            assert!(reply.text.contains("another adapter"), "{}", reply.text);
        }
        cluster.p.is_clean();
        cluster.d.is_clean();
    }
}

#[test]
fn an_engine_without_the_adapter_leaves_the_handoff_to_a_settling_router() {
    let cluster = Cluster::each(LLAMA, |options| serve(options, &[("sql", ALL)]));
    let (without, with_another) = (node_of(Role::Decode, &[]), node_of(Role::Decode, &[("sql", OTHER)]));
    let body = by("sql", &greedy(&prompt(4, 45), 8));
    let handoff = cluster.p.open_lease(&body);
    let leg = with(&body, "kv_transfer_params", handoff.clone()).to_string();
    for (d, status, code) in [(&without, 404, "model_not_found"), (&with_another, 400, "kv_prompt_mismatch")]
    {
        let settles = [("x-baton-router-settles", "1")];
        let reply = http::call(d.http, "POST", "/v1/completions", &settles, &leg);
        assert_eq!((reply.status, reply.code().as_deref()), (status, Some(code)), "{}", reply.text);
        assert_eq!(cluster.p.kv()["leases"]["live"], 1, "the lease is still there after {code}");
        d.is_clean();
    }
    let answer = cluster.d.decode(&body, &handoff).ok();
    same_choices(&answer, &cluster.one.generate(&fresh_id(), &body).ok());
    assert_eq!(cluster.p.metric("baton_kv_leases_opened_total"), 1.0, "there was no second prefill");
    cluster.is_clean();
}

#[test]
fn embeddings_of_an_adapter_are_its_own() {
    let engine = node(&SQL_AND_CHAT);
    let input = prompt(2, 30);
    let embed = |model: &str| {
        let reply = engine.post("/v1/embeddings", &json!({"model": model, "input": input})).ok();
        assert_eq!(reply["model"], model);
        reply["data"][0]["embedding"].clone()
    };
    let [base, sql, chat] = [LLAMA, "sql", "chat"].map(embed);
    assert!(base != sql && sql != chat && base != chat);
    assert_eq!([LLAMA, "sql", "chat"].map(embed), [base, sql, chat], "with a cache");
    engine.is_clean();
}

/// Why an engine does not start.
fn refusal(options: EngineOptions) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let started = Engine::start(options, &mut |_| panic!("weights are read before the refusal"));
        started.err().map(|error| error.to_string()).expect("refused")
    })
}

#[test]
fn an_engine_with_an_adapter_that_cannot_be_served_does_not_start() {
    let refused = |adapters: &[(&str, &str)], words: &str| {
        let mut options = options(LLAMA, Role::Both);
        serve(&mut options, adapters);
        let error = refusal(options);
        assert!(error.starts_with("--lora ") && error.contains(words), "{error}");
    };
    refused(&[("sql", "no-such-adapter")], "adapter_config.json is missing");
    refused(&[("sql", ALL), ("sql", OTHER)], "two adapters with this name");
    refused(&[(LLAMA, ALL)], "this is the name of the model");
    // Of other models: other widths, other names.
    refused(&[("sql", "qwen3-rslora")], "has shape");
    refused(&[("sql", "phi3-fused")], "gate_up_proj is not supported");
    let mut on_device = options(LLAMA, Role::Both);
    serve(&mut on_device, &SQL_AND_CHAT);
    on_device.device = baton_engine_check::SOFTWARE;
    assert_eq!(refusal(on_device), "--lora needs --device cpu, not software");
}
