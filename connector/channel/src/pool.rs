//! The consumer's kept connections: a bounded number per peer, each for a bounded time.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::transport::Peer;

use crate::client::Connection;

/// Peers with kept connections, at most. A cluster with more producers than this reconnects more often.
const PEERS_MAX: usize = 1_024;

/// Idle connections. One in use is not in here, and is not counted: callers bound those by their threads.
#[derive(Debug)]
pub(crate) struct Pool<K> {
    per_peer_max: usize,
    idle: Duration,
    kept: Mutex<HashMap<Peer, Vec<Kept<K>>>>,
}

#[derive(Debug)]
struct Kept<K> {
    connection: Connection<K>,
    since: Instant,
}

impl<K> Pool<K> {
    pub(crate) fn new(per_peer_max: usize, idle: Duration) -> Self {
        Self { per_peer_max, idle, kept: Mutex::new(HashMap::new()) }
    }

    fn with<R>(&self, f: impl FnOnce(&mut HashMap<Peer, Vec<Kept<K>>>) -> R) -> R {
        f(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The connection that was used last, if one is kept that its peer has not closed.
    pub(crate) fn take(&self, peer: &Peer) -> Option<Connection<K>> {
        loop {
            let kept = self.with(|kept| kept.get_mut(peer).and_then(Vec::pop))?;
            if kept.since.elapsed() < self.idle && kept.connection.link.is_idle() {
                return Some(kept.connection);
            }
        }
    }

    /// Keeps a connection over which every question has been answered, if there is room for it.
    pub(crate) fn put(&self, peer: &Peer, connection: Connection<K>) {
        self.with(|kept| {
            evict(kept, self.idle);
            if kept.len() >= PEERS_MAX && !kept.contains_key(peer) {
                return;
            }
            let links = kept.entry(peer.clone()).or_default();
            if links.len() < self.per_peer_max {
                links.push(Kept { connection, since: Instant::now() });
            }
        });
    }

    /// Closes what has been idle for too long, and what its peer has closed: beside a connection a transport may
    /// keep the producer's memory, which outlives a dead producer for as long.
    pub(crate) fn sweep(&self) {
        self.with(|kept| {
            for links in kept.values_mut() {
                links.retain(|kept| kept.connection.link.is_idle());
            }
            evict(kept, self.idle);
        });
    }

    /// Whether a connection to this peer is kept that its peer has not closed.
    pub(crate) fn has(&self, peer: &Peer) -> bool {
        let kept = self.take(peer);
        let has = kept.is_some();
        if let Some(connection) = kept {
            self.put(peer, connection);
        }
        has
    }

    pub(crate) fn len(&self) -> usize {
        self.with(|kept| kept.values().map(Vec::len).sum())
    }
}

fn evict<K>(kept: &mut HashMap<Peer, Vec<Kept<K>>>, idle: Duration) {
    kept.retain(|_, links| {
        links.retain(|kept| kept.since.elapsed() < idle);
        !links.is_empty()
    });
}
