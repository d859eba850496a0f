//! The paged KV pool: the holders of each block, and the list of reusable blocks.
//!
//! ```text
//!            allocate                     lease
//!   Free ─────────────▶ Active ───────────────▶ Leased
//!    ▲  ╲ allocate for a fetch                     │
//!    │   ▶ Landing ── landed ──▶ Active            │ release
//!    │        │ release             │ release      │
//!    └────────┴─────────────────────┴──────────────┘
//!   Cached: free, but still found by its hash; the free list is the cache, oldest first.
//!   Storing: held only by a worker that copies it to a lower tier; begins while it is Active, and may outlast that.
//! ```
//!
//! Invariants (numbers as in ARCHITECTURE.md):
//! - 1: every block is in exactly one state, and the states add up to the pool. A shared block is counted in the
//!   strongest of its states: landing, then active, then leased, then storing.
//! - 2: a block is released at most once per grant. A further release is a bug and panics.
//! - 3: a landing block is in no prefix cache and is never shared. A block that is being stored is not reused.

use std::collections::{HashMap, HashSet};

use baton_connector::BlockId;

use crate::blocks::cache_events::{CacheEventLog, CacheMedium};
use crate::blocks::hash::BlockHash;

/// The number of blocks in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockUsage {
    /// Blocks of the pool.
    pub total: usize,
    /// Not held, and without cached contents.
    pub free: usize,
    /// Not held, but found by its hash until it is reused.
    pub cached: usize,
    /// Held by a running request.
    pub active: usize,
    /// Held only by leases to decode engines.
    pub leased: usize,
    /// Being written by a transfer.
    pub landing: usize,
    /// Being copied to a lower tier, and not held otherwise.
    pub storing: usize,
}

/// Fewer reusable blocks than requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not enough blocks: {wanted} requested, {available} available")]
pub struct OutOfBlocks {
    /// Blocks requested.
    pub wanted: usize,
    /// Blocks that are free or only cached.
    pub available: usize,
}

/// The kind of a hold on a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// A running request.
    Active,
    /// A lease.
    Leased,
    /// A transfer into it.
    Landing,
    /// A copy of it to a lower tier.
    Storing,
}

#[derive(Clone, Debug, Default)]
struct BlockState {
    active: u32,
    leased: u32,
    landing: bool,
    storing: bool,
    hash: Option<BlockHash>,
    /// Neighbours in the free list, valid only while the block is not held.
    previous: Option<u32>,
    next: Option<u32>,
    /// The audience of its last event.
    announced: Option<u64>,
}

impl BlockState {
    fn idle(&self) -> bool {
        self.active == 0 && self.leased == 0 && !self.landing && !self.storing
    }
}

/// The states of a pool's blocks. The memory itself is a [`baton_connector::region::Region`].
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<BlockState>,
    by_hash: HashMap<BlockHash, BlockId>,
    head: Option<u32>,
    tail: Option<u32>,
    available: usize,
    usage: BlockUsage,
    /// Changes of the prefix cache, if they are recorded.
    events: Option<CacheEventLog>,
}

impl BlockPool {
    /// A pool of `total` free blocks.
    #[must_use]
    pub fn new(total: usize) -> Self {
        let mut pool = Self {
            blocks: vec![BlockState::default(); total],
            by_hash: HashMap::new(),
            head: None,
            tail: None,
            available: 0,
            usage: BlockUsage { total, free: total, ..BlockUsage::default() },
            events: None,
        };
        for id in 0..total {
            pool.push_back(BlockId(u32::try_from(id).expect("block ids are 32 bits")));
        }
        pool
    }

    /// Records changes of the prefix cache from now on. The owner must drain them.
    pub fn record_events(&mut self) {
        self.events = Some(CacheEventLog::default());
    }

    /// The recorded changes; `None` if they are not recorded.
    pub fn events_mut(&mut self) -> Option<&mut CacheEventLog> {
        self.events.as_mut()
    }

    /// Whether the present audience has an event of this block. True if no changes are recorded.
    #[must_use]
    pub fn is_announced(&self, id: BlockId) -> bool {
        let audience = self.events.as_ref().map(CacheEventLog::audience);
        audience.is_none_or(|audience| self.blocks[id.index()].announced == Some(audience))
    }

    /// Whether the present audience has an event of the cached block with this hash, and of all blocks before it.
    #[must_use]
    pub fn is_known(&self, hash: BlockHash) -> bool {
        self.find(hash).is_some_and(|id| self.is_announced(id))
    }

    /// The present audience has an event of these blocks, and of the blocks before them.
    pub fn mark_announced(&mut self, blocks: &[BlockId]) {
        let audience = self.events.as_ref().map(CacheEventLog::audience);
        for id in blocks {
            self.blocks[id.index()].announced = audience;
        }
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

    /// Blocks that [`Self::allocate`] can return.
    #[must_use]
    pub fn available(&self) -> usize {
        self.available
    }

    /// Takes `count` blocks, the least recently used first, and removes their contents from the cache.
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
                if let Some(events) = &mut self.events {
                    events.removed(CacheMedium::Device, hash);
                }
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

    /// Up to `limit` cached blocks with a hash above `after`, in the order of their hashes.
    #[must_use]
    pub fn cached_after(&self, after: Option<BlockHash>, limit: usize) -> Vec<(BlockHash, BlockId)> {
        let wanted = self.by_hash.iter().filter(|(hash, _)| after.is_none_or(|after| **hash > after));
        let mut found: Vec<_> = wanted.map(|(&hash, &id)| (hash, id)).collect();
        if found.len() > limit {
            found.select_nth_unstable_by_key(limit, |(hash, _)| *hash);
            found.truncate(limit);
        }
        found.sort_unstable_by_key(|(hash, _)| *hash);
        found
    }

    /// The number of blocks of a match that are not held. Taking them reduces the available blocks.
    #[must_use]
    pub fn count_idle(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|id| self.blocks[id.index()].idle()).count()
    }

    /// The number of blocks of a match that only a store holds.
    #[must_use]
    pub fn count_only_storing(&self, blocks: &[BlockId]) -> usize {
        let stored_only =
            |block: &BlockState| block.storing && block.active == 0 && block.leased == 0 && !block.landing;
        blocks.iter().filter(|id| stored_only(&self.blocks[id.index()])).count()
    }

    /// The number of a request's blocks that are free when it releases them. `blocks` are in the order of its tokens.
    /// Requests share blocks from the first token on, so the shared ones come first.
    #[must_use]
    pub fn count_own(&self, blocks: &[BlockId]) -> usize {
        let is_shared = |id: &BlockId| {
            let block = &self.blocks[id.index()];
            block.active > 1 || block.leased > 0
        };
        blocks.len() - blocks.partition_point(is_shared)
    }

    /// The number of a request's blocks that can be allocated once it has released them, but for these blocks of a prefix,
    /// which another request takes then. A block that a store copies is free only after that.
    #[must_use]
    pub fn count_freed(&self, blocks: &[BlockId], prefix: &HashSet<BlockId>) -> usize {
        let is_freed = |id: &&BlockId| {
            let BlockState { active, leased, landing, storing, .. } = self.blocks[id.index()];
            active == 1 && leased == 0 && !landing && !storing && !prefix.contains(*id)
        };
        blocks.iter().filter(is_freed).count()
    }

    /// Adds a hold to blocks found by [`Self::match_prefix`].
    pub fn share(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            assert!(!self.blocks[id.index()].landing, "a landing block is not in the cache");
            self.hold(id, Hold::Active);
        }
    }

    /// Enters a full, computed or verified block into the prefix cache. The first block with a hash keeps it.
    /// Returns whether the block was entered.
    pub fn register(&mut self, id: BlockId, hash: BlockHash) -> bool {
        let block = &self.blocks[id.index()];
        assert!(block.active > 0 && !block.landing, "only a block with an active holder is registered");
        let enters = block.hash.is_none() && !self.by_hash.contains_key(&hash);
        if enters {
            let block = &mut self.blocks[id.index()];
            (block.hash, block.announced) = (Some(hash), None);
            self.by_hash.insert(hash, id);
        }
        enters
    }

    /// Clears the prefix cache. Held blocks stay held.
    pub fn reset_cache(&mut self) {
        self.by_hash.clear();
        for index in 0..self.blocks.len() {
            self.recount(BlockId(index as u32), |block| block.hash = None);
        }
        if let Some(events) = &mut self.events {
            events.cleared();
        }
    }

    /// Converts the request's hold on these blocks into a lease's hold.
    pub fn lease(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            self.recount(id, |block| {
                block.active = block.active.checked_sub(1).expect("a leased block was held by its request");
                block.leased += 1;
            });
        }
    }

    /// Adds a lease's hold, while a request still computes these blocks.
    pub fn add_lease(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            self.recount(id, |block| {
                assert!(block.active > 0, "a leased block is held by its request");
                block.leased += 1;
            });
        }
    }

    /// Holds this block while a worker copies it to a lower tier, so that it is not reused. False, without a new
    /// hold, if it is already being stored.
    pub fn store(&mut self, id: BlockId) -> bool {
        let block = &self.blocks[id.index()];
        assert!(block.hash.is_some() && !block.landing, "only a block that can be found is stored");
        if block.storing {
            return false;
        }
        self.hold(id, Hold::Storing);
        true
    }

    /// The block with this hash.
    #[must_use]
    pub fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.by_hash.get(&hash).copied()
    }

    /// Ends the transfer into these blocks. Their request now holds them, and knows whether their contents may be
    /// used.
    pub fn finish_landing(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            self.recount(id, |block| {
                assert!(block.landing, "block {} was not landing", id.0);
                block.landing = false;
                block.active += 1;
            });
        }
    }

    /// Releases blocks, once per grant. The last of the list is reused first, so that a prefix outlives its tail.
    pub fn release(&mut self, blocks: &[BlockId], hold: Hold) {
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

    /// Adds a hold. A block that was not held leaves the free list.
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

    /// Changes a block and updates the counts by state.
    fn recount(&mut self, id: BlockId, change: impl FnOnce(&mut BlockState)) {
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
    fn of(&mut self, block: &BlockState) -> &mut usize {
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

    /// Held blocks as a share of the pool, from 0 to 1.
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
    fn freed_blocks_stay_cached_and_the_tail_is_evicted_first() {
        let mut pool = BlockPool::new(4);
        let held = pool.allocate(3, Hold::Active).expect("room");
        for (i, &id) in held.iter().enumerate() {
            pool.register(id, hash(i as u8));
        }
        pool.release(&held, Hold::Active);
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
        assert_eq!(pool.cached_after(None, 2), [(hash(1), held[3]), (hash(2), held[1])]);
        assert_eq!(pool.cached_after(Some(hash(2)), 2), [(hash(3), held[4]), (hash(4), held[0])]);
        assert_eq!(pool.cached_after(Some(hash(4)), 2), [(hash(5), held[2])]);
        assert_eq!(pool.cached_after(Some(hash(5)), 2), []);
    }

    #[test]
    fn a_leased_block_is_not_allocated_until_the_lease_ends() {
        let mut pool = BlockPool::new(2);
        let held = pool.allocate(2, Hold::Active).expect("room");
        pool.lease(&held);
        assert_eq!(pool.usage().leased, 2);
        assert_eq!(pool.allocate(1, Hold::Active), Err(OutOfBlocks { wanted: 1, available: 0 }));
        pool.release(&held, Hold::Leased);
        assert_eq!(pool.usage().free, 2);
    }

    #[test]
    fn a_leased_and_active_block_counts_once_and_is_held_for_both() {
        let mut pool = BlockPool::new(2);
        let held = pool.allocate(1, Hold::Active).expect("room");
        pool.register(held[0], hash(1));
        pool.share(&held);
        pool.lease(&held);
        assert_eq!((pool.usage().active, pool.usage().leased), (1, 0));
        pool.release(&held, Hold::Active);
        assert_eq!((pool.usage().active, pool.usage().leased), (0, 1));
        pool.release(&held, Hold::Leased);
        assert_eq!(pool.usage().cached, 1);
    }

    #[test]
    fn a_block_that_is_being_stored_is_not_reused_before_the_copy_is_done() {
        let mut pool = BlockPool::new(1);
        let held = pool.allocate(1, Hold::Active).expect("room");
        pool.register(held[0], hash(1));
        assert!(pool.store(held[0]) && !pool.store(held[0]), "one copy at a time");
        pool.lease(&held);
        pool.release(&held, Hold::Leased);
        assert_eq!((pool.usage().storing, pool.available()), (1, 0));
        pool.share(&held);
        assert_eq!((pool.usage().storing, pool.usage().active), (0, 1), "it is found meanwhile");
        pool.release(&held, Hold::Active);
        assert!(pool.allocate(1, Hold::Active).is_err());
        pool.release(&held, Hold::Storing);
        assert_eq!(pool.usage().cached, 1);
    }

    #[test]
    #[should_panic(expected = "given back once per lease")]
    fn a_double_release_of_a_lease_panics() {
        let mut pool = BlockPool::new(1);
        let held = pool.allocate(1, Hold::Active).expect("room");
        pool.lease(&held);
        pool.release(&held, Hold::Leased);
        pool.release(&held, Hold::Leased);
    }

    proptest! {
        /// Random grants, shares, leases, landings and releases: the states always add up, and in the end every block
        /// is free.
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
                        pool.lease(blocks);
                        *hold = Hold::Leased;
                    },
                    3 => if let Some((blocks, hold)) = grants.get_mut(at) && *hold == Hold::Landing {
                        pool.finish_landing(blocks);
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
                        pool.release(&blocks, hold);
                    },
                }
                prop_assert!(pool.usage().adds_up());
                prop_assert_eq!(pool.available(), pool.usage().free + pool.usage().cached);
            }
            for (blocks, hold) in grants.drain(..) { pool.release(&blocks, hold) }
            prop_assert_eq!(pool.available(), 12);
        }
    }
}
