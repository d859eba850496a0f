//! The `admin` part: the listener for people and monitors.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::address;
use super::tls::{ClientAuth, ListenTlsConfig};

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
    /// Whether everybody who is connected has shown a certificate.
    pub(crate) fn asks_for_certificates(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.client_auth == ClientAuth::Require)
    }

    /// Whether everybody who reaches a listener at this address could use it.
    pub(crate) fn is_open(&self, listen: SocketAddr, certificates: bool) -> bool {
        !listen.ip().is_loopback() && self.token_file.is_none() && !certificates
    }
}
