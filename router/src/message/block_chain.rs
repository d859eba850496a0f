//! The router's names of KV blocks: the chained hash of all tokens up to a block's end.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The router's names of a prompt's whole blocks, at most `most`.
pub(crate) fn links(tokens: &[u32], block_size: usize, most: usize) -> Vec<u64> {
    if block_size == 0 {
        return Vec::new();
    }
    chain(root(block_size), tokens, block_size).take(most).collect()
}

pub(crate) fn chain(parent: u64, tokens: &[u32], size: usize) -> impl Iterator<Item = u64> + '_ {
    let mut link = parent;
    let mut bytes = Vec::with_capacity(size * 4);
    tokens.chunks_exact(size).map(move |block| {
        bytes.clear();
        bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
        link = xxh3_64_with_seed(&bytes, link);
        link
    })
}

/// The parent of the first block. Chains of different block sizes never meet.
pub(crate) fn root(block_size: usize) -> u64 {
    0x6b76_5f72_6f6f_7421 ^ block_size as u64
}
