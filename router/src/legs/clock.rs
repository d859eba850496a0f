//! The router's time: microseconds since its start, the unit of the pure state machines.

use std::time::{Duration, Instant};

use baton_connector::Time;

/// Measures the time since its start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    /// A clock that starts now.
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// Microseconds since the start.
    pub(crate) fn now(self) -> Time {
        self.time(Instant::now())
    }

    /// An instant on this clock; one before its start is the start.
    pub(crate) fn time(self, instant: Instant) -> Time {
        let since = instant.saturating_duration_since(self.0);
        Time(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
    }

    /// A time of this clock, for timers.
    pub(crate) fn instant(self, time: Time) -> Instant {
        self.0 + Duration::from_micros(time.0)
    }
}
