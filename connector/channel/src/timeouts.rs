//! The time limits of a consumer's read. The limit for its bytes restarts while the producer reports that it still
//! computes. A second limit bounds that.

use std::time::{Duration, Instant};

use baton_connector::limits::GROWING_MAX;
use baton_connector::transport::StopFlag;

use crate::socket::{self, ChannelError, ChannelSocket, WaitLimit};
use crate::wire::{HEADER_BYTES, Header, Reply};

/// The time limits of one read.
#[derive(Debug)]
pub struct ChannelTimeouts<'a> {
    stop: &'a StopFlag,
    timeout: Duration,
    deadline: Instant,
    /// [`Reply::NotYet`] does not extend the read after this time.
    compute_deadline: Instant,
}

impl<'a> ChannelTimeouts<'a> {
    /// The limits of a read of `bytes` bytes.
    #[must_use]
    pub fn new(socket: &ChannelSocket, bytes: usize, stop: &'a StopFlag) -> Self {
        let (timeout, now) = (socket::longest_read(socket.silence(), bytes), Instant::now());
        Self { stop, timeout, deadline: now + timeout, compute_deadline: now + GROWING_MAX }
    }

    /// The limit of the next wait.
    #[must_use]
    pub fn wait_limit(&self) -> WaitLimit<'a> {
        WaitLimit::deadline(self.stop, self.deadline)
    }

    /// Replaces `header` by the next one while it is [`Reply::NotYet`].
    ///
    /// # Errors
    /// [`ChannelError`]; the connection is out of step.
    pub fn skip_not_yet(
        &mut self,
        socket: &mut ChannelSocket,
        header: &mut [u8; HEADER_BYTES],
    ) -> Result<(), ChannelError> {
        while matches!(Header::decode(*header), Header { kind, len: 0 } if Reply::decode(kind, &[]) == Ok(Reply::NotYet))
        {
            let now = Instant::now();
            if now >= self.compute_deadline {
                return Err(ChannelError::Silent(GROWING_MAX));
            }
            // `receive` does not check the stop flag while headers arrive without a pause.
            socket.check(self.wait_limit(), now)?;
            self.deadline = now + self.timeout;
            socket.receive(header, self.wait_limit())?;
        }
        Ok(())
    }
}
