//! Reads larger than one request, with the real library: the largest possible read, and blocks larger than a batch.
//! Also requests that the library refuses, and requests far beyond the bounds of this crate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_connector::BlockId;
use baton_connector::lease::LeaseTerms;
use baton_connector::limits::BLOCKS_PER_HANDOFF_MAX;
use baton_connector::region::Region;
use baton_connector::transport::{Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector_nixl::api::{
    Agent, AgentRole, Library, Memory, NixlError, ReadDescriptor, Segment, TransferRequest, TransferState,
};
use baton_connector_nixl::{BATCH_BYTES, ClientOptions, DESCRIPTORS_MAX, NixlTransport, transport};

use super::conformance::TestProducer;
use super::harness::{SILENCE, secret};
use super::{GO, TEST_TIMEOUT, library, order_into, serve};

/// The real library, with a record of its requests.
#[derive(Debug)]
struct RecordingLibrary {
    real: Arc<dyn Library>,
    recorded: Arc<RecordedRequests>,
}

#[derive(Debug, Default)]
struct RecordedRequests {
    requests: AtomicUsize,
    most_pieces: AtomicUsize,
    most_bytes: AtomicUsize,
    /// Whether the next request also reads bytes beyond the producer's pool.
    corrupt_next: AtomicBool,
}

struct RecordingAgent {
    real: Box<dyn Agent>,
    recorded: Arc<RecordedRequests>,
}

impl Library for RecordingLibrary {
    fn origin(&self) -> &str {
        self.real.origin()
    }

    fn agent(&self, name: &str, side: AgentRole) -> Result<Box<dyn Agent>, NixlError> {
        Ok(Box::new(RecordingAgent {
            real: self.real.agent(name, side)?,
            recorded: Arc::clone(&self.recorded),
        }))
    }
}

#[allow(unsafe_code, reason = "the calls are forwarded unchanged")]
impl Agent for RecordingAgent {
    unsafe fn register(&self, memory: Memory) -> Result<(), NixlError> {
        // SAFETY: the caller's contract.
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
        pieces: &[ReadDescriptor],
    ) -> Result<TransferRequest, NixlError> {
        let bytes = pieces.iter().map(|piece| piece.len).sum();
        self.recorded.requests.fetch_add(1, Ordering::Relaxed);
        self.recorded.most_pieces.fetch_max(pieces.len(), Ordering::Relaxed);
        self.recorded.most_bytes.fetch_max(bytes, Ordering::Relaxed);
        if self.recorded.corrupt_next.swap(false, Ordering::Relaxed) {
            let last = *pieces.last().expect("a request has pieces");
            let beyond = ReadDescriptor { from: last.from + (1 << 40), ..last };
            return self.real.prepare(peer, from, into, &[pieces, &[beyond]].concat());
        }
        self.real.prepare(peer, from, into, pieces)
    }

    unsafe fn post(&self, request: &TransferRequest) -> Result<TransferState, NixlError> {
        // SAFETY: the caller's contract.
        unsafe { self.real.post(request) }
    }

    fn status(&self, request: &TransferRequest) -> Result<TransferState, NixlError> {
        self.real.status(request)
    }

    fn release(&self, request: TransferRequest) {
        self.real.release(request);
    }
}

fn recording() -> (NixlTransport, Arc<RecordedRequests>) {
    let recorded = Arc::new(RecordedRequests::default());
    let library = RecordingLibrary { real: library(), recorded: Arc::clone(&recorded) };
    let options = ClientOptions { secret: secret(), silence: SILENCE, ..ClientOptions::default() };
    (transport(Arc::new(library), options), recorded)
}

/// Reads the whole lease, in the order of the table, into these blocks of a region, and compares every byte.
fn read_all(transport: &NixlTransport, producer: &Arc<TestProducer>, table: &[u32], into: Vec<BlockId>) {
    let (_server, peer) = serve(producer);
    let region = Region::allocate(producer.region().blocks(), producer.region().block_bytes());
    let order = order_into(producer.lease(table, 1), into);
    assert_eq!(transport.read(&peer, &order, &region, &GO), Ok(()));
    assert_eq!(transport.finish(&peer, order.handle, order.reader), Ok(Verdict::Valid));
    for (&there, &here) in table.iter().zip(&order.into) {
        let (landed, leased) = (region.read_block(here), producer.region().read_block(BlockId(there)));
        assert!(landed == leased, "block {there}");
    }
}

/// A block table in which no two consecutive blocks are adjacent at the producer.
fn scattered(blocks: usize) -> Vec<u32> {
    let blocks = blocks as u32;
    (0..blocks).step_by(2).chain((1..blocks).step_by(2)).collect()
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn the_largest_read_is_split_into_requests_within_the_bounds() {
    let (transport, recorded) = recording();
    let producer = TestProducer::new(BLOCKS_PER_HANDOFF_MAX, 64, LeaseTerms::default());
    let table = scattered(BLOCKS_PER_HANDOFF_MAX);
    let into = table.iter().rev().map(|&block| BlockId(block)).collect();
    let begun = Instant::now();
    read_all(&transport, &producer, &table, into);
    let requests = recorded.requests.load(Ordering::Relaxed);
    println!("{} blocks in {requests} requests, {:?}", table.len(), begun.elapsed());
    assert_eq!(recorded.most_pieces.load(Ordering::Relaxed), DESCRIPTORS_MAX);
    assert!(recorded.most_bytes.load(Ordering::Relaxed) <= BATCH_BYTES);
    assert!(requests >= BLOCKS_PER_HANDOFF_MAX / DESCRIPTORS_MAX);
    assert_eq!(transport.dialer().agents_made(), 1);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn blocks_larger_than_a_batch_arrive_one_by_one() {
    let (transport, recorded) = recording();
    let producer = TestProducer::new(3, 8 * BATCH_BYTES, LeaseTerms::default());
    read_all(&transport, &producer, &[2, 0, 1], vec![BlockId(1), BlockId(2), BlockId(0)]);
    assert_eq!(recorded.requests.load(Ordering::Relaxed), 3);
    assert_eq!(recorded.most_bytes.load(Ordering::Relaxed), 8 * BATCH_BYTES);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_refused_request_moves_no_byte_and_the_agent_stays_usable() {
    let (transport, recorded) = recording();
    let producer = TestProducer::new(64, 4096, LeaseTerms::default());
    let (_server, peer) = serve(&producer);
    let region = Region::allocate(64, 4096);
    let table = scattered(64);
    let order = |region: &Region| -> ReadOrder {
        order_into(producer.lease(&table, 1), (0..region.blocks() as u32).rev().map(BlockId).collect())
    };
    let first = order(&region);
    recorded.corrupt_next.store(true, Ordering::Relaxed);
    let refused = transport.read(&peer, &first, &region, &GO);
    println!("refused: {refused:?}");
    assert!(matches!(refused, Err(TransportError::Transfer(_))), "{refused:?}");
    assert!(
        (0..64).all(|block| region.read_block(BlockId(block)).iter().all(|&byte| byte == 0)),
        "bytes came"
    );
    producer.await_failed(first.reader);
    let second = order(&region);
    assert_eq!(transport.read(&peer, &second, &region, &GO), Ok(()));
    assert_eq!(transport.finish(&peer, second.handle, second.reader), Ok(Verdict::Valid));
    for (&there, &here) in table.iter().zip(&second.into) {
        assert!(region.read_block(here) == producer.region().read_block(BlockId(there)), "block {there}");
    }
    assert_eq!(transport.dialer().agents_made(), 1, "nothing was in flight");
}

/// A producer's agent, and a consumer's agent that has its metadata, with their memory.
struct AgentPair {
    consumer: Box<dyn Agent>,
    _producer: Box<dyn Agent>,
    name: String,
    from: Region,
    into: Region,
}

/// The whole memory of a region.
fn memory(region: &Region) -> Memory {
    let base = region.block_ptr(BlockId(0)).expose_provenance();
    Memory { segment: Segment::Host, base, len: region.blocks() * region.block_bytes() }
}

impl AgentPair {
    fn new(name: &str, blocks: usize, block_bytes: usize) -> Self {
        let library = library();
        let name = format!("baton-test-{name}-{}", std::process::id());
        let agent = |name: &str, side| library.agent(name, side).expect("an agent");
        let (producer, consumer) =
            (agent(&name, AgentRole::Target), agent(&format!("{name}-d"), AgentRole::Initiator));
        let (from, into) = (Region::allocate(blocks, block_bytes), Region::allocate(blocks, block_bytes));
        #[allow(unsafe_code, reason = "registering memory; it says why it is sound")]
        // SAFETY: both regions are dropped after both agents, by the order of the fields.
        unsafe {
            producer.register(memory(&from)).expect("memory");
            consumer.register(memory(&into)).expect("memory");
        }
        consumer.add(&producer.metadata().expect("metadata")).expect("a peer");
        Self { consumer, _producer: producer, name, from, into }
    }

    fn piece(&self, from: u32, into: u32, len: usize) -> ReadDescriptor {
        ReadDescriptor {
            from: self.from.block_ptr(BlockId(from)).addr(),
            into: self.into.block_ptr(BlockId(into)).addr(),
            len,
        }
    }

    /// Runs one request to its end, and returns the result and the duration of the post.
    fn read(&self, pieces: &[ReadDescriptor]) -> (Result<(), NixlError>, Duration) {
        let request = match self.consumer.prepare(&self.name, Segment::Host, Segment::Host, pieces) {
            Ok(request) => request,
            Err(error) => return (Err(error), Duration::ZERO),
        };
        let begun = Instant::now();
        #[allow(unsafe_code, reason = "posting a read; it says why it is sound")]
        // SAFETY: only this request uses the landing memory, which outlives the agent.
        let mut state = unsafe { self.consumer.post(&request) };
        let posted = begun.elapsed();
        while state == Ok(TransferState::InFlight) {
            assert!(begun.elapsed() < TEST_TIMEOUT, "it does not end");
            state = self.consumer.status(&request);
        }
        self.consumer.release(request);
        (state.map(drop), posted)
    }
}

/// Requests of a thousand times the bound. The library either reads every byte correctly or refuses the request.
/// Afterwards the same agent still reads.
#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn oversized_requests_arrive_whole_or_are_refused_and_the_agent_stays_usable() {
    const BYTES: usize = 64;
    for times in [64, 1024] {
        let count = times * DESCRIPTORS_MAX;
        let pair = AgentPair::new(&format!("many-{times}"), count, BYTES);
        (0..count as u32)
            .for_each(|block| pair.from.write_block(BlockId(block), &block.to_le_bytes().repeat(BYTES / 4)));
        let table = scattered(count);
        let pieces: Vec<_> =
            table.iter().zip(0..).map(|(&from, at)| pair.piece(from, count as u32 - 1 - at, BYTES)).collect();
        let (answer, posted) = pair.read(&pieces);
        println!("{count} descriptors of {BYTES} bytes: {answer:?}, posted in {posted:?}");
        if answer.is_ok() {
            for (&from, at) in table.iter().zip(0..) {
                let landed = pair.into.read_block(BlockId(count as u32 - 1 - at));
                assert!(landed == from.to_le_bytes().repeat(BYTES / 4), "block {from}");
            }
        }
        pair.into.write_block(BlockId(7), &[0xee; BYTES]);
        assert_eq!(pair.read(&[pair.piece(3, 7, BYTES)]).0, Ok(()));
        assert_eq!(pair.into.read_block(BlockId(7)), 3_u32.to_le_bytes().repeat(BYTES / 4));
    }
}

/// One system call copies at most 2 GiB less a page on Linux; a descriptor may be larger.
#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_descriptor_larger_than_a_system_call_copies_arrives_whole_or_is_refused() {
    const HALF: usize = (1 << 30) + (64 << 20);
    let pair = AgentPair::new("large", 2, HALF);
    // All other bytes are zeros, which take no memory until they are read into the other pool.
    let marks = [0, HALF - 8, HALF, 2 * HALF - 8];
    let mark = |at: usize| [1, 2, 3, 4, 5, 6, 7, at.leading_zeros() as u8];
    let word = |region: &Region, at: usize| region.block_ptr(BlockId(0)).wrapping_add(at).cast::<[u8; 8]>();
    #[allow(unsafe_code, reason = "single words of pools that are too large to be copied out")]
    // SAFETY: within the pool of this test, which nothing reads or writes yet.
    marks.iter().for_each(|&at| unsafe { word(&pair.from, at).write_unaligned(mark(at)) });
    let (answer, posted) = pair.read(&[pair.piece(0, 0, 2 * HALF)]);
    println!("one descriptor of {} bytes: {answer:?}, posted in {posted:?}", 2 * HALF);
    if answer.is_ok() {
        for at in marks {
            #[allow(unsafe_code, reason = "single words of pools that are too large to be copied out")]
            // SAFETY: within the pool of this test; the read is over.
            let landed = unsafe { word(&pair.into, at).read_unaligned() };
            assert_eq!(landed, mark(at), "at {at}");
        }
    }
    assert_eq!(pair.read(&[pair.piece(1, 0, 4096)]).0, Ok(()), "and the agent lives");
}
