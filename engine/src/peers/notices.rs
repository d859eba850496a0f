//! Release notices to producers: delivered at least once, repeated until answered or past the lease's expiry
//! (after which the producer has its blocks back anyway).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::Rank;
use baton_connector::transport::{Transport, TransportError};

use super::FetchTarget;
use crate::metrics::EngineMetrics;

/// Notices that wait for an answer. One more is dropped with a log line; its lease then ends by expiry.
pub const NOTICES_MAX: usize = 16_384;

/// Pause after the first failure; doubled each time up to [`PAUSE_MAX`].
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

struct Notice {
    target: FetchTarget,
    /// Which of the producer's ranks is told: any of them will do, and one that does not answer is followed by the
    /// next.
    rank: Rank,
    reason: &'static str,
    due: Instant,
    pause: Duration,
    give_up: Instant,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Notice>,
    in_flight: usize,
}

#[derive(Default)]
pub(super) struct Notices {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Notices {
    pub(super) fn add(&self, target: FetchTarget, reason: &'static str) {
        let mut queue = self.lock();
        if queue.waiting.len() >= NOTICES_MAX {
            tracing::warn!(reason, "too many release notices wait; this lease ends by expiry");
            return;
        }
        let now = Instant::now();
        // Heartbeats have renewed the lease since the handoff arrived; it lives at most this long from now.
        let give_up = now + target.lease;
        queue.waiting.push_back(Notice {
            target,
            rank: Rank(0),
            reason,
            due: now,
            pause: PAUSE_FIRST,
            give_up,
        });
        drop(queue);
        self.changed.notify_all();
    }

    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    /// Waits until every notice is answered or given up, at most until `deadline`.
    pub(super) fn drain(&self, deadline: Instant) {
        let mut queue = self.lock();
        while !queue.waiting.is_empty() || queue.in_flight > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn run(&self, transport: &dyn Transport, metrics: &EngineMetrics, stop: &AtomicBool) {
        while !stop.load(Ordering::Acquire) {
            let Some(mut notice) = self.next() else { continue };
            let answered = deliver(transport, &notice);
            let mut queue = self.lock();
            queue.in_flight -= 1;
            match answered {
                Ok(label) => metrics.notice(notice.reason, label),
                Err(error) if Instant::now() >= notice.give_up => {
                    tracing::warn!(%error, reason = notice.reason, "release not delivered before the lease's expiry");
                    metrics.notice(notice.reason, "undelivered");
                }
                Err(_) => {
                    notice.rank = notice.target.rank_after(notice.rank);
                    let pause = if notice.rank == Rank(0) { notice.pause } else { Duration::ZERO };
                    notice.due = Instant::now() + pause;
                    // The same producer is not tried for each of its other notices: one that is silent must not keep
                    // the releases of others.
                    for other in
                        queue.waiting.iter_mut().filter(|other| other.target.same_producer(&notice.target))
                    {
                        other.due = other.due.max(notice.due);
                    }
                    if notice.rank == Rank(0) {
                        notice.pause = (notice.pause * 2).min(PAUSE_MAX);
                    }
                    queue.waiting.push_back(notice);
                }
            }
            drop(queue);
            self.changed.notify_all();
        }
    }

    /// The next notice that is due; waits a little when none is.
    fn next(&self) -> Option<Notice> {
        let mut queue = self.lock();
        let now = Instant::now();
        if let Some(at) = queue.waiting.iter().position(|notice| notice.due <= now) {
            queue.in_flight += 1;
            return queue.waiting.remove(at);
        }
        let next = queue.waiting.iter().map(|notice| notice.due).min();
        let nap = next.map_or(Duration::from_secs(1), |due| due.saturating_duration_since(now));
        drop(self.changed.wait_timeout(queue, nap.min(Duration::from_secs(1))));
        None
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An answer of any kind ends a notice, and so does an earlier epoch: that engine has forgotten the lease.
fn deliver(transport: &dyn Transport, notice: &Notice) -> Result<&'static str, TransportError> {
    let target = &notice.target;
    let peer = target.peer(notice.rank)?;
    let told = if target.consumers > 1 {
        // Others may still want it.
        transport.leave(&peer, target.handle, target.consumer, notice.reason)
    } else {
        transport.release(&peer, target.handle, notice.reason)
    };
    match told {
        Ok(reply) => Ok(reply.label()),
        Err(TransportError::Gone) => Ok("gone"),
        Err(error @ (TransportError::Refused(_) | TransportError::Handshake(..)))
        | Err(error @ (TransportError::Transfer(_) | TransportError::Stopped)) => Err(error),
    }
}
