//! Producers with false information about their pool, their agent or the granted blocks. The consumer closes the
//! connection before a byte is transferred. A producer without NIXL is detected at once.

#[path = "../../tests/conformance/mod.rs"]
#[allow(
    unused_imports,
    unused_macros,
    dead_code,
    reason = "the suite's vocabulary; its cases run in conformance.rs"
)]
mod conformance;
mod simulated;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use baton_connector::lease::LeaseTerms;
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, Producer, ReadOrder, Transport, TransportError};
use baton_connector::{BlockId, Reader};
use baton_connector_channel::handshake::Service;
use baton_connector_channel::socket::{ChannelError, ChannelSocket, WaitLimit};
use baton_connector_channel::wire::{Header, KIND_BATCH};
use baton_connector_channel::{ConnectError, Delivery, GrantedRead, Serve, Server};
use baton_connector_nixl::{ClientOptions, NixlTransport, ServerOptions, transport};
use conformance::TestProducer;
use simulated::{Simulated, SimulatedLibrary, host, metadata};
use socket2::Socket;

fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

const BLOCK: usize = 4096;
const BLOCKS: usize = 16;
const SILENCE: Duration = Duration::from_millis(500);
/// Tolerance for a loaded machine.
const SLACK: Duration = Duration::from_secs(3);
static GO: AtomicBool = AtomicBool::new(false);

/// A producer that sends the given offer and grants.
struct HostileService {
    offer: Vec<u8>,
    /// Block ids of its only batch.
    ids: Vec<u32>,
}

impl Serve for HostileService {
    fn name(&self) -> &'static str {
        "nixl"
    }

    fn service(&self) -> Service {
        Service::Nixl
    }

    fn check_socket(&self, _socket: &Socket) -> io::Result<()> {
        Ok(())
    }

    fn send_offer(
        &self,
        socket: &mut ChannelSocket,
        _producer: &dyn Producer,
        until: WaitLimit<'_>,
    ) -> Result<(), ChannelError> {
        socket.send(&self.offer, until)
    }

    fn deliver(
        &self,
        socket: &mut ChannelSocket,
        granted: &GrantedRead<'_>,
    ) -> Result<Delivery, ChannelError> {
        let mut frames = granted.granted_frame();
        frames.extend(Header { kind: KIND_BATCH, len: 4 * self.ids.len() }.encode());
        self.ids.iter().for_each(|id| frames.extend(id.to_le_bytes()));
        socket.send(&frames, granted.wait_limit())?;
        Ok(Delivery::Complete)
    }
}

/// The encoded offer of a producer with a pool at `base`.
fn offer(block_bytes: u64, blocks: u64, base: u64, name: &str, metadata: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    [block_bytes, blocks, base].iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    bytes.extend((name.len() as u16).to_le_bytes());
    bytes.extend((metadata.len() as u32).to_le_bytes());
    bytes.extend(name.as_bytes());
    bytes.extend(metadata);
    bytes
}

struct HostileSetup {
    library: Arc<Simulated>,
    producer: Arc<TestProducer>,
    transport: NixlTransport,
    peer: Peer,
    region: Region,
    _server: Server,
}

impl HostileSetup {
    /// A producer with the offer that `forge` makes of the pool's address.
    fn with(ids: &[u32], forge: impl Fn(u64, usize) -> Vec<u8>) -> Self {
        let producer = TestProducer::new(BLOCKS, BLOCK, LeaseTerms::default());
        let base = producer.region().block_ptr(BlockId(0)).expose_provenance();
        let hostile = HostileService { offer: forge(base as u64, base), ids: ids.to_vec() };
        let (server, address) = listening(&producer, Arc::new(hostile));
        let library = Simulated::new();
        let options = ClientOptions { silence: SILENCE, ..ClientOptions::default() };
        let transport = transport(Arc::new(SimulatedLibrary(Arc::clone(&library))), options);
        let peer = Peer { address, epoch: producer.epoch(), fingerprint: producer.fingerprint() };
        let region = Region::allocate(BLOCKS, BLOCK);
        (0..BLOCKS as u32).for_each(|block| region.write_block(BlockId(block), &[0xee; BLOCK]));
        Self { library, producer, transport, peer, region, _server: server }
    }

    fn read(&self) -> Result<(), TransportError> {
        let handle = self.producer.lease(&[1, 2], 1);
        let into = vec![BlockId(4), BlockId(9)];
        let order = ReadOrder { handle, reader: Reader::sole(1), part: Part::Blocks { first: 0 }, into };
        self.transport.read(&self.peer, &order, &self.region, &GO)
    }

    fn nothing_moved(&self) {
        assert_eq!(self.library.largest(), (0, 0), "a request was prepared");
        for block in 0..BLOCKS as u32 {
            assert!(self.region.read_block(BlockId(block)).iter().all(|&byte| byte == 0xee), "block {block}");
        }
    }
}

fn listening(producer: &Arc<TestProducer>, serve: Arc<dyn Serve>) -> (Server, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it listens");
    let options = ServerOptions { silence: SILENCE, ..ServerOptions::default() };
    let server = Server::start(listener.into(), Arc::clone(producer) as _, vec![serve], options);
    (server.expect("loopback"), address)
}

fn honest(base: u64, at: usize) -> Vec<u8> {
    offer(BLOCK as u64, BLOCKS as u64, base, "p", &metadata("p", &[host(at, BLOCKS * BLOCK)]))
}

#[test]
fn an_honest_producer_of_this_test_is_read() {
    let setup = HostileSetup::with(&[1, 2], honest);
    assert_eq!(setup.read(), Ok(()));
    for (here, there) in [(4, 1), (9, 2)] {
        assert_eq!(
            setup.region.read_block(BlockId(here)),
            setup.producer.region().read_block(BlockId(there))
        );
    }
}

#[test]
fn an_invalid_offer_is_refused() {
    let good = |base, at| (base, metadata("p", &[host(at, BLOCKS * BLOCK)]));
    /// Makes an offer of the pool's address and its correct metadata.
    type OfferForgery = fn(u64, Vec<u8>) -> Vec<u8>;
    let forgeries: [OfferForgery; 6] = [
        |base, metadata| offer(u64::MAX, BLOCKS as u64, base, "p", &metadata),
        |_, metadata| offer(BLOCK as u64, BLOCKS as u64, u64::MAX - 4096, "p", &metadata),
        |base, metadata| offer(BLOCK as u64, BLOCKS as u64, base, "p q", &metadata),
        |base, metadata| offer(BLOCK as u64, BLOCKS as u64, base, "q", &metadata),
        |base, _| offer(BLOCK as u64, BLOCKS as u64, base, "p", b"not metadata"),
        |base, _| offer(BLOCK as u64, BLOCKS as u64, base, "p", &[0; 70_000]),
    ];
    for (at, forgery) in forgeries.into_iter().enumerate() {
        let setup = HostileSetup::with(&[1, 2], |base, place| {
            let (base, metadata) = good(base, place);
            forgery(base, metadata)
        });
        let read = setup.read();
        assert!(matches!(read, Err(TransportError::Handshake(..))), "{at}: {read:?}");
        setup.nothing_moved();
    }
}

#[test]
fn an_offer_that_is_never_finished_is_silence() {
    let setup = HostileSetup::with(&[], |base, at| {
        let mut offer = honest(base, at);
        offer.pop();
        offer
    });
    let begun = Instant::now();
    let read = setup.read();
    assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
    assert!(begun.elapsed() < SILENCE + SLACK, "{:?}", begun.elapsed());
    setup.nothing_moved();
}

#[test]
fn blocks_outside_the_pool_end_the_read_before_a_request_is_made() {
    for ids in [&[1, BLOCKS as u32][..], &[u32::MAX, 0], &[1], &[1, 2, 3], &[]] {
        let setup = HostileSetup::with(ids, honest);
        let read = setup.read();
        assert!(matches!(read, Err(TransportError::Transfer(_))), "{ids:?}: {read:?}");
        setup.nothing_moved();
    }
}

#[test]
fn a_pool_outside_its_metadata_is_refused() {
    let setup = HostileSetup::with(&[1, 2], |base, at| {
        offer(BLOCK as u64, BLOCKS as u64, base + (1 << 30), "p", &metadata("p", &[host(at, BLOCKS * BLOCK)]))
    });
    let read = setup.read();
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    setup.nothing_moved();
    assert_eq!(setup.transport.dialer().agents_made(), 1, "nothing was in flight");
}

#[test]
fn blocks_of_another_size_are_refused() {
    let setup = HostileSetup::with(&[1, 2], |base, at| {
        offer(2 * BLOCK as u64, BLOCKS as u64 / 2, base, "p", &metadata("p", &[host(at, BLOCKS * BLOCK)]))
    });
    let read = setup.read();
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    setup.nothing_moved();
}

/// A listener of another transport.
struct OtherTransportService;

impl Serve for OtherTransportService {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn check_socket(&self, _socket: &Socket) -> io::Result<()> {
        Ok(())
    }

    fn deliver(
        &self,
        _socket: &mut ChannelSocket,
        _granted: &GrantedRead<'_>,
    ) -> Result<Delivery, ChannelError> {
        Err(ChannelError::Unexpected)
    }
}

#[test]
fn a_producer_without_nixl_is_found_out_at_once_and_is_no_failure() {
    let producer = TestProducer::new(BLOCKS, BLOCK, LeaseTerms::default());
    let (server, address) = listening(&producer, Arc::new(OtherTransportService));
    let transport = transport(Arc::new(SimulatedLibrary(Simulated::new())), ClientOptions::default());
    let peer = Peer { address, epoch: producer.epoch(), fingerprint: producer.fingerprint() };
    let begun = Instant::now();
    let reached = transport.ensure_connected(&peer, &GO);
    assert!(matches!(reached, Err(ConnectError::Unreachable(_))), "{reached:?}");
    assert!(begun.elapsed() < SLACK, "{:?}", begun.elapsed());
    assert_eq!(server.stats().handshakes_failed, 0);
}
