//! TLS on a listener: the certificate in effect, and handshakes that are bounded in time and number.
//!
//! ```text
//! connected ─ whole hello ─▶ waits for a place ─▶ key exchange, signature ─ place free again ─▶ finished
//!     └────────────────────────── handshake_ms for all of it, else cut ──────────────────────────┘
//! ```
//!
//! A place is held while the router computes, never while it waits for a client. Clients that wait are bounded by
//! `limits.connections`.

use std::future::{Future as _, poll_fn};
use std::path::PathBuf;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::LazyConfigAcceptor;

use super::certificate::{chain, key, provider, roots};
use super::followed::Followed;
use super::{TlsConnection, TlsError, content};
use crate::config::{ClientAuth, ListenTlsConfig};
use crate::metrics::tls::{Handshake, ListenerTls};

/// The certificates of a listener. Connections are accepted with those that are in effect when they begin.
pub(crate) struct ServerTls {
    config: ListenTlsConfig,
    files: Followed<ServerConfig>,
    handshakes: Semaphore,
    metrics: ListenerTls,
}

impl ServerTls {
    /// # Errors
    /// [`TlsError`] names the file at fault.
    pub(crate) fn new(config: &ListenTlsConfig, metrics: ListenerTls) -> Result<Self, TlsError> {
        let files: Vec<PathBuf> =
            [&config.certificate, &config.key].into_iter().chain(&config.client_ca).cloned().collect();
        let tls = Self {
            config: config.clone(),
            files: Followed::new(files, || load(config))?,
            handshakes: Semaphore::new(config.handshakes),
            metrics,
        };
        tls.metrics.expires(tls.files.not_after_s());
        Ok(tls)
    }

    /// The connection, encrypted; `None` when there was no handshake in time. The client is then cut.
    pub(crate) async fn accept(&self, stream: TcpStream) -> Option<TlsConnection> {
        let handshake = async {
            // Whoever says nothing, or half of its hello, takes no place of those who have said it.
            let hello = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), stream).await?;
            let one = self.handshakes.acquire().await.expect("the semaphore is never closed");
            // The key exchange and the signature are made here; what follows waits for the client and costs little.
            let mut rest = Box::pin(hello.into_stream(self.files.current()));
            let first = poll_fn(|cx| Poll::Ready(rest.as_mut().poll(cx))).await;
            drop(one);
            match first {
                Poll::Ready(done) => done,
                Poll::Pending => rest.await,
            }
        };
        let within = Duration::from_millis(self.config.handshake_ms);
        match tokio::time::timeout(within, handshake).await {
            Ok(Ok(stream)) => {
                self.metrics.handshake(Handshake::Done);
                Some(TlsConnection::new(stream))
            }
            Ok(Err(error)) => {
                self.metrics.handshake(Handshake::Failed);
                tracing::debug!(%error, "TLS handshake failed");
                None
            }
            Err(_elapsed) => {
                self.metrics.handshake(Handshake::TimedOut);
                None
            }
        }
    }

    /// Reads the files again if they have changed.
    pub(crate) fn refresh(&self) {
        if let Some(read) = self.files.refresh(|| load(&self.config)) {
            self.metrics.reloaded(read.is_ok());
            match read {
                Ok(()) => {
                    tracing::info!(certificate = %self.config.certificate.display(), "certificate reloaded");
                }
                Err(error) => {
                    tracing::error!(%error, "cannot reload the certificate, the old one stays in effect");
                }
            }
        }
        self.tell_expiry();
    }

    /// Tells how long the certificate is still good.
    pub(crate) fn tell_expiry(&self) {
        self.metrics.expires(self.files.not_after_s());
    }
}

fn load(config: &ListenTlsConfig) -> Result<(Arc<ServerConfig>, u64), TlsError> {
    let (chain, not_after_s) = chain(&config.certificate)?;
    let key = key(&config.key)?;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(rustls::DEFAULT_VERSIONS)
        .expect("ring has suites for TLS 1.2 and 1.3");
    let builder = match (config.client_auth, &config.client_ca) {
        (ClientAuth::None, _) | (_, None) => builder.with_no_client_auth(),
        (asked, Some(file)) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(file)?), provider());
            let verifier = match asked {
                ClientAuth::Optional => verifier.allow_unauthenticated(),
                ClientAuth::None | ClientAuth::Require => verifier,
            };
            builder.with_client_cert_verifier(verifier.build().map_err(|e| content(file, e.to_string()))?)
        }
    };
    let pair = |source| TlsError::Pair { certificate: config.certificate.clone(), source };
    let mut server = builder.with_single_cert(chain, key).map_err(pair)?;
    server.alpn_protocols = vec![b"http/1.1".to_vec()];
    // Tickets belong to this configuration: a client whose root was taken out cannot resume its way in.
    if let Ok(ticketer) = rustls::crypto::ring::Ticketer::new() {
        server.ticketer = ticketer;
    }
    Ok((Arc::new(server), not_after_s))
}
