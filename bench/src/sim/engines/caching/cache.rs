//! The prefix cache of a simulated engine: whole blocks by the hash of everything up to their end. Pure.

use std::collections::{BTreeMap, HashMap};

use crate::load::rng::mix;

/// A bounded cache. The block that was used least recently is evicted first, and of one prompt its end.
#[derive(Debug)]
pub(super) struct PrefixCache {
    capacity: usize,
    last_use: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
    clock: u64,
}

/// What the use of a prompt has changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct CacheChanges {
    /// Blocks of the prompt that were cached before, from its beginning.
    pub hits: usize,
    /// The other blocks of the prompt that are cached now, behind the hits.
    pub stored: usize,
    pub evicted: Vec<u64>,
}

/// The hashes of a prompt's whole blocks. Prompts with different salts have different hashes.
pub(super) fn block_hashes(tokens: &[u32], block_tokens: usize, salt: Option<&str>) -> Vec<u64> {
    let start = salt.unwrap_or_default().bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
    let mut hash = start;
    let end_of_block = |block: &[u32]| {
        hash = block.iter().fold(hash, |hash, &token| mix(hash ^ u64::from(token)));
        hash
    };
    tokens.chunks_exact(block_tokens).map(end_of_block).collect()
}

impl PrefixCache {
    /// An empty cache of so many blocks.
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, last_use: HashMap::new(), by_use: BTreeMap::new(), clock: 0 }
    }

    /// Cached blocks of a prompt, from its beginning.
    pub(super) fn hits(&self, prompt: &[u64]) -> usize {
        prompt.iter().take_while(|hash| self.last_use.contains_key(hash)).count()
    }

    /// Uses and stores a prompt's blocks, as many as the cache holds.
    pub(super) fn use_prompt(&mut self, prompt: &[u64]) -> CacheChanges {
        let hits = self.hits(prompt);
        let kept = &prompt[..prompt.len().min(self.capacity)];
        // The beginning is used last, so that it outlives what follows it.
        for &hash in kept.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.last_use.insert(hash, self.clock) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(self.clock, hash);
        }
        let mut evicted = Vec::new();
        while self.last_use.len() > self.capacity {
            let (_, oldest) = self.by_use.pop_first().expect("every block has a last use");
            self.last_use.remove(&oldest);
            evicted.push(oldest);
        }
        CacheChanges { hits, stored: kept.len().saturating_sub(hits), evicted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(count: u32) -> Vec<u32> {
        (0..count).collect()
    }

    #[test]
    fn a_longer_prompt_hits_the_blocks_of_a_shorter_one() {
        let mut cache = PrefixCache::new(100);
        let short = block_hashes(&tokens(10), 4, None);
        let long = block_hashes(&tokens(17), 4, None);
        assert_eq!((short.len(), long.len()), (2, 4), "whole blocks");
        assert_eq!(cache.use_prompt(&short), CacheChanges { hits: 0, stored: 2, evicted: vec![] });
        assert_eq!(cache.use_prompt(&long), CacheChanges { hits: 2, stored: 2, evicted: vec![] });
        assert_eq!(cache.hits(&long), 4);
        assert_eq!(cache.hits(&block_hashes(&tokens(17), 4, Some("s"))), 0, "a salt separates");
    }

    #[test]
    fn the_end_of_the_oldest_prompt_is_evicted_first() {
        let mut cache = PrefixCache::new(4);
        let old = block_hashes(&tokens(12), 4, None);
        let new = block_hashes(&[9; 8], 4, None);
        cache.use_prompt(&old);
        let changes = cache.use_prompt(&new);
        assert_eq!(changes, CacheChanges { hits: 0, stored: 2, evicted: vec![old[2]] });
        assert_eq!((cache.hits(&old), cache.hits(&new)), (2, 2));
        // A prompt that is larger than the cache keeps its beginning.
        let large = block_hashes(&tokens(100), 4, Some("s"));
        assert_eq!(cache.use_prompt(&large).stored, 4);
        assert_eq!(cache.hits(&large), 4);
        assert_eq!(cache.last_use.len(), cache.by_use.len());
    }
}
