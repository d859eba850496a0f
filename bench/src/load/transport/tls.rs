//! Trusted certificates for an endpoint by https.

use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio_rustls::TlsConnector;

use crate::load::target::TargetError;

/// A server with TLS.
#[derive(Clone)]
pub(crate) struct TlsPeer {
    pub(crate) connector: TlsConnector,
    /// The name that its certificate must have.
    pub(crate) name: ServerName<'static>,
}

/// Trusts the certificates of a file, or the system's.
///
/// # Errors
/// [`TargetError::Roots`] if there are none.
pub(crate) fn connector(ca_file: Option<&Path>) -> Result<TlsConnector, TargetError> {
    let name = ca_file.map_or_else(|| "the system".to_owned(), |file| file.display().to_string());
    let none = |why: String| TargetError::Roots(name.clone(), why);
    let mut roots = RootCertStore::empty();
    match ca_file {
        Some(file) => {
            let pem = std::fs::read(file).map_err(|error| none(error.to_string()))?;
            for certificate in CertificateDer::pem_slice_iter(&pem) {
                let certificate = certificate.map_err(|error| none(error.to_string()))?;
                roots.add(certificate).map_err(|error| none(error.to_string()))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    if roots.is_empty() {
        return Err(none("there is none".to_owned()));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| none(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::load::call::CallStage;
    use crate::load::*;

    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n\
        data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n";

    /// Answers one request, begins a stream and does not end it. Returns how the client disconnected, as TLS shows
    /// it.
    async fn serve(listener: tokio::net::TcpListener, acceptor: TlsAcceptor) -> std::io::Result<usize> {
        let (stream, _) = listener.accept().await?;
        let mut stream = acceptor.accept(stream).await?;
        let mut request = vec![0; 4_096];
        assert!(stream.read(&mut request).await? > 0);
        stream.write_all(ANSWER).await?;
        stream.flush().await?;
        stream.read(&mut request).await
    }

    #[test]
    fn an_https_endpoint_needs_a_trusted_certificate_and_closes_as_configured() {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("ca.pem");
        std::fs::write(&file, made.cert.pem()).expect("written");
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let server = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .expect("a certificate and its key");
        let acceptor = TlsAcceptor::from(Arc::new(server));
        let ask = CompletionSpec::new(Endpoint::Completions, "m", &Prompt::Text("x".to_owned()), 2).prepare();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            for (manner, trusted) in [
                (DisconnectKind::Fin, true),
                (DisconnectKind::Rst, true),
                (DisconnectKind::HalfClose, true),
                (DisconnectKind::Fin, false),
            ] {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
                let port = listener.local_addr().expect("an address").port();
                let serving = tokio::spawn(serve(listener, acceptor.clone()));
                let target = Target::parse(&format!("https://localhost:{port}/v1")).expect("a target");
                let target = target.with_ca_file(trusted.then_some(file.as_path()));
                // A machine without certificates trusts no endpoint.
                let Ok(client) = Client::open(target, Limits::default(), Connections::Fresh).await else {
                    assert!(!trusted);
                    continue;
                };
                let call = client.call(&ask, &CancelTrigger::AfterTokens(1), manner);
                let call = tokio::time::timeout(Duration::from_secs(20), call).await.expect("it ends");
                let seen = tokio::time::timeout(Duration::from_secs(20), serving)
                    .await
                    .expect("it ends")
                    .expect("no panic");
                if trusted {
                    assert_eq!((&call.outcome, call.text.as_str()), (&CallOutcome::Left, "a"), "{call:?}");
                    // An RST is an error. TLS's closing message is read to the end.
                    assert_eq!(
                        seen.map_err(|error| error.kind()),
                        match manner {
                            DisconnectKind::Rst => Err(std::io::ErrorKind::ConnectionReset),
                            _ => Ok(0),
                        }
                    );
                } else {
                    assert!(
                        matches!(call.outcome, CallOutcome::Broken { stage: CallStage::Connect, .. }),
                        "{call:?}"
                    );
                }
            }
        });
        assert!(connector(Some(&folder.path().join("none.pem"))).is_err());
        std::fs::write(&file, "nothing").expect("written");
        assert!(connector(Some(&file)).is_err());
    }
}
