//! The bytes of a granted batch as descriptors, with the addresses at the producer and at the consumer. Bytes that are
//! adjacent on both sides are one descriptor. This module reads and writes no block.

use std::ops::Range;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector::transport::{Part, ReadOrder};

use crate::api::ReadDescriptor;
use crate::offer::Offer;

/// A block id outside the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutsidePool;

/// The descriptors of the read's blocks `blocks`, with the unchecked ids `ids` at the producer. They land in the pool
/// at `base`, which has the shape of `region`. An error for bytes outside either pool.
pub(crate) fn descriptors(
    order: &ReadOrder,
    (region, base): (&Region, usize),
    offer: &Offer,
    blocks: Range<usize>,
    ids: &mut dyn Iterator<Item = u32>,
) -> Result<Vec<ReadDescriptor>, OutsidePool> {
    let landing = |block: BlockId, offset: usize| {
        let inside = block.index() < region.blocks();
        inside.then(|| base + block.index() * region.block_bytes() + offset).ok_or(OutsidePool)
    };
    let mut descriptors = Vec::new();
    match &order.part {
        Part::Blocks { .. } => {
            let len = region.block_bytes();
            for (id, &into) in ids.zip(&order.into[blocks]) {
                let from = offer.address(id, 0, len).ok_or(OutsidePool)?;
                push(&mut descriptors, ReadDescriptor { from, into: landing(into, 0)?, len });
            }
        }
        Part::Slice(slice) => {
            for (index, id) in blocks.zip(ids) {
                for (source, target) in slice.copies(&slice.range.piece(&slice.producer, index)) {
                    let from = offer.address(id, source.offset, source.len).ok_or(OutsidePool)?;
                    let into = landing(order.into[target.entry], target.offset)?;
                    push(&mut descriptors, ReadDescriptor { from, into, len: source.len });
                }
            }
        }
    }
    Ok(descriptors)
}

fn push(descriptors: &mut Vec<ReadDescriptor>, descriptor: ReadDescriptor) {
    match descriptors.last_mut() {
        Some(last) if last.from + last.len == descriptor.from && last.into + last.len == descriptor.into => {
            last.len += descriptor.len;
        }
        _ => descriptors.push(descriptor),
    }
}

#[cfg(test)]
mod tests {
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
        (descriptors(&order, (&region, base), &offer, 0..ids.len(), &mut ids.iter().copied()), base)
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
