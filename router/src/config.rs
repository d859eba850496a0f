//! The router's configuration: one struct per part, every field with its unit, default and bounds.
//!
//! Read from YAML; a key that is not known is an error with file, line and column, as is a value out of its
//! bounds. `deploy/config/router.yaml` is a commented example; the JSON schema is [`RouterConfig::schema`].

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use capacity::CapacityConfig;
pub use disaggregate::DisaggregateConfig;
pub use features::FeaturesConfig;
pub use policy::{
    AffinityKey, ConsistentHashConfig, LoadConfig, LoadUnit, NoParameters, PolicyConfig, PrefixAwareConfig,
};
pub use url::EngineUrl;

mod capacity;
mod disaggregate;
mod features;
mod policy;
mod url;

/// The whole file.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct RouterConfig {
    /// Where clients connect: `IP:PORT`; port 0 picks a free one. Default `127.0.0.1:8080`.
    #[serde(default = "default_listen")]
    #[garde(skip)]
    pub listen: SocketAddr,
    /// The listener for people and monitors: `/metrics`, `/health`, `/ready`.
    #[serde(default)]
    #[garde(dive)]
    pub admin: AdminConfig,
    /// The models and who serves them. At least one.
    #[garde(length(min = 1, max = 1024), dive, custom(distinct_names))]
    pub models: Vec<ModelConfig>,
    /// Bounds on what clients may send and hold.
    #[serde(default)]
    #[garde(dive)]
    pub limits: LimitsConfig,
    /// How long each leg may take or be silent.
    #[serde(default)]
    #[garde(dive)]
    pub timeouts: TimeoutsConfig,
    /// How often a leg is tried.
    #[serde(default)]
    #[garde(dive)]
    pub attempts: AttemptsConfig,
    /// Shared with the engines and sent to them as `x-baton-cluster-secret`. Baton engines beyond loopback
    /// take the release verbs only with it. Prefer `cluster_secret_file`. Default: none.
    #[serde(default, skip_serializing)]
    #[garde(inner(length(bytes, min = 16, max = 512)))]
    pub cluster_secret: Option<String>,
    /// A file whose first line is the cluster secret. Default: none.
    #[serde(default)]
    #[garde(skip)]
    pub cluster_secret_file: Option<PathBuf>,
    /// On shutdown, how long requests in flight may go on before they are cut and settled, in milliseconds.
    /// 0 to 3,600,000; default 30,000.
    #[serde(default = "default_drain_timeout_ms")]
    #[garde(range(max = 3_600_000))]
    pub drain_timeout_ms: u64,
}

/// The listener for people and monitors.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// `IP:PORT`; port 0 picks a free one. It has no authentication, so keep it on loopback or behind a
    /// firewall. Default `127.0.0.1:8081`.
    #[garde(skip)]
    pub listen: SocketAddr,
}

/// One model and the engines that serve it.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The name that clients send as `model`, and that the engines know.
    #[garde(length(bytes, min = 1, max = 256))]
    pub name: String,
    /// Other names that clients may send; engines are always sent `name`. Default: none.
    #[serde(default)]
    #[garde(length(max = 64), inner(length(bytes, min = 1, max = 256)))]
    pub aliases: Vec<String>,
    /// The engines that prefill. Without any, decode engines compute whole requests.
    #[serde(default)]
    #[garde(dive)]
    pub prefill: PoolConfig,
    /// The engines that decode. At least one.
    #[garde(dive, custom(not_empty))]
    pub decode: PoolConfig,
    /// What happens when no prefill engine can be had. Default `aggregate`.
    #[serde(default)]
    #[garde(skip)]
    pub fallback: Fallback,
    /// Which requests are prefilled on another engine than the one that decodes them. Default: all.
    #[serde(default)]
    #[garde(dive)]
    pub disaggregate: DisaggregateConfig,
    /// Names of labels. A prefill engine that has the decode engine's values of them is preferred to one that
    /// has not. At most 8; default: none.
    #[serde(default)]
    #[garde(length(max = 8), inner(length(bytes, min = 1, max = 256)))]
    pub pair_by: Vec<String>,
    /// What the router looks at in a request to choose engines.
    #[serde(default)]
    #[garde(dive)]
    pub features: FeaturesConfig,
}

/// Engines that can stand in for each other, and how one is chosen.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// How one of them is chosen: a name, or `{name: {parameters}}`. Default `least_load`.
    #[serde(default)]
    #[garde(dive)]
    pub policy: PolicyConfig,
    /// Only engines with all of these labels are members. Default: every engine.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub select: BTreeMap<String, String>,
    /// Engines with all of these labels are chosen while one of them has room. Default: none.
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
}

/// One engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
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
    pub max_in_flight: Option<u32>,
}

/// What happens when no prefill engine can be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fallback {
    /// A decode engine computes the whole request.
    #[default]
    Aggregate,
    /// The request is refused with 503.
    None,
}

/// Bounds on what clients may send and hold.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Largest request body, in bytes; a larger one is answered 413. 1,024 to 1 GiB; default 32 MiB.
    #[garde(range(min = 1024, max = 1 << 30))]
    pub body_bytes: usize,
    /// Client connections at once; more wait in the kernel's queue. 1 to 1,000,000; default 16,384.
    #[garde(range(min = 1, max = 1_000_000))]
    pub connections: usize,
    /// Requests at once; more are answered 429 with `Retry-After`. 1 to 1,000,000; default 8,192.
    #[garde(range(min = 1, max = 1_000_000))]
    pub in_flight: usize,
    /// Settlements (aborts and releases) at once. A settlement beyond it is counted and left to the lease's
    /// expiry. 1 to 1,000,000; default 4,096.
    #[garde(range(min = 1, max = 1_000_000))]
    pub settlements: usize,
}

/// How long each part of a request may take or be silent, in milliseconds.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct TimeoutsConfig {
    /// The whole body of a client's request. 1 to 3,600,000; default 30,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub body_ms: u64,
    /// A client that takes no bytes of its answer. 1 to 3,600,000; default 60,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub client_stall_ms: u64,
    /// A connection to an engine. 1 to 60,000; default 2,000.
    #[garde(range(min = 1, max = 60_000))]
    pub connect_ms: u64,
    /// A prefill engine that says nothing. 1 to 3,600,000; default 120,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub prefill_silence_ms: u64,
    /// A decode engine before the first byte of its answer. For an answer that is not streamed this is the
    /// whole generation. 1 to 3,600,000; default 600,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub decode_first_byte_ms: u64,
    /// An engine that has been asked and says nothing is asked for its health this often; one that does not answer
    /// twice in a row, within 2 s each, has failed. Shorter than a lease. 1 to 3,600,000; default 5,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub alive_ms: u64,
    /// A decode engine between two pieces of its answer. 1 to 3,600,000; default 60,000.
    #[garde(range(min = 1, max = 3_600_000))]
    pub stream_silence_ms: u64,
    /// One try of a settlement; also how long an abandoned prefill's reply is waited for.
    /// 1 to 60,000; default 5,000.
    #[garde(range(min = 1, max = 60_000))]
    pub settle_ms: u64,
    /// An idle connection to an engine is not used again after this. Engines must keep idle connections for
    /// longer (vLLM: 5 s). 0 to 3,600,000; default 4,000.
    #[garde(range(max = 3_600_000))]
    pub engine_idle_ms: u64,
}

/// How often a leg is tried, each time on another engine.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct AttemptsConfig {
    /// Prefill engines that one request may ask. 1 to 16; default 2.
    #[garde(range(min = 1, max = 16))]
    pub prefill: u16,
    /// Decode engines that one request may ask, with the same handoff. 1 to 16; default 3.
    #[garde(range(min = 1, max = 16))]
    pub decode: u16,
    /// Tries of one settlement. 1 to 16; default 4.
    #[garde(range(min = 1, max = 16))]
    pub settle: u16,
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{name}: {source}")]
    Unreadable {
        /// The file.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// What is in it is not a configuration.
    #[error("{name}:{line}:{column}: {what}")]
    Invalid {
        /// The file.
        name: String,
        /// From 1.
        line: u64,
        /// From 1.
        column: u64,
        /// What is wrong.
        what: String,
    },
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self { listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8081) }
    }
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self { body_bytes: 32 << 20, connections: 16_384, in_flight: 8_192, settlements: 4_096 }
    }
}

impl Default for TimeoutsConfig {
    fn default() -> Self {
        Self {
            body_ms: 30_000,
            client_stall_ms: 60_000,
            connect_ms: 2_000,
            prefill_silence_ms: 120_000,
            decode_first_byte_ms: 600_000,
            alive_ms: 5_000,
            stream_silence_ms: 60_000,
            settle_ms: 5_000,
            engine_idle_ms: 4_000,
        }
    }
}

impl Default for AttemptsConfig {
    fn default() -> Self {
        Self { prefill: 2, decode: 3, settle: 4 }
    }
}

impl RouterConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ConfigError`] with the place and what is wrong there.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let name = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Self::from_yaml(&text, &name),
            Err(source) => Err(ConfigError::Unreadable { name, source }),
        }
    }

    /// Reads YAML text; `name` is what errors call it.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with the place and what is wrong there.
    pub fn from_yaml(text: &str, name: &str) -> Result<Self, ConfigError> {
        serde_saphyr::from_str_valid(text).map_err(|error| {
            let place = error.location();
            ConfigError::Invalid {
                name: name.to_owned(),
                line: place.map_or(1, |p| p.line()),
                column: place.map_or(1, |p| p.column()),
                what: first_line(&error.without_snippet().to_string()),
            }
        })
    }

    /// The JSON schema of the file.
    #[must_use]
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(Self).to_value()
    }

    /// The secret that is shared with the engines.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`] when its file cannot be read.
    pub fn secret(&self) -> Result<Option<String>, ConfigError> {
        let Some(path) = &self.cluster_secret_file else {
            return Ok(self.cluster_secret.clone());
        };
        let name = path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable { name, source })?;
        Ok(text.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()))
    }

    /// How long requests in flight may go on at shutdown.
    #[must_use]
    pub fn drain_timeout(&self) -> Duration {
        Duration::from_millis(self.drain_timeout_ms)
    }
}

fn default_listen() -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080)
}

fn default_weight() -> u32 {
    1
}

fn default_drain_timeout_ms() -> u64 {
    30_000
}

fn first_line(text: &str) -> String {
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_owned()
}

fn distinct_names(models: &[ModelConfig], _: &()) -> garde::Result {
    let mut seen = std::collections::BTreeSet::new();
    let names = models.iter().flat_map(|m| std::iter::once(&m.name).chain(&m.aliases));
    for name in names {
        if !seen.insert(name) {
            return Err(garde::Error::new(format!("the name `{name}` is given twice")));
        }
    }
    Ok(())
}

fn not_empty(pool: &PoolConfig, _: &()) -> garde::Result {
    if pool.engines.is_empty() {
        return Err(garde::Error::new("needs at least one engine"));
    }
    Ok(())
}
