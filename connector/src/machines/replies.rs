//! The answers of producers and transports that the machines use.

use std::net::SocketAddr;

/// Whether bytes that were read may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The lease was live from the first to the last byte of this reader.
    Valid,
    /// The lease was not live, or its state is unknown. The bytes must not reach a forward pass.
    Gone,
}

/// Whether a producer may send blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The blocks may be sent.
    Ready,
    /// The lease is live, but the blocks are not computed yet.
    NotYet,
    /// The lease no longer serves this reader.
    Gone,
}

/// Why a read, or a message about a lease, failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// The lease has ended, never existed, or belongs to an earlier epoch.
    #[error("the lease is gone")]
    Gone,
    /// The range, the reader or the layout does not fit the lease.
    #[error("refused by the producer: {0}")]
    Refused(Box<str>),
    /// The peer could not be reached, or did not prove its identity.
    #[error("no connection to {0}: {1}")]
    Handshake(SocketAddr, Box<str>),
    /// The connection broke or fell silent during the read.
    #[error("transfer broke off: {0}")]
    Transfer(Box<str>),
    /// The caller raised the stop flag. The transport no longer writes into the landing blocks.
    #[error("stopped")]
    Stopped,
}
