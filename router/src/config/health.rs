//! The `health` part: how the router finds out which engines work, and what it does when none does.

use std::time::Duration;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::health::{breaker, checks, outlier, state};

/// How the router finds out which engines work.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct HealthConfig {
    /// Asking engines.
    #[garde(dive)]
    pub active: ActiveConfig,
    /// Leaving an engine out because of what became of requests.
    #[garde(dive)]
    pub breaker: BreakerConfig,
    /// Leaving an engine out because it is far worse than its pool's others.
    #[garde(dive)]
    pub outlier: OutlierConfig,
    /// Asking engines for their load.
    #[garde(dive)]
    pub load: ReportedLoadConfig,
    /// What happens when every engine of a pool is left out. Engines that answer nothing at all, and engines that
    /// are drained, are not tried in either case. Default `fail_open`.
    #[garde(skip)]
    pub all_out: AllOut,
    /// With less than this share of a pool's engines in use, in percent, the pool is used as if all of them were
    /// well, as far as `all_out` allows. 0 to 100; default 0: only when none is left.
    #[garde(range(max = 100))]
    pub panic_percent: u8,
    /// When `/ready` says yes. Default `any_model`.
    #[garde(skip)]
    pub ready: Ready,
}

/// `GET /health` to every engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct ActiveConfig {
    /// How often an engine in use is asked, in milliseconds, give or take a fifth. An engine that is left out is
    /// asked when its cool-down is over, whatever this says. 0 (never) to 3,600,000; default 10,000.
    #[garde(range(max = 3_600_000))]
    pub interval_ms: u64,
    /// The wait for an answer, in milliseconds. 1 to 60,000; default 2,000.
    #[garde(range(min = 1, max = 60_000))]
    pub timeout_ms: u64,
    /// Good answers in a row that bring an engine back. 1 to 100; default 1.
    #[garde(range(min = 1, max = 100))]
    pub healthy: u32,
    /// Bad answers in a row that take it out. 1 to 100; default 2.
    #[garde(range(min = 1, max = 100))]
    pub unhealthy: u32,
}

/// What becomes of an engine that fails requests.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct BreakerConfig {
    /// Failures (5xx, broken connections, answers that do not come in time) in a row that take an engine out. One
    /// that no other engine disproved counts only if the one before was another client's. An engine to which no
    /// connection can be made, or that answers nothing at all, is out at once. 2 to 1,000; default 5.
    #[garde(range(min = 2, max = 1000))]
    pub failures: u32,
    /// How long it is out at first, in milliseconds; then it is asked for its health and gets one request.
    /// Doubled with each failure. 1 to 3,600,000; default 1,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub cool_down_ms: u64,
    /// The longest of these, in milliseconds. 1 to 3,600,000; default 30,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub cool_down_max_ms: u64,
}

/// Engines that are far worse than their pool's others.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct OutlierConfig {
    /// How often engines are compared, in milliseconds. 0 (never) to 3,600,000; default 10,000.
    #[garde(range(max = 3_600_000))]
    pub interval_ms: u64,
    /// Answers in an interval below which nothing is concluded. 1 to 1,000,000; default 20.
    #[garde(range(min = 1, max = 1_000_000))]
    pub requests_min: u64,
    /// An engine is left out when more of its answers than this, in percent, are failures, and at least twice the
    /// others' share. 1 to 100; default 30.
    #[garde(range(min = 1, max = 100))]
    pub failure_percent: u8,
    /// An engine is left out when its mean time to the first byte is over this many times the others' median.
    /// 0 (not looked at) to 1,000; default 0.
    #[garde(range(min = 0.0, max = 1000.0))]
    pub latency_factor: f64,
    /// How long it is left out, in milliseconds, the first time; longer each time in a row.
    /// 1 to 3,600,000; default 30,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub ejection_ms: u64,
    /// The most of a pool that is left out for this, in percent; one engine always may be, the last one never.
    /// 0 to 100; default 20.
    #[garde(range(max = 100))]
    pub max_ejected_percent: u8,
}

/// `GET /metrics` to every engine, for policies that look at an engine's own queue.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct ReportedLoadConfig {
    /// How often an engine is asked, in milliseconds. 0 (never) to 3,600,000; default 0.
    #[garde(range(max = 3_600_000))]
    pub interval_ms: u64,
    /// A reading older than this, in milliseconds, is not used. 1 to 3,600,000; default 5,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub stale_ms: u64,
}

/// What happens when every engine of a pool is left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AllOut {
    /// They are tried nevertheless: whatever took all of them out may be over, or not be theirs.
    #[default]
    FailOpen,
    /// The request is refused with 503.
    Refuse,
}

/// When `/ready` says yes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Ready {
    /// One model has a decode engine in use.
    #[default]
    AnyModel,
    /// Every model has one.
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

impl HealthConfig {
    /// The terms of one engine.
    pub(crate) fn terms(&self, drain: bool) -> state::Terms {
        let ms = Duration::from_millis;
        state::Terms {
            breaker: breaker::Terms {
                failures: self.breaker.failures,
                cool_down: ms(self.breaker.cool_down_ms),
                cool_down_max: ms(self.breaker.cool_down_max_ms.max(self.breaker.cool_down_ms)),
            },
            checks: checks::Terms { healthy: self.active.healthy, unhealthy: self.active.unhealthy },
            check_every: ms(self.active.interval_ms),
            ejection: ms(self.outlier.ejection_ms),
            drain,
            load_stale: ms(self.load.stale_ms),
        }
    }

    pub(crate) fn outlier_terms(&self) -> outlier::Terms {
        outlier::Terms {
            requests_min: self.outlier.requests_min,
            failure_percent: u64::from(self.outlier.failure_percent),
            latency_factor: self.outlier.latency_factor,
            max_ejected_percent: usize::from(self.outlier.max_ejected_percent),
        }
    }
}
