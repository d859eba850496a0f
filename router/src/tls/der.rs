//! The three things the router wants to know of a certificate: when it ends, and whose it is. Read from its DER;
//! everything else about a certificate is rustls's business. Whether it is genuine is checked before this is asked.
//!
//! No input panics, recurses or reads beyond its end.

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OID: u8 = 0x06;
const OCTETS: u8 = 0x04;
const INTEGER: u8 = 0x02;
const BOOLEAN: u8 = 0x01;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];
/// `dNSName` and `uniformResourceIdentifier` of RFC 5280's `GeneralName`.
const DNS: u8 = 0x82;
const URI: u8 = 0x86;
/// The wrappers of version and extensions.
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;
/// Names of one certificate that are looked at.
const NAMES_MAX: usize = 64;

/// What is read of a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Seconds since 1970.
    pub not_after_s: u64,
    /// DNS names and URIs of its subject alternative names; where there are none, the subject's common name.
    pub names: Vec<String>,
}

/// Reads a certificate; `None` if it is not one.
pub(crate) fn facts(certificate: &[u8]) -> Option<Facts> {
    let mut outer = Reader(certificate).inside(SEQUENCE)?;
    let mut tbs = outer.inside(SEQUENCE)?;
    tbs.skip_if(VERSION)?;
    tbs.inside(INTEGER)?;
    tbs.inside(SEQUENCE)?;
    tbs.inside(SEQUENCE)?;
    let mut validity = tbs.inside(SEQUENCE)?;
    validity.next()?;
    let (kind, not_after) = validity.next()?;
    let not_after_s = moment(kind, not_after)?;
    let subject = tbs.inside(SEQUENCE)?;
    tbs.inside(SEQUENCE)?;
    let mut names = Vec::new();
    while let Some((kind, value)) = tbs.next() {
        if kind == EXTENSIONS {
            names = alternative_names(Reader(value).inside(SEQUENCE)?);
        }
    }
    if names.is_empty() {
        names.extend(common_name(subject));
    }
    Some(Facts { not_after_s, names })
}

fn alternative_names(mut extensions: Reader<'_>) -> Vec<String> {
    let mut names = Vec::new();
    while let Some(mut extension) = extensions.inside(SEQUENCE) {
        let Some((OID, SUBJECT_ALT_NAME)) = extension.next() else { continue };
        let _ = extension.skip_if(BOOLEAN);
        let general = extension.inside(OCTETS).and_then(|mut octets| octets.inside(SEQUENCE));
        let Some(mut general) = general else { continue };
        while let Some((kind, value)) = general.next() {
            if matches!(kind, DNS | URI) && names.len() < NAMES_MAX {
                names.extend(std::str::from_utf8(value).ok().map(str::to_owned));
            }
        }
    }
    names
}

fn common_name(mut subject: Reader<'_>) -> Option<String> {
    while let Some(mut set) = subject.inside(SET) {
        while let Some(mut attribute) = set.inside(SEQUENCE) {
            if let Some((OID, COMMON_NAME)) = attribute.next() {
                let (_, value) = attribute.next()?;
                return std::str::from_utf8(value).ok().map(str::to_owned);
            }
        }
    }
    None
}

/// `YYMMDDHHMMSSZ`, or with four digits for the year.
fn moment(kind: u8, text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok().filter(|text| text.is_ascii())?;
    let (year, rest) = match kind {
        // RFC 5280: 50 to 99 are of the last century.
        UTC_TIME => {
            let (year, rest) = text.split_at_checked(2)?;
            (format!("{}{year}", if year < "50" { "20" } else { "19" }), rest)
        }
        GENERALIZED_TIME => {
            let (year, rest) = text.split_at_checked(4)?;
            (year.to_owned(), rest)
        }
        _ => return None,
    };
    let part = |at: usize| rest.get(at..at + 2);
    let [month, day, hour, minute, second] = [part(0)?, part(2)?, part(4)?, part(6)?, part(8)?];
    if rest.len() != 11 || !rest.ends_with('Z') {
        return None;
    }
    crate::config::moment(&format!("{year}-{month}-{day}T{hour}:{minute}:{second}Z"))
}

/// DER values one after another.
#[derive(Clone, Copy)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// The next value: its tag and its content.
    fn next(&mut self) -> Option<(u8, &'a [u8])> {
        let (&tag, rest) = self.0.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (length, rest) = if first < 0x80 {
            (usize::from(first), rest)
        } else {
            // At most four bytes of length: nothing here is longer.
            let (digits, rest) =
                rest.split_at_checked(usize::from(first & 0x7f)).filter(|(d, _)| d.len() <= 4)?;
            (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), rest)
        };
        let (value, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((tag, value))
    }

    /// What is in the next value, which must be of this kind.
    fn inside(&mut self, kind: u8) -> Option<Reader<'a>> {
        let (tag, value) = self.next()?;
        (tag == kind).then_some(Reader(value))
    }

    fn skip_if(&mut self, kind: u8) -> Option<()> {
        if self.0.first() == Some(&kind) {
            self.next()?;
        }
        Some(())
    }
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
    fn the_end_and_the_names_are_read() {
        let plain = facts(&certificate(|_| {})).unwrap();
        assert_eq!(plain.not_after_s, crate::config::moment("2031-02-03").unwrap());
        assert_eq!(plain.names, ["a.example"]);
        let spiffe = facts(&certificate(|params| {
            let uri = "spiffe://cluster/ns/a/sa/b".try_into().unwrap();
            params.subject_alt_names.push(SanType::URI(uri));
        }));
        assert_eq!(spiffe.unwrap().names, ["a.example", "spiffe://cluster/ns/a/sa/b"]);
        let late = facts(&certificate(|params| params.not_after = rcgen::date_time_ymd(2055, 1, 1))).unwrap();
        assert_eq!(late.not_after_s, crate::config::moment("2055-01-01").unwrap());
        let common = facts(&certificate(|params| {
            params.subject_alt_names.clear();
            params.distinguished_name.push(DnType::CommonName, "client-7");
        }));
        assert_eq!(common.unwrap().names, ["client-7"]);
    }

    #[test]
    fn a_common_name_does_not_count_beside_alternative_names() {
        let both = facts(&certificate(|params| {
            params.distinguished_name.push(DnType::CommonName, "b.example");
        }));
        assert_eq!(both.unwrap().names, ["a.example"]);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = facts(&bytes);
        }

        #[test]
        fn no_damage_panics(at in 0..400_usize, byte in any::<u8>(), cut in 0..400_usize) {
            thread_local! { static GOOD: Vec<u8> = certificate(|_| {}); }
            let mut damaged = GOOD.with(Clone::clone);
            let length = damaged.len();
            damaged[at % length] = byte;
            let _ = facts(&damaged);
            let _ = facts(&damaged[..cut % length]);
        }
    }
}
