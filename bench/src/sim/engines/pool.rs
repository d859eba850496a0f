//! The blocks of one simulated engine: which are free, and their contents.
//!
//! The free list is a stack: the block that was freed last is allocated first, so that a late read finds another
//! request's content. Other engines can read contents at any time, as with one-sided reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::text;

/// The contents of an engine's blocks. Other engines read them without permission.
#[derive(Clone, Debug)]
pub(super) struct Contents(Arc<[AtomicU64]>);

impl Contents {
    fn new(blocks: usize) -> Self {
        Self((0..blocks).map(|_| AtomicU64::new(0)).collect())
    }

    /// A block that does not exist has no content.
    pub(super) fn read(&self, block: u32) -> u64 {
        self.0.get(block as usize).map_or(0, |content| content.load(Ordering::Relaxed))
    }

    pub(super) fn write(&self, block: u32, content: u64) {
        self.0[block as usize].store(content, Ordering::Relaxed);
    }

    /// Word `number` of the response to a prompt of `prompt` tokens, by the current contents of its blocks. Writes the
    /// content of a block that the word before has begun.
    pub(super) fn generate(
        &self,
        blocks: &[u32],
        prompt: usize,
        number: usize,
        block_tokens: usize,
    ) -> &'static str {
        let used = (prompt + number).div_ceil(block_tokens).min(blocks.len());
        if number > 0 && used > (prompt + number - 1).div_ceil(block_tokens) {
            let before = self.read(blocks[used - 2]);
            self.write(blocks[used - 1], text::next_content(before));
        }
        text::word(blocks[..used].iter().map(|&block| self.read(block)), number)
    }
}

/// The state of a block that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockHolder {
    Active,
    Landing,
    Leased,
}

/// A pool. See the module documentation.
#[derive(Debug)]
pub(super) struct SimPool {
    free: Vec<u32>,
    total: usize,
    held: [usize; 3],
    contents: Contents,
}

/// Blocks by state. With blocks that were freed twice, the sum exceeds the total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolUsage {
    pub total: usize,
    pub free: usize,
    pub active: usize,
    pub landing: usize,
    pub leased: usize,
}

impl SimPool {
    pub(super) fn new(blocks: usize) -> Self {
        let free = (0..u32::try_from(blocks).expect("a plan's blocks are few")).rev().collect();
        Self { free, total: blocks, held: [0; 3], contents: Contents::new(blocks) }
    }

    pub(super) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Takes blocks, or none if there are not enough.
    pub(super) fn take(&mut self, blocks: usize, held: BlockHolder) -> Option<Vec<u32>> {
        let left = self.free.len().checked_sub(blocks)?;
        let mut taken = self.free.split_off(left);
        taken.reverse();
        self.held[held as usize] += blocks;
        Some(taken)
    }

    pub(super) fn become_of(&mut self, blocks: usize, before: BlockHolder, now: BlockHolder) {
        self.held[before as usize] -= blocks;
        self.held[now as usize] += blocks;
    }

    pub(super) fn give_back(&mut self, blocks: &[u32], held: BlockHolder) {
        self.held[held as usize] -= blocks.len();
        self.free.extend(blocks.iter().rev());
    }

    /// The fault: adds free blocks to the list again. The list has a maximum length.
    pub(super) fn free_again(&mut self, blocks: &[u32]) {
        if self.free.len() + blocks.len() <= self.total * 4 {
            self.free.extend(blocks.iter().rev());
        }
    }

    pub(super) fn usage(&self) -> PoolUsage {
        let [active, landing, leased] = self.held;
        PoolUsage { total: self.total, free: self.free.len(), active, landing, leased }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_freed_block_is_allocated_next() {
        let mut pool = SimPool::new(8);
        let first = pool.take(3, BlockHolder::Active).expect("eight are free");
        assert!(pool.take(6, BlockHolder::Active).is_none(), "five are free");
        pool.give_back(&first, BlockHolder::Active);
        assert_eq!(pool.take(3, BlockHolder::Landing), Some(first));
        let usage = PoolUsage { total: 8, free: 5, active: 0, landing: 3, leased: 0 };
        assert_eq!(pool.usage(), usage);
    }

    #[test]
    fn a_double_free_gives_a_block_two_owners_and_a_wrong_sum() {
        let mut pool = SimPool::new(4);
        let blocks = pool.take(2, BlockHolder::Leased).expect("four are free");
        pool.give_back(&blocks, BlockHolder::Leased);
        pool.free_again(&blocks);
        let (one, other) = (pool.take(2, BlockHolder::Active), pool.take(2, BlockHolder::Active));
        assert_eq!(one, other);
        let PoolUsage { total, free, active, .. } = pool.usage();
        assert!(free + active > total);
    }
}
