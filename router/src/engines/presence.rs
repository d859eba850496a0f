//! Detection of a peer host that disappeared silently: its power was cut, or the network in between.
//!
//! | while | detection |
//! |---|---|
//! | nothing is in transit | keepalive probes, from half of the time on; the kernel breaks the connection |
//! | a client does not acknowledge data, or its window is closed | the kernel's counters, checked while a request is served: [`PeerSilence`] |
//! | an engine does not acknowledge data | `TCP_USER_TIMEOUT`; the kernel breaks the connection |
//! | received data is not read | the state of the connection: [`has_ended`] |
//!
//! `TCP_USER_TIMEOUT` is not for clients. The kernel counts a closed window as unacknowledged data even while the
//! peer acknowledges its probes (Linux since 5.11, `tcp_probe_timer`), and a client may pause.

#![allow(unsafe_code, reason = "one system call that no dependency offers; see its block")]

use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// Unit of keepalive times.
const SECOND: Duration = Duration::from_secs(1);
/// `TCP_ESTABLISHED` of Linux: both directions are open.
const ESTABLISHED: u8 = 1;
/// Checks of a connection per timeout.
pub(crate) const CHECKS_PER_TIMEOUT: u32 = 8;
/// Minimum unanswered retransmissions or probes for a silence. One may be lost in transit.
const UNANSWERED_TRIES_MIN: u32 = 2;

/// Breaks an idle connection if the peer answers no probe for so long; zero: the kernel's default.
///
/// Errors are ignored: the connection also works without these options.
pub(crate) fn set_keepalive(socket: &TcpStream, within: Duration) {
    if within.is_zero() {
        return;
    }
    let (idle, interval) = ((within / 2).max(SECOND), (within / 8).max(SECOND));
    let tries = within.saturating_sub(idle).as_secs() / interval.as_secs().max(1);
    let keepalive = TcpKeepalive::new().with_time(idle).with_interval(interval);
    let keepalive = keepalive.with_retries(u32::try_from(tries).unwrap_or(u32::MAX).clamp(1, 127));
    let _ = SockRef::from(socket).set_tcp_keepalive(&keepalive);
}

/// The same, and breaks any connection if the peer acknowledges no data, or accepts none, for so long.
pub(crate) fn set_lost_timeout(socket: &TcpStream, within: Duration) {
    if !within.is_zero() {
        set_keepalive(socket, within);
        let _ = SockRef::from(socket).set_tcp_user_timeout(Some(within));
    }
}

/// How long the peer has acknowledged neither data nor probes, as far as it was checked.
#[derive(Debug, Default)]
pub(crate) struct PeerSilence {
    since: Option<Instant>,
}

impl PeerSilence {
    /// Whether the silence exceeds `within`. To be called [`CHECKS_PER_TIMEOUT`] times within it.
    pub(crate) fn is_over(&mut self, socket: &TcpStream, within: Duration) -> bool {
        let counters = info(socket).map(|info| {
            let unanswered = u32::from(info.tcpi_retransmits) + u32::from(info.tcpi_probes);
            (unanswered, Duration::from_millis(u64::from(info.tcpi_last_ack_recv)))
        });
        self.update(counters, Instant::now(), within)
    }

    /// `counters`: unanswered tries, and the time since the last answer.
    fn update(&mut self, counters: Option<(u32, Duration)>, now: Instant, within: Duration) -> bool {
        let Some((unanswered @ 1.., answered)) = counters else {
            self.since = None;
            return false;
        };
        let since = *self.since.get_or_insert(now);
        let silent = now.saturating_duration_since(since);
        if answered < silent {
            self.since = Some(now);
            return false;
        }
        unanswered >= UNANSWERED_TRIES_MIN && silent >= within
    }
}

/// Breaks a connection at once for its reader and writer, because the peer is lost.
pub(crate) fn cut(socket: &TcpStream) {
    let socket = SockRef::from(socket);
    let _ = socket.set_linger(Some(Duration::ZERO));
    let _ = socket.shutdown(Shutdown::Both);
}

/// Whether the peer has closed or broken the connection, even behind unread data.
pub(crate) fn has_ended(socket: &TcpStream) -> bool {
    info(socket).is_some_and(|info| info.tcpi_state != ESTABLISHED)
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

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_connection_is_probed_in_time_and_only_engines_must_take_data() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let connect = || TcpStream::connect(listener.local_addr().expect("bound"));
        let socket = connect().await.expect("it listens");
        set_lost_timeout(&socket, Duration::ZERO);
        let options = SockRef::from(&socket);
        assert!(!options.keepalive().expect("an option"), "as the system does it");
        for (ms, expected) in [(20_000, [10, 2, 5]), (1_000, [1, 1, 1]), (3_600_000, [1_800, 450, 4])] {
            set_keepalive(&socket, Duration::from_millis(ms));
            assert!(options.keepalive().expect("an option"));
            let seconds = [options.tcp_keepalive_time(), options.tcp_keepalive_interval()];
            let [idle, interval] = seconds.map(|option| option.expect("an option").as_secs());
            let tries = u64::from(options.tcp_keepalive_retries().expect("an option"));
            assert_eq!([idle, interval, tries], expected, "{ms}");
            assert!(options.tcp_user_timeout().expect("an option").is_none_or(|within| within.is_zero()));
        }
        set_lost_timeout(&socket, Duration::from_secs(20));
        assert_eq!(options.tcp_user_timeout().expect("an option"), Some(Duration::from_secs(20)));
    }

    #[test]
    fn a_silence_begins_with_what_is_not_answered_and_ends_with_any_answer() {
        let (within, begun) = (Duration::from_secs(20), Instant::now());
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let counters = |unanswered, seconds| Some((unanswered, Duration::from_secs(seconds)));
        let mut silence = PeerSilence::default();
        // Nothing was sent for an hour; then one packet was sent and lost.
        assert!(!silence.update(counters(0, 3_600), at(0), within));
        assert!(!silence.update(counters(1, 3_602), at(2), within));
        assert!(!silence.update(counters(0, 1), at(4), within), "it was only late");
        // A closed window: probes are far apart, and some are answered late.
        let looks = [(6, 1, 30), (8, 0, 1), (24, 1, 17), (26, 2, 19), (28, 1, 1), (30, 2, 3), (47, 2, 19)];
        for (second, unanswered, answered) in looks {
            assert!(!silence.update(counters(unanswered, answered), at(second), within), "{second}");
        }
        assert!(silence.update(counters(2, 21), at(48), within), "none is any more");
        assert!(!silence.update(None, at(50), within));
        // One unanswered try may have been lost itself.
        assert!(
            !silence.update(counters(1, 60), at(60), within)
                && !silence.update(counters(1, 90), at(90), within)
        );
    }

    #[tokio::test]
    async fn an_end_behind_unread_data_is_detected() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        for reset in [false, true] {
            let mut other =
                TcpStream::connect(listener.local_addr().expect("bound")).await.expect("it listens");
            let (socket, _) = listener.accept().await.expect("it connected");
            other.write_all(b"x").await.expect("there is room");
            socket.readable().await.expect("it is open");
            assert!(!has_ended(&socket));
            if reset {
                SockRef::from(&other).set_linger(Some(Duration::ZERO)).expect("an option");
            }
            drop(other);
            while !has_ended(&socket) {
                tokio::task::yield_now().await;
            }
        }
    }
}
