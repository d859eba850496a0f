//! The router follows the caches of Baton's engines by their KV events: prompts that it has never sent go to the engine
//! that has their blocks. A LoRA adapter is a model of the router with the engines of its base, and blocks of its own.

use std::path::Path;

use serde_json::{Value, json};

use crate::harness::{Cluster, Engine, GenerateRequest, PATIENCE, PendingCall, Reply, digests, eventually};

/// A pool of 64 blocks whose changes are published at a free port.
const PUBLISHING: &str =
    r#"--kv-blocks 64 --kv-events-config {"enable_kv_cache_events":true,"endpoint":"tcp://*:0"}"#;

/// Tokens of a prompt: six blocks, and a token to compute.
const PROMPT: usize = 97;

fn publishing(options: &str) -> Cluster {
    let options = format!("{PUBLISHING} {options}");
    let cluster = Cluster::new().prefill(&options).decode(&options).decode(&options);
    let cluster = cluster.pools("policy", json!("prefix_aware")).pools("kv_events", json!({})).start();
    for engine in cluster.prefill.iter().chain(&cluster.decode) {
        eventually(PATIENCE, "the router subscribes", || match reported(&cluster, "connected", engine) {
            1.0 => Ok(()),
            connected => Err(connected.to_string()),
        });
    }
    cluster
}

/// What the router reports of its subscription to an engine.
fn reported(cluster: &Cluster, what: &str, engine: &Engine) -> f64 {
    let name = format!("baton_router_kv_events_{what}");
    cluster.router_metric(&name, &format!("engine=\"{}\"", engine.address))
}

/// The decode engine that the router would choose, and the number of the prompt's blocks that it is known to have.
fn chosen(cluster: &Cluster, ask: &GenerateRequest) -> (String, u64) {
    let path = format!("/dry-run?path={}", ask.path);
    let plan =
        PendingCall::new(&cluster.admin, "POST", &path, ask.body.to_string().as_bytes()).reply().json();
    let decode = &plan["decode"];
    let held = decode["held"]["blocks"].as_u64().unwrap_or_default();
    (decode["chosen"].as_str().unwrap_or_default().to_owned(), held)
}

/// Sends a prompt to an engine, past the router.
fn compute(engine: &Engine, ask: &GenerateRequest) {
    assert_eq!(engine.send("POST", ask.path, &ask.body).reply().status, 200);
}

/// Computes prompts at an engine until the router knows all blocks of one. Messages before its subscription are lost.
fn known_prompt(cluster: &Cluster, engine: &Engine) -> GenerateRequest {
    let mut sent: Vec<GenerateRequest> = Vec::new();
    eventually(PATIENCE, "the router knows a prompt that it did not send", || {
        let ask = GenerateRequest::fresh(PROMPT);
        compute(engine, &ask);
        sent.push(ask);
        let wanted = (engine.address.clone(), 6);
        let last: Vec<_> = sent.iter().rev().take(5).map(|ask| (ask, chosen(cluster, ask))).collect();
        match last.iter().find(|(_, found)| *found == wanted) {
            Some((ask, _)) => Ok((*ask).clone()),
            None => Err(format!("{:?}", last.iter().map(|(_, found)| found).collect::<Vec<_>>())),
        }
    })
}

#[test]
fn a_prompt_goes_to_the_engine_whose_events_report_its_blocks() {
    let cluster = publishing("");
    let [first, second] = &cluster.decode[..] else { panic!("two engines") };
    let ask = known_prompt(&cluster, second);
    let hits = |engine: &Engine| engine.metric("vllm:prefix_cache_hits_total", "");
    let before = (hits(first), hits(second));
    let reply = cluster.ask(&ask);
    assert_eq!(reply.status, 200, "{}", reply.json());
    assert_eq!((hits(first), hits(second)), (before.0, before.1 + 96.0), "all six blocks were reused");
    // Another salt is another tenant's cache.
    let salted = ask.with("cache_salt", json!("tenant"));
    assert_eq!(chosen(&cluster, &salted).1, 0);
    compute(second, &salted);
    eventually(PATIENCE, "the router knows the salted blocks", || match chosen(&cluster, &salted) {
        (engine, 6) if engine == second.address => Ok(()),
        other => Err(format!("{other:?}")),
    });
    cluster.settled(PATIENCE);
}

#[test]
fn the_router_knows_exactly_the_blocks_that_an_engine_has() {
    let cluster = publishing("");
    let engine = &cluster.decode[1];
    known_prompt(&cluster, engine);
    // More blocks than the pool has: all earlier ones are evicted.
    for _ in 0..20 {
        compute(engine, &GenerateRequest::fresh(PROMPT));
    }
    eventually(PATIENCE, "the router knows each block", || {
        let (known, cached) = (reported(&cluster, "blocks", engine), digests(&engine.address).len());
        if known == cached as f64 && cached > 30 { Ok(()) } else { Err(format!("{known} of {cached}")) }
    });
    assert_eq!(reported(&cluster, "gaps_total", engine), 0.0);
    assert_eq!(engine.metric("baton_kv_events_dropped_total", ""), 0.0);
    engine.send("POST", "/reset_prefix_cache", &json!({})).reply();
    eventually(PATIENCE, "the router forgets all blocks", || match reported(&cluster, "blocks", engine) {
        0.0 => Ok(()),
        known => Err(known.to_string()),
    });
}

#[test]
fn a_block_counts_while_the_host_tier_has_it() {
    let cluster = publishing("--kv-offload-host-mib 32");
    let engine = &cluster.decode[1];
    let ask = known_prompt(&cluster, engine);
    let on_device = || digests(&engine.address).len();
    for _ in 0..20 {
        compute(engine, &GenerateRequest::fresh(PROMPT));
    }
    eventually(PATIENCE, "the router knows more blocks than the pool has", || {
        let known = reported(&cluster, "blocks", engine);
        if known > on_device() as f64 { Ok(()) } else { Err(known.to_string()) }
    });
    let sources = engine.send("GET", "/kv_event_sources", &Value::Null).reply().json();
    assert_eq!(sources["0"]["publisher"], "zmq", "{sources}");
    let (chosen, held) = chosen(&cluster, &ask);
    assert_eq!((chosen.as_str(), held), (engine.address.as_str(), 6), "its blocks are on the host");
}

/// A model with two adapters, in the fixtures of the engine.
fn with_adapters() -> String {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("engine/tests/fixtures");
    let at = |name: &str| fixtures.join(name).display().to_string();
    format!(
        "--model {} --served-model-name baton-demo --lora sql={} --lora chat={}",
        at("llama3-f32"),
        at("lora/llama3-all"),
        at("lora/llama3-other")
    )
}

/// A prompt of four blocks and some tokens, of the fixture's vocabulary.
fn ask_of(model: &str) -> GenerateRequest {
    let prompt: Vec<u32> = (0..70).map(|at| 260 + at * 37 % 240).collect();
    let ask = GenerateRequest::fresh(1).with("model", json!(model)).with("prompt", json!(prompt));
    ask.tokens(8).with("return_token_ids", json!(true))
}

fn tokens(reply: &Reply) -> Value {
    assert_eq!(reply.status, 200, "{}", reply.json());
    reply.json()["choices"][0]["token_ids"].clone()
}

#[test]
fn an_adapter_routes_as_a_model_of_its_own() {
    let options = with_adapters();
    let cluster = Cluster::new().prefill(&options).decode(&options).adapter("sql").adapter("chat").start();
    let list = PendingCall::new(&cluster.url, "GET", "/v1/models", b"").reply().json();
    let names: Vec<_> = list["data"].as_array().expect("a list").iter().map(|card| &card["id"]).collect();
    assert_eq!(names, ["baton-demo", "sql", "chat"], "{list}");
    let mut found = Vec::new();
    for model in ["baton-demo", "sql", "chat"] {
        let reply = cluster.ask(&ask_of(model));
        assert_eq!(reply.json()["model"], model);
        let handed_over = tokens(&reply);
        let engine = &cluster.decode[0];
        let alone = engine.send("POST", "/v1/completions", &ask_of(model).body).reply();
        assert_eq!(handed_over, tokens(&alone), "{model}");
        found.push(handed_over);
    }
    assert!(found[0] != found[1] && found[1] != found[2] && found[0] != found[2], "{found:?}");
    let fetched = cluster.decode[0].metric("vllm:external_prefix_cache_hits_total", "");
    assert!(fetched >= 3.0 * 64.0, "{fetched} tokens were fetched: no adapter has the blocks of another");
    let unknown = cluster.ask(&ask_of("law"));
    assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("model_not_found")));
    cluster.settled(PATIENCE);
}
