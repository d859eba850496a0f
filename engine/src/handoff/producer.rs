//! The producer's leases as the rest of the process sees them: the [`Ledger`] behind a lock, with a clock.
//!
//! Served off the step loop: transports, the release verb and the expiry timer call it from their own threads,
//! so a forward pass of any length delays neither heartbeats nor releases, and an engine with leases but no work
//! sleeps. Blocks of ended leases go to the step loop's mailbox; it alone touches the block pool.
//!
//! The desks of one process (data-parallel ranks) know each other: a release or heartbeat that arrives at the side
//! channel of another rank is answered by the desk that holds the lease.
//!
//! Every lease that ends by expiry leaves one log line and one count, with the request, the readers that
//! finished of those expected, and the seconds held.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use baton_connector::lease::{Cause, LeaseTerms};
use baton_connector::ledger::{
    Grant, HeartbeatReply, LeaseView, Ledger, LedgerCounts, OpenRefused, ReadRefusal, ReleaseReply,
};
use baton_connector::multi::first_that_knows;
use baton_connector::transport::{Readiness, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, Reader, RequestId, Time};

use crate::engine_core::mailbox::Mailbox;
use crate::event_log::{RankLog, What};
use crate::metrics::EngineMetrics;

/// See the module's documentation.
pub struct LeaseDesk {
    ledger: Mutex<Ledger>,
    /// Wakes the timer when an earlier deadline has appeared, or at the end.
    deadline_moved: Condvar,
    /// Wakes readers that wait for blocks of a growing lease.
    grown: Condvar,
    start: Instant,
    epoch: Epoch,
    fingerprint: u64,
    mailbox: Arc<Mailbox>,
    metrics: Arc<EngineMetrics>,
    log: RankLog,
    /// The desks of the other ranks of this process.
    siblings: OnceLock<Vec<Weak<LeaseDesk>>>,
}

impl LeaseDesk {
    /// A desk for a fresh engine.
    #[must_use]
    pub fn new(
        terms: LeaseTerms,
        epoch: Epoch,
        fingerprint: u64,
        mailbox: Arc<Mailbox>,
        metrics: Arc<EngineMetrics>,
        log: RankLog,
    ) -> Self {
        Self {
            ledger: Mutex::new(Ledger::new(terms)),
            deadline_moved: Condvar::new(),
            grown: Condvar::new(),
            start: Instant::now(),
            epoch,
            fingerprint,
            mailbox,
            metrics,
            log,
            siblings: OnceLock::new(),
        }
    }

    /// Makes the desks of one process known to each other; once.
    pub fn introduce(desks: &[Arc<Self>]) {
        for (at, desk) in desks.iter().enumerate() {
            let others = desks.iter().enumerate().filter(|(other, _)| *other != at);
            // A second introduction would change nothing.
            let _ = desk.siblings.set(others.map(|(_, other)| Arc::downgrade(other)).collect());
        }
    }

    /// Ends a lease of this rank; one of another rank is unknown.
    pub fn release_here(&self, handle: Handle, reason: &str) -> ReleaseReply {
        let reply = self.with(|ledger, now| ledger.release(handle, reason, now));
        self.deadline_moved.notify_one();
        reply
    }

    fn siblings(&self) -> impl Iterator<Item = Arc<Self>> {
        self.siblings.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// Runs the expiry timer until `stop` says so; on a thread of its own.
    pub fn run_timer(&self, stop: impl Fn() -> bool) {
        /// How long the timer sleeps at most, so that it notices `stop`.
        const NAP: Duration = Duration::from_millis(200);
        let mut ledger = self.lock();
        while !stop() {
            let now = self.now();
            ledger.tick(now);
            let settled = ledger.take_settled();
            if !settled.is_empty() {
                drop(ledger);
                self.hand_over(settled);
                ledger = self.lock();
                continue;
            }
            let nap = ledger
                .next_deadline()
                .map_or(NAP, |due| due.since(now).clamp(Duration::from_micros(200), NAP));
            let (back, _) = self
                .deadline_moved
                .wait_timeout(ledger, nap)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            ledger = back;
        }
    }

    /// Lends the blocks of a finished request; says how long the lease lives.
    ///
    /// # Errors
    /// [`OpenRefused`] gives the grant back.
    pub fn open(&self, grant: Grant) -> Result<Duration, OpenRefused> {
        self.opened(grant, false, Ledger::open)
    }

    /// Lends the blocks of a request that still computes, of which the first `ready` are final.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_growing(&self, grant: Grant, ready: usize) -> Result<Duration, OpenRefused> {
        let opened = self.opened(grant, true, |ledger, grant, now| ledger.open_growing(grant, ready, now));
        if opened.is_ok() {
            self.metrics.early_lease();
        }
        opened
    }

    fn opened(
        &self,
        grant: Grant,
        growing: bool,
        open: impl FnOnce(&mut Ledger, Grant, Time) -> Result<Duration, OpenRefused>,
    ) -> Result<Duration, OpenRefused> {
        let (blocks, request) = (grant.blocks.len(), grant.request.clone());
        let opened = self.with(|ledger, now| {
            let opened = open(ledger, grant, now);
            if let Ok(left) = opened {
                // Before anybody can end it.
                self.log.tell(&request, 0, What::Lent { blocks, left: (!growing).then_some(left) });
            }
            opened
        });
        self.deadline_moved.notify_one();
        if opened.is_ok() {
            self.metrics.lease_opened(blocks as u64);
        }
        opened
    }

    /// More blocks of a growing lease are final: the first `ready`.
    pub fn grow(&self, handle: Handle, ready: usize) {
        self.lock().grow(handle, ready);
        self.grown.notify_all();
    }

    /// All blocks of a growing lease are final, and its time runs. False: it has ended.
    pub fn seal(&self, handle: Handle) -> bool {
        let sealed = self.with(|ledger, now| ledger.seal(handle, now));
        self.grown.notify_all();
        self.deadline_moved.notify_one();
        sealed
    }

    /// As [`baton_connector::transport::Producer`] says, for every rank alike.
    pub fn await_ready(&self, handle: Handle, reader: Reader, upto: usize, within: Duration) -> Readiness {
        let until = Instant::now() + within;
        let mut ledger = self.lock();
        loop {
            let readiness = ledger.readiness(handle, reader, upto);
            let left = until.saturating_duration_since(Instant::now());
            if readiness != Readiness::NotYet || left.is_zero() {
                return readiness;
            }
            let waited = self.grown.wait_timeout(ledger, left);
            ledger = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Ends every lease of a request and keeps in mind that it was given up.
    pub fn release_request(&self, request: &RequestId, reason: &str) -> ReleaseReply {
        self.with(|ledger, now| ledger.release_request(request, reason, now))
    }

    /// Whether a request was given up before it was known.
    #[must_use]
    pub fn was_released_early(&self, request: &RequestId) -> bool {
        self.lock().was_released_early(request)
    }

    /// Releases every live lease: the end of a drain.
    pub fn release_all(&self, reason: &str) {
        self.with(|ledger, now| {
            for handle in ledger.handles() {
                ledger.release(handle, reason, now);
            }
        });
    }

    /// Live leases.
    #[must_use]
    pub fn live(&self) -> usize {
        self.lock().len()
    }

    /// Live leases, oldest first, for people; handles are shortened.
    #[must_use]
    pub fn view(&self) -> Vec<LeaseView> {
        self.with(|ledger, now| ledger.view(now))
    }

    /// What was opened, repeated or late so far.
    #[must_use]
    pub fn counts(&self) -> LedgerCounts {
        self.lock().counts()
    }

    fn with<T>(&self, act: impl FnOnce(&mut Ledger, Time) -> T) -> T {
        let mut ledger = self.lock();
        let result = act(&mut ledger, self.now());
        let (settled, unfinished) = (ledger.take_settled(), ledger.take_unfinished());
        drop(ledger);
        if !settled.is_empty() {
            self.hand_over(settled);
        }
        if !unfinished.is_empty() {
            self.grown.notify_all();
            self.mailbox.unfinished(unfinished);
        }
        result
    }

    fn hand_over(&self, settled: Vec<baton_connector::ledger::Settled>) {
        for lease in &settled {
            self.metrics.lease_settled(lease);
            let ended = What::LeaseEnded {
                reason: lease.reason.clone(),
                blocks: lease.blocks.len(),
                readers: lease.readers,
                held: lease.held,
            };
            self.log.tell(&lease.request, 0, ended);
            let (done, expected) = lease.readers;
            let held = lease.held.as_secs_f64();
            match lease.cause {
                Cause::Expired => tracing::warn!(
                    request = %lease.request, blocks = lease.blocks.len(), done, expected, held,
                    "lease expired before its blocks were fetched or released"
                ),
                Cause::Fetched | Cause::Released => tracing::debug!(
                    request = %lease.request, blocks = lease.blocks.len(), done, expected, held,
                    reason = &*lease.reason, "lease ended"
                ),
            }
        }
        self.mailbox.settled(settled);
    }

    fn now(&self) -> Time {
        Time::ZERO.after(self.start.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// What the transports of all KV ranks ask: a lease covers a block in every rank, so they share the desk.
impl LeaseDesk {
    /// The engine's epoch.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Of model and shape: [`baton_connector::KvLayout::fingerprint`].
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// As [`baton_connector::transport::Producer`] says, for every rank alike.
    ///
    /// # Errors
    /// [`TransportError::Gone`] or [`TransportError::Refused`].
    pub fn read_begun(
        &self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    ) -> Result<Vec<BlockId>, TransportError> {
        self.with(|ledger, now| ledger.read_begun(handle, reader, first, count, now)).map_err(|refusal| {
            match refusal {
                ReadRefusal::Gone => TransportError::Gone,
                ReadRefusal::Busy => TransportError::Refused("too many readers at once".into()),
                ReadRefusal::Range { first, count, blocks } => TransportError::Refused(
                    format!(
                        "entries {first}..{} are not in a block table of {blocks}",
                        first.saturating_add(count)
                    )
                    .into(),
                ),
            }
        })
    }

    /// Whether the lease still lets this reader read.
    #[must_use]
    pub fn read_live(&self, handle: Handle, reader: Reader) -> bool {
        self.lock().read_live(handle, reader)
    }

    /// The reader says that it has everything.
    pub fn read_done(&self, handle: Handle, reader: Reader) -> Verdict {
        self.with(|ledger, now| ledger.read_done(handle, reader, now))
    }

    /// The reader's connection broke, or it gave up.
    pub fn read_failed(&self, handle: Handle, reader: Reader) {
        self.with(|ledger, now| ledger.read_failed(handle, reader, now));
    }

    /// The answer of this desk, or of the first of its siblings that has one.
    fn first_that_knows<R>(&self, ask: impl Fn(&Self) -> Option<R>) -> Option<R> {
        let siblings: Vec<Arc<Self>> = self.siblings().collect();
        first_that_knows(std::iter::once(self).chain(siblings.iter().map(|desk| &**desk)), ask)
    }

    /// Ends a lease of this engine early.
    pub fn release(&self, handle: Handle, reason: &str) -> ReleaseReply {
        let release = |desk: &Self| {
            let reply = desk.release_here(handle, reason);
            (reply != ReleaseReply::Unknown).then_some(reply)
        };
        self.first_that_knows(release).unwrap_or(ReleaseReply::Unknown)
    }

    /// One of a lease's consumers will not read (any more).
    pub fn leave(&self, handle: Handle, consumer: u64, reason: &str) -> ReleaseReply {
        let leave = |desk: &Self| {
            let reply = desk.with(|ledger, now| ledger.leave(handle, consumer, reason, now));
            desk.deadline_moved.notify_one();
            (reply != ReleaseReply::Unknown).then_some(reply)
        };
        self.first_that_knows(leave).unwrap_or(ReleaseReply::Unknown)
    }

    /// Renews a lease of this engine.
    pub fn heartbeat(&self, handle: Handle) -> HeartbeatReply {
        let beat = |desk: &Self| {
            let reply = desk.with(|ledger, now| ledger.heartbeat(handle, now));
            (reply != HeartbeatReply::Gone).then_some(reply)
        };
        self.first_that_knows(beat).unwrap_or(HeartbeatReply::Gone)
    }
}

#[cfg(test)]
mod tests;
