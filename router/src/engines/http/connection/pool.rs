//! Connections to one address that can accept a request: idle ones of HTTP/1.1, and shared ones of HTTP/2.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::http2::MultiplexedConnection;
use super::{Connection, Purpose};

/// Maximum idle connections to one address. One engine batches no more requests.
const IDLE_MAX: usize = 256;
/// Maximum shared connections to one address, per purpose: 25,600 streams. A further connection serves one request.
const SHARED_MAX: usize = 256;

/// Connections to one address that can accept a request.
#[derive(Debug, Default)]
pub(in crate::engines::http) struct IdleConnections(Mutex<OpenConnections>);

#[derive(Debug, Default)]
struct OpenConnections {
    idle: Vec<Connection>,
    /// By purpose.
    shared: [Vec<PooledConnection>; 2],
}

#[derive(Debug)]
struct PooledConnection {
    connection: MultiplexedConnection,
    /// The first check that found no streams, unless one was opened since.
    idle_since: Option<Instant>,
}

impl OpenConnections {
    /// A stream of the first connection that has one left: the last ones can become idle.
    fn open_stream(&mut self, purpose: Purpose) -> Option<Connection> {
        let shared = &mut self.shared[purpose as usize];
        if shared.is_empty() {
            return None;
        }
        shared.retain_mut(|one| one.connection.is_usable());
        shared.iter_mut().find_map(|one| {
            let stream = one.connection.open()?;
            one.idle_since = None;
            Some(Connection::over_stream(stream))
        })
    }
}

impl IdleConnections {
    /// A stream of a shared connection. Else the last idle connection that seems to be open and was idle for a shorter
    /// time.
    pub(in crate::engines::http) fn take(
        &self,
        idle_timeout: Duration,
        purpose: Purpose,
        now: Instant,
    ) -> Option<Connection> {
        loop {
            let mut open = self.lock();
            if let Some(stream) = open.open_stream(purpose) {
                return Some(stream);
            }
            let mut idle = open.idle.pop()?;
            drop(open);
            if idle.idle_for(now) < idle_timeout && idle.is_ready() {
                return Some(idle);
            }
        }
    }

    /// A stream of a shared connection.
    pub(in crate::engines::http) fn take_stream(&self, purpose: Purpose) -> Option<Connection> {
        self.lock().open_stream(purpose)
    }

    /// Keeps a connection for the next request. The oldest one is closed if there are too many.
    pub(in crate::engines::http) fn store(&self, mut connection: Connection) {
        if !connection.is_ready() {
            return;
        }
        connection.mark_idle(Instant::now());
        let mut open = self.lock();
        if open.idle.len() == IDLE_MAX {
            open.idle.remove(0);
        }
        open.idle.push(connection);
    }

    /// Lets other requests use a connection of HTTP/2, too.
    pub(in crate::engines::http) fn share(&self, connection: &Connection, purpose: Purpose) {
        let Some(connection) = connection.shared() else { return };
        let shared = &mut self.lock().shared[purpose as usize];
        if shared.len() < SHARED_MAX {
            shared.push(PooledConnection { connection, idle_since: None });
        }
    }

    /// Closes those that were idle for too long.
    pub(in crate::engines::http) fn close_old(&self, idle_timeout: Duration) {
        let (mut open, now) = (self.lock(), Instant::now());
        open.idle.retain(|idle| idle.idle_for(now) < idle_timeout);
        for shared in open.shared.iter_mut().flat_map(|shared| shared.iter_mut()) {
            let since = (!shared.connection.has_streams()).then(Instant::now);
            shared.idle_since = shared.idle_since.and(since).and(shared.idle_since).or(since);
        }
        let is_young = |since: Instant| since.elapsed() < idle_timeout;
        open.shared.iter_mut().for_each(|shared| {
            shared.retain_mut(|one| one.idle_since.is_none_or(is_young) && one.connection.is_usable());
        });
    }

    /// Closes those whose other end has closed.
    pub(in crate::engines::http) fn close_unready(&self) {
        let mut open = self.lock();
        open.idle.retain_mut(Connection::is_ready);
        open.shared.iter_mut().for_each(|shared| shared.retain_mut(|one| one.connection.is_usable()));
    }

    /// Closes all. Requests on them continue.
    pub(in crate::engines::http) fn clear(&self) {
        *self.lock() = OpenConnections::default();
    }

    fn lock(&self) -> MutexGuard<'_, OpenConnections> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
