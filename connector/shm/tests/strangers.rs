//! Who gets nothing here, and readers that stop in the middle: strangers, other users, the wrong secret, the
//! silent, the dead. Each ends its own connection and disturbs nobody; none makes a byte usable that it should not.
#![allow(unsafe_code)] // changing the user of one thread; one call

#[path = "../../tests/conformance/mod.rs"]
#[allow(unused_imports, dead_code)] // the suite's vocabulary; its cases run in conformance.rs
mod conformance;

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::lease::LeaseTerms;
use baton_connector::ledger::ReleaseReply;
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Epoch, Handle, Reader};
use baton_connector_shm::{
    ClientOptions, Secret, ServerOptions, ShmServer, ShmTransport, listen, shared_pool,
};
use conformance::Lender;

const SILENCE: Duration = Duration::from_millis(300);
/// What a loaded machine may add to a bound.
const SLACK: Duration = Duration::from_secs(3);
const READER: Reader = Reader::sole(1);
static GO: AtomicBool = AtomicBool::new(false);

fn pool(blocks: usize, block_bytes: usize) -> Region {
    shared_pool(blocks, block_bytes).expect("a system with memfd and seals")
}

fn secret(text: &str) -> Option<Secret> {
    Some(Secret::new(text.as_bytes()).expect("long enough"))
}

/// A port that no other test uses; only names are taken here.
fn address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port =
        (std::process::id() as u16).wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::from(([127, 0, 0, 2], port))
}

/// A name of this process alone.
fn epoch(lender: &Lender) -> Epoch {
    lender.epoch()
}

fn serve(lender: &Arc<Lender>, secret: Option<Secret>, connections_max: usize) -> (ShmServer, Peer) {
    let address = address();
    let listener = listen(epoch(lender), address.port()).expect("a free name");
    let options = ServerOptions { secret, connections_max, silence: SILENCE };
    let server = ShmServer::start(listener, Arc::clone(lender) as _, options).expect("a server");
    (server, Peer { address, epoch: lender.epoch(), fingerprint: lender.fingerprint() })
}

fn lender() -> Arc<Lender> {
    Lender::new(16, 4096, LeaseTerms::default())
}

fn client(secret: Option<Secret>) -> ShmTransport {
    ShmTransport::new(ClientOptions { secret, silence: SILENCE, ..ClientOptions::default() })
}

fn order(handle: Handle, reader: Reader, into: &[u32]) -> ReadOrder {
    ReadOrder {
        handle,
        reader,
        part: Part::Blocks { first: 0 },
        into: into.iter().map(|&block| BlockId(block)).collect(),
    }
}

/// A whole fetch of two blocks works.
fn fetch_works(lender: &Lender, transport: &ShmTransport, peer: &Peer) {
    let region = Region::allocate(4, 4096);
    let handle = lender.lend(&[3, 9], 1);
    transport.read(peer, &order(handle, READER, &[1, 0]), &region, &GO).expect("a live lease");
    assert_eq!(transport.finish(peer, handle, READER), Ok(Verdict::Valid));
    assert_eq!(region.read_block(BlockId(1)), lender.region().read_block(BlockId(3)));
    assert_eq!(region.read_block(BlockId(0)), lender.region().read_block(BlockId(9)));
}

/// A socket to a producer, as any program can have it.
fn plain_socket(peer: &Peer) -> UnixStream {
    let name = format!("baton-kv-{}-{}", peer.epoch, peer.address.port());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name).expect("a short name");
    let socket = UnixStream::connect_addr(&address).expect("a listener");
    socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    socket
}

/// The bytes of a consumer without a secret, up to its admission.
fn introduction(peer: &Peer) -> Vec<u8> {
    let mut bytes = b"BATON-KV".to_vec();
    bytes.extend([2, 0, 0, 0]);
    bytes.extend([7; 32]);
    bytes.extend(peer.epoch.0.to_le_bytes());
    bytes.extend(peer.fingerprint.to_le_bytes());
    bytes.extend([0; 32]);
    bytes
}

/// An admitted consumer that does what the test says. It has no use for the descriptor.
fn admitted(peer: &Peer) -> UnixStream {
    let mut socket = plain_socket(peer);
    socket.write_all(&introduction(peer)).expect("a listener");
    // Welcome, result and pool.
    let mut answer = [0; 76 + 1 + 16];
    socket.read_exact(&mut answer).expect("admitted");
    assert_eq!(answer[76], 0, "admitted");
    socket
}

/// A message about a lease and its reader.
fn message(kind: u8, handle: Handle, more: &[u8]) -> Vec<u8> {
    let mut payload = handle.0.to_le_bytes().to_vec();
    payload.extend(READER.consumer.to_le_bytes());
    payload.extend(READER.of.to_le_bytes());
    payload.extend(READER.rank.0.to_le_bytes());
    payload.extend(more);
    let mut frame = vec![kind];
    frame.extend((payload.len() as u32).to_le_bytes());
    frame.extend(payload);
    frame
}

/// Asks for `count` blocks.
fn ask_for(socket: &mut UnixStream, handle: Handle, count: u32) {
    let range = [0_u32.to_le_bytes(), count.to_le_bytes()].concat();
    socket.write_all(&message(0x01, handle, &range)).expect("a producer");
}

/// The kind of the next frame.
fn next_frame(socket: &mut UnixStream) -> u8 {
    let mut header = [0; 5];
    socket.read_exact(&mut header).expect("a frame");
    let len = u32::from_le_bytes(header[1..].try_into().expect("four bytes"));
    socket.read_exact(&mut vec![0; len as usize]).expect("its payload");
    header[0]
}

const GRANTED: u8 = 0x81;
const BATCH: u8 = 0x42;
const GONE: u8 = 0x82;
const VERDICT: u8 = 0x84;
const COPIED: [u8; 5] = [0x06, 0, 0, 0, 0];

/// Runs something as another user; only the thread that runs it changes. `None` where this process may not.
fn as_another_user<T: Send>(run: impl FnOnce() -> T + Send) -> Option<T> {
    const NOBODY_HERE: libc::c_long = 54_321;
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: only root can become another user");
        return None;
    }
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            // SAFETY: the system call, unlike libc's function, changes this thread alone, which ends after `run`.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, NOBODY_HERE, -1) };
            assert_eq!(changed, 0, "root may become anybody");
            run()
        });
        Some(other.join().expect("the other user's part"))
    })
}

#[test]
fn a_process_of_another_user_learns_nothing() {
    for secret in [None, secret("a secret of the cluster")] {
        let lender = lender();
        let (server, peer) = serve(&lender, secret.clone(), 8);
        let heard = as_another_user(|| {
            let mut socket = plain_socket(&peer);
            // The producer closes before it reads.
            let _ = socket.write_all(&introduction(&peer));
            let mut heard = Vec::new();
            match socket.read_to_end(&mut heard) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
            }
            let handle = lender.lend(&[0], 1);
            let read = client(secret.clone()).read(
                &peer,
                &order(handle, READER, &[0]),
                &Region::allocate(1, 4096),
                &GO,
            );
            assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
            heard
        });
        assert!(heard.is_none_or(|heard| heard.is_empty()), "not even a greeting");
        assert_eq!((server.stats().reads, server.stats().handshakes_failed), (0, 0), "not even asked");
        fetch_works(&lender, &client(secret), &peer);
    }
}

#[test]
fn a_producer_of_another_user_is_not_believed() {
    let lender = lender();
    let served = as_another_user(|| {
        let address = address();
        (listen(epoch(&lender), address.port()).expect("a free name"), address)
    });
    let Some((listener, address)) = served else { return };
    let peer = Peer { address, epoch: lender.epoch(), fingerprint: lender.fingerprint() };
    let server = ShmServer::start(listener, Arc::clone(&lender) as _, ServerOptions::default());
    let handle = lender.lend(&[0], 1);
    let read = client(None).read(&peer, &order(handle, READER, &[0]), &Region::allocate(1, 4096), &GO);
    assert!(matches!(&read, Err(TransportError::Handshake(_, why)) if why.contains("54321")), "{read:?}");
    assert!(client(None).finish(&peer, handle, READER).is_err(), "nor is its verdict");
    drop(server);
}

#[test]
fn both_ends_must_know_the_same_secret() {
    let (right, wrong) = (secret("a secret of the cluster"), secret("another cluster's secret"));
    for (here, there, works) in [
        (right.clone(), right.clone(), true),
        (None, None, true),
        (right.clone(), wrong.clone(), false),
        (right.clone(), None, false),
        (None, right.clone(), false),
    ] {
        let lender = lender();
        let (_server, peer) = serve(&lender, here, 8);
        let transport = client(there);
        if works {
            fetch_works(&lender, &transport, &peer);
            continue;
        }
        let handle = lender.lend(&[0], 1);
        let read = transport.read(&peer, &order(handle, READER, &[0]), &Region::allocate(1, 4096), &GO);
        assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
        assert!(transport.finish(&peer, handle, READER).is_err(), "no verdict from whom one cannot trust");
        assert!(transport.release(&peer, handle, "x").is_err());
        assert_eq!(lender.live_leases(), 1);
    }
}

#[test]
fn nobody_under_that_name_is_not_the_end_of_a_lease() {
    // The producer may be on another host: to say "gone" would be to forget its lease there.
    let peer = Peer { address: address(), epoch: Epoch(77), fingerprint: 1 };
    let transport = client(None);
    let read = transport.read(&peer, &order(Handle(1), READER, &[0]), &Region::allocate(1, 64), &GO);
    assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
    assert!(matches!(transport.finish(&peer, Handle(1), READER), Err(TransportError::Handshake(..))));
    assert!(matches!(transport.release(&peer, Handle(1), "x"), Err(TransportError::Handshake(..))));
}

#[test]
fn memory_of_one_process_is_not_served() {
    let plain = Region::allocate(1, 64);
    struct Plain(Arc<Lender>, Region);
    impl Producer for Plain {
        fn epoch(&self) -> Epoch {
            self.0.epoch()
        }
        fn fingerprint(&self) -> u64 {
            self.0.fingerprint()
        }
        fn read_begun(
            &self,
            h: Handle,
            r: Reader,
            f: usize,
            c: usize,
        ) -> Result<Vec<BlockId>, TransportError> {
            self.0.read_begun(h, r, f, c)
        }
        fn read_live(&self, handle: Handle, reader: Reader) -> bool {
            self.0.read_live(handle, reader)
        }
        fn read_done(&self, handle: Handle, reader: Reader) -> Verdict {
            self.0.read_done(handle, reader)
        }
        fn read_failed(&self, handle: Handle, reader: Reader) {
            self.0.read_failed(handle, reader);
        }
        fn release(&self, handle: Handle, reason: &str) -> ReleaseReply {
            self.0.release(handle, reason)
        }
        fn leave(&self, handle: Handle, consumer: u64, reason: &str) -> ReleaseReply {
            self.0.leave(handle, consumer, reason)
        }

        fn heartbeat(&self, handle: Handle) -> baton_connector::ledger::HeartbeatReply {
            self.0.heartbeat(handle)
        }
        fn region(&self) -> &Region {
            &self.1
        }
    }
    let lender = lender();
    let listener = listen(epoch(&lender), address().port()).expect("a free name");
    let started = ShmServer::start(listener, Arc::new(Plain(lender, plain)), ServerOptions::default());
    assert_eq!(started.err().map(|error| error.kind()), Some(ErrorKind::Unsupported));
}

#[test]
fn garbage_ends_its_own_connection_and_disturbs_nobody() {
    let lender = lender();
    let (_server, peer) = serve(&lender, None, 8);
    let transport = client(None);
    let after = |frame: &[u8]| [&introduction(&peer)[..], frame].concat();
    for bytes in [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        vec![0; 4096],
        vec![],
        b"BATON-KV".to_vec(),
        after(&[0x77, 0, 0, 0, 0]),
        after(&[0x01, 0xff, 0xff, 0xff, 0xff]),
        after(&COPIED),
        after(&[0x02, 26, 0]),
    ] {
        let begun = Instant::now();
        let mut socket = plain_socket(&peer);
        // The producer may close before it has read everything.
        let _ = socket.write_all(&bytes);
        match socket.read_to_end(&mut Vec::new()) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        }
        assert!(begun.elapsed() < SILENCE + SLACK, "{:?} for {:?}…", begun.elapsed(), bytes.get(..12));
        fetch_works(&lender, &transport, &peer);
    }
}

#[test]
fn connections_are_bounded_and_come_free_again() {
    let lender = lender();
    let (server, peer) = serve(&lender, None, 2);
    let transport = client(None);
    let idlers: Vec<_> = (0..2).map(|_| plain_socket(&peer)).collect();
    let turned_away = (0..100).find_map(|_| transport.heartbeat(&peer, &[Handle(1)]).err());
    assert!(matches!(turned_away, Some(TransportError::Handshake(..))), "{turned_away:?}");
    // The idlers never finish their handshake: their places come free by themselves.
    let begun = Instant::now();
    while transport.heartbeat(&peer, &[Handle(1)]).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(10), "silent strangers hold every connection");
        thread::yield_now();
    }
    drop(idlers);
    fetch_works(&lender, &transport, &peer);
    assert!(server.stats().turned_away > 0);
}

/// Ten batches of one block, of a lease that drains for `drain`.
fn ten_batches(drain: Duration) -> (Arc<Lender>, ShmServer, Peer, Handle) {
    let lender = Lender::new(10, 1 << 20, LeaseTerms { drain, ..LeaseTerms::default() });
    let (server, peer) = serve(&lender, None, 8);
    let handle = lender.lend(&(0..10).collect::<Vec<_>>(), 1);
    (lender, server, peer, handle)
}

#[test]
fn a_grant_runs_ahead_of_the_copying_by_a_window_only() {
    let (lender, server, peer, handle) = ten_batches(Duration::from_secs(5));
    let mut socket = admitted(&peer);
    ask_for(&mut socket, handle, 10);
    assert_eq!(next_frame(&mut socket), GRANTED);
    for _ in 0..4 {
        assert_eq!(next_frame(&mut socket), BATCH);
    }
    socket.set_read_timeout(Some(Duration::from_millis(200))).expect("a socket");
    let more = socket.read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(more, Err(ErrorKind::WouldBlock), "nothing has been copied yet");
    assert_eq!(server.stats().bytes, 4 << 20);
    socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    for _ in 0..6 {
        socket.write_all(&COPIED).expect("a producer");
        assert_eq!(next_frame(&mut socket), BATCH);
    }
    socket.write_all(&message(0x02, handle, &[])).expect("a producer");
    assert_eq!(next_frame(&mut socket), VERDICT, "the connection is in step");
    assert_eq!(lender.settled().len(), 1);
}

#[test]
fn a_silent_reader_holds_its_blocks_until_the_drain_deadline_and_then_gets_nothing() {
    let (lender, _server, peer, handle) = ten_batches(Duration::from_secs(2));
    // As a process that is stopped while it copies: its connection stays open, and it says nothing.
    let mut stopped = admitted(&peer);
    ask_for(&mut stopped, handle, 10);
    for _ in 0..5 {
        next_frame(&mut stopped);
    }
    thread::park_timeout(2 * SILENCE);
    let released = Instant::now();
    let reply = client(None).release(&peer, handle, "test");
    assert_eq!(reply, Ok(ReleaseReply::Draining), "it may still copy: the blocks stay");
    let settled = loop {
        let settled = lender.settled();
        if !settled.is_empty() {
            break settled;
        }
        assert!(released.elapsed() < Duration::from_secs(2) + SLACK);
        thread::yield_now();
    };
    assert!(released.elapsed() >= Duration::from_secs(2), "not before the drain deadline");
    assert_eq!(settled[0].blocks.len(), 10);
    // It is continued: told that the lease is over, and nothing it has is valid.
    assert_eq!(next_frame(&mut stopped), GONE);
    let verdict = client(None).finish(&peer, handle, READER);
    assert_eq!(verdict, Ok(Verdict::Gone));
}

#[test]
fn a_connection_whose_lease_ended_in_mid_read_is_still_in_step() {
    let (lender, _server, peer, handle) = ten_batches(Duration::ZERO);
    let mut socket = admitted(&peer);
    ask_for(&mut socket, handle, 10);
    for _ in 0..5 {
        next_frame(&mut socket);
    }
    assert_eq!(client(None).release(&peer, handle, "test"), Ok(ReleaseReply::Draining));
    assert_eq!(next_frame(&mut socket), GONE);
    // It had copied what it was granted before it read that, and told so where it had to.
    socket.write_all(&COPIED.repeat(4)).expect("a producer");
    let next = lender.lend(&[3], 1);
    ask_for(&mut socket, next, 1);
    assert_eq!((next_frame(&mut socket), next_frame(&mut socket)), (GRANTED, BATCH));
}

#[test]
fn a_dead_readers_read_has_failed_at_once() {
    for frames in [0, 1, 5] {
        let (lender, _server, peer, handle) = ten_batches(Duration::from_secs(60));
        let mut dying = admitted(&peer);
        ask_for(&mut dying, handle, 10);
        for _ in 0..frames {
            next_frame(&mut dying);
        }
        drop(dying);
        lender.await_failed(READER);
        assert_eq!(client(None).release(&peer, handle, "test"), Ok(ReleaseReply::Released));
    }
}

#[test]
fn blocks_reused_after_the_drain_deadline_are_never_valid() {
    let terms = LeaseTerms { drain: Duration::from_millis(100), ..LeaseTerms::default() };
    let lender = Lender::new(4, 1 << 20, terms);
    let (_server, peer) = serve(&lender, None, 8);
    let transport = client(None);
    let region = Region::allocate(4, 1 << 20);
    let handle = lender.lend(&[0, 1], 1);
    transport.read(&peer, &order(handle, READER, &[0, 1]), &region, &GO).expect("a live lease");
    // Between the last byte and the question the lease ends, and the blocks are another prompt's.
    assert_eq!(transport.release(&peer, handle, "test"), Ok(ReleaseReply::Draining));
    let begun = Instant::now();
    while lender.settled().is_empty() {
        assert!(begun.elapsed() < SLACK);
        thread::yield_now();
    }
    lender.region().write_block(BlockId(0), &vec![0xee; 1 << 20]);
    assert_eq!(transport.finish(&peer, handle, READER), Ok(Verdict::Gone));
}

#[test]
fn what_was_copied_from_a_producer_that_died_since_has_no_verdict() {
    let lender = lender();
    let (server, peer) = serve(&lender, None, 8);
    let transport = client(None);
    let region = Region::allocate(2, 4096);
    let handle = lender.lend(&[1, 2], 1);
    transport.read(&peer, &order(handle, READER, &[0, 1]), &region, &GO).expect("a live lease");
    server.shutdown();
    assert!(transport.finish(&peer, handle, READER).is_err(), "nobody knows: not valid");
    let again = lender.lend(&[1], 1);
    let read = transport.read(&peer, &order(again, READER, &[0]), &region, &GO);
    assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
}

#[test]
fn a_producer_that_never_answers_is_an_error_within_the_bound() {
    // The listener's backlog accepts for a process that does nothing, as one that was stopped.
    let address = address();
    let _silent = listen(Epoch(5), address.port()).expect("a free name");
    let peer = Peer { address, epoch: Epoch(5), fingerprint: 1 };
    let begun = Instant::now();
    let error = client(None).finish(&peer, Handle(1), READER).expect_err("nobody answers");
    assert!(matches!(error, TransportError::Handshake(..)), "{error}");
    assert!(begun.elapsed() >= SILENCE && begun.elapsed() < SILENCE + SLACK, "{:?}", begun.elapsed());
}
