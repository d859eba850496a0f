//! TLS towards engines, with the router's own certificate where they ask for one.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::certificate::{chain, key, provider, roots};
use super::followed::Followed;
use super::{TlsError, content};
use crate::config::{EngineTlsConfig, EngineUrl};
use crate::metrics::tls::EngineTlsMetrics;

/// How engines are talked to. Kept connections keep what they began with.
pub(crate) struct EngineTls {
    config: EngineTlsConfig,
    files: Followed<ClientConfig>,
    metrics: EngineTlsMetrics,
}

/// TLS for one engine.
#[derive(Clone)]
pub(crate) struct EngineName {
    tls: Arc<EngineTls>,
    name: ServerName<'static>,
}

impl EngineTls {
    /// # Errors
    /// [`TlsError`] names the file at fault.
    pub(crate) fn new(config: &EngineTlsConfig, metrics: EngineTlsMetrics) -> Result<Arc<Self>, TlsError> {
        let own = config.certificate.iter().chain(&config.key);
        let files: Vec<PathBuf> = std::iter::once(&config.ca).chain(own).cloned().collect();
        let files = Followed::new(files, || load(config))?;
        Ok(Arc::new(Self { config: config.clone(), files, metrics }))
    }

    /// For one engine, by the name in its certificate.
    ///
    /// # Errors
    /// [`TlsError::Name`].
    pub(crate) fn named(self: &Arc<Self>, url: &EngineUrl) -> Result<EngineName, TlsError> {
        let name = self.config.server_name.as_deref().unwrap_or_else(|| url.host());
        let name = ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name(name.to_owned()))?;
        Ok(EngineName { tls: Arc::clone(self), name })
    }

    /// Reads the files again if they have changed.
    pub(crate) fn refresh(&self) {
        if let Some(read) = self.files.refresh(|| load(&self.config)) {
            self.metrics.reloaded(read.is_ok());
            if let Err(error) = read {
                tracing::error!(%error, "cannot reload engine_tls, the old files stay in effect");
            }
        }
        self.tell_expiry();
    }

    /// Tells how long the certificate is still good.
    pub(crate) fn tell_expiry(&self) {
        self.metrics.expires(self.files.not_after_s());
    }
}

impl EngineName {
    /// # Errors
    /// The handshake failed: the engine is not who it should be, or does not know the router.
    pub(crate) async fn connect(&self, stream: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
        TlsConnector::from(self.tls.files.current()).connect(self.name.clone(), stream).await
    }
}

impl std::fmt::Debug for EngineName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("EngineName").field(&self.name).finish()
    }
}

fn load(config: &EngineTlsConfig) -> Result<(Arc<ClientConfig>, u64), TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(rustls::DEFAULT_VERSIONS)
        .expect("ring has suites for TLS 1.2 and 1.3")
        .with_root_certificates(roots(&config.ca)?);
    let (mut client, not_after_s) = match (&config.certificate, &config.key) {
        (Some(certificate), Some(key_file)) => {
            let (chain, not_after_s) = chain(certificate)?;
            let pair = |source| TlsError::Pair { certificate: certificate.clone(), source };
            (builder.with_client_auth_cert(chain, key(key_file)?).map_err(pair)?, not_after_s)
        }
        (None, None) => (builder.with_no_client_auth(), 0),
        (Some(file), None) | (None, Some(file)) => {
            return Err(content(file, "certificate and key need each other"));
        }
    };
    client.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok((Arc::new(client), not_after_s))
}
