//! Threads that read blocks: two sets for each rank of this engine's KV cache, one for what is computed and one for what
//! its producer still computes, so that a read that waits for a prefill takes no thread from one that need not. A read blocks its thread, so a rank has
//! as many reads in flight as it has workers; one rank of one producer has all of them but one at most ([`Turns`]).
//!
//! A fetch is one job per link: per pair of ranks, there and here, that share heads ([`Geometry::links`]). The
//! [`Gather`] of the fetch makes one report of theirs for the step loop.

use std::collections::{HashMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use baton_connector::fetch::{Answer, Event, FailureKind};
use baton_connector::gather::{self, Gather};
use baton_connector::region::Region;
use baton_connector::slice::{Geometry, Slice, SliceError};
use baton_connector::transport::{Part, Peer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Rank, Reader};

use super::Producer;
use super::turns::Turns;
use crate::compute::cuda::device::DeviceError;
use crate::compute::cuda::port::Port;
use crate::engine_core::fetch_target::FetchTarget;
use crate::engine_core::mailbox::Mailbox;
use crate::metrics::EngineMetrics;
use crate::scheduler::sequence::SeqId;

/// This engine's own KV cache: where fetched blocks land.
#[derive(Clone, Debug)]
pub struct OwnCache {
    /// How it is cut.
    pub geometry: Geometry,
    /// The memory of each rank.
    pub regions: Vec<Region>,
    /// Where it mirrors a device's own memory.
    pub port: Option<Arc<Port>>,
}

impl OwnCache {
    /// Waits until these blocks may be written, where a device copies what was in them before.
    fn quiet(&self, blocks: &[BlockId]) -> Result<(), DeviceError> {
        self.port.as_ref().map_or(Ok(()), |port| port.quiet(blocks))
    }

    /// Brings landed blocks to the device, if there is one, so that no step waits for their copies.
    fn bring(&self, blocks: &[BlockId]) -> Result<(), DeviceError> {
        self.port.as_ref().map_or(Ok(()), |port| port.onto_device(blocks))
    }
}

/// One fetch, shared by the jobs of its links.
struct Run {
    id: SeqId,
    target: FetchTarget,
    gather: Mutex<Gather>,
    /// Links whose bytes have not landed. Slices of several may be in one block, which goes to the device when it is whole.
    unread: AtomicUsize,
    /// Raised to end its reads: given up by the step loop, or one link has failed.
    stop: AtomicBool,
    /// Given up by the step loop: not worth a count of failure.
    given_up: AtomicBool,
    started: Instant,
    bytes: usize,
}

/// One link of a fetch.
struct Job {
    run: Arc<Run>,
    link: usize,
    /// The producer's rank.
    from: Rank,
    order: ReadOrder,
}

/// Jobs of one rank that wait for a worker. At most one per link of a fetching sequence, which the scheduler bounds;
/// those of a fetch that is given up leave at once.
struct Queue {
    waiting: VecDeque<Job>,
    turns: Turns<Producer>,
    closed: bool,
}

struct Jobs {
    queue: Mutex<Queue>,
    arrived: Condvar,
}

/// What front and workers share.
struct Shared {
    transport: Arc<dyn Transport>,
    cache: OwnCache,
    mailbox: Arc<Mailbox>,
    metrics: Arc<EngineMetrics>,
    /// By rank.
    jobs: Vec<Jobs>,
    /// The same for blocks that are still computed.
    early: Vec<Jobs>,
    /// Fetches that have not reported their end.
    runs: Mutex<HashMap<SeqId, Arc<Run>>>,
}

pub(super) struct FetchWorkers(Arc<Shared>);

impl FetchWorkers {
    pub(super) fn start(
        transport: Arc<dyn Transport>,
        cache: OwnCache,
        mailbox: Arc<Mailbox>,
        metrics: Arc<EngineMetrics>,
        workers: usize,
    ) -> std::io::Result<(Self, Vec<JoinHandle<()>>)> {
        let sets = || cache.regions.iter().map(|_| Jobs::new(workers)).collect();
        let (jobs, early) = (sets(), sets());
        let runs = Mutex::default();
        let shared = Arc::new(Shared { transport, cache, mailbox, metrics, jobs, early, runs });
        let mut threads = Vec::with_capacity(2 * workers * shared.jobs.len());
        for rank in 0..shared.jobs.len() {
            for (growing, n) in [false, true].into_iter().flat_map(|set| (0..workers).map(move |n| (set, n)))
            {
                let shared = Arc::clone(&shared);
                let name = format!("{}-{rank}-{n}", if growing { "fetch-early" } else { "fetch" });
                let thread = std::thread::Builder::new().name(name);
                threads.push(thread.spawn(move || shared.work(rank, growing))?);
            }
        }
        Ok((Self(shared), threads))
    }

    /// Starts a fetch of what lies from this engine's block `first` on.
    pub(super) fn read(&self, id: SeqId, target: FetchTarget, first: usize, into: &[BlockId]) {
        let shared = &self.0;
        let orders = match orders(&target, &shared.cache.geometry, first, into) {
            Ok(orders) => orders,
            Err(error) => {
                tracing::warn!(seq = id.0, %error, "handoff does not match the KV cache");
                return shared.mailbox.fetch(id, Event::TransferFailed(FailureKind::Refused));
            }
        };
        let block_bytes = shared.cache.geometry.shard().block_bytes();
        let run = Arc::new(Run {
            id,
            target,
            gather: Mutex::new(Gather::new(orders.len())),
            unread: AtomicUsize::new(orders.len()),
            stop: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            started: Instant::now(),
            bytes: orders.iter().map(|link| link.order.bytes(block_bytes)).sum(),
        });
        lock(&shared.runs).insert(id, Arc::clone(&run));
        for (number, Link { from, into, order }) in orders.into_iter().enumerate() {
            let jobs = &shared.jobs(run.target.growing())[usize::from(into.0)];
            let mut queue = lock(&jobs.queue);
            if queue.closed {
                drop(queue);
                shared.report(&run, number, gather::Event::Failed(FailureKind::Transfer));
                continue;
            }
            queue.waiting.push_back(Job { run: Arc::clone(&run), link: number, from, order });
            drop(queue);
            jobs.arrived.notify_one();
        }
        if run.stop.load(Ordering::Acquire) {
            // A link has failed before its last sibling was queued.
            shared.stop(&run);
        }
    }

    /// Raises the stop flag of a fetch; links that still wait are over at once, so that its blocks do not wait behind
    /// a producer that says nothing.
    pub(super) fn stop(&self, id: SeqId) {
        let run = lock(&self.0.runs).get(&id).cloned();
        if let Some(run) = run {
            run.given_up.store(true, Ordering::Release);
            self.0.stop(&run);
        }
    }

    /// Raises every stop flag and takes no more jobs; the threads end when they have reported.
    pub(super) fn close(&self) {
        for jobs in self.0.all_jobs() {
            lock(&jobs.queue).closed = true;
        }
        let runs: Vec<_> = lock(&self.0.runs).values().cloned().collect();
        for run in runs {
            run.given_up.store(true, Ordering::Release);
            self.0.stop(&run);
        }
        self.0.all_jobs().for_each(|jobs| jobs.arrived.notify_all());
    }
}

/// One link's read: from which rank there into which rank here.
struct Link {
    from: Rank,
    into: Rank,
    order: ReadOrder,
}

/// What each link of a fetch reads: whole blocks where both engines cut their caches alike, slices otherwise.
fn orders(
    target: &FetchTarget,
    ours: &Geometry,
    first: usize,
    into: &[BlockId],
) -> Result<Vec<Link>, SliceError> {
    let theirs = target.geometry(ours)?;
    let links = theirs.links(ours)?;
    let of = u16::try_from(links.len()).expect("there are at most LINKS_MAX links");
    let origin = first * ours.whole().block_tokens;
    let order = |(number, link): (usize, &baton_connector::slice::Link)| {
        let part = if theirs.same_blocks(ours) {
            Part::Blocks { first }
        } else {
            let slice = Slice::of(link, &theirs, ours, origin..target.tokens, origin);
            slice.check(into.len())?;
            Part::Slice(Box::new(slice))
        };
        let rank = Rank(u16::try_from(number).expect("there are at most LINKS_MAX links"));
        let reader = Reader { consumer: target.consumer, of, rank };
        let order = ReadOrder { handle: target.handle, reader, part, into: into.to_vec() };
        Ok(Link { from: link.producer, into: link.consumer, order })
    };
    links.iter().enumerate().map(order).collect()
}

impl Shared {
    /// By rank: those of blocks that are still computed, or of the others.
    fn jobs(&self, growing: bool) -> &[Jobs] {
        if growing { &self.early } else { &self.jobs }
    }

    fn all_jobs(&self) -> impl Iterator<Item = &Jobs> {
        self.jobs.iter().chain(&self.early)
    }

    fn work(&self, rank: usize, growing: bool) {
        while let Some(job) = self.jobs(growing)[rank].next() {
            // A panic costs one fetch, not the worker: its rank must not be without. `Report` says that it is lost.
            let read = AssertUnwindSafe(|| self.read(rank, &job));
            let answered = std::panic::catch_unwind(read).unwrap_or_else(|_| {
                tracing::error!(seq = job.run.id.0, rank, "KV read panicked");
                None
            });
            let jobs = &self.jobs(growing)[rank];
            lock(&jobs.queue).turns.ended(&job.endpoint(), answered);
            jobs.arrived.notify_all();
        }
    }

    /// Says whether the producer answered, whatever it answered; `None` when it was not waited for.
    fn read(&self, rank: usize, job: &Job) -> Option<bool> {
        let Job { run, order, .. } = job;
        let mut report = Report { shared: self, run, link: job.link, owed: true };
        let peer = if run.stop.load(Ordering::Acquire) {
            Err(TransportError::Stopped)
        } else {
            run.target.peer(job.from)
        };
        let mut quiet = Ok(());
        let read = peer.and_then(|peer| {
            quiet = self.cache.quiet(&order.into);
            if quiet.is_ok() {
                // What is not brought now is brought below, or refused there.
                let landed = &mut |blocks: &[BlockId]| drop(self.cache.bring(blocks));
                self.transport.read_telling(&peer, order, &self.cache.regions[rank], &run.stop, landed)?;
            }
            Ok(peer)
        });
        // Before anybody hears that they have landed, and may give them to somebody else.
        let brought = match read {
            Ok(_) if quiet.is_err() => quiet,
            Ok(_) if run.unread.fetch_sub(1, Ordering::AcqRel) == 1 => self.cache.bring(&order.into),
            _ => Ok(()),
        };
        match read {
            Ok(peer) if let Err(error) = brought => {
                tracing::error!(seq = run.id.0, %error, "cannot copy fetched blocks to the device");
                report.last(gather::Event::Failed(FailureKind::Transfer));
                self.give_up(&peer, job);
                Some(true)
            }
            Ok(peer) if run.stop.load(Ordering::Acquire) => {
                // Given up while the last bytes came in: nobody will ask for the verdict.
                report.last(gather::Event::Failed(FailureKind::Transfer));
                self.give_up(&peer, job);
                Some(true)
            }
            Ok(peer) => {
                report.say(gather::Event::Done);
                let verdict = self.transport.finish(&peer, order.handle, order.reader);
                if verdict == Ok(Verdict::Valid) {
                    let bytes = order.bytes(self.cache.geometry.shard().block_bytes());
                    self.metrics.carried(self.transport.carrier(&peer), bytes as u64);
                }
                let unknown = verdict.is_err();
                report.last(gather::Event::Verdict(Answer::from(verdict)));
                if unknown {
                    self.give_up(&peer, job);
                }
                Some(!unknown)
            }
            Err(error) => {
                let (seq, from) = (run.id.0, job.from.0);
                match &error {
                    TransportError::Stopped => {}
                    _ if run.given_up.load(Ordering::Acquire) => {
                        tracing::debug!(seq, from, rank, %error, "fetch failed after its request ended");
                    }
                    // As when a client leaves: the router ends the lease before this engine hears of it.
                    TransportError::Gone => {
                        tracing::info!(seq, from, rank, "fetch ended, lease no longer open")
                    }
                    _ => tracing::warn!(seq, from, rank, %error, "fetch failed"),
                }
                report.last(gather::Event::Failed(FailureKind::from(&error)));
                let answered = matches!(error, TransportError::Gone | TransportError::Refused(_));
                (error != TransportError::Stopped).then_some(answered)
            }
        }
    }

    /// Takes a link's report to the fetch's gatherer, and what follows to the step loop.
    fn report(&self, run: &Arc<Run>, link: usize, event: gather::Event) {
        let mut gather = lock(&run.gather);
        let mut stop_others = false;
        // Under the lock: the step loop must hear of the transfer before it hears of the verdict.
        for action in gather.apply(link, event).iter() {
            match action {
                gather::Action::StopOthers => stop_others = true,
                gather::Action::Transfer(Ok(())) => self.mailbox.fetch(run.id, Event::TransferDone),
                gather::Action::Transfer(Err(kind)) => {
                    if !run.given_up.load(Ordering::Acquire) {
                        self.metrics.transfer(run.started.elapsed(), 0, false);
                    }
                    self.mailbox.fetch(run.id, Event::TransferFailed(kind));
                }
                gather::Action::Verdict(answer) => {
                    let valid = answer == Answer::Valid;
                    self.metrics.transfer(run.started.elapsed(), run.bytes as u64, valid);
                    self.mailbox.fetch(run.id, Event::Verdict(answer));
                }
            }
        }
        let over = gather.is_over();
        drop(gather);
        if over {
            lock(&self.runs).remove(&run.id);
        }
        if stop_others {
            self.stop(run);
        }
    }

    /// Raises the stop flag, and ends the links that have not begun.
    fn stop(&self, run: &Arc<Run>) {
        run.stop.store(true, Ordering::Release);
        let mut unbegun = Vec::new();
        for jobs in self.all_jobs() {
            let mut queue = lock(&jobs.queue);
            let (theirs, others) =
                queue.waiting.drain(..).partition::<VecDeque<_>, _>(|job| Arc::ptr_eq(&job.run, run));
            queue.waiting = others;
            unbegun.extend(theirs);
        }
        for job in unbegun {
            self.report(run, job.link, gather::Event::Failed(FailureKind::Transfer));
        }
    }

    /// Without this the release that follows a read which succeeded would wait for its reader until the drain
    /// deadline. The order of the two does not matter.
    fn give_up(&self, peer: &Peer, job: &Job) {
        let seq = job.run.id.0;
        if let Err(error) = self.transport.give_up(peer, job.order.handle, job.order.reader) {
            tracing::debug!(seq, %error, "cannot notify the producer of an ended fetch");
        }
    }
}

impl Job {
    /// Whose turn it is.
    fn endpoint(&self) -> Producer {
        self.run.target.endpoint(self.from)
    }
}

impl Jobs {
    fn new(workers: usize) -> Self {
        let turns = Turns::new(workers, workers.saturating_sub(1));
        let queue = Queue { waiting: VecDeque::new(), turns, closed: false };
        Self { queue: Mutex::new(queue), arrived: Condvar::new() }
    }

    /// The next job whose producer may be dealt with; `None` at the end.
    fn next(&self) -> Option<Job> {
        let mut queue = lock(&self.queue);
        loop {
            let Queue { waiting, turns, .. } = &mut *queue;
            let next = waiting.iter().position(|job| turns.may_start(&job.endpoint()));
            if let Some(job) = next.and_then(|at| waiting.remove(at)) {
                turns.started(&job.endpoint());
                return Some(job);
            }
            if queue.closed {
                return None;
            }
            queue = self.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Sees to it that every link is reported to its end, also when its read unwinds.
struct Report<'a> {
    shared: &'a Shared,
    run: &'a Arc<Run>,
    link: usize,
    /// Whether more is to be said.
    owed: bool,
}

impl Report<'_> {
    fn say(&self, event: gather::Event) {
        self.shared.report(self.run, self.link, event);
    }

    fn last(&mut self, event: gather::Event) {
        self.owed = false;
        self.say(event);
    }
}

impl Drop for Report<'_> {
    fn drop(&mut self) {
        if self.owed {
            self.say(gather::Event::Lost);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
