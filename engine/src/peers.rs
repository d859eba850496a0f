//! The consumer's dealings with prefill engines, off the step loop: reads on fetch workers, heartbeats, and
//! release notices that are repeated until they are answered.
//!
//! | thread | does | bound |
//! |---|---|---|
//! | `fetch-0..n` | one read at a time, then asks for the verdict | jobs: one per fetching sequence |
//! | `heartbeat-0..3` | renew the leases of queued and fetching sequences, one producer at a time each | one entry per sequence |
//! | `notices-0..3` | deliver releases at least once, until answered or past expiry, one at a time to each producer | [`NOTICES_MAX`] |
//!
//! A producer that says nothing costs its own requests time, and nobody else's: `turns.rs` says who may be dealt with.

mod fetch_workers;
mod heartbeat;
mod notices;
#[cfg(test)]
mod tests;
mod turns;

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_connector::fetch::LoadFailurePolicy;
use baton_connector::limits::KV_LEASE_DURATION;
use baton_connector::region::Region;
use baton_connector::transport::{Peer, Transport, TransportError};
use baton_connector::{BlockId, Epoch, Handle, Handoff, Rank, Reader};

use crate::mailbox::Mailbox;
use crate::metrics::EngineMetrics;
use crate::sequence::SeqId;

pub use notices::NOTICES_MAX;

/// A producer, as handoffs name it: host and port of its side channel.
type Producer = (Box<str>, u16);

/// Where one handoff's blocks lie, and for how long.
#[derive(Clone, Debug)]
pub struct FetchTarget {
    host: Box<str>,
    port: u16,
    epoch: Epoch,
    fingerprint: u64,
    handle: Handle,
    reader: Reader,
    lease: Duration,
    survives_refusal: bool,
    survives_failure: bool,
    cached: usize,
}

impl FetchTarget {
    /// The target of a handoff that has just arrived; `consumer` is a fresh random name for this fetch.
    #[must_use]
    pub fn new(handoff: &Handoff, consumer: u64) -> Self {
        let lease = handoff.lease_left.unwrap_or(KV_LEASE_DURATION);
        Self {
            host: handoff.host.as_str().into(),
            port: handoff.port,
            epoch: handoff.epoch,
            fingerprint: handoff.layout,
            handle: handoff.handle,
            reader: Reader { consumer, rank: Rank(0) },
            lease,
            survives_refusal: false,
            survives_failure: false,
            cached: handoff.cached,
        }
    }

    /// The lease.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// Who reads it.
    #[must_use]
    pub fn reader(&self) -> Reader {
        self.reader
    }

    /// The producer's epoch when it made the handoff.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The port of the producer's side channel.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// How long the lease lives without a heartbeat.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// Prompt tokens that the producer found in its prefix cache.
    #[must_use]
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// The router tries other engines with the same handoff and releases it itself when it gives up: a refusal
    /// leaves the lease alone, and so does a failed fetch, unless it is made up for by computing the prompt here.
    pub fn leave_to_router(&mut self, policy: LoadFailurePolicy) {
        self.survives_refusal = true;
        self.survives_failure = policy == LoadFailurePolicy::Fail;
    }

    /// Whether the lease stays when this engine is too full for the request.
    #[must_use]
    pub fn survives_refusal(&self) -> bool {
        self.survives_refusal
    }

    /// Whether the lease stays when the blocks could not be fetched.
    #[must_use]
    pub fn survives_failure(&self) -> bool {
        self.survives_failure
    }

    /// Whose turn it is to be dealt with; see `turns.rs`.
    fn producer(&self) -> Producer {
        (self.host.clone(), self.port)
    }

    /// Looks the producer's address up; a name is resolved anew each time, because engines move.
    fn peer(&self) -> Result<Peer, TransportError> {
        let failed = |why: String| {
            TransportError::Handshake(SocketAddr::from(([0, 0, 0, 0], self.port)), why.into_boxed_str())
        };
        let mut found =
            (&*self.host, self.port).to_socket_addrs().map_err(|error| failed(error.to_string()))?;
        let address = found.next().ok_or_else(|| failed(format!("{} has no address", self.host)))?;
        Ok(Peer { address, epoch: self.epoch, fingerprint: self.fingerprint })
    }
}

/// See the module's documentation.
pub struct Peers {
    fetch_workers: fetch_workers::FetchWorkers,
    heartbeat: Arc<heartbeat::Heartbeat>,
    notices: Arc<notices::Notices>,
    stop: Arc<AtomicBool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Peers {
    /// Starts the threads; `workers` reads run at once.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(
        transport: Arc<dyn Transport>,
        region: Region,
        mailbox: Arc<Mailbox>,
        metrics: Arc<EngineMetrics>,
        workers: usize,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let heartbeat = Arc::new(heartbeat::Heartbeat::default());
        let notices = Arc::new(notices::Notices::default());
        let mut threads = Vec::new();
        let (fetch_workers, handles) = fetch_workers::FetchWorkers::start(
            Arc::clone(&transport),
            region,
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

    /// Renews it no longer.
    pub fn let_go(&self, id: SeqId) {
        self.heartbeat.remove(id);
    }

    /// Starts a read on a worker; its reports go to the mailbox.
    pub fn read(&self, id: SeqId, target: &FetchTarget, first: usize, into: Vec<BlockId>) {
        self.fetch_workers.read(id, target.clone(), first, into);
    }

    /// Raises the stop flag of a read.
    pub fn stop_read(&self, id: SeqId) {
        self.fetch_workers.stop(id);
    }

    /// Releases a lease at its producer: at least once, repeated until answered or past expiry.
    pub fn release(&self, target: &FetchTarget, reason: &'static str) {
        self.notices.add(target.clone(), reason);
    }

    /// Delivers what can be delivered until `deadline`, then ends the threads.
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
