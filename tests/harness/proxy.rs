//! A link that fails on command: a TCP proxy whose fault can be changed while connections are open.
//!
//! | fault | connections that are open | new ones |
//! |---|---|---|
//! | [`LinkFault::Delay`] | every piece is held for a while, each way | the same |
//! | [`LinkFault::Slow`] | some bytes, a pause, some bytes, from the target to the client | the same |
//! | [`LinkFault::Cut`] | ended at once, both ends see FIN or RST | ended at once |
//! | [`LinkFault::CutAfter`] | ended once so many more bytes have come from the target | the same |
//! | [`LinkFault::HalfOpen`] | bytes and ends vanish without a notice | the same |
//!
//! A connection that has lost bytes cannot continue. The proxy resets it when its fault is lifted, as a network does
//! that no longer knows the connection.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use socket2::{Domain, SockRef, Socket, Type};

use super::HangUp;

/// Longest wait of a pump before it reads its fault again.
const SLICE: Duration = Duration::from_millis(10);

/// Bytes that a pump reads at once.
const PIECE_BYTES: usize = 16 * 1024;

/// Receive buffer towards the target. Bytes that a slow link does not deliver stay with the sender, not in the kernel.
const BUFFER_BYTES: usize = 16 * 1024;

/// Maximum of the clients' bytes that the proxy keeps.
const RECEIVED_BYTES_MAX: usize = 1 << 20;

/// The fault of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LinkFault {
    None,
    Delay(Duration),
    Slow { bytes: usize, pause: Duration },
    Cut(CloseKind),
    CutAfter { bytes: u32, end: CloseKind },
    HalfOpen { up: bool, down: bool },
}

/// How the proxy ends a connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CloseKind {
    Fin,
    Rst,
}

impl From<CloseKind> for HangUp {
    fn from(end: CloseKind) -> Self {
        match end {
            CloseKind::Fin => Self::Fin,
            CloseKind::Rst => Self::Rst,
        }
    }
}

/// A running proxy. Dropping it ends the proxy and its connections.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    shared: Arc<ProxyState>,
    accepting: Option<JoinHandle<()>>,
}

struct ProxyState {
    target: SocketAddr,
    fault: Mutex<LinkFault>,
    /// Changes with every fault and invalidates the effects of an earlier one.
    generation: AtomicU64,
    /// Bytes from the target until the cut of [`LinkFault::CutAfter`].
    left: AtomicI64,
    connections: AtomicU64,
    /// Forwarded bytes from the target.
    passed: AtomicU64,
    /// Bytes that clients sent, of all connections.
    received: Mutex<Vec<u8>>,
    stop: AtomicBool,
}

/// One connection through the proxy.
struct ProxiedConnection {
    shared: Arc<ProxyState>,
    client: TcpStream,
    target: TcpStream,
    /// The generation in which bytes or an end vanished.
    lost: Mutex<Option<u64>>,
    over: AtomicBool,
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    /// From the client to the target.
    Up,
    /// From the target to the client.
    Down,
}

impl Proxy {
    /// Listens on `listen` and forwards to `target`, without a fault.
    pub(crate) fn start(listen: SocketAddr, target: SocketAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind(listen)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(ProxyState {
            target,
            fault: Mutex::new(LinkFault::None),
            generation: AtomicU64::new(0),
            left: AtomicI64::new(0),
            connections: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            received: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let accepting = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || shared.accept(&listener))
        };
        Ok(Self { address, shared, accepting: Some(accepting) })
    }

    /// Sets the fault of the link.
    pub(crate) fn set(&self, fault: LinkFault) {
        let mut current = self.shared.lock();
        if let LinkFault::CutAfter { bytes, .. } = fault {
            self.shared.left.store(i64::from(bytes), Ordering::SeqCst);
        }
        *current = fault;
        self.shared.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// Number of open connections.
    pub(crate) fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Forwarded bytes from the target, of all connections.
    pub(crate) fn passed(&self) -> u64 {
        self.shared.passed.load(Ordering::SeqCst)
    }

    /// Bytes that clients sent, of all connections, up to a bound.
    pub(crate) fn received(&self) -> String {
        let received = self.shared.received.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&received).into_owned()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

impl ProxyState {
    /// The current fault.
    fn fault(&self) -> LinkFault {
        *self.lock()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, LinkFault> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        while !self.stopped() {
            match listener.accept() {
                Ok((client, _)) => {
                    let shared = Arc::clone(self);
                    std::thread::spawn(move || shared.serve(client));
                }
                Err(_) => nap(Duration::from_millis(2)),
            }
        }
    }

    fn serve(self: Arc<Self>, client: TcpStream) {
        let cut = match self.fault() {
            LinkFault::Cut(end) => Some(end),
            _ => None,
        };
        if let Some(end) = cut {
            return super::http::disconnect(client, end.into());
        }
        let Ok(target) = self.connect() else {
            // A client sees a target that refuses as a reset.
            return super::http::disconnect(client, HangUp::Rst);
        };
        let ready = [&client, &target].iter().all(|stream| {
            stream.set_nonblocking(false).is_ok()
                && stream.set_nodelay(true).is_ok()
                && stream.set_read_timeout(Some(SLICE)).is_ok()
                && stream.set_write_timeout(Some(SLICE)).is_ok()
        });
        if !ready {
            return;
        }
        self.connections.fetch_add(1, Ordering::SeqCst);
        let connection = Arc::new(ProxiedConnection {
            shared: Arc::clone(&self),
            client,
            target,
            lost: Mutex::new(None),
            over: AtomicBool::new(false),
        });
        let up = {
            let connection = Arc::clone(&connection);
            std::thread::spawn(move || connection.pump(Direction::Up))
        };
        connection.pump(Direction::Down);
        let _ = up.join();
        self.connections.fetch_sub(1, Ordering::SeqCst);
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        let socket = Socket::new(Domain::for_address(self.target), Type::STREAM, None)?;
        socket.set_recv_buffer_size(BUFFER_BYTES)?;
        socket.connect_timeout(&self.target.into(), Duration::from_secs(2))?;
        Ok(socket.into())
    }
}

impl ProxiedConnection {
    /// Forwards one direction until its end.
    fn pump(&self, direction: Direction) {
        let (from, to) = match direction {
            Direction::Up => (&self.client, &self.target),
            Direction::Down => (&self.target, &self.client),
        };
        let mut piece = vec![0; PIECE_BYTES];
        let mut ended = false;
        while !self.over() {
            if ended {
                // The other direction may continue, and a fault that begins now affects both.
                nap(SLICE);
                continue;
            }
            let take = match self.shared.fault() {
                LinkFault::Slow { bytes, .. } if direction == Direction::Down => bytes.clamp(1, PIECE_BYTES),
                _ => PIECE_BYTES,
            };
            match { from }.read(&mut piece[..take]) {
                Ok(0) => {
                    ended = true;
                    if !self.swallows(direction) {
                        let _ = to.shutdown(std::net::Shutdown::Write);
                        if self.other_has_ended(direction) {
                            self.finish();
                        }
                    }
                }
                Ok(count) => self.pass(direction, to, &piece[..count]),
                Err(error) if waits(&error) => {}
                Err(_) => {
                    // The proxy forwards a reset unless the link is dead.
                    if !self.swallows(direction) {
                        self.reset();
                    }
                    ended = true;
                }
            }
        }
    }

    /// Whether this connection has ended, by its own end, a cut, or a fault that was lifted.
    fn over(&self) -> bool {
        if self.over.load(Ordering::SeqCst) || self.shared.stopped() {
            return true;
        }
        let fault = self.shared.fault();
        if let LinkFault::Cut(end) = fault {
            self.cut(end);
            return true;
        }
        let lost = *self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if lost.is_some_and(|generation| generation != self.shared.generation()) {
            self.reset();
            return true;
        }
        false
    }

    /// Whether bytes of this direction vanish now. If they do, the connection cannot continue.
    fn swallows(&self, direction: Direction) -> bool {
        // The lock keeps fault and generation consistent.
        let fault = self.shared.lock();
        let LinkFault::HalfOpen { up, down } = *fault else { return false };
        let dead = if direction == Direction::Up { up } else { down };
        if dead {
            *self.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.shared.generation());
        }
        dead
    }

    fn pass(&self, direction: Direction, to: &TcpStream, mut bytes: &[u8]) {
        let generation = self.shared.generation();
        let mut cut = None;
        match self.shared.fault() {
            LinkFault::Delay(pause) => self.hold(pause, generation),
            LinkFault::Slow { pause, .. } if direction == Direction::Down => self.hold(pause, generation),
            LinkFault::CutAfter { end, .. } if direction == Direction::Down => {
                let count = i64::try_from(bytes.len()).expect("a piece is small");
                let left = self.shared.left.fetch_sub(count, Ordering::SeqCst);
                if left < count {
                    bytes = &bytes[..usize::try_from(left.max(0)).expect("less than a piece")];
                    cut = Some(end);
                }
            }
            _ => {}
        }
        if self.swallows(direction) {
            return;
        }
        if direction == Direction::Up {
            let mut received = self.shared.received.lock().unwrap_or_else(PoisonError::into_inner);
            let room = RECEIVED_BYTES_MAX.saturating_sub(received.len());
            received.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
        while !bytes.is_empty() && !self.over() {
            match { to }.write(bytes) {
                Ok(count) => {
                    bytes = &bytes[count..];
                    if direction == Direction::Down {
                        self.shared.passed.fetch_add(count as u64, Ordering::SeqCst);
                    }
                }
                Err(error) if waits(&error) => {}
                Err(_) => return self.reset(),
            }
        }
        if let Some(end) = cut {
            self.cut(end);
        }
    }

    /// Delays a piece for a time, or until the fault changes.
    fn hold(&self, pause: Duration, generation: u64) {
        let until = Instant::now() + pause;
        while Instant::now() < until && self.shared.generation() == generation && !self.over() {
            nap(SLICE.min(until.saturating_duration_since(Instant::now())));
        }
    }

    fn other_has_ended(&self, direction: Direction) -> bool {
        // Both directions have ended when the other one has been shut down too: a read there returns an end at once.
        let other = if direction == Direction::Up { &self.target } else { &self.client };
        matches!(other.peek(&mut [0]), Ok(0))
    }

    fn finish(&self) {
        let _ = self.client.shutdown(std::net::Shutdown::Write);
        let _ = self.target.shutdown(std::net::Shutdown::Write);
        self.over.store(true, Ordering::SeqCst);
    }

    fn cut(&self, end: CloseKind) {
        match end {
            CloseKind::Rst => self.reset(),
            CloseKind::Fin => {
                let _ = self.client.shutdown(std::net::Shutdown::Both);
                let _ = self.target.shutdown(std::net::Shutdown::Both);
                self.over.store(true, Ordering::SeqCst);
            }
        }
    }

    /// The sockets are reset when the pumps drop them.
    fn reset(&self) {
        for stream in [&self.client, &self.target] {
            let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
        }
        self.over.store(true, Ordering::SeqCst);
    }
}

fn waits(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// The pause between two looks.
#[allow(clippy::disallowed_methods, reason = "the pace of a link is the subject of this file")]
fn nap(pause: Duration) {
    std::thread::sleep(pause);
}
