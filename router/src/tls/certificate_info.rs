//! Expiry and names of a certificate. Its authenticity was verified before.

use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Maximum names read from one certificate.
const NAMES_MAX: usize = 64;

/// The parsed fields of a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CertificateInfo {
    /// Seconds since 1970.
    pub not_after_s: u64,
    /// DNS names and URIs of its subject alternative names, or else the subject's common name.
    pub names: Vec<String>,
}

/// Parses a certificate; `None` if it is invalid.
pub(crate) fn certificate_info(der: &[u8]) -> Option<CertificateInfo> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let names = names_of(&certificate);
    let not_after_s = u64::try_from(certificate.validity().not_after.timestamp()).ok()?;
    Some(CertificateInfo { not_after_s, names })
}

fn names_of(certificate: &X509Certificate<'_>) -> Vec<String> {
    // The common name does not stand in for alternative names that cannot be read.
    let Ok(alternative) = certificate.subject_alternative_name() else { return Vec::new() };
    let alternative = alternative.into_iter().flat_map(|extension| &extension.value.general_names);
    let name = |general: &GeneralName<'_>| match general {
        GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
        _ => None,
    };
    let mut names: Vec<_> = alternative.filter_map(name).take(NAMES_MAX).collect();
    if names.is_empty() {
        let common = certificate.subject().iter_common_name().next();
        names.extend(common.and_then(|name| std::str::from_utf8(name.as_slice()).ok()).map(str::to_owned));
    }
    names
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    fn certificate(shape: impl FnOnce(&mut CertificateParams)) -> Vec<u8> {
        let mut params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(2031, 2, 3);
        shape(&mut params);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn expiry_and_names_of_a_certificate_are_parsed() {
        let plain = certificate_info(&certificate(|_| {})).unwrap();
        assert_eq!(plain.not_after_s, crate::config::moment("2031-02-03").unwrap());
        assert_eq!(plain.names, ["a.example"]);
        let spiffe = certificate_info(&certificate(|params| {
            let uri = "spiffe://cluster/ns/a/sa/b".try_into().unwrap();
            params.subject_alt_names.push(SanType::URI(uri));
        }));
        assert_eq!(spiffe.unwrap().names, ["a.example", "spiffe://cluster/ns/a/sa/b"]);
        let late =
            certificate_info(&certificate(|params| params.not_after = rcgen::date_time_ymd(2055, 1, 1)))
                .unwrap();
        assert_eq!(late.not_after_s, crate::config::moment("2055-01-01").unwrap());
        let common = certificate_info(&certificate(|params| {
            params.subject_alt_names.clear();
            params.distinguished_name.push(DnType::CommonName, "client-7");
        }));
        assert_eq!(common.unwrap().names, ["client-7"]);
    }

    #[test]
    fn a_common_name_does_not_count_beside_alternative_names() {
        let both = certificate_info(&certificate(|params| {
            params.distinguished_name.push(DnType::CommonName, "b.example");
        }));
        assert_eq!(both.unwrap().names, ["a.example"]);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = certificate_info(&bytes);
        }

        #[test]
        fn no_damage_panics(at in 0..400_usize, byte in any::<u8>(), cut in 0..400_usize) {
            thread_local! { static GOOD: Vec<u8> = certificate(|_| {}); }
            let mut damaged = GOOD.with(Clone::clone);
            let length = damaged.len();
            damaged[at % length] = byte;
            let _ = certificate_info(&damaged);
            let _ = certificate_info(&damaged[..cut % length]);
        }
    }
}
