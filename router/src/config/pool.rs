//! A pool: engines that can stand in for each other, and how one of them is chosen.

use std::collections::BTreeMap;
use std::path::PathBuf;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::capacity::CapacityConfig;
use super::discover::DiscoverConfig;
use super::kv_events::KvEventsConfig;
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
    /// Where its engines tell of their caches; an engine's own `kv_events` wins. Default: nowhere.
    #[serde(default)]
    #[garde(dive)]
    pub kv_events: Option<KvEventsConfig>,
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
    /// `http://HOST:PORT`, or `https://HOST:PORT` with `engine_tls`.
    #[garde(skip)]
    pub url: EngineUrl,
    /// Its share of the work against the others' of its pool. 1 to 1,000; default 1.
    #[serde(default = "default_weight")]
    #[garde(range(min = 1, max = 1000))]
    pub weight: u32,
    /// A file whose first line is sent to it as `Authorization: Bearer`, whatever the client sent: for a stock
    /// engine's own `--api-key`. Default: none.
    #[serde(default)]
    #[garde(skip)]
    pub api_key_file: Option<PathBuf>,
    /// What it is, for policies and people: `zone: a`. At most 32. Default: none.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub labels: BTreeMap<String, String>,
    /// Requests of this router in flight at once; an engine that has as many gets no more. 1 to 1,000,000.
    /// Default: the pool's `capacity.max_in_flight`.
    #[serde(default)]
    #[garde(inner(range(min = 1, max = 1_000_000)))]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_in_flight: Option<usize>,
    /// Where it tells of its cache. Default: the pool's `kv_events`.
    #[serde(default)]
    #[garde(dive)]
    pub kv_events: Option<KvEventsConfig>,
    /// It finishes what it has and is given nothing new; `POST /engines/…/undrain` on the admin listener goes
    /// before this. Default false.
    #[serde(default)]
    #[garde(skip)]
    pub drain: bool,
    /// How a lease that nobody will read is ended at this engine. One that prefills and decodes has what is said where it
    /// prefills, and the same in every model. Default `auto`.
    #[serde(default)]
    #[garde(skip)]
    pub release: ReleaseMode,
    /// Data-parallel ranks behind the address. With more than one, each is a candidate with a load of its own, and
    /// the router chooses it (`X-data-parallel-rank`); with one, the header is not sent. 1 to 256; default 1.
    #[serde(default = "default_ranks")]
    #[garde(range(min = 1, max = 256))]
    pub data_parallel_size: u16,
}

/// How a lease that nobody will read is ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReleaseMode {
    /// By the release verb, where the engine has it (which is learnt once); otherwise as `refused_decode`.
    #[default]
    Auto,
    /// By the release verb (`POST /kv/release`, `POST /abort_requests`) or not at all.
    Verb,
    /// For stock vLLM: a decode engine is sent a request that its handler must refuse, with the handoff. Its refusal
    /// tells the prefill engine, within 10 to 30 ms (measured 2026-11-20 on vLLM 0.32).
    RefusedDecode,
    /// Not at all: the lease runs out (30 s on stock vLLM).
    Lease,
}

fn default_ranks() -> u16 {
    1
}

fn default_weight() -> u32 {
    1
}
