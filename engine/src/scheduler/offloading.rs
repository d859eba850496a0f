//! The scheduler's part of the offload tiers, and of the multi-connector that handoff and offload form.
//!
//! ```text
//!   a block becomes full and cached ─▶ backlog ─▶ hold, slot, OffloadOrder::Store ─ ended ─▶ OffloadOrder::Write
//!   a waiting sequence's next blocks are in a tier ─▶ landing blocks, OffloadOrder::Load ─ all ended ─▶ Running
//! ```
//!
//! - Stored blocks are those that the prefix cache contains: computed here, or fetched and verified. The index
//!   already contains blocks that came from a tier, so they are not stored again.
//! - A load that fails truncates the result: the blocks before it are used, those from it on are computed.
//! - Stores hold blocks. When the pool runs short, stores that no worker has begun are revoked before a sequence is
//!   preempted. No new store begins until the pool has recovered.

use std::collections::{HashMap, VecDeque};

use baton_connector::BlockId;
use baton_connector::multi::{
    Action as MultiAction, Child, ChildReply as Held, Children, Event as MultiEvent,
};
use baton_connector::offload::{Action, BlockEvent, Event, FinishReply, OffloadSlots, TransferId};

use super::{Admission, Effect, Scheduler};
use crate::blocks::hash::BlockHash;
use crate::blocks::pool::Hold;
use crate::offload::tier_index::{LoadOutcome, OrderOutcome, TierConfig, TierIndex};
use crate::offload::{LoadSource, OffloadCounts, OffloadFault, OffloadOrder, OffloadReport, Tier};
use crate::scheduler::sequence::{FinishReason, Phase, Purpose, SeqId, TierLoadProgress};

/// The handoff connector. It is asked first, because a handoff contains blocks of this very prompt.
pub(super) const HANDOFF: Child = Child(0);
/// The connector to the lower tiers: the fallback of a failed handoff.
pub(super) const OFFLOAD: Child = Child(1);

/// Blocks that wait for a free worker or slot. They are not held; a block that is reused before its turn is not
/// stored.
const BACKLOG_MAX: usize = 8_192;

/// Stores in flight hold at most this share of the pool …
const STORING_SHARE: usize = 8;
/// … and at most this many blocks.
const STORING_MAX: usize = 256;

/// The owner of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum StoreOwner {
    /// The request has ended before the store began.
    Engine,
    Request(SeqId),
}

/// An order that has not ended.
#[derive(Debug)]
enum PendingOrder {
    Store { owner: StoreOwner, block: BlockId, hash: BlockHash },
    Load { id: SeqId, index: usize, block: BlockId, hash: BlockHash, from: LoadSource },
    Write { hash: BlockHash, evict: Vec<BlockHash> },
    Delete(Vec<BlockHash>),
}

/// The tiers of one scheduler.
#[derive(Debug)]
pub(super) struct TierOffload {
    index: TierIndex,
    slots: OffloadSlots<StoreOwner>,
    pending: HashMap<TransferId, PendingOrder>,
    next: u64,
    storing: usize,
    storing_max: usize,
    /// Blocks that could not be stored yet, and the request that computed them.
    backlog: VecDeque<(SeqId, BlockHash)>,
    /// The pool is short of blocks.
    short_of_blocks: bool,
    counts: OffloadCounts,
    ignored: u64,
}

impl TierOffload {
    fn next_id(&mut self) -> TransferId {
        self.next += 1;
        TransferId(self.next)
    }

    /// Adds a block to store later. At the limit the oldest block is dropped: it is the likeliest to be reused first.
    fn push_backlog(&mut self, id: SeqId, hash: BlockHash) {
        if self.backlog.len() >= BACKLOG_MAX {
            self.backlog.pop_front();
            self.counts.not_stored += 1;
        }
        self.backlog.push_back((id, hash));
    }

    /// Removes a pending order that has ended. `None` for a repeated report.
    fn take_pending(&mut self, id: TransferId) -> Option<PendingOrder> {
        let order = self.pending.remove(&id);
        match order {
            None => self.ignored += 1,
            Some(PendingOrder::Store { .. }) => self.storing -= 1,
            Some(PendingOrder::Load { .. } | PendingOrder::Write { .. } | PendingOrder::Delete(_)) => {}
        }
        order
    }

    /// The number of blocks at the start of this chain that the tiers can load.
    pub(super) fn prefix_len(&self, chain: &[BlockHash]) -> usize {
        self.index.prefix_len(chain)
    }

    pub(super) fn ignored(&self) -> u64 {
        self.ignored + self.slots.ignored()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.pending.len()
    }

    pub(super) fn counts(&self) -> OffloadCounts {
        OffloadCounts {
            host: self.index.counts(Tier::Host),
            disk: self.index.counts(Tier::Disk),
            disk_suspended: self.index.is_disk_suspended(),
            ..self.counts
        }
    }
}

impl Scheduler {
    /// The same scheduler with tiers below its pool. `found` are the blocks in the disk tier from an earlier run,
    /// least recently used first.
    #[must_use]
    pub fn with_tiers(mut self, config: TierConfig, found: impl IntoIterator<Item = BlockHash>) -> Self {
        let mut index = TierIndex::new(config);
        index.adopt(found);
        let storing_max = (self.pool.usage().total / STORING_SHARE).clamp(1, STORING_MAX);
        self.offload = config.any().then(|| TierOffload {
            index,
            slots: OffloadSlots::default(),
            pending: HashMap::new(),
            next: 0,
            storing: 0,
            storing_max,
            backlog: VecDeque::new(),
            short_of_blocks: false,
            counts: OffloadCounts::default(),
            ignored: 0,
        });
        self
    }

    /// The index of the tiers, if there are any.
    pub(super) fn tier_index_mut(&mut self) -> Option<&mut TierIndex> {
        self.offload.as_mut().map(|offload| &mut offload.index)
    }

    /// Applies a report of the offload workers. Late, repeated and unknown reports are counted and ignored (invariant
    /// 9).
    pub fn offload_event(&mut self, report: OffloadReport) {
        let Some(offload) = &mut self.offload else {
            self.ignored += 1;
            return;
        };
        match report {
            OffloadReport::DiskSuspended => offload.index.set_disk_suspended(true),
            OffloadReport::DiskResumed => offload.index.set_disk_suspended(false),
            OffloadReport::Ended(id, outcome) => {
                if let Some(order) = offload.take_pending(id) {
                    self.finish_order(id, order, outcome);
                }
            }
        }
        self.record_tier_changes();
        self.issue_deletions();
        self.issue_stores();
    }

    /// The workers' answer to [`Effect::Revoke`]. True: no worker has begun the order, and none will.
    pub fn offload_revoked(&mut self, id: TransferId, revoked: bool) {
        let Some(offload) = &mut self.offload else { return };
        if !revoked {
            let owner = match offload.pending.get(&id) {
                Some(PendingOrder::Store { owner, .. }) => *owner,
                Some(PendingOrder::Load { id, .. }) => StoreOwner::Request(*id),
                Some(PendingOrder::Write { .. } | PendingOrder::Delete(_)) | None => return,
            };
            offload.slots.apply(owner, Event::Block(id, BlockEvent::Committed));
            return;
        }
        let Some(order) = offload.take_pending(id) else { return };
        let (owner, block, hold) = match order {
            PendingOrder::Store { owner, block, hash } => {
                offload.index.end_store(hash, OrderOutcome::Failed);
                match owner {
                    // The store is queued again, if the block is still there then.
                    StoreOwner::Request(id) => offload.push_backlog(id, hash),
                    StoreOwner::Engine => offload.counts.not_stored += 1,
                }
                (owner, block, Hold::Storing)
            }
            PendingOrder::Load { id, block, hash, from, .. } => {
                offload.index.end_load(hash, from, LoadOutcome::Failed);
                (StoreOwner::Request(id), block, Hold::Landing)
            }
            PendingOrder::Write { .. } | PendingOrder::Delete(_) => {
                unreachable!("only stores and loads are revoked")
            }
        };
        let actions = offload.slots.apply(owner, Event::Block(id, BlockEvent::Revoked));
        self.carry_out_offload(owner, &actions, block, hold, None);
    }

    /// Clears the tiers; the files are deleted.
    pub fn reset_tiers(&mut self) {
        if let Some(offload) = &mut self.offload {
            offload.backlog.clear();
            offload.index.clear();
        }
        self.issue_deletions();
    }

    /// Enters a sequence's newly full blocks into the prefix cache, and stores them.
    pub(super) fn register(&mut self, id: SeqId) {
        let block_tokens = self.config.block_tokens;
        let sequence = self.sequences.get_mut(&id).expect("the sequence is known");
        let from = sequence.blocks.registered;
        sequence.register(&mut self.pool, block_tokens);
        let blocks = &sequence.blocks;
        let Some(offload) = &mut self.offload else { return };
        let audience = self.pool.events_mut().map(|events| events.audience());
        for &hash in blocks.hashes.get(from..blocks.registered).unwrap_or_default() {
            if !offload.index.contains(hash) {
                offload.push_backlog(id, hash);
            } else if let Some(audience) = audience.filter(|_| self.pool.is_known(hash)) {
                // A copy of an earlier run, or of a block that had left the pool.
                offload.index.announce(hash, audience);
            }
        }
        self.record_tier_changes();
        self.issue_stores();
    }

    /// Begins as many stores of the backlog as workers, slots and pool allow.
    fn issue_stores(&mut self) {
        let Some(offload) = &mut self.offload else { return };
        while !offload.short_of_blocks
            && offload.storing < offload.storing_max
            && let Some((id, hash)) = offload.backlog.pop_front()
        {
            if offload.index.contains(hash) {
                continue;
            }
            // The block may have been reused since, or is being stored for an earlier request.
            let Some(block) = self.pool.find(hash).filter(|&block| self.pool.store(block)) else {
                offload.counts.not_stored += 1;
                continue;
            };
            let Some(slot) = offload.index.begin_store(hash) else {
                self.pool.release(&[block], Hold::Storing);
                if offload.pending.is_empty() {
                    offload.counts.not_stored += 1;
                    continue;
                }
                // A pending order frees a slot when it ends.
                offload.backlog.push_front((id, hash));
                break;
            };
            let owner =
                if self.sequences.contains_key(&id) { StoreOwner::Request(id) } else { StoreOwner::Engine };
            let transfer = offload.next_id();
            offload.slots.open(owner);
            let begun = offload.slots.apply(owner, Event::Block(transfer, BlockEvent::Store));
            assert_eq!(begun, [Action::Begin(transfer)], "a running request's slot takes a store");
            offload.storing += 1;
            offload.pending.insert(transfer, PendingOrder::Store { owner, block, hash });
            self.effects.push(Effect::Offload(OffloadOrder::Store { id: transfer, hash, block, slot }));
        }
    }

    fn issue_deletions(&mut self) {
        let Some(offload) = &mut self.offload else { return };
        if let Some(hashes) = offload.index.begin_delete() {
            let id = offload.next_id();
            offload.pending.insert(id, PendingOrder::Delete(hashes.clone()));
            self.effects.push(Effect::Offload(OffloadOrder::Delete { id, hashes }));
        }
    }

    /// Frees blocks for a pool that is short of them. True when stores hold some: those that no worker has begun are
    /// revoked, and the others end soon.
    pub(super) fn cancel_stores(&mut self) -> bool {
        let Some(offload) = &mut self.offload else { return false };
        offload.short_of_blocks = true;
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

    /// Resumes stores after a step was planned without running short of blocks.
    pub(super) fn resume_stores(&mut self) {
        if let Some(offload) = &mut self.offload
            && std::mem::take(&mut offload.short_of_blocks)
        {
            self.issue_stores();
        }
    }

    /// Allocates `run` landing blocks for a waiting sequence, and the other blocks it needs, and starts to load.
    pub(super) fn begin_load(&mut self, id: SeqId, run: usize, fresh: usize) -> Admission {
        let into = self.pool.allocate(run, Hold::Landing).expect("room was checked");
        let rest = self.pool.allocate(fresh - run, Hold::Active).expect("room was checked");
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence is known");
        let offload = self.offload.as_mut().expect("its tiers have blocks");
        let first = sequence.blocks.shared;
        sequence.blocks.table.extend(&into);
        sequence.blocks.table.extend(rest);
        sequence.phase = Phase::Loading(TierLoadProgress { first, left: run, loaded_until: first + run });
        self.admitted.loading += 1;
        let owner = StoreOwner::Request(id);
        offload.slots.open(owner);
        let sources = offload.index.begin_loads(&sequence.blocks.hashes[first..first + run]);
        for (at, (block, from)) in into.into_iter().zip(sources).enumerate() {
            let (index, transfer) = (first + at, offload.next_id());
            let hash = sequence.blocks.hashes[index];
            let begun = offload.slots.apply(owner, Event::Block(transfer, BlockEvent::Load));
            assert_eq!(begun, [Action::Begin(transfer)], "a waiting request's slot takes a load");
            offload.pending.insert(transfer, PendingOrder::Load { id, index, block, hash, from });
            self.effects.push(Effect::Offload(OffloadOrder::Load { id: transfer, hash, from, block }));
        }
        let left = sequence.tokens.len() - (first + run) * self.config.block_tokens;
        Admission::Fetch(left)
    }

    fn finish_order(&mut self, id: TransferId, order: PendingOrder, outcome: Result<(), OffloadFault>) {
        let offload = self.offload.as_mut().expect("it has pending orders");
        if let Err(fault) = outcome {
            let at = OffloadFault::ALL.iter().position(|&other| other == fault).expect("all of them");
            offload.counts.faults[at] += 1;
        }
        let (ended, event) = match outcome {
            Ok(()) => (OrderOutcome::Complete, BlockEvent::Done),
            Err(_) => (OrderOutcome::Failed, BlockEvent::Failed),
        };
        let event = Event::Block(id, event);
        match order {
            PendingOrder::Store { owner, block, hash } => {
                let write = offload.index.end_store(hash, ended);
                if let Some(write) = write {
                    let id = offload.next_id();
                    offload.pending.insert(id, PendingOrder::Write { hash, evict: write.evict.clone() });
                    let (slot, evict) = (write.slot, write.evict);
                    self.effects.push(Effect::Offload(OffloadOrder::Write { id, hash, slot, evict }));
                } else if outcome.is_ok() && offload.index.lacks_file(hash) {
                    offload.counts.not_written += 1;
                }
                let actions = offload.slots.apply(owner, event);
                self.announce_copies(hash);
                self.carry_out_offload(owner, &actions, block, Hold::Storing, None);
            }
            PendingOrder::Load { id, index, block, hash, from } => {
                let how = match outcome {
                    Ok(()) => LoadOutcome::Complete,
                    Err(OffloadFault::Missing | OffloadFault::Corrupt) => LoadOutcome::Lost,
                    Err(
                        OffloadFault::Refused
                        | OffloadFault::Full
                        | OffloadFault::Io
                        | OffloadFault::Suspended
                        | OffloadFault::Slow
                        | OffloadFault::Broken,
                    ) => LoadOutcome::Failed,
                };
                offload.index.end_load(hash, from, how);
                let owner = StoreOwner::Request(id);
                let actions = offload.slots.apply(owner, event);
                self.carry_out_offload(owner, &actions, block, Hold::Landing, Some(index));
            }
            PendingOrder::Write { hash, evict } => {
                offload.index.end_write(hash, &evict, ended);
                self.announce_copies(hash);
            }
            PendingOrder::Delete(hashes) => offload.index.end_delete(&hashes, ended),
        }
    }

    /// Carries out a slot's actions for one block whose transfer has ended.
    fn carry_out_offload(
        &mut self,
        owner: StoreOwner,
        actions: &[Action],
        block: BlockId,
        hold: Hold,
        index: Option<usize>,
    ) {
        for &action in actions {
            match (action, owner) {
                (Action::ReleaseHold(_), _) => self.pool.release(&[block], hold),
                (Action::Land(_) | Action::Miss(_), StoreOwner::Request(id)) => {
                    // Nothing writes into it any more in both cases. A missed block is computed before it is used.
                    self.pool.finish_landing(&[block]);
                    let index = index.expect("only loads land");
                    self.finish_load(id, index, matches!(action, Action::Land(_)));
                }
                (Action::Settled, StoreOwner::Request(id)) => self.pending_releases.release(id, OFFLOAD),
                (Action::Land(_) | Action::Miss(_) | Action::Settled, StoreOwner::Engine) => {
                    unreachable!("the engine's own slot only stores, and never ends")
                }
                (Action::Begin(_) | Action::Revoke(_), _) => unreachable!("a block at rest begins nothing"),
            }
        }
    }

    fn finish_load(&mut self, id: SeqId, index: usize, whole: bool) {
        let block_tokens = self.config.block_tokens;
        let sequence = self.sequences.get_mut(&id).expect("nothing lands in a sequence that is over");
        let Phase::Loading(load) = &mut sequence.phase else { unreachable!("it loads") };
        load.left -= 1;
        if !whole {
            load.loaded_until = load.loaded_until.min(index);
        }
        if load.left > 0 {
            return;
        }
        let TierLoadProgress { first, loaded_until: whole_until, .. } = *load;
        sequence.computed = whole_until * block_tokens;
        sequence.reuse.set_cached(sequence.computed.min(sequence.prompt_len));
        if whole_until > first {
            sequence.connectors.apply(MultiEvent::Loaded(OFFLOAD));
        } else {
            sequence.connectors.apply(MultiEvent::LoadFailed(OFFLOAD));
        }
        sequence.phase = Phase::Running;
        self.admitted.loading -= 1;
        self.admitted.running.push(id);
        self.register(id);
        if let Some(offload) = &mut self.offload {
            offload.counts.hit_tokens += ((whole_until - first) * block_tokens) as u64;
        }
    }

    /// Chooses the connector that loads a waiting sequence's prefix, if one has it.
    pub(super) fn choose_connector(&mut self, id: SeqId, in_tiers: usize) -> Option<Child> {
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence is known");
        let mut sources = Children::NONE;
        if let Purpose::Consume(_) = sequence.purpose {
            sources = sources.with(HANDOFF);
        }
        if in_tiers > 0 {
            sources = sources.with(OFFLOAD);
        }
        match sequence.connectors.apply(MultiEvent::Load(sources)).first() {
            Some(MultiAction::LoadFrom(child)) => Some(*child),
            _ => None,
        }
    }

    /// Marks this chain of blocks as recently used, after its request has ended.
    pub(super) fn touch_tiers(&mut self, chain: &[BlockHash]) {
        if let Some(offload) = &mut self.offload {
            offload.index.touch(chain);
        }
    }

    /// The offload connector's `request_finished`.
    pub(super) fn offload_finished(&mut self, id: SeqId, reason: FinishReason) -> Held {
        let Some(offload) = &mut self.offload else { return Held::Nothing };
        let event = match reason {
            FinishReason::Stop | FinishReason::Length => Event::Finish,
            FinishReason::Abort | FinishReason::Error => Event::Abort,
        };
        let (answer, actions) = offload.slots.finish(StoreOwner::Request(id), event);
        for action in actions {
            if let Action::Revoke(id) = action {
                self.effects.push(Effect::Revoke(id));
            }
        }
        match answer {
            FinishReply::Settled => Held::Nothing,
            FinishReply::Draining(_) => Held::Holds,
        }
    }
}
