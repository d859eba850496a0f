//! The router's names of KV blocks: the chained hash of all tokens up to a block's end, and of what else separates the
//! blocks of one prompt from those of another.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Keys that separate blocks with equal tokens: vLLM's extra keys of a prompt's first block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockKeys<'a> {
    /// The name of a LoRA adapter.
    pub adapter: Option<&'a [u8]>,
    /// The request's `cache_salt`.
    pub salt: Option<&'a [u8]>,
}

/// The router's names of a prompt's whole blocks, at most `most`.
pub(crate) fn links(tokens: &[u32], root: u64, block_size: usize, most: usize) -> Vec<u64> {
    if block_size == 0 {
        return Vec::new();
    }
    chain(root, tokens, block_size).take(most).collect()
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

/// The parent of the first block. Chains of different block sizes, adapters or salts never meet.
pub(crate) fn root(block_size: usize, keys: BlockKeys<'_>) -> u64 {
    let plain = 0x6b76_5f72_6f6f_7421 ^ block_size as u64;
    if keys == BlockKeys::default() {
        return plain;
    }
    let mut hash = Xxh3::with_seed(plain);
    for key in [keys.adapter, keys.salt] {
        // The length comes first, so that no adapter and salt equal another pair.
        hash.update(&key.map_or(u64::MAX, |key| key.len() as u64).to_le_bytes());
        hash.update(key.unwrap_or_default());
    }
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_salts_and_block_sizes_have_chains_of_their_own() {
        let of = |adapter: Option<&'static str>, salt: Option<&'static str>| BlockKeys {
            adapter: adapter.map(str::as_bytes),
            salt: salt.map(str::as_bytes),
        };
        let roots = [
            root(16, of(None, None)),
            root(32, of(None, None)),
            root(16, of(Some("a"), None)),
            root(16, of(None, Some("a"))),
            root(16, of(Some("a"), Some("b"))),
            root(16, of(Some("ab"), Some(""))),
            root(16, of(Some("ab"), None)),
            root(32, of(Some("ab"), None)),
        ];
        let distinct: std::collections::BTreeSet<_> = roots.iter().collect();
        assert_eq!(distinct.len(), roots.len());
        assert_eq!(root(16, of(Some("a"), Some("b"))), root(16, of(Some("a"), Some("b"))));
    }
}
