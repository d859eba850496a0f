//! Which side has the newer bytes of a block: the device, or the host's mirror that transports and tiers read and
//! write. Pure.
//!
//! | event | newer side afterwards |
//! |---|---|
//! | a step writes the block, or it lands on the device from another device or a tier | the device |
//! | the block is leased | the device; a reader of the mirror copies the block first |
//! | the block is reserved for a write from outside | the host |
//! | the block is copied, in either direction | neither |

use baton_connector::BlockId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NewerSide {
    Neither,
    Device,
    /// The device, under the lease with this number. A copy for an earlier lease does not complete a later one.
    Leased(u64),
    Host,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct MirrorMap {
    blocks: Vec<NewerSide>,
    leases: u64,
    /// Blocks that are being copied to the host. No other code may write them there meanwhile.
    in_flight: Vec<bool>,
}

/// A leased block that is not in the mirror yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingCopy {
    pub(super) block: BlockId,
    lease: u64,
}

impl MirrorMap {
    pub(super) fn new(blocks: usize) -> Self {
        Self { blocks: vec![NewerSide::Neither; blocks], leases: 0, in_flight: vec![false; blocks] }
    }

    /// The device has newer bytes: a step, a transport or a tier has written them there.
    pub(super) fn mark_device_newer(&mut self, block: BlockId) {
        self.blocks[block.index()] = NewerSide::Device;
    }

    pub(super) fn reserve(&mut self, block: BlockId) {
        self.blocks[block.index()] = NewerSide::Host;
    }

    /// These blocks are leased: their bytes do not change any more, and readers of the mirror may copy them.
    pub(super) fn mark_leased(&mut self, blocks: impl Iterator<Item = BlockId>) {
        self.leases += 1;
        for block in blocks {
            let newer = &mut self.blocks[block.index()];
            if *newer == NewerSide::Device {
                *newer = NewerSide::Leased(self.leases);
            }
        }
    }

    /// Of these blocks, the leased ones that must be copied to the host before a read there.
    pub(super) fn pending_copies(&self, blocks: &[BlockId]) -> Vec<PendingCopy> {
        let pending = |&block: &BlockId| match self.blocks[block.index()] {
            NewerSide::Leased(lease) => Some(PendingCopy { block, lease }),
            NewerSide::Neither | NewerSide::Device | NewerSide::Host => None,
        };
        blocks.iter().filter_map(pending).collect()
    }

    /// These blocks are being copied to the host until [`Self::end_download`]. No other thread copies them meanwhile.
    pub(super) fn begin_download(&mut self, blocks: impl Iterator<Item = BlockId>) {
        blocks.for_each(|block| self.in_flight[block.index()] = true);
    }

    /// These are not being copied to the host any more.
    pub(super) fn end_download(&mut self, blocks: impl Iterator<Item = BlockId>) {
        blocks.for_each(|block| self.in_flight[block.index()] = false);
    }

    /// Whether any of these is being copied to the host.
    pub(super) fn is_in_flight(&self, blocks: &[BlockId]) -> bool {
        blocks.iter().any(|block| self.in_flight[block.index()])
    }

    /// These blocks have been copied to the host. Blocks that were reused meanwhile keep their state.
    pub(super) fn finish_copies(&mut self, pending: &[PendingCopy]) {
        for PendingCopy { block, lease } in pending {
            let newer = &mut self.blocks[block.index()];
            if *newer == NewerSide::Leased(*lease) {
                *newer = NewerSide::Neither;
            }
        }
    }

    /// Of these blocks, those that must be copied to the device before a step reads them. Marks them as copied. If the
    /// copy fails, the device is disabled.
    pub(super) fn take_pending_uploads(&mut self, blocks: impl Iterator<Item = BlockId>) -> Vec<BlockId> {
        let mut taken = Vec::new();
        for block in blocks {
            let newer = &mut self.blocks[block.index()];
            if *newer == NewerSide::Host {
                *newer = NewerSide::Neither;
                taken.push(block);
            }
        }
        taken
    }

    /// Of these blocks, those whose newer bytes are on the host.
    pub(super) fn pending_uploads(&self, blocks: &[BlockId]) -> Vec<BlockId> {
        blocks.iter().copied().filter(|block| self.blocks[block.index()] == NewerSide::Host).collect()
    }

    /// Of these blocks, those that must be copied to the host before a read there, without duplicates.
    pub(super) fn pending_downloads(&self, blocks: &[BlockId]) -> Vec<BlockId> {
        let on_device =
            |block: &BlockId| matches!(self.blocks[block.index()], NewerSide::Device | NewerSide::Leased(_));
        let mut found: Vec<_> = blocks.iter().copied().filter(on_device).collect();
        found.sort_unstable_by_key(|block| block.0);
        found.dedup();
        found
    }

    /// These blocks have been copied to the host, and have not been written since.
    pub(super) fn mark_downloaded(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            self.blocks[block.index()] = NewerSide::Neither;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(ids: &[u32]) -> Vec<BlockId> {
        ids.iter().map(|&id| BlockId(id)).collect()
    }

    #[test]
    fn a_block_is_copied_once_and_from_the_side_that_has_it() {
        let mut mirror = MirrorMap::new(4);
        let all = blocks(&[0, 1, 2, 3, 1]);
        let to_device = |mirror: &mut MirrorMap| mirror.take_pending_uploads((0..4).map(BlockId));
        let to_host = |mirror: &mut MirrorMap| {
            let found = mirror.pending_downloads(&all);
            mirror.mark_downloaded(&found);
            found
        };
        assert!(to_host(&mut mirror).is_empty() && to_device(&mut mirror).is_empty());
        mirror.mark_device_newer(BlockId(1));
        mirror.reserve(BlockId(2));
        assert_eq!(to_host(&mut mirror), [BlockId(1)]);
        assert_eq!(to_device(&mut mirror), [BlockId(2)]);
        assert!(to_host(&mut mirror).is_empty() && to_device(&mut mirror).is_empty());
        // After a failed read the block is computed, and the landed bytes are not used.
        mirror.reserve(BlockId(3));
        mirror.mark_device_newer(BlockId(3));
        assert_eq!(to_host(&mut mirror), [BlockId(3)]);
        // This block landed on the device: the mirror does not have it.
        mirror.reserve(BlockId(0));
        mirror.mark_device_newer(BlockId(0));
        assert!(to_device(&mut mirror).is_empty());
        assert_eq!(to_host(&mut mirror), [BlockId(0)]);
    }

    #[test]
    fn a_leased_block_is_copied_once_for_its_first_reader() {
        let mut mirror = MirrorMap::new(4);
        let leased = blocks(&[1, 2]);
        [1, 2, 3].into_iter().for_each(|block| mirror.mark_device_newer(BlockId(block)));
        mirror.mark_leased(leased.iter().copied());
        let pending = mirror.pending_copies(&blocks(&[0, 1, 2, 3]));
        assert_eq!(pending.iter().map(|copy| copy.block).collect::<Vec<_>>(), leased, "3 is not leased");
        mirror.finish_copies(&pending);
        assert!(mirror.pending_copies(&leased).is_empty());
        mirror.mark_leased(leased.iter().copied());
        assert!(mirror.pending_copies(&leased).is_empty(), "the mirror has it");
        assert!(mirror.pending_downloads(&leased).is_empty());
    }

    #[test]
    fn a_copy_for_one_lease_does_not_count_for_another() {
        let mut mirror = MirrorMap::new(1);
        let leased = blocks(&[0]);
        mirror.mark_device_newer(leased[0]);
        mirror.mark_leased(leased.iter().copied());
        let pending = mirror.pending_copies(&leased);
        // The lease ends while its reader copies, and the block then belongs to another prompt, which is leased too.
        mirror.mark_device_newer(leased[0]);
        mirror.finish_copies(&pending);
        assert_eq!(mirror.pending_downloads(&leased), leased);
        mirror.mark_leased(leased.iter().copied());
        mirror.finish_copies(&pending);
        assert_eq!(mirror.pending_copies(&leased).len(), 1, "the mirror has the other prompt's bytes");
        // A store includes leased blocks.
        assert_eq!(mirror.pending_downloads(&leased), leased);
        mirror.mark_downloaded(&leased);
        assert!(mirror.pending_copies(&leased).is_empty());
    }
}
