//! The `reload` part: how a changed configuration is noticed.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a changed configuration is noticed. SIGHUP always reads it, and the files that it names, again.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct ReloadConfig {
    /// How often the file, and the files that it names (secrets, keys, tokens, certificates), are read again and put
    /// into effect when their content has changed, in milliseconds. 0 turns that off. 0 to 3,600,000; default 1,000.
    #[garde(range(max = 3_600_000))]
    pub poll_ms: u64,
}

impl Default for ReloadConfig {
    fn default() -> Self {
        Self { poll_ms: 1_000 }
    }
}
