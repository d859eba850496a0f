//! The loads of one engine: which requests read which lease, and what their producers have answered.
//!
//! ```text
//! admit ─▶ held: renewed from now on ─ begin ─▶ read asked ─▶ open, or broken
//!   done ─▶ one request: Done at the producer ─────────────▶ verdict
//!           several requests of one lease: a renewal each ─▶ verdict; Done after the last one
//!   leave ─▶ the last request: Leave or Release at the producer, and GiveUp after the last read
//! ```
//!
//! Several requests of this engine with one handle (`n > 1`) are one consumer at the producer. A Done of one of them
//! would end the lease below the others. So each is verified by a renewal: a lease never reopens, so a live lease was
//! live during the whole read. Workers read on after their request has ended: Done and GiveUp wait for the last of these
//! reads, so the producer frees no block below one.
//!
//! The table decides. [`super::workers`] talks to producers without the table's lock.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::Handle;
use baton_connector::limits::{HEARTBEATS_PER_LEASE, LEASES_MAX, RENEWAL_DURATIONS_MAX};
use baton_connector_leases::lease_span;

use super::check::Invalid;
use super::queues::{Job, JobKind, Notice, NoticeKind, ProducerQueues};
use super::target::LoadTarget;

/// A producer answers "done" within this time, or the load has failed.
pub(super) const VERDICT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long "done" for several requests of one lease waits for further ones.
pub(super) const LINGER: Duration = Duration::from_millis(250);

/// The shortest interval between two renewals of one lease.
const INTERVAL_MIN: Duration = Duration::from_millis(20);

/// A read whose request has ended is remembered for this long: the producer's drain deadline and a second.
const ABANDONED_KEPT: Duration = Duration::from_secs(6);

/// Limit of the loads, and of the reads whose request has ended.
const LOADS_MAX: usize = LEASES_MAX;

/// How long a handle is remembered after its load was admitted, and limit of the remembered ones.
const RECENT_TIME: Duration = Duration::from_secs(120);
const RECENT_MAX: usize = 16_384;

/// The producer's first answer must arrive within this time, or before the lease's expiry.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The producer has ended the lease.
pub(super) const LEASE_OVER: &str = "lease_over";

/// The producer has not answered, or there is no connection to it.
pub(super) const UNREACHABLE: &str = "unreachable";

/// The reason of a release after a read whose blocks are not used.
pub(super) const LOAD_FAILED: &str = "load_failed";

/// The verdict on one load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoadVerdict {
    /// The blocks may be used.
    pub(crate) valid: bool,
    /// Why, for the log and the metrics.
    pub(crate) reason: &'static str,
}

impl LoadVerdict {
    /// The lease was live during the read.
    pub(super) const VALID: Self = Self { valid: true, reason: "live" };

    /// The blocks must not be used.
    pub(super) const fn gone(reason: &'static str) -> Self {
        Self { valid: false, reason }
    }
}

/// The producer's answer about a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Nothing yet.
    Asking,
    /// It is live.
    Live,
    /// It is over, or the producer refuses this engine.
    Gone(&'static str),
}

/// The read of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadProgress {
    /// Not asked for.
    None,
    /// Asked, not answered.
    Asked,
    /// Granted, and the block ids are those of the handoff.
    Open,
    /// Not granted.
    Broken(&'static str),
}

/// One lease that requests of this engine read.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) target: Arc<LoadTarget>,
    /// This engine's name at the producer.
    pub(super) consumer: u64,
    pub(super) hold: Hold,
    pub(super) read: ReadProgress,
    members: BTreeSet<Arc<str>>,
    /// Requests whose workers read, also after the request has ended.
    readers: BTreeSet<Arc<str>>,
    /// All requests have left. What remains are reads of ended requests.
    left: bool,
    /// Its entry in [`LoadTable::lingering`].
    lingers_until: Option<Instant>,
    /// More than one request has this lease, or will have.
    several: bool,
    /// A member was verified.
    verified: bool,
    /// Its only member asks the producer for the verdict. No other one joins.
    finishing: bool,
    last_arrival: Instant,
    admitted: Instant,
}

impl Load {
    /// The interval of renewals.
    pub(super) fn interval(&self) -> Duration {
        (self.target.lease / HEARTBEATS_PER_LEASE).max(INTERVAL_MIN)
    }

    /// Whether the lease is renewed further. A read that does not begin in time is given up.
    pub(super) fn renews(&mut self, now: Instant) -> bool {
        let until = self.admitted.checked_add(self.target.lease.max(LINGER) * RENEWAL_DURATIONS_MAX);
        if until.is_some_and(|until| until <= now) && !self.has_begun() {
            self.hold = Hold::Gone("wait_expired");
        }
        !matches!(self.hold, Hold::Gone(_))
    }

    /// When the load is given up without a first answer of its producer.
    fn answer_due(&self) -> Instant {
        self.admitted + ANSWER_TIMEOUT.min(self.target.lease.max(LINGER))
    }

    /// Whether the producer may have granted the read.
    fn has_begun(&self) -> bool {
        matches!(self.read, ReadProgress::Asked | ReadProgress::Open)
    }

    fn job(&self, load: u64, kind: JobKind) -> Job {
        Job { load, target: Arc::clone(&self.target), consumer: self.consumer, kind, opened: false }
    }
}

/// A verdict that a request waits for.
#[derive(Debug)]
struct Asked {
    until: Instant,
    /// The verdict arrives by `take`.
    announce: bool,
}

/// What became of a handle at this engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HandleUse {
    Admitted,
    GivenBack,
}

/// Handles that this engine admitted or gave back, for a while.
#[derive(Debug, Default)]
struct RecentHandles {
    order: VecDeque<(Instant, Handle)>,
    known: HashMap<Handle, HandleUse>,
}

impl RecentHandles {
    fn insert(&mut self, handle: Handle, used: HandleUse, now: Instant) {
        let old = |at: Instant| now.saturating_duration_since(at) > RECENT_TIME;
        while let Some((at, first)) = self.order.front().copied() {
            if self.order.len() < RECENT_MAX && !old(at) {
                break;
            }
            self.order.pop_front();
            self.known.remove(&first);
        }
        if self.known.insert(handle, used).is_none() {
            self.order.push_back((now, handle));
        }
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct LoadTable {
    pub(super) loads: HashMap<u64, Load>,
    next: u64,
    /// Loads that further requests join.
    by_handle: HashMap<Handle, u64>,
    members: HashMap<Arc<str>, u64>,
    asked: HashMap<Arc<str>, Asked>,
    /// For the call of `done` in progress.
    answered: HashMap<Arc<str>, LoadVerdict>,
    /// For `take`.
    verdicts: Vec<(Arc<str>, LoadVerdict)>,
    /// Loads without members: verified ones until "done" is sent, others until the last read of an ended request is over.
    lingering: BTreeSet<(Instant, u64)>,
    /// Loads without a first answer, until they are given up. Answered ones are ignored.
    unanswered: BTreeSet<(Instant, u64)>,
    /// Requests that have ended while their workers read, and their loads.
    abandoned: HashMap<Arc<str>, u64>,
    recent: RecentHandles,
    pub(super) queues: ProducerQueues,
}

/// Why an operation did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnknownLoad;

impl LoadTable {
    /// Adds a request. `consumer` is random. The renewals of its lease begin.
    ///
    /// # Errors
    /// [`Invalid`] if other requests read other blocks by this handle, or the table is full.
    pub(super) fn admit(
        &mut self,
        id: &Arc<str>,
        child: bool,
        target: LoadTarget,
        consumer: u64,
        now: Instant,
    ) -> Result<(), Invalid> {
        if self.members.len() >= LOADS_MAX || self.members.contains_key(id) {
            return Err(Invalid { why: "too many loads, or a repeated request id".into(), stock: false });
        }
        if let Some(load) = self.by_handle.get(&target.handle) {
            let number = *load;
            let load = self.loads.get_mut(&number).expect("a joinable load is in the table");
            if load.target.producer != target.producer || load.target.blocks != target.blocks {
                return Err(Invalid::field("remote_block_ids", "those of other requests with this handle"));
            }
            load.members.insert(Arc::clone(id));
            load.several = true;
            load.last_arrival = now;
            self.linger(number, None);
            self.members.insert(Arc::clone(id), number);
            return Ok(());
        }
        self.recent.insert(target.handle, HandleUse::Admitted, now);
        self.next += 1;
        let (number, handle) = (self.next, target.handle);
        let load = Load {
            target: Arc::new(target),
            consumer,
            hold: Hold::Asking,
            read: ReadProgress::None,
            members: BTreeSet::from([Arc::clone(id)]),
            readers: BTreeSet::new(),
            left: false,
            lingers_until: None,
            several: child,
            verified: false,
            finishing: false,
            last_arrival: now,
            admitted: now,
        };
        self.queues.renew(&load.target.producer, now, number);
        self.unanswered.insert((load.answer_due(), number));
        self.loads.insert(number, load);
        self.by_handle.insert(handle, number);
        self.members.insert(Arc::clone(id), number);
        Ok(())
    }

    /// The producer's answer about the lease of a request.
    pub(super) fn hold(&self, id: &str) -> Option<Hold> {
        self.members.get(id).and_then(|load| self.loads.get(load)).map(|load| load.hold)
    }

    /// The workers begin to read. The producer is asked once per lease.
    pub(super) fn begin(&mut self, id: &str) -> Result<(), UnknownLoad> {
        let (id, number) = self.members.get_key_value(id).ok_or(UnknownLoad)?;
        let (id, number) = (Arc::clone(id), *number);
        if let Some(load) = self.loads.get_mut(&number) {
            load.readers.insert(id);
        }
        self.begin_load(number);
        Ok(())
    }

    fn begin_load(&mut self, number: u64) {
        let Some(load) = self.loads.get_mut(&number) else { return };
        if load.read == ReadProgress::None && !matches!(load.hold, Hold::Gone(_)) {
            load.read = ReadProgress::Asked;
            let job = load.job(number, JobKind::Begin);
            self.queues.push(job);
        }
    }

    /// The workers have read. Asks for the verdict.
    pub(super) fn done(&mut self, id: &Arc<str>, now: Instant) -> Result<(), UnknownLoad> {
        let Some(number) = self.members.get(&**id).copied() else {
            // The read of a request that has ended is over.
            return self.end_abandoned(id, now);
        };
        if self.asked.contains_key(id) {
            return Ok(());
        }
        self.asked.insert(Arc::clone(id), Asked { until: now + VERDICT_TIMEOUT, announce: false });
        self.begin_load(number);
        let Some(load) = self.loads.get_mut(&number) else { return Err(UnknownLoad) };
        load.readers.remove(id);
        // An open read of a draining lease may still be confirmed.
        let broken = match (load.read, load.hold) {
            (ReadProgress::Broken(reason), _) | (ReadProgress::None, Hold::Gone(reason)) => Some(reason),
            (ReadProgress::None | ReadProgress::Asked | ReadProgress::Open, _) => None,
        };
        if let Some(reason) = broken {
            self.settle(id, LoadVerdict::gone(reason), now);
            return Ok(());
        }
        let kind = if load.several {
            JobKind::Confirm(Arc::clone(id))
        } else {
            load.finishing = true;
            self.by_handle.remove(&load.target.handle);
            JobKind::Finish(Arc::clone(id))
        };
        let job = load.job(number, kind);
        self.queues.push(job);
        Ok(())
    }

    /// Whether the verdict on a request is not known yet.
    pub(super) fn is_asked(&self, id: &str) -> bool {
        self.asked.contains_key(id)
    }

    /// The verdict for the call of `done`; `None` if it arrives by `take`.
    pub(super) fn collect(&mut self, id: &str) -> Option<LoadVerdict> {
        if let Some(verdict) = self.answered.remove(id) {
            return Some(verdict);
        }
        match self.asked.get_mut(id) {
            Some(asked) => {
                asked.announce = true;
                None
            }
            None => Some(LoadVerdict::gone("unknown")),
        }
    }

    /// Verdicts for `take`, each once.
    pub(super) fn take_verdicts(&mut self) -> Vec<(Arc<str>, LoadVerdict)> {
        std::mem::take(&mut self.verdicts)
    }

    /// Whether `take` has something to return.
    pub(super) fn has_verdicts(&self) -> bool {
        !self.verdicts.is_empty()
    }

    /// Delivers a verdict and removes the request. The last request of a load ends it.
    pub(super) fn settle(&mut self, id: &Arc<str>, verdict: LoadVerdict, now: Instant) {
        let Some(asked) = self.asked.remove(id) else { return };
        if asked.announce {
            self.verdicts.push((Arc::clone(id), verdict));
        } else {
            self.answered.insert(Arc::clone(id), verdict);
        }
        let Some(number) = self.members.remove(id) else { return };
        let Some(load) = self.loads.get_mut(&number) else { return };
        load.members.remove(id);
        load.verified |= verdict.valid;
        if load.members.is_empty() {
            let reason = if verdict.valid { LEASE_OVER } else { verdict.reason };
            self.end_load(number, reason, Some(LOAD_FAILED), now);
        }
    }

    /// Ends a load without members. `reason` is that of the last failure. `discard` is the reason of the release if the
    /// read is over, and `None` if the workers may still read.
    fn end_load(&mut self, number: u64, reason: &str, discard: Option<&str>, now: Instant) {
        let Some(load) = self.loads.get_mut(&number) else { return };
        let finished = load.finishing && load.verified;
        let over = load.hold == Hold::Gone(LEASE_OVER) || (reason == LEASE_OVER && !load.verified);
        if load.verified && !finished && !over {
            let done = if load.several { now.max(load.last_arrival + LINGER) } else { now };
            let due = if load.readers.is_empty() { done } else { now + ABANDONED_KEPT };
            self.linger(number, Some(due));
            return;
        }
        if !load.readers.is_empty() {
            // The lease drains at the producer until the last read is over.
            (load.left, load.hold) = (true, Hold::Gone(LEASE_OVER));
            let leave = notice(load, NoticeKind::Leave, discard.unwrap_or(reason), now);
            self.forget_handle(number);
            self.linger(number, Some(now + ABANDONED_KEPT));
            if !over {
                self.queues.notify(leave);
            }
            return;
        }
        let Some(load) = self.remove(number) else { return };
        if finished {
            return;
        }
        if load.has_begun() && discard.is_some() {
            // A draining lease need not wait for this reader.
            self.queues.notify(notice(&load, NoticeKind::GiveUp, LOAD_FAILED, now));
        }
        if over {
            return;
        }
        self.queues.notify(notice(&load, NoticeKind::Leave, discard.unwrap_or(reason), now));
    }

    /// Changes when a load without members ends.
    fn linger(&mut self, number: u64, due: Option<Instant>) {
        let Some(load) = self.loads.get_mut(&number) else { return };
        if let Some(before) = std::mem::replace(&mut load.lingers_until, due) {
            self.lingering.remove(&(before, number));
        }
        self.lingering.extend(due.map(|due| (due, number)));
    }

    /// No further request joins, and no first answer is waited for.
    fn forget_handle(&mut self, number: u64) {
        let Some(load) = self.loads.get(&number) else { return };
        self.unanswered.remove(&(load.answer_due(), number));
        if self.by_handle.get(&load.target.handle) == Some(&number) {
            self.by_handle.remove(&load.target.handle);
        }
    }

    fn remove(&mut self, number: u64) -> Option<Load> {
        self.forget_handle(number);
        self.linger(number, None);
        let load = self.loads.remove(&number)?;
        for id in &load.readers {
            self.abandoned.remove(id);
        }
        Some(load)
    }

    /// A request will not use its load. With the reason `load_failed`, and by a repetition, the workers' read is over.
    pub(super) fn leave(&mut self, id: &Arc<str>, reason: &str, now: Instant) -> Result<(), UnknownLoad> {
        let Some(number) = self.members.remove(id) else { return self.end_abandoned(id, now) };
        self.asked.remove(id);
        let Some(load) = self.loads.get_mut(&number) else { return Ok(()) };
        load.members.remove(id);
        let discard = (reason == LOAD_FAILED).then_some(reason);
        if discard.is_some() || self.abandoned.len() >= LOADS_MAX {
            load.readers.remove(id);
        } else if load.readers.contains(id) {
            self.abandoned.insert(Arc::clone(id), number);
        }
        if load.members.is_empty() && !load.finishing {
            // Otherwise the verdict that is on its way ends the load.
            self.end_load(number, reason, discard, now);
        }
        Ok(())
    }

    /// The workers' read of a request that has ended is over. After the last one the producer need not wait any more.
    fn end_abandoned(&mut self, id: &str, now: Instant) -> Result<(), UnknownLoad> {
        let number = self.abandoned.remove(id).ok_or(UnknownLoad)?;
        let Some(load) = self.loads.get_mut(&number) else { return Ok(()) };
        load.readers.remove(id);
        if !load.members.is_empty() || !load.readers.is_empty() {
            return Ok(());
        }
        if load.left {
            if let Some(load) = self.remove(number) {
                self.queues.notify(notice(&load, NoticeKind::GiveUp, "consumer_aborted", now));
            }
        } else {
            self.end_load(number, LEASE_OVER, Some(LOAD_FAILED), now);
        }
        Ok(())
    }

    /// A lease of a request that was refused before it was admitted: the producer gets it back, once. False: a request
    /// of this engine has or had it, and has settled it or will.
    pub(super) fn give_back(
        &mut self,
        target: &LoadTarget,
        consumer: u64,
        reason: &str,
        now: Instant,
    ) -> bool {
        if self.by_handle.contains_key(&target.handle) {
            return false;
        }
        match self.recent.known.get(&target.handle) {
            Some(HandleUse::Admitted) => return false,
            Some(HandleUse::GivenBack) => {}
            None => {
                self.recent.insert(target.handle, HandleUse::GivenBack, now);
                self.queues.notify(Notice::new(target, consumer, NoticeKind::Leave, reason, now));
            }
        }
        true
    }

    /// The producer has answered "done" for the only request of a load, which may have left meanwhile.
    pub(super) fn finish_answered(&mut self, number: u64, id: &Arc<str>, verdict: LoadVerdict, now: Instant) {
        self.settle(id, verdict, now);
        let Some(load) = self.loads.get_mut(&number).filter(|load| load.members.is_empty()) else { return };
        load.verified |= verdict.valid;
        self.end_load(number, verdict.reason, Some(LOAD_FAILED), now);
    }

    /// Applies passed deadlines: verdicts and first answers that are too late, and "done" for lingering loads.
    pub(super) fn tick(&mut self, now: Instant) {
        let late: Vec<_> =
            self.asked.iter().filter(|(_, asked)| asked.until <= now).map(|(id, _)| Arc::clone(id)).collect();
        late.iter().for_each(|id| self.settle(id, LoadVerdict::gone("timeout"), now));
        while let Some(entry) = self.unanswered.first().copied().filter(|(due, _)| *due <= now) {
            self.unanswered.remove(&entry);
            let Some(load) = self.loads.get_mut(&entry.1) else { continue };
            if load.hold == Hold::Asking && !load.has_begun() {
                load.hold = Hold::Gone(UNREACHABLE);
                tracing::warn!(
                    parent: lease_span!(load.target.handle), event = "handoff_producer_silent",
                    producer = &*load.target.producer.host, port = load.target.producer.port,
                    "handoff given up, no answer of its producer in time"
                );
            }
        }
        while let Some((due, number)) = self.lingering.first().copied().filter(|(due, _)| *due <= now) {
            self.lingering.remove(&(due, number));
            if let Some(load) = self.remove(number).filter(|load| !load.left) {
                self.queues.notify(notice(&load, NoticeKind::Done, "transfer_done", now));
            }
        }
    }

    /// When [`Self::tick`] has something to do.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let asked = self.asked.values().map(|asked| asked.until).min();
        let lingering = self.lingering.first().map(|(due, _)| *due);
        let unanswered = self.unanswered.first().map(|(due, _)| *due);
        asked.into_iter().chain(lingering).chain(unanswered).min()
    }

    /// Ends every load, at shutdown.
    pub(super) fn leave_all(&mut self, now: Instant) {
        let all: Vec<_> = self.members.keys().cloned().collect();
        for id in all {
            // Every id is in the table.
            let _ = self.leave(&id, "consumer_aborted", now);
        }
        while let Some((due, number)) = self.lingering.pop_first() {
            self.lingering.insert((due.min(now), number));
            self.tick(now);
        }
    }

    /// Requests in the table.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }
}

/// A notice about a load.
fn notice(load: &Load, kind: NoticeKind, reason: &str, now: Instant) -> Notice {
    Notice::new(&load.target, load.consumer, kind, reason, now)
}

#[cfg(test)]
mod tests;
