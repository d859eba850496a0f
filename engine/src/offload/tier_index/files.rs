//! The files of a disk tier: which may be evicted, and which deletions are pending.

use std::collections::{BTreeMap, BTreeSet};

use super::WRITES_MAX;
use crate::blocks::hash::BlockHash;
use crate::offload::TierCounts;

/// Limit of the pending deletes that one write order carries out.
const EVICTIONS_PER_ORDER_MAX: usize = 64;

/// Limit of the deletions of one delete order.
const DELETIONS_PER_ORDER_MAX: usize = 1024;

/// The files of the disk tier.
#[derive(Debug)]
pub(super) struct TierFiles {
    /// Blocks that may be evicted, by last use.
    pub(super) idle: BTreeMap<u64, BlockHash>,
    /// Evicted files that are not deleted yet.
    pub(super) pending_deletes: BTreeSet<BlockHash>,
    /// Files that are not evicted, including those being written.
    pub(super) used: usize,
    /// Pending writes.
    pub(super) writes: usize,
    /// A delete order is pending.
    pub(super) deleting: bool,
    /// The index was cleared: deletions do not wait for a write.
    pub(super) purging: bool,
    pub(super) suspended: bool,
    pub(super) counts: TierCounts,
}

impl TierFiles {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            idle: BTreeMap::new(),
            pending_deletes: BTreeSet::new(),
            used: 0,
            writes: 0,
            deleting: false,
            purging: false,
            suspended: false,
            counts: TierCounts { capacity, ..TierCounts::default() },
        }
    }

    pub(super) fn counts(&self) -> TierCounts {
        TierCounts { blocks: self.used, ..self.counts }
    }

    /// Whether a file can be written, apart from the number of files.
    pub(super) fn takes_writes(&self) -> bool {
        self.counts.capacity > 0 && !self.suspended && self.writes < WRITES_MAX
    }

    /// Counts a file that is about to be written. Returns the files to delete first.
    pub(super) fn begin_write(&mut self, hash: BlockHash) -> Option<Vec<BlockHash>> {
        // A file that is written again must not be deleted afterwards.
        self.pending_deletes.remove(&hash);
        if self.used + self.pending_deletes.len().saturating_sub(EVICTIONS_PER_ORDER_MAX)
            >= self.counts.capacity
        {
            // One order cannot carry out that many deletes; [`Self::begin_delete`] comes first.
            return None;
        }
        self.writes += 1;
        self.used += 1;
        Some(self.pending_deletes.iter().take(EVICTIONS_PER_ORDER_MAX).copied().collect())
    }

    /// Files to delete in an order of their own, if there are any that do not wait for a write.
    pub(super) fn begin_delete(&mut self) -> Option<Vec<BlockHash>> {
        let waits = self.pending_deletes.len() <= EVICTIONS_PER_ORDER_MAX && !self.purging;
        if self.pending_deletes.is_empty() || waits || self.deleting || self.suspended {
            return None;
        }
        self.deleting = true;
        Some(self.pending_deletes.iter().take(DELETIONS_PER_ORDER_MAX).copied().collect())
    }

    /// Excludes a file from the tier. A later order deletes it.
    pub(super) fn delete_later(&mut self, hash: BlockHash) {
        self.used -= 1;
        self.pending_deletes.insert(hash);
    }

    pub(super) fn deleted(&mut self, hashes: &[BlockHash]) {
        for hash in hashes {
            self.pending_deletes.remove(hash);
        }
    }
}
