//! A pool: engines that can stand in for each other, and how one of them is chosen.

use std::collections::BTreeMap;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::capacity::CapacityConfig;
use super::discover::DiscoverConfig;
use super::engine::EngineConfig;
use super::kv_events::KvEventsConfig;
use super::policy::PolicyConfig;

/// Interchangeable engines, and the policy that chooses one.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// The policy that chooses an engine: a name, or `{name: {parameters}}`. Default `least_load`.
    #[serde(default)]
    #[garde(dive)]
    pub policy: PolicyConfig,
    /// Only engines with all of these labels are members. At most 32. Default: every engine.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub select: BTreeMap<String, String>,
    /// Engines with all of these labels are preferred while one of them has capacity. At most 32. Default:
    /// none.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub prefer: BTreeMap<String, String>,
    /// Where its engines publish KV events; an engine's own `kv_events` overrides it. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub kv_events: Option<KvEventsConfig>,
    /// When an engine is full.
    #[serde(default)]
    #[garde(dive)]
    pub capacity: CapacityConfig,
    /// The engines.
    #[serde(default)]
    #[garde(length(max = 4096), dive)]
    pub engines: Vec<EngineConfig>,
    /// Sources of further engines. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub discover: Option<DiscoverConfig>,
}
