//! The consumer's idle connections: a bounded number per peer, each for a bounded time.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::transport::Peer;

use crate::connection::Connection;

/// Maximum number of peers with idle connections. A cluster with more producers reconnects more often.
const PEERS_MAX: usize = 1_024;

/// The idle connections. Connections in use are not counted: the number of the caller's threads bounds them.
#[derive(Debug)]
pub(crate) struct ConnectionPool<K> {
    per_peer_max: usize,
    idle_timeout: Duration,
    connections: Mutex<HashMap<Peer, Vec<IdleConnection<K>>>>,
}

#[derive(Debug)]
struct IdleConnection<K> {
    connection: Connection<K>,
    since: Instant,
}

impl<K> ConnectionPool<K> {
    pub(crate) fn new(per_peer_max: usize, idle_timeout: Duration) -> Self {
        Self { per_peer_max, idle_timeout, connections: Mutex::new(HashMap::new()) }
    }

    fn with<R>(&self, f: impl FnOnce(&mut HashMap<Peer, Vec<IdleConnection<K>>>) -> R) -> R {
        f(&mut self.connections.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes the connection that was used last, if the peer has not closed it.
    pub(crate) fn take(&self, peer: &Peer) -> Option<Connection<K>> {
        loop {
            let idle = self.with(|connections| connections.get_mut(peer).and_then(Vec::pop))?;
            if idle.since.elapsed() < self.idle_timeout && idle.connection.socket.is_idle() {
                return Some(idle.connection);
            }
        }
    }

    /// Keeps a connection without pending requests, within the bounds.
    pub(crate) fn put(&self, peer: &Peer, connection: Connection<K>) {
        self.with(|connections| {
            evict(connections, self.idle_timeout);
            if connections.len() >= PEERS_MAX && !connections.contains_key(peer) {
                return;
            }
            let idle = connections.entry(peer.clone()).or_default();
            if idle.len() < self.per_peer_max {
                idle.push(IdleConnection { connection, since: Instant::now() });
            }
        });
    }

    /// Closes connections that are idle for too long or that the peer has closed. A connection may keep a dead
    /// producer's memory mapped.
    pub(crate) fn sweep(&self) {
        self.with(|connections| {
            for idle in connections.values_mut() {
                idle.retain(|idle| idle.connection.socket.is_idle());
            }
            evict(connections, self.idle_timeout);
        });
    }

    /// Whether there is an idle connection to this peer that the peer has not closed.
    pub(crate) fn has(&self, peer: &Peer) -> bool {
        let idle = self.take(peer);
        let has = idle.is_some();
        if let Some(connection) = idle {
            self.put(peer, connection);
        }
        has
    }

    pub(crate) fn len(&self) -> usize {
        self.with(|connections| connections.values().map(Vec::len).sum())
    }
}

fn evict<K>(connections: &mut HashMap<Peer, Vec<IdleConnection<K>>>, idle_timeout: Duration) {
    connections.retain(|_, idle| {
        idle.retain(|idle| idle.since.elapsed() < idle_timeout);
        !idle.is_empty()
    });
}
