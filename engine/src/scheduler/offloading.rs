//! The scheduler's side of the offload tiers, and of the multi-connector that P/D and offload form.
//!
//! ```text
//!   a block becomes full and findable ─▶ backlog ─▶ hold, slot, Order::Store ─ ended ─▶ hold back ─▶ Order::Write
//!   a waiting sequence's next blocks are in a tier ─▶ landing blocks, Order::Load ─ all ended ─▶ Running
//! ```
//!
//! - What is stored is what the prefix cache can find at that moment: computed here, or fetched and verified. What came
//!   from a tier is known to its books and is not stored again.
//! - A load that fails truncates what was loaded: the blocks before it are used, those from it on are computed.
//! - Stores hold blocks. When the pool runs short, those that no worker has begun are given up before anybody is
//!   preempted, and no more are begun until the pool has recovered.

use std::collections::{HashMap, VecDeque};

use baton_connector::BlockId;
use baton_connector::multi::{Action as MultiAction, Answer as Held, Child, Children, Event as MultiEvent};
use baton_connector::offload::{Action, Answer, BlockEvent, Event, Slots, TransferId};

use super::{Admission, Effect, Scheduler};
use crate::blocks::hash::BlockHash;
use crate::blocks::pool::Hold;
use crate::offload::tier_index::{Loaded, TierBooks, TierConfig};
use crate::offload::{Fault, OffloadCounts, Order, Report, Source, Tier};
use crate::scheduler::sequence::{FinishReason, LoadProgress, Phase, Purpose, SeqId};

/// The connector that lends and fetches: asked first, because a handoff is of this very prompt.
pub(super) const HANDOFF: Child = Child(0);
/// The connector to the lower tiers: the fallback of a handoff that failed.
pub(super) const OFFLOAD: Child = Child(1);

/// Blocks that wait for a free worker or slot; they are not held, and dropped when they are reused first.
const BACKLOG_MAX: usize = 8_192;

/// Stores in flight hold at most this share of the pool …
const STORING_SHARE: usize = 8;
/// … and at most this many blocks.
const STORING_MAX: usize = 256;

/// For whom a block is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    /// Its request has ended before its turn came.
    Engine,
    Request(SeqId),
}

/// An order that is not over.
#[derive(Debug)]
enum Flight {
    Store { owner: Owner, block: BlockId, hash: BlockHash },
    Load { id: SeqId, index: usize, block: BlockId, hash: BlockHash, from: Source },
    Write { hash: BlockHash, evict: Vec<BlockHash> },
    Delete(Vec<BlockHash>),
}

/// The tiers of one scheduler.
#[derive(Debug)]
pub(super) struct Offload {
    books: TierBooks,
    slots: Slots<Owner>,
    flights: HashMap<TransferId, Flight>,
    next: u64,
    storing: usize,
    storing_max: usize,
    /// Blocks that could not be stored yet, and the request that computed them.
    backlog: VecDeque<(SeqId, BlockHash)>,
    /// The pool is short of blocks.
    pressed: bool,
    counts: OffloadCounts,
    ignored: u64,
}

impl Offload {
    fn fresh(&mut self) -> TransferId {
        self.next += 1;
        TransferId(self.next)
    }

    /// A block whose turn to be stored comes later. Of too many the oldest goes: it is the likeliest to be reused first.
    fn put_off(&mut self, id: SeqId, hash: BlockHash) {
        if self.backlog.len() >= BACKLOG_MAX {
            self.backlog.pop_front();
            self.counts.not_stored += 1;
        }
        self.backlog.push_back((id, hash));
    }

    /// A flight that is over, unless it was before.
    fn land(&mut self, id: TransferId) -> Option<Flight> {
        let flight = self.flights.remove(&id);
        match flight {
            None => self.ignored += 1,
            Some(Flight::Store { .. }) => self.storing -= 1,
            Some(Flight::Load { .. } | Flight::Write { .. } | Flight::Delete(_)) => {}
        }
        flight
    }

    /// How many blocks at the start of this chain the tiers can deliver.
    pub(super) fn run(&self, chain: &[BlockHash]) -> usize {
        self.books.run(chain)
    }

    pub(super) fn ignored(&self) -> u64 {
        self.ignored + self.slots.ignored()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    pub(super) fn counts(&self) -> OffloadCounts {
        OffloadCounts {
            host: self.books.counts(Tier::Host),
            disk: self.books.counts(Tier::Disk),
            disk_rests: self.books.disk_rests(),
            ..self.counts
        }
    }
}

impl Scheduler {
    /// The same scheduler with tiers below its pool. `found` are the blocks that the disk tier holds from an earlier
    /// life, least recently used first.
    #[must_use]
    pub fn with_tiers(mut self, config: TierConfig, found: impl IntoIterator<Item = BlockHash>) -> Self {
        let mut books = TierBooks::new(config);
        books.adopt(found);
        let storing_max = (self.pool.usage().total / STORING_SHARE).clamp(1, STORING_MAX);
        self.offload = config.any().then(|| Offload {
            books,
            slots: Slots::default(),
            flights: HashMap::new(),
            next: 0,
            storing: 0,
            storing_max,
            backlog: VecDeque::new(),
            pressed: false,
            counts: OffloadCounts::default(),
            ignored: 0,
        });
        self
    }

    /// What the offload workers tell. Late, repeated and unknown reports are counted and ignored (invariant 9).
    pub fn offload_event(&mut self, report: Report) {
        let Some(offload) = &mut self.offload else {
            self.ignored += 1;
            return;
        };
        match report {
            Report::DiskRests => offload.books.set_disk_rests(true),
            Report::DiskIsBack => offload.books.set_disk_rests(false),
            Report::Ended(id, outcome) => {
                if let Some(flight) = offload.land(id) {
                    self.flight_ended(id, flight, outcome);
                }
            }
        }
        self.issue_deletions();
        self.issue_stores();
    }

    /// The workers' answer to [`Effect::Revoke`]: whether nobody had begun, and nobody will.
    pub fn offload_revoked(&mut self, id: TransferId, revoked: bool) {
        let Some(offload) = &mut self.offload else { return };
        if !revoked {
            let owner = match offload.flights.get(&id) {
                Some(Flight::Store { owner, .. }) => *owner,
                Some(Flight::Load { id, .. }) => Owner::Request(*id),
                Some(Flight::Write { .. } | Flight::Delete(_)) | None => return,
            };
            offload.slots.apply(owner, Event::Block(id, BlockEvent::Committed));
            return;
        }
        let Some(flight) = offload.land(id) else { return };
        let (owner, block, hold) = match flight {
            Flight::Store { owner, block, hash } => {
                offload.books.end_store(hash, false);
                match owner {
                    // Its turn comes again, if the block is still there then.
                    Owner::Request(id) => offload.put_off(id, hash),
                    Owner::Engine => offload.counts.not_stored += 1,
                }
                (owner, block, Hold::Storing)
            }
            Flight::Load { id, block, hash, from, .. } => {
                offload.books.end_load(hash, from, Loaded::Not);
                (Owner::Request(id), block, Hold::Landing)
            }
            Flight::Write { .. } | Flight::Delete(_) => unreachable!("only stores and loads are revoked"),
        };
        let actions = offload.slots.apply(owner, Event::Block(id, BlockEvent::Revoked));
        self.carry_out_offload(owner, &actions, block, hold, None);
    }

    /// Forgets what the tiers hold; the files are deleted.
    pub fn reset_tiers(&mut self) {
        if let Some(offload) = &mut self.offload {
            offload.backlog.clear();
            offload.books.clear();
        }
        self.issue_deletions();
    }

    /// Makes a sequence's newly full blocks findable, and stores them.
    pub(super) fn register(&mut self, id: SeqId) {
        let block_tokens = self.config.block_tokens;
        let sequence = self.sequences.get_mut(&id).expect("the sequence is known");
        let from = sequence.registered;
        sequence.register(&mut self.pool, block_tokens);
        let Some(offload) = &mut self.offload else { return };
        for &hash in sequence.hashes.get(from..sequence.registered).unwrap_or_default() {
            if offload.books.knows(hash) {
                continue;
            }
            offload.put_off(id, hash);
        }
        self.issue_stores();
    }

    /// Begins as many stores of the backlog as workers, slots and pool allow.
    fn issue_stores(&mut self) {
        let Some(offload) = &mut self.offload else { return };
        while !offload.pressed
            && offload.storing < offload.storing_max
            && let Some((id, hash)) = offload.backlog.pop_front()
        {
            if offload.books.knows(hash) {
                continue;
            }
            // It may have been reused since, or is being stored for an earlier request.
            let Some(block) = self.pool.find(hash).filter(|&block| self.pool.store(block)) else {
                offload.counts.not_stored += 1;
                continue;
            };
            let Some(slot) = offload.books.begin_store(hash) else {
                self.pool.give_back(&[block], Hold::Storing);
                if offload.flights.is_empty() {
                    offload.counts.not_stored += 1;
                    continue;
                }
                // A slot comes free with the end of something.
                offload.backlog.push_front((id, hash));
                break;
            };
            let owner = if self.sequences.contains_key(&id) { Owner::Request(id) } else { Owner::Engine };
            let transfer = offload.fresh();
            offload.slots.open(owner);
            let begun = offload.slots.apply(owner, Event::Block(transfer, BlockEvent::Store));
            assert_eq!(begun, [Action::Begin(transfer)], "a running request's slot takes a store");
            offload.storing += 1;
            offload.flights.insert(transfer, Flight::Store { owner, block, hash });
            self.effects.push(Effect::Offload(Order::Store { id: transfer, hash, block, slot }));
        }
    }

    fn issue_deletions(&mut self) {
        let Some(offload) = &mut self.offload else { return };
        if let Some(hashes) = offload.books.begin_delete() {
            let id = offload.fresh();
            offload.flights.insert(id, Flight::Delete(hashes.clone()));
            self.effects.push(Effect::Offload(Order::Delete { id, hashes }));
        }
    }

    /// The pool is short of blocks. True when stores hold some: those that can be had back are asked for, and the
    /// others come back soon.
    pub(super) fn yield_stores(&mut self) -> bool {
        let Some(offload) = &mut self.offload else { return false };
        offload.pressed = true;
        if self.pool.usage().storing == 0 {
            return false;
        }
        for owner in offload.slots.requests().collect::<Vec<_>>() {
            for action in offload.slots.apply(owner, Event::Yield) {
                if let Action::Revoke(id) = action {
                    self.effects.push(Effect::Revoke(id));
                }
            }
        }
        true
    }

    /// A step was planned without running short of blocks.
    pub(super) fn resume_stores(&mut self) {
        if let Some(offload) = &mut self.offload
            && std::mem::take(&mut offload.pressed)
        {
            self.issue_stores();
        }
    }

    /// Sets `run` landing blocks aside for a waiting sequence, and the rest of what it needs, and starts to load.
    pub(super) fn begin_load(&mut self, id: SeqId, run: usize, fresh: usize) -> Admission {
        let into = self.pool.allocate(run, Hold::Landing).expect("room was checked");
        let rest = self.pool.allocate(fresh - run, Hold::Active).expect("room was checked");
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence is known");
        let offload = self.offload.as_mut().expect("its tiers have blocks");
        let first = sequence.shared;
        sequence.blocks.extend(&into);
        sequence.blocks.extend(rest);
        sequence.phase = Phase::Loading;
        sequence.load = Some(LoadProgress { first, left: run, whole_until: first + run });
        self.loading += 1;
        let owner = Owner::Request(id);
        offload.slots.open(owner);
        let sources = offload.books.begin_loads(&sequence.hashes[first..first + run]);
        for (at, (block, from)) in into.into_iter().zip(sources).enumerate() {
            let (index, transfer) = (first + at, offload.fresh());
            let hash = sequence.hashes[index];
            let begun = offload.slots.apply(owner, Event::Block(transfer, BlockEvent::Load));
            assert_eq!(begun, [Action::Begin(transfer)], "a waiting request's slot takes a load");
            offload.flights.insert(transfer, Flight::Load { id, index, block, hash, from });
            self.effects.push(Effect::Offload(Order::Load { id: transfer, hash, from, block }));
        }
        let left = sequence.tokens.len() - (first + run) * self.config.block_tokens;
        Admission::Fetch(left)
    }

    fn flight_ended(&mut self, id: TransferId, flight: Flight, outcome: Result<(), Fault>) {
        let offload = self.offload.as_mut().expect("it has flights");
        if let Err(fault) = outcome {
            let at = Fault::ALL.iter().position(|&other| other == fault).expect("all of them");
            offload.counts.faults[at] += 1;
        }
        let event = Event::Block(id, if outcome.is_ok() { BlockEvent::Done } else { BlockEvent::Failed });
        match flight {
            Flight::Store { owner, block, hash } => {
                let write = offload.books.end_store(hash, outcome.is_ok());
                if let Some(write) = write {
                    let id = offload.fresh();
                    offload.flights.insert(id, Flight::Write { hash, evict: write.evict.clone() });
                    let (slot, evict) = (write.slot, write.evict);
                    self.effects.push(Effect::Offload(Order::Write { id, hash, slot, evict }));
                } else if outcome.is_ok() && offload.books.lacks_file(hash) {
                    offload.counts.not_written += 1;
                }
                let actions = offload.slots.apply(owner, event);
                self.carry_out_offload(owner, &actions, block, Hold::Storing, None);
            }
            Flight::Load { id, index, block, hash, from } => {
                let how = match outcome {
                    Ok(()) => Loaded::Whole,
                    Err(Fault::Missing | Fault::Corrupt) => Loaded::Gone,
                    Err(
                        Fault::Refused
                        | Fault::Full
                        | Fault::Io
                        | Fault::Resting
                        | Fault::Slow
                        | Fault::Broken,
                    ) => Loaded::Not,
                };
                offload.books.end_load(hash, from, how);
                let owner = Owner::Request(id);
                let actions = offload.slots.apply(owner, event);
                self.carry_out_offload(owner, &actions, block, Hold::Landing, Some(index));
            }
            Flight::Write { hash, evict } => offload.books.end_write(hash, &evict, outcome.is_ok()),
            Flight::Delete(hashes) => offload.books.end_delete(&hashes, outcome.is_ok()),
        }
    }

    /// Does what a slot says about its one block that has come to rest.
    fn carry_out_offload(
        &mut self,
        owner: Owner,
        actions: &[Action],
        block: BlockId,
        hold: Hold,
        index: Option<usize>,
    ) {
        for &action in actions {
            match (action, owner) {
                (Action::LetGo(_), _) => self.pool.give_back(&[block], hold),
                (Action::Land(_) | Action::Miss(_), Owner::Request(id)) => {
                    // Either way nothing writes into it any more. One that was missed is computed before it is used.
                    self.pool.landed(&[block]);
                    let index = index.expect("only loads land");
                    self.load_ended(id, index, matches!(action, Action::Land(_)));
                }
                (Action::Settled, Owner::Request(id)) => self.departures.let_go(id, OFFLOAD),
                (Action::Land(_) | Action::Miss(_) | Action::Settled, Owner::Engine) => {
                    unreachable!("the engine's own slot only stores, and never ends")
                }
                (Action::Begin(_) | Action::Revoke(_), _) => unreachable!("a block at rest begins nothing"),
            }
        }
    }

    fn load_ended(&mut self, id: SeqId, index: usize, whole: bool) {
        let block_tokens = self.config.block_tokens;
        let sequence = self.sequences.get_mut(&id).expect("nothing lands in a sequence that is over");
        let load = sequence.load.as_mut().expect("it loads");
        load.left -= 1;
        if !whole {
            load.whole_until = load.whole_until.min(index);
        }
        if load.left > 0 {
            return;
        }
        let LoadProgress { first, whole_until, .. } = *load;
        sequence.load = None;
        sequence.computed = whole_until * block_tokens;
        if sequence.preemptions == 0 {
            sequence.cached = sequence.computed.min(sequence.prompt_len);
        }
        if whole_until > first {
            sequence.connectors.apply(MultiEvent::Loaded(OFFLOAD));
        } else {
            sequence.connectors.apply(MultiEvent::LoadFailed(OFFLOAD));
        }
        sequence.phase = Phase::Running;
        self.loading -= 1;
        self.running.push(id);
        self.register(id);
        if let Some(offload) = &mut self.offload {
            offload.counts.hit_tokens += ((whole_until - first) * block_tokens) as u64;
        }
    }

    /// Who loads a waiting sequence's prefix, if anybody has it.
    pub(super) fn choose_connector(&mut self, id: SeqId, in_tiers: usize) -> Option<Child> {
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence is known");
        let mut who = Children::NONE;
        if let Purpose::Consume(_) = sequence.purpose {
            who = who.with(HANDOFF);
        }
        if in_tiers > 0 {
            who = who.with(OFFLOAD);
        }
        match sequence.connectors.apply(MultiEvent::Load(who)).first() {
            Some(MultiAction::LoadFrom(child)) => Some(*child),
            _ => None,
        }
    }

    /// A request that used this chain of blocks is over.
    pub(super) fn touch_tiers(&mut self, chain: &[BlockHash]) {
        if let Some(offload) = &mut self.offload {
            offload.books.touch(chain);
        }
    }

    /// The offload connector's `request_finished`.
    pub(super) fn offload_finished(&mut self, id: SeqId, reason: FinishReason) -> Held {
        let Some(offload) = &mut self.offload else { return Held::Nothing };
        let event = match reason {
            FinishReason::Stop | FinishReason::Length => Event::Finish,
            FinishReason::Abort | FinishReason::Error => Event::Abort,
        };
        let (answer, actions) = offload.slots.finish(Owner::Request(id), event);
        for action in actions {
            if let Action::Revoke(id) = action {
                self.effects.push(Effect::Revoke(id));
            }
        }
        match answer {
            Answer::Settled => Held::Nothing,
            Answer::Draining(_) => Held::Holds,
        }
    }
}
