//! Engines without handoffs (`--role standalone`): no side channel, no mirror of a device's pool, and plain requests
//! as on any other engine.

use baton_engine::compute::cuda::DeviceChoice;
use baton_engine::engine::Engine;
use baton_engine::handoff::transport::KvTransport;
use baton_engine::offload::open::DiskOptions;
use baton_engine::run::options::{EngineOptions, Role};
use serde_json::Value;

use super::device::device;
use super::harness::cluster::{
    BLOCK, LLAMA, Node, QWEN3, fresh_id, greedy, options, prefill_leg, prompt, same_choices, with,
};
use super::harness::http::Reply;
use super::observe::digests::{digests, hashes, same_bytes};

fn node(model: &str, role: Role, on: DeviceChoice, change: impl FnOnce(&mut EngineOptions)) -> Node {
    let mut options = options(model, role);
    options.device = on;
    change(&mut options);
    Node::start(options)
}

/// The tokens of an answer. Steps of other sizes may change the last bits of log-probabilities on a device.
fn ids(reply: &Value) -> &Value {
    &reply["choices"][0]["token_ids"]
}

/// The size of the mirror in the engine's metrics; `None` on the CPU.
fn mirror_bytes(node: &Node) -> Option<f64> {
    let text = node.get("/metrics").text;
    let line = text.lines().find(|line| line.starts_with("baton_kv_mirror_bytes{"))?;
    line.rsplit(' ').next().and_then(|n| n.parse().ok())
}

#[test]
fn a_standalone_engine_answers_like_one_with_handoffs_without_a_mirror() {
    for on in [DeviceChoice::Cpu, device()] {
        let (one, both) = (node(QWEN3, Role::Standalone, on, |_| {}), node(QWEN3, Role::Both, on, |_| {}));
        // Two processes of the matrix library may choose different sums on a GPU.
        let is_exact = on == DeviceChoice::Cpu || on == baton_engine_check::SOFTWARE;
        for (seed, len) in [1, BLOCK, 3 * BLOCK + 1, 101].into_iter().enumerate() {
            let prompt = prompt(seed as u64 + 1, len);
            let body = greedy(&prompt, 12);
            let answer = |node: &Node| node.generate(&fresh_id(), &body).ok();
            let (ours, theirs) = (answer(&one), answer(&both));
            assert_eq!(ids(&ours), ids(&theirs));
            if is_exact {
                same_choices(&ours, &theirs);
                // The digests of the one are of copies from the device, those of the other of its mirror.
                same_bytes(&one, &both, &prompt);
            }
        }
        assert!(digests(&one).len() >= 101 / BLOCK);
        let is_on_device = on != DeviceChoice::Cpu;
        assert_eq!((one.region.is_none(), both.region.is_some()), (is_on_device, true));
        if is_on_device {
            let region = both.memory();
            let bytes = (region.blocks() * region.block_bytes()) as f64;
            assert_eq!((mirror_bytes(&one), mirror_bytes(&both)), (Some(0.0), Some(bytes)));
        } else {
            assert_eq!((mirror_bytes(&one), mirror_bytes(&both)), (None, None));
        }
        assert_eq!(one.kv()["engine"]["role"], "standalone");
        one.is_clean();
        both.is_clean();
    }
}

#[test]
fn with_a_host_transport_a_device_has_a_mirror_in_every_role() {
    for role in [Role::Prefill, Role::Decode, Role::Both] {
        for transport in [KvTransport::Auto, KvTransport::Shm, KvTransport::Tcp] {
            let node = node(LLAMA, role, device(), |options| options.kv_transport = transport);
            let bytes = (node.memory().blocks() * node.memory().block_bytes()) as f64;
            assert_eq!(mirror_bytes(&node), Some(bytes), "{role:?} {transport:?}");
        }
    }
}

#[test]
fn handoffs_to_and_from_a_standalone_engine_are_refused_and_released() {
    let p = Node::start(options(LLAMA, Role::Prefill));
    for on in [DeviceChoice::Cpu, device()] {
        let engine = node(LLAMA, Role::Standalone, on, |_| {});
        let body = greedy(&prompt(7, 3 * BLOCK + 2), 6);
        let alone = engine.generate(&fresh_id(), &body).ok();
        let handoffs = [p.open_lease(&body), p.open_lease(&body)];
        p.wait_until("both leases are live", |kv| kv["leases"]["live"] == 2);
        let refused = |reply: Reply, field: &str| {
            let error: Value = reply.json()["error"].clone();
            assert_eq!((reply.status, error["code"].as_str()), (400, Some("kv_wrong_role")), "{error}");
            assert_eq!(error["param"], "kv_transfer_params", "{error}");
            let message = error["message"].as_str().expect("a message");
            assert!(message.contains(field) && message.contains("standalone"), "{message}");
        };
        refused(engine.generate(&fresh_id(), &prefill_leg(&body)), "do_remote_decode");
        for handoff in &handoffs {
            refused(engine.decode(&body, handoff), "do_remote_prefill");
        }
        // Each refusal has released the lease at the producer, long before its expiry.
        p.wait_until("a lease is live", |kv| kv["leases"]["live"] == 0);
        engine.until("the answers to the notices are counted", || {
            engine.metric("baton_release_notices_total") == 2.0
        });
        assert_eq!(engine.metric("baton_early_rejections_total"), 2.0);
        // A request with the field and no intent is a plain one.
        let again = engine.generate(&fresh_id(), &with(&body, "kv_transfer_params", Value::Null)).ok();
        assert_eq!(ids(&again), ids(&alone));
        assert_eq!(engine.metric("baton_kv_leases_opened_total"), 0.0);
        engine.is_clean();
    }
    p.is_clean();
}

#[test]
fn a_standalone_device_engine_stores_and_loads_blocks_without_a_mirror() {
    let dir = tempfile::tempdir().expect("a folder");
    let start = || {
        node(LLAMA, Role::Standalone, device(), |options| {
            (options.kv_blocks, options.offload.host_bytes) = (Some(24), 1 << 20);
            options.offload.disk = Some(DiskOptions { dir: dir.path().to_owned(), bytes: 64 << 20 });
        })
    };
    let settled = |node: &Node| node.wait_until("copies are in flight", |kv| kv["offload"]["in_flight"] == 0);
    let answer = |node: &Node, body: &Value| {
        let reply = node.generate(&fresh_id(), body).ok();
        settled(node);
        reply
    };
    let hits = |node: &Node| node.metric("baton_kv_offload_hit_tokens_total");
    let (text, first_run) = (prompt(1, 12 * BLOCK + 3), start());
    let body = greedy(&text, 12);
    let first = answer(&first_run, &body);
    let computed = digests(&first_run);
    for seed in 900..903 {
        answer(&first_run, &greedy(&prompt(seed, 14 * BLOCK), 2));
    }
    assert_eq!(ids(&answer(&first_run, &body)), ids(&first));
    assert_eq!(hits(&first_run), (12 * BLOCK) as f64, "evicted blocks are loaded from the host tier");
    first_run.is_clean();
    first_run.stop();
    let second = start();
    assert_eq!(ids(&answer(&second, &body)), ids(&first));
    assert_eq!(hits(&second), (12 * BLOCK) as f64, "the disk tier has survived the restart");
    // Each loaded block has the bytes that were computed before the restart.
    let loaded = digests(&second);
    for hash in hashes(&text) {
        assert_eq!(loaded[&hash].1, computed[&hash].1, "{hash}");
    }
    assert_eq!(mirror_bytes(&second), Some(0.0));
    second.is_clean();
}

#[test]
fn options_of_handoffs_are_refused_without_handoffs() {
    let refused = |change: &dyn Fn(&mut EngineOptions)| {
        let mut options = options(LLAMA, Role::Standalone);
        change(&mut options);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let _entered = runtime.enter();
        match Engine::start(options, &mut |_| {}) {
            Ok(_) => panic!("it starts"),
            Err(error) => error.to_string(),
        }
    };
    let error = refused(&|options| options.kv_transport = KvTransport::Tcp);
    assert!(error.contains("--kv-transport") && error.contains("--role standalone"), "{error}");
    let error = refused(&|options| options.side_channel_host = Some("host".into()));
    assert!(error.contains("--side-channel-host"), "{error}");
    // A side channel on an unspecified address would need a host for peers, and there is none.
    let mut everywhere = options(LLAMA, Role::Standalone);
    everywhere.side_channel = ([0, 0, 0, 0], 0).into();
    let node = Node::start(everywhere);
    node.generate(&fresh_id(), &greedy(&prompt(3, 9), 2)).ok();
    // Beyond loopback, its own endpoints need the secret as those of every engine.
    let error = refused(&|options| options.listen = ([0, 0, 0, 0], 0).into());
    assert!(error.contains("--cluster-secret-file"), "{error}");
}
