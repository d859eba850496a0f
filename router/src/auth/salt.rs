//! Cache salts, which separate prefix caches. An engine shares cached blocks only between requests with the same
//! `cache_salt`. A client that could choose another's salt could find out prompts by timing. So the router sets
//! the salt: a keyed hash of the tenant and of the client's own salt. The client's salt can therefore only divide
//! a tenant's cache further.

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

/// The secret from which salts are derived.
#[derive(Clone)]
pub(crate) struct SaltKey([u8; 32]);

impl SaltKey {
    /// Derives a key from a secret of any length. `purpose` separates keys that are derived from one secret.
    pub(crate) fn derived(purpose: &str, secret: &[u8]) -> Self {
        let mut mac = keyed(secret);
        mac.update(purpose.as_bytes());
        Self(mac.finalize().into_bytes().into())
    }

    /// The salt of a tenant's request: 64 hexadecimal digits.
    pub(crate) fn salt(&self, tenant: &str, own: Option<&str>) -> String {
        let mut mac = keyed(&self.0);
        // The length comes first, so that no pair of tenant and salt equals another tenant's.
        mac.update(&(tenant.len() as u64).to_be_bytes());
        mac.update(tenant.as_bytes());
        if let Some(own) = own {
            mac.update(&[1]);
            mac.update(own.as_bytes());
        }
        super::keys::hex(&mac.finalize().into_bytes())
    }
}

impl std::fmt::Debug for SaltKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SaltKey")
    }
}

fn keyed(secret: &[u8]) -> Hmac<Sha256> {
    // HMAC never refuses a key of this length.
    let key: [u8; 32] = Sha256::digest(secret).into();
    Hmac::<Sha256>::new_from_slice(&key).expect("HMAC takes keys of every length")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_are_apart_by_tenant_by_own_salt_and_by_secret() {
        let key = SaltKey::derived("salt", b"secret");
        let all = [
            key.salt("a", None),
            key.salt("b", None),
            key.salt("a", Some("")),
            key.salt("a", Some("b")),
            key.salt("ab", None),
            key.salt("b", Some("a")),
            SaltKey::derived("salt", b"other").salt("a", None),
            SaltKey::derived("other", b"secret").salt("a", None),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert_eq!(key.salt("a", Some("x")), key.salt("a", Some("x")));
        assert_eq!(all[0].len(), 64);
    }
}
