//! An index of prompt prefixes by engine: chained hashes, bounded.
//!
//! A hash represents the beginning of a prompt up to the end of one chunk. So a longer match is a later hash of
//! the same list. Each engine's hashes are an LRU list. A use of a prompt touches its end first, so that a
//! beginning outlives what follows it. This allows a binary search for the last cached hash.
//!
//! When the total bound is reached, an engine below an equal share takes from one above it, from the largest as
//! far as known. An engine with its share evicts its own least recently used hash.
//!
//! The index is an estimate, not a promise of an engine. A wrong estimate costs the computation of a prefix.

mod hash_lru;

use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, Hasher};

use hash_lru::HashLru;

use crate::message::random;

/// Maximum engines examined per hash. The others are as good.
const HOLDERS_EXAMINED_MAX: usize = 64;

/// The index.
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    engines: HashMap<u32, HashLru, MixHashBuilder>,
    /// The engines of each hash; never empty.
    holders: HashMap<u64, Vec<u32>, MixHashBuilder>,
    hash_builder: MixHashBuilder,
    /// Maximum hashes of one engine.
    per_engine: usize,
    /// Maximum hashes of all engines.
    total: usize,
    /// Current hashes of all engines.
    len: usize,
    /// Engines above an equal share at the last scan, with their sizes; see [`Self::largest_above_share`].
    above_share: BinaryHeap<(usize, u32)>,
}

/// One reported change of an engine's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheChange {
    /// The engine caches this hash now.
    Added(u64),
    /// The engine no longer caches this hash.
    Removed(u64),
}

/// An engine that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixMatch {
    pub engine: u32,
    /// Number of cached hashes, from the first of the list.
    pub length: usize,
}

impl PrefixIndex {
    /// Bounds the hashes of each engine and of all engines. A hash takes about 110 bytes.
    pub(crate) fn new(per_engine: usize, total: usize) -> Self {
        // Without a source of randomness a client could slow down lookups, with no other effect.
        let hash_builder = MixHashBuilder(random::seed());
        let (engines, holders) = (HashMap::with_hasher(hash_builder), HashMap::with_hasher(hash_builder));
        Self { engines, holders, hash_builder, per_engine, total, len: 0, above_share: BinaryHeap::new() }
    }

    /// Changes the bounds, and evicts from the largest engines what exceeds them.
    pub(crate) fn set_bounds(&mut self, per_engine: usize, total: usize) {
        (self.per_engine, self.total) = (per_engine, total);
        let sum = |most: usize| self.engines.values().map(|lru| lru.len().min(most)).sum::<usize>();
        // The largest size that all engines may keep, and the number of engines that may keep one more.
        let (mut most, mut over) = (0, per_engine + 1);
        while over - most > 1 {
            let middle = most + (over - most) / 2;
            if sum(middle) <= total { most = middle } else { over = middle }
        }
        let mut spare = if most == per_engine { 0 } else { total - sum(most) };
        for (&engine, lru) in &mut self.engines {
            let one_more = spare > 0 && lru.len() > most;
            spare -= usize::from(one_more);
            while lru.len() > most + usize::from(one_more) {
                let Some(oldest) = lru.evict() else { break };
                self.len -= 1;
                release(&mut self.holders, engine, oldest);
            }
        }
        self.engines.retain(|_, lru| lru.len() > 0);
    }

    /// Maximum hashes of one engine.
    pub(crate) fn per_engine(&self) -> usize {
        self.per_engine
    }

    /// Current hashes of all engines.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Current hashes of one engine.
    #[cfg(test)]
    pub(crate) fn len_of(&self, engine: u32) -> usize {
        self.engines.get(&engine).map_or(0, HashLru::len)
    }

    /// Adds a prompt that the engine has just used.
    pub(crate) fn add(&mut self, engine: u32, prefix: &[u64]) {
        // Hashes beyond the bound would evict the prompt's own beginning.
        let prefix = &prefix[..prefix.len().min(self.per_engine)];
        for &hash in prefix.iter().rev() {
            self.add_one(engine, hash);
        }
    }

    /// Adds a hash that the engine has just used.
    pub(crate) fn add_one(&mut self, engine: u32, hash: u64) {
        let lru = self.engines.entry(engine).or_insert_with(|| HashLru::new(self.hash_builder));
        if lru.touch(hash) {
            return;
        }
        let own = lru.len();
        if own >= self.per_engine {
            self.evict(engine);
        } else if self.len >= self.total {
            let share = (self.total / self.engines.len()).max(1);
            let from = if own >= share { Some(engine) } else { self.largest_above_share(share) };
            from.into_iter().for_each(|from| self.evict(from));
        }
        let lru = self.engines.entry(engine).or_insert_with(|| HashLru::new(self.hash_builder));
        if self.len < self.total && lru.len() < self.per_engine {
            lru.insert(hash);
            self.len += 1;
            self.holders.entry(hash).or_default().push(engine);
        }
    }

    /// The largest engine above an equal share, by the last scan less the evictions since. A new scan happens only
    /// when no engine of the last one is left. A scan of a thousand engines per hash would cost more than the
    /// choice that it serves.
    fn largest_above_share(&mut self, share: usize) -> Option<u32> {
        for fresh in [false, true] {
            if fresh {
                let sizes = self.engines.iter().map(|(&engine, lru)| (lru.len(), engine));
                self.above_share = sizes.filter(|(length, _)| *length > share).collect();
            }
            while let Some((length, engine)) = self.above_share.pop() {
                let now = self.engines.get(&engine).map_or(0, HashLru::len);
                if now > share {
                    self.above_share.push((now, engine));
                    if now == length {
                        return Some(engine);
                    }
                }
            }
        }
        // No engine exceeds its share, so all sizes are nearly equal. Evict from the largest.
        self.engines.iter().max_by_key(|(_, lru)| lru.len()).map(|(&engine, _)| engine)
    }

    /// Evicts an engine's least recently used hash.
    fn evict(&mut self, engine: u32) {
        let Some(lru) = self.engines.get_mut(&engine) else { return };
        let oldest = lru.evict();
        if lru.len() == 0 {
            self.engines.remove(&engine);
        }
        if let Some(oldest) = oldest {
            self.len -= 1;
            release(&mut self.holders, engine, oldest);
        }
    }

    /// Removes a hash that the engine no longer caches.
    fn remove(&mut self, engine: u32, hash: u64) {
        if self.engines.get_mut(&engine).is_some_and(|lru| lru.remove(hash)) {
            self.len -= 1;
            release(&mut self.holders, engine, hash);
        }
    }

    /// Applies an engine's reported changes, in order.
    pub(crate) fn change(&mut self, engine: u32, changes: &[CacheChange]) {
        for change in changes {
            match *change {
                CacheChange::Added(hash) => self.add_one(engine, hash),
                CacheChange::Removed(hash) => self.remove(engine, hash),
            }
        }
    }

    /// Evicts at most `most` hashes of an engine, the least recently used first. Returns whether none is left.
    pub(crate) fn forget_some(&mut self, engine: u32, most: usize) -> bool {
        (0..most).for_each(|_| self.evict(engine));
        !self.engines.contains_key(&engine)
    }

    /// Removes all hashes of an engine.
    #[cfg(test)]
    pub(crate) fn forget(&mut self, engine: u32) {
        while !self.forget_some(engine, usize::from(u16::MAX)) {}
    }

    /// Number of cached hashes of the list, from the first.
    pub(crate) fn length(&self, engine: u32, prefix: &[u64]) -> usize {
        let (Some(lru), Some((first, rest))) = (self.engines.get(&engine), prefix.split_first()) else {
            return 0;
        };
        // Most engines have no part of a prompt, and one lookup shows it.
        if lru.contains(*first) { 1 + rest.partition_point(|&hash| lru.contains(hash)) } else { 0 }
    }

    /// The engine with the longest match, of the engines that have a load; of equals the least loaded.
    ///
    /// The search examines a logarithmic number of hashes, and for each a bounded number of engines.
    pub(crate) fn longest(&self, prefix: &[u64], load: impl Fn(u32) -> Option<u64>) -> Option<PrefixMatch> {
        let holder = |hash: &u64| -> Option<u32> {
            let engines = self.holders.get(hash)?.iter().take(HOLDERS_EXAMINED_MAX);
            engines.filter_map(|&engine| Some((load(engine)?, engine))).min().map(|(_, engine)| engine)
        };
        let has_holder = |hash: &u64| -> bool {
            let engines = self.holders.get(hash).map(Vec::as_slice).unwrap_or_default();
            engines.iter().take(HOLDERS_EXAMINED_MAX).any(|&engine| load(engine).is_some())
        };
        let length = prefix.partition_point(has_holder);
        let last = prefix.get(length.checked_sub(1)?)?;
        holder(last).map(|engine| PrefixMatch { engine, length })
    }
}

fn release(holders: &mut HashMap<u64, Vec<u32>, MixHashBuilder>, engine: u32, hash: u64) {
    let Some(engines) = holders.get_mut(&hash) else { return };
    engines.retain(|&other| other != engine);
    if engines.is_empty() {
        holders.remove(&hash);
    }
}

/// Hashes hashes by one multiplication with a secret, because clients control the hashed values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MixHashBuilder(u64);

impl BuildHasher for MixHashBuilder {
    type Hasher = MixHasher;

    fn build_hasher(&self) -> MixHasher {
        MixHasher(self.0)
    }
}

/// Hashes one number to one `u64`.
#[derive(Debug)]
pub(crate) struct MixHasher(u64);

impl Hasher for MixHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        let wide =
            u128::from(self.0 ^ word) * u128::from(0x9e37_79b9_7f4a_7c15_u64 ^ self.0.rotate_left(17) | 1);
        self.0 = (wide as u64) ^ ((wide >> 64) as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap as Model, VecDeque};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_longest_match_wins_and_the_less_loaded_of_equals() {
        let mut index = PrefixIndex::new(100, 1000);
        index.add(1, &[1, 2, 3, 4]);
        index.add(2, &[1, 2, 3, 4, 5]);
        index.add(3, &[1, 2]);
        let loads = |of: &'static [(u32, u64)]| {
            move |engine| of.iter().find(|(e, _)| *e == engine).map(|(_, load)| *load)
        };
        let found = |index: &PrefixIndex, prefix: &[u64], of| index.longest(prefix, loads(of));
        let all: &[_] = &[(1, 5), (2, 9), (3, 0)];
        assert_eq!(found(&index, &[1, 2, 3, 4, 5, 6], all), Some(PrefixMatch { engine: 2, length: 5 }));
        assert_eq!(found(&index, &[1, 2, 3, 4, 7], all), Some(PrefixMatch { engine: 1, length: 4 }));
        assert_eq!(found(&index, &[1, 2, 9], all), Some(PrefixMatch { engine: 3, length: 2 }));
        assert_eq!(
            found(&index, &[1, 2, 3, 4, 5], &[(1, 5), (3, 0)]),
            Some(PrefixMatch { engine: 1, length: 4 })
        );
        assert_eq!(found(&index, &[9], all), None);
        assert_eq!(found(&index, &[], all), None);
        assert_eq!(index.length(2, &[1, 2, 3, 4, 5, 6]), 5);
        index.forget(2);
        assert_eq!(index.length(2, &[1, 2, 3]), 0);
        assert_eq!(found(&index, &[1, 2, 3, 4, 5], all), Some(PrefixMatch { engine: 1, length: 4 }));
    }

    #[test]
    fn the_start_of_a_prompt_is_evicted_last() {
        let mut index = PrefixIndex::new(10, 1000);
        index.add(1, &[1, 2, 3, 4, 5, 6]);
        index.add(1, &[1, 2, 13, 14, 15, 16, 17, 18]);
        assert_eq!(index.length(1, &[1, 2, 13, 14, 15, 16, 17, 18]), 8);
        assert_eq!(index.length(1, &[1, 2, 3, 4, 5, 6]), 4, "the end of the older prompt went first");
        assert_eq!(index.len(), 10);
    }

    #[test]
    fn a_prompt_that_is_larger_than_the_bound_keeps_its_beginning() {
        let mut index = PrefixIndex::new(4, 1000);
        index.add(1, &[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(index.length(1, &[1, 2, 3, 4, 5, 6, 7]), 4);
    }

    #[test]
    fn all_engines_together_hold_no_more_than_the_total() {
        let mut index = PrefixIndex::new(50, 100);
        for engine in 0..10 {
            let prefix: Vec<u64> = (0..50).map(|n| u64::from(engine) * 1000 + n).collect();
            index.add(engine, &prefix);
            assert!(index.len() <= 100);
        }
        assert_eq!(index.holders.len(), index.len());
        (0..10).for_each(|engine| index.forget(engine));
        assert_eq!((index.len(), index.holders.len(), index.engines.len()), (0, 0, 0));
    }

    #[test]
    fn a_new_engine_in_a_full_index_takes_its_share_from_the_largest() {
        let mut index = PrefixIndex::new(100, 100);
        let prompt = |engine: u32| (0..100).map(|n| u64::from(engine) * 1000 + n).collect::<Vec<_>>();
        for engine in 0..4 {
            index.add(engine, &prompt(engine));
            assert_eq!(index.len(), 100);
        }
        for engine in 0..4 {
            let length = index.length(engine, &prompt(engine));
            assert_eq!(length, index.len_of(engine), "what is left is a beginning");
            assert!(length >= 25, "engine {engine} has {length}");
        }
        // More engines than hashes: each new engine has one hash, which another engine loses.
        let mut index = PrefixIndex::new(100, 4);
        for engine in 0..20 {
            index.add(engine, &prompt(engine));
            assert_eq!((index.len(), index.holders.len()), (4, 4));
            assert!(index.len_of(engine) >= 1, "engine {engine} has nothing");
            assert!(index.engines.len() <= 4);
        }
    }

    #[test]
    fn lower_bounds_take_from_the_engines_that_hold_most_and_at_once() {
        let full = || {
            let mut index = PrefixIndex::new(100, 1000);
            for (engine, length) in [(1, 60), (2, 30), (3, 5)] {
                let prompt: Vec<_> = (0..length).map(|n| u64::from(engine) * 1000 + n).collect();
                index.add(engine, &prompt);
            }
            index
        };
        let lengths = |index: &PrefixIndex| [1, 2, 3].map(|engine| index.len_of(engine));
        for (per_engine, total, expected) in
            [(100, 95, [60, 30, 5]), (40, 1000, [40, 30, 5]), (100, 45, [20, 20, 5]), (10, 18, [7, 6, 5])]
        {
            let mut index = full();
            index.set_bounds(per_engine, total);
            let mut now = lengths(&index);
            assert_eq!(now.iter().sum::<usize>(), index.len());
            assert_eq!(index.holders.len(), index.len());
            now.sort_unstable_by(|a, b| b.cmp(a));
            assert_eq!(now, expected, "{per_engine} {total}");
        }
        let mut index = full();
        index.set_bounds(100, 2);
        assert_eq!((index.len(), index.holders.len(), index.engines.len()), (2, 2, 2));
        index.add_one(9, 9);
        assert_eq!((index.len(), index.len_of(9)), (2, 1));
    }

    #[derive(Clone, Debug)]
    enum IndexOp {
        Add(u32, u64),
        Remove(u32, u64),
        Forget(u32),
    }

    fn op() -> impl Strategy<Value = IndexOp> {
        prop_oneof![
            8 => (0..4_u32, 0..30_u64).prop_map(|(e, h)| IndexOp::Add(e, h)),
            2 => (0..4_u32, 0..30_u64).prop_map(|(e, h)| IndexOp::Remove(e, h)),
            1 => (0..4_u32).prop_map(IndexOp::Forget),
        ]
    }

    proptest! {
        /// Compared with lists that are searched from end to end.
        #[test]
        fn each_engine_has_an_lru_list(ops in prop::collection::vec(op(), 0..300)) {
            let mut index = PrefixIndex::new(8, 1000);
            let mut model: Model<u32, VecDeque<u64>> = Model::new();
            for op in ops {
                match op {
                    IndexOp::Add(engine, hash) => {
                        index.add_one(engine, hash);
                        let list = model.entry(engine).or_default();
                        list.retain(|&h| h != hash);
                        list.push_back(hash);
                        if list.len() > 8 {
                            list.pop_front();
                        }
                    }
                    IndexOp::Remove(engine, hash) => {
                        index.remove(engine, hash);
                        model.entry(engine).or_default().retain(|&h| h != hash);
                    }
                    IndexOp::Forget(engine) => {
                        index.forget(engine);
                        model.remove(&engine);
                    }
                }
                for engine in 0..4 {
                    for hash in 0..30 {
                        let held = model.get(&engine).is_some_and(|l| l.contains(&hash));
                        prop_assert_eq!(index.length(engine, &[hash]) == 1, held);
                        let listed = index.holders.get(&hash).is_some_and(|l| l.contains(&engine));
                        prop_assert_eq!(listed, held);
                    }
                }
                prop_assert_eq!(index.len(), model.values().map(VecDeque::len).sum::<usize>());
            }
        }
    }
}
