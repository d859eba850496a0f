//! The `access_log` part: one line of JSON per request that is over.

use std::path::PathBuf;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One line of JSON per ended request. It never contains prompts, responses, keys or `Authorization`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct AccessLogConfig {
    /// Whether lines are written. Default: false, which costs nothing.
    #[garde(skip)]
    pub enabled: bool,
    /// The file to which lines are appended; it may be a terminal, or a pipe with a reader. The router opens
    /// it again on SIGUSR1, and within a second after it is renamed or removed. Default: none, which is
    /// standard output.
    #[garde(skip)]
    pub path: Option<PathBuf>,
    /// The share of successful requests that are logged; all other requests are always logged. 0 to 1;
    /// default 1.
    #[garde(range(min = 0.0, max = 1.0))]
    pub sample: f64,
    /// Whether lines contain the client's address. Default: true.
    #[garde(skip)]
    pub client: bool,
    /// Lines that may wait for a slow disk; more are dropped and counted. 1 to 1,000,000; default 8,192.
    #[garde(range(min = 1, max = 1_000_000))]
    pub queue: usize,
}

impl Default for AccessLogConfig {
    fn default() -> Self {
        Self { enabled: false, path: None, sample: 1.0, client: true, queue: 8_192 }
    }
}
