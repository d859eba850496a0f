//! Which side has a block's newer bytes: the device, or the host's mirror that transports and tiers read and write.
//! Pure.
//!
//! | what happens | the newer side is then |
//! |---|---|
//! | a step writes the block, or it has landed on the device from another or from a tier | the device's |
//! | it is lent | the device's, and whoever reads it in the mirror copies it there first |
//! | it is about to be written from outside | the host's |
//! | it was copied, either way | neither's |

use baton_connector::BlockId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Newer {
    Neither,
    Device,
    /// The device, by loan of this number. A copy of an earlier loan's bytes does not settle a later one's.
    Lent(u64),
    Host,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Mirror {
    blocks: Vec<Newer>,
    loans: u64,
    /// Which blocks are being copied to the host: nobody else may write them there meanwhile.
    in_flight: Vec<bool>,
}

/// A block of a loan that is not in the mirror yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owed {
    pub(super) block: BlockId,
    loan: u64,
}

impl Mirror {
    pub(super) fn new(blocks: usize) -> Self {
        Self { blocks: vec![Newer::Neither; blocks], loans: 0, in_flight: vec![false; blocks] }
    }

    /// The device has newer bytes: a step has written them, or a transport or a tier to the device.
    pub(super) fn computed(&mut self, block: BlockId) {
        self.blocks[block.index()] = Newer::Device;
    }

    pub(super) fn landing(&mut self, block: BlockId) {
        self.blocks[block.index()] = Newer::Host;
    }

    /// These blocks are lent: from now on their bytes do not change, and readers of the mirror may copy them.
    pub(super) fn lend(&mut self, blocks: impl Iterator<Item = BlockId>) {
        self.loans += 1;
        for block in blocks {
            let newer = &mut self.blocks[block.index()];
            if *newer == Newer::Device {
                *newer = Newer::Lent(self.loans);
            }
        }
    }

    /// Of these blocks, those that were lent and must be copied to the host before anybody reads them there.
    pub(super) fn owed(&self, blocks: &[BlockId]) -> Vec<Owed> {
        let owed = |&block: &BlockId| match self.blocks[block.index()] {
            Newer::Lent(loan) => Some(Owed { block, loan }),
            Newer::Neither | Newer::Device | Newer::Host => None,
        };
        blocks.iter().filter_map(owed).collect()
    }

    /// These are being copied to the host, until that is over. Nobody else copies them meanwhile.
    pub(super) fn begin(&mut self, blocks: impl Iterator<Item = BlockId>) {
        blocks.for_each(|block| self.in_flight[block.index()] = true);
    }

    /// These are not being copied to the host any more.
    pub(super) fn over(&mut self, blocks: impl Iterator<Item = BlockId>) {
        blocks.for_each(|block| self.in_flight[block.index()] = false);
    }

    /// Whether any of these is being copied to the host.
    pub(super) fn is_in_flight(&self, blocks: &[BlockId]) -> bool {
        blocks.iter().any(|block| self.in_flight[block.index()])
    }

    /// These have been copied to the host. What has been given to somebody else meanwhile counts as it did.
    pub(super) fn paid(&mut self, owed: &[Owed]) {
        for Owed { block, loan } in owed {
            let newer = &mut self.blocks[block.index()];
            if *newer == Newer::Lent(*loan) {
                *newer = Newer::Neither;
            }
        }
    }

    /// Of these blocks, those that must be copied to the device before it reads them. They count as copied: where that
    /// fails, the device is used no more.
    pub(super) fn take_to_device(&mut self, blocks: impl Iterator<Item = BlockId>) -> Vec<BlockId> {
        let mut taken = Vec::new();
        for block in blocks {
            let newer = &mut self.blocks[block.index()];
            if *newer == Newer::Host {
                *newer = Newer::Neither;
                taken.push(block);
            }
        }
        taken
    }

    /// Of these blocks, those that only the host has.
    pub(super) fn on_host(&self, blocks: &[BlockId]) -> Vec<BlockId> {
        blocks.iter().copied().filter(|block| self.blocks[block.index()] == Newer::Host).collect()
    }

    /// Of these blocks, those that must be copied to the host before anybody reads them there, each once.
    pub(super) fn to_host(&self, blocks: &[BlockId]) -> Vec<BlockId> {
        let on_device =
            |block: &BlockId| matches!(self.blocks[block.index()], Newer::Device | Newer::Lent(_));
        let mut found: Vec<_> = blocks.iter().copied().filter(on_device).collect();
        found.sort_unstable_by_key(|block| block.0);
        found.dedup();
        found
    }

    /// These have been copied to the host, and have not been written since.
    pub(super) fn copied_to_host(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            self.blocks[block.index()] = Newer::Neither;
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
        let mut mirror = Mirror::new(4);
        let all = blocks(&[0, 1, 2, 3, 1]);
        let to_device = |mirror: &mut Mirror| mirror.take_to_device((0..4).map(BlockId));
        let to_host = |mirror: &mut Mirror| {
            let found = mirror.to_host(&all);
            mirror.copied_to_host(&found);
            found
        };
        assert!(to_host(&mut mirror).is_empty() && to_device(&mut mirror).is_empty());
        mirror.computed(BlockId(1));
        mirror.landing(BlockId(2));
        assert_eq!(to_host(&mut mirror), [BlockId(1)]);
        assert_eq!(to_device(&mut mirror), [BlockId(2)]);
        assert!(to_host(&mut mirror).is_empty() && to_device(&mut mirror).is_empty());
        // A read that failed: the block is computed after all, and what had landed is of no use.
        mirror.landing(BlockId(3));
        mirror.computed(BlockId(3));
        assert_eq!(to_host(&mut mirror), [BlockId(3)]);
        // One that came by the device: the mirror has nothing of it.
        mirror.landing(BlockId(0));
        mirror.computed(BlockId(0));
        assert!(to_device(&mut mirror).is_empty());
        assert_eq!(to_host(&mut mirror), [BlockId(0)]);
    }

    #[test]
    fn what_is_lent_is_copied_for_its_first_reader_and_not_again() {
        let mut mirror = Mirror::new(4);
        let lent = blocks(&[1, 2]);
        [1, 2, 3].into_iter().for_each(|block| mirror.computed(BlockId(block)));
        mirror.lend(lent.iter().copied());
        let owed = mirror.owed(&blocks(&[0, 1, 2, 3]));
        assert_eq!(owed.iter().map(|owed| owed.block).collect::<Vec<_>>(), lent, "3 is not lent");
        mirror.paid(&owed);
        assert!(mirror.owed(&lent).is_empty());
        mirror.lend(lent.iter().copied());
        assert!(mirror.owed(&lent).is_empty(), "the mirror has it");
        assert!(mirror.to_host(&lent).is_empty());
    }

    #[test]
    fn a_copy_of_one_loan_does_not_settle_another() {
        let mut mirror = Mirror::new(1);
        let lent = blocks(&[0]);
        mirror.computed(lent[0]);
        mirror.lend(lent.iter().copied());
        let owed = mirror.owed(&lent);
        // The lease ends while its reader copies, and the block is another prompt's, which is lent too.
        mirror.computed(lent[0]);
        mirror.paid(&owed);
        assert_eq!(mirror.to_host(&lent), lent);
        mirror.lend(lent.iter().copied());
        mirror.paid(&owed);
        assert_eq!(mirror.owed(&lent).len(), 1, "the mirror has the other prompt's bytes");
        // A store takes a lent block too.
        assert_eq!(mirror.to_host(&lent), lent);
        mirror.copied_to_host(&lent);
        assert!(mirror.owed(&lent).is_empty());
    }
}
