//! The conformance suite of the shared-memory transport.

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
use baton_connector_shm::{
    ClientOptions, Secret, ServerOptions, ShmServer, ShmTransport, listen, shared_pool,
};
use conformance::{TestProducer, TransportHarness};

const SILENCE: Duration = Duration::from_millis(700);

fn pool(blocks: usize, block_bytes: usize) -> Region {
    shared_pool(blocks, block_bytes).expect("a system with memfd and seals")
}

struct ShmHarness {
    servers: Vec<ShmServer>,
    transport: Arc<ShmTransport>,
    peer: Peer,
    producer: Arc<TestProducer>,
}

/// An address that no other test of this process or of another uses. Listeners bind names made from it.
fn address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port =
        (std::process::id() as u16).wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn start(producer: Arc<TestProducer>) -> Box<dyn TransportHarness> {
    let secret = Some(Secret::new(b"a secret of the cluster").expect("long enough"));
    let address = address();
    // The producer also listens on the name of another epoch: the handshake decides, not the name.
    let servers = [producer.epoch(), Epoch(1)].map(|epoch| {
        let listener = listen(epoch, address.port()).expect("a free name");
        let options = ServerOptions { secret: secret.clone(), silence: SILENCE, ..ServerOptions::default() };
        ShmServer::start(listener, Arc::clone(&producer) as _, options).expect("a server")
    });
    let peer = Peer { address, epoch: producer.epoch(), fingerprint: producer.fingerprint() };
    let options = ClientOptions { secret, silence: SILENCE, ..ClientOptions::default() };
    let transport = Arc::new(ShmTransport::new(options));
    Box::new(ShmHarness { servers: servers.into(), transport, peer, producer })
}

impl TransportHarness for ShmHarness {
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

impl Drop for ShmHarness {
    fn drop(&mut self) {
        // A read that a failed test left at the gate must not block the server's shutdown.
        self.producer.open_gate();
    }
}

transport_conformance!(start);
