//! One HTTP/1.1 connection to an engine. An abandoned connection is cut, or half-closed and read to the end.

use std::future::poll_fn;
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use socket2::SockRef;
use tokio::net::TcpStream;

use super::activity::EngineActivity;
use super::connection_error::ConnectionError;
use super::http1::Http1;
use super::reply_head::ReplyHead;
use super::transport::{self, Transport};
use crate::engines::presence;
use crate::tls::client::EngineTlsConnector;

/// Maximum idle connections to one address. One engine batches no more requests.
const IDLE_MAX: usize = 256;

/// A handle that abandons a connection while its reply is awaited. It has no descriptor: its commands are carried
/// out at the next poll of the reply.
#[derive(Debug, Default)]
pub(crate) struct ConnectionHandle {
    /// The request's work is no longer needed.
    abandoned: AtomicBool,
    /// Nothing more will be sent.
    half_closed: AtomicBool,
}

/// A connection. It is closed when dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    http: Http1<Transport>,
    handle: Arc<ConnectionHandle>,
    half_closed: bool,
    idle_since: Instant,
    activity: Arc<EngineActivity>,
    /// Received bytes are a sign of life: the request is work, or a liveness probe.
    shows_life: bool,
    /// The last read had to wait.
    waits: bool,
}

/// Idle connections to one address.
#[derive(Debug, Default)]
pub(super) struct IdleConnections(Mutex<Vec<Connection>>);

impl ConnectionHandle {
    /// Closes the sending side. The reply can still be read, and must be awaited. Stock vLLM aborts a request at a
    /// half-close just as at a close, and a reply that crosses it still arrives.
    pub(crate) fn half_close(&self) {
        self.abandon();
        self.half_closed.store(true, Ordering::SeqCst);
    }

    /// Whether the sending side is closed, or will be at the next poll.
    pub(crate) fn is_half_closed(&self) -> bool {
        self.half_closed.load(Ordering::SeqCst)
    }

    /// The request must not be sent again, however its connection ends. The engine gets no message.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }
}

impl Connection {
    /// Connects to the first address that accepts, with `tls` if it is set.
    pub(super) async fn dial(
        addresses: &[SocketAddr],
        tls: Option<&EngineTlsConnector>,
        lost_after: Duration,
        activity: &Arc<EngineActivity>,
    ) -> std::io::Result<Self> {
        let stream = TcpStream::connect(addresses).await?;
        stream.set_nodelay(true)?;
        presence::set_lost_timeout(&stream, lost_after);
        let stream = match tls {
            None => Transport::Left(stream),
            Some(name) => Transport::Right(Box::new(name.connect(stream).await?)),
        };
        activity.add_connection();
        Ok(Self {
            http: Http1::new(stream),
            handle: Arc::default(),
            half_closed: false,
            idle_since: Instant::now(),
            activity: Arc::clone(activity),
            shows_life: false,
            waits: false,
        })
    }

    pub(crate) fn handle(&self) -> Arc<ConnectionHandle> {
        Arc::clone(&self.handle)
    }

    /// Sends a request, the bytes of its head and the pieces of its body, and waits for the head of its reply.
    /// `shows_life`: a reply shows that the engine works.
    ///
    /// # Cancel safety
    /// The connection is unusable after a cancelled call.
    pub(crate) async fn send(
        &mut self,
        head: Vec<u8>,
        body: &[Bytes],
        shows_life: bool,
    ) -> Result<ReplyHead, ConnectionError> {
        self.shows_life = shows_life;
        self.http.begin(head, body);
        let head = poll_fn(|context| {
            self.apply_half_close();
            self.http.poll_head(context)
        });
        let head = head.await?;
        // Stock vLLM sends the head of a stream before it has begun, also while its engine hangs.
        if shows_life && !head.is_stream() {
            self.activity.record_read();
        }
        Ok(head)
    }

    /// The next piece of the reply's body; `None` at its end.
    pub(crate) fn poll_piece(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, ConnectionError>>> {
        self.apply_half_close();
        let piece = self.http.poll_piece(context);
        match &piece {
            Poll::Pending => self.waits = true,
            Poll::Ready(Some(Ok(_))) if std::mem::take(&mut self.waits) && self.shows_life => {
                self.activity.record_read()
            }
            Poll::Ready(_) => {}
        }
        piece
    }

    /// Carries out the handle's half-close.
    fn apply_half_close(&mut self) {
        if !self.half_closed && self.handle.half_closed.load(Ordering::Relaxed) {
            self.half_closed = true;
            // An error means that the connection is closed already, which is the purpose.
            let _ = SockRef::from(transport::tcp(self.http.stream())).shutdown(Shutdown::Write);
        }
    }

    /// Whether the whole reply was read.
    pub(crate) fn is_ended(&self) -> bool {
        self.http.is_ended()
    }

    /// Whether another request can be sent: the last reply was read, and the engine has not closed the connection.
    pub(crate) fn is_ready(&mut self) -> bool {
        self.http.is_ready()
    }

    pub(crate) fn mark_idle(&mut self, now: Instant) {
        self.idle_since = now;
    }

    pub(crate) fn idle_for(&self) -> Duration {
        self.idle_since.elapsed()
    }
}

impl IdleConnections {
    /// The last one that seems to be open and was idle for a shorter time.
    pub(super) fn take(&self, idle_timeout: Duration) -> Option<Connection> {
        loop {
            let mut idle = self.lock().pop()?;
            if idle.idle_for() < idle_timeout && idle.is_ready() {
                return Some(idle);
            }
        }
    }

    /// Keeps a connection for the next request. The oldest one is closed if there are too many.
    pub(super) fn store(&self, mut connection: Connection) {
        if !connection.is_ready() {
            return;
        }
        connection.mark_idle(Instant::now());
        let mut pool = self.lock();
        if pool.len() == IDLE_MAX {
            pool.remove(0);
        }
        pool.push(connection);
    }

    /// Closes those that were idle for too long.
    pub(super) fn close_old(&self, idle_timeout: Duration) {
        self.lock().retain(|idle| idle.idle_for() < idle_timeout);
    }

    /// Closes those whose other end has closed.
    pub(super) fn close_unready(&self) {
        self.lock().retain_mut(Connection::is_ready);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a connection failed because this machine lacks a resource.
pub(super) fn is_local_error(error: &std::io::Error) -> bool {
    let local = [libc::EMFILE, libc::ENFILE, libc::EADDRNOTAVAIL, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| local.contains(&code))
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.activity.remove_connection();
    }
}

#[cfg(test)]
mod tests {
    use super::is_local_error;

    #[test]
    fn local_resource_errors_are_distinct_from_engine_errors() {
        let is = |code: i32| is_local_error(&std::io::Error::from_raw_os_error(code));
        assert!(
            [libc::EMFILE, libc::ENFILE, libc::EADDRNOTAVAIL, libc::ENOBUFS, libc::ENOMEM]
                .into_iter()
                .all(is)
        );
        assert!(
            ![libc::ECONNREFUSED, libc::EHOSTUNREACH, libc::ETIMEDOUT, libc::ECONNRESET].into_iter().any(is)
        );
        assert!(!is_local_error(&std::io::Error::other("no such host")));
    }
}
