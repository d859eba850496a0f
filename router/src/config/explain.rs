//! How many requests' decisions are kept for those who ask why.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Decisions kept for `GET /explain/{id}` on the admin listener and `baton explain`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct ExplainConfig {
    /// Number of latest requests whose decisions are kept; each takes about 1 KiB. 0 keeps none and costs
    /// nothing. 0 to 1,000,000; default 4,096.
    #[garde(range(max = 1_000_000))]
    pub requests: usize,
}

impl Default for ExplainConfig {
    fn default() -> Self {
        Self { requests: 4_096 }
    }
}
