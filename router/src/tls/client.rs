//! TLS towards engines, with the router's own certificate where engines require one.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::{AlertDescription, ClientConfig, DigitallySignedStruct, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::certificate::{chain, key, provider, roots};
use super::files::TlsFiles;
use super::{TlsError, content};
use crate::config::{EngineHttp2, EngineTlsConfig, EngineUrl};
use crate::metrics::tls::EngineTlsMetrics;

const HTTP1: &[u8] = b"http/1.1";
const HTTP2: &[u8] = b"h2";

/// TLS settings for all engines. Idle connections keep the settings they began with.
pub(crate) struct EngineTls {
    config: EngineTlsConfig,
    files: TlsFiles<ClientConfig>,
    metrics: EngineTlsMetrics,
}

/// TLS for one engine.
#[derive(Clone)]
pub(crate) struct EngineTlsConnector {
    tls: Arc<EngineTls>,
    name: ServerName<'static>,
}

impl EngineTls {
    /// # Errors
    /// [`TlsError`] names the invalid file.
    pub(crate) fn new(config: &EngineTlsConfig, metrics: EngineTlsMetrics) -> Result<Arc<Self>, TlsError> {
        let own = config.certificate.iter().chain(&config.key);
        let roots = (!config.is_unverified).then_some(&config.ca);
        let files: Vec<PathBuf> = roots.into_iter().chain(own).cloned().collect();
        let files = TlsFiles::new(files, || load(config))?;
        Ok(Arc::new(Self { config: config.clone(), files, metrics }))
    }

    /// The connector for one engine, by the name in its certificate.
    ///
    /// # Errors
    /// [`TlsError::Name`].
    pub(crate) fn named(self: &Arc<Self>, url: &EngineUrl) -> Result<EngineTlsConnector, TlsError> {
        let name = self.config.server_name.as_deref().unwrap_or_else(|| url.host());
        let name = ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name(name.to_owned()))?;
        Ok(EngineTlsConnector { tls: Arc::clone(self), name })
    }

    /// Reads the files again if they have changed.
    pub(crate) fn refresh(&self) {
        if let Some(read) = self.files.refresh(|| load(&self.config)) {
            self.metrics.count_reload(read.is_ok());
            if let Err(error) = read {
                tracing::error!(
                    event = "engine_tls_reload_failed", %error,
                    "cannot reload engine_tls, the old files stay in effect"
                );
            }
        }
        self.update_expiry_metric();
    }

    /// Sets the metric of the certificate's expiry.
    pub(crate) fn update_expiry_metric(&self) {
        self.metrics.set_expiry(self.files.not_after_s());
    }
}

impl EngineTlsConnector {
    /// Returns whether the engine chose HTTP/2, by ALPN.
    ///
    /// # Errors
    /// The handshake failed: the engine's certificate does not match, or the engine rejects the router's.
    /// [`io::ErrorKind::Unsupported`]: HTTP/2 is required, and the engine did not choose it.
    pub(crate) async fn connect(
        &self,
        stream: TcpStream,
        http2: EngineHttp2,
    ) -> io::Result<(TlsStream<TcpStream>, bool)> {
        let names: &[&[u8]] = match http2 {
            EngineHttp2::Off => &[HTTP1],
            EngineHttp2::Auto => &[HTTP2, HTTP1],
            EngineHttp2::On => &[HTTP2],
        };
        let connector = TlsConnector::from(self.tls.files.current());
        let connector = connector.with_alpn(names.iter().map(|name| name.to_vec()).collect());
        let stream = connector.connect(self.name.clone(), stream).await.map_err(|error| {
            let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
            match cause {
                Some(rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)) => no_http2(),
                _ => error,
            }
        })?;
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(HTTP2);
        match http2 {
            EngineHttp2::On if !is_http2 => Err(no_http2()),
            EngineHttp2::Auto | EngineHttp2::Off | EngineHttp2::On => Ok((stream, is_http2)),
        }
    }
}

impl std::fmt::Debug for EngineTlsConnector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("EngineTlsConnector").field(&self.name).finish()
    }
}

fn no_http2() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "the engine did not choose HTTP/2")
}

fn load(config: &EngineTlsConfig) -> Result<(Arc<ClientConfig>, u64), TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(rustls::DEFAULT_VERSIONS)
        .expect("ring has suites for TLS 1.2 and 1.3");
    let builder = match config.is_unverified {
        true => builder.dangerous().with_custom_certificate_verifier(Arc::new(Unverified(provider()))),
        false => builder.with_root_certificates(roots(&config.ca)?),
    };
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
    client.alpn_protocols = vec![HTTP1.to_vec()];
    Ok((Arc::new(client), not_after_s))
}

/// Accepts every certificate whose key signs the handshake.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
