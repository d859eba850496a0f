//! What the router knows of the engines' caches: from its own decisions, and from what engines tell of
//! themselves. It outlives reloads, because the caches do.

pub(crate) mod kv_events;
pub(crate) mod prefix_index;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{PoisonError, RwLock};

use parking_lot::{Mutex, MutexGuard};

use crate::engines::caches::prefix_index::{Change, Match, PrefixIndex};
use crate::message::features::Wanted;
use crate::metrics::kv_events::Told;

/// Hashes that change or are forgotten under one lock of an index: about 0.1 ms, for which a choice may wait.
const AT_ONCE: usize = 1_024;

/// The numbers under which the caches of one engine are remembered; see [`crate::engines::http::Engine::holder`].
pub(crate) type Holders = Range<u32>;

/// Two indexes: by chunks of prompts as the router sent them, and by KV blocks as engines told.
#[derive(Debug)]
pub(crate) struct Memory {
    sent: Mutex<PrefixIndex>,
    told: Mutex<PrefixIndex>,
    /// Tokens of one KV block, of engines that told.
    sizes: RwLock<HashMap<u32, usize>>,
}

/// What of a prompt an engine holds, as far as is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holding {
    /// Chunks, of [`crate::message::features::Wanted::prefix`].
    pub chunks: usize,
    /// Blocks, of [`crate::message::features::Wanted::blocks`].
    pub blocks: usize,
}

impl Holding {
    /// Tokens of the prompt that it is, as far as is known. Only the beginning of a long prompt is looked at, so of a
    /// longer one this is less than what is held.
    pub(crate) fn tokens(self, wanted: &Wanted<'_>) -> u64 {
        let head = if self.chunks == 0 { 0.0 } else { wanted.head_tokens };
        let by_chunks = (head + self.chunks as f64 * wanted.chunk_tokens).round() as u64;
        let by_blocks = (self.blocks * wanted.block_tokens) as u64;
        by_chunks.max(by_blocks).min(wanted.tokens)
    }

    /// The same as a share of the whole prompt: 0 to 1.
    pub(crate) fn share(self, wanted: &Wanted<'_>) -> f64 {
        // Tokens of prompts are far below 2^53.
        if wanted.tokens == 0 { 0.0 } else { self.tokens(wanted) as f64 / wanted.tokens as f64 }
    }
}

impl Memory {
    /// At most so many hashes of each engine and of all, in each index.
    pub(crate) fn new(per_engine: usize, total: usize) -> Self {
        let index = || Mutex::new(PrefixIndex::new(per_engine, total));
        Self { sent: index(), told: index(), sizes: RwLock::default() }
    }

    /// Changes the bounds.
    pub(crate) fn set_bounds(&self, per_engine: usize, total: usize) {
        self.sent.lock().set_bounds(per_engine, total);
        self.told.lock().set_bounds(per_engine, total);
    }

    /// A prompt was sent to an engine.
    pub(crate) fn sent(&self, engine: u32, prefix: &[u64]) {
        if !prefix.is_empty() {
            self.sent.lock().add(engine, prefix);
        }
    }

    /// An engine has said what changed in its cache, in a subscription that goes on. A choice that waits has its turn
    /// between two pieces of a long list.
    pub(crate) fn told(&self, engine: u32, changes: &[Change], subscription: &Told) {
        for piece in changes.chunks(AT_ONCE) {
            let mut told = self.told.lock();
            if !subscription.is_over() {
                told.change(engine, piece);
            }
            MutexGuard::unlock_fair(told);
        }
    }

    /// Blocks of one engine at most.
    pub(crate) fn blocks_max(&self) -> usize {
        self.told.lock().per_engine()
    }

    /// An engine is gone.
    pub(crate) fn forget(&self, engine: Holders) {
        self.forget_told(engine.start);
        self.forget_sent(engine);
    }

    /// An engine that could not be reached may come back with an empty cache.
    pub(crate) fn forget_sent(&self, engine: Holders) {
        engine.for_each(|holder| forget(&self.sent, holder));
    }

    /// The blocks of an engine are not known any more.
    pub(crate) fn forget_blocks(&self, engine: u32) {
        forget(&self.told, engine);
    }

    /// An engine tells nothing any more.
    pub(crate) fn forget_told(&self, engine: u32) {
        self.forget_blocks(engine);
        self.sizes.write().unwrap_or_else(PoisonError::into_inner).remove(&engine);
    }

    /// Tokens of one KV block of an engine, as it told.
    pub(crate) fn block_size(&self, engine: u32) -> Option<usize> {
        self.sizes.read().unwrap_or_else(PoisonError::into_inner).get(&engine).copied()
    }

    pub(crate) fn set_block_size(&self, engine: u32, tokens: usize) {
        if self.block_size(engine) != Some(tokens) {
            self.sizes.write().unwrap_or_else(PoisonError::into_inner).insert(engine, tokens);
        }
    }

    /// What an engine holds of a prompt.
    pub(crate) fn holding(&self, engine: u32, prefix: &[u64], blocks: &[u64]) -> Holding {
        self.holdings(&[engine], prefix, blocks)[0]
    }

    /// What each of several engines holds of a prompt; each index is locked once.
    pub(crate) fn holdings(&self, engines: &[u32], prefix: &[u64], blocks: &[u64]) -> Vec<Holding> {
        let mut holdings = vec![Holding::default(); engines.len()];
        if !prefix.is_empty() {
            let sent = self.sent.lock();
            for (holding, &engine) in holdings.iter_mut().zip(engines) {
                holding.chunks = sent.length(engine, prefix);
            }
        }
        if !blocks.is_empty() {
            let told = self.told.lock();
            for (holding, &engine) in holdings.iter_mut().zip(engines) {
                holding.blocks = told.length(engine, blocks);
            }
        }
        holdings
    }

    /// Who holds most of a prompt's chunks, of the engines that have a load.
    pub(crate) fn longest_sent(&self, prefix: &[u64], load: impl Fn(u32) -> Option<u64>) -> Option<Match> {
        if prefix.is_empty() { None } else { self.sent.lock().longest(prefix, load) }
    }

    /// Who holds most of a prompt's blocks, of the engines that have a load.
    pub(crate) fn longest_told(&self, blocks: &[u64], load: impl Fn(u32) -> Option<u64>) -> Option<Match> {
        if blocks.is_empty() { None } else { self.told.lock().longest(blocks, load) }
    }

    /// Chunks that an engine was sent and is still taken to hold.
    #[cfg(test)]
    pub(crate) fn chunks_of(&self, engine: u32) -> usize {
        self.sent.lock().len_of(engine)
    }
}

/// Forgets all of an engine, a piece at a time.
fn forget(index: &Mutex<PrefixIndex>, engine: u32) {
    loop {
        let mut index = index.lock();
        let is_over = index.forget_some(engine, AT_ONCE);
        MutexGuard::unlock_fair(index);
        if is_over {
            return;
        }
    }
}
