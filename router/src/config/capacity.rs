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
    pub max_in_flight: Option<usize>,
}
