//! When an engine has no room for another request.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// When an engine of a pool is full. What is not set does not count.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct CapacityConfig {
    /// Requests of this router in flight at one engine. 1 to 1,000,000; an engine's own `max_in_flight` wins.
    /// Default: no bound.
    #[garde(inner(range(min = 1, max = 1_000_000)))]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_in_flight: Option<usize>,
    /// Requests that wait in the engine from which on it is full, by its metrics and what was sent there since; needs
    /// `health.load.interval_ms`. 1 to 1,000,000. Default: no bound.
    #[garde(inner(range(min = 1, max = 1_000_000)))]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_waiting: Option<u32>,
    /// Share of the engine's KV cache in use, as its metrics say, from which on it is full; needs
    /// `health.load.interval_ms`. 0.01 to 1.0. Default: no bound.
    #[garde(inner(range(min = 0.01, max = 1.0)))]
    #[schemars(range(min = 0.01, max = 1.0))]
    pub max_kv_usage: Option<f32>,
}
