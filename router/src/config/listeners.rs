//! TLS and cross-origin requests (CORS) of the client listener, TLS towards engines, the admin listener, and the
//! listeners of the endpoint picker.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Priority, address};

/// Every origin of pages.
const ANY_ORIGIN: &str = "*";

/// Whether clients may use HTTP/2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClientHttp2 {
    /// HTTP/2 for clients that begin with its preface, or choose it in the TLS handshake.
    #[default]
    Auto,
    /// Only HTTP/1.
    Off,
}

/// TLS 1.2 and 1.3 on a listener.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct ListenTlsConfig {
    /// The certificate, with the chain below its root.
    #[garde(skip)]
    pub certificate: PathBuf,
    /// Its key: PKCS#8, PKCS#1 or SEC1.
    #[garde(skip)]
    pub key: PathBuf,
    /// Roots of clients' certificates. Default: none.
    #[serde(default)]
    #[garde(skip)]
    pub client_ca: Option<PathBuf>,
    /// Whether clients show a certificate; needs `client_ca`. Default `none`.
    #[serde(default)]
    #[garde(custom(has_client_ca(&self.client_ca)))]
    pub client_auth: ClientAuth,
    /// A handshake takes at most this long, in milliseconds. 1 to 60,000; default 5,000.
    #[serde(default = "default_handshake_ms")]
    #[garde(range(min = 1, max = 60_000))]
    pub handshake_ms: u64,
    /// Concurrent TLS handshakes; more wait, within `handshake_ms`. A handshake that waits for its client
    /// does not count. 1 to 65,536; default 128.
    #[serde(default = "default_handshakes")]
    #[garde(range(min = 1, max = 65_536))]
    pub handshakes: usize,
}

impl ListenTlsConfig {
    /// These files, and the defaults.
    pub(crate) fn new(certificate: PathBuf, key: PathBuf) -> Self {
        Self {
            certificate,
            key,
            client_ca: None,
            client_auth: ClientAuth::None,
            handshake_ms: default_handshake_ms(),
            handshakes: default_handshakes(),
        }
    }
}

/// Whether clients show a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClientAuth {
    /// Clients need no certificate.
    #[default]
    None,
    /// Clients may show a certificate; an invalid one is refused.
    Optional,
    /// Clients must show a certificate.
    Require,
}

/// TLS of connections to engines with an `https://` address.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct EngineTlsConfig {
    /// Roots of the engines' certificates. The system's are not used: engines are not public servers.
    #[garde(skip)]
    pub ca: PathBuf,
    /// The router's own certificate, for engines that ask for one. Default: none.
    #[serde(default)]
    #[garde(skip)]
    pub certificate: Option<PathBuf>,
    /// Its key. Default: none.
    #[serde(default)]
    #[garde(custom(goes_with(&self.certificate)))]
    pub key: Option<PathBuf>,
    /// The name in the engines' certificates. Default: the host of their address.
    #[serde(default)]
    #[garde(inner(length(bytes, min = 1, max = 253)))]
    pub server_name: Option<String>,
    /// The engines' certificates are not checked. Only `baton sidecar` sets it.
    #[serde(skip)]
    #[garde(skip)]
    pub is_unverified: bool,
}

fn default_handshake_ms() -> u64 {
    5_000
}

fn default_handshakes() -> usize {
    128
}

fn has_client_ca(ca: &Option<PathBuf>) -> impl FnOnce(&ClientAuth, &()) -> garde::Result + '_ {
    move |asked, _| {
        if *asked != ClientAuth::None && ca.is_none() {
            return Err(garde::Error::new("needs client_ca: the roots of the clients' certificates"));
        }
        Ok(())
    }
}

fn goes_with(certificate: &Option<PathBuf>) -> impl FnOnce(&Option<PathBuf>, &()) -> garde::Result + '_ {
    move |key, _| {
        if key.is_some() != certificate.is_some() {
            return Err(garde::Error::new("certificate and key need each other"));
        }
        Ok(())
    }
}

/// The listener for people and monitors.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// `IP:PORT` or `localhost:PORT`; port 0 picks a free one. Beyond loopback it needs `token_file`, or `tls` with
    /// `client_auth: require`. Default `127.0.0.1:8081`.
    #[serde(deserialize_with = "address::deserialize")]
    #[schemars(extend("format" = address::FORMAT))]
    #[garde(skip)]
    pub listen: SocketAddr,
    /// A file whose first line, of at least 16 bytes, is the required token: `Authorization: Bearer`.
    /// `/health` and `/ready` need no token. Read again when it changes. Default: none.
    #[garde(skip)]
    pub token_file: Option<PathBuf>,
    /// TLS for people and monitors. Default: none.
    #[garde(dive)]
    pub tls: Option<ListenTlsConfig>,
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self { listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8081), token_file: None, tls: None }
    }
}

impl AdminConfig {
    /// Whether the admin listener requires a client certificate.
    pub(crate) fn asks_for_certificates(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.client_auth == ClientAuth::Require)
    }

    /// Whether a listener at this address serves other hosts without a token or a certificate.
    pub(crate) fn is_open(&self, listen: SocketAddr, certificates: bool) -> bool {
        !listen.ip().is_loopback() && self.token_file.is_none() && !certificates
    }
}

/// The endpoint picker: a gateway such as Envoy asks it for an engine and forwards requests itself. Models,
/// pools, policies, `limits`, `queue`, `health` and `admin` apply as to the router; `listen` has no effect.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct PickerConfig {
    /// Where gateways connect with ext_proc (gRPC): `IP:PORT` or `localhost:PORT`; port 0 picks a free one.
    /// A gateway learns the addresses of engines, so let only gateways reach it. Default `127.0.0.1:9002`.
    #[serde(deserialize_with = "address::deserialize")]
    #[schemars(extend("format" = address::FORMAT))]
    #[garde(skip)]
    pub listen: SocketAddr,
    /// Where probes ask for the gRPC health services `liveness` and `readiness`, without TLS. `listen` has
    /// them too. Default `127.0.0.1:9003`.
    #[serde(deserialize_with = "address::deserialize")]
    #[schemars(extend("format" = address::FORMAT))]
    #[garde(skip)]
    pub health_listen: SocketAddr,
    /// TLS for gateways, with HTTP/2 inside. Default: none.
    #[garde(dive)]
    pub tls: Option<ListenTlsConfig>,
    /// Endpoints after the chosen one, for a gateway that tries the next when a connection fails. Envoy needs
    /// the `override_host` policy for them: an `ORIGINAL_DST` cluster accepts one address only. 0 to 4;
    /// default 0.
    #[garde(range(max = 4))]
    pub fallbacks: u8,
    /// The priority of each value of `x-gateway-inference-objective`. Other values have the priority of
    /// requests without one. At most 256. Default: none.
    #[garde(length(max = 256))]
    pub objectives: BTreeMap<String, Priority>,
}

impl Default for PickerConfig {
    fn default() -> Self {
        let loopback = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
        Self {
            listen: loopback(9002),
            health_listen: loopback(9003),
            tls: None,
            fallbacks: 0,
            objectives: BTreeMap::new(),
        }
    }
}

/// Pages of other origins that may call the client listener from a browser.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct CorsConfig {
    /// Origins as browsers send them, such as `https://chat.example.com`: scheme, host, and the port if it is not the
    /// scheme's own. Or only `*`: every origin. 1 to 256.
    #[garde(length(min = 1, max = 256), custom(is_alone), inner(custom(is_origin)))]
    pub origins: Vec<String>,
    /// Request headers that pages may send beyond those of the OpenAI and Anthropic SDKs. At most 64; default: none.
    #[serde(default)]
    #[garde(length(max = 64), inner(custom(is_header)))]
    pub headers: Vec<String>,
    /// Whether a browser may send its client certificate. An API key that the page sets needs no permission. Needs
    /// listed origins. Default false.
    #[serde(default)]
    #[garde(custom(has_listed(&self.origins)))]
    pub credentials: bool,
    /// How long a browser may reuse the answer to a preflight, in milliseconds. 0 to 86,400,000; default 600,000.
    #[serde(default = "default_max_age_ms")]
    #[garde(range(max = 86_400_000))]
    pub max_age_ms: u64,
}

impl CorsConfig {
    /// Whether every origin is allowed.
    pub(crate) fn allows_any(&self) -> bool {
        self.origins.iter().any(|origin| origin == ANY_ORIGIN)
    }
}

fn default_max_age_ms() -> u64 {
    600_000
}

fn is_alone(origins: &[String], _: &()) -> garde::Result {
    match origins {
        [_, _, ..] if origins.iter().any(|origin| origin == ANY_ORIGIN) => {
            Err(garde::Error::new("`*` means every origin: list it alone, or leave it out"))
        }
        _ => Ok(()),
    }
}

/// A browser's text is compared byte by byte, so text that no browser sends is a mistake.
fn is_origin(origin: &str, _: &()) -> garde::Result {
    if origin == ANY_ORIGIN {
        return Ok(());
    }
    let error = |what: &str| Err(garde::Error::new(format!("{what}, such as `https://chat.example.com`")));
    let Some((scheme, authority)) = origin.split_once("://") else {
        return error("must be a scheme and a host");
    };
    if scheme.is_empty() || authority.is_empty() || authority.contains(['/', '?', '#', '@', '*', ',']) {
        return error("must be a scheme and a host without a path or a pattern");
    }
    if !origin.bytes().all(|byte| byte.is_ascii_graphic() && !byte.is_ascii_uppercase()) {
        return error("must be lower-case ASCII, as browsers send it");
    }
    match (scheme, authority.rsplit_once(':')) {
        ("https", Some((_, "443"))) | ("http", Some((_, "80"))) => {
            error("must leave out the scheme's own port, as browsers do")
        }
        _ => Ok(()),
    }
}

fn is_header(name: &str, _: &()) -> garde::Result {
    match hyper::header::HeaderName::try_from(name) {
        Ok(_) => Ok(()),
        Err(_) => Err(garde::Error::new("must be the name of a header")),
    }
}

fn has_listed(origins: &[String]) -> impl FnOnce(&bool, &()) -> garde::Result + '_ {
    move |credentials, _| {
        if *credentials && origins.iter().any(|origin| origin == ANY_ORIGIN) {
            return Err(garde::Error::new(
                "needs listed origins: with `*` every page could use a client's certificate",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(yaml: &str) -> String {
        let config: CorsConfig = serde_saphyr::from_str(yaml).expect("the keys exist");
        config.validate().err().map(|report| report.to_string()).unwrap_or_default()
    }

    #[test]
    fn an_origin_is_what_a_browser_sends() {
        for origin in [
            "https://chat.example.com",
            "http://localhost:3000",
            "http://[::1]:8000",
            "https://a.b:8443",
            "tauri://localhost",
            "vscode-webview://0a1b",
            "*",
        ] {
            assert_eq!(problems(&format!("origins: ['{origin}']")), "", "{origin}");
        }
        for origin in [
            "",
            "null",
            "chat.example.com",
            "https://",
            "https://a.b/",
            "https://a.b/path",
            "https://*.a.b",
            "https://A.b",
            "https://a.b:443",
            "http://a.b:80",
            "https://u@a.b",
            "https://ä.b",
            "https://a.b, https://c.d",
            "https://a b",
        ] {
            assert_ne!(problems(&format!("origins: ['{origin}']")), "", "{origin}");
        }
        assert!(problems("origins: []").contains("length"));
    }

    #[test]
    fn every_origin_stands_alone_and_goes_without_credentials() {
        assert!(problems("origins: ['*', 'https://a.b']").contains("list it alone"));
        assert!(problems("{origins: ['*'], credentials: true}").contains("needs listed origins"));
        assert_eq!(problems("{origins: ['https://a.b'], credentials: true, headers: [x-app]}"), "");
        assert!(problems("{origins: ['*'], headers: ['x app']}").contains("name of a header"));
    }
}
