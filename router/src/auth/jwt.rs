//! Tokens (JWT, RFC 7519) of issuers, beside API keys.
//!
//! ```text
//!  token ─▶ verified lately? ─▶ read ─▶ issuer's entry ─▶ key by id ─▶ signature and claims ─▶ Identity
//!               │ yes                       │ 401          │ unknown: one fetch, then 401; no or older keys: 503
//!               └──────────────────────────────────────────────────────────────────────────▶ Identity
//! ```
//!
//! Invariants:
//! - The algorithm is the key's own and asymmetric. A token chooses among the keys of its issuer and nothing else.
//! - A token is neither stored, logged nor repeated in an error.
//! - Signature checks, waits for keys, remembered tokens and tenants are bounded.

mod fetch;
mod key_set;
pub(super) mod key_source;
mod signature;
mod token;
mod token_error;
mod verified;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use baton_openai::{ApiError, Challenge, Code};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::table::KeyTable;
use super::{AuthError, Identity, TenantRegistry, since_1970_s};
use crate::config::JwtConfig;
use crate::metrics::tenants::TokenCheckResult;
use crate::tls::service::ServiceTls;
use key_set::KeySet;
use key_source::{CurrentKeys, KeySource};
pub(super) use token::is_token;
use token::{Grant, UnverifiedToken};
use token_error::TokenError;
use verified::{VerifiedToken, VerifiedTokens};

/// Largest file of keys: that of a fetched document.
const KEYS_FILE_BYTES_MAX: u64 = 256 << 10;
/// Maximum checks that wait for a processor. More are refused with 503.
const WAITING_MAX: usize = 1024;
/// The delay before a retry of a request whose token could not be checked.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Checks the tokens of all issuers of one configuration.
pub(super) struct TokenChecker {
    entries: Vec<IssuerEntry>,
    verified: Mutex<VerifiedTokens>,
    /// Signature checks at once: half of the processors, so that forged tokens leave half to other requests.
    checks: Semaphore,
    waiting: Semaphore,
}

struct IssuerEntry {
    config: JwtConfig,
    source: Arc<KeySource>,
}

/// Why a token grants nothing.
enum CheckError {
    Refused(TokenError),
    /// No keys, or none that certainly include the token's. The wait is that until the next fetch may begin.
    NoKeys(Duration),
    Busy,
    /// Too many tenants.
    Full,
}

impl From<TokenError> for CheckError {
    fn from(error: TokenError) -> Self {
        Self::Refused(error)
    }
}

impl TokenChecker {
    /// # Errors
    /// [`AuthError`]: a file of keys or of root certificates is invalid.
    pub(super) fn build(configs: &[JwtConfig], registry: &TenantRegistry) -> Result<Option<Self>, AuthError> {
        if configs.is_empty() {
            return Ok(None);
        }
        signature::install();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let entries = configs.iter().map(|config| {
            Ok::<_, AuthError>(IssuerEntry { config: config.clone(), source: source(config, registry)? })
        });
        Ok(Some(Self {
            entries: entries.collect::<Result<_, _>>()?,
            verified: Mutex::default(),
            checks: Semaphore::new(processors.div_ceil(2)),
            waiting: Semaphore::new(WAITING_MAX),
        }))
    }

    /// The identity of a token's sender.
    ///
    /// # Errors
    /// 401 if the token is not valid here, 503 if that cannot be found out.
    pub(super) async fn check(
        &self,
        token: &str,
        table: &ArcSwap<KeyTable>,
        registry: &TenantRegistry,
    ) -> Result<Arc<Identity>, ApiError> {
        let hash = verified::hash(token);
        let metrics = registry.metrics();
        // The epoch is read before the table: a table that is replaced meanwhile begins another epoch.
        let (known, epoch) = {
            let mut verified = self.verified.lock();
            (verified.get(&hash, since_1970_s()), verified.epoch())
        };
        if let Some(known) = known {
            let keys = self.entries[known.issuer].source.current();
            if keys.is_some_and(|keys| keys.version == known.keys_version) {
                metrics.count_token_check(TokenCheckResult::Cached);
                return Ok(known.identity);
            }
        }
        let checked = self.verify(token, &table.load_full(), registry).await;
        let (result, error) = match checked {
            Ok(verified) => {
                metrics.count_token_check(TokenCheckResult::Verified);
                let identity = Arc::clone(&verified.identity);
                self.verified.lock().insert(epoch, hash, verified);
                return Ok(identity);
            }
            Err(CheckError::Refused(error)) => {
                metrics.count_unauthorized(error.reason());
                (TokenCheckResult::Refused, refusal(error))
            }
            Err(CheckError::NoKeys(wait)) => {
                let message =
                    "the keys of the token's issuer are unavailable, or older than the token may be";
                (TokenCheckResult::NoKeys, ApiError::unavailable(message, wait.max(RETRY_AFTER)))
            }
            Err(CheckError::Busy) => {
                let message = "the router checks too many tokens at once";
                (TokenCheckResult::Busy, ApiError::unavailable(message, RETRY_AFTER))
            }
            Err(CheckError::Full) => {
                let message = "the router serves too many tenants at once";
                (TokenCheckResult::Busy, ApiError::unavailable(message, RETRY_AFTER))
            }
        };
        metrics.count_token_check(result);
        Err(error)
    }

    /// Removes what depends on tenants' limits, which have changed.
    pub(super) fn forget(&self) {
        self.verified.lock().clear();
    }

    async fn verify(
        &self,
        token: &str,
        table: &KeyTable,
        registry: &TenantRegistry,
    ) -> Result<VerifiedToken, CheckError> {
        let token = UnverifiedToken::read(token)?;
        let issuer = token.entry(self.entries.iter().map(|entry| &entry.config))?;
        let IssuerEntry { config, source } = &self.entries[issuer];
        token.is_current(config.leeway_s, since_1970_s())?;
        let keys = usable_keys(source, &token, config.leeway_s).await?;
        let claims = {
            let _waiting = self.waiting.try_acquire().map_err(|_| CheckError::Busy)?;
            // An error would mean that the semaphore is closed, which never happens.
            let _check = self.checks.acquire().await.map_err(|_| CheckError::Busy)?;
            token.verify(config, keys.set.find(token.key_id(), token.algorithm())?)?
        };
        let Grant { tenant, models, priority_max, until_s } = Grant::read(&claims, config)?;
        let tenant = match table.by_tenant.get(tenant.as_str()) {
            Some(identity) => Arc::clone(&identity.tenant),
            None => {
                let (weight, limits) = table.terms(&tenant).unwrap_or((1, &config.limits));
                registry.tenant(&tenant, weight, limits).map_err(|_| CheckError::Full)?
            }
        };
        let identity = Identity::of_token(config.issuer.clone(), tenant, priority_max, models);
        Ok(VerifiedToken { identity: Arc::new(identity), until_s, issuer, keys_version: keys.version })
    }
}

/// The keys of the issuer, after a fetch if the token's key is not among them. A key id is unknown for certain only
/// among keys that were asked for after the request began, or after the token was issued: its key was published then.
async fn usable_keys(
    source: &KeySource,
    token: &UnverifiedToken<'_>,
    leeway_s: u64,
) -> Result<CurrentKeys, CheckError> {
    let lacks_key = |keys: &CurrentKeys| {
        keys.set.find(token.key_id(), token.algorithm()).map(drop) == Err(TokenError::KeyId)
    };
    let began = Instant::now();
    let age = Duration::from_secs(token.age_s(leeway_s, since_1970_s()));
    let published = began.checked_sub(age).unwrap_or(began);
    if let Some(keys) = source.current().filter(|keys| !lacks_key(keys)) {
        return Ok(keys);
    }
    source.await_fetch().await;
    // Of an issuer with several keys, no later set makes a token without a key id valid.
    let is_certain = |keys: &CurrentKeys| token.key_id().is_none() || keys.are_newer_than(published);
    match source.current() {
        Some(keys) if !lacks_key(&keys) => Ok(keys),
        Some(keys) if is_certain(&keys) => Err(TokenError::KeyId.into()),
        _ => Err(CheckError::NoKeys(source.pause())),
    }
}

fn source(config: &JwtConfig, registry: &TenantRegistry) -> Result<Arc<KeySource>, AuthError> {
    let metrics = registry.metrics().issuer(&config.issuer);
    if let Some(file) = &config.jwks_file {
        return Ok(KeySource::of_file(config, read_file(file)?, metrics));
    }
    let tls = match &config.ca_file {
        Some(file) => Some(ServiceTls::new(Some(file.as_path()))?),
        // Without roots of the system, an issuer on loopback still works.
        None => ServiceTls::new(None).ok(),
    };
    Ok(registry.key_source(config, tls, metrics))
}

fn read_file(file: &Path) -> Result<KeySet, AuthError> {
    let text = crate::config::read::named_file::read_text(file, KEYS_FILE_BYTES_MAX);
    let set = text
        .map_err(|error| error.to_string())
        .and_then(|text| KeySet::read(text.as_bytes()).map_err(|error| error.to_string()));
    set.map_err(|what| AuthError::KeySet { file: file.to_owned(), what })
}

/// 401, with what a client can correct. It repeats nothing of the token.
fn refusal(error: TokenError) -> ApiError {
    let why = match error {
        TokenError::Malformed => "it cannot be read",
        TokenError::Issuer => "its issuer is not accepted here",
        TokenError::Audience => "it is for another audience",
        TokenError::Algorithm => "its algorithm is not that of its key, or not accepted here",
        TokenError::KeyId => "its issuer has no key with its key id",
        TokenError::Signature => "its signature is wrong",
        TokenError::Expired => "it has expired",
        TokenError::NotYetValid => "it is not valid yet",
        TokenError::Claims => "a claim is missing or invalid",
    };
    let mut refused = ApiError::of(Code::InvalidApiKey, format!("the token is not valid: {why}"));
    refused.challenge = Some(Challenge::InvalidToken);
    refused
}
