//! TLS on a listener: the current certificate, and handshakes that are bounded in time and number.
//!
//! ```text
//! connected ─ whole hello ─▶ waits for a permit ─▶ key exchange, signature ─ permit released ─▶ finished
//!     └────────────────────────── handshake_ms for all of it, else cut ─────────────────────────┘
//! ```
//!
//! A permit is held while the router computes, never while it waits for a client. Waiting clients are bounded by
//! `limits.connections`.

use std::future::{Future as _, poll_fn};
use std::path::PathBuf;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::LazyConfigAcceptor;

use super::certificate::{chain, key, provider, roots};
use super::files::TlsFiles;
use super::{TlsConnection, TlsError, content};
use crate::config::{ClientAuth, ListenTlsConfig};
use crate::metrics::tls::{HandshakeResult, ListenerTlsMetrics};

/// The certificates of a listener. A connection uses those that are current when it begins.
pub(crate) struct ServerTls {
    config: ListenTlsConfig,
    /// The protocols inside, in the names of ALPN, the preferred one first.
    alpn: &'static [&'static [u8]],
    files: TlsFiles<ServerConfig>,
    handshakes: Semaphore,
    metrics: ListenerTlsMetrics,
}

impl ServerTls {
    /// For HTTP/1.1.
    ///
    /// # Errors
    /// [`TlsError`] names the invalid file.
    pub(crate) fn new(config: &ListenTlsConfig, metrics: ListenerTlsMetrics) -> Result<Self, TlsError> {
        Self::with_alpn(config, &[b"http/1.1"], metrics)
    }

    /// For the protocols of these ALPN names, the preferred one first.
    ///
    /// # Errors
    /// [`TlsError`] names the invalid file.
    pub(crate) fn with_alpn(
        config: &ListenTlsConfig,
        alpn: &'static [&'static [u8]],
        metrics: ListenerTlsMetrics,
    ) -> Result<Self, TlsError> {
        let files: Vec<PathBuf> =
            [&config.certificate, &config.key].into_iter().chain(&config.client_ca).cloned().collect();
        let tls = Self {
            config: config.clone(),
            alpn,
            files: TlsFiles::new(files, || load(config, alpn))?,
            handshakes: Semaphore::new(config.handshakes),
            metrics,
        };
        tls.update_expiry_metric();
        Ok(tls)
    }

    /// For HTTP/1.1, with a certificate that is made now and that no client can check.
    ///
    /// # Errors
    /// [`TlsError::SelfSigned`].
    pub(crate) fn self_signed(
        alpn: &'static [&'static [u8]],
        metrics: ListenerTlsMetrics,
    ) -> Result<Self, TlsError> {
        let config = ListenTlsConfig::new(PathBuf::new(), PathBuf::new());
        let own = || -> Result<_, TlsError> {
            let made = rcgen::generate_simple_self_signed(["localhost".to_owned()])
                .map_err(|error| TlsError::SelfSigned(error.to_string()))?;
            let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
            let server = server_config(&config, vec![made.cert.der().clone()], key.into(), alpn)?;
            Ok((Arc::new(server), 0))
        };
        let files = TlsFiles::new(Vec::new(), own)?;
        let handshakes = Semaphore::new(config.handshakes);
        Ok(Self { config, alpn, files, handshakes, metrics })
    }

    /// Performs the handshake; `None` if it did not complete in time. The client is then cut.
    pub(crate) async fn accept(&self, stream: TcpStream) -> Option<TlsConnection> {
        let handshake = async {
            // Clients that send nothing, or half of a hello, take no permit from the others.
            let hello = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), stream).await?;
            let permit = self.handshakes.acquire().await.expect("the semaphore is never closed");
            // The first poll computes the key exchange and the signature. The rest waits for the client and costs
            // little.
            let mut rest = Box::pin(hello.into_stream(self.files.current()));
            let first = poll_fn(|cx| Poll::Ready(rest.as_mut().poll(cx))).await;
            drop(permit);
            match first {
                Poll::Ready(done) => done,
                Poll::Pending => rest.await,
            }
        };
        let within = Duration::from_millis(self.config.handshake_ms);
        match tokio::time::timeout(within, handshake).await {
            Ok(Ok(stream)) => {
                self.metrics.count_handshake(HandshakeResult::Done);
                Some(TlsConnection::new(stream))
            }
            Ok(Err(error)) => {
                self.metrics.count_handshake(HandshakeResult::Failed);
                tracing::debug!(event = "tls_handshake_failed", %error, "TLS handshake failed");
                None
            }
            Err(_elapsed) => {
                self.metrics.count_handshake(HandshakeResult::TimedOut);
                None
            }
        }
    }

    /// Reads the files again if they have changed.
    pub(crate) fn refresh(&self) {
        if let Some(read) = self.files.refresh(|| load(&self.config, self.alpn)) {
            self.metrics.files.count_reload(read.is_ok());
            match read {
                Ok(()) => {
                    tracing::info!(
                        event = "certificate_reloaded", certificate = %self.config.certificate.display(),
                        "certificate reloaded"
                    );
                }
                Err(error) => {
                    tracing::error!(
                        event = "certificate_reload_failed", %error,
                        "cannot reload the certificate, the old one stays in effect"
                    );
                }
            }
        }
        self.update_expiry_metric();
    }

    /// Sets the metric of the certificate's expiry.
    pub(crate) fn update_expiry_metric(&self) {
        self.metrics.files.set_expiry(self.files.not_after_s());
    }
}

fn load(config: &ListenTlsConfig, alpn: &[&[u8]]) -> Result<(Arc<ServerConfig>, u64), TlsError> {
    let (chain, not_after_s) = chain(&config.certificate)?;
    let server = server_config(config, chain, key(&config.key)?, alpn)?;
    Ok((Arc::new(server), not_after_s))
}

fn server_config(
    config: &ListenTlsConfig,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    alpn: &[&[u8]],
) -> Result<ServerConfig, TlsError> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(rustls::DEFAULT_VERSIONS)
        .expect("ring has suites for TLS 1.2 and 1.3");
    let builder = match (config.client_auth, &config.client_ca) {
        (ClientAuth::None, _) | (_, None) => builder.with_no_client_auth(),
        (client_auth, Some(file)) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(file)?), provider());
            let verifier = match client_auth {
                ClientAuth::Optional => verifier.allow_unauthenticated(),
                ClientAuth::None | ClientAuth::Require => verifier,
            };
            builder.with_client_cert_verifier(verifier.build().map_err(|e| content(file, e.to_string()))?)
        }
    };
    let pair = |source| TlsError::Pair { certificate: config.certificate.clone(), source };
    let mut server = builder.with_single_cert(chain, key).map_err(pair)?;
    server.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    // Tickets belong to this configuration, so that a client whose root was removed cannot resume a session.
    if let Ok(ticketer) = rustls::crypto::ring::Ticketer::new() {
        server.ticketer = ticketer;
    }
    Ok(server)
}
