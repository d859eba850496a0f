//! Which copies subscribers of KV events know. A copy is announced once, after an event named its block, and is
//! withdrawn when the tier has it no more. Copies that were never announced are not withdrawn.

use super::{DiskState, HostState, TierEntry, TierIndex};
use crate::blocks::hash::BlockHash;
use crate::offload::Tier;

/// The announced copies of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AnnouncedCopies {
    host: bool,
    disk: bool,
}

/// A change of the announced copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierChange {
    /// A tier has the block.
    Announced(Tier, BlockHash),
    /// A tier has the block no more.
    Withdrawn(Tier, BlockHash),
}

impl TierIndex {
    /// Announces the complete copies of a block whose tokens subscribers know.
    pub fn announce(&mut self, hash: BlockHash) {
        let Some(entry) = self.entries.get_mut(&hash).filter(|entry| !entry.forget_when_idle) else { return };
        // Without a host tier its slots only stage blocks for the disk.
        if self.config.host_blocks > 0
            && matches!(entry.host, HostState::Ready { .. })
            && !entry.announced.host
        {
            entry.announced.host = true;
            self.changes.push(TierChange::Announced(Tier::Host, hash));
        }
        if matches!(entry.disk, DiskState::Ready { lost: false, .. }) && !entry.announced.disk {
            entry.announced.disk = true;
            self.changes.push(TierChange::Announced(Tier::Disk, hash));
        }
    }

    /// Whether a copy of the block is announced.
    #[must_use]
    pub fn is_announced(&self, hash: BlockHash) -> bool {
        self.entries.get(&hash).is_some_and(|entry| entry.announced != AnnouncedCopies::default())
    }

    /// Subscribers have forgotten all blocks.
    pub fn forget_announcements(&mut self) {
        self.changes.clear();
        self.entries.values_mut().for_each(|entry| entry.announced = AnnouncedCopies::default());
    }

    /// Removes and returns the changes since the last call, in order.
    #[must_use]
    pub fn take_changes(&mut self) -> Vec<TierChange> {
        std::mem::take(&mut self.changes)
    }
}

impl TierEntry {
    /// Withdraws announced copies that are absent.
    pub(super) fn withdraw(&mut self, hash: BlockHash, changes: &mut Vec<TierChange>) {
        if self.host == HostState::Absent && std::mem::take(&mut self.announced.host) {
            changes.push(TierChange::Withdrawn(Tier::Host, hash));
        }
        if self.disk == DiskState::Absent && std::mem::take(&mut self.announced.disk) {
            changes.push(TierChange::Withdrawn(Tier::Disk, hash));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{OrderOutcome, TierConfig};
    use super::*;

    fn hash(n: u8) -> BlockHash {
        BlockHash([n; 32])
    }

    fn store(index: &mut TierIndex, n: u8) -> bool {
        index.begin_store(hash(n)).expect("a slot");
        index.end_store(hash(n), OrderOutcome::Complete).is_some()
    }

    #[test]
    fn a_copy_is_announced_once_and_withdrawn_when_it_is_evicted() {
        let mut index = TierIndex::new(TierConfig { host_blocks: 2, disk_blocks: 0 });
        store(&mut index, 1);
        index.announce(hash(1));
        index.announce(hash(1));
        store(&mut index, 2);
        assert_eq!(index.take_changes(), [TierChange::Announced(Tier::Host, hash(1))]);
        assert!(index.is_announced(hash(1)) && !index.is_announced(hash(2)));
        // Both are evicted. Subscribers know the first only.
        store(&mut index, 3);
        store(&mut index, 4);
        assert_eq!(index.take_changes(), [TierChange::Withdrawn(Tier::Host, hash(1))]);
        index.announce(hash(3));
        index.announce(hash(9));
        index.forget_announcements();
        store(&mut index, 5);
        store(&mut index, 6);
        assert_eq!(index.take_changes(), [], "subscribers have forgotten it");
    }

    #[test]
    fn a_staged_block_is_announced_on_the_disk_only() {
        let mut index = TierIndex::new(TierConfig { host_blocks: 0, disk_blocks: 1 });
        assert!(store(&mut index, 1), "it goes on to the disk");
        index.announce(hash(1));
        assert_eq!(index.take_changes(), [], "neither copy is complete for a reader");
        index.end_write(hash(1), &[], OrderOutcome::Complete);
        index.announce(hash(1));
        assert_eq!(index.take_changes(), [TierChange::Announced(Tier::Disk, hash(1))]);
        index.clear();
        assert_eq!(index.take_changes(), [TierChange::Withdrawn(Tier::Disk, hash(1))]);
    }
}
