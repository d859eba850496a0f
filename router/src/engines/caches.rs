//! The router's knowledge of the engines' caches, from its own decisions and from KV events. It outlives reloads,
//! because the caches do.

pub(crate) mod kept_turns;
pub(crate) mod kv_events;
pub(crate) mod prefix_index;

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use parking_lot::{Mutex, MutexGuard};

use crate::engines::caches::prefix_index::{CacheChange, PrefixIndex, PrefixMatch};
use crate::message::features::RoutingFeatures;
use crate::metrics::kv_events::SubscriptionStats;

/// Hashes that are changed or removed under one lock of an index: about 0.1 ms, for which a choice may wait.
const HASHES_PER_LOCK_MAX: usize = 1_024;

/// Maximum names of adapters, and maximum bytes of one: that of a model's name in the configuration.
const ADAPTERS_MAX: usize = 4_096;
const ADAPTER_BYTES_MAX: usize = 256;

/// The numbers of one engine's caches; see [`crate::engines::http::Engine::cache_ids`].
pub(crate) type CacheIds = Range<u32>;

/// Two indexes: chunks of prompts that the router has sent, and KV blocks that engines have reported.
#[derive(Debug)]
pub(crate) struct KnownCaches {
    routed: Mutex<PrefixIndex>,
    reported: Mutex<PrefixIndex>,
    /// Tokens of one KV block, of engines that report them.
    block_sizes: RwLock<HashMap<u32, usize>>,
    /// Names of LoRA adapters in events and in the engines' lists of models.
    adapters: RwLock<BTreeSet<Box<[u8]>>>,
}

/// The known part of a prompt that an engine has cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CachedPrefix {
    /// Chunks, of [`crate::message::features::RoutingFeatures::prefix`].
    pub chunks: usize,
    /// Blocks, of [`crate::message::features::RoutingFeatures::blocks`].
    pub blocks: usize,
}

impl CachedPrefix {
    /// Cached tokens of the prompt, as far as known. Only the beginning of a long prompt is compared, so for a
    /// longer one the result is below the cached part.
    pub(crate) fn tokens(self, features: &RoutingFeatures<'_>) -> u64 {
        let head = if self.chunks == 0 { 0.0 } else { features.head_tokens };
        let by_chunks = (head + self.chunks as f64 * features.chunk_tokens).round() as u64;
        let by_blocks = (self.blocks * features.block_tokens) as u64;
        by_chunks.max(by_blocks).min(features.tokens)
    }

    /// The same as a share of the whole prompt: 0 to 1.
    pub(crate) fn share(self, features: &RoutingFeatures<'_>) -> f64 {
        // Token counts are far below 2^53.
        if features.tokens == 0 { 0.0 } else { self.tokens(features) as f64 / features.tokens as f64 }
    }
}

impl KnownCaches {
    /// Bounds the hashes of each engine and of all engines, per index.
    pub(crate) fn new(per_engine: usize, total: usize) -> Self {
        let index = || Mutex::new(PrefixIndex::new(per_engine, total));
        Self {
            routed: index(),
            reported: index(),
            block_sizes: RwLock::default(),
            adapters: RwLock::default(),
        }
    }

    /// Changes the bounds.
    pub(crate) fn set_bounds(&self, per_engine: usize, total: usize) {
        self.routed.lock().set_bounds(per_engine, total);
        self.reported.lock().set_bounds(per_engine, total);
    }

    /// Records that a prompt was sent to an engine.
    pub(crate) fn record_routed(&self, engine: u32, prefix: &[u64]) {
        if !prefix.is_empty() {
            self.routed.lock().add(engine, prefix);
        }
    }

    /// Applies changes that an engine has reported, unless the subscription has ended. Between two pieces of a
    /// long list, a waiting choice gets the lock.
    pub(crate) fn apply_reported(&self, engine: u32, changes: &[CacheChange], stats: &SubscriptionStats) {
        for piece in changes.chunks(HASHES_PER_LOCK_MAX) {
            let mut reported = self.reported.lock();
            if !stats.has_ended() {
                reported.change(engine, piece);
            }
            MutexGuard::unlock_fair(reported);
        }
    }

    /// Maximum blocks of one engine.
    pub(crate) fn blocks_max(&self) -> usize {
        self.reported.lock().per_engine()
    }

    /// Removes an engine.
    pub(crate) fn forget(&self, engine: CacheIds) {
        engine.clone().for_each(|cache_id| self.forget_reported(cache_id));
        self.forget_routed(engine);
    }

    /// Removes what was routed to an engine. An unreachable engine may return with an empty cache.
    pub(crate) fn forget_routed(&self, engine: CacheIds) {
        engine.for_each(|cache_id| forget(&self.routed, cache_id));
    }

    /// Removes the reported blocks of an engine.
    pub(crate) fn forget_blocks(&self, engine: u32) {
        forget(&self.reported, engine);
    }

    /// Removes everything that an engine has reported.
    pub(crate) fn forget_reported(&self, engine: u32) {
        self.forget_blocks(engine);
        self.block_sizes.write().unwrap_or_else(PoisonError::into_inner).remove(&engine);
    }

    /// Tokens of one KV block, as reported by the engine.
    pub(crate) fn block_size(&self, engine: u32) -> Option<usize> {
        self.block_sizes.read().unwrap_or_else(PoisonError::into_inner).get(&engine).copied()
    }

    pub(crate) fn set_block_size(&self, engine: u32, tokens: usize) {
        if self.block_size(engine) != Some(tokens) {
            self.block_sizes.write().unwrap_or_else(PoisonError::into_inner).insert(engine, tokens);
        }
    }

    /// Records that an engine's events or its list of models name an adapter. Names beyond the bound are left out.
    pub(crate) fn add_adapter(&self, name: &[u8]) {
        if name.len() > ADAPTER_BYTES_MAX || self.is_adapter(name) {
            return;
        }
        let mut adapters = self.adapters.write().unwrap_or_else(PoisonError::into_inner);
        if adapters.len() < ADAPTERS_MAX {
            adapters.insert(name.into());
        }
    }

    /// Whether an engine has named this model as an adapter.
    pub(crate) fn is_adapter(&self, model: &[u8]) -> bool {
        self.adapters.read().unwrap_or_else(PoisonError::into_inner).contains(model)
    }

    /// The cached prefix of one engine.
    pub(crate) fn cached_prefix(&self, engine: u32, prefix: &[u64], blocks: &[u64]) -> CachedPrefix {
        self.cached_prefixes(&[engine], prefix, blocks)[0]
    }

    /// The cached prefixes of several engines. Each index is locked once.
    pub(crate) fn cached_prefixes(
        &self,
        engines: &[u32],
        prefix: &[u64],
        blocks: &[u64],
    ) -> Vec<CachedPrefix> {
        let mut cached = vec![CachedPrefix::default(); engines.len()];
        if !prefix.is_empty() {
            let routed = self.routed.lock();
            for (one, &engine) in cached.iter_mut().zip(engines) {
                one.chunks = routed.length(engine, prefix);
            }
        }
        if !blocks.is_empty() {
            let reported = self.reported.lock();
            for (one, &engine) in cached.iter_mut().zip(engines) {
                one.blocks = reported.length(engine, blocks);
            }
        }
        cached
    }

    /// The engine with the longest routed prefix, of the engines that have a load.
    pub(crate) fn longest_routed(
        &self,
        prefix: &[u64],
        load: impl Fn(u32) -> Option<u64>,
    ) -> Option<PrefixMatch> {
        if prefix.is_empty() { None } else { self.routed.lock().longest(prefix, load) }
    }

    /// The engine with the longest reported prefix, of the engines that have a load.
    pub(crate) fn longest_reported(
        &self,
        blocks: &[u64],
        load: impl Fn(u32) -> Option<u64>,
    ) -> Option<PrefixMatch> {
        if blocks.is_empty() { None } else { self.reported.lock().longest(blocks, load) }
    }

    /// Chunks that were routed to an engine and are still in the index.
    #[cfg(test)]
    pub(crate) fn routed_chunks(&self, engine: u32) -> usize {
        self.routed.lock().len_of(engine)
    }
}

/// Removes all hashes of an engine, piece by piece.
fn forget(index: &Mutex<PrefixIndex>, engine: u32) {
    loop {
        let mut index = index.lock();
        let is_over = index.forget_some(engine, HASHES_PER_LOCK_MAX);
        MutexGuard::unlock_fair(index);
        if is_over {
            return;
        }
    }
}
