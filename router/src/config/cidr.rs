//! A network: `10.0.0.0/8`, `fd00::/8`, or one address.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// A network, by an address in it and the length of what its addresses share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    address: IpAddr,
    bits: u8,
}

/// Why text is not a network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no network: ADDRESS/BITS, for example 10.0.0.0/8, or one address")]
pub struct CidrError(String);

impl Cidr {
    /// Whether an address is in it. An IPv4 address is the same when it is written as IPv6.
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
