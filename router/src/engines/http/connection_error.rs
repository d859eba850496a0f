//! Errors after which a connection to an engine is unusable.

use std::io;

/// Why a connection is unusable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionError {
    /// Closed before any byte of a reply; an idle connection may have been closed earlier.
    #[error("closed before a response")]
    Unanswered,
    /// Closed in the middle of a reply.
    #[error("closed in the middle of a response")]
    Ended,
    /// A socket error in the middle of a reply.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The reply is malformed, or can be read in more than one way.
    #[error("the answer is malformed: {0}")]
    Malformed(&'static str),
}
