//! The address and lifetime of one handoff's blocks: the data that a consumer has of a lease.

use std::sync::Arc;
use std::time::Duration;

use baton_connector::fetch::LoadFailurePolicy;
use baton_connector::limits::KV_LEASE_DURATION;
use baton_connector::{Epoch, Handle, Handoff, Reader};

/// The longest lifetime of a lease without a heartbeat that a consumer assumes.
const LEASE_LEFT_MAX: Duration = Duration::from_secs(3600);

/// The producer's KV cache: its address, and the layout of its blocks.
#[derive(Clone, Debug)]
pub(crate) struct ProducerCache {
    pub(crate) host: Box<str>,
    /// The port of each rank.
    pub(crate) ports: Arc<[u16]>,
    pub(crate) epoch: Epoch,
    /// Of model and shape, independent of the number of KV ranks.
    pub(crate) fingerprint: u64,
    pub(crate) block_tokens: usize,
}

/// The address and lifetime of one handoff's blocks.
#[derive(Clone, Debug)]
pub struct FetchTarget {
    pub(crate) producer: ProducerCache,
    pub(crate) tokens: usize,
    pub(crate) handle: Handle,
    /// This fetch's name at the producer.
    pub(crate) consumer: u64,
    /// Consumers that the lease waits for.
    pub(crate) consumers: u16,
    /// How long the lease lives without a heartbeat.
    pub(crate) lease: Duration,
    /// Whether the lease stays when this engine is too full for the request.
    pub(crate) survives_refusal: bool,
    /// Whether the lease stays when the blocks could not be fetched.
    pub(crate) survives_failure: bool,
    /// Prompt tokens that the producer found in its prefix cache.
    pub(crate) cached: usize,
    /// Whether the producer still computed the blocks when it answered.
    pub(crate) growing: bool,
}

impl FetchTarget {
    /// The target of a handoff that has just arrived; `consumer` is a fresh random name for this fetch.
    #[must_use]
    pub fn new(handoff: &Handoff, consumer: u64) -> Self {
        // The value is untrusted until it is bounded here, because waits depend on it.
        let lease = handoff.lease_left.unwrap_or(KV_LEASE_DURATION).min(LEASE_LEFT_MAX);
        let producer = ProducerCache {
            host: handoff.host.as_str().into(),
            ports: handoff.ports.as_slice().into(),
            epoch: handoff.epoch,
            fingerprint: handoff.layout,
            block_tokens: handoff.block_tokens,
        };
        Self {
            producer,
            tokens: handoff.tokens,
            handle: handoff.handle,
            consumer,
            consumers: handoff.consumers,
            lease,
            survives_refusal: false,
            survives_failure: false,
            cached: handoff.cached,
            growing: handoff.growing,
        }
    }

    /// The lease.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// How long the lease lives without a heartbeat.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Whether the lease stays when this engine is too full for the request.
    #[must_use]
    pub fn survives_refusal(&self) -> bool {
        self.survives_refusal
    }

    /// Whether the lease stays when the blocks could not be fetched.
    #[must_use]
    pub fn survives_failure(&self) -> bool {
        self.survives_failure
    }

    /// The reader of a lease that is read over one link.
    #[must_use]
    pub fn reader(&self) -> Reader {
        Reader::sole(self.consumer)
    }

    /// The producer's epoch when it made the handoff.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.producer.epoch
    }

    /// The port of the side channel of the producer's first rank.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.producer.ports[0]
    }

    /// Leaves the lease to the router, which retries the handoff on other engines and releases it when it gives up. A
    /// refusal then keeps the lease. A failed fetch keeps it too, unless this engine computes the prompt instead.
    pub fn leave_to_router(&mut self, policy: LoadFailurePolicy) {
        self.survives_refusal = true;
        self.survives_failure = policy == LoadFailurePolicy::Fail;
    }
}
