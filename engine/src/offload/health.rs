//! Whether the disk can be trusted with work: after some failures in a row it is left alone for a while, and tried out
//! before it is used again.

use std::time::{Duration, Instant};

use super::Fault;

/// Failures in a row after which the disk is left alone.
pub(super) const FAILURES_MAX: u32 = 3;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Health {
    failures: u32,
    rests_until: Option<Instant>,
    rest: Duration,
}

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing.
    None,
    /// It is left alone from now on.
    Rests,
}

impl Health {
    pub(super) fn new(rest: Duration) -> Self {
        Self { failures: 0, rests_until: None, rest }
    }

    /// When it is to be tried out, if it is being left alone.
    pub(super) fn rests_until(&self) -> Option<Instant> {
        self.rests_until
    }

    /// The disk did, or did not do, what it was asked for. A file that is missing or damaged says nothing about the
    /// disk.
    pub(super) fn heard(&mut self, outcome: Result<(), Fault>, now: Instant) -> Turn {
        match outcome {
            Ok(()) => {
                self.failures = 0;
                Turn::None
            }
            Err(Fault::Full | Fault::Io | Fault::Slow) => {
                self.failures += 1;
                if self.failures < FAILURES_MAX || self.rests_until.is_some() {
                    return Turn::None;
                }
                self.rests_until = Some(now + self.rest);
                Turn::Rests
            }
            Err(Fault::Missing | Fault::Corrupt | Fault::Refused | Fault::Resting | Fault::Broken) => {
                Turn::None
            }
        }
    }

    /// It was tried out; says whether it works again.
    pub(super) fn tried(&mut self, outcome: Result<(), Fault>, now: Instant) -> bool {
        if outcome.is_ok() {
            (self.failures, self.rests_until) = (0, None);
        } else {
            self.rests_until = Some(now + self.rest);
        }
        outcome.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_fails_in_a_row_is_left_alone_and_tried_out_before_it_is_used_again() {
        let (start, rest) = (Instant::now(), Duration::from_secs(30));
        let mut health = Health::new(rest);
        let io = Err(Fault::Io);
        assert_eq!([io, io, Ok(()), io, Err(Fault::Full)].map(|o| health.heard(o, start)), [Turn::None; 5]);
        assert_eq!(health.heard(Err(Fault::Slow), start), Turn::Rests);
        assert_eq!(health.heard(io, start), Turn::None, "once");
        assert_eq!(health.rests_until(), Some(start + rest));
        assert!(!health.tried(io, start + rest));
        assert_eq!(health.rests_until(), Some(start + 2 * rest));
        assert!(health.tried(Ok(()), start + 2 * rest));
        assert_eq!(health.rests_until(), None);
    }

    #[test]
    fn a_file_that_is_missing_or_damaged_says_nothing_about_the_disk() {
        let mut health = Health::new(Duration::from_secs(1));
        for _ in 0..10 {
            assert_eq!(health.heard(Err(Fault::Missing), Instant::now()), Turn::None);
            assert_eq!(health.heard(Err(Fault::Corrupt), Instant::now()), Turn::None);
        }
    }
}
