//! One version of everything that comes from the configuration. It never changes; a reload builds the next
//! one beside it and swaps them. Requests finish on the version on which they began.
//!
//! What an engine has become in use (connections, load, health) is not part of it: engines live in the
//! [`Fleet`], and a generation says who is a member of which pool, and on what terms.

use std::sync::Arc;
use std::time::Duration;

use baton_openai::ParseLimits;
use hyper::header::HeaderValue;

use crate::auth::admin::{Access, AdminError};
use crate::auth::{Auth, AuthError, Tenants};
use crate::config::{ConfigError, ReleaseMode, RouterConfig};
use crate::engines::fleet::Fleet;
use crate::engines::http::{ApiKeys, EngineTerms, Terms, TermsError};
use crate::engines::membership::Members;
use crate::legs::settle::SettleTerms;
use crate::observe::observers::{ObserverError, Observers};
use crate::routing::models::{Ground, Models};
use crate::tls::TlsError;
use crate::tls::client::EngineTls;

/// Why a sound configuration cannot be put into effect.
#[derive(Debug, thiserror::Error)]
pub enum GenerationError {
    /// A file that it names cannot be read.
    #[error(transparent)]
    File(#[from] ConfigError),
    /// The keys cannot be used.
    #[error(transparent)]
    Auth(#[from] AuthError),
    /// The admin listener would be open, or its token cannot be read.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// Engines cannot be talked to like that.
    #[error(transparent)]
    Terms(#[from] TermsError),
    /// A certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The access log or the traces cannot be had.
    #[error(transparent)]
    Observer(#[from] ObserverError),
    /// The cluster secret cannot be a header.
    #[error("the cluster secret must be printable ASCII")]
    SecretText,
}

/// One version of the configuration, ready for use.
pub(crate) struct Generation {
    /// From 1, one more with each version that takes effect.
    pub number: u64,
    /// From 0, one more with each change of pools by discovery.
    pub revision: u64,
    pub config: RouterConfig,
    /// Who is in which pool: listed, or discovered.
    pub members: Members,
    pub models: Models,
    pub parse_limits: ParseLimits,
    /// Who may ask. `None`: everybody.
    pub auth: Option<Arc<Auth>>,
    /// Who may use the admin listener.
    pub access: Arc<Access>,
    terms: EngineTerms,
    engine_tls: Option<Arc<EngineTls>>,
    pub observers: Observers,
}

/// What a version takes from files and devices. It is read before anything is locked: a file system that hangs, hangs
/// one reload, and neither requests nor discovery.
pub(crate) struct Outside {
    secret: Option<HeaderValue>,
    keys: ApiKeys,
    auth: Option<Arc<Auth>>,
    access: Arc<Access>,
    engine_tls: Option<Arc<EngineTls>>,
    observers: Observers,
}

impl Outside {
    /// # Errors
    /// [`GenerationError`] says what is in the way.
    pub(crate) fn read(
        config: &RouterConfig,
        previous: Option<&Generation>,
        fleet: &Fleet,
        tenants: &Tenants,
        observers: Observers,
    ) -> Result<Self, GenerationError> {
        let text = config.secret()?;
        config.warnings().iter().for_each(|warning| tracing::warn!(warning, "configuration warning"));
        let auth = config.auth.as_ref().map(|auth| Auth::build(auth, text.as_deref(), tenants));
        let access = match previous {
            Some(previous) => previous.access.next(&config.admin)?,
            None => Access::new(&config.admin)?,
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

    /// As a version has it. Where only pools change, files are not read again: a bad one must not hold engines up.
    pub(crate) fn of(same: &Generation) -> Self {
        Self {
            secret: same.terms.secret(),
            keys: same.terms.keys(),
            auth: same.auth.clone(),
            access: Arc::clone(&same.access),
            engine_tls: same.engine_tls.clone(),
            observers: same.observers.clone(),
        }
    }
}

impl Generation {
    /// What policies remember of a pool is taken over from the `previous` version.
    ///
    /// # Errors
    /// [`GenerationError`] says what is in the way.
    pub(crate) fn build(
        (number, revision): (u64, u64),
        config: RouterConfig,
        members: Members,
        previous: Option<&Self>,
        ground: &Ground<'_>,
        outside: Outside,
    ) -> Result<Self, GenerationError> {
        let Outside { secret, keys, auth, access, engine_tls, observers } = outside;
        let terms = Terms {
            connect_timeout: Duration::from_millis(config.timeouts.connect_ms),
            idle_timeout: Duration::from_millis(config.timeouts.engine_idle_ms),
            lost_after: config.timeouts.engine_lost(),
            secret,
            api_key: None,
            tls: None,
            health: config.health.terms(false),
            release: ReleaseMode::default(),
        };
        let before = previous.map(|previous| &previous.terms);
        let terms = EngineTerms::new(&config, &members, terms, keys, engine_tls.as_ref(), before)?;
        ground
            .fleet
            .memory
            .set_bounds(config.prefix_index.chunks_per_engine, config.prefix_index.chunks_total);
        Ok(Self {
            number,
            revision,
            models: Models::new(&config, &members, &terms, ground, previous.map(|previous| &previous.models)),
            members,
            // What an engine behind this router can do is for it to say; its refusal is told to the client.
            parse_limits: ParseLimits::of_any_engine(config.limits.body_bytes),
            auth,
            access,
            terms,
            engine_tls,
            observers,
            config,
        })
    }

    /// Looks whether files that this version names have changed.
    pub(crate) fn reread(&self, tenants: &Tenants) {
        self.auth.iter().for_each(|auth| auth.refresh(tenants));
        self.access.refresh();
        self.engine_tls.iter().for_each(|tls| tls.refresh());
    }

    /// Tells how long the certificate for engines is still good.
    pub(crate) fn tell_expiry(&self) {
        self.engine_tls.iter().for_each(|tls| tls.tell_expiry());
    }

    pub(crate) fn settle_terms(&self) -> SettleTerms {
        SettleTerms {
            at_once: self.config.limits.settlements,
            // A request that ends owes an abort and a release at most.
            waiting: self.config.limits.in_flight.saturating_mul(2),
            tries: self.config.attempts.settle,
            try_timeout: Duration::from_millis(self.config.timeouts.settle_ms),
        }
    }
}

fn secret_header(text: &str) -> Result<HeaderValue, GenerationError> {
    let mut secret = HeaderValue::from_str(text).map_err(|_| GenerationError::SecretText)?;
    secret.set_sensitive(true);
    Ok(secret)
}
