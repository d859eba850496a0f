//! Release notices to producers: delivered at least once, repeated until answered or past the lease's expiry
//! (after which the producer has its blocks back anyway).
//!
//! Each producer has a lane of its own: one notice of it is in flight at a time, and the pauses after failures are the
//! lane's, so that a producer that says nothing keeps neither a thread per notice nor the notices of others.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::Rank;
use baton_connector::limits::KV_LEASE_DURATION;
use baton_connector::transport::{Transport, TransportError};

use super::Producer;
use super::turns::Turns;
use crate::engine_core::fetch_target::FetchTarget;
use crate::metrics::{EngineMetrics, UNDELIVERED};

/// Notices that wait for an answer. One more is dropped with a log line; its lease then ends by expiry.
pub const NOTICES_MAX: usize = 16_384;

/// Of those, how many may wait for one producer: one that is dead must leave room to the others.
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

/// The notices to one producer, oldest first. Lives as long as there are any, or one is in flight.
struct Lane {
    waiting: VecDeque<Notice>,
    /// Which of the producer's ranks is told: any of them will do, and one that does not answer is followed by the
    /// next.
    rank: Rank,
    due: Instant,
    pause: Duration,
}

struct Queue {
    lanes: HashMap<Producer, Lane>,
    turns: Turns<Producer>,
    /// In all lanes, those in flight included.
    count: usize,
}

pub(super) struct Notices {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Default for Notices {
    fn default() -> Self {
        let queue = Queue { lanes: HashMap::new(), turns: Turns::new(THREADS, 1), count: 0 };
        Self { queue: Mutex::new(queue), changed: Condvar::new() }
    }
}

impl Notices {
    pub(super) fn add(&self, target: FetchTarget, reason: &'static str) {
        let mut queue = self.lock();
        let of_one = queue.lanes.get(&target.producer()).map_or(0, |lane| lane.waiting.len());
        if queue.count >= NOTICES_MAX || of_one >= NOTICES_OF_ONE_MAX {
            tracing::warn!(reason, "release notice dropped, lease ends by expiry");
            return;
        }
        let now = Instant::now();
        // Heartbeats may have renewed the lease since the handoff arrived.
        let give_up = now + target.lease.max(KV_LEASE_DURATION);
        queue.count += 1;
        let fresh = || Lane { waiting: VecDeque::new(), rank: Rank(0), due: now, pause: PAUSE_FIRST };
        let lane = queue.lanes.entry(target.producer()).or_insert_with(fresh);
        lane.waiting.push_back(Notice { target, reason, give_up });
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
                tracing::warn!(notices = queue.count, "release notices not delivered before shutdown");
                return;
            }
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Delivers until `stop`; on [`THREADS`] threads at once.
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
        let Queue { lanes, turns, count } = &mut *queue;
        turns.ended(producer, answered.is_ok());
        let lane = lanes.get_mut(producer).expect("a lane lives while one of its notices is in flight");
        match answered {
            Ok(label) => {
                metrics.notice(notice.reason, label);
                *count -= 1;
                (lane.due, lane.pause) = (Instant::now(), PAUSE_FIRST);
            }
            Err(error) => {
                let now = Instant::now();
                lane.rank = notice.target.rank_after(lane.rank);
                if lane.rank == Rank(0) {
                    lane.due = now + lane.pause;
                    lane.pause = (lane.pause * 2).min(PAUSE_MAX);
                }
                lane.waiting.push_front(notice);
                let before = lane.waiting.len();
                lane.waiting.retain(|notice| {
                    let alive = now < notice.give_up;
                    if !alive {
                        metrics.notice(notice.reason, UNDELIVERED);
                    }
                    alive
                });
                let given_up = before - lane.waiting.len();
                *count -= given_up;
                if given_up > 0 {
                    tracing::warn!(%error, given_up, "release notices not delivered before lease expiry");
                }
            }
        }
        if lane.waiting.is_empty() {
            lanes.remove(producer);
        }
        drop(queue);
        self.changed.notify_all();
    }

    /// The next notice that is due; waits a little when none is.
    fn next(&self) -> Option<(Producer, Rank, Notice)> {
        let mut queue = self.lock();
        let now = Instant::now();
        let Queue { lanes, turns, .. } = &mut *queue;
        let startable =
            |producer: &Producer, lane: &Lane| !lane.waiting.is_empty() && turns.may_start(producer);
        let ripe = lanes.iter().filter(|(producer, lane)| lane.due <= now && startable(producer, lane));
        let longest_due = ripe.min_by_key(|(_, lane)| lane.due).map(|(producer, _)| producer.clone());
        if let Some(producer) = longest_due {
            turns.started(&producer);
            let lane = lanes.get_mut(&producer).expect("it was found just now");
            let notice = lane.waiting.pop_front().expect("a startable lane has a notice");
            return Some((producer, lane.rank, notice));
        }
        // Those that are due wait for a turn, whose end wakes.
        let next = lanes.values().map(|lane| lane.due).filter(|due| *due > now).min();
        let nap = next.map_or(Duration::from_secs(1), |due| due.saturating_duration_since(now));
        drop(self.changed.wait_timeout(queue, nap.min(Duration::from_secs(1))));
        None
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An answer of any kind ends a notice, and so does an earlier epoch: that engine has forgotten the lease.
fn deliver(transport: &dyn Transport, notice: &Notice, rank: Rank) -> Result<&'static str, TransportError> {
    let target = &notice.target;
    let peer = target.peer(rank)?;
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
