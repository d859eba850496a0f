//! Which side has a block's newer bytes: the device, or the host's mirror that transports and tiers read and write.
//! Pure.
//!
//! | what happens | the newer side is then |
//! |---|---|
//! | a step writes the block | the device's |
//! | it is about to be written from outside | the host's |
//! | it was copied, either way | neither's |

use baton_connector::BlockId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Newer {
    Neither,
    Device,
    Host,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Mirror(Vec<Newer>);

impl Mirror {
    pub(super) fn new(blocks: usize) -> Self {
        Self(vec![Newer::Neither; blocks])
    }

    pub(super) fn computed(&mut self, block: BlockId) {
        self.0[block.index()] = Newer::Device;
    }

    pub(super) fn landing(&mut self, block: BlockId) {
        self.0[block.index()] = Newer::Host;
    }

    /// Of these blocks, those that must be copied to the device before it reads them. They count as copied.
    pub(super) fn take_to_device(&mut self, blocks: impl Iterator<Item = BlockId>) -> Vec<BlockId> {
        self.take(Newer::Host, blocks)
    }

    /// Of these blocks, those that must be copied to the host before anybody reads them there. They count as copied.
    pub(super) fn take_to_host(&mut self, blocks: impl Iterator<Item = BlockId>) -> Vec<BlockId> {
        self.take(Newer::Device, blocks)
    }

    fn take(&mut self, side: Newer, blocks: impl Iterator<Item = BlockId>) -> Vec<BlockId> {
        let mut taken = Vec::new();
        for block in blocks {
            let newer = &mut self.0[block.index()];
            if *newer == side {
                *newer = Newer::Neither;
                taken.push(block);
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_copied_once_and_from_the_side_that_has_it() {
        let mut mirror = Mirror::new(4);
        let all = || (0..4).map(BlockId);
        assert!(mirror.take_to_host(all()).is_empty() && mirror.take_to_device(all()).is_empty());
        mirror.computed(BlockId(1));
        mirror.landing(BlockId(2));
        assert_eq!(mirror.take_to_host(all()), [BlockId(1)]);
        assert_eq!(mirror.take_to_device(all()), [BlockId(2)]);
        assert!(mirror.take_to_host(all()).is_empty() && mirror.take_to_device(all()).is_empty());
        // A read that failed: the block is computed after all, and what had landed is of no use.
        mirror.landing(BlockId(3));
        mirror.computed(BlockId(3));
        assert_eq!(mirror.take_to_host(all()), [BlockId(3)]);
    }
}
