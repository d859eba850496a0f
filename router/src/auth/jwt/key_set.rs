//! An issuer's public keys (JWKS, RFC 7517), read from its document. Pure.

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, PublicKeyUse};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey};
use serde::Deserialize;

use super::token_error::TokenError;

/// Maximum keys of an issuer. Issuers publish two to ten.
const KEYS_MAX: usize = 100;
/// Minimum size of an RSA modulus: 2,048 bits (RFC 7518, section 3.3), as base64 without padding.
const MODULUS_CHARS_MIN: usize = 342;

/// The keys with which an issuer signs.
#[derive(Debug, Default)]
pub(super) struct KeySet(Vec<IssuerKey>);

/// A key, and the algorithms that may be used with it.
#[derive(Debug)]
pub(super) struct IssuerKey {
    jwk: Jwk,
    algorithms: Vec<Algorithm>,
    pub(super) decoding: DecodingKey,
}

/// Why a document is no set of keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum KeySetError {
    /// The document is no JWKS.
    #[error("not a JSON Web Key Set")]
    Format,
    /// Too many keys.
    #[error("{0} keys, of at most {KEYS_MAX}")]
    TooMany(usize),
    /// No key can be used.
    #[error("no usable key in it: RSA from 2048 bits, P-256, P-384 or Ed25519, for signatures")]
    Empty,
}

#[derive(Deserialize)]
struct KeyDocument {
    keys: Vec<serde_json::Value>,
}

impl KeySet {
    /// Reads a document. Keys that cannot be used are skipped, as RFC 7517 requires.
    ///
    /// # Errors
    /// [`KeySetError`].
    pub(super) fn read(document: &[u8]) -> Result<Self, KeySetError> {
        let KeyDocument { keys } = serde_json::from_slice(document).map_err(|_| KeySetError::Format)?;
        if keys.len() > KEYS_MAX {
            return Err(KeySetError::TooMany(keys.len()));
        }
        let keys: Vec<_> = keys.into_iter().filter_map(IssuerKey::read).collect();
        if keys.is_empty() { Err(KeySetError::Empty) } else { Ok(Self(keys)) }
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The key of a token. A token without a key id needs an issuer with one key.
    ///
    /// # Errors
    /// [`TokenError::KeyId`], or [`TokenError::Algorithm`] if the key has another one.
    pub(super) fn find(&self, id: Option<&str>, algorithm: Algorithm) -> Result<&IssuerKey, TokenError> {
        let named: Vec<_> = match (id, &self.0[..]) {
            (None, [only]) => vec![only],
            (None, _) => Vec::new(),
            (Some(id), keys) => {
                keys.iter().filter(|key| key.jwk.common.key_id.as_deref() == Some(id)).collect()
            }
        };
        if named.is_empty() {
            return Err(TokenError::KeyId);
        }
        named.into_iter().find(|key| key.algorithms.contains(&algorithm)).ok_or(TokenError::Algorithm)
    }

    /// Whether every key of an earlier set is in this one, unchanged.
    pub(super) fn contains(&self, earlier: &Self) -> bool {
        earlier.0.iter().all(|key| self.0.iter().any(|own| own.jwk == key.jwk))
    }
}

impl IssuerKey {
    fn read(value: serde_json::Value) -> Option<Self> {
        let jwk: Jwk = serde_json::from_value(value).ok()?;
        if jwk.common.public_key_use.as_ref().is_some_and(|of| *of != PublicKeyUse::Signature) {
            return None;
        }
        let possible: &[Algorithm] = match &jwk.algorithm {
            AlgorithmParameters::RSA(key) if key.n.len() >= MODULUS_CHARS_MIN => {
                AlgorithmFamily::Rsa.algorithms()
            }
            AlgorithmParameters::EllipticCurve(key) => match key.curve {
                EllipticCurve::P256 => &[Algorithm::ES256],
                EllipticCurve::P384 => &[Algorithm::ES384],
                _ => return None,
            },
            AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
                &[Algorithm::EdDSA]
            }
            _ => return None,
        };
        let algorithms = match &jwk.common.key_algorithm {
            None => possible.to_vec(),
            Some(own) => {
                possible.iter().copied().filter(|algorithm| KeyAlgorithm::from(*algorithm) == *own).collect()
            }
        };
        let decoding = DecodingKey::from_jwk(&jwk).ok()?;
        (!algorithms.is_empty()).then_some(Self { jwk, algorithms, decoding })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(keys: &Value) -> Result<KeySet, KeySetError> {
        KeySet::read(json!({"keys": keys}).to_string().as_bytes())
    }

    fn ed(id: &str) -> Value {
        json!({"kty": "OKP", "crv": "Ed25519", "kid": id, "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"})
    }

    fn rsa(id: &str, bits: usize) -> Value {
        json!({"kty": "RSA", "kid": id, "use": "sig", "n": "g".repeat((bits / 8 * 4).div_ceil(3)), "e": "AQAB"})
    }

    #[test]
    fn keys_that_cannot_sign_tokens_are_skipped() {
        let mut encryption = ed("enc");
        encryption["use"] = "enc".into();
        let secret = json!({"kty": "oct", "kid": "oct", "alg": "HS256", "k": "AAAA"});
        let mut hmac = rsa("hmac", 2048);
        hmac["alg"] = "HS256".into();
        let unusable =
            [encryption, secret, hmac, rsa("weak", 1024), json!({"kty": "new"}), json!({}), json!(1)];
        let keys: Vec<_> = unusable.iter().cloned().chain([ed("a"), rsa("b", 2048)]).collect();
        let set = read(&Value::from(keys)).expect("two keys");
        assert_eq!(set.len(), 2);
        assert_eq!(read(&Value::from(unusable.to_vec())).err(), Some(KeySetError::Empty));
        assert!(set.find(Some("b"), Algorithm::PS512).is_ok());
        for id in ["enc", "oct", "hmac", "weak", "c", ""] {
            assert_eq!(set.find(Some(id), Algorithm::EdDSA).err(), Some(TokenError::KeyId), "{id}");
        }
    }

    #[test]
    fn the_algorithm_is_the_keys_own() {
        let mut one = rsa("a", 2048);
        one["alg"] = "RS256".into();
        let set = read(&json!([one, ed("b"), rsa("b", 2048)])).expect("keys");
        assert!(set.find(Some("a"), Algorithm::RS256).is_ok());
        for wrong in [Algorithm::RS384, Algorithm::PS256, Algorithm::HS256, Algorithm::EdDSA] {
            assert_eq!(set.find(Some("a"), wrong).err(), Some(TokenError::Algorithm), "{wrong:?}");
        }
        assert!(
            set.find(Some("b"), Algorithm::EdDSA).is_ok() && set.find(Some("b"), Algorithm::RS512).is_ok()
        );
    }

    #[test]
    fn only_an_issuer_with_one_key_needs_no_key_id() {
        let one = read(&json!([ed("a")])).expect("a key");
        assert!(one.find(None, Algorithm::EdDSA).is_ok());
        let two = read(&json!([ed("a"), ed("b")])).expect("two keys");
        assert_eq!(two.find(None, Algorithm::EdDSA).err(), Some(TokenError::KeyId));
        assert!(two.contains(&one) && !one.contains(&two));
    }

    #[test]
    fn other_documents_are_refused() {
        for wrong in ["", "[]", "{}", "{\"keys\": 1}", "<html>", "{\"keys\": [], "] {
            assert_eq!(KeySet::read(wrong.as_bytes()).err(), Some(KeySetError::Format), "{wrong}");
        }
        let many: Vec<_> = (0..101).map(|n| ed(&n.to_string())).collect();
        assert_eq!(read(&Value::from(many)).err(), Some(KeySetError::TooMany(101)));
    }
}
