//! Engines whose KV cache is in a device's own memory: handoffs and tiers use a mirror in host memory.
//!
//! The default is the software device, which also checks every copy and launch. `BATON_TEST_DEVICE=cuda:0` runs the
//! same tests on a GPU (`bench/gpu/check.sh`).

use baton_connector::layout::KvDtype;
use baton_engine::compute::cuda::{Accelerator, DeviceChoice};
use baton_engine::engine::Engine;
use baton_engine::handoff::transport::KvTransport;
use baton_engine::run::options::{EngineOptions, Role};
use serde_json::{Value, json};

use super::early::Early;
use super::harness::cluster::{
    BLOCK, Cluster, LLAMA, Node, QWEN2, QWEN3, fresh_id, greedy, options, prompt, with,
};
use super::observe::digests::same_bytes;

pub(crate) fn device() -> DeviceChoice {
    match std::env::var("BATON_TEST_DEVICE") {
        Ok(name) => baton_engine_check::parse_device(&name).expect("BATON_TEST_DEVICE is a device"),
        Err(_) => baton_engine_check::SOFTWARE,
    }
}

fn on_device(options: &mut EngineOptions) {
    options.device = device();
}

/// Without log-probabilities, so that tokens are drawn on the device.
fn drawn(prompt: &[u32], temperature: f64) -> Value {
    json!({
        "prompt": prompt, "max_tokens": 12, "temperature": temperature, "top_p": 0.95, "seed": 7, "ignore_eos": true,
        "return_token_ids": true,
    })
}

fn ids(reply: &Value) -> Value {
    reply["choices"][0]["token_ids"].clone()
}

#[track_caller]
fn same_tokens(cluster: &Cluster, body: &Value) {
    let two = cluster.hand_over(body);
    let one = cluster.one.generate(&fresh_id(), body).ok();
    assert!(ids(&two).as_array().is_some_and(|ids| ids.len() == 12), "{two}");
    assert_eq!(ids(&two), ids(&one));
}

/// Blocks that a step had to copy to the device while all its sequences waited.
fn in_steps(node: &Node) -> f64 {
    let text = node.get("/metrics").text;
    let line = text.lines().find(|line| line.contains("to=\"device_in_step\"")).expect("a device exports it");
    line.rsplit(' ').next().and_then(|n| n.parse().ok()).expect(line)
}

/// Below, at and above a block, and over several steps. No length ends with a full block: P and D compute the last
/// token's KV in different sums.
const LENGTHS: [usize; 5] = [1, BLOCK - 1, BLOCK + 1, 3 * BLOCK + 1, 101];

#[test]
fn a_handoff_between_devices_matches_the_cpu() {
    for (model, transport) in
        [(LLAMA, KvTransport::Tcp), (QWEN3, KvTransport::Auto), (QWEN2, KvTransport::Auto)]
    {
        let cluster = Cluster::with(model, |options| {
            on_device(options);
            options.kv_transport = transport;
        });
        for (seed, len) in LENGTHS.into_iter().enumerate() {
            let prompt = prompt(seed as u64 + 1, len);
            same_tokens(&cluster, &drawn(&prompt, 0.0));
            same_bytes(&cluster.p, &cluster.d, &prompt);
            assert_eq!(in_steps(&cluster.d), 0.0, "read blocks are on the device before a step needs them");
            let with_logits = with(&greedy(&prompt, 12), "logprobs", json!(2));
            same_tokens(&cluster, &with_logits);
        }
        assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 0.0);
        assert!(cluster.d.metric("vllm:external_prefix_cache_hits_total") > 0.0, "D has fetched nothing");
        cluster.is_clean();
    }
}

#[test]
fn early_leased_device_blocks_are_copied_to_the_host_for_host_readers() {
    for transport in [KvTransport::Tcp, KvTransport::Auto] {
        let cluster = Cluster::with(LLAMA, |options| {
            on_device(options);
            options.kv_transport = transport;
        });
        let copied = || cluster.p.metric("baton_kv_mirror_blocks_total");
        // Read after the computation, and during it.
        for (seed, len, waits) in [(11, 125, true), (12, 141, false)] {
            let prompt = prompt(seed, len);
            let body = drawn(&prompt, 0.0);
            let before = copied();
            let early = Early::begin(&cluster.p, &body);
            let two = if waits {
                let params = early.params.clone();
                assert!(early.end().contains("[DONE]"));
                assert_eq!(copied(), before, "the step loop copies blocks without a reader");
                cluster.d.decode(&body, &params).ok()
            } else {
                let two = cluster.d.decode(&body, &early.params).ok();
                assert!(early.end().contains("[DONE]"));
                two
            };
            assert_eq!(ids(&two), ids(&cluster.one.generate(&fresh_id(), &body).ok()));
            let blocks = copied() - before;
            let whole = (len / BLOCK) as f64;
            assert!((whole..=whole + 1.0).contains(&blocks), "{blocks} of {whole} and a part: once each");
            same_bytes(&cluster.p, &cluster.d, &prompt);
        }
        assert_eq!(in_steps(&cluster.d), 0.0);
        assert_eq!(cluster.p.metric("baton_kv_early_leases_total"), 2.0);
        assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 0.0);
        cluster.is_clean();
    }
}

#[test]
fn a_draw_with_a_seed_is_the_same_on_one_device_and_across_a_handoff() {
    let cluster = Cluster::each(LLAMA, on_device);
    for (seed, len) in LENGTHS.into_iter().enumerate() {
        same_tokens(&cluster, &drawn(&prompt(seed as u64 + 30, len), 0.9));
    }
    cluster.is_clean();
}

#[test]
fn host_sampled_and_device_sampled_requests_share_steps() {
    let node = Node::start({
        let mut options = options(LLAMA, Role::Both);
        on_device(&mut options);
        options.pace = Some(std::time::Duration::from_millis(2));
        options
    });
    let plain = |seed: u64| with(&drawn(&prompt(seed, 20 + seed as usize), 0.0), "max_tokens", json!(40));
    let bodies = [
        plain(1),
        with(&plain(2), "repetition_penalty", json!(1.05)),
        with(&plain(3), "logprobs", json!(2)),
        with(&plain(4), "logit_bias", json!({"5": 1.5})),
        with(&plain(5), "temperature", json!(0.9)),
        with(&plain(6), "presence_penalty", json!(0.5)),
    ];
    let answer = |body: &Value| ids(&node.generate(&fresh_id(), body).ok());
    let alone: Vec<Value> = bodies.iter().map(answer).collect();
    let together: Vec<Value> = std::thread::scope(|scope| {
        let calls: Vec<_> = bodies.iter().map(|body| scope.spawn(|| answer(body))).collect();
        calls.into_iter().map(|call| call.join().expect("an answer")).collect()
    });
    assert_eq!(alone, together);
    node.is_clean();
}

#[test]
fn cpu_and_device_engines_hand_off_to_each_other() {
    for on in [Role::Prefill, Role::Decode] {
        let cluster = Cluster::with(QWEN3, |options| {
            if options.role == on {
                on_device(options);
            }
        });
        let prompt = prompt(50, 5 * BLOCK + 3);
        same_tokens(&cluster, &drawn(&prompt, 0.0));
        same_bytes(&cluster.p, &cluster.d, &prompt);
        cluster.is_clean();
    }
}

#[test]
fn blocks_evicted_from_a_device_are_loaded_from_the_tiers() {
    let dir = tempfile::tempdir().expect("a folder");
    let start = || {
        let mut options = options(LLAMA, Role::Both);
        on_device(&mut options);
        (options.kv_blocks, options.offload.host_bytes) = (Some(24), 1 << 20);
        options.offload.disk =
            Some(baton_engine::offload::open::DiskOptions { dir: dir.path().to_owned(), bytes: 64 << 20 });
        Node::start(options)
    };
    let node = start();
    let body = drawn(&prompt(1, 12 * BLOCK + 3), 0.0);
    let rested = |node: &Node| node.wait_until("copies are in flight", |kv| kv["offload"]["in_flight"] == 0);
    let answer = |node: &Node, body: &Value| {
        let reply = node.generate(&fresh_id(), body).ok();
        rested(node);
        reply
    };
    let first = answer(&node, &body);
    for seed in 900..903 {
        answer(&node, &drawn(&prompt(seed, 14 * BLOCK), 0.0));
    }
    let again = answer(&node, &body);
    assert_eq!(ids(&again), ids(&first));
    let hits = |node: &Node| node.metric("baton_kv_offload_hit_tokens_total");
    assert_eq!(hits(&node), (12 * BLOCK) as f64);
    assert_eq!(in_steps(&node), 0.0);
    node.is_clean();
    node.stop();
    let second = start();
    assert_eq!(ids(&answer(&second, &body)), ids(&first));
    assert_eq!(hits(&second), (12 * BLOCK) as f64, "the disk tier has survived the restart");
    assert_eq!(in_steps(&second), 0.0);
    second.is_clean();
}

#[test]
fn unsupported_device_options_are_refused_at_start() {
    let refused = |change: &dyn Fn(&mut EngineOptions)| {
        let mut options = options(LLAMA, Role::Both);
        options.device = baton_engine_check::SOFTWARE;
        change(&mut options);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let _entered = runtime.enter();
        match Engine::start(options, &mut |_| {}) {
            Ok(_) => panic!("it starts"),
            Err(error) => error.to_string(),
        }
    };
    let error = refused(&|options| options.kv_dtype = KvDtype::F16);
    assert!(error.contains("--device software") && error.contains("--kv-cache-dtype"), "{error}");
    let error = refused(&|options| options.kv_ranks = 2);
    assert!(error.contains("--kv-ranks"), "{error}");
    if device() == baton_engine_check::SOFTWARE {
        // No machine has as many; most machines that run this test have neither a GPU nor a driver.
        let error = refused(&|options| options.device = DeviceChoice::Accelerator(Accelerator::Cuda(4_000)));
        assert!(error.contains("--device cuda:4000"), "{error}");
        assert!(error.contains("looked for") || error.contains("cuda:4000: there is no"), "{error}");
    }
}
