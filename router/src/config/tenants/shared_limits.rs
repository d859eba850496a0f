//! `auth.shared_limits`: limits that several routers share through a Valkey or Redis server.

use std::path::PathBuf;

use garde::Validate;
use hyper::Uri;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A Valkey or Redis server (version 6 or later) that holds the limits of keys and tenants for all routers.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct SharedLimitsConfig {
    /// `redis://HOST:PORT/DATABASE`, or `rediss://` with TLS. The port is 6379 and the database 0 unless given. A
    /// user name may precede the host: `redis://USER@HOST`. One server or a proxy; no cluster, no sentinel.
    #[garde(custom(is_store_url))]
    pub url: String,
    /// A file whose first line is the password. Default: none.
    #[serde(default)]
    #[garde(skip)]
    pub password_file: Option<PathBuf>,
    /// Roots of the server's certificate, in PEM, for `rediss://`. Default: the system's.
    #[serde(default)]
    #[garde(skip)]
    pub ca_file: Option<PathBuf>,
    /// What happens to requests while the server does not answer in time. Default `allow_local`.
    #[serde(default)]
    #[garde(skip)]
    pub on_failure: OnStoreFailure,
    /// Time that one question of a request may take, in milliseconds. A request asks up to twice. 1 to 1,000;
    /// default 20.
    #[serde(default = "default_timeout_ms")]
    #[garde(range(min = 1, max = 1000))]
    pub timeout_ms: u64,
    /// Prefix of all names at the server. Routers with the same prefix share limits. Default `baton`.
    #[serde(default = "default_prefix")]
    #[garde(length(bytes, min = 1, max = 64), ascii)]
    pub prefix: String,
}

/// What happens to requests while the shared limits are unavailable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnStoreFailure {
    /// Each router applies the limits by itself, so N routers allow up to N times as much.
    #[default]
    AllowLocal,
    /// Requests of keys and tenants with limits are refused with 503.
    Refuse,
}

/// The parts of [`SharedLimitsConfig::url`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreAddress {
    pub is_tls: bool,
    /// Without brackets.
    pub host: String,
    pub port: u16,
    pub user: Option<String>,
    pub database: u16,
}

impl SharedLimitsConfig {
    /// The parts of the address, which validation has checked.
    pub(crate) fn address(&self) -> Option<StoreAddress> {
        address(&self.url)
    }
}

fn address(text: &str) -> Option<StoreAddress> {
    let uri: Uri = text.parse().ok()?;
    let is_tls = match uri.scheme_str()? {
        "redis" => false,
        "rediss" => true,
        _ => return None,
    };
    let authority = uri.authority()?;
    let user = authority.as_str().rsplit_once('@').map(|(user, _)| user.to_owned());
    let is_name = |user: &String| !user.is_empty() && !user.contains([':', '%', '@']);
    if user.as_ref().is_some_and(|user| !is_name(user)) || uri.query().is_some() {
        return None;
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    let port = match authority.port() {
        Some(port) => port.as_str().parse().ok().filter(|&port| port > 0)?,
        None if authority.as_str().ends_with(':') => return None,
        None => 6379,
    };
    let database = match uri.path().trim_start_matches('/') {
        "" => 0,
        digits => digits.parse().ok()?,
    };
    (!host.is_empty()).then_some(StoreAddress { is_tls, host, port, user, database })
}

fn is_store_url(text: &str, _: &()) -> garde::Result {
    let wrong = "must be redis://HOST:PORT/DATABASE or rediss://…; a password belongs into `password_file`";
    address(text).map(drop).ok_or_else(|| garde::Error::new(wrong))
}

fn default_timeout_ms() -> u64 {
    20
}

fn default_prefix() -> String {
    "baton".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_no_password() {
        let parts = |text: &str| {
            let address = address(text)?;
            Some((address.is_tls, address.host, address.port, address.user, address.database))
        };
        assert_eq!(parts("redis://a"), Some((false, "a".into(), 6379, None, 0)));
        assert_eq!(parts("rediss://u@a:1/3"), Some((true, "a".into(), 1, Some("u".into()), 3)));
        assert_eq!(parts("redis://[::1]:7/"), Some((false, "::1".into(), 7, None, 0)));
        for bad in
            ["http://a", "redis://", "redis://:p@a", "redis://u:p@a", "redis://a/x", "redis://a:0", "a:1"]
        {
            assert_eq!(parts(bad), None, "{bad}");
        }
    }
}
