//! More than one request may have, with the real library: the largest read there can be, blocks larger than a batch,
//! requests that the library refuses, and requests far beyond our bounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_connector::BlockId;
use baton_connector::lease::LeaseTerms;
use baton_connector::limits::BLOCKS_PER_HANDOFF_MAX;
use baton_connector::region::Region;
use baton_connector::transport::{Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector_nixl::api::{Agent, Library, Memory, NixlError, Piece, Request, Segment, Side, State};
use baton_connector_nixl::{BATCH_BYTES, ClientOptions, DESCRIPTORS_MAX, NixlTransport, transport};

use super::conformance::Lender;
use super::wire::{SILENCE, secret};
use super::{GO, PATIENCE, library, order_into, serve};

/// The real library, and what is asked of it.
#[derive(Debug)]
struct Watched {
    real: Arc<dyn Library>,
    asked: Arc<Asked>,
}

#[derive(Debug, Default)]
struct Asked {
    requests: AtomicUsize,
    most_pieces: AtomicUsize,
    most_bytes: AtomicUsize,
    /// The next request asks for bytes beyond the producer's pool, too.
    spoils: AtomicBool,
}

struct WatchedAgent {
    real: Box<dyn Agent>,
    asked: Arc<Asked>,
}

impl Library for Watched {
    fn origin(&self) -> &str {
        self.real.origin()
    }

    fn agent(&self, name: &str, side: Side) -> Result<Box<dyn Agent>, NixlError> {
        Ok(Box::new(WatchedAgent { real: self.real.agent(name, side)?, asked: Arc::clone(&self.asked) }))
    }
}

#[allow(unsafe_code)] // passed on as they are
impl Agent for WatchedAgent {
    unsafe fn register(&self, memory: Memory) -> Result<(), NixlError> {
        // SAFETY: the caller's promise.
        unsafe { self.real.register(memory) }
    }

    fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        self.real.metadata()
    }

    fn owner<'a>(&self, metadata: &'a [u8]) -> Option<&'a str> {
        self.real.owner(metadata)
    }

    fn add(&self, metadata: &[u8]) -> Result<String, NixlError> {
        self.real.add(metadata)
    }

    fn remove(&self, peer: &str) {
        self.real.remove(peer);
    }

    fn prepare(
        &self,
        peer: &str,
        from: Segment,
        into: Segment,
        pieces: &[Piece],
    ) -> Result<Request, NixlError> {
        let bytes = pieces.iter().map(|piece| piece.len).sum();
        self.asked.requests.fetch_add(1, Ordering::Relaxed);
        self.asked.most_pieces.fetch_max(pieces.len(), Ordering::Relaxed);
        self.asked.most_bytes.fetch_max(bytes, Ordering::Relaxed);
        if self.asked.spoils.swap(false, Ordering::Relaxed) {
            let last = *pieces.last().expect("a request has pieces");
            let beyond = Piece { from: last.from + (1 << 40), ..last };
            return self.real.prepare(peer, from, into, &[pieces, &[beyond]].concat());
        }
        self.real.prepare(peer, from, into, pieces)
    }

    unsafe fn post(&self, request: &Request) -> Result<State, NixlError> {
        // SAFETY: the caller's promise.
        unsafe { self.real.post(request) }
    }

    fn status(&self, request: &Request) -> Result<State, NixlError> {
        self.real.status(request)
    }

    fn release(&self, request: Request) {
        self.real.release(request);
    }
}

fn watched() -> (NixlTransport, Arc<Asked>) {
    let asked = Arc::new(Asked::default());
    let library = Watched { real: library(), asked: Arc::clone(&asked) };
    let options = ClientOptions { secret: secret(), silence: SILENCE, ..ClientOptions::default() };
    (transport(Arc::new(library), options), asked)
}

/// Everything that is lent, in the order of the table, into these blocks of the region; compared byte by byte.
fn read_all(transport: &NixlTransport, lender: &Arc<Lender>, table: &[u32], into: Vec<BlockId>) {
    let (_server, peer) = serve(lender);
    let region = Region::allocate(lender.region().blocks(), lender.region().block_bytes());
    let order = order_into(lender.lend(table, 1), into);
    assert_eq!(transport.read(&peer, &order, &region, &GO), Ok(()));
    assert_eq!(transport.finish(&peer, order.handle, order.reader), Ok(Verdict::Valid));
    for (&there, &here) in table.iter().zip(&order.into) {
        let (landed, lent) = (region.read_block(here), lender.region().read_block(BlockId(there)));
        assert!(landed == lent, "block {there}");
    }
}

/// Blocks so that no two that follow each other are neighbours at the producer.
fn scattered(blocks: usize) -> Vec<u32> {
    let blocks = blocks as u32;
    (0..blocks).step_by(2).chain((1..blocks).step_by(2)).collect()
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn the_largest_read_there_can_be_arrives_in_requests_within_the_bounds() {
    let (transport, asked) = watched();
    let lender = Lender::new(BLOCKS_PER_HANDOFF_MAX, 64, LeaseTerms::default());
    let table = scattered(BLOCKS_PER_HANDOFF_MAX);
    let into = table.iter().rev().map(|&block| BlockId(block)).collect();
    let begun = Instant::now();
    read_all(&transport, &lender, &table, into);
    let requests = asked.requests.load(Ordering::Relaxed);
    println!("{} blocks in {requests} requests, {:?}", table.len(), begun.elapsed());
    assert_eq!(asked.most_pieces.load(Ordering::Relaxed), DESCRIPTORS_MAX);
    assert!(asked.most_bytes.load(Ordering::Relaxed) <= BATCH_BYTES);
    assert!(requests >= BLOCKS_PER_HANDOFF_MAX / DESCRIPTORS_MAX);
    assert_eq!(transport.way().agents_made(), 1);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn blocks_larger_than_a_batch_arrive_one_by_one() {
    let (transport, asked) = watched();
    let lender = Lender::new(3, 8 * BATCH_BYTES, LeaseTerms::default());
    read_all(&transport, &lender, &[2, 0, 1], vec![BlockId(1), BlockId(2), BlockId(0)]);
    assert_eq!(asked.requests.load(Ordering::Relaxed), 3);
    assert_eq!(asked.most_bytes.load(Ordering::Relaxed), 8 * BATCH_BYTES);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_request_that_the_library_refuses_moves_nothing_and_the_next_read_works_on_the_same_agent() {
    let (transport, asked) = watched();
    let lender = Lender::new(64, 4096, LeaseTerms::default());
    let (_server, peer) = serve(&lender);
    let region = Region::allocate(64, 4096);
    let table = scattered(64);
    let order = |region: &Region| -> ReadOrder {
        order_into(lender.lend(&table, 1), (0..region.blocks() as u32).rev().map(BlockId).collect())
    };
    let first = order(&region);
    asked.spoils.store(true, Ordering::Relaxed);
    let refused = transport.read(&peer, &first, &region, &GO);
    println!("refused: {refused:?}");
    assert!(matches!(refused, Err(TransportError::Transfer(_))), "{refused:?}");
    assert!(
        (0..64).all(|block| region.read_block(BlockId(block)).iter().all(|&byte| byte == 0)),
        "bytes came"
    );
    lender.await_failed(first.reader);
    let second = order(&region);
    assert_eq!(transport.read(&peer, &second, &region, &GO), Ok(()));
    assert_eq!(transport.finish(&peer, second.handle, second.reader), Ok(Verdict::Valid));
    for (&there, &here) in table.iter().zip(&second.into) {
        assert!(region.read_block(here) == lender.region().read_block(BlockId(there)), "block {there}");
    }
    assert_eq!(transport.way().agents_made(), 1, "nothing was in flight");
}

/// A producer's agent and a consumer's that knows it, with their memory.
struct Two {
    consumer: Box<dyn Agent>,
    _producer: Box<dyn Agent>,
    name: String,
    from: Region,
    into: Region,
}

/// All of a region.
fn memory(region: &Region) -> Memory {
    let base = region.block_ptr(BlockId(0)).expose_provenance();
    Memory { segment: Segment::Host, base, len: region.blocks() * region.block_bytes() }
}

impl Two {
    fn new(name: &str, blocks: usize, block_bytes: usize) -> Self {
        let library = library();
        let name = format!("baton-test-{name}-{}", std::process::id());
        let agent = |name: &str, side| library.agent(name, side).expect("an agent");
        let (producer, consumer) = (agent(&name, Side::Target), agent(&format!("{name}-d"), Side::Initiator));
        let (from, into) = (Region::allocate(blocks, block_bytes), Region::allocate(blocks, block_bytes));
        #[allow(unsafe_code)] // registering memory; it says why it is sound
        // SAFETY: both regions are dropped after both agents, by the order of the fields.
        unsafe {
            producer.register(memory(&from)).expect("memory");
            consumer.register(memory(&into)).expect("memory");
        }
        consumer.add(&producer.metadata().expect("metadata")).expect("a peer");
        Self { consumer, _producer: producer, name, from, into }
    }

    fn piece(&self, from: u32, into: u32, len: usize) -> Piece {
        Piece {
            from: self.from.block_ptr(BlockId(from)).addr(),
            into: self.into.block_ptr(BlockId(into)).addr(),
            len,
        }
    }

    /// One request to its end, whatever that is, and how long its post took.
    fn read(&self, pieces: &[Piece]) -> (Result<(), NixlError>, Duration) {
        let request = match self.consumer.prepare(&self.name, Segment::Host, Segment::Host, pieces) {
            Ok(request) => request,
            Err(error) => return (Err(error), Duration::ZERO),
        };
        let begun = Instant::now();
        #[allow(unsafe_code)] // posting a read; it says why it is sound
        // SAFETY: the landing memory is nobody else's, and outlives the agent.
        let mut state = unsafe { self.consumer.post(&request) };
        let posted = begun.elapsed();
        while state == Ok(State::InFlight) {
            assert!(begun.elapsed() < PATIENCE, "it does not end");
            state = self.consumer.status(&request);
        }
        self.consumer.release(request);
        (state.map(drop), posted)
    }
}

/// What the library makes of a thousand times what we ask for at once: if it takes it, every byte is right; if it refuses
/// it, it says so; and afterwards the same agent reads as before.
#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn requests_far_beyond_our_bounds_arrive_whole_or_are_refused_and_the_agent_lives() {
    const BYTES: usize = 64;
    for times in [64, 1024] {
        let count = times * DESCRIPTORS_MAX;
        let two = Two::new(&format!("many-{times}"), count, BYTES);
        (0..count as u32)
            .for_each(|block| two.from.write_block(BlockId(block), &block.to_le_bytes().repeat(BYTES / 4)));
        let table = scattered(count);
        let pieces: Vec<_> =
            table.iter().zip(0..).map(|(&from, at)| two.piece(from, count as u32 - 1 - at, BYTES)).collect();
        let (answer, posted) = two.read(&pieces);
        println!("{count} descriptors of {BYTES} bytes: {answer:?}, posted in {posted:?}");
        if answer.is_ok() {
            for (&from, at) in table.iter().zip(0..) {
                let landed = two.into.read_block(BlockId(count as u32 - 1 - at));
                assert!(landed == from.to_le_bytes().repeat(BYTES / 4), "block {from}");
            }
        }
        two.into.write_block(BlockId(7), &[0xee; BYTES]);
        assert_eq!(two.read(&[two.piece(3, 7, BYTES)]).0, Ok(()));
        assert_eq!(two.into.read_block(BlockId(7)), 3_u32.to_le_bytes().repeat(BYTES / 4));
    }
}

/// One system call copies at most 2 GiB less a page on Linux; a descriptor may be larger.
#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_descriptor_larger_than_a_system_call_copies_arrives_whole_or_is_refused() {
    const HALF: usize = (1 << 30) + (64 << 20);
    let two = Two::new("large", 2, HALF);
    // Everything else is zeros, which take no memory until they are read into the other pool.
    let marks = [0, HALF - 8, HALF, 2 * HALF - 8];
    let mark = |at: usize| [1, 2, 3, 4, 5, 6, 7, at.leading_zeros() as u8];
    let word = |region: &Region, at: usize| region.block_ptr(BlockId(0)).wrapping_add(at).cast::<[u8; 8]>();
    #[allow(unsafe_code)] // single words of pools that are too large to be copied out
    // SAFETY: within the pool of this test, which nothing reads or writes yet.
    marks.iter().for_each(|&at| unsafe { word(&two.from, at).write_unaligned(mark(at)) });
    let (answer, posted) = two.read(&[two.piece(0, 0, 2 * HALF)]);
    println!("one descriptor of {} bytes: {answer:?}, posted in {posted:?}", 2 * HALF);
    if answer.is_ok() {
        for at in marks {
            #[allow(unsafe_code)] // single words of pools that are too large to be copied out
            // SAFETY: within the pool of this test; the read is over.
            let landed = unsafe { word(&two.into, at).read_unaligned() };
            assert_eq!(landed, mark(at), "at {at}");
        }
    }
    assert_eq!(two.read(&[two.piece(1, 0, 4096)]).0, Ok(()), "and the agent lives");
}
