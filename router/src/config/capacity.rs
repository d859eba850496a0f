//! When an engine has no room for another request.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
