//! The `retries` part: how much of the router's work may be second attempts.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The budget of retries, for the whole router. Without it, slow engines would get more work the slower they
/// are. `attempts` bounds one request; this bounds all requests together.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct RetriesConfig {
    /// Concurrent retries, in percent of the requests in flight. 0 to 1,000; default 20.
    #[garde(range(max = 1000))]
    pub budget_percent: u32,
    /// Retries per second that are always allowed, so that a router with few requests can retry. 0 to
    /// 1,000,000; default 10.
    #[garde(range(max = 1_000_000))]
    pub min_per_second: u32,
    /// The pause before the third attempt of a leg, in milliseconds. The router draws it between half and all
    /// of this, and doubles it for each further attempt. The second attempt, at another engine, follows at
    /// once. 0 to 60,000; default 25.
    #[garde(range(max = 60_000))]
    pub pause_ms: u64,
    /// The longest pause, in milliseconds. 0 to 60,000; default 250.
    #[garde(range(max = 60_000))]
    pub pause_max_ms: u64,
}

impl Default for RetriesConfig {
    fn default() -> Self {
        Self { budget_percent: 20, min_per_second: 10, pause_ms: 25, pause_max_ms: 250 }
    }
}
