//! The host tier's memory, and the copies between it and the device's pool.
//!
//! A block of the device is one shard per rank. In a slot and in a file its shards are contiguous. A pool in a device's
//! own memory has one shard, and the device copies it.
#![allow(
    unsafe_code,
    reason = "the pool and the arena are shared memory; scheduler and tier index give exclusive access"
)]

use std::sync::{Arc, Mutex, PoisonError};

use baton_connector::BlockId;
use baton_connector::region::Region;

use super::{HostSlot, OffloadFault};
use crate::compute::cuda::device::DeviceError;
use crate::compute::cuda::shared_kv_pool::SharedKvPool;

/// Host memory in slots of one block, below the device's pool.
#[derive(Clone, Debug)]
pub struct HostArena {
    slots: Region,
    pool: TieredPool,
}

/// The pool above the tiers.
#[derive(Clone, Debug)]
pub enum TieredPool {
    /// In the regions that the executor computes in, one per rank.
    Host(Vec<Region>),
    /// In a device's own memory.
    Device(StagedPool),
}

/// A pool in a device's own memory. Its mirror is not used, if there is one.
#[derive(Clone, Debug)]
pub struct StagedPool {
    pool: Arc<SharedKvPool>,
    /// Idle memory of one block each, for blocks that are loaded without a slot. Page-locked if the system allows it.
    /// Their number is bounded by the number of loading threads.
    staging: Arc<Mutex<Vec<Region>>>,
}

impl TieredPool {
    /// The pool of an executor with these regions, or with this pool in a device's memory.
    #[must_use]
    pub fn new(regions: Vec<Region>, shared_pool: Option<Arc<SharedKvPool>>) -> Self {
        match shared_pool {
            Some(pool) => Self::Device(StagedPool { pool, staging: Arc::default() }),
            None => Self::Host(regions),
        }
    }

    /// Bytes of one block, over all shards.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        match self {
            Self::Host(shards) => shards.iter().map(Region::block_bytes).sum(),
            Self::Device(device) => device.pool.block_bytes(),
        }
    }

    /// Shards of one block.
    #[must_use]
    pub fn shards(&self) -> usize {
        match self {
            Self::Host(shards) => shards.len(),
            Self::Device(_) => 1,
        }
    }
}

impl StagedPool {
    /// Copies bytes into a landing block. The device reads them from memory that stays until the copy is over.
    fn write_block(&self, bytes: &[u8], block: BlockId) -> Result<(), DeviceError> {
        let idle = self.staging.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let staging = idle.unwrap_or_else(|| {
            let region = Region::allocate(1, bytes.len());
            self.pool.pin(&region);
            region
        });
        staging.write_block(BlockId(0), bytes);
        let loaded = self.pool.load(&staging, BlockId(0), block);
        // A copy that hung may still read this memory.
        if !matches!(loaded, Err(DeviceError::Hung { .. })) {
            self.staging.lock().unwrap_or_else(PoisonError::into_inner).push(staging);
        }
        loaded
    }
}

impl HostArena {
    /// `slots` slots for blocks of a pool. The system provides the memory page by page at its first use. Below a device
    /// the slots are page-locked if the system allows it, which allocates all of their memory now.
    ///
    /// # Panics
    /// Without slots or regions.
    #[must_use]
    pub fn new(slots: usize, pool: TieredPool) -> Self {
        let slots = Region::allocate(slots, pool.block_bytes());
        if let TieredPool::Device(device) = &pool {
            device.pool.pin(&slots);
        }
        Self { slots, pool }
    }

    /// Bytes of one block, over all ranks.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.slots.block_bytes()
    }

    /// Copies a block of the device into a slot. Contract of the caller: no thread writes the block, and no other
    /// thread uses the slot.
    ///
    /// # Errors
    /// [`OffloadFault::Io`] when the device fails to copy the block.
    pub fn store(&self, block: BlockId, slot: HostSlot) -> Result<(), OffloadFault> {
        let shards = match &self.pool {
            TieredPool::Host(shards) => shards,
            TieredPool::Device(device) => {
                return device.pool.store(block, &self.slots, BlockId(slot.0)).map_err(|error| {
                    tracing::error!(
                        event = "block_offload_failed", %error,
                        "cannot copy a block to host memory, block not stored"
                    );
                    OffloadFault::Io
                });
            }
        };
        let mut at = self.slots.block_ptr(BlockId(slot.0));
        for shard in shards {
            let bytes = shard.block_bytes();
            // SAFETY: a slot is as long as all shards of a block together, and no other thread writes either.
            unsafe {
                std::ptr::copy_nonoverlapping(shard.block_ptr(block), at, bytes);
                at = at.add(bytes);
            }
        }
        Ok(())
    }

    /// Copies a slot into a block of the device. Contract of the caller: the block is landing, and no thread writes
    /// the slot.
    ///
    /// # Errors
    /// [`OffloadFault::Io`] when the device fails to copy it.
    pub fn load(&self, slot: HostSlot, block: BlockId) -> Result<(), OffloadFault> {
        let shards = match &self.pool {
            TieredPool::Host(shards) => shards,
            TieredPool::Device(device) => {
                return device.pool.load(&self.slots, BlockId(slot.0), block).map_err(copy_fault);
            }
        };
        let mut at = self.slots.block_ptr(BlockId(slot.0)).cast_const();
        for shard in shards {
            let bytes = shard.block_bytes();
            // SAFETY: as above.
            unsafe {
                std::ptr::copy_nonoverlapping(at, shard.block_ptr(block), bytes);
                at = at.add(bytes);
            }
        }
        Ok(())
    }

    /// Copies verified bytes into a landing block of the device.
    ///
    /// # Errors
    /// As [`Self::load`].
    ///
    /// # Panics
    /// When `bytes` is not exactly one block.
    pub fn write_block(&self, bytes: &[u8], block: BlockId) -> Result<(), OffloadFault> {
        assert_eq!(bytes.len(), self.block_bytes(), "one block");
        let shards = match &self.pool {
            TieredPool::Host(shards) => shards,
            TieredPool::Device(device) => return device.write_block(bytes, block).map_err(copy_fault),
        };
        let mut rest = bytes;
        for shard in shards {
            let (mine, others) = rest.split_at(shard.block_bytes());
            shard.write_block(block, mine);
            rest = others;
        }
        Ok(())
    }

    /// Copies verified bytes into a slot that no other thread uses.
    ///
    /// # Panics
    /// When `bytes` is not exactly one block.
    pub fn write_slot(&self, bytes: &[u8], slot: HostSlot) {
        self.slots.write_block(BlockId(slot.0), bytes);
    }

    /// A copy of a slot's bytes, because a file is written at the disk's speed.
    #[must_use]
    pub fn bytes(&self, slot: HostSlot) -> Vec<u8> {
        self.slots.read_block(BlockId(slot.0))
    }
}

fn copy_fault(error: DeviceError) -> OffloadFault {
    tracing::error!(event = "block_load_failed", %error, "cannot copy a stored block to the device");
    OffloadFault::Io
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shards_of_a_block_are_offloaded_and_loaded_together() {
        let device = vec![Region::allocate(4, 8), Region::allocate(4, 16)];
        let arena = HostArena::new(2, TieredPool::Host(device.clone()));
        device[0].write_block(BlockId(1), &[1; 8]);
        device[1].write_block(BlockId(1), &[2; 16]);
        arena.store(BlockId(1), HostSlot(1)).expect("there is no device to refuse");
        let bytes = arena.bytes(HostSlot(1));
        assert_eq!(bytes, [vec![1; 8], vec![2; 16]].concat());
        arena.load(HostSlot(1), BlockId(3)).expect("there is no device to refuse");
        assert_eq!(
            (device[0].read_block(BlockId(3)), device[1].read_block(BlockId(3))),
            (vec![1; 8], vec![2; 16])
        );
        arena.write_block(&bytes, BlockId(0)).expect("there is no device to refuse");
        assert_eq!(
            (device[0].read_block(BlockId(0)), device[1].read_block(BlockId(0))),
            (vec![1; 8], vec![2; 16])
        );
        arena.write_slot(&[9; 24], HostSlot(0));
        assert_eq!((arena.bytes(HostSlot(0)), arena.bytes(HostSlot(1))), (vec![9; 24], bytes));
    }
}
