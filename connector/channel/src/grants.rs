//! One-sided reads: the consumer takes granted blocks from the producer's memory by itself, and what both say to
//! each other meanwhile.
//!
//! A read is cut into batches, the same on both ends. The producer sends the block ids of a batch after it has
//! looked at the lease, and no more than `WINDOW` batches ahead of what the consumer says it has taken; so
//! the bytes that are still taken after a lease has ended, although nobody may use them, are bounded too.

use std::ops::Range;
use std::time::Instant;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector::transport::{Part, ReadOrder, StopFlag, TransportError};
use std::sync::atomic::Ordering;

use crate::link::{Link, LinkError, SLICE};
use crate::patience::Patience;
use crate::serve::{Delivered, Granted};
use crate::wire::{HEADER_BYTES, Header, KIND_BATCH, Reply};

/// Batches that may be granted and not yet taken. One waits for the other's thread to be scheduled, which takes
/// some 50 µs; two would do for that, and four do on a busy machine.
const WINDOW: usize = 4;

/// The consumer has taken the oldest batch that it had not yet told about.
const KIND_COPIED: u8 = 0x06;

/// How one-sided reads are cut: the same at both ends.
#[derive(Clone, Copy, Debug)]
pub struct Grants {
    /// Bytes of one batch, between two looks at the lease.
    pub batch_bytes: usize,
}

/// What a read takes, in blocks of the producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Blocks of the producer that are read.
    pub blocks: usize,
    /// Bytes that each of them must have.
    pub block_bytes: usize,
}

impl Wanted {
    /// What an order wants; `None` when it is not for blocks like the region's.
    #[must_use]
    pub fn of(order: &ReadOrder, region: &Region) -> Option<Self> {
        match &order.part {
            Part::Blocks { .. } => Some(Self { blocks: order.into.len(), block_bytes: region.block_bytes() }),
            Part::Slice(slice) => {
                let wanted = Self {
                    blocks: slice.cut.entries(&slice.producer).len(),
                    block_bytes: slice.producer.block_bytes(),
                };
                (slice.consumer.block_bytes() == region.block_bytes()).then_some(wanted)
            }
        }
    }
}

impl Grants {
    /// Blocks of one batch, for both ends: at least one.
    fn batch_blocks(self, block_bytes: usize) -> usize {
        (self.batch_bytes / block_bytes.max(1)).max(1)
    }

    /// The producer's side of a read: "granted", and the block ids in batches.
    ///
    /// # Errors
    /// [`LinkError`]; the connection ends, and the read has failed.
    pub fn deliver(self, link: &mut Link, granted: &Granted<'_>) -> Result<Delivered, LinkError> {
        let block_bytes = granted.region().block_bytes();
        let per_batch = self.batch_blocks(block_bytes);
        let batches = granted.blocks().len().div_ceil(per_batch);
        // Frames that go out with the next batch, in front of it.
        let mut front = granted.announcement();
        let mut heard = 0;
        for (at, blocks) in granted.blocks().chunks(per_batch).enumerate() {
            let live = if at >= WINDOW { copied_one(link, granted, &mut heard)? } else { true };
            let upto = (at * per_batch) + blocks.len();
            if !live || !granted.await_ready(link, &mut front, upto)? {
                front.extend(Reply::Gone.encode());
                link.send(&front, granted.until())?;
                for _ in 0..tells_owed(at, batches, heard) {
                    receive_copied(link, granted)?;
                }
                return Ok(Delivered::LeaseEnded);
            }
            front.extend(batch(blocks));
            link.send(&front, granted.until())?;
            granted.count(blocks.len() * block_bytes);
            front.clear();
        }
        Ok(Delivered::Whole)
    }

    /// The consumer's side: `take` has the blocks of a batch land, given which of the read's they are and their ids
    /// at the producer, which are whatever the producer says. When it returns, nothing writes into their landing
    /// blocks any more. `bytes` are all that the read moves.
    ///
    /// The inner error is an answer: the connection is still in step.
    ///
    /// # Errors
    /// [`LinkError`], also of `take`: the connection is out of step, and the read has failed.
    pub fn receive(
        self,
        link: &mut Link,
        wanted: Wanted,
        bytes: usize,
        stop: &StopFlag,
        mut take: impl FnMut(Range<usize>, &mut dyn Iterator<Item = u32>) -> Result<(), LinkError>,
    ) -> Result<Result<(), TransportError>, LinkError> {
        let mut patience = Patience::new(link, bytes, stop);
        let count = wanted.blocks;
        let per_batch = self.batch_blocks(wanted.block_bytes);
        let batches = count.div_ceil(per_batch);
        let mut payload = Vec::new();
        for (at, first) in (0..count).step_by(per_batch).enumerate() {
            let blocks = first..count.min(first + per_batch);
            let mut header = [0; HEADER_BYTES];
            link.receive(&mut header, patience.until())?;
            patience.outlast(link, &mut header)?;
            let until = patience.until();
            let Header { kind, len } = Header::decode(header);
            if kind != KIND_BATCH {
                return gone(kind, len);
            }
            if len != 4 * blocks.len() {
                return Err(LinkError::Unexpected);
            }
            payload.resize(len, 0);
            link.receive(&mut payload, until)?;
            if stop.load(Ordering::Acquire) {
                return Err(LinkError::Stopped);
            }
            take(blocks, &mut block_ids(&payload))?;
            if is_told(at, batches) {
                link.send(&copied(), until)?;
            }
        }
        Ok(Ok(()))
    }
}

/// What a producer says instead of a batch.
fn gone(kind: u8, len: usize) -> Result<Result<(), TransportError>, LinkError> {
    match (len, Reply::decode(kind, &[])?) {
        (0, Reply::Gone) => Ok(Err(TransportError::Gone)),
        _ => Err(LinkError::Unexpected),
    }
}

/// Waits until the reader has taken one more batch. A silent one is waited for as long as the lease lasts: it may
/// be a stopped process that copies on when it is continued, and until then the blocks must stay. False when the
/// lease has ended.
fn copied_one(link: &mut Link, granted: &Granted<'_>, heard: &mut usize) -> Result<bool, LinkError> {
    while !link.readable_within(SLICE).map_err(LinkError::Io)? {
        link.check(granted.until(), Instant::now())?;
        if !granted.live() {
            return Ok(false);
        }
    }
    receive_copied(link, granted)?;
    *heard += 1;
    Ok(true)
}

fn receive_copied(link: &mut Link, granted: &Granted<'_>) -> Result<(), LinkError> {
    let mut header = [0; HEADER_BYTES];
    link.receive(&mut header, granted.until())?;
    let is_it = Header::decode(header) == Header { kind: KIND_COPIED, len: 0 };
    if is_it { Ok(()) } else { Err(LinkError::Unexpected) }
}

/// Whether the consumer tells the producer that it has taken batch `batch` of `batches`: only where a later
/// batch waits for it.
fn is_told(batch: usize, batches: usize) -> bool {
    batch + WINDOW < batches
}

/// Tells of a batch that are still to come when the lease ends before batch `next`, of which `heard` have come.
fn tells_owed(next: usize, batches: usize, heard: usize) -> usize {
    next.min(batches.saturating_sub(WINDOW)) - heard
}

/// The block ids of one batch, as a frame.
fn batch(blocks: &[BlockId]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEADER_BYTES + 4 * blocks.len());
    frame.extend(Header { kind: KIND_BATCH, len: 4 * blocks.len() }.encode());
    blocks.iter().for_each(|block| frame.extend(block.0.to_le_bytes()));
    frame
}

/// The block ids in a batch's payload.
fn block_ids(payload: &[u8]) -> impl Iterator<Item = u32> + '_ {
    payload.chunks_exact(4).map(|id| u32::from_le_bytes(id.try_into().expect("a chunk of four bytes")))
}

/// "Copied", as a frame.
fn copied() -> [u8; HEADER_BYTES] {
    Header { kind: KIND_COPIED, len: 0 }.encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_survives_the_wire() {
        let blocks = [BlockId(7), BlockId(u32::MAX), BlockId(0)];
        let frame = batch(&blocks);
        let header = Header::decode(frame[..HEADER_BYTES].try_into().expect("a header"));
        assert_eq!(header, Header { kind: KIND_BATCH, len: 12 });
        assert!(block_ids(&frame[HEADER_BYTES..]).eq(blocks.iter().map(|block| block.0)));
    }

    /// Both ends, for every number of batches, and a lease that ends before any of them.
    #[test]
    fn both_ends_count_the_same_tells() {
        for batches in 1..=3 * WINDOW {
            for ends_before in 0..=batches {
                // The producer hears one tell before each batch past the window.
                let heard = (0..ends_before.min(batches)).filter(|&batch| batch >= WINDOW).count();
                let told = (0..ends_before).filter(|&batch| is_told(batch, batches)).count();
                if ends_before < batches {
                    // It had waited for one more before it looked at the lease for this batch.
                    let heard = heard + usize::from(ends_before >= WINDOW);
                    assert_eq!(
                        told,
                        heard + tells_owed(ends_before, batches, heard),
                        "{ends_before} of {batches}"
                    );
                } else {
                    assert_eq!(told, heard, "all {batches}: nothing is left over");
                }
            }
        }
    }
}
