//! A producer and a consumer over one library, real or simulated, and what the conformance suite wants of them.

// Compiled into several tests, of which each uses a part.
#![allow(unreachable_pub, dead_code)]

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::transport::{Peer, Producer, Transport};
use baton_connector_channel::Server;
use baton_connector_nixl::{
    ClientOptions, Library, NixlTransport, Secret, ServerOptions, producer, transport,
};

use super::conformance::{Lender, Wire};

/// How long the suite's ends bear silence.
pub const SILENCE: Duration = Duration::from_millis(700);

/// The secret of these tests' cluster.
pub fn secret() -> Option<Secret> {
    Some(Secret::new(b"a secret of the cluster").expect("long enough"))
}

/// A listener for NIXL alone; an engine serves it beside TCP. And how consumers find it.
pub fn serve(library: &dyn Library, lender: &Arc<Lender>, options: ServerOptions) -> (Server, Peer) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it listens");
    let offering = producer(library, lender.region()).expect("a pool that the library takes");
    let server = Server::start(listener.into(), Arc::clone(lender) as _, vec![offering], options);
    let peer = Peer { address, epoch: lender.epoch(), fingerprint: lender.fingerprint() };
    (server.expect("loopback"), peer)
}

/// Both ends as the conformance suite wants them: with a secret, and little patience.
pub struct Agents {
    server: Option<Server>,
    transport: Arc<NixlTransport>,
    peer: Peer,
    lender: Arc<Lender>,
}

impl Agents {
    /// Two agents of this library.
    pub fn start(library: Arc<dyn Library>, lender: Arc<Lender>) -> Box<dyn Wire> {
        let options = ServerOptions { secret: secret(), silence: SILENCE, ..ServerOptions::default() };
        let (server, peer) = serve(&*library, &lender, options);
        let options = ClientOptions { secret: secret(), silence: SILENCE, ..ClientOptions::default() };
        let transport = Arc::new(transport(library, options));
        Box::new(Self { server: Some(server), transport, peer, lender })
    }
}

impl Wire for Agents {
    fn transport(&self) -> Arc<dyn Transport> {
        Arc::clone(&self.transport) as Arc<dyn Transport>
    }

    fn peer(&self) -> Peer {
        self.peer.clone()
    }

    fn kill(&mut self) {
        self.server = None;
    }

    fn kept(&self) -> usize {
        self.transport.idle_connections()
    }

    fn silence(&self) -> Duration {
        SILENCE
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        // A read that a failed test left at the gate must not keep the server's shutdown waiting.
        self.lender.open_gate();
    }
}
