//! Who asks, and what they may: API keys, client certificates, tenants and their limits.
//!
//! ```text
//!  Authorization: Bearer KEY ─┐
//!  client certificate ────────┴▶ Auth::identify ─▶ Identity ── begin ─▶ Permit ── take_tokens ─▶ the queue
//!                                      │ 401                     │ 429               │ 429
//!                                  KeyTable                 Meter of the key, Meter of its tenant
//! ```
//!
//! [`Auth`] is part of a generation; its table is replaced when the keys file changes. [`Tenants`] outlives both: a
//! reload neither fills anybody's bucket nor forgets who has how many requests in flight, unless the limit itself
//! was changed.
//!
//! Invariants:
//! - Without a known, unexpired key or a named certificate nothing of a request is read but its head.
//! - A limit that refuses has taken nothing from any other limit.
//! - A client's credentials go no further than this module: engines get their own.

pub(crate) mod admin;
mod bucket;
mod keys;
mod limits;
mod salt;
mod table;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use baton_openai::{ApiError, Code};
use hyper::header::HeaderMap;

use crate::config::file_watch::FileWatch;
use crate::config::{AuthConfig, ConfigError, Priority};
use crate::metrics::tenants::Unknown;

use bucket::Meter;
pub use keys::NewKey;
pub(crate) use keys::{bearer, same};
pub(crate) use limits::Permit;
use salt::SaltKey;
use table::KeyTable;
pub(crate) use table::Tenants;

/// Why keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// A file cannot be read or is not what it should be.
    #[error(transparent)]
    File(#[from] ConfigError),
    /// A name is used twice.
    #[error("auth: the {what} `{name}` is given twice")]
    Twice {
        /// Of what.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// Two keys have one hash: they are the same key.
    #[error("auth: the key `{0}` has the hash of another key")]
    SameKey(String),
    /// The secret for salts is too short to be one.
    #[error("auth.cache_salt_file: the secret must have 16 bytes at least")]
    ShortSecret,
}

/// The keys of one generation.
pub(crate) struct Auth {
    table: ArcSwap<KeyTable>,
    config: AuthConfig,
    watch: FileWatch,
    salts: SaltKey,
}

/// Who asks.
pub(crate) struct Identity {
    /// Of the key or the certificate.
    pub name: String,
    pub tenant: Arc<Tenant>,
    pub priority_max: Priority,
    /// `None`: all.
    models: Option<Vec<String>>,
    expires_s: Option<u64>,
    meter: Arc<Meter>,
}

/// Whose requests share a queue, limits and a prefix cache.
pub(crate) struct Tenant {
    pub name: Arc<str>,
    pub id: TenantId,
    pub weight: u32,
    meter: Arc<Meter>,
    requests: crate::metrics::Counter,
}

impl Auth {
    /// # Errors
    /// [`AuthError`] says what is wrong.
    pub(crate) fn build(
        config: &AuthConfig,
        cluster_secret: Option<&str>,
        tenants: &Tenants,
    ) -> Result<Self, AuthError> {
        let files: Vec<PathBuf> = config.keys_file.iter().cloned().collect();
        let watch = FileWatch::new(files);
        let table = KeyTable::build(config, tenants)?;
        let salts = match (&config.cache_salt_file, cluster_secret) {
            (Some(path), _) => {
                let secret = crate::config::first_line_of("auth.cache_salt_file", path)?;
                let secret = secret.filter(|secret| secret.len() >= 16);
                SaltKey::derived("cache salt", secret.ok_or(AuthError::ShortSecret)?.as_bytes())
            }
            (None, Some(secret)) => SaltKey::derived("cache salt", secret.as_bytes()),
            (None, None) => tenants.salts(),
        };
        Ok(Self { table: ArcSwap::from_pointee(table), config: config.clone(), watch, salts })
    }

    /// Who asks.
    ///
    /// # Errors
    /// 401; it does not say what was wrong with the key.
    pub(crate) fn identify(
        &self,
        headers: &HeaderMap,
        certificate: &[String],
        tenants: &Tenants,
    ) -> Result<Arc<Identity>, ApiError> {
        let table = self.table.load();
        let unknown = |why| {
            tenants.metrics().unknown(why);
            Err(ApiError::unauthorized())
        };
        let found = match keys::bearer(headers) {
            // A key that is sent counts, also beside a certificate: it says more.
            Some(token) => table.by_hash.of(token),
            None if headers.contains_key(hyper::header::AUTHORIZATION) => None,
            None => match certificate.iter().find_map(|name| table.by_certificate.get(name)) {
                None => return unknown(Unknown::Missing),
                found => found,
            },
        };
        let Some(identity) = found else { return unknown(Unknown::Key) };
        if identity.expires_s.is_some_and(|at| since_1970_s() >= at) {
            return unknown(Unknown::Expired);
        }
        Ok(Arc::clone(identity))
    }

    /// Somebody of a tenant.
    pub(crate) fn of_tenant(&self, name: &str) -> Option<Arc<Identity>> {
        self.table.load().by_tenant.get(name).cloned()
    }

    /// It is in effect from now on.
    pub(crate) fn installed(&self, tenants: &Tenants) {
        tenants.keep(&self.table.load());
    }

    /// The salt that keeps a tenant's cached blocks to itself.
    pub(crate) fn cache_salt(&self, identity: &Identity, own: Option<&str>) -> String {
        self.salts.salt(&identity.tenant.name, own)
    }

    /// Reads the keys file again if it has changed. One that cannot be used leaves everything as it was.
    pub(crate) fn refresh(&self, tenants: &Tenants) {
        if !self.watch.has_changed() {
            return;
        }
        let read = KeyTable::build(&self.config, tenants);
        tenants.metrics().reloaded(read.is_ok());
        match read {
            Ok(table) => {
                tracing::info!(keys = table.len(), "keys file reloaded");
                tenants.keep(&table);
                self.table.store(Arc::new(table));
            }
            Err(error) => {
                tracing::error!(%error, "cannot reload the keys file, the old keys stay in effect")
            }
        }
    }
}

impl Identity {
    /// Whether it may use this model; `names` says whether a configured name means it.
    pub(crate) fn may_use(&self, names: impl Fn(&str) -> bool) -> bool {
        self.models.as_ref().is_none_or(|models| models.iter().any(|name| names(name)))
    }
}

/// 403: the key is good, but not for this model.
pub(crate) fn forbidden(model: &str) -> ApiError {
    let mut error = ApiError::invalid("model", format!("this API key may not use the model `{model}`"));
    error.status = 403;
    error.with_code(Code::ModelNotAllowed)
}

fn since_1970_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// A tenant, by a number that stays the same as long as the process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TenantId(pub u32);
