//! The ledger: all leases of one producer.
//!
//! It opens, finds and ends leases, keeps their expiry in a heap (O(log n) per event, never a scan), and
//! remembers ended leases and early releases for a bounded time, so that a late message gets an exact answer.
//!
//! Invariants:
//! - Blocks that went in with [`Ledger::open`] come out of [`Ledger::take_settled`] exactly once.
//! - A release that arrives before its request is known wins when the request arrives.
//! - Every table is bounded; a full ledger refuses to open, it never forgets a live lease.

mod portrait;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::time::Duration;

use crate::lease::{Cause, Event, Lease, LeaseTerms, Reply, State};
use crate::limits::{BLOCKS_PER_HANDOFF_MAX, LEASES_MAX, TOMBSTONE_KEPT, TOMBSTONES_MAX};
use crate::transport::Verdict;
use crate::{BlockId, Handle, Reader, RequestId, Time};

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
    /// Readers (consumer × rank) that must fetch before the lease ends by itself.
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
    /// Never heard of it (or too long ago). Kept in mind in case it arrives late.
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

#[derive(Debug)]
struct Entry {
    lease: Lease,
    request: RequestId,
    blocks: Vec<BlockId>,
    opened: Time,
    reason: Option<Box<str>>,
}

impl Entry {
    fn view(&self, now: Time) -> LeaseView {
        LeaseView {
            request: self.request.clone(),
            blocks: self.blocks.len(),
            state: self.lease.state(),
            age: now.since(self.opened),
            left: self.lease.deadline().map_or(Duration::ZERO, |deadline| deadline.since(now)),
            readers: self.lease.progress(),
        }
    }
}

#[derive(Debug)]
enum Tombstone {
    Handle(Handle),
    Request(RequestId),
}

/// All leases of one producer.
#[derive(Debug, Default)]
pub struct Ledger {
    terms: LeaseTerms,
    live: HashMap<Handle, Entry>,
    by_request: BTreeMap<RequestId, Vec<Handle>>,
    /// Lazy: an entry whose time is no longer its lease's deadline is skipped or moved when it comes up.
    deadlines: BinaryHeap<Reverse<(Time, Handle)>>,
    ended: HashMap<Handle, (Cause, Vec<Reader>)>,
    released_early: HashMap<RequestId, Box<str>>,
    tombstones: VecDeque<(Time, Tombstone)>,
    settled: Vec<Settled>,
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
        self.tick(now);
        let why = if self.released_early.contains_key(&grant.request) {
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
        let lease = Lease::open(self.terms, expected, now);
        self.deadlines.push(Reverse((now.after(self.terms.duration), handle)));
        self.by_request.entry(request.clone()).or_default().push(handle);
        let entry = Entry { lease, request, blocks, opened: now, reason: None };
        let clash = self.live.insert(handle, entry);
        assert!(clash.is_none(), "handles are 128 random bits");
        self.counts.opened += 1;
        Ok(self.terms.duration)
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
        let Some(entry) = self.live.get(&handle) else {
            self.count_absent(handle);
            return Err(ReadRefusal::Gone);
        };
        let blocks = entry.blocks.len();
        let end = first.checked_add(count).filter(|&end| end <= blocks && count > 0);
        let Some(end) = end else {
            return Err(ReadRefusal::Range { first, count, blocks });
        };
        match self.apply(handle, Event::ReadBegun(reader), now) {
            Reply::Granted => Ok(self.live[&handle].blocks[first..end].to_vec()),
            Reply::Busy => Err(ReadRefusal::Busy),
            _ => Err(ReadRefusal::Gone),
        }
    }

    /// Whether this reader may still be sent bytes.
    #[must_use]
    pub fn read_live(&self, handle: Handle, reader: Reader) -> bool {
        self.live.get(&handle).is_some_and(|entry| entry.lease.serves(reader))
    }

    /// A reader has everything. The answer says whether it may use it.
    pub fn read_done(&mut self, handle: Handle, reader: Reader, now: Time) -> Verdict {
        self.tick(now);
        if self.live.contains_key(&handle) {
            let reply = self.apply(handle, Event::ReadDone(reader), now);
            return if reply == Reply::Valid { Verdict::Valid } else { Verdict::Gone };
        }
        self.count_absent(handle);
        let checked = self.ended.get(&handle).is_some_and(|(_, readers)| readers.contains(&reader));
        if checked { Verdict::Valid } else { Verdict::Gone }
    }

    /// A reader's connection broke, or it gave up.
    pub fn read_failed(&mut self, handle: Handle, reader: Reader, now: Time) {
        self.tick(now);
        if self.live.contains_key(&handle) {
            self.apply(handle, Event::ReadFailed(reader), now);
        }
    }

    /// A consumer's sign of life.
    pub fn heartbeat(&mut self, handle: Handle, now: Time) -> HeartbeatReply {
        self.tick(now);
        if self.live.contains_key(&handle) && self.apply(handle, Event::Heartbeat, now) == Reply::Valid {
            return HeartbeatReply::Renewed;
        }
        self.count_absent(handle);
        HeartbeatReply::Gone
    }

    /// Ends one lease early.
    pub fn release(&mut self, handle: Handle, reason: &str, now: Time) -> ReleaseReply {
        self.tick(now);
        let Some(entry) = self.live.get_mut(&handle) else {
            self.count_absent(handle);
            return if self.ended.contains_key(&handle) {
                ReleaseReply::Already
            } else {
                ReleaseReply::Unknown
            };
        };
        entry.reason.get_or_insert_with(|| reason.into());
        match self.apply(handle, Event::Release, now) {
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
        let handles = self.by_request.get(request).cloned().unwrap_or_default();
        let known = !handles.is_empty();
        let mut reply = ReleaseReply::Unknown;
        for handle in handles {
            reply = self.release(handle, reason, now);
        }
        if !known && !self.released_early.contains_key(request) {
            self.bury(Tombstone::Request(request.clone()), now);
            self.released_early.insert(request.clone(), reason.into());
        }
        reply
    }

    /// Whether the request was given up before it finished.
    #[must_use]
    pub fn was_released_early(&self, request: &RequestId) -> bool {
        self.released_early.contains_key(request)
    }

    /// Lets time act on leases and tombstones that are due.
    pub fn tick(&mut self, now: Time) {
        while let Some(&Reverse((due, handle))) = self.deadlines.peek() {
            if due > now {
                break;
            }
            self.deadlines.pop();
            if self.live.contains_key(&handle) {
                self.apply(handle, Event::Tick, now);
                if let Some(deadline) = self.live.get(&handle).and_then(|e| e.lease.deadline()) {
                    self.deadlines.push(Reverse((deadline, handle)));
                }
            }
        }
        while self.tombstones.front().is_some_and(|(since, _)| now.since(*since) >= TOMBSTONE_KEPT) {
            self.forget_oldest();
        }
    }

    /// When [`Self::tick`] should next be called; may be early, never late.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.peek().map(|Reverse((due, _))| *due)
    }

    /// Leases that have ended since the last call; their blocks are now the caller's to free.
    pub fn take_settled(&mut self) -> Vec<Settled> {
        std::mem::take(&mut self.settled)
    }

    /// Live leases.
    #[must_use]
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// Whether no lease is live.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// What was repeated or late so far.
    #[must_use]
    pub fn counts(&self) -> LedgerCounts {
        self.counts
    }

    /// Handles of all live leases, for a drain at shutdown.
    #[must_use]
    pub fn handles(&self) -> Vec<Handle> {
        self.live.keys().copied().collect()
    }

    /// Live leases, oldest first.
    #[must_use]
    pub fn view(&self, now: Time) -> Vec<LeaseView> {
        let mut views: Vec<_> = self.live.values().map(|entry| entry.view(now)).collect();
        views.sort_by_key(|view| std::cmp::Reverse(view.age));
        views
    }

    /// Applies one event to a live lease and books what follows from it.
    fn apply(&mut self, handle: Handle, event: Event, now: Time) -> Reply {
        let entry = self.live.get_mut(&handle).expect("the caller looked it up");
        let before = entry.lease.deadline();
        let step = entry.lease.apply(event, now);
        let after = entry.lease.deadline();
        if let Some(cause) = step.closed {
            self.settle(handle, cause, now);
        } else if after < before {
            // An earlier deadline (a drain) must not wait for the old one to come up.
            self.deadlines.push(Reverse((after.expect("an open lease has a deadline"), handle)));
        }
        step.reply
    }

    fn settle(&mut self, handle: Handle, cause: Cause, now: Time) {
        let entry = self.live.remove(&handle).expect("a lease closes once");
        if let Some(handles) = self.by_request.get_mut(&entry.request) {
            handles.retain(|h| *h != handle);
            if handles.is_empty() {
                self.by_request.remove(&entry.request);
            }
        }
        self.bury(Tombstone::Handle(handle), now);
        self.ended.insert(handle, (cause, entry.lease.finished_readers()));
        let reason = match (cause, entry.reason) {
            (Cause::Released, Some(reason)) => reason,
            _ => cause.label().into(),
        };
        self.settled.push(Settled {
            handle,
            request: entry.request,
            blocks: entry.blocks,
            cause,
            reason,
            held: now.since(entry.opened),
            readers: entry.lease.progress(),
        });
    }

    fn bury(&mut self, tombstone: Tombstone, now: Time) {
        if self.tombstones.len() >= TOMBSTONES_MAX {
            self.forget_oldest();
        }
        self.tombstones.push_back((now, tombstone));
    }

    fn forget_oldest(&mut self) {
        match self.tombstones.pop_front() {
            Some((_, Tombstone::Handle(handle))) => drop(self.ended.remove(&handle)),
            Some((_, Tombstone::Request(request))) => drop(self.released_early.remove(&request)),
            None => {}
        }
    }

    fn count_absent(&mut self, handle: Handle) {
        if self.ended.contains_key(&handle) {
            self.counts.late += 1;
        } else {
            self.counts.unknown += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rank;

    const READER: Reader = Reader { consumer: 9, rank: Rank(0) };

    fn id(text: &str) -> RequestId {
        RequestId::new(text).expect("a test id")
    }

    fn grant(n: u128) -> Grant {
        let blocks = vec![BlockId(2 * n as u32), BlockId(2 * n as u32 + 1)];
        Grant { handle: Handle(n), request: id(&format!("r{n}")), blocks, expected: 1 }
    }

    #[test]
    fn blocks_come_back_once_with_the_reason_that_was_given() {
        let mut ledger = Ledger::new(LeaseTerms::default());
        ledger.open(grant(1), Time(0)).expect("open");
        assert_eq!(ledger.release(Handle(1), "client_gone", Time(5)), ReleaseReply::Released);
        assert_eq!(ledger.release(Handle(1), "client_gone", Time(6)), ReleaseReply::Already);
        let settled = ledger.take_settled();
        assert_eq!(settled.len(), 1);
        assert_eq!((&*settled[0].reason, settled[0].blocks.len()), ("client_gone", 2));
        assert!(ledger.take_settled().is_empty());
        assert_eq!(ledger.counts().late, 1);
    }

    #[test]
    fn a_release_before_the_request_is_known_wins_when_it_arrives() {
        let mut ledger = Ledger::new(LeaseTerms::default());
        assert_eq!(ledger.release_request(&id("r1"), "client_gone", Time(0)), ReleaseReply::Unknown);
        let refused = ledger.open(grant(1), Time(1)).expect_err("it was given up");
        assert_eq!((refused.why, refused.grant.blocks.len()), (OpenRefusal::AlreadyReleased, 2));
    }

    #[test]
    fn one_live_lease_at_the_head_does_not_stop_the_expiry_of_others() {
        let mut ledger = Ledger::new(LeaseTerms::default());
        for n in 1..=3 {
            ledger.open(grant(n), Time(n as u64)).expect("open");
        }
        let late = Time::ZERO.after(Duration::from_secs(29));
        assert_eq!(ledger.heartbeat(Handle(1), late), HeartbeatReply::Renewed);
        ledger.tick(Time::ZERO.after(Duration::from_secs(31)));
        assert_eq!(ledger.take_settled().iter().map(|s| s.cause).collect::<Vec<_>>(), [Cause::Expired; 2]);
        assert_eq!(ledger.len(), 1);
        ledger.tick(late.after(Duration::from_secs(20)));
        assert!(ledger.is_empty());
    }

    #[test]
    fn a_release_during_a_read_ends_at_the_drain_deadline_at_the_latest() {
        let mut ledger = Ledger::new(LeaseTerms::default());
        ledger.open(grant(1), Time(0)).expect("open");
        ledger.read_begun(Handle(1), READER, 0, 2, Time(1)).expect("granted");
        assert_eq!(ledger.release(Handle(1), "x", Time(2)), ReleaseReply::Draining);
        let due = ledger.next_deadline().expect("a drain has a deadline");
        assert!(due <= Time(2).after(LeaseTerms::default().drain));
        ledger.tick(due);
        assert_eq!(ledger.take_settled().len(), 1);
        assert_eq!(ledger.read_done(Handle(1), READER, due), Verdict::Gone);
    }

    #[test]
    fn a_read_outside_the_table_is_refused_and_changes_nothing() {
        let mut ledger = Ledger::new(LeaseTerms::default());
        ledger.open(grant(1), Time(0)).expect("open");
        for (first, count) in [(0, 3), (2, 1), (usize::MAX, 2), (0, 0)] {
            let refusal = ledger.read_begun(Handle(1), READER, first, count, Time(1));
            assert_eq!(refusal, Err(ReadRefusal::Range { first, count, blocks: 2 }));
        }
        assert_eq!(ledger.read_begun(Handle(2), READER, 0, 1, Time(1)), Err(ReadRefusal::Gone));
        assert_eq!(ledger.release(Handle(1), "x", Time(2)), ReleaseReply::Released, "no reader was counted");
    }

    #[test]
    fn a_repeated_done_after_the_end_is_still_valid_and_a_strangers_is_not() {
        let mut ledger = Ledger::new(LeaseTerms::default());
        ledger.open(grant(1), Time(0)).expect("open");
        ledger.read_begun(Handle(1), READER, 0, 2, Time(1)).expect("granted");
        assert_eq!(ledger.read_done(Handle(1), READER, Time(2)), Verdict::Valid);
        assert_eq!(ledger.read_done(Handle(1), READER, Time(3)), Verdict::Valid);
        let stranger = Reader { consumer: 10, ..READER };
        assert_eq!(ledger.read_done(Handle(1), stranger, Time(3)), Verdict::Gone);
    }

    #[test]
    fn tombstones_are_bounded_in_number_and_time() {
        let mut ledger = Ledger::new(LeaseTerms::default());
        for n in 0..TOMBSTONES_MAX + 10 {
            ledger.release_request(&id(&format!("r{n}")), "x", Time(0));
        }
        assert_eq!(ledger.tombstones.len(), TOMBSTONES_MAX);
        assert!(!ledger.was_released_early(&id("r0")) && ledger.was_released_early(&id("r10")));
        ledger.tick(Time::ZERO.after(TOMBSTONE_KEPT));
        assert!(ledger.tombstones.is_empty() && ledger.released_early.is_empty());
    }
}
