//! Bounded reads and writes on one socket. Every wait is divided into slices. Between two slices the stop flag, the
//! lease and the time since the last byte are checked.
#![allow(unsafe_code, reason = "poll(2); one call")]

use std::io::{self, ErrorKind, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use socket2::Socket;

use crate::scatter::Spans;

/// Longest single wait, and therefore the longest delay until a raised stop flag takes effect.
pub const SLICE: Duration = Duration::from_millis(40);

/// The time limit of a read with steady progress: six times `silence` (by default a lease duration), and the time on
/// the slowest acceptable network.
#[must_use]
pub fn longest_read(silence: Duration, bytes: usize) -> Duration {
    /// Bytes per second.
    const SLOWEST: u64 = 1 << 20;
    silence * 6 + Duration::from_secs(bytes as u64 / SLOWEST)
}

/// Why a connection cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The peer closed or reset the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// No byte was transferred for this long, or a message missed its deadline.
    #[error("silent for {0:?}")]
    Silent(Duration),
    /// The caller raised the stop flag.
    #[error("stopped")]
    Stopped,
    /// The bytes may not be sent any more.
    #[error("the lease ended during a batch")]
    LeaseEnded,
    /// A system error.
    #[error(transparent)]
    Io(io::Error),
    /// Bytes that are not a message.
    #[error(transparent)]
    Wire(#[from] crate::wire::WireError),
    /// A message that is not allowed here.
    #[error("the response does not match the request")]
    Unexpected,
}

/// One connection.
#[derive(Debug)]
pub struct ChannelSocket {
    socket: Socket,
    silence: Duration,
}

/// The conditions that end a wait.
#[derive(Clone, Copy, Debug)]
pub struct WaitLimit<'a> {
    stop: &'a AtomicBool,
    /// The deadline of the whole message.
    deadline: Option<Instant>,
}

impl<'a> WaitLimit<'a> {
    /// Waits while bytes arrive, until the flag is raised.
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

impl ChannelSocket {
    /// Takes over a connected stream socket: blocking, with a receive timeout of one slice.
    ///
    /// # Errors
    /// A system error.
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

    /// Checks whether the wait may continue: not stopped, not past the deadline, and not silent since `last`.
    ///
    /// # Errors
    /// `Stopped` or `Silent`.
    pub fn check(&self, until: WaitLimit<'_>, last: Instant) -> Result<(), ChannelError> {
        if until.stop.load(Ordering::Acquire) {
            return Err(ChannelError::Stopped);
        }
        let now = Instant::now();
        if now.duration_since(last) >= self.silence || until.deadline.is_some_and(|deadline| now >= deadline)
        {
            return Err(ChannelError::Silent(self.silence));
        }
        Ok(())
    }

    /// Fills a small buffer.
    ///
    /// # Errors
    /// [`ChannelError`]; the connection is out of step.
    pub fn receive(&mut self, mut buffer: &mut [u8], until: WaitLimit<'_>) -> Result<(), ChannelError> {
        let mut last = Instant::now();
        while !buffer.is_empty() {
            match self.socket.read(buffer) {
                Ok(0) => return Err(ChannelError::Closed),
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
    /// [`ChannelError`]; the connection is out of step.
    pub fn receive_spans(&mut self, spans: &mut Spans<'_>, until: WaitLimit<'_>) -> Result<(), ChannelError> {
        let mut last = Instant::now();
        while spans.remaining() > 0 {
            match spans.receive(self.socket.as_fd()) {
                Ok(0) => return Err(ChannelError::Closed),
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
    /// [`ChannelError`]; the connection is out of step.
    pub fn send(&mut self, bytes: &[u8], until: WaitLimit<'_>) -> Result<(), ChannelError> {
        let mut spans = Spans::with_capacity(1);
        spans.push_bytes(bytes);
        self.send_spans(&mut spans, until, || true)
    }

    /// Sends all spans; after every wait `live` returns whether the bytes may still be sent.
    ///
    /// # Errors
    /// [`ChannelError`]; `spans` contains the unsent rest.
    pub fn send_spans(
        &mut self,
        spans: &mut Spans<'_>,
        until: WaitLimit<'_>,
        live: impl Fn() -> bool,
    ) -> Result<(), ChannelError> {
        let mut last = Instant::now();
        while spans.remaining() > 0 {
            match spans.send(self.socket.as_fd()) {
                Ok(_) => last = Instant::now(),
                Err(error) => {
                    transient(error)?;
                    wait(self.socket.as_fd(), libc::POLLOUT, SLICE).map_err(ChannelError::Io)?;
                    self.check(until, last)?;
                    if !live() {
                        return Err(ChannelError::LeaseEnded);
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits in one system call for a byte or the end of the connection; false after `limit`.
    ///
    /// # Errors
    /// A system error.
    pub fn readable_within(&self, limit: Duration) -> io::Result<bool> {
        wait(self.socket.as_fd(), libc::POLLIN, limit)
    }

    /// Whether the peer has closed the connection and every byte is read.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let mut byte = [MaybeUninit::uninit()];
        self.readable_within(Duration::ZERO).is_ok_and(|readable| readable)
            && matches!(self.socket.peek(&mut byte), Ok(0) | Err(_))
    }

    /// Whether an idle connection can still be used: there is nothing to read, not even its end.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        matches!(self.readable_within(Duration::ZERO), Ok(false))
    }
}

/// Maps an I/O error to a retry or to the end of the connection.
///
/// # Errors
/// [`ChannelError::Closed`] or [`ChannelError::Io`].
pub fn transient(error: io::Error) -> Result<(), ChannelError> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
            Err(ChannelError::Closed)
        }
        _ => Err(ChannelError::Io(error)),
    }
}

impl AsFd for ChannelSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Waits for an event on a socket; false after `limit`.
///
/// # Errors
/// A system error.
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
