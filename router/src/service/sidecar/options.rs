//! The checked options of a sidecar, and the router's configuration that they stand for. Pure.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use crate::config::{EngineUrl, ListenTlsConfig, ProtocolSetting, RouterConfig, Scheme};

pub use super::allow_list::AllowedPrefiller;
pub use super::error::SidecarError;
use super::secret::SecretOptions;
pub use super::settings::{SidecarSettings, UNSUPPORTED};

/// Retries of a prefill leg, bounded by `attempts.prefill` of a router.
const RETRIES_MAX: u16 = 15;
/// Data-parallel ranks, as many as an engine may have.
const RANKS_MAX: u16 = 256;
/// The API group of the InferencePool that discovery knows.
const POOL_GROUP: &str = "inference.networking.k8s.io";
/// The system's roots, where Debian, Alpine and Baton's image have them.
const SYSTEM_ROOTS: &str = "/etc/ssl/certs/ca-certificates.crt";

/// How the engines exchange blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connector {
    Nixl,
    Sglang,
}

/// Which engine of a list gets the prefill leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sampling {
    First,
    Random,
}

/// TLS of the sidecar's listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ServingTls {
    Off,
    /// A certificate that is made at the start.
    SelfSigned,
    Files(ListenTlsConfig),
}

/// How engines' certificates are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EngineCheck {
    Roots(PathBuf),
    /// Not at all.
    Off,
}

/// An InferencePool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolName {
    pub namespace: String,
    pub name: String,
}

/// The options of a sidecar.
#[derive(Clone, Debug)]
pub struct SidecarOptions {
    /// Where rank 0 listens; rank r listens at the port + r.
    pub(crate) listen: SocketAddr,
    /// The decode engine's port on localhost; rank r's is the port + r.
    decode_port: u16,
    pub(crate) ranks: u16,
    connector: Connector,
    pub(crate) serving_tls: ServingTls,
    pub(crate) prefill_scheme: Scheme,
    decode_scheme: Scheme,
    engine_check: EngineCheck,
    pub(super) allowed: Vec<AllowedPrefiller>,
    /// Its Pods may be prefill engines, and other hosts only if they are listed.
    pub(crate) inference_pool: Option<PoolName>,
    pub(crate) sampling: Sampling,
    pub(crate) rest: OtherOptions,
}

/// The options that few parts read.
#[derive(Clone, Debug)]
pub(crate) struct OtherOptions {
    retries: u16,
    retry_pause: Duration,
    metrics: Option<SocketAddr>,
    bootstrap_port: Option<u16>,
    pod_ip: Option<String>,
    secret: Option<SecretOptions>,
}

fn invalid(flag: &'static str, what: impl Into<String>) -> SidecarError {
    SidecarError::Value { flag, what: what.into() }
}

impl SidecarOptions {
    /// # Errors
    /// [`SidecarError`] names the flag.
    pub fn new(settings: SidecarSettings) -> Result<Self, SidecarError> {
        settings.check_other()?;
        let settings = settings.or(SidecarSettings::default());
        let host = settings.host.unwrap_or(Ipv4Addr::UNSPECIFIED.into());
        let ranks = settings.data_parallel_size.unwrap_or(1);
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(invalid("data-parallel-size", format!("must be from 1 to {RANKS_MAX}")));
        }
        let ports = |flag, port: Option<u16>, default| match port.unwrap_or(default) {
            0 => Err(invalid(flag, "must be from 1 to 65535")),
            port if port.checked_add(ranks - 1).is_none() => {
                Err(invalid(flag, format!("{port} and the ports of {ranks} ranks exceed 65535")))
            }
            port => Ok(port),
        };
        let [prefill_tls, decode_tls] = stages("enable-tls", settings.enable_tls.as_deref())?;
        let unchecked = stages("tls-insecure-skip-verify", settings.tls_insecure_skip_verify.as_deref())?;
        let engine_check = match unchecked {
            [false, false] => EngineCheck::Roots(settings.tls_ca_path.unwrap_or_else(|| SYSTEM_ROOTS.into())),
            // One setting serves both legs.
            [prefill, decode] if prefill >= prefill_tls && decode >= decode_tls => EngineCheck::Off,
            _ => {
                return Err(invalid(
                    "tls-insecure-skip-verify",
                    "must name every stage of `--enable-tls`, or none",
                ));
            }
        };
        let scheme = |tls| if tls { Scheme::Https } else { Scheme::Http };
        let allowed = allowed(settings.allow_prefiller.as_deref());
        let is_limited = !allowed.iter().any(AllowedPrefiller::admits_all);
        let has_list = is_limited && (!allowed.is_empty() || settings.enable_ssrf_protection == Some(true));
        Ok(Self {
            listen: SocketAddr::new(host, ports("port", settings.port, 8000)?),
            decode_port: ports("model-server-port", settings.model_server_port, 8200)?,
            ranks,
            connector: connector(settings.kv_connector.as_deref().unwrap_or("nixlv2"))?,
            serving_tls: serving_tls(settings.secure_proxy, settings.cert_path),
            prefill_scheme: scheme(prefill_tls),
            decode_scheme: scheme(decode_tls),
            engine_check,
            allowed,
            inference_pool: match settings.enable_ssrf_protection.unwrap_or(false) {
                true => Some(pool(settings.inference_pool.as_deref(), settings.pool_group.as_deref())?),
                false => None,
            },
            sampling: match settings.enable_prefiller_sampling.unwrap_or(false) {
                true => Sampling::Random,
                false => Sampling::First,
            },
            rest: OtherOptions {
                retries: match settings.prefill_max_retries.unwrap_or(0) {
                    retries if retries > RETRIES_MAX => {
                        return Err(invalid("prefill-max-retries", format!("must be at most {RETRIES_MAX}")));
                    }
                    retries => retries,
                },
                retry_pause: retry_pause(settings.prefill_retry_backoff.as_deref())?,
                metrics: settings
                    .metrics_port
                    .filter(|port| *port > 0)
                    .map(|port| SocketAddr::new(host, port)),
                bootstrap_port: settings.sglang_bootstrap_port,
                pod_ip: settings.pod_ip,
                secret: secret(
                    settings.cluster_secret_file,
                    settings.cluster_secret_stages.as_deref(),
                    has_list,
                )?,
            },
        })
    }

    /// The protocol of both engines.
    pub(crate) fn protocol(&self) -> ProtocolSetting {
        match self.connector {
            Connector::Nixl => ProtocolSetting::Vllm,
            Connector::Sglang => ProtocolSetting::Sglang,
        }
    }

    /// The port of prefill engines' bootstrap servers, if it is configured.
    pub(crate) fn bootstrap_port(&self) -> Option<u16> {
        self.rest.bootstrap_port
    }

    /// Where monitors read the metrics.
    pub(crate) fn metrics(&self) -> Option<SocketAddr> {
        self.rest.metrics
    }

    /// The cluster's secret, if it is configured.
    pub(crate) fn secret(&self) -> Option<&SecretOptions> {
        self.rest.secret.as_ref()
    }

    /// Whether an engine that a request may name gets the cluster's secret. The decode engine can be named, too.
    pub(crate) fn gets_secret(&self, engine: &EngineUrl) -> bool {
        let Some(secret) = &self.rest.secret else { return false };
        let is_decode = |rank| self.decode_url(rank).parse().is_ok_and(|own: EngineUrl| own == *engine);
        if (0..self.ranks).any(is_decode) { secret.for_decode } else { secret.for_prefill }
    }

    /// Where a rank listens.
    pub(crate) fn listen_at(&self, rank: u16) -> SocketAddr {
        SocketAddr::new(self.listen.ip(), self.listen.port() + rank)
    }

    /// The rank whose listener has this address, `HOST:PORT`. The host is compared if `POD_IP` is set.
    pub(crate) fn rank_at(&self, named: &str) -> Option<u16> {
        let (host, port) = named.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let rank = port.parse::<u16>().ok()?.checked_sub(self.listen.port())?;
        let is_own = self.rest.pod_ip.as_deref().is_none_or(|own| own == host);
        (is_own && rank < self.ranks).then_some(rank)
    }

    /// The URL of a rank's decode engine.
    pub(crate) fn decode_url(&self, rank: u16) -> String {
        let scheme = if self.decode_scheme == Scheme::Https { "https" } else { "http" };
        format!("{scheme}://localhost:{}", self.decode_port + rank)
    }

    /// The configuration of a router with one model per rank, whose decode engine is the rank's. Its prefill engines come
    /// with the requests.
    pub(crate) fn router_config(&self) -> RouterConfig {
        let model = |rank| {
            json!({
                "name": format!("rank-{rank}"),
                "protocol": if self.connector == Connector::Sglang { "sglang" } else { "vllm" },
                "fallback": "none",
                "messages": "native",
                "decode": {"engines": [{"url": self.decode_url(rank)}]},
            })
        };
        let pause_ms = u64::try_from(self.rest.retry_pause.as_millis()).unwrap_or(u64::MAX);
        let mut config = json!({
            "listen": self.listen.to_string(),
            // For people in the Pod. `--metrics-port` opens a listener for monitors.
            "admin": {"listen": "127.0.0.1:0"},
            "models": (0..self.ranks).map(model).collect::<Vec<_>>(),
            // A request has one decode engine, and one prefill engine that may be tried again.
            "attempts": {"prefill": self.rest.retries + 1, "decode": 1},
            "retries": {"pause_ms": pause_ms, "pause_max_ms": pause_ms},
            // A sidecar beside each decode engine would multiply the checks of each prefill engine.
            "health": {"active": {"interval_ms": 0}},
        });
        if self.prefill_scheme == Scheme::Https || self.decode_scheme == Scheme::Https {
            config["engine_tls"] = match &self.engine_check {
                EngineCheck::Roots(roots) => json!({"ca": roots}),
                EngineCheck::Off => json!({"ca": ""}),
            };
        }
        let mut config = RouterConfig::from_yaml(&config.to_string(), "sidecar")
            .expect("the options were checked, and the text is made of them");
        if let Some(tls) = config.engine_tls.as_mut().filter(|_| self.engine_check == EngineCheck::Off) {
            tls.is_unverified = true;
        }
        config
    }
}

/// Whether a list of stages names the prefill and the decode engine.
fn stages(flag: &'static str, named: Option<&[String]>) -> Result<[bool; 2], SidecarError> {
    let mut stages = [false; 2];
    for stage in named.unwrap_or_default() {
        match stage.trim() {
            "prefiller" => stages[0] = true,
            "decoder" => stages[1] = true,
            "encoder" => {
                let name = format!("{flag} encoder");
                return Err(SidecarError::Unsupported { name, why: "there is no encoder stage" });
            }
            _ => return Err(invalid(flag, "must be a list of prefiller, decoder")),
        }
    }
    Ok(stages)
}

fn allowed(listed: Option<&[String]>) -> Vec<AllowedPrefiller> {
    let parsed =
        |text: &String| text.parse::<AllowedPrefiller>().unwrap_or_else(|never: Infallible| match never {});
    listed.unwrap_or_default().iter().map(parsed).collect()
}

/// The secret, for the prefill engines unless other stages are named. `has_list`: not every address may be named.
fn secret(
    file: Option<PathBuf>,
    named: Option<&[String]>,
    has_list: bool,
) -> Result<Option<SecretOptions>, SidecarError> {
    let (flag, of_stages) = ("cluster-secret-file", "cluster-secret-stages");
    let Some(file) = file else {
        return match named {
            None => Ok(None),
            Some(_) => Err(invalid(of_stages, "needs `--cluster-secret-file`")),
        };
    };
    let [for_prefill, for_decode] = match named {
        None => [true, false],
        Some(_) => stages(of_stages, named)?,
    };
    if for_prefill && !has_list {
        return Err(invalid(
            flag,
            "or BATON_CLUSTER_SECRET_FILE needs `--allow-prefiller` without 0.0.0.0/0, or `--enable-ssrf-protection`: \
             every address that a request names would get the secret",
        ));
    }
    Ok(Some(SecretOptions { file, for_prefill, for_decode }))
}

fn connector(name: &str) -> Result<Connector, SidecarError> {
    match name {
        "nixlv2" => Ok(Connector::Nixl),
        "sglang" => Ok(Connector::Sglang),
        "shared-storage" | "mooncake" | "offloading" => {
            let name = format!("kv-connector {name}");
            Err(SidecarError::Unsupported { name, why: "the supported connectors are nixlv2 and sglang" })
        }
        _ => Err(invalid("kv-connector", "must be nixlv2 or sglang")),
    }
}

fn serving_tls(secure: Option<bool>, path: Option<PathBuf>) -> ServingTls {
    match (secure.unwrap_or(true), path.filter(|path| !path.as_os_str().is_empty())) {
        (false, _) => ServingTls::Off,
        (true, None) => ServingTls::SelfSigned,
        (true, Some(path)) => {
            ServingTls::Files(ListenTlsConfig::new(path.join("tls.crt"), path.join("tls.key")))
        }
    }
}

fn pool(named: Option<&str>, group: Option<&str>) -> Result<PoolName, SidecarError> {
    let flag = "inference-pool";
    let named =
        named.ok_or_else(|| invalid(flag, "or INFERENCE_POOL is needed with `--enable-ssrf-protection`"))?;
    if group.is_some_and(|group| group != POOL_GROUP) {
        return Err(invalid("pool-group", format!("must be {POOL_GROUP}")));
    }
    let (namespace, name) = named.split_once('/').unwrap_or(("default", named));
    if namespace.is_empty() || name.is_empty() || name.contains('/') {
        return Err(invalid(flag, "must be NAMESPACE/NAME or NAME"));
    }
    Ok(PoolName { namespace: namespace.to_owned(), name: name.to_owned() })
}

fn retry_pause(text: Option<&str>) -> Result<Duration, SidecarError> {
    let Some(text) = text else { return Ok(Duration::from_millis(200)) };
    let pause = go_duration(text).filter(|pause| *pause <= Duration::from_secs(60));
    pause.ok_or_else(|| {
        invalid("prefill-retry-backoff", "must be a duration of at most a minute, such as 200ms")
    })
}

/// A duration in Go's notation: numbers with units, such as `1m30s`.
fn go_duration(text: &str) -> Option<Duration> {
    let (mut rest, mut sum) = (text, Duration::ZERO);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').filter(|at| *at > 0)?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let unit = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let seconds = match &rest[..unit] {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        sum = sum.checked_add(Duration::try_from_secs_f64(number * seconds).ok()?)?;
        rest = &rest[unit..];
    }
    (!text.is_empty()).then_some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(yaml: &str) -> Result<SidecarOptions, SidecarError> {
        SidecarOptions::new(SidecarSettings::from_yaml(yaml).expect(yaml))
    }

    #[test]
    fn the_defaults_are_those_of_llmd() {
        let options = options("{}").expect("valid");
        assert_eq!((options.listen.to_string().as_str(), options.ranks), ("0.0.0.0:8000", 1));
        assert_eq!(options.decode_url(0), "http://localhost:8200");
        assert_eq!(options.serving_tls, ServingTls::SelfSigned);
        assert_eq!(options.protocol(), ProtocolSetting::Vllm);
        assert_eq!((options.sampling, options.rest.metrics), (Sampling::First, None));
        let config = options.router_config();
        assert_eq!((config.attempts.prefill, config.retries.pause_ms), (1, 200));
        assert!(config.warnings().is_empty(), "{:?}", config.warnings());
    }

    #[test]
    fn each_rank_has_a_listener_and_a_decode_engine() {
        let options =
            options("{port: 9000, model-server-port: 9100, data-parallel-size: 3, kv-connector: sglang}")
                .expect("valid");
        assert_eq!(options.listen_at(2).port(), 9002);
        assert_eq!(options.decode_url(2), "http://localhost:9102");
        let config = options.router_config();
        assert_eq!(config.models.len(), 3);
        assert!(config.models.iter().all(|model| model.protocol == ProtocolSetting::Sglang));
        for (named, rank) in [
            ("h:9000", Some(0)),
            ("[::1]:9002", Some(2)),
            ("h:9003", None),
            ("h:8999", None),
            ("h", None),
            ("h:x", None),
        ] {
            assert_eq!(options.rank_at(named), rank, "{named}");
        }
        let settings = SidecarSettings { pod_ip: Some("10.0.0.1".to_owned()), ..SidecarSettings::default() };
        let options = SidecarOptions::new(settings).expect("valid");
        assert_eq!([options.rank_at("10.0.0.1:8000"), options.rank_at("10.0.0.2:8000")], [Some(0), None]);
    }

    #[test]
    fn the_secret_goes_to_listed_prefill_engines_and_to_the_decode_engine_only_if_it_is_named() {
        let with = |rest: &str| options(&format!("{{cluster-secret-file: /s{rest}}}"));
        let gets = |options: &SidecarOptions, url: &str| options.gets_secret(&url.parse().expect(url));
        for unlisted in ["", ", inference-pool: ns/pool", ", cluster-secret-stages: [prefiller, decoder]"] {
            let error = with(unlisted).expect_err(unlisted).to_string();
            assert!(
                error.starts_with("`--cluster-secret-file` or BATON_CLUSTER_SECRET_FILE needs"),
                "{error}"
            );
        }
        for listed in
            [", allow-prefiller: [10.0.0.0/8]", ", enable-ssrf-protection: true, inference-pool: ns/pool"]
        {
            let options = with(listed).expect(listed);
            assert_eq!(
                options.secret().map(|secret| secret.file.as_path()),
                Some(std::path::Path::new("/s"))
            );
            assert!(gets(&options, "http://10.0.0.1:8000"), "{listed}");
            assert!(!gets(&options, "http://localhost:8200"), "a request names the decode engine");
            assert_eq!(options.router_config().secret().expect("no file"), None, "the decode engine's terms");
        }
        let options = with(", cluster-secret-stages: [decoder]").expect("no prefill engine gets it");
        assert!(gets(&options, "http://localhost:8200") && !gets(&options, "http://10.0.0.1:8000"));
        let alone = options_error("{cluster-secret-stages: [decoder]}");
        assert_eq!(alone, "`--cluster-secret-stages` needs `--cluster-secret-file`");
        assert!(options_error("{cluster-secret-file: /s, cluster-secret-stages: [x]}").contains("must be"));
    }

    fn options_error(yaml: &str) -> String {
        options(yaml).expect_err(yaml).to_string()
    }

    #[test]
    fn tls_to_engines_needs_roots_or_none_is_checked() {
        let tls = |yaml| options(yaml).expect(yaml).router_config().engine_tls;
        assert_eq!(tls("{}"), None);
        let checked = tls("{enable-tls: [prefiller], tls-ca-path: /x}").expect("it has TLS");
        assert_eq!((checked.ca.to_str(), checked.is_unverified), (Some("/x"), false));
        let both = "{enable-tls: [prefiller, decoder], tls-insecure-skip-verify: [decoder, prefiller]}";
        assert!(tls(both).expect("it has TLS").is_unverified);
        assert_eq!(options(both).expect("valid").decode_url(0), "https://localhost:8200");
    }

    #[test]
    fn what_cannot_be_done_is_named() {
        for (yaml, message) in [
            ("{kv-connector: mooncake}", "`--kv-connector mooncake` is not supported: "),
            ("{kv-connector: shared-storage}", "`--kv-connector shared-storage` is not supported: "),
            ("{kv-connector: x}", "`--kv-connector` must be nixlv2 or sglang"),
            ("{enable-tls: [encoder]}", "`--enable-tls encoder` is not supported: "),
            ("{enable-tls: [x]}", "`--enable-tls` must be"),
            (
                "{enable-tls: [prefiller, decoder], tls-insecure-skip-verify: [decoder]}",
                "`--tls-insecure-skip-verify` must",
            ),
            ("{enable-ssrf-protection: true}", "`--inference-pool` or INFERENCE_POOL is needed"),
            ("{enable-ssrf-protection: true, inference-pool: a/b/c}", "`--inference-pool` must be"),
            ("{enable-ssrf-protection: true, inference-pool: a, pool-group: x}", "`--pool-group` must be"),
            ("{data-parallel-size: 0}", "`--data-parallel-size` must be"),
            ("{port: 0}", "`--port` must be"),
            ("{port: 65535, data-parallel-size: 2}", "`--port` 65535 and the ports of 2 ranks"),
            ("{model-server-port: 65535, data-parallel-size: 2}", "`--model-server-port` 65535"),
            ("{prefill-max-retries: 16}", "`--prefill-max-retries` must be"),
            ("{prefill-retry-backoff: '5'}", "`--prefill-retry-backoff` must be"),
            ("{prefill-retry-backoff: 2m}", "`--prefill-retry-backoff` must be"),
        ] {
            let error = options(yaml).expect_err(yaml).to_string();
            assert!(error.starts_with(message), "{yaml}: {error}");
        }
    }

    #[test]
    fn a_pool_without_a_namespace_is_in_the_default_one() {
        let of = |named| {
            options(&format!("{{enable-ssrf-protection: true, inference-pool: {named}}}")).expect("valid")
        };
        let name = |options: SidecarOptions| {
            options.inference_pool.map(|pool| [pool.namespace, pool.name].join("/"))
        };
        assert_eq!(name(of("pool")).as_deref(), Some("default/pool"));
        assert_eq!(name(of("ns/pool")).as_deref(), Some("ns/pool"));
        assert_eq!(
            options("{inference-pool: ns/pool}").expect("valid").inference_pool,
            None,
            "without protection"
        );
    }

    #[test]
    fn durations_are_written_as_in_go() {
        for (text, ms) in
            [("200ms", Some(200)), ("1.5s", Some(1500)), ("1m30s", Some(90_000)), ("0s", Some(0))]
        {
            assert_eq!(go_duration(text).map(|duration| duration.as_millis()), ms, "{text}");
        }
        for wrong in ["", "5", "ms", "1x", "-1s", "1.2.3s", "1e400s"] {
            assert_eq!(go_duration(wrong), None, "{wrong}");
        }
    }
}
