//! The phase in which a request is cancelled, and the kind of the cancel.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A phase of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    /// The request is sent and no engine computes yet
    Queued,
    /// The prefill engine computes
    Prefill,
    /// The lease is open and the reply with its handle is not yet written
    Reply,
    /// The lease is open and the decode engine does not read yet
    Gap,
    /// The decode engine reads the blocks
    Fetch,
    /// The blocks are read and no token has reached the client
    FirstToken,
    /// Tokens have reached the client
    Stream,
    /// Like `stream`, for a response in one piece
    Unary,
}

impl Phase {
    /// All phases, in the order of a request.
    pub(crate) const ALL: [Self; 8] = [
        Self::Queued,
        Self::Prefill,
        Self::Reply,
        Self::Gap,
        Self::Fetch,
        Self::FirstToken,
        Self::Stream,
        Self::Unary,
    ];
    /// The phases of cancels in a storm. A reply is written too soon for a cancel under load to hit that instant.
    pub(crate) const STORM: [Self; 6] =
        [Self::Queued, Self::Prefill, Self::Gap, Self::Fetch, Self::FirstToken, Self::Stream];

    /// The name in reports.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Prefill => "prefill",
            Self::Reply => "reply",
            Self::Gap => "gap",
            Self::Fetch => "fetch",
            Self::FirstToken => "before first token",
            Self::Stream => "mid-stream",
            Self::Unary => "unary",
        }
    }
}

/// Why blocks stay leased after a cancel in [`Phase::Reply`]. `docs/how-to/stuck-blocks.md` explains the reply window.
pub(crate) const REPLY_DROPPED: &str =
    "the engine's server dropped the reply, the only copy of the handoff (the reply window)";

/// How a client cancels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CancelKind {
    /// Closes its connection
    Fin,
    /// Resets its connection
    Rst,
    /// Closes its sending side and continues to read, as many proxies do
    HalfClose,
    /// Stops reading, keeps the connection for a while, then resets it
    Stall,
    /// Closes as an SDK does at a timeout, then repeats the request, at most twice
    Timeout,
    /// Disappears with its host, without FIN or RST; only where a network namespace can be made
    Vanish,
}

impl CancelKind {
    /// All kinds.
    pub(crate) const ALL: [Self; 6] =
        [Self::Fin, Self::Rst, Self::HalfClose, Self::Stall, Self::Timeout, Self::Vanish];

    /// The name in reports.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Fin => "FIN",
            Self::Rst => "RST",
            Self::HalfClose => "half-close",
            Self::Stall => "stall",
            Self::Timeout => "timeout",
            Self::Vanish => "vanish",
        }
    }
}
