//! A TCP connection to a producer's side channel, within a bound.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_connector::transport::StopFlag;
use socket2::{Domain, Protocol, Socket, Type};

use crate::handshake::ConnectError;
use crate::socket::{SLICE, wait};

/// Connects. The socket is left non-blocking; [`crate::socket::ChannelSocket::new`] sets its options.
///
/// # Errors
/// [`ConnectError::Stopped`], or [`ConnectError::Unreachable`] without an answer within `timeout`.
pub fn dial(address: SocketAddr, timeout: Duration, stop: &StopFlag) -> Result<Socket, ConnectError> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))
        .map_err(ConnectError::unreachable)?;
    socket.set_nonblocking(true).map_err(ConnectError::unreachable)?;
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
            let deadline = Instant::now() + timeout;
            while !wait(socket.as_fd(), libc::POLLOUT, SLICE).map_err(ConnectError::unreachable)? {
                if stop.load(Ordering::Acquire) {
                    return Err(ConnectError::Stopped);
                }
                if Instant::now() >= deadline {
                    return Err(ConnectError::unreachable(io::Error::from(io::ErrorKind::TimedOut)));
                }
            }
            let failed = socket.take_error().map_err(ConnectError::unreachable)?;
            failed.map_or(Ok(()), |error| Err(ConnectError::unreachable(error)))?;
        }
        Err(error) => return Err(ConnectError::unreachable(error)),
    }
    Ok(socket)
}
