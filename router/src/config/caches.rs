//! Known caches of engines: KV events, the bounds of the prefix index, and the token ids by which both are compared.

use std::net::IpAddr;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where an engine publishes its KV events (vLLM's `--kv-events-config`, ZeroMQ).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct KvEventsConfig {
    /// The port, at the engine's host; rank N of an engine with `data_parallel_size` publishes at this port + N. 1 to
    /// 65,535. Default: what the engine reports at `/kv_event_sources` (vLLM 0.32), for each of its ranks.
    #[serde(default)]
    #[garde(inner(range(min = 1)))]
    #[schemars(range(min = 1))]
    pub port: Option<u16>,
    /// Prefix of its messages; an empty topic accepts all, or with reported ports that which the engine reports. At
    /// most 64 bytes; default: empty.
    #[serde(default)]
    #[garde(length(bytes, max = 64))]
    pub topic: String,
    /// The router listens on this address, and the engine connects to it. vLLM connects if its endpoint names
    /// a host instead of `*`. Use one port per engine; needs `port`. Default: the router connects to the engine.
    #[serde(default)]
    #[garde(skip)]
    pub bind: Option<IpAddr>,
}

/// Where the token ids of texts and chats come from. The blocks of KV events are named by token ids, so without them
/// only prompts that are token ids match.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct TokenizeConfig {
    /// Who computes the ids. Default `off`.
    #[garde(skip)]
    pub from: TokenizeSource,
    /// Maximum wait of a request for its ids. A request whose ids are late goes on without. 1 to 10,000; default 50.
    #[garde(range(min = 1, max = 10_000))]
    pub timeout_ms: u64,
    /// Requests with smaller bodies go on without ids. 0 to 1,073,741,824; default 1,024.
    #[garde(range(max = 1 << 30))]
    pub min_bytes: usize,
    /// Requests that wait for their ids at once. Further ones go on without. 1 to 4,096; default 64.
    #[garde(range(min = 1, max = 4096))]
    pub concurrent: usize,
}

impl Default for TokenizeConfig {
    fn default() -> Self {
        Self { from: TokenizeSource::default(), timeout_ms: 50, min_bytes: 1_024, concurrent: 64 }
    }
}

/// Who computes the token ids of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenizeSource {
    /// No process: text is compared as text.
    #[default]
    Off,
    /// An engine of the model, before engines are chosen: by vLLM's render paths, which need `--enable-scale-out`, or
    /// else by `/tokenize`. The router learns which of them an engine has.
    Engine,
}

/// Bounds of the known caches of engines: once for the router's own decisions, once for the engines' KV
/// events. A chunk, or a KV block, takes about 110 bytes, allocated when needed.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixIndexConfig {
    /// Chunks of one engine; the least recently used are evicted first. Set it to about the size of its
    /// cache: with chunks of 512 bytes the default is two million tokens. 16 to 16,777,216; default 16,384.
    #[garde(range(min = 16, max = 1 << 24))]
    pub chunks_per_engine: usize,
    /// Chunks of all engines. 16 to 268,435,456; default 2,097,152.
    #[garde(range(min = 16, max = 1 << 28))]
    pub chunks_total: usize,
}

impl Default for PrefixIndexConfig {
    fn default() -> Self {
        Self { chunks_per_engine: 16_384, chunks_total: 2_097_152 }
    }
}
