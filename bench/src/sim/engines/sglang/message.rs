//! Messages between the ranks of decode and prefill engines.
//!
//! ```text
//!  D ── Metadata (its page indices) ─▶ P         P ── Written (KV, first token) ─▶ D
//!  D ── Abort ───────────────────────▶ P         P ── Failed, AbortAck ──────────▶ D
//! ```
//!
//! SGLang sends the small ones by ZMQ and writes KV cache and first token into D's memory. Here each is one line of
//! JSON on a connection between the engines ([`super::links`]).

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// The number of a leg in its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct LegTicket(pub u64);

/// A rank of another engine, at the address for its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct PeerRank {
    pub at: SocketAddr,
    pub rank: usize,
}

/// One decode leg, for P's messages about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DecodeLeg {
    pub peer: PeerRank,
    pub leg: LegTicket,
}

/// A message between ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum PeerMessage {
    /// D has reserved these pages for the room's KV cache.
    Metadata { room: u64, from: DecodeLeg, pages: Vec<u32> },
    /// D's leg has ended.
    Abort { room: u64, from: DecodeLeg },
    /// A write into D's pages. It needs no permission. With the first word the transfer has succeeded.
    Written { room: u64, leg: LegTicket, pages: Vec<u32>, contents: Vec<u64>, word: Option<String> },
    /// P's leg has ended without success.
    Failed { room: u64, leg: LegTicket, reason: String },
    /// No write into the leg's pages is in flight, and none will follow.
    AbortAck { leg: LegTicket },
}

/// A message for one rank of the receiver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Envelope {
    pub rank: usize,
    pub message: PeerMessage,
}
