//! Threads that read blocks. A read blocks its thread, so there are as many reads in flight as workers; one producer
//! has all of them but one at most ([`Turns`]).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use baton_connector::BlockId;
use baton_connector::fetch::{Answer, Event, FailureKind};
use baton_connector::region::Region;
use baton_connector::transport::{Peer, ReadOrder, Transport, TransportError, Verdict};

use super::turns::Turns;
use super::{FetchTarget, Producer};
use crate::mailbox::Mailbox;
use crate::metrics::EngineMetrics;
use crate::sequence::SeqId;

struct Job {
    id: SeqId,
    target: FetchTarget,
    first: usize,
    into: Vec<BlockId>,
    stop: Arc<AtomicBool>,
}

/// Jobs that wait, and the stop flags of those that run. At most one job per fetching sequence, which the
/// scheduler bounds; one that is given up leaves at once.
struct Queue {
    waiting: VecDeque<Job>,
    turns: Turns<Producer>,
    running: HashMap<SeqId, Arc<AtomicBool>>,
    closed: bool,
}

struct Jobs {
    queue: Mutex<Queue>,
    arrived: Condvar,
}

pub(super) struct FetchWorkers {
    jobs: Arc<Jobs>,
    mailbox: Arc<Mailbox>,
}

struct Worker {
    transport: Arc<dyn Transport>,
    region: Region,
    mailbox: Arc<Mailbox>,
    metrics: Arc<EngineMetrics>,
    jobs: Arc<Jobs>,
}

impl FetchWorkers {
    pub(super) fn start(
        transport: Arc<dyn Transport>,
        region: Region,
        mailbox: Arc<Mailbox>,
        metrics: Arc<EngineMetrics>,
        workers: usize,
    ) -> std::io::Result<(Self, Vec<JoinHandle<()>>)> {
        let queue = Queue {
            waiting: VecDeque::new(),
            turns: Turns::new(workers, workers.saturating_sub(1)),
            running: HashMap::new(),
            closed: false,
        };
        let jobs = Arc::new(Jobs { queue: Mutex::new(queue), arrived: Condvar::new() });
        let mut threads = Vec::with_capacity(workers);
        for n in 0..workers {
            let worker = Worker {
                transport: Arc::clone(&transport),
                region: region.clone(),
                mailbox: Arc::clone(&mailbox),
                metrics: Arc::clone(&metrics),
                jobs: Arc::clone(&jobs),
            };
            threads.push(std::thread::Builder::new().name(format!("fetch-{n}")).spawn(move || worker.run())?);
        }
        Ok((Self { jobs, mailbox }, threads))
    }

    pub(super) fn read(&self, id: SeqId, target: FetchTarget, first: usize, into: Vec<BlockId>) {
        let job = Job { id, target, first, into, stop: Arc::default() };
        let mut queue = lock(&self.jobs.queue);
        if queue.closed {
            drop(queue);
            return self.mailbox.fetch(id, Event::TransferFailed(FailureKind::Transfer));
        }
        queue.waiting.push_back(job);
        drop(queue);
        self.jobs.arrived.notify_one();
    }

    /// Raises the stop flag of a read that runs; one that still waits is over at once, so that its blocks do not
    /// wait behind a producer that says nothing.
    pub(super) fn stop(&self, id: SeqId) {
        let mut queue = lock(&self.jobs.queue);
        if let Some(at) = queue.waiting.iter().position(|job| job.id == id) {
            drop(queue.waiting.remove(at));
            drop(queue);
            self.mailbox.fetch(id, Event::TransferFailed(FailureKind::Transfer));
        } else if let Some(stop) = queue.running.get(&id) {
            stop.store(true, Ordering::Release);
        }
    }

    /// Raises every stop flag and takes no more jobs; the threads end when they have reported.
    pub(super) fn close(&self) {
        let mut queue = lock(&self.jobs.queue);
        queue.closed = true;
        for job in queue.waiting.drain(..) {
            self.mailbox.fetch(job.id, Event::TransferFailed(FailureKind::Transfer));
        }
        for stop in queue.running.values() {
            stop.store(true, Ordering::Release);
        }
        drop(queue);
        self.jobs.arrived.notify_all();
    }
}

impl Worker {
    fn run(&self) {
        while let Some(job) = self.jobs.next() {
            let report = Report { worker: self, id: job.id, owed: Some(Event::Quiet) };
            let answered = self.read(&job, report);
            lock(&self.jobs.queue).turns.ended(&job.target.producer(), answered);
            self.jobs.arrived.notify_all();
        }
    }

    /// Says whether the producer answered, whatever it answered.
    fn read(&self, job: &Job, mut report: Report<'_>) -> bool {
        let started = Instant::now();
        let order = ReadOrder {
            handle: job.target.handle,
            reader: job.target.reader,
            first: job.first,
            into: job.into.clone(),
        };
        let peer =
            if job.stop.load(Ordering::Acquire) { Err(TransportError::Stopped) } else { job.target.peer() };
        let read = peer.and_then(|peer| {
            self.transport.read(&peer, &order, &self.region, &job.stop)?;
            Ok(peer)
        });
        match read {
            Ok(peer) if job.stop.load(Ordering::Acquire) => {
                // Given up while the last bytes came in: nobody will ask for the verdict.
                report.quiet(Event::TransferFailed(FailureKind::Transfer));
                self.give_up(&peer, job);
                true
            }
            Ok(peer) => {
                report.quiet(Event::TransferDone);
                let verdict = self.transport.finish(&peer, job.target.handle, job.target.reader);
                let bytes = order.into.len() * self.region.block_bytes();
                let valid = verdict == Ok(Verdict::Valid);
                self.metrics.transfer(started.elapsed(), bytes as u64, valid);
                if valid {
                    self.metrics.carried(self.transport.carrier(&peer), bytes as u64);
                }
                let unknown = verdict.is_err();
                report.verdict(Answer::from(verdict));
                if unknown {
                    self.give_up(&peer, job);
                }
                !unknown
            }
            Err(error) => {
                if error != TransportError::Stopped {
                    tracing::warn!(seq = job.id.0, %error, "fetch failed");
                    self.metrics.transfer(started.elapsed(), 0, false);
                }
                report.quiet(Event::TransferFailed(FailureKind::from(&error)));
                matches!(error, TransportError::Gone | TransportError::Refused(_))
            }
        }
    }
}

impl Jobs {
    /// The next job whose producer may be dealt with, which counts as running from now on; `None` at the end.
    fn next(&self) -> Option<Job> {
        let mut queue = lock(&self.queue);
        loop {
            let Queue { waiting, turns, .. } = &mut *queue;
            let next = waiting.iter().position(|job| turns.may_start(&job.target.producer()));
            if let Some(job) = next.and_then(|at| waiting.remove(at)) {
                turns.started(&job.target.producer());
                queue.running.insert(job.id, Arc::clone(&job.stop));
                return Some(job);
            }
            if queue.closed {
                return None;
            }
            queue = self.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Worker {
    /// Without this the release that follows a read which succeeded would wait for its reader until the drain
    /// deadline. The order of the two does not matter.
    fn give_up(&self, peer: &Peer, job: &Job) {
        if let Err(error) = self.transport.give_up(peer, job.target.handle, job.target.reader) {
            tracing::debug!(seq = job.id.0, %error, "the producer waits for this reader until its drain deadline");
        }
    }
}

/// Sees to it that every job is reported to its end, also when its thread unwinds.
struct Report<'a> {
    worker: &'a Worker,
    id: SeqId,
    /// What is reported if nothing better is.
    owed: Option<Event>,
}

impl Report<'_> {
    /// Nothing writes into the landing blocks any more.
    fn quiet(&mut self, event: Event) {
        self.owed = (event == Event::TransferDone).then_some(Event::Verdict(Answer::Unknown));
        lock(&self.worker.jobs.queue).running.remove(&self.id);
        self.worker.mailbox.fetch(self.id, event);
    }

    fn verdict(&mut self, answer: Answer) {
        self.owed = None;
        self.worker.mailbox.fetch(self.id, Event::Verdict(answer));
    }
}

impl Drop for Report<'_> {
    fn drop(&mut self) {
        if let Some(event) = self.owed {
            self.quiet(event);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
    use baton_connector::transport::{StopFlag, Verdict};
    use baton_connector::{Epoch, Handle, Handoff, Reader, RequestId};

    use super::*;

    /// Reads at once, and writes down what else is asked of it.
    struct Scripted {
        /// Raises the stop flag as if the request had been given up while the last bytes came in.
        given_up: bool,
        verdict: Result<Verdict, TransportError>,
        asked: Mutex<Vec<&'static str>>,
    }

    impl Transport for Scripted {
        fn read(&self, _: &Peer, _: &ReadOrder, _: &Region, stop: &StopFlag) -> Result<(), TransportError> {
            stop.store(self.given_up, Ordering::Release);
            Ok(())
        }

        fn finish(&self, _: &Peer, _: Handle, _: Reader) -> Result<Verdict, TransportError> {
            lock(&self.asked).push("finish");
            self.verdict.clone()
        }

        fn give_up(&self, _: &Peer, _: Handle, _: Reader) -> Result<(), TransportError> {
            lock(&self.asked).push("give up");
            Ok(())
        }

        fn release(&self, _: &Peer, _: Handle, _: &str) -> Result<ReleaseReply, TransportError> {
            Ok(ReleaseReply::Released)
        }

        fn heartbeat(&self, _: &Peer, handles: &[Handle]) -> Result<Vec<HeartbeatReply>, TransportError> {
            Ok(vec![HeartbeatReply::Gone; handles.len()])
        }
    }

    fn target() -> FetchTarget {
        let handoff = Handoff {
            handle: Handle(1),
            epoch: Epoch(2),
            engine_id: "p".into(),
            request: RequestId::new("r").expect("an id"),
            host: "127.0.0.1".into(),
            port: 9,
            blocks: vec![BlockId(0)],
            tokens: 2,
            lease_left: Some(Duration::from_secs(1)),
            layout: 3,
            prompt: 4,
            cached: 0,
        };
        FetchTarget::new(&handoff, 5)
    }

    /// What a read reports to the step loop, and what the transport was asked for.
    fn read(given_up: bool, verdict: Result<Verdict, TransportError>) -> (Vec<Event>, Vec<&'static str>) {
        let transport = Arc::new(Scripted { given_up, verdict, asked: Mutex::default() });
        let mailbox = Arc::new(Mailbox::new(1));
        let (workers, threads) = FetchWorkers::start(
            Arc::clone(&transport) as _,
            Region::allocate(1, 64),
            Arc::clone(&mailbox),
            Arc::new(EngineMetrics::new("m")),
            1,
        )
        .expect("a thread");
        workers.read(SeqId(1), target(), 0, vec![BlockId(0)]);
        let mut events: Vec<Event> = mailbox.wait(None).fetches.into_iter().map(|(_, event)| event).collect();
        workers.close();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        events.extend(mailbox.collect().fetches.into_iter().map(|(_, event)| event));
        let asked = lock(&transport.asked).clone();
        (events, asked)
    }

    #[test]
    fn a_read_that_succeeds_is_verified() {
        let (events, asked) = read(false, Ok(Verdict::Valid));
        assert_eq!(events, [Event::TransferDone, Event::Verdict(Answer::Valid)]);
        assert_eq!(asked, ["finish"]);
    }

    #[test]
    fn a_read_that_was_given_up_while_its_last_bytes_came_in_says_so_to_the_producer() {
        let (events, asked) = read(true, Ok(Verdict::Valid));
        assert_eq!(events, [Event::TransferFailed(FailureKind::Transfer)]);
        assert_eq!(asked, ["give up"]);
    }

    #[test]
    fn a_read_whose_verdict_never_comes_is_given_up_at_the_producer() {
        let (events, asked) = read(false, Err(TransportError::Transfer("silence".into())));
        assert_eq!(events, [Event::TransferDone, Event::Verdict(Answer::Unknown)]);
        assert_eq!(asked, ["finish", "give up"]);
    }

    /// Says nothing until it is stopped.
    struct Silent;

    impl Transport for Silent {
        #[allow(clippy::disallowed_methods)] // a producer that says nothing
        fn read(&self, _: &Peer, _: &ReadOrder, _: &Region, stop: &StopFlag) -> Result<(), TransportError> {
            while !stop.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(TransportError::Stopped)
        }

        fn finish(&self, _: &Peer, _: Handle, _: Reader) -> Result<Verdict, TransportError> {
            Ok(Verdict::Gone)
        }

        fn release(&self, _: &Peer, _: Handle, _: &str) -> Result<ReleaseReply, TransportError> {
            Ok(ReleaseReply::Released)
        }

        fn heartbeat(&self, _: &Peer, _: &[Handle]) -> Result<Vec<HeartbeatReply>, TransportError> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn a_read_given_up_behind_a_silent_producer_is_over_at_once() {
        let mailbox = Arc::new(Mailbox::new(1));
        let metrics = Arc::new(EngineMetrics::new("m"));
        let (workers, threads) =
            FetchWorkers::start(Arc::new(Silent), Region::allocate(1, 64), Arc::clone(&mailbox), metrics, 1)
                .expect("a thread");
        workers.read(SeqId(1), target(), 0, vec![BlockId(0)]);
        while lock(&workers.jobs.queue).running.is_empty() {
            std::thread::yield_now();
        }
        workers.read(SeqId(2), target(), 0, vec![BlockId(0)]);
        workers.stop(SeqId(2));
        let over = (SeqId(2), Event::TransferFailed(FailureKind::Transfer));
        assert_eq!(mailbox.wait(None).fetches, [over]);
        workers.close();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    }
}
