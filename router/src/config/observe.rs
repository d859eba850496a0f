//! Records of requests: access log, traces and explanations.

use std::collections::BTreeMap;
use std::path::PathBuf;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One line of JSON per ended request. It never contains prompts, responses, keys or `Authorization`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct AccessLogConfig {
    /// Whether lines are written. Default: false, which costs nothing.
    #[garde(skip)]
    pub enabled: bool,
    /// The file to which lines are appended; it may be a terminal, or a pipe with a reader. The router opens
    /// it again on SIGUSR1, and within a second after it is renamed or removed. Default: none, which is
    /// standard output.
    #[garde(skip)]
    pub path: Option<PathBuf>,
    /// The share of successful requests that are logged; all other requests are always logged. 0 to 1;
    /// default 1.
    #[garde(range(min = 0.0, max = 1.0))]
    pub sample: f64,
    /// Whether lines contain the client's address. Default: true.
    #[garde(skip)]
    pub client: bool,
    /// Lines that may wait for a slow disk; more are dropped and counted. 1 to 1,000,000; default 8,192.
    #[garde(range(min = 1, max = 1_000_000))]
    pub queue: usize,
}

impl Default for AccessLogConfig {
    fn default() -> Self {
        Self { enabled: false, path: None, sample: 1.0, client: true, queue: 8_192 }
    }
}

/// OpenTelemetry traces.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetryConfig {
    /// Where traces are sent. Default: none, which costs nothing; a client's W3C context is then passed on
    /// unchanged.
    #[garde(dive)]
    pub otlp: Option<OtlpConfig>,
    /// Whether responses have a `Server-Timing` header with the time of each phase before the response began.
    /// It shows clients how busy engines are. Default: false.
    #[garde(skip)]
    pub server_timing: bool,
}

/// A collector that speaks OTLP over HTTP with JSON.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct OtlpConfig {
    /// `http://HOST:PORT`; `/v1/traces` is added if there is no path. To reach a collector with TLS, use a
    /// second collector on the same host.
    #[garde(custom(is_http))]
    pub endpoint: String,
    /// A file with one header per line, `name: value`, for the collector: its credentials. Default: none.
    #[serde(default)]
    #[garde(skip)]
    pub headers_file: Option<PathBuf>,
    /// The share of traces begun by the router that are sent. For a trace begun by a client, the client
    /// decides. 0 to 1; default 1.
    #[serde(default = "whole")]
    #[garde(range(min = 0.0, max = 1.0))]
    pub sample_ratio: f64,
    /// `service.name`. At most 256 bytes; default `baton-router`.
    #[serde(default = "service_name")]
    #[garde(length(bytes, min = 1, max = 256))]
    pub service_name: String,
    /// Further attributes of the resource: `deployment.environment.name: prod`. At most 64. Default: none.
    #[serde(default)]
    #[garde(length(max = 64))]
    pub resource: BTreeMap<String, String>,
    /// One try to send spans. 1 to 60,000 milliseconds; default 5,000.
    #[serde(default = "timeout_ms")]
    #[garde(range(min = 1, max = 60_000))]
    pub timeout_ms: u64,
    /// Requests whose spans may wait for the collector; more are dropped and counted. 1 to 1,000,000; default 2,048.
    #[serde(default = "queue")]
    #[garde(range(min = 1, max = 1_000_000))]
    pub queue: usize,
}

fn whole() -> f64 {
    1.0
}

fn service_name() -> String {
    "baton-router".to_owned()
}

fn timeout_ms() -> u64 {
    5_000
}

fn queue() -> usize {
    2_048
}

fn is_http(endpoint: &str, _: &()) -> garde::Result {
    let uri = endpoint.parse::<hyper::Uri>().ok();
    let fits = uri.is_some_and(|uri| {
        uri.scheme_str() == Some("http") && uri.host().is_some_and(|host| !host.is_empty())
    });
    if fits { Ok(()) } else { Err(garde::Error::new("must be `http://HOST:PORT`")) }
}

/// Decisions kept for `GET /explain/{id}` on the admin listener and `baton explain`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct ExplainConfig {
    /// Number of latest requests whose decisions are kept; each takes about 1 KiB. 0 keeps none and costs
    /// nothing. 0 to 1,000,000; default 4,096.
    #[garde(range(max = 1_000_000))]
    pub requests: usize,
}

impl Default for ExplainConfig {
    fn default() -> Self {
        Self { requests: 4_096 }
    }
}
