//! Why a connection to an engine is of no further use.

use std::io;

/// Why a connection is of no further use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Lost {
    /// Before any byte of an answer: an idle connection may have been closed meanwhile.
    #[error("closed before a response")]
    Unanswered,
    /// In the middle of an answer.
    #[error("closed in the middle of a response")]
    Ended,
    /// The socket said so in the middle of an answer.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// What came is not an answer that can be read in one way only.
    #[error("the answer is malformed: {0}")]
    Malformed(&'static str),
}
