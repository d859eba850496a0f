//! One rank of an engine's KV cache: its memory, and the implementation of [`Producer`] for its side channel.
//!
//! The KV heads are sharded over the ranks. A block is its shards under one id in every rank's region. One lease
//! covers a block in all ranks, so all of them use the same [`LeaseService`].

use std::sync::Arc;
use std::time::Duration;

use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::slice::Geometry;
use baton_connector::transport::{Producer, Readiness, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, KvLayout, Rank, Reader};

use crate::compute::cuda::shared_kv_pool::SharedKvPool;
use crate::handoff::producer::LeaseService;

/// See the module's documentation.
pub struct KvRank {
    leases: Arc<LeaseService>,
    geometry: Geometry,
    rank: Rank,
    region: Region,
    /// Set if the region mirrors a device's own memory.
    shared_pool: Option<Arc<SharedKvPool>>,
}

impl KvRank {
    /// Rank `rank` of a cache with this geometry.
    ///
    /// # Panics
    /// When the region's blocks are not those of a shard.
    #[must_use]
    pub fn new(
        leases: Arc<LeaseService>,
        geometry: Geometry,
        rank: Rank,
        region: Region,
        shared_pool: Option<Arc<SharedKvPool>>,
    ) -> Self {
        assert_eq!(region.block_bytes(), geometry.shard().block_bytes(), "a region of shards");
        Self { leases, geometry, rank, region, shared_pool }
    }
}

impl Producer for KvRank {
    fn epoch(&self) -> Epoch {
        self.leases.epoch()
    }

    fn fingerprint(&self) -> u64 {
        self.geometry.rank_fingerprint(self.leases.fingerprint(), self.rank)
    }

    fn layout(&self) -> Option<KvLayout> {
        Some(self.geometry.shard())
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
        &self.region
    }

    fn download_blocks(&self, blocks: &[BlockId]) -> Result<(), TransportError> {
        let Some(shared_pool) = &self.shared_pool else { return Ok(()) };
        shared_pool.download(blocks).map_err(|error| {
            tracing::error!(
                event = "leased_blocks_not_downloaded", %error,
                "cannot copy leased blocks to host memory"
            );
            TransportError::Refused("the device cannot copy the blocks".into())
        })
    }
}
