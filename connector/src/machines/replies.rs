//! What a producer and a transport answer to the machines.

use std::net::SocketAddr;

/// Whether bytes that were read may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The lease was live from the first to the last byte of this reader.
    Valid,
    /// It was not, or its state is unknown. The bytes must not reach a forward pass.
    Gone,
}

/// Whether a producer may let blocks out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// It may.
    Ready,
    /// The lease lives, and they are not computed yet.
    NotYet,
    /// The lease lets this reader read no more.
    Gone,
}

/// Why a read, or a message about a lease, did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// The lease is over, was never there, or belongs to an earlier epoch.
    #[error("the lease is gone")]
    Gone,
    /// The range, the reader or the layout does not fit the lease.
    #[error("refused by the producer: {0}")]
    Refused(Box<str>),
    /// The peer could not be reached, or did not prove who it is.
    #[error("no connection to {0}: {1}")]
    Handshake(SocketAddr, Box<str>),
    /// The connection broke or fell silent during the read.
    #[error("transfer broke off: {0}")]
    Transfer(Box<str>),
    /// The caller raised the stop flag. Nothing writes into the landing blocks any more.
    #[error("stopped")]
    Stopped,
}
