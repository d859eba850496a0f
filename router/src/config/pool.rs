//! A pool: engines that can stand in for each other, and how one of them is chosen.

use std::collections::BTreeMap;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::capacity::CapacityConfig;
use super::discover::DiscoverConfig;
use super::policy::PolicyConfig;
use super::url::EngineUrl;

/// Engines that can stand in for each other, and how one is chosen.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// How one of them is chosen: a name, or `{name: {parameters}}`. Default `least_load`.
    #[serde(default)]
    #[garde(dive)]
    pub policy: PolicyConfig,
    /// Only engines with all of these labels are members. At most 32. Default: every engine.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub select: BTreeMap<String, String>,
    /// Engines with all of these labels are chosen while one of them has room. At most 32. Default: none.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub prefer: BTreeMap<String, String>,
    /// When an engine has no room for another request.
    #[serde(default)]
    #[garde(dive)]
    pub capacity: CapacityConfig,
    /// The engines.
    #[serde(default)]
    #[garde(length(max = 4096), dive)]
    pub engines: Vec<EngineConfig>,
    /// Where further engines are looked up. Default: nowhere.
    #[serde(default)]
    #[garde(dive)]
    pub discover: Option<DiscoverConfig>,
}

/// One engine.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// `http://HOST:PORT`.
    #[garde(skip)]
    pub url: EngineUrl,
    /// Its share of the work against the others' of its pool. 1 to 1,000; default 1.
    #[serde(default = "default_weight")]
    #[garde(range(min = 1, max = 1000))]
    pub weight: u32,
    /// What it is, for policies and people: `zone: a`. At most 32. Default: none.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub labels: BTreeMap<String, String>,
    /// Requests of this router in flight at once; an engine that has as many gets no more. 1 to 1,000,000.
    /// Default: the pool's `capacity.max_in_flight`.
    #[serde(default)]
    #[garde(inner(range(min = 1, max = 1_000_000)))]
    pub max_in_flight: Option<usize>,
}

fn default_weight() -> u32 {
    1
}
