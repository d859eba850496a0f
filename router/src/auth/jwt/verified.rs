//! Tokens that were verified lately. A client sends one token for hours, so its signature is checked once. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::auth::Identity;

/// Entries of one half. Two halves of 8,192 entries are about 2 MiB, and identities.
const HALF_MAX: usize = 8192;

/// A verified token.
#[derive(Clone)]
pub(super) struct VerifiedToken {
    pub identity: Arc<Identity>,
    /// The end of the token, in seconds since 1970.
    pub until_s: u64,
    /// The entry of the issuer.
    pub issuer: usize,
    /// The version of the issuer's keys. It changes when a key is withdrawn.
    pub keys_version: u64,
}

/// Verified tokens by hash, those of late use: a full young half becomes the old half, and the old half is dropped.
#[derive(Default)]
pub(super) struct VerifiedTokens {
    young: HashMap<[u8; 32], VerifiedToken>,
    old: HashMap<[u8; 32], VerifiedToken>,
    /// Increases when all are forgotten.
    epoch: u64,
}

/// The name of a token in [`VerifiedTokens`]. The token itself is not stored.
pub(super) fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

impl VerifiedTokens {
    pub(super) fn get(&mut self, hash: &[u8; 32], now_s: u64) -> Option<VerifiedToken> {
        let found = match self.young.get(hash) {
            Some(found) => found.clone(),
            None => {
                let found = self.old.remove(hash)?;
                self.insert(self.epoch, *hash, found.clone());
                found
            }
        };
        (now_s <= found.until_s).then_some(found)
    }

    /// The epoch of a check that begins now.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Remembers a token whose check began in this epoch. That of an earlier one used limits that have changed.
    pub(super) fn insert(&mut self, epoch: u64, hash: [u8; 32], token: VerifiedToken) {
        if epoch != self.epoch {
            return;
        }
        if self.young.len() >= HALF_MAX {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(hash, token);
    }

    pub(super) fn clear(&mut self) {
        *self = Self { epoch: self.epoch.wrapping_add(1), ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::TenantRegistry;
    use crate::metrics::Metrics;

    fn token(until_s: u64) -> VerifiedToken {
        let registry = TenantRegistry::new(Arc::clone(&Metrics::new().tenants));
        let tenant = registry.tenant("t", 1, &Default::default()).unwrap_or_else(|_| panic!("room"));
        let identity = Arc::new(Identity::of_token("i".into(), tenant, Default::default(), None));
        VerifiedToken { identity, until_s, issuer: 0, keys_version: 1 }
    }

    #[test]
    fn a_token_is_remembered_until_it_expires() {
        let mut tokens = VerifiedTokens::default();
        tokens.insert(0, hash("a"), token(10));
        assert!(tokens.get(&hash("a"), 10).is_some());
        assert!(tokens.get(&hash("a"), 11).is_none() && tokens.get(&hash("b"), 10).is_none());
    }

    #[test]
    fn a_check_that_began_before_a_change_of_limits_is_not_remembered() {
        let mut tokens = VerifiedTokens::default();
        let before = tokens.epoch();
        tokens.clear();
        tokens.insert(before, hash("a"), token(10));
        assert!(tokens.get(&hash("a"), 0).is_none(), "its limits were replaced meanwhile");
        tokens.insert(tokens.epoch(), hash("a"), token(10));
        assert!(tokens.get(&hash("a"), 0).is_some());
    }

    #[test]
    fn tokens_in_use_survive_and_the_table_is_bounded() {
        let (mut tokens, token) = (VerifiedTokens::default(), token(10));
        tokens.insert(0, hash("used"), token.clone());
        tokens.insert(0, hash("unused"), token.clone());
        for n in 0..3 * HALF_MAX {
            tokens.insert(0, hash(&n.to_string()), token.clone());
            assert!(tokens.get(&hash("used"), 0).is_some(), "after {n}");
            assert!(tokens.young.len() + tokens.old.len() <= 2 * HALF_MAX);
        }
        assert!(tokens.get(&hash("unused"), 0).is_none());
    }
}
