//! A producer and a consumer over one library, real or simulated, for the conformance suite.

// Compiled into several tests, of which each uses a part.
#![allow(unreachable_pub, dead_code, reason = "several test crates include this file")]

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::transport::{Peer, Producer, Transport};
use baton_connector_channel::Server;
use baton_connector_nixl::{ClientOptions, Library, NixlTransport, Secret, ServerOptions, transport};

use super::conformance::{TestProducer, TransportHarness};

/// The bound on silence of both ends.
pub const SILENCE: Duration = Duration::from_millis(700);

/// The secret of these tests' cluster.
pub fn secret() -> Option<Secret> {
    Some(Secret::new(b"a secret of the cluster").expect("long enough"))
}

/// A listener for NIXL alone, and its peer address. An engine also serves TCP on its listener.
pub fn serve(library: &dyn Library, producer: &Arc<TestProducer>, options: ServerOptions) -> (Server, Peer) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it listens");
    let offering =
        baton_connector_nixl::producer(library, producer.region()).expect("a pool that the library takes");
    let server = Server::start(listener.into(), Arc::clone(producer) as _, vec![offering], options);
    let peer = Peer { address, epoch: producer.epoch(), fingerprint: producer.fingerprint() };
    (server.expect("loopback"), peer)
}

/// Both ends for the conformance suite: with a secret, and a short bound on silence.
pub struct NixlHarness {
    server: Option<Server>,
    transport: Arc<NixlTransport>,
    peer: Peer,
    producer: Arc<TestProducer>,
}

impl NixlHarness {
    /// Starts two agents of this library.
    pub fn start(library: Arc<dyn Library>, producer: Arc<TestProducer>) -> Box<dyn TransportHarness> {
        let options = ServerOptions { secret: secret(), silence: SILENCE, ..ServerOptions::default() };
        let (server, peer) = serve(&*library, &producer, options);
        let options = ClientOptions { secret: secret(), silence: SILENCE, ..ClientOptions::default() };
        let transport = Arc::new(transport(library, options));
        Box::new(Self { server: Some(server), transport, peer, producer })
    }
}

impl TransportHarness for NixlHarness {
    fn transport(&self) -> Arc<dyn Transport> {
        Arc::clone(&self.transport) as Arc<dyn Transport>
    }

    fn peer(&self) -> Peer {
        self.peer.clone()
    }

    fn kill(&mut self) {
        self.server = None;
    }

    fn idle_connections(&self) -> usize {
        self.transport.idle_connections()
    }

    fn silence(&self) -> Duration {
        SILENCE
    }
}

impl Drop for NixlHarness {
    fn drop(&mut self) {
        // A read that a failed test left at the gate must not block the server's shutdown.
        self.producer.open_gate();
    }
}
