//! The copies of a granted batch, as offsets in the producer's pool and in the consumer's pool. This module reads and
//! writes no block.

use std::ops::Range;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector::transport::ReadOrder;
use baton_connector_channel::copy_runs::{CopyRun, OutsidePool, copy_runs};

use crate::offer::Offer;

/// The runs of the read's blocks `blocks`, with the unchecked ids `ids` at the producer. An error for bytes outside
/// either pool.
pub(crate) fn runs(
    order: &ReadOrder,
    region: &Region,
    offer: &Offer,
    blocks: Range<usize>,
    ids: &mut dyn Iterator<Item = u32>,
) -> Result<Vec<CopyRun>, OutsidePool> {
    let block_bytes = region.block_bytes();
    let from = |id: u32, offset: usize, len: usize| offer.offset_of(id, offset, len);
    let into = |block: BlockId, offset: usize| {
        (block.index() < region.blocks()).then(|| block.index() * block_bytes + offset)
    };
    copy_runs(order, block_bytes, blocks, ids, from, into)
}

#[cfg(test)]
mod tests {
    use baton_connector::transport::Part;
    use baton_connector::{Handle, Reader};
    use baton_connector_shm::PoolShape;

    use super::*;
    use crate::offer::{DeviceId, DeviceKind, HANDLE_BYTES};

    fn found(into: &[u32], ids: &[u32]) -> Result<Vec<CopyRun>, OutsidePool> {
        let offer = Offer {
            device: DeviceId { kind: DeviceKind::Software, uuid: [0; 16] },
            process: [0; 16],
            batch_bytes: 1,
            pool: PoolShape { block_bytes: 100, blocks: 8 },
            handle: [0; HANDLE_BYTES],
            descriptor: true,
        };
        let into: Vec<_> = into.iter().map(|&block| BlockId(block)).collect();
        let blocks = 0..into.len();
        let part = Part::Blocks { first: 0 };
        let order = ReadOrder { handle: Handle(1), reader: Reader::sole(1), part, into };
        runs(&order, &Region::allocate(6, 100), &offer, blocks, &mut ids.iter().copied())
    }

    #[test]
    fn neighbours_on_both_sides_are_one_run() {
        let run = |from, into, len| CopyRun { from, into, len };
        assert_eq!(found(&[1, 2, 3], &[4, 5, 6]), Ok(vec![run(400, 100, 300)]));
        assert_eq!(
            found(&[1, 2, 0], &[7, 3, 4]),
            Ok(vec![run(700, 100, 100), run(300, 200, 100), run(400, 0, 100)])
        );
    }

    #[test]
    fn bytes_outside_either_pool_are_not_copied() {
        for id in [8, u32::MAX] {
            assert_eq!(found(&[0, 1], &[0, id]), Err(OutsidePool));
        }
        assert_eq!(found(&[6], &[0]), Err(OutsidePool));
    }
}
