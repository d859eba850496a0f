//! Exact mode: on every path of a request, its tokens and log-probabilities equal those of the plain run to the last
//! bit. So do the bytes of every block that was computed, sent, stored or loaded for it.
//!
//! ```text
//! plain run: one engine, one request at a time, each prompt in one step, no tier ─▶ answers, and SHA-256 of each block
//! each path: the same requests ─▶ the same answers; each block that is held, by name, has the plain run's digest
//! ```
//!
//! Three families in f32 (the Qwen 2 with its bf16 weights widened). Four with windows, ropes per layer, experts and
//! attention sinks, with bf16 or MXFP4 weights that the engine widens. Six GGUF models, of which five are of further
//! families. Four formats of quantized matrices. Five models whose products are computed in integers. And two models
//! with LoRA adapters, beside other requests without.
//! `cargo test -p baton-engine --test handoff exact -- --nocapture` prints the table with the number of compared
//! blocks.
//!
//! Bytes are compared because answers do not show every error. Attention is a sum over positions, and each key
//! contains its position, so two swapped blocks change no token. The last tests swap such a pair in a transport and
//! in a tier.

use std::fs;

use baton_connector::BlockId;
use baton_engine::blocks::hash::BlockHash;
use baton_engine::compute::cpu::WeightMode;
use baton_engine::offload::record::{HEADER_BYTES, TierIdentity, header};
use baton_engine::run::options::Role;

use super::harness::cluster::{
    GEMMA2_GGUF, GEMMA3, GEMMA3_GGUF, GPT_OSS, LLAMA, LLAMA_GGUF, MISTRAL, MIXTRAL_GGUF, Node, PHI3_GGUF,
    QWEN3, QWEN3_MOE, QWEN3_MOE_GGUF, greedy,
};
use super::harness::quantized::Format;
use super::harness::widened::qwen2_in_f32;
use super::observe::digests::{digests, hashes};
use super::paths::{self, Plain};
use super::tiers::{disk, files, rested};

/// Runs one path. Returns the number of compared blocks.
type PathCheck = fn(&Plain) -> usize;

const PATHS: [(&str, PathCheck); 15] = [
    ("P to D over TCP", paths::over_tcp),
    ("P to D over shared memory", paths::over_shared_memory),
    ("P in 2 KV ranks to D in 1", paths::from_two_ranks_to_one),
    ("P in 1 KV rank to D in 2", paths::from_one_rank_to_two),
    ("P in 2 KV ranks and blocks of 16 to D", paths::from_two_ranks_and_larger_blocks),
    ("batched with others", paths::batched),
    ("in chunks of 5, 7 and 24", paths::chunked),
    ("preempted and computed again", paths::preempted),
    ("prefix in the cache", paths::cached),
    ("with drafts, alone, batched and at D", paths::drafted),
    ("evicted to host memory and back", paths::by_way_of_host_memory),
    ("written to disk, read after a restart", paths::by_way_of_disk),
    ("P and D with tiers, from P's and from D's", paths::handed_over_from_tiers),
    ("data-parallel ranks, from each to each", paths::between_data_parallel_ranks),
    ("resumed in mid-answer, alone and P to D", paths::resumed),
];

fn every_path(family: &str, model: &str) {
    every_path_of(family, &Plain::of(model));
}

fn every_path_of(family: &str, plain: &Plain) {
    for (name, path) in PATHS {
        let blocks = path(plain);
        assert!(blocks > 0, "{family}, {name}: nothing was compared");
        eprintln!("{family}, {name}: the same answers, {blocks} blocks with the same bytes");
    }
}

#[test]
fn llama_is_the_same_on_every_path() {
    every_path("llama", LLAMA);
}

#[test]
fn qwen2_is_the_same_on_every_path() {
    every_path("qwen2", qwen2_in_f32());
}

#[test]
fn qwen3_is_the_same_on_every_path() {
    every_path("qwen3", QWEN3);
}

#[test]
fn a_gguf_model_is_the_same_on_every_path() {
    every_path("llama in GGUF", LLAMA_GGUF);
}

#[test]
fn mistral_with_a_window_is_the_same_on_every_path() {
    every_path("mistral", MISTRAL);
}

#[test]
fn gemma3_is_the_same_on_every_path() {
    every_path("gemma3", GEMMA3);
}

#[test]
fn qwen3_with_experts_is_the_same_on_every_path() {
    every_path("qwen3 with experts", QWEN3_MOE);
}

#[test]
fn further_families_in_gguf_are_the_same_on_every_path() {
    for (family, model) in [
        ("gemma2", GEMMA2_GGUF),
        ("gemma3", GEMMA3_GGUF),
        ("phi3", PHI3_GGUF),
        ("mixtral", MIXTRAL_GGUF),
        ("qwen3 with experts", QWEN3_MOE_GGUF),
    ] {
        every_path(&format!("{family} in GGUF"), model);
    }
}

#[test]
fn quantized_matrices_are_the_same_on_every_path() {
    for format in Format::ALL {
        every_path(&format!("{format:?}"), format.checkpoint());
    }
}

#[test]
fn products_with_integers_are_the_same_on_every_path() {
    for (family, model, weights) in [
        ("llama in GGUF", LLAMA_GGUF, WeightMode::Integers),
        ("qwen3 with experts in GGUF", QWEN3_MOE_GGUF, WeightMode::Integers),
        ("AWQ", Format::Awq.checkpoint(), WeightMode::Integers),
        ("qwen3 in int8", QWEN3, WeightMode::Integers8),
        ("gemma3 in int4", GEMMA3, WeightMode::Integers4),
    ] {
        every_path_of(&format!("{family}, integers"), &Plain::in_mode(model, weights));
    }
}

#[test]
fn an_adapter_of_every_projection_is_the_same_on_every_path() {
    every_path_of("llama with an adapter", &Plain::adapted(LLAMA, "llama3-all"));
}

#[test]
fn an_adapter_behind_a_model_with_experts_is_the_same_on_every_path() {
    every_path_of("qwen3 with experts and an adapter", &Plain::adapted(QWEN3_MOE, "qwen3moe-attention"));
}

#[test]
fn gpt_oss_with_sinks_and_mxfp4_is_the_same_on_every_path() {
    every_path("gpt-oss", GPT_OSS);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn each_family_is_the_same_by_nixl() {
    for (family, model) in [("llama", LLAMA), ("qwen2", qwen2_in_f32()), ("qwen3", QWEN3)] {
        let blocks = paths::over_nixl(&Plain::of(model));
        eprintln!("{family}, P to D by NIXL, whole and in KV ranks: {blocks} blocks with the same bytes");
    }
}

/// The second and the fifth block of the longest prompt.
fn pair(plain: &Plain) -> [String; 2] {
    let names = hashes(&plain.longest().prompt);
    [names[1].clone(), names[4].clone()]
}

/// The tokens equal the plain run's. Of the prompt's blocks, exactly these differ. Blocks that were computed from the
/// pair may differ in their last bits, because of another order of summing.
fn only_bytes_show(plain: &Plain, node: &Node, answer: &serde_json::Value, pair: &[String]) {
    let ask = plain.longest();
    assert_eq!(
        answer["choices"][0]["token_ids"], ask.answer["choices"][0]["token_ids"],
        "this pair must change no token"
    );
    let names = hashes(&ask.prompt);
    let wrong = plain.differing(&digests(node));
    let wrong: Vec<&String> = names.iter().filter(|name| wrong.contains(name)).collect();
    assert_eq!(wrong, pair.iter().collect::<Vec<_>>());
}

#[test]
fn a_transport_that_swaps_two_blocks_is_detected_despite_equal_tokens() {
    let plain = Plain::of(LLAMA);
    let (p, d) = (plain.node(Role::Prefill, |_| {}), plain.node(Role::Decode, |_| {}));
    let ask = plain.longest();
    let handoff = p.open_lease(&ask.body);
    let pair = pair(&plain);
    // P's blocks are swapped while D reads them, as by a transport that confuses two addresses.
    let held = digests(&p);
    let [a, b] = [0, 1].map(|at| BlockId(held[&pair[at]].0));
    let cross = || {
        let (first, second) = (p.memory().read_block(a), p.memory().read_block(b));
        p.memory().write_block(a, &second);
        p.memory().write_block(b, &first);
    };
    cross();
    let answer = d.decode(&ask.body, &handoff).ok();
    cross();
    only_bytes_show(&plain, &d, &answer, &pair);
    assert!(plain.differing(&digests(&p)).is_empty(), "P's own are unchanged");
}

#[test]
fn a_tier_that_swaps_two_blocks_is_detected_despite_equal_tokens() {
    let plain = Plain::of(LLAMA);
    let dir = tempfile::tempdir().expect("a folder");
    let with_disk = || plain.node(Role::Both, |options| disk(options, dir.path()));
    let ask = plain.longest();
    let first = with_disk();
    first.generate("stored", &ask.body).ok();
    rested(&first);
    first.stop();
    assert!(plain.differing_files(dir.path()).is_empty());
    // Each file is complete, and its header has the hash of its name. Only its block belongs to the other file.
    let pair = pair(&plain);
    let all = files(dir.path());
    let of = |name: &String| all.iter().find(|file| file.to_string_lossy().contains(name)).expect("stored");
    let paths = [of(&pair[0]), of(&pair[1])];
    let records = paths.map(|path| fs::read(path).expect("readable"));
    for (at, path) in paths.into_iter().enumerate() {
        let (own, others) = (&records[at], &records[1 - at][HEADER_BYTES..]);
        let layout = u64::from_le_bytes(own[16..24].try_into().expect("eight bytes"));
        let identity = TierIdentity { layout, model: own[24..40].try_into().expect("sixteen bytes") };
        let name: BlockHash = pair[at].parse().expect("a hash");
        fs::write(path, [&header(&identity, name, others)[..], others].concat()).expect("writable");
    }
    let second = with_disk();
    let answer = second.generate("loaded", &ask.body).ok();
    assert!(second.metric("baton_kv_offload_hit_tokens_total") > 0.0, "nothing was loaded");
    assert_eq!(second.metric("baton_kv_offload_failures_total"), 0.0, "it was not detected");
    only_bytes_show(&plain, &second, &answer, &pair);
    let mut sorted = pair.to_vec();
    sorted.sort();
    assert_eq!(plain.differing_files(dir.path()), sorted);
}

#[test]
fn one_flipped_bit_of_a_block_is_detected() {
    let plain = Plain::of(LLAMA);
    let node = plain.node(Role::Both, |_| {});
    node.generate("one", &greedy(&plain.longest().prompt, 1)).ok();
    let name = &pair(&plain)[1];
    let block = BlockId(digests(&node)[name].0);
    let mut bytes = node.memory().read_block(block);
    bytes[0] ^= 1;
    node.memory().write_block(block, &bytes);
    assert_eq!(plain.differing(&digests(&node)), std::slice::from_ref(name));
}
