//! Which transport carries a handoff's blocks: NIXL where it was asked for and both ends have it, from device to device or
//! between their host sides; otherwise from device to
//! device where both pools are in such memory on one host, shared memory where producer and consumer are on one host, and
//! TCP between hosts. Both ends are here, as [`SideChannel`] (what other engines read) and [`consumer`] (what reads them).
//!
//! ```text
//! peer ─ known? ─ yes ───────────────────────────────────▶ nixl-device | nixl | device | shm | tcp
//!          └ no ─ NIXL was asked for, is here, our pool is on a device, and so is the peer's, which serves it?
//!                                                                       ─ yes ─▶ nixl-device; a read that breaks off:
//!                                                                                 tcp for a while
//!                 NIXL was asked for, is here, and the peer serves it? ─ yes ─▶ nixl; the same
//!                 our pool is on a device, and it can open the peer's? ─ yes ─▶ device; the same
//!                 somebody of us listens here under the peer's epoch and port?
//!                   yes, and the handshake succeeds ─────▶ shm   until it fails once
//!                   no, or not one of us ────────────────▶ tcp   asked again after a while
//!                   says nothing, or "gone", or "refused" ▶ that is the answer: TCP would wait for the same engine
//! ```
//!
//! Only a connection that never came about is made up for with another transport. A read that breaks off is a failed read,
//! whatever carried it: what becomes of it is the fetch's to decide.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::transport::{Peer, Producer, ReadOrder, StopFlag, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Handle, Reader};
use baton_connector_device::{DevicePool, DeviceTransport, Serve};
use baton_connector_nixl::{Library, NixlDeviceTransport, NixlTransport};
use baton_connector_shm::{ShmServer, ShmTransport};
use baton_connector_tcp::{ClientOptions, NotAdmitted, ServerOptions, TcpServer, TcpTransport};

use crate::compute::cuda::port::Port;

/// How blocks travel between engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvTransport {
    /// Device to device or shared memory between engines of one host, TCP between others.
    #[default]
    Auto,
    /// Reads shared memory only: a producer of another host is an error. TCP is still served.
    Shm,
    /// TCP only: this engine neither reads shared memory or devices nor offers its own.
    Tcp,
    /// NIXL where both engines have it, as [`Self::Auto`] otherwise.
    Nixl,
}

/// NIXL as this engine found it.
#[derive(Clone, Debug)]
pub enum FoundNixl {
    /// Nobody asked for it.
    Unwanted,
    /// Asked for, and not to be had: blocks travel otherwise.
    Missing,
    /// Here.
    Here(Arc<dyn Library>),
}

impl FoundNixl {
    /// Looks for the library if the transport is for it: at `named`, or wherever it may be. What is missing is said
    /// once, here.
    #[must_use]
    pub fn look(transport: KvTransport, named: Option<&Path>) -> Self {
        if transport != KvTransport::Nixl {
            return Self::Unwanted;
        }
        match baton_connector_nixl::find::library(named) {
            Ok(library) => {
                tracing::info!(library = library.origin(), "NIXL found");
                Self::Here(library)
            }
            Err(why) => {
                tracing::warn!(error = %why, "NIXL not loaded, using shared memory and TCP");
                Self::Missing
            }
        }
    }

    /// What it is called in metrics, and where it is.
    #[must_use]
    pub fn label(&self) -> (&'static str, &str) {
        match self {
            Self::Unwanted => ("disabled", ""),
            Self::Missing => ("not_found", ""),
            Self::Here(library) => ("loaded", library.origin()),
        }
    }

    fn library(&self) -> Option<&Arc<dyn Library>> {
        match self {
            Self::Here(library) => Some(library),
            Self::Unwanted | Self::Missing => None,
        }
    }
}

/// Peers whose transport is remembered. A cluster with more producers asks some of them again.
const PEERS_MAX: usize = 1_024;

/// A peer that was not found on this host is looked for again after this long: its socket may have been full.
const ASK_AGAIN: Duration = Duration::from_secs(30);

/// Messages about leases are bounded by the transport; nobody stops them.
static NEVER: AtomicBool = AtomicBool::new(false);

/// What other engines read the blocks of one producer from.
pub struct SideChannel {
    tcp: TcpServer,
    shm: Option<ShmServer>,
}

impl SideChannel {
    /// Serves on a bound listener, and under the name of the producer's epoch and the listener's port. `port` is the pool
    /// where it is in a device's memory, whose mirror is then the producer's region.
    ///
    /// # Errors
    /// As [`TcpServer::start`]; and when shared memory was asked for expressly and is not to be had.
    pub fn start(
        (transport, nixl): (KvTransport, &FoundNixl),
        listener: TcpListener,
        producer: &Arc<dyn Producer>,
        port: Option<&Arc<Port>>,
        options: &ServerOptions,
    ) -> io::Result<Self> {
        let side_port = listener.local_addr()?.port();
        let beside = nixl.library().map_or_else(Vec::new, |library| offered_by_nixl(library, producer, port));
        let tcp = TcpServer::start_beside(listener, Arc::clone(producer), beside, options.clone())?;
        let shm = || {
            let listener = baton_connector_shm::listen(producer.epoch(), side_port)?;
            let beside = port.and_then(offered_device).into_iter().collect();
            ShmServer::start_beside(listener, Arc::clone(producer), beside, options.clone())
        };
        let shm = match transport {
            KvTransport::Tcp => None,
            KvTransport::Shm => Some(shm()?),
            KvTransport::Auto | KvTransport::Nixl => match shm() {
                Ok(server) => Some(server),
                Err(error) => {
                    tracing::warn!(%error, "cannot serve KV blocks by shared memory");
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

/// What serves a producer's blocks by NIXL: from its region, and from its device if there is one.
fn offered_by_nixl(
    library: &Arc<dyn Library>,
    producer: &Arc<dyn Producer>,
    port: Option<&Arc<Port>>,
) -> Vec<Arc<dyn Serve>> {
    let on_host = baton_connector_nixl::producer(&**library, producer.region());
    let on_host = on_host.map_err(|why| tracing::warn!(error = %why, "cannot serve KV blocks by NIXL"));
    let on_device = port.map(|port| {
        let pool = Arc::clone(port) as Arc<dyn baton_connector_nixl::DevicePool>;
        let batch_bytes = baton_connector_nixl::DEVICE_BATCH_BYTES;
        let offered = baton_connector_nixl::device_producer(&**library, pool, batch_bytes);
        let refused =
            |why| tracing::warn!(error = %why, "cannot serve device memory by NIXL, using host memory");
        offered.map_err(refused)
    });
    on_host.into_iter().chain(on_device.into_iter().flatten()).collect()
}

/// What serves a device's pool beside shared memory, unless the device does not export it.
fn offered_device(port: &Arc<Port>) -> Option<Arc<dyn Serve>> {
    let pool = Arc::clone(port) as Arc<dyn DevicePool>;
    let offered = baton_connector_device::producer(pool, port.region(), baton_connector_device::BATCH_BYTES);
    let refused = |why| tracing::warn!(error = %why, "cannot serve device memory, using host memory");
    offered.map_err(refused).ok()
}

/// What reads other engines' blocks; `port` is our own pool where it is in a device's memory.
#[must_use]
pub fn consumer(
    transport: KvTransport,
    nixl: &FoundNixl,
    port: Option<Arc<Port>>,
    options: &ClientOptions,
) -> Arc<dyn Transport> {
    match transport {
        KvTransport::Auto | KvTransport::Nixl => Arc::new(Nearest::new(nixl, port, options)),
        KvTransport::Shm => Arc::new(ShmTransport::new(options.clone())),
        KvTransport::Tcp => Arc::new(TcpTransport::new(options.clone())),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    NixlDevice,
    Nixl,
    Device,
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

/// NIXL where there is any; otherwise what is nearest, from device to device to TCP.
struct Nearest {
    nixl_device: Option<NixlDeviceTransport>,
    nixl: Option<NixlTransport>,
    device: Option<DeviceTransport>,
    shm: ShmTransport,
    tcp: TcpTransport,
    known: Mutex<Known>,
}

impl Nearest {
    fn new(nixl: &FoundNixl, port: Option<Arc<Port>>, options: &ClientOptions) -> Self {
        let nixl = nixl.library().map(Arc::clone);
        let nixl_device = nixl
            .clone()
            .zip(port.clone())
            .map(|(library, port)| baton_connector_nixl::device_transport(library, port, options.clone()));
        Self {
            nixl_device,
            device: port.map(|port| baton_connector_device::transport(port, options.clone())),
            nixl: nixl.map(|library| baton_connector_nixl::transport(library, options.clone())),
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
        let carrier = self.nearest(peer, stop).map_err(|why| why.of(peer))?;
        self.known().remember(peer, carrier);
        Ok(carrier)
    }

    fn nearest(&self, peer: &Peer, stop: &StopFlag) -> Result<Carrier, NotAdmitted> {
        for carrier in [Carrier::NixlDevice, Carrier::Nixl, Carrier::Device, Carrier::Shm] {
            let reached = match carrier {
                Carrier::NixlDevice => self.nixl_device.as_ref().map(|nixl| nixl.reach(peer, stop)),
                Carrier::Nixl => self.nixl.as_ref().map(|nixl| nixl.reach(peer, stop)),
                Carrier::Device => self.device.as_ref().map(|device| device.reach(peer, stop)),
                Carrier::Shm => Some(self.shm.reach(peer, stop)),
                Carrier::Tcp(_) => None,
            };
            let Some(reached) = reached else { continue };
            match reached {
                Ok(()) => return Ok(carrier),
                Err(NotAdmitted::Absent(why)) if carrier == Carrier::NixlDevice => {
                    tracing::info!(peer = %peer.address, error = %why, "cannot read the peer's device memory by NIXL");
                }
                Err(NotAdmitted::Absent(why)) if carrier == Carrier::Device => {
                    tracing::info!(peer = %peer.address, error = %why, "cannot read the peer's device memory, using host memory");
                }
                Err(NotAdmitted::Absent(why)) => {
                    tracing::debug!(peer = %peer.address, ?carrier, error = %why, "transport not usable for this peer");
                }
                Err(other) => return Err(other),
            }
        }
        Ok(Carrier::Tcp(Instant::now()))
    }

    /// The carrier's transport.
    fn transport(&self, carrier: Carrier) -> &dyn Transport {
        let special = match carrier {
            Carrier::NixlDevice => self.nixl_device.as_ref().map(|nixl| nixl as &dyn Transport),
            Carrier::Nixl => self.nixl.as_ref().map(|nixl| nixl as _),
            Carrier::Device => self.device.as_ref().map(|device| device as _),
            Carrier::Shm => Some(&self.shm as _),
            Carrier::Tcp(_) => None,
        };
        special.unwrap_or(&self.tcp)
    }

    /// Calls the peer's transport. If there is no connection any more, looks once more which one that is.
    fn call<T>(
        &self,
        peer: &Peer,
        stop: &StopFlag,
        mut call: impl FnMut(&dyn Transport) -> Result<T, TransportError>,
    ) -> Result<T, TransportError> {
        let carrier = self.find(peer, stop)?;
        let result = call(self.transport(carrier));
        match (&result, carrier) {
            (
                Err(TransportError::Handshake(..)),
                Carrier::NixlDevice | Carrier::Nixl | Carrier::Device | Carrier::Shm,
            ) => {
                self.known().forget(peer);
                call(self.transport(self.find(peer, stop)?))
            }
            // The handshake is ours and says little of what NIXL or a device can do: a read that it cannot carry must not
            // be the fate of every read.
            (Err(TransportError::Transfer(_)), Carrier::NixlDevice | Carrier::Nixl | Carrier::Device) => {
                self.known().remember(peer, Carrier::Tcp(Instant::now()));
                result
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
        let known = self.known().carriers.get(peer).copied();
        known.map_or_else(|| self.tcp.carrier(peer), |carrier| self.transport(carrier).carrier(peer))
    }

    fn read(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
    ) -> Result<(), TransportError> {
        self.read_telling(peer, order, region, stop, &mut |_| ())
    }

    fn read_telling(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<(), TransportError> {
        self.call(peer, stop, |transport| transport.read_telling(peer, order, region, stop, landed))
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
        if let Some(nixl) = &self.nixl_device {
            nixl.sweep();
        }
        if let Some(nixl) = &self.nixl {
            nixl.sweep();
        }
        if let Some(device) = &self.device {
            device.sweep();
        }
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
