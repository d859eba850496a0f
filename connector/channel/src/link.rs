//! Bounded reads and writes on one socket: every wait is cut into slices, and between two slices the stop
//! flag, the lease and the time since the last byte are looked at.
#![allow(unsafe_code)] // poll(2); one call

use std::io::{self, ErrorKind, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use socket2::Socket;

use crate::scatter::Spans;

/// Longest single wait: a raised stop flag is seen at the latest after this.
pub const SLICE: Duration = Duration::from_millis(40);

/// How long a read may take, however steadily its bytes trickle in: six silences (with the defaults a lease's
/// length), and the time of the slowest network worth waiting for.
#[must_use]
pub fn longest_read(silence: Duration, bytes: usize) -> Duration {
    /// Bytes per second.
    const SLOWEST: u64 = 1 << 20;
    silence * 6 + Duration::from_secs(bytes as u64 / SLOWEST)
}

/// Why nothing more can be moved over a link.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// Its end, or a reset.
    #[error("the peer closed the connection")]
    Closed,
    /// No byte came or went for this long, or a message was not over in time.
    #[error("silent for {0:?}")]
    Silent(Duration),
    /// The caller raised the stop flag.
    #[error("stopped")]
    Stopped,
    /// The bytes may not leave any more.
    #[error("the lease ended during a batch")]
    LeaseEnded,
    /// The system's reason.
    #[error(transparent)]
    Io(io::Error),
    /// Bytes that are no message.
    #[error(transparent)]
    Wire(#[from] crate::wire::WireError),
    /// A message that may not come here.
    #[error("the response does not match the request")]
    Unexpected,
}

/// One connection.
#[derive(Debug)]
pub struct Link {
    socket: Socket,
    silence: Duration,
}

/// What ends a wait early.
#[derive(Clone, Copy, Debug)]
pub struct Until<'a> {
    stop: &'a AtomicBool,
    /// The whole message must be over by then, however steadily its bytes trickle in.
    deadline: Option<Instant>,
}

impl<'a> Until<'a> {
    /// Goes on while bytes come, until the flag is raised.
    #[must_use]
    pub fn stopped(stop: &'a AtomicBool) -> Self {
        Self { stop, deadline: None }
    }

    /// As [`Self::stopped`], and not past `deadline`.
    #[must_use]
    pub fn deadline(stop: &'a AtomicBool, deadline: Instant) -> Self {
        Self { stop, deadline: Some(deadline) }
    }
}

impl Link {
    /// Takes over a connected stream socket: blocking, with a receive timeout of one slice.
    ///
    /// # Errors
    /// The system's.
    pub fn new(socket: Socket, silence: Duration) -> io::Result<Self> {
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(SLICE))?;
        Ok(Self { socket, silence })
    }

    /// The longest wait for a byte.
    #[must_use]
    pub fn silence(&self) -> Duration {
        self.silence
    }

    /// Whether one may wait on: not stopped, not past the deadline, and not silent since `last`.
    ///
    /// # Errors
    /// `Stopped` or `Silent`.
    pub fn check(&self, until: Until<'_>, last: Instant) -> Result<(), LinkError> {
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
    ///
    /// # Errors
    /// [`LinkError`]; the connection is out of step.
    pub fn receive(&mut self, mut buffer: &mut [u8], until: Until<'_>) -> Result<(), LinkError> {
        let mut last = Instant::now();
        while !buffer.is_empty() {
            match self.socket.read(buffer) {
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
    ///
    /// # Errors
    /// [`LinkError`]; the connection is out of step.
    pub fn receive_spans(&mut self, spans: &mut Spans<'_>, until: Until<'_>) -> Result<(), LinkError> {
        let mut last = Instant::now();
        while spans.left() > 0 {
            match spans.receive(self.socket.as_fd()) {
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
    ///
    /// # Errors
    /// [`LinkError`]; the connection is out of step.
    pub fn send(&mut self, bytes: &[u8], until: Until<'_>) -> Result<(), LinkError> {
        let mut spans = Spans::with_capacity(1);
        spans.push_bytes(bytes);
        self.send_spans(&mut spans, until, || true)
    }

    /// Sends all spans; after every wait `live` says whether their bytes may still leave.
    ///
    /// # Errors
    /// [`LinkError`]; `spans` tells what was not sent.
    pub fn send_spans(
        &mut self,
        spans: &mut Spans<'_>,
        until: Until<'_>,
        live: impl Fn() -> bool,
    ) -> Result<(), LinkError> {
        let mut last = Instant::now();
        while spans.left() > 0 {
            match spans.send(self.socket.as_fd()) {
                Ok(_) => last = Instant::now(),
                Err(error) => {
                    transient(error)?;
                    wait(self.socket.as_fd(), libc::POLLOUT, SLICE).map_err(LinkError::Io)?;
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
    ///
    /// # Errors
    /// The system's.
    pub fn readable_within(&self, limit: Duration) -> io::Result<bool> {
        wait(self.socket.as_fd(), libc::POLLIN, limit)
    }

    /// Whether the peer is known to have closed it. What it said before that can still be read.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let mut byte = [MaybeUninit::uninit()];
        self.readable_within(Duration::ZERO).is_ok_and(|readable| readable)
            && matches!(self.socket.peek(&mut byte), Ok(0) | Err(_))
    }

    /// Whether an idle connection can still be used: nothing is there to be read, not even its end.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        matches!(self.readable_within(Duration::ZERO), Ok(false))
    }
}

/// An error after which one tries again, or the end of the connection.
///
/// # Errors
/// [`LinkError::Closed`] or [`LinkError::Io`].
pub fn transient(error: io::Error) -> Result<(), LinkError> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
            Err(LinkError::Closed)
        }
        _ => Err(LinkError::Io(error)),
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Waits for an event on a socket; false when none came in time.
///
/// # Errors
/// The system's.
pub fn wait(socket: BorrowedFd<'_>, events: libc::c_short, limit: Duration) -> io::Result<bool> {
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
