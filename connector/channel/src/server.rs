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
use crate::handshake::{self, HandshakeError};
use crate::serve::{self, ConnectionTable, OpenReads, Serve, ServeError, ServerCounters, ServerState};
use crate::socket::{self, ChannelError, ChannelSocket, SLICE};

/// Stack of a connection's thread, in bytes: its deepest frame holds a few hundred spans, on the heap.
const STACK_BYTES: usize = 256 * 1024;

/// How a producer serves.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The cluster's secret. Needed beyond this machine.
    pub secret: Option<Secret>,
    /// Maximum number of connections. One more evicts the connection that has been idle for longest. If none is idle,
    /// the new one is rejected. Each connection has a thread.
    pub connections_max: usize,
    /// A peer that is silent for this long within a handshake, a request or a read has failed.
    pub silence: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self { secret: None, connections_max: 256, silence: SILENCE }
    }
}

/// The counters of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerStats {
    /// Current connections.
    pub connections: usize,
    /// Connections that were rejected at the limit.
    pub rejected: u64,
    /// Idle connections that were closed in favour of new ones.
    pub evicted: u64,
    /// Connections that ended in their handshake.
    pub handshakes_failed: u64,
    /// Reads granted.
    pub reads: u64,
    /// Reads answered "gone", before or between batches.
    pub reads_gone: u64,
    /// Bytes of blocks that were sent.
    pub bytes: u64,
}

/// A server: its state, and the table of its connections.
struct ServerShared {
    state: ServerState,
    options: ServerOptions,
    connections: Mutex<HashMap<u64, ServedConnection>>,
}

/// One entry of the connection table.
struct ServedConnection {
    socket: Socket,
    thread: JoinHandle<()>,
    /// Whether its handshake is complete.
    admitted: bool,
    /// Since when it waits for a request; `None` during a request and the handshake.
    idle_since: Option<Instant>,
    /// Closed in favour of another connection; its thread is about to end.
    evicted: bool,
}

impl ConnectionTable for ServerShared {
    /// Beyond the limit a connection takes the slot of an idle one. This happens only after the handshake, so that
    /// unauthenticated peers evict no consumer.
    fn claim_slot(&self, id: u64) -> bool {
        let mut connections = self.connections();
        if let Some(connection) = connections.get_mut(&id) {
            connection.admitted = true;
        }
        let serving = connections.values().filter(|connection| connection.admitted && !connection.evicted);
        let has_slot = serving.count() <= self.options.connections_max || self.evict_idle(&mut connections);
        if !has_slot {
            self.state.stats.rejected.fetch_add(1, Ordering::Relaxed);
        }
        has_slot
    }

    fn mark_idle(&self, id: u64, since: Instant) {
        if let Some(connection) = self.connections().get_mut(&id) {
            connection.idle_since = Some(since);
        }
    }

    fn mark_busy(&self, id: u64) {
        if let Some(connection) = self.connections().get_mut(&id) {
            connection.idle_since = None;
        }
    }
}

impl ServerShared {
    /// Connections that cannot be evicted: in their handshake, with a request, or with a read in flight.
    fn busy_connections(&self, connections: &HashMap<u64, ServedConnection>) -> usize {
        let is_busy = |(id, connection): &(&u64, &ServedConnection)| {
            !connection.evicted
                && (connection.idle_since.is_none()
                    || self.state.open_reads.in_flight(&*self.state.producer, **id))
        };
        connections.iter().filter(is_busy).count()
    }

    /// Closes the connection that has been idle for longest and has no read in flight. Its peer reconnects when it has
    /// a request.
    fn evict_idle(&self, connections: &mut HashMap<u64, ServedConnection>) -> bool {
        let mut idle: Vec<_> = connections
            .iter()
            .filter_map(|(id, connection)| {
                Some((connection.idle_since.filter(|_| !connection.evicted)?, *id))
            })
            .collect();
        idle.sort_unstable();
        let free =
            idle.into_iter().find(|(_, id)| !self.state.open_reads.in_flight(&*self.state.producer, *id));
        let Some(connection) = free.and_then(|(_, id)| connections.get_mut(&id)) else { return false };
        connection.evicted = true;
        // It may have been closed by the peer already.
        let _ = connection.socket.shutdown(Shutdown::Both);
        self.state.stats.evicted.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<u64, ServedConnection>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves the blocks of one producer until it is shut down or dropped.
pub struct Server {
    shared: Arc<ServerShared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts to serve on a listening socket. The first service is the listener's own: it checks every connection.
    ///
    /// # Errors
    /// `InvalidInput` if the listener is reachable from beyond loopback without a secret; otherwise a system error.
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
        let state = ServerState {
            producer,
            services,
            secret: options.secret.clone(),
            stop: AtomicBool::new(false),
            open_reads: OpenReads::default(),
            stats: ServerCounters::default(),
        };
        let shared = Arc::new(ServerShared { state, options, connections: Mutex::default() });
        let for_thread = Arc::clone(&shared);
        let acceptor = thread::Builder::new()
            .name("kv-accept".into())
            .stack_size(STACK_BYTES)
            .spawn(move || accept(&listener, &for_thread))?;
        Ok(Self { shared, acceptor: Some(acceptor) })
    }

    /// The counters so far.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        let stats = &self.shared.state.stats;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ServerStats {
            connections: self.shared.connections().len(),
            rejected: load(&stats.rejected),
            evicted: load(&stats.evicted),
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
        self.shared.state.stop.store(true, Ordering::Release);
        join(self.acceptor.take());
        // The lock is not held while a thread is joined, because the thread takes it to remove its entry.
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
        tracing::error!(event = "side_channel_panicked", "KV side channel thread panicked");
    }
}

fn accept(listener: &Socket, shared: &Arc<ServerShared>) {
    let mut next_id = 0;
    while !shared.state.stop.load(Ordering::Acquire) {
        if !socket::wait(listener.as_fd(), libc::POLLIN, SLICE).unwrap_or(false) {
            continue;
        }
        match listener.accept() {
            Ok((socket, peer)) => {
                next_id += 1;
                if let Err(error) = admit(socket, next_id, shared) {
                    let (transport, peer) = (shared.state.listener_service().name(), peer.as_socket());
                    tracing::warn!(
                        event = "kv_connection_not_served", transport, ?peer, %error,
                        "KV connection not served"
                    );
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {}
            Err(error) => {
                // Probably out of descriptors. The listener stays readable, so this loop would spin.
                tracing::warn!(event = "kv_accept_failed", %error, "cannot accept KV connections");
                thread::park_timeout(SLICE);
            }
        }
    }
}

/// Starts the thread of a connection, or rejects the connection at the limit.
fn admit(socket: Socket, id: u64, shared: &Arc<ServerShared>) -> io::Result<()> {
    shared.state.listener_service().check_socket(&socket)?;
    let mut connections = shared.connections();
    let most = shared.options.connections_max;
    // A new connection completes its handshake before it evicts an idle one. So there may be twice as many threads
    // briefly.
    if connections.len() >= 2 * most
        || connections.len() >= most && shared.busy_connections(&connections) >= most
    {
        shared.state.stats.rejected.fetch_add(1, Ordering::Relaxed);
        socket.set_nonblocking(true)?;
        // If the socket does not accept these bytes at once, the peer sees only the close.
        let _ = io::Write::write(&mut &socket, &handshake::busy_welcome());
        return Ok(());
    }
    let mut channel = ChannelSocket::new(socket.try_clone()?, shared.options.silence)?;
    let for_thread = Arc::clone(shared);
    let thread =
        thread::Builder::new().name(format!("kv-serve-{id}")).stack_size(STACK_BYTES).spawn(move || {
            let guard = ConnectionGuard { id, shared: for_thread };
            let ended = serve::serve(&mut channel, id, &guard.shared.state, &*guard.shared);
            report(&guard.shared.state, ended);
        })?;
    connections
        .insert(id, ServedConnection { socket, thread, admitted: false, idle_since: None, evicted: false });
    Ok(())
}

fn report(shared: &ServerState, ended: Result<(), ServeError>) {
    match ended {
        Ok(()) | Err(ServeError::Channel(ChannelError::Closed | ChannelError::Stopped)) => {}
        Err(ServeError::Channel(error)) => {
            let transport = shared.listener_service().name();
            tracing::debug!(event = "kv_connection_ended", transport, %error, "KV connection ended");
        }
        // A consumer that tries transports in order of preference: not a failure.
        Err(ServeError::Handshake(HandshakeError::Service)) => {}
        // A port check by a monitor or by `baton doctor`: counted, but no reason for an operator to act.
        Err(ServeError::Handshake(HandshakeError::Channel(error @ ChannelError::Closed))) => {
            shared.stats.handshakes_failed.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(
                event = "kv_handshake_missing", transport = shared.listener_service().name(), %error,
                "KV connection closed before its handshake"
            );
        }
        Err(ServeError::Handshake(error)) => {
            shared.stats.handshakes_failed.fetch_add(1, Ordering::Relaxed);
            let transport = shared.listener_service().name();
            tracing::warn!(event = "kv_handshake_failed", transport, %error, "KV connection refused");
        }
    }
}

/// Removes the connection from the table when its thread ends, also by a panic.
struct ConnectionGuard {
    id: u64,
    shared: Arc<ServerShared>,
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.shared.state.open_reads.connection_ended(&*self.shared.state.producer, self.id);
        self.shared.connections().remove(&self.id);
    }
}
