//! The router's configuration: one struct per part, every field with its unit, default and bounds.
//!
//! ```text
//! text ─▶ document ─▶ shape ─▶ values ─▶ bounds ─▶ contradictions ─▶ RouterConfig
//!         (bounded    (keys and (serde)  (garde)   (keys that do
//!          tree)       types)                       not agree)
//! ```
//!
//! Each step tells all that it finds, by file, line and column, and ends the reading when it found something.
//! Keys of files that the configuration names end in `_file`; see [`RouterConfig::files`]. `deploy/config/router.yaml` is a commented example; the JSON schema is [`RouterConfig::schema`].

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use garde::Validate;
use read::document::{Document, Unreadable};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use access_log::AccessLogConfig;
pub use address::{AddressError, listen_address};
pub use admin::AdminConfig;
pub use attempts::AttemptsConfig;
pub use capacity::CapacityConfig;
pub use cidr::{Cidr, CidrError};
pub use disaggregate::DisaggregateConfig;
pub use discover::{
    DiscoverConfig, DnsConfig, EndpointsFileConfig, EngineTemplate, KubernetesConfig, PortName, Scheme,
};
pub use engine::{EngineConfig, ReleaseMode};
pub use error::{ConfigError, Place, Problem};
pub use explain::ExplainConfig;
pub use features::FeaturesConfig;
pub use health::{
    ActiveConfig, AllOut, BreakerConfig, HealthConfig, OutlierConfig, Ready, ReportedLoadConfig,
};
pub use kv_events::KvEventsConfig;
pub use limits::LimitsConfig;
pub use models::{Fallback, ModelConfig};
pub use policy::{
    AffinityKey, ConsistentHashConfig, LoadConfig, LoadUnit, NoParameters, PolicyConfig, PrefixAwareConfig,
};
pub use pool::PoolConfig;
pub use prefix_index::PrefixIndexConfig;
pub use queue::{Priority, PriorityWeights, QueueConfig};
pub use reload::ReloadConfig;
pub use retries::RetriesConfig;
pub use secret::{MASK, Secret};
pub use telemetry::{OtlpConfig, TelemetryConfig};
pub use tenants::{AuthConfig, CertificateConfig, KeyConfig, KeysFile, RateLimitsConfig, TenantConfig};
pub(crate) use timeouts::Bounds;
pub use timeouts::{ModelTimeouts, TimeoutsConfig};
pub use tls::{ClientAuth, EngineTlsConfig, ListenTlsConfig};
pub use url::{EngineUrl, UrlError};

pub(crate) use tenants::moment;

mod access_log;
mod address;
mod admin;
mod attempts;
mod capacity;
mod changes;
mod cidr;
mod disaggregate;
mod discover;
mod engine;
mod error;
mod explain;
mod features;
pub(crate) mod file_watch;
mod health;
mod hints;
mod kv_events;
pub(crate) mod limits;
mod models;
pub(crate) mod named_file;
mod policy;
mod pool;
mod prefix_index;
mod queue;
mod read;
mod reload;
mod retries;
mod secret;
mod telemetry;
mod tenants;
mod timeouts;
mod tls;
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
    /// Load balancers and proxies before the router, as networks (`10.0.0.0/8`) or addresses. For a
    /// connection from one of them, the client is the rightmost address of `X-Forwarded-For` that is not in
    /// this list. The router logs this address and distinguishes clients by it if they have no other
    /// identity. It ignores the header from other addresses. At most 256. Default: none.
    #[serde(default)]
    #[garde(length(max = 256))]
    pub trusted_proxies: Vec<Cidr>,
    /// TLS towards engines whose address is `https://`. Default: none.
    #[serde(default)]
    #[garde(dive)]
    pub engine_tls: Option<EngineTlsConfig>,
    /// The listener for people and monitors: `/metrics`, `/health`, `/ready`.
    #[serde(default)]
    #[garde(dive)]
    pub admin: AdminConfig,
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
    /// [`ConfigError`] with the place and what is wrong there.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::from_yaml(&Self::read_text(path)?, &path.display().to_string())
    }

    /// The text of a file, or as much of it as shows that it is too large.
    pub(crate) fn read_text(path: &Path) -> Result<String, ConfigError> {
        let name = path.display().to_string();
        let unreadable = |source| ConfigError::Unreadable { name: name.clone(), source };
        let mut text = String::new();
        // One byte more than is read shows that there is more.
        let most = u64::try_from(read::document::BYTES_MAX).expect("a small number") + 1;
        let file = std::fs::File::open(path).map_err(unreadable)?;
        std::io::Read::read_to_string(&mut std::io::Read::take(file, most), &mut text).map_err(unreadable)?;
        Ok(text)
    }

    /// Reads YAML text; `name` is what errors call it.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with every problem that can be told, each with its place.
    pub fn from_yaml(text: &str, name: &str) -> Result<Self, ConfigError> {
        read(text).map_err(|mut problems| {
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

    /// The secret that is shared with the engines.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`] when its file cannot be read.
    pub fn secret(&self) -> Result<Option<String>, ConfigError> {
        match &self.cluster_secret_file {
            Some(path) => first_line_of("cluster_secret_file", path),
            None => Ok(self.cluster_secret.as_ref().map(|secret| secret.reveal().to_owned())),
        }
    }

    /// The whole configuration with every default, as YAML; secrets are masked.
    #[must_use]
    pub fn effective(&self) -> String {
        serde_saphyr::to_string(self).expect("a configuration is made of maps, lists and scalars")
    }

    /// What changes from this configuration to another, one line each: `- path: old` and `+ path: new`. Secrets
    /// are masked, so that a change of a secret alone is not shown.
    #[must_use]
    pub fn changes(&self, next: &Self) -> Vec<String> {
        changes::between(&self.value(), &next.value())
    }

    /// As JSON, with secrets masked.
    pub(crate) fn value(&self) -> serde_json::Value {
        serde_json::to_value(self).expect("a configuration is made of maps, lists and scalars")
    }

    /// Every file that the configuration names: those under keys that end in `_file`, and the keys and certificates
    /// of the parts that end in `tls`. Lists of engines are not among them; their sources follow them.
    #[must_use]
    pub fn files(&self) -> BTreeSet<PathBuf> {
        self.named_files().into_iter().map(|named| named.file).collect()
    }

    /// Those of them that are read with the configuration only: a change needs a new version of it. API keys, the admin
    /// token and certificates are followed by those who use them.
    #[must_use]
    pub fn watched_files(&self) -> BTreeSet<PathBuf> {
        self.named_files().into_iter().filter(|named| !named.followed).map(|named| named.file).collect()
    }

    /// Each of them as often as it is named.
    #[must_use]
    pub fn named_files(&self) -> Vec<NamedFile> {
        let mut files = Vec::new();
        files_in(&self.value(), "", false, &mut files);
        files
    }

    /// What is allowed and yet is hardly what was meant, one line each.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        read::contradictions::doubts(self)
    }

    /// How long requests in flight may go on at shutdown.
    #[must_use]
    pub fn drain_timeout(&self) -> Duration {
        Duration::from_millis(self.drain_timeout_ms)
    }
}

/// A file that a key of the configuration names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFile {
    /// Where: `admin.token_file`, `models[0].decode.engines[1].api_key_file`.
    pub key: String,
    /// The file.
    pub file: PathBuf,
    /// Whether whoever uses it follows it.
    followed: bool,
}

/// A file of one secret is not read beyond this.
const SECRET_BYTES_MAX: u64 = 1 << 20;
/// A file of keys is not read beyond this: 100,000 keys of 640 bytes.
const KEYS_BYTES_MAX: u64 = 64 << 20;

/// The first line of a file that holds a secret and that this key names; `None` when it is empty.
///
/// # Errors
/// [`ConfigError::Unreadable`].
pub(crate) fn first_line_of(key: &str, path: &Path) -> Result<Option<String>, ConfigError> {
    let name = format!("{key}: {}", path.display());
    let text = named_file::read_text(path, SECRET_BYTES_MAX)
        .map_err(|source| ConfigError::Unreadable { name, source })?;
    Ok(text.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()))
}

/// Reads a YAML file that belongs to the configuration, and checks it.
///
/// # Errors
/// [`ConfigError`] with the place and what is wrong there.
pub(crate) fn load_checked<T>(path: &Path) -> Result<T, ConfigError>
where
    T: serde::de::DeserializeOwned + Validate<Context = ()>,
{
    let name = path.display().to_string();
    let text = named_file::read_text(path, KEYS_BYTES_MAX)
        .map_err(|source| ConfigError::Unreadable { name: name.clone(), source })?;
    let wrong = |what| Problem { place: Place { line: 1, column: 1 }, what };
    let checked = typed::<T>(&text).and_then(|value| match value.validate() {
        Ok(()) => Ok(value),
        Err(report) => Err(wrong(report.to_string().trim().replace('\n', "; "))),
    });
    checked.map_err(|problem| ConfigError::Invalid { name, problems: vec![problem] })
}

fn default_listen() -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080)
}

fn default_drain_timeout_ms() -> u64 {
    30_000
}

/// Each step assumes that the one before found nothing: a text, a tree of known keys, values, and values that
/// agree with each other.
fn read(text: &str) -> Result<RouterConfig, Vec<Problem>> {
    let document =
        Document::read(text).map_err(|Unreadable { place, what }| vec![Problem { place, what }])?;
    let mut problems = read::shape::misfits(&RouterConfig::schema(), &document.root);
    problems.extend(document.repeated.iter().map(|(place, name, first)| Problem {
        place: *place,
        what: format!("the key `{name}` is given twice, first in line {}", first.line),
    }));
    if !problems.is_empty() {
        return Err(problems);
    }
    let config: RouterConfig = typed(text).map_err(|problem| vec![with_key(problem, &document.root)])?;
    let said = config.validate().err().map(garde::Report::into_inner).unwrap_or_default();
    let said = said.into_iter().map(|(path, error)| (path.to_string(), error.to_string()));
    let told = |(path, what): (String, String)| Problem {
        place: document.root.place_of(&path),
        what: if path.is_empty() { what } else { format!("`{path}`: {what}") },
    };
    let mut problems: Vec<_> = said.map(told).collect();
    // Contradictions between values that are wrong by themselves say nothing new.
    if problems.is_empty() {
        problems.extend(read::contradictions::find(&config).into_iter().map(told));
    }
    if problems.is_empty() { Ok(config) } else { Err(problems) }
}

fn files_in(value: &serde_json::Value, place: &str, in_tls: bool, files: &mut Vec<NamedFile>) {
    // The names in these maps are the operator's own.
    const FREE: [&str; 5] = ["labels", "select", "prefer", "selector", "resource"];
    const TLS: [&str; 4] = ["certificate", "key", "ca", "client_ca"];
    const FOLLOWED: [&str; 2] = ["keys_file", "token_file"];
    match value {
        serde_json::Value::Object(entries) => {
            for (key, value) in entries.iter().filter(|(key, _)| !FREE.contains(&key.as_str())) {
                let of_tls = in_tls && TLS.contains(&key.as_str());
                let place = if place.is_empty() { key.clone() } else { format!("{place}.{key}") };
                match value.as_str().filter(|_| of_tls || key.ends_with("_file")) {
                    Some(path) => {
                        let followed = of_tls || FOLLOWED.contains(&key.as_str());
                        files.push(NamedFile { key: place, file: PathBuf::from(path), followed });
                    }
                    None => files_in(value, &place, key.ends_with("tls"), files),
                }
            }
        }
        serde_json::Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                files_in(item, &format!("{place}[{index}]"), false, files);
            }
        }
        _ => {}
    }
}

fn typed<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, Problem> {
    let options = serde_saphyr::options! {
        // The document is within its own bounds; many engines may share one anchor.
        budget: serde_saphyr::budget! { enforce_alias_anchor_ratio: false },
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let place = error.location();
        let at = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        Problem {
            place: Place {
                line: place.map_or(1, |p| at(p.line())),
                column: place.map_or(1, |p| at(p.column())),
            },
            what: without_place(&error.to_string()),
        }
    })
}

/// A problem of a value, with the key that has it.
fn with_key(problem: Problem, root: &read::document::Node) -> Problem {
    match root.path_at(problem.place) {
        Some(path) if !problem.what.contains(&path) => {
            Problem { what: format!("`{path}`: {}", problem.what), ..problem }
        }
        _ => problem,
    }
}

/// The first line of what the reader of values says, without the place that it puts behind or before it.
fn without_place(said: &str) -> String {
    let line = said.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let line = line.rsplit_once(" at line ").map_or(line, |(what, _)| what);
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}
