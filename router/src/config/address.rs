//! An address to listen at: `IP:PORT`, or `localhost:PORT`, which is `127.0.0.1:PORT`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::{Deserialize, Deserializer, de};

/// What [`listen_address`] takes, as the schema names it (`format`).
pub(super) const FORMAT: &str = "listen-address";

/// Why a text is not an address to listen at. Each message shows what to write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// A port alone: `8080`, `:8080`, `*:8080`.
    #[error(
        "`{text}` has no IP address: write `127.0.0.1:{port}` (this machine only) or `0.0.0.0:{port}` (every \
         interface)"
    )]
    NoHost {
        /// What was written.
        text: String,
        /// Its port.
        port: u16,
    },
    /// An IP address or `localhost` alone.
    #[error("`{text}` has no port: write `{host}:8080`")]
    NoPort {
        /// What was written.
        text: String,
        /// The host, in brackets where it needs them.
        host: String,
    },
    /// A URL.
    #[error("`{text}` is a URL: write `{rest}`")]
    Url {
        /// What was written.
        text: String,
        /// What of it is an address.
        rest: String,
    },
    /// A port above 65535, or none.
    #[error("`{text}` has no port from 0 to 65535")]
    Port {
        /// What was written.
        text: String,
    },
    /// A name of a host.
    #[error(
        "`{text}` names a host: write an IP address of this machine and a port, for example `0.0.0.0:{port}`"
    )]
    Name {
        /// What was written.
        text: String,
        /// Its port.
        port: u16,
    },
    /// Anything else.
    #[error("`{text}` is no address: write IP:PORT, for example `127.0.0.1:8080`")]
    Form {
        /// What was written.
        text: String,
    },
}

/// Reads an address to listen at. No name but `localhost` is looked up.
///
/// # Errors
/// [`AddressError`] with what to write instead.
pub fn listen_address(text: &str) -> Result<SocketAddr, AddressError> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    // A message shows as much of it as an address could have.
    let shown = || text.chars().take(64).flat_map(char::escape_debug).collect::<String>();
    if let Some((_, rest)) = text.split_once("://") {
        let rest = rest.trim_end_matches('/');
        return Err(match listen_address(rest) {
            Ok(_) => AddressError::Url { text: shown(), rest: rest.to_owned() },
            Err(_) => AddressError::Form { text: shown() },
        });
    }
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    match bare.parse::<IpAddr>() {
        Ok(IpAddr::V6(_)) => return Err(AddressError::NoPort { text: shown(), host: format!("[{bare}]") }),
        Ok(IpAddr::V4(_)) => return Err(AddressError::NoPort { text: shown(), host: bare.to_owned() }),
        Err(_) if bare == "localhost" => {
            return Err(AddressError::NoPort { text: shown(), host: bare.to_owned() });
        }
        Err(_) => {}
    }
    let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
    let is_number = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let is_host = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'));
    match (host, port.parse::<u16>()) {
        (_, _) if !is_number && !host.is_empty() && is_host => Err(AddressError::Port { text: shown() }),
        (_, _) if !is_number => Err(AddressError::Form { text: shown() }),
        (_, Err(_)) => Err(AddressError::Port { text: shown() }),
        ("" | "*", Ok(port)) => Err(AddressError::NoHost { text: shown(), port }),
        ("localhost", Ok(port)) => Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)),
        (_, Ok(port)) if is_host && host.parse::<IpAddr>().is_err() => {
            Err(AddressError::Name { text: shown(), port })
        }
        (_, Ok(_)) => Err(AddressError::Form { text: shown() }),
    }
}

/// For serde: a key whose value is an address to listen at.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    listen_address(&String::deserialize(deserializer)?).map_err(de::Error::custom)
}
