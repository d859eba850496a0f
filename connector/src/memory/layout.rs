//! The layout of the bytes of one KV block, and the fingerprint that two engines compare.
//!
//! Pools are block-major: all layers and both K and V of one block are one contiguous run,
//! `[layer][K|V][kv_head][token][dim]`. So a block is one descriptor on every transport and tier.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// 32-bit float: exact mode.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// bfloat16.
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// The shape of one KV block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvLayout {
    /// Transformer layers.
    pub layers: usize,
    /// KV heads of the whole model, or, in the layout of a shard, of one rank.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Tokens of one block.
    pub block_tokens: usize,
    /// Element type.
    pub dtype: KvDtype,
}

impl KvLayout {
    /// Bytes of one block: `layers × 2 × kv_heads × block_tokens × head_dim × element`.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.layers * 2 * self.kv_heads * self.block_tokens * self.head_dim * self.dtype.bytes()
    }

    /// Blocks that hold `tokens` tokens.
    #[must_use]
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// A 64-bit fingerprint. It is equal on two engines only if one can use the other's KV. It does not depend on the
    /// block size, which is a field of the handoff. It covers the layout over all heads, so it does not depend on the
    /// sharding either.
    ///
    /// `model` identifies the weights: two models of the same shape must never share blocks.
    #[must_use]
    pub fn fingerprint(&self, model: &str) -> u64 {
        let mut hash = Sha256::new();
        hash.update(b"baton-kv-layout-2");
        for part in [self.layers, self.kv_heads, self.head_dim, self.dtype as usize] {
            hash.update((part as u64).to_le_bytes());
        }
        hash.update(model.as_bytes());
        let digest = hash.finalize();
        u64::from_le_bytes(digest[..8].try_into().expect("a SHA-256 digest has 32 bytes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: KvLayout =
        KvLayout { layers: 2, kv_heads: 2, head_dim: 32, block_tokens: 16, dtype: KvDtype::F32 };

    #[test]
    fn a_block_holds_keys_and_values_of_every_layer() {
        assert_eq!(LAYOUT.block_bytes(), 2 * 2 * 2 * 16 * 32 * 4);
        assert_eq!([0, 1, 16, 17].map(|t| LAYOUT.blocks_for(t)), [0, 1, 1, 2]);
    }

    #[test]
    fn the_fingerprint_differs_by_model_and_shape() {
        let here = LAYOUT.fingerprint("model-a");
        assert_eq!(here, LAYOUT.fingerprint("model-a"));
        assert_ne!(here, LAYOUT.fingerprint("model-b"));
        assert_ne!(here, KvLayout { kv_heads: 4, ..LAYOUT }.fingerprint("model-a"));
        assert_eq!(here, KvLayout { block_tokens: 32, ..LAYOUT }.fingerprint("model-a"), "blocks can be cut");
    }
}
