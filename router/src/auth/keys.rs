//! API keys: generation, storage and comparison.
//!
//! Only SHA-256 hashes are stored. No slower hash is needed: a key is 256 random bits, so there is no dictionary
//! to try, and the hashes open nothing. Passwords would need a slow hash. Keys that people choose are passwords,
//! so `baton key new` generates keys.
//!
//! The lookup by the hash's first bytes leaks by its timing at most a part of the hash of what the client itself
//! sent. The rest is compared in constant time all the same.

use std::collections::HashMap;
use std::sync::Arc;

use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::message::random;

/// Prefix of every key, for scanners that look for leaked secrets.
const PREFIX: &str = "sk-baton-";
/// Anthropic's header of a key.
pub(crate) const X_API_KEY: &str = "x-api-key";
/// Maximum length of a key. Longer ones are not hashed.
const KEY_BYTES_MAX: usize = 512;

/// A new key. Its text is stored nowhere.
#[derive(Clone, Debug)]
pub struct NewKey {
    /// For the client: `Authorization: Bearer KEY`.
    pub key: String,
    /// For the configuration: `sha256:…`.
    pub hash: String,
}

impl NewKey {
    /// Generates a key from 256 bits of the kernel's random numbers.
    #[must_use]
    pub fn make() -> Self {
        let key = format!("{PREFIX}{}", hex(&random::bytes::<32>()));
        let hash = format!("sha256:{}", hex(&Sha256::digest(key.as_bytes())));
        Self { key, hash }
    }

    /// The entry of `auth.keys`, as YAML.
    #[must_use]
    pub fn entry(&self, id: &str, tenant: &str) -> String {
        // Every JSON string is a YAML string.
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        format!("- id: {}\n  hash: {}\n  tenant: {}\n", quoted(id), self.hash, quoted(tenant))
    }
}

/// Entries by the hash of a secret.
pub(crate) struct DigestMap<T>(HashMap<u64, DigestBucket<T>>);

/// Entries whose hashes begin alike: rarely more than one.
type DigestBucket<T> = Vec<([u8; 32], Arc<T>)>;

impl<T> Default for DigestMap<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> DigestMap<T> {
    /// Adds an entry. Returns `false` if the hash exists.
    pub(crate) fn insert(&mut self, digest: [u8; 32], entry: Arc<T>) -> bool {
        if self.at(&digest).is_some() {
            return false;
        }
        self.0.entry(first(&digest)).or_default().push((digest, entry));
        true
    }

    /// The entry of the secret.
    pub(crate) fn of(&self, secret: &str) -> Option<&Arc<T>> {
        if secret.len() > KEY_BYTES_MAX {
            return None;
        }
        self.at(&Sha256::digest(secret.as_bytes()).into())
    }

    fn at(&self, digest: &[u8; 32]) -> Option<&Arc<T>> {
        let entries = self.0.get(&first(digest))?;
        entries.iter().find(|(known, _)| bool::from(known.ct_eq(digest))).map(|(_, entry)| entry)
    }
}

/// The `Authorization` for a key in `x-api-key`, where Anthropic's clients send it. A request's own `Authorization`
/// precedes it. Of several keys none is valid.
pub(crate) fn bearer_of_api_key(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut keys = headers.get_all(X_API_KEY).iter();
    let key = keys.next()?;
    let key = if keys.next().is_some() { b"" } else { key.as_bytes() };
    let bearer = HeaderValue::from_bytes(&[b"Bearer ", key].concat()).ok()?;
    (!headers.contains_key(AUTHORIZATION)).then_some(bearer)
}

/// The bearer token of a request that has exactly one.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next()?.to_str().ok()?;
    if values.next().is_some() {
        return None;
    }
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes everything");
        text
    })
}

fn first(digest: &[u8; 32]) -> u64 {
    u64::from_be_bytes(digest[..8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_key_matches_its_hash_only() {
        let (new, other) = (NewKey::make(), NewKey::make());
        let config = format!("hash: {}\nid: a\ntenant: t\n", new.hash);
        let config: crate::config::KeyConfig = serde_saphyr::from_str(&config).expect("an entry");
        let mut keys = DigestMap::default();
        assert!(keys.insert(config.digest().expect("a hash"), Arc::new(7)));
        assert!(!keys.insert(config.digest().expect("a hash"), Arc::new(8)), "taken");
        assert_eq!(keys.of(&new.key).map(|n| **n), Some(7));
        let cut = &new.key[..new.key.len() - 1];
        for wrong in [other.key.as_str(), cut, "", new.hash.as_str(), &"x".repeat(100_000)] {
            assert!(keys.of(wrong).is_none());
        }
        assert_eq!(new.key.len(), PREFIX.len() + 64);
    }

    #[test]
    fn an_entry_is_valid_yaml_for_any_name() {
        let entry = NewKey::make().entry("a: #b\"", "t\n- x");
        let read: Vec<crate::config::KeyConfig> = serde_saphyr::from_str(&entry).expect("YAML");
        assert_eq!((read[0].id.as_str(), read[0].tenant.as_str()), ("a: #b\"", "t\n- x"));
    }

    #[test]
    fn anthropics_header_stands_for_a_bearer_token_unless_there_is_one() {
        let with = |fields: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in fields {
                headers.append(*name, value.parse().expect("a value"));
            }
            bearer_of_api_key(&headers)
        };
        assert_eq!(with(&[("x-api-key", "k")]).expect("a header"), "Bearer k");
        assert_eq!(with(&[("x-api-key", "k"), ("authorization", "Bearer a")]), None);
        assert_eq!(with(&[("x-api-key", "a"), ("x-api-key", "b")]).expect("a header"), "Bearer ");
        assert_eq!(with(&[]), None);
    }

    #[test]
    fn a_token_is_read_only_where_there_is_exactly_one() {
        let with = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(AUTHORIZATION, value.parse().expect("a value"));
            }
            bearer(&headers).map(str::to_owned)
        };
        assert_eq!(with(&["Bearer k"]).as_deref(), Some("k"));
        assert_eq!(with(&["bearer  k "]).as_deref(), Some("k"));
        for none in [&["k"][..], &["Basic k"], &["Bearer "], &["Bearer"], &["Bearer a", "Bearer b"], &[]] {
            assert_eq!(with(none), None, "{none:?}");
        }
    }
}
