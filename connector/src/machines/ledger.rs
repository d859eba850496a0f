//! The ledger: all leases of one producer.
//!
//! The ledger opens, finds and ends leases, and keeps their deadlines in order without a scan. It remembers ended
//! leases and early releases for a bounded time, so that a late message gets an exact answer. Opening, a message about
//! a lease and its end are O(1) on average. The expiry of a renewed lease is O(log n). `baton bench lease` measures
//! them.
//!
//! Invariants:
//! - Blocks that went in with [`Ledger::open`] come out of [`Ledger::take_closed`] exactly once.
//! - A release that arrives before its request is known wins when the request arrives.
//! - Every table is bounded. A full ledger refuses to open; it never forgets a live lease.
//! - A lease that ends before its prefill is returned by [`Ledger::take_unfinished`] once.
//! - The memory of ended leases is bounded by the live ones, not by the rate at which leases end.

mod deadlines;
mod live;
mod snapshot;
mod tombstones;

use std::time::Duration;

use crate::limits::{BLOCKS_PER_HANDOFF_MAX, LEASES_MAX};
use crate::machines::lease::{CloseCause, Event, Lease, LeaseTerms, Reply, State};
use crate::machines::replies::{Readiness, Verdict};
use crate::{BlockId, Handle, Reader, RequestId, Time};
use deadlines::Deadlines;
use live::{LeaseEntry, LeaseSlot, LiveLeases};
use tombstones::Tombstones;

pub use snapshot::{LedgerSnapshot, LiveSnapshot};

/// The lease that [`Ledger::open`] opens.
#[derive(Debug)]
pub struct LeaseSpec {
    /// A fresh random handle.
    pub handle: Handle,
    /// The request that computed the blocks.
    pub request: RequestId,
    /// The block table of the request, in order.
    pub blocks: Vec<BlockId>,
    /// Consumers that must fetch, or leave, before the lease ends by itself.
    pub expected: usize,
}

/// Why a lease could not be opened. The error returns the spec: the caller frees its blocks.
#[derive(Debug)]
pub struct LeaseOpenError {
    /// The lease that was not opened.
    pub spec: LeaseSpec,
    /// The reason.
    pub kind: LeaseOpenErrorKind,
}

/// The reason of a [`LeaseOpenError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseOpenErrorKind {
    /// The request was released before it finished.
    AlreadyReleased,
    /// [`LEASES_MAX`] leases are live.
    Full,
    /// The block table is empty or longer than [`BLOCKS_PER_HANDOFF_MAX`].
    Blocks,
}

/// How a lease ended, with its blocks.
#[derive(Debug)]
pub struct ClosedLease {
    /// The lease.
    pub handle: Handle,
    /// The request that computed the blocks.
    pub request: RequestId,
    /// The blocks. The receiver frees them.
    pub blocks: Vec<BlockId>,
    /// Why it ended.
    pub cause: CloseCause,
    /// The reason given with a release, or the cause's label.
    pub reason: Box<str>,
    /// From open to close.
    pub lifetime: Duration,
    /// Readers that finished, of those expected.
    pub readers: (usize, usize),
}

crate::labelled! {
    /// The answer to a release.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ReleaseReply {
        /// The blocks are freed.
        Released => "released",
        /// The lease waits for readers in flight and accepts no new ones.
        Draining => "draining",
        /// The lease had ended before.
        Already => "already",
        /// The lease is not known, or was forgotten. A request id is remembered in case the request arrives late.
        Unknown => "unknown",
    }
}

/// The answer to a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeartbeatReply {
    /// The lease is renewed.
    Renewed,
    /// The lease has ended or is ending.
    Gone,
}

/// Why a read may not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// The lease has ended or never existed.
    Gone,
    /// Entries `first .. first + count` are not all in a table of `blocks` entries.
    Range {
        /// First requested entry.
        first: usize,
        /// Number of requested entries.
        count: usize,
        /// Entries of the table.
        blocks: usize,
    },
    /// Too many readers at once.
    Busy,
}

/// One live lease for display, without its handle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseView {
    /// The request that computed the blocks.
    pub request: RequestId,
    /// Number of leased blocks.
    pub blocks: usize,
    /// State of the lease.
    pub state: State,
    /// Time since the lease was opened.
    pub age: Duration,
    /// Time until the lease ends by itself.
    pub remaining: Duration,
    /// Readers that finished, of those expected.
    pub readers: (usize, usize),
}

/// Counts of repeated and delayed messages, which change nothing.
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
    live: LiveLeases,
    deadlines: Deadlines,
    tombstones: Tombstones,
    closed: Vec<ClosedLease>,
    unfinished: Vec<Handle>,
    counts: LedgerCounts,
}

impl Ledger {
    /// An empty ledger.
    #[must_use]
    pub fn new(terms: LeaseTerms) -> Self {
        Self { terms, ..Self::default() }
    }

    /// The terms of every lease.
    #[must_use]
    pub fn terms(&self) -> LeaseTerms {
        self.terms
    }

    /// Leases the blocks of a finished request.
    ///
    /// # Errors
    /// [`LeaseOpenError`] returns the spec: the caller frees its blocks.
    pub fn open(&mut self, spec: LeaseSpec, now: Time) -> Result<Duration, LeaseOpenError> {
        let ready = spec.blocks.len();
        let slot = self.insert(spec, ready, now, |terms, expected| Lease::open(terms, expected, now))?;
        self.schedule(slot, now.after(self.terms.duration));
        Ok(self.terms.duration)
    }

    /// Leases the blocks of a request that still computes. The first `ready` blocks are final. The lease grows until
    /// [`Self::seal`] or the end of the lease. It does not expire before that.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_growing(
        &mut self,
        spec: LeaseSpec,
        ready: usize,
        now: Time,
    ) -> Result<Duration, LeaseOpenError> {
        self.insert(spec, ready, now, Lease::growing)?;
        Ok(self.terms.duration)
    }

    /// Records that the first `ready` blocks of a growing lease are final. A late or repeated call changes nothing.
    pub fn grow(&mut self, handle: Handle, ready: usize) {
        let Some(entry) = self.live.find(handle).and_then(|slot| self.live.get_mut(slot)) else { return };
        entry.ready = entry.ready.max(ready.min(entry.blocks.len()));
    }

    /// Records that the prefill of a growing lease is done: all of its blocks are final, and its duration starts now.
    /// Returns false when the lease has ended or drains.
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
        spec: LeaseSpec,
        ready: usize,
        now: Time,
        lease: impl FnOnce(LeaseTerms, usize) -> Lease,
    ) -> Result<LeaseSlot, LeaseOpenError> {
        self.tick(now);
        let kind = if self.tombstones.has_request(&spec.request) {
            Some(LeaseOpenErrorKind::AlreadyReleased)
        } else if self.live.len() >= LEASES_MAX {
            Some(LeaseOpenErrorKind::Full)
        } else if spec.blocks.is_empty() || spec.blocks.len() > BLOCKS_PER_HANDOFF_MAX {
            Some(LeaseOpenErrorKind::Blocks)
        } else {
            None
        };
        if let Some(kind) = kind {
            return Err(LeaseOpenError { spec, kind });
        }
        let LeaseSpec { handle, request, blocks, expected } = spec;
        let lease = lease(self.terms, expected);
        self.counts.opened += 1;
        let entry = LeaseEntry { lease, handle, request, blocks, ready, opened: now, reason: None };
        Ok(self.live.insert(entry))
    }

    /// Starts a read of `count` entries of the block table from `first` on.
    ///
    /// # Errors
    /// [`ReadError`]; a refused read does not change the lease.
    pub fn begin_read(
        &mut self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
        now: Time,
    ) -> Result<Vec<BlockId>, ReadError> {
        self.tick(now);
        let Some((slot, entry)) = self.find(handle) else {
            self.count_absent(handle);
            return Err(ReadError::Gone);
        };
        let blocks = entry.blocks.len();
        let end = first.checked_add(count).filter(|&end| end <= blocks && count > 0);
        let Some(end) = end else {
            return Err(ReadError::Range { first, count, blocks });
        };
        match self.apply(slot, Event::ReadBegun(reader), now) {
            Reply::Granted => {
                let entry = self.live.get(slot).expect("a lease that grants a read lives on");
                Ok(entry.blocks[first..end].to_vec())
            }
            Reply::Busy => Err(ReadError::Busy),
            _ => Err(ReadError::Gone),
        }
    }

    /// Whether the lease still serves this reader.
    #[must_use]
    pub fn is_read_live(&self, handle: Handle, reader: Reader) -> bool {
        self.readiness(handle, reader, 0) == Readiness::Ready
    }

    /// Whether the first `upto` blocks of the table may be sent to this reader.
    #[must_use]
    pub fn readiness(&self, handle: Handle, reader: Reader, upto: usize) -> Readiness {
        match self.find(handle) {
            Some((_, entry)) if !entry.lease.serves(reader) => Readiness::Gone,
            // The prefill has ended: no further block becomes final.
            Some((_, entry)) if entry.ready < upto && entry.lease.state() != State::Growing => {
                Readiness::Gone
            }
            Some((_, entry)) if entry.ready < upto => Readiness::NotYet,
            Some(_) => Readiness::Ready,
            None => Readiness::Gone,
        }
    }

    /// Ends a read that has every byte. The verdict is whether the reader may use them.
    pub fn finish_read(&mut self, handle: Handle, reader: Reader, now: Time) -> Verdict {
        self.tick(now);
        if let Some(slot) = self.live.find(handle) {
            let reply = self.apply(slot, Event::ReadDone(reader), now);
            return if reply == Reply::Valid { Verdict::Valid } else { Verdict::Gone };
        }
        self.count_absent(handle);
        if self.tombstones.had_finished(handle, reader) { Verdict::Valid } else { Verdict::Gone }
    }

    /// Ends a read whose connection broke, or that the reader abandoned.
    pub fn fail_read(&mut self, handle: Handle, reader: Reader, now: Time) {
        self.tick(now);
        if let Some(slot) = self.live.find(handle) {
            self.apply(slot, Event::ReadFailed(reader), now);
        }
    }

    /// Renews a lease.
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

    fn release_at(&mut self, slot: LeaseSlot, reason: &str, now: Time) -> ReleaseReply {
        if let Some(entry) = self.live.get_mut(slot) {
            entry.reason.get_or_insert_with(|| reason.into());
        }
        release_reply(self.apply(slot, Event::Release, now))
    }

    /// Records that one consumer of the lease does not read any more. The last one ends the lease.
    pub fn leave(&mut self, handle: Handle, consumer: u64, reason: &str, now: Time) -> ReleaseReply {
        self.tick(now);
        let Some(slot) = self.live.find(handle) else {
            return self.release(handle, reason, now);
        };
        let reply = self.apply(slot, Event::Leave(consumer), now);
        if let (Reply::Released, Some(last)) = (reply, self.closed.last_mut()) {
            last.reason = reason.into();
        }
        release_reply(reply)
    }

    /// Ends every lease of a request, and prevents a later one.
    ///
    /// The caller aborts the request itself if it still runs.
    pub fn release_request(&mut self, request: &RequestId, reason: &str, now: Time) -> ReleaseReply {
        self.tick(now);
        let leases = self.live.find_request(request);
        if leases.is_empty() {
            self.tombstones.record_released(request, reason, now);
        }
        let mut reply = ReleaseReply::Unknown;
        for slot in leases {
            reply = self.release_at(slot, reason, now);
        }
        reply
    }

    /// Whether the request was released before it finished.
    #[must_use]
    pub fn was_released_early(&self, request: &RequestId) -> bool {
        self.tombstones.has_request(request)
    }

    /// Ends the leases and tombstones whose deadline has passed.
    pub fn tick(&mut self, now: Time) {
        while let Some(slot) = self.deadlines.pop_due(now) {
            // The entry may be stale: a lease that ended early leaves one behind, and a renewed lease is due later.
            if self.live.get(slot).is_some() {
                self.apply(slot, Event::Tick, now);
                if let Some(deadline) = self.live.get(slot).and_then(|entry| entry.lease.deadline()) {
                    self.deadlines.push(deadline, slot);
                }
            }
        }
        self.tombstones.tick(now);
    }

    /// When [`Self::tick`] must be called next. The time may be too early, never too late.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.next()
    }

    /// Leases that have ended since the last call. The caller frees their blocks.
    pub fn take_closed(&mut self) -> Vec<ClosedLease> {
        std::mem::take(&mut self.closed)
    }

    /// Leases that ended or drain since the last call, and whose prefill still computes. The caller aborts that
    /// prefill.
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

    /// Repeated and late messages so far.
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

    fn find(&self, handle: Handle) -> Option<(LeaseSlot, &LeaseEntry)> {
        let slot = self.live.find(handle)?;
        self.live.get(slot).map(|entry| (slot, entry))
    }

    /// Schedules a check of a lease at that time.
    fn schedule(&mut self, slot: LeaseSlot, due: Time) {
        self.deadlines.push(due, slot);
        if self.deadlines.needs_compaction(self.live.len()) {
            self.deadlines.retain(|slot| self.live.get(slot).is_some());
        }
    }

    /// Applies one event to a live lease and updates the tables.
    fn apply(&mut self, slot: LeaseSlot, event: Event, now: Time) -> Reply {
        let entry = self.live.get_mut(slot).expect("the caller looked it up");
        let (grew, before) = (entry.lease.state() == State::Growing, entry.lease.deadline());
        let step = entry.lease.apply(event, now);
        let after = entry.lease.deadline();
        if grew && matches!(entry.lease.state(), State::Draining(_) | State::Closed(_)) {
            self.unfinished.push(entry.handle);
        }
        if let Some(cause) = step.closed {
            self.close(slot, cause, now);
        } else if let Some(after) = after.filter(|after| before.is_none_or(|before| *after < before)) {
            // An earlier deadline (a drain) needs an entry of its own, and a growing lease had none.
            self.schedule(slot, after);
        }
        step.reply
    }

    fn close(&mut self, slot: LeaseSlot, cause: CloseCause, now: Time) {
        let entry = self.live.remove(slot).expect("a lease closes once");
        self.tombstones.record_ended(entry.handle, cause, entry.lease.finished_readers(), now);
        let reason = match (cause, entry.reason) {
            (CloseCause::Released, Some(reason)) => reason,
            _ => cause.label().into(),
        };
        self.closed.push(ClosedLease {
            handle: entry.handle,
            request: entry.request,
            blocks: entry.blocks,
            cause,
            reason,
            lifetime: now.since(entry.opened),
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

fn release_reply(reply: Reply) -> ReleaseReply {
    match reply {
        Reply::Released => ReleaseReply::Released,
        Reply::Draining => ReleaseReply::Draining,
        _ => ReleaseReply::Already,
    }
}

#[cfg(test)]
mod tests;
