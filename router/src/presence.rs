//! Whether the host at the other end of a connection is still there, where it left without a word: its power was cut, or
//! the network between. The system finds out, and breaks the connection.
//!
//! | while | what finds out |
//! |---|---|
//! | nothing is on its way | keepalive probes, from half of the time on |
//! | data is not acknowledged | `TCP_USER_TIMEOUT` |
//! | the window is closed | the same, too early for a reader that is there and pauses: see [`bear`] and [`is_lost`] |
//! | what it sent is not read | the state of the connection: see [`has_ended`] |

#![allow(unsafe_code)] // one system call that no dependency offers; see its block

use std::os::fd::AsRawFd;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// Keepalive counts in these.
const SECOND: Duration = Duration::from_secs(1);
/// `TCP_ESTABLISHED` of Linux: both directions are open.
const ESTABLISHED: u8 = 1;

/// Has the connection broken once the other end has acknowledged nothing for so long; zero: as the system does it.
///
/// A system without these options serves all the same.
pub(crate) fn watch(socket: &TcpStream, within: Duration) {
    if within.is_zero() {
        return;
    }
    let (idle, interval) = ((within / 2).max(SECOND), (within / 8).max(SECOND));
    let keepalive = TcpKeepalive::new().with_time(idle).with_interval(interval);
    let _ = SockRef::from(socket).set_tcp_keepalive(&keepalive);
    bear(socket, within);
}

/// Changes how long data may be unacknowledged. The system counts a closed window as that, even while the other end
/// acknowledges its probes (Linux since 5.11, `tcp_probe_timer`).
pub(crate) fn bear(socket: &TcpStream, within: Duration) {
    let _ = SockRef::from(socket).set_tcp_user_timeout(Some(within));
}

/// Whether the other end has acknowledged nothing for so long, although it was sent something or asked.
pub(crate) fn is_lost(socket: &TcpStream, within: Duration) -> bool {
    let Some(info) = info(socket) else { return false };
    let asked = info.tcpi_retransmits > 0 || info.tcpi_probes > 0;
    asked && u128::from(info.tcpi_last_ack_recv) >= within.as_millis()
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
    async fn a_watched_connection_is_probed_and_broken_in_time_and_one_that_is_there_is_not_lost() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let socket = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("it listens");
        watch(&socket, Duration::ZERO);
        let options = SockRef::from(&socket);
        assert!(!options.keepalive().expect("an option"), "as the system does it");
        for (ms, idle, interval) in [(20_000, 10, 2), (1_000, 1, 1), (3_600_000, 1_800, 450)] {
            watch(&socket, Duration::from_millis(ms));
            assert!(options.keepalive().expect("an option"));
            let seconds = [options.tcp_keepalive_time(), options.tcp_keepalive_interval()];
            let seconds = seconds.map(|option| option.expect("an option").as_secs());
            assert_eq!(seconds, [idle, interval], "{ms}");
            let within = options.tcp_user_timeout().expect("an option");
            assert_eq!(within, Some(Duration::from_millis(ms)));
        }
        assert!(!is_lost(&socket, Duration::ZERO), "it was asked nothing");
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
