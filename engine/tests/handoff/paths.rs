//! The paths of a request through engines (see `exact`). Each path repeats the requests of the plain run, and returns
//! the number of blocks that it compared byte by byte.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;

use baton_connector::fetch::LoadFailurePolicy;
use baton_engine::blocks::hash::BlockHash;
use baton_engine::compute::cpu::WeightMode;
use baton_engine::handoff::transport::KvTransport;
use baton_engine::model::config::ModelConfig;
use baton_engine::offload::record::HEADER_BYTES;
use baton_engine::run::options::{EngineOptions, Role};
use baton_engine::scheduler::PromptLookup;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::data_parallel::{at, open_lease_at};
use super::harness::cluster::{BLOCK, Node, fresh_id, greedy, options, prompt, same_choices, with};
use super::observe::digests::{digests, digests_of_rank, hashes_by};
use super::requests::adapters;
use super::tiers::{SMALL_POOL, cached_tokens, disk, files, hits, host, rested, wash};
use super::transports::carried;

/// Tokens of each answer.
const ANSWER: usize = 20;

/// One request, and the plain run's answer.
pub(crate) struct ReferenceRequest {
    pub(crate) prompt: Vec<u32>,
    pub(crate) body: Value,
    pub(crate) answer: Value,
    /// Prompt and answer without the last token, whose keys and values are never computed.
    tokens: Vec<u32>,
}

impl ReferenceRequest {
    /// Full blocks of its prompt, and of prompt and answer.
    fn blocks(&self) -> (usize, usize) {
        (self.prompt.len() / BLOCK, self.tokens.len() / BLOCK)
    }

    /// Tokens of its prompt that can come from a cache or a tier: the last one is always computed.
    fn findable(&self) -> usize {
        (self.prompt.len() - 1) / BLOCK * BLOCK
    }

    fn answered(&self) -> &[u32] {
        &self.tokens[self.prompt.len()..]
    }
}

/// The plain run: one engine, one request at a time, each prompt in one step, nothing cached, no tier.
pub(crate) struct Plain {
    model: String,
    weights: WeightMode,
    /// The adapter of all requests, and its digest.
    adapter: Option<(&'static str, [u8; 32])>,
    pub(crate) asks: Vec<ReferenceRequest>,
    /// The digest of every full block of every sequence, by name.
    truth: BTreeMap<String, String>,
}

impl Plain {
    pub(crate) fn of(model: &str) -> Self {
        Self::with(model, WeightMode::Stored, None)
    }

    /// As [`Self::of`], with matrices stored and multiplied in another way.
    pub(crate) fn in_mode(model: &str, weights: WeightMode) -> Self {
        Self::with(model, weights, None)
    }

    /// As [`Self::of`], with an adapter in `fixtures/lora`.
    pub(crate) fn adapted(model: &str, adapter: &'static str) -> Self {
        Self::with(model, WeightMode::Stored, Some((adapter, adapters::digest(model, adapter))))
    }

    fn with(model: &str, weights: WeightMode, adapter: Option<(&'static str, [u8; 32])>) -> Self {
        let (model, asks, truth) = (model.to_owned(), Vec::new(), BTreeMap::new());
        let mut plain = Self { model, weights, adapter, asks, truth };
        let node = plain.node(Role::Both, |options| options.max_num_batched_tokens = 512);
        let drawn = json!({
            "prompt": plain.prompt(3, 41), "max_tokens": ANSWER, "temperature": 0.9, "top_p": 0.95, "seed": 7,
            "ignore_eos": true, "return_token_ids": true, "logprobs": 5,
        });
        let long = plain.prompt(2, 12 * BLOCK + 3);
        for body in [greedy(&plain.prompt(1, 50), ANSWER), greedy(&long, ANSWER), drawn] {
            let body = plain.by(body);
            let answer = node.generate(&fresh_id(), &body).ok();
            let list = |value: &Value| serde_json::from_value::<Vec<u32>>(value.clone()).expect("tokens");
            let (prompt, emitted) = (list(&body["prompt"]), list(&answer["choices"][0]["token_ids"]));
            assert_eq!((emitted.len(), cached_tokens(&answer)), (ANSWER, 0));
            let tokens = [&prompt[..], &emitted[..ANSWER - 1]].concat();
            plain.asks.push(ReferenceRequest { prompt, body, answer, tokens });
        }
        let held = digests(&node);
        for ask in &plain.asks {
            let names = hashes_by(plain.adapter.as_ref().map(|(_, digest)| digest), &ask.tokens);
            plain.truth.extend(names.into_iter().map(|name| {
                let digest = held[&name].1.clone();
                (name, digest)
            }));
        }
        node.is_clean();
        plain
    }

    /// A prompt of ordinary tokens, also of the smallest vocabulary of the fixtures.
    fn prompt(&self, seed: u64, len: usize) -> Vec<u32> {
        let ordinary = if self.config().vocab < 512 { 48 } else { 240 };
        prompt(seed, len).into_iter().map(|id| 260 + (id - 260) % ordinary).collect()
    }

    fn config(&self) -> ModelConfig {
        ModelConfig::read(&options(&self.model, Role::Both).model).expect("a configuration")
    }

    /// An engine of the same model, which fails instead of computing blocks that it should have received.
    pub(crate) fn node(&self, role: Role, change: impl FnOnce(&mut EngineOptions)) -> Node {
        let mut options = options(&self.model, role);
        options.kv_load_failure_policy = LoadFailurePolicy::Fail;
        options.weights = self.weights;
        if let Some((name, _)) = self.adapter {
            adapters::serve(&mut options, &[("adapter", name)]);
        }
        change(&mut options);
        Node::start(options)
    }

    /// A request for the adapter, if there is one.
    fn by(&self, body: Value) -> Value {
        match self.adapter {
            Some(_) => with(&body, "model", json!("adapter")),
            None => body,
        }
    }

    pub(crate) fn longest(&self) -> &ReferenceRequest {
        &self.asks[1]
    }

    /// Full blocks of all prompts, and of all sequences.
    fn blocks(&self) -> (usize, usize) {
        (self.asks.iter().map(|ask| ask.blocks().0).sum(), self.truth.len())
    }

    /// Names of the blocks whose bytes differ from the plain run's.
    pub(crate) fn differing(&self, held: &BTreeMap<String, (u32, String)>) -> Vec<String> {
        let wrong = held
            .iter()
            .filter(|(name, (_, digest))| self.truth.get(*name).is_some_and(|plain| plain != digest));
        wrong.map(|(name, _)| name.clone()).collect()
    }

    /// Names of the files whose blocks differ from the plain run's.
    pub(crate) fn differing_files(&self, dir: &Path) -> Vec<String> {
        let digests = files(dir).into_iter().map(|file| {
            let name = file.file_stem().expect("a name").to_string_lossy().into_owned();
            let record = fs::read(&file).expect("readable");
            (name, (0, BlockHash(Sha256::digest(&record[HEADER_BYTES..]).into()).to_string()))
        });
        self.differing(&digests.collect())
    }

    /// Checks that all blocks of these sequences have the plain run's bytes. Returns their number.
    #[track_caller]
    fn same_bytes(&self, held: &BTreeMap<String, (u32, String)>) -> usize {
        assert_eq!(self.differing(held), [""; 0], "blocks with other bytes");
        held.keys().filter(|name| self.truth.contains_key(*name)).count()
    }

    /// As [`Self::same_bytes`], and checks that all blocks of this sequence are present.
    #[track_caller]
    fn all_of(&self, ask: &ReferenceRequest, held: &BTreeMap<String, (u32, String)>) -> usize {
        self.same_bytes(held);
        let names = hashes_by(self.adapter.as_ref().map(|(_, digest)| digest), &ask.tokens);
        assert!(names.iter().all(|name| held.contains_key(name)), "a block is not held");
        names.len()
    }

    /// Sends all requests at once, and checks each answer against the plain run. `beside` other requests of `tokens`
    /// tokens run at the same time.
    fn all_at_once(&self, node: &Node, others: u64, tokens: usize) {
        thread::scope(|scope| {
            for other in 0..others {
                let body = greedy(&self.prompt(500 + other, 2 * BLOCK + 1), tokens);
                scope.spawn(move || node.generate(&fresh_id(), &body).ok());
            }
            for ask in &self.asks {
                scope.spawn(move || same_choices(&node.generate(&fresh_id(), &ask.body).ok(), &ask.answer));
            }
        });
    }
}

/// Sends both legs of every request, and compares the blocks of P and D.
fn handed_over(plain: &Plain, p: &Node, d: &Node) -> usize {
    for ask in &plain.asks {
        let handoff = p.open_lease(&ask.body);
        same_choices(&d.decode(&ask.body, &handoff).ok(), &ask.answer);
    }
    let sent: usize = plain.asks.iter().map(|ask| ask.prompt.len()).sum();
    assert_eq!(d.metric("vllm:external_prefix_cache_hits_total"), sent as f64, "every prompt was sent");
    assert_eq!(d.metric("baton_kv_load_failures_total"), 0.0);
    let (at_p, at_d) = (plain.same_bytes(&digests(p)), plain.same_bytes(&digests(d)));
    assert_eq!(at_d, plain.blocks().1, "D holds all sequences");
    p.is_clean();
    d.is_clean();
    at_p + at_d
}

fn between(
    plain: &Plain,
    p: impl FnOnce(&mut EngineOptions),
    d: impl FnOnce(&mut EngineOptions),
    transport: &str,
) -> usize {
    let (p, d) = (plain.node(Role::Prefill, p), plain.node(Role::Decode, d));
    let blocks = handed_over(plain, &p, &d);
    assert!(carried(&d, transport) >= plain.asks.len() as u64, "over {transport}");
    blocks
}

pub(crate) fn over_tcp(plain: &Plain) -> usize {
    let tcp = |options: &mut EngineOptions| options.kv_transport = KvTransport::Tcp;
    let blocks = between(plain, tcp, tcp, "tcp");
    assert_eq!(blocks, plain.blocks().0 + plain.blocks().1);
    blocks
}

pub(crate) fn over_shared_memory(plain: &Plain) -> usize {
    let shm = |options: &mut EngineOptions| options.kv_transport = KvTransport::Shm;
    let blocks = between(plain, shm, shm, "shm");
    assert_eq!(blocks, plain.blocks().0 + plain.blocks().1);
    blocks
}

/// With the library in `BATON_NIXL_LIBRARY`: whole blocks, and slices of them.
pub(crate) fn over_nixl(plain: &Plain) -> usize {
    let library = std::env::var_os("BATON_NIXL_LIBRARY").expect("BATON_NIXL_LIBRARY names libnixl_capi.so");
    let nixl = |options: &mut EngineOptions| {
        options.kv_transport = KvTransport::Nixl;
        options.nixl_library = Some(library.clone().into());
    };
    let in_two_ranks = |options: &mut EngineOptions| {
        nixl(options);
        options.kv_ranks = 2;
    };
    between(plain, nixl, nixl, "nixl") + between(plain, in_two_ranks, nixl, "nixl")
}

pub(crate) fn from_two_ranks_to_one(plain: &Plain) -> usize {
    between(plain, |options| options.kv_ranks = 2, |_| {}, "shm")
}

pub(crate) fn from_one_rank_to_two(plain: &Plain) -> usize {
    let tcp = |options: &mut EngineOptions| options.kv_transport = KvTransport::Tcp;
    between(plain, tcp, |options| options.kv_ranks = 2, "tcp")
}

/// P's blocks have other names, so only D's are compared.
pub(crate) fn from_two_ranks_and_larger_blocks(plain: &Plain) -> usize {
    let larger = |options: &mut EngineOptions| (options.kv_ranks, options.block_tokens) = (2, 2 * BLOCK);
    between(plain, larger, |_| {}, "shm")
}

pub(crate) fn batched(plain: &Plain) -> usize {
    let node = plain.node(Role::Both, |options| options.max_num_batched_tokens = 64);
    let others = 8;
    plain.all_at_once(&node, others, ANSWER);
    // Without batching each request takes a step for each token of its answer.
    let alone = (plain.asks.len() as u64 + others) * ANSWER as u64;
    let steps = node.kv()["steps"].as_u64().expect("a count");
    assert!(steps < alone, "no requests shared a step: {steps} steps");
    node.is_clean();
    let blocks = plain.same_bytes(&digests(&node));
    assert_eq!(blocks, plain.blocks().1);
    blocks
}

pub(crate) fn chunked(plain: &Plain) -> usize {
    let mut blocks = 0;
    for chunk in [5, 7, 24] {
        let node = plain.node(Role::Both, |options| {
            (options.max_num_seqs, options.max_num_batched_tokens) = (4, chunk);
        });
        for ask in &plain.asks {
            same_choices(&node.generate(&fresh_id(), &ask.body).ok(), &ask.answer);
        }
        let fewest: usize = plain.asks.iter().map(|ask| ask.prompt.len().div_ceil(chunk)).sum();
        assert!(node.kv()["steps"].as_u64().expect("a count") >= fewest as u64, "in larger chunks");
        node.is_clean();
        blocks += plain.same_bytes(&digests(&node));
    }
    assert_eq!(blocks, 3 * plain.blocks().1);
    blocks
}

/// Drafts of prompt lookup, alone, batched with others, and at a decode engine.
pub(crate) fn drafted(plain: &Plain) -> usize {
    let drafts = |options: &mut EngineOptions| options.speculation = PromptLookup::new(5, 1, 3);
    let node = plain.node(Role::Both, drafts);
    for ask in &plain.asks {
        same_choices(&node.generate(&fresh_id(), &ask.body).ok(), &ask.answer);
    }
    plain.all_at_once(&node, 4, ANSWER);
    assert!(node.metric("vllm:spec_decode_num_draft_tokens_total") > 0.0, "nothing was drafted");
    node.is_clean();
    let blocks = plain.same_bytes(&digests(&node));
    assert_eq!(blocks, plain.blocks().1);
    blocks + between(plain, |_| {}, drafts, "shm")
}

/// The pool holds the prompts of two requests, but not their answers. The threads decide which two begin.
pub(crate) fn preempted(plain: &Plain) -> usize {
    for _ in 0..20 {
        let node = plain.node(Role::Both, |options| {
            options.kv_blocks = Some(SMALL_POOL - 2);
            options.scheduling.growth_reserve = false;
        });
        plain.all_at_once(&node, 0, 0);
        node.is_clean();
        let blocks = plain.same_bytes(&digests(&node));
        // The pool contained no other blocks.
        assert!(blocks >= SMALL_POOL / 2, "{blocks}");
        // With a window in every layer, sequences leave so many blocks that they need not preempt.
        let windowed = plain.config().attention.widest_window().is_some();
        if windowed || node.metric("vllm:num_preemptions_total") > 0.0 {
            return blocks;
        }
    }
    panic!("nothing was preempted");
}

pub(crate) fn cached(plain: &Plain) -> usize {
    let node = plain.node(Role::Both, |_| {});
    for ask in &plain.asks {
        node.generate(&fresh_id(), &plain.by(greedy(&ask.prompt[..3 * BLOCK], 1))).ok();
        for cached in [3 * BLOCK, ask.findable()] {
            let answer = node.generate(&fresh_id(), &ask.body).ok();
            same_choices(&answer, &ask.answer);
            assert_eq!(cached_tokens(&answer), cached as u64);
        }
    }
    node.is_clean();
    let blocks = plain.same_bytes(&digests(&node));
    assert_eq!(blocks, plain.blocks().1);
    blocks
}

/// Loads and compares the sequence: its prompt for the same answer, then the full blocks of its answer.
fn loads(plain: &Plain, node: &Node, ask: &ReferenceRequest, between: impl Fn(&Node)) -> usize {
    let before = hits(node);
    let answer = node.generate(&fresh_id(), &ask.body).ok();
    rested(node);
    same_choices(&answer, &ask.answer);
    assert_eq!(hits(node) - before, ask.findable() as f64, "loaded, not computed");
    let blocks = plain.all_of(ask, &digests(node));
    between(node);
    // One more token, so that the last full block is looked up.
    let longer = [&ask.tokens[..], &[300]].concat();
    let before = hits(node);
    node.generate(&fresh_id(), &plain.by(greedy(&longer, 1))).ok();
    rested(node);
    assert_eq!(hits(node) - before, (ask.blocks().1 * BLOCK) as f64, "also the blocks of decoded tokens");
    blocks + plain.all_of(ask, &digests(node))
}

pub(crate) fn by_way_of_host_memory(plain: &Plain) -> usize {
    let node = plain.node(Role::Both, |options| {
        options.kv_blocks = Some(SMALL_POOL);
        host(options, 8);
    });
    for ask in &plain.asks {
        same_choices(&node.generate(&fresh_id(), &ask.body).ok(), &ask.answer);
        rested(&node);
    }
    let mut blocks = 0;
    for ask in &plain.asks {
        wash(&node);
        assert_eq!(plain.same_bytes(&digests(&node)), 0, "everything was evicted");
        blocks += loads(plain, &node, ask, wash);
    }
    node.is_clean();
    blocks
}

pub(crate) fn by_way_of_disk(plain: &Plain) -> usize {
    let dir = tempfile::tempdir().expect("a folder");
    let with_disk = || plain.node(Role::Both, |options| disk(options, dir.path()));
    let first = with_disk();
    for ask in &plain.asks {
        same_choices(&first.generate(&fresh_id(), &ask.body).ok(), &ask.answer);
        rested(&first);
    }
    first.stop();
    assert_eq!(plain.differing_files(dir.path()), [""; 0], "files with other bytes");
    let on_disk = files(dir.path()).len();
    assert_eq!(on_disk, plain.blocks().1, "a file for each block");
    let second = with_disk();
    let loaded: usize = plain.asks.iter().map(|ask| loads(plain, &second, ask, Node::forget)).sum();
    second.is_clean();
    on_disk + loaded
}

/// P loads its prompt from its tier. Then P's lease is gone, and D loads the prompt from its own tier.
pub(crate) fn handed_over_from_tiers(plain: &Plain) -> usize {
    let with_host = |role| {
        plain.node(role, |options| {
            // D falls back to its tiers only under this policy. A recomputed prompt would be no hit.
            options.kv_load_failure_policy = LoadFailurePolicy::Recompute;
            host(options, 8);
        })
    };
    let (p, d) = (with_host(Role::Prefill), with_host(Role::Decode));
    let mut blocks = 0;
    for ask in &plain.asks {
        let both = || same_choices(&d.decode(&ask.body, &p.open_lease(&ask.body)).ok(), &ask.answer);
        let all_at_rest = || [&p, &d].into_iter().for_each(rested);
        both();
        all_at_rest();
        p.forget();
        d.forget();
        let before = hits(&p);
        both();
        all_at_rest();
        assert_eq!(hits(&p) - before, ask.findable() as f64, "P loads");
        blocks += plain.same_bytes(&digests(&p)) + plain.all_of(ask, &digests(&d));
        p.forget();
        d.forget();
        let (handoff, before) = (p.open_lease(&ask.body), hits(&d));
        p.post("/kv/release", &json!({"handle": handoff["remote_handle"]})).ok();
        same_choices(&d.decode(&ask.body, &handoff).ok(), &ask.answer);
        all_at_rest();
        assert_eq!(hits(&d) - before, ask.findable() as f64, "D loads");
        blocks += plain.all_of(ask, &digests(&d));
        p.forget();
        d.forget();
    }
    p.is_clean();
    d.is_clean();
    blocks
}

pub(crate) fn between_data_parallel_ranks(plain: &Plain) -> usize {
    let two = |role| plain.node(role, |options| options.data_parallel_size = 2);
    let (p, d) = (two(Role::Prefill), two(Role::Decode));
    let mut blocks = 0;
    for (from, to) in [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")] {
        d.forget();
        for ask in &plain.asks {
            let handoff = open_lease_at(&p, from, &ask.body);
            let body = with(&ask.body, "kv_transfer_params", handoff);
            same_choices(&at(&d, to, "/v1/completions", &body).ok(), &ask.answer);
        }
        let rank = |name: &str| name.parse().expect("a rank");
        let (at_p, at_d) = (digests_of_rank(&p, rank(from)), digests_of_rank(&d, rank(to)));
        assert_eq!(plain.same_bytes(&at_p), plain.blocks().0);
        assert_eq!(plain.same_bytes(&at_d), plain.blocks().1);
        blocks += at_p.len() + at_d.len();
    }
    assert_eq!(d.metric("baton_kv_load_failures_total"), 0.0);
    p.is_clean();
    d.is_clean();
    blocks
}

/// The requests of a router that resumes an answer after an engine failed. The drawn answer is left out: draws start
/// again, so the router does not resume it.
pub(crate) fn resumed(plain: &Plain) -> usize {
    let (one, p, d) =
        (plain.node(Role::Both, |_| {}), plain.node(Role::Prefill, |_| {}), plain.node(Role::Decode, |_| {}));
    let mut blocks = 0;
    for ask in plain.asks.iter().filter(|ask| ask.body["temperature"] == 0) {
        for emitted in [1, BLOCK, ANSWER - 3] {
            [&one, &p, &d].into_iter().for_each(Node::forget);
            let so_far = [&ask.prompt[..], &ask.answered()[..emitted]].concat();
            let body = plain.by(greedy(&so_far, ANSWER - emitted));
            let alone = one.generate(&fresh_id(), &body).ok();
            let handed_over = d.decode(&body, &p.open_lease(&body)).ok();
            for rest in [&alone, &handed_over] {
                assert_continues(rest, &ask.answer, emitted);
            }
            blocks += plain.all_of(ask, &digests(&one)) + plain.all_of(ask, &digests(&d));
            blocks += plain.same_bytes(&digests(&p));
        }
    }
    [&one, &p, &d].into_iter().for_each(Node::is_clean);
    blocks
}

/// The rest of an answer equals the tokens after the first `emitted` ones, to the last bit of each log-probability.
#[track_caller]
fn assert_continues(rest: &Value, whole: &Value, emitted: usize) {
    let (rest, whole) = (&rest["choices"][0], &whole["choices"][0]);
    let list = |value: &Value| value.as_array().expect("a list").clone();
    assert_eq!(list(&rest["token_ids"]), list(&whole["token_ids"])[emitted..]);
    for numbers in ["token_logprobs", "top_logprobs"] {
        assert_eq!(
            list(&rest["logprobs"][numbers]),
            list(&whole["logprobs"][numbers])[emitted..],
            "{numbers} after {emitted} tokens"
        );
    }
}
