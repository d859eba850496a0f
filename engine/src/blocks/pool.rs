//! The paged KV pool's books: who holds which block, and which blocks can be reused.
//!
//! ```text
//!            allocate                     lend
//!   Free ─────────────▶ Active ───────────────▶ Leased
//!    ▲  ╲ allocate for a fetch                     │
//!    │   ▶ Landing ── landed ──▶ Active            │ give_back
//!    │        │ give_back           │ give_back    │
//!    └────────┴─────────────────────┴──────────────┘
//!   Cached: free, but still found by its hash; the free list is the cache, oldest first.
//!   Storing: nobody's but a worker's that copies it to a lower tier; begins while it is Active, and may outlast that.
//! ```
//!
//! Invariants (numbers as in ARCHITECTURE.md):
//! - 1: every block is in exactly one state and the states add up to the pool. A block that is shared is
//!   counted in the strongest of its states: landing, then active, then leased, then storing.
//! - 2: a block is given back at most once per grant; one time more is a bug of ours and panics.
//! - 3: a landing block is in no prefix cache and is never shared; a block that is being stored is not reused.

use std::collections::HashMap;

use baton_connector::BlockId;

use crate::blocks::hash::BlockHash;

/// How many blocks are in which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockUsage {
    /// Blocks of the pool.
    pub total: usize,
    /// Nobody's, and nothing worth keeping in it.
    pub free: usize,
    /// Nobody's, but found by its hash until it is reused.
    pub cached: usize,
    /// Held by a request that runs here.
    pub active: usize,
    /// Lent to a decode engine and held by nobody else.
    pub leased: usize,
    /// Being written by a transfer.
    pub landing: usize,
    /// Being copied to a lower tier and held by nobody else.
    pub storing: usize,
}

/// There are fewer reusable blocks than wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not enough blocks: {wanted} requested, {available} available")]
pub struct OutOfBlocks {
    /// Blocks asked for.
    pub wanted: usize,
    /// Blocks that are free or only cached.
    pub available: usize,
}

/// In what capacity somebody holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// A request that runs here.
    Active,
    /// A lease.
    Leased,
    /// A transfer into it.
    Landing,
    /// A copy of it to a lower tier.
    Storing,
}

#[derive(Clone, Debug, Default)]
struct Block {
    active: u32,
    leased: u32,
    landing: bool,
    storing: bool,
    hash: Option<BlockHash>,
    /// Neighbours in the free list, meaningful only while nobody holds the block.
    previous: Option<u32>,
    next: Option<u32>,
}

impl Block {
    fn idle(&self) -> bool {
        self.active == 0 && self.leased == 0 && !self.landing && !self.storing
    }
}

/// The pool's books. The memory itself is a [`baton_connector::region::Region`].
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    by_hash: HashMap<BlockHash, BlockId>,
    head: Option<u32>,
    tail: Option<u32>,
    available: usize,
    usage: BlockUsage,
}

impl BlockPool {
    /// A pool of `total` free blocks.
    #[must_use]
    pub fn new(total: usize) -> Self {
        let mut pool = Self {
            blocks: vec![Block::default(); total],
            by_hash: HashMap::new(),
            head: None,
            tail: None,
            available: 0,
            usage: BlockUsage { total, free: total, ..BlockUsage::default() },
        };
        for id in 0..total {
            pool.push_back(BlockId(u32::try_from(id).expect("block ids are 32 bits")));
        }
        pool
    }

    /// Blocks by state.
    #[must_use]
    pub fn usage(&self) -> BlockUsage {
        self.usage
    }

    /// Whether a transfer may write into this block.
    #[must_use]
    pub fn is_landing(&self, id: BlockId) -> bool {
        self.blocks[id.index()].landing
    }

    /// Blocks that [`Self::allocate`] can hand out.
    #[must_use]
    pub fn available(&self) -> usize {
        self.available
    }

    /// Takes `count` blocks, the least recently used first, and forgets what was cached in them.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; nothing is taken then.
    pub fn allocate(&mut self, count: usize, hold: Hold) -> Result<Vec<BlockId>, OutOfBlocks> {
        if count > self.available {
            return Err(OutOfBlocks { wanted: count, available: self.available });
        }
        let mut taken = Vec::with_capacity(count);
        for _ in 0..count {
            let id = BlockId(self.head.expect("available counts the list"));
            if let Some(hash) = self.blocks[id.index()].hash {
                self.recount(id, |block| block.hash = None);
                self.by_hash.remove(&hash);
            }
            self.hold(id, hold);
            taken.push(id);
        }
        Ok(taken)
    }

    /// The longest run of cached blocks that starts the chain `hashes`.
    #[must_use]
    pub fn match_prefix(&self, hashes: &[BlockHash]) -> Vec<BlockId> {
        hashes.iter().map_while(|hash| self.by_hash.get(hash).copied()).collect()
    }

    /// Up to `limit` findable blocks with a hash above `after`, in the order of their hashes.
    #[must_use]
    pub fn findable(&self, after: Option<BlockHash>, limit: usize) -> Vec<(BlockHash, BlockId)> {
        let wanted = self.by_hash.iter().filter(|(hash, _)| after.is_none_or(|after| **hash > after));
        let mut found: Vec<_> = wanted.map(|(&hash, &id)| (hash, id)).collect();
        if found.len() > limit {
            found.select_nth_unstable_by_key(limit, |(hash, _)| *hash);
            found.truncate(limit);
        }
        found.sort_unstable_by_key(|(hash, _)| *hash);
        found
    }

    /// Of the blocks of a match, how many are nobody's (taking them uses up availability).
    #[must_use]
    pub fn idle_among(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|id| self.blocks[id.index()].idle()).count()
    }

    /// Of the blocks of a match, how many only a store holds.
    #[must_use]
    pub fn stored_only_among(&self, blocks: &[BlockId]) -> usize {
        let stored_only =
            |block: &Block| block.storing && block.active == 0 && block.leased == 0 && !block.landing;
        blocks.iter().filter(|id| stored_only(&self.blocks[id.index()])).count()
    }

    /// Adds a holder to blocks found by [`Self::match_prefix`].
    pub fn share(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            assert!(!self.blocks[id.index()].landing, "a landing block is not in the cache");
            self.hold(id, Hold::Active);
        }
    }

    /// Makes a full, computed or verified block findable. The first block with a hash keeps it.
    pub fn register(&mut self, id: BlockId, hash: BlockHash) {
        let block = &self.blocks[id.index()];
        assert!(block.active > 0 && !block.landing, "only a block with an active holder is registered");
        if block.hash.is_none() && !self.by_hash.contains_key(&hash) {
            self.blocks[id.index()].hash = Some(hash);
            self.by_hash.insert(hash, id);
        }
    }

    /// Forgets every cached block's contents; blocks that are held stay with their holders.
    pub fn reset_cache(&mut self) {
        self.by_hash.clear();
        for index in 0..self.blocks.len() {
            self.recount(BlockId(index as u32), |block| block.hash = None);
        }
    }

    /// A request's hold becomes a lease's: its blocks are lent.
    pub fn lend(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            self.recount(id, |block| {
                block.active = block.active.checked_sub(1).expect("a leased block was held by its request");
                block.leased += 1;
            });
        }
    }

    /// A lease holds these blocks too, beside the request that still computes them.
    pub fn lend_too(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            self.recount(id, |block| {
                assert!(block.active > 0, "a leased block is held by its request");
                block.leased += 1;
            });
        }
    }

    /// A worker is going to copy this block to a lower tier: until that is given back nobody reuses it. False, and
    /// nothing is held, when one does so already.
    pub fn store(&mut self, id: BlockId) -> bool {
        let block = &self.blocks[id.index()];
        assert!(block.hash.is_some() && !block.landing, "only a block that can be found is stored");
        if block.storing {
            return false;
        }
        self.hold(id, Hold::Storing);
        true
    }

    /// The block that is found by this hash.
    #[must_use]
    pub fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.by_hash.get(&hash).copied()
    }

    /// Nothing writes into these blocks any more: they are their request's now, which knows whether what is in them
    /// may be used.
    pub fn landed(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            self.recount(id, |block| {
                assert!(block.landing, "block {} was not landing", id.0);
                block.landing = false;
                block.active += 1;
            });
        }
    }

    /// Gives blocks back, once per grant. The last of the list is reused first: a prefix outlives its tail.
    pub fn give_back(&mut self, blocks: &[BlockId], hold: Hold) {
        for &id in blocks.iter().rev() {
            self.recount(id, |block| match hold {
                Hold::Active => {
                    block.active = block.active.checked_sub(1).expect("given back once per grant")
                }
                Hold::Leased => {
                    block.leased = block.leased.checked_sub(1).expect("given back once per lease")
                }
                Hold::Landing => {
                    assert!(block.landing, "given back once per landing");
                    block.landing = false;
                }
                Hold::Storing => {
                    assert!(block.storing, "given back once per store");
                    block.storing = false;
                }
            });
            let block = &self.blocks[id.index()];
            if block.idle() {
                if block.hash.is_some() { self.push_back(id) } else { self.push_front(id) }
            }
        }
    }

    /// Adds a holder, taking the block out of the free list if it was nobody's.
    fn hold(&mut self, id: BlockId, hold: Hold) {
        if self.blocks[id.index()].idle() {
            self.unlink(id);
        }
        self.recount(id, |block| match hold {
            Hold::Active => block.active += 1,
            Hold::Leased => block.leased += 1,
            Hold::Landing => block.landing = true,
            Hold::Storing => block.storing = true,
        });
    }

    /// Changes a block and keeps the counts by state in step.
    fn recount(&mut self, id: BlockId, change: impl FnOnce(&mut Block)) {
        let block = &mut self.blocks[id.index()];
        *self.usage.of(block) -= 1;
        change(block);
        *self.usage.of(block) += 1;
    }

    fn push_back(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        (block.previous, block.next) = (self.tail, None);
        match self.tail {
            Some(tail) => self.blocks[tail as usize].next = Some(id.0),
            None => self.head = Some(id.0),
        }
        self.tail = Some(id.0);
        self.available += 1;
    }

    fn push_front(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        (block.previous, block.next) = (None, self.head);
        match self.head {
            Some(head) => self.blocks[head as usize].previous = Some(id.0),
            None => self.tail = Some(id.0),
        }
        self.head = Some(id.0);
        self.available += 1;
    }

    fn unlink(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        let (previous, next) = (block.previous.take(), block.next.take());
        match previous {
            Some(previous) => self.blocks[previous as usize].next = next,
            None => self.head = next,
        }
        match next {
            Some(next) => self.blocks[next as usize].previous = previous,
            None => self.tail = previous,
        }
        self.available -= 1;
    }
}

impl BlockUsage {
    fn of(&mut self, block: &Block) -> &mut usize {
        if block.landing {
            &mut self.landing
        } else if block.active > 0 {
            &mut self.active
        } else if block.leased > 0 {
            &mut self.leased
        } else if block.storing {
            &mut self.storing
        } else if block.hash.is_some() {
            &mut self.cached
        } else {
            &mut self.free
        }
    }

    /// Whether the states add up to the pool (invariant 1).
    #[must_use]
    pub fn adds_up(&self) -> bool {
        self.free + self.cached + self.active + self.leased + self.landing + self.storing == self.total
    }

    /// Blocks that somebody holds, as a share of the pool from 0 to 1.
    #[must_use]
    pub fn held_share(&self) -> f64 {
        (self.active + self.leased + self.landing + self.storing) as f64 / self.total.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hash(n: u8) -> BlockHash {
        BlockHash([n; 32])
    }

    #[test]
    fn the_free_list_is_the_cache_and_a_prefix_outlives_its_tail() {
        let mut pool = BlockPool::new(4);
        let held = pool.allocate(3, Hold::Active).expect("room");
        for (i, &id) in held.iter().enumerate() {
            pool.register(id, hash(i as u8));
        }
        pool.give_back(&held, Hold::Active);
        assert_eq!(pool.usage(), BlockUsage { total: 4, free: 1, cached: 3, ..BlockUsage::default() });
        assert_eq!(pool.match_prefix(&[hash(0), hash(1), hash(9), hash(2)]), held[..2]);
        pool.allocate(2, Hold::Active).expect("room");
        assert_eq!(pool.match_prefix(&[hash(0), hash(1), hash(2)]), held[..2], "the tail was reused first");
    }

    #[test]
    fn findable_blocks_come_in_the_order_of_their_hashes_page_by_page() {
        let mut pool = BlockPool::new(5);
        let held = pool.allocate(5, Hold::Active).expect("room");
        for (&id, n) in held.iter().zip([4, 2, 5, 1, 3]) {
            pool.register(id, hash(n));
        }
        assert_eq!(pool.findable(None, 2), [(hash(1), held[3]), (hash(2), held[1])]);
        assert_eq!(pool.findable(Some(hash(2)), 2), [(hash(3), held[4]), (hash(4), held[0])]);
        assert_eq!(pool.findable(Some(hash(4)), 2), [(hash(5), held[2])]);
        assert_eq!(pool.findable(Some(hash(5)), 2), []);
    }

    #[test]
    fn a_lent_block_is_not_handed_out_again_until_the_lease_ends() {
        let mut pool = BlockPool::new(2);
        let held = pool.allocate(2, Hold::Active).expect("room");
        pool.lend(&held);
        assert_eq!(pool.usage().leased, 2);
        assert_eq!(pool.allocate(1, Hold::Active), Err(OutOfBlocks { wanted: 1, available: 0 }));
        pool.give_back(&held, Hold::Leased);
        assert_eq!(pool.usage().free, 2);
    }

    #[test]
    fn a_block_both_leased_and_active_is_counted_once_and_kept_for_both() {
        let mut pool = BlockPool::new(2);
        let held = pool.allocate(1, Hold::Active).expect("room");
        pool.register(held[0], hash(1));
        pool.share(&held);
        pool.lend(&held);
        assert_eq!((pool.usage().active, pool.usage().leased), (1, 0));
        pool.give_back(&held, Hold::Active);
        assert_eq!((pool.usage().active, pool.usage().leased), (0, 1));
        pool.give_back(&held, Hold::Leased);
        assert_eq!(pool.usage().cached, 1);
    }

    #[test]
    fn a_block_that_is_being_stored_is_not_reused_before_the_copy_is_done() {
        let mut pool = BlockPool::new(1);
        let held = pool.allocate(1, Hold::Active).expect("room");
        pool.register(held[0], hash(1));
        assert!(pool.store(held[0]) && !pool.store(held[0]), "one copy at a time");
        pool.lend(&held);
        pool.give_back(&held, Hold::Leased);
        assert_eq!((pool.usage().storing, pool.available()), (1, 0));
        pool.share(&held);
        assert_eq!((pool.usage().storing, pool.usage().active), (0, 1), "it is found meanwhile");
        pool.give_back(&held, Hold::Active);
        assert!(pool.allocate(1, Hold::Active).is_err());
        pool.give_back(&held, Hold::Storing);
        assert_eq!(pool.usage().cached, 1);
    }

    #[test]
    #[should_panic(expected = "given back once per lease")]
    fn a_lease_that_gives_back_twice_is_caught() {
        let mut pool = BlockPool::new(1);
        let held = pool.allocate(1, Hold::Active).expect("room");
        pool.lend(&held);
        pool.give_back(&held, Hold::Leased);
        pool.give_back(&held, Hold::Leased);
    }

    proptest! {
        /// Random grants, shares, loans, landings and returns: the states always add up, and in the end
        /// everything is home.
        #[test]
        fn states_always_add_up(steps in prop::collection::vec((0_u8..7, 0_usize..64, 1_usize..4), 1..200)) {
            let mut pool = BlockPool::new(12);
            let mut grants: Vec<(Vec<BlockId>, Hold)> = Vec::new();
            let mut stamp = 0_u8;
            for (kind, pick, count) in steps {
                let at = if grants.is_empty() { 0 } else { pick % grants.len() };
                match kind {
                    0 => if let Ok(taken) = pool.allocate(count, Hold::Active) {
                        for &id in &taken { stamp = stamp.wrapping_add(1); pool.register(id, hash(stamp)); }
                        grants.push((taken, Hold::Active));
                    },
                    1 => if let Ok(taken) = pool.allocate(count, Hold::Landing) { grants.push((taken, Hold::Landing)) },
                    2 => if let Some((blocks, hold)) = grants.get_mut(at) && *hold == Hold::Active {
                        pool.lend(blocks);
                        *hold = Hold::Leased;
                    },
                    3 => if let Some((blocks, hold)) = grants.get_mut(at) && *hold == Hold::Landing {
                        pool.landed(blocks);
                        *hold = Hold::Active;
                    },
                    4 => {
                        let found = pool.match_prefix(&[hash(pick as u8)]);
                        pool.share(&found);
                        if !found.is_empty() { grants.push((found, Hold::Active)) }
                    }
                    5 => if let Some(block) = pool.find(hash(pick as u8)) && pool.store(block) {
                        grants.push((vec![block], Hold::Storing));
                    },
                    _ => if !grants.is_empty() {
                        let (blocks, hold) = grants.swap_remove(at);
                        pool.give_back(&blocks, hold);
                    },
                }
                prop_assert!(pool.usage().adds_up());
                prop_assert_eq!(pool.available(), pool.usage().free + pool.usage().cached);
            }
            for (blocks, hold) in grants.drain(..) { pool.give_back(&blocks, hold) }
            prop_assert_eq!(pool.available(), 12);
        }
    }
}
