//! The engines of a pool as policies see them. The engines themselves update it: an engine writes each change here at
//! once (start or end of a request, health, reported load). So a choice reads O(log n) engines instead of all n.
//!
//! ```text
//! Engine: begin, end, health, reported load ─▶ LoadSubscription ─▶ LoadIndex::refresh ─▶ LoadTree::set  O(log engines)
//! Pool::reserve ─▶ LoadIndex::view ─▶ Policy::choose ─▶ LoadTree::at, LoadTree::least                   O(log engines)
//! ```
//!
//! The lock is held for one change or one choice. The values written are read from the engine under the lock, after its
//! change. Of two concurrent changes to one engine, the second to take the lock writes the combined result.
//!
//! A reading of an engine's own load causes no event when it becomes stale. The index is updated with the engine's next
//! event, at the latest when `process/health_probe.rs` visits all engines (every second).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use super::load_tree::{LoadLeaf, LoadTree};
use super::member::{CapacityRule, ChoiceContext, Eligibility, LazyNow, PoolMember};
use crate::config::LoadUnit;
use crate::engines::health::Standing;
use crate::engines::http::Engine;
use crate::engines::listeners::{LoadListener, LoadSubscription};
use crate::metrics::Leg;
use crate::routing::policy::{Candidate, Candidates, FIRST};

/// Engines that suit a request equally well.
pub(super) struct LoadIndex {
    members: Vec<Arc<PoolMember>>,
    /// The members' indices in the pool, ascending.
    indices: Vec<usize>,
    /// The members' cache ids, ascending.
    cache_ids: Vec<u32>,
    /// The weight of every member, if all are equal.
    even_weight: Option<u32>,
    leg: Leg,
    /// The unit of the least load.
    by: LoadUnit,
    tree: Mutex<LoadTree>,
    /// The members with the highest ranks for each hash slot; created at the first use of a slot.
    firsts: OnceLock<Box<[AtomicU64]>>,
}

/// Up to this many engines, computing ranks is faster than the lookup in the table.
const FEW: usize = 16;
/// Limit on the members of an index with a slot table: a slot stores 16 bits per member.
const NO_MEMBER: u64 = 0xffff;

impl LoadListener for LoadIndex {
    fn refresh(&self, at: usize) {
        let mut tree = self.tree();
        tree.set(at, load_leaf(&self.members[at], self.indices[at], self.leg, self.by));
    }
}

impl LoadIndex {
    /// `members` are ordered by cache id.
    pub(super) fn new(members: Vec<(usize, Arc<PoolMember>)>, leg: Leg, by: LoadUnit) -> Arc<Self> {
        let (indices, members): (Vec<_>, Vec<_>) = members.into_iter().unzip();
        let first = members.first().map(|member| member.weight);
        let even_weight = first.filter(|first| members.iter().all(|member| member.weight == *first));
        let leaf = |(index, member): (&usize, &Arc<PoolMember>)| load_leaf(member, *index, leg, by);
        let tree = LoadTree::new(indices.iter().zip(&members).map(leaf).collect());
        let cache_ids = members.iter().map(|member| member.cache_id()).collect();
        let load_index = Arc::new(Self {
            members,
            indices,
            cache_ids,
            even_weight,
            leg,
            by,
            tree: Mutex::new(tree),
            firsts: OnceLock::new(),
        });
        for (at, member) in load_index.members.iter().enumerate() {
            let listener: Weak<dyn LoadListener> = Arc::<Self>::downgrade(&load_index);
            member.engine.add_listener(LoadSubscription::new(listener, at, member.subscribed_rank()));
        }
        // Applies changes between the first read and the subscription.
        (0..load_index.members.len()).for_each(|at| load_index.refresh(at));
        load_index
    }

    fn tree(&self) -> MutexGuard<'_, LoadTree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Engines whose health permits requests.
    pub(super) fn in_use(&self) -> usize {
        self.tree().in_use()
    }

    /// This router's requests at the engine with the fewest.
    pub(super) fn least_own(&self) -> Option<u32> {
        self.tree().least_own()
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether it contains this member of the pool.
    pub(super) fn contains(&self, index: usize) -> bool {
        self.position_of_member(index).is_some()
    }

    /// The position of a member of the pool.
    fn position_of_member(&self, index: usize) -> Option<usize> {
        // Usually the index contains all members.
        if self.indices.get(index) == Some(&index) {
            return Some(index);
        }
        self.indices.binary_search(&index).ok()
    }

    /// The position of the member with this cache.
    fn position_of_cache(&self, cache_id: u32) -> Option<usize> {
        let first = *self.cache_ids.first()?;
        // Engines created together have consecutive ids. While none of them is removed, the position follows from the
        // id.
        let guess = (cache_id.checked_sub(first)? / Engine::HOLDERS) as usize;
        if self.cache_ids.get(guess) == Some(&cache_id) {
            return Some(guess);
        }
        self.cache_ids.binary_search(&cache_id).ok()
    }

    /// The index without the engines in `tried`, for one choice. The lock prevents changes meanwhile.
    pub(super) fn view(&self, tried: &[Arc<Engine>]) -> LoadIndexView<'_> {
        let (mut tree, mut hidden) = (self.tree(), Vec::new());
        for engine in tried {
            let ranks = engine.all_cache_ids();
            if self.cache_ids.last().is_none_or(|last| *last < ranks.start) || self.cache_ids[0] >= ranks.end
            {
                continue;
            }
            let from = self.cache_ids.partition_point(|cache_id| *cache_id < ranks.start);
            let there = self.cache_ids[from..].iter().take_while(|cache_id| ranks.contains(cache_id)).count();
            for at in from..from + there {
                let before = *tree.leaf(at);
                tree.set(at, LoadLeaf { fit: Eligibility::Tried, ..before });
                hidden.push((at, before));
            }
        }
        LoadIndexView { index: self, tree, hidden }
    }
}

fn load_leaf(member: &PoolMember, index: usize, leg: Leg, by: LoadUnit) -> LoadLeaf {
    let now = LazyNow::new(Instant::now);
    let context = ChoiceContext {
        tried: &[],
        leg,
        panic: false,
        capacity: CapacityRule::Needed,
        compatibility: None,
        now: &now,
    };
    let candidate = member.candidate(index, &now);
    LoadLeaf {
        candidate,
        load: candidate.load(by),
        own: u32::try_from(member.load()).unwrap_or(u32::MAX),
        fit: member.eligibility(&context),
        in_use: member.engine.health().standing(leg) <= Standing::Trial,
    }
}

/// A locked index during one choice.
pub(super) struct LoadIndexView<'a> {
    index: &'a LoadIndex,
    tree: MutexGuard<'a, LoadTree>,
    /// The previous leaves of the hidden engines.
    hidden: Vec<(usize, LoadLeaf)>,
}

impl LoadIndexView<'_> {
    /// Whether an engine is not ready only because it is full.
    pub(super) fn has_full(&self) -> bool {
        self.tree.has_full()
    }

    /// Some of the ready members; the first one has the least load.
    pub(super) fn first_ready(&self, most: usize) -> Vec<Candidate> {
        self.tree.first_ready(most)
    }

    /// The first members that are not ready, with their eligibility.
    pub(super) fn first_not_ready(&self, most: usize) -> Vec<(usize, Eligibility)> {
        let index = |(at, fit): (usize, Eligibility)| (self.index.indices[at], fit);
        self.tree.first_not_ready(most).into_iter().map(index).collect()
    }

    /// A member of the pool as a candidate.
    pub(super) fn candidate(&self, index: usize) -> Option<Candidate> {
        Some(self.tree.leaf(self.index.position_of_member(index)?).candidate)
    }
}

impl Drop for LoadIndexView<'_> {
    fn drop(&mut self) {
        // Restore in reverse order: `tried` may contain an engine twice.
        while let Some((at, leaf)) = self.hidden.pop() {
            self.tree.set(at, leaf);
        }
    }
}

impl Candidates for LoadIndexView<'_> {
    fn count(&self) -> usize {
        self.tree.ready()
    }

    fn even_weight(&self) -> Option<u32> {
        self.index.even_weight
    }

    fn weights(&self) -> u64 {
        self.tree.weight()
    }

    fn requests(&self) -> u64 {
        self.tree.requests()
    }

    fn at(&self, position: u64) -> Option<(Candidate, u64)> {
        let (at, begins) = self.tree.at(position)?;
        Some((self.tree.leaf(at).candidate, begins))
    }

    fn least(&self, by: LoadUnit, turn: u64) -> Option<Candidate> {
        debug_assert_eq!(by, self.index.by, "an index is made for its pool's policy");
        Some(self.tree.leaf(self.tree.least(turn)?).candidate)
    }

    fn with_cache(&self, cache_id: u32) -> Option<Candidate> {
        let leaf = self.tree.leaf(self.index.position_of_cache(cache_id)?);
        (leaf.fit == Eligibility::Ready).then_some(leaf.candidate)
    }

    fn first_of_slot(
        &self,
        slot: u16,
        rank: &dyn Fn(&Candidate) -> f64,
    ) -> Option<[Option<Candidate>; FIRST]> {
        let leaves = self.tree.leaves();
        if leaves.len() <= FEW || leaves.len() >= NO_MEMBER as usize {
            return None;
        }
        let slots = self.index.firsts.get_or_init(|| (0..=u16::MAX).map(|_| AtomicU64::new(0)).collect());
        // 0 would be the first member four times, so it marks an empty slot.
        let mut kept = slots[usize::from(slot)].load(Ordering::Relaxed);
        if kept == 0 {
            kept = first_by(rank, leaves);
            slots[usize::from(slot)].store(kept, Ordering::Relaxed);
        }
        Some(std::array::from_fn(|place| {
            let leaf = leaves.get((kept >> (16 * place) & NO_MEMBER) as usize)?;
            (leaf.fit == Eligibility::Ready).then_some(leaf.candidate)
        }))
    }

    fn each(&self, see: &mut dyn FnMut(&Candidate)) {
        let ready = self.tree.leaves().iter().filter(|leaf| leaf.fit == Eligibility::Ready);
        ready.for_each(|leaf| see(&leaf.candidate));
    }
}

/// The leaves with the highest ranks, the highest in the lowest bits. Of equal ranks the later leaf wins, as in a walk.
fn first_by(rank: &dyn Fn(&Candidate) -> f64, leaves: &[LoadLeaf]) -> u64 {
    let mut first = [(f64::MIN, NO_MEMBER); FIRST];
    for (at, leaf) in (0_u64..).zip(leaves) {
        let rank = rank(&leaf.candidate);
        if rank >= first[FIRST - 1].0 {
            let place = first.partition_point(|other| other.0 > rank);
            first[place..].rotate_right(1);
            first[place] = (rank, at);
        }
    }
    first.iter().rev().fold(0, |kept, (_, at)| kept << 16 | at)
}

const _: () = assert!(FIRST * 16 == 64, "a slot is one word");
