//! Digests of cached blocks. Two engines that cache the same prefix must hold the same bytes, and digests show this
//! to an operator or a test. Wrong or swapped blocks rarely show in logits.
//!
//! The step loop computes a page between two steps, on its own thread. Cached blocks are then complete, and no block
//! is reallocated meanwhile. The next step waits for the hashing of up to [`DIGEST_BYTES_MAX`], so a page is bounded.

use baton_connector::BlockId;
use baton_connector::slice::Geometry;
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;

use crate::blocks::hash::BlockHash;

/// Limit of the blocks of one page.
pub const DIGEST_BLOCKS_MAX: usize = 4_096;

/// Limit of the bytes that are hashed for one page, unless it has one block: about a fifth of a second of one core.
pub const DIGEST_BYTES_MAX: usize = 256 << 20;

/// Limit of the pages that wait for the step loop. Further requests are refused.
pub const DIGEST_REQUESTS_MAX: usize = 4;

/// A request for a page.
#[derive(Debug)]
pub struct DigestRequest {
    /// Only blocks with a hash above this one.
    pub after: Option<BlockHash>,
    /// Receives the page.
    pub reply: oneshot::Sender<DigestPage>,
}

/// One cached block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockDigest {
    /// Its key in the prefix cache.
    pub hash: BlockHash,
    /// Its index in the pool.
    pub block: BlockId,
    /// SHA-256 of its bytes.
    pub sha256: [u8; 32],
}

/// A part of the cached blocks, in the order of their hashes (the same on every engine).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DigestPage {
    /// The blocks.
    pub blocks: Vec<BlockDigest>,
    /// Start of the next page: [`DigestRequest::after`] of the next request. `None` for the last page.
    pub next: Option<BlockHash>,
}

/// Blocks of `block_bytes` in one page.
#[must_use]
pub fn page_blocks(block_bytes: usize) -> usize {
    (DIGEST_BYTES_MAX / block_bytes.max(1)).clamp(1, DIGEST_BLOCKS_MAX)
}

impl DigestPage {
    /// Hashes the readable ones of the first [`page_blocks`] of `cached`, which is sorted by hash. The others belong
    /// to the next page. `read` returns the bytes of a block, by rank.
    ///
    /// # Errors
    /// The first error of `read`.
    pub fn of<E>(
        cached: &[(BlockHash, BlockId)],
        is_readable: impl Fn(BlockId) -> bool,
        geometry: &Geometry,
        mut read: impl FnMut(BlockId) -> Result<Vec<Vec<u8>>, E>,
    ) -> Result<Self, E> {
        let shown = &cached[..cached.len().min(page_blocks(geometry.whole().block_bytes()))];
        let next = shown.last().filter(|_| shown.len() < cached.len()).map(|&(hash, _)| hash);
        let mut blocks = Vec::with_capacity(shown.len());
        for &(hash, block) in shown.iter().filter(|(_, block)| is_readable(*block)) {
            blocks.push(BlockDigest { hash, block, sha256: digest_of(&read(block)?, geometry) });
        }
        Ok(Self { blocks, next })
    }
}

/// SHA-256 of a block's bytes in the order of the whole layout, so that engines with different shards of heads agree.
fn digest_of(shards: &[Vec<u8>], geometry: &Geometry) -> [u8; 32] {
    let (whole, shard) = (geometry.whole(), geometry.shard());
    // All heads of one rank in one half of one layer are contiguous.
    let run = shard.block_bytes() / (2 * whole.layers);
    let mut hash = Sha256::new();
    for half in 0..2 * whole.layers {
        shards.iter().for_each(|bytes| hash.update(&bytes[half * run..(half + 1) * run]));
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use baton_connector::KvLayout;
    use baton_connector::layout::KvDtype;

    use super::*;

    fn geometry(ranks: usize) -> Geometry {
        let whole = KvLayout { layers: 1, kv_heads: 4, head_dim: 2, block_tokens: 2, dtype: KvDtype::F16 };
        Geometry::new(whole, ranks).expect("ranks that divide the heads")
    }

    #[test]
    fn a_digest_does_not_depend_on_how_the_heads_are_sharded() {
        let bytes: Vec<u8> = (0..64).collect();
        let whole = digest_of(std::slice::from_ref(&bytes), &geometry(1));
        assert_eq!(whole, <[u8; 32]>::from(Sha256::digest(&bytes)));
        // Rank r of two has heads 2r and 2r + 1 of the keys, and then of the values.
        let two = [0, 16].map(|at| [&bytes[at..at + 16], &bytes[32 + at..48 + at]].concat());
        assert_eq!(digest_of(&two, &geometry(2)), whole);
    }

    #[test]
    fn a_page_is_bounded_by_blocks_and_bytes_and_contains_the_next_cursor() {
        assert_eq!(page_blocks(1), DIGEST_BLOCKS_MAX);
        assert_eq!(page_blocks(DIGEST_BYTES_MAX / 3), 3);
        assert_eq!(page_blocks(usize::MAX), 1);
        let read = |block: BlockId| Ok::<_, &str>(vec![vec![9 * block.0 as u8; 64]]);
        let cached: Vec<_> = (0..=DIGEST_BLOCKS_MAX)
            .map(|n| {
                let mut hash = [0; 32];
                hash[..8].copy_from_slice(&(n as u64).to_be_bytes());
                (BlockHash(hash), BlockId(n as u32 % 2))
            })
            .collect();
        let geometry = geometry(1);
        let page = DigestPage::of(&cached, |_| true, &geometry, read).expect("every block can be read");
        assert_eq!(
            (page.blocks.len(), page.next),
            (DIGEST_BLOCKS_MAX, Some(cached[DIGEST_BLOCKS_MAX - 1].0))
        );
        assert_ne!(page.blocks[0].sha256, page.blocks[1].sha256);
        assert_eq!(page.blocks[0].sha256, page.blocks[2].sha256);
        let last = DigestPage::of(&cached[DIGEST_BLOCKS_MAX..], |_| true, &geometry, read);
        assert_eq!(last.expect("every block can be read").next, None);
        let failed = DigestPage::of(&cached, |_| true, &geometry, |_| Err("the device failed"));
        assert_eq!(failed, Err("the device failed"));
    }
}
