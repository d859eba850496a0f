//! One version of everything derived from the configuration. A generation never changes: a reload builds the next one
//! and swaps the two. A request finishes on the generation on which it began.
//!
//! The state of engines (connections, load, health) is not part of it. Engines are in the [`Fleet`]; a generation
//! contains the pool memberships and the terms of each engine.

use std::sync::Arc;
use std::time::Duration;

use baton_openai::ParseLimits;
use hyper::header::HeaderValue;

use crate::auth::admin::{AdminAccess, AdminError};
use crate::auth::{Auth, AuthError, TenantRegistry};
use crate::config::{ConfigError, EngineHttp2, ReleaseMode, RouterConfig};
use crate::engines::fleet::Fleet;
use crate::engines::http::{ApiKeys, ConnectionTerms, EngineTerms, TermsError};
use crate::engines::pool_members::PoolMembers;
use crate::engines::protocol::learned::ProtocolTerms;
use crate::legs::settle::SettlementTerms;
use crate::observe::observers::{ObserverError, Observers};
use crate::routing::models::{BuildContext, Models};
use crate::tls::TlsError;
use crate::tls::client::EngineTls;

/// Why a valid configuration cannot take effect.
#[derive(Debug, thiserror::Error)]
pub enum GenerationError {
    /// A file that it names is unreadable.
    #[error(transparent)]
    File(#[from] ConfigError),
    /// The keys are invalid.
    #[error(transparent)]
    Auth(#[from] AuthError),
    /// The admin listener would be unprotected, or its token is unreadable.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// The terms of the engines are invalid.
    #[error(transparent)]
    Terms(#[from] TermsError),
    /// A certificate is invalid.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The access log or the traces cannot be opened.
    #[error(transparent)]
    Observer(#[from] ObserverError),
    /// The cluster secret is no valid header value.
    #[error("the cluster secret must be printable ASCII")]
    SecretText,
}

/// The version of a generation.
#[derive(Clone, Copy)]
pub(crate) struct GenerationVersion {
    /// Starts at 1 and increases with each configuration that takes effect.
    pub number: u64,
    /// Starts at 0 and increases with each change of pools by discovery.
    pub revision: u64,
}

impl GenerationVersion {
    /// The version of the first generation.
    pub(crate) const FIRST: Self = Self { number: 1, revision: 0 };
}

/// One version of the configuration, ready for use.
pub(crate) struct Generation {
    pub version: GenerationVersion,
    pub config: RouterConfig,
    /// The members of each pool, listed or discovered.
    pub members: PoolMembers,
    pub models: Models,
    pub parse_limits: ParseLimits,
    /// Authenticates clients. `None`: all clients are accepted.
    pub auth: Option<Arc<Auth>>,
    /// Authenticates clients of the admin listener.
    pub access: Arc<AdminAccess>,
    pub terms: EngineTerms,
    pub engine_tls: Option<Arc<EngineTls>>,
    pub observers: Observers,
}

/// The parts of a generation that are read from files and devices, before any lock is taken. A file system that hangs
/// therefore blocks one reload, and neither requests nor discovery.
pub(crate) struct ExternalInputs {
    secret: Option<HeaderValue>,
    keys: ApiKeys,
    auth: Option<Arc<Auth>>,
    access: Arc<AdminAccess>,
    engine_tls: Option<Arc<EngineTls>>,
    observers: Observers,
}

impl ExternalInputs {
    /// # Errors
    /// [`GenerationError`] contains the reason.
    pub(crate) fn read(
        config: &RouterConfig,
        previous: Option<&Generation>,
        fleet: &Fleet,
        tenants: &TenantRegistry,
        observers: Observers,
    ) -> Result<Self, GenerationError> {
        let text = config.secret()?;
        for warning in config.warnings() {
            tracing::warn!(event = "configuration_warning", warning, "configuration warning");
        }
        let auth = config.auth.as_ref().map(|auth| Auth::build(auth, text.as_deref(), tenants));
        let access = match previous {
            Some(previous) => previous.access.next(&config.admin)?,
            None => AdminAccess::new(&config.admin)?,
        };
        let tls = config.engine_tls.as_ref();
        Ok(Self {
            secret: text.as_deref().map(secret_header).transpose()?,
            keys: ApiKeys::read(config)?,
            auth: auth.transpose()?.map(Arc::new),
            access: Arc::new(access),
            engine_tls: tls.map(|tls| EngineTls::new(tls, fleet.metrics().engine_tls())).transpose()?,
            observers,
        })
    }

    /// Reuses the inputs of a generation. A change of pools reads no files, so that a bad file does not delay engines.
    pub(crate) fn reuse(current: &Generation) -> Self {
        Self {
            secret: current.terms.secret(),
            keys: current.terms.keys(),
            auth: current.auth.clone(),
            access: Arc::clone(&current.access),
            engine_tls: current.engine_tls.clone(),
            observers: current.observers.clone(),
        }
    }
}

impl Generation {
    /// Policies continue their turns from the `previous` generation.
    ///
    /// # Errors
    /// [`GenerationError`] contains the reason.
    pub(crate) fn build(
        version: GenerationVersion,
        config: RouterConfig,
        members: PoolMembers,
        previous: Option<&Self>,
        context: &BuildContext<'_>,
        inputs: ExternalInputs,
    ) -> Result<Self, GenerationError> {
        let ExternalInputs { secret, keys, auth, access, engine_tls, observers } = inputs;
        let terms = ConnectionTerms {
            connect_timeout: Duration::from_millis(config.timeouts.connect_ms),
            idle_timeout: Duration::from_millis(config.timeouts.engine_idle_ms),
            lost_after: config.timeouts.engine_lost(),
            secret,
            api_key: None,
            tls: None,
            http2: EngineHttp2::default(),
            health: config.health.terms(),
            release: ReleaseMode::default(),
            protocol: ProtocolTerms::default(),
            control: None,
        };
        let before = previous.map(|previous| &previous.terms);
        let terms = EngineTerms::new(&config, &members, terms, keys, engine_tls.as_ref(), before)?;
        context
            .fleet
            .known_caches
            .set_bounds(config.prefix_index.chunks_per_engine, config.prefix_index.chunks_total);
        Ok(Self {
            version,
            models: Models::new(
                &config,
                &members,
                &terms,
                context,
                previous.map(|previous| &previous.models),
            ),
            members,
            // The engine decides which requests it supports; the client gets its refusal.
            parse_limits: ParseLimits::of_any_engine(config.limits.body_bytes),
            auth,
            access,
            terms,
            engine_tls,
            observers,
            config,
        })
    }

    /// Reads the files of this generation again if they have changed.
    pub(crate) fn reload_files(&self, tenants: &TenantRegistry) {
        self.auth.iter().for_each(|auth| auth.refresh(tenants));
        self.access.refresh();
        self.engine_tls.iter().for_each(|tls| tls.refresh());
    }

    /// Updates the metric with the remaining validity of the certificate for engines.
    pub(crate) fn update_expiry_metrics(&self) {
        self.engine_tls.iter().for_each(|tls| tls.update_expiry_metric());
    }

    pub(crate) fn settle_terms(&self) -> SettlementTerms {
        SettlementTerms {
            at_once: self.config.limits.settlements,
            // A request that ends needs one abort and one release at most.
            waiting: self.config.limits.in_flight.saturating_mul(2),
            tries: self.config.attempts.settle,
            try_timeout: Duration::from_millis(self.config.timeouts.settle_ms),
            abandon_wait: Duration::from_millis(self.config.timeouts.abandon_wait_ms),
        }
    }
}

/// The header that contains the cluster secret.
///
/// # Errors
/// [`GenerationError::SecretText`]
pub(crate) fn secret_header(text: &str) -> Result<HeaderValue, GenerationError> {
    let mut secret = HeaderValue::from_str(text).map_err(|_| GenerationError::SecretText)?;
    secret.set_sensitive(true);
    Ok(secret)
}
