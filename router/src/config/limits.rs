//! The `limits` part: bounds on what clients may send and hold.

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
    /// Concurrent client connections; more wait in the kernel's queue. 1 to 1,000,000; default 16,384.
    #[garde(range(min = 1, max = 1_000_000))]
    pub connections: usize,
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
            in_flight: 8_192,
            settlements: 4_096,
        }
    }
}

/// Members of one pool; as many as a configuration may list.
pub(crate) const MEMBERS_MAX: usize = 4096;
