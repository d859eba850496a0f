//! The adapter on which the KV of a block depends.

use crate::model::lora::AdapterIndex;

/// The adapter of a sequence. Blocks of other adapters, and of the model alone, have other hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockAdapter {
    /// Its index in the steps of an executor.
    pub index: AdapterIndex,
    /// Its name in requests and in KV events.
    pub name: Box<str>,
    /// Digest of its values. Two adapters with one name share no block.
    pub digest: [u8; 32],
}

impl BlockAdapter {
    /// Its number in KV events (vLLM's `lora_id`), from 1.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.index.0 as u64 + 1
    }
}
