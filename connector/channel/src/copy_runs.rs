//! The copies of a granted batch of a one-sided read, from the producer's pool to the consumer's. Bytes that are adjacent
//! on both sides are one run. This module reads and writes no block.

use std::ops::Range;

use baton_connector::BlockId;
use baton_connector::transport::{Part, ReadOrder};

/// One contiguous copy. Each position is an offset in a pool or an address, as the transport's device needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRun {
    /// First byte in the producer's pool.
    pub from: usize,
    /// First byte in the consumer's pool.
    pub into: usize,
    /// Length in bytes.
    pub len: usize,
}

/// A block outside its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutsidePool;

/// The runs of the read's blocks `blocks`, with the unchecked ids `ids` at the producer.
///
/// `from` returns the position of a part of a producer's block: its id, the offset in it, and the length. `into`
/// returns the position of a byte of a landing block. Each returns `None` for bytes outside its pool.
///
/// # Errors
/// [`OutsidePool`] for bytes outside either pool.
pub fn copy_runs(
    order: &ReadOrder,
    block_bytes: usize,
    blocks: Range<usize>,
    ids: &mut dyn Iterator<Item = u32>,
    from: impl Fn(u32, usize, usize) -> Option<usize>,
    into: impl Fn(BlockId, usize) -> Option<usize>,
) -> Result<Vec<CopyRun>, OutsidePool> {
    let mut runs = Vec::new();
    match &order.part {
        Part::Blocks { .. } => {
            let len = block_bytes;
            for (id, &block) in ids.zip(&order.into[blocks]) {
                let from = from(id, 0, len).ok_or(OutsidePool)?;
                push(&mut runs, CopyRun { from, into: into(block, 0).ok_or(OutsidePool)?, len });
            }
        }
        Part::Slice(slice) => {
            for (index, id) in blocks.zip(ids) {
                for (source, target) in slice.copies(&slice.range.piece(&slice.producer, index)) {
                    let from = from(id, source.offset, source.len).ok_or(OutsidePool)?;
                    let into = into(order.into[target.entry], target.offset).ok_or(OutsidePool)?;
                    push(&mut runs, CopyRun { from, into, len: source.len });
                }
            }
        }
    }
    Ok(runs)
}

fn push(runs: &mut Vec<CopyRun>, run: CopyRun) {
    match runs.last_mut() {
        Some(last) if last.from + last.len == run.from && last.into + last.len == run.into => {
            last.len += run.len;
        }
        _ => runs.push(run),
    }
}
