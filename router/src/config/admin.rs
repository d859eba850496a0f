//! The `admin` part: the listener for people and monitors.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The listener for people and monitors.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// `IP:PORT`; port 0 picks a free one. It has no authentication, so keep it on loopback or behind a
    /// firewall. Default `127.0.0.1:8081`.
    #[garde(skip)]
    pub listen: SocketAddr,
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self { listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8081) }
    }
}
