//! Which transport carries a handoff's blocks: shared memory where producer and consumer are on one host, TCP
//! otherwise. Both ends are here, as [`SideChannel`] (what other engines read) and [`consumer`] (what reads them).
//!
//! ```text
//! peer ─ known? ─ yes ───────────────────────────────────▶ shm | tcp
//!          └ no ─ somebody of us listens here under the peer's epoch and port?
//!                   yes, and the handshake succeeds ─────▶ shm   until it fails once
//!                   no, or not one of us ────────────────▶ tcp   asked again after a while
//!                   says nothing, or "gone", or "refused" ▶ that is the answer: TCP would wait for the same engine
//! ```
//!
//! Only a connection that never came about is made up for with TCP. A read that breaks off is a failed read,
//! whatever carried it: what becomes of it is the fetch's to decide.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::TcpListener;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::transport::{Peer, Producer, ReadOrder, StopFlag, Transport, TransportError, Verdict};
use baton_connector::{Handle, Reader};
use baton_connector_shm::{ShmServer, ShmTransport};
use baton_connector_tcp::{ClientOptions, NotAdmitted, ServerOptions, TcpServer, TcpTransport};

/// How blocks travel between engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvTransport {
    /// Shared memory between engines of one host, TCP between others.
    #[default]
    Auto,
    /// Reads shared memory only: a producer of another host is an error. TCP is still served.
    Shm,
    /// TCP only: this engine neither reads shared memory nor offers its own.
    Tcp,
}

/// Peers whose transport is remembered. A cluster with more producers asks some of them again.
const PEERS_MAX: usize = 1_024;

/// A peer that was not found on this host is looked for again after this long: its socket may have been full.
const ASK_AGAIN: Duration = Duration::from_secs(30);

/// Messages about leases are bounded by the transport; nobody stops them.
static NEVER: AtomicBool = AtomicBool::new(false);

/// A pool of `blocks` zeroed blocks that engines of this host can be let read. Where the system has no such memory
/// it is this process's own, and travels over TCP.
#[must_use]
pub fn shared_pool(blocks: usize, block_bytes: usize) -> Region {
    baton_connector_shm::shared_pool(blocks, block_bytes).unwrap_or_else(|error| {
        tracing::warn!(%error, "the KV pool cannot be shared with engines of this host; its blocks travel over TCP");
        Region::allocate(blocks, block_bytes)
    })
}

/// What other engines read the blocks of one producer from.
pub struct SideChannel {
    tcp: TcpServer,
    shm: Option<ShmServer>,
}

impl SideChannel {
    /// Serves on a bound listener, and under the name of the producer's epoch and the listener's port.
    ///
    /// # Errors
    /// As [`TcpServer::start`]; and when shared memory was asked for expressly and is not to be had.
    pub fn start(
        transport: KvTransport,
        listener: TcpListener,
        producer: &Arc<dyn Producer>,
        options: &ServerOptions,
    ) -> io::Result<Self> {
        let port = listener.local_addr()?.port();
        let tcp = TcpServer::start(listener, Arc::clone(producer), options.clone())?;
        let shm = || {
            let listener = baton_connector_shm::listen(producer.epoch(), port)?;
            ShmServer::start(listener, Arc::clone(producer), options.clone())
        };
        let shm = match transport {
            KvTransport::Tcp => None,
            KvTransport::Shm => Some(shm()?),
            KvTransport::Auto => match shm() {
                Ok(server) => Some(server),
                Err(error) => {
                    tracing::warn!(%error, "KV blocks are not offered to engines of this host by shared memory");
                    None
                }
            },
        };
        Ok(Self { tcp, shm })
    }

    /// Stops to listen and ends every connection. Reads in flight have then failed.
    pub fn shutdown(self) {
        if let Some(shm) = self.shm {
            shm.shutdown();
        }
        self.tcp.shutdown();
    }
}

/// What reads other engines' blocks.
#[must_use]
pub fn consumer(transport: KvTransport, options: &ClientOptions) -> Arc<dyn Transport> {
    match transport {
        KvTransport::Auto => Arc::new(Nearest::new(options)),
        KvTransport::Shm => Arc::new(ShmTransport::new(options.clone())),
        KvTransport::Tcp => Arc::new(TcpTransport::new(options.clone())),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    Shm,
    /// Since when.
    Tcp(Instant),
}

/// What is remembered of peers, the oldest first out.
#[derive(Default)]
struct Known {
    carriers: HashMap<Peer, Carrier>,
    order: VecDeque<Peer>,
}

impl Known {
    fn remember(&mut self, peer: &Peer, carrier: Carrier) {
        if self.carriers.insert(peer.clone(), carrier).is_none() {
            self.order.push_back(peer.clone());
        }
        if self.order.len() > PEERS_MAX {
            self.order.pop_front().map(|oldest| self.carriers.remove(&oldest));
        }
    }

    fn forget(&mut self, peer: &Peer) {
        if self.carriers.remove(peer).is_some() {
            self.order.retain(|known| known != peer);
        }
    }
}

/// Shared memory where the producer is on this host, TCP otherwise.
struct Nearest {
    shm: ShmTransport,
    tcp: TcpTransport,
    known: Mutex<Known>,
}

impl Nearest {
    fn new(options: &ClientOptions) -> Self {
        Self {
            shm: ShmTransport::new(options.clone()),
            tcp: TcpTransport::new(options.clone()),
            known: Mutex::default(),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, peer: &Peer, stop: &StopFlag) -> Result<Carrier, TransportError> {
        match self.known().carriers.get(peer) {
            Some(&Carrier::Tcp(since)) if since.elapsed() >= ASK_AGAIN => {}
            Some(&carrier) => return Ok(carrier),
            None => {}
        }
        // The lock is not held while somebody else is waited for.
        let carrier = match self.shm.reach(peer, stop) {
            Ok(()) => Carrier::Shm,
            Err(NotAdmitted::Absent(why)) => {
                tracing::debug!(peer = %peer.address, %why, "not read by shared memory");
                Carrier::Tcp(Instant::now())
            }
            Err(other) => return Err(other.of(peer)),
        };
        self.known().remember(peer, carrier);
        Ok(carrier)
    }

    /// Calls the peer's transport. If there is no connection any more, looks once more which one that is.
    fn call<T>(
        &self,
        peer: &Peer,
        stop: &StopFlag,
        call: impl Fn(&dyn Transport) -> Result<T, TransportError>,
    ) -> Result<T, TransportError> {
        let transport = |carrier| -> &dyn Transport {
            match carrier {
                Carrier::Shm => &self.shm,
                Carrier::Tcp(_) => &self.tcp,
            }
        };
        let carrier = self.find(peer, stop)?;
        let result = call(transport(carrier));
        match (&result, carrier) {
            (Err(TransportError::Handshake(..)), Carrier::Shm) => {
                self.known().forget(peer);
                call(transport(self.find(peer, stop)?))
            }
            (Err(TransportError::Handshake(..) | TransportError::Transfer(_)), _) => {
                self.known().forget(peer);
                result
            }
            _ => result,
        }
    }
}

impl Transport for Nearest {
    fn carrier(&self, peer: &Peer) -> &'static str {
        match self.known().carriers.get(peer) {
            Some(Carrier::Shm) => self.shm.carrier(peer),
            Some(Carrier::Tcp(_)) | None => self.tcp.carrier(peer),
        }
    }

    fn read(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
    ) -> Result<(), TransportError> {
        self.call(peer, stop, |transport| transport.read(peer, order, region, stop))
    }

    fn finish(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<Verdict, TransportError> {
        self.call(peer, &NEVER, |transport| transport.finish(peer, handle, reader))
    }

    fn give_up(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<(), TransportError> {
        self.call(peer, &NEVER, |transport| transport.give_up(peer, handle, reader))
    }

    fn release(&self, peer: &Peer, handle: Handle, reason: &str) -> Result<ReleaseReply, TransportError> {
        self.call(peer, &NEVER, |transport| transport.release(peer, handle, reason))
    }

    fn leave(
        &self,
        peer: &Peer,
        handle: Handle,
        consumer: u64,
        reason: &str,
    ) -> Result<ReleaseReply, TransportError> {
        self.call(peer, &NEVER, |transport| transport.leave(peer, handle, consumer, reason))
    }

    fn heartbeat(&self, peer: &Peer, handles: &[Handle]) -> Result<Vec<HeartbeatReply>, TransportError> {
        self.call(peer, &NEVER, |transport| transport.heartbeat(peer, handles))
    }

    fn sweep(&self) {
        self.shm.sweep();
        self.tcp.sweep();
    }
}

#[cfg(test)]
mod tests {
    use baton_connector::Epoch;

    use super::*;

    fn peer(n: u64) -> Peer {
        Peer { address: ([127, 0, 0, 1], 1).into(), epoch: Epoch(n), fingerprint: 0 }
    }

    #[test]
    fn what_is_remembered_of_peers_is_bounded() {
        let mut known = Known::default();
        for n in 0..PEERS_MAX as u64 + 10 {
            known.remember(&peer(n), Carrier::Shm);
            known.remember(&peer(n), Carrier::Tcp(Instant::now()));
        }
        assert_eq!((known.carriers.len(), known.order.len()), (PEERS_MAX, PEERS_MAX));
        assert!(!known.carriers.contains_key(&peer(9)) && known.carriers.contains_key(&peer(10)));
        known.forget(&peer(10));
        known.forget(&peer(10));
        assert_eq!((known.carriers.len(), known.order.len()), (PEERS_MAX - 1, PEERS_MAX - 1));
    }
}
