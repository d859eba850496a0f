//! A link that fails on command: a TCP proxy whose fault can be changed while connections are open.
//!
//! | fault | connections that are open | new ones |
//! |---|---|---|
//! | [`Fault::Delay`] | every piece is held for a while, each way | the same |
//! | [`Fault::Slow`] | some bytes, a pause, some bytes, from the target to the client | the same |
//! | [`Fault::Cut`] | ended at once, both ends see FIN or RST | ended at once |
//! | [`Fault::CutAfter`] | ended once so many more bytes have come from the target | the same |
//! | [`Fault::HalfOpen`] | bytes and ends vanish, nobody is told | the same |
//!
//! A connection that has lost bytes cannot go on: it is reset when its fault is lifted, as a network does that no
//! longer knows the connection.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use socket2::{Domain, SockRef, Socket, Type};

use super::HangUp;

/// Longest wait of a pump before it looks at its fault again.
const SLICE: Duration = Duration::from_millis(10);

/// What a pump takes at once.
const PIECE_BYTES: usize = 16 * 1024;

/// Receive buffer towards the target: what a slow link does not deliver stays with the sender, not in the kernel.
const BUFFER_BYTES: usize = 16 * 1024;

/// What is kept of what clients say, at most.
const HEARD_BYTES_MAX: usize = 1 << 20;

/// What is wrong with a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    None,
    Delay(Duration),
    Slow { bytes: usize, pause: Duration },
    Cut(End),
    CutAfter { bytes: u32, end: End },
    HalfOpen { up: bool, down: bool },
}

/// How a connection is ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum End {
    Fin,
    Rst,
}

impl From<End> for HangUp {
    fn from(end: End) -> Self {
        match end {
            End::Fin => Self::Fin,
            End::Rst => Self::Rst,
        }
    }
}

/// A running proxy; it ends with its connections when this is dropped.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    target: SocketAddr,
    fault: Mutex<Fault>,
    /// Changes with every fault: what belongs to an earlier one is over.
    generation: AtomicU64,
    /// Bytes from the target until the cut of [`Fault::CutAfter`].
    left: AtomicI64,
    connections: AtomicU64,
    /// Bytes that came from the target and were passed on.
    passed: AtomicU64,
    /// What clients said, of all connections.
    heard: Mutex<Vec<u8>>,
    stop: AtomicBool,
}

/// One connection through the proxy.
struct Connection {
    shared: Arc<Shared>,
    client: TcpStream,
    target: TcpStream,
    /// Bytes or an end vanished in this generation.
    lost: Mutex<Option<u64>>,
    over: AtomicBool,
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// From the client to the target.
    Up,
    /// From the target to the client.
    Down,
}

impl Proxy {
    /// Listens on `listen` and passes everything on to `target`, faultless.
    pub(crate) fn start(listen: SocketAddr, target: SocketAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind(listen)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            target,
            fault: Mutex::new(Fault::None),
            generation: AtomicU64::new(0),
            left: AtomicI64::new(0),
            connections: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            heard: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let accepting = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || shared.accept(&listener))
        };
        Ok(Self { address, shared, accepting: Some(accepting) })
    }

    /// The link has this fault from now on.
    pub(crate) fn set(&self, fault: Fault) {
        let mut current = self.shared.lock();
        if let Fault::CutAfter { bytes, .. } = fault {
            self.shared.left.store(i64::from(bytes), Ordering::SeqCst);
        }
        *current = fault;
        self.shared.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// Connections that are open.
    pub(crate) fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Bytes that came from the target and were passed on, of all connections.
    pub(crate) fn passed(&self) -> u64 {
        self.shared.passed.load(Ordering::SeqCst)
    }

    /// What clients said, of all connections, up to a bound.
    pub(crate) fn heard(&self) -> String {
        let heard = self.shared.heard.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&heard).into_owned()
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

impl Shared {
    /// The fault of this moment.
    fn fault(&self) -> Fault {
        *self.lock()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Fault> {
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
            Fault::Cut(end) => Some(end),
            _ => None,
        };
        if let Some(end) = cut {
            return super::http::leave(client, end.into());
        }
        let Ok(target) = self.connect() else {
            // What a client sees of a target that refuses.
            return super::http::leave(client, HangUp::Rst);
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
        let connection = Arc::new(Connection {
            shared: Arc::clone(&self),
            client,
            target,
            lost: Mutex::new(None),
            over: AtomicBool::new(false),
        });
        let up = {
            let connection = Arc::clone(&connection);
            std::thread::spawn(move || connection.pump(Way::Up))
        };
        connection.pump(Way::Down);
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

impl Connection {
    /// Passes one direction on until its end.
    fn pump(&self, way: Way) {
        let (from, to) = match way {
            Way::Up => (&self.client, &self.target),
            Way::Down => (&self.target, &self.client),
        };
        let mut piece = vec![0; PIECE_BYTES];
        let mut ended = false;
        while !self.over() {
            if ended {
                // The other direction may go on; and a fault that begins now concerns both.
                nap(SLICE);
                continue;
            }
            let take = match self.shared.fault() {
                Fault::Slow { bytes, .. } if way == Way::Down => bytes.clamp(1, PIECE_BYTES),
                _ => PIECE_BYTES,
            };
            match { from }.read(&mut piece[..take]) {
                Ok(0) => {
                    ended = true;
                    if !self.swallows(way) {
                        let _ = to.shutdown(std::net::Shutdown::Write);
                        if self.other_has_ended(way) {
                            self.finish();
                        }
                    }
                }
                Ok(count) => self.pass(way, to, &piece[..count]),
                Err(error) if waits(&error) => {}
                Err(_) => {
                    // A reset travels on, unless the link is dead.
                    if !self.swallows(way) {
                        self.reset();
                    }
                    ended = true;
                }
            }
        }
    }

    /// Whether this connection is over, by its own end, a cut or a fault that was lifted.
    fn over(&self) -> bool {
        if self.over.load(Ordering::SeqCst) || self.shared.stopped() {
            return true;
        }
        let fault = self.shared.fault();
        if let Fault::Cut(end) = fault {
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

    /// Whether what goes this way vanishes now. If so the connection cannot go on.
    fn swallows(&self, way: Way) -> bool {
        // With the lock, so that fault and generation belong together.
        let fault = self.shared.lock();
        let Fault::HalfOpen { up, down } = *fault else { return false };
        let dead = if way == Way::Up { up } else { down };
        if dead {
            *self.lost.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.shared.generation());
        }
        dead
    }

    fn pass(&self, way: Way, to: &TcpStream, mut bytes: &[u8]) {
        let generation = self.shared.generation();
        let mut cut = None;
        match self.shared.fault() {
            Fault::Delay(pause) => self.hold(pause, generation),
            Fault::Slow { pause, .. } if way == Way::Down => self.hold(pause, generation),
            Fault::CutAfter { end, .. } if way == Way::Down => {
                let count = i64::try_from(bytes.len()).expect("a piece is small");
                let left = self.shared.left.fetch_sub(count, Ordering::SeqCst);
                if left < count {
                    bytes = &bytes[..usize::try_from(left.max(0)).expect("less than a piece")];
                    cut = Some(end);
                }
            }
            _ => {}
        }
        if self.swallows(way) {
            return;
        }
        if way == Way::Up {
            let mut heard = self.shared.heard.lock().unwrap_or_else(PoisonError::into_inner);
            let room = HEARD_BYTES_MAX.saturating_sub(heard.len());
            heard.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
        while !bytes.is_empty() && !self.over() {
            match { to }.write(bytes) {
                Ok(count) => {
                    bytes = &bytes[count..];
                    if way == Way::Down {
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

    /// Holds a piece for a while, or until the fault changes.
    fn hold(&self, pause: Duration, generation: u64) {
        let until = Instant::now() + pause;
        while Instant::now() < until && self.shared.generation() == generation && !self.over() {
            nap(SLICE.min(until.saturating_duration_since(Instant::now())));
        }
    }

    fn other_has_ended(&self, way: Way) -> bool {
        // Both ends have said all when the other direction has been shut down too: reading it gives an end at once.
        let other = if way == Way::Up { &self.target } else { &self.client };
        matches!(other.peek(&mut [0]), Ok(0))
    }

    fn finish(&self) {
        let _ = self.client.shutdown(std::net::Shutdown::Write);
        let _ = self.target.shutdown(std::net::Shutdown::Write);
        self.over.store(true, Ordering::SeqCst);
    }

    fn cut(&self, end: End) {
        match end {
            End::Rst => self.reset(),
            End::Fin => {
                let _ = self.client.shutdown(std::net::Shutdown::Both);
                let _ = self.target.shutdown(std::net::Shutdown::Both);
                self.over.store(true, Ordering::SeqCst);
            }
        }
    }

    /// Both sockets are reset when the pumps let go of them.
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

/// Between two looks.
#[allow(clippy::disallowed_methods)] // a link's own pace is what this file is about
fn nap(pause: Duration) {
    std::thread::sleep(pause);
}
