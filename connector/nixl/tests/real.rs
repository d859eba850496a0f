//! The real library: every promise of a transport, what only another process can do, and reads larger than a request may
//! be (`oversize`). `tests/peers/nixl.sh` runs all of it. Needs NIXL, which
//! `pip install --no-deps nixl nixl-cu12` brings, without a GPU:
//!
//! ```text
//! BATON_NIXL_LIBRARY=…/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so \
//!     cargo test --workspace --test real -- --ignored --test-threads 2
//! ```
//!
//! Once more with `UCX_TLS=tcp`, the only way here to have a request hang while its producer is stopped.
//! Where the library is missing these tests fail; without `--ignored` they are listed as ignored, with the reason.

#[path = "../../tests/conformance/mod.rs"]
#[macro_use]
mod conformance;
mod oversize;
mod wire;

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
use conformance::{At, Lender, Wire};
use wire::{Agents, SILENCE, secret};

/// What a loaded machine may add to a bound.
const SLACK: Duration = Duration::from_secs(5);
/// Longest wait for a state.
const PATIENCE: Duration = Duration::from_secs(30);
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

fn serve(lender: &Arc<Lender>) -> (Server, Peer) {
    let options = ServerOptions { secret: secret(), silence: SILENCE, ..ServerOptions::default() };
    wire::serve(&*library(), lender, options)
}

fn client() -> NixlTransport {
    transport(library(), ClientOptions { secret: secret(), silence: SILENCE, ..ClientOptions::default() })
}

fn start(lender: Arc<Lender>) -> Box<dyn Wire> {
    Agents::start(library(), lender)
}

transport_conformance!(
    #[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
    start
);

/// Blocks of the producer in another process, and their size.
const BLOCKS: usize = 48;
const BLOCK: usize = 2 << 20;
const ROLE: &str = "BATON_TEST_PRODUCER";

/// Not a test: a producer in a process of its own, started by the tests below. It lends all its blocks, as often as it
/// is asked to, until its standard input ends.
#[test]
#[ignore = "the other process of the tests below"]
fn producer_process() {
    let Ok(gate) = std::env::var(ROLE) else { return };
    let lender = Lender::new(BLOCKS, BLOCK, LeaseTerms::default());
    if let Ok(look) = gate.parse() {
        lender.gate(At::Look(look));
    }
    let (_server, peer) = serve(&lender);
    println!("\nproducer {}", peer.address);
    let table: Vec<u32> = (0..BLOCKS as u32).rev().collect();
    for line in std::io::stdin().lines() {
        match line.expect("text").as_str() {
            "lend" => println!("\nlent {}", lender.lend(&table, 1).0),
            other => panic!("{other:?}"),
        }
    }
    lender.open_gate();
}

struct Other {
    process: Child,
    said: BufReader<std::process::ChildStdout>,
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
        let nowhere = ([127, 0, 0, 1], 1).into();
        let like = Lender::new(1, 1, LeaseTerms::default());
        let peer = Peer { address: nowhere, epoch: like.epoch(), fingerprint: like.fingerprint() };
        let mut other = Self { process, said, peer };
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

    fn lend(&mut self) -> Handle {
        writeln!(self.process.stdin.as_mut().expect("piped"), "lend").expect("it reads");
        Handle(self.heard("lent ").parse().expect("a handle"))
    }

    fn signal(&self, signal: i32) {
        #[allow(unsafe_code)] // kill(2); one call
        // SAFETY: a signal to a child of ours; one that has ended gets none.
        unsafe {
            libc::kill(self.process.id().cast_signed(), signal)
        };
    }
}

impl Other {
    /// Stops the process, and returns when all its threads have stopped.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        #[allow(unsafe_code)] // waitpid(2); one call
        // SAFETY: a child of ours, and room for its status.
        let changed =
            unsafe { libc::waitpid(self.process.id().cast_signed(), &raw mut status, libc::WUNTRACED) };
        assert!(changed > 0 && libc::WIFSTOPPED(status), "it stops");
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
    order_into(handle, (0..BLOCKS as u32).map(BlockId).collect())
}

/// The whole table, into these blocks.
fn order_into(handle: Handle, into: Vec<BlockId>) -> ReadOrder {
    ReadOrder { handle, reader: Reader::sole(7), part: Part::Blocks { first: 0 }, into }
}

fn landed(region: &Region) {
    /// What the other process lends.
    static LIKE: OnceLock<Arc<Lender>> = OnceLock::new();
    let like = LIKE.get_or_init(|| Lender::new(BLOCKS, BLOCK, LeaseTerms::default()));
    for block in 0..BLOCKS as u32 {
        let lent = like.region().read_block(BlockId(BLOCKS as u32 - 1 - block));
        assert!(region.read_block(BlockId(block)) == lent, "block {block}");
    }
}

/// Whatever is written over this is seen: no block of a lender's is all of it, nor begins with it where it matters.
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
    let (mut other, transport) = (Other::start(None), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    for _ in 0..3 {
        mark(&region);
        let order = order(other.lend());
        assert_eq!(transport.read(&other.peer, &order, &region, &GO), Ok(()));
        assert_eq!(transport.finish(&other.peer, order.handle, order.reader), Ok(Verdict::Valid));
        landed(&region);
    }
    let stale = order(other.lend());
    assert_eq!(transport.release(&other.peer, stale.handle, "test"), Ok(ReleaseReply::Released));
    assert_eq!(transport.read(&other.peer, &stale, &region, &GO), Err(TransportError::Gone));
    assert_eq!(transport.finish(&other.peer, stale.handle, stale.reader), Ok(Verdict::Gone));
    assert_eq!(transport.way().agents_made(), 1);
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_producer_that_is_killed_in_mid_read_is_an_error_and_the_next_one_is_read() {
    let (mut other, transport) = (Other::start(Some(4)), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    let order_of_dead = order(other.lend());
    mark(&region);
    let begun = Instant::now();
    thread::scope(|scope| {
        let read = scope.spawn(|| transport.read(&other.peer, &order_of_dead, &region, &GO));
        // It has taken some batches, and waits for the rest.
        while !begins_to_arrive(&region) {
            assert!(begun.elapsed() < PATIENCE && !read.is_finished(), "nothing arrives");
        }
        other.signal(libc::SIGKILL);
        let read = read.join().expect("no panic");
        assert!(matches!(read, Err(TransportError::Transfer(_))), "{read:?}");
    });
    assert!(transport.finish(&other.peer, order_of_dead.handle, order_of_dead.reader).is_err());
    let mut next = Other::start(None);
    let order = order(next.lend());
    assert_eq!(transport.read(&next.peer, &order, &region, &GO), Ok(()));
    assert_eq!(transport.finish(&next.peer, order.handle, order.reader), Ok(Verdict::Valid));
    landed(&region);
}

/// Killed at any moment, many times: whatever the read says, a verdict is needed, and there is none.
#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_producer_that_is_killed_at_any_moment_leaves_no_valid_verdict_and_no_hang() {
    let transport = client();
    let region = Region::allocate(BLOCKS, BLOCK);
    for _ in 0..4 {
        let mut other = Other::start(None);
        let order = order(other.lend());
        mark(&region);
        thread::scope(|scope| {
            let read = scope.spawn(|| transport.read(&other.peer, &order, &region, &GO));
            let begun = Instant::now();
            while !begins_to_arrive(&region) {
                assert!(begun.elapsed() < PATIENCE, "nothing arrives");
            }
            other.signal(libc::SIGKILL);
            drop(read.join().expect("no panic"));
            assert!(begun.elapsed() < 2 * SILENCE + SLACK, "{:?}", begun.elapsed());
        });
        assert!(transport.finish(&other.peer, order.handle, order.reader).is_err());
        mark(&region);
        transport.sweep();
        assert!(marked(&region), "written after the read had returned");
    }
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_stopped_producer_is_an_error_within_the_bound_and_nothing_is_written_when_it_goes_on() {
    let (mut other, transport) = (Other::start(None), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    let order = order(other.lend());
    mark(&region);
    let begun = Instant::now();
    let read = thread::scope(|scope| {
        let read = scope.spawn(|| transport.read(&other.peer, &order, &region, &GO));
        while !begins_to_arrive(&region) {
            assert!(begun.elapsed() < PATIENCE && !read.is_finished(), "nothing arrives");
        }
        other.stop();
        let stopped = Instant::now();
        let read = read.join().expect("no panic");
        assert!(stopped.elapsed() < 2 * SILENCE + SLACK, "{:?}", stopped.elapsed());
        read
    });
    // It may have granted everything before it was stopped.
    assert!(matches!(read, Ok(()) | Err(TransportError::Transfer(_))), "{read:?}");
    let verdict = transport.finish(&other.peer, order.handle, order.reader);
    assert!(verdict.is_err(), "it says nothing, and the read said {read:?}: {verdict:?}");
    mark(&region);
    other.signal(libc::SIGCONT);
    let begun = Instant::now();
    while begun.elapsed() < SILENCE {
        transport.sweep();
        assert!(marked(&region), "written after the read had returned");
    }
    // And its consumer reads from the next one.
    let mut next = Other::start(None);
    let again = self::order(next.lend());
    assert_eq!(transport.read(&next.peer, &again, &region, &GO), Ok(()));
    landed(&region);
    // Over UCX's TCP a request was in flight, most likely: then its agent has been replaced. And the producer may have
    // been ended by its UCX (see the crate's table).
    let (agents, ended) = (transport.way().agents_made(), other.process.try_wait());
    println!("the read: {read:?}; agents made: {agents}; the producer, continued: {ended:?}");
    assert!(agents == 1 || read.is_err(), "replaced without need");
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn a_raised_stop_flag_ends_a_read_of_another_process_for_good() {
    let (mut other, transport) = (Other::start(None), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    let (order, stop) = (order(other.lend()), AtomicBool::new(false));
    mark(&region);
    let begun = Instant::now();
    let read = thread::scope(|scope| {
        let read = scope.spawn(|| transport.read(&other.peer, &order, &region, &stop));
        while !begins_to_arrive(&region) {
            assert!(begun.elapsed() < PATIENCE, "nothing arrives");
        }
        stop.store(true, Ordering::Release);
        read.join().expect("no panic")
    });
    assert!(matches!(read, Ok(()) | Err(TransportError::Stopped)), "{read:?}");
    mark(&region);
    let again = self::order(other.lend());
    let other_region = Region::allocate(BLOCKS, BLOCK);
    assert_eq!(transport.read(&other.peer, &again, &other_region, &GO), Ok(()));
    landed(&other_region);
    assert!(marked(&region), "written after the read had returned");
}

#[test]
#[ignore = "needs NIXL: BATON_NIXL_LIBRARY"]
fn an_idle_producer_uses_no_processor() {
    let (mut other, transport) = (Other::start(None), client());
    let region = Region::allocate(BLOCKS, BLOCK);
    let order = order(other.lend());
    assert_eq!(transport.read(&other.peer, &order, &region, &GO), Ok(()));
    let ticks = |process: u32| -> u64 {
        let mut stat = String::new();
        let file = std::fs::File::open(format!("/proc/{process}/stat"));
        file.expect("it lives").read_to_string(&mut stat).expect("text");
        let fields: Vec<_> = stat.rsplit(')').next().expect("fields").split_whitespace().collect();
        fields[11].parse::<u64>().expect("user time") + fields[12].parse::<u64>().expect("system time")
    };
    let (process, begun) = (other.process.id(), Instant::now());
    let before = ticks(process);
    while begun.elapsed() < 2 * SILENCE {
        thread::park_timeout(SILENCE);
    }
    let used = Duration::from_millis(10 * (ticks(process) - before));
    assert!(used < SILENCE / 4, "an idle producer used {used:?} of {:?}", begun.elapsed());
}
