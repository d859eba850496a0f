//! The bytes of a granted batch as descriptors, with the addresses at the producer and at the consumer. This module
//! reads and writes no block.

use std::ops::Range;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector::transport::ReadOrder;
use baton_connector_channel::copy_runs::{OutsidePool, copy_runs};

use crate::api::ReadDescriptor;
use crate::offer::Offer;

/// The consumer's pool.
#[derive(Clone, Copy)]
pub(crate) struct LandingPool<'a> {
    /// A region of the same shape.
    pub region: &'a Region,
    /// The address of the pool, which may be in the memory of a device.
    pub base: usize,
}

impl LandingPool<'_> {
    /// The address of a block's byte.
    fn address(self, block: BlockId, offset: usize) -> Option<usize> {
        let inside = block.index() < self.region.blocks();
        inside.then(|| self.base + block.index() * self.region.block_bytes() + offset)
    }
}

/// The descriptors of the read's blocks `blocks`, with the unchecked ids `ids` at the producer. An error for bytes
/// outside either pool.
pub(crate) fn descriptors(
    order: &ReadOrder,
    landing: LandingPool<'_>,
    offer: &Offer,
    blocks: Range<usize>,
    ids: &mut dyn Iterator<Item = u32>,
) -> Result<Vec<ReadDescriptor>, OutsidePool> {
    let from = |id: u32, offset: usize, len: usize| offer.address(id, offset, len);
    let into = |block: BlockId, offset: usize| landing.address(block, offset);
    copy_runs(order, landing.region.block_bytes(), blocks, ids, from, into)
}

#[cfg(test)]
mod tests {
    use baton_connector::transport::Part;
    use baton_connector::{Handle, Reader};

    use super::*;
    use crate::api::Segment;

    const OFFER: u64 = 1 << 40;

    fn ask(into: &[u32], ids: &[u32]) -> (Result<Vec<ReadDescriptor>, OutsidePool>, usize) {
        let region = Region::allocate(8, 100);
        let (segment, name, metadata) = (Segment::Host, "p".into(), vec![1]);
        let offer = Offer { segment, block_bytes: 100, blocks: 5, base: OFFER, name, metadata };
        let into = into.iter().map(|&block| BlockId(block)).collect();
        let order =
            ReadOrder { handle: Handle(1), reader: Reader::sole(1), part: Part::Blocks { first: 0 }, into };
        // An address without memory, as device addresses are for the host.
        let base = 1 << 20;
        let landing = LandingPool { region: &region, base };
        (descriptors(&order, landing, &offer, 0..ids.len(), &mut ids.iter().copied()), base)
    }

    #[test]
    fn neighbours_on_both_sides_are_one_piece() {
        let (descriptors, base) = ask(&[3, 4, 5, 0], &[1, 2, 4, 3]);
        let from = usize::try_from(OFFER).expect("64 bits");
        let expected = [(100, 300, 200), (400, 500, 100), (300, 0, 100)];
        let expected =
            expected.map(|(there, here, len)| ReadDescriptor { from: from + there, into: base + here, len });
        assert_eq!(descriptors, Ok(expected.to_vec()));
    }

    #[test]
    fn a_block_outside_either_pool_has_no_piece() {
        assert_eq!(ask(&[0, 1], &[0, 5]).0, Err(OutsidePool));
        assert_eq!(ask(&[0, 1], &[u32::MAX, 0]).0, Err(OutsidePool));
        assert_eq!(ask(&[0, 8], &[0, 1]).0, Err(OutsidePool));
    }
}
