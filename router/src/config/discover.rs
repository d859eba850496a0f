//! The `discover` part of a pool: sources of engines in addition to the listed ones.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use garde::Validate;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use super::engine::EngineConfig;

/// Sources of a pool's engines. Several sources are combined. An engine that the configuration lists keeps
/// its keys.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct DiscoverConfig {
    /// Every address of a host name. Default: none.
    #[garde(dive)]
    pub dns: Option<DnsConfig>,
    /// A list of engines that another program writes. Default: none.
    #[garde(dive)]
    pub file: Option<EndpointsFileConfig>,
    /// The EndpointSlices of a Kubernetes service. Default: none.
    #[garde(dive)]
    pub kubernetes: Option<KubernetesConfig>,
    /// The Pods of an InferencePool of the Gateway API inference extension. Default: none.
    #[garde(dive)]
    pub inference_pool: Option<InferencePoolConfig>,
    /// Keys of every discovered engine: those of a listed engine, except `url` and `control_url`. Labels and
    /// weights of a source take precedence.
    #[garde(dive)]
    pub template: EngineTemplate,
}

/// Every address (A and AAAA) of a host name, for example of a headless service.
#[derive(
    Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize, JsonSchema, Validate,
)]
#[serde(deny_unknown_fields)]
pub struct DnsConfig {
    /// The host name, for the system's resolver.
    #[garde(length(bytes, min = 1, max = 253), custom(is_bare))]
    pub host: String,
    /// The port of every engine. 1 to 65,535.
    #[garde(range(min = 1))]
    pub port: u16,
    /// Scheme of every engine: `http`, or `https` with `engine_tls`. Its certificate contains its address, or
    /// the name in `engine_tls.server_name`. Default `http`.
    #[serde(default)]
    #[garde(skip)]
    pub scheme: Scheme,
    /// Interval of lookups, in milliseconds. 100 to 3,600,000; default 5,000.
    #[serde(default = "default_dns_refresh_ms")]
    #[garde(range(min = 100, max = 3_600_000))]
    pub refresh_ms: u64,
}

/// A YAML or JSON file: a list of URLs or of `{url, weight, labels}`, or a map with one under `engines`, or with
/// llm-d's `{name, address, port, labels}` under `endpoints`.
#[derive(
    Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize, JsonSchema, Validate,
)]
#[serde(deny_unknown_fields)]
pub struct EndpointsFileConfig {
    /// The file.
    #[garde(skip)]
    pub path: PathBuf,
    /// Interval of reads, in milliseconds. 100 to 3,600,000; default 1,000.
    #[serde(default = "default_file_refresh_ms")]
    #[garde(range(min = 100, max = 3_600_000))]
    pub refresh_ms: u64,
}

/// The EndpointSlices of a service, watched. Engines that are ready are members; those that are terminating are
/// not. Pods need the verbs `list` and `watch` on `endpointslices` (`discovery.k8s.io`).
#[derive(
    Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize, JsonSchema, Validate,
)]
#[serde(deny_unknown_fields)]
pub struct KubernetesConfig {
    /// Default: the namespace that the router itself runs in, or the kubeconfig's.
    #[serde(default)]
    #[garde(inner(length(bytes, min = 1, max = 253)))]
    pub namespace: Option<String>,
    /// The service's name. Default: none; then `selector` chooses the slices.
    #[serde(default)]
    #[garde(inner(length(bytes, min = 1, max = 253)))]
    pub service: Option<String>,
    /// Labels that the slices must have; slices have those of their service. At most 32. Default: none.
    #[serde(default)]
    #[garde(length(max = 32))]
    pub selector: BTreeMap<String, String>,
    /// The port's name in the service, or its number.
    #[garde(skip)]
    pub port: PortName,
    /// Scheme of every engine: `http`, or `https` with `engine_tls`. Its certificate contains its address, or
    /// the name in `engine_tls.server_name`. Default `http`.
    #[serde(default)]
    #[garde(skip)]
    pub scheme: Scheme,
    /// Kubeconfig of a router outside of the cluster. Default: the API and account of the router's pod.
    #[serde(default)]
    #[garde(skip)]
    pub kubeconfig_file: Option<PathBuf>,
}

/// The Pods of an InferencePool (`inference.networking.k8s.io/v1`), watched. Every target port of a ready Pod is an
/// engine, with the labels of its Pod, `pod` and `node`. Pods need the verbs `list` and `watch` on `inferencepools`
/// and on `pods`.
#[derive(
    Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize, JsonSchema, Validate,
)]
#[serde(deny_unknown_fields)]
pub struct InferencePoolConfig {
    /// Default: the namespace that the router itself runs in, or the kubeconfig's.
    #[serde(default)]
    #[garde(inner(length(bytes, min = 1, max = 253)))]
    pub namespace: Option<String>,
    /// The pool's name.
    #[garde(length(bytes, min = 1, max = 253))]
    pub name: String,
    /// Scheme of every engine: `http`, or `https` with `engine_tls`. Its certificate contains its address, or
    /// the name in `engine_tls.server_name`. Default `http`.
    #[serde(default)]
    #[garde(skip)]
    pub scheme: Scheme,
    /// Kubeconfig of a router outside of the cluster. Default: the API and account of the router's pod.
    #[serde(default)]
    #[garde(skip)]
    pub kubeconfig_file: Option<PathBuf>,
}

/// Scheme of connections to engines.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// Without TLS.
    #[default]
    Http,
    /// With TLS.
    Https,
}

impl Scheme {
    /// The scheme as written in an address.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

/// A port by its name or by its number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum PortName {
    /// Its number.
    Number(u16),
    /// Its name.
    Name(String),
}

/// The keys of an engine without its addresses.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineTemplate(EngineConfig);

/// URL of the engine inside a template; [`EngineTemplate::engine`] replaces it.
const PLACEHOLDER_URL: &str = "http://0.0.0.0:1";

/// Keys that a template does not have: they differ between engines.
const OF_ONE_ENGINE: [&str; 2] = ["url", "control_url"];

impl EngineTemplate {
    /// The file with the API key of every discovered engine.
    pub(crate) fn api_key_file(&self) -> Option<&Path> {
        self.0.api_key_file.as_deref()
    }

    /// The keys of every discovered engine; the URL is a placeholder.
    pub(crate) fn keys(&self) -> &EngineConfig {
        &self.0
    }

    /// The engine at `url`, with the template's keys.
    #[must_use]
    pub fn engine(&self, url: super::EngineUrl) -> EngineConfig {
        EngineConfig { url, ..self.0.clone() }
    }
}

impl Default for EngineTemplate {
    fn default() -> Self {
        let keys = serde_json::json!({"url": PLACEHOLDER_URL});
        Self(serde_json::from_value(keys).expect("an engine needs no key but its URL"))
    }
}

impl<'de> Deserialize<'de> for EngineTemplate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut keys = serde_json::Map::deserialize(deserializer)?;
        if keys.insert("url".into(), PLACEHOLDER_URL.into()).is_some() {
            return Err(de::Error::custom("a template has no `url`: engines are found"));
        }
        if keys.contains_key("control_url") {
            return Err(de::Error::custom("a template has no `control_url`: each engine needs its own"));
        }
        serde_json::from_value(keys.into()).map(Self).map_err(de::Error::custom)
    }
}

impl Serialize for EngineTemplate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut keys = serde_json::to_value(&self.0).map_err(ser::Error::custom)?;
        if let Some(keys) = keys.as_object_mut() {
            OF_ONE_ENGINE.iter().for_each(|key| drop(keys.remove(*key)));
        }
        keys.serialize(serializer)
    }
}

impl JsonSchema for EngineTemplate {
    fn schema_name() -> Cow<'static, str> {
        "EngineTemplate".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = EngineConfig::json_schema(generator);
        let keys = schema.ensure_object();
        keys.remove("required");
        if let Some(properties) = keys.get_mut("properties").and_then(|p| p.as_object_mut()) {
            OF_ONE_ENGINE.iter().for_each(|key| drop(properties.remove(*key)));
        }
        // The generated reference page links to the keys of an engine instead of repeating them.
        keys.insert("x-keys-of".into(), "EngineConfig".into());
        schema
    }
}

impl Validate for EngineTemplate {
    type Context = ();

    fn validate_into(
        &self,
        context: &(),
        parent: &mut dyn FnMut() -> garde::Path,
        report: &mut garde::Report,
    ) {
        self.0.validate_into(context, parent, report);
    }
}

impl DiscoverConfig {
    /// Whether a source discovers engines with the scheme `https`.
    pub(crate) fn finds_https(&self) -> bool {
        let dns = self.dns.as_ref().map(|dns| dns.scheme);
        let kubernetes = self.kubernetes.as_ref().map(|kubernetes| kubernetes.scheme);
        let pool = self.inference_pool.as_ref().map(|pool| pool.scheme);
        [dns, kubernetes, pool].contains(&Some(Scheme::Https))
    }

    /// Whether the part names a source.
    #[must_use]
    pub fn has_sources(&self) -> bool {
        self.dns.is_some()
            || self.file.is_some()
            || self.kubernetes.is_some()
            || self.inference_pool.is_some()
    }
}

fn is_bare(host: &str, _: &()) -> garde::Result {
    let has_port = host.matches(':').count() == 1;
    if host.contains('/') || has_port {
        return Err(garde::Error::new(
            "is a name alone, without a scheme or a port; `port` and `scheme` are keys",
        ));
    }
    Ok(())
}

fn default_dns_refresh_ms() -> u64 {
    5_000
}

fn default_file_refresh_ms() -> u64 {
    1_000
}
