//! The consumer's communication with prefill engines, off the step loop: reads on fetch workers, heartbeats, and
//! release notices that are repeated until they are answered.
//!
//! | thread | does | bound |
//! |---|---|---|
//! | `fetch-r-0..n` | reads one link at a time for KV rank r, then asks for the verdict | one job per link |
//! | `fetch-early-r-0..n` | the same, of blocks that their producer still computes | the same |
//! | `heartbeat-0..3` | renew leases, one producer at a time each | one entry per sequence |
//! | `notices-0..3` | deliver releases until answered or past expiry, one at a time per producer | [`NOTICES_MAX`] |
//!
//! A silent producer delays only its own requests: `producer_turns.rs` limits the threads that one producer can
//! occupy.
//!
//! An engine without handoffs reads nothing, but it releases the handoffs that it refuses. From the first refusal on it
//! has the `notices` threads, and one `heartbeat` thread that closes idle connections.

mod fetch_workers;
mod heartbeat;
mod notices;
mod producer_turns;
#[cfg(test)]
mod tests;

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use baton_connector::slice::{Geometry, SliceError, rank_fingerprint};
use baton_connector::transport::{Peer, Transport, TransportError};
use baton_connector::{BlockId, KvLayout, Rank};

use crate::engine_core::fetch_target::{FetchTarget, ProducerCache};
use crate::engine_core::mailbox::Mailbox;
use crate::metrics::EngineMetrics;
use crate::scheduler::sequence::SeqId;

pub use fetch_workers::LocalCache;
pub use notices::NOTICES_MAX;

/// The address of a producer's side channel in its handoffs: host and port.
type Producer = (Box<str>, u16);

/// The addresses of a producer's ranks.
impl ProducerCache {
    /// The key of the producer's turns; see `producer_turns.rs`.
    fn key(&self) -> Producer {
        self.endpoint(Rank(0))
    }

    /// The same for one of the producer's ranks.
    fn endpoint(&self, rank: Rank) -> Producer {
        (self.host.clone(), self.ports.get(usize::from(rank.0)).copied().unwrap_or_default())
    }

    /// Resolves the address of one of the producer's ranks. The name is resolved again each time, because engines
    /// move.
    fn peer(&self, rank: Rank) -> Result<Peer, TransportError> {
        let failed = |port: u16, why: String| {
            TransportError::Handshake(SocketAddr::from(([0, 0, 0, 0], port)), why.into_boxed_str())
        };
        let port = self.ports.get(usize::from(rank.0)).copied();
        let port = port.ok_or_else(|| failed(0, format!("the producer has no rank {}", rank.0)))?;
        let mut found =
            (&*self.host, port).to_socket_addrs().map_err(|error| failed(port, error.to_string()))?;
        let address = found.next().ok_or_else(|| failed(port, format!("{} has no address", self.host)))?;
        let fingerprint = rank_fingerprint(self.fingerprint, self.ports.len(), self.block_tokens, rank);
        Ok(Peer { address, epoch: self.epoch, fingerprint })
    }

    /// The producer's rank to try after `rank`: every rank knows every lease.
    fn rank_after(&self, rank: Rank) -> Rank {
        let next = usize::from(rank.0) + 1;
        if next < self.ports.len() { Rank(rank.0 + 1) } else { Rank(0) }
    }

    /// The geometry of the producer's cache, if it is of the same model as `ours`.
    fn geometry(&self, ours: &Geometry) -> Result<Geometry, SliceError> {
        let whole = KvLayout { block_tokens: self.block_tokens, ..ours.whole() };
        Geometry::new(whole, self.ports.len())
    }
}

/// See the module's documentation.
pub struct HandoffConsumer {
    /// `None`: handoffs are refused.
    fetch_workers: Option<fetch_workers::FetchWorkers>,
    heartbeat: Arc<heartbeat::Heartbeat>,
    notices: Arc<notices::NoticeSender>,
    /// Threads that the first notice starts.
    deferred: Mutex<Option<PeerThreads>>,
    stop: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What the threads for heartbeats and notices need.
struct PeerThreads {
    heartbeat: Arc<heartbeat::Heartbeat>,
    notices: Arc<notices::NoticeSender>,
    transport: Arc<dyn Transport>,
    mailbox: Arc<Mailbox>,
    metrics: Arc<EngineMetrics>,
    stop: Arc<AtomicBool>,
}

impl PeerThreads {
    fn new(transport: Arc<dyn Transport>, mailbox: Arc<Mailbox>, metrics: Arc<EngineMetrics>) -> Self {
        let (heartbeat, notices, stop) = (Arc::default(), Arc::default(), Arc::default());
        Self { heartbeat, notices, transport, mailbox, metrics, stop }
    }

    /// Starts all threads for notices and `heartbeats` for heartbeats, and leaves their handles in `threads`.
    fn start(&self, heartbeats: usize, threads: &mut Vec<JoinHandle<()>>) -> std::io::Result<()> {
        for n in 0..notices::THREADS {
            let (notices, transport) = (Arc::clone(&self.notices), Arc::clone(&self.transport));
            let (metrics, stop) = (Arc::clone(&self.metrics), Arc::clone(&self.stop));
            let delivering = std::thread::Builder::new().name(format!("notices-{n}"));
            threads.push(delivering.spawn(move || notices.run(&*transport, &metrics, &stop))?);
        }
        for n in 0..heartbeats {
            let (heartbeat, transport) = (Arc::clone(&self.heartbeat), Arc::clone(&self.transport));
            let (mailbox, stop) = (Arc::clone(&self.mailbox), Arc::clone(&self.stop));
            let beating = std::thread::Builder::new().name(format!("heartbeat-{n}"));
            threads.push(beating.spawn(move || heartbeat.run(&*transport, &mailbox, &stop))?);
        }
        Ok(())
    }
}

impl HandoffConsumer {
    /// Starts the threads. Each rank runs `workers` reads at once.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(
        transport: Arc<dyn Transport>,
        cache: LocalCache,
        mailbox: Arc<Mailbox>,
        metrics: Arc<EngineMetrics>,
        workers: usize,
    ) -> std::io::Result<Self> {
        let (fetch_workers, mut threads) = fetch_workers::FetchWorkers::start(
            Arc::clone(&transport),
            cache,
            Arc::clone(&mailbox),
            Arc::clone(&metrics),
            workers,
        )?;
        let of_peers = PeerThreads::new(transport, mailbox, metrics);
        of_peers.start(heartbeat::THREADS, &mut threads)?;
        Ok(Self::with(Some(fetch_workers), of_peers, threads))
    }

    /// The consumer of an engine that refuses every handoff. It has no thread before the first refusal.
    #[must_use]
    pub fn for_refusals(
        transport: Arc<dyn Transport>,
        mailbox: Arc<Mailbox>,
        metrics: Arc<EngineMetrics>,
    ) -> Self {
        Self::with(None, PeerThreads::new(transport, mailbox, metrics), Vec::new())
    }

    fn with(
        fetch_workers: Option<fetch_workers::FetchWorkers>,
        of_peers: PeerThreads,
        threads: Vec<JoinHandle<()>>,
    ) -> Self {
        Self {
            heartbeat: Arc::clone(&of_peers.heartbeat),
            notices: Arc::clone(&of_peers.notices),
            stop: Arc::clone(&of_peers.stop),
            // With fetch workers all threads run already.
            deferred: Mutex::new(fetch_workers.is_none().then_some(of_peers)),
            fetch_workers,
            threads: Mutex::new(threads),
        }
    }

    /// Keeps the lease of a queued sequence alive from now on.
    pub fn keep_alive(&self, id: SeqId, target: &FetchTarget) {
        self.heartbeat.add(id, target.clone());
    }

    /// Stops renewing that lease.
    pub fn stop_renewing(&self, id: SeqId) {
        self.heartbeat.remove(id);
    }

    /// Starts a read on a worker; its reports go to the mailbox.
    ///
    /// # Panics
    /// When the consumer is for refusals only: no such sequence is admitted.
    pub fn read(&self, id: SeqId, target: &FetchTarget, first: usize, into: Vec<BlockId>) {
        let workers = self.fetch_workers.as_ref().expect("an engine without handoffs admits no fetch");
        workers.read(id, target.clone(), first, &into);
    }

    /// Raises the stop flag of a read.
    pub fn stop_read(&self, id: SeqId) {
        self.fetch_workers.iter().for_each(|workers| workers.stop(id));
    }

    /// Releases a lease at its producer: at least once, repeated until answered or past expiry.
    pub fn release(&self, target: &FetchTarget, reason: &'static str) {
        self.notices.add(target.clone(), reason);
        self.start_deferred();
    }

    /// Starts the threads for notices, unless they run. One for heartbeats closes their idle connections.
    fn start_deferred(&self) {
        let mut deferred = self.deferred.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(of_peers) = deferred.take() else { return };
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = of_peers.start(1, &mut threads) {
            tracing::error!(
                event = "notice_threads_not_started", %error,
                "cannot start threads, leases of refused handoffs may end by expiry"
            );
            // The next refusal tries again. One thread is enough for all notices.
            *deferred = threads.is_empty().then_some(of_peers);
        }
    }

    /// Delivers notices until `deadline`, then ends the threads.
    pub fn shutdown(&self, deadline: Instant) {
        self.notices.drain(deadline);
        self.stop.store(true, Ordering::Release);
        self.heartbeat.wake();
        self.notices.wake();
        self.fetch_workers.iter().for_each(fetch_workers::FetchWorkers::close);
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            drop(thread.join());
        }
    }
}
