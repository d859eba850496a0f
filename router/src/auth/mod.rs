//! Authentication and limits: API keys, tokens, client certificates, tenants and their limits.
//!
//! ```text
//!  Authorization: Bearer KEY ─┐
//!  client certificate ────────┼▶ Auth::identify ─▶ Identity ── begin ─▶ Permit ── take_tokens ─▶ the queue
//!  Bearer TOKEN ─▶ jwt ───────┘        │ 401                     │ 429               │ 429
//!                                  KeyTable           Meter of the key, Meter of its tenant, or `shared`
//! ```
//!
//! [`Auth`] is part of a generation. Its table is replaced when the keys file changes. [`TenantRegistry`] outlives
//! both: a reload refills no bucket and forgets no request in flight, unless the limit itself was changed.
//!
//! Invariants:
//! - Without a known, unexpired key, a valid token or a named certificate, the router reads only the head of a request.
//!   While it waits for an issuer's keys, it reads at most 16 KiB behind the head.
//! - A limit that refuses has taken nothing from any other limit.
//! - A client's credentials stay in this module: engines receive the router's own.

pub(crate) mod admin;
mod bucket;
mod jwt;
mod keys;
mod limits;
mod salt;
mod shared;
mod table;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use baton_openai::{ApiError, Code};
use hyper::header::HeaderMap;

use crate::config::file_watch::FileWatch;
use crate::config::{AuthConfig, ConfigError, Priority, RateLimitsConfig};
use crate::metrics::tenants::{TenantCounters, UnauthorizedReason};
use crate::tls::TlsError;

use bucket::Meter;
use jwt::TokenChecker;
pub use keys::NewKey;
pub(crate) use keys::{X_API_KEY, bearer, bearer_of_api_key};
pub(crate) use limits::Permit;
use salt::SaltKey;
use shared::SharedLimits;
use table::KeyTable;
pub(crate) use table::TenantRegistry;

/// Why keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// A file cannot be read or is not valid.
    #[error(transparent)]
    File(#[from] ConfigError),
    /// A name is used twice.
    #[error("auth: the {what} `{name}` is given twice")]
    Twice {
        /// What the name belongs to.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// Two keys have one hash: they are the same key.
    #[error("auth: the key `{0}` has the hash of another key")]
    SameKey(String),
    /// The secret for salts is too short.
    #[error("auth.cache_salt_file: the secret must have 16 bytes at least")]
    ShortSecret,
    /// A file with an issuer's keys cannot be used.
    #[error("auth.jwt: {file}: {what}", file = .file.display())]
    KeySet {
        /// The file.
        file: PathBuf,
        /// The problem.
        what: String,
    },
    /// The address of the server of shared limits is invalid, which validation excludes.
    #[error("auth.shared_limits.url is no address")]
    StoreAddress,
    /// Root certificates cannot be used.
    #[error("auth: {0}")]
    Roots(#[from] TlsError),
}

/// The keys of one generation.
pub(crate) struct Auth {
    table: ArcSwap<KeyTable>,
    config: AuthConfig,
    watch: FileWatch,
    salts: SaltKey,
    tokens: Option<TokenChecker>,
    shared: Option<Arc<SharedLimits>>,
}

/// The credentials of a request.
pub(crate) enum Credentials {
    /// A known key or certificate.
    Known(Arc<Identity>),
    /// A token, for [`Auth::check`].
    Token(String),
}

/// The key, token or certificate that authenticated a request.
pub(crate) struct Identity {
    /// Name of the key or the certificate, or the issuer of the token.
    pub name: String,
    pub tenant: Arc<Tenant>,
    pub priority_max: Priority,
    /// `None`: all.
    models: Option<Vec<String>>,
    expires_s: Option<u64>,
    meter: Arc<Meter>,
}

/// A tenant: its requests share a queue, limits and a prefix cache.
pub(crate) struct Tenant {
    pub name: Arc<str>,
    pub id: TenantId,
    pub weight: u32,
    meter: Arc<Meter>,
    pub counters: TenantCounters,
}

impl Auth {
    /// # Errors
    /// [`AuthError`] names the problem.
    pub(crate) fn build(
        config: &AuthConfig,
        cluster_secret: Option<&str>,
        registry: &TenantRegistry,
    ) -> Result<Self, AuthError> {
        let files: Vec<PathBuf> = config.keys_file.iter().cloned().collect();
        let watch = FileWatch::new(files);
        let table = KeyTable::build(config, registry)?;
        let salts = match (&config.cache_salt_file, cluster_secret) {
            (Some(path), _) => {
                let secret = crate::config::read::first_line_of("auth.cache_salt_file", path)?;
                let secret = secret.filter(|secret| secret.len() >= 16);
                SaltKey::derived("cache salt", secret.ok_or(AuthError::ShortSecret)?.as_bytes())
            }
            (None, Some(secret)) => SaltKey::derived("cache salt", secret.as_bytes()),
            (None, None) => registry.salts(),
        };
        let tokens = TokenChecker::build(&config.jwt, registry)?;
        let shared =
            config.shared_limits.as_ref().map(|shared| registry.shared_limits(shared)).transpose()?;
        Ok(Self { table: ArcSwap::from_pointee(table), config: config.clone(), watch, salts, tokens, shared })
    }

    /// Authenticates a request with a key or a certificate. A token needs [`Self::check`] too.
    ///
    /// # Errors
    /// 401, without the reason for which the key was rejected.
    pub(crate) fn identify(
        &self,
        headers: &HeaderMap,
        certificate: &[String],
        registry: &TenantRegistry,
    ) -> Result<Credentials, ApiError> {
        let table = self.table.load();
        let unknown = |why| {
            registry.metrics().count_unauthorized(why);
            Err(ApiError::unauthorized())
        };
        let found = match keys::bearer(headers) {
            Some(token) if self.tokens.is_some() && jwt::is_token(token) => {
                return Ok(Credentials::Token(token.to_owned()));
            }
            // A key overrides a certificate, because it is more specific.
            Some(token) => table.by_hash.of(token),
            None if headers.contains_key(hyper::header::AUTHORIZATION) => None,
            None => match certificate.iter().find_map(|name| table.by_certificate.get(name)) {
                None => return unknown(UnauthorizedReason::Missing),
                found => found,
            },
        };
        let Some(identity) = found else { return unknown(UnauthorizedReason::Key) };
        if identity.expires_s.is_some_and(|at| since_1970_s() >= at) {
            return unknown(UnauthorizedReason::Expired);
        }
        Ok(Credentials::Known(Arc::clone(identity)))
    }

    /// The identity behind credentials.
    ///
    /// # Errors
    /// 401 for a token that is not valid here, 503 for one that cannot be checked now.
    pub(crate) async fn check(
        &self,
        credentials: Credentials,
        registry: &TenantRegistry,
    ) -> Result<Arc<Identity>, ApiError> {
        match (credentials, &self.tokens) {
            (Credentials::Known(identity), _) => Ok(identity),
            (Credentials::Token(_), None) => Err(ApiError::unauthorized()),
            (Credentials::Token(token), Some(tokens)) => {
                // Boxed, because requests with keys need no memory for it.
                Box::pin(tokens.check(&token, &self.table, registry)).await
            }
        }
    }

    /// The limits that several routers share.
    pub(crate) fn shared(&self) -> Option<&Arc<SharedLimits>> {
        self.shared.as_ref()
    }

    /// An identity of this tenant.
    pub(crate) fn of_tenant(&self, name: &str) -> Option<Arc<Identity>> {
        self.table.load().by_tenant.get(name).cloned()
    }

    /// Called when this generation takes effect.
    pub(crate) fn activate(&self, registry: &TenantRegistry) {
        registry.keep(&self.table.load());
    }

    /// The salt that separates a tenant's cached blocks from those of other tenants.
    pub(crate) fn cache_salt(&self, identity: &Identity, own: Option<&str>) -> String {
        self.salts.salt(&identity.tenant.name, own)
    }

    /// Reads the keys file again if it has changed. An invalid file changes nothing.
    pub(crate) fn refresh(&self, registry: &TenantRegistry) {
        if !self.watch.has_changed() {
            return;
        }
        let read = KeyTable::build(&self.config, registry);
        registry.metrics().count_reload(read.is_ok());
        match read {
            Ok(table) => {
                tracing::info!(event = "keys_file_reloaded", keys = table.len(), "keys file reloaded");
                registry.keep(&table);
                self.table.store(Arc::new(table));
                self.tokens.iter().for_each(TokenChecker::forget);
            }
            Err(error) => tracing::error!(
                event = "keys_file_reload_failed", %error,
                "cannot reload the keys file, the old keys stay in effect"
            ),
        }
    }
}

impl Identity {
    /// The identity of a token's sender: its tenant has limits, and itself has none.
    fn of_token(
        issuer: String,
        tenant: Arc<Tenant>,
        priority_max: Priority,
        models: Option<Vec<String>>,
    ) -> Self {
        let meter = Arc::new(Meter::new(&issuer, &RateLimitsConfig::default()));
        Self { name: issuer, tenant, priority_max, models, expires_s: None, meter }
    }

    /// Whether this identity may use a model. `names` returns whether a configured name means the model.
    pub(crate) fn may_use(&self, names: impl Fn(&str) -> bool) -> bool {
        self.models.as_ref().is_none_or(|models| models.iter().any(|name| names(name)))
    }
}

/// 403: the key is valid, but not for this model.
pub(crate) fn forbidden(model: &str) -> ApiError {
    let mut error = ApiError::invalid("model", format!("this API key may not use the model `{model}`"));
    error.status = 403;
    error.with_code(Code::ModelNotAllowed)
}

fn since_1970_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A tenant's number, which never changes while the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TenantId(pub u32);
