//! The two system calls that move blocks: a gathering send from, and a scattering receive into, a pool.
#![allow(
    unsafe_code,
    reason = "sendmsg and recvmsg take raw pointers into a pool that other threads also use"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use baton_connector::BlockId;
use baton_connector::region::Region;

/// Maximum number of spans of one system call: Linux allows 1,024 (UIO_MAXIOV). The rest follows with the next call.
const SPANS_MAX: usize = 1_024;

/// Memory to send from or receive into, in order: blocks of a pool, and small buffers around them.
///
/// The spans borrow their memory, so that no span outlives it.
#[derive(Debug)]
pub struct Spans<'a> {
    list: Vec<libc::iovec>,
    next: usize,
    remaining: usize,
    _memory: std::marker::PhantomData<&'a Region>,
}

impl<'a> Spans<'a> {
    /// An empty list with this capacity.
    #[must_use]
    pub fn with_capacity(spans: usize) -> Self {
        Self { list: Vec::with_capacity(spans), next: 0, remaining: 0, _memory: std::marker::PhantomData }
    }

    /// Bytes that are not transferred yet.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Appends a whole block. Adjacent memory becomes one span.
    ///
    /// # Panics
    /// When the block is outside the pool.
    pub fn push_block(&mut self, region: &'a Region, block: BlockId) {
        self.push_part(region, block, 0, region.block_bytes());
    }

    /// Appends `len` bytes of a block from `offset` on. Adjacent memory becomes one span.
    ///
    /// # Panics
    /// When the block is outside the pool, or the bytes are outside the block.
    pub fn push_part(&mut self, region: &'a Region, block: BlockId, offset: usize, len: usize) {
        let inside = offset.checked_add(len).is_some_and(|end| end <= region.block_bytes());
        assert!(inside, "{len} bytes from {offset} on of a block of {}", region.block_bytes());
        let start = region.block_ptr(block).wrapping_add(offset);
        match self.list.last_mut() {
            Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == start => {
                last.iov_len += len;
            }
            _ => self.list.push(libc::iovec { iov_base: start.cast(), iov_len: len }),
        }
        self.remaining += len;
    }

    /// Appends bytes to send.
    pub fn push_bytes(&mut self, bytes: &'a [u8]) {
        self.list.push(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
        self.remaining += bytes.len();
    }

    /// Appends a small buffer to receive into.
    pub fn push_buffer(&mut self, buffer: &'a mut [u8]) {
        self.list.push(libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() });
        self.remaining += buffer.len();
    }

    fn advance(&mut self, mut moved: usize) {
        self.remaining -= moved;
        while moved > 0 {
            let span = &mut self.list[self.next];
            if moved < span.iov_len {
                span.iov_base = span.iov_base.cast::<u8>().wrapping_add(moved).cast();
                span.iov_len -= moved;
                return;
            }
            moved -= span.iov_len;
            self.next += 1;
        }
    }

    fn message(&mut self) -> libc::msghdr {
        let rest = &mut self.list[self.next..];
        // SAFETY: all zeros is a valid `msghdr`: no name, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = rest.as_mut_ptr();
        message.msg_iovlen = rest.len().min(SPANS_MAX);
        message
    }

    /// Sends as many bytes as the socket accepts without waiting, and returns their number.
    ///
    /// # Errors
    /// That of the system call; `WouldBlock` when the socket accepts nothing now.
    pub fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let message = self.message();
        // SAFETY: every span points at live memory of its length (the spans borrow it). The kernel only reads. The
        // blocks are leased and therefore not written (invariant 3). Blocks of an ended lease may change during the
        // call; the verdict refuses these bytes.
        let sent = unsafe {
            libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
        };
        self.advance_by_result(sent)
    }

    /// Receives until every span is full or the socket's receive timeout has passed. Returns the number of bytes, which
    /// is 0 when the peer has closed the connection.
    ///
    /// # Errors
    /// That of the system call; `WouldBlock` when no byte arrived in time.
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut message = self.message();
        // SAFETY: every span points at live memory of its length (the spans borrow it). The blocks are landing: only
        // this read accesses them until its end (invariant 3).
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_WAITALL) };
        self.advance_by_result(received)
    }

    fn advance_by_result(&mut self, result: isize) -> io::Result<usize> {
        let moved = usize::try_from(result).map_err(|_| io::Error::last_os_error())?;
        self.advance(moved);
        Ok(moved)
    }
}
