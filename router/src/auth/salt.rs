//! Whose prefix cache a request uses. An engine shares cached blocks only between requests with the same
//! `cache_salt`; who can choose another's salt can find out by timing what the other asked. So the router sets it:
//! a keyed hash of the tenant and of the client's own salt, which therefore can only divide a tenant's cache further.

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

/// The secret from which salts are made.
#[derive(Clone)]
pub(crate) struct SaltKey([u8; 32]);

impl SaltKey {
    /// From a secret of whatever length. `purpose` keeps apart keys that are made from one secret.
    pub(crate) fn derived(purpose: &str, secret: &[u8]) -> Self {
        let mut mac = keyed(secret);
        mac.update(purpose.as_bytes());
        Self(mac.finalize().into_bytes().into())
    }

    /// The salt of a tenant's request: 64 hexadecimal digits.
    pub(crate) fn salt(&self, tenant: &str, own: Option<&str>) -> String {
        let mut mac = keyed(&self.0);
        // The length first: no tenant and salt run together into another tenant's.
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
    // Hashed first, so that a key of any length is one of a length that is never refused.
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
