//! The conformance suite of the TCP transport.

#[path = "../../tests/conformance/mod.rs"]
#[macro_use]
mod conformance;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::region::Region;
use baton_connector::transport::{Peer, Producer, Transport};
use baton_connector_tcp::{ClientOptions, Secret, ServerOptions, TcpServer, TcpTransport};
use conformance::{TestProducer, TransportHarness};

fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

const SILENCE: Duration = Duration::from_millis(700);

struct TcpHarness {
    server: Option<TcpServer>,
    transport: Arc<TcpTransport>,
    peer: Peer,
    producer: Arc<TestProducer>,
}

fn start(producer: Arc<TestProducer>) -> Box<dyn TransportHarness> {
    let secret = Some(Secret::new(b"a secret of the cluster").expect("long enough"));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let options = ServerOptions { secret: secret.clone(), silence: SILENCE, ..ServerOptions::default() };
    let server =
        TcpServer::start(listener, Arc::clone(&producer) as _, options).expect("a server on loopback");
    let peer =
        Peer { address: server.local_addr(), epoch: producer.epoch(), fingerprint: producer.fingerprint() };
    let options = ClientOptions { secret, silence: SILENCE, ..ClientOptions::default() };
    let transport = Arc::new(TcpTransport::new(options));
    Box::new(TcpHarness { server: Some(server), transport, peer, producer })
}

impl TransportHarness for TcpHarness {
    fn transport(&self) -> Arc<dyn Transport> {
        Arc::clone(&self.transport) as Arc<dyn Transport>
    }

    fn peer(&self) -> Peer {
        self.peer.clone()
    }

    fn kill(&mut self) {
        drop(self.server.take());
    }

    fn idle_connections(&self) -> usize {
        self.transport.idle_connections()
    }

    fn silence(&self) -> Duration {
        SILENCE
    }
}

impl Drop for TcpHarness {
    fn drop(&mut self) {
        // A read that a failed test left at the gate must not block the server's shutdown.
        self.producer.open_gate();
    }
}

transport_conformance!(start);
