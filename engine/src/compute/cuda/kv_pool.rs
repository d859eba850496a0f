//! The KV pool of a device: the number of its blocks, its memory, and its mirror in host memory if there is one.
//!
//! Only transports read and write the mirror. An engine without handoffs has none. Steps, tiers and digests then use
//! the device's memory alone.

use std::sync::Arc;

use baton_connector::BlockId;
use baton_connector::region::Region;

use super::device::{Device, DeviceError, DeviceSlice, HostBuffer, HostSlice};
use super::pool_size::{self, MemorySizes};
use super::shared_kv_pool::SharedKvPool;
use super::{DeviceOptions, GPU_MEMORY_UTILIZATION, LoadError, PoolSize, Streams};

/// See the module's documentation.
pub(super) struct CudaKvPool {
    /// All of it.
    pub(super) pool: DeviceSlice,
    block_bytes: usize,
    /// The mirror; empty without one.
    pub(super) regions: Vec<Region>,
    mirror_host: Option<HostBuffer>,
    pub(super) shared_pool: Arc<SharedKvPool>,
    /// Host memory for one block, where there is no mirror. Allocated at its first use.
    read_buffer: Option<HostBuffer>,
}

impl CudaKvPool {
    /// Allocates the pool, and its mirror if the options contain an allocator of it.
    pub(super) fn new(
        device: &mut impl Device,
        options: &DeviceOptions,
        blocks: usize,
        block_bytes: usize,
    ) -> Result<Self, DeviceError> {
        let bytes = blocks * block_bytes;
        let (pool, memory) = device.alloc_shared(bytes)?;
        let mirror = options.mirror.map(|allocate| allocate(blocks, block_bytes));
        tracing::info!(
            event = "kv_pool_allocated",
            blocks,
            bytes,
            mirror_bytes = mirror.as_ref().map_or(0, |_| bytes),
            "KV pool allocated on the device, its mirror for transports takes mirror_bytes of host memory"
        );
        let mirror_host = mirror.as_ref().map(|region| device.host_over(region)).transpose()?;
        let shared_pool = match &mirror {
            Some(region) => SharedKvPool::new(memory, region.clone()),
            None => SharedKvPool::without_mirror(memory, blocks, block_bytes),
        };
        Ok(Self {
            pool: DeviceSlice::of(pool, bytes),
            block_bytes,
            regions: mirror.into_iter().collect(),
            mirror_host,
            shared_pool: Arc::new(shared_pool),
            read_buffer: None,
        })
    }

    fn block(&self, block: BlockId) -> DeviceSlice {
        self.pool.part(block.index() * self.block_bytes, self.block_bytes)
    }

    /// A block in the mirror and in the pool.
    ///
    /// # Panics
    /// Without a mirror: no block differs from it then.
    pub(super) fn both(&self, block: BlockId) -> (HostSlice, DeviceSlice) {
        let host = self.mirror_host.expect("only blocks of a mirror are copied between both sides");
        (HostSlice { host, offset: block.index() * self.block_bytes }, self.block(block))
    }

    /// A copy of a block's bytes: of the mirror, which must have them, or of the device without a mirror. Waits for the
    /// copy.
    pub(super) fn read_block(
        &mut self,
        device: &mut impl Device,
        streams: &Streams,
        block: BlockId,
    ) -> Result<Vec<u8>, DeviceError> {
        if let Some(mirror) = self.regions.first() {
            return Ok(mirror.read_block(block));
        }
        let host = match self.read_buffer {
            Some(host) => host,
            None => *self.read_buffer.insert(device.host(self.block_bytes)?),
        };
        let copy = HostSlice { host, offset: 0 };
        device.download(streams.copies, self.block(block), copy)?;
        device.record(streams.copied, streams.copies)?;
        device.synchronize(streams.copied)?;
        let mut bytes = vec![0; self.block_bytes];
        device.read_host(copy, &mut bytes)?;
        Ok(bytes)
    }
}

/// Blocks of the pool, after the allocation of `own` bytes of weights and buffers.
pub(super) fn blocks(
    device: &impl Device,
    options: &DeviceOptions,
    own: usize,
    block_bytes: usize,
) -> Result<usize, LoadError> {
    let most = i32::MAX as usize / options.block_tokens;
    let share = match options.pool_size {
        PoolSize::Blocks(blocks) if blocks == 0 || blocks > most => {
            return Err(LoadError::Unsupported(format!(
                "the KV pool has {blocks} blocks, expected 1 to {most}"
            )));
        }
        PoolSize::Blocks(blocks) => return Ok(blocks),
        PoolSize::Share(share) => share,
    };
    let total = device.total_bytes()?;
    let (free, reserve) = (device.free_bytes()?, MemorySizes::reserve_of(total));
    // An engine with a share of the device gets the same share of the host, because other engines may use the same
    // device.
    let part = (share / GPU_MEMORY_UTILIZATION).min(1.0);
    let host = options.mirror.map(|_| (pool_size::host_bytes() as f64 * part) as usize);
    let memory = MemorySizes { total, free, own, reserve, host };
    let chosen = pool_size::blocks(share, &memory, block_bytes, most)
        .map_err(|error| LoadError::Unsupported(error.to_string()))?;
    tracing::info!(
        event = "kv_cache_sized",
        blocks = chosen.blocks,
        tokens = chosen.blocks * options.block_tokens,
        mib = (chosen.blocks * block_bytes) >> 20,
        bound = chosen.bound,
        share,
        total_mib = total >> 20,
        free_mib = free >> 20,
        weights_and_buffers_mib = own >> 20,
        "KV cache sized from free device memory; --kv-cache-mib sets it"
    );
    Ok(chosen.blocks)
}
