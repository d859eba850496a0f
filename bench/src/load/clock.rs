//! A monotonic clock, anchored once to the wall clock. Times of a client are comparable with those that an engine of
//! the same host writes.

use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Serialize, Serializer};

/// An instant and the wall-clock time in nanoseconds at that instant.
static ANCHOR: OnceLock<(Instant, u64)> = OnceLock::new();

fn anchor() -> (Instant, u64) {
    *ANCHOR.get_or_init(|| {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (Instant::now(), nanos(since_epoch))
    })
}

/// Sufficient until the year 2554.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A point in time: nanoseconds since the Unix epoch, by a monotonic clock.
///
/// It is serialized as microseconds since the Unix epoch, as engines do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

impl Moment {
    pub(crate) fn now() -> Self {
        Self::of(Instant::now())
    }

    pub(crate) fn of(instant: Instant) -> Self {
        let (anchored, at) = anchor();
        Self(match instant.checked_duration_since(anchored) {
            Some(after) => at.saturating_add(nanos(after)),
            None => at.saturating_sub(nanos(anchored.duration_since(instant))),
        })
    }

    /// Microseconds since the Unix epoch.
    pub(crate) fn us(self) -> u64 {
        self.0 / 1_000
    }

    /// The time since `earlier`. Zero if `earlier` is later.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The moment `later` after this one.
    pub(crate) fn plus(self, later: Duration) -> Self {
        Self(self.0.saturating_add(nanos(later)))
    }

    /// The instant for a timer.
    pub(crate) fn instant(self) -> Instant {
        let (anchored, at) = anchor();
        match self.0.checked_sub(at) {
            Some(after) => anchored + Duration::from_nanos(after),
            None => anchored.checked_sub(Duration::from_nanos(at - self.0)).unwrap_or(anchored),
        }
    }
}

impl Serialize for Moment {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.us())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_an_instant_and_a_time_of_day() {
        let instant = Instant::now();
        let moment = Moment::of(instant);
        assert_eq!(moment.instant(), instant);
        assert_eq!(moment.plus(Duration::from_micros(7)).since(moment), Duration::from_micros(7));
        assert_eq!(moment.since(moment.plus(Duration::from_secs(1))), Duration::ZERO);
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        // One hour: no clock is adjusted by that much during a test.
        assert!(u128::from(moment.us()).abs_diff(wall.as_micros()) < 3_600_000_000);
        assert!(Moment::now() >= moment);
    }
}
