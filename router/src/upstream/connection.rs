//! One HTTP/1.1 connection to an engine, with the two ways of giving it up: cut, or half-closed and read on.

use std::future::poll_fn;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use socket2::SockRef;
use tokio::net::TcpStream;

use super::http1::{Http1, Lost};
use super::reply_head::Head;
use super::transport::Transport;
use crate::tls::client::EngineName;

/// A second hand on a connection's socket, for closing it while somebody else reads.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    /// Nobody wants the request's work any more.
    abandoned: AtomicBool,
}

/// A connection. Cut when dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    http: Http1<Transport>,
    socket: Arc<Socket>,
    idle_since: Instant,
}

impl Socket {
    /// Says that nothing more will be sent; the answer can still be read. Stock vLLM aborts a request at this
    /// just as at a close, and a reply that crosses it still arrives.
    pub(crate) fn half_close(&self) {
        self.abandon();
        // An error means that the connection is closed already, which is what was wanted.
        let _ = SockRef::from(&self.fd).shutdown(Shutdown::Write);
    }

    /// The request on it is not to be sent again, however its connection ends. Nothing is told to the engine.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    fn cut(&self) {
        let _ = SockRef::from(&self.fd).shutdown(Shutdown::Both);
    }
}

impl Connection {
    /// Connects, with TLS where the engine has a name for it.
    pub(crate) async fn dial(host: &str, port: u16, tls: Option<&EngineName>) -> std::io::Result<Self> {
        let stream = TcpStream::connect((host, port)).await?;
        stream.set_nodelay(true)?;
        let socket =
            Arc::new(Socket { fd: stream.as_fd().try_clone_to_owned()?, abandoned: AtomicBool::new(false) });
        let stream = match tls {
            None => Transport::Plain(stream),
            Some(name) => Transport::Tls(Box::new(name.connect(stream).await?)),
        };
        Ok(Self { http: Http1::new(stream), socket, idle_since: Instant::now() })
    }

    pub(crate) fn socket(&self) -> Arc<Socket> {
        Arc::clone(&self.socket)
    }

    /// Sends a request, the bytes of its head and the pieces of its body, and waits for the head of its answer.
    ///
    /// # Cancel safety
    /// The connection is of no use after a cancelled call.
    pub(crate) async fn send(&mut self, head: Vec<u8>, body: &[Bytes]) -> Result<Head, Lost> {
        self.http.begin(head, body);
        poll_fn(|context| self.http.poll_head(context)).await
    }

    /// The next piece of the answer's body; `None` at its end.
    pub(crate) fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Lost>>> {
        self.http.poll_piece(context)
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
        self.socket.cut();
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
