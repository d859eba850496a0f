//! Known caches of engines: KV events and the bounds of the prefix index.

use std::net::IpAddr;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where an engine publishes its KV events (vLLM's `--kv-events-config`, ZeroMQ).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct KvEventsConfig {
    /// The port, at the engine's host. 1 to 65,535.
    #[garde(range(min = 1))]
    pub port: u16,
    /// Prefix of its messages; an empty topic accepts all. At most 64 bytes; default: empty.
    #[serde(default)]
    #[garde(length(bytes, max = 64))]
    pub topic: String,
    /// The router listens on this address, and the engine connects to it. vLLM connects if its endpoint names
    /// a host instead of `*`. Use one port per engine. Default: the router connects to the engine.
    #[serde(default)]
    #[garde(skip)]
    pub bind: Option<IpAddr>,
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
