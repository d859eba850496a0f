//! The cluster's shared secret.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Shortest secret, in bytes: 128 bits that cannot be guessed offline from one recorded handshake.
pub(crate) const SECRET_MIN_BYTES: usize = 16;

/// The secret of all engines of a cluster, and during a rotation a previous one. Cheap to clone; never printed.
#[derive(Clone)]
pub struct Secret {
    current: Arc<[u8]>,
    /// Accepted beside the current one.
    previous: Option<Arc<[u8]>>,
}

/// A secret of fewer than 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cluster secret has {0} bytes, expected at least {SECRET_MIN_BYTES}")]
pub struct SecretTooShort(pub usize);

impl Secret {
    /// A secret of at least 16 bytes.
    ///
    /// # Errors
    /// [`SecretTooShort`] with the actual length.
    pub fn new(bytes: &[u8]) -> Result<Self, SecretTooShort> {
        if bytes.len() < SECRET_MIN_BYTES {
            return Err(SecretTooShort(bytes.len()));
        }
        Ok(Self { current: bytes.into(), previous: None })
    }

    /// Also accepts a previous secret of at least 16 bytes.
    ///
    /// # Errors
    /// [`SecretTooShort`] with the actual length.
    pub fn with_previous(self, bytes: &[u8]) -> Result<Self, SecretTooShort> {
        Ok(Self { previous: Some(Self::new(bytes)?.current), ..self })
    }

    /// The accepted secrets, the current one first.
    pub fn accepted(&self) -> impl Iterator<Item = &[u8]> {
        [Some(&self.current), self.previous.as_ref()].into_iter().flatten().map(AsRef::as_ref)
    }

    /// The accepted secret, alone, to whose code for these parts the bytes belong. The bytes may be the beginning of
    /// the code. Every secret is compared, each in constant time.
    pub(crate) fn maker_of(&self, parts: &[&[u8]], code: &[u8]) -> Option<Self> {
        let made_with = |key: &[u8]| mac(key, parts).verify_truncated_left(code).is_ok();
        let makers = self
            .accepted()
            .filter(|key| made_with(key))
            .map(|key| Self { current: key.into(), previous: None });
        makers.reduce(|first, _| first)
    }
    /// An authentication code: HMAC-SHA256 over the concatenated parts. The first part names the purpose. At most one
    /// part may have a variable length.
    #[must_use]
    pub fn authenticate(&self, parts: &[&[u8]]) -> [u8; 32] {
        mac(&self.current, parts).finalize().into_bytes().into()
    }

    /// Whether a code of an accepted secret belongs to these parts; compared in constant time.
    #[must_use]
    pub fn is_authentic(&self, parts: &[&[u8]], code: &[u8; 32]) -> bool {
        self.maker_of(parts, code).is_some()
    }
}

/// HMAC-SHA256 over the parts, ready to be sent or compared (comparison is in constant time).
fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    for part in parts {
        mac.update(part);
    }
    mac
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_secret_is_refused_and_none_is_printed() {
        assert_eq!(Secret::new(b"short").err(), Some(SecretTooShort(5)));
        let secret = Secret::new(b"sixteen bytes is").expect("long enough");
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        assert_eq!(secret.with_previous(b"short").err(), Some(SecretTooShort(5)));
    }

    #[test]
    fn codes_of_both_secrets_are_authentic_and_the_current_one_makes_them() {
        let secret = |text: &[u8]| Secret::new(text).expect("long enough");
        let (old, new) = (secret(b"the previous secret"), secret(b"the current secret"));
        let both = new.clone().with_previous(b"the previous secret").expect("long enough");
        assert_eq!(both.accepted().collect::<Vec<_>>(), [&b"the current secret"[..], b"the previous secret"]);
        let parts = [&b"purpose"[..], b"part"];
        assert_eq!(both.authenticate(&parts), new.authenticate(&parts));
        for one in [&old, &new] {
            let code = one.authenticate(&parts);
            assert!(both.is_authentic(&parts, &code) && !both.is_authentic(&parts[..1], &code));
            let maker = both.maker_of(&parts, &code[..8]).expect("one of both");
            assert!(maker.accepted().eq(one.accepted()), "the other one is left out");
        }
        assert!(!both.is_authentic(&parts, &secret(b"the secret of others").authenticate(&parts)));
        assert!(both.maker_of(&parts, b"").is_none());
    }
}
