//! The memory of one rank of an engine's KV cache, from which its side channel serves leased blocks.

use std::sync::Arc;

use baton_connector::region::Region;
use baton_connector::slice::Geometry;
use baton_connector::transport::TransportError;
use baton_connector::{BlockId, KvLayout, Rank};
use baton_connector_leases::rank::RankMemory;

use crate::compute::cuda::shared_kv_pool::SharedKvPool;

/// See the module's documentation.
pub struct KvRank {
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
        geometry: Geometry,
        rank: Rank,
        region: Region,
        shared_pool: Option<Arc<SharedKvPool>>,
    ) -> Self {
        assert_eq!(region.block_bytes(), geometry.shard().block_bytes(), "a region of shards");
        Self { geometry, rank, region, shared_pool }
    }
}

impl RankMemory for KvRank {
    fn fingerprint(&self, shape: u64) -> u64 {
        self.geometry.rank_fingerprint(shape, self.rank)
    }

    fn layout(&self) -> Option<KvLayout> {
        Some(self.geometry.shard())
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
