//! Tests with a second process, between software devices with shared memory: a producer that dies or stops during a
//! read, and invalid offers.

#[path = "../../tests/conformance/mod.rs"]
#[allow(unused_imports, dead_code, reason = "the suite's vocabulary; its cases run in conformance.rs")]
mod conformance;

use std::io::{self, BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::lease::LeaseTerms;
use baton_connector::ledger::ReleaseReply;
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, Reader};
use baton_connector_device::{
    ClientOptions, CopyRun, DevicePool, DeviceTransport, HANDLE_BYTES, ImportedPool, Offer, PoolExport,
    Secret, ServerOptions, SoftwarePool, transport,
};
use baton_connector_shm::{ShmServer, listen, shared_pool};
use conformance::{GatePoint, TestProducer};

const SILENCE: Duration = Duration::from_millis(700);
/// Tolerance for a loaded machine.
const SLACK: Duration = Duration::from_secs(5);
/// Longest wait for a state.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Blocks of the producer in another process, their size, and that of a batch.
const BLOCKS: usize = 24;
const BLOCK: usize = 1 << 20;
const ROLE: &str = "BATON_TEST_DEVICE_PRODUCER";
const READER: Reader = Reader::sole(7);
static GO: AtomicBool = AtomicBool::new(false);

fn pool(blocks: usize, block_bytes: usize) -> Region {
    shared_pool(blocks, block_bytes).expect("a system with memfd and seals")
}

fn secret() -> Option<Secret> {
    Some(Secret::new(b"a secret of the cluster").expect("long enough"))
}

/// An address that no other test of this process or of another uses.
fn address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port =
        (std::process::id() as u16).wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::from(([127, 0, 0, 4], port))
}

fn serve(producer: &Arc<TestProducer>, exported: Arc<dyn DevicePool>) -> (ShmServer, SocketAddr) {
    let address = address();
    let offered =
        baton_connector_device::producer(exported, producer.region(), BLOCK).expect("it can be exported");
    let listener = listen(producer.epoch(), address.port()).expect("a free name");
    let options = ServerOptions { secret: secret(), silence: SILENCE, ..ServerOptions::default() };
    let server = ShmServer::start_with_services(listener, Arc::clone(producer) as _, vec![offered], options);
    (server.expect("a server"), address)
}

fn client_of(device: Arc<dyn DevicePool>) -> DeviceTransport {
    transport(device, ClientOptions { secret: secret(), silence: SILENCE, ..ClientOptions::default() })
}

fn client() -> DeviceTransport {
    client_of(Arc::new(SoftwarePool::over(Region::allocate(1, 1))))
}

fn software(producer: &Arc<TestProducer>) -> Arc<dyn DevicePool> {
    Arc::new(SoftwarePool::over(producer.region().clone()))
}

fn test_producer() -> Arc<TestProducer> {
    TestProducer::new(BLOCKS, BLOCK, LeaseTerms::default())
}

fn peer_at(address: SocketAddr) -> Peer {
    let like = TestProducer::new(1, 1, LeaseTerms::default());
    Peer { address, epoch: like.epoch(), fingerprint: like.fingerprint() }
}

/// Not a test: the producer process that the tests below start. It leases all its blocks for each `lease` line of its
/// standard input.
#[test]
#[ignore = "the other process of the tests below"]
fn producer_process() {
    let Ok(gate) = std::env::var(ROLE) else { return };
    let producer = test_producer();
    if let Ok(look) = gate.parse() {
        producer.gate(GatePoint::Look(look));
    }
    let (server, address) = serve(&producer, software(&producer));
    println!("\nproducer {address}");
    let table: Vec<u32> = (0..BLOCKS as u32).rev().collect();
    for line in io::stdin().lines() {
        assert_eq!(line.expect("text"), "lease");
        println!("\nleased {}", producer.lease(&table, 1).0);
    }
    producer.open_gate();
    server.shutdown();
}

struct ProducerProcess {
    process: Child,
    stdout: BufReader<ChildStdout>,
    peer: Peer,
}

impl ProducerProcess {
    /// `gate`: the check of the lease at which its first read stops for good, if any.
    fn start(gate: Option<u64>) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "producer_process", "--ignored", "--nocapture"])
            .env(ROLE, gate.map_or_else(|| "open".to_owned(), |look| look.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test again");
        let stdout = BufReader::new(process.stdout.take().expect("piped"));
        let mut started = Self { process, stdout, peer: peer_at(([127, 0, 0, 4], 1).into()) };
        started.peer.address = started.read_line("producer ").parse().expect("an address");
        started
    }

    fn read_line(&mut self, prefix: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.stdout.read_line(&mut line).expect("text") > 0, "the producer ended");
            if let Some(rest) = line.strip_prefix(prefix) {
                return rest.trim().to_owned();
            }
        }
    }

    fn lease(&mut self) -> ReadOrder {
        writeln!(self.process.stdin.as_mut().expect("piped"), "lease").expect("it reads");
        order(Handle(self.read_line("leased ").parse().expect("a handle")))
    }

    fn signal(&self, signal: i32) {
        #[allow(unsafe_code, reason = "kill(2); one call")]
        // SAFETY: a signal to a child of this process. An ended child gets none.
        unsafe {
            libc::kill(self.process.id().cast_signed(), signal)
        };
    }
}

impl Drop for ProducerProcess {
    fn drop(&mut self) {
        // A stopped process can be killed too.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn order(handle: Handle) -> ReadOrder {
    let into = (0..BLOCKS as u32).map(BlockId).collect();
    ReadOrder { handle, reader: READER, part: Part::Blocks { first: 0 }, into }
}

/// Checks that all blocks have landed, in the reverse order of the lease.
fn landed(region: &Region) {
    /// A producer with the content of the other process.
    static LIKE: OnceLock<Arc<TestProducer>> = OnceLock::new();
    let like = LIKE.get_or_init(test_producer);
    for block in 0..BLOCKS as u32 {
        let leased = like.region().read_block(BlockId(BLOCKS as u32 - 1 - block));
        assert!(region.read_block(BlockId(block)) == leased, "block {block}");
    }
}

fn mark(region: &Region) {
    (0..BLOCKS as u32).for_each(|block| region.write_block(BlockId(block), &vec![0xee; BLOCK]));
}

fn is_marked(region: &Region, block: u32) -> bool {
    region.read_block(BlockId(block)).iter().all(|&byte| byte == 0xee)
}

#[test]
fn blocks_of_another_process_arrive_byte_by_byte_and_its_pool_is_opened_once() {
    let (mut process, transport) = (ProducerProcess::start(None), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    for _ in 0..3 {
        mark(&region);
        let order = process.lease();
        assert_eq!(transport.read(&process.peer, &order, &region, &GO), Ok(()));
        assert_eq!(transport.finish(&process.peer, order.handle, READER), Ok(Verdict::Valid));
        landed(&region);
    }
    let stale = process.lease();
    assert_eq!(transport.release(&process.peer, stale.handle, "test"), Ok(ReleaseReply::Released));
    assert_eq!(transport.read(&process.peer, &stale, &region, &GO), Err(TransportError::Gone));
    assert_eq!(transport.dialer().open_pools(), 1);
}

/// Starts a read that stops in its middle, sends the producer a signal, and returns the result of the read.
fn in_mid_read(
    transport: &DeviceTransport,
    process: &mut ProducerProcess,
    signal: i32,
) -> (ReadOrder, Result<(), TransportError>) {
    let region = Region::allocate(BLOCKS, BLOCK);
    mark(&region);
    let (order, begun) = (process.lease(), Instant::now());
    let read = thread::scope(|scope| {
        let read = scope.spawn(|| transport.read(&process.peer, &order, &region, &GO));
        while is_marked(&region, 0) {
            assert!(begun.elapsed() < TEST_TIMEOUT && !read.is_finished(), "nothing arrives");
        }
        process.signal(signal);
        let signalled = Instant::now();
        let read = read.join().expect("no panic");
        assert!(signalled.elapsed() < 2 * SILENCE + SLACK, "{:?}", signalled.elapsed());
        read
    });
    // After the read nothing is written, whether the producer continues or not.
    mark(&region);
    process.signal(libc::SIGCONT);
    let since = Instant::now();
    while since.elapsed() < SILENCE {
        assert!(is_marked(&region, 0) && is_marked(&region, BLOCKS as u32 - 1), "written after the read");
    }
    (order, read)
}

#[test]
fn a_producer_that_is_killed_in_mid_read_is_an_error_and_its_pool_is_closed() {
    let (mut process, transport) = (ProducerProcess::start(Some(6)), client());
    let (order, read) = in_mid_read(&transport, &mut process, libc::SIGKILL);
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    assert!(transport.finish(&process.peer, order.handle, READER).is_err(), "unknown: not valid");
    transport.sweep();
    assert_eq!(transport.dialer().open_pools(), 0);
    let mut next = ProducerProcess::start(None);
    let (order, region) = (next.lease(), Region::allocate(BLOCKS, BLOCK));
    assert_eq!(transport.read(&next.peer, &order, &region, &GO), Ok(()));
    assert_eq!(transport.finish(&next.peer, order.handle, READER), Ok(Verdict::Valid));
    landed(&region);
}

#[test]
fn a_producer_that_is_stopped_in_mid_read_is_an_error_within_the_bound() {
    let (mut process, transport) = (ProducerProcess::start(Some(6)), client());
    let (_, read) = in_mid_read(&transport, &mut process, libc::SIGSTOP);
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
}

#[test]
fn a_pool_outlives_its_producer_for_a_copy_but_not_for_a_verdict() {
    let (mut process, transport) = (ProducerProcess::start(None), client());
    let (order, region) = (process.lease(), Region::allocate(BLOCKS, BLOCK));
    assert_eq!(transport.read(&process.peer, &order, &region, &GO), Ok(()));
    process.signal(libc::SIGKILL);
    process.process.wait().expect("it ends");
    assert!(transport.finish(&process.peer, order.handle, READER).is_err());
    landed(&region);
    transport.sweep();
    assert_eq!(transport.dialer().open_pools(), 0);
}

#[test]
fn a_copy_that_a_device_fails_is_a_failed_read_and_the_producer_knows() {
    /// Opens every offer, and copies two batches.
    #[derive(Debug, Default)]
    struct FailingPool(Arc<AtomicU64>);
    impl DevicePool for FailingPool {
        fn export(&self) -> io::Result<PoolExport> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn open(&self, _offer: &Offer, _descriptor: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>> {
            Ok(Box::new(Self(Arc::clone(&self.0))))
        }
        fn landed(&self, _blocks: &[BlockId]) {
            panic!("it has not landed");
        }
    }
    impl ImportedPool for FailingPool {
        fn copy(&self, _runs: &[CopyRun], _region: &Region) -> io::Result<()> {
            match self.0.fetch_add(1, Ordering::Relaxed) {
                0 | 1 => Ok(()),
                _ => Err(io::Error::other("CUDA_ERROR_ILLEGAL_ADDRESS")),
            }
        }
    }
    let producer = test_producer();
    let (_server, address) = serve(&producer, software(&producer));
    let transport = client_of(Arc::new(FailingPool::default()));
    let (peer, region) = (peer_at(address), Region::allocate(BLOCKS, BLOCK));
    let handle = producer.lease(&(0..BLOCKS as u32).collect::<Vec<_>>(), 1);
    let read = transport.read(&peer, &order(handle), &region, &GO);
    assert!(
        matches!(&read, Err(TransportError::Transfer(why)) if why.contains("ILLEGAL_ADDRESS")),
        "{read:?}"
    );
    producer.await_failed(READER);
}

/// The error of a read from a producer whose offers do not match its pool.
fn offers(
    export: impl Fn(&SoftwarePool) -> io::Result<PoolExport> + Send + Sync + 'static,
) -> TransportError {
    struct HostilePool<F>(SoftwarePool, F);
    impl<F> std::fmt::Debug for HostilePool<F> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("HostilePool")
        }
    }
    impl<F: Fn(&SoftwarePool) -> io::Result<PoolExport> + Send + Sync> DevicePool for HostilePool<F> {
        fn export(&self) -> io::Result<PoolExport> {
            self.1(&self.0)
        }
        fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>> {
            self.0.open(offer, descriptor)
        }
        fn landed(&self, blocks: &[BlockId]) {
            self.0.landed(blocks);
        }
    }
    let producer = test_producer();
    let hostile = HostilePool(SoftwarePool::over(producer.region().clone()), export);
    let (_server, address) = serve(&producer, Arc::new(hostile));
    let handle = producer.lease(&(0..BLOCKS as u32).collect::<Vec<_>>(), 1);
    let region = Region::allocate(BLOCKS, BLOCK);
    mark(&region);
    let read = client().read(&peer_at(address), &order(handle), &region, &GO);
    assert!((0..BLOCKS as u32).all(|block| is_marked(&region, block)), "something was copied");
    read.expect_err("it was believed")
}

#[test]
fn a_false_offer_is_rejected_with_a_reason() {
    // Memory that is shorter than the pool, memory of another device, no memory, and a file that is not memory.
    let short = offers(|own| {
        let few = SoftwarePool::over(pool(1, BLOCK));
        Ok(PoolExport { descriptor: few.export()?.descriptor, ..own.export()? })
    });
    let other = offers(|own| {
        let mut export = own.export()?;
        export.device.uuid = [1; 16];
        Ok(export)
    });
    let none = offers(|own| Ok(PoolExport { descriptor: None, handle: [9; HANDLE_BYTES], ..own.export()? }));
    let file = offers(|own| {
        let null = std::fs::File::open("/dev/null")?;
        Ok(PoolExport { descriptor: Some(null.into()), ..own.export()? })
    });
    for error in [short, other, none, file] {
        assert!(matches!(error, TransportError::Handshake(..)), "{error:?}");
    }
}

#[test]
fn a_producer_without_a_device_is_a_handshake_that_failed() {
    let producer = test_producer();
    let address = address();
    let listener = listen(producer.epoch(), address.port()).expect("a free name");
    let options = ServerOptions { secret: secret(), silence: SILENCE, ..ServerOptions::default() };
    let _server = ShmServer::start(listener, Arc::clone(&producer) as _, options).expect("a server");
    let handle = producer.lease(&[0], 1);
    let region = Region::allocate(1, BLOCK);
    let order = ReadOrder { into: vec![BlockId(0)], ..order(handle) };
    for peer in [peer_at(address), Peer { epoch: Epoch(99), ..peer_at(address) }] {
        let read = client().read(&peer, &order, &region, &GO);
        assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
    }
}
