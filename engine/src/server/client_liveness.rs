//! Detects a client whose host vanished, because of a power cut or a network failure. The system then breaks the
//! connection, and the end of the connection aborts its requests.
//!
//! | while | detection |
//! |---|---|
//! | no data is in flight | keepalive probes, from half of the time on |
//! | data is not acknowledged, or the window is closed | polling of the system's counters ([`AckSilence`]) |
//!
//! `TCP_USER_TIMEOUT` is not suitable: it would also break the connection of a client that pauses. The router does
//! the same for its clients.

#![allow(unsafe_code, reason = "one system call that no dependency offers; see its block")]

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// The unit of keepalive times.
const SECOND: Duration = Duration::from_secs(1);
/// Checks of a connection within the time after which a client is lost.
const LOOKS: u32 = 8;
/// Unanswered retransmissions, or probes, that count as silence: a single one may be lost.
const UNANSWERED: u32 = 2;

/// A client's connection that breaks when the client's host acknowledges nothing for a while.
pub(super) struct MonitoredStream {
    stream: TcpStream,
    /// Zero leaves detection to the system.
    within: Duration,
    /// The next check of the connection; set while a read or a write waits.
    next_check: Option<Pin<Box<Sleep>>>,
    silence: AckSilence,
}

impl MonitoredStream {
    /// On a system without these options the connection works without keepalive.
    pub(super) fn new(stream: TcpStream, within: Duration) -> Self {
        if !within.is_zero() {
            let (idle, interval) = ((within / 2).max(SECOND), (within / 8).max(SECOND));
            let tries = within.saturating_sub(idle).as_secs() / interval.as_secs().max(1);
            let keepalive = TcpKeepalive::new().with_time(idle).with_interval(interval);
            let keepalive = keepalive.with_retries(u32::try_from(tries).unwrap_or(u32::MAX).clamp(1, 127));
            let _ = SockRef::from(&stream).set_tcp_keepalive(&keepalive);
        }
        Self { stream, within, next_check: None, silence: AckSilence::default() }
    }

    /// Returns the result of a read or a write. While it is pending, checks the client's host.
    fn check_result<T>(&mut self, cx: &mut Context<'_>, done: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if done.is_ready() || self.within.is_zero() {
            return done;
        }
        let every = self.within / LOOKS;
        let looks = self.next_check.get_or_insert_with(|| Box::pin(tokio::time::sleep(every)));
        while looks.as_mut().poll(cx).is_ready() {
            if self.silence.is_over(&self.stream, self.within) {
                return Poll::Ready(Err(ErrorKind::TimedOut.into()));
            }
            looks.as_mut().reset(tokio::time::Instant::now() + every);
        }
        Poll::Pending
    }
}

/// For how long the other end has acknowledged neither data nor probes, as far as it was checked.
#[derive(Debug, Default)]
struct AckSilence {
    since: Option<Instant>,
}

impl AckSilence {
    fn is_over(&mut self, socket: &TcpStream, within: Duration) -> bool {
        let facts = info(socket).map(|info| {
            let unanswered = u32::from(info.tcpi_retransmits) + u32::from(info.tcpi_probes);
            (unanswered, Duration::from_millis(u64::from(info.tcpi_last_ack_recv)))
        });
        self.observe(facts, Instant::now(), within)
    }

    /// `facts`: unanswered retransmissions or probes, and the time since the last acknowledgement.
    fn observe(&mut self, facts: Option<(u32, Duration)>, now: Instant, within: Duration) -> bool {
        let Some((unanswered @ 1.., answered)) = facts else {
            self.since = None;
            return false;
        };
        let since = *self.since.get_or_insert(now);
        let silent = now.saturating_duration_since(since);
        if answered < silent {
            self.since = Some(now);
            return false;
        }
        unanswered >= UNANSWERED && silent >= within
    }
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

impl AsyncRead for MonitoredStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.check_result(cx, read)
    }
}

impl AsyncWrite for MonitoredStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.check_result(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.check_result(cx, written)
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
            let watched = MonitoredStream::new(pair().await.0, Duration::from_millis(ms));
            let options = SockRef::from(&watched.stream);
            assert!(options.keepalive().expect("an option"));
            let seconds = [options.tcp_keepalive_time(), options.tcp_keepalive_interval()];
            assert_eq!(seconds.map(|option| option.expect("an option").as_secs()), [idle, interval], "{ms}");
            assert!(options.tcp_user_timeout().expect("an option").is_none_or(|within| within.is_zero()));
        }
        let as_it_is = MonitoredStream::new(pair().await.0, Duration::ZERO);
        assert!(!SockRef::from(&as_it_is.stream).keepalive().expect("an option"));
    }

    #[test]
    fn a_silence_begins_with_what_is_not_answered_and_ends_with_any_answer() {
        let (within, begun) = (Duration::from_secs(20), Instant::now());
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let facts = |unanswered, seconds| Some((unanswered, Duration::from_secs(seconds)));
        let mut silence = AckSilence::default();
        // After an hour without data, one of the packets sent is lost.
        assert!(!silence.observe(facts(1, 3_602), at(2), within));
        assert!(!silence.observe(facts(0, 1), at(4), within), "it was only late");
        for (second, unanswered, answered) in [(24, 1, 17), (26, 2, 19), (28, 1, 1), (30, 2, 3), (47, 2, 19)]
        {
            assert!(!silence.observe(facts(unanswered, answered), at(second), within), "{second}");
        }
        assert!(silence.observe(facts(2, 21), at(48), within));
    }

    #[tokio::test]
    async fn a_client_that_pauses_longer_than_a_lost_one_may_keeps_its_connection() {
        let (stream, client) = pair().await;
        let mut watched = MonitoredStream::new(stream, Duration::from_millis(1_000));
        // More than the client's buffer takes, and less than the system's: no write waits for the client.
        let piece = vec![7; 1 << 20];
        let written =
            poll_fn(|cx| Pin::new(&mut watched).poll_write(cx, &piece)).await.expect("there is room");
        // The system begins to probe a closed window at once, and `TCP_USER_TIMEOUT` would break it by now.
        let mut none = [0; 1];
        let read = poll_fn(|cx| Pin::new(&mut watched).poll_read(cx, &mut ReadBuf::new(&mut none)));
        let waited = tokio::time::timeout(Duration::from_millis(2_500), read).await;
        assert!(waited.is_err(), "{waited:?}");
        let mut read = 0;
        let mut room = vec![0; 1 << 20];
        while read < written {
            client.readable().await.expect("it is there");
            match client.try_read(&mut room) {
                Ok(0) => panic!("it was cut after {read} of {written}"),
                Ok(bytes) => read += bytes,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
    }
}
