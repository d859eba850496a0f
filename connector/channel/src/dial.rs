//! A TCP connection to a producer's side channel, within a bound.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_connector::transport::StopFlag;
use socket2::{Domain, Protocol, Socket, Type};

use crate::handshake::NotAdmitted;
use crate::link::{SLICE, wait};

/// Connects. The socket is left non-blocking; [`crate::link::Link::new`] sets what it needs.
///
/// # Errors
/// [`NotAdmitted::Stopped`], or [`NotAdmitted::Absent`] when nobody answers within `timeout`.
pub fn dial(address: SocketAddr, timeout: Duration, stop: &StopFlag) -> Result<Socket, NotAdmitted> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))
        .map_err(NotAdmitted::absent)?;
    socket.set_nonblocking(true).map_err(NotAdmitted::absent)?;
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
            let deadline = Instant::now() + timeout;
            while !wait(socket.as_fd(), libc::POLLOUT, SLICE).map_err(NotAdmitted::absent)? {
                if stop.load(Ordering::Acquire) {
                    return Err(NotAdmitted::Stopped);
                }
                if Instant::now() >= deadline {
                    return Err(NotAdmitted::absent(io::Error::from(io::ErrorKind::TimedOut)));
                }
            }
            let failed = socket.take_error().map_err(NotAdmitted::absent)?;
            failed.map_or(Ok(()), |error| Err(NotAdmitted::absent(error)))?;
        }
        Err(error) => return Err(NotAdmitted::absent(error)),
    }
    Ok(socket)
}
