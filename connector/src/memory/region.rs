//! The memory of one paged KV pool, shared by the executor that computes in it and the transport that
//! copies blocks in and out.
//!
//! Blocks are plain bytes at `base + block × block_bytes`. The block pool and the leases decide which thread may access
//! a block (invariants 2 and 3), not Rust's borrow checker. An executor writes some blocks while transports read or
//! write others, from other threads. The methods below are therefore raw copies with bounds checks. Only the executor's
//! kernels and the transports get pointers.
//!
//! The bytes are on this process's heap, or in a [`Memory`] of a transport, for example one that other engines of this
//! host can map.
#![allow(
    unsafe_code,
    reason = "a pool is one piece of memory used by several threads on disjoint blocks; see each block"
)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::BlockId;

/// Alignment of a pool and therefore of its first block, in bytes: one huge page if the pool is that large.
const ALIGNMENT_BYTES: usize = 2 << 20;

/// The memory of a pool.
///
/// # Safety
/// From construction to drop, `base()` is one and the same address, aligned to 64 bytes. Any thread can read and write
/// the `len()` bytes from there on. Only the pool of this memory decides which thread writes them.
pub unsafe trait Memory: Any + Debug + Send + Sync {
    /// Address of the first byte.
    fn base(&self) -> *mut u8;

    /// Length in bytes.
    fn len(&self) -> usize;

    /// Whether the length is zero.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A paged pool's memory. Cheap to clone; freed when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Region(Arc<RegionInner>);

#[derive(Debug)]
struct RegionInner {
    memory: Box<dyn Memory>,
    /// The value of `memory.base()`: kernels use it for every block.
    base: *mut u8,
    block_bytes: usize,
    blocks: usize,
}

// SAFETY: the pool is plain bytes. The contract excludes conflicting access to one block: its owner writes a block, or
// one transfer while the block is landing, and a leased block is only read.
unsafe impl Send for RegionInner {}
// SAFETY: as above.
unsafe impl Sync for RegionInner {}

impl Region {
    /// Allocates `blocks` zeroed blocks of `block_bytes` bytes on this process's heap.
    ///
    /// # Panics
    /// When the pool is empty or larger than the address space.
    #[must_use]
    pub fn allocate(blocks: usize, block_bytes: usize) -> Self {
        Self::with_memory(Box::new(HeapMemory::zeroed(pool_bytes(blocks, block_bytes))), blocks, block_bytes)
    }

    /// A pool of `blocks` blocks of `block_bytes` bytes in the caller's memory, which is dropped with the last clone of
    /// the region.
    ///
    /// # Panics
    /// When the pool is empty or larger than the memory.
    #[must_use]
    pub fn with_memory(memory: Box<dyn Memory>, blocks: usize, block_bytes: usize) -> Self {
        let bytes = pool_bytes(blocks, block_bytes);
        assert!(bytes <= memory.len(), "a pool of {bytes} bytes in a memory of {}", memory.len());
        let base = memory.base();
        Self(Arc::new(RegionInner { memory, base, block_bytes, blocks }))
    }

    /// The memory, for a transport that needs memory of its own kind.
    #[must_use]
    pub fn memory(&self) -> &dyn Memory {
        &*self.0.memory
    }

    /// Blocks in the pool.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.0.blocks
    }

    /// Bytes of one block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.0.block_bytes
    }

    /// Start of a block's bytes, for the executor's kernels and for scatter/gather system calls.
    ///
    /// The pointer is valid for [`Self::block_bytes`] bytes while any clone of this region lives. By the contract, the
    /// caller neither reads a landing block nor writes a leased one.
    ///
    /// # Panics
    /// When the block is outside the pool.
    #[must_use]
    pub fn block_ptr(&self, block: BlockId) -> *mut u8 {
        assert!(block.index() < self.0.blocks, "block {} of a pool of {}", block.0, self.0.blocks);
        // SAFETY: the index was checked, so the offset stays inside the allocation.
        unsafe { self.0.base.add(block.index() * self.0.block_bytes) }
    }

    /// Copies a block out, for checks and small transfers.
    ///
    /// # Panics
    /// When the block is outside the pool.
    #[must_use]
    pub fn read_block(&self, block: BlockId) -> Vec<u8> {
        let mut bytes = vec![0; self.0.block_bytes];
        // SAFETY: both ranges are `block_bytes` long and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(self.block_ptr(block), bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }

    /// Overwrites a block.
    ///
    /// # Panics
    /// When the block is outside the pool, or `bytes` is not exactly one block.
    pub fn write_block(&self, block: BlockId, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.0.block_bytes, "one block");
        // SAFETY: both ranges are `block_bytes` long and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.block_ptr(block), bytes.len()) };
    }
}

fn pool_bytes(blocks: usize, block_bytes: usize) -> usize {
    let bytes = blocks.checked_mul(block_bytes).expect("a pool fits into the address space");
    assert!(bytes > 0, "a pool has at least one block of at least one byte");
    bytes
}

/// Memory of this process alone.
#[derive(Debug)]
struct HeapMemory {
    base: *mut u8,
    layout: Layout,
}

impl HeapMemory {
    fn zeroed(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, ALIGNMENT_BYTES.min(bytes.next_power_of_two()).max(64))
            .expect("a pool fits into the address space");
        // SAFETY: the layout has a non-zero size: a pool is never empty.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        Self { base, layout }
    }
}

// SAFETY: plain bytes that belong to this value. See [`RegionInner`] for concurrent access.
unsafe impl Send for HeapMemory {}
// SAFETY: as above.
unsafe impl Sync for HeapMemory {}
// SAFETY: one allocation of `layout.size()` bytes, aligned to at least 64, that lives as long as `self`.
unsafe impl Memory for HeapMemory {
    fn base(&self) -> *mut u8 {
        self.base
    }

    fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for HeapMemory {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this layout and is freed once, by the only owner.
        unsafe { dealloc(self.base, self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_apart_and_start_zeroed() {
        let region = Region::allocate(3, 96);
        region.write_block(BlockId(1), &[7; 96]);
        assert_eq!(region.read_block(BlockId(0)), vec![0; 96]);
        assert_eq!(region.read_block(BlockId(1)), vec![7; 96]);
        assert_eq!(region.read_block(BlockId(2)), vec![0; 96]);
    }

    #[test]
    #[should_panic(expected = "block 3 of a pool of 3")]
    fn a_block_outside_the_pool_is_refused() {
        let _ = Region::allocate(3, 96).block_ptr(BlockId(3));
    }

    #[test]
    #[should_panic(expected = "a pool of 288 bytes in a memory of 192")]
    fn a_pool_larger_than_its_memory_is_refused() {
        let _ = Region::with_memory(Box::new(HeapMemory::zeroed(192)), 3, 96);
    }

    #[test]
    fn provided_memory_is_released_with_the_last_clone() {
        #[derive(Debug)]
        struct CountedMemory {
            heap: HeapMemory,
            _alive: Arc<()>,
        }
        // SAFETY: `HeapMemory` meets the contract.
        unsafe impl Memory for CountedMemory {
            fn base(&self) -> *mut u8 {
                self.heap.base()
            }
            fn len(&self) -> usize {
                self.heap.len()
            }
        }
        let alive = Arc::new(());
        let region = Region::with_memory(
            Box::new(CountedMemory { heap: HeapMemory::zeroed(192), _alive: Arc::clone(&alive) }),
            2,
            96,
        );
        assert!((region.memory() as &dyn Any).is::<CountedMemory>());
        let clone = region.clone();
        drop(region);
        clone.write_block(BlockId(1), &[7; 96]);
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(clone);
        assert_eq!(Arc::strong_count(&alive), 1);
    }
}
