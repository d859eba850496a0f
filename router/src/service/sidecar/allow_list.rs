//! The prefill engines that requests may name. Pure.

use std::collections::HashSet;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use crate::config::Cidr;

/// The addresses of the Pods of an InferencePool.
pub(crate) type PodAddresses = HashSet<IpAddr>;

/// Hosts that may be prefill engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedPrefiller {
    /// The addresses of a network.
    Network(Cidr),
    /// One host name, in lower case.
    Name(String),
}

impl FromStr for AllowedPrefiller {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text.parse().map_or_else(|_| Self::Name(text.to_ascii_lowercase()), Self::Network))
    }
}

impl AllowedPrefiller {
    /// Whether it admits every address of a family.
    pub(super) fn admits_all(&self) -> bool {
        let ends = [
            [Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::BROADCAST.into()],
            [Ipv6Addr::UNSPECIFIED.into(), IpAddr::from(Ipv6Addr::from_bits(u128::MAX))],
        ];
        matches!(self, Self::Network(network) if ends.iter().any(|[first, last]| {
            network.contains(*first) && network.contains(*last)
        }))
    }

    /// A name matches as it is written: it is not resolved, because its address may change after the check.
    fn contains(&self, host: &str) -> bool {
        match self {
            Self::Network(network) => host.parse().is_ok_and(|address| network.contains(address)),
            Self::Name(name) => name == host,
        }
    }
}

/// Whether a host may be a prefill engine. Without any list, every host may. With an InferencePool that is not known
/// yet, only listed hosts may.
pub(super) fn allows(
    listed: &[AllowedPrefiller],
    has_pool: bool,
    host: &str,
    pods: Option<&PodAddresses>,
) -> bool {
    let is_pod = |pods: &PodAddresses| {
        host.parse().is_ok_and(|address: IpAddr| pods.contains(&address.to_canonical()))
    };
    listed.is_empty() && !has_pool
        || listed.iter().any(|allowed| allowed.contains(host))
        || pods.is_some_and(is_pod)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(hosts: &[&str]) -> Vec<AllowedPrefiller> {
        hosts.iter().map(|host| host.parse().expect("every text is a host")).collect()
    }

    #[test]
    fn without_a_list_every_host_is_allowed() {
        assert!(allows(&[], false, "anywhere", None));
    }

    #[test]
    fn listed_networks_and_names_are_allowed_and_nothing_else() {
        let listed = listed(&["10.1.0.0/16", "fd00::/8", "Prefill.svc"]);
        for (host, allowed) in [
            ("10.1.2.3", true),
            ("fd00::1", true),
            ("prefill.svc", true),
            ("::ffff:10.1.2.3", true),
            ("10.2.0.1", false),
            ("127.0.0.1", false),
            ("prefill.svc.evil", false),
            // Resolvers read these as addresses.
            ("0x0a010203", false),
            ("10.1.515", false),
        ] {
            assert_eq!(allows(&listed, false, host, None), allowed, "{host}");
        }
    }

    #[test]
    fn the_pods_of_the_pool_are_allowed_once_they_are_known() {
        let pods = PodAddresses::from([IpAddr::from([10, 0, 0, 7])]);
        let listed = listed(&["extra"]);
        let in_pool = |host, pods| allows(&listed, true, host, pods);
        assert!(!in_pool("10.0.0.7", None) && in_pool("extra", None));
        assert!(in_pool("10.0.0.7", Some(&pods)) && !in_pool("10.0.0.8", Some(&pods)));
        assert!(!allows(&[], true, "10.0.0.7", None), "a pool that is not known allows no engine");
    }

    #[test]
    fn a_network_of_every_address_is_no_limit() {
        for (network, admits_all) in
            [("0.0.0.0/0", true), ("::/0", true), ("0.0.0.0/1", false), ("10.0.0.0/8", false), ("p", false)]
        {
            assert_eq!(listed(&[network])[0].admits_all(), admits_all, "{network}");
        }
    }
}
