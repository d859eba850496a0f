//! The transport of an engine that is configured for NIXL, with simulated agents. The engine uses the best transport of
//! both ends. If NIXL connects to a producer but cannot read from it, the engine uses another one for a while. Device
//! pools are read from device to device, without a copy to the host.

#[path = "../../connector/tests/conformance/mod.rs"]
#[allow(
    unused_imports,
    unused_macros,
    dead_code,
    reason = "the suite's vocabulary; its cases run in conformance.rs"
)]
mod conformance;
#[path = "../../connector/nixl/tests/simulated/mod.rs"]
mod simulated;

use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use baton_connector::lease::LeaseTerms;
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Reader};
use baton_connector_device::{ImportedPool, Offer, PoolExport};
use baton_connector_nixl::api::{Memory, Segment};
use baton_connector_tcp::{ClientOptions, ServerOptions};
use baton_engine::compute::cuda::DeviceError;
use baton_engine::compute::cuda::device::{HostRun, PoolMemory};
use baton_engine::compute::cuda::shared_kv_pool::SharedKvPool;
use baton_engine::handoff::transport::{KvTransport, NixlState, SideChannel, open_consumer_transport};
use conformance::TestProducer;
use simulated::{Mode, Simulated, SimulatedLibrary};

const BLOCK: usize = 4096;
static GO: AtomicBool = AtomicBool::new(false);

/// Memory of this process alone, so that the shared-memory transport is not available.
fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

/// GPU memory: host memory that the simulated library treats as a device's.
#[derive(Debug)]
struct Vram {
    region: Region,
    ordinal: u32,
    copied_out: AtomicUsize,
}

impl Vram {
    /// A pool of blocks that each hold `byte`.
    fn filled(ordinal: u32, byte: u8) -> Arc<Self> {
        let region = pool(16, BLOCK);
        (0..16).for_each(|block| region.write_block(BlockId(block), &[byte ^ block as u8; BLOCK]));
        Arc::new(Self { region, ordinal, copied_out: AtomicUsize::new(0) })
    }

    fn port(self: &Arc<Self>, mirror: &Region) -> Arc<SharedKvPool> {
        Arc::new(SharedKvPool::new(Arc::clone(self) as _, mirror.clone()))
    }
}

impl PoolMemory for Vram {
    fn export(&self) -> io::Result<PoolExport> {
        Err(ErrorKind::Unsupported.into())
    }

    fn open(&self, _: &Offer, _: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>> {
        Err(ErrorKind::Unsupported.into())
    }

    fn copy_in(&self, _: &[HostRun], _: &Region) -> Result<(), DeviceError> {
        Ok(())
    }

    fn copy_out(&self, _: &[HostRun], _: &Region) -> Result<(), DeviceError> {
        self.copied_out.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn place(&self) -> io::Result<Memory> {
        let base = self.region.block_ptr(BlockId(0)).expose_provenance();
        Ok(Memory { segment: Segment::Cuda(self.ordinal), base, len: 16 * BLOCK })
    }
}

struct TestLink {
    producer: Arc<TestProducer>,
    transport: Arc<dyn Transport>,
    peer: Peer,
    region: Region,
    _side: SideChannel,
}

impl TestLink {
    fn new(there: &NixlState, here: &NixlState) -> Self {
        Self::between((there, None), (here, None))
    }

    /// Either pool may be on a device.
    fn between(
        (there, theirs): (&NixlState, Option<&Arc<Vram>>),
        (here, ours): (&NixlState, Option<&Arc<Vram>>),
    ) -> Self {
        let producer = TestProducer::new(16, BLOCK, LeaseTerms::default());
        let region = pool(16, BLOCK);
        let theirs = theirs.map(|vram| vram.port(producer.region()));
        let ours = ours.map(|vram| vram.port(&region));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it listens");
        let served: Arc<dyn Producer> = Arc::clone(&producer) as _;
        let options = ServerOptions::default();
        let side = SideChannel::start(KvTransport::Nixl, there, listener, &served, theirs.as_ref(), &options);
        let peer = Peer { address, epoch: producer.epoch(), fingerprint: producer.fingerprint() };
        let transport = open_consumer_transport(KvTransport::Nixl, here, ours, &ClientOptions::default());
        Self { producer, transport, peer, region, _side: side.expect("loopback") }
    }

    /// Runs a whole fetch.
    fn fetch(&self) -> Result<(), TransportError> {
        let (reader, into) = (Reader::sole(1), vec![BlockId(4), BlockId(9)]);
        let handle = self.producer.lease(&[1, 2], 1);
        let order = ReadOrder { handle, reader, part: Part::Blocks { first: 0 }, into };
        self.transport.read(&self.peer, &order, &self.region, &GO)?;
        assert_eq!(self.transport.finish(&self.peer, handle, reader), Ok(Verdict::Valid));
        Ok(())
    }

    /// Runs a fetch between the host sides and checks the blocks.
    fn read(&self) -> Result<(), TransportError> {
        self.fetch()?;
        for (here, there) in [(4, 1), (9, 2)] {
            let leased = self.producer.region().read_block(BlockId(there));
            assert!(self.region.read_block(BlockId(here)) == leased, "block {there}");
        }
        Ok(())
    }

    fn carrier(&self) -> &'static str {
        self.transport.carrier(&self.peer)
    }
}

fn found(library: &Arc<Simulated>) -> NixlState {
    NixlState::Loaded(Arc::new(SimulatedLibrary(Arc::clone(library))))
}

#[test]
fn nixl_is_taken_where_both_engines_have_it() {
    let library = Simulated::new();
    let pair = TestLink::new(&found(&library), &found(&library));
    assert_eq!((pair.read(), pair.carrier()), (Ok(()), "nixl"));
    assert!(library.largest().1 > 0, "it moved the bytes");
}

#[test]
fn without_nixl_on_either_side_another_transport_serves_the_first_read() {
    let library = Simulated::new();
    for (there, here) in [
        (found(&library), NixlState::NotFound),
        (NixlState::NotFound, found(&library)),
        (NixlState::NotFound, NixlState::NotFound),
    ] {
        let pair = TestLink::new(&there, &here);
        assert_eq!((pair.read(), pair.carrier()), (Ok(()), "tcp"), "{there:?} {here:?}");
        assert_eq!(library.largest(), (0, 0));
    }
}

#[test]
fn a_producer_that_nixl_meets_and_cannot_read_costs_one_read_and_no_more() {
    let library = Simulated::new();
    let pair = TestLink::new(&found(&library), &found(&library));
    library.mode(Mode::Failed);
    let read = pair.read();
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    for _ in 0..3 {
        assert_eq!((pair.read(), pair.carrier()), (Ok(()), "tcp"));
    }
    assert_eq!(library.deliver(), 0, "what failed writes nothing any more");
}

#[test]
fn a_device_to_device_read_uses_no_host_memory() {
    let library = Simulated::new();
    let nixl = found(&library);
    let (theirs, ours) = (Vram::filled(3, 0x40), Vram::filled(1, 0x80));
    let pair = TestLink::between((&nixl, Some(&theirs)), (&nixl, Some(&ours)));
    assert_eq!((pair.fetch(), pair.carrier()), (Ok(()), "nixl-device"));
    for (here, there) in [(4, 1), (9, 2)] {
        assert_eq!(ours.region.read_block(BlockId(here)), [0x40 ^ there; BLOCK], "block {there}");
        assert_eq!(pair.region.read_block(BlockId(here)), [0; BLOCK], "the mirror");
    }
    assert_eq!(ours.region.read_block(BlockId(5)), [0x80 ^ 5; BLOCK], "no order was given for it");
    assert_eq!(library.device_bytes(), 2 * BLOCK);
    assert_eq!(theirs.copied_out.load(Ordering::Relaxed) + ours.copied_out.load(Ordering::Relaxed), 0);
}

#[test]
fn a_device_and_host_memory_meet_in_host_memory_by_nixl_too() {
    for on_device in [[true, false], [false, true]] {
        let library = Simulated::new();
        let nixl = found(&library);
        let vram = on_device.map(|there| there.then(|| Vram::filled(0, 0x40)));
        let pair = TestLink::between((&nixl, vram[0].as_ref()), (&nixl, vram[1].as_ref()));
        assert_eq!((pair.read(), pair.carrier()), (Ok(()), "nixl"), "{on_device:?}");
        assert_eq!(library.device_bytes(), 0);
    }
}

#[test]
fn without_device_memory_in_nixl_the_copy_goes_through_the_host() {
    let library = Simulated::new();
    library.without_cuda();
    let nixl = found(&library);
    let (theirs, ours) = (Vram::filled(0, 0x40), Vram::filled(0, 0x80));
    let pair = TestLink::between((&nixl, Some(&theirs)), (&nixl, Some(&ours)));
    assert_eq!((pair.read(), pair.carrier()), (Ok(()), "nixl"));
    assert_eq!(library.device_bytes(), 0);
}

#[test]
fn a_device_that_nixl_meets_and_cannot_read_costs_one_read_and_no_more() {
    let library = Simulated::new();
    let nixl = found(&library);
    let (theirs, ours) = (Vram::filled(0, 0x40), Vram::filled(0, 0x80));
    let pair = TestLink::between((&nixl, Some(&theirs)), (&nixl, Some(&ours)));
    library.mode(Mode::Failed);
    let read = pair.fetch();
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    assert_eq!(library.deliver(), 0, "what failed writes nothing any more");
    assert_eq!((pair.read(), pair.carrier()), (Ok(()), "tcp"));
}
