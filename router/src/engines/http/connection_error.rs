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
    /// The engine closes the HTTP/2 connection and has not begun the request. It can be sent again.
    #[error("not begun, the connection is closing")]
    GoingAway,
    /// The engine refused the HTTP/2 stream and has not begun the request.
    #[error("the engine refused the stream")]
    Refused,
    /// The engine reset the HTTP/2 stream.
    #[error("the engine reset the stream: {0}")]
    Reset(h2::Reason),
    /// The engine's frames of HTTP/2 are malformed, or beyond a bound.
    #[error("the frames are malformed: {0}")]
    Frames(h2::Reason),
    /// A socket error in the middle of a reply.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The reply is malformed, or can be read in more than one way.
    #[error("the answer is malformed: {0}")]
    Malformed(&'static str),
}
