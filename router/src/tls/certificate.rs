//! PEM files, as rustls takes them.

use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::{TlsError, content, der};

/// A file of PEM is not read beyond this: thousands of roots.
const FILE_BYTES_MAX: u64 = 8 << 20;

/// The one provider of cryptography, whatever else is linked in.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A certificate with its chain, and when it ends (seconds since 1970).
pub(super) fn chain(file: &Path) -> Result<(Vec<CertificateDer<'static>>, u64), TlsError> {
    let text = read(file)?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let chain = chain.map_err(|error| content(file, error.to_string()))?;
    let leaf = chain.first().ok_or_else(|| content(file, "no certificate in it"))?;
    let facts = der::facts(leaf).ok_or_else(|| content(file, "its first certificate cannot be read"))?;
    Ok((chain, facts.not_after_s))
}

pub(super) fn key(file: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    // The error may name what is in the file; a key is not for logs.
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
    let opened = crate::config::named_file::open(file).map_err(failed)?;
    opened.take(FILE_BYTES_MAX).read_to_end(&mut text).map_err(failed)?;
    Ok(text)
}
