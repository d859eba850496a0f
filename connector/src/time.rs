//! The time of the machines: microseconds on the owner's monotonic clock.
//!
//! A [`Time`] never crosses a process boundary; a [`Duration`] ("time left") does.

use std::time::Duration;

/// A point on a monotonic clock, in microseconds since that clock's arbitrary start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// The clock's start.
    pub const ZERO: Self = Self(0);

    /// The time `duration` later; saturates at the end of the clock (584,000 years).
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)))
    }

    /// The duration since `earlier`; zero when this time is not later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_added_and_subtracted_is_the_same_duration() {
        let start = Time(5);
        assert_eq!(start.after(Duration::from_millis(3)).since(start), Duration::from_millis(3));
        assert_eq!(start.since(start.after(Duration::from_secs(1))), Duration::ZERO);
        assert_eq!(Time(u64::MAX).after(Duration::from_secs(1)), Time(u64::MAX));
    }
}
