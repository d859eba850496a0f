//! The exchanges with producers that are due: jobs, renewals and notices, each producer in a queue of its own.
//!
//! A worker serves one queue at a time, so a silent producer occupies one worker and delays no other producer. Jobs of
//! one queue are in order: a "done" follows its read's answer. Notices are repeated until answered, or until the lease
//! has expired.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::limits::{HEARTBEAT_HANDLES_MAX, KV_LEASE_DURATION};
use baton_connector_leases::lease_span;

use super::target::{LoadTarget, ProducerKey};

/// Limit of the notices that wait for an answer. A further one is dropped, and its lease ends by expiry.
const NOTICES_MAX: usize = 16_384;

/// Limit of the notices to one producer, so that a dead producer leaves capacity for the others.
const NOTICES_OF_ONE_MAX: usize = NOTICES_MAX / 4;

/// Pause after the first failure of a notice; doubled each time up to [`PAUSE_MAX`].
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Renewals that are due this soon are sent together with due ones.
const TOGETHER: Duration = Duration::from_millis(20);

/// Renewals that are late by this much precede jobs.
const OVERDUE: Duration = Duration::from_secs(1);

/// One exchange about a load.
#[derive(Debug)]
pub(super) struct Job {
    /// The number of the load.
    pub(super) load: u64,
    pub(super) target: Arc<LoadTarget>,
    pub(super) consumer: u64,
    pub(super) kind: JobKind,
    /// The read is open, with the block ids of the handoff. Set when the job is picked.
    pub(super) opened: bool,
}

/// The kinds of jobs. The id is that of the request that waits for the verdict.
#[derive(Debug)]
pub(super) enum JobKind {
    /// Open the read, and compare the block ids.
    Begin,
    /// Report that the workers have read.
    Finish(Arc<str>),
    /// Renew, to learn whether the lease is live.
    Confirm(Arc<str>),
}

/// A message that is repeated until it is answered.
#[derive(Debug)]
pub(super) struct Notice {
    pub(super) target: Arc<LoadTarget>,
    pub(super) consumer: u64,
    pub(super) kind: NoticeKind,
    pub(super) reason: Box<str>,
    give_up: Instant,
}

/// The kinds of notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoticeKind {
    /// All requests of this engine have read.
    Done,
    /// This engine does not read: the lease is left, or released if no other engine reads it.
    Leave,
    /// What was read is discarded.
    GiveUp,
}

impl Notice {
    /// A notice that is repeated until the lease has expired.
    pub(super) fn new(
        target: Arc<LoadTarget>,
        consumer: u64,
        kind: NoticeKind,
        reason: &str,
        now: Instant,
    ) -> Self {
        // Heartbeats may have renewed the lease since the handoff arrived.
        let give_up = now + target.lease.max(KV_LEASE_DURATION);
        Self { target, consumer, kind, reason: reason.into(), give_up }
    }
}

/// The next exchange with a producer, whose queue is busy until [`ProducerQueues::release`].
#[derive(Debug)]
pub(super) struct PickedTask {
    pub(super) producer: ProducerKey,
    /// The address of its last exchange.
    pub(super) address: Option<SocketAddr>,
    pub(super) kind: PickedKind,
}

/// The kinds of exchanges.
#[derive(Debug)]
pub(super) enum PickedKind {
    Job(Job),
    /// Numbers of loads whose renewals are due.
    Renewals(Vec<u64>),
    Notice(Notice),
}

#[derive(Debug)]
struct ProducerQueue {
    jobs: VecDeque<Job>,
    renewals: BTreeSet<(Instant, u64)>,
    /// Oldest first.
    notices: VecDeque<Notice>,
    notice_due: Instant,
    pause: Duration,
    busy: bool,
    address: Option<SocketAddr>,
}

impl ProducerQueue {
    fn new(now: Instant) -> Self {
        Self {
            jobs: VecDeque::new(),
            renewals: BTreeSet::new(),
            notices: VecDeque::new(),
            notice_due: now,
            pause: PAUSE_FIRST,
            busy: false,
            address: None,
        }
    }

    fn is_ready(&self, now: Instant) -> bool {
        !self.busy && (!self.jobs.is_empty() || self.next_due().is_some_and(|due| due <= now))
    }

    /// When a renewal or a notice is due.
    fn next_due(&self) -> Option<Instant> {
        let renewal = self.renewals.first().map(|(due, _)| *due);
        let notice = (!self.notices.is_empty()).then_some(self.notice_due);
        renewal.into_iter().chain(notice).min()
    }

    fn take(&mut self, now: Instant) -> Option<PickedKind> {
        let renewal = self.renewals.first().map(|(due, _)| *due).filter(|due| *due <= now);
        if renewal.is_some_and(|due| self.jobs.is_empty() || due + OVERDUE <= now) {
            let later = self.renewals.split_off(&(now + TOGETHER, 0));
            let mut due = std::mem::replace(&mut self.renewals, later).into_iter();
            let numbers = due.by_ref().take(HEARTBEAT_HANDLES_MAX).map(|(_, load)| load).collect();
            self.renewals.extend(due);
            return Some(PickedKind::Renewals(numbers));
        }
        if let Some(job) = self.jobs.pop_front() {
            return Some(PickedKind::Job(job));
        }
        if self.notice_due > now {
            return None;
        }
        self.notices.pop_front().map(PickedKind::Notice)
    }

    fn is_empty(&self) -> bool {
        !self.busy && self.jobs.is_empty() && self.renewals.is_empty() && self.notices.is_empty()
    }
}

/// The queues of all producers.
#[derive(Debug, Default)]
pub(super) struct ProducerQueues {
    queues: HashMap<ProducerKey, ProducerQueue>,
    /// Notices in all queues, including those in flight.
    notices: usize,
    dropped: u64,
}

impl ProducerQueues {
    /// Adds a job.
    pub(super) fn push(&mut self, job: Job) {
        self.queue(&Arc::clone(&job.target).producer, Instant::now()).jobs.push_back(job);
    }

    /// Schedules the renewal of a load.
    pub(super) fn renew(&mut self, producer: &ProducerKey, due: Instant, load: u64) {
        self.queue(producer, due).renewals.insert((due, load));
    }

    /// Adds a notice, within the bounds.
    pub(super) fn notify(&mut self, notice: Notice) {
        let target = Arc::clone(&notice.target);
        let of_one = self.queues.get(&target.producer).map_or(0, |queue| queue.notices.len());
        if self.notices >= NOTICES_MAX || of_one >= NOTICES_OF_ONE_MAX {
            self.dropped += 1;
            tracing::warn!(
                parent: lease_span!(target.handle), event = "release_notice_dropped", reason = &*notice.reason,
                "release notice dropped, lease ends by expiry"
            );
            return;
        }
        self.notices += 1;
        self.queue(&target.producer, Instant::now()).notices.push_back(notice);
    }

    fn queue(&mut self, producer: &ProducerKey, now: Instant) -> &mut ProducerQueue {
        self.queues.entry(producer.clone()).or_insert_with(|| ProducerQueue::new(now))
    }

    /// Takes the next exchange with any producer that has no other one in progress.
    pub(super) fn pick(&mut self, now: Instant) -> Option<PickedTask> {
        let (producer, queue) = self.queues.iter_mut().find(|(_, queue)| queue.is_ready(now))?;
        let kind = queue.take(now)?;
        queue.busy = true;
        Some(PickedTask { producer: producer.clone(), address: queue.address, kind })
    }

    /// Whether an exchange can begin now.
    pub(super) fn has_ready(&self, now: Instant) -> bool {
        self.queues.values().any(|queue| queue.is_ready(now))
    }

    /// When the next renewal or notice is due that waits for time only.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        let waiting = self.queues.values().filter(|queue| !queue.busy);
        waiting.filter_map(ProducerQueue::next_due).filter(|due| *due > now).min()
    }

    /// The exchange with this producer is over. `address` is where it was reached.
    pub(super) fn release(&mut self, producer: &ProducerKey, address: Option<SocketAddr>) {
        let Some(queue) = self.queues.get_mut(producer) else { return };
        queue.busy = false;
        queue.address = address;
        if queue.is_empty() {
            self.queues.remove(producer);
        }
    }

    /// A notice was answered.
    pub(super) fn delivered(&mut self, producer: &ProducerKey, now: Instant) {
        self.notices -= 1;
        let queue = self.queue(producer, now);
        (queue.notice_due, queue.pause) = (now, PAUSE_FIRST);
    }

    /// A notice was not answered: it is repeated after a pause. Returns the reasons of those that are given up.
    pub(super) fn not_delivered(
        &mut self,
        producer: &ProducerKey,
        notice: Notice,
        now: Instant,
    ) -> Vec<Box<str>> {
        let queue = self.queue(producer, now);
        queue.notice_due = now + queue.pause;
        queue.pause = (queue.pause * 2).min(PAUSE_MAX);
        queue.notices.push_front(notice);
        let mut given_up = Vec::new();
        queue.notices.retain(|notice| {
            if now >= notice.give_up {
                given_up.push(notice.reason.clone());
            }
            now < notice.give_up
        });
        self.notices -= given_up.len();
        given_up
    }

    /// Notices that wait for an answer, and those that were dropped.
    pub(super) fn notices(&self) -> (usize, u64) {
        (self.notices, self.dropped)
    }

    /// Whether nothing is in progress and no notice waits.
    pub(super) fn is_idle(&self) -> bool {
        self.notices == 0 && self.queues.values().all(|queue| !queue.busy && queue.jobs.is_empty())
    }
}
