//! A pool: engines that can stand in for each other, and how one of them is chosen.

use std::collections::BTreeMap;
use std::path::PathBuf;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::url::EngineUrl;

/// Engines that can stand in for each other, and how one is chosen.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// Default `least_load`.
    #[serde(default)]
    #[garde(skip)]
    pub policy: PolicyKind,
    /// The engines.
    #[serde(default)]
    #[garde(length(max = 4096), dive)]
    pub engines: Vec<EngineConfig>,
}

/// One engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// `http://HOST:PORT`, or `https://HOST:PORT` with `engine_tls`.
    #[garde(skip)]
    pub url: EngineUrl,
    /// Its share of the work against the others' of its pool. 1 to 1,000; default 1.
    #[serde(default = "default_weight")]
    #[garde(range(min = 1, max = 1000))]
    pub weight: u32,
    /// Requests of this router that it works on at once. When every engine of a pool is full, requests wait in
    /// the queue. 1 to 1,000,000; default: no bound.
    #[serde(default)]
    #[garde(inner(range(min = 1, max = 1_000_000)))]
    pub max_in_flight: Option<usize>,
    /// A file whose first line is sent to it as `Authorization: Bearer`, whatever the client sent: for a stock
    /// engine's own `--api-key`. Default: none.
    #[serde(default)]
    #[garde(skip)]
    pub api_key_file: Option<PathBuf>,
    /// What it is, for policies and people: `zone: a`. At most 32. Default: none.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub labels: BTreeMap<String, String>,
}

/// How an engine of a pool is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKind {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest requests of this router in flight.
    #[default]
    LeastLoad,
}

fn default_weight() -> u32 {
    1
}
