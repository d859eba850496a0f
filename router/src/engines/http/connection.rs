//! One HTTP/1.1 connection to an engine, with the two ways of giving it up: cut, or half-closed and read on.

use std::future::poll_fn;
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use socket2::SockRef;
use tokio::net::TcpStream;

use super::http1::Http1;
use super::life::Life;
use super::lost::Lost;
use super::reply_head::Head;
use super::terms::Terms;
use super::transport::Transport;
use crate::engines::presence;

/// A second hand on a connection, for closing it while its answer is waited for. It holds no descriptor: what it orders
/// is carried out when the answer is next waited for.
#[derive(Debug, Default)]
pub(crate) struct Socket {
    /// Nobody wants the request's work any more.
    abandoned: AtomicBool,
    /// Nothing more is to be sent.
    half_closed: AtomicBool,
}

/// A connection. Closed when dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    http: Http1<Transport>,
    socket: Arc<Socket>,
    half_closed: bool,
    idle_since: Instant,
    life: Arc<Life>,
    /// What comes is a sign of life: it is asked for work, or whether the engine lives.
    vital: bool,
    /// There was nothing to read when it was last looked at.
    waits: bool,
}

impl Socket {
    /// Says that nothing more will be sent; the answer can still be read, and must be waited for. Stock vLLM aborts a
    /// request at this just as at a close, and a reply that crosses it still arrives.
    pub(crate) fn half_close(&self) {
        self.abandon();
        self.half_closed.store(true, Ordering::SeqCst);
    }

    /// The request on it is not to be sent again, however its connection ends. Nothing is told to the engine.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }
}

impl Connection {
    /// Connects to the first address that takes it, with TLS where the engine has a name for it.
    pub(super) async fn dial(
        addresses: &[SocketAddr],
        terms: &Terms,
        life: &Arc<Life>,
    ) -> std::io::Result<Self> {
        let stream = TcpStream::connect(addresses).await?;
        stream.set_nodelay(true)?;
        presence::watch(&stream, terms.lost_after);
        let stream = match &terms.tls {
            None => Transport::Plain(stream),
            Some(name) => Transport::Tls(Box::new(name.connect(stream).await?)),
        };
        life.opened();
        Ok(Self {
            http: Http1::new(stream),
            socket: Arc::default(),
            half_closed: false,
            idle_since: Instant::now(),
            life: Arc::clone(life),
            vital: false,
            waits: false,
        })
    }

    pub(crate) fn socket(&self) -> Arc<Socket> {
        Arc::clone(&self.socket)
    }

    /// Sends a request, the bytes of its head and the pieces of its body, and waits for the head of its answer.
    /// `vital`: its answer shows that the engine works.
    ///
    /// # Cancel safety
    /// The connection is of no use after a cancelled call.
    pub(crate) async fn send(&mut self, head: Vec<u8>, body: &[Bytes], vital: bool) -> Result<Head, Lost> {
        self.vital = vital;
        self.http.begin(head, body);
        let head = poll_fn(|context| {
            self.obey();
            self.http.poll_head(context)
        });
        let head = head.await?;
        // Stock vLLM sends the head of a stream before it has begun, also while its engine hangs.
        if vital && !head.is_stream() {
            self.life.hear();
        }
        Ok(head)
    }

    /// The next piece of the answer's body; `None` at its end.
    pub(crate) fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Lost>>> {
        self.obey();
        let piece = self.http.poll_piece(context);
        match &piece {
            Poll::Pending => self.waits = true,
            Poll::Ready(Some(Ok(_))) if std::mem::take(&mut self.waits) && self.vital => self.life.hear(),
            Poll::Ready(_) => {}
        }
        piece
    }

    /// Does what the second hand has ordered.
    fn obey(&mut self) {
        if !self.half_closed && self.socket.half_closed.load(Ordering::Relaxed) {
            self.half_closed = true;
            // An error means that the connection is closed already, which is what was wanted.
            let _ = SockRef::from(self.http.stream().tcp()).shutdown(Shutdown::Write);
        }
    }

    /// Whether the whole answer was read.
    pub(crate) fn is_ended(&self) -> bool {
        self.http.is_ended()
    }

    /// Whether another request can be sent: the last answer is read and the engine has not closed it.
    pub(crate) fn is_ready(&mut self) -> bool {
        self.http.is_ready()
    }

    pub(crate) fn rest(&mut self, now: Instant) {
        self.idle_since = now;
    }

    pub(crate) fn idle_for(&self) -> Duration {
        self.idle_since.elapsed()
    }
}

/// Whether a connection could not be had for want of something of this machine's own.
pub(super) fn is_ours(error: &std::io::Error) -> bool {
    let ours = [libc::EMFILE, libc::ENFILE, libc::EADDRNOTAVAIL, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| ours.contains(&code))
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.life.closed();
    }
}

#[cfg(test)]
mod tests {
    use super::is_ours;

    #[test]
    fn what_this_machine_lacks_is_told_from_what_an_engine_lacks() {
        let is = |code: i32| is_ours(&std::io::Error::from_raw_os_error(code));
        assert!(
            [libc::EMFILE, libc::ENFILE, libc::EADDRNOTAVAIL, libc::ENOBUFS, libc::ENOMEM]
                .into_iter()
                .all(is)
        );
        assert!(
            ![libc::ECONNREFUSED, libc::EHOSTUNREACH, libc::ETIMEDOUT, libc::ECONNRESET].into_iter().any(is)
        );
        assert!(!is_ours(&std::io::Error::other("no such host")));
    }
}
