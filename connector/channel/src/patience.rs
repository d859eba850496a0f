//! How long a consumer waits for a read: so long for its bytes, and longer as long as its producer says that it still
//! computes them, which is bounded too.

use std::time::{Duration, Instant};

use baton_connector::limits::GROWING_MAX;
use baton_connector::transport::StopFlag;

use crate::link::{self, Link, LinkError, Until};
use crate::wire::{HEADER_BYTES, Header, Reply};

/// See the module's documentation.
#[derive(Debug)]
pub struct Patience<'a> {
    stop: &'a StopFlag,
    allowed: Duration,
    deadline: Instant,
    /// No sign of life is believed after that.
    computed_by: Instant,
}

impl<'a> Patience<'a> {
    /// For a read that moves so many bytes.
    #[must_use]
    pub fn new(link: &Link, bytes: usize, stop: &'a StopFlag) -> Self {
        let (allowed, now) = (link::longest_read(link.silence(), bytes), Instant::now());
        Self { stop, allowed, deadline: now + allowed, computed_by: now + GROWING_MAX }
    }

    /// What ends the next wait.
    #[must_use]
    pub fn until(&self) -> Until<'a> {
        Until::deadline(self.stop, self.deadline)
    }

    /// Waits until a header that has come is of something else than a sign of life.
    ///
    /// # Errors
    /// [`LinkError`]; the connection is out of step.
    pub fn outlast(&mut self, link: &mut Link, header: &mut [u8; HEADER_BYTES]) -> Result<(), LinkError> {
        while matches!(Header::decode(*header), Header { kind, len: 0 } if Reply::decode(kind, &[]) == Ok(Reply::NotYet))
        {
            let now = Instant::now();
            if now >= self.computed_by {
                return Err(LinkError::Silent(GROWING_MAX));
            }
            // Headers that come without a pause are read without a look at the flag.
            link.check(self.until(), now)?;
            self.deadline = now + self.allowed;
            link.receive(header, self.until())?;
        }
        Ok(())
    }
}
