//! TLS: towards clients and monitors ([`server`]), and towards engines ([`client`]). rustls with ring.
//!
//! ```text
//!  accept ─▶ handshake (bounded in time and number) ─▶ TlsConnection ─▶ pingora, or hyper for the admin listener
//!                 └▶ refused: the connection is closed, nobody hears of a request
//! ```
//!
//! Invariants:
//! - A connection keeps the certificate it began with; a new certificate is for new connections, and none is cut.
//! - Files that cannot be used change nothing: the old ones stay in effect, which is logged and counted.
//! - However a client ends its connection (`close_notify`, FIN, RST), it reads as an end here, and so reaches the
//!   engines as without TLS.

mod certificate;
pub(crate) mod client;
mod der;
mod followed;
pub(crate) mod server;
mod stream;

use std::path::{Path, PathBuf};

pub(crate) use stream::TlsConnection;

/// Why TLS cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{file}: {source}", file = file.display())]
    File {
        /// Which.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{file}: {what}", file = file.display())]
    Content {
        /// Which.
        file: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The files do not go together.
    #[error("the certificate {certificate} and its key cannot be used: {source}", certificate = certificate.display())]
    Pair {
        /// The certificate.
        certificate: PathBuf,
        /// Why.
        source: rustls::Error,
    },
    /// An engine's address needs TLS, and there is no `engine_tls`.
    #[error("the engine {0} needs `engine_tls.ca`: the roots of the engines' certificates")]
    NoRoots(String),
    /// An engine's address is not a name that a certificate can have.
    #[error("`{0}` is not a name for certificates; set `engine_tls.server_name`")]
    Name(String),
}

fn content(file: &Path, what: impl Into<String>) -> TlsError {
    TlsError::Content { file: file.to_owned(), what: what.into() }
}
