//! Which copies subscribers of KV events know. A copy is announced once to an audience, after an event named its block.
//! It is withdrawn when the tier has it no more, and before it is announced to another audience. Copies that were never
//! announced are not withdrawn.

use super::{DiskState, HostState, TierEntry, TierIndex};
use crate::blocks::hash::BlockHash;
use crate::offload::Tier;

/// The audiences to which the copies of one block were announced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AnnouncedCopies {
    host: Option<u64>,
    disk: Option<u64>,
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
    /// Announces the complete copies of a block whose tokens this audience knows.
    pub fn announce(&mut self, hash: BlockHash, audience: u64) {
        let Some(entry) = self.entries.get_mut(&hash).filter(|entry| !entry.forget_when_idle) else { return };
        // Without a host tier its slots only stage blocks for the disk.
        let host = self.config.host_blocks > 0 && matches!(entry.host, HostState::Ready { .. });
        let disk = matches!(entry.disk, DiskState::Ready { lost: false, .. });
        let AnnouncedCopies { host: host_known, disk: disk_known } = &mut entry.announced;
        for (is_complete, tier, known) in [(host, Tier::Host, host_known), (disk, Tier::Disk, disk_known)] {
            if is_complete && *known != Some(audience) {
                // A subscriber may count the copies of a block that it knows.
                if known.replace(audience).is_some() {
                    self.changes.push(TierChange::Withdrawn(tier, hash));
                }
                self.changes.push(TierChange::Announced(tier, hash));
            }
        }
    }

    /// Whether a copy of the block is announced to this audience.
    #[must_use]
    pub fn is_announced(&self, hash: BlockHash, audience: u64) -> bool {
        let is_known = |known: Option<u64>| known == Some(audience);
        let announced = self.entries.get(&hash).map(|entry| entry.announced);
        announced.is_some_and(|announced| is_known(announced.host) || is_known(announced.disk))
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
        if self.host == HostState::Absent && self.announced.host.take().is_some() {
            changes.push(TierChange::Withdrawn(Tier::Host, hash));
        }
        if self.disk == DiskState::Absent && self.announced.disk.take().is_some() {
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
        index.announce(hash(1), 0);
        index.announce(hash(1), 0);
        store(&mut index, 2);
        assert_eq!(index.take_changes(), [TierChange::Announced(Tier::Host, hash(1))]);
        assert!(index.is_announced(hash(1), 0) && !index.is_announced(hash(2), 0));
        // Both are evicted. Subscribers know the first only.
        store(&mut index, 3);
        store(&mut index, 4);
        assert_eq!(index.take_changes(), [TierChange::Withdrawn(Tier::Host, hash(1))]);
        index.announce(hash(3), 0);
        index.announce(hash(9), 0);
        index.forget_announcements();
        store(&mut index, 5);
        store(&mut index, 6);
        assert_eq!(index.take_changes(), [], "subscribers have forgotten it");
    }

    #[test]
    fn a_copy_is_announced_once_to_each_audience() {
        let mut index = TierIndex::new(TierConfig { host_blocks: 2, disk_blocks: 0 });
        store(&mut index, 1);
        index.announce(hash(1), 0);
        index.announce(hash(1), 3);
        index.announce(hash(1), 3);
        assert!(index.is_announced(hash(1), 3) && !index.is_announced(hash(1), 0));
        let (announced, withdrawn) =
            (TierChange::Announced(Tier::Host, hash(1)), TierChange::Withdrawn(Tier::Host, hash(1)));
        assert_eq!(index.take_changes(), [announced, withdrawn, announced]);
        index.clear();
        assert_eq!(index.take_changes(), [withdrawn]);
    }

    #[test]
    fn a_staged_block_is_announced_on_the_disk_only() {
        let mut index = TierIndex::new(TierConfig { host_blocks: 0, disk_blocks: 1 });
        assert!(store(&mut index, 1), "it goes on to the disk");
        index.announce(hash(1), 0);
        assert_eq!(index.take_changes(), [], "neither copy is complete for a reader");
        index.end_write(hash(1), &[], OrderOutcome::Complete);
        index.announce(hash(1), 0);
        assert_eq!(index.take_changes(), [TierChange::Announced(Tier::Disk, hash(1))]);
        index.clear();
        assert_eq!(index.take_changes(), [TierChange::Withdrawn(Tier::Disk, hash(1))]);
    }
}
