//! The offload slot: one request's blocks on their way down to slower tiers and up again.
//!
//! ```text
//!             store                  done                        load                done
//!   Resident ───────▶ Storing ───────────────▶ Stored    Stored ──────▶ Loading ───────────▶ Resident
//!      ▲                 │ failed, revoked                  ▲              │ failed, revoked
//!      └─────────────────┘                                  └──────────────┘
//!
//!   a transfer (Storing, Loading) in itself:
//!   Queued ─ committed ─▶ Committed        give up:  Queued    ─▶ Revoking ─ revoked ─▶ over, nothing was touched
//!                                                    Committed ─▶ Draining           └ committed ─▶ Draining
//! ```
//!
//! **The commitment point** is the moment in which a worker begins with a transfer. Giving up before it takes effect
//! at once: nothing has been read or written and nothing will be. After it the transfer drains. Who was first is
//! decided by the worker's side alone, and is an event here.
//!
//! **Finish and abort** mean the same to a slot, in either order and any number of times: loads are given up (nobody
//! waits for them), stores go on (a computed block is worth keeping, whoever asked for it), and the answer says whether
//! anything is still in flight. A slot that is already gone is settled: neither a panic nor "free it now" (Dynamo
//! #6681 was both).
//!
//! Invariants:
//! - Every transfer that began ends with exactly one of [`Action::LetGo`], [`Action::Land`] and [`Action::Miss`]; until
//!   then its block is neither freed nor overwritten (invariants 2, 3).
//! - [`Action::Settled`] comes exactly once: when the request is over and nothing is in flight.
//! - An event that no longer matters (repeated, late, unknown) changes nothing and is counted (invariant 9).
//!
//! The table of every state and event is a golden file, `connector/tests/golden/offload.txt`.

use std::collections::BTreeMap;

/// One copy of one block between two tiers. Never reused, so that a late report is never taken for another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// Where one block of a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// On the device only.
    Resident,
    /// A worker copies it down, or is about to. The block on the device is only read.
    Storing(Course),
    /// In a lower tier.
    Stored,
    /// A worker copies it up, or is about to. The block on the device is being written.
    Loading(Course),
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Course {
    /// Handed to the workers; none has begun.
    Queued,
    /// Given up while queued; the workers' answer is awaited.
    Revoking,
    /// A worker has begun: past the commitment point.
    Committed,
    /// Given up after a worker had begun; runs to its end.
    Draining,
}

/// What can happen to one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockEvent {
    /// It is full, computed and to be copied down.
    Store,
    /// It was found in a tier and is to be copied up.
    Load,
    /// A worker has begun; also the answer to [`Action::Revoke`] when it came too late.
    Committed,
    /// The copy is complete, and verified if it came up.
    Done,
    /// The transfer is over without a copy that may be used: full, broken, corrupt, or never tried.
    Failed,
    /// The answer to [`Action::Revoke`]: no worker had begun, and none will.
    Revoked,
    /// Nobody waits for it any more.
    GiveUp,
}

/// What can happen to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Something about one block.
    Block(TransferId, BlockEvent),
    /// The pool is short of blocks: stores that have not begun are given up.
    Yield,
    /// The request has ended by itself.
    Finish,
    /// The request was aborted.
    Abort,
}

/// What the owner of a slot must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Hand the transfer to the workers. Also the receipt: without it nothing is held for this transfer.
    Begin(TransferId),
    /// Ask the workers to forget the transfer. [`BlockEvent::Revoked`] or [`BlockEvent::Committed`] answers.
    Revoke(TransferId),
    /// Nothing reads or writes the block for this transfer any more: its hold goes back.
    LetGo(TransferId),
    /// The block was loaded and verified: it is the request's.
    Land(TransferId),
    /// The block was not loaded: nothing writes into it any more, and the request computes it.
    Miss(TransferId),
    /// The request is over and nothing is in flight: the slot can be forgotten.
    Settled,
}

/// The answer to [`Event::Finish`] and [`Event::Abort`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// Nothing is in flight (any more), also when the slot is unknown.
    Settled,
    /// So many transfers still hold a block each; [`Action::Settled`] follows their end.
    Draining(usize),
}

/// What one event does to a block. `None`: it does not matter in this state.
///
/// The action, if any, is that of its slot without the name of the transfer.
fn next(state: BlockState, event: BlockEvent) -> Option<(BlockState, Step)> {
    use BlockEvent as E;
    use BlockState::{Loading, Resident, Stored, Storing};
    use Course::{Committed, Draining, Queued, Revoking};

    Some(match (state, event) {
        (Resident, E::Store) => (Storing(Queued), Step::Begin),
        (Stored, E::Load) => (Loading(Queued), Step::Begin),

        (Storing(Queued), E::Committed) => (Storing(Committed), Step::Nothing),
        (Storing(Revoking), E::Committed) => (Storing(Draining), Step::Nothing),
        (Storing(Queued), E::GiveUp) => (Storing(Revoking), Step::Revoke),
        (Storing(Committed), E::GiveUp) => (Storing(Draining), Step::Nothing),
        (Storing(Queued | Revoking | Committed | Draining), E::Done) => (Stored, Step::LetGo),
        (Storing(Queued | Revoking | Committed | Draining), E::Failed) => (Resident, Step::LetGo),
        (Storing(Revoking), E::Revoked) => (Resident, Step::LetGo),

        (Loading(Queued), E::Committed) => (Loading(Committed), Step::Nothing),
        (Loading(Revoking), E::Committed) => (Loading(Draining), Step::Nothing),
        (Loading(Queued), E::GiveUp) => (Loading(Revoking), Step::Revoke),
        (Loading(Committed), E::GiveUp) => (Loading(Draining), Step::Nothing),
        (Loading(Queued | Committed), E::Done) => (Resident, Step::Land),
        (Loading(Queued | Committed), E::Failed) => (Stored, Step::Miss),
        (Loading(Revoking | Draining), E::Done | E::Failed) => (Stored, Step::LetGo),
        (Loading(Revoking), E::Revoked) => (Stored, Step::LetGo),

        (Resident, E::Load | E::Committed | E::Done | E::Failed | E::Revoked | E::GiveUp)
        | (Stored, E::Store | E::Committed | E::Done | E::Failed | E::Revoked | E::GiveUp)
        | (Storing(_) | Loading(_), E::Store | E::Load)
        | (Storing(Committed | Draining) | Loading(Committed | Draining), E::Committed)
        | (Storing(Revoking | Draining) | Loading(Revoking | Draining), E::GiveUp)
        | (Storing(Queued | Committed | Draining) | Loading(Queued | Committed | Draining), E::Revoked) => {
            return None;
        }
    })
}

/// An [`Action`] of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    Begin,
    Revoke,
    LetGo,
    Land,
    Miss,
}

impl Step {
    fn of(self, id: TransferId) -> Option<Action> {
        match self {
            Self::Nothing => None,
            Self::Begin => Some(Action::Begin(id)),
            Self::Revoke => Some(Action::Revoke(id)),
            Self::LetGo => Some(Action::LetGo(id)),
            Self::Land => Some(Action::Land(id)),
            Self::Miss => Some(Action::Miss(id)),
        }
    }
}

/// One block's state. Only a value: what it stands for is held by the [`Slot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block(BlockState);

impl Block {
    /// A block in a state.
    #[must_use]
    pub fn new(state: BlockState) -> Self {
        Self(state)
    }

    /// Where it is.
    #[must_use]
    pub fn state(self) -> BlockState {
        self.0
    }

    /// Whether a transfer holds it.
    #[must_use]
    pub fn in_flight(self) -> bool {
        matches!(self.0, BlockState::Storing(_) | BlockState::Loading(_))
    }

    /// Moves it by one event. `None`: the event does not matter in this state and changed nothing.
    pub fn apply(&mut self, id: TransferId, event: BlockEvent) -> Option<Option<Action>> {
        let (state, step) = next(self.0, event)?;
        self.0 = state;
        Some(step.of(id))
    }
}

/// The offload side of one request. Not `Clone`: it stands for holds that are given back once.
#[derive(Debug, Default)]
pub struct Slot {
    /// Those in flight; one that has come to rest is forgotten.
    blocks: BTreeMap<TransferId, Block>,
    over: bool,
    ignored: u32,
}

impl Slot {
    /// The slot of a request that runs.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Transfers in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.blocks.len()
    }

    /// A block in flight.
    #[must_use]
    pub fn block(&self, id: TransferId) -> Option<BlockState> {
        self.blocks.get(&id).map(|block| block.state())
    }

    /// Whether the request is over and nothing is in flight.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.over && self.blocks.is_empty()
    }

    /// Events so far that changed nothing.
    #[must_use]
    pub fn ignored(&self) -> u32 {
        self.ignored
    }

    /// What to tell who asks whether the request's blocks are free of this connector.
    #[must_use]
    pub fn answer(&self) -> Answer {
        if self.blocks.is_empty() { Answer::Settled } else { Answer::Draining(self.blocks.len()) }
    }

    /// Moves the slot by one event and says what its owner must do, in order.
    ///
    /// Every event is allowed in every state: workers and the scheduler repeat, delay and reorder them.
    pub fn apply(&mut self, event: Event) -> Vec<Action> {
        match event {
            Event::Block(id, BlockEvent::Store) => self.begin(id, BlockState::Resident, BlockEvent::Store),
            Event::Block(id, BlockEvent::Load) => self.begin(id, BlockState::Stored, BlockEvent::Load),
            Event::Block(id, event) => self.move_block(id, event),
            Event::Yield => self.give_up(|state| matches!(state, BlockState::Storing(_))),
            Event::Finish | Event::Abort => self.end(),
        }
    }

    fn begin(&mut self, id: TransferId, from: BlockState, event: BlockEvent) -> Vec<Action> {
        if self.over || self.blocks.contains_key(&id) {
            return self.ignore();
        }
        let mut block = Block::new(from);
        let action = block.apply(id, event).expect("a transfer begins from rest");
        self.blocks.insert(id, block);
        action.into_iter().collect()
    }

    fn move_block(&mut self, id: TransferId, event: BlockEvent) -> Vec<Action> {
        let Some(block) = self.blocks.get_mut(&id) else { return self.ignore() };
        let Some(action) = block.apply(id, event) else { return self.ignore() };
        let mut actions: Vec<Action> = action.into_iter().collect();
        if !block.in_flight() {
            self.blocks.remove(&id);
            if self.is_settled() {
                actions.push(Action::Settled);
            }
        }
        actions
    }

    fn give_up(&mut self, which: impl Fn(BlockState) -> bool) -> Vec<Action> {
        let wanted = self.blocks.iter_mut().filter(|(_, block)| which(block.state()));
        wanted.filter_map(|(&id, block)| block.apply(id, BlockEvent::GiveUp)?).collect()
    }

    fn end(&mut self) -> Vec<Action> {
        if self.over {
            return self.ignore();
        }
        self.over = true;
        let mut actions = self.give_up(|state| matches!(state, BlockState::Loading(_)));
        if self.is_settled() {
            actions.push(Action::Settled);
        }
        actions
    }

    fn ignore(&mut self) -> Vec<Action> {
        self.ignored = self.ignored.saturating_add(1);
        Vec::new()
    }
}

/// The slots of all requests, by the name that their owner gives them.
#[derive(Debug)]
pub struct Slots<K> {
    slots: BTreeMap<K, Slot>,
    ignored: u64,
}

impl<K> Default for Slots<K> {
    fn default() -> Self {
        Self { slots: BTreeMap::new(), ignored: 0 }
    }
}

impl<K: Copy + Ord> Slots<K> {
    /// Gives a request that runs a slot, unless it has one.
    pub fn open(&mut self, request: K) {
        self.slots.entry(request).or_default();
    }

    /// Moves a request's slot by one event. One that is settled is forgotten; events of an unknown slot are counted.
    pub fn apply(&mut self, request: K, event: Event) -> Vec<Action> {
        let Some(slot) = self.slots.get_mut(&request) else {
            self.ignored += 1;
            return Vec::new();
        };
        let before = slot.ignored();
        let actions = slot.apply(event);
        self.ignored += u64::from(slot.ignored() - before);
        if slot.is_settled() {
            self.slots.remove(&request);
        }
        actions
    }

    /// `request_finished`, however the request ended; the same answer however often it is asked.
    pub fn finish(&mut self, request: K, event: Event) -> (Answer, Vec<Action>) {
        let actions = match self.slots.contains_key(&request) {
            true => self.apply(request, event),
            // It never had a slot, or it is settled: an answer, not an error.
            false => Vec::new(),
        };
        (self.slots.get(&request).map_or(Answer::Settled, Slot::answer), actions)
    }

    /// Requests that have a slot, in order.
    pub fn requests(&self) -> impl Iterator<Item = K> + '_ {
        self.slots.keys().copied()
    }

    /// A request's slot.
    #[must_use]
    pub fn get(&self, request: K) -> Option<&Slot> {
        self.slots.get(&request)
    }

    /// Whether no request has a slot.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Late, repeated and unknown events so far.
    #[must_use]
    pub fn ignored(&self) -> u64 {
        self.ignored
    }
}

#[cfg(test)]
mod tests;
