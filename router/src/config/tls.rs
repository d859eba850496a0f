//! The `listen_tls`, `admin.tls` and `engine_tls` parts: certificates. All files are PEM, and are read again when
//! they change; a new one that cannot be used leaves the old one in effect.

use std::path::PathBuf;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// TLS 1.2 and 1.3 on a listener, with HTTP/1.1 inside.
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
