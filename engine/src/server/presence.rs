//! Whether a client's host is still there, where it left without a word: its power was cut, or the network between. The
//! system finds out and breaks the connection, and the connection's end aborts what it asked for.
//!
//! | while | what finds out |
//! |---|---|
//! | nothing is on its way | keepalive probes, from half of the time on |
//! | data is not acknowledged | `TCP_USER_TIMEOUT` |
//! | the window is closed | the system's count of acknowledgements, looked at from time to time: `TCP_USER_TIMEOUT` would also break the connection of a client that is there and pauses |
//!
//! The router has the same for its clients (`router/src/presence.rs`).

#![allow(unsafe_code)] // one system call that no dependency offers; see its block

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// Keepalive counts in these.
const SECOND: Duration = Duration::from_secs(1);
/// Looks at a connection whose window is closed, within the time after which a client is lost.
const LOOKS: u32 = 4;

/// A client's connection that breaks when the client's host acknowledges nothing for a while.
pub(super) struct Watched {
    stream: TcpStream,
    /// Zero: as the system does it.
    within: Duration,
    /// Set while the client takes nothing.
    paused: Option<Pin<Box<Sleep>>>,
}

impl Watched {
    /// A system without these options serves all the same.
    pub(super) fn new(stream: TcpStream, within: Duration) -> Self {
        if !within.is_zero() {
            let (idle, interval) = ((within / 2).max(SECOND), (within / 8).max(SECOND));
            let keepalive = TcpKeepalive::new().with_time(idle).with_interval(interval);
            let _ = SockRef::from(&stream).set_tcp_keepalive(&keepalive);
            let _ = SockRef::from(&stream).set_tcp_user_timeout(Some(within));
        }
        Self { stream, within, paused: None }
    }

    /// What a write has come to. One that waits is a client that pauses, for as long as its host acknowledges probes.
    fn judged<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if self.within.is_zero() {
            return written;
        }
        if written.is_ready() {
            if self.paused.take().is_some() {
                let _ = SockRef::from(&self.stream).set_tcp_user_timeout(Some(self.within));
            }
            return written;
        }
        let every = self.within / LOOKS;
        let stream = &self.stream;
        let sleep = self.paused.get_or_insert_with(|| {
            let _ = SockRef::from(stream).set_tcp_user_timeout(None);
            Box::pin(tokio::time::sleep(every))
        });
        loop {
            ready!(sleep.as_mut().poll(cx));
            if is_lost(stream, self.within) {
                return Poll::Ready(Err(ErrorKind::TimedOut.into()));
            }
            sleep.as_mut().reset(tokio::time::Instant::now() + every);
        }
    }
}

/// Whether the other end has acknowledged nothing for so long, although it was sent something or asked.
fn is_lost(socket: &TcpStream, within: Duration) -> bool {
    let Some(info) = info(socket) else { return false };
    let asked = info.tcpi_retransmits > 0 || info.tcpi_probes > 0;
    asked && u128::from(info.tcpi_last_ack_recv) >= within.as_millis()
}

fn info(socket: &TcpStream) -> Option<libc::tcp_info> {
    // SAFETY: all of its fields are integers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut bytes = libc::socklen_t::try_from(size_of_val(&info)).ok()?;
    // SAFETY: the descriptor is open while `socket` is borrowed, and the system writes at most `bytes` to `info`.
    let done = unsafe {
        let to = std::ptr::from_mut(&mut info).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, to, &raw mut bytes)
    };
    (done == 0).then_some(info)
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.judged(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.judged(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("it listens");
        (listener.accept().await.expect("it connects").0, client)
    }

    #[tokio::test]
    async fn a_clients_connection_is_probed_and_broken_in_time() {
        for (ms, idle, interval) in [(20_000, 10, 2), (1_000, 1, 1)] {
            let watched = Watched::new(pair().await.0, Duration::from_millis(ms));
            let options = SockRef::from(&watched.stream);
            assert!(options.keepalive().expect("an option"));
            let seconds = [options.tcp_keepalive_time(), options.tcp_keepalive_interval()];
            assert_eq!(seconds.map(|option| option.expect("an option").as_secs()), [idle, interval], "{ms}");
            let within = options.tcp_user_timeout().expect("an option");
            assert_eq!(within, Some(Duration::from_millis(ms)));
        }
        let as_it_is = Watched::new(pair().await.0, Duration::ZERO);
        assert!(!SockRef::from(&as_it_is.stream).keepalive().expect("an option"));
    }

    #[tokio::test]
    async fn a_client_that_pauses_is_not_broken_off_for_it() {
        let (stream, client) = pair().await;
        let within = Duration::from_secs(3600);
        let mut watched = Watched::new(stream, within);
        let timeout =
            |watched: &Watched| SockRef::from(&watched.stream).tcp_user_timeout().expect("an option");
        let piece = vec![0; 1 << 20];
        let full = poll_fn(|cx| {
            loop {
                match Pin::new(&mut watched).poll_write(cx, &piece) {
                    Poll::Ready(written) => drop(written.expect("it is there")),
                    Poll::Pending => return Poll::Ready(()),
                }
            }
        });
        full.await;
        assert!(watched.paused.is_some() && timeout(&watched).is_none_or(|within| within.is_zero()));
        assert!(!is_lost(&watched.stream, within));
        // It reads again.
        let mut room = vec![0; 1 << 20];
        let next = async {
            poll_fn(|cx| Pin::new(&mut watched).poll_write(cx, &piece)).await.expect("there is room");
        };
        let reads = async {
            loop {
                client.readable().await.expect("it is there");
                let _ = client.try_read(&mut room);
            }
        };
        tokio::select! {
            () = next => {}
            () = reads => {}
        }
        assert!(watched.paused.is_none() && timeout(&watched) == Some(within));
    }
}
