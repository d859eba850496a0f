//! Hostile and failing peers: garbage, other users, a wrong secret, silent and dead peers, readers that stop in the
//! middle. Each ends only its own connection, and none gets a byte that it may not use.
#![allow(unsafe_code, reason = "changing the user of one thread; one call")]

#[path = "../../tests/conformance/mod.rs"]
#[allow(unused_imports, dead_code, reason = "the suite's vocabulary; its cases run in conformance.rs")]
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
use conformance::TestProducer;

const SILENCE: Duration = Duration::from_millis(300);
/// Tolerance for a loaded machine.
const SLACK: Duration = Duration::from_secs(3);
const READER: Reader = Reader::sole(1);
static GO: AtomicBool = AtomicBool::new(false);

fn pool(blocks: usize, block_bytes: usize) -> Region {
    shared_pool(blocks, block_bytes).expect("a system with memfd and seals")
}

fn secret(text: &str) -> Option<Secret> {
    Some(Secret::new(text.as_bytes()).expect("long enough"))
}

/// An address that no other test uses. Listeners bind names made from it.
fn address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let port =
        (std::process::id() as u16).wrapping_mul(64).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::from(([127, 0, 0, 2], port))
}

/// The epoch, which is part of the listener's name.
fn epoch(producer: &TestProducer) -> Epoch {
    producer.epoch()
}

fn serve(producer: &Arc<TestProducer>, secret: Option<Secret>, connections_max: usize) -> (ShmServer, Peer) {
    let address = address();
    let listener = listen(epoch(producer), address.port()).expect("a free name");
    let options = ServerOptions { secret, connections_max, silence: SILENCE };
    let server = ShmServer::start(listener, Arc::clone(producer) as _, options).expect("a server");
    (server, Peer { address, epoch: producer.epoch(), fingerprint: producer.fingerprint() })
}

fn test_producer() -> Arc<TestProducer> {
    TestProducer::new(16, 4096, LeaseTerms::default())
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

/// Checks that a whole fetch of two blocks works.
fn fetch_works(producer: &TestProducer, transport: &ShmTransport, peer: &Peer) {
    let region = Region::allocate(4, 4096);
    let handle = producer.lease(&[3, 9], 1);
    transport.read(peer, &order(handle, READER, &[1, 0]), &region, &GO).expect("a live lease");
    assert_eq!(transport.finish(peer, handle, READER), Ok(Verdict::Valid));
    assert_eq!(region.read_block(BlockId(1)), producer.region().read_block(BlockId(3)));
    assert_eq!(region.read_block(BlockId(0)), producer.region().read_block(BlockId(9)));
}

/// A socket to a producer, without a handshake.
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

/// The socket of an admitted consumer, which the test drives. The test does not use the descriptor.
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

/// Requests `count` blocks.
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

/// Runs a function as another user, on a thread of its own. `None` if this process may not change its user.
fn as_another_user<T: Send>(run: impl FnOnce() -> T + Send) -> Option<T> {
    const OTHER_USER: libc::c_long = 54_321;
    // SAFETY: the call has no arguments and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: only root can become another user");
        return None;
    }
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            // SAFETY: the system call, unlike libc's function, changes this thread alone, which ends after `run`.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, OTHER_USER, -1) };
            assert_eq!(changed, 0, "root may become any user");
            run()
        });
        Some(other.join().expect("the other user's part"))
    })
}

#[test]
fn a_process_of_another_user_learns_nothing() {
    for secret in [None, secret("a secret of the cluster")] {
        let producer = test_producer();
        let (server, peer) = serve(&producer, secret.clone(), 8);
        let received = as_another_user(|| {
            let mut socket = plain_socket(&peer);
            // The producer closes before it reads.
            let _ = socket.write_all(&introduction(&peer));
            let mut received = Vec::new();
            match socket.read_to_end(&mut received) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
            }
            let handle = producer.lease(&[0], 1);
            let read = client(secret.clone()).read(
                &peer,
                &order(handle, READER, &[0]),
                &Region::allocate(1, 4096),
                &GO,
            );
            assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
            received
        });
        assert!(received.is_none_or(|received| received.is_empty()), "not even a greeting");
        assert_eq!((server.stats().reads, server.stats().handshakes_failed), (0, 0), "not even asked");
        fetch_works(&producer, &client(secret), &peer);
    }
}

#[test]
fn a_producer_of_another_user_is_rejected() {
    let producer = test_producer();
    let served = as_another_user(|| {
        let address = address();
        (listen(epoch(&producer), address.port()).expect("a free name"), address)
    });
    let Some((listener, address)) = served else { return };
    let peer = Peer { address, epoch: producer.epoch(), fingerprint: producer.fingerprint() };
    let server = ShmServer::start(listener, Arc::clone(&producer) as _, ServerOptions::default());
    let handle = producer.lease(&[0], 1);
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
        let producer = test_producer();
        let (_server, peer) = serve(&producer, here, 8);
        let transport = client(there);
        if works {
            fetch_works(&producer, &transport, &peer);
            continue;
        }
        let handle = producer.lease(&[0], 1);
        let read = transport.read(&peer, &order(handle, READER, &[0]), &Region::allocate(1, 4096), &GO);
        assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
        assert!(transport.finish(&peer, handle, READER).is_err(), "no verdict from an untrusted producer");
        assert!(transport.release(&peer, handle, "x").is_err());
        assert_eq!(producer.live_leases(), 1);
    }
}

#[test]
fn a_missing_listener_is_a_handshake_error_and_not_gone() {
    // The producer may be on another host. "Gone" would leave its lease there unreleased.
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
    struct HeapProducer(Arc<TestProducer>, Region);
    impl Producer for HeapProducer {
        fn epoch(&self) -> Epoch {
            self.0.epoch()
        }
        fn fingerprint(&self) -> u64 {
            self.0.fingerprint()
        }
        fn begin_read(
            &self,
            h: Handle,
            r: Reader,
            f: usize,
            c: usize,
        ) -> Result<Vec<BlockId>, TransportError> {
            self.0.begin_read(h, r, f, c)
        }
        fn is_read_live(&self, handle: Handle, reader: Reader) -> bool {
            self.0.is_read_live(handle, reader)
        }
        fn finish_read(&self, handle: Handle, reader: Reader) -> Verdict {
            self.0.finish_read(handle, reader)
        }
        fn fail_read(&self, handle: Handle, reader: Reader) {
            self.0.fail_read(handle, reader);
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
    let producer = test_producer();
    let listener = listen(epoch(&producer), address().port()).expect("a free name");
    let started =
        ShmServer::start(listener, Arc::new(HeapProducer(producer, plain)), ServerOptions::default());
    assert_eq!(started.err().map(|error| error.kind()), Some(ErrorKind::Unsupported));
}

#[test]
fn garbage_ends_only_its_own_connection() {
    let producer = test_producer();
    let (_server, peer) = serve(&producer, None, 8);
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
        fetch_works(&producer, &transport, &peer);
    }
}

#[test]
fn connections_are_bounded_and_come_free_again() {
    let producer = test_producer();
    let (server, peer) = serve(&producer, None, 2);
    let transport = client(None);
    let idlers: Vec<_> = (0..2).map(|_| plain_socket(&peer)).collect();
    let rejected = (0..100).find_map(|_| transport.heartbeat(&peer, &[Handle(1)]).err());
    assert!(matches!(rejected, Some(TransportError::Handshake(..))), "{rejected:?}");
    // The idle peers never finish their handshake: their places become free by themselves.
    let begun = Instant::now();
    while transport.heartbeat(&peer, &[Handle(1)]).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(10), "silent peers hold every connection");
        thread::yield_now();
    }
    drop(idlers);
    fetch_works(&producer, &transport, &peer);
    assert!(server.stats().rejected > 0);
}

/// Ten batches of one block, of a lease that drains for `drain`.
fn ten_batches(drain: Duration) -> (Arc<TestProducer>, ShmServer, Peer, Handle) {
    let producer = TestProducer::new(10, 1 << 20, LeaseTerms { drain, ..LeaseTerms::default() });
    let (server, peer) = serve(&producer, None, 8);
    let handle = producer.lease(&(0..10).collect::<Vec<_>>(), 1);
    (producer, server, peer, handle)
}

#[test]
fn a_grant_runs_ahead_of_the_copying_by_a_window_only() {
    let (producer, server, peer, handle) = ten_batches(Duration::from_secs(5));
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
    assert_eq!(producer.closed_leases().len(), 1);
}

#[test]
fn a_silent_reader_holds_blocks_only_until_the_drain_deadline() {
    let (producer, _server, peer, handle) = ten_batches(Duration::from_secs(2));
    // As a process that is stopped while it copies: its connection stays open and silent.
    let mut stopped = admitted(&peer);
    ask_for(&mut stopped, handle, 10);
    for _ in 0..5 {
        next_frame(&mut stopped);
    }
    thread::park_timeout(2 * SILENCE);
    let released = Instant::now();
    let reply = client(None).release(&peer, handle, "test");
    assert_eq!(reply, Ok(ReleaseReply::Draining), "it may still copy: the blocks stay");
    let closed = loop {
        let closed = producer.closed_leases();
        if !closed.is_empty() {
            break closed;
        }
        assert!(released.elapsed() < Duration::from_secs(2) + SLACK);
        thread::yield_now();
    };
    assert!(released.elapsed() >= Duration::from_secs(2), "not before the drain deadline");
    assert_eq!(closed[0].blocks.len(), 10);
    // When the reader continues, the producer reports the end of the lease, and the read is not valid.
    assert_eq!(next_frame(&mut stopped), GONE);
    let verdict = client(None).finish(&peer, handle, READER);
    assert_eq!(verdict, Ok(Verdict::Gone));
}

#[test]
fn a_connection_whose_lease_ended_in_mid_read_is_still_in_step() {
    let (producer, _server, peer, handle) = ten_batches(Duration::ZERO);
    let mut socket = admitted(&peer);
    ask_for(&mut socket, handle, 10);
    for _ in 0..5 {
        next_frame(&mut socket);
    }
    assert_eq!(client(None).release(&peer, handle, "test"), Ok(ReleaseReply::Draining));
    assert_eq!(next_frame(&mut socket), GONE);
    // The reader had copied and acknowledged the granted batches before it received this frame.
    socket.write_all(&COPIED.repeat(4)).expect("a producer");
    let next = producer.lease(&[3], 1);
    ask_for(&mut socket, next, 1);
    assert_eq!((next_frame(&mut socket), next_frame(&mut socket)), (GRANTED, BATCH));
}

#[test]
fn a_dead_readers_read_has_failed_at_once() {
    for frames in [0, 1, 5] {
        let (producer, _server, peer, handle) = ten_batches(Duration::from_secs(60));
        let mut dying = admitted(&peer);
        ask_for(&mut dying, handle, 10);
        for _ in 0..frames {
            next_frame(&mut dying);
        }
        drop(dying);
        producer.await_failed(READER);
        assert_eq!(client(None).release(&peer, handle, "test"), Ok(ReleaseReply::Released));
    }
}

#[test]
fn blocks_reused_after_the_drain_deadline_are_never_valid() {
    let terms = LeaseTerms { drain: Duration::from_millis(100), ..LeaseTerms::default() };
    let producer = TestProducer::new(4, 1 << 20, terms);
    let (_server, peer) = serve(&producer, None, 8);
    let transport = client(None);
    let region = Region::allocate(4, 1 << 20);
    let handle = producer.lease(&[0, 1], 1);
    transport.read(&peer, &order(handle, READER, &[0, 1]), &region, &GO).expect("a live lease");
    // The lease ends between the last byte and the request of the verdict, and another prompt reuses the blocks.
    assert_eq!(transport.release(&peer, handle, "test"), Ok(ReleaseReply::Draining));
    let begun = Instant::now();
    while producer.closed_leases().is_empty() {
        assert!(begun.elapsed() < SLACK);
        thread::yield_now();
    }
    producer.region().write_block(BlockId(0), &vec![0xee; 1 << 20]);
    assert_eq!(transport.finish(&peer, handle, READER), Ok(Verdict::Gone));
}

#[test]
fn a_copy_from_a_producer_that_died_has_no_verdict() {
    let producer = test_producer();
    let (server, peer) = serve(&producer, None, 8);
    let transport = client(None);
    let region = Region::allocate(2, 4096);
    let handle = producer.lease(&[1, 2], 1);
    transport.read(&peer, &order(handle, READER, &[0, 1]), &region, &GO).expect("a live lease");
    server.shutdown();
    assert!(transport.finish(&peer, handle, READER).is_err(), "unknown: not valid");
    let again = producer.lease(&[1], 1);
    let read = transport.read(&peer, &order(again, READER, &[0]), &region, &GO);
    assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
}

#[test]
fn a_producer_that_never_answers_is_an_error_within_the_bound() {
    // The kernel accepts connections into the backlog of a process that does nothing, such as a stopped one.
    let address = address();
    let _silent = listen(Epoch(5), address.port()).expect("a free name");
    let peer = Peer { address, epoch: Epoch(5), fingerprint: 1 };
    let begun = Instant::now();
    let error = client(None).finish(&peer, Handle(1), READER).expect_err("no answer");
    assert!(matches!(error, TransportError::Handshake(..)), "{error}");
    assert!(begun.elapsed() >= SILENCE && begun.elapsed() < SILENCE + SLACK, "{:?}", begun.elapsed());
}
