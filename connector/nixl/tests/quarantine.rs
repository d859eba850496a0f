//! No byte lands in a block after the return of its read. The library may still write for requests that failed, hang or
//! were released. NIXL does not guarantee this, and the simulated agents write late on purpose.

#[path = "../../tests/conformance/mod.rs"]
#[allow(
    unused_imports,
    unused_macros,
    dead_code,
    reason = "the suite's vocabulary; its cases run in conformance.rs"
)]
mod conformance;
mod harness;
mod simulated;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::layout::KvDtype;
use baton_connector::lease::LeaseTerms;
use baton_connector::region::Region;
use baton_connector::slice::{Slice, SliceRange};
use baton_connector::transport::{Part, Peer, Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, KvLayout, Reader};
use baton_connector_channel::Server;
use baton_connector_nixl::{
    BATCH_BYTES, ClientOptions, DESCRIPTORS_MAX, NixlTransport, ServerOptions, transport,
};
use conformance::TestProducer;
use simulated::{Mode, Simulated, SimulatedLibrary};

fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

const BLOCK: usize = 4096;
const READER: Reader = Reader::sole(1);
/// Bounds on silence: short for a library that never completes, since the test waits for it, long for one that does.
const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(20);
/// Tolerance for a loaded machine.
const SLACK: Duration = Duration::from_secs(3);
static GO: AtomicBool = AtomicBool::new(false);

struct TransferPair {
    library: Arc<Simulated>,
    producer: Arc<TestProducer>,
    transport: NixlTransport,
    peer: Peer,
    region: Region,
    _server: Server,
}

impl TransferPair {
    fn new(silence: Duration) -> Self {
        Self::over(TestProducer::new(64, BLOCK, LeaseTerms::default()), silence)
    }

    fn over(producer: Arc<TestProducer>, silence: Duration) -> Self {
        let library = Simulated::new();
        let handle = || SimulatedLibrary(Arc::clone(&library));
        let options = ServerOptions { silence: LONG, ..ServerOptions::default() };
        let (server, peer) = harness::serve(&handle(), &producer, options);
        let options = ClientOptions { silence, ..ClientOptions::default() };
        let region = Region::allocate(64, producer.region().block_bytes());
        let transport = transport(Arc::new(handle()), options);
        Self { library, producer, transport, peer, region, _server: server }
    }

    fn order(&self) -> ReadOrder {
        let into = vec![BlockId(5), BlockId(6), BlockId(9)];
        ReadOrder {
            handle: self.producer.lease(&[1, 2, 3], 1),
            reader: READER,
            part: Part::Blocks { first: 0 },
            into,
        }
    }

    fn read(&self, order: &ReadOrder, stop: &AtomicBool) -> Result<(), TransportError> {
        self.transport.read(&self.peer, order, &self.region, stop)
    }

    /// Overwrites the landing blocks, lets the library deliver late bytes, and checks that none arrive.
    fn nothing_comes_after(&self, order: &ReadOrder) {
        for &block in &order.into {
            self.region.write_block(block, &[0xee; BLOCK]);
        }
        assert_eq!(self.library.deliver(), 0, "bytes of a read that has returned");
        for &block in &order.into {
            assert!(self.region.read_block(block).iter().all(|&byte| byte == 0xee), "{block:?} was written");
        }
    }

    /// A whole fetch works.
    fn works(&self) {
        self.library.mode(Mode::Done);
        let order = self.order();
        assert_eq!(self.read(&order, &GO), Ok(()));
        assert_eq!(self.transport.finish(&self.peer, order.handle, READER), Ok(Verdict::Valid));
        for (&here, there) in order.into.iter().zip([1, 2, 3]) {
            let (landed, leased) =
                (self.region.read_block(here), self.producer.region().read_block(BlockId(there)));
            assert!(landed == leased, "block {there}");
        }
    }
}

#[test]
fn a_read_past_its_bound_returns_after_its_agent_is_destroyed() {
    let pair = TransferPair::new(SHORT);
    pair.works();
    pair.library.mode(Mode::InFlight);
    let (order, begun) = (pair.order(), Instant::now());
    let read = pair.read(&order, &GO);
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    assert!(begun.elapsed() < SHORT + SLACK, "{:?}", begun.elapsed());
    pair.nothing_comes_after(&order);
    pair.works();
    assert_eq!(pair.transport.dialer().agents_made(), 2, "the first is gone");
    assert_eq!(pair.library.agents(), 2, "the producer's and the second");
}

#[test]
fn a_post_that_fails_may_still_write_and_is_waited_for() {
    for mode in [Mode::Failed, Mode::FailedLater] {
        let pair = TransferPair::new(LONG);
        pair.library.mode(mode);
        let order = pair.order();
        let read = pair.read(&order, &GO);
        assert!(matches!(read, Err(TransportError::Transfer(_))), "{mode:?}: {read:?}");
        pair.nothing_comes_after(&order);
        pair.producer.await_failed(READER);
        pair.works();
    }
}

#[test]
fn a_read_that_is_stopped_waits_for_its_request_in_flight() {
    let pair = TransferPair::new(LONG);
    pair.library.mode(Mode::InFlight);
    let (order, stop) = (pair.order(), AtomicBool::new(false));
    thread::scope(|scope| {
        let read = scope.spawn(|| pair.read(&order, &stop));
        pair.library.await_posted();
        stop.store(true, Ordering::Release);
        assert!(!read.is_finished(), "bytes can still come");
        assert_eq!(pair.library.deliver(), 3 * BLOCK);
        // The whole read was one request, which is complete. Both results are correct.
        let read = read.join().expect("no panic");
        assert!(matches!(read, Ok(()) | Err(TransportError::Stopped)), "{read:?}");
    });
    pair.nothing_comes_after(&order);
    assert_eq!(pair.transport.dialer().agents_made(), 1, "nothing was in doubt");
}

/// The tests above prove nothing unless the simulated library writes late.
#[test]
fn the_simulated_library_writes_late() {
    use baton_connector_nixl::api::{AgentRole, Library, ReadDescriptor, Segment, TransferState};
    let library = Simulated::new();
    let handle = SimulatedLibrary(Arc::clone(&library));
    let (from, into) = (Region::allocate(1, BLOCK), Region::allocate(1, BLOCK));
    from.write_block(BlockId(0), &[7; BLOCK]);
    let (p, d) = (
        handle.agent("p", AgentRole::Target).expect("one"),
        handle.agent("d", AgentRole::Initiator).expect("one"),
    );
    let at = |region: &Region| simulated::host(region.block_ptr(BlockId(0)).expose_provenance(), BLOCK);
    #[allow(unsafe_code, reason = "calls of an agent; each says why it is sound")]
    // SAFETY: both pools outlive both agents.
    unsafe {
        p.register(at(&from)).expect("memory");
        d.register(at(&into)).expect("memory");
    }
    d.add(&p.metadata().expect("metadata")).expect("a peer");
    library.mode(Mode::InFlight);
    let piece = ReadDescriptor { from: at(&from).base, into: at(&into).base, len: BLOCK };
    let request = d.prepare("p", Segment::Host, Segment::Host, &[piece]).expect("it fits");
    #[allow(unsafe_code, reason = "calls of an agent; each says why it is sound")]
    // SAFETY: only this request uses the landing memory.
    let posted = unsafe { d.post(&request) };
    assert_eq!(posted, Ok(TransferState::InFlight));
    d.release(request);
    assert_eq!(library.deliver(), BLOCK, "written after the release");
    assert_eq!(into.read_block(BlockId(0)), [7; BLOCK]);
}

#[test]
fn requests_are_bounded_for_any_read() {
    // Blocks that are not adjacent: each needs a descriptor of its own.
    let producer = TestProducer::new(4_096, 64, LeaseTerms::default());
    let pair = TransferPair::over(producer, LONG);
    let region = Region::allocate(4_096, 64);
    let table: Vec<u32> = (0..4_096).step_by(2).chain((1..4_096).step_by(2)).collect();
    let into = table.iter().rev().map(|&block| BlockId(block)).collect();
    let order = ReadOrder {
        handle: pair.producer.lease(&table, 1),
        reader: READER,
        part: Part::Blocks { first: 0 },
        into,
    };
    pair.transport.read(&pair.peer, &order, &region, &GO).expect("a live lease");
    for (&there, &here) in table.iter().zip(&order.into) {
        let (landed, leased) = (region.read_block(here), pair.producer.region().read_block(BlockId(there)));
        assert!(landed == leased, "block {there}");
    }
    let (pieces, bytes) = pair.library.largest();
    assert_eq!(pieces, DESCRIPTORS_MAX, "more than one request");
    assert!(bytes <= BATCH_BYTES);
}

#[test]
fn slices_become_many_small_pieces_and_the_bounds_hold() {
    let layout = KvLayout { layers: 64, kv_heads: 8, head_dim: 4, block_tokens: 16, dtype: KvDtype::F32 };
    let pair = TransferPair::over(TestProducer::shaped(4, layout, LeaseTerms::default()), LONG);
    let region = Region::allocate(4, layout.block_bytes());
    let range = SliceRange { tokens: 3..50, heads: 1..7 };
    let slice = Slice { range, producer: layout, consumer: layout, into_head: 1, origin: 0 };
    let order = ReadOrder {
        handle: pair.producer.lease(&[3, 1, 0, 2], 1),
        reader: READER,
        part: Part::Slice(Box::new(slice.clone())),
        into: (0..4).map(BlockId).collect(),
    };
    pair.transport.read(&pair.peer, &order, &region, &GO).expect("a live lease");
    for piece in slice.pieces() {
        for (source, target) in slice.copies(&piece) {
            let entry = [3, 1, 0, 2][piece.tokens.start / 16];
            let leased = pair.producer.region().read_block(BlockId(entry));
            let landed = region.read_block(order.into[target.entry]);
            let (from, into) =
                (source.offset..source.offset + source.len, target.offset..target.offset + target.len);
            assert!(landed[into] == leased[from]);
        }
    }
    assert!(pair.library.largest().0 > 64 && pair.library.largest().0 <= DESCRIPTORS_MAX);
}

#[test]
fn state_of_a_producer_is_dropped_with_its_last_connection() {
    let pair = TransferPair::new(LONG);
    pair.works();
    assert_eq!(pair.transport.idle_connections(), 1);
    let TransferPair { library, transport, _server, .. } = pair;
    _server.shutdown();
    let begun = Instant::now();
    while transport.idle_connections() > 0 {
        assert!(begun.elapsed() < LONG, "its connection is kept");
        transport.sweep();
    }
    assert_eq!(library.agents(), 1, "the consumer's own");
    drop(transport);
    assert_eq!(library.agents(), 0);
}
