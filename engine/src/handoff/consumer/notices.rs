//! Release notices to producers: delivered at least once, and repeated until answered or past the lease's expiry.
//! After the expiry the producer has freed the blocks anyway.
//!
//! Each producer has its own queue: one of its notices is in flight at a time, and the pauses after failures belong
//! to the queue. A silent producer therefore occupies at most one thread, and delays no notice to others.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::Rank;
use baton_connector::limits::KV_LEASE_DURATION;
use baton_connector::transport::{Transport, TransportError};
use baton_connector_leases::lease_span;

use super::Producer;
use super::producer_turns::Turns;
use crate::engine_core::fetch_target::FetchTarget;
use crate::metrics::{EngineMetrics, UNDELIVERED};

/// Limit of the notices that wait for an answer. A further one is dropped with a log line; its lease then expires.
pub const NOTICES_MAX: usize = 16_384;

/// Limit of the notices to one producer, so that a dead producer leaves capacity for the others.
const NOTICES_OF_ONE_MAX: usize = NOTICES_MAX / 4;

/// Threads that deliver notices.
pub(super) const THREADS: usize = 4;

/// Pause after the first failure; doubled each time up to [`PAUSE_MAX`].
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

struct Notice {
    target: FetchTarget,
    reason: &'static str,
    give_up: Instant,
}

/// The notices to one producer, oldest first. The queue exists while it has notices, or one is in flight.
struct ProducerQueue {
    waiting: VecDeque<Notice>,
    /// The producer's rank to notify. Any rank will do, and after a failure the next rank is tried.
    rank: Rank,
    due: Instant,
    pause: Duration,
}

struct NoticeQueue {
    producers: HashMap<Producer, ProducerQueue>,
    turns: Turns<Producer>,
    /// In all queues, including those in flight.
    count: usize,
}

pub(super) struct NoticeSender {
    queue: Mutex<NoticeQueue>,
    changed: Condvar,
}

impl Default for NoticeSender {
    fn default() -> Self {
        let queue = NoticeQueue { producers: HashMap::new(), turns: Turns::new(THREADS, 1), count: 0 };
        Self { queue: Mutex::new(queue), changed: Condvar::new() }
    }
}

impl NoticeSender {
    pub(super) fn add(&self, target: FetchTarget, reason: &'static str) {
        let mut queue = self.lock();
        let of_one = queue.producers.get(&target.producer.key()).map_or(0, |pending| pending.waiting.len());
        if queue.count >= NOTICES_MAX || of_one >= NOTICES_OF_ONE_MAX {
            tracing::warn!(
                parent: lease_span!(target.handle), event = "release_notice_dropped", reason,
                "release notice dropped, lease ends by expiry"
            );
            return;
        }
        let now = Instant::now();
        // Heartbeats may have renewed the lease since the handoff arrived.
        let give_up = now + target.lease.max(KV_LEASE_DURATION);
        queue.count += 1;
        let fresh =
            || ProducerQueue { waiting: VecDeque::new(), rank: Rank(0), due: now, pause: PAUSE_FIRST };
        let pending = queue.producers.entry(target.producer.key()).or_insert_with(fresh);
        pending.waiting.push_back(Notice { target, reason, give_up });
        drop(queue);
        self.changed.notify_all();
    }

    pub(super) fn wake(&self) {
        self.changed.notify_all();
    }

    /// Waits until every notice is answered or given up, at most until `deadline`.
    pub(super) fn drain(&self, deadline: Instant) {
        let mut queue = self.lock();
        while queue.count > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(
                    event = "release_notices_abandoned",
                    notices = queue.count,
                    "release notices not delivered before shutdown"
                );
                return;
            }
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Delivers notices until `stop`; [`THREADS`] threads run this loop.
    pub(super) fn run(&self, transport: &dyn Transport, metrics: &EngineMetrics, stop: &AtomicBool) {
        while !stop.load(Ordering::Acquire) {
            if let Some((producer, rank, notice)) = self.next() {
                let answered = deliver(transport, &notice, rank);
                self.settle(&producer, notice, answered, metrics);
            }
        }
    }

    fn settle(
        &self,
        producer: &Producer,
        notice: Notice,
        answered: Result<&'static str, TransportError>,
        metrics: &EngineMetrics,
    ) {
        let mut queue = self.lock();
        let NoticeQueue { producers, turns, count } = &mut *queue;
        turns.ended(producer, answered.is_ok());
        let pending =
            producers.get_mut(producer).expect("a queue exists while one of its notices is in flight");
        match answered {
            Ok(label) => {
                metrics.notice(notice.reason, label);
                *count -= 1;
                (pending.due, pending.pause) = (Instant::now(), PAUSE_FIRST);
            }
            Err(error) => {
                let now = Instant::now();
                pending.rank = notice.target.producer.rank_after(pending.rank);
                if pending.rank == Rank(0) {
                    pending.due = now + pending.pause;
                    pending.pause = (pending.pause * 2).min(PAUSE_MAX);
                }
                pending.waiting.push_front(notice);
                let before = pending.waiting.len();
                pending.waiting.retain(|notice| {
                    let alive = now < notice.give_up;
                    if !alive {
                        metrics.notice(notice.reason, UNDELIVERED);
                    }
                    alive
                });
                let given_up = before - pending.waiting.len();
                *count -= given_up;
                if given_up > 0 {
                    tracing::warn!(
                        event = "release_notices_expired", %error, given_up,
                        "release notices not delivered before lease expiry"
                    );
                }
            }
        }
        if pending.waiting.is_empty() {
            producers.remove(producer);
        }
        drop(queue);
        self.changed.notify_all();
    }

    /// The next due notice. Waits a little if none is due.
    fn next(&self) -> Option<(Producer, Rank, Notice)> {
        let mut queue = self.lock();
        let now = Instant::now();
        let NoticeQueue { producers, turns, .. } = &mut *queue;
        let startable = |producer: &Producer, pending: &ProducerQueue| {
            !pending.waiting.is_empty() && turns.may_start(producer)
        };
        let ripe =
            producers.iter().filter(|(producer, pending)| pending.due <= now && startable(producer, pending));
        let longest_due = ripe.min_by_key(|(_, pending)| pending.due).map(|(producer, _)| producer.clone());
        if let Some(producer) = longest_due {
            turns.started(&producer);
            let pending = producers.get_mut(&producer).expect("it was found just now");
            let notice = pending.waiting.pop_front().expect("a startable queue has a notice");
            return Some((producer, pending.rank, notice));
        }
        // Due notices wait for a turn, and its end wakes this thread.
        let next = producers.values().map(|pending| pending.due).filter(|due| *due > now).min();
        let nap = next.map_or(Duration::from_secs(1), |due| due.saturating_duration_since(now));
        drop(self.changed.wait_timeout(queue, nap.min(Duration::from_secs(1))));
        None
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, NoticeQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Delivers a notice. Any answer ends the notice, and so does an earlier epoch: that engine no longer has the lease.
fn deliver(transport: &dyn Transport, notice: &Notice, rank: Rank) -> Result<&'static str, TransportError> {
    let target = &notice.target;
    let peer = target.producer.peer(rank)?;
    let reply = if target.consumers > 1 {
        // Other consumers may still read it.
        transport.leave(&peer, target.handle, target.consumer, notice.reason)
    } else {
        transport.release(&peer, target.handle, notice.reason)
    };
    match reply {
        Ok(reply) => Ok(reply.label()),
        Err(TransportError::Gone) => Ok("gone"),
        Err(error @ (TransportError::Refused(_) | TransportError::Handshake(..)))
        | Err(error @ (TransportError::Transfer(_) | TransportError::Stopped)) => Err(error),
    }
}
