//! A model and its pools: engines, capacity, and the conditions for a prefill by a prefill engine.

use std::collections::BTreeMap;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::caches::{KvEventsConfig, TokenizeConfig};
use super::discover::DiscoverConfig;
use super::engine::EngineConfig;
use super::policy::{FeaturesConfig, PolicyConfig};
use super::timeouts::ModelTimeouts;

/// One model and the engines that serve it.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The name that clients send as `model`, and that the engines know.
    #[garde(length(bytes, min = 1, max = 256))]
    pub name: String,
    /// Other names that clients may send; engines are always sent `name`. Default: none.
    #[serde(default)]
    #[garde(length(max = 64), inner(length(bytes, min = 1, max = 256)))]
    pub aliases: Vec<String>,
    /// The engines that prefill. Without any, decode engines compute whole requests.
    #[serde(default)]
    #[garde(dive)]
    pub prefill: PoolConfig,
    /// The engines that decode. At least one.
    #[garde(dive)]
    pub decode: PoolConfig,
    /// The protocol between the router and the model's engines. Default `auto`.
    #[serde(default)]
    #[garde(skip)]
    pub protocol: ProtocolSetting,
    /// HTTP/2 to the model's engines. Default `auto`.
    #[serde(default)]
    #[garde(skip)]
    pub http2: EngineHttp2,
    /// What happens if no prefill engine is available. SGLang's prefill and decode engines serve no request
    /// alone, so there it is `none` whatever the value. Default `aggregate`.
    #[serde(default)]
    #[garde(skip)]
    pub fallback: Fallback,
    /// A decode engine begins to read a prompt's blocks while the prefill engine computes them, if that
    /// engine supports it. Baton's engine does, for prompts of more than one step. During this time the
    /// decode engine already holds its blocks for the prompt. Default true.
    #[serde(default = "yes")]
    #[garde(skip)]
    pub early_handoff: bool,
    /// A decode engine of vLLM 0.32 or later gets the token ids of a chat's prompt from the prefill engine's reply, and
    /// does not tokenize the prompt again. For chats of text up to 512 KiB; other engines ignore the ids. Default
    /// false.
    #[serde(default)]
    #[garde(skip)]
    pub reuse_tokens: bool,
    /// The model's engines schedule by `priority` (`--scheduling-policy priority`): the router sets it on both
    /// legs. It is that of `x-priority` or of the body, and no more urgent than `priority_max` of the key.
    /// Default false: a client's `priority` is passed on, unless it exceeds `priority_max`.
    #[serde(default)]
    #[garde(skip)]
    pub priority_scheduling: bool,
    /// Bidirectional KV: decode engines of vLLM with `bidirectional_kv_xfer` keep the blocks of a response, and the prefill
    /// engine of the conversation's next turn reads them. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub bidirectional_kv: Option<BidirectionalKvConfig>,
    /// If the decode engine of a stream fails, another one continues from the tokens that were sent, if the
    /// request allows it: see docs/explanation/resilience.md. The router then reads every event of such a
    /// stream. Needs `fallback: aggregate`. Default false.
    #[serde(default)]
    #[garde(skip)]
    pub resume: bool,
    /// How the router serves Anthropic's `/v1/messages`. Default `auto`.
    #[serde(default)]
    #[garde(skip)]
    pub messages: ApiMode,
    /// How the router serves OpenAI's `/v1/responses`. Default `auto`.
    #[serde(default)]
    #[garde(skip)]
    pub responses: ApiMode,
    /// Timeouts of this model that differ from the router's. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub timeouts: ModelTimeouts,
    /// Which requests are prefilled by a prefill engine. Default: all.
    #[serde(default)]
    #[garde(dive)]
    pub disaggregate: DisaggregateConfig,
    /// Names of labels. The router prefers a prefill engine with the decode engine's values of these labels.
    /// At most 8; default: none.
    #[serde(default)]
    #[garde(length(max = 8), inner(length(bytes, min = 1, max = 256)))]
    pub pair_by: Vec<String>,
    /// The name of a label. The router pairs a prefill engine and a decode engine only if their values of this
    /// label are equal, so that no engine reads blocks of another revision. Engines without the label fit only
    /// each other. Default: none; then all engines fit.
    #[serde(default)]
    #[garde(inner(length(bytes, min = 1, max = 256)))]
    pub compatibility: Option<String>,
    /// What the router reads of a request to choose engines.
    #[serde(default)]
    #[garde(dive)]
    pub features: FeaturesConfig,
    /// Where the token ids of texts and chats come from, to compare prompts with the blocks of KV events.
    #[serde(default)]
    #[garde(dive)]
    pub tokenize: TokenizeConfig,
}

fn yes() -> bool {
    true
}

/// The protocol between the router and a model's engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProtocolSetting {
    /// Learned from each engine: SGLang's engines have a `/server_info`. With an API key on that path the key
    /// must be in `api_key_file`.
    #[default]
    Auto,
    /// vLLM's pull protocol, and that of Baton's engines: first the prefill leg, then the decode leg with the
    /// handoff of its reply.
    Vllm,
    /// vLLM engines whose connector shares KV blocks through a store: a shared file system, LMCache, Mooncake Store or
    /// an offloading tier. First the prefill leg, then the decode leg, without a handoff.
    VllmStore,
    /// SGLang's protocol: both legs at once, with the same bootstrap room.
    Sglang,
}

/// Blocks that decode engines keep for the next turn of a conversation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct BidirectionalKvConfig {
    /// Time after which the router releases the kept blocks of a conversation without a next turn. Keep it below the
    /// engines' `decoder_kv_blocks_ttl` (480 s). 1,000 to 450,000; default 60,000.
    #[serde(default = "idle_ms")]
    #[garde(range(min = 1_000_u64, max = 450_000_u64))]
    #[schemars(range(min = 1_000_u64, max = 450_000_u64))]
    pub idle_ms: u64,
}

fn idle_ms() -> u64 {
    60_000
}

/// HTTP/2 between the router and a model's engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EngineHttp2 {
    /// Where an `https` engine chooses it, by ALPN. HTTP/1.1 to `http` engines.
    #[default]
    Auto,
    /// HTTP/1.1 only.
    Off,
    /// HTTP/2 only: without negotiation to `http` engines, by ALPN to `https` engines.
    On,
}

/// What happens if no prefill engine is available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fallback {
    /// A decode engine computes the whole request.
    #[default]
    Aggregate,
    /// The request is refused with 503.
    None,
}

/// How the router serves an API that Baton's engines and others answer as a chat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ApiMode {
    /// As `native` if a decode engine has the endpoint, or else as `translate`; the latter for Baton's engines. The router
    /// asks one at the first such request, and again after a minute.
    #[default]
    Auto,
    /// The engines get the request.
    Native,
    /// The engines get a chat, and their replies are translated back.
    Translate,
}

/// Interchangeable engines, and the policy that chooses one.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// The policy that chooses an engine: a name, or `{name: {parameters}}`. Default `least_load`.
    #[serde(default)]
    #[garde(dive)]
    pub policy: PolicyConfig,
    /// Only engines with all of these labels are members. At most 32. Default: every engine.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub select: BTreeMap<String, String>,
    /// Engines with all of these labels are preferred while one of them has capacity. At most 32. Default:
    /// none.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub prefer: BTreeMap<String, String>,
    /// Where its engines publish KV events; an engine's own `kv_events` overrides it. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub kv_events: Option<KvEventsConfig>,
    /// When an engine is full.
    #[serde(default)]
    #[garde(dive)]
    pub capacity: CapacityConfig,
    /// The engines.
    #[serde(default)]
    #[garde(length(max = 4096), dive)]
    pub engines: Vec<EngineConfig>,
    /// Sources of further engines. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub discover: Option<DiscoverConfig>,
}

/// When an engine of a pool is full. A limit that is not set does not apply.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct CapacityConfig {
    /// Requests of this router in flight at one engine. 1 to 1,000,000; an engine's own `max_in_flight`
    /// overrides it. Default: no bound.
    #[garde(inner(range(min = 1, max = 1_000_000)))]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_in_flight: Option<usize>,
    /// An engine is full if this many requests wait in it, by its metrics and the requests sent since. Needs
    /// `health.load.interval_ms`. 1 to 1,000,000. Default: no bound.
    #[garde(inner(range(min = 1, max = 1_000_000)))]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_waiting: Option<u32>,
    /// An engine is full if this share of its KV cache is in use, by its metrics. Needs
    /// `health.load.interval_ms`. 0.01 to 1.0. Default: no bound.
    #[garde(inner(range(min = 0.01, max = 1.0)))]
    #[schemars(range(min = 0.01, max = 1.0))]
    pub max_kv_usage: Option<f32>,
}

/// Conditions for a prefill by a prefill engine. All of them must hold; with the defaults they hold for every
/// request.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct DisaggregateConfig {
    /// Every request, regardless of the other keys. Default false.
    #[garde(skip)]
    pub always: bool,
    /// The prompt has at least this many tokens (estimated: `features.bytes_per_token`).
    /// 0 to 100,000,000; default 0.
    #[garde(range(max = 100_000_000))]
    pub min_prompt_tokens: u64,
    /// The decode engine would have to compute at least this many tokens of the prompt. Tokens in its known
    /// cache do not count. 0 to 100,000,000; default 0.
    #[garde(range(max = 100_000_000))]
    pub min_uncached_tokens: u64,
    /// The decode engine would have to compute at least this share of the prompt. 0.0 to 1.0; default 0.0.
    #[garde(range(min = 0.0, max = 1.0))]
    pub min_uncached_share: f64,
    /// Conditional decode: the decode engine gets the request first, with this `cache_hit_threshold`. A prefill engine
    /// computes the prompt only if the decode engine replies that it has cached a smaller share: with 412, or with
    /// `finish_reason: cache_threshold` (llm-d's images of vLLM). An engine that does not know the field computes every
    /// prompt itself. For completions and chats. 0.01 to 1.0; default: none.
    #[garde(inner(range(min = 0.01, max = 1.0)))]
    #[schemars(range(min = 0.01, max = 1.0))]
    pub cache_hit_threshold: Option<f64>,
    /// The least loaded prefill engine has fewer requests in flight than this. 1 to 1,000,000; default: no bound.
    #[garde(inner(range(min = 1, max = 1_000_000)))]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_prefill_in_flight: Option<u32>,
}

impl DisaggregateConfig {
    /// Whether the conditions depend on how much of a prompt the decode engine has cached.
    pub(crate) fn asks_what_is_cached(&self) -> bool {
        !self.always && (self.min_uncached_tokens > 0 || self.min_uncached_share > 0.0)
    }
}
