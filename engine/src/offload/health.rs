//! The health of the disk. After some failures in a row the disk is suspended for a while, and probed before it is
//! used again.

use std::time::{Duration, Instant};

use super::OffloadFault;

/// Failures in a row that suspend the disk.
pub(super) const FAILURES_MAX: u32 = 3;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct DiskHealth {
    failures: u32,
    suspended_until: Option<Instant>,
    suspension: Duration,
}

/// A change of the disk's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HealthChange {
    /// No change.
    None,
    /// The disk is suspended from now on.
    Suspended,
}

impl DiskHealth {
    pub(super) fn new(suspension: Duration) -> Self {
        Self { failures: 0, suspended_until: None, suspension }
    }

    /// When to probe the disk, if it is suspended.
    pub(super) fn suspended_until(&self) -> Option<Instant> {
        self.suspended_until
    }

    /// Records the outcome of a disk operation. A missing or damaged file is no failure of the disk.
    pub(super) fn record(&mut self, outcome: Result<(), OffloadFault>, now: Instant) -> HealthChange {
        match outcome {
            Ok(()) => {
                self.failures = 0;
                HealthChange::None
            }
            Err(OffloadFault::Full | OffloadFault::Io | OffloadFault::Slow) => {
                self.failures += 1;
                if self.failures < FAILURES_MAX || self.suspended_until.is_some() {
                    return HealthChange::None;
                }
                self.suspended_until = Some(now + self.suspension);
                HealthChange::Suspended
            }
            Err(
                OffloadFault::Missing
                | OffloadFault::Corrupt
                | OffloadFault::Refused
                | OffloadFault::Suspended
                | OffloadFault::Broken,
            ) => HealthChange::None,
        }
    }

    /// Records the outcome of a probe. Returns whether the disk works again.
    pub(super) fn record_probe(&mut self, outcome: Result<(), OffloadFault>, now: Instant) -> bool {
        if outcome.is_ok() {
            (self.failures, self.suspended_until) = (0, None);
        } else {
            self.suspended_until = Some(now + self.suspension);
        }
        outcome.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_suspended_after_repeated_failures_and_probed_before_reuse() {
        let (start, suspension) = (Instant::now(), Duration::from_secs(30));
        let mut health = DiskHealth::new(suspension);
        let io = Err(OffloadFault::Io);
        assert_eq!(
            [io, io, Ok(()), io, Err(OffloadFault::Full)].map(|o| health.record(o, start)),
            [HealthChange::None; 5]
        );
        assert_eq!(health.record(Err(OffloadFault::Slow), start), HealthChange::Suspended);
        assert_eq!(health.record(io, start), HealthChange::None, "once");
        assert_eq!(health.suspended_until(), Some(start + suspension));
        assert!(!health.record_probe(io, start + suspension));
        assert_eq!(health.suspended_until(), Some(start + 2 * suspension));
        assert!(health.record_probe(Ok(()), start + 2 * suspension));
        assert_eq!(health.suspended_until(), None);
    }

    #[test]
    fn a_missing_or_damaged_file_is_no_disk_failure() {
        let mut health = DiskHealth::new(Duration::from_secs(1));
        for _ in 0..10 {
            assert_eq!(health.record(Err(OffloadFault::Missing), Instant::now()), HealthChange::None);
            assert_eq!(health.record(Err(OffloadFault::Corrupt), Instant::now()), HealthChange::None);
        }
    }
}
