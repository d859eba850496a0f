//! The device transport keeps the promises of every transport, on pools of software devices. This suite is one process,
//! and a process cannot open what it exported by CUDA IPC itself: on a GPU `baton bench gpu-ipc` moves blocks between two.

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
    ClientOptions, DeviceTransport, Secret, ServerOptions, Software, producer, transport,
};
use baton_connector_shm::{ShmServer, listen, shared_pool};
use conformance::{Lender, Wire};

/// Smaller than in engines, so that a read of a few blocks has a middle.
const BATCH_BYTES: usize = 1 << 20;
const SILENCE: Duration = Duration::from_millis(700);

fn pool(blocks: usize, block_bytes: usize) -> Region {
    shared_pool(blocks, block_bytes).expect("a system with memfd and seals")
}

struct OneHost {
    servers: Vec<ShmServer>,
    transport: Arc<DeviceTransport>,
    peer: Peer,
    lender: Arc<Lender>,
}

/// A name that no other test of this process or of another has: there is nothing to listen on but names.
fn address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port =
        (std::process::id() as u16).wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::from(([127, 0, 0, 3], port))
}

fn start(lender: Arc<Lender>) -> Box<dyn Wire> {
    let secret = Some(Secret::new(b"a secret of the cluster").expect("long enough"));
    let address = address();
    // It answers to the name of another epoch too: the name only finds a producer, the handshake decides.
    let servers = [lender.epoch(), Epoch(1)].map(|epoch| {
        let listener = listen(epoch, address.port()).expect("a free name");
        let options = ServerOptions { secret: secret.clone(), silence: SILENCE, ..ServerOptions::default() };
        let pool = Arc::new(Software::over(lender.region().clone()));
        let offered = producer(pool, lender.region(), BATCH_BYTES).expect("memory that can be shared");
        ShmServer::start_beside(listener, Arc::clone(&lender) as _, vec![offered], options).expect("a server")
    });
    let peer = Peer { address, epoch: lender.epoch(), fingerprint: lender.fingerprint() };
    let options = ClientOptions { secret, silence: SILENCE, ..ClientOptions::default() };
    let transport = Arc::new(transport(Arc::new(Software::over(Region::allocate(1, 1))), options));
    Box::new(OneHost { servers: servers.into(), transport, peer, lender })
}

impl Wire for OneHost {
    fn transport(&self) -> Arc<dyn Transport> {
        Arc::clone(&self.transport) as Arc<dyn Transport>
    }

    fn peer(&self) -> Peer {
        self.peer.clone()
    }

    fn kill(&mut self) {
        self.servers.clear();
    }

    fn kept(&self) -> usize {
        self.transport.idle_connections()
    }

    fn silence(&self) -> Duration {
        SILENCE
    }
}

impl Drop for OneHost {
    fn drop(&mut self) {
        // A read that a failed test left at the gate must not keep the server's shutdown waiting.
        self.lender.open_gate();
    }
}

transport_conformance!(start);
