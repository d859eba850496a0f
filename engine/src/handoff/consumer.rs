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
    fetch_workers: fetch_workers::FetchWorkers,
    heartbeat: Arc<heartbeat::Heartbeat>,
    notices: Arc<notices::NoticeSender>,
    stop: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
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
        let stop = Arc::new(AtomicBool::new(false));
        let heartbeat = Arc::new(heartbeat::Heartbeat::default());
        let notices = Arc::new(notices::NoticeSender::default());
        let mut threads = Vec::new();
        let (fetch_workers, handles) = fetch_workers::FetchWorkers::start(
            Arc::clone(&transport),
            cache,
            Arc::clone(&mailbox),
            Arc::clone(&metrics),
            workers,
        )?;
        threads.extend(handles);
        for n in 0..heartbeat::THREADS {
            let (heartbeat, transport, stop, mailbox) =
                (Arc::clone(&heartbeat), Arc::clone(&transport), Arc::clone(&stop), Arc::clone(&mailbox));
            let beating = std::thread::Builder::new().name(format!("heartbeat-{n}"));
            threads.push(beating.spawn(move || heartbeat.run(&*transport, &mailbox, &stop))?);
        }
        for n in 0..notices::THREADS {
            let (notices, transport, stop, metrics) =
                (Arc::clone(&notices), Arc::clone(&transport), Arc::clone(&stop), Arc::clone(&metrics));
            let delivering = std::thread::Builder::new().name(format!("notices-{n}"));
            threads.push(delivering.spawn(move || notices.run(&*transport, &metrics, &stop))?);
        }
        Ok(Self { fetch_workers, heartbeat, notices, stop, threads: Mutex::new(threads) })
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
    pub fn read(&self, id: SeqId, target: &FetchTarget, first: usize, into: Vec<BlockId>) {
        self.fetch_workers.read(id, target.clone(), first, &into);
    }

    /// Raises the stop flag of a read.
    pub fn stop_read(&self, id: SeqId) {
        self.fetch_workers.stop(id);
    }

    /// Releases a lease at its producer: at least once, repeated until answered or past expiry.
    pub fn release(&self, target: &FetchTarget, reason: &'static str) {
        self.notices.add(target.clone(), reason);
    }

    /// Delivers notices until `deadline`, then ends the threads.
    pub fn shutdown(&self, deadline: Instant) {
        self.notices.drain(deadline);
        self.stop.store(true, Ordering::Release);
        self.heartbeat.wake();
        self.notices.wake();
        self.fetch_workers.close();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            drop(thread.join());
        }
    }
}
