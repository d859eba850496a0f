//! One engine of a pool: its addresses, weight, labels, limits, and how its leases are released.

use std::collections::BTreeMap;
use std::path::PathBuf;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{EngineUrl, KvEventsConfig};

/// One engine.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// `http://HOST:PORT`, or `https://HOST:PORT` with `engine_tls`.
    #[garde(skip)]
    pub url: EngineUrl,
    /// Share of the work, relative to the other engines of its pool. 1 to 1,000; default 1.
    #[serde(default = "default_weight")]
    #[garde(range(min = 1, max = 1000))]
    pub weight: u32,
    /// A file whose first line the router sends to the engine as `Authorization: Bearer`, instead of the
    /// client's key. For the `--api-key` of a stock engine. Default: none.
    #[serde(default)]
    #[garde(skip)]
    pub api_key_file: Option<PathBuf>,
    /// Labels for policies and people: `zone: a`. At most 32. Default: none.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub labels: BTreeMap<String, String>,
    /// Requests of this router in flight at the engine; at this number it gets no more. 1 to 1,000,000.
    /// Default: the pool's `capacity.max_in_flight`.
    #[serde(default)]
    #[garde(inner(range(min = 1, max = 1_000_000)))]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_in_flight: Option<usize>,
    /// Where it publishes KV events. Default: the pool's `kv_events`.
    #[serde(default)]
    #[garde(dive)]
    pub kv_events: Option<KvEventsConfig>,
    /// The engine finishes its requests and gets no new ones. `POST /engines/…/undrain` on the admin listener
    /// overrides this. Default false.
    #[serde(default)]
    #[garde(skip)]
    pub drain: bool,
    /// How the router ends a lease of this engine that no engine will read. An engine with both legs uses the
    /// value of its prefill pool, the same in every model. Default `auto`.
    #[serde(default)]
    #[garde(skip)]
    pub release: ReleaseMode,
    /// Data-parallel ranks behind the address. With more than one, each rank is a candidate with its own
    /// load, and the router chooses it (`X-data-parallel-rank`). With one, the header is not sent. 1 to 256;
    /// default 1.
    #[serde(default = "default_ranks")]
    #[garde(range(min = 1, max = 256))]
    pub data_parallel_size: u16,
    /// SGLang only: the port of a prefill engine's bootstrap server. 1 to 65,535. Default: what the engine's
    /// `/server_info` reports, or else 8998.
    #[serde(default)]
    #[garde(inner(range(min = 1)))]
    #[schemars(range(min = 1))]
    pub bootstrap_port: Option<u16>,
    /// SGLang only: the host of a prefill engine's bootstrap server, as decode engines reach it. Default: the
    /// host of `url`.
    #[serde(default)]
    #[garde(inner(length(bytes, min = 1, max = 253)))]
    pub bootstrap_host: Option<String>,
    /// The address at which the engine answers `/abort_requests`, `/kv/release` and `/debug/kv`, if it is not
    /// `url`: same form, same secrets. The same in every pool; discovered engines have none. Default: `url`.
    #[serde(default)]
    #[garde(skip)]
    pub control_url: Option<EngineUrl>,
}

/// How the router ends a lease that no engine will read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReleaseMode {
    /// By the release verb, if P's reply has a handle or the engine has the verb (tested once); otherwise as
    /// `refused_decode`.
    #[default]
    Auto,
    /// By the release verb (`POST /kv/release`, `POST /abort_requests`) or not at all.
    Verb,
    /// For stock vLLM: the router sends a decode engine the handoff in a request that its handler must
    /// refuse. The refusal notifies the prefill engine, within 10 to 30 ms (vLLM 0.32).
    RefusedDecode,
    /// Not at all: the lease expires (30 s on stock vLLM).
    Lease,
}

fn default_ranks() -> u16 {
    1
}

fn default_weight() -> u32 {
    1
}
