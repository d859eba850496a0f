//! TCP keeps the promises of every transport.

#[path = "../../tests/conformance/mod.rs"]
#[macro_use]
mod conformance;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::region::Region;
use baton_connector::transport::{Peer, Producer, Transport};
use baton_connector_tcp::{ClientOptions, Secret, ServerOptions, TcpServer, TcpTransport};
use conformance::{Lender, Wire};

fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

const SILENCE: Duration = Duration::from_millis(700);

struct Loopback {
    server: Option<TcpServer>,
    transport: Arc<TcpTransport>,
    peer: Peer,
    lender: Arc<Lender>,
}

fn start(lender: Arc<Lender>) -> Box<dyn Wire> {
    let secret = Some(Secret::new(b"a secret of the cluster").expect("long enough"));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let options = ServerOptions { secret: secret.clone(), silence: SILENCE, ..ServerOptions::default() };
    let producer = Arc::clone(&lender);
    let server = TcpServer::start(listener, producer, options).expect("a server on loopback");
    let peer =
        Peer { address: server.local_addr(), epoch: lender.epoch(), fingerprint: lender.fingerprint() };
    let options = ClientOptions { secret, silence: SILENCE, ..ClientOptions::default() };
    let transport = Arc::new(TcpTransport::new(options));
    Box::new(Loopback { server: Some(server), transport, peer, lender })
}

impl Wire for Loopback {
    fn transport(&self) -> Arc<dyn Transport> {
        Arc::clone(&self.transport) as Arc<dyn Transport>
    }

    fn peer(&self) -> Peer {
        self.peer.clone()
    }

    fn kill(&mut self) {
        drop(self.server.take());
    }

    fn kept(&self) -> usize {
        self.transport.idle_connections()
    }

    fn silence(&self) -> Duration {
        SILENCE
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        // A read that a failed test left at the gate must not keep the server's shutdown waiting.
        self.lender.open_gate();
    }
}

transport_conformance!(start);
