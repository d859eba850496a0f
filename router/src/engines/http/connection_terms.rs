//! Terms of connections to engines: those common to all engines, and those of one engine.
//!
//! Invariant: a discovered engine never makes a configuration invalid. A discovered engine without usable terms is
//! ignored and logged. Engines and files that the configuration itself names must be valid.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::header::HeaderValue;

use crate::config::read::first_line_of;
use crate::config::{ConfigError, EngineConfig, EngineHttp2, EngineUrl, ReleaseMode, RouterConfig};
use crate::engines::health;
use crate::engines::pool_members::PoolMembers;
use crate::engines::protocol::learned::ProtocolTerms;
use crate::tls::TlsError;
use crate::tls::client::{EngineTls, EngineTlsConnector};

/// Terms of connections to engines.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionTerms {
    pub connect_timeout: Duration,
    pub idle_timeout: Duration,
    /// Maximum time without an acknowledgement from the engine's host.
    pub lost_after: Duration,
    pub secret: Option<HeaderValue>,
    /// `Authorization`, in place of the client's.
    pub api_key: Option<HeaderValue>,
    /// For an `https://` address.
    pub tls: Option<EngineTlsConnector>,
    pub http2: EngineHttp2,
    pub health: health::HealthTerms,
    /// How leases that are no longer needed are ended there.
    pub release: ReleaseMode,
    /// The protocol of its legs.
    pub protocol: ProtocolTerms,
    /// Where it answers verbs and snapshot queries, if not at its own address.
    pub control: Option<ControlTerms>,
}

/// An engine's control address.
#[derive(Clone, Debug)]
pub(crate) struct ControlTerms {
    pub url: EngineUrl,
    /// For an `https://` address.
    pub tls: Option<EngineTlsConnector>,
}

/// Why the terms of an engine are unusable.
#[derive(Debug, thiserror::Error)]
pub enum TermsError {
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] ConfigError),
    /// TLS cannot be set up.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// An API key is no valid header value.
    #[error("{0}: the API key must be one line of printable ASCII")]
    KeyText(String),
}

/// The terms of all engines.
pub(crate) struct EngineTerms {
    common: ConnectionTerms,
    own: HashMap<EngineUrl, ConnectionTerms>,
    keys: ApiKeys,
    /// Discovered engines without usable terms.
    left_out: HashSet<EngineUrl>,
}

/// `Authorization` headers by file.
#[derive(Clone, Default)]
pub(crate) struct ApiKeys(HashMap<PathBuf, HeaderValue>);

impl ApiKeys {
    /// Reads all files that the configuration names, also in templates of engines that are not discovered yet.
    ///
    /// # Errors
    /// [`TermsError`] names the file.
    pub(crate) fn read(config: &RouterConfig) -> Result<Self, TermsError> {
        let mut keys = HashMap::new();
        for file in key_files(config) {
            if !keys.contains_key(file) {
                keys.insert(file.to_owned(), read_key(file)?);
            }
        }
        Ok(Self(keys))
    }

    fn of(&self, file: &Path) -> Result<HeaderValue, TermsError> {
        // An engine of an earlier configuration, which stays until a new source has a result, may have another
        // file.
        self.0.get(file).cloned().map_or_else(|| read_key(file), Ok)
    }
}

/// All API key files that the configuration names.
fn key_files(config: &RouterConfig) -> impl Iterator<Item = &Path> {
    let pools = config.models.iter().flat_map(|model| [&model.prefill, &model.decode]);
    pools.flat_map(|pool| {
        let found = pool.discover.as_ref().and_then(|discover| discover.template.api_key_file());
        pool.engines.iter().filter_map(|engine| engine.api_key_file.as_deref()).chain(found)
    })
}

fn read_key(file: &Path) -> Result<HeaderValue, TermsError> {
    let key_text = || TermsError::KeyText(file.display().to_string());
    let key = first_line_of("api_key_file", file)?.ok_or_else(key_text)?;
    let mut header = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| key_text())?;
    header.set_sensitive(true);
    Ok(header)
}

/// TLS for an address; `None` without `https`.
fn tls_of(url: &EngineUrl, tls: Option<&Arc<EngineTls>>) -> Result<Option<EngineTlsConnector>, TlsError> {
    if !url.is_tls() {
        return Ok(None);
    }
    let tls = tls.ok_or_else(|| TlsError::NoRoots(url.to_string()))?;
    tls.named(url).map(Some)
}

impl EngineTerms {
    /// # Errors
    /// [`TermsError`] names the invalid file or address, which the configuration itself contains.
    pub(crate) fn new(
        config: &RouterConfig,
        members: &PoolMembers,
        common: ConnectionTerms,
        keys: ApiKeys,
        tls: Option<&Arc<EngineTls>>,
        previous: Option<&Self>,
    ) -> Result<Self, TermsError> {
        let pools = config.models.iter().flat_map(|model| [&model.prefill, &model.decode]);
        let listed: HashSet<_> = pools.flat_map(|pool| &pool.engines).map(|engine| &engine.url).collect();
        let mut terms = Self { common, own: HashMap::new(), keys, left_out: HashSet::new() };
        for engine in members.engines() {
            match terms.own_terms(engine, tls) {
                Ok(None) => {}
                Ok(Some(own)) => drop(terms.own.insert(engine.url.clone(), own)),
                Err(error) if listed.contains(&engine.url) => return Err(error),
                Err(error) => {
                    if previous.is_none_or(|previous| previous.is_usable(&engine.url)) {
                        tracing::warn!(
                            event = "discovered_engine_ignored", engine = %engine.url, %error,
                            "discovered engine ignored"
                        );
                    }
                    terms.left_out.insert(engine.url.clone());
                }
            }
        }
        for engine in members.engines() {
            let Some(url) = &engine.control_url else { continue };
            let tls = tls_of(url, tls)?;
            let own = terms.own.entry(engine.url.clone()).or_insert_with(|| terms.common.clone());
            own.control = Some(ControlTerms { url: url.clone(), tls });
        }
        Ok(terms)
    }

    /// The engine's own terms; `None` if it has none.
    fn own_terms(
        &self,
        engine: &EngineConfig,
        tls: Option<&Arc<EngineTls>>,
    ) -> Result<Option<ConnectionTerms>, TermsError> {
        if engine.api_key_file.is_none() && !engine.url.is_tls() {
            return Ok(None);
        }
        let mut terms = self.common.clone();
        if let Some(file) = &engine.api_key_file {
            terms.api_key = Some(self.keys.of(file)?);
        }
        terms.tls = tls_of(&engine.url, tls)?;
        Ok(Some(terms))
    }

    /// Whether the engine has usable terms.
    pub(crate) fn is_usable(&self, url: &EngineUrl) -> bool {
        !self.left_out.contains(url)
    }

    pub(crate) fn of(&self, url: &EngineUrl) -> &ConnectionTerms {
        self.own.get(url).unwrap_or(&self.common)
    }

    /// The cluster secret, as a header value.
    pub(crate) fn secret(&self) -> Option<HeaderValue> {
        self.common.secret.clone()
    }

    pub(crate) fn keys(&self) -> ApiKeys {
        self.keys.clone()
    }
}
