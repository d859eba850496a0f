//! What only another process can do, between software devices whose memory is really shared: die and stand still in the
//! middle of a read, and offer what cannot be.

#[path = "../../tests/conformance/mod.rs"]
#[allow(unused_imports, dead_code)] // the suite's vocabulary; its cases run in conformance.rs
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
    ClientOptions, DevicePool, DeviceTransport, Export, HANDLE_BYTES, Offer, Opened, Run, Secret,
    ServerOptions, Software, producer, transport,
};
use baton_connector_shm::{ShmServer, listen, shared_pool};
use conformance::{At, Lender};

const SILENCE: Duration = Duration::from_millis(700);
/// What a loaded machine may add to a bound.
const SLACK: Duration = Duration::from_secs(5);
/// Longest wait for a state.
const PATIENCE: Duration = Duration::from_secs(30);
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

/// A name that no other test of this process or of another has.
fn address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port =
        (std::process::id() as u16).wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::from(([127, 0, 0, 4], port))
}

fn serve(lender: &Arc<Lender>, exported: Arc<dyn DevicePool>) -> (ShmServer, SocketAddr) {
    let address = address();
    let offered = producer(exported, lender.region(), BLOCK).expect("it can be exported");
    let listener = listen(lender.epoch(), address.port()).expect("a free name");
    let options = ServerOptions { secret: secret(), silence: SILENCE, ..ServerOptions::default() };
    let server = ShmServer::start_beside(listener, Arc::clone(lender) as _, vec![offered], options);
    (server.expect("a server"), address)
}

fn client_of(device: Arc<dyn DevicePool>) -> DeviceTransport {
    transport(device, ClientOptions { secret: secret(), silence: SILENCE, ..ClientOptions::default() })
}

fn client() -> DeviceTransport {
    client_of(Arc::new(Software::over(Region::allocate(1, 1))))
}

fn software(lender: &Arc<Lender>) -> Arc<dyn DevicePool> {
    Arc::new(Software::over(lender.region().clone()))
}

fn lender() -> Arc<Lender> {
    Lender::new(BLOCKS, BLOCK, LeaseTerms::default())
}

fn peer_at(address: SocketAddr) -> Peer {
    let like = Lender::new(1, 1, LeaseTerms::default());
    Peer { address, epoch: like.epoch(), fingerprint: like.fingerprint() }
}

/// Not a test: a producer in a process of its own, started by the tests below. It lends all its blocks, as often as it is
/// asked to, until its standard input ends.
#[test]
#[ignore = "the other process of the tests below"]
fn producer_process() {
    let Ok(gate) = std::env::var(ROLE) else { return };
    let lender = lender();
    if let Ok(look) = gate.parse() {
        lender.gate(At::Look(look));
    }
    let (server, address) = serve(&lender, software(&lender));
    println!("\nproducer {address}");
    let table: Vec<u32> = (0..BLOCKS as u32).rev().collect();
    for line in io::stdin().lines() {
        assert_eq!(line.expect("text"), "lend");
        println!("\nlent {}", lender.lend(&table, 1).0);
    }
    lender.open_gate();
    server.shutdown();
}

struct Other {
    process: Child,
    said: BufReader<ChildStdout>,
    peer: Peer,
}

impl Other {
    /// `gate`: where its first read stops for good, if anywhere.
    fn start(gate: Option<u64>) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "producer_process", "--ignored", "--nocapture"])
            .env(ROLE, gate.map_or_else(|| "open".to_owned(), |look| look.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test again");
        let said = BufReader::new(process.stdout.take().expect("piped"));
        let mut other = Self { process, said, peer: peer_at(([127, 0, 0, 4], 1).into()) };
        other.peer.address = other.heard("producer ").parse().expect("an address");
        other
    }

    fn heard(&mut self, prefix: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.said.read_line(&mut line).expect("text") > 0, "the producer ended");
            if let Some(rest) = line.strip_prefix(prefix) {
                return rest.trim().to_owned();
            }
        }
    }

    fn lends(&mut self) -> ReadOrder {
        writeln!(self.process.stdin.as_mut().expect("piped"), "lend").expect("it reads");
        order(Handle(self.heard("lent ").parse().expect("a handle")))
    }

    fn signal(&self, signal: i32) {
        #[allow(unsafe_code)] // kill(2); one call
        // SAFETY: a signal to a child of ours; one that has ended gets none.
        unsafe {
            libc::kill(self.process.id().cast_signed(), signal)
        };
    }
}

impl Drop for Other {
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

/// All blocks, in the reverse order that they are lent in.
fn landed(region: &Region) {
    /// What the other process lends.
    static LIKE: OnceLock<Arc<Lender>> = OnceLock::new();
    let like = LIKE.get_or_init(lender);
    for block in 0..BLOCKS as u32 {
        let lent = like.region().read_block(BlockId(BLOCKS as u32 - 1 - block));
        assert!(region.read_block(BlockId(block)) == lent, "block {block}");
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
    let (mut other, transport) = (Other::start(None), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    for _ in 0..3 {
        mark(&region);
        let order = other.lends();
        assert_eq!(transport.read(&other.peer, &order, &region, &GO), Ok(()));
        assert_eq!(transport.finish(&other.peer, order.handle, READER), Ok(Verdict::Valid));
        landed(&region);
    }
    let stale = other.lends();
    assert_eq!(transport.release(&other.peer, stale.handle, "test"), Ok(ReleaseReply::Released));
    assert_eq!(transport.read(&other.peer, &stale, &region, &GO), Err(TransportError::Gone));
    assert_eq!(transport.way().open_pools(), 1);
}

/// Starts a read that stops in its middle, does something to the producer, and says what the read said.
fn in_mid_read(
    transport: &DeviceTransport,
    other: &mut Other,
    signal: i32,
) -> (ReadOrder, Result<(), TransportError>) {
    let region = Region::allocate(BLOCKS, BLOCK);
    mark(&region);
    let (order, begun) = (other.lends(), Instant::now());
    let read = thread::scope(|scope| {
        let read = scope.spawn(|| transport.read(&other.peer, &order, &region, &GO));
        while is_marked(&region, 0) {
            assert!(begun.elapsed() < PATIENCE && !read.is_finished(), "nothing arrives");
        }
        other.signal(signal);
        let signalled = Instant::now();
        let read = read.join().expect("no panic");
        assert!(signalled.elapsed() < 2 * SILENCE + SLACK, "{:?}", signalled.elapsed());
        read
    });
    // Nothing is written any more, whatever becomes of the producer.
    mark(&region);
    other.signal(libc::SIGCONT);
    let since = Instant::now();
    while since.elapsed() < SILENCE {
        assert!(is_marked(&region, 0) && is_marked(&region, BLOCKS as u32 - 1), "written after the read");
    }
    (order, read)
}

#[test]
fn a_producer_that_is_killed_in_mid_read_is_an_error_and_its_pool_is_closed() {
    let (mut other, transport) = (Other::start(Some(6)), client());
    let (order, read) = in_mid_read(&transport, &mut other, libc::SIGKILL);
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    assert!(transport.finish(&other.peer, order.handle, READER).is_err(), "nobody knows: not valid");
    transport.sweep();
    assert_eq!(transport.way().open_pools(), 0);
    let mut next = Other::start(None);
    let (order, region) = (next.lends(), Region::allocate(BLOCKS, BLOCK));
    assert_eq!(transport.read(&next.peer, &order, &region, &GO), Ok(()));
    assert_eq!(transport.finish(&next.peer, order.handle, READER), Ok(Verdict::Valid));
    landed(&region);
}

#[test]
fn a_producer_that_is_stopped_in_mid_read_is_an_error_within_the_bound() {
    let (mut other, transport) = (Other::start(Some(6)), client());
    let (_, read) = in_mid_read(&transport, &mut other, libc::SIGSTOP);
    assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
}

#[test]
fn a_pool_outlives_its_producer_for_a_copy_but_not_for_a_verdict() {
    let (mut other, transport) = (Other::start(None), client());
    let (order, region) = (other.lends(), Region::allocate(BLOCKS, BLOCK));
    assert_eq!(transport.read(&other.peer, &order, &region, &GO), Ok(()));
    other.signal(libc::SIGKILL);
    other.process.wait().expect("it ends");
    assert!(transport.finish(&other.peer, order.handle, READER).is_err());
    landed(&region);
    transport.sweep();
    assert_eq!(transport.way().open_pools(), 0);
}

#[test]
fn a_copy_that_a_device_fails_is_a_failed_read_and_the_producer_knows() {
    /// Opens everything, and copies a batch or two.
    #[derive(Debug, Default)]
    struct Failing(Arc<AtomicU64>);
    impl DevicePool for Failing {
        fn export(&self) -> io::Result<Export> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn open(&self, _offer: &Offer, _descriptor: Option<OwnedFd>) -> io::Result<Box<dyn Opened>> {
            Ok(Box::new(Self(Arc::clone(&self.0))))
        }
        fn landed(&self, _blocks: &[BlockId]) {
            panic!("it has not landed");
        }
    }
    impl Opened for Failing {
        fn copy(&self, _runs: &[Run], _region: &Region) -> io::Result<()> {
            match self.0.fetch_add(1, Ordering::Relaxed) {
                0 | 1 => Ok(()),
                _ => Err(io::Error::other("CUDA_ERROR_ILLEGAL_ADDRESS")),
            }
        }
    }
    let lender = lender();
    let (_server, address) = serve(&lender, software(&lender));
    let transport = client_of(Arc::new(Failing::default()));
    let (peer, region) = (peer_at(address), Region::allocate(BLOCKS, BLOCK));
    let handle = lender.lend(&(0..BLOCKS as u32).collect::<Vec<_>>(), 1);
    let read = transport.read(&peer, &order(handle), &region, &GO);
    assert!(
        matches!(&read, Err(TransportError::Transfer(why)) if why.contains("ILLEGAL_ADDRESS")),
        "{read:?}"
    );
    lender.await_failed(READER);
}

/// A producer whose offers are not what its pool is.
fn offers(export: impl Fn(&Software) -> io::Result<Export> + Send + Sync + 'static) -> TransportError {
    struct Lying<F>(Software, F);
    impl<F> std::fmt::Debug for Lying<F> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Lying")
        }
    }
    impl<F: Fn(&Software) -> io::Result<Export> + Send + Sync> DevicePool for Lying<F> {
        fn export(&self) -> io::Result<Export> {
            self.1(&self.0)
        }
        fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn Opened>> {
            self.0.open(offer, descriptor)
        }
        fn landed(&self, blocks: &[BlockId]) {
            self.0.landed(blocks);
        }
    }
    let lender = lender();
    let lying = Lying(Software::over(lender.region().clone()), export);
    let (_server, address) = serve(&lender, Arc::new(lying));
    let handle = lender.lend(&(0..BLOCKS as u32).collect::<Vec<_>>(), 1);
    let region = Region::allocate(BLOCKS, BLOCK);
    mark(&region);
    let read = client().read(&peer_at(address), &order(handle), &region, &GO);
    assert!((0..BLOCKS as u32).all(|block| is_marked(&region, block)), "something was copied");
    read.expect_err("it was believed")
}

#[test]
fn an_offer_that_is_not_true_is_not_believed_and_says_why() {
    // Memory that is shorter than the pool, memory of another kind, and none at all.
    let short = offers(|own| {
        let few = Software::over(pool(1, BLOCK));
        Ok(Export { descriptor: few.export()?.descriptor, ..own.export()? })
    });
    let other = offers(|own| {
        let mut export = own.export()?;
        export.device.uuid = [1; 16];
        Ok(export)
    });
    let none = offers(|own| Ok(Export { descriptor: None, handle: [9; HANDLE_BYTES], ..own.export()? }));
    let file = offers(|own| {
        let null = std::fs::File::open("/dev/null")?;
        Ok(Export { descriptor: Some(null.into()), ..own.export()? })
    });
    for error in [short, other, none, file] {
        assert!(matches!(error, TransportError::Handshake(..)), "{error:?}");
    }
}

#[test]
fn a_producer_without_a_device_is_a_handshake_that_failed() {
    let lender = lender();
    let address = address();
    let listener = listen(lender.epoch(), address.port()).expect("a free name");
    let options = ServerOptions { secret: secret(), silence: SILENCE, ..ServerOptions::default() };
    let _server = ShmServer::start(listener, Arc::clone(&lender) as _, options).expect("a server");
    let handle = lender.lend(&[0], 1);
    let region = Region::allocate(1, BLOCK);
    let order = ReadOrder { into: vec![BlockId(0)], ..order(handle) };
    for peer in [peer_at(address), Peer { epoch: Epoch(99), ..peer_at(address) }] {
        let read = client().read(&peer, &order, &region, &GO);
        assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
    }
}
