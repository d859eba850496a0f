//! The lease of a handoff, and the producer that has it.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::{BlockId, Epoch, Handle};

/// A lease at a producer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LoadTarget {
    pub(super) handle: Handle,
    pub(super) producer: ProducerKey,
    /// Whether the lease waits for other engines too.
    pub(super) several_consumers: bool,
    /// Fingerprint of the producer's layout.
    pub(super) layout: u64,
    /// How long the lease lives without a heartbeat.
    pub(super) lease: Duration,
    /// The block ids of all groups, one after another.
    pub(super) blocks: Arc<[BlockId]>,
}

/// The side channel of a producer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ProducerKey {
    pub(super) host: Box<str>,
    pub(super) port: u16,
    pub(super) epoch: Epoch,
    /// Fingerprint of its layout and of its names in NIXL ([`crate::channel::fingerprint`]). The handshake compares it,
    /// so that the bytes come from the engine that confirms the read.
    pub(super) fingerprint: u64,
}
