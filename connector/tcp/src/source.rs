//! The bytes of a read and their division into batches. Pure, and the same for both ends: each end maps its own memory
//! to the same parts.

use std::ops::Range;

use baton_connector::region::Region;
use baton_connector::slice::{Run, Slice, SliceRange};
use baton_connector::transport::{Part, ReadOrder};
use baton_connector::{BlockId, KvLayout};
use baton_connector_channel::GrantedRead;
use baton_connector_channel::scatter::Spans;

/// Bytes of one batch, between two checks of the lease. Large enough that header and check cost nothing. Small enough
/// that a closed lease is noticed within half a millisecond at the speed of one connection.
pub(crate) const BATCH_BYTES: usize = 1 << 20;

/// The parts of a read, in order, with their number and sizes. A part is a block, or the piece of a slice in one block
/// of the producer.
pub(crate) enum ReadParts<'a> {
    Blocks { count: usize, bytes: usize },
    Slice { range: &'a SliceRange, layout: &'a KvLayout },
}

/// Parts that are sent together.
pub(crate) struct Batch {
    pub(crate) parts: Range<usize>,
    pub(crate) bytes: usize,
}

impl ReadParts<'_> {
    fn count(&self) -> usize {
        match self {
            Self::Blocks { count, .. } => *count,
            Self::Slice { range, layout } => range.entries(layout).len(),
        }
    }

    fn bytes(&self, part: usize) -> usize {
        match self {
            Self::Blocks { bytes, .. } => *bytes,
            Self::Slice { range, layout } => range.piece_bytes(layout, &range.piece(layout, part)),
        }
    }
}

/// The batches of all parts. Each has as many parts as fit [`BATCH_BYTES`], and at least one.
pub(crate) fn batches(parts: ReadParts<'_>) -> impl Iterator<Item = Batch> {
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

/// The parts of a granted read.
pub(crate) fn parts<'a>(granted: &'a GrantedRead<'_>) -> ReadParts<'a> {
    match granted.slice() {
        None => ReadParts::Blocks { count: granted.blocks().len(), bytes: granted.region().block_bytes() },
        Some((range, layout)) => ReadParts::Slice { range, layout },
    }
}

/// Appends the memory of some parts of a granted read.
pub(crate) fn gather<'a>(granted: &'a GrantedRead<'_>, parts: Range<usize>, spans: &mut Spans<'a>) {
    let (region, blocks) = (granted.region(), granted.blocks());
    match granted.slice() {
        None => blocks[parts].iter().for_each(|&block| spans.push_block(region, block)),
        Some((range, layout)) => {
            let mut runs = Vec::new();
            parts.for_each(|part| range.runs(layout, &range.piece(layout, part), &mut runs));
            push_runs(&runs, region, blocks, spans);
        }
    }
}

/// The memory into which a consumer receives.
pub(crate) struct ReadTarget<'a> {
    pub(crate) region: &'a Region,
    pub(crate) order: &'a ReadOrder,
}

impl<'a> ReadTarget<'a> {
    pub(crate) fn parts(&self) -> ReadParts<'a> {
        match &self.order.part {
            Part::Blocks { .. } => {
                ReadParts::Blocks { count: self.order.into.len(), bytes: self.region.block_bytes() }
            }
            Part::Slice(slice) => ReadParts::Slice { range: &slice.range, layout: &slice.producer },
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
                let Slice { range, producer, .. } = &**slice;
                parts.for_each(|part| slice.runs(&range.piece(producer, part), &mut runs));
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
