//! Connections to services that are no engines: issuers of tokens and the server of shared limits.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::TlsError;
use super::certificate::{provider, roots};

/// A connection, with or without TLS.
pub(crate) trait ServiceStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ServiceStream for T {}

/// TLS towards a service.
#[derive(Clone)]
pub(crate) struct ServiceTls(Arc<ClientConfig>);

impl ServiceTls {
    /// Trusts the roots of a PEM file, or else the system's.
    ///
    /// # Errors
    /// [`TlsError`]: there are no roots.
    pub(crate) fn new(ca: Option<&Path>) -> Result<Self, TlsError> {
        let roots = match ca {
            Some(file) => roots(file)?,
            None => {
                let mut store = RootCertStore::empty();
                store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                store
            }
        };
        if roots.is_empty() {
            return Err(TlsError::NoSystemRoots);
        }
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(rustls::DEFAULT_VERSIONS)
            .expect("ring has suites for TLS 1.2 and 1.3")
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self(Arc::new(config)))
    }
}

/// Connects to a host. The caller bounds the time.
///
/// # Errors
/// The name has no address, the host refuses, or the handshake fails.
pub(crate) async fn dial(
    host: &str,
    port: u16,
    tls: Option<&ServiceTls>,
) -> io::Result<Box<dyn ServiceStream>> {
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    let Some(ServiceTls(config)) = tls else { return Ok(Box::new(stream)) };
    let name = ServerName::try_from(host.to_owned())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "the host is no name for a certificate"))?;
    Ok(Box::new(TlsConnector::from(Arc::clone(config)).connect(name, stream).await?))
}
