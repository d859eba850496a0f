//! Threads that read blocks. A read blocks its thread, so there are as many reads in flight as workers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use baton_connector::BlockId;
use baton_connector::fetch::{Answer, Event, FailureKind};
use baton_connector::region::Region;
use baton_connector::transport::{Peer, ReadOrder, Transport, TransportError};

use super::FetchTarget;
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

type Stops = Arc<Mutex<HashMap<SeqId, Arc<AtomicBool>>>>;

pub(super) struct FetchWorkers {
    jobs: Mutex<Option<SyncSender<Job>>>,
    stops: Stops,
    mailbox: Arc<Mailbox>,
}

struct Worker {
    transport: Arc<dyn Transport>,
    region: Region,
    mailbox: Arc<Mailbox>,
    metrics: Arc<EngineMetrics>,
    stops: Stops,
}

impl FetchWorkers {
    pub(super) fn start(
        transport: Arc<dyn Transport>,
        region: Region,
        mailbox: Arc<Mailbox>,
        metrics: Arc<EngineMetrics>,
        workers: usize,
        jobs_max: usize,
    ) -> std::io::Result<(Self, Vec<JoinHandle<()>>)> {
        let (jobs, queue) = sync_channel::<Job>(jobs_max);
        let queue = Arc::new(Mutex::new(queue));
        let stops = Stops::default();
        let mut threads = Vec::with_capacity(workers);
        for n in 0..workers {
            let worker = Worker {
                transport: Arc::clone(&transport),
                region: region.clone(),
                mailbox: Arc::clone(&mailbox),
                metrics: Arc::clone(&metrics),
                stops: Arc::clone(&stops),
            };
            let queue = Arc::clone(&queue);
            threads.push(
                std::thread::Builder::new().name(format!("fetch-{n}")).spawn(move || worker.run(&queue))?,
            );
        }
        Ok((Self { jobs: Mutex::new(Some(jobs)), stops, mailbox }, threads))
    }

    pub(super) fn read(&self, id: SeqId, target: FetchTarget, first: usize, into: Vec<BlockId>) {
        let stop = Arc::new(AtomicBool::new(false));
        lock(&self.stops).insert(id, Arc::clone(&stop));
        let job = Job { id, target, first, into, stop };
        let sent = match &*lock(&self.jobs) {
            Some(jobs) => jobs.try_send(job).map_err(|error| match error {
                TrySendError::Full(job) | TrySendError::Disconnected(job) => job,
            }),
            None => Err(job),
        };
        if let Err(job) = sent {
            lock(&self.stops).remove(&job.id);
            self.mailbox.fetch(job.id, Event::TransferFailed(FailureKind::Transfer));
        }
    }

    pub(super) fn stop(&self, id: SeqId) {
        if let Some(stop) = lock(&self.stops).get(&id) {
            stop.store(true, Ordering::Release);
        }
    }

    /// Raises every stop flag and takes no more jobs; the threads end when they have reported.
    pub(super) fn close(&self) {
        drop(lock(&self.jobs).take());
        for stop in lock(&self.stops).values() {
            stop.store(true, Ordering::Release);
        }
    }
}

impl Worker {
    fn run(&self, queue: &Mutex<Receiver<Job>>) {
        loop {
            let job = lock(queue).recv();
            let Ok(job) = job else { return };
            let report = Report { worker: self, id: job.id, quiet: false };
            self.read(&job, report);
        }
    }

    fn read(&self, job: &Job, mut report: Report<'_>) {
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
            }
            Ok(peer) => {
                report.quiet(Event::TransferDone);
                let verdict = self.transport.finish(&peer, job.target.handle, job.target.reader);
                let bytes = order.into.len() * self.region.block_bytes();
                self.metrics.transfer(
                    started.elapsed(),
                    bytes as u64,
                    matches!(verdict, Ok(v) if v == baton_connector::transport::Verdict::Valid),
                );
                let unknown = verdict.is_err();
                self.mailbox.fetch(job.id, Event::Verdict(Answer::from(verdict)));
                if unknown {
                    self.give_up(&peer, job);
                }
            }
            Err(error) => {
                if error != TransportError::Stopped {
                    tracing::warn!(seq = job.id.0, %error, "fetch failed");
                    self.metrics.transfer(started.elapsed(), 0, false);
                }
                report.quiet(Event::TransferFailed(FailureKind::from(&error)));
            }
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

/// Sees to it that every job is reported quiet, also when its thread unwinds.
struct Report<'a> {
    worker: &'a Worker,
    id: SeqId,
    quiet: bool,
}

impl Report<'_> {
    fn quiet(&mut self, event: Event) {
        self.quiet = true;
        lock(&self.worker.stops).remove(&self.id);
        self.worker.mailbox.fetch(self.id, event);
    }
}

impl Drop for Report<'_> {
    fn drop(&mut self) {
        if !self.quiet {
            self.quiet(Event::Quiet);
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
            1,
        )
        .expect("a thread");
        workers.read(SeqId(1), target(), 0, vec![BlockId(0)]);
        let mut events: Vec<Event> = mailbox.wait(None).fetches.into_iter().map(|(_, event)| event).collect();
        drop(lock(&workers.jobs).take());
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
}
