//! Bounded reads and writes on one socket: every wait is cut into slices, and between two slices the stop
//! flag, the lease and the time since the last byte are looked at.
#![allow(unsafe_code)] // poll(2); one call

use std::io::{self, ErrorKind, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::scatter::Spans;

/// Longest single wait: a raised stop flag is seen at the latest after this.
pub(crate) const SLICE: Duration = Duration::from_millis(40);

/// Send buffer of every connection, in bytes; Linux doubles it for its own books. Left to grow by itself, it
/// outgrows the processor's cache and every byte is copied from and to memory. With this one, and with waits
/// in `poll` instead of inside `sendmsg`, one connection over loopback moves 0.5 of what memcpy moves, and
/// with blocking sends 0.3 (measured 2026-11 on 2 cores; 128 KiB to 4 MiB tried). At 100 µs between two
/// machines it still carries 5 GB/s.
pub const SEND_BUFFER_BYTES: usize = 256 * 1024;

/// Why nothing more can be moved over a link.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error("the peer closed the connection")]
    Closed,
    #[error("silent for {0:?}")]
    Silent(Duration),
    #[error("stopped")]
    Stopped,
    #[error("the lease ended during a batch")]
    LeaseEnded,
    #[error(transparent)]
    Io(io::Error),
    #[error(transparent)]
    Wire(#[from] crate::wire::WireError),
    #[error("an answer that does not fit the question")]
    Unexpected,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Link {
    stream: TcpStream,
    silence: Duration,
}

/// What ends a wait early.
#[derive(Clone, Copy)]
pub(crate) struct Until<'a> {
    stop: &'a AtomicBool,
    /// The whole message must be over by then, however steadily its bytes trickle in.
    deadline: Option<Instant>,
}

impl<'a> Until<'a> {
    /// Goes on while bytes come, until the flag is raised.
    pub(crate) fn stopped(stop: &'a AtomicBool) -> Self {
        Self { stop, deadline: None }
    }

    /// As [`Self::stopped`], and not past `deadline`.
    pub(crate) fn deadline(stop: &'a AtomicBool, deadline: Instant) -> Self {
        Self { stop, deadline: Some(deadline) }
    }
}

impl Link {
    /// Takes over a connected socket: blocking, without Nagle's delay, with a receive timeout of one slice.
    pub(crate) fn new(stream: TcpStream, silence: Duration) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SLICE))?;
        socket2::SockRef::from(&stream).set_send_buffer_size(SEND_BUFFER_BYTES)?;
        Ok(Self { stream, silence })
    }

    pub(crate) fn silence(&self) -> Duration {
        self.silence
    }

    fn check(&self, until: Until<'_>, last: Instant) -> Result<(), LinkError> {
        if until.stop.load(Ordering::Acquire) {
            return Err(LinkError::Stopped);
        }
        let now = Instant::now();
        if now.duration_since(last) >= self.silence || until.deadline.is_some_and(|deadline| now >= deadline)
        {
            return Err(LinkError::Silent(self.silence));
        }
        Ok(())
    }

    /// Fills a small buffer.
    pub(crate) fn receive(&mut self, mut buffer: &mut [u8], until: Until<'_>) -> Result<(), LinkError> {
        let mut last = Instant::now();
        while !buffer.is_empty() {
            match self.stream.read(buffer) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(read) => {
                    buffer = &mut buffer[read..];
                    last = Instant::now();
                    if !buffer.is_empty() {
                        self.check(until, last)?;
                    }
                }
                Err(error) => {
                    transient(error)?;
                    self.check(until, last)?;
                }
            }
        }
        Ok(())
    }

    /// Fills all spans.
    pub(crate) fn receive_spans(&mut self, spans: &mut Spans<'_>, until: Until<'_>) -> Result<(), LinkError> {
        let mut last = Instant::now();
        while spans.left() > 0 {
            match spans.receive(self.stream.as_fd()) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(_) => {
                    last = Instant::now();
                    self.check(until, last)?;
                }
                Err(error) => {
                    transient(error)?;
                    self.check(until, last)?;
                }
            }
        }
        Ok(())
    }

    /// Sends a small message.
    pub(crate) fn send(&mut self, bytes: &[u8], until: Until<'_>) -> Result<(), LinkError> {
        let mut spans = Spans::with_capacity(1);
        spans.push_bytes(bytes);
        self.send_spans(&mut spans, until, || true)
    }

    /// Sends all spans; after every wait `live` says whether their bytes may still leave.
    pub(crate) fn send_spans(
        &mut self,
        spans: &mut Spans<'_>,
        until: Until<'_>,
        live: impl Fn() -> bool,
    ) -> Result<(), LinkError> {
        let mut last = Instant::now();
        while spans.left() > 0 {
            match spans.send(self.stream.as_fd()) {
                Ok(_) => last = Instant::now(),
                Err(error) => {
                    transient(error)?;
                    wait(self.stream.as_fd(), libc::POLLOUT, SLICE).map_err(LinkError::Io)?;
                    self.check(until, last)?;
                    if !live() {
                        return Err(LinkError::LeaseEnded);
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits, without a thread's worth of wake-ups, until a byte (or the end) is there. False when none came.
    pub(crate) fn readable_within(&self, limit: Duration) -> io::Result<bool> {
        wait(self.stream.as_fd(), libc::POLLIN, limit)
    }

    /// Whether an idle connection can still be used: nothing is there to be read, not even its end.
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.readable_within(Duration::ZERO), Ok(false))
    }
}

fn transient(error: io::Error) -> Result<(), LinkError> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
            Err(LinkError::Closed)
        }
        _ => Err(LinkError::Io(error)),
    }
}

/// Waits for an event on a socket; false when none came in time.
pub(crate) fn wait(socket: BorrowedFd<'_>, events: libc::c_short, limit: Duration) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 };
    let millis = libc::c_int::try_from(limit.as_millis()).unwrap_or(libc::c_int::MAX);
    // SAFETY: one `pollfd` that lives through the call, and its count.
    let ready = unsafe { libc::poll(&raw mut poll, 1, millis) };
    match ready {
        -1 => match io::Error::last_os_error() {
            error if error.kind() == ErrorKind::Interrupted => Ok(false),
            error => Err(error),
        },
        ready => Ok(ready > 0),
    }
}
