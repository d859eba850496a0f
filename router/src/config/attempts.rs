//! The `attempts` part: how often a leg is tried.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How often a leg is tried, each time on another engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct AttemptsConfig {
    /// Prefill engines that one request may try. 1 to 16; default 2.
    #[garde(range(min = 1, max = 16))]
    pub prefill: u16,
    /// Decode engines that one request may try, with the same handoff. 1 to 16; default 3.
    #[garde(range(min = 1, max = 16))]
    pub decode: u16,
    /// Tries of one settlement. 1 to 16; default 4.
    #[garde(range(min = 1, max = 16))]
    pub settle: u16,
}

impl Default for AttemptsConfig {
    fn default() -> Self {
        Self { prefill: 2, decode: 3, settle: 4 }
    }
}
