//! The host tier's memory, and the copies between it and the device's pool.
//!
//! A block of the device is one shard per rank; in a slot, and in a file, its shards lie one after the other.
#![allow(unsafe_code)] // the device's pool and the arena are shared memory; the books say who may touch what

use std::sync::Arc;

use baton_connector::BlockId;
use baton_connector::region::Region;

use super::{Fault, HostSlot};
use crate::compute::cuda::device::DeviceError;
use crate::compute::cuda::port::Port;

/// Host memory in slots of one block, beside the device's pool.
#[derive(Clone, Debug)]
pub struct Arena {
    slots: Region,
    device: Vec<Region>,
    /// Where the regions mirror a device's own memory.
    port: Option<Arc<Port>>,
}

impl Arena {
    /// `slots` slots for blocks of a device with these regions, one per rank. The system gives the memory page by page,
    /// as it is first used.
    ///
    /// # Panics
    /// Without slots or regions.
    #[must_use]
    pub fn new(slots: usize, device: Vec<Region>) -> Self {
        let block_bytes = device.iter().map(Region::block_bytes).sum();
        Self { slots: Region::allocate(slots, block_bytes), device, port: None }
    }

    /// The same, where the regions mirror a device's own memory: slots are copied from and to that directly, page-locked
    /// where the system lets them be, which takes all of their memory now.
    #[must_use]
    pub fn mirroring(mut self, port: Option<Arc<Port>>) -> Self {
        if let Some(port) = &port {
            port.pin(&self.slots);
        }
        self.port = port;
        self
    }

    /// Bytes of one block, over all ranks.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.slots.block_bytes()
    }

    /// Copies a block of the device into a slot. The caller keeps the contract: nobody writes the block, and nobody
    /// else touches the slot.
    ///
    /// # Errors
    /// [`Fault::Io`] when the device does not give the block.
    pub fn store(&self, block: BlockId, slot: HostSlot) -> Result<(), Fault> {
        if let Some(port) = &self.port {
            return port.store(block, &self.slots, BlockId(slot.0)).map_err(|error| {
                tracing::error!(%error, "cannot copy a block to host memory, block not stored");
                Fault::Io
            });
        }
        let mut at = self.slots.block_ptr(BlockId(slot.0));
        for shard in &self.device {
            let bytes = shard.block_bytes();
            // SAFETY: a slot is as long as all shards of a block together, and neither is written by anybody else.
            unsafe {
                std::ptr::copy_nonoverlapping(shard.block_ptr(block), at, bytes);
                at = at.add(bytes);
            }
        }
        Ok(())
    }

    /// Copies a slot into a block of the device. The caller keeps the contract: the block is landing, and nobody
    /// writes the slot.
    ///
    /// # Errors
    /// [`Fault::Io`] when the device does not take it.
    pub fn load(&self, slot: HostSlot, block: BlockId) -> Result<(), Fault> {
        if let Some(port) = &self.port {
            return port.load(&self.slots, BlockId(slot.0), block).map_err(not_taken);
        }
        let mut at = self.slots.block_ptr(BlockId(slot.0)).cast_const();
        for shard in &self.device {
            let bytes = shard.block_bytes();
            // SAFETY: as above.
            unsafe {
                std::ptr::copy_nonoverlapping(at, shard.block_ptr(block), bytes);
                at = at.add(bytes);
            }
        }
        Ok(())
    }

    /// Copies verified bytes into a block of the device, which is landing.
    ///
    /// # Errors
    /// As [`Self::load`].
    ///
    /// # Panics
    /// When `bytes` is not exactly one block.
    pub fn land(&self, bytes: &[u8], block: BlockId) -> Result<(), Fault> {
        assert_eq!(bytes.len(), self.block_bytes(), "one block");
        if let Some(port) = &self.port {
            port.quiet(&[block]).map_err(not_taken)?;
        }
        let mut rest = bytes;
        for shard in &self.device {
            let (mine, others) = rest.split_at(shard.block_bytes());
            shard.write_block(block, mine);
            rest = others;
        }
        self.port.as_ref().map_or(Ok(()), |port| port.onto_device(&[block]).map_err(not_taken))
    }

    /// Copies verified bytes into a slot that nobody else touches.
    ///
    /// # Panics
    /// When `bytes` is not exactly one block.
    pub fn keep(&self, bytes: &[u8], slot: HostSlot) {
        self.slots.write_block(BlockId(slot.0), bytes);
    }

    /// A slot's bytes, copied out: a file is written at the disk's pace.
    #[must_use]
    pub fn bytes(&self, slot: HostSlot) -> Vec<u8> {
        self.slots.read_block(BlockId(slot.0))
    }
}

fn not_taken(error: DeviceError) -> Fault {
    tracing::error!(%error, "cannot copy a stored block to the device");
    Fault::Io
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shards_of_a_block_go_down_and_come_up_together() {
        let device = vec![Region::allocate(4, 8), Region::allocate(4, 16)];
        let arena = Arena::new(2, device.clone());
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
        arena.land(&bytes, BlockId(0)).expect("there is no device to refuse");
        assert_eq!(
            (device[0].read_block(BlockId(0)), device[1].read_block(BlockId(0))),
            (vec![1; 8], vec![2; 16])
        );
        arena.keep(&[9; 24], HostSlot(0));
        assert_eq!((arena.bytes(HostSlot(0)), arena.bytes(HostSlot(1))), (vec![9; 24], bytes));
    }
}
