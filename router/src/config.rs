//! The router's configuration: one struct per part, every field with its unit, default and bounds.
//!
//! Read from YAML; a key that is not known is an error with file, line and column, as is a value out of its
//! bounds. `deploy/config/router.yaml` is a commented example; the JSON schema is [`RouterConfig::schema`].

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use admin::AdminConfig;
pub use attempts::AttemptsConfig;
pub use error::ConfigError;
pub use health::{ActiveConfig, AllOut, BreakerConfig, HealthConfig, LoadConfig, OutlierConfig, Ready};
pub use limits::LimitsConfig;
pub use models::{Fallback, ModelConfig};
pub use pool::{EngineConfig, PolicyKind, PoolConfig, ReleaseMode};
pub use retries::RetriesConfig;
pub(crate) use timeouts::Bounds;
pub use timeouts::{ModelTimeouts, TimeoutsConfig};
pub use url::EngineUrl;

mod admin;
mod attempts;
mod error;
mod health;
mod limits;
mod models;
mod pool;
mod retries;
mod timeouts;
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
    #[garde(length(min = 1, max = 1024), dive, custom(models::distinct_names))]
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
    /// How much of the router's work may be second attempts.
    #[serde(default)]
    #[garde(dive)]
    pub retries: RetriesConfig,
    /// How the router finds out which engines work.
    #[serde(default)]
    #[garde(dive)]
    pub health: HealthConfig,
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
    /// On shutdown, how long the router goes on taking connections while `/ready` already says no and answers close
    /// their connections, so that load balancers have time to see it; in milliseconds. A second signal ends the
    /// wait. 0 to 600,000; default 0.
    #[serde(default)]
    #[garde(range(max = 600_000))]
    pub drain_delay_ms: u64,
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

fn default_drain_timeout_ms() -> u64 {
    30_000
}

fn first_line(text: &str) -> String {
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_owned()
}
