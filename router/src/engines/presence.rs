//! Whether the host at the other end of a connection is still there, where it left without a word: its power was cut, or
//! the network between.
//!
//! | while | what finds out |
//! |---|---|
//! | nothing is on its way | keepalive probes, from half of the time on; the system breaks the connection |
//! | a client does not acknowledge data, or its window is closed | the system's counts, looked at while a request is served: [`Silence`] |
//! | an engine does not acknowledge data | `TCP_USER_TIMEOUT`; the system breaks the connection |
//! | what it sent is not read | the state of the connection: see [`has_ended`] |
//!
//! `TCP_USER_TIMEOUT` is not for clients: the system counts a closed window as unacknowledged data even while the other end
//! acknowledges its probes (Linux since 5.11, `tcp_probe_timer`), and a client may pause.

#![allow(unsafe_code)] // one system call that no dependency offers; see its block

use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// Keepalive counts in these.
const SECOND: Duration = Duration::from_secs(1);
/// `TCP_ESTABLISHED` of Linux: both directions are open.
const ESTABLISHED: u8 = 1;
/// Looks at a connection within the time after which its host is lost.
pub(crate) const LOOKS: u32 = 8;
/// Retransmissions, or probes, without an answer that make a silence: one may be lost on its way.
const UNANSWERED: u32 = 2;

/// Has an idle connection broken once the other end has answered no probe for so long; zero: as the system does it.
///
/// A system without these options serves all the same.
pub(crate) fn probe(socket: &TcpStream, within: Duration) {
    if within.is_zero() {
        return;
    }
    let (idle, interval) = ((within / 2).max(SECOND), (within / 8).max(SECOND));
    let tries = within.saturating_sub(idle).as_secs() / interval.as_secs().max(1);
    let keepalive = TcpKeepalive::new().with_time(idle).with_interval(interval);
    let keepalive = keepalive.with_retries(u32::try_from(tries).unwrap_or(u32::MAX).clamp(1, 127));
    let _ = SockRef::from(socket).set_tcp_keepalive(&keepalive);
}

/// The same, and has any connection broken once the other end has acknowledged no data, or taken none, for so long.
pub(crate) fn watch(socket: &TcpStream, within: Duration) {
    if !within.is_zero() {
        probe(socket, within);
        let _ = SockRef::from(socket).set_tcp_user_timeout(Some(within));
    }
}

/// For how long the other end has acknowledged nothing of what it was sent or asked, as far as it was looked at.
#[derive(Debug, Default)]
pub(crate) struct Silence {
    since: Option<Instant>,
}

impl Silence {
    /// Whether it is longer than that. To be asked [`LOOKS`] times within it.
    pub(crate) fn is_over(&mut self, socket: &TcpStream, within: Duration) -> bool {
        let facts = info(socket).map(|info| {
            let unanswered = u32::from(info.tcpi_retransmits) + u32::from(info.tcpi_probes);
            (unanswered, Duration::from_millis(u64::from(info.tcpi_last_ack_recv)))
        });
        self.judge(facts, Instant::now(), within)
    }

    /// `facts`: tries without an answer, and the time since the last one.
    fn judge(&mut self, facts: Option<(u32, Duration)>, now: Instant, within: Duration) -> bool {
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

/// Ends a connection at once, for those who read and write it: its other end is lost.
pub(crate) fn cut(socket: &TcpStream) {
    let socket = SockRef::from(socket);
    let _ = socket.set_linger(Some(Duration::ZERO));
    let _ = socket.shutdown(Shutdown::Both);
}

/// Whether the other end has closed or broken the connection, also where that is behind data that was not read.
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
        watch(&socket, Duration::ZERO);
        let options = SockRef::from(&socket);
        assert!(!options.keepalive().expect("an option"), "as the system does it");
        for (ms, expected) in [(20_000, [10, 2, 5]), (1_000, [1, 1, 1]), (3_600_000, [1_800, 450, 4])] {
            probe(&socket, Duration::from_millis(ms));
            assert!(options.keepalive().expect("an option"));
            let seconds = [options.tcp_keepalive_time(), options.tcp_keepalive_interval()];
            let [idle, interval] = seconds.map(|option| option.expect("an option").as_secs());
            let tries = u64::from(options.tcp_keepalive_retries().expect("an option"));
            assert_eq!([idle, interval, tries], expected, "{ms}");
            assert!(options.tcp_user_timeout().expect("an option").is_none_or(|within| within.is_zero()));
        }
        watch(&socket, Duration::from_secs(20));
        assert_eq!(options.tcp_user_timeout().expect("an option"), Some(Duration::from_secs(20)));
    }

    #[test]
    fn a_silence_begins_with_what_is_not_answered_and_ends_with_any_answer() {
        let (within, begun) = (Duration::from_secs(20), Instant::now());
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let facts = |unanswered, seconds| Some((unanswered, Duration::from_secs(seconds)));
        let mut silence = Silence::default();
        // Nothing was sent for an hour; then something, of which one packet is lost.
        assert!(!silence.judge(facts(0, 3_600), at(0), within));
        assert!(!silence.judge(facts(1, 3_602), at(2), within));
        assert!(!silence.judge(facts(0, 1), at(4), within), "it was only late");
        // A closed window: probes are far apart, and some are answered late.
        let looks = [(6, 1, 30), (8, 0, 1), (24, 1, 17), (26, 2, 19), (28, 1, 1), (30, 2, 3), (47, 2, 19)];
        for (second, unanswered, answered) in looks {
            assert!(!silence.judge(facts(unanswered, answered), at(second), within), "{second}");
        }
        assert!(silence.judge(facts(2, 21), at(48), within), "none is any more");
        assert!(!silence.judge(None, at(50), within));
        // One try that is not answered may have been lost itself.
        assert!(!silence.judge(facts(1, 60), at(60), within) && !silence.judge(facts(1, 90), at(90), within));
    }

    #[tokio::test]
    async fn an_end_behind_data_that_was_not_read_is_seen() {
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
