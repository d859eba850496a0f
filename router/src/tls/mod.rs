//! TLS towards clients and monitors ([`server`]), towards engines ([`client`]), and towards other services
//! ([`service`]), with rustls and ring.
//!
//! ```text
//!  accept ─▶ handshake (bounded in time and number) ─▶ TlsConnection ─▶ pingora, or hyper for the admin listener
//!                 └▶ refused: the connection is closed without a request
//! ```
//!
//! Invariants:
//! - A connection keeps the certificate that it began with. A new certificate is for new connections, and no
//!   connection is cut.
//! - Invalid files change nothing: the old ones stay in effect, which is logged and counted.
//! - However a client ends its connection (`close_notify`, FIN, RST), reads return its end. So a disconnect has
//!   the same effect as without TLS.

mod certificate;
mod certificate_info;
pub(crate) mod client;
mod files;
pub(crate) mod server;
pub(crate) mod service;
mod stream;

use std::path::{Path, PathBuf};

pub(crate) use stream::TlsConnection;

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{file}: {source}", file = file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file's content is invalid.
    #[error("{file}: {what}", file = file.display())]
    Content {
        /// The file.
        file: PathBuf,
        /// The problem.
        what: String,
    },
    /// A certificate and its key do not match.
    #[error("the certificate {certificate} and its key cannot be used: {source}", certificate = certificate.display())]
    Pair {
        /// The certificate.
        certificate: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
    /// No certificate can be made.
    #[error("cannot make a self-signed certificate: {0}")]
    SelfSigned(String),
    /// An engine's address needs TLS, and there is no `engine_tls`.
    #[error("the engine {0} needs `engine_tls.ca`: the roots of the engines' certificates")]
    NoRoots(String),
    /// An engine's address is no valid name of a certificate.
    #[error("`{0}` is not a name for certificates; set `engine_tls.server_name`")]
    Name(String),
    /// The system has no roots of certificates.
    #[error("the system has no root certificates; name a file with `ca_file`")]
    NoSystemRoots,
}

fn content(file: &Path, what: impl Into<String>) -> TlsError {
    TlsError::Content { file: file.to_owned(), what: what.into() }
}
