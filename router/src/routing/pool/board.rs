//! The engines of a pool as policies see them, kept up to date by the engines themselves: whatever changes at one of them
//! (a request begins or ends, its health, what it says of its load) is written here at once, so that a choice looks at a
//! few of them and not at all.
//!
//! ```text
//! Engine: begin, end, health, reported load ─▶ Seat ─▶ Board::refresh ─▶ Tree::set      O(log engines)
//! Pool::reserve ─▶ Board::view ─▶ Policy::choose ─▶ Tree::at, Tree::least               O(log engines)
//! ```
//!
//! The lock is held for one change or one choice. What is written is read from the engine under the lock, after its change:
//! of two who change the same engine at once the second to get the lock writes what both came to.
//!
//! A reading of an engine's own load that grows stale is nobody's event. It is written down with the next event of that
//! engine, at the latest when all engines are looked at (`process/health_probe.rs`, every second).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use super::member::{Fit, Look, Member, Now, Room};
use super::tree::{Leaf, Tree};
use crate::config::LoadUnit;
use crate::engines::health::Standing;
use crate::engines::http::Engine;
use crate::engines::listeners::{LoadListener, Seat};
use crate::metrics::Leg;
use crate::routing::policy::{Candidate, Candidates, FIRST};

/// Engines that suit a request equally well.
pub(super) struct Board {
    members: Vec<Arc<Member>>,
    /// The members' indices in their pool, ascending.
    indices: Vec<usize>,
    /// The numbers of their caches, ascending.
    holders: Vec<u32>,
    /// All members' weight, if they weigh the same.
    even: Option<u32>,
    leg: Leg,
    /// What the least is looked for of.
    by: LoadUnit,
    tree: Mutex<Tree>,
    /// The members whose ranks are the highest of each slot of keys; made when a slot is first asked for.
    firsts: OnceLock<Box<[AtomicU64]>>,
}

/// Fewer engines are asked for their ranks sooner than a table is looked up.
const FEW: usize = 16;
/// A board has at most so many members: what a slot keeps of one is 16 bits.
const NO_MEMBER: u64 = 0xffff;

impl LoadListener for Board {
    fn refresh(&self, at: usize) {
        let mut tree = self.tree();
        tree.set(at, leaf(&self.members[at], self.indices[at], self.leg, self.by));
    }
}

impl Board {
    /// Of these members of a pool, which are in the order of their caches' numbers.
    pub(super) fn new(members: Vec<(usize, Arc<Member>)>, leg: Leg, by: LoadUnit) -> Arc<Self> {
        let (indices, members): (Vec<_>, Vec<_>) = members.into_iter().unzip();
        let first = members.first().map(|member| member.weight);
        let even = first.filter(|first| members.iter().all(|member| member.weight == *first));
        let leaf = |(index, member): (&usize, &Arc<Member>)| leaf(member, *index, leg, by);
        let tree = Tree::new(indices.iter().zip(&members).map(leaf).collect());
        let holders = members.iter().map(|member| member.holder()).collect();
        let board = Arc::new(Self {
            members,
            indices,
            holders,
            even,
            leg,
            by,
            tree: Mutex::new(tree),
            firsts: OnceLock::new(),
        });
        for (at, member) in board.members.iter().enumerate() {
            let listener: Weak<dyn LoadListener> = Arc::<Self>::downgrade(&board);
            member.engine.sit(Seat::new(listener, at, member.looks_at()));
        }
        // What changed between the first look and the engines' knowing of their seats.
        (0..board.members.len()).for_each(|at| board.refresh(at));
        board
    }

    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Engines whose health lets them be given requests.
    pub(super) fn in_use(&self) -> usize {
        self.tree().in_use()
    }

    /// Requests of this router at the engine that has fewest.
    pub(super) fn least_own(&self) -> Option<u32> {
        self.tree().least_own()
    }

    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether it has this member of the pool.
    pub(super) fn has(&self, index: usize) -> bool {
        self.place_at(index).is_some()
    }

    /// Where this member of the pool is.
    fn place_at(&self, index: usize) -> Option<usize> {
        // Mostly all of them are here.
        if self.indices.get(index) == Some(&index) {
            return Some(index);
        }
        self.indices.binary_search(&index).ok()
    }

    /// Where the one is that has this cache.
    fn place_of(&self, holder: u32) -> Option<usize> {
        let first = *self.holders.first()?;
        // Engines that came together have numbers in a row: as long as none of them has gone, the place is known.
        let guess = (holder.checked_sub(first)? / Engine::HOLDERS) as usize;
        if self.holders.get(guess) == Some(&holder) {
            return Some(guess);
        }
        self.holders.binary_search(&holder).ok()
    }

    /// The board without those that were `tried`, for one choice. Nothing changes on it meanwhile.
    pub(super) fn view(&self, tried: &[Arc<Engine>]) -> View<'_> {
        let (mut tree, mut hidden) = (self.tree(), Vec::new());
        for engine in tried {
            let ranks = engine.every_holder();
            if self.holders.last().is_none_or(|last| *last < ranks.start) || self.holders[0] >= ranks.end {
                continue;
            }
            let from = self.holders.partition_point(|holder| *holder < ranks.start);
            let there = self.holders[from..].iter().take_while(|holder| ranks.contains(holder)).count();
            for at in from..from + there {
                let before = *tree.leaf(at);
                tree.set(at, Leaf { fit: Fit::Tried, ..before });
                hidden.push((at, before));
            }
        }
        View { board: self, tree, hidden }
    }
}

fn leaf(member: &Member, index: usize, leg: Leg, by: LoadUnit) -> Leaf {
    let now = Now::new(Instant::now);
    let look = Look { tried: &[], leg, panic: false, room: Room::Needed, now: &now };
    let candidate = member.candidate(index, &now);
    Leaf {
        candidate,
        load: candidate.load(by),
        own: u32::try_from(member.load()).unwrap_or(u32::MAX),
        fit: member.fit(&look),
        in_use: member.engine.health().standing(leg) <= Standing::Trial,
    }
}

/// A board while somebody chooses from it.
pub(super) struct View<'a> {
    board: &'a Board,
    tree: MutexGuard<'a, Tree>,
    /// What was there of those that are left out.
    hidden: Vec<(usize, Leaf)>,
}

impl View<'_> {
    /// Whether somebody would be ready if it were not full.
    pub(super) fn has_full(&self) -> bool {
        self.tree.has_full()
    }

    /// Of those that can be chosen a few, the first of them with the least load.
    pub(super) fn few(&self, most: usize) -> Vec<Candidate> {
        self.tree.few(most)
    }

    /// The members that are not ready, the first few, and why.
    pub(super) fn few_not_ready(&self, most: usize) -> Vec<(usize, Fit)> {
        let index = |(at, fit): (usize, Fit)| (self.board.indices[at], fit);
        self.tree.few_not_ready(most).into_iter().map(index).collect()
    }

    /// A member of the pool, as it is seen here.
    pub(super) fn candidate(&self, index: usize) -> Option<Candidate> {
        Some(self.tree.leaf(self.board.place_at(index)?).candidate)
    }
}

impl Drop for View<'_> {
    fn drop(&mut self) {
        // The last that was hidden first: an engine may have been named twice.
        while let Some((at, leaf)) = self.hidden.pop() {
            self.tree.set(at, leaf);
        }
    }
}

impl Candidates for View<'_> {
    fn count(&self) -> usize {
        self.tree.ready()
    }

    fn even_weight(&self) -> Option<u32> {
        self.board.even
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
        debug_assert_eq!(by, self.board.by, "a board is made for its pool's policy");
        Some(self.tree.leaf(self.tree.least(turn)?).candidate)
    }

    fn of_holder(&self, holder: u32) -> Option<Candidate> {
        let leaf = self.tree.leaf(self.board.place_of(holder)?);
        (leaf.fit == Fit::Ready).then_some(leaf.candidate)
    }

    fn first_of(&self, slot: u16, rank: &dyn Fn(&Candidate) -> f64) -> Option<[Option<Candidate>; FIRST]> {
        let leaves = self.tree.leaves();
        if leaves.len() <= FEW || leaves.len() >= NO_MEMBER as usize {
            return None;
        }
        let slots = self.board.firsts.get_or_init(|| (0..=u16::MAX).map(|_| AtomicU64::new(0)).collect());
        // 0 would be the first member four times over: nothing yet.
        let mut kept = slots[usize::from(slot)].load(Ordering::Relaxed);
        if kept == 0 {
            kept = first_by(rank, leaves);
            slots[usize::from(slot)].store(kept, Ordering::Relaxed);
        }
        Some(std::array::from_fn(|place| {
            let leaf = leaves.get((kept >> (16 * place) & NO_MEMBER) as usize)?;
            (leaf.fit == Fit::Ready).then_some(leaf.candidate)
        }))
    }

    fn each(&self, see: &mut dyn FnMut(&Candidate)) {
        let ready = self.tree.leaves().iter().filter(|leaf| leaf.fit == Fit::Ready);
        ready.for_each(|leaf| see(&leaf.candidate));
    }
}

/// The leaves of the highest ranks, the highest in the lowest bits; of equal ranks the later one, as in a walk.
fn first_by(rank: &dyn Fn(&Candidate) -> f64, leaves: &[Leaf]) -> u64 {
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
