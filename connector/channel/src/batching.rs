//! One-sided reads: the messages of a read in which the consumer copies granted blocks from the producer's memory
//! itself.
//!
//! A read is divided into batches, the same at both ends. The producer sends the block ids of a batch after it has
//! checked the lease, at most `WINDOW` batches ahead of the consumer's acknowledgements. So the number of bytes that
//! the consumer copies in vain after the end of a lease is bounded too.

use std::ops::Range;
use std::time::Instant;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector::transport::{Part, ReadOrder, StopFlag, TransportError};
use std::sync::atomic::Ordering;

use crate::serve::{Delivery, GrantedRead};
use crate::socket::{ChannelError, ChannelSocket, SLICE};
use crate::timeouts::ChannelTimeouts;
use crate::wire::{HEADER_BYTES, Header, KIND_BATCH, Reply};

/// Maximum number of granted batches without an acknowledgement. Each end waits for the scheduling of the other's
/// thread. Two batches cover that on an idle machine, four on a busy one.
const WINDOW: usize = 4;

/// The acknowledgement: the consumer has copied its oldest batch without one.
const KIND_COPIED: u8 = 0x06;

/// The division of one-sided reads into batches, the same at both ends.
#[derive(Clone, Copy, Debug)]
pub struct ReadBatching {
    /// Bytes of one batch, between two checks of the lease.
    pub batch_bytes: usize,
}

/// The extent of a read, in blocks of the producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadExtent {
    /// Number of the producer's blocks.
    pub blocks: usize,
    /// Bytes of each block.
    pub block_bytes: usize,
}

impl ReadExtent {
    /// The extent of an order; `None` if its blocks have another size than the region's.
    #[must_use]
    pub fn of(order: &ReadOrder, region: &Region) -> Option<Self> {
        match &order.part {
            Part::Blocks { .. } => Some(Self { blocks: order.into.len(), block_bytes: region.block_bytes() }),
            Part::Slice(slice) => {
                let extent = Self {
                    blocks: slice.range.entries(&slice.producer).len(),
                    block_bytes: slice.producer.block_bytes(),
                };
                (slice.consumer.block_bytes() == region.block_bytes()).then_some(extent)
            }
        }
    }
}

impl ReadBatching {
    /// Blocks of one batch, for both ends: at least one.
    fn batch_blocks(self, block_bytes: usize) -> usize {
        (self.batch_bytes / block_bytes.max(1)).max(1)
    }

    /// The producer's side of a read: sends "granted", and the block ids in batches.
    ///
    /// # Errors
    /// [`ChannelError`]; the connection ends, and the read has failed.
    pub fn deliver(
        self,
        socket: &mut ChannelSocket,
        granted: &GrantedRead<'_>,
    ) -> Result<Delivery, ChannelError> {
        let block_bytes = granted.region().block_bytes();
        let per_batch = self.batch_blocks(block_bytes);
        let batches = granted.blocks().len().div_ceil(per_batch);
        // Frames that are sent before the next batch, in one call.
        let mut front = granted.granted_frame();
        let mut acks = 0;
        for (at, blocks) in granted.blocks().chunks(per_batch).enumerate() {
            let live = if at >= WINDOW { await_copied(socket, granted, &mut acks)? } else { true };
            let upto = (at * per_batch) + blocks.len();
            if !live || !granted.await_ready(socket, &mut front, upto)? {
                front.extend(Reply::Gone.encode());
                socket.send(&front, granted.wait_limit())?;
                for _ in 0..pending_acks(at, batches, acks) {
                    receive_copied(socket, granted)?;
                }
                return Ok(Delivery::LeaseEnded);
            }
            front.extend(batch_frame(blocks));
            socket.send(&front, granted.wait_limit())?;
            granted.count_bytes(blocks.len() * block_bytes);
            front.clear();
        }
        Ok(Delivery::Complete)
    }

    /// The consumer's side of a read. `take` copies the blocks of a batch. Its arguments are their positions in the
    /// read and their unchecked ids at the producer. After its return, no transfer writes into their landing blocks.
    /// `bytes` is the size of the whole read.
    ///
    /// The inner error is an answer of the producer: the connection is still in step.
    ///
    /// # Errors
    /// [`ChannelError`], also of `take`: the connection is out of step, and the read has failed.
    pub fn receive(
        self,
        socket: &mut ChannelSocket,
        extent: ReadExtent,
        bytes: usize,
        stop: &StopFlag,
        mut take: impl FnMut(Range<usize>, &mut dyn Iterator<Item = u32>) -> Result<(), ChannelError>,
    ) -> Result<Result<(), TransportError>, ChannelError> {
        let mut timeouts = ChannelTimeouts::new(socket, bytes, stop);
        let count = extent.blocks;
        let per_batch = self.batch_blocks(extent.block_bytes);
        let batches = count.div_ceil(per_batch);
        let mut payload = Vec::new();
        for (at, first) in (0..count).step_by(per_batch).enumerate() {
            let blocks = first..count.min(first + per_batch);
            let mut header = [0; HEADER_BYTES];
            socket.receive(&mut header, timeouts.wait_limit())?;
            timeouts.skip_not_yet(socket, &mut header)?;
            let until = timeouts.wait_limit();
            let Header { kind, len } = Header::decode(header);
            if kind != KIND_BATCH {
                return end_of_batches(kind, len);
            }
            if len != 4 * blocks.len() {
                return Err(ChannelError::Unexpected);
            }
            payload.resize(len, 0);
            socket.receive(&mut payload, until)?;
            if stop.load(Ordering::Acquire) {
                return Err(ChannelError::Stopped);
            }
            take(blocks, &mut block_ids(&payload))?;
            if is_acknowledged(at, batches) {
                socket.send(&copied_frame(), until)?;
            }
        }
        Ok(Ok(()))
    }
}

/// The frame that a producer sends instead of a batch.
fn end_of_batches(kind: u8, len: usize) -> Result<Result<(), TransportError>, ChannelError> {
    match (len, Reply::decode(kind, &[])?) {
        (0, Reply::Gone) => Ok(Err(TransportError::Gone)),
        _ => Err(ChannelError::Unexpected),
    }
}

/// Waits until the reader has copied one more batch; false when the lease has ended. The wait for a silent reader lasts
/// as long as the lease. A stopped process may continue to copy later, and until then the blocks must stay.
fn await_copied(
    socket: &mut ChannelSocket,
    granted: &GrantedRead<'_>,
    acks: &mut usize,
) -> Result<bool, ChannelError> {
    while !socket.readable_within(SLICE).map_err(ChannelError::Io)? {
        socket.check(granted.wait_limit(), Instant::now())?;
        if !granted.is_live() {
            return Ok(false);
        }
    }
    receive_copied(socket, granted)?;
    *acks += 1;
    Ok(true)
}

fn receive_copied(socket: &mut ChannelSocket, granted: &GrantedRead<'_>) -> Result<(), ChannelError> {
    let mut header = [0; HEADER_BYTES];
    socket.receive(&mut header, granted.wait_limit())?;
    let is_copied = Header::decode(header) == Header { kind: KIND_COPIED, len: 0 };
    if is_copied { Ok(()) } else { Err(ChannelError::Unexpected) }
}

/// Whether the consumer acknowledges batch `batch` of `batches`: only if a later batch waits for it.
fn is_acknowledged(batch: usize, batches: usize) -> bool {
    batch + WINDOW < batches
}

/// Acknowledgements that still arrive when the lease ends before batch `next`, after `acks` received ones.
fn pending_acks(next: usize, batches: usize, acks: usize) -> usize {
    next.min(batches.saturating_sub(WINDOW)) - acks
}

/// The block ids of one batch, as a frame.
fn batch_frame(blocks: &[BlockId]) -> Vec<u8> {
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
fn copied_frame() -> [u8; HEADER_BYTES] {
    Header { kind: KIND_COPIED, len: 0 }.encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_round_trips_on_the_wire() {
        let blocks = [BlockId(7), BlockId(u32::MAX), BlockId(0)];
        let frame = batch_frame(&blocks);
        let header = Header::decode(frame[..HEADER_BYTES].try_into().expect("a header"));
        assert_eq!(header, Header { kind: KIND_BATCH, len: 12 });
        assert!(block_ids(&frame[HEADER_BYTES..]).eq(blocks.iter().map(|block| block.0)));
    }

    /// Both ends, for every number of batches, and a lease that ends before any of them.
    #[test]
    fn both_ends_count_the_same_acks() {
        for batches in 1..=3 * WINDOW {
            for ends_before in 0..=batches {
                // The producer receives one acknowledgement before each batch past the window.
                let acks = (0..ends_before.min(batches)).filter(|&batch| batch >= WINDOW).count();
                let acks_sent = (0..ends_before).filter(|&batch| is_acknowledged(batch, batches)).count();
                if ends_before < batches {
                    // The producer waited for one more before it checked the lease for this batch.
                    let acks = acks + usize::from(ends_before >= WINDOW);
                    let pending = pending_acks(ends_before, batches, acks);
                    assert_eq!(acks_sent, acks + pending, "{ends_before} of {batches}");
                } else {
                    assert_eq!(acks_sent, acks, "all {batches}: nothing is left over");
                }
            }
        }
    }
}
