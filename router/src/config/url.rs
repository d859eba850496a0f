//! The address of an engine: `http://HOST:PORT` or `https://HOST:PORT`, nothing else.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// `http://HOST:PORT` or `https://HOST:PORT`; HOST is a name, an IPv4 address, or an IPv6 address in brackets.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EngineUrl {
    is_tls: bool,
    host: String,
    port: u16,
}

/// Why a text is not the address of an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// Another scheme, or none.
    #[error("`{0}` must start with http:// or https://")]
    Scheme(String),
    /// A path, a query, or a user.
    #[error("`{0}` must be http://HOST:PORT or https://HOST:PORT, without a path, query or user")]
    NotBare(String),
    /// No host.
    #[error("`{0}` names no host")]
    Host(String),
    /// No port, or not a port.
    #[error("`{0}` must name a port from 1 to 65535")]
    Port(String),
}

impl EngineUrl {
    /// Whether the scheme is `https`.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// The host without brackets, as resolvers expect it.
    #[must_use]
    pub fn host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    /// The host as a URL contains it: an IPv6 address is in brackets.
    #[must_use]
    pub fn bracketed_host(&self) -> &str {
        &self.host
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `HOST:PORT`: the value of the `Host` header.
    #[must_use]
    pub fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

impl FromStr for EngineUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let (is_tls, rest) = match (text.strip_prefix("http://"), text.strip_prefix("https://")) {
            (Some(rest), _) => (false, rest),
            (None, Some(rest)) => (true, rest),
            (None, None) => return Err(UrlError::Scheme(text.to_owned())),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '#', '@']) || !rest.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(UrlError::NotBare(text.to_owned()));
        }
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| UrlError::Port(text.to_owned()))?;
        let bracketed = host.starts_with('[') && host.ends_with(']') && host.len() > 2;
        if host.is_empty() || (host.contains([':', '[', ']']) && !bracketed) {
            return Err(UrlError::Host(text.to_owned()));
        }
        let digits = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
        let port = port.parse::<u16>().ok().filter(|&p| digits && p > 0);
        Ok(Self { is_tls, host: host.to_owned(), port: port.ok_or_else(|| UrlError::Port(text.to_owned()))? })
    }
}

impl TryFrom<String> for EngineUrl {
    type Error = UrlError;
    fn try_from(text: String) -> Result<Self, UrlError> {
        text.parse()
    }
}

impl From<EngineUrl> for String {
    fn from(url: EngineUrl) -> Self {
        url.to_string()
    }
}

impl fmt::Display for EngineUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http{}://{}:{}", if self.is_tls { "s" } else { "" }, self.host, self.port)
    }
}

impl JsonSchema for EngineUrl {
    fn schema_name() -> Cow<'static, str> {
        "EngineUrl".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "format": "engine-url", "pattern": "^https?://[^/?#@\\s]+:[0-9]+/?$"})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_and_addresses_with_a_port() {
        for (text, host, port) in [
            ("http://127.0.0.1:8000", "127.0.0.1", 8000),
            ("http://engine-0.pool:80/", "engine-0.pool", 80),
            ("http://[::1]:9", "::1", 9),
        ] {
            let url: EngineUrl = text.parse().expect(text);
            assert_eq!((url.host(), url.port()), (host, port));
        }
    }

    #[test]
    fn an_https_url_is_recognized_and_round_trips() {
        for text in ["http://a:1", "https://a:1", "https://[::1]:443"] {
            let url: EngineUrl = text.parse().expect(text);
            assert_eq!((url.is_tls(), url.to_string().as_str()), (text.starts_with("https"), text));
        }
    }

    #[test]
    fn invalid_text_is_refused_with_its_defect() {
        for bad in [
            "127.0.0.1:8000",
            "ftp://a:1",
            "http://a",
            "http://a:0",
            "http://a:65536",
            "http://a:+1",
            "http://:80",
            "http://a:80/v1",
            "http://u@a:80",
            "http://a b:80",
            "http://::1:80",
        ] {
            assert!(bad.parse::<EngineUrl>().is_err(), "{bad}");
        }
    }
}
