//! Offload tiers below real engines. Evicted blocks, blocks from before a restart and damaged files never change a
//! bit of an answer, and every block is freed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_connector::layout::KvDtype;
use baton_engine::compute::cpu::WeightMode;
use baton_engine::engine::Engine;
use baton_engine::offload::open::{DiskOptions, OffloadOptions};
use baton_engine::offload::workers::WorkerTimeouts;
use baton_engine::run::options::{EngineOptions, Role};
use serde_json::Value;

use super::harness::cluster::{
    BLOCK, Cluster, LLAMA, Node, QWEN2, fresh_id, greedy, options, prompt, same_choices,
};
use super::harness::http;

/// Enough for one of the prompts below with its output, but not for two.
pub(crate) const SMALL_POOL: usize = 24;
/// Of these, twelve blocks can be loaded: at least one token is computed.
const PROMPT_TOKENS: usize = 12 * BLOCK + 3;

pub(crate) fn host(options: &mut EngineOptions, mib: usize) {
    options.offload.host_bytes = mib << 20;
}

pub(crate) fn disk(options: &mut EngineOptions, dir: &Path) {
    options.offload = OffloadOptions {
        host_bytes: 0,
        disk: Some(DiskOptions { dir: dir.to_owned(), bytes: 64 << 20 }),
        timeouts: WorkerTimeouts {
            load_timeout: Duration::from_secs(60),
            disk_suspension: Duration::from_millis(50),
        },
    };
}

fn node(model: &str, change: impl Fn(&mut EngineOptions)) -> Node {
    let mut options = options(model, Role::Both);
    options.kv_blocks = Some(SMALL_POOL);
    change(&mut options);
    Node::start(options)
}

/// Waits until all stores have ended.
#[track_caller]
pub(crate) fn rested(node: &Node) {
    node.wait_until("copies are in flight", |kv| kv["offload"].is_null() || kv["offload"]["in_flight"] == 0);
}

#[track_caller]
fn answer(node: &Node, body: &Value) -> Value {
    let answer = node.generate(&fresh_id(), body).ok();
    rested(node);
    answer
}

/// Fills the pool with other prompts.
#[track_caller]
pub(crate) fn wash(node: &Node) {
    for seed in 900..903 {
        // Tokens of the smallest vocabulary of the fixtures.
        let prompt: Vec<u32> = prompt(seed, 14 * BLOCK).into_iter().map(|id| 260 + id % 48).collect();
        answer(node, &greedy(&prompt, 4));
    }
}

pub(crate) fn hits(node: &Node) -> f64 {
    node.metric("baton_kv_offload_hit_tokens_total")
}

pub(crate) fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
}

pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("readable") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "kv") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

#[test]
fn evicted_blocks_are_loaded_from_the_host_tier_bit_for_bit() {
    for (model, dtype) in
        [(LLAMA, KvDtype::F32), (QWEN2, KvDtype::F32), (LLAMA, KvDtype::F16), (QWEN2, KvDtype::Bf16)]
    {
        let plain = node(model, |options| options.kv_dtype = dtype);
        let tiered = node(model, |options| {
            options.kv_dtype = dtype;
            host(options, 8);
        });
        let body = greedy(&prompt(1, PROMPT_TOKENS), 20);
        let one = answer(&plain, &body);
        same_choices(&answer(&tiered, &body), &one);
        wash(&tiered);
        assert_eq!(hits(&tiered), 0.0);
        let again = answer(&tiered, &body);
        same_choices(&again, &one);
        assert_eq!(hits(&tiered), (12 * BLOCK) as f64);
        assert_eq!(cached_tokens(&again), (12 * BLOCK) as u64, "loaded is cached");
        assert!(tiered.metric("baton_kv_offload_loaded_bytes_total") > 0.0);
        plain.is_clean();
        tiered.is_clean();
    }
}

#[test]
fn the_disk_tier_survives_a_restart() {
    let dir = tempfile::tempdir().expect("a folder");
    let body = greedy(&prompt(2, PROMPT_TOKENS), 20);
    let first = node(LLAMA, |options| disk(options, dir.path()));
    let one = answer(&first, &body);
    first.stop();
    assert!(files(dir.path()).len() >= 14, "prompt and output, block by block");
    let second = node(LLAMA, |options| disk(options, dir.path()));
    let again = answer(&second, &body);
    same_choices(&again, &one);
    assert_eq!(cached_tokens(&again), (12 * BLOCK) as u64);
    assert_eq!(hits(&second), (12 * BLOCK) as f64);
    second.is_clean();
    second.stop();
    // Another model finds none of the blocks. Neither does the same model with other elements or rounded weights.
    let others: [(&str, KvDtype, WeightMode); 5] = [
        (QWEN2, KvDtype::F32, WeightMode::Stored),
        (LLAMA, KvDtype::F16, WeightMode::Stored),
        (LLAMA, KvDtype::F32, WeightMode::Int8),
        (LLAMA, KvDtype::F32, WeightMode::Bf16),
        (LLAMA, KvDtype::F32, WeightMode::Integers8),
    ];
    for (model, dtype, weights) in others {
        let other = node(model, |options| {
            disk(options, dir.path());
            (options.kv_dtype, options.weights) = (dtype, weights);
        });
        answer(&other, &body);
        assert_eq!(hits(&other), 0.0, "{model} {dtype:?} {weights:?}");
    }
}

#[test]
fn the_blocks_of_a_damaged_file_are_recomputed() {
    let damage: [&dyn Fn(&Path); 4] = [
        &|file| {
            let mut bytes = fs::read(file).expect("readable");
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x10;
            fs::write(file, bytes).expect("writable");
        },
        &|file| {
            let length = fs::metadata(file).expect("there").len();
            fs::File::options().write(true).open(file).expect("there").set_len(length - 1).expect("cut");
        },
        &|file| {
            // The fingerprint in the header: a file of another engine.
            let mut bytes = fs::read(file).expect("readable");
            bytes[17] ^= 1;
            fs::write(file, bytes).expect("writable");
        },
        &|file| fs::remove_file(file).expect("deleted"),
    ];
    for damage in damage {
        let dir = tempfile::tempdir().expect("a folder");
        let engine = node(LLAMA, |options| disk(options, dir.path()));
        let body = greedy(&prompt(3, PROMPT_TOKENS), 12);
        let one = answer(&engine, &body);
        // All of them: no block after the first damaged one may be used.
        files(dir.path()).iter().for_each(|file| damage(file));
        engine.forget();
        let again = answer(&engine, &body);
        same_choices(&again, &one);
        assert_eq!((cached_tokens(&again), hits(&engine)), (0, 0.0));
        assert!(engine.metric("baton_kv_offload_failures_total") >= 12.0);
        // The blocks were stored again, and are complete now.
        engine.forget();
        same_choices(&answer(&engine, &body), &one);
        assert_eq!(hits(&engine), (12 * BLOCK) as f64);
        engine.is_clean();
    }
}

#[test]
fn one_damaged_file_truncates_the_loaded_prefix() {
    let dir = tempfile::tempdir().expect("a folder");
    let engine = node(LLAMA, |options| disk(options, dir.path()));
    let body = greedy(&prompt(4, PROMPT_TOKENS), 12);
    let one = answer(&engine, &body);
    let sixth = {
        let mut hashes = Vec::new();
        baton_engine::blocks::hash::extend(&mut hashes, &prompt(4, PROMPT_TOKENS), BLOCK, None);
        hashes[5].to_string()
    };
    let file =
        files(dir.path()).into_iter().find(|file| file.to_string_lossy().contains(&sixth)).expect("there");
    let mut bytes = fs::read(&file).expect("readable");
    *bytes.last_mut().expect("not empty") ^= 1;
    fs::write(&file, bytes).expect("writable");
    engine.forget();
    let again = answer(&engine, &body);
    same_choices(&again, &one);
    assert_eq!(cached_tokens(&again), (5 * BLOCK) as u64);
    engine.is_clean();
}

#[test]
fn a_disk_that_fails_under_load_is_suspended_until_it_works() {
    let dir = tempfile::tempdir().expect("a folder");
    let below = dir.path().join("tier");
    let (plain, engine) = (node(LLAMA, |_| {}), node(LLAMA, |options| disk(options, &below)));
    let body = |seed| greedy(&prompt(seed, PROMPT_TOKENS), 8);
    same_choices(&answer(&engine, &body(5)), &answer(&plain, &body(5)));
    // A file replaces the directory: every access fails, for every user.
    fs::remove_dir_all(&below).expect("deleted");
    fs::write(&below, b"in the way").expect("written");
    for seed in 5..9 {
        engine.forget();
        same_choices(&answer(&engine, &body(seed)), &answer(&plain, &body(seed)));
    }
    assert!(engine.metric("baton_kv_offload_failures_total") > 0.0);
    engine.wait_until("the disk is not left alone", |kv| kv["offload"]["disk_suspended"] == true);
    same_choices(&answer(&engine, &body(9)), &answer(&plain, &body(9)));
    fs::remove_file(&below).expect("deleted");
    engine.wait_until("the disk is not used again", |kv| kv["offload"]["disk_suspended"] == false);
    same_choices(&answer(&engine, &body(10)), &answer(&plain, &body(10)));
    assert!(!files(&below).is_empty());
    engine.is_clean();
}

#[test]
fn a_disk_tier_keeps_to_its_size() {
    let dir = tempfile::tempdir().expect("a folder");
    let engine = node(LLAMA, |options| {
        disk(options, dir.path());
        let block_bytes = 1 << 20;
        options.offload.disk.as_mut().expect("set").bytes = block_bytes;
    });
    for seed in 20..40 {
        answer(&engine, &greedy(&prompt(seed, PROMPT_TOKENS), 2));
        let bytes: u64 =
            files(dir.path()).iter().map(|file| fs::metadata(file).map_or(0, |facts| facts.len())).sum();
        assert!(bytes <= 1 << 20, "{bytes}");
    }
    assert!(engine.metric("baton_kv_offload_evicted_blocks_total") > 0.0);
    engine.is_clean();
}

/// Dynamo #6681, with an engine's own threads: requests end and are aborted by name while their blocks are being
/// stored.
#[test]
fn stop_and_abort_while_blocks_are_stored_strand_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let engine = node(LLAMA, |options| {
        disk(options, dir.path());
        options.offload.host_bytes = 1 << 20;
    });
    std::thread::scope(|scope| {
        for worker in 0..4_u64 {
            let engine = &engine;
            scope.spawn(move || {
                for round in 0..25 {
                    let id = fresh_id();
                    let body = greedy(&prompt(worker * 100 + round, 3 * BLOCK + 5), 12);
                    let path = "/v1/completions";
                    let sent =
                        http::send(engine.http, "POST", path, &[("x-request-id", &id)], &body.to_string());
                    for _ in 0..=round % 3 {
                        engine.post("/abort_requests", &serde_json::json!({"request_ids": [id]}));
                    }
                    drop(http::receive(sent));
                    engine.post("/abort_requests", &serde_json::json!({"request_ids": [id]}));
                }
            });
        }
    });
    rested(&engine);
    engine.is_clean();
    let body = greedy(&prompt(5, PROMPT_TOKENS), 8);
    same_choices(&answer(&engine, &body), &answer(&node(LLAMA, |_| {}), &body));
}

#[test]
fn engines_with_tiers_match_a_single_engine() {
    let cluster = Cluster::with(LLAMA, |options| {
        options.kv_blocks = Some(SMALL_POOL);
        host(options, 8);
    });
    let body = greedy(&prompt(6, PROMPT_TOKENS), 20);
    cluster.agrees(&body);
    for node in [&cluster.p, &cluster.d] {
        rested(node);
        assert!(node.metric("baton_kv_offload_stored_blocks_total") >= 12.0, "each stores its own blocks");
    }
    // P loads the prompt that it prefilled before.
    cluster.p.forget();
    cluster.d.forget();
    cluster.agrees(&body);
    assert_eq!((hits(&cluster.p), hits(&cluster.d)), ((12 * BLOCK) as f64, 0.0), "D asks P first");
    // A handoff whose lease is gone: D falls back to its own tiers.
    cluster.p.forget();
    cluster.d.forget();
    let handoff = cluster.p.open_lease(&body);
    cluster.p.post("/kv/release", &serde_json::json!({"handle": handoff["remote_handle"]})).ok();
    let fallback = cluster.d.decode(&body, &handoff).ok();
    same_choices(&fallback, &cluster.one.generate(&fresh_id(), &body).ok());
    assert_eq!(hits(&cluster.d), (12 * BLOCK) as f64);
    cluster.is_clean();
}

#[test]
fn several_choices_and_a_reset_of_everything_work_with_tiers() {
    let (plain, engine) = (node(LLAMA, |_| {}), node(LLAMA, |options| host(options, 8)));
    let mut body = greedy(&prompt(7, 4 * BLOCK + 1), 6);
    body["n"] = 3.into();
    body["temperature"] = 0.8.into();
    body["seed"] = 11.into();
    let one = answer(&plain, &body);
    same_choices(&answer(&engine, &body), &one);
    engine.forget();
    same_choices(&answer(&engine, &body), &one);
    assert_eq!(hits(&engine), (4 * BLOCK) as f64, "one loads, the others share");
    assert_eq!(engine.post("/reset_prefix_cache?reset_external=perhaps", &Value::Null).status, 400);
    engine.post("/reset_prefix_cache?reset_external=true", &Value::Null).ok();
    engine.wait_until("the tiers are kept", |kv| kv["offload"]["host"]["blocks"] == 0);
    same_choices(&answer(&engine, &body), &one);
    assert_eq!(hits(&engine), (4 * BLOCK) as f64, "nothing was left to load");
    engine.is_clean();
}

#[test]
fn each_data_parallel_rank_has_tiers_of_its_own() {
    let dir = tempfile::tempdir().expect("a folder");
    let engine = node(LLAMA, |options| {
        disk(options, dir.path());
        options.data_parallel_size = 2;
    });
    let body = greedy(&prompt(8, PROMPT_TOKENS), 4).to_string();
    for rank in ["0", "1"] {
        for cached in [0, (12 * BLOCK) as u64] {
            let headers = [("x-data-parallel-rank", rank)];
            let answer = http::call(engine.http, "POST", "/v1/completions", &headers, &body).ok();
            assert_eq!(cached_tokens(&answer), cached, "rank {rank}");
            engine.wait_until("copies are in flight", |kv| {
                // A rank without requests has no counts.
                let rested = |core: &Value| core["offload"].is_null() || core["offload"]["in_flight"] == 0;
                kv["cores"].as_array().expect("two").iter().all(rested)
            });
            engine.forget();
        }
        assert!(files(&dir.path().join(format!("dp{rank}"))).len() >= 12);
    }
    assert_eq!(hits(&engine), (2 * 12 * BLOCK) as f64);
    engine.is_clean();
}

#[test]
fn tiers_that_cannot_be_had_are_refused_at_the_start_with_a_reason() {
    let dir = tempfile::tempdir().expect("a folder");
    let refused = |change: &dyn Fn(&mut EngineOptions)| {
        let mut options = options(LLAMA, Role::Both);
        change(&mut options);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let _inside = runtime.enter();
        Engine::start(options, &mut |_| {}).err().map(|error| error.to_string()).expect("refused")
    };
    assert!(refused(&|options| options.offload.host_bytes = 100).contains("cannot hold a block"));
    assert!(refused(&|options| options.offload.host_bytes = usize::MAX / 2).contains("no memory"));
    let small = refused(&|options| {
        disk(options, dir.path());
        options.offload.disk.as_mut().expect("set").bytes = 100;
    });
    assert!(small.contains("cannot hold a file"), "{small}");
    let file = dir.path().join("file");
    fs::write(&file, b"").expect("written");
    assert!(refused(&|options| disk(options, &file)).contains("cannot open the disk tier"));
    let _first = node(LLAMA, |options| disk(options, dir.path()));
    assert!(refused(&|options| disk(options, dir.path())).contains("in use by another engine"));
}
