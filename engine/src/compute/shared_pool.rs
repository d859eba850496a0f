//! The memory of a KV pool that other engines of the host can read.

use baton_connector::region::Region;

/// A pool of `blocks` zeroed blocks that engines of this host can open. On a system without shared memory, the pool is
/// private memory of this process and transports use TCP.
#[must_use]
pub fn shared_pool(blocks: usize, block_bytes: usize) -> Region {
    baton_connector_shm::shared_pool(blocks, block_bytes).unwrap_or_else(|error| {
        tracing::warn!(
            event = "kv_pool_not_shared", %error,
            "cannot share the KV pool on this host, using TCP"
        );
        Region::allocate(blocks, block_bytes)
    })
}
