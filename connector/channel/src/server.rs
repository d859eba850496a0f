//! The producer's side: accepts connections, bounds them, and ends them.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use baton_connector::transport::{Producer, SILENCE};

use socket2::Socket;

use crate::Secret;
use crate::handshake::{self, TurnedAway};
use crate::link::{self, Link, LinkError, SLICE};
use crate::serve::{self, Ended, OpenReads, Serve};

/// Stack of a connection's thread, in bytes: its deepest frame holds a few hundred spans, on the heap.
const STACK_BYTES: usize = 256 * 1024;

/// How a producer serves.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The cluster's secret. Needed beyond this machine.
    pub secret: Option<Secret>,
    /// Connections at once. One more takes the place of the one that has been idle for longest; where none is idle it is
    /// told that there is no room. Each costs a thread while it lasts.
    pub connections_max: usize,
    /// A peer that is silent this long within a handshake, a request or a read has failed.
    pub silence: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self { secret: None, connections_max: 256, silence: SILENCE }
    }
}

/// What a server has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerStats {
    /// Connections now.
    pub connections: usize,
    /// Connections that were told that there is no room.
    pub turned_away: u64,
    /// Idle connections that were closed for the sake of new ones.
    pub displaced: u64,
    /// Connections that ended in their handshake.
    pub handshakes_failed: u64,
    /// Reads granted.
    pub reads: u64,
    /// Reads answered "gone", before or between batches.
    pub reads_gone: u64,
    /// Bytes of blocks that were sent.
    pub bytes: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    turned_away: AtomicU64,
    displaced: AtomicU64,
    handshakes_failed: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) reads_gone: AtomicU64,
    pub(crate) bytes: AtomicU64,
}

/// What the threads of one server share.
pub(crate) struct Shared {
    pub(crate) producer: Arc<dyn Producer>,
    /// What a consumer can ask for; the first is the listener's own.
    pub(crate) services: Vec<Arc<dyn Serve>>,
    pub(crate) options: ServerOptions,
    pub(crate) stop: AtomicBool,
    pub(crate) open_reads: OpenReads,
    pub(crate) stats: Counters,
    connections: Mutex<HashMap<u64, Connection>>,
}

/// What is needed to end a connection from outside.
struct Connection {
    socket: Socket,
    thread: JoinHandle<()>,
    /// It has shown who it is.
    admitted: bool,
    /// Since it has waited for a request; none while it has one, and in its handshake.
    idle_since: Option<Instant>,
    /// Closed for the sake of another; its thread is about to end.
    displaced: bool,
}

impl Shared {
    /// The listener's own service.
    fn own(&self) -> &dyn Serve {
        &*self.services[0]
    }

    /// After its handshake, a connection takes its place: beyond the bound, that of an idle one. Strangers displace no
    /// consumer.
    pub(crate) fn take_place(&self, id: u64) -> bool {
        let mut connections = self.connections();
        if let Some(connection) = connections.get_mut(&id) {
            connection.admitted = true;
        }
        let serving = connections.values().filter(|connection| connection.admitted && !connection.displaced);
        let has_place =
            serving.count() <= self.options.connections_max || self.displace_one(&mut connections);
        if !has_place {
            self.stats.turned_away.fetch_add(1, Ordering::Relaxed);
        }
        has_place
    }

    /// Connections whose place nothing can take: in their handshake, with a request, or with a read under way.
    fn held(&self, connections: &HashMap<u64, Connection>) -> usize {
        let is_held = |(id, connection): &(&u64, &Connection)| {
            !connection.displaced
                && (connection.idle_since.is_none() || self.open_reads.in_flight(&*self.producer, **id))
        };
        connections.iter().filter(is_held).count()
    }

    /// A connection waits for a request from now on.
    pub(crate) fn rests(&self, id: u64, since: Instant) {
        if let Some(connection) = self.connections().get_mut(&id) {
            connection.idle_since = Some(since);
        }
    }

    /// A connection has a request.
    pub(crate) fn begins(&self, id: u64) {
        if let Some(connection) = self.connections().get_mut(&id) {
            connection.idle_since = None;
        }
    }

    /// Closes the connection that has been idle for longest, of which no read may be under way. Its peer makes another
    /// when it has something to ask.
    fn displace_one(&self, connections: &mut HashMap<u64, Connection>) -> bool {
        let mut idle: Vec<_> = connections
            .iter()
            .filter_map(|(id, connection)| {
                Some((connection.idle_since.filter(|_| !connection.displaced)?, *id))
            })
            .collect();
        idle.sort_unstable();
        let free = idle.into_iter().find(|(_, id)| !self.open_reads.in_flight(&*self.producer, *id));
        let Some(connection) = free.and_then(|(_, id)| connections.get_mut(&id)) else { return false };
        connection.displaced = true;
        // It may have been closed by the peer already.
        let _ = connection.socket.shutdown(Shutdown::Both);
        self.stats.displaced.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<u64, Connection>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves the blocks of one producer until it is shut down or dropped.
pub struct Server {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts to serve on a listening socket. The first service is the listener's own: it meets every connection.
    ///
    /// # Errors
    /// `InvalidInput` when the listener is reachable from beyond loopback and there is no secret; otherwise
    /// the system's.
    ///
    /// # Panics
    /// Without a service.
    pub fn start(
        listener: Socket,
        producer: Arc<dyn Producer>,
        services: Vec<Arc<dyn Serve>>,
        options: ServerOptions,
    ) -> io::Result<Self> {
        assert!(!services.is_empty(), "a listener serves something");
        let address = listener.local_addr()?.as_socket();
        if let Some(address) = address.filter(|a| !a.ip().is_loopback() && options.secret.is_none()) {
            let why = format!("{address} is reachable from other machines: a cluster secret is needed");
            return Err(io::Error::new(ErrorKind::InvalidInput, why));
        }
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            producer,
            services,
            options,
            stop: AtomicBool::new(false),
            open_reads: OpenReads::default(),
            stats: Counters::default(),
            connections: Mutex::default(),
        });
        let for_thread = Arc::clone(&shared);
        let acceptor = thread::Builder::new()
            .name("kv-accept".into())
            .stack_size(STACK_BYTES)
            .spawn(move || accept(&listener, &for_thread))?;
        Ok(Self { shared, acceptor: Some(acceptor) })
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        let stats = &self.shared.stats;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ServerStats {
            connections: self.shared.connections().len(),
            turned_away: load(&stats.turned_away),
            displaced: load(&stats.displaced),
            handshakes_failed: load(&stats.handshakes_failed),
            reads: load(&stats.reads),
            reads_gone: load(&stats.reads_gone),
            bytes: load(&stats.bytes),
        }
    }

    /// Stops to listen, closes every connection and waits for its thread. Reads in flight have then failed.
    pub fn shutdown(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        join(self.acceptor.take());
        // The lock is not held while a thread is joined: it takes it to sign off.
        let connections = std::mem::take(&mut *self.shared.connections());
        for connection in connections.values() {
            // It may have been closed by the peer already.
            let _ = connection.socket.shutdown(Shutdown::Both);
        }
        for connection in connections.into_values() {
            join(Some(connection.thread));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn join(thread: Option<JoinHandle<()>>) {
    if thread.is_some_and(|thread| thread.join().is_err()) {
        tracing::error!("KV side channel thread panicked");
    }
}

fn accept(listener: &Socket, shared: &Arc<Shared>) {
    let mut next_id = 0;
    while !shared.stop.load(Ordering::Acquire) {
        if !link::wait(listener.as_fd(), libc::POLLIN, SLICE).unwrap_or(false) {
            continue;
        }
        match listener.accept() {
            Ok((socket, peer)) => {
                next_id += 1;
                if let Err(error) = admit(socket, next_id, shared) {
                    let (transport, peer) = (shared.own().name(), peer.as_socket());
                    tracing::warn!(transport, ?peer, %error, "KV connection not served");
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {}
            Err(error) => {
                // Out of descriptors, most likely: the listener stays readable, so this would spin.
                tracing::warn!(%error, "cannot accept KV connections");
                thread::park_timeout(SLICE);
            }
        }
    }
}

/// Gives a connection its thread, or tells it that there is no room.
fn admit(socket: Socket, id: u64, shared: &Arc<Shared>) -> io::Result<()> {
    shared.own().meet(&socket)?;
    let mut connections = shared.connections();
    let most = shared.options.connections_max;
    // A newcomer shows who it is before it takes an idle one's place, so there may be twice as many threads for a moment.
    if connections.len() >= 2 * most || connections.len() >= most && shared.held(&connections) >= most {
        shared.stats.turned_away.fetch_add(1, Ordering::Relaxed);
        socket.set_nonblocking(true)?;
        // A courtesy to the peer. If its socket does not take these bytes at once, it sees the close.
        let _ = io::Write::write(&mut &socket, &handshake::busy());
        return Ok(());
    }
    let mut link = Link::new(socket.try_clone()?, shared.options.silence)?;
    let for_thread = Arc::clone(shared);
    let thread =
        thread::Builder::new().name(format!("kv-serve-{id}")).stack_size(STACK_BYTES).spawn(move || {
            let signed_on = SignedOn { id, shared: for_thread };
            let ended = serve::serve(&mut link, id, &signed_on.shared);
            report(&signed_on.shared, ended);
        })?;
    connections
        .insert(id, Connection { socket, thread, admitted: false, idle_since: None, displaced: false });
    Ok(())
}

fn report(shared: &Shared, ended: Result<(), Ended>) {
    match ended {
        Ok(()) | Err(Ended::Link(LinkError::Closed | LinkError::Stopped)) => {}
        Err(Ended::Link(error)) => {
            tracing::debug!(listener = shared.own().name(), %error, "KV connection ended")
        }
        // A consumer that looks for the best transport there is: no failure.
        Err(Ended::Handshake(TurnedAway::Service)) => {}
        // A port that is looked at, by a monitor or by `baton doctor`: counted, and nothing that an operator acts on.
        Err(Ended::Handshake(TurnedAway::Link(error @ LinkError::Closed))) => {
            shared.stats.handshakes_failed.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(listener = shared.own().name(), %error, "KV connection closed before its handshake");
        }
        Err(Ended::Handshake(error)) => {
            shared.stats.handshakes_failed.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(listener = shared.own().name(), %error, "KV connection refused");
        }
    }
}

/// A connection's entry in the books; signs off when its thread ends, also by a panic.
struct SignedOn {
    id: u64,
    shared: Arc<Shared>,
}

impl Drop for SignedOn {
    fn drop(&mut self) {
        self.shared.open_reads.connection_ended(&*self.shared.producer, self.id);
        self.shared.connections().remove(&self.id);
    }
}
