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
//! **The commitment point** is the start of a transfer on a worker. Giving up before that takes effect at once: nothing
//! is read or written. After it, the transfer drains. The worker's side alone decides the order and reports it as an
//! event.
//!
//! **Finish and abort** have the same effect on a slot, in any order and number. Loads are given up, because no request
//! needs them. Stores continue, because a computed block is of use to other requests. The reply contains the number of
//! transfers in flight. A slot that is already removed counts as settled: neither a panic nor "free it now" (Dynamo
//! #6681 was both).
//!
//! Invariants:
//! - Every transfer that began ends with exactly one of [`Action::ReleaseHold`], [`Action::Land`] and [`Action::Miss`].
//!   Until then its block is neither freed nor overwritten (invariants 2, 3).
//! - [`Action::Settled`] is returned exactly once: when the request has ended and nothing is in flight.
//! - An irrelevant event (repeated, late, unknown) changes nothing and is counted (invariant 9).
//!
//! The table of every state and event is a golden file, `connector/tests/golden/offload.txt`.

use std::collections::BTreeMap;

/// One copy of one block between two tiers. Ids are never reused, so a late report always refers to its own transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// Where one block of a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// On the device only.
    Resident,
    /// A worker copies the block down, or will. The block on the device is only read.
    Storing(TransferStage),
    /// In a lower tier.
    Stored,
    /// A worker copies the block up, or will. The block on the device is written.
    Loading(TransferStage),
}

/// The stage of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferStage {
    /// Handed to the workers; no worker has started it.
    Queued,
    /// Given up while queued; the workers' answer is pending.
    Revoking,
    /// A worker has started it: past the commitment point.
    Committed,
    /// Given up after the commitment point; runs to its end.
    Draining,
}

/// What can happen to one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockEvent {
    /// The block is full and computed: copy it down.
    Store,
    /// The block was found in a tier: copy it up.
    Load,
    /// A worker has started; also the answer to an [`Action::Revoke`] that was too late.
    Committed,
    /// The copy is complete. A load is also verified.
    Done,
    /// The transfer ended without a usable copy: full, broken, corrupt, or never tried.
    Failed,
    /// The answer to [`Action::Revoke`]: no worker has started, and none will.
    Revoked,
    /// The transfer is not needed any more.
    GiveUp,
}

/// What can happen to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// An event of one block.
    Block(TransferId, BlockEvent),
    /// The pool is short of blocks: stores that have not started are given up.
    Yield,
    /// The request has ended by itself.
    Finish,
    /// The request was aborted.
    Abort,
}

/// What the owner of a slot must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Hand the transfer to the workers. Without this action the slot holds nothing for the transfer.
    Begin(TransferId),
    /// Withdraw the transfer from the workers. [`BlockEvent::Revoked`] or [`BlockEvent::Committed`] answers.
    Revoke(TransferId),
    /// The transfer neither reads nor writes the block any more: release its hold.
    ReleaseHold(TransferId),
    /// The block was loaded and verified: the request owns it.
    Land(TransferId),
    /// The block was not loaded, and the transfer writes no more: the request computes it.
    Miss(TransferId),
    /// The request has ended and nothing is in flight: the slot can be removed.
    Settled,
}

/// The answer to [`Event::Finish`] and [`Event::Abort`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReply {
    /// Nothing is in flight. Also the reply of an unknown slot.
    Settled,
    /// Number of transfers that still hold a block each. [`Action::Settled`] follows their end.
    Draining(usize),
}

/// The transition of a block on one event. `None`: the event is irrelevant in this state.
///
/// The step is the slot's action without the id of the transfer.
fn transition(state: BlockState, event: BlockEvent) -> Option<(BlockState, Step)> {
    use BlockEvent as E;
    use BlockState::{Loading, Resident, Stored, Storing};
    use TransferStage::{Committed, Draining, Queued, Revoking};

    Some(match (state, event) {
        (Resident, E::Store) => (Storing(Queued), Step::Begin),
        (Stored, E::Load) => (Loading(Queued), Step::Begin),

        (Storing(Queued), E::Committed) => (Storing(Committed), Step::Nothing),
        (Storing(Revoking), E::Committed) => (Storing(Draining), Step::Nothing),
        (Storing(Queued), E::GiveUp) => (Storing(Revoking), Step::Revoke),
        (Storing(Committed), E::GiveUp) => (Storing(Draining), Step::Nothing),
        (Storing(Queued | Revoking | Committed | Draining), E::Done) => (Stored, Step::ReleaseHold),
        (Storing(Queued | Revoking | Committed | Draining), E::Failed) => (Resident, Step::ReleaseHold),
        (Storing(Revoking), E::Revoked) => (Resident, Step::ReleaseHold),

        (Loading(Queued), E::Committed) => (Loading(Committed), Step::Nothing),
        (Loading(Revoking), E::Committed) => (Loading(Draining), Step::Nothing),
        (Loading(Queued), E::GiveUp) => (Loading(Revoking), Step::Revoke),
        (Loading(Committed), E::GiveUp) => (Loading(Draining), Step::Nothing),
        (Loading(Queued | Committed), E::Done) => (Resident, Step::Land),
        (Loading(Queued | Committed), E::Failed) => (Stored, Step::Miss),
        (Loading(Revoking | Draining), E::Done | E::Failed) => (Stored, Step::ReleaseHold),
        (Loading(Revoking), E::Revoked) => (Stored, Step::ReleaseHold),

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
    ReleaseHold,
    Land,
    Miss,
}

impl Step {
    fn of(self, id: TransferId) -> Option<Action> {
        match self {
            Self::Nothing => None,
            Self::Begin => Some(Action::Begin(id)),
            Self::Revoke => Some(Action::Revoke(id)),
            Self::ReleaseHold => Some(Action::ReleaseHold(id)),
            Self::Land => Some(Action::Land(id)),
            Self::Miss => Some(Action::Miss(id)),
        }
    }
}

/// The state of one block, as a value. The [`OffloadSlot`] owns the holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadBlock(BlockState);

impl OffloadBlock {
    /// A block in a state.
    #[must_use]
    pub fn new(state: BlockState) -> Self {
        Self(state)
    }

    /// Current state.
    #[must_use]
    pub fn state(self) -> BlockState {
        self.0
    }

    /// Whether a transfer holds the block.
    #[must_use]
    pub fn in_flight(self) -> bool {
        matches!(self.0, BlockState::Storing(_) | BlockState::Loading(_))
    }

    /// Applies one event. `None`: the event is irrelevant in this state and changed nothing.
    pub fn apply(&mut self, id: TransferId, event: BlockEvent) -> Option<Option<Action>> {
        let (state, step) = transition(self.0, event)?;
        self.0 = state;
        Some(step.of(id))
    }
}

/// The offload side of one request. Not `Clone`: its holds are released once.
#[derive(Debug, Default)]
pub struct OffloadSlot {
    /// Blocks in flight. A block at rest is removed.
    blocks: BTreeMap<TransferId, OffloadBlock>,
    ended: bool,
    ignored: u32,
}

impl OffloadSlot {
    /// The slot of a running request.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Transfers in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.blocks.len()
    }

    /// State of a block in flight.
    #[must_use]
    pub fn block(&self, id: TransferId) -> Option<BlockState> {
        self.blocks.get(&id).map(|block| block.state())
    }

    /// Whether the request has ended and nothing is in flight.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.ended && self.blocks.is_empty()
    }

    /// Events so far that changed nothing.
    #[must_use]
    pub fn ignored(&self) -> u32 {
        self.ignored
    }

    /// The reply to a finish: whether this connector still holds blocks of the request.
    #[must_use]
    pub fn finish_reply(&self) -> FinishReply {
        if self.blocks.is_empty() { FinishReply::Settled } else { FinishReply::Draining(self.blocks.len()) }
    }

    /// Applies one event and returns the actions for the owner, in order.
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
        if self.ended || self.blocks.contains_key(&id) {
            return self.ignore();
        }
        let mut block = OffloadBlock::new(from);
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
        let selected = self.blocks.iter_mut().filter(|(_, block)| which(block.state()));
        selected.filter_map(|(&id, block)| block.apply(id, BlockEvent::GiveUp)?).collect()
    }

    fn end(&mut self) -> Vec<Action> {
        if self.ended {
            return self.ignore();
        }
        self.ended = true;
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

/// The slots of all requests, by a key of their owner.
#[derive(Debug)]
pub struct OffloadSlots<K> {
    slots: BTreeMap<K, OffloadSlot>,
    ignored: u64,
}

impl<K> Default for OffloadSlots<K> {
    fn default() -> Self {
        Self { slots: BTreeMap::new(), ignored: 0 }
    }
}

impl<K: Copy + Ord> OffloadSlots<K> {
    /// Opens a slot for a running request, unless it has one.
    pub fn open(&mut self, request: K) {
        self.slots.entry(request).or_default();
    }

    /// Applies one event to a request's slot. A settled slot is removed. Events of an unknown slot are counted.
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

    /// `request_finished`, for any end of the request. A repeated call gets the same reply.
    pub fn finish(&mut self, request: K, event: Event) -> (FinishReply, Vec<Action>) {
        let actions = match self.slots.contains_key(&request) {
            true => self.apply(request, event),
            // The request never had a slot, or its slot is settled: not an error.
            false => Vec::new(),
        };
        (self.slots.get(&request).map_or(FinishReply::Settled, OffloadSlot::finish_reply), actions)
    }

    /// Requests that have a slot, in order.
    pub fn requests(&self) -> impl Iterator<Item = K> + '_ {
        self.slots.keys().copied()
    }

    /// A request's slot.
    #[must_use]
    pub fn get(&self, request: K) -> Option<&OffloadSlot> {
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
