//! The transport of a handoff's blocks. It is the first of these that works:
//! - NIXL, if it is enabled and both ends have it, between devices or between their host memories;
//! - direct copies between devices of one host, if both pools allow it;
//! - shared memory on one host;
//! - TCP.
//!
//! This module contains both ends: [`SideChannel`] serves other engines, and [`open_consumer_transport`] reads from
//! them.
//!
//! ```text
//! peer ─ known? ─ yes ───────────────────────────────────▶ nixl-device | nixl | device | shm | tcp
//!          └ no ─ NIXL is enabled and loaded, our pool is on a device, and the peer serves its device by NIXL?
//!                                                                       ─ yes ─▶ nixl-device; after a failed read:
//!                                                                                 tcp for a while
//!                 NIXL is enabled and loaded, and the peer serves it? ── yes ─▶ nixl; the same
//!                 our pool is on a device, and it can open the peer's? ─ yes ─▶ device; the same
//!                 a process on this host listens under the peer's epoch and port?
//!                   yes, and the handshake succeeds ─────▶ shm   until it fails once
//!                   no, or it belongs to another user ───▶ tcp   asked again after a while
//!                   silence, "gone" or "refused" ────────▶ final: TCP would reach the same engine
//! ```
//!
//! Another transport replaces only a connection that was never established. A read that breaks off is a failed read
//! with every transport, and the fetch decides what follows.

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
use baton_connector_tcp::{ClientOptions, ConnectError, ServerOptions, TcpServer, TcpTransport};

use crate::compute::cuda::shared_kv_pool::SharedKvPool;

/// The transport of blocks between engines.
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

/// The result of the search for NIXL.
#[derive(Clone, Debug)]
pub enum NixlState {
    /// Not enabled.
    Disabled,
    /// Enabled but not found: other transports carry the blocks.
    NotFound,
    /// Loaded.
    Loaded(Arc<dyn Library>),
}

impl NixlState {
    /// Looks for the library if the transport is NIXL: at `named`, or at its usual paths. A missing library is logged
    /// here, once.
    #[must_use]
    pub fn find(transport: KvTransport, named: Option<&Path>) -> Self {
        if transport != KvTransport::Nixl {
            return Self::Disabled;
        }
        match baton_connector_nixl::find::library(named) {
            Ok(library) => {
                tracing::info!(event = "nixl_loaded", library = library.origin(), "NIXL found");
                Self::Loaded(library)
            }
            Err(why) => {
                tracing::warn!(
                    event = "nixl_not_loaded", error = %why,
                    "NIXL not loaded, using shared memory and TCP"
                );
                Self::NotFound
            }
        }
    }

    /// Its label in metrics, and its path.
    #[must_use]
    pub fn label(&self) -> (&'static str, &str) {
        match self {
            Self::Disabled => ("disabled", ""),
            Self::NotFound => ("not_found", ""),
            Self::Loaded(library) => ("loaded", library.origin()),
        }
    }

    fn library(&self) -> Option<&Arc<dyn Library>> {
        match self {
            Self::Loaded(library) => Some(library),
            Self::Disabled | Self::NotFound => None,
        }
    }
}

/// Limit of the peers whose transport is remembered. With more producers, some transports are chosen again.
const PEERS_MAX: usize = 1_024;

/// How long a peer uses TCP before shared memory is tried again: its socket may have been full.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// The transport bounds messages about leases; they need no stop flag.
static NEVER: AtomicBool = AtomicBool::new(false);

/// The server of one producer's blocks for other engines.
pub struct SideChannel {
    tcp: TcpServer,
    shm: Option<ShmServer>,
}

impl SideChannel {
    /// Serves on a bound listener, and in shared memory under the producer's epoch and the listener's port.
    /// `shared_pool` is set if the producer's region mirrors a device's memory.
    ///
    /// # Errors
    /// As [`TcpServer::start`], and for [`KvTransport::Shm`] if shared memory is not available.
    pub fn start(
        transport: KvTransport,
        nixl: &NixlState,
        listener: TcpListener,
        producer: &Arc<dyn Producer>,
        shared_pool: Option<&Arc<SharedKvPool>>,
        options: &ServerOptions,
    ) -> io::Result<Self> {
        let side_port = listener.local_addr()?.port();
        let services =
            nixl.library().map_or_else(Vec::new, |library| nixl_servers(library, producer, shared_pool));
        let tcp = TcpServer::start_with_services(listener, Arc::clone(producer), services, options.clone())?;
        let shm = || {
            let listener = baton_connector_shm::listen(producer.epoch(), side_port)?;
            let services = shared_pool.and_then(device_server).into_iter().collect();
            ShmServer::start_with_services(listener, Arc::clone(producer), services, options.clone())
        };
        let shm = match transport {
            KvTransport::Tcp => None,
            KvTransport::Shm => Some(shm()?),
            KvTransport::Auto | KvTransport::Nixl => match shm() {
                Ok(server) => Some(server),
                Err(error) => {
                    tracing::warn!(
                        event = "shared_memory_not_served", %error,
                        "cannot serve KV blocks by shared memory"
                    );
                    None
                }
            },
        };
        Ok(Self { tcp, shm })
    }

    /// Stops listening and closes every connection. Pending reads fail.
    pub fn shutdown(self) {
        if let Some(shm) = self.shm {
            shm.shutdown();
        }
        self.tcp.shutdown();
    }
}

/// Serves a producer's blocks by NIXL: from its region, and from its device if there is one.
fn nixl_servers(
    library: &Arc<dyn Library>,
    producer: &Arc<dyn Producer>,
    shared_pool: Option<&Arc<SharedKvPool>>,
) -> Vec<Arc<dyn Serve>> {
    let on_host = baton_connector_nixl::producer(&**library, producer.region());
    let on_host = on_host.map_err(|why| {
        tracing::warn!(event = "nixl_not_served", error = %why, "cannot serve KV blocks by NIXL");
    });
    let on_device = shared_pool.map(|pool| {
        let pool = Arc::clone(pool) as Arc<dyn baton_connector_nixl::DevicePool>;
        let batch_bytes = baton_connector_nixl::DEVICE_BATCH_BYTES;
        let offered = baton_connector_nixl::device_producer(&**library, pool, batch_bytes);
        offered.map_err(|why| {
            tracing::warn!(
                event = "nixl_device_not_served", error = %why,
                "cannot serve device memory by NIXL, using host memory"
            );
        })
    });
    on_host.into_iter().chain(on_device.into_iter().flatten()).collect()
}

/// Serves a device's pool, unless the device does not export it. The shared memory server carries this service.
fn device_server(shared_pool: &Arc<SharedKvPool>) -> Option<Arc<dyn Serve>> {
    let pool = Arc::clone(shared_pool) as Arc<dyn DevicePool>;
    let offered =
        baton_connector_device::producer(pool, shared_pool.region(), baton_connector_device::BATCH_BYTES);
    let refused = |why| {
        tracing::warn!(
            event = "device_memory_not_served", error = %why,
            "cannot serve device memory, using host memory"
        );
    };
    offered.map_err(refused).ok()
}

/// The transport that reads other engines' blocks. `shared_pool` is this engine's pool if it is on a device.
#[must_use]
pub fn open_consumer_transport(
    transport: KvTransport,
    nixl: &NixlState,
    shared_pool: Option<Arc<SharedKvPool>>,
    options: &ClientOptions,
) -> Arc<dyn Transport> {
    match transport {
        KvTransport::Auto | KvTransport::Nixl => Arc::new(AutoTransport::new(nixl, shared_pool, options)),
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
    /// Since this time.
    Tcp(Instant),
}

/// The chosen carriers of peers; the oldest is removed first.
#[derive(Default)]
struct KnownCarriers {
    carriers: HashMap<Peer, Carrier>,
    order: VecDeque<Peer>,
}

impl KnownCarriers {
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

/// NIXL if available; otherwise the most direct carrier, from device to device to TCP.
struct AutoTransport {
    nixl_device: Option<NixlDeviceTransport>,
    nixl: Option<NixlTransport>,
    device: Option<DeviceTransport>,
    shm: ShmTransport,
    tcp: TcpTransport,
    known: Mutex<KnownCarriers>,
}

impl AutoTransport {
    fn new(nixl: &NixlState, shared_pool: Option<Arc<SharedKvPool>>, options: &ClientOptions) -> Self {
        let nixl = nixl.library().map(Arc::clone);
        let nixl_device = nixl.clone().zip(shared_pool.clone()).map(|(library, shared_pool)| {
            baton_connector_nixl::device_transport(library, shared_pool, options.clone())
        });
        Self {
            nixl_device,
            device: shared_pool
                .map(|shared_pool| baton_connector_device::transport(shared_pool, options.clone())),
            nixl: nixl.map(|library| baton_connector_nixl::transport(library, options.clone())),
            shm: ShmTransport::new(options.clone()),
            tcp: TcpTransport::new(options.clone()),
            known: Mutex::default(),
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownCarriers> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, peer: &Peer, stop: &StopFlag) -> Result<Carrier, TransportError> {
        match self.known().carriers.get(peer) {
            Some(&Carrier::Tcp(since)) if since.elapsed() >= RETRY_AFTER => {}
            Some(&carrier) => return Ok(carrier),
            None => {}
        }
        // The lock is not held during the connection attempts.
        let carrier = self.choose_carrier(peer, stop).map_err(|why| why.into_transport_error(peer))?;
        self.known().remember(peer, carrier);
        Ok(carrier)
    }

    fn choose_carrier(&self, peer: &Peer, stop: &StopFlag) -> Result<Carrier, ConnectError> {
        for carrier in [Carrier::NixlDevice, Carrier::Nixl, Carrier::Device, Carrier::Shm] {
            let reached = match carrier {
                Carrier::NixlDevice => {
                    self.nixl_device.as_ref().map(|nixl| nixl.ensure_connected(peer, stop))
                }
                Carrier::Nixl => self.nixl.as_ref().map(|nixl| nixl.ensure_connected(peer, stop)),
                Carrier::Device => self.device.as_ref().map(|device| device.ensure_connected(peer, stop)),
                Carrier::Shm => Some(self.shm.ensure_connected(peer, stop)),
                Carrier::Tcp(_) => None,
            };
            let Some(reached) = reached else { continue };
            match reached {
                Ok(()) => return Ok(carrier),
                Err(ConnectError::Unreachable(why)) if carrier == Carrier::NixlDevice => {
                    tracing::info!(
                        event = "peer_device_unreadable_by_nixl", peer = %peer.address, error = %why,
                        "cannot read the peer's device memory by NIXL"
                    );
                }
                Err(ConnectError::Unreachable(why)) if carrier == Carrier::Device => {
                    tracing::info!(
                        event = "peer_device_unreadable", peer = %peer.address, error = %why,
                        "cannot read the peer's device memory, using host memory"
                    );
                }
                Err(ConnectError::Unreachable(why)) => {
                    tracing::debug!(
                        event = "transport_unusable", peer = %peer.address,
                        transport = self.transport(carrier).carrier(peer), error = %why,
                        "transport not usable for this peer"
                    );
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

    /// Calls the peer's transport. If the connection is lost, chooses a transport once more.
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
            // The handshake does not show whether NIXL or a device can carry a read. A failed read therefore switches
            // the peer to TCP, so that later reads succeed.
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

impl Transport for AutoTransport {
    fn carrier(&self, peer: &Peer) -> &'static str {
        let known = self.known().carriers.get(peer).copied();
        known.map_or_else(|| self.tcp.carrier(peer), |carrier| self.transport(carrier).carrier(peer))
    }

    fn read_with(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        landed: &mut dyn FnMut(&[BlockId]),
    ) -> Result<(), TransportError> {
        self.call(peer, stop, |transport| transport.read_with(peer, order, region, stop, landed))
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
        self.nixl_device.iter().for_each(Transport::sweep);
        self.nixl.iter().for_each(Transport::sweep);
        self.device.iter().for_each(Transport::sweep);
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
    fn the_state_of_peers_is_bounded() {
        let mut known = KnownCarriers::default();
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
