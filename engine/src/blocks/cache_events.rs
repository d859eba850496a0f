//! The changes of an engine's caches, in order: what a publisher of KV events reports. Pure.
//!
//! The pool and the scheduler record them between two drains by the step loop. Their number is bounded by the pool
//! and the tiers: a block leaves a cache only after it has entered it.

use std::sync::Arc;

use crate::blocks::adapter::BlockAdapter;
use crate::blocks::hash::BlockHash;

/// Limit of the tokens of one event: about 40 KiB on the wire. A longer run is several events.
const RUN_TOKENS_MAX: usize = 8_192;

/// Limit of the blocks of one event without tokens.
const NAMES_MAX: usize = 4_096;

/// Where a block is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMedium {
    /// The KV pool.
    Device,
    /// The host tier.
    Host,
    /// The disk tier.
    Disk,
}

/// Consecutive blocks of one prompt that entered the prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRun {
    /// The blocks, in order; at least one.
    pub hashes: Vec<BlockHash>,
    /// The block before them; none at the beginning of a prompt.
    pub parent: Option<BlockHash>,
    /// Their tokens: a whole block of them per hash.
    pub tokens: Vec<u32>,
    /// The salt of the prompt, if its first block is among them.
    pub salt: Option<Box<str>>,
    /// The adapter that computed them; `None` for the model alone.
    pub adapter: Option<Arc<BlockAdapter>>,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Blocks entered the prefix cache.
    Stored(StoredRun),
    /// A tier has these blocks too. An earlier event contains their tokens.
    Copied {
        /// The tier.
        medium: CacheMedium,
        /// The blocks.
        hashes: Vec<BlockHash>,
    },
    /// A medium has these blocks no more.
    Removed {
        /// The pool or a tier.
        medium: CacheMedium,
        /// The blocks.
        hashes: Vec<BlockHash>,
    },
    /// The prefix cache was cleared.
    Cleared,
}

/// The changes since the last drain.
#[derive(Debug, Default)]
pub struct CacheEventLog {
    events: Vec<CacheEvent>,
    audience: u64,
}

impl CacheEventLog {
    /// The number of the audience: it changes whenever a subscriber may have missed earlier events.
    #[must_use]
    pub fn audience(&self) -> u64 {
        self.audience
    }

    /// Later events are for this audience.
    pub fn set_audience(&mut self, audience: u64) {
        self.audience = audience;
    }

    /// Removes and returns all changes, in order.
    #[must_use]
    pub fn take(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.events)
    }

    /// Blocks `hashes` after `parent` entered the prefix cache. `tokens` are theirs, `block_tokens` each.
    pub fn stored(
        &mut self,
        hashes: &[BlockHash],
        parent: Option<BlockHash>,
        tokens: &[u32],
        salt: Option<&str>,
        adapter: Option<&Arc<BlockAdapter>>,
    ) {
        let Some(block_tokens) = tokens.len().checked_div(hashes.len()).filter(|tokens| *tokens > 0) else {
            return;
        };
        let run = (RUN_TOKENS_MAX / block_tokens).max(1);
        let mut parent = parent;
        for (hashes, tokens) in hashes.chunks(run).zip(tokens.chunks(run * block_tokens)) {
            let salt = salt.filter(|_| parent.is_none()).map(Into::into);
            let (tokens, adapter) = (tokens.to_vec(), adapter.cloned());
            let stored = StoredRun { hashes: hashes.to_vec(), parent, tokens, salt, adapter };
            self.events.push(CacheEvent::Stored(stored));
            parent = hashes.last().copied();
        }
    }

    /// A tier has a block too.
    pub fn copied(&mut self, medium: CacheMedium, hash: BlockHash) {
        if let Some(CacheEvent::Copied { medium: last, hashes }) = self.events.last_mut()
            && *last == medium
            && hashes.len() < NAMES_MAX
        {
            hashes.push(hash);
        } else {
            self.events.push(CacheEvent::Copied { medium, hashes: vec![hash] });
        }
    }

    /// A medium has a block no more.
    pub fn removed(&mut self, medium: CacheMedium, hash: BlockHash) {
        if let Some(CacheEvent::Removed { medium: last, hashes }) = self.events.last_mut()
            && *last == medium
            && hashes.len() < NAMES_MAX
        {
            hashes.push(hash);
        } else {
            self.events.push(CacheEvent::Removed { medium, hashes: vec![hash] });
        }
    }

    /// The prefix cache was cleared. Earlier changes no longer matter.
    pub fn cleared(&mut self) {
        self.events.clear();
        self.events.push(CacheEvent::Cleared);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u32) -> BlockHash {
        let mut bytes = [0; 32];
        bytes[28..].copy_from_slice(&n.to_be_bytes());
        BlockHash(bytes)
    }

    #[test]
    fn a_long_run_is_several_events_that_name_their_parents() {
        let block_tokens = 16;
        let blocks = 2 * RUN_TOKENS_MAX / block_tokens + 1;
        let hashes: Vec<_> = (0..blocks as u32).map(hash).collect();
        let tokens: Vec<_> = (0..(blocks * block_tokens) as u32).collect();
        let mut log = CacheEventLog::default();
        log.stored(&hashes, None, &tokens, Some("salt"), None);
        let events = log.take();
        assert_eq!(events.len(), 3);
        let (mut next, mut parent) = (0, None);
        for event in events {
            let CacheEvent::Stored(run) = event else { panic!("{event:?}") };
            assert_eq!(run.parent, parent);
            assert_eq!(run.salt.is_some(), parent.is_none(), "a salt belongs to the first block");
            assert_eq!(run.hashes, hashes[next..next + run.hashes.len()]);
            let end = next + run.hashes.len();
            assert_eq!(run.tokens, tokens[next * block_tokens..end * block_tokens]);
            (next, parent) = (end, run.hashes.last().copied());
        }
        assert_eq!(next, blocks);
        log.stored(&[], None, &[], None, None);
        assert_eq!(log.take(), [], "no block");
    }

    #[test]
    fn consecutive_removals_of_one_medium_are_one_event_and_order_is_kept() {
        let mut log = CacheEventLog::default();
        log.removed(CacheMedium::Device, hash(1));
        log.removed(CacheMedium::Device, hash(2));
        log.removed(CacheMedium::Host, hash(1));
        log.stored(&[hash(1)], None, &[7, 8], None, None);
        log.copied(CacheMedium::Disk, hash(1));
        log.copied(CacheMedium::Disk, hash(2));
        log.removed(CacheMedium::Device, hash(1));
        let removed = |medium, hashes: &[u32]| CacheEvent::Removed {
            medium,
            hashes: hashes.iter().map(|n| hash(*n)).collect(),
        };
        let (hashes, tokens) = (vec![hash(1)], vec![7, 8]);
        let run = StoredRun { hashes, parent: None, tokens, salt: None, adapter: None };
        assert_eq!(
            log.take(),
            [
                removed(CacheMedium::Device, &[1, 2]),
                removed(CacheMedium::Host, &[1]),
                CacheEvent::Stored(run),
                CacheEvent::Copied { medium: CacheMedium::Disk, hashes: vec![hash(1), hash(2)] },
                removed(CacheMedium::Device, &[1]),
            ]
        );
        log.removed(CacheMedium::Device, hash(1));
        log.cleared();
        assert_eq!(log.take(), [CacheEvent::Cleared]);
    }
}
