//! The bytes of a read and how they are cut into batches. Pure, and the same for both ends: each lays its own
//! memory under the same parts.

use std::ops::Range;

use baton_connector::region::Region;
use baton_connector::slice::{Cut, Run, Slice};
use baton_connector::transport::{Part, ReadOrder};
use baton_connector::{BlockId, KvLayout};
use baton_connector_channel::Granted;
use baton_connector_channel::scatter::Spans;

/// Bytes of one batch, between two looks at the lease. Large enough that header and look cost nothing, small
/// enough that a closed lease is noticed within half a millisecond at the speed of one connection.
pub(crate) const BATCH_BYTES: usize = 1 << 20;

/// The parts of a read, in order: how many there are, and the bytes of each. A part is a block, or what a slice
/// takes of one block of the producer.
pub(crate) enum Parts<'a> {
    Blocks { count: usize, bytes: usize },
    Slice { cut: &'a Cut, layout: &'a KvLayout },
}

/// Parts that go out together.
pub(crate) struct Batch {
    pub(crate) parts: Range<usize>,
    pub(crate) bytes: usize,
}

impl Parts<'_> {
    fn count(&self) -> usize {
        match self {
            Self::Blocks { count, .. } => *count,
            Self::Slice { cut, layout } => cut.entries(layout).len(),
        }
    }

    fn bytes(&self, part: usize) -> usize {
        match self {
            Self::Blocks { bytes, .. } => *bytes,
            Self::Slice { cut, layout } => cut.piece_bytes(layout, &cut.piece(layout, part)),
        }
    }
}

/// As many parts as fit [`BATCH_BYTES`], at least one, until all are in a batch.
pub(crate) fn batches(parts: Parts<'_>) -> impl Iterator<Item = Batch> {
    let (mut next, count) = (0, parts.count());
    std::iter::from_fn(move || {
        let (first, mut bytes) = (next, 0);
        while next < count && (next == first || bytes + parts.bytes(next) <= BATCH_BYTES) {
            bytes += parts.bytes(next);
            next += 1;
        }
        (next > first).then_some(Batch { parts: first..next, bytes })
    })
}

/// The parts of what a producer has granted.
pub(crate) fn parts<'a>(granted: &'a Granted<'_>) -> Parts<'a> {
    match granted.slice() {
        None => Parts::Blocks { count: granted.blocks().len(), bytes: granted.region().block_bytes() },
        Some((cut, layout)) => Parts::Slice { cut, layout },
    }
}

/// Appends the memory of some parts of what a producer has granted.
pub(crate) fn gather<'a>(granted: &'a Granted<'_>, parts: Range<usize>, spans: &mut Spans<'a>) {
    let (region, blocks) = (granted.region(), granted.blocks());
    match granted.slice() {
        None => blocks[parts].iter().for_each(|&block| spans.push_block(region, block)),
        Some((cut, layout)) => {
            let mut runs = Vec::new();
            parts.for_each(|part| cut.runs(layout, &cut.piece(layout, part), &mut runs));
            push_runs(&runs, region, blocks, spans);
        }
    }
}

/// Where a consumer receives into.
pub(crate) struct Target<'a> {
    pub(crate) region: &'a Region,
    pub(crate) order: &'a ReadOrder,
}

impl<'a> Target<'a> {
    pub(crate) fn parts(&self) -> Parts<'a> {
        match &self.order.part {
            Part::Blocks { .. } => {
                Parts::Blocks { count: self.order.into.len(), bytes: self.region.block_bytes() }
            }
            Part::Slice(slice) => Parts::Slice { cut: &slice.cut, layout: &slice.producer },
        }
    }

    /// Appends the memory of some parts.
    pub(crate) fn scatter(&self, parts: Range<usize>, spans: &mut Spans<'a>) {
        match &self.order.part {
            Part::Blocks { .. } => {
                self.order.into[parts].iter().for_each(|&block| spans.push_block(self.region, block));
            }
            Part::Slice(slice) => {
                let mut runs = Vec::new();
                let Slice { cut, producer, .. } = &**slice;
                parts.for_each(|part| slice.runs(&cut.piece(producer, part), &mut runs));
                push_runs(&runs, self.region, &self.order.into, spans);
            }
        }
    }
}

fn push_runs<'a>(runs: &[Run], region: &'a Region, blocks: &[BlockId], spans: &mut Spans<'a>) {
    for run in runs {
        spans.push_part(region, blocks[run.entry], run.offset, run.len);
    }
}
