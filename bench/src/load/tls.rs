//! Whose certificates an endpoint by https may show.

use std::path::Path;
use std::sync::Arc;

use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tokio_rustls::TlsConnector;

use super::target::TargetError;

/// Trusts the certificates of a file, or the system's.
///
/// # Errors
/// [`TargetError::Roots`] when there are none.
pub(super) fn connector(ca_file: Option<&Path>) -> Result<TlsConnector, TargetError> {
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
