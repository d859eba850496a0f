//! The conformance suite of the device transport, on pools of software devices. The suite is one process, and a process
//! cannot open its own CUDA IPC exports. `baton bench gpu-ipc` moves blocks between two processes on a GPU.

#[path = "../../tests/conformance/mod.rs"]
#[macro_use]
mod conformance;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use baton_connector::Epoch;
use baton_connector::region::Region;
use baton_connector::transport::{Peer, Producer, Transport};
use baton_connector_device::{
    ClientOptions, DeviceTransport, Secret, ServerOptions, SoftwarePool, transport,
};
use baton_connector_shm::{ShmServer, listen, shared_pool};
use conformance::{TestProducer, TransportHarness};

/// Smaller than in engines, so that a read of a few blocks takes several batches.
const BATCH_BYTES: usize = 1 << 20;
const SILENCE: Duration = Duration::from_millis(700);

fn pool(blocks: usize, block_bytes: usize) -> Region {
    shared_pool(blocks, block_bytes).expect("a system with memfd and seals")
}

struct DeviceHarness {
    servers: Vec<ShmServer>,
    transport: Arc<DeviceTransport>,
    peer: Peer,
    producer: Arc<TestProducer>,
}

/// An address that no other test of this process or of another uses. Listeners bind names made from it.
fn address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port =
        (std::process::id() as u16).wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::from(([127, 0, 0, 3], port))
}

fn start(producer: Arc<TestProducer>) -> Box<dyn TransportHarness> {
    let secret = Some(Secret::new(b"a secret of the cluster").expect("long enough"));
    let address = address();
    // The producer also listens on the name of another epoch: the handshake decides, not the name.
    let servers = [producer.epoch(), Epoch(1)].map(|epoch| {
        let listener = listen(epoch, address.port()).expect("a free name");
        let options = ServerOptions { secret: secret.clone(), silence: SILENCE, ..ServerOptions::default() };
        let pool = Arc::new(SoftwarePool::over(producer.region().clone()));
        let offered = baton_connector_device::producer(pool, producer.region(), BATCH_BYTES)
            .expect("memory that can be shared");
        ShmServer::start_with_services(listener, Arc::clone(&producer) as _, vec![offered], options)
            .expect("a server")
    });
    let peer = Peer { address, epoch: producer.epoch(), fingerprint: producer.fingerprint() };
    let options = ClientOptions { secret, silence: SILENCE, ..ClientOptions::default() };
    let transport = Arc::new(transport(Arc::new(SoftwarePool::over(Region::allocate(1, 1))), options));
    Box::new(DeviceHarness { servers: servers.into(), transport, peer, producer })
}

impl TransportHarness for DeviceHarness {
    fn transport(&self) -> Arc<dyn Transport> {
        Arc::clone(&self.transport) as Arc<dyn Transport>
    }

    fn peer(&self) -> Peer {
        self.peer.clone()
    }

    fn kill(&mut self) {
        self.servers.clear();
    }

    fn idle_connections(&self) -> usize {
        self.transport.idle_connections()
    }

    fn silence(&self) -> Duration {
        SILENCE
    }
}

impl Drop for DeviceHarness {
    fn drop(&mut self) {
        // A read that a failed test left at the gate must not block the server's shutdown.
        self.producer.open_gate();
    }
}

transport_conformance!(start);
