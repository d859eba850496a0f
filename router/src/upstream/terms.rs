//! On what terms engines are talked to: what all of them have in common, and what one has of its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use hyper::header::HeaderValue;

use crate::config::{ConfigError, EngineConfig, EngineUrl, ReleaseMode, first_line_of};
use crate::health;
use crate::tls::TlsError;
use crate::tls::client::{EngineName, EngineTls};

/// Terms on which connections to engines are made and kept.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub connect_timeout: Duration,
    pub idle_timeout: Duration,
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
}

impl EngineTerms {
    /// # Errors
    /// [`TermsError`] names the file or address at fault.
    pub(crate) fn new<'a>(
        engines: impl Iterator<Item = &'a EngineConfig>,
        common: Terms,
        tls: Option<&Arc<EngineTls>>,
    ) -> Result<Self, TermsError> {
        let mut own = HashMap::new();
        for engine in engines {
            if engine.api_key_file.is_none() && !engine.url.is_tls() {
                continue;
            }
            let mut terms = common.clone();
            if let Some(file) = &engine.api_key_file {
                let key_text = || TermsError::KeyText(file.display().to_string());
                let key = first_line_of(file)?.ok_or_else(key_text)?;
                let mut header = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| key_text())?;
                header.set_sensitive(true);
                terms.api_key = Some(header);
            }
            if engine.url.is_tls() {
                let tls = tls.ok_or_else(|| TlsError::NoRoots(engine.url.to_string()))?;
                terms.tls = Some(tls.named(&engine.url)?);
            }
            own.insert(engine.url.clone(), terms);
        }
        Ok(Self { common, own })
    }

    pub(crate) fn of(&self, url: &EngineUrl) -> &Terms {
        self.own.get(url).unwrap_or(&self.common)
    }
}
