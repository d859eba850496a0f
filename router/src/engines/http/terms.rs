//! On what terms engines are talked to: what all of them have in common, and what one has of its own.
//!
//! Invariant: an engine that was discovered never makes a configuration fail. One that cannot be talked to is left
//! out and logged. What the configuration itself names, engines and files, must be in order.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::header::HeaderValue;

use crate::config::{ConfigError, EngineConfig, EngineUrl, ReleaseMode, RouterConfig, first_line_of};
use crate::engines::health;
use crate::engines::membership::Members;
use crate::tls::TlsError;
use crate::tls::client::{EngineName, EngineTls};

/// Terms on which connections to engines are made and kept.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub connect_timeout: Duration,
    pub idle_timeout: Duration,
    /// The engine's host may acknowledge nothing for so long.
    pub lost_after: Duration,
    pub secret: Option<HeaderValue>,
    /// `Authorization`, in place of the client's.
    pub api_key: Option<HeaderValue>,
    /// For an `https://` address.
    pub tls: Option<EngineName>,
    pub health: health::Terms,
    /// How a lease that nobody will read is ended there.
    pub release: ReleaseMode,
}

/// Why an engine cannot be talked to.
#[derive(Debug, thiserror::Error)]
pub enum TermsError {
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] ConfigError),
    /// TLS cannot be had.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// A key cannot be sent.
    #[error("{0}: the API key must be one line of printable ASCII")]
    KeyText(String),
}

/// The terms of every engine.
pub(crate) struct EngineTerms {
    common: Terms,
    own: HashMap<EngineUrl, Terms>,
    keys: ApiKeys,
    /// Discovered, and nobody knows how to talk to them.
    left_out: HashSet<EngineUrl>,
}

/// `Authorization` headers by the files from which they were read.
#[derive(Clone, Default)]
pub(crate) struct ApiKeys(HashMap<PathBuf, HeaderValue>);

impl ApiKeys {
    /// Every file that the configuration names, also in templates of engines that are not found yet.
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
        // An engine that stays while a new source is waited for may have a file of an earlier configuration.
        self.0.get(file).cloned().map_or_else(|| read_key(file), Ok)
    }
}

/// Every file of an API key that the configuration names.
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

impl EngineTerms {
    /// # Errors
    /// [`TermsError`] names the file or address at fault, which the configuration names itself.
    pub(crate) fn new(
        config: &RouterConfig,
        members: &Members,
        common: Terms,
        keys: ApiKeys,
        tls: Option<&Arc<EngineTls>>,
        previous: Option<&Self>,
    ) -> Result<Self, TermsError> {
        let pools = config.models.iter().flat_map(|model| [&model.prefill, &model.decode]);
        let listed: HashSet<_> = pools.flat_map(|pool| &pool.engines).map(|engine| &engine.url).collect();
        let mut terms = Self { common, own: HashMap::new(), keys, left_out: HashSet::new() };
        for engine in members.engines() {
            match terms.own_of(engine, tls) {
                Ok(None) => {}
                Ok(Some(own)) => drop(terms.own.insert(engine.url.clone(), own)),
                Err(error) if listed.contains(&engine.url) => return Err(error),
                Err(error) => {
                    if previous.is_none_or(|previous| previous.takes(&engine.url)) {
                        tracing::warn!(engine = %engine.url, %error, "discovered engine ignored");
                    }
                    terms.left_out.insert(engine.url.clone());
                }
            }
        }
        Ok(terms)
    }

    /// What an engine has of its own; `None` if nothing.
    fn own_of(
        &self,
        engine: &EngineConfig,
        tls: Option<&Arc<EngineTls>>,
    ) -> Result<Option<Terms>, TermsError> {
        if engine.api_key_file.is_none() && !engine.url.is_tls() {
            return Ok(None);
        }
        let mut terms = self.common.clone();
        if let Some(file) = &engine.api_key_file {
            terms.api_key = Some(self.keys.of(file)?);
        }
        if engine.url.is_tls() {
            let tls = tls.ok_or_else(|| TlsError::NoRoots(engine.url.to_string()))?;
            terms.tls = Some(tls.named(&engine.url)?);
        }
        Ok(Some(terms))
    }

    /// Whether the engine can be talked to.
    pub(crate) fn takes(&self, url: &EngineUrl) -> bool {
        !self.left_out.contains(url)
    }

    pub(crate) fn of(&self, url: &EngineUrl) -> &Terms {
        self.own.get(url).unwrap_or(&self.common)
    }

    /// The cluster secret, as engines are shown it.
    pub(crate) fn secret(&self) -> Option<HeaderValue> {
        self.common.secret.clone()
    }

    pub(crate) fn keys(&self) -> ApiKeys {
        self.keys.clone()
    }
}
