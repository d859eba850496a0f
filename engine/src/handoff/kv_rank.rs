//! One rank of an engine's KV cache: its memory, and what its side channel asks of the engine.
//!
//! The KV heads are sharded over the ranks; a block is its shards under one id in every rank's region. There is
//! one lease for a block in all ranks, so all of them ask the same [`LeaseDesk`].

use std::sync::Arc;
use std::time::Duration;

use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::slice::Geometry;
use baton_connector::transport::{Producer, Readiness, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, KvLayout, Rank, Reader};

use crate::compute::cuda::port::Port;
use crate::handoff::producer::LeaseDesk;

/// See the module's documentation.
pub struct KvRank {
    desk: Arc<LeaseDesk>,
    geometry: Geometry,
    rank: Rank,
    region: Region,
    /// Where the region mirrors a device's own memory.
    port: Option<Arc<Port>>,
}

impl KvRank {
    /// Rank `rank` of a cache that is cut like this.
    ///
    /// # Panics
    /// When the region's blocks are not those of a shard.
    #[must_use]
    pub fn new(
        desk: Arc<LeaseDesk>,
        geometry: Geometry,
        rank: Rank,
        region: Region,
        port: Option<Arc<Port>>,
    ) -> Self {
        assert_eq!(region.block_bytes(), geometry.shard().block_bytes(), "a region of shards");
        Self { desk, geometry, rank, region, port }
    }
}

impl Producer for KvRank {
    fn epoch(&self) -> Epoch {
        self.desk.epoch()
    }

    fn fingerprint(&self) -> u64 {
        self.geometry.rank_fingerprint(self.desk.fingerprint(), self.rank)
    }

    fn layout(&self) -> Option<KvLayout> {
        Some(self.geometry.shard())
    }

    fn read_begun(
        &self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    ) -> Result<Vec<BlockId>, TransportError> {
        self.desk.read_begun(handle, reader, first, count)
    }

    fn read_live(&self, handle: Handle, reader: Reader) -> bool {
        self.desk.read_live(handle, reader)
    }

    fn await_ready(&self, handle: Handle, reader: Reader, upto: usize, within: Duration) -> Readiness {
        self.desk.await_ready(handle, reader, upto, within)
    }

    fn read_done(&self, handle: Handle, reader: Reader) -> Verdict {
        self.desk.read_done(handle, reader)
    }

    fn read_failed(&self, handle: Handle, reader: Reader) {
        self.desk.read_failed(handle, reader);
    }

    fn release(&self, handle: Handle, reason: &str) -> ReleaseReply {
        self.desk.release(handle, reason)
    }

    fn leave(&self, handle: Handle, consumer: u64, reason: &str) -> ReleaseReply {
        self.desk.leave(handle, consumer, reason)
    }

    fn heartbeat(&self, handle: Handle) -> HeartbeatReply {
        self.desk.heartbeat(handle)
    }

    fn region(&self) -> &Region {
        &self.region
    }

    fn in_region(&self, blocks: &[BlockId]) -> Result<(), TransportError> {
        let Some(port) = &self.port else { return Ok(()) };
        port.in_region(blocks).map_err(|error| {
            tracing::error!(%error, "cannot copy leased blocks to host memory");
            TransportError::Refused("the device cannot copy the blocks".into())
        })
    }
}
