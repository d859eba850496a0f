//! The conformance suite of NIXL from device to device. Further tests have ends with memory of different kinds, a
//! library without CUDA, and late bytes. The agents are simulated: device memory is host memory that was registered as
//! a device's.

#[path = "../../tests/conformance/mod.rs"]
#[macro_use]
mod conformance;
mod simulated;

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_connector::lease::LeaseTerms;
use baton_connector::ledger::{HeartbeatReply, ReleaseReply};
use baton_connector::region::Region;
use baton_connector::transport::{
    Part, Peer, Producer, ReadOrder, StopFlag, Transport, TransportError, Verdict,
};
use baton_connector::{BlockId, Handle, Reader};
use baton_connector_channel::handshake::Service;
use baton_connector_channel::socket::{ChannelError, ChannelSocket, WaitLimit};
use baton_connector_channel::{ConnectError, Delivery, GrantedRead, Secret, Serve, Server};
use baton_connector_nixl::api::{Memory, Segment};
use baton_connector_nixl::{
    ClientOptions, DevicePool, NixlDeviceTransport, ServerOptions, device_producer, device_transport,
};
use conformance::{TestProducer, TransportHarness};
use simulated::{Mode, Simulated};
use socket2::Socket;

/// Smaller than in engines, so that a read of a few blocks takes several batches.
const BATCH_BYTES: usize = 1 << 20;
const SILENCE: Duration = Duration::from_millis(700);
const BLOCK: usize = 4096;
const BLOCKS: usize = 16;
const READER: Reader = Reader::sole(1);
static GO: AtomicBool = AtomicBool::new(false);

fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

/// A region that stands for a device's memory and its host side.
#[derive(Debug)]
struct FakeDevicePool {
    segment: Segment,
    region: Region,
    landed: Mutex<Vec<BlockId>>,
}

impl FakeDevicePool {
    fn of(segment: Segment, region: &Region) -> Arc<Self> {
        Arc::new(Self { segment, region: region.clone(), landed: Mutex::default() })
    }
}

impl DevicePool for FakeDevicePool {
    fn memory(&self) -> io::Result<Memory> {
        let base = self.region.block_ptr(BlockId(0)).expose_provenance();
        Ok(Memory { segment: self.segment, base, len: self.region.blocks() * self.region.block_bytes() })
    }

    fn region(&self) -> &Region {
        &self.region
    }

    fn enter(&self) -> io::Result<()> {
        Ok(())
    }

    fn landed(&self, blocks: &[BlockId]) {
        self.landed.lock().expect("no panic").extend(blocks);
    }
}

fn library(simulated: &Arc<Simulated>) -> Arc<simulated::SimulatedLibrary> {
    Arc::new(simulated::SimulatedLibrary(Arc::clone(simulated)))
}

fn serving(serve: Arc<dyn Serve>, producer: &Arc<TestProducer>, options: ServerOptions) -> (Server, Peer) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address: SocketAddr = listener.local_addr().expect("it listens");
    let server = Server::start(listener.into(), Arc::clone(producer) as _, vec![serve], options);
    let peer = Peer { address, epoch: producer.epoch(), fingerprint: producer.fingerprint() };
    (server.expect("loopback"), peer)
}

fn offered(simulated: &Arc<Simulated>, segment: Segment, producer: &TestProducer) -> Arc<dyn Serve> {
    let pool = FakeDevicePool::of(segment, producer.region());
    device_producer(&*library(simulated), pool, BATCH_BYTES).expect("a pool that the library takes")
}

/// An engine has one pool and one transport that lands there. The suite has a pool for each read.
struct TransportPerPool {
    simulated: Arc<Simulated>,
    options: ClientOptions,
    pools: Mutex<HashMap<usize, Arc<NixlDeviceTransport>>>,
    any: NixlDeviceTransport,
}

impl TransportPerPool {
    fn new(simulated: Arc<Simulated>, options: ClientOptions) -> Self {
        let none = FakeDevicePool::of(Segment::Cuda(1), &pool(1, 1));
        let any = device_transport(library(&simulated), none, options.clone());
        Self { simulated, options, pools: Mutex::default(), any }
    }

    fn all<T>(&self, each: impl Fn(&NixlDeviceTransport) -> T) -> Vec<T> {
        let pools = self.pools.lock().expect("no panic");
        pools.values().map(|transport| each(transport)).chain([each(&self.any)]).collect()
    }
}

impl Transport for TransportPerPool {
    fn read_with(
        &self,
        peer: &Peer,
        order: &ReadOrder,
        region: &Region,
        stop: &StopFlag,
        _: &mut dyn FnMut(&[BlockId]),
    ) -> Result<(), TransportError> {
        let transport = {
            let mut pools = self.pools.lock().expect("no panic");
            let new = || {
                let pool = FakeDevicePool::of(Segment::Cuda(1), region);
                Arc::new(device_transport(library(&self.simulated), pool, self.options.clone()))
            };
            Arc::clone(pools.entry(region.block_ptr(BlockId(0)).addr()).or_insert_with(new))
        };
        transport.read(peer, order, region, stop)
    }

    fn finish(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<Verdict, TransportError> {
        self.any.finish(peer, handle, reader)
    }

    fn give_up(&self, peer: &Peer, handle: Handle, reader: Reader) -> Result<(), TransportError> {
        self.any.give_up(peer, handle, reader)
    }

    fn release(&self, peer: &Peer, handle: Handle, reason: &str) -> Result<ReleaseReply, TransportError> {
        self.any.release(peer, handle, reason)
    }

    fn leave(
        &self,
        peer: &Peer,
        handle: Handle,
        consumer: u64,
        reason: &str,
    ) -> Result<ReleaseReply, TransportError> {
        self.any.leave(peer, handle, consumer, reason)
    }

    fn heartbeat(&self, peer: &Peer, handles: &[Handle]) -> Result<Vec<HeartbeatReply>, TransportError> {
        self.any.heartbeat(peer, handles)
    }

    fn sweep(&self) {
        self.all(|transport| transport.sweep());
    }
}

struct NixlDeviceHarness {
    server: Option<Server>,
    transport: Arc<TransportPerPool>,
    peer: Peer,
    producer: Arc<TestProducer>,
}

fn start(producer: Arc<TestProducer>) -> Box<dyn TransportHarness> {
    let simulated = Simulated::new();
    let secret = Some(Secret::new(b"a secret of the cluster").expect("long enough"));
    let options = ServerOptions { secret: secret.clone(), silence: SILENCE, ..ServerOptions::default() };
    let (server, peer) = serving(offered(&simulated, Segment::Cuda(3), &producer), &producer, options);
    let options = ClientOptions { secret, silence: SILENCE, ..ClientOptions::default() };
    let transport = Arc::new(TransportPerPool::new(simulated, options));
    Box::new(NixlDeviceHarness { server: Some(server), transport, peer, producer })
}

impl TransportHarness for NixlDeviceHarness {
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
        self.transport.all(|transport| transport.idle_connections()).into_iter().sum()
    }

    fn silence(&self) -> Duration {
        SILENCE
    }
}

impl Drop for NixlDeviceHarness {
    fn drop(&mut self) {
        // A read that a failed test left at the gate must not block the server's shutdown.
        self.producer.open_gate();
    }
}

transport_conformance!(start);

/// One producer and one consumer, each with a pool in some kind of memory.
struct DevicePair {
    simulated: Arc<Simulated>,
    producer: Arc<TestProducer>,
    pool: Arc<FakeDevicePool>,
    transport: NixlDeviceTransport,
    peer: Peer,
    _server: Server,
}

impl DevicePair {
    fn new(there: Segment, here: Segment) -> Self {
        let simulated = Simulated::new();
        let producer = TestProducer::new(BLOCKS, BLOCK, LeaseTerms::default());
        Self::with(offered(&simulated, there, &producer), here, simulated, producer)
    }

    fn with(
        serve: Arc<dyn Serve>,
        here: Segment,
        simulated: Arc<Simulated>,
        producer: Arc<TestProducer>,
    ) -> Self {
        let (server, peer) = serving(serve, &producer, ServerOptions::default());
        let region = pool(BLOCKS, BLOCK);
        (0..BLOCKS as u32).for_each(|block| region.write_block(BlockId(block), &[0xee; BLOCK]));
        let pool = FakeDevicePool::of(here, &region);
        let options = ClientOptions { silence: SILENCE, ..ClientOptions::default() };
        let transport = device_transport(library(&simulated), Arc::clone(&pool) as _, options);
        Self { simulated, producer, pool, transport, peer, _server: server }
    }

    fn order(&self) -> ReadOrder {
        let into = vec![BlockId(4), BlockId(9)];
        ReadOrder {
            handle: self.producer.lease(&[1, 2], 1),
            reader: READER,
            part: Part::Blocks { first: 0 },
            into,
        }
    }

    fn read(&self, order: &ReadOrder, region: &Region) -> Result<(), TransportError> {
        self.transport.read(&self.peer, order, region, &GO)
    }

    fn untouched(&self) {
        for block in 0..BLOCKS as u32 {
            let bytes = self.pool.region.read_block(BlockId(block));
            assert!(bytes.iter().all(|&byte| byte == 0xee), "block {block}");
        }
        assert!(self.pool.landed.lock().expect("no panic").is_empty(), "landed blocks were reported");
    }

    fn connect_failure(&self) -> String {
        let reached = self.transport.ensure_connected(&self.peer, &GO);
        let Err(ConnectError::Unreachable(why)) = reached else { panic!("{reached:?}") };
        self.untouched();
        assert_eq!(self.simulated.largest(), (0, 0), "a request was prepared");
        why.into()
    }
}

#[test]
fn each_end_uses_its_own_device_number_and_receives_completions() {
    for (there, here) in [
        (Segment::Cuda(3), Segment::Cuda(0)),
        (Segment::Cuda(0), Segment::Cuda(0)),
        // Software devices.
        (Segment::Host, Segment::Host),
    ] {
        let pair = DevicePair::new(there, here);
        let order = pair.order();
        assert_eq!(pair.read(&order, &pair.pool.region), Ok(()), "{there} to {here}");
        assert_eq!(pair.transport.finish(&pair.peer, order.handle, READER), Ok(Verdict::Valid));
        for (&here, there) in order.into.iter().zip([1, 2]) {
            let leased = pair.producer.region().read_block(BlockId(there));
            assert!(pair.pool.region.read_block(here) == leased, "block {there}");
        }
        assert_eq!(*pair.pool.landed.lock().expect("no panic"), order.into);
        assert_eq!(pair.simulated.device_bytes() > 0, here != Segment::Host);
    }
}

#[test]
fn memory_of_another_kind_is_refused_with_both_kinds_named() {
    for (there, here) in [(Segment::Host, Segment::Cuda(0)), (Segment::Cuda(2), Segment::Host)] {
        let why = DevicePair::new(there, here).connect_failure();
        assert!(why.contains(&there.to_string()) && why.contains(&here.to_string()), "{why}");
    }
}

#[test]
fn a_pool_in_host_memory_alone_is_no_device() {
    let simulated = Simulated::new();
    let producer = TestProducer::new(BLOCKS, BLOCK, LeaseTerms::default());
    let on_host =
        baton_connector_nixl::producer(&*library(&simulated), producer.region()).expect("host memory");
    DevicePair::with(on_host, Segment::Cuda(0), simulated, producer).connect_failure();
}

#[test]
fn a_library_without_cuda_makes_no_offer_and_is_not_retried_at_once() {
    let pair = DevicePair::new(Segment::Cuda(0), Segment::Cuda(0));
    pair.simulated.without_cuda();
    let made = pair.simulated.made();
    for _ in 0..3 {
        let why = pair.connect_failure();
        assert!(why.contains("register_mem"), "{why}");
    }
    assert_eq!(pair.simulated.made(), made + 1, "an agent costs half a second");
    assert_eq!(pair.simulated.agents(), 1, "and it is gone: the producer's is left");
    let pool = FakeDevicePool::of(Segment::Cuda(0), pair.producer.region());
    assert!(device_producer(&*library(&pair.simulated), pool, BATCH_BYTES).is_err());
}

#[test]
fn a_read_into_foreign_memory_is_refused() {
    let pair = DevicePair::new(Segment::Cuda(0), Segment::Cuda(0));
    let other = pool(BLOCKS, BLOCK);
    let read = pair.read(&pair.order(), &other);
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    pair.untouched();
    assert_eq!(pair.simulated.largest(), (0, 0), "a request was prepared");
}

#[test]
fn late_bytes_of_a_failed_read_are_not_delivered_or_reported() {
    for mode in [Mode::InFlight, Mode::Failed, Mode::FailedLater] {
        let pair = DevicePair::new(Segment::Cuda(0), Segment::Cuda(1));
        pair.simulated.mode(mode);
        let order = pair.order();
        let read = pair.read(&order, &pair.pool.region);
        assert!(matches!(read, Err(TransportError::Transfer(_))), "{mode:?}: {read:?}");
        assert_eq!(pair.simulated.deliver(), 0, "{mode:?}: bytes of a read that has returned");
        pair.untouched();
        pair.producer.await_failed(READER);
        pair.simulated.mode(Mode::Done);
        assert_eq!(pair.read(&pair.order(), &pair.pool.region), Ok(()), "{mode:?}");
        assert_eq!(pair.transport.dialer().agents_made(), 2, "{mode:?}: the first is gone");
    }
}

/// A producer that sends the given offer.
struct HostileService(Vec<u8>);

impl Serve for HostileService {
    fn name(&self) -> &'static str {
        "nixl-device"
    }

    fn service(&self) -> Service {
        Service::NixlDevice
    }

    fn check_socket(&self, _socket: &Socket) -> io::Result<()> {
        Ok(())
    }

    fn send_offer(
        &self,
        socket: &mut ChannelSocket,
        _: &dyn Producer,
        until: WaitLimit<'_>,
    ) -> Result<(), ChannelError> {
        socket.send(&self.0, until)
    }

    fn deliver(&self, _: &mut ChannelSocket, _: &GrantedRead<'_>) -> Result<Delivery, ChannelError> {
        Err(ChannelError::Unexpected)
    }
}

#[test]
fn an_invalid_announcement_fails_the_connection_before_metadata_is_loaded() {
    let announced = |bytes: &[u8; 8], batch: u64| [&bytes[..], &batch.to_le_bytes()].concat();
    for (at, offer) in [
        announced(&[0, 1, 0, 0, 0, 0, 0, 0], 1 << 20),
        announced(&[1, 9, 0, 0, 0, 0, 0, 0], 1 << 20),
        announced(&[1, 1, 1, 0, 0, 0, 0, 0], 1 << 20),
        announced(&[1, 1, 0, 0, 0, 1, 0, 0], 1 << 20),
        announced(&[1, 0, 0, 0, 1, 0, 0, 0], 1 << 20),
        announced(&[1, 1, 0, 0, 0, 0, 0, 0], 0),
        announced(&[1, 1, 0, 0, 0, 0, 0, 0], u64::MAX),
    ]
    .into_iter()
    .enumerate()
    {
        let producer = TestProducer::new(BLOCKS, BLOCK, LeaseTerms::default());
        let pair =
            DevicePair::with(Arc::new(HostileService(offer)), Segment::Cuda(0), Simulated::new(), producer);
        let why = pair.connect_failure();
        assert!(why.contains("invalid"), "{at}: {why}");
        assert_eq!(pair.simulated.made(), 0, "{at}");
    }
}
