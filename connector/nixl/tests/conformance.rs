//! NIXL keeps the promises of every transport: with simulated agents here, with the real library in `real.rs`.

#[path = "../../tests/conformance/mod.rs"]
#[macro_use]
mod conformance;
mod simulated;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::region::Region;
use baton_connector::transport::{Peer, Producer, Transport};
use baton_connector_nixl::{ClientOptions, NixlServer, NixlTransport, Secret, ServerOptions, transport};
use conformance::{Lender, Wire};
use simulated::{Handle, Simulated};

const SILENCE: Duration = Duration::from_millis(700);

fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

struct Agents {
    server: Option<NixlServer>,
    transport: Arc<NixlTransport>,
    peer: Peer,
    lender: Arc<Lender>,
}

fn start(lender: Arc<Lender>) -> Box<dyn Wire> {
    let library = Simulated::new();
    let secret = Some(Secret::new(b"a secret of the cluster").expect("long enough"));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let options = ServerOptions { secret: secret.clone(), silence: SILENCE, ..ServerOptions::default() };
    let producer = Arc::clone(&lender) as _;
    let server =
        NixlServer::start(&Handle(Arc::clone(&library)), listener, producer, options).expect("a server");
    let peer =
        Peer { address: server.local_addr(), epoch: lender.epoch(), fingerprint: lender.fingerprint() };
    let options = ClientOptions { secret, silence: SILENCE, ..ClientOptions::default() };
    let transport = Arc::new(transport(Arc::new(Handle(library)), options));
    Box::new(Agents { server: Some(server), transport, peer, lender })
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

transport_conformance!(start);
