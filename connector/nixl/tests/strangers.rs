//! Producers that lie: about their pool, their agent, and which blocks they grant. Each ends its own connection, before
//! a byte moves. And consumers: one listener serves TCP's and NIXL's, and a producer without NIXL is found out at once.

#[path = "../../tests/conformance/mod.rs"]
#[allow(unused_imports, unused_macros, dead_code)] // the suite's vocabulary; its cases run in conformance.rs
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
use baton_connector_channel::link::{Link, LinkError, Until};
use baton_connector_channel::wire::{Header, KIND_BATCH};
use baton_connector_channel::{Delivered, Granted, NotAdmitted, Serve, Server};
use baton_connector_nixl::{ClientOptions, NixlTransport, ServerOptions, transport};
use conformance::Lender;
use simulated::{Handle, Simulated, host, metadata};
use socket2::Socket;

fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

const BLOCK: usize = 4096;
const BLOCKS: usize = 16;
const SILENCE: Duration = Duration::from_millis(500);
/// What a loaded machine may add to a bound.
const SLACK: Duration = Duration::from_secs(3);
static GO: AtomicBool = AtomicBool::new(false);

/// A producer that says what it is told to.
struct Liar {
    offer: Vec<u8>,
    /// Block ids of the one batch that it grants.
    ids: Vec<u32>,
}

impl Serve for Liar {
    fn name(&self) -> &'static str {
        "nixl"
    }

    fn service(&self) -> Service {
        Service::Nixl
    }

    fn meet(&self, _socket: &Socket) -> io::Result<()> {
        Ok(())
    }

    fn admitted(&self, link: &mut Link, _producer: &dyn Producer, until: Until<'_>) -> Result<(), LinkError> {
        link.send(&self.offer, until)
    }

    fn deliver(&self, link: &mut Link, granted: &Granted<'_>) -> Result<Delivered, LinkError> {
        let mut frames = granted.announcement();
        frames.extend(Header { kind: KIND_BATCH, len: 4 * self.ids.len() }.encode());
        self.ids.iter().for_each(|id| frames.extend(id.to_le_bytes()));
        link.send(&frames, granted.until())?;
        Ok(Delivered::Whole)
    }
}

/// What a producer with a pool at `base` offers, as it travels.
fn offer(block_bytes: u64, blocks: u64, base: u64, name: &str, metadata: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    [block_bytes, blocks, base].iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    bytes.extend((name.len() as u16).to_le_bytes());
    bytes.extend((metadata.len() as u32).to_le_bytes());
    bytes.extend(name.as_bytes());
    bytes.extend(metadata);
    bytes
}

struct Meeting {
    library: Arc<Simulated>,
    lender: Arc<Lender>,
    transport: NixlTransport,
    peer: Peer,
    region: Region,
    _server: Server,
}

impl Meeting {
    /// With a lender whose pool is offered as `say` makes it of where it lies.
    fn with(ids: &[u32], say: impl Fn(u64, usize) -> Vec<u8>) -> Self {
        let lender = Lender::new(BLOCKS, BLOCK, LeaseTerms::default());
        let base = lender.region().block_ptr(BlockId(0)).expose_provenance();
        let liar = Liar { offer: say(base as u64, base), ids: ids.to_vec() };
        let (server, address) = listening(&lender, Arc::new(liar));
        let library = Simulated::new();
        let options = ClientOptions { silence: SILENCE, ..ClientOptions::default() };
        let transport = transport(Arc::new(Handle(Arc::clone(&library))), options);
        let peer = Peer { address, epoch: lender.epoch(), fingerprint: lender.fingerprint() };
        let region = Region::allocate(BLOCKS, BLOCK);
        (0..BLOCKS as u32).for_each(|block| region.write_block(BlockId(block), &[0xee; BLOCK]));
        Self { library, lender, transport, peer, region, _server: server }
    }

    fn read(&self) -> Result<(), TransportError> {
        let handle = self.lender.lend(&[1, 2], 1);
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

fn listening(lender: &Arc<Lender>, serve: Arc<dyn Serve>) -> (Server, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it listens");
    let options = ServerOptions { silence: SILENCE, ..ServerOptions::default() };
    let server = Server::start(listener.into(), Arc::clone(lender) as _, vec![serve], options);
    (server.expect("loopback"), address)
}

fn honest(base: u64, at: usize) -> Vec<u8> {
    offer(BLOCK as u64, BLOCKS as u64, base, "p", &metadata("p", &[host(at, BLOCKS * BLOCK)]))
}

#[test]
fn an_honest_producer_of_this_test_is_read() {
    let meeting = Meeting::with(&[1, 2], honest);
    assert_eq!(meeting.read(), Ok(()));
    for (here, there) in [(4, 1), (9, 2)] {
        assert_eq!(
            meeting.region.read_block(BlockId(here)),
            meeting.lender.region().read_block(BlockId(there))
        );
    }
}

#[test]
fn an_offer_that_cannot_be_is_nobody_to_be_trusted() {
    let good = |base, at| (base, metadata("p", &[host(at, BLOCKS * BLOCK)]));
    /// From where the pool lies, and true metadata of it.
    type Lie = fn(u64, Vec<u8>) -> Vec<u8>;
    let lies: [Lie; 6] = [
        |base, metadata| offer(u64::MAX, BLOCKS as u64, base, "p", &metadata),
        |_, metadata| offer(BLOCK as u64, BLOCKS as u64, u64::MAX - 4096, "p", &metadata),
        |base, metadata| offer(BLOCK as u64, BLOCKS as u64, base, "p q", &metadata),
        |base, metadata| offer(BLOCK as u64, BLOCKS as u64, base, "q", &metadata),
        |base, _| offer(BLOCK as u64, BLOCKS as u64, base, "p", b"not metadata"),
        |base, _| offer(BLOCK as u64, BLOCKS as u64, base, "p", &[0; 70_000]),
    ];
    for (at, lie) in lies.into_iter().enumerate() {
        let meeting = Meeting::with(&[1, 2], |base, place| {
            let (base, metadata) = good(base, place);
            lie(base, metadata)
        });
        let read = meeting.read();
        assert!(matches!(read, Err(TransportError::Handshake(..))), "{at}: {read:?}");
        meeting.nothing_moved();
    }
}

#[test]
fn an_offer_that_is_never_finished_is_silence() {
    let meeting = Meeting::with(&[], |base, at| {
        let mut offer = honest(base, at);
        offer.pop();
        offer
    });
    let begun = Instant::now();
    let read = meeting.read();
    assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
    assert!(begun.elapsed() < SILENCE + SLACK, "{:?}", begun.elapsed());
    meeting.nothing_moved();
}

#[test]
fn blocks_outside_the_pool_end_the_read_before_a_request_is_made() {
    for ids in [&[1, BLOCKS as u32][..], &[u32::MAX, 0], &[1], &[1, 2, 3], &[]] {
        let meeting = Meeting::with(ids, honest);
        let read = meeting.read();
        assert!(matches!(read, Err(TransportError::Transfer(_))), "{ids:?}: {read:?}");
        meeting.nothing_moved();
    }
}

#[test]
fn a_pool_that_is_not_where_its_metadata_is_moves_nothing() {
    let meeting = Meeting::with(&[1, 2], |base, at| {
        offer(BLOCK as u64, BLOCKS as u64, base + (1 << 30), "p", &metadata("p", &[host(at, BLOCKS * BLOCK)]))
    });
    let read = meeting.read();
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    meeting.nothing_moved();
    assert_eq!(meeting.transport.way().agents_made(), 1, "nothing was in flight");
}

#[test]
fn blocks_of_another_size_move_nothing() {
    let meeting = Meeting::with(&[1, 2], |base, at| {
        offer(2 * BLOCK as u64, BLOCKS as u64 / 2, base, "p", &metadata("p", &[host(at, BLOCKS * BLOCK)]))
    });
    let read = meeting.read();
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    meeting.nothing_moved();
}

/// A listener of something else: another transport.
struct Other;

impl Serve for Other {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn meet(&self, _socket: &Socket) -> io::Result<()> {
        Ok(())
    }

    fn deliver(&self, _link: &mut Link, _granted: &Granted<'_>) -> Result<Delivered, LinkError> {
        Err(LinkError::Unexpected)
    }
}

#[test]
fn a_producer_without_nixl_is_found_out_at_once_and_is_no_failure() {
    let lender = Lender::new(BLOCKS, BLOCK, LeaseTerms::default());
    let (server, address) = listening(&lender, Arc::new(Other));
    let transport = transport(Arc::new(Handle(Simulated::new())), ClientOptions::default());
    let peer = Peer { address, epoch: lender.epoch(), fingerprint: lender.fingerprint() };
    let begun = Instant::now();
    let reached = transport.reach(&peer, &GO);
    assert!(matches!(reached, Err(NotAdmitted::Absent(_))), "{reached:?}");
    assert!(begun.elapsed() < SLACK, "{:?}", begun.elapsed());
    assert_eq!(server.stats().handshakes_failed, 0);
}
