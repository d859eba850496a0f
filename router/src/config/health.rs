//! The `health` part: how the router detects engines that fail, and what happens if every engine is ejected.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the router detects engines that fail.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct HealthConfig {
    /// Health checks of engines.
    #[garde(dive)]
    pub active: ActiveConfig,
    /// Ejecting an engine because of failed requests.
    #[garde(dive)]
    pub breaker: BreakerConfig,
    /// Ejecting an engine that is far worse than the others of its pool.
    #[garde(dive)]
    pub outlier: OutlierConfig,
    /// Reading the load of engines.
    #[garde(dive)]
    pub load: ReportedLoadConfig,
    /// What happens if every engine of a pool is ejected. Unresponsive and draining engines get no requests
    /// in either case. Default `fail_open`.
    #[garde(skip)]
    pub all_out: AllOut,
    /// If less than this share of a pool's engines is usable, in percent, the router ignores ejections, as
    /// far as `all_out` allows. 0 to 100; default 0: only if no engine is usable.
    #[garde(range(max = 100))]
    pub panic_percent: u8,
    /// When `/ready` returns 200. Default `any_model`.
    #[garde(skip)]
    pub ready: Ready,
}

/// `GET /health` to every engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct ActiveConfig {
    /// Interval of checks of an engine in use, in milliseconds, plus or minus a fifth. An ejected engine is
    /// checked at the end of its cool-down, regardless of this value. 0 (never) to 3,600,000; default 10,000.
    #[garde(range(max = 3_600_000))]
    pub interval_ms: u64,
    /// Timeout of one check, in milliseconds. 1 to 60,000; default 2,000.
    #[garde(range(min = 1, max = 60_000))]
    pub timeout_ms: u64,
    /// Successful checks in a row that return an engine to use. 1 to 100; default 1.
    #[garde(range(min = 1, max = 100))]
    pub healthy: u32,
    /// Failed checks in a row that eject an engine. 1 to 100; default 2.
    #[garde(range(min = 1, max = 100))]
    pub unhealthy: u32,
}

/// When an engine that fails requests is ejected.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct BreakerConfig {
    /// Failures in a row that eject an engine: 5xx, broken connections, and responses that do not arrive in
    /// time. A failure that no other engine disproved counts only if the previous one was another client's.
    /// An engine that accepts no connection, or is unresponsive, is ejected at once. 2 to 1,000; default 5.
    #[garde(range(min = 2, max = 1000))]
    pub failures: u32,
    /// Duration of the first ejection, in milliseconds. Then the router checks the engine's health and sends
    /// it one request. Each failure doubles the duration. 1 to 3,600,000; default 1,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub cool_down_ms: u64,
    /// Longest duration of an ejection, in milliseconds. 1 to 3,600,000; default 30,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub cool_down_max_ms: u64,
}

/// Engines that are far worse than the others of their pool.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct OutlierConfig {
    /// Interval of comparisons, in milliseconds. 0 (never) to 3,600,000; default 10,000.
    #[garde(range(max = 3_600_000))]
    pub interval_ms: u64,
    /// Responses in an interval that a comparison needs at least. 1 to 1,000,000; default 20.
    #[garde(range(min = 1, max = 1_000_000))]
    pub requests_min: u64,
    /// An engine is ejected if more than this share of its responses, in percent, are failures, and at least
    /// twice the others' share. 1 to 100; default 30.
    #[garde(range(min = 1, max = 100))]
    pub failure_percent: u8,
    /// An engine is ejected if its mean time to the first byte exceeds this multiple of the others' median. 0
    /// (not compared) to 1,000; default 0.
    #[garde(range(min = 0.0, max = 1000.0))]
    pub latency_factor: f64,
    /// Duration of the first ejection, in milliseconds; longer for each further one in a row. 1 to 3,600,000;
    /// default 30,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub ejection_ms: u64,
    /// Largest share of a pool that is ejected for this, in percent. One engine always may be, the last
    /// engine never. 0 to 100; default 20.
    #[garde(range(max = 100))]
    pub max_ejected_percent: u8,
}

/// `GET /metrics` to every engine, for policies that use an engine's own queue.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct ReportedLoadConfig {
    /// Interval of reads of one engine, in milliseconds. 0 (never) to 3,600,000; default 0.
    #[garde(range(max = 3_600_000))]
    pub interval_ms: u64,
    /// A reading older than this, in milliseconds, is not used. 1 to 3,600,000; default 5,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub stale_ms: u64,
}

/// What happens if every engine of a pool is ejected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AllOut {
    /// The router uses them nevertheless: the cause may have ended, or may not be theirs.
    #[default]
    FailOpen,
    /// The request is refused with 503.
    Refuse,
}

/// When `/ready` returns 200.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Ready {
    /// One model has a usable decode engine.
    #[default]
    AnyModel,
    /// Every model has a usable decode engine.
    EveryModel,
    /// Always, until the router drains.
    Always,
}

impl Default for ActiveConfig {
    fn default() -> Self {
        Self { interval_ms: 10_000, timeout_ms: 2_000, healthy: 1, unhealthy: 2 }
    }
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self { failures: 5, cool_down_ms: 1_000, cool_down_max_ms: 30_000 }
    }
}

impl Default for OutlierConfig {
    fn default() -> Self {
        Self {
            interval_ms: 10_000,
            requests_min: 20,
            failure_percent: 30,
            latency_factor: 0.0,
            ejection_ms: 30_000,
            max_ejected_percent: 20,
        }
    }
}

impl Default for ReportedLoadConfig {
    fn default() -> Self {
        Self { interval_ms: 0, stale_ms: 5_000 }
    }
}
