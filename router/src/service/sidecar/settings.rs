//! The settings of llm-d's routing sidecar, by their names there: from flags, from YAML, and from the environment. Pure.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::Value;

use super::error::SidecarError;

/// Flags and keys of llm-d that change nothing here, with the values that mean so, and what is missing otherwise. No
/// value: every value is accepted.
pub const UNSUPPORTED: [(&str, &[&str], &str); 26] = [
    ("ec-connector", &[""], "there is no encoder stage"),
    ("decode-chunk-size", &["0"], "a decode engine generates a response in one piece"),
    ("enable-p2p-pull", &["false"], "there is no offloading connector"),
    ("p2p-connector-port", &["7777"], "there is no offloading connector"),
    ("mooncake-bootstrap-port", &["8998"], "there is no Mooncake connector"),
    ("tracing", &["false"], "the sidecar passes trace headers on and exports no spans"),
    ("moriio-write-mode", &["false"], "there is no MoRI-IO connector"),
    ("moriio-parallel-dispatch", &["false"], "there is no MoRI-IO connector"),
    ("moriio-decode-notify-port", &["61005"], "there is no MoRI-IO connector"),
    ("moriio-local-pod-ip", &[""], "there is no MoRI-IO connector"),
    ("moriio-decode-handshake-port", &["6301"], "there is no MoRI-IO connector"),
    ("moriio-parallel-decode-wait-timeout", &["30s"], "there is no MoRI-IO connector"),
    ("moriio-prefill-handshake-port", &["6301"], "there is no MoRI-IO connector"),
    ("moriio-prefill-notify-port", &["61005"], "there is no MoRI-IO connector"),
    ("moriio-tp-size", &["1"], "there is no MoRI-IO connector"),
    ("moriio-dp-size", &["1"], "there is no MoRI-IO connector"),
    ("moriio-remote-hosts", &[""], "there is no MoRI-IO connector"),
    ("moriio-dp-size-local", &["0"], "there is no MoRI-IO connector"),
    ("moriio-decode-hosts", &[""], "there is no MoRI-IO connector"),
    ("zap-devel", &["false"], "RUST_LOG selects log lines"),
    ("zap-encoder", &["console", "json"], "--log-json writes lines as JSON"),
    ("zap-log-level", &["info"], "RUST_LOG selects log lines"),
    ("zap-stacktrace-level", &["error", "panic"], "log lines have no stack traces"),
    ("zap-time-encoding", &["epoch", "rfc3339"], "log lines have one form of time"),
    ("kubeconfig", &[""], "the sidecar uses the account of its Pod"),
    ("v", &["0"], "RUST_LOG selects log lines"),
];

/// What was set; `None`: not set.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the names are those of the flags, which have the descriptions")]
pub struct SidecarSettings {
    pub port: Option<u16>,
    pub model_server_port: Option<u16>,
    pub vllm_port: Option<u16>,
    pub data_parallel_size: Option<u16>,
    pub kv_connector: Option<String>,
    pub enable_ssrf_protection: Option<bool>,
    pub enable_prefiller_sampling: Option<bool>,
    pub secure_proxy: Option<bool>,
    pub cert_path: Option<PathBuf>,
    pub enable_tls: Option<Vec<String>>,
    pub tls_insecure_skip_verify: Option<Vec<String>>,
    pub inference_pool: Option<String>,
    pub pool_group: Option<String>,
    pub max_idle_conns_per_host: Option<u32>,
    pub prefill_max_retries: Option<u16>,
    pub prefill_retry_backoff: Option<String>,
    pub metrics_port: Option<u16>,
    /// Baton's own: hosts that may be prefill engines.
    pub allow_prefiller: Option<Vec<String>>,
    /// Baton's own: the address to listen at.
    pub host: Option<std::net::IpAddr>,
    /// Baton's own: the roots of the engines' certificates.
    pub tls_ca_path: Option<PathBuf>,
    /// Baton's own: the file of the cluster's secret.
    pub cluster_secret_file: Option<PathBuf>,
    /// Baton's own: the engines that get the cluster's secret.
    pub cluster_secret_stages: Option<Vec<String>>,
    /// Only in the environment.
    #[serde(skip)]
    pub sglang_bootstrap_port: Option<u16>,
    /// Only in the environment.
    #[serde(skip)]
    pub pod_ip: Option<String>,
    /// Other keys, for [`UNSUPPORTED`].
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

impl SidecarSettings {
    /// Reads YAML with llm-d's keys.
    ///
    /// # Errors
    /// A key has a value of another type.
    pub fn from_yaml(text: &str) -> Result<Self, SidecarError> {
        serde_saphyr::from_str(text).map_err(|error| SidecarError::Yaml(error.to_string()))
    }

    /// Reads llm-d's environment variables, and that of the cluster's secret, with `get`. As there, a value of another
    /// form counts as unset.
    #[must_use]
    pub fn from_environment(get: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name| get(name).filter(|value| !value.is_empty());
        let sampling = get("ENABLE_PREFILLER_SAMPLING");
        Self {
            inference_pool: get("INFERENCE_POOL"),
            enable_prefiller_sampling: sampling.and_then(|text| go_bool(&text)),
            sglang_bootstrap_port: get("SGLANG_BOOTSTRAP_PORT").and_then(|port| port.parse().ok()),
            pod_ip: get("POD_IP"),
            cluster_secret_file: get("BATON_CLUSTER_SECRET_FILE").map(PathBuf::from),
            ..Self::default()
        }
    }

    /// These settings, and `others` where they are not set. As in llm-d, the deprecated name of a flag precedes the new
    /// name in YAML.
    #[must_use]
    pub fn or(mut self, others: Self) -> Self {
        let model_server_port = match (self.model_server_port, self.vllm_port) {
            (None, None) => others.model_server_port.or(others.vllm_port),
            (own, deprecated) => own.or(deprecated),
        };
        let mut other = others.other;
        other.append(&mut self.other);
        Self {
            port: self.port.or(others.port),
            model_server_port,
            vllm_port: None,
            data_parallel_size: self.data_parallel_size.or(others.data_parallel_size),
            kv_connector: self.kv_connector.or(others.kv_connector),
            enable_ssrf_protection: self.enable_ssrf_protection.or(others.enable_ssrf_protection),
            enable_prefiller_sampling: self.enable_prefiller_sampling.or(others.enable_prefiller_sampling),
            secure_proxy: self.secure_proxy.or(others.secure_proxy),
            cert_path: self.cert_path.or(others.cert_path),
            enable_tls: self.enable_tls.or(others.enable_tls),
            tls_insecure_skip_verify: self.tls_insecure_skip_verify.or(others.tls_insecure_skip_verify),
            inference_pool: self.inference_pool.or(others.inference_pool),
            pool_group: self.pool_group.or(others.pool_group),
            max_idle_conns_per_host: self.max_idle_conns_per_host.or(others.max_idle_conns_per_host),
            prefill_max_retries: self.prefill_max_retries.or(others.prefill_max_retries),
            prefill_retry_backoff: self.prefill_retry_backoff.or(others.prefill_retry_backoff),
            metrics_port: self.metrics_port.or(others.metrics_port),
            allow_prefiller: self.allow_prefiller.or(others.allow_prefiller),
            host: self.host.or(others.host),
            tls_ca_path: self.tls_ca_path.or(others.tls_ca_path),
            cluster_secret_file: self.cluster_secret_file.or(others.cluster_secret_file),
            cluster_secret_stages: self.cluster_secret_stages.or(others.cluster_secret_stages),
            sglang_bootstrap_port: self.sglang_bootstrap_port.or(others.sglang_bootstrap_port),
            pod_ip: self.pod_ip.or(others.pod_ip),
            other,
        }
    }

    /// # Errors
    /// A setting that llm-d has and Baton does not, or that neither has.
    pub(super) fn check_other(&self) -> Result<(), SidecarError> {
        for (name, value) in &self.other {
            let Some((_, harmless, why)) = UNSUPPORTED.iter().find(|(known, ..)| known == name) else {
                return Err(SidecarError::UnknownKey(name.clone()));
            };
            let value = match value {
                Value::String(text) => text.clone(),
                Value::Null => String::new(),
                other => other.to_string(),
            };
            if !harmless.contains(&value.as_str()) {
                return Err(SidecarError::Unsupported { name: name.clone(), why });
            }
        }
        Ok(())
    }
}

/// A truth value as Go's `strconv.ParseBool` reads it.
fn go_bool(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_of_llmd_that_is_not_understood_is_named() {
        for (name, harmless, _) in UNSUPPORTED {
            let with = |value: &str| {
                let other = BTreeMap::from([(name.to_owned(), Value::from(value))]);
                SidecarSettings { other, ..SidecarSettings::default() }.check_other()
            };
            for value in harmless {
                assert_eq!(with(value), Ok(()), "{name} {value}");
            }
            let error = with("something").expect_err(name).to_string();
            assert!(error.starts_with(&format!("`--{name}` is not supported: ")), "{error}");
        }
    }

    #[test]
    fn yaml_has_the_names_of_the_flags() {
        let text = "{port: 8085, model-server-port: 8203, enable-tls: [prefiller], secure-proxy: false, \
                    prefill-retry-backoff: 1s, decode-chunk-size: 0}";
        let read = SidecarSettings::from_yaml(text).expect("valid");
        assert_eq!(
            (read.port, read.model_server_port, read.secure_proxy),
            (Some(8085), Some(8203), Some(false))
        );
        assert_eq!(read.enable_tls, Some(vec!["prefiller".to_owned()]));
        assert_eq!(read.check_other(), Ok(()));
        let unknown = SidecarSettings::from_yaml("{prot: 1}").expect("a map").check_other();
        assert_eq!(unknown, Err(SidecarError::UnknownKey("prot".to_owned())));
        assert!(SidecarSettings::from_yaml("{port: x}").is_err());
    }

    #[test]
    fn flags_precede_yaml_and_yaml_precedes_the_environment() {
        let of = |port| SidecarSettings { port, ..SidecarSettings::default() };
        let environment = SidecarSettings::from_environment(|name| match name {
            "INFERENCE_POOL" => Some("ns/env".to_owned()),
            "ENABLE_PREFILLER_SAMPLING" => Some("T".to_owned()),
            "SGLANG_BOOTSTRAP_PORT" => Some("9".to_owned()),
            "POD_IP" => Some(String::new()),
            "BATON_CLUSTER_SECRET_FILE" => Some("/s".to_owned()),
            _ => None,
        });
        let yaml = SidecarSettings { inference_pool: Some("ns/yaml".to_owned()), ..of(Some(2)) };
        let merged = of(Some(1)).or(yaml).or(environment);
        assert_eq!((merged.port, merged.inference_pool.as_deref()), (Some(1), Some("ns/yaml")));
        assert_eq!((merged.enable_prefiller_sampling, merged.sglang_bootstrap_port), (Some(true), Some(9)));
        assert_eq!(merged.pod_ip, None);
        assert_eq!(merged.cluster_secret_file.as_deref(), Some(std::path::Path::new("/s")));
        assert_eq!(
            SidecarSettings::from_environment(|_| Some("yes".to_owned())).enable_prefiller_sampling,
            None
        );
    }

    #[test]
    fn the_deprecated_flag_precedes_the_new_key_in_yaml() {
        let flags = SidecarSettings { vllm_port: Some(1), ..SidecarSettings::default() };
        let yaml = SidecarSettings { model_server_port: Some(2), ..SidecarSettings::default() };
        assert_eq!(flags.clone().or(yaml.clone()).model_server_port, Some(1));
        assert_eq!(
            SidecarSettings { model_server_port: Some(3), ..flags }.or(yaml).model_server_port,
            Some(3)
        );
    }
}
