//! The bytes of a granted batch as descriptors: where each lies at the producer, and where it lands. Neighbours on both
//! sides are one descriptor. Nothing is read or written here.

use std::ops::Range;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector::transport::{Part, ReadOrder};

use crate::api::Piece;
use crate::offer::Offer;

/// A block id that is none of the pool's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outside;

/// The pieces of the read's blocks `blocks`, whose ids at the producer are `ids`, which may be anything. They land in the
/// pool at `base`, which is cut like `region`. What lies outside the offered pool has none.
pub(crate) fn pieces(
    order: &ReadOrder,
    (region, base): (&Region, usize),
    offer: &Offer,
    blocks: Range<usize>,
    ids: &mut dyn Iterator<Item = u32>,
) -> Result<Vec<Piece>, Outside> {
    let landing = |block: BlockId, offset: usize| {
        let inside = block.index() < region.blocks();
        inside.then(|| base + block.index() * region.block_bytes() + offset).ok_or(Outside)
    };
    let mut pieces = Vec::new();
    match &order.part {
        Part::Blocks { .. } => {
            let len = region.block_bytes();
            for (id, &into) in ids.zip(&order.into[blocks]) {
                let from = offer.address(id, 0, len).ok_or(Outside)?;
                push(&mut pieces, Piece { from, into: landing(into, 0)?, len });
            }
        }
        Part::Slice(slice) => {
            for (index, id) in blocks.zip(ids) {
                for (source, target) in slice.copies(&slice.cut.piece(&slice.producer, index)) {
                    let from = offer.address(id, source.offset, source.len).ok_or(Outside)?;
                    let into = landing(order.into[target.entry], target.offset)?;
                    push(&mut pieces, Piece { from, into, len: source.len });
                }
            }
        }
    }
    Ok(pieces)
}

fn push(pieces: &mut Vec<Piece>, piece: Piece) {
    match pieces.last_mut() {
        Some(last) if last.from + last.len == piece.from && last.into + last.len == piece.into => {
            last.len += piece.len;
        }
        _ => pieces.push(piece),
    }
}

#[cfg(test)]
mod tests {
    use baton_connector::{Handle, Reader};

    use super::*;
    use crate::api::Segment;

    const OFFER: u64 = 1 << 40;

    fn ask(into: &[u32], ids: &[u32]) -> (Result<Vec<Piece>, Outside>, usize) {
        let region = Region::allocate(8, 100);
        let (segment, name, metadata) = (Segment::Host, "p".into(), vec![1]);
        let offer = Offer { segment, block_bytes: 100, blocks: 5, base: OFFER, name, metadata };
        let into = into.iter().map(|&block| BlockId(block)).collect();
        let order =
            ReadOrder { handle: Handle(1), reader: Reader::sole(1), part: Part::Blocks { first: 0 }, into };
        // Nothing is there, as little as at a device's addresses.
        let base = 1 << 20;
        (pieces(&order, (&region, base), &offer, 0..ids.len(), &mut ids.iter().copied()), base)
    }

    #[test]
    fn neighbours_on_both_sides_are_one_piece() {
        let (pieces, base) = ask(&[3, 4, 5, 0], &[1, 2, 4, 3]);
        let from = usize::try_from(OFFER).expect("64 bits");
        let expected = [(100, 300, 200), (400, 500, 100), (300, 0, 100)];
        let expected =
            expected.map(|(there, here, len)| Piece { from: from + there, into: base + here, len });
        assert_eq!(pieces, Ok(expected.to_vec()));
    }

    #[test]
    fn a_block_outside_either_pool_has_no_piece() {
        assert_eq!(ask(&[0, 1], &[0, 5]).0, Err(Outside));
        assert_eq!(ask(&[0, 1], &[u32::MAX, 0]).0, Err(Outside));
        assert_eq!(ask(&[0, 8], &[0, 1]).0, Err(Outside));
    }
}
