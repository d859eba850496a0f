//! The messages of a granted read, and how far the grant runs ahead of the copying. Pure: no socket in here.
//!
//! A read is cut into batches, the same on both ends. The producer sends the block ids of a batch after it has
//! looked at the lease, and no more than [`WINDOW`] batches ahead of what the consumer says it has copied; so
//! the bytes that are still copied after a lease has ended, although nobody may use them, are bounded too.

use baton_connector::BlockId;
use baton_connector_channel::wire::{HEADER_BYTES, Header, KIND_BATCH};

/// Bytes of one batch, between two looks at the lease: about 0.2 ms of copying.
const BATCH_BYTES: usize = 1 << 20;

/// Batches that may be granted and not yet copied. One waits for the other's thread to be scheduled, which takes
/// some 50 µs; two would do for that, and four do on a busy machine.
pub(crate) const WINDOW: usize = 4;

/// The consumer has copied the oldest batch that it had not yet told about.
pub(crate) const KIND_COPIED: u8 = 0x06;

/// Blocks of one batch, for both ends: at least one.
pub(crate) fn batch_blocks(block_bytes: usize) -> usize {
    (BATCH_BYTES / block_bytes.max(1)).max(1)
}

/// Whether the consumer tells the producer that it has copied batch `batch` of `batches`: only where a later
/// batch waits for it.
pub(crate) fn is_told(batch: usize, batches: usize) -> bool {
    batch + WINDOW < batches
}

/// Tells of a batch that are still to come when the lease ends before batch `next`, of which `heard` have come.
pub(crate) fn tells_owed(next: usize, batches: usize, heard: usize) -> usize {
    next.min(batches.saturating_sub(WINDOW)) - heard
}

/// The block ids of one batch, as a frame.
pub(crate) fn batch(blocks: &[BlockId]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEADER_BYTES + 4 * blocks.len());
    frame.extend(Header { kind: KIND_BATCH, len: 4 * blocks.len() }.encode());
    blocks.iter().for_each(|block| frame.extend(block.0.to_le_bytes()));
    frame
}

/// The block ids in a batch's payload.
pub(crate) fn block_ids(payload: &[u8]) -> impl Iterator<Item = u32> + '_ {
    payload.chunks_exact(4).map(|id| u32::from_le_bytes(id.try_into().expect("a chunk of four bytes")))
}

/// "Copied", as a frame.
pub(crate) fn copied() -> [u8; HEADER_BYTES] {
    Header { kind: KIND_COPIED, len: 0 }.encode()
}

/// What a consumer must know of a pool to find a block in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pool {
    pub(crate) block_bytes: u64,
    pub(crate) blocks: u64,
}

/// Bytes of a pool's description, which travels with its descriptor.
pub(crate) const POOL_BYTES: usize = 16;

impl Pool {
    pub(crate) fn encode(self) -> [u8; POOL_BYTES] {
        let mut bytes = [0; POOL_BYTES];
        bytes[..8].copy_from_slice(&self.block_bytes.to_le_bytes());
        bytes[8..].copy_from_slice(&self.blocks.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: [u8; POOL_BYTES]) -> Self {
        let number = |at| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Self { block_bytes: number(0), blocks: number(8) }
    }

    /// Bytes of all of it; `None` when that is no number.
    pub(crate) fn bytes(self) -> Option<usize> {
        self.block_bytes.checked_mul(self.blocks).and_then(|bytes| usize::try_from(bytes).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_and_a_pool_survive_the_wire() {
        let blocks = [BlockId(7), BlockId(u32::MAX), BlockId(0)];
        let frame = batch(&blocks);
        let header = Header::decode(frame[..HEADER_BYTES].try_into().expect("a header"));
        assert_eq!(header, Header { kind: KIND_BATCH, len: 12 });
        assert!(block_ids(&frame[HEADER_BYTES..]).eq(blocks.iter().map(|block| block.0)));
        let pool = Pool { block_bytes: 3 << 40, blocks: 77 };
        assert_eq!(Pool::decode(pool.encode()), pool);
        assert_eq!(Pool { block_bytes: u64::MAX, blocks: 2 }.bytes(), None);
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
