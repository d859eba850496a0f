//! The address of a client: the peer of its connection, or, behind trusted proxies, the one that they name in
//! `X-Forwarded-For`.
//!
//! Each proxy appends the address that connected to it. So the list is read from its end, for as long as the
//! author of an entry is trusted. Entries that the client itself wrote come before those and are never reached. No
//! engine receives the header.

use std::net::{IpAddr, SocketAddr};

use hyper::header::HeaderMap;

use crate::client::session::Session;
use crate::config::Cidr;

const FORWARDED_FOR: &str = "x-forwarded-for";

/// The address of a session's client.
pub(crate) fn of(session: &Session, trusted: &[Cidr]) -> IpAddr {
    behind(session.client_addr().ip(), &session.req_header().headers, trusted)
}

/// The address of a client whose request came over a connection from `peer`.
pub(crate) fn behind(peer: IpAddr, headers: &HeaderMap, trusted: &[Cidr]) -> IpAddr {
    let mut client = peer.to_canonical();
    let is_trusted = |address: IpAddr| trusted.iter().any(|network| network.contains(address));
    if !is_trusted(client) {
        return client;
    }
    let lines: Vec<_> = headers.get_all(FORWARDED_FOR).iter().collect();
    for line in lines.into_iter().rev() {
        for entry in line.as_bytes().rsplit(|byte| *byte == b',') {
            // An entry that is no address ends the search: its author is the last known address.
            let Some(address) = std::str::from_utf8(entry).ok().and_then(address) else { return client };
            client = address;
            if !is_trusted(client) {
                return client;
            }
        }
    }
    client
}

/// An address, with or without a port.
fn address(entry: &str) -> Option<IpAddr> {
    let entry = entry.trim();
    let bare = entry.strip_prefix('[').and_then(|entry| entry.strip_suffix(']')).unwrap_or(entry);
    let with_port = || entry.parse::<SocketAddr>().ok().map(|address| address.ip());
    bare.parse::<IpAddr>().ok().or_else(with_port).map(|address| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn named(peer: &str, lines: &[&str], trusted: &[&str]) -> String {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(FORWARDED_FOR, HeaderValue::from_str(line).unwrap());
        }
        let trusted: Vec<Cidr> = trusted.iter().map(|network| network.parse().unwrap()).collect();
        behind(peer.parse().unwrap(), &headers, &trusted).to_string()
    }

    #[test]
    fn the_rightmost_address_that_no_trusted_proxy_has_is_the_clients() {
        let inside = ["10.0.0.0/8", "fd00::/8"];
        for (peer, lines, client) in [
            ("10.0.0.1", vec!["203.0.113.9"], "203.0.113.9"),
            ("10.0.0.1", vec!["1.1.1.1, 203.0.113.9"], "203.0.113.9"),
            ("10.0.0.1", vec!["1.1.1.1, 203.0.113.9 ,10.0.0.2"], "203.0.113.9"),
            ("10.0.0.1", vec!["1.1.1.1", "203.0.113.9", "10.0.0.2"], "203.0.113.9"),
            ("10.0.0.1", vec!["203.0.113.9:4711"], "203.0.113.9"),
            ("10.0.0.1", vec!["[2001:db8::7]:4711"], "2001:db8::7"),
            ("10.0.0.1", vec!["[2001:db8::7]"], "2001:db8::7"),
            ("::ffff:10.0.0.1", vec!["203.0.113.9"], "203.0.113.9"),
            ("10.0.0.1", vec!["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
            ("10.0.0.1", vec!["203.0.113.9, unknown"], "10.0.0.1"),
            ("10.0.0.1", vec!["203.0.113.9, _hidden, 10.0.0.2"], "10.0.0.2"),
            ("10.0.0.1", vec![""], "10.0.0.1"),
            ("10.0.0.1", vec![], "10.0.0.1"),
            ("203.0.113.7", vec!["1.1.1.1"], "203.0.113.7"),
        ] {
            assert_eq!(named(peer, &lines, &inside), client, "{peer} {lines:?}");
        }
    }

    proptest! {
        #[test]
        fn the_address_of_an_untrusted_peer_ignores_its_headers(
            peer in any::<[u8; 4]>().prop_map(IpAddr::from),
            lines in proptest::collection::vec("[0-9a-f.:, \\[\\]]{0,60}", 0..4),
        ) {
            let trusted: [Cidr; 1] = ["127.0.0.0/8".parse().unwrap()];
            prop_assume!(!trusted[0].contains(peer));
            let mut headers = HeaderMap::new();
            for line in &lines {
                headers.append(FORWARDED_FOR, HeaderValue::from_str(line).unwrap());
            }
            prop_assert_eq!(behind(peer, &headers, &trusted), peer);
            prop_assert_eq!(behind(peer, &headers, &[]), peer);
            // A trusted peer never causes a panic.
            let _ = behind(IpAddr::from([127, 0, 0, 1]), &headers, &trusted);
        }
    }
}
