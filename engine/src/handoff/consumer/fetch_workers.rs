//! Threads that read blocks. Each rank of this engine's KV cache has two sets of workers: one for computed blocks,
//! and one for blocks that their producer still computes. A read that waits for a prefill therefore takes no thread
//! from another read.
//!
//! A read blocks its thread, so a rank has as many reads in flight as workers. One rank of one producer can have all
//! of them but one ([`Turns`]).
//!
//! A fetch is one job per link: a pair of ranks, there and here, that share heads ([`Geometry::links`]). The
//! [`Gatherer`] of the fetch combines their reports for the step loop.

use std::collections::{HashMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use baton_connector::fetch::{Event, FailureKind, Verification};
use baton_connector::gather::{self, Gatherer};
use baton_connector::region::Region;
use baton_connector::slice::{Geometry, Slice, SliceError};
use baton_connector::transport::{Part, Peer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Rank, Reader};
use baton_connector_leases::lease_span;

use super::Producer;
use super::producer_turns::Turns;
use crate::compute::cuda::device::DeviceError;
use crate::compute::cuda::shared_kv_pool::SharedKvPool;
use crate::engine_core::fetch_target::FetchTarget;
use crate::engine_core::mailbox::Mailbox;
use crate::metrics::EngineMetrics;
use crate::scheduler::sequence::SeqId;

/// This engine's own KV cache, into which fetched blocks land.
#[derive(Clone, Debug)]
pub struct LocalCache {
    /// Its shards.
    pub geometry: Geometry,
    /// The memory of each rank. Empty if the cache is in a device's memory without a mirror.
    pub regions: Vec<Region>,
    /// Set if the cache is in a device's own memory, which the region mirrors.
    pub shared_pool: Option<Arc<SharedKvPool>>,
}

impl LocalCache {
    /// Waits until these blocks may be written, if a device still copies their earlier contents.
    fn wait_for_downloads(&self, blocks: &[BlockId]) -> Result<(), DeviceError> {
        self.shared_pool.as_ref().map_or(Ok(()), |pool| pool.wait_for_downloads(blocks))
    }

    /// Copies landed blocks to the device, if there is one, so that no step waits for these copies.
    fn upload(&self, blocks: &[BlockId]) -> Result<(), DeviceError> {
        self.shared_pool.as_ref().map_or(Ok(()), |pool| pool.upload(blocks))
    }
}

/// One fetch, shared by the jobs of its links.
struct FetchRun {
    id: SeqId,
    target: FetchTarget,
    gather: Mutex<Gatherer>,
    /// Links whose bytes have not landed. One block may contain slices of several links, and is uploaded when it is
    /// complete.
    unread: AtomicUsize,
    /// Ends the reads: the step loop has stopped the fetch, or one link has failed.
    stop: AtomicBool,
    /// Stopped by the step loop: its failures are not counted.
    abandoned: AtomicBool,
    started: Instant,
    bytes: usize,
}

/// One link of a fetch.
struct LinkJob {
    run: Arc<FetchRun>,
    link: usize,
    /// The producer's rank.
    from: Rank,
    order: ReadOrder,
}

/// Jobs of one rank that wait for a worker. The scheduler bounds the fetching sequences, which have at most one job
/// per link. The jobs of a stopped fetch are removed at once.
struct JobQueue {
    waiting: VecDeque<LinkJob>,
    turns: Turns<Producer>,
    closed: bool,
}

struct RankJobs {
    queue: Mutex<JobQueue>,
    arrived: Condvar,
}

/// State that the front and the workers share.
struct FetchShared {
    transport: Arc<dyn Transport>,
    cache: LocalCache,
    mailbox: Arc<Mailbox>,
    metrics: Arc<EngineMetrics>,
    /// By rank.
    jobs: Vec<RankJobs>,
    /// The same for blocks that their producer still computes.
    early: Vec<RankJobs>,
    /// Fetches whose end is not reported yet.
    runs: Mutex<HashMap<SeqId, Arc<FetchRun>>>,
}

pub(super) struct FetchWorkers(Arc<FetchShared>);

impl FetchWorkers {
    pub(super) fn start(
        transport: Arc<dyn Transport>,
        cache: LocalCache,
        mailbox: Arc<Mailbox>,
        metrics: Arc<EngineMetrics>,
        workers: usize,
    ) -> std::io::Result<(Self, Vec<JoinHandle<()>>)> {
        let sets = || cache.regions.iter().map(|_| RankJobs::new(workers)).collect();
        let (jobs, early) = (sets(), sets());
        let runs = Mutex::default();
        let shared = Arc::new(FetchShared { transport, cache, mailbox, metrics, jobs, early, runs });
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

    /// Starts a fetch into `into`, from this engine's block `first` on.
    pub(super) fn read(&self, id: SeqId, target: FetchTarget, first: usize, into: &[BlockId]) {
        let shared = &self.0;
        let orders = match orders(&target, &shared.cache.geometry, first, into) {
            Ok(orders) => orders,
            Err(error) => {
                tracing::warn!(
                    parent: lease_span!(target.handle), event = "handoff_mismatched", seq = id.0, %error,
                    "handoff does not match the KV cache"
                );
                return shared.mailbox.fetch(id, Event::TransferFailed(FailureKind::Refused));
            }
        };
        let block_bytes = shared.cache.geometry.shard().block_bytes();
        let run = Arc::new(FetchRun {
            id,
            target,
            gather: Mutex::new(Gatherer::new(orders.len())),
            unread: AtomicUsize::new(orders.len()),
            stop: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            started: Instant::now(),
            bytes: orders.iter().map(|link| link.order.bytes(block_bytes)).sum(),
        });
        lock(&shared.runs).insert(id, Arc::clone(&run));
        for (number, Link { from, into, order }) in orders.into_iter().enumerate() {
            let jobs = &shared.jobs(run.target.growing)[usize::from(into.0)];
            let mut queue = lock(&jobs.queue);
            if queue.closed {
                drop(queue);
                shared.report(&run, number, gather::Event::Failed(FailureKind::Transfer));
                continue;
            }
            queue.waiting.push_back(LinkJob { run: Arc::clone(&run), link: number, from, order });
            drop(queue);
            jobs.arrived.notify_one();
        }
        if run.stop.load(Ordering::Acquire) {
            // A link has failed before its last sibling was queued.
            shared.stop(&run);
        }
    }

    /// Stops a fetch. Waiting links end at once, so that the fetch's blocks do not wait for a silent producer.
    pub(super) fn stop(&self, id: SeqId) {
        let run = lock(&self.0.runs).get(&id).cloned();
        if let Some(run) = run {
            run.abandoned.store(true, Ordering::Release);
            self.0.stop(&run);
        }
    }

    /// Stops every fetch and accepts no more jobs. The threads end after their reports.
    pub(super) fn close(&self) {
        for jobs in self.0.all_jobs() {
            lock(&jobs.queue).closed = true;
        }
        let runs: Vec<_> = lock(&self.0.runs).values().cloned().collect();
        for run in runs {
            run.abandoned.store(true, Ordering::Release);
            self.0.stop(&run);
        }
        self.0.all_jobs().for_each(|jobs| jobs.arrived.notify_all());
    }
}

/// One link's read: from a rank of the producer into a rank here.
struct Link {
    from: Rank,
    into: Rank,
    order: ReadOrder,
}

/// The read of each link of a fetch: whole blocks if both engines have the same shards, slices otherwise.
fn orders(
    target: &FetchTarget,
    ours: &Geometry,
    first: usize,
    into: &[BlockId],
) -> Result<Vec<Link>, SliceError> {
    let theirs = target.producer.geometry(ours)?;
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

impl FetchShared {
    /// By rank: the jobs for blocks that are still computed, or those for the others.
    fn jobs(&self, growing: bool) -> &[RankJobs] {
        if growing { &self.early } else { &self.jobs }
    }

    fn all_jobs(&self) -> impl Iterator<Item = &RankJobs> {
        self.jobs.iter().chain(&self.early)
    }

    fn work(&self, rank: usize, growing: bool) {
        while let Some(job) = self.jobs(growing)[rank].next() {
            // A panic ends one fetch, not the worker, because its rank needs it. `LinkReport` then reports the link
            // as lost.
            let read = AssertUnwindSafe(|| self.read(rank, &job));
            let answered = std::panic::catch_unwind(read).unwrap_or_else(|_| {
                tracing::error!(
                    parent: lease_span!(job.order.handle), event = "kv_read_panicked",
                    seq = job.run.id.0, rank, "KV read panicked"
                );
                None
            });
            let jobs = &self.jobs(growing)[rank];
            lock(&jobs.queue).turns.ended(&job.endpoint(), answered);
            jobs.arrived.notify_all();
        }
    }

    /// Returns whether the producer answered in any way; `None` if no call was made.
    fn read(&self, rank: usize, job: &LinkJob) -> Option<bool> {
        let LinkJob { run, order, .. } = job;
        let mut report = LinkReport { shared: self, run, link: job.link, pending: true };
        let peer = if run.stop.load(Ordering::Acquire) {
            Err(TransportError::Stopped)
        } else {
            run.target.producer.peer(job.from)
        };
        let mut quiet = Ok(());
        let read = peer.and_then(|peer| {
            quiet = self.cache.wait_for_downloads(&order.into);
            if quiet.is_ok() {
                // The upload after the read repeats a failed one, and reports its error.
                let landed = &mut |blocks: &[BlockId]| drop(self.cache.upload(blocks));
                self.transport.read_with(&peer, order, &self.cache.regions[rank], &run.stop, landed)?;
            }
            Ok(peer)
        });
        // Uploaded before the report: afterwards the blocks may be reallocated.
        let uploaded = match read {
            Ok(_) if quiet.is_err() => quiet,
            Ok(_) if run.unread.fetch_sub(1, Ordering::AcqRel) == 1 => self.cache.upload(&order.into),
            _ => Ok(()),
        };
        match read {
            Ok(peer) if let Err(error) = uploaded => {
                tracing::error!(
                    parent: lease_span!(order.handle), event = "fetched_blocks_not_uploaded",
                    seq = run.id.0, %error, "cannot copy fetched blocks to the device"
                );
                report.last(gather::Event::Failed(FailureKind::Transfer));
                self.give_up(&peer, job);
                Some(true)
            }
            Ok(peer) if run.stop.load(Ordering::Acquire) => {
                // Stopped while the last bytes arrived: the verdict is not needed.
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
                report.last(gather::Event::Verdict(Verification::from(verdict)));
                if unknown {
                    self.give_up(&peer, job);
                }
                Some(!unknown)
            }
            Err(error) => {
                log_failed_read(job, rank, &error);
                report.last(gather::Event::Failed(FailureKind::from(&error)));
                let answered = matches!(error, TransportError::Gone | TransportError::Refused(_));
                (error != TransportError::Stopped).then_some(answered)
            }
        }
    }

    /// Applies a link's report to the fetch's gatherer, and sends the result to the step loop.
    fn report(&self, run: &Arc<FetchRun>, link: usize, event: gather::Event) {
        let mut gather = lock(&run.gather);
        let mut stop_others = false;
        // Under the lock: the end of the transfer must reach the step loop before the verdict.
        for action in gather.apply(link, event).iter() {
            match action {
                gather::Action::StopOthers => stop_others = true,
                gather::Action::Transfer(Ok(())) => self.mailbox.fetch(run.id, Event::TransferDone),
                gather::Action::Transfer(Err(kind)) => {
                    if !run.abandoned.load(Ordering::Acquire) {
                        self.metrics.transfer_failed();
                    }
                    self.mailbox.fetch(run.id, Event::TransferFailed(kind));
                }
                gather::Action::Verdict(answer) => {
                    if answer == Verification::Valid {
                        self.metrics.transfer(run.started.elapsed(), run.bytes as u64);
                    } else {
                        self.metrics.transfer_failed();
                    }
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
    fn stop(&self, run: &Arc<FetchRun>) {
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

    /// Abandons a successful read at the producer. Otherwise the release that follows would wait for this reader
    /// until the drain deadline. The order of the two does not matter.
    fn give_up(&self, peer: &Peer, job: &LinkJob) {
        let seq = job.run.id.0;
        if let Err(error) = self.transport.give_up(peer, job.order.handle, job.order.reader) {
            tracing::debug!(
                parent: lease_span!(job.order.handle), event = "fetch_end_not_delivered", seq, %error,
                "cannot notify the producer of an ended fetch"
            );
        }
    }
}

/// Logs why a read failed.
fn log_failed_read(job: &LinkJob, rank: usize, error: &TransportError) {
    let (seq, from, handle) = (job.run.id.0, job.from.0, job.order.handle);
    match error {
        TransportError::Stopped => {}
        _ if job.run.abandoned.load(Ordering::Acquire) => tracing::debug!(
            parent: lease_span!(handle), event = "abandoned_fetch_failed", seq, from, rank, %error,
            "fetch failed after its request ended"
        ),
        // For example when a client leaves: the router ends the lease before this engine receives the abort.
        TransportError::Gone => tracing::info!(
            parent: lease_span!(handle), event = "fetch_lease_gone", seq, from, rank,
            "fetch ended, lease no longer open"
        ),
        _ => tracing::warn!(
            parent: lease_span!(handle), event = "fetch_failed", seq, from, rank, %error,
            "fetch failed"
        ),
    }
}

impl LinkJob {
    /// The key of its turn.
    fn endpoint(&self) -> Producer {
        self.run.target.producer.endpoint(self.from)
    }
}

impl RankJobs {
    fn new(workers: usize) -> Self {
        let turns = Turns::new(workers, workers.saturating_sub(1));
        let queue = JobQueue { waiting: VecDeque::new(), turns, closed: false };
        Self { queue: Mutex::new(queue), arrived: Condvar::new() }
    }

    /// The next job whose producer has a turn; `None` at the end.
    fn next(&self) -> Option<LinkJob> {
        let mut queue = lock(&self.queue);
        loop {
            let JobQueue { waiting, turns, .. } = &mut *queue;
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

/// Reports the end of a link, also when its read panics.
struct LinkReport<'a> {
    shared: &'a FetchShared,
    run: &'a Arc<FetchRun>,
    link: usize,
    /// Whether the end is still to be reported.
    pending: bool,
}

impl LinkReport<'_> {
    fn say(&self, event: gather::Event) {
        self.shared.report(self.run, self.link, event);
    }

    fn last(&mut self, event: gather::Event) {
        self.pending = false;
        self.say(event);
    }
}

impl Drop for LinkReport<'_> {
    fn drop(&mut self) {
        if self.pending {
            self.say(gather::Event::Lost);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
