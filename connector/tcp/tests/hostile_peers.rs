//! Hostile and failing peers: garbage, a wrong secret, silent peers, too many connections. Each ends only its own
//! connection.

#[path = "../../tests/conformance/mod.rs"]
#[allow(unused_imports, dead_code, reason = "the suite's vocabulary; its cases run in conformance.rs")]
mod conformance;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use baton_connector::lease::LeaseTerms;
use baton_connector::region::Region;
use baton_connector::transport::{Part, Peer, Producer, ReadOrder, Transport, TransportError, Verdict};
use baton_connector::{BlockId, Handle, Reader};
use baton_connector_tcp::{ClientOptions, Secret, ServerOptions, TcpServer, TcpTransport};
use conformance::TestProducer;

fn pool(blocks: usize, block_bytes: usize) -> Region {
    Region::allocate(blocks, block_bytes)
}

const SILENCE: Duration = Duration::from_millis(500);
/// Tolerance for a loaded machine.
const SLACK: Duration = Duration::from_secs(3);
const READER: Reader = Reader::sole(1);
static GO: AtomicBool = AtomicBool::new(false);

fn secret(text: &str) -> Option<Secret> {
    Some(Secret::new(text.as_bytes()).expect("long enough"))
}

fn serve(secret: Option<Secret>, connections_max: usize) -> (Arc<TestProducer>, TcpServer) {
    let producer = TestProducer::new(16, 4096, LeaseTerms::default());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let options = ServerOptions { secret, connections_max, silence: SILENCE };
    let server = TcpServer::start(listener, Arc::clone(&producer) as _, options).expect("loopback");
    (producer, server)
}

fn peer(producer: &TestProducer, server: &TcpServer) -> Peer {
    Peer { address: server.local_addr(), epoch: producer.epoch(), fingerprint: producer.fingerprint() }
}

fn client(secret: Option<Secret>) -> TcpTransport {
    TcpTransport::new(ClientOptions { secret, silence: SILENCE, ..ClientOptions::default() })
}

/// Checks that a whole fetch of two blocks works.
fn fetch_works(producer: &TestProducer, transport: &TcpTransport, peer: &Peer) {
    let region = Region::allocate(4, 4096);
    let handle = producer.lease(&[3, 9], 1);
    let order = ReadOrder {
        handle,
        reader: READER,
        part: Part::Blocks { first: 0 },
        into: vec![BlockId(1), BlockId(0)],
    };
    transport.read(peer, &order, &region, &GO).expect("a live lease");
    assert_eq!(transport.finish(peer, handle, READER), Ok(Verdict::Valid));
    assert_eq!(region.read_block(BlockId(1)), producer.region().read_block(BlockId(3)));
    assert_eq!(region.read_block(BlockId(0)), producer.region().read_block(BlockId(9)));
}

/// Sends bytes and returns how long the server took to close the connection.
fn until_closed(server: &TcpServer, bytes: &[u8]) -> Duration {
    let begun = Instant::now();
    let mut socket = TcpStream::connect(server.local_addr()).expect("a listener");
    socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    // The server may close before it has read everything.
    let _ = socket.write_all(bytes);
    match socket.read_to_end(&mut Vec::new()) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
    }
    begun.elapsed()
}

#[test]
fn a_server_beyond_loopback_needs_a_secret() {
    let start = |secret| {
        let producer = TestProducer::new(1, 64, LeaseTerms::default());
        let listener = TcpListener::bind("0.0.0.0:0").expect("a free port");
        TcpServer::start(listener, producer, ServerOptions { secret, ..ServerOptions::default() })
    };
    assert_eq!(start(None).err().map(|e| e.kind()), Some(ErrorKind::InvalidInput));
    start(secret("a secret of the cluster")).expect("with a secret it may").shutdown();
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
        let (producer, server) = serve(here, 8);
        let (transport, peer) = (client(there), peer(&producer, &server));
        if works {
            fetch_works(&producer, &transport, &peer);
            continue;
        }
        let handle = producer.lease(&[0], 1);
        let order =
            ReadOrder { handle, reader: READER, part: Part::Blocks { first: 0 }, into: vec![BlockId(0)] };
        let read = transport.read(&peer, &order, &Region::allocate(1, 4096), &GO);
        assert!(matches!(read, Err(TransportError::Handshake(..))), "{read:?}");
        assert!(transport.finish(&peer, handle, READER).is_err(), "no verdict from an untrusted producer");
        assert!(transport.release(&peer, handle, "x").is_err());
        assert_eq!(producer.live_leases(), 1);
    }
}

#[test]
fn garbage_ends_only_its_own_connection() {
    let (producer, server) = serve(secret("a secret of the cluster"), 8);
    let (transport, peer) = (client(secret("a secret of the cluster")), peer(&producer, &server));
    fetch_works(&producer, &transport, &peer);
    let hello = |version: u16, with_secret: u8| {
        let mut hello = b"BATON-KV".to_vec();
        hello.extend(version.to_le_bytes());
        hello.extend([with_secret, 0]);
        hello.extend([0x5a; 48]);
        hello
    };
    let mut unproved = hello(1, 1);
    unproved.extend([0; 32]);
    let mut reads_without_proof = unproved.clone();
    reads_without_proof.extend([1, 34, 0, 0, 0]);
    reads_without_proof.extend([0; 34]);
    let corpus: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec(),
        vec![0; 4096],
        vec![0xff; 100_000],
        b"BATON-KV".to_vec(),
        hello(3, 1),
        hello(2, 0),
        hello(2, 1),
        unproved,
        reads_without_proof,
        vec![],
    ];
    for bytes in &corpus {
        let took = until_closed(&server, bytes);
        assert!(took < SILENCE + SLACK, "{took:?} for {:?}…", &bytes[..bytes.len().min(12)]);
        fetch_works(&producer, &transport, &peer);
    }
    assert_eq!(server.stats().handshakes_failed, corpus.len() as u64);
}

#[test]
fn garbage_after_the_handshake_ends_only_its_own_connection() {
    let (producer, server) = serve(None, 8);
    let (transport, peer) = (client(None), peer(&producer, &server));
    let mut admitted = b"BATON-KV".to_vec();
    admitted.extend([2, 0, 0, 0]);
    admitted.extend([7; 32]);
    admitted.extend(producer.epoch().0.to_le_bytes());
    admitted.extend(producer.fingerprint().to_le_bytes());
    admitted.extend([0; 32]);
    for frame in [
        vec![0x77, 0, 0, 0, 0],
        vec![0x01, 0xff, 0xff, 0xff, 0xff],
        vec![0x05, 0xff, 0x7f, 0, 0],
        vec![0x01, 2, 0, 0, 0, 1, 1],
        vec![0x81, 0, 0, 0, 0],
        vec![0x04, 18, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0xff, 0xfe],
        vec![0x02, 26, 0],
    ] {
        let took = until_closed(&server, &[&admitted[..], &frame].concat());
        assert!(took < SILENCE + SLACK, "{took:?} for {frame:?}");
        fetch_works(&producer, &transport, &peer);
    }
}

#[test]
fn connections_are_bounded_and_come_free_again() {
    let (producer, server) = serve(None, 2);
    let transport = client(None);
    let idlers: Vec<_> = (0..2).map(|_| TcpStream::connect(server.local_addr()).expect("room")).collect();
    let peer = peer(&producer, &server);
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
}

#[test]
fn a_new_consumer_replaces_the_longest_idle_connection() {
    const MOST: usize = 2;
    let (producer, server) = serve(None, MOST);
    let at = peer(&producer, &server);
    // Each consumer keeps an idle connection.
    let consumers: Vec<_> = (0..4 * MOST).map(|_| client(None)).collect();
    for _ in 0..2 {
        for consumer in &consumers {
            let begun = Instant::now();
            // An answer arrives shortly before the producer marks its connection idle.
            while consumer.heartbeat(&at, &[Handle(1)]).is_err() {
                assert!(begun.elapsed() < Duration::from_secs(10), "idle connections hold every place");
                thread::yield_now();
            }
            fetch_works(&producer, consumer, &at);
        }
    }
    assert!(server.stats().evicted >= 3 * MOST as u64, "{:?}", server.stats());
}

#[test]
fn an_idle_connection_closed_by_the_producer_is_reopened() {
    let (producer, server) = serve(None, 8);
    let (transport, at) = (client(None), peer(&producer, &server));
    fetch_works(&producer, &transport, &at);
    assert_eq!(transport.idle_connections(), 1);
    let address = server.local_addr();
    server.shutdown();
    assert!(transport.heartbeat(&at, &[Handle(1)]).is_err(), "no listener");
    let listener = TcpListener::bind(address).expect("the same port again");
    let options = ServerOptions { silence: SILENCE, ..ServerOptions::default() };
    let again = TcpServer::start(listener, Arc::clone(&producer) as _, options).expect("loopback");
    fetch_works(&producer, &transport, &at);
    again.shutdown();
}

#[test]
fn idle_connections_are_closed() {
    let (producer, server) = serve(None, 8);
    let idle = Duration::from_millis(20);
    let transport =
        TcpTransport::new(ClientOptions { idle_timeout: idle, silence: SILENCE, ..ClientOptions::default() });
    fetch_works(&producer, &transport, &peer(&producer, &server));
    let begun = Instant::now();
    while transport.idle_connections() > 0 || server.stats().connections > 0 {
        transport.sweep();
        assert!(begun.elapsed() < Duration::from_secs(10));
        thread::yield_now();
    }
}

#[test]
fn a_producer_that_never_answers_is_an_error_within_the_bound() {
    // The kernel accepts connections into the backlog of a process that does nothing, such as a stopped one.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let producer = TestProducer::new(1, 64, LeaseTerms::default());
    let peer = Peer {
        address: silent.local_addr().expect("bound"),
        epoch: producer.epoch(),
        fingerprint: producer.fingerprint(),
    };
    let transport = client(None);
    let begun = Instant::now();
    let error = transport.finish(&peer, Handle(1), READER).expect_err("no answer");
    assert!(matches!(error, TransportError::Handshake(..)), "{error}");
    assert!(begun.elapsed() >= SILENCE && begun.elapsed() < SILENCE + SLACK, "{:?}", begun.elapsed());
}

/// Forwards the first `at_once` bytes of a producer's answers at once, and the rest one by one.
fn slow_proxy(producer: std::net::SocketAddr, at_once: usize) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    thread::spawn(move || {
        let (consumer, _) = listener.accept().expect("a consumer");
        let producer = TcpStream::connect(producer).expect("the producer listens");
        let (mut requests, mut server) =
            (consumer.try_clone().expect("a socket"), producer.try_clone().expect("a socket"));
        thread::spawn(move || std::io::copy(&mut requests, &mut server));
        let (mut from, mut to, mut forwarded) = (producer, consumer, 0);
        let mut byte = [0];
        while from.read_exact(&mut byte).is_ok() && to.write_all(&byte).is_ok() {
            forwarded += 1;
            if forwarded > at_once {
                #[allow(clippy::disallowed_methods, reason = "slowness is what it is for")]
                thread::sleep(Duration::from_millis(20));
            }
        }
    });
    address
}

#[test]
fn a_producer_that_drips_its_bytes_is_an_error_within_the_bound() {
    let (producer, server) = serve(None, 8);
    let address = slow_proxy(server.local_addr(), 1_000);
    let peer = Peer { address, ..peer(&producer, &server) };
    let region = Region::allocate(4, 4096);
    let handle = producer.lease(&[3, 9], 1);
    let order = ReadOrder {
        handle,
        reader: READER,
        part: Part::Blocks { first: 0 },
        into: vec![BlockId(1), BlockId(0)],
    };
    let begun = Instant::now();
    let error = client(None).read(&peer, &order, &region, &GO).expect_err("it would take minutes");
    assert!(matches!(error, TransportError::Transfer(_)), "{error}");
    assert!(begun.elapsed() >= SILENCE && begun.elapsed() < 6 * SILENCE + SLACK, "{:?}", begun.elapsed());
}

#[test]
fn a_consumer_that_does_not_read_ends_alone_and_its_read_has_failed() {
    let producer = TestProducer::new(64, 1 << 20, LeaseTerms::default());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let options = ServerOptions { silence: SILENCE, ..ServerOptions::default() };
    let server = TcpServer::start(listener, Arc::clone(&producer) as _, options).expect("loopback");
    let handle = producer.lease(&(0..64).collect::<Vec<_>>(), 1);
    let mut socket = TcpStream::connect(server.local_addr()).expect("a listener");
    let mut bytes = b"BATON-KV".to_vec();
    bytes.extend([2, 0, 0, 0]);
    bytes.extend([7; 32]);
    bytes.extend(producer.epoch().0.to_le_bytes());
    bytes.extend(producer.fingerprint().to_le_bytes());
    bytes.extend([0; 32]);
    bytes.extend([1, 36, 0, 0, 0]);
    bytes.extend(handle.0.to_le_bytes());
    bytes.extend(READER.consumer.to_le_bytes());
    bytes.extend(READER.of.to_le_bytes());
    bytes.extend(READER.rank.0.to_le_bytes());
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend(64_u32.to_le_bytes());
    socket.write_all(&bytes).expect("a listener");
    producer.await_failed(READER);
    let region = Region::allocate(1, 1 << 20);
    let order =
        ReadOrder { handle, reader: READER, part: Part::Blocks { first: 63 }, into: vec![BlockId(0)] };
    let reader = Reader::sole(2);
    let order = ReadOrder { reader, ..order };
    let transport = client(None);
    transport.read(&peer(&producer, &server), &order, &region, &GO).expect("the lease is still there");
}

#[test]
fn a_shutdown_with_reads_in_flight_is_quick() {
    let (producer, server) = serve(None, 64);
    let (transport, at) = (client(None), peer(&producer, &server));
    fetch_works(&producer, &transport, &at);
    let idle: Vec<_> = (0..20).map(|_| TcpStream::connect(at.address).expect("room")).collect();
    let begun = Instant::now();
    server.shutdown();
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    drop(idle);
}
