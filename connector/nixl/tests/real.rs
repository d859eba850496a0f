//! The real library: the conformance suite, tests with a second process, and reads larger than one request
//! (`oversize`). `tests/peers/nixl.sh` runs all of them. They need NIXL, but no GPU.
//! `pip install --no-deps nixl nixl-cu12` installs it:
//!
//! ```text
//! BATON_NIXL_LIBRARY=…/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so \
//!     cargo test --workspace --test real -- --ignored --test-threads 2
//! ```
//!
//! The script runs them again with `UCX_TLS=tcp`, where a request can hang while its producer is stopped. Without the
//! library these tests fail. Without `--ignored` they are listed as ignored, with the reason.

#[path = "../../tests/conformance/mod.rs"]
#[macro_use]
mod conformance;
mod harness;
mod oversize;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::lease::LeaseTerms;
use baton_connector::ledger::ReleaseReply;
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Handle, Reader};
use baton_connector_channel::Server;
use baton_connector_nixl::find::{self, VARIABLE};
use baton_connector_nixl::{ClientOptions, Library, NixlTransport, ServerOptions, transport};
use conformance::{GatePoint, TestProducer, TransportHarness};
use harness::{NixlHarness, SILENCE, secret};

/// Tolerance for a loaded machine.
const SLACK: Duration = Duration::from_secs(5);
/// Longest wait for a state.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);
static GO: AtomicBool = AtomicBool::new(false);

fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

/// The library that the variable names; one for all tests of this process.
fn library() -> Arc<dyn Library> {
    static LIBRARY: OnceLock<Arc<dyn Library>> = OnceLock::new();
    let find = || {
        let named = std::env::var_os(VARIABLE).map(PathBuf::from);
        let named = named.unwrap_or_else(|| panic!("{VARIABLE} must name libnixl_capi.so"));
        find::library(Some(&named)).expect("the library that was named")
    };
    Arc::clone(LIBRARY.get_or_init(find))
}

fn serve(producer: &Arc<TestProducer>) -> (Server, Peer) {
    let options = ServerOptions { secret: secret(), silence: SILENCE, ..ServerOptions::default() };
    harness::serve(&*library(), producer, options)
}

fn client() -> NixlTransport {
    transport(library(), ClientOptions { secret: secret(), silence: SILENCE, ..ClientOptions::default() })
}

fn start(producer: Arc<TestProducer>) -> Box<dyn TransportHarness> {
    NixlHarness::start(library(), producer)
}

transport_conformance!(
    #[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
    start
);

/// Blocks of the producer in another process, and their size.
const BLOCKS: usize = 48;
const BLOCK: usize = 2 << 20;
const ROLE: &str = "BATON_TEST_PRODUCER";

/// Not a test: the producer process that the tests below start. It leases all its blocks for each `lease` line of its
/// standard input.
#[test]
#[ignore = "the other process of the tests below"]
fn producer_process() {
    let Ok(gate) = std::env::var(ROLE) else { return };
    let producer = TestProducer::new(BLOCKS, BLOCK, LeaseTerms::default());
    if let Ok(look) = gate.parse() {
        producer.gate(GatePoint::Look(look));
    }
    let (_server, peer) = serve(&producer);
    println!("\nproducer {}", peer.address);
    let table: Vec<u32> = (0..BLOCKS as u32).rev().collect();
    for line in std::io::stdin().lines() {
        match line.expect("text").as_str() {
            "lease" => println!("\nleased {}", producer.lease(&table, 1).0),
            other => panic!("{other:?}"),
        }
    }
    producer.open_gate();
}

struct ProducerProcess {
    process: Child,
    stdout: BufReader<std::process::ChildStdout>,
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
        let nowhere = ([127, 0, 0, 1], 1).into();
        let like = TestProducer::new(1, 1, LeaseTerms::default());
        let peer = Peer { address: nowhere, epoch: like.epoch(), fingerprint: like.fingerprint() };
        let mut started = Self { process, stdout, peer };
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

    fn lease(&mut self) -> Handle {
        writeln!(self.process.stdin.as_mut().expect("piped"), "lease").expect("it reads");
        Handle(self.read_line("leased ").parse().expect("a handle"))
    }

    fn signal(&self, signal: i32) {
        #[allow(unsafe_code, reason = "kill(2); one call")]
        // SAFETY: a signal to a child of this process. An ended child gets none.
        unsafe {
            libc::kill(self.process.id().cast_signed(), signal)
        };
    }
}

impl ProducerProcess {
    /// Stops the process, and returns when all its threads have stopped.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        #[allow(unsafe_code, reason = "waitpid(2); one call")]
        // SAFETY: a child of this process, and memory for its status.
        let changed =
            unsafe { libc::waitpid(self.process.id().cast_signed(), &raw mut status, libc::WUNTRACED) };
        assert!(changed > 0 && libc::WIFSTOPPED(status), "it stops");
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
    order_into(handle, (0..BLOCKS as u32).map(BlockId).collect())
}

/// The whole table, into these blocks.
fn order_into(handle: Handle, into: Vec<BlockId>) -> ReadOrder {
    ReadOrder { handle, reader: Reader::sole(7), part: Part::Blocks { first: 0 }, into }
}

fn landed(region: &Region) {
    /// A producer with the content of the other process.
    static LIKE: OnceLock<Arc<TestProducer>> = OnceLock::new();
    let like = LIKE.get_or_init(|| TestProducer::new(BLOCKS, BLOCK, LeaseTerms::default()));
    for block in 0..BLOCKS as u32 {
        let leased = like.region().read_block(BlockId(BLOCKS as u32 - 1 - block));
        assert!(region.read_block(BlockId(block)) == leased, "block {block}");
    }
}

/// Fills the region with a mark that no block of the producer equals or, as far as checked, begins with.
fn mark(region: &Region) {
    (0..BLOCKS as u32).for_each(|block| region.write_block(BlockId(block), &vec![0xee; BLOCK]));
}

fn begins_to_arrive(region: &Region) -> bool {
    region.read_block(BlockId(0))[0] != 0xee
}

fn marked(region: &Region) -> bool {
    (0..BLOCKS as u32).all(|block| region.read_block(BlockId(block)).iter().all(|&byte| byte == 0xee))
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn blocks_of_another_process_arrive_byte_by_byte() {
    let (mut process, transport) = (ProducerProcess::start(None), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    for _ in 0..3 {
        mark(&region);
        let order = order(process.lease());
        assert_eq!(transport.read(&process.peer, &order, &region, &GO), Ok(()));
        assert_eq!(transport.finish(&process.peer, order.handle, order.reader), Ok(Verdict::Valid));
        landed(&region);
    }
    let stale = order(process.lease());
    assert_eq!(transport.release(&process.peer, stale.handle, "test"), Ok(ReleaseReply::Released));
    assert_eq!(transport.read(&process.peer, &stale, &region, &GO), Err(TransportError::Gone));
    assert_eq!(transport.finish(&process.peer, stale.handle, stale.reader), Ok(Verdict::Gone));
    assert_eq!(transport.dialer().agents_made(), 1);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_producer_that_is_killed_in_mid_read_is_an_error_and_the_next_one_is_read() {
    let (mut process, transport) = (ProducerProcess::start(Some(4)), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    let order_of_dead = order(process.lease());
    mark(&region);
    let begun = Instant::now();
    thread::scope(|scope| {
        let read = scope.spawn(|| transport.read(&process.peer, &order_of_dead, &region, &GO));
        // The read has received some batches and waits for the rest.
        while !begins_to_arrive(&region) {
            assert!(begun.elapsed() < TEST_TIMEOUT && !read.is_finished(), "nothing arrives");
        }
        process.signal(libc::SIGKILL);
        let read = read.join().expect("no panic");
        assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    });
    assert!(transport.finish(&process.peer, order_of_dead.handle, order_of_dead.reader).is_err());
    let mut next = ProducerProcess::start(None);
    let order = order(next.lease());
    assert_eq!(transport.read(&next.peer, &order, &region, &GO), Ok(()));
    assert_eq!(transport.finish(&next.peer, order.handle, order.reader), Ok(Verdict::Valid));
    landed(&region);
}

/// Kills the producer at varying moments: for any result of the read there is no verdict.
#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_producer_killed_at_any_moment_gives_no_valid_verdict_and_no_hang() {
    let transport = client();
    let region = Region::allocate(BLOCKS, BLOCK);
    for _ in 0..4 {
        let mut process = ProducerProcess::start(None);
        let order = order(process.lease());
        mark(&region);
        thread::scope(|scope| {
            let read = scope.spawn(|| transport.read(&process.peer, &order, &region, &GO));
            let begun = Instant::now();
            while !begins_to_arrive(&region) {
                assert!(begun.elapsed() < TEST_TIMEOUT, "nothing arrives");
            }
            process.signal(libc::SIGKILL);
            drop(read.join().expect("no panic"));
            assert!(begun.elapsed() < 2 * SILENCE + SLACK, "{:?}", begun.elapsed());
        });
        assert!(transport.finish(&process.peer, order.handle, order.reader).is_err());
        mark(&region);
        transport.sweep();
        assert!(marked(&region), "written after the read had returned");
    }
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_stopped_producer_is_an_error_within_the_bound_and_nothing_is_written_when_it_goes_on() {
    let (mut process, transport) = (ProducerProcess::start(None), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    let order = order(process.lease());
    mark(&region);
    let begun = Instant::now();
    let read = thread::scope(|scope| {
        let read = scope.spawn(|| transport.read(&process.peer, &order, &region, &GO));
        while !begins_to_arrive(&region) {
            assert!(begun.elapsed() < TEST_TIMEOUT && !read.is_finished(), "nothing arrives");
        }
        process.stop();
        let stopped = Instant::now();
        let read = read.join().expect("no panic");
        assert!(stopped.elapsed() < 2 * SILENCE + SLACK, "{:?}", stopped.elapsed());
        read
    });
    // The producer may have granted everything before it was stopped.
    assert!(matches!(read, Ok(()) | Err(TransportError::Transfer(_))), "{read:?}");
    let verdict = transport.finish(&process.peer, order.handle, order.reader);
    assert!(verdict.is_err(), "a stopped producer gives no verdict; the read: {read:?}: {verdict:?}");
    mark(&region);
    process.signal(libc::SIGCONT);
    let begun = Instant::now();
    while begun.elapsed() < SILENCE {
        transport.sweep();
        assert!(marked(&region), "written after the read had returned");
    }
    // The consumer can read from another producer.
    let mut next = ProducerProcess::start(None);
    let again = self::order(next.lease());
    assert_eq!(transport.read(&next.peer, &again, &region, &GO), Ok(()));
    landed(&region);
    // Over UCX's TCP a request was probably in flight, and its agent was replaced. UCX may have ended the producer (see
    // the crate's table).
    let (agents, ended) = (transport.dialer().agents_made(), process.process.try_wait());
    println!("the read: {read:?}; agents made: {agents}; the producer, continued: {ended:?}");
    assert!(agents == 1 || read.is_err(), "replaced without need");
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_stop_flag_ends_a_cross_process_read_permanently() {
    let (mut process, transport) = (ProducerProcess::start(None), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    let (order, stop) = (order(process.lease()), AtomicBool::new(false));
    mark(&region);
    let begun = Instant::now();
    let read = thread::scope(|scope| {
        let read = scope.spawn(|| transport.read(&process.peer, &order, &region, &stop));
        while !begins_to_arrive(&region) {
            assert!(begun.elapsed() < TEST_TIMEOUT, "nothing arrives");
        }
        stop.store(true, Ordering::Release);
        read.join().expect("no panic")
    });
    assert!(matches!(read, Ok(()) | Err(TransportError::Stopped)), "{read:?}");
    mark(&region);
    let again = self::order(process.lease());
    let other_region = Region::allocate(BLOCKS, BLOCK);
    assert_eq!(transport.read(&process.peer, &again, &other_region, &GO), Ok(()));
    landed(&other_region);
    assert!(marked(&region), "written after the read had returned");
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn an_idle_producer_uses_no_processor() {
    let (mut process, transport) = (ProducerProcess::start(None), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    let order = order(process.lease());
    assert_eq!(transport.read(&process.peer, &order, &region, &GO), Ok(()));
    let ticks = |pid: u32| -> u64 {
        let mut stat = String::new();
        let file = std::fs::File::open(format!("/proc/{pid}/stat"));
        file.expect("it lives").read_to_string(&mut stat).expect("text");
        let fields: Vec<_> = stat.rsplit(')').next().expect("fields").split_whitespace().collect();
        fields[11].parse::<u64>().expect("user time") + fields[12].parse::<u64>().expect("system time")
    };
    let (pid, begun) = (process.process.id(), Instant::now());
    let before = ticks(pid);
    while begun.elapsed() < 2 * SILENCE {
        thread::park_timeout(SILENCE);
    }
    let used = Duration::from_millis(10 * (ticks(pid) - before));
    assert!(used < SILENCE / 4, "an idle producer used {used:?} of {:?}", begun.elapsed());
}
