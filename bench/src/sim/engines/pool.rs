//! The blocks of one simulated engine: which are free, and what each of them holds.
//!
//! The free list is a stack, so that what was freed last is given out next, and a read that comes too late finds
//! somebody else's content. Contents can be read by anybody at any time, as one-sided reads do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the blocks of an engine hold; its peers read it without asking.
#[derive(Clone, Debug)]
pub(super) struct Contents(Arc<[AtomicU64]>);

impl Contents {
    fn new(blocks: usize) -> Self {
        Self((0..blocks).map(|_| AtomicU64::new(0)).collect())
    }

    /// A block that does not exist holds nothing.
    pub(super) fn read(&self, block: u32) -> u64 {
        self.0.get(block as usize).map_or(0, |content| content.load(Ordering::Relaxed))
    }

    pub(super) fn write(&self, block: u32, content: u64) {
        self.0[block as usize].store(content, Ordering::Relaxed);
    }
}

/// Whose a block is that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    Active,
    Landing,
    Leased,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Pool {
    free: Vec<u32>,
    total: usize,
    held: [usize; 3],
    contents: Contents,
}

/// Blocks by state. Where a block was freed twice they add up to more than the total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Usage {
    pub total: usize,
    pub free: usize,
    pub active: usize,
    pub landing: usize,
    pub leased: usize,
}

impl Pool {
    pub(super) fn new(blocks: usize) -> Self {
        let free = (0..u32::try_from(blocks).expect("a plan's blocks are few")).rev().collect();
        Self { free, total: blocks, held: [0; 3], contents: Contents::new(blocks) }
    }

    pub(super) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Takes blocks, or none where there are not enough.
    pub(super) fn take(&mut self, blocks: usize, held: Held) -> Option<Vec<u32>> {
        let left = self.free.len().checked_sub(blocks)?;
        let mut taken = self.free.split_off(left);
        taken.reverse();
        self.held[held as usize] += blocks;
        Some(taken)
    }

    pub(super) fn become_of(&mut self, blocks: usize, before: Held, now: Held) {
        self.held[before as usize] -= blocks;
        self.held[now as usize] += blocks;
    }

    pub(super) fn give_back(&mut self, blocks: &[u32], held: Held) {
        self.held[held as usize] -= blocks.len();
        self.free.extend(blocks.iter().rev());
    }

    /// The planted fault: blocks that are free are put on the list once more. The list has an end.
    pub(super) fn free_again(&mut self, blocks: &[u32]) {
        if self.free.len() + blocks.len() <= self.total * 4 {
            self.free.extend(blocks.iter().rev());
        }
    }

    pub(super) fn usage(&self) -> Usage {
        let [active, landing, leased] = self.held;
        Usage { total: self.total, free: self.free.len(), active, landing, leased }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_freed_last_is_given_out_next() {
        let mut pool = Pool::new(8);
        let first = pool.take(3, Held::Active).expect("eight are free");
        assert!(pool.take(6, Held::Active).is_none(), "five are free");
        pool.give_back(&first, Held::Active);
        assert_eq!(pool.take(3, Held::Landing), Some(first));
        let usage = Usage { total: 8, free: 5, active: 0, landing: 3, leased: 0 };
        assert_eq!(pool.usage(), usage);
    }

    #[test]
    fn what_is_freed_twice_has_two_owners_and_shows_in_the_sum() {
        let mut pool = Pool::new(4);
        let blocks = pool.take(2, Held::Leased).expect("four are free");
        pool.give_back(&blocks, Held::Leased);
        pool.free_again(&blocks);
        let (one, other) = (pool.take(2, Held::Active), pool.take(2, Held::Active));
        assert_eq!(one, other);
        let Usage { total, free, active, .. } = pool.usage();
        assert!(free + active > total);
    }
}
