//! The ledger: all leases of one producer.
//!
//! It opens, finds and ends leases, keeps their expiry in order (never a scan), and remembers ended leases and
//! early releases for a bounded time, so that a late message gets an exact answer. Opening, a message about a
//! lease and its end are O(1) on the average; the expiry of one that was renewed is O(log n). `baton bench lease`
//! measures them.
//!
//! Invariants:
//! - Blocks that went in with [`Ledger::open`] come out of [`Ledger::take_settled`] exactly once.
//! - A release that arrives before its request is known wins when the request arrives.
//! - Every table is bounded; a full ledger refuses to open, it never forgets a live lease.
//! - A lease that ends before its prefill does is told of ([`Ledger::take_unfinished`]), once.
//! - What ended leases leave behind is bounded by the live ones, not by the rate at which leases end.

mod deadlines;
mod live;
mod portrait;
mod tombstones;

use std::time::Duration;

use crate::limits::{BLOCKS_PER_HANDOFF_MAX, LEASES_MAX};
use crate::machines::lease::{Cause, Event, Lease, LeaseTerms, Reply, State};
use crate::machines::replies::{Readiness, Verdict};
use crate::{BlockId, Handle, Reader, RequestId, Time};
use deadlines::Deadlines;
use live::{Entry, Live, Slot};
use tombstones::Tombstones;

pub use portrait::{LedgerPortrait, LivePortrait};

/// What [`Ledger::open`] lends.
#[derive(Debug)]
pub struct Grant {
    /// A fresh random handle.
    pub handle: Handle,
    /// The request that computed the blocks.
    pub request: RequestId,
    /// Its block table, in order.
    pub blocks: Vec<BlockId>,
    /// Consumers that must fetch, or leave, before the lease ends by itself.
    pub expected: usize,
}

/// Why a lease could not be opened. The grant comes back: its blocks are the caller's to free.
#[derive(Debug)]
pub struct OpenRefused {
    /// What was to be lent.
    pub grant: Grant,
    /// Why not.
    pub why: OpenRefusal,
}

/// See [`OpenRefused`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenRefusal {
    /// The request was released before it finished.
    AlreadyReleased,
    /// [`LEASES_MAX`] leases are live.
    Full,
    /// The block table is empty or longer than [`BLOCKS_PER_HANDOFF_MAX`].
    Blocks,
}

/// How a lease ended, and what goes back.
#[derive(Debug)]
pub struct Settled {
    /// The lease.
    pub handle: Handle,
    /// Its request.
    pub request: RequestId,
    /// The blocks; now the receiver's to free.
    pub blocks: Vec<BlockId>,
    /// Why it ended.
    pub cause: Cause,
    /// The reason given with a release, or the cause's label.
    pub reason: Box<str>,
    /// From open to close.
    pub held: Duration,
    /// Readers that finished, of those expected.
    pub readers: (usize, usize),
}

/// The answer to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseReply {
    /// Blocks are back.
    Released,
    /// Readers in flight are waited for; nobody else is let in.
    Draining,
    /// It had ended before.
    Already,
    /// Never heard of it (or too long ago). By request id it is kept in mind in case the request arrives late.
    Unknown,
}

impl ReleaseReply {
    /// The word on the wire.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Draining => "draining",
            Self::Already => "already",
            Self::Unknown => "unknown",
        }
    }
}

/// The answer to a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeartbeatReply {
    /// The lease lives on.
    Renewed,
    /// It does not.
    Gone,
}

/// Why a read may not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadRefusal {
    /// The lease is over or was never there.
    Gone,
    /// Entries `first .. first + count` are not all in a table of `blocks` entries.
    Range {
        /// First entry asked for.
        first: usize,
        /// Entries asked for.
        count: usize,
        /// Entries there are.
        blocks: usize,
    },
    /// Too many readers at once.
    Busy,
}

/// One live lease as people see it: no key in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseView {
    /// The request that computed the blocks.
    pub request: RequestId,
    /// Blocks held.
    pub blocks: usize,
    /// Why it is still held.
    pub state: State,
    /// Since it was opened.
    pub age: Duration,
    /// Until it ends by itself.
    pub left: Duration,
    /// Readers that finished, of those expected.
    pub readers: (usize, usize),
}

/// Counts of what the network repeated or delayed: no-ops, but visible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerCounts {
    /// Leases opened.
    pub opened: u64,
    /// Messages about a lease that had already ended.
    pub late: u64,
    /// Messages about a lease never seen.
    pub unknown: u64,
}

/// All leases of one producer.
#[derive(Debug, Default)]
pub struct Ledger {
    terms: LeaseTerms,
    live: Live,
    deadlines: Deadlines,
    tombstones: Tombstones,
    settled: Vec<Settled>,
    unfinished: Vec<Handle>,
    counts: LedgerCounts,
}

impl Ledger {
    /// An empty ledger.
    #[must_use]
    pub fn new(terms: LeaseTerms) -> Self {
        Self { terms, ..Self::default() }
    }

    /// The terms every lease gets.
    #[must_use]
    pub fn terms(&self) -> LeaseTerms {
        self.terms
    }

    /// Lends the blocks of a finished request.
    ///
    /// # Errors
    /// [`OpenRefused`] gives the grant back: its blocks are the caller's to free.
    pub fn open(&mut self, grant: Grant, now: Time) -> Result<Duration, OpenRefused> {
        let ready = grant.blocks.len();
        let slot = self.insert(grant, ready, now, |terms, expected| Lease::open(terms, expected, now))?;
        self.look_at(slot, now.after(self.terms.duration));
        Ok(self.terms.duration)
    }

    /// Lends the blocks of a request that still computes, of which the first `ready` are final. It is over with
    /// [`Self::seal`], or by whatever else ends a lease; no clock does.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_growing(&mut self, grant: Grant, ready: usize, now: Time) -> Result<Duration, OpenRefused> {
        self.insert(grant, ready, now, Lease::growing)?;
        Ok(self.terms.duration)
    }

    /// The first `ready` blocks of a growing lease are final. Late, repeated or of another lease, it says nothing.
    pub fn grow(&mut self, handle: Handle, ready: usize) {
        let Some(entry) = self.live.find(handle).and_then(|slot| self.live.get_mut(slot)) else { return };
        entry.ready = entry.ready.max(ready.min(entry.blocks.len()));
    }

    /// The prefill of a growing lease is done: all of its blocks are final, and its time runs from now on. False when
    /// the lease has ended, or ends because its readers are still waited for.
    pub fn seal(&mut self, handle: Handle, now: Time) -> bool {
        self.tick(now);
        let Some(slot) = self.live.find(handle) else { return false };
        if self.apply(slot, Event::Sealed, now) != Reply::Valid {
            return false;
        }
        let entry = self.live.get_mut(slot).expect("a lease that is sealed lives on");
        entry.ready = entry.blocks.len();
        true
    }

    fn insert(
        &mut self,
        grant: Grant,
        ready: usize,
        now: Time,
        lease: impl FnOnce(LeaseTerms, usize) -> Lease,
    ) -> Result<Slot, OpenRefused> {
        self.tick(now);
        let why = if self.tombstones.has_request(&grant.request) {
            Some(OpenRefusal::AlreadyReleased)
        } else if self.live.len() >= LEASES_MAX {
            Some(OpenRefusal::Full)
        } else if grant.blocks.is_empty() || grant.blocks.len() > BLOCKS_PER_HANDOFF_MAX {
            Some(OpenRefusal::Blocks)
        } else {
            None
        };
        if let Some(why) = why {
            return Err(OpenRefused { grant, why });
        }
        let Grant { handle, request, blocks, expected } = grant;
        let lease = lease(self.terms, expected);
        self.counts.opened += 1;
        let entry = Entry { lease, handle, request, blocks, ready, opened: now, reason: None };
        Ok(self.live.insert(entry))
    }

    /// A reader asks for `count` entries of the block table from `first` on.
    ///
    /// # Errors
    /// [`ReadRefusal`]; the lease is unchanged by a refused read.
    pub fn read_begun(
        &mut self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
        now: Time,
    ) -> Result<Vec<BlockId>, ReadRefusal> {
        self.tick(now);
        let Some((slot, entry)) = self.find(handle) else {
            self.count_absent(handle);
            return Err(ReadRefusal::Gone);
        };
        let blocks = entry.blocks.len();
        let end = first.checked_add(count).filter(|&end| end <= blocks && count > 0);
        let Some(end) = end else {
            return Err(ReadRefusal::Range { first, count, blocks });
        };
        match self.apply(slot, Event::ReadBegun(reader), now) {
            Reply::Granted => {
                let entry = self.live.get(slot).expect("a lease that grants a read lives on");
                Ok(entry.blocks[first..end].to_vec())
            }
            Reply::Busy => Err(ReadRefusal::Busy),
            _ => Err(ReadRefusal::Gone),
        }
    }

    /// Whether this reader may still be sent bytes.
    #[must_use]
    pub fn read_live(&self, handle: Handle, reader: Reader) -> bool {
        self.readiness(handle, reader, 0) == Readiness::Ready
    }

    /// Whether this reader may be sent the first `upto` blocks of the table.
    #[must_use]
    pub fn readiness(&self, handle: Handle, reader: Reader, upto: usize) -> Readiness {
        match self.find(handle) {
            Some((_, entry)) if !entry.lease.serves(reader) => Readiness::Gone,
            // What is not final yet will never be.
            Some((_, entry)) if entry.ready < upto && entry.lease.state() != State::Growing => {
                Readiness::Gone
            }
            Some((_, entry)) if entry.ready < upto => Readiness::NotYet,
            Some(_) => Readiness::Ready,
            None => Readiness::Gone,
        }
    }

    /// A reader has everything. The answer says whether it may use it.
    pub fn read_done(&mut self, handle: Handle, reader: Reader, now: Time) -> Verdict {
        self.tick(now);
        if let Some(slot) = self.live.find(handle) {
            let reply = self.apply(slot, Event::ReadDone(reader), now);
            return if reply == Reply::Valid { Verdict::Valid } else { Verdict::Gone };
        }
        self.count_absent(handle);
        if self.tombstones.had_finished(handle, reader) { Verdict::Valid } else { Verdict::Gone }
    }

    /// A reader's connection broke, or it gave up.
    pub fn read_failed(&mut self, handle: Handle, reader: Reader, now: Time) {
        self.tick(now);
        if let Some(slot) = self.live.find(handle) {
            self.apply(slot, Event::ReadFailed(reader), now);
        }
    }

    /// A consumer's sign of life.
    pub fn heartbeat(&mut self, handle: Handle, now: Time) -> HeartbeatReply {
        self.tick(now);
        if let Some(slot) = self.live.find(handle)
            && self.apply(slot, Event::Heartbeat, now) == Reply::Valid
        {
            return HeartbeatReply::Renewed;
        }
        self.count_absent(handle);
        HeartbeatReply::Gone
    }

    /// Ends one lease early.
    pub fn release(&mut self, handle: Handle, reason: &str, now: Time) -> ReleaseReply {
        self.tick(now);
        let Some(slot) = self.live.find(handle) else {
            self.count_absent(handle);
            return if self.tombstones.has(handle) { ReleaseReply::Already } else { ReleaseReply::Unknown };
        };
        self.release_at(slot, reason, now)
    }

    fn release_at(&mut self, slot: Slot, reason: &str, now: Time) -> ReleaseReply {
        if let Some(entry) = self.live.get_mut(slot) {
            entry.reason.get_or_insert_with(|| reason.into());
        }
        match self.apply(slot, Event::Release, now) {
            Reply::Released => ReleaseReply::Released,
            Reply::Draining => ReleaseReply::Draining,
            _ => ReleaseReply::Already,
        }
    }

    /// One of the lease's consumers will not read (any more). The last one ends it.
    pub fn leave(&mut self, handle: Handle, consumer: u64, reason: &str, now: Time) -> ReleaseReply {
        self.tick(now);
        let Some(slot) = self.live.find(handle) else {
            return self.release(handle, reason, now);
        };
        let reply = self.apply(slot, Event::Leave(consumer), now);
        if let (Reply::Released, Some(last)) = (reply, self.settled.last_mut()) {
            last.reason = reason.into();
        }
        match reply {
            Reply::Released => ReleaseReply::Released,
            Reply::Draining => ReleaseReply::Draining,
            _ => ReleaseReply::Already,
        }
    }

    /// Ends every lease of a request, and makes sure that none is opened for it later.
    ///
    /// The caller aborts the request itself if it is still running.
    pub fn release_request(&mut self, request: &RequestId, reason: &str, now: Time) -> ReleaseReply {
        self.tick(now);
        let leases = self.live.find_request(request);
        if leases.is_empty() {
            self.tombstones.bury_request(request, reason, now);
        }
        let mut reply = ReleaseReply::Unknown;
        for slot in leases {
            reply = self.release_at(slot, reason, now);
        }
        reply
    }

    /// Whether the request was given up before it finished.
    #[must_use]
    pub fn was_released_early(&self, request: &RequestId) -> bool {
        self.tombstones.has_request(request)
    }

    /// Lets time act on leases and tombstones that are due.
    pub fn tick(&mut self, now: Time) {
        while let Some(slot) = self.deadlines.pop_due(now) {
            // One that has ended early left this behind, and one that was renewed is looked at again later.
            if self.live.get(slot).is_some() {
                self.apply(slot, Event::Tick, now);
                if let Some(deadline) = self.live.get(slot).and_then(|entry| entry.lease.deadline()) {
                    self.deadlines.push(deadline, slot);
                }
            }
        }
        self.tombstones.tick(now);
    }

    /// When [`Self::tick`] should next be called; may be early, never late.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.next()
    }

    /// Leases that have ended since the last call; their blocks are now the caller's to free.
    pub fn take_settled(&mut self) -> Vec<Settled> {
        std::mem::take(&mut self.settled)
    }

    /// Leases that ended, or begin to end, before their prefill did, since the last call: the caller aborts what it
    /// still computes for them.
    pub fn take_unfinished(&mut self) -> Vec<Handle> {
        std::mem::take(&mut self.unfinished)
    }

    /// Live leases.
    #[must_use]
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// Whether no lease is live.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.live.len() == 0
    }

    /// What was repeated or late so far.
    #[must_use]
    pub fn counts(&self) -> LedgerCounts {
        self.counts
    }

    /// Handles of all live leases, for a drain at shutdown.
    #[must_use]
    pub fn handles(&self) -> Vec<Handle> {
        self.live.iter().map(|(_, entry)| entry.handle).collect()
    }

    /// Live leases, oldest first.
    #[must_use]
    pub fn view(&self, now: Time) -> Vec<LeaseView> {
        let mut views: Vec<_> = self.live.iter().map(|(_, entry)| entry.view(now)).collect();
        views.sort_by_key(|view| std::cmp::Reverse(view.age));
        views
    }

    fn find(&self, handle: Handle) -> Option<(Slot, &Entry)> {
        let slot = self.live.find(handle)?;
        self.live.get(slot).map(|entry| (slot, entry))
    }

    /// Looks at a lease at that time, at the latest.
    fn look_at(&mut self, slot: Slot, due: Time) {
        self.deadlines.push(due, slot);
        if self.deadlines.is_overgrown(self.live.len()) {
            self.deadlines.retain(|slot| self.live.get(slot).is_some());
        }
    }

    /// Applies one event to a live lease and books what follows from it.
    fn apply(&mut self, slot: Slot, event: Event, now: Time) -> Reply {
        let entry = self.live.get_mut(slot).expect("the caller looked it up");
        let (grew, before) = (entry.lease.state() == State::Growing, entry.lease.deadline());
        let step = entry.lease.apply(event, now);
        let after = entry.lease.deadline();
        if grew && matches!(entry.lease.state(), State::Draining(_) | State::Closed(_)) {
            self.unfinished.push(entry.handle);
        }
        if let Some(cause) = step.closed {
            self.settle(slot, cause, now);
        } else if let Some(after) = after.filter(|after| before.is_none_or(|before| *after < before)) {
            // An earlier deadline (a drain) must not wait for the old one to come up; one that grows had none.
            self.look_at(slot, after);
        }
        step.reply
    }

    fn settle(&mut self, slot: Slot, cause: Cause, now: Time) {
        let entry = self.live.remove(slot).expect("a lease closes once");
        self.tombstones.bury(entry.handle, cause, entry.lease.finished_readers(), now);
        let reason = match (cause, entry.reason) {
            (Cause::Released, Some(reason)) => reason,
            _ => cause.label().into(),
        };
        self.settled.push(Settled {
            handle: entry.handle,
            request: entry.request,
            blocks: entry.blocks,
            cause,
            reason,
            held: now.since(entry.opened),
            readers: entry.lease.progress(),
        });
    }

    fn count_absent(&mut self, handle: Handle) {
        if self.tombstones.has(handle) {
            self.counts.late += 1;
        } else {
            self.counts.unknown += 1;
        }
    }
}

#[cfg(test)]
mod tests;
