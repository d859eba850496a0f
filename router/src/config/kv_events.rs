//! Where engines tell of their caches.

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
