//! The consumer's kept connections: a bounded number per peer, each for a bounded time.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::transport::Peer;

use crate::link::Link;

/// Peers with kept connections, at most. A cluster with more producers than this reconnects more often.
const PEERS_MAX: usize = 1_024;

/// Idle connections. One in use is not in here, and is not counted: callers bound those by their threads.
#[derive(Debug)]
pub(crate) struct Pool {
    per_peer_max: usize,
    idle: Duration,
    kept: Mutex<HashMap<Peer, Vec<Kept>>>,
}

#[derive(Debug)]
struct Kept {
    link: Link,
    since: Instant,
}

impl Pool {
    pub(crate) fn new(per_peer_max: usize, idle: Duration) -> Self {
        Self { per_peer_max, idle, kept: Mutex::default() }
    }

    fn with<R>(&self, f: impl FnOnce(&mut HashMap<Peer, Vec<Kept>>) -> R) -> R {
        f(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The connection that was used last, if one is kept that its peer has not closed.
    pub(crate) fn take(&self, peer: &Peer) -> Option<Link> {
        loop {
            let kept = self.with(|kept| kept.get_mut(peer).and_then(Vec::pop))?;
            if kept.since.elapsed() < self.idle && kept.link.is_idle() {
                return Some(kept.link);
            }
        }
    }

    /// Keeps a connection over which every question has been answered, if there is room for it.
    pub(crate) fn put(&self, peer: &Peer, link: Link) {
        self.with(|kept| {
            evict(kept, self.idle);
            if kept.len() >= PEERS_MAX && !kept.contains_key(peer) {
                return;
            }
            let links = kept.entry(peer.clone()).or_default();
            if links.len() < self.per_peer_max {
                links.push(Kept { link, since: Instant::now() });
            }
        });
    }

    /// Closes what has been idle for too long.
    pub(crate) fn sweep(&self) {
        self.with(|kept| evict(kept, self.idle));
    }

    pub(crate) fn len(&self) -> usize {
        self.with(|kept| kept.values().map(Vec::len).sum())
    }
}

fn evict(kept: &mut HashMap<Peer, Vec<Kept>>, idle: Duration) {
    kept.retain(|_, links| {
        links.retain(|kept| kept.since.elapsed() < idle);
        !links.is_empty()
    });
}
