//! The bytes of a granted batch as descriptors: where each lies at the producer, and where it lands. Neighbours on both
//! sides are one descriptor. Nothing is read or written here.

use std::ops::Range;

use baton_connector::region::Region;
use baton_connector::transport::{Part, ReadOrder};

use crate::api::Piece;
use crate::offer::Offer;

/// A block id that is none of the pool's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outside;

/// The pieces of the read's blocks `blocks`, whose ids at the producer are `ids`, which may be anything. What lies
/// outside the offered pool has none.
pub(crate) fn pieces(
    order: &ReadOrder,
    region: &Region,
    offer: &Offer,
    blocks: Range<usize>,
    ids: &mut dyn Iterator<Item = u32>,
) -> Result<Vec<Piece>, Outside> {
    let mut pieces = Vec::new();
    match &order.part {
        Part::Blocks { .. } => {
            let len = region.block_bytes();
            for (id, &into) in ids.zip(&order.into[blocks]) {
                let from = offer.address(id, 0, len).ok_or(Outside)?;
                push(&mut pieces, Piece { from, into: region.block_ptr(into).addr(), len });
            }
        }
        Part::Slice(slice) => {
            for (index, id) in blocks.zip(ids) {
                for (source, target) in slice.copies(&slice.cut.piece(&slice.producer, index)) {
                    let from = offer.address(id, source.offset, source.len).ok_or(Outside)?;
                    let into = region.block_ptr(order.into[target.entry]).addr() + target.offset;
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
    use baton_connector::{BlockId, Handle, Reader};

    use super::*;

    const OFFER: u64 = 1 << 40;

    fn ask(into: &[u32], ids: &[u32]) -> (Result<Vec<Piece>, Outside>, usize) {
        let region = Region::allocate(8, 100);
        let offer = Offer { block_bytes: 100, blocks: 5, base: OFFER, name: "p".into(), metadata: vec![1] };
        let into = into.iter().map(|&block| BlockId(block)).collect();
        let order =
            ReadOrder { handle: Handle(1), reader: Reader::sole(1), part: Part::Blocks { first: 0 }, into };
        let base = region.block_ptr(BlockId(0)).addr();
        (pieces(&order, &region, &offer, 0..ids.len(), &mut ids.iter().copied()), base)
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
    fn a_block_outside_the_offered_pool_has_no_piece() {
        assert_eq!(ask(&[0, 1], &[0, 5]).0, Err(Outside));
        assert_eq!(ask(&[0, 1], &[u32::MAX, 0]).0, Err(Outside));
    }
}
