//! One rank of a KV cache, as the [`Producer`] behind its side channel.
//!
//! The KV heads are sharded over the ranks. A block is its shards under one id in every rank's region. One lease
//! covers a block in all ranks, so all of them use the same [`LeaseService`] and differ in their [`RankMemory`].

use std::sync::Arc;
use std::time::Duration;

use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::transport::{Producer, Readiness, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, KvLayout, Reader};

use crate::service::LeaseService;

/// The memory of one rank.
pub trait RankMemory: Send + Sync {
    /// This rank's fingerprint, from the one of model and shape: [`LeaseService::fingerprint`].
    fn fingerprint(&self, shape: u64) -> u64;

    /// As [`Producer::layout`].
    fn layout(&self) -> Option<KvLayout>;

    /// As [`Producer::region`].
    fn region(&self) -> &Region;

    /// As [`Producer::download_blocks`].
    ///
    /// # Errors
    /// [`TransportError::Refused`] if the copy fails.
    fn download_blocks(&self, blocks: &[BlockId]) -> Result<(), TransportError>;
}

/// See the module's documentation.
pub struct LeasedRank<M> {
    leases: Arc<LeaseService>,
    memory: M,
}

impl<M> LeasedRank<M> {
    /// The rank with this memory.
    #[must_use]
    pub fn new(leases: Arc<LeaseService>, memory: M) -> Self {
        Self { leases, memory }
    }
}

impl<M: RankMemory> Producer for LeasedRank<M> {
    fn epoch(&self) -> Epoch {
        self.leases.epoch()
    }

    fn fingerprint(&self) -> u64 {
        self.memory.fingerprint(self.leases.fingerprint())
    }

    fn layout(&self) -> Option<KvLayout> {
        self.memory.layout()
    }

    fn begin_read(
        &self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    ) -> Result<Vec<BlockId>, TransportError> {
        self.leases.begin_read(handle, reader, first, count)
    }

    fn is_read_live(&self, handle: Handle, reader: Reader) -> bool {
        self.leases.is_read_live(handle, reader)
    }

    fn await_ready(&self, handle: Handle, reader: Reader, upto: usize, within: Duration) -> Readiness {
        self.leases.await_ready(handle, reader, upto, within)
    }

    fn finish_read(&self, handle: Handle, reader: Reader) -> Verdict {
        self.leases.finish_read(handle, reader)
    }

    fn fail_read(&self, handle: Handle, reader: Reader) {
        self.leases.fail_read(handle, reader);
    }

    fn release(&self, handle: Handle, reason: &str) -> ReleaseReply {
        self.leases.release(handle, reason)
    }

    fn leave(&self, handle: Handle, consumer: u64, reason: &str) -> ReleaseReply {
        self.leases.leave(handle, consumer, reason)
    }

    fn heartbeat(&self, handle: Handle) -> HeartbeatReply {
        self.leases.heartbeat(handle)
    }

    fn region(&self) -> &Region {
        self.memory.region()
    }

    fn download_blocks(&self, blocks: &[BlockId]) -> Result<(), TransportError> {
        self.memory.download_blocks(blocks)
    }
}
