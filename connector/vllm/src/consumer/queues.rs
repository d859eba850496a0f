//! The exchanges with producers that are due: jobs, renewals and notices, each producer in a queue of its own.
//!
//! A worker serves one queue at a time, so a silent producer occupies one worker and delays no other producer. Jobs of
//! one queue are in order: a "done" follows its read's answer. Notices are repeated until answered, or until the lease
//! has expired.
//!
//! A producer that has not answered is tried: on its first exchange, and after one without an answer. Tries share half
//! of the workers, so a producer that answers never waits for silent ones. Within that half each [`Standing`] has a
//! limit of its own. So no first try waits for producers that have failed, and no second try for those that fail
//! repeatedly. An empty queue is forgotten with its standing.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::Handle;
use baton_connector::limits::{HEARTBEAT_HANDLES_MAX, KV_LEASE_DURATION};
use baton_connector_leases::lease_span;

use super::WORKERS_MAX;
use super::target::{LoadTarget, ProducerKey};

/// Limit of the producers that are remembered because they answered. A further one replaces all.
const ANSWERED_MAX: usize = 4_096;

/// Limit of the notices that wait for an answer. A further one is dropped, and its lease ends by expiry.
const NOTICES_MAX: usize = 16_384;

/// Limit of the notices to one producer, so that a dead producer leaves capacity for the others.
const NOTICES_OF_ONE_MAX: usize = NOTICES_MAX / 4;

/// The longest time that a notice waits for an answer: a handoff's own lease may be forged.
const NOTICE_KEPT_MAX: Duration = Duration::from_secs(120);

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

/// A message that is repeated until it is answered. It waits without the block table of its lease.
#[derive(Debug)]
pub(super) struct Notice {
    producer: ProducerKey,
    pub(super) handle: Handle,
    pub(super) several_consumers: bool,
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
    /// A notice that is repeated until the lease has expired, or for two minutes.
    pub(super) fn new(
        target: &LoadTarget,
        consumer: u64,
        kind: NoticeKind,
        reason: &str,
        now: Instant,
    ) -> Self {
        // Heartbeats may have renewed the lease since the handoff arrived.
        let give_up = now + target.lease.clamp(KV_LEASE_DURATION, NOTICE_KEPT_MAX);
        let LoadTarget { producer, handle, several_consumers, .. } = target;
        let (producer, handle, several_consumers) = (producer.clone(), *handle, *several_consumers);
        Self { producer, handle, several_consumers, consumer, kind, reason: reason.into(), give_up }
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

/// How the last exchanges with a producer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The last one was answered.
    Answered,
    /// There was none since the queue exists.
    New,
    /// The last one was not answered. It was the first, or the one before was answered.
    FailedOnce,
    /// Several in a row were not answered.
    FailedRepeatedly,
}

impl Standing {
    /// Limit of the exchanges in progress with such producers.
    const fn limit(self) -> usize {
        match self {
            Self::Answered => WORKERS_MAX,
            Self::New => WORKERS_MAX / 4,
            Self::FailedOnce | Self::FailedRepeatedly => WORKERS_MAX / 8,
        }
    }

    const fn after_failure(self) -> Self {
        match self {
            Self::Answered | Self::New => Self::FailedOnce,
            Self::FailedOnce | Self::FailedRepeatedly => Self::FailedRepeatedly,
        }
    }
}

/// Exchanges in progress, by [`Standing`].
type InProgress = [usize; 4];

#[derive(Debug)]
struct ProducerQueue {
    jobs: VecDeque<Job>,
    renewals: BTreeSet<(Instant, u64)>,
    /// Oldest first.
    notices: VecDeque<Notice>,
    notice_due: Instant,
    pause: Duration,
    busy: bool,
    /// Does not change while the queue is busy.
    standing: Standing,
    /// The queue that waits longest has the lowest.
    turn: u64,
    address: Option<SocketAddr>,
}

impl ProducerQueue {
    fn new(now: Instant, standing: Standing, turn: u64) -> Self {
        Self {
            jobs: VecDeque::new(),
            renewals: BTreeSet::new(),
            notices: VecDeque::new(),
            notice_due: now,
            pause: PAUSE_FIRST,
            busy: false,
            standing,
            turn,
            address: None,
        }
    }

    /// Whether an exchange can begin beside those in progress.
    fn is_ready(&self, now: Instant, in_progress: &InProgress) -> bool {
        let is_due = !self.jobs.is_empty() || self.next_due().is_some_and(|due| due <= now);
        !self.busy && in_progress[self.standing as usize] < self.standing.limit() && is_due
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
    /// Hosts and ports that answered the last time.
    answered: HashSet<(Box<str>, u16)>,
    in_progress: InProgress,
    turns: u64,
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
        let of_one = self.queues.get(&notice.producer).map_or(0, |queue| queue.notices.len());
        if self.notices >= NOTICES_MAX {
            self.evict(&notice.producer);
        }
        if self.notices >= NOTICES_MAX || of_one >= NOTICES_OF_ONE_MAX {
            self.dropped += 1;
            tracing::warn!(
                parent: lease_span!(notice.handle), event = "release_notice_dropped", reason = &*notice.reason,
                "release notice dropped, lease ends by expiry"
            );
            return;
        }
        self.notices += 1;
        self.queue(&notice.producer, Instant::now()).notices.push_back(notice);
    }

    /// Makes room for a notice to a producer that has answered: the last one to a producer that has not is dropped.
    fn evict(&mut self, producer: &ProducerKey) {
        if !self.answered.contains(&(producer.host.clone(), producer.port)) {
            return;
        }
        let mut silent = self.queues.values_mut().filter(|queue| queue.standing != Standing::Answered);
        if silent.any(|queue| queue.notices.pop_back().is_some()) {
            self.notices -= 1;
            self.dropped += 1;
        }
    }

    fn queue(&mut self, producer: &ProducerKey, now: Instant) -> &mut ProducerQueue {
        self.turns += 1;
        self.queues.entry(producer.clone()).or_insert_with(|| {
            let answered = self.answered.contains(&(producer.host.clone(), producer.port));
            let standing = if answered { Standing::Answered } else { Standing::New };
            ProducerQueue::new(now, standing, self.turns)
        })
    }

    /// Takes the next exchange with the producer that waits longest and has no other one in progress.
    pub(super) fn pick(&mut self, now: Instant) -> Option<PickedTask> {
        let in_progress = self.in_progress;
        let ready = self.queues.iter_mut().filter(|(_, queue)| queue.is_ready(now, &in_progress));
        let (producer, queue) = ready.min_by_key(|(_, queue)| queue.turn)?;
        let kind = queue.take(now)?;
        self.turns += 1;
        self.in_progress[queue.standing as usize] += 1;
        (queue.busy, queue.turn) = (true, self.turns);
        Some(PickedTask { producer: producer.clone(), address: queue.address, kind })
    }

    /// Whether an exchange can begin now.
    pub(super) fn has_ready(&self, now: Instant) -> bool {
        self.queues.values().any(|queue| queue.is_ready(now, &self.in_progress))
    }

    /// When the next renewal or notice is due that waits for time only.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        let waiting = self.queues.values().filter(|queue| !queue.busy);
        waiting.filter_map(ProducerQueue::next_due).filter(|due| *due > now).min()
    }

    /// The exchange with this producer is over. `address` is where it has answered.
    pub(super) fn release(&mut self, producer: &ProducerKey, address: Option<SocketAddr>) {
        self.put_back(producer);
        let place = (producer.host.clone(), producer.port);
        if address.is_none() {
            self.answered.remove(&place);
        } else {
            if self.answered.len() >= ANSWERED_MAX && !self.answered.contains(&place) {
                self.answered.clear();
            }
            self.answered.insert(place);
        }
        if let Some(queue) = self.queues.get_mut(producer) {
            queue.standing =
                if address.is_some() { Standing::Answered } else { queue.standing.after_failure() };
            queue.address = address;
        }
    }

    /// The exchange with this producer was not needed.
    pub(super) fn put_back(&mut self, producer: &ProducerKey) {
        let Some(queue) = self.queues.get_mut(producer) else { return };
        queue.busy = false;
        self.in_progress[queue.standing as usize] -= 1;
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

#[cfg(test)]
mod tests {
    use baton_connector::Epoch;

    use super::*;

    fn producer(port: u16) -> ProducerKey {
        ProducerKey { host: "p".into(), port, epoch: Epoch(1), fingerprint: 1 }
    }

    fn picked(queues: &mut ProducerQueues, now: Instant) -> Vec<u16> {
        std::iter::from_fn(|| queues.pick(now)).map(|task| task.producer.port).collect()
    }

    /// An address of a producer that has answered.
    fn address() -> Option<SocketAddr> {
        Some(SocketAddr::from(([127, 0, 0, 1], 1)))
    }

    #[test]
    fn producers_that_have_not_answered_leave_half_of_the_workers() {
        let tries = [Standing::New, Standing::FailedOnce, Standing::FailedRepeatedly].map(Standing::limit);
        assert_eq!(tries.iter().sum::<usize>(), WORKERS_MAX / 2);
        let (mut queues, now, first_tries) = (ProducerQueues::default(), Instant::now(), tries[0]);
        let (healthy, silent) = (producer(1), 2..3 + u16::try_from(first_tries).expect("a small number"));
        queues.renew(&healthy, now, 1);
        assert_eq!(picked(&mut queues, now), [1]);
        queues.release(&healthy, address());
        assert!(queues.queues.is_empty(), "the answer is remembered without a queue");
        silent.clone().for_each(|port| queues.renew(&producer(port), now, 1));
        assert_eq!(picked(&mut queues, now), silent.clone().take(first_tries).collect::<Vec<_>>());
        assert!(!queues.has_ready(now), "no worker is woken for the last one");
        queues.renew(&healthy, now, 1);
        assert!(queues.has_ready(now));
        assert_eq!(picked(&mut queues, now), [1]);
        // A job that is settled without an exchange changes nothing.
        queues.put_back(&healthy);
        queues.renew(&healthy, now, 1);
        assert_eq!(picked(&mut queues, now), [1]);
        // After an exchange without an answer, it waits its turn.
        queues.release(&healthy, None);
        queues.renew(&healthy, now, 1);
        assert!(!queues.has_ready(now));
        queues.release(&producer(2), None);
        assert_eq!(picked(&mut queues, now), [silent.end - 1], "the one that waits longest");
        queues.release(&producer(3), None);
        assert_eq!(picked(&mut queues, now), [1]);
        assert_eq!(queues.in_progress, [0, first_tries, 0, 0]);
    }

    #[test]
    fn first_tries_wait_for_no_producer_that_has_failed_and_second_ones_for_none_that_fails_repeatedly() {
        let (mut queues, now) = (ProducerQueues::default(), Instant::now());
        let later = now + Duration::from_secs(1);
        let (repeatedly, once) = (100..160, 200..205);
        for (ports, failures) in [(repeatedly.clone(), 2), (once.clone(), 1)] {
            for port in ports {
                queues.renew(&producer(port), later, 1);
                for _ in 0..failures {
                    queues.renew(&producer(port), now, 2);
                    assert_eq!(picked(&mut queues, now), [port]);
                    queues.release(&producer(port), None);
                }
            }
        }
        queues.renew(&producer(1), later, 1);
        let tries = repeatedly.take(Standing::FailedRepeatedly.limit());
        let tries = tries.chain(once.take(Standing::FailedOnce.limit())).chain([1]);
        assert_eq!(picked(&mut queues, later), tries.collect::<Vec<_>>());
        // An answer makes room for the next try, and needs none itself.
        queues.renew(&producer(100), later, 3);
        queues.release(&producer(100), address());
        assert_eq!(picked(&mut queues, later), [104, 100]);
        // After an answer, one failure does not count as repeated.
        queues.renew(&producer(100), later, 4);
        queues.release(&producer(100), None);
        assert!(!queues.has_ready(later));
        queues.release(&producer(200), address());
        queues.release(&producer(201), address());
        assert_eq!(picked(&mut queues, later), [204, 100]);
    }

    #[test]
    fn notices_to_silent_producers_make_room_for_those_to_one_that_answers() {
        let (mut queues, now) = (ProducerQueues::default(), Instant::now());
        let notice = |port| Notice {
            producer: producer(port),
            handle: Handle(1),
            several_consumers: false,
            consumer: 1,
            kind: NoticeKind::Leave,
            reason: "x".into(),
            give_up: now + NOTICE_KEPT_MAX,
        };
        (2..10).cycle().take(NOTICES_MAX).for_each(|port| queues.notify(notice(port)));
        queues.notify(notice(1));
        assert_eq!(queues.notices(), (NOTICES_MAX, 1), "an unknown producer");
        queues.answered.insert((producer(1).host, 1));
        queues.notify(notice(1));
        assert_eq!(queues.notices(), (NOTICES_MAX, 2));
        assert_eq!(queues.queues[&producer(1)].notices.len(), 1);
    }
}
