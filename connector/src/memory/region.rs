//! The memory of one paged KV pool, shared by the executor that computes in it and the transport that
//! copies blocks in and out.
//!
//! Blocks are plain bytes at `base + block × block_bytes`. Who may touch a block, and when, is decided by the
//! block pool and the leases (invariants 2 and 3), not by Rust's borrow checker: an executor writes some blocks
//! while transports read or write others, from other threads. The methods below are therefore raw copies
//! with bounds checks, and the pointers never escape except to the executor's kernels.
//!
//! The bytes are this process's heap, or any [`Memory`] that a transport brings: one that other engines of this
//! host can map, for instance.
#![allow(unsafe_code)] // a pool is one piece of memory used by several threads on disjoint blocks; see each block

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::BlockId;

/// Alignment of a pool and therefore of its first block, in bytes: one huge page where the pool is that large.
const ALIGNMENT_BYTES: usize = 2 << 20;

/// Where the bytes of a pool lie.
///
/// # Safety
/// From construction to drop, `base()` is one and the same address, aligned to 64 bytes, and the `len()` bytes
/// from it can be read and written by any thread. Nothing but the pool over it decides who writes them.
pub unsafe trait Memory: Any + Debug + Send + Sync {
    /// The first byte.
    fn base(&self) -> *mut u8;

    /// Bytes from there on.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A paged pool's memory. Cheap to clone; freed when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Region(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    memory: Box<dyn Memory>,
    /// `memory.base()`, asked once: kernels come here for every block.
    base: *mut u8,
    block_bytes: usize,
    blocks: usize,
}

// SAFETY: the pool is plain bytes. Concurrent access to one block is excluded by the contract (a block is
// written by its owner, or by one transfer while it is landing, or only read while it is leased).
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Region {
    /// Allocates `blocks` zeroed blocks of `block_bytes` bytes on this process's heap.
    ///
    /// # Panics
    /// When the pool is empty or larger than the address space.
    #[must_use]
    pub fn allocate(blocks: usize, block_bytes: usize) -> Self {
        Self::over(Box::new(Heap::zeroed(pool_bytes(blocks, block_bytes))), blocks, block_bytes)
    }

    /// A pool of `blocks` blocks of `block_bytes` bytes in memory that somebody else provides. It is dropped with
    /// the last clone of the region.
    ///
    /// # Panics
    /// When the pool is empty or larger than the memory.
    #[must_use]
    pub fn over(memory: Box<dyn Memory>, blocks: usize, block_bytes: usize) -> Self {
        let bytes = pool_bytes(blocks, block_bytes);
        assert!(bytes <= memory.len(), "a pool of {bytes} bytes in a memory of {}", memory.len());
        let base = memory.base();
        Self(Arc::new(Pool { memory, base, block_bytes, blocks }))
    }

    /// What holds the bytes, for a transport that looks for memory of its own kind.
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
    /// The pointer is valid for [`Self::block_bytes`] bytes while any clone of this region lives. The caller
    /// keeps the contract: nobody reads a block that is landing, and nobody writes one that is leased.
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
struct Heap {
    base: *mut u8,
    layout: Layout,
}

impl Heap {
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

// SAFETY: plain bytes that belong to this value; see [`Pool`] for who touches them.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}
// SAFETY: one allocation of `layout.size()` bytes, aligned to at least 64, that lives as long as `self`.
unsafe impl Memory for Heap {
    fn base(&self) -> *mut u8 {
        self.base
    }

    fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Heap {
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
        let _ = Region::over(Box::new(Heap::zeroed(192)), 3, 96);
    }

    #[test]
    fn memory_that_is_provided_is_given_back_with_the_last_clone() {
        #[derive(Debug)]
        struct Counted {
            heap: Heap,
            _alive: Arc<()>,
        }
        // SAFETY: the heap's own promise, passed on.
        unsafe impl Memory for Counted {
            fn base(&self) -> *mut u8 {
                self.heap.base()
            }
            fn len(&self) -> usize {
                self.heap.len()
            }
        }
        let alive = Arc::new(());
        let region =
            Region::over(Box::new(Counted { heap: Heap::zeroed(192), _alive: Arc::clone(&alive) }), 2, 96);
        assert!((region.memory() as &dyn Any).is::<Counted>());
        let clone = region.clone();
        drop(region);
        clone.write_block(BlockId(1), &[7; 96]);
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(clone);
        assert_eq!(Arc::strong_count(&alive), 1);
    }
}
