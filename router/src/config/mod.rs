//! The router's configuration: one struct per part, every field with its unit, default and bounds.
//!
//! ```text
//! text ─▶ document ─▶ shape ─▶ values ─▶ bounds ─▶ contradictions ─▶ RouterConfig
//!         (bounded    (keys and (serde)  (garde)   (keys that
//!          tree)       types)                       conflict)
//! ```
//!
//! Each step reports every problem that it finds, by file, line and column. The next step runs only if there is none.
//! Keys that name files end in `_file`; see [`RouterConfig::files`]. `examples/router/router.yaml` is a commented
//! example. [`RouterConfig::schema`] returns the JSON schema.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use garde::Validate;
use read::named_file::{self, Section};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use address::{AddressError, Cidr, CidrError, listen_address};
pub use caches::{KvEventsConfig, PrefixIndexConfig, TokenizeConfig, TokenizeSource};
pub use discover::{
    DiscoverConfig, DnsConfig, EndpointsFileConfig, EngineTemplate, InferencePoolConfig, KubernetesConfig,
    PortName, Scheme,
};
pub use engine::{EngineConfig, ReleaseMode};
pub use error::{ConfigError, Problem, SourcePosition};
pub use health::{
    ActiveConfig, AllOut, BreakerConfig, HealthConfig, OutlierConfig, Ready, ReportedLoadConfig,
};
pub use limits::{LimitsConfig, Priority, PriorityWeights, QueueConfig};
pub use listeners::{
    AdminConfig, ClientAuth, ClientHttp2, CorsConfig, EngineTlsConfig, ListenTlsConfig, PickerConfig,
};
pub use models::{
    ApiMode, CapacityConfig, DisaggregateConfig, EngineHttp2, Fallback, ModelConfig, PoolConfig,
    ProtocolSetting,
};
pub use observe::{AccessLogConfig, ExplainConfig, OtlpConfig, TelemetryConfig};
pub use policy::{
    AffinityKey, ConsistentHashConfig, FeaturesConfig, LoadConfig, LoadUnit, NoParameters, PolicyConfig,
    PrefixAwareConfig,
};
pub use read::named_file::NamedFile;
pub use reload::ReloadConfig;
pub use secret::{MASK, Secret};
pub use tenants::jwt::{JwtAlgorithm, JwtConfig};
pub use tenants::shared_limits::{OnStoreFailure, SharedLimitsConfig};
pub use tenants::{AuthConfig, CertificateConfig, KeyConfig, KeysFile, RateLimitsConfig, TenantConfig};
pub(crate) use timeouts::RequestTimeouts;
pub use timeouts::{AttemptsConfig, ModelTimeouts, RetriesConfig, TimeoutsConfig};
pub use url::{EngineUrl, UrlError};

pub(crate) use tenants::jwt::key_url;
#[cfg(test)]
pub(crate) use tenants::moment;
pub(crate) use tenants::shared_limits::StoreAddress;

mod address;
mod caches;
mod discover;
mod engine;
mod error;
pub(crate) mod file_watch;
mod health;
pub(crate) mod limits;
mod listeners;
mod models;
mod observe;
mod policy;
pub(crate) mod read;
mod reload;
mod secret;
mod tenants;
mod timeouts;
mod url;

/// The whole file.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct RouterConfig {
    /// Where clients connect: `IP:PORT` or `localhost:PORT`; port 0 picks a free one. Default `127.0.0.1:8080`.
    #[serde(default = "default_listen", deserialize_with = "address::deserialize")]
    #[schemars(extend("format" = address::FORMAT))]
    #[garde(skip)]
    pub listen: SocketAddr,
    /// TLS for clients. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub listen_tls: Option<ListenTlsConfig>,
    /// Whether clients may use HTTP/2: with prior knowledge, or with TLS by ALPN. HTTP/1.1 stays possible.
    /// Default `auto`.
    #[serde(default)]
    #[garde(skip)]
    pub http2: ClientHttp2,
    /// Load balancers and proxies before the router, as networks (`10.0.0.0/8`) or addresses. For a
    /// connection from one of them, the client is the rightmost address of `X-Forwarded-For` that is not in
    /// this list. The router logs this address and distinguishes clients by it if they have no other
    /// identity. It ignores the header from other addresses. At most 256. Default: none.
    #[serde(default)]
    #[garde(length(max = 256))]
    pub trusted_proxies: Vec<Cidr>,
    /// Pages of other origins that may call the client listener from a browser (CORS). Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub cors: Option<CorsConfig>,
    /// TLS towards engines whose address is `https://`. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub engine_tls: Option<EngineTlsConfig>,
    /// The listener for people and monitors: `/metrics`, `/health`, `/ready`.
    #[serde(default)]
    #[garde(dive)]
    pub admin: AdminConfig,
    /// The listeners and rules of `baton picker`. `baton router` ignores it.
    #[serde(default)]
    #[garde(dive)]
    pub picker: PickerConfig,
    /// The models and their engines. At least one.
    #[garde(length(min = 1, max = 1024), dive)]
    pub models: Vec<ModelConfig>,
    /// Bounds on what clients may send and hold.
    #[serde(default)]
    #[garde(dive)]
    pub limits: LimitsConfig,
    /// Clients that may use the router. Default: all clients; the router then passes `Authorization` on to
    /// engines.
    #[serde(default)]
    #[garde(dive)]
    pub auth: Option<AuthConfig>,
    /// Requests that wait when every decode engine of a model is full.
    #[serde(default)]
    #[garde(dive)]
    pub queue: QueueConfig,
    /// How long each leg may take or be silent.
    #[serde(default)]
    #[garde(dive)]
    pub timeouts: TimeoutsConfig,
    /// How often a leg is tried.
    #[serde(default)]
    #[garde(dive)]
    pub attempts: AttemptsConfig,
    /// Budget of retries, for the whole router.
    #[serde(default)]
    #[garde(dive)]
    pub retries: RetriesConfig,
    /// How the router detects engines that fail.
    #[serde(default)]
    #[garde(dive)]
    pub health: HealthConfig,
    /// Decisions kept for `GET /explain/{id}` and `baton explain`.
    #[serde(default)]
    #[garde(dive)]
    pub explain: ExplainConfig,
    /// One line of JSON per ended request.
    #[serde(default)]
    #[garde(dive)]
    pub access_log: AccessLogConfig,
    /// OpenTelemetry traces.
    #[serde(default)]
    #[garde(dive)]
    pub telemetry: TelemetryConfig,
    /// Bounds of the known caches of engines.
    #[serde(default)]
    #[garde(dive)]
    pub prefix_index: PrefixIndexConfig,
    /// How the router detects a changed configuration.
    #[serde(default)]
    #[garde(dive)]
    pub reload: ReloadConfig,
    /// Secret shared with the engines, sent as `x-baton-cluster-secret`. Baton engines beyond loopback accept
    /// the release verbs only with it. Prefer `cluster_secret_file`. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[garde(inner(length(bytes, min = 16, max = 512)))]
    pub cluster_secret: Option<Secret>,
    /// A file whose first line is the cluster secret. Default: none.
    #[serde(default)]
    #[garde(skip)]
    pub cluster_secret_file: Option<PathBuf>,
    /// On shutdown, time after which the router ends and settles requests in flight, in milliseconds. 0 to
    /// 3,600,000; default 30,000.
    #[serde(default = "default_drain_timeout_ms")]
    #[garde(range(max = 3_600_000))]
    pub drain_timeout_ms: u64,
    /// On shutdown, time during which the router still accepts connections, in milliseconds. `/ready` already
    /// fails, and responses close their connections, so that load balancers can react. A second signal ends
    /// this time. 0 to 600,000; default 0.
    #[serde(default)]
    #[garde(range(max = 600_000))]
    pub drain_delay_ms: u64,
}

impl RouterConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ConfigError`] with every problem and its position.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::from_yaml(&read::text_of(path)?, &path.display().to_string())
    }

    /// Reads YAML text. Errors contain `name` as the file's name.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with every problem and its position.
    pub fn from_yaml(text: &str, name: &str) -> Result<Self, ConfigError> {
        read::config(text).map_err(|mut problems| {
            problems.sort();
            problems.dedup();
            ConfigError::Invalid { name: name.to_owned(), problems }
        })
    }

    /// The JSON schema of the file.
    #[must_use]
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(Self).to_value()
    }

    /// The secret shared with the engines.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`] if its file cannot be read.
    pub fn secret(&self) -> Result<Option<String>, ConfigError> {
        match &self.cluster_secret_file {
            Some(path) => read::first_line_of("cluster_secret_file", path),
            None => Ok(self.cluster_secret.as_ref().map(|secret| secret.reveal().to_owned())),
        }
    }

    /// The whole configuration with every default, as YAML; secrets are masked.
    #[must_use]
    pub fn effective(&self) -> String {
        serde_saphyr::to_string(self).expect("a configuration is made of maps, lists and scalars")
    }

    /// The differences from this configuration to another, one line each: `- path: old` and `+ path: new`. Secrets
    /// are masked, so a change of only a secret is not shown.
    #[must_use]
    pub fn changes(&self, next: &Self) -> Vec<String> {
        reload::diff(&self.value(), &next.value())
    }

    /// The configuration as JSON, with secrets masked.
    pub(crate) fn value(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("a configuration is made of maps, lists and scalars")
    }

    /// Every file that the configuration names: values of keys that end in `_file`, and the keys and certificates of
    /// parts that end in `tls`. Lists of engines are not included: their discovery sources watch them.
    #[must_use]
    pub fn files(&self) -> BTreeSet<PathBuf> {
        self.named_files().into_iter().map(|named| named.file).collect()
    }

    /// The named files that the router reads only with the configuration: a change needs a new generation. API keys,
    /// the admin token and certificates are not included: the components that use them reload them.
    #[must_use]
    pub fn watched_files(&self) -> BTreeSet<PathBuf> {
        self.named_files().into_iter().filter(|named| !named.followed).map(|named| named.file).collect()
    }

    /// Every key that names a file, with its file. A file appears once per key.
    #[must_use]
    pub fn named_files(&self) -> Vec<NamedFile> {
        let mut files = Vec::new();
        named_file::find(&self.value(), "", Section::Other, &mut files);
        files
    }

    /// Settings that are valid but probably unintended, one line each.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        read::contradictions::find_warnings(self)
    }

    /// How long requests in flight may continue at shutdown.
    #[must_use]
    pub fn drain_timeout(&self) -> Duration {
        Duration::from_millis(self.drain_timeout_ms)
    }
}

fn default_listen() -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080)
}

fn default_drain_timeout_ms() -> u64 {
    30_000
}
