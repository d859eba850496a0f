//! Who holds which beginnings of prompts: chained hashes, by engine, bounded.
//!
//! A hash stands for a prompt's beginning up to the end of one chunk, so a longer match is a later hash of the
//! same list. Each engine's hashes are an LRU list; touching a prompt touches its end first, so that a beginning
//! outlives what follows it and "does it hold the n-th" can be searched for by halves.
//!
//! When all of them together hold as much as they may, an engine that has less than an equal share takes from one that has
//! more, the one that has most as far as is known, and one that has its share forgets what it used longest ago.
//!
//! Nothing here is a promise of an engine: an answer is a guess, and a wrong guess costs a prefix that is
//! computed again.

mod held;

use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, Hasher};

use held::Held;

/// Of an engine list longer than this only so many are looked at: they are as good as the rest.
const HOLDERS_LOOKED_AT: usize = 64;

/// Who holds what.
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    engines: HashMap<u32, Held, Mixed>,
    /// The engines that hold a hash; never empty.
    holders: HashMap<u64, Vec<u32>, Mixed>,
    mixed: Mixed,
    /// Hashes of one engine.
    per_engine: usize,
    /// Hashes of all engines.
    total: usize,
    /// Hashes of all engines, now.
    held: usize,
    /// Engines that held more than an equal share when they were looked at, and how much; see [`Self::fattest`].
    fat: BinaryHeap<(usize, u32)>,
}

/// One thing that an engine has said of its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It holds this hash now.
    Added(u64),
    /// It does not hold this hash any more.
    Removed(u64),
}

/// A holder that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    pub engine: u32,
    /// Hashes of the list that it holds, from the first.
    pub length: usize,
}

impl PrefixIndex {
    /// At most so many hashes of each engine and of all. Each takes about 110 bytes.
    pub(crate) fn new(per_engine: usize, total: usize) -> Self {
        let mixed = Mixed(seed());
        let (engines, holders) = (HashMap::with_hasher(mixed), HashMap::with_hasher(mixed));
        Self { engines, holders, mixed, per_engine, total, held: 0, fat: BinaryHeap::new() }
    }

    /// Changes the bounds; what is over them goes, of the engines that hold most.
    pub(crate) fn set_bounds(&mut self, per_engine: usize, total: usize) {
        (self.per_engine, self.total) = (per_engine, total);
        let sum = |most: usize| self.engines.values().map(|held| held.len().min(most)).sum::<usize>();
        // The most that all may keep alike, and who may keep one more.
        let (mut most, mut over) = (0, per_engine + 1);
        while over - most > 1 {
            let middle = most + (over - most) / 2;
            if sum(middle) <= total { most = middle } else { over = middle }
        }
        let mut spare = if most == per_engine { 0 } else { total - sum(most) };
        for (&engine, held) in &mut self.engines {
            let one_more = spare > 0 && held.len() > most;
            spare -= usize::from(one_more);
            while held.len() > most + usize::from(one_more) {
                let Some(oldest) = held.evict() else { break };
                self.held -= 1;
                release(&mut self.holders, engine, oldest);
            }
        }
        self.engines.retain(|_, held| held.len() > 0);
    }

    /// Hashes of one engine at most.
    pub(crate) fn per_engine(&self) -> usize {
        self.per_engine
    }

    /// Hashes of all engines.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.held
    }

    /// Hashes of one engine.
    #[cfg(test)]
    pub(crate) fn len_of(&self, engine: u32) -> usize {
        self.engines.get(&engine).map_or(0, Held::len)
    }

    /// The engine holds this prompt now, and has just used it.
    pub(crate) fn add(&mut self, engine: u32, prefix: &[u64]) {
        // What does not fit would push its own beginning out.
        let prefix = &prefix[..prefix.len().min(self.per_engine)];
        for &hash in prefix.iter().rev() {
            self.add_one(engine, hash);
        }
    }

    /// The engine holds this hash now, and has just used it.
    pub(crate) fn add_one(&mut self, engine: u32, hash: u64) {
        let held = self.engines.entry(engine).or_insert_with(|| Held::new(self.mixed));
        if held.touch(hash) {
            return;
        }
        let own = held.len();
        if own >= self.per_engine {
            self.evict(engine);
        } else if self.held >= self.total {
            let share = (self.total / self.engines.len()).max(1);
            let from = if own >= share { Some(engine) } else { self.fattest(share) };
            from.into_iter().for_each(|from| self.evict(from));
        }
        let held = self.engines.entry(engine).or_insert_with(|| Held::new(self.mixed));
        if self.held < self.total && held.len() < self.per_engine {
            held.insert(hash);
            self.held += 1;
            self.holders.entry(hash).or_default().push(engine);
        }
    }

    /// An engine that holds more than an equal share: the one that held most of them when all were last looked at, less
    /// what was taken from it since. All are looked at only when none of those is left, because a look at a thousand for
    /// each hash would cost more than the choice that it serves.
    fn fattest(&mut self, share: usize) -> Option<u32> {
        for fresh in [false, true] {
            if fresh {
                let held = self.engines.iter().map(|(&engine, held)| (held.len(), engine));
                self.fat = held.filter(|(length, _)| *length > share).collect();
            }
            while let Some((length, engine)) = self.fat.pop() {
                let now = self.engines.get(&engine).map_or(0, Held::len);
                if now > share {
                    self.fat.push((now, engine));
                    if now == length {
                        return Some(engine);
                    }
                }
            }
        }
        // Nobody has more than a share, so nobody has less than one less.
        self.engines.iter().max_by_key(|(_, held)| held.len()).map(|(&engine, _)| engine)
    }

    /// Forgets what an engine used longest ago.
    fn evict(&mut self, engine: u32) {
        let Some(held) = self.engines.get_mut(&engine) else { return };
        let oldest = held.evict();
        if held.len() == 0 {
            self.engines.remove(&engine);
        }
        if let Some(oldest) = oldest {
            self.held -= 1;
            release(&mut self.holders, engine, oldest);
        }
    }

    /// The engine does not hold this hash any more.
    fn remove(&mut self, engine: u32, hash: u64) {
        if self.engines.get_mut(&engine).is_some_and(|held| held.remove(hash)) {
            self.held -= 1;
            release(&mut self.holders, engine, hash);
        }
    }

    /// Takes what an engine has said, in its order.
    pub(crate) fn change(&mut self, engine: u32, changes: &[Change]) {
        for change in changes {
            match *change {
                Change::Added(hash) => self.add_one(engine, hash),
                Change::Removed(hash) => self.remove(engine, hash),
            }
        }
    }

    /// Forgets at most so many hashes of an engine, the least recently used first; whether none is left.
    pub(crate) fn forget_some(&mut self, engine: u32, most: usize) -> bool {
        (0..most).for_each(|_| self.evict(engine));
        !self.engines.contains_key(&engine)
    }

    /// The engine holds nothing any more.
    #[cfg(test)]
    pub(crate) fn forget(&mut self, engine: u32) {
        while !self.forget_some(engine, usize::from(u16::MAX)) {}
    }

    /// Hashes of the list that an engine holds, from the first.
    pub(crate) fn length(&self, engine: u32, prefix: &[u64]) -> usize {
        let (Some(held), Some((first, rest))) = (self.engines.get(&engine), prefix.split_first()) else {
            return 0;
        };
        // Of many engines most hold nothing of a prompt, and one look says so.
        if held.contains(*first) { 1 + rest.partition_point(|&hash| held.contains(hash)) } else { 0 }
    }

    /// The engine that holds most of the list, of those that have a load; the least loaded of equals.
    ///
    /// Looks at a logarithmic number of hashes and a bounded number of engines for each.
    pub(crate) fn longest(&self, prefix: &[u64], load: impl Fn(u32) -> Option<u64>) -> Option<Match> {
        let holder = |hash: &u64| -> Option<u32> {
            let engines = self.holders.get(hash)?.iter().take(HOLDERS_LOOKED_AT);
            engines.filter_map(|&engine| Some((load(engine)?, engine))).min().map(|(_, engine)| engine)
        };
        let has_holder = |hash: &u64| -> bool {
            let engines = self.holders.get(hash).map(Vec::as_slice).unwrap_or_default();
            engines.iter().take(HOLDERS_LOOKED_AT).any(|&engine| load(engine).is_some())
        };
        let length = prefix.partition_point(has_holder);
        let last = prefix.get(length.checked_sub(1)?)?;
        holder(last).map(|engine| Match { engine, length })
    }
}

fn release(holders: &mut HashMap<u64, Vec<u32>, Mixed>, engine: u32, hash: u64) {
    let Some(engines) = holders.get_mut(&hash) else { return };
    engines.retain(|&other| other != engine);
    if engines.is_empty() {
        holders.remove(&hash);
    }
}

/// Hashes hashes: one multiplication with a secret, because clients can choose what is hashed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mixed(u64);

impl BuildHasher for Mixed {
    type Hasher = MixedHasher;

    fn build_hasher(&self) -> MixedHasher {
        MixedHasher(self.0)
    }
}

/// One number in, one `u64` out.
#[derive(Debug)]
pub(crate) struct MixedHasher(u64);

impl Hasher for MixedHasher {
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

fn seed() -> u64 {
    let mut bytes = [0; 8];
    // Without a source of randomness a client could make look-ups slow, and that is all.
    let _ = getrandom::fill(&mut bytes);
    u64::from_ne_bytes(bytes)
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
        assert_eq!(found(&index, &[1, 2, 3, 4, 5, 6], all), Some(Match { engine: 2, length: 5 }));
        assert_eq!(found(&index, &[1, 2, 3, 4, 7], all), Some(Match { engine: 1, length: 4 }));
        assert_eq!(found(&index, &[1, 2, 9], all), Some(Match { engine: 3, length: 2 }));
        assert_eq!(found(&index, &[1, 2, 3, 4, 5], &[(1, 5), (3, 0)]), Some(Match { engine: 1, length: 4 }));
        assert_eq!(found(&index, &[9], all), None);
        assert_eq!(found(&index, &[], all), None);
        assert_eq!(index.length(2, &[1, 2, 3, 4, 5, 6]), 5);
        index.forget(2);
        assert_eq!(index.length(2, &[1, 2, 3]), 0);
        assert_eq!(found(&index, &[1, 2, 3, 4, 5], all), Some(Match { engine: 1, length: 4 }));
    }

    #[test]
    fn a_beginning_outlives_what_follows_it() {
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
    fn an_engine_that_comes_when_the_index_is_full_gets_its_share_of_those_that_have_most() {
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
        // More engines than hashes: each newcomer has one, in the place of another's.
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
    enum Op {
        Add(u32, u64),
        Remove(u32, u64),
        Forget(u32),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            8 => (0..4_u32, 0..30_u64).prop_map(|(e, h)| Op::Add(e, h)),
            2 => (0..4_u32, 0..30_u64).prop_map(|(e, h)| Op::Remove(e, h)),
            1 => (0..4_u32).prop_map(Op::Forget),
        ]
    }

    proptest! {
        /// Against lists that are searched from end to end.
        #[test]
        fn it_is_an_lru_list_for_each_engine(ops in prop::collection::vec(op(), 0..300)) {
            let mut index = PrefixIndex::new(8, 1000);
            let mut model: Model<u32, VecDeque<u64>> = Model::new();
            for op in ops {
                match op {
                    Op::Add(engine, hash) => {
                        index.add_one(engine, hash);
                        let list = model.entry(engine).or_default();
                        list.retain(|&h| h != hash);
                        list.push_back(hash);
                        if list.len() > 8 {
                            list.pop_front();
                        }
                    }
                    Op::Remove(engine, hash) => {
                        index.remove(engine, hash);
                        model.entry(engine).or_default().retain(|&h| h != hash);
                    }
                    Op::Forget(engine) => {
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
