//! PEM files for rustls.

use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::certificate_info::certificate_info;
use super::{TlsError, content};

/// Maximum bytes of a PEM file: thousands of roots.
const FILE_BYTES_MAX: u64 = 8 << 20;

/// The provider of cryptography, whatever others are linked.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A certificate with its chain, and its expiry in seconds since 1970.
pub(super) fn chain(file: &Path) -> Result<(Vec<CertificateDer<'static>>, u64), TlsError> {
    let text = read(file)?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let chain = chain.map_err(|error| content(file, error.to_string()))?;
    let leaf = chain.first().ok_or_else(|| content(file, "no certificate in it"))?;
    let info = certificate_info(leaf).ok_or_else(|| content(file, "its first certificate cannot be read"))?;
    Ok((chain, info.not_after_s))
}

pub(super) fn key(file: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    // The error is dropped, because it may contain parts of the key.
    PrivateKeyDer::from_pem_slice(&read(file)?).map_err(|_| content(file, "no private key in it"))
}

pub(super) fn roots(file: &Path) -> Result<RootCertStore, TlsError> {
    let text = read(file)?;
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(&text) {
        let root = root.map_err(|error| content(file, error.to_string()))?;
        roots.add(root).map_err(|error| content(file, error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(content(file, "no certificate in it"));
    }
    Ok(roots)
}

fn read(file: &Path) -> Result<Vec<u8>, TlsError> {
    use std::io::Read;
    let failed = |source| TlsError::File { file: file.to_owned(), source };
    let mut text = Vec::new();
    let opened = crate::config::read::named_file::open(file).map_err(failed)?;
    opened.take(FILE_BYTES_MAX).read_to_end(&mut text).map_err(failed)?;
    Ok(text)
}
