//! Engines in this process, and the legs of a request as a router sends them.

use std::net::SocketAddr;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_connector::region::Region;
use baton_engine::engine::Engine;
use baton_engine::model::ModelFiles;
use baton_engine::run::options::{EngineOptions, Role};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::http;
use crate::harness::http::Reply;

/// Tokens of a block in all tests.
pub(crate) const BLOCK: usize = 8;

/// A Llama with scaled rope, in f32.
pub(crate) const LLAMA: &str = "llama3-f32";
/// A Qwen 3 with norms on queries and keys, and tied embeddings, in f32.
pub(crate) const QWEN3: &str = "qwen3-f32";
/// A Qwen 2 with biases and yarn, sharded, in bf16.
pub(crate) const QWEN2: &str = "qwen2-yarn-bf16";
/// A Llama in a GGUF file, whose types are those of Q4_K_M.
pub(crate) const LLAMA_GGUF: &str = "llama3-gguf";
/// A Qwen 2 in a GGUF file, with types of blocks of 32 values, F16 and BF16.
pub(crate) const QWEN2_GGUF: &str = "qwen2-gguf";
/// A Gemma 2 in a GGUF file: windows, soft caps and norms on both sides.
pub(crate) const GEMMA2_GGUF: &str = "gemma2-gguf";
/// A Gemma 3 in a GGUF file: windows in five of six layers, two ropes, norms of heads.
pub(crate) const GEMMA3_GGUF: &str = "gemma3-gguf";
/// A Qwen 3 with experts in a GGUF file.
pub(crate) const QWEN3_MOE_GGUF: &str = "qwen3moe-gguf";
/// A Phi-3 in a GGUF file: a window, and LongRoPE in a part of each head.
pub(crate) const PHI3_GGUF: &str = "phi3-gguf";
/// A Mixtral in a GGUF file.
pub(crate) const MIXTRAL_GGUF: &str = "mixtral-gguf";

/// A Mistral with a window in every layer, in bf16.
pub(crate) const MISTRAL: &str = "mistral-bf16";
/// A Gemma 3 with windows in every second layer and two ropes, in bf16.
pub(crate) const GEMMA3: &str = "gemma3-bf16";
/// A Qwen 3 with experts in two of three layers, in bf16.
pub(crate) const QWEN3_MOE: &str = "qwen3moe-bf16";
/// A gpt-oss with attention sinks, and windows in every second layer, with experts in MXFP4.
pub(crate) const GPT_OSS: &str = "gpt-oss-mxfp4";

/// All blocks must be free within this time after the last request.
const FREED_WITHIN: Duration = Duration::from_secs(20);

/// One engine with a runtime of its own.
pub(crate) struct Node {
    pub(crate) http: SocketAddr,
    /// Of its first KV rank; none without handoffs.
    side_channel: Option<SocketAddr>,
    /// Memory of its first KV rank, if the host can read it.
    pub(crate) region: Option<Region>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

/// Options of a test's engine (`model` is a fixture's name, or an absolute path). Blocks and steps are small, so that
/// prompts have several of each.
pub(crate) fn options(model: &str, role: Role) -> EngineOptions {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(model);
    let mut options = EngineOptions::new(ModelFiles::at(&folder).expect("a checkpoint"));
    options.role = role;
    options.block_tokens = BLOCK;
    options.kv_blocks = Some(512);
    options.max_num_seqs = 16;
    options.max_num_batched_tokens = 24;
    options.threads = Some(1);
    options.shutdown_timeout = Duration::from_secs(2);
    options
}

impl Node {
    pub(crate) fn start(options: EngineOptions) -> Self {
        let stop = CancellationToken::new();
        let (started, ready) = std::sync::mpsc::sync_channel(1);
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            let runtime = builder.worker_threads(1).enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let engine = Engine::start(options, &mut |_| {}).expect("the engine starts");
                let side_channel = engine.side_channels().first().copied();
                let facts = (engine.http(), side_channel, engine.kv_regions().first().cloned());
                started.send(facts).expect("the test waits");
                engine.run(stopped).await.expect("the engine serves");
            });
        });
        let (http, side_channel, region) = ready.recv().expect("the engine starts");
        Self { http, side_channel, region, stop, thread: Some(thread) }
    }

    /// Where other engines read its blocks.
    #[track_caller]
    pub(crate) fn side_channel(&self) -> SocketAddr {
        self.side_channel.expect("an engine with handoffs")
    }

    /// The memory of its first KV rank.
    #[track_caller]
    pub(crate) fn memory(&self) -> &Region {
        self.region.as_ref().expect("the host can read the pool")
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        http::call(self.http, "GET", path, &[], "")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Reply {
        http::call(self.http, "POST", path, &[], &body.to_string())
    }

    /// Sends a generation request under a name. A body with `messages` is a conversation.
    pub(crate) fn generate(&self, id: &str, body: &Value) -> Reply {
        let path = if body["messages"].is_null() { "/v1/completions" } else { "/v1/chat/completions" };
        http::call(self.http, "POST", path, &[("x-request-id", id)], &body.to_string())
    }

    /// The prefill leg of a request, as a router sends it.
    pub(crate) fn prefill(&self, id: &str, body: &Value) -> Reply {
        self.generate(id, &prefill_leg(body))
    }

    /// Sends the prefill leg. Returns its handoff.
    #[track_caller]
    pub(crate) fn open_lease(&self, body: &Value) -> Value {
        let reply = self.prefill(&fresh_id(), body).ok();
        let params = reply["kv_transfer_params"].clone();
        assert_eq!(params["do_remote_prefill"], true, "{reply}");
        params
    }

    /// The decode leg of a request, as a router sends it.
    pub(crate) fn decode(&self, body: &Value, handoff: &Value) -> Reply {
        self.generate(&fresh_id(), &with(body, "kv_transfer_params", handoff.clone()))
    }

    /// The sum of a metric over its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text;
        let lines = text.lines().filter(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{') || rest.starts_with(' '))
        });
        lines.map(|line| line.rsplit(' ').next().and_then(|n| n.parse::<f64>().ok()).expect(line)).sum()
    }

    pub(crate) fn kv(&self) -> Value {
        self.get("/debug/kv").ok()
    }

    /// Waits until the condition is true.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + FREED_WITHIN;
        while !condition() {
            assert!(Instant::now() < deadline, "not in time: {what}");
            std::thread::yield_now();
        }
    }

    /// Waits until the condition is true of the engine's `/debug/kv`.
    #[track_caller]
    pub(crate) fn wait_until(&self, what: &str, condition: impl Fn(&Value) -> bool) {
        let deadline = Instant::now() + FREED_WITHIN;
        loop {
            let kv = self.kv();
            if condition(&kv) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {kv}");
            std::thread::yield_now();
        }
    }

    /// Every block is free, no lease is live, no request remains, and no lease has expired.
    #[track_caller]
    pub(crate) fn is_clean(&self) {
        self.all_free();
        assert_eq!(self.metric("vllm:nixl_num_kv_expired_reqs"), 0.0, "a lease has expired");
    }

    /// Every block is free, for whatever reason.
    #[track_caller]
    pub(crate) fn all_free(&self) {
        self.wait_until("not all blocks are free", |kv| {
            let (blocks, requests) = (&kv["blocks"], &kv["requests"]);
            let count = |value: &Value| value.as_u64().expect("a count");
            count(&blocks["free"]) + count(&blocks["cached"]) == count(&blocks["total"])
                && requests.as_object().expect("phases").values().all(|n| count(n) == 0)
                && count(&kv["leases"]["live"]) == 0
        });
    }

    /// Clears its prefix cache.
    pub(crate) fn forget(&self) {
        self.post("/reset_prefix_cache", &json!({})).ok();
        self.wait_until("the cache is kept", |kv| kv["blocks"]["cached"] == 0);
    }

    /// Takes no more requests; running ones may finish.
    pub(crate) fn begin_to_stop(&self) {
        self.stop.cancel();
    }

    /// Stops serving and waits for the end.
    pub(crate) fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "an engine panicked");
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.end();
    }
}

/// A prefill engine, a decode engine, and the reference, which does both.
pub(crate) struct Cluster {
    pub(crate) p: Node,
    pub(crate) d: Node,
    pub(crate) one: Node,
}

impl Cluster {
    pub(crate) fn of(model: &str) -> Self {
        Self::with(model, |_| {})
    }

    /// Changes the options of both engines; the reference keeps the usual ones.
    pub(crate) fn with(model: &str, change: impl Fn(&mut EngineOptions)) -> Self {
        Self::each(model, |options| match options.role {
            Role::Prefill | Role::Decode => change(options),
            Role::Both | Role::Standalone => {}
        })
    }

    /// All three engines, each with its options changed.
    pub(crate) fn each(model: &str, change: impl Fn(&mut EngineOptions)) -> Self {
        let node = |role| {
            let mut options = options(model, role);
            change(&mut options);
            Node::start(options)
        };
        Self { p: node(Role::Prefill), d: node(Role::Decode), one: node(Role::Both) }
    }

    /// Both legs.
    #[track_caller]
    pub(crate) fn hand_over(&self, body: &Value) -> Value {
        let handoff = self.p.open_lease(body);
        self.d.decode(body, &handoff).ok()
    }

    /// The joint answer of two engines equals that of one: choices with their text, tokens, log-probabilities and
    /// endings.
    #[track_caller]
    pub(crate) fn agrees(&self, body: &Value) -> Value {
        let (two, one) = (self.hand_over(body), self.one.generate(&fresh_id(), body).ok());
        same_choices(&two, &one);
        two
    }

    #[track_caller]
    pub(crate) fn is_clean(&self) {
        for node in [&self.p, &self.d, &self.one] {
            node.is_clean();
        }
    }
}

/// Two answers have the same choices: text, tokens, log-probabilities to the last bit, endings.
#[track_caller]
pub(crate) fn same_choices(two: &Value, one: &Value) {
    let (two, one) = (&two["choices"], &one["choices"]);
    let ids =
        |choices: &Value| choices.as_array().map(|all| all.iter().map(|c| c["token_ids"].clone()).collect());
    let (ids_of_two, ids_of_one): (Option<Vec<Value>>, Option<Vec<Value>>) = (ids(two), ids(one));
    assert_eq!(ids_of_two, ids_of_one, "other tokens");
    assert!(two == one, "the same tokens, but not the same choices:\n{two}\n{one}");
}

/// A new request name.
pub(crate) fn fresh_id() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("test-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A body with one field set.
pub(crate) fn with(body: &Value, field: &str, value: Value) -> Value {
    let mut body = body.clone();
    body[field] = value;
    body
}

/// The prefill leg that a router makes of a client's body.
pub(crate) fn prefill_leg(body: &Value) -> Value {
    let intent = serde_json::from_str(baton_connector::handoff::KvIntent::PRODUCE_REQUEST).expect("JSON");
    let mut leg = with(body, "kv_transfer_params", intent);
    leg["max_tokens"] = json!(1);
    leg["stream"] = json!(false);
    let fields = leg.as_object_mut().expect("an object");
    fields.remove("stream_options");
    fields.remove("min_tokens");
    if fields.contains_key("n") {
        leg["n"] = json!(1);
    }
    leg
}

/// A prompt of `len` tokens of every fixture's vocabulary, different for each `seed`.
pub(crate) fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bd1_e995;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len).map(|_| 260 + (next() >> 33) as u32 % 240).collect()
}

/// A request for exactly `max_tokens` of the likeliest tokens.
pub(crate) fn greedy(prompt: &[u32], max_tokens: usize) -> Value {
    json!({
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true, "logprobs": 5,
    })
}
