//! The `reload` part: how a changed configuration is noticed.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the router detects a changed configuration. SIGHUP always reloads it and the files that it names.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct ReloadConfig {
    /// Interval at which the router reads the file and the files that it names (secrets, keys, tokens,
    /// certificates), in milliseconds. Changed content takes effect. 0 disables this. 0 to 3,600,000; default
    /// 1,000.
    #[garde(range(max = 3_600_000))]
    pub poll_ms: u64,
}

impl Default for ReloadConfig {
    fn default() -> Self {
        Self { poll_ms: 1_000 }
    }
}
