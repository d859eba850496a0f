//! The producer's leases: the [`Ledger`] behind a lock, with a clock.
//!
//! Leases are served off the step loop: transports, the release endpoint and the expiry timer call this service from
//! their own threads. A long forward pass therefore delays neither heartbeats nor releases, and an engine with leases
//! but no work sleeps. Blocks of ended leases go to the [`LeaseOwner`], whose engine alone changes its block pool.
//!
//! The services of one process (data-parallel ranks) are linked. If a release or heartbeat arrives at the side
//! channel of another rank, the service with the lease answers.
//!
//! Every expired lease produces one log line and one count, with the request, the finished and the expected readers,
//! and the seconds held.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use baton_connector::lease::{CloseCause, LeaseTerms, State};
use baton_connector::ledger::{
    ClosedLease, HeartbeatReply, LeaseOpenError, LeaseSpec, LeaseView, Ledger, LedgerCounts, ReadError,
    ReleaseReply,
};
use baton_connector::multi::first_reply;
use baton_connector::transport::{Readiness, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, Reader, RequestId, Time};
use serde_json::{Value, json};

use crate::event_log::{RankLog, RequestEvent};
use crate::lease_span;

/// Limit of the leases in an answer to `GET /debug/kv`.
const LEASES_SHOWN: usize = 1_000;

/// The engine behind the leases: it counts them and owns their blocks.
///
/// The service calls its owner without the ledger's lock, on the thread that opened or ended a lease. That is the
/// step loop, a transport thread, the release endpoint or the expiry timer. Several threads may call at once. An
/// implementation returns without waiting, because transports and the timer wait for it.
pub trait LeaseOwner: Send + Sync {
    /// A lease over this many blocks was opened. `growing`: its prefill still computes. The thread is the one that
    /// called [`LeaseService::open`] or [`LeaseService::open_growing`]. The lease may have ended before this call.
    fn lease_opened(&self, blocks: usize, growing: bool);

    /// Counts the end of a lease, before its event and its log line are written. The default counts nothing.
    fn count_closed(&self, lease: &ClosedLease) {
        let _ = lease;
    }

    /// Receives ended leases, in the order of their ends within one call. The owner frees their blocks. Each lease
    /// arrives once, after its event and its log line.
    fn leases_closed(&self, closed: Vec<ClosedLease>);

    /// Receives leases that end before their prefill does. No consumer needs the prefill any more.
    fn leases_unfinished(&self, handles: Vec<Handle>);
}

/// See the module's documentation.
pub struct LeaseService {
    ledger: Mutex<Ledger>,
    /// Wakes the timer for an earlier deadline, or at the end.
    deadline_moved: Condvar,
    /// Wakes readers that wait for blocks of a growing lease.
    blocks_ready: Condvar,
    start: Instant,
    epoch: Epoch,
    fingerprint: u64,
    owner: Arc<dyn LeaseOwner>,
    log: RankLog,
    /// The services of the other ranks of this process.
    siblings: OnceLock<Vec<Weak<LeaseService>>>,
}

impl LeaseService {
    /// The service of a new engine.
    #[must_use]
    pub fn new(
        terms: LeaseTerms,
        epoch: Epoch,
        fingerprint: u64,
        owner: Arc<dyn LeaseOwner>,
        log: RankLog,
    ) -> Self {
        Self {
            ledger: Mutex::new(Ledger::new(terms)),
            deadline_moved: Condvar::new(),
            blocks_ready: Condvar::new(),
            start: Instant::now(),
            epoch,
            fingerprint,
            owner,
            log,
            siblings: OnceLock::new(),
        }
    }

    /// Links the services of one process; called once.
    pub fn link_siblings(services: &[Arc<Self>]) {
        for (at, service) in services.iter().enumerate() {
            let others = services.iter().enumerate().filter(|(other, _)| *other != at);
            // A second call changes nothing.
            let _ = service.siblings.set(others.map(|(_, other)| Arc::downgrade(other)).collect());
        }
    }

    /// Ends a lease of this rank. A lease of another rank is unknown.
    pub fn release_here(&self, handle: Handle, reason: &str) -> ReleaseReply {
        let reply = self.with_ledger(|ledger, now| ledger.release(handle, reason, now));
        self.deadline_moved.notify_one();
        reply
    }

    fn siblings(&self) -> impl Iterator<Item = Arc<Self>> {
        self.siblings.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    /// Runs the expiry timer until `stop` returns true, on its own thread.
    pub fn run_timer(&self, stop: impl Fn() -> bool) {
        /// The longest sleep of the timer, so that it notices `stop`.
        const TIMER_SLEEP_MAX: Duration = Duration::from_millis(200);
        let mut ledger = self.lock();
        while !stop() {
            let now = self.now();
            ledger.tick(now);
            let settled = ledger.take_closed();
            if !settled.is_empty() {
                drop(ledger);
                self.deliver_settled(settled);
                ledger = self.lock();
                continue;
            }
            let nap = ledger.next_deadline().map_or(TIMER_SLEEP_MAX, |due| {
                due.since(now).clamp(Duration::from_micros(200), TIMER_SLEEP_MAX)
            });
            let (back, _) = self
                .deadline_moved
                .wait_timeout(ledger, nap)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            ledger = back;
        }
    }

    /// Leases the blocks of a finished request. Returns the lifetime of the lease.
    ///
    /// # Errors
    /// [`LeaseOpenError`] returns the grant.
    pub fn open(&self, grant: LeaseSpec) -> Result<Duration, LeaseOpenError> {
        self.open_with(grant, false, Ledger::open)
    }

    /// Leases the blocks of a request that still computes. The first `ready` blocks are final.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_growing(&self, grant: LeaseSpec, ready: usize) -> Result<Duration, LeaseOpenError> {
        self.open_with(grant, true, |ledger, grant, now| ledger.open_growing(grant, ready, now))
    }

    fn open_with(
        &self,
        grant: LeaseSpec,
        growing: bool,
        open: impl FnOnce(&mut Ledger, LeaseSpec, Time) -> Result<Duration, LeaseOpenError>,
    ) -> Result<Duration, LeaseOpenError> {
        let (blocks, request) = (grant.blocks.len(), grant.request.clone());
        let opened = self.with_ledger(|ledger, now| {
            let opened = open(ledger, grant, now);
            if let Ok(left) = opened {
                // Emitted under the lock, before the lease can end.
                self.log.emit(
                    &request,
                    0,
                    RequestEvent::LeaseOpened { blocks, left: (!growing).then_some(left) },
                );
            }
            opened
        });
        self.deadline_moved.notify_one();
        if opened.is_ok() {
            self.owner.lease_opened(blocks, growing);
        }
        opened
    }

    /// More blocks of a growing lease are final: the first `ready`.
    pub fn grow(&self, handle: Handle, ready: usize) {
        self.lock().grow(handle, ready);
        self.blocks_ready.notify_all();
    }

    /// All blocks of a growing lease are final, and its time runs. False: it has ended.
    pub fn seal(&self, handle: Handle) -> bool {
        let sealed = self.with_ledger(|ledger, now| ledger.seal(handle, now));
        self.blocks_ready.notify_all();
        self.deadline_moved.notify_one();
        sealed
    }

    /// As in [`baton_connector::transport::Producer`], for every rank alike.
    pub fn await_ready(&self, handle: Handle, reader: Reader, upto: usize, within: Duration) -> Readiness {
        let until = Instant::now() + within;
        let mut ledger = self.lock();
        loop {
            let readiness = ledger.readiness(handle, reader, upto);
            let left = until.saturating_duration_since(Instant::now());
            if readiness != Readiness::NotYet || left.is_zero() {
                return readiness;
            }
            let waited = self.blocks_ready.wait_timeout(ledger, left);
            ledger = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// Ends every lease of a request and remembers that the request was aborted.
    pub fn release_request(&self, request: &RequestId, reason: &str) -> ReleaseReply {
        self.with_ledger(|ledger, now| ledger.release_request(request, reason, now))
    }

    /// Whether a request was released before it was known.
    #[must_use]
    pub fn was_released_early(&self, request: &RequestId) -> bool {
        self.lock().was_released_early(request)
    }

    /// Releases every live lease, at the end of a drain.
    pub fn release_all(&self, reason: &str) {
        self.with_ledger(|ledger, now| {
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

    /// Live leases, oldest first, with shortened handles for display.
    #[must_use]
    pub fn view(&self) -> Vec<LeaseView> {
        self.with_ledger(|ledger, now| ledger.view(now))
    }

    /// Counts of opened leases and of repeated or late messages.
    #[must_use]
    pub fn counts(&self) -> LedgerCounts {
        self.lock().counts()
    }

    fn with_ledger<T>(&self, act: impl FnOnce(&mut Ledger, Time) -> T) -> T {
        let mut ledger = self.lock();
        let result = act(&mut ledger, self.now());
        let (settled, unfinished) = (ledger.take_closed(), ledger.take_unfinished());
        drop(ledger);
        if !settled.is_empty() {
            self.deliver_settled(settled);
        }
        if !unfinished.is_empty() {
            self.blocks_ready.notify_all();
            self.owner.leases_unfinished(unfinished);
        }
        result
    }

    fn deliver_settled(&self, settled: Vec<ClosedLease>) {
        for lease in &settled {
            self.owner.count_closed(lease);
            let ended = RequestEvent::LeaseEnded {
                reason: lease.reason.clone(),
                blocks: lease.blocks.len(),
                readers: lease.readers,
                held: lease.lifetime,
            };
            self.log.emit(&lease.request, 0, ended);
            let (done, expected) = lease.readers;
            let held = lease.lifetime.as_secs_f64();
            match lease.cause {
                CloseCause::Expired => tracing::warn!(
                    parent: lease_span!(lease.handle), event = "lease_expired",
                    request = %lease.request, blocks = lease.blocks.len(), done, expected, held,
                    "lease expired before its blocks were fetched or released"
                ),
                CloseCause::Fetched | CloseCause::Released => tracing::debug!(
                    parent: lease_span!(lease.handle), event = "lease_ended",
                    request = %lease.request, blocks = lease.blocks.len(), done, expected, held,
                    reason = &*lease.reason, "lease ended"
                ),
            }
        }
        self.owner.leases_closed(settled);
    }

    fn now(&self) -> Time {
        Time::ZERO.after(self.start.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The part of [`baton_connector::transport::Producer`] that all KV ranks share, because a lease covers a block in
/// every rank.
impl LeaseService {
    /// The engine's epoch.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The fingerprint of model and shape: [`baton_connector::KvLayout::fingerprint`].
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// As in [`baton_connector::transport::Producer`], for every rank alike.
    ///
    /// # Errors
    /// [`TransportError::Gone`] or [`TransportError::Refused`].
    pub fn begin_read(
        &self,
        handle: Handle,
        reader: Reader,
        first: usize,
        count: usize,
    ) -> Result<Vec<BlockId>, TransportError> {
        self.with_ledger(|ledger, now| ledger.begin_read(handle, reader, first, count, now)).map_err(
            |refusal| match refusal {
                ReadError::Gone => TransportError::Gone,
                ReadError::Busy => TransportError::Refused("too many readers at once".into()),
                ReadError::Range { first, count, blocks } => TransportError::Refused(
                    format!(
                        "entries {first}..{} are not in a block table of {blocks}",
                        first.saturating_add(count)
                    )
                    .into(),
                ),
            },
        )
    }

    /// Whether this reader may still read the lease.
    #[must_use]
    pub fn is_read_live(&self, handle: Handle, reader: Reader) -> bool {
        self.lock().is_read_live(handle, reader)
    }

    /// Finishes a read that has received all blocks.
    pub fn finish_read(&self, handle: Handle, reader: Reader) -> Verdict {
        self.with_ledger(|ledger, now| ledger.finish_read(handle, reader, now))
    }

    /// Fails a read whose connection broke, or which was abandoned.
    pub fn fail_read(&self, handle: Handle, reader: Reader) {
        self.with_ledger(|ledger, now| ledger.fail_read(handle, reader, now));
    }

    /// The answer of this service, or of the first of its siblings that has one.
    fn first_that_knows<R>(&self, ask: impl Fn(&Self) -> Option<R>) -> Option<R> {
        let siblings: Vec<Arc<Self>> = self.siblings().collect();
        first_reply(std::iter::once(self).chain(siblings.iter().map(|service| &**service)), ask)
    }

    /// Ends a lease of this engine early.
    pub fn release(&self, handle: Handle, reason: &str) -> ReleaseReply {
        let release = |service: &Self| {
            let reply = service.release_here(handle, reason);
            (reply != ReleaseReply::Unknown).then_some(reply)
        };
        self.first_that_knows(release).unwrap_or(ReleaseReply::Unknown)
    }

    /// Removes one of a lease's consumers, which will not read it (any more).
    pub fn leave(&self, handle: Handle, consumer: u64, reason: &str) -> ReleaseReply {
        let leave = |service: &Self| {
            let reply = service.with_ledger(|ledger, now| ledger.leave(handle, consumer, reason, now));
            service.deadline_moved.notify_one();
            (reply != ReleaseReply::Unknown).then_some(reply)
        };
        self.first_that_knows(leave).unwrap_or(ReleaseReply::Unknown)
    }

    /// Renews a lease of this engine.
    pub fn heartbeat(&self, handle: Handle) -> HeartbeatReply {
        let beat = |service: &Self| {
            let reply = service.with_ledger(|ledger, now| ledger.heartbeat(handle, now));
            (reply != HeartbeatReply::Gone).then_some(reply)
        };
        self.first_that_knows(beat).unwrap_or(HeartbeatReply::Gone)
    }
}

/// The first leases of [`LeaseService::view`], as `GET /debug/kv` shows them.
#[must_use]
pub fn oldest_leases(leases: &[LeaseView]) -> Vec<Value> {
    leases.iter().take(LEASES_SHOWN).map(lease_json).collect()
}

fn lease_json(lease: &LeaseView) -> Value {
    let state = match lease.state {
        State::Growing => "growing",
        State::Offered => "offered",
        State::Reading => "reading",
        State::Draining(_) => "draining",
        State::Closed(_) => "closed",
    };
    // A growing lease has no time limit.
    let left = (lease.state != State::Growing).then_some(lease.remaining.as_millis() as u64);
    json!({
        "request_id": lease.request.as_str(), "blocks": lease.blocks, "state": state,
        "age_ms": lease.age.as_millis() as u64, "left_ms": left,
        "readers_done": lease.readers.0, "readers_expected": lease.readers.1,
    })
}

#[cfg(test)]
mod tests;
