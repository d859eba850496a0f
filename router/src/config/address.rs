//! Addresses to listen at (`IP:PORT`, or `localhost:PORT`, which is `127.0.0.1:PORT`) and networks (`10.0.0.0/8`).

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de};

/// The `format` of listen addresses in the schema; [`listen_address`] parses them.
pub(super) const FORMAT: &str = "listen-address";

/// Why a text is not an address to listen at. Each message contains a correct form.
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
        /// The address in the URL.
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

/// Reads an address to listen at. `localhost` is the only valid name; names are not resolved.
///
/// # Errors
/// [`AddressError`] with a correct form.
pub fn listen_address(text: &str) -> Result<SocketAddr, AddressError> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    // A message shows as many characters as an address can have.
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

/// Deserializes an address to listen at.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    listen_address(&String::deserialize(deserializer)?).map_err(de::Error::custom)
}

/// A network: an address in it, and the number of leading bits that its addresses share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    address: IpAddr,
    bits: u8,
}

/// Why a text is not a network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no network: ADDRESS/BITS, for example 10.0.0.0/8, or one address")]
pub struct CidrError(String);

impl Cidr {
    /// Whether the network contains an address. An IPv4-mapped IPv6 address counts as IPv4.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        let shared = |own: u128, other: u128, width: u32| {
            let rest = width - u32::from(self.bits).min(width);
            rest >= width || own >> rest == other >> rest
        };
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => shared(own.to_bits().into(), other.to_bits().into(), 32),
            (IpAddr::V6(own), IpAddr::V6(other)) => shared(own.to_bits(), other.to_bits(), 128),
            _ => false,
        }
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let wrong = || CidrError(text.to_owned());
        let (address, bits) =
            text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let widest = if address.is_ipv4() { 32 } else { 128 };
        let bits = match bits {
            None => widest,
            Some(bits) if bits.bytes().all(|byte| byte.is_ascii_digit()) => {
                bits.parse().ok().filter(|bits| *bits <= widest).ok_or_else(wrong)?
            }
            Some(_) => return Err(wrong()),
        };
        Ok(Self { address, bits })
    }
}

impl TryFrom<String> for Cidr {
    type Error = CidrError;
    fn try_from(text: String) -> Result<Self, CidrError> {
        text.parse()
    }
}

impl From<Cidr> for String {
    fn from(cidr: Cidr) -> Self {
        cidr.to_string()
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

impl JsonSchema for Cidr {
    fn schema_name() -> Cow<'static, str> {
        "Cidr".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "format": "network", "pattern": "^[0-9a-fA-F.:]+(/[0-9]+)?$"})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_the_addresses_that_share_its_first_bits() {
        for (network, inside, outside) in [
            ("10.0.0.0/8", "10.255.0.1", "11.0.0.0"),
            ("10.0.0.7", "10.0.0.7", "10.0.0.6"),
            ("192.168.4.0/22", "192.168.7.255", "192.168.8.0"),
            ("0.0.0.0/0", "1.2.3.4", "::1"),
            ("fd00::/8", "fdff::1", "fe00::1"),
            ("::/0", "2001:db8::1", "10.0.0.1"),
            ("127.0.0.0/8", "::ffff:127.0.0.1", "::1"),
        ] {
            let network: Cidr = network.parse().expect(network);
            assert!(network.contains(inside.parse().unwrap()), "{network} {inside}");
            assert!(!network.contains(outside.parse().unwrap()), "{network} {outside}");
        }
        for wrong in
            ["", "10.0.0.0/33", "::/129", "10.0.0.0/", "10.0.0.0/+8", "x/8", "10.0.0/8", "10.0.0.0/8/8"]
        {
            assert!(wrong.parse::<Cidr>().is_err(), "{wrong}");
        }
    }
}
