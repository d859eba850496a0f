//! The joint answer of two engines equals that of one.

use std::time::Duration;

use baton_connector::layout::KvDtype;
use baton_engine::compute::cpu::WeightMode;
use baton_engine::run::options::{EngineOptions, Role};
use serde_json::{Value, json};

use super::harness::cluster::{
    BLOCK, Cluster, LLAMA, LLAMA_GGUF, Node, QWEN2, QWEN2_GGUF, QWEN3, fresh_id, greedy, options, prompt,
    same_choices, with,
};
use super::harness::unpacked::unpack;
use super::observe::digests::same_bytes;

/// Below, at and above a block; several blocks; several prefill chunks (a step has 24 tokens).
const LENGTHS: [usize; 10] = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 50, 104, 121];

fn every_length_agrees(model: &str) {
    let cluster = Cluster::of(model);
    for (seed, len) in LENGTHS.into_iter().enumerate() {
        let prompt = prompt(seed as u64 + 1, len);
        let reply = cluster.agrees(&greedy(&prompt, 16));
        assert_eq!(reply["choices"][0]["token_ids"].as_array().expect("ids").len(), 16);
        assert_eq!(reply["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("numbers").len(), 16);
        same_bytes(&cluster.p, &cluster.d, &prompt);
        same_bytes(&cluster.p, &cluster.one, &prompt);
        let sampled = json!({
            "prompt": prompt, "max_tokens": 16, "temperature": 0.9, "top_p": 0.95, "seed": 7, "logprobs": 3,
            "ignore_eos": true, "return_token_ids": true,
        });
        cluster.agrees(&sampled);
    }
    assert_eq!(cluster.d.metric("baton_kv_load_failures_total"), 0.0);
    assert!(cluster.d.metric("vllm:external_prefix_cache_hits_total") > 0.0, "D has fetched nothing");
    cluster.is_clean();
}

#[test]
fn llama_in_f32_handed_off_at_every_length_matches_a_single_engine() {
    every_length_agrees(LLAMA);
}

#[test]
fn qwen3_in_f32_handed_off_at_every_length_matches_a_single_engine() {
    every_length_agrees(QWEN3);
}

#[test]
fn qwen2_in_bf16_handed_off_at_every_length_matches_a_single_engine() {
    every_length_agrees(QWEN2);
}

#[test]
fn a_gguf_model_handed_off_at_every_length_matches_a_single_engine() {
    every_length_agrees(QWEN2_GGUF);
}

#[test]
fn a_gguf_model_and_its_values_in_f32_safetensors_compute_the_same_bits() {
    for gguf in [LLAMA_GGUF, QWEN2_GGUF] {
        let folder = tempfile::tempdir().expect("a folder");
        unpack(gguf, folder.path());
        let packed = Node::start(options(gguf, Role::Both));
        let unpacked = Node::start(options(folder.path().to_str().expect("UTF-8"), Role::Both));
        for (seed, len) in [(1, 5), (2, 3 * BLOCK + 1), (3, 90)] {
            let prompt = prompt(seed, len);
            let body = greedy(&prompt, 16);
            let [one, other] = [&packed, &unpacked].map(|node| node.generate(&fresh_id(), &body).ok());
            same_choices(&one, &other);
            same_bytes(&packed, &unpacked, &prompt);
        }
        let body = json!({"prompt": "The 12 blocks, I'LL don't: é 🙂", "max_tokens": 4, "temperature": 0});
        let [one, other] = [&packed, &unpacked].map(|node| node.post("/v1/completions", &body).ok());
        same_choices(&one, &other);
        assert_eq!(one["usage"]["prompt_tokens"], other["usage"]["prompt_tokens"]);
    }
}

/// `BATON_PARITY_DIR` is a folder of the parity oracle (see `tests/fixtures/README.md`).
#[test]
fn every_model_of_a_full_set_agrees_where_one_is_given() {
    let Some(dir) = std::env::var_os("BATON_PARITY_DIR") else { return };
    let folders = std::fs::read_dir(dir).expect("a folder").map(|entry| entry.expect("an entry").path());
    let models: Vec<_> = folders.filter(|folder| folder.join("config.json").exists()).collect();
    assert!(!models.is_empty(), "no model in it");
    for model in models {
        every_length_agrees(model.canonicalize().expect("it is there").to_str().expect("UTF-8"));
    }
}

/// A prefix that is cached on P, on D, on both or on neither before the handoff.
#[test]
fn a_prefix_that_is_cached_on_either_side_or_on_both_changes_nothing() {
    let cluster = Cluster::of(QWEN3);
    let fetched = || cluster.d.metric("vllm:external_prefix_cache_hits_total");
    let cached_of = |reply: &Value| reply["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    // A prompt of whole blocks, one with a single token after them, and one with several.
    for (seed, len) in [(100, 6 * BLOCK), (200, 6 * BLOCK + 1), (300, 6 * BLOCK + 5)] {
        // The last token is always computed, so a full block that ends with it is not taken from the cache.
        let whole = (len - 1) / BLOCK * BLOCK;
        for (at, warm) in [0, 2 * BLOCK, len].into_iter().enumerate() {
            let places: &[&str] = if warm == 0 { &["nowhere"] } else { &["on P", "on D", "on both"] };
            for &place in places {
                for node in [&cluster.p, &cluster.d, &cluster.one] {
                    node.forget();
                }
                let prompt = prompt(seed + at as u64, len);
                if warm > 0 {
                    let warming = greedy(&prompt[..warm], 1);
                    if place != "on D" {
                        cluster.p.generate("warm", &warming).ok();
                    }
                    if place != "on P" {
                        cluster.d.generate("warm", &warming).ok();
                    }
                }
                let before = fetched();
                let reply = cluster.agrees(&greedy(&prompt, 12));
                let reused = whole.min(warm / BLOCK * BLOCK);
                let on_p = if place == "on D" { 0 } else { reused };
                let on_d = if place == "on P" { 0 } else { reused };
                assert_eq!(cached_of(&reply), on_p, "{place}, {warm} of {len}: P's cache counts");
                let expected = if len - on_d <= 1 { 0 } else { len - on_d };
                assert_eq!(fetched() - before, expected as f64, "{place}, {warm} of {len}: fetched");
                same_bytes(&cluster.p, &cluster.d, &prompt);
            }
        }
    }
    cluster.is_clean();
}

#[test]
fn one_handoff_serves_all_choices_of_a_request() {
    let cluster = Cluster::of(LLAMA);
    for len in [1, BLOCK, 3 * BLOCK + 3] {
        let body = json!({
            "prompt": prompt(len as u64, len), "max_tokens": 16, "temperature": 1.0, "seed": 11, "n": 4,
            "ignore_eos": true, "return_token_ids": true, "logprobs": 2,
        });
        let before = cluster.d.metric("vllm:nixl_xfer_time_seconds_count");
        let reply = cluster.agrees(&body);
        let choices = reply["choices"].as_array().expect("choices");
        assert_eq!(choices.len(), 4);
        assert!(choices.iter().any(|choice| choice["token_ids"] != choices[0]["token_ids"]), "all the same");
        let reads = cluster.d.metric("vllm:nixl_xfer_time_seconds_count") - before;
        assert_eq!(reads, f64::from(u8::from(len > 1)), "one read, and none for a prompt of one token");
    }
    cluster.is_clean();
}

fn agrees_with(model: &str, change: impl Fn(&mut EngineOptions)) {
    let cluster = Cluster::each(model, change);
    for len in [BLOCK, 3 * BLOCK + 1, 77] {
        let prompt = prompt(len as u64, len);
        cluster.agrees(&greedy(&prompt, 16));
        same_bytes(&cluster.p, &cluster.d, &prompt);
    }
    assert!(cluster.d.metric("vllm:external_prefix_cache_hits_total") > 0.0, "D has fetched nothing");
    cluster.is_clean();
}

#[test]
fn a_cache_in_half_precision_is_handed_over_bit_by_bit() {
    for dtype in [KvDtype::F16, KvDtype::Bf16] {
        agrees_with(QWEN3, |options| options.kv_dtype = dtype);
        agrees_with(LLAMA, |options| (options.kv_dtype, options.kv_ranks) = (dtype, 2));
    }
}

#[test]
fn engines_with_quantized_weights_match_a_single_engine() {
    for model in [QWEN2, QWEN3] {
        agrees_with(model, |options| options.weights = WeightMode::Int8);
    }
    agrees_with(LLAMA, |options| (options.weights, options.kv_dtype) = (WeightMode::Int8, KvDtype::F16));
}

#[test]
fn engines_that_multiply_in_bfloat16_match_a_single_engine() {
    for model in [LLAMA, QWEN2, QWEN3] {
        agrees_with(model, |options| options.weights = WeightMode::Bf16);
    }
    agrees_with(LLAMA, |options| (options.weights, options.kv_dtype) = (WeightMode::Bf16, KvDtype::Bf16));
}

#[test]
fn engines_that_batch_and_compute_differently_agree_all_the_same() {
    // Other numbers of threads, steps and pools: only model, block size and element type must match.
    let cluster = Cluster::each(LLAMA, |options| match options.role {
        Role::Prefill => (options.threads, options.max_num_batched_tokens) = (Some(2), 16),
        Role::Decode => (options.kv_blocks, options.max_num_batched_tokens) = (Some(33), 512),
        Role::Both | Role::Standalone => options.max_num_batched_tokens = 100,
    });
    for len in [5, 40, 120] {
        let prompt = prompt(len as u64, len);
        cluster.agrees(&greedy(&prompt, 16));
        same_bytes(&cluster.p, &cluster.d, &prompt);
    }
    cluster.is_clean();
}

/// Where the chunks of a prompt end depends on the times of steps then, and no token or log-probability does.
#[test]
fn a_time_target_of_steps_changes_no_token() {
    let target = Duration::from_millis(2);
    let timed = Node::start(EngineOptions {
        step_target: target,
        max_num_batched_tokens: 512,
        ..options(LLAMA, Role::Both)
    });
    let plain = Node::start(options(LLAMA, Role::Both));
    let bodies = [(1, 5), (2, 120), (3, 100), (4, 60), (5, 121), (6, 40), (7, 119), (8, 33)]
        .map(|(seed, len)| greedy(&prompt(800 + seed, len), 16));
    let node = &timed;
    let replies: Vec<Value> = std::thread::scope(|scope| {
        let all = bodies.each_ref().map(|body| scope.spawn(move || node.generate(&fresh_id(), body).ok()));
        all.into_iter().map(|one| one.join().expect("a reply")).collect()
    });
    for (body, reply) in bodies.iter().zip(&replies) {
        same_choices(reply, &plain.generate(&fresh_id(), body).ok());
    }
    assert_eq!(timed.metric("baton_engine_step_target_seconds"), target.as_secs_f64());
    let steps = timed.metric("baton_engine_step_seconds_count");
    let expected = timed.metric("baton_engine_step_expected_seconds_count");
    assert!(0.0 < expected && expected < steps, "{expected} of {steps} steps had an expected duration");
    assert_eq!(plain.metric("baton_engine_step_expected_seconds_count"), 0.0);
    timed.is_clean();
    plain.is_clean();
}

#[test]
fn a_conversation_is_handed_over_like_any_prompt() {
    let cluster = Cluster::of(QWEN3);
    let body = json!({
        "messages": [{"role": "user", "content": "where does the foo live?"}], "max_tokens": 16, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true, "logprobs": true, "top_logprobs": 3,
    });
    let reply = cluster.agrees(&body);
    let prompt: Vec<u32> = serde_json::from_value(reply["prompt_token_ids"].clone()).expect("token ids");
    assert!(prompt.len() > BLOCK, "{reply}");
    same_bytes(&cluster.p, &cluster.d, &prompt);
    cluster.is_clean();
}

#[test]
fn a_streamed_answer_is_the_whole_answer_in_pieces() {
    let cluster = Cluster::of(QWEN3);
    let body = greedy(&prompt(5, 30), 20);
    let whole = cluster.agrees(&body);
    let streamed =
        with(&with(&body, "stream", json!(true)), "stream_options", json!({"include_usage": true}));
    let handoff = cluster.p.open_lease(&streamed);
    let reply = cluster.d.decode(&streamed, &handoff);
    assert_eq!(reply.status, 200, "{}", reply.text);
    let (mut text, mut ids, mut prompts) = (String::new(), Vec::new(), Vec::new());
    let frames: Vec<&str> = reply.text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(frames.last(), Some(&"[DONE]"));
    for frame in &frames[..frames.len() - 1] {
        let chunk: Value = serde_json::from_str(frame).expect("a chunk");
        let choice = &chunk["choices"][0];
        text += choice["text"].as_str().unwrap_or_default();
        ids.extend(choice["token_ids"].as_array().cloned().unwrap_or_default());
        prompts.extend(choice.get("prompt_token_ids").cloned());
    }
    assert_eq!(prompts, [body["prompt"].clone()], "once, in the first piece");
    assert_eq!(whole["choices"][0]["text"], text);
    assert_eq!(whole["choices"][0]["token_ids"], json!(ids));
    cluster.is_clean();
}
