//! Bounds on what clients may send and hold, the queue of waiting requests, and their priorities.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Bounds on what clients may send and hold.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Largest request body, in bytes; a larger one gets 413. 1,024 to 1 GiB; default 32 MiB.
    #[garde(range(min = 1024, max = 1 << 30))]
    pub body_bytes: usize,
    /// Sum of the request bodies in memory, in bytes, from their arrival until a decode engine accepts the
    /// request. Requests beyond it get 429. Whole responses have a second sum of this size; beyond it they
    /// are passed on as they arrive. 1 MiB to 1 TiB; default 1 GiB.
    #[garde(range(min = 1_usize << 20, max = 1_usize << 40))]
    pub body_bytes_total: usize,
    /// Largest head of a request (its line and headers), in bytes; a larger one gets 431. 1,024 to 1 MiB;
    /// default 32 KiB.
    #[garde(range(min = 1024, max = 1 << 20))]
    pub head_bytes: usize,
    /// Concurrent client connections; more wait in the kernel's queue (`net.core.somaxconn`). 1 to 1,000,000;
    /// default 16,384.
    #[garde(range(min = 1, max = 1_000_000))]
    pub connections: usize,
    /// Concurrent requests of one HTTP/2 connection. Further streams are refused (`REFUSED_STREAM`), and
    /// clients wait or repeat them. 1 to 10,000; default 256.
    #[garde(range(min = 1, max = 10_000))]
    pub streams: u32,
    /// Concurrent requests; more get 429 with `Retry-After`. 1 to 1,000,000; default 8,192.
    #[garde(range(min = 1, max = 1_000_000))]
    pub in_flight: usize,
    /// Concurrent settlements (aborts and releases). Up to twice `in_flight` more wait. A settlement beyond
    /// that is counted, and its lease ends by expiry. 1 to 1,000,000; default 4,096.
    #[garde(range(min = 1, max = 1_000_000))]
    pub settlements: usize,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            body_bytes: 32 << 20,
            body_bytes_total: 1 << 30,
            head_bytes: 32 << 10,
            connections: 16_384,
            streams: 256,
            in_flight: 8_192,
            settlements: 4_096,
        }
    }
}

/// Most members of one pool. A configuration may list as many engines.
pub(crate) const MEMBERS_MAX: usize = 4096;

/// Requests that wait for a decode engine, per model. They wait only for engines with `max_in_flight`; an
/// engine without it accepts every request.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct QueueConfig {
    /// Requests that wait; more get 429. As many again may wait with a finished prefill after a decode engine
    /// failed them, and go first. 0 disables the queue. 0 to 1,000,000; default 1,024.
    #[garde(range(max = 1_000_000))]
    pub requests: usize,
    /// The sum of their bodies, in bytes. 0 to 1 TiB; default 256 MiB.
    #[garde(range(max = 1_usize << 40))]
    pub bytes: usize,
    /// Requests of one tenant that wait; without `auth` there are no tenants. 1 to 1,000,000; default 256.
    #[garde(range(min = 1, max = 1_000_000))]
    pub tenant_requests: usize,
    /// The sum of the bodies of one tenant's waiting requests, in bytes. 1 to 1 TiB; default 64 MiB.
    #[garde(range(min = 1_usize, max = 1_usize << 40))]
    pub tenant_bytes: usize,
    /// Longest wait before the first attempt, and longest wait after an engine failed the request, in
    /// milliseconds. A client's own deadline can only be shorter. 1 to 3,600,000; default 30,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub timeout_ms: u64,
    /// How priorities share the capacity of engines while all of them wait.
    #[garde(dive)]
    pub weights: PriorityWeights,
}

/// Shares of the priorities. No priority starves: each gets its share as soon as one of its requests waits.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct PriorityWeights {
    /// 1 to 1,000; default 16.
    #[garde(range(min = 1, max = 1000))]
    pub high: u32,
    /// 1 to 1,000; default 4.
    #[garde(range(min = 1, max = 1000))]
    pub normal: u32,
    /// 1 to 1,000; default 1.
    #[garde(range(min = 1, max = 1000))]
    pub low: u32,
}

/// Priority of a request.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Interactive, and more important than others.
    High,
    /// Default.
    #[default]
    Normal,
    /// Batch work.
    Low,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            requests: 1024,
            bytes: 256 << 20,
            tenant_requests: 256,
            tenant_bytes: 64 << 20,
            timeout_ms: 30_000,
            weights: PriorityWeights::default(),
        }
    }
}

impl Default for PriorityWeights {
    fn default() -> Self {
        Self { high: 16, normal: 4, low: 1 }
    }
}

impl Priority {
    /// All priorities, the most urgent first.
    pub const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];

    /// The name in configuration, headers and metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }

    /// The priority with this name, in capitals or small letters.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|priority| priority.label().eq_ignore_ascii_case(name))
    }

    /// vLLM's number for this priority, the most urgent one with this name but for `high`.
    pub(crate) const fn number(self) -> i32 {
        match self {
            Self::High => -1,
            Self::Normal => 0,
            Self::Low => 1,
        }
    }

    /// The priority for vLLM's number. A lower number is more urgent; 0 is the default.
    #[must_use]
    pub const fn of_number(number: i64) -> Self {
        match number {
            ..0 => Self::High,
            0 => Self::Normal,
            1.. => Self::Low,
        }
    }
}

impl PriorityWeights {
    pub(crate) fn of(&self, priority: Priority) -> u32 {
        match priority {
            Priority::High => self.high,
            Priority::Normal => self.normal,
            Priority::Low => self.low,
        }
    }
}
