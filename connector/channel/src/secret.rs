//! The cluster's shared secret.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Shortest secret, in bytes: 128 bits that cannot be guessed offline from one recorded handshake.
pub(crate) const SECRET_MIN_BYTES: usize = 16;

/// The secret of all engines of a cluster. Cheap to clone; never printed.
#[derive(Clone)]
pub struct Secret(Arc<[u8]>);

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
        Ok(Self(bytes.into()))
    }

    /// HMAC-SHA256 over the parts, ready to be sent or compared (comparison is in constant time).
    pub(crate) fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes a key of any length");
        for part in parts {
            mac.update(part);
        }
        mac
    }
}

impl Secret {
    /// An authentication code: HMAC-SHA256 over the concatenated parts. The first part names the purpose. At most one
    /// part may have a variable length.
    #[must_use]
    pub fn authenticate(&self, parts: &[&[u8]]) -> [u8; 32] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Whether a code belongs to these parts; compared in constant time.
    #[must_use]
    pub fn is_authentic(&self, parts: &[&[u8]], code: &[u8; 32]) -> bool {
        self.mac(parts).verify_slice(code).is_ok()
    }
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
    }
}
