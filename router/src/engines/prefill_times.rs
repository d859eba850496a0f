//! How long an engine's prefills take, by the size of their request: when the reply to a cancelled prefill is due.
//!
//! The estimator is that of TCP's round-trip times (RFC 6298): a smoothed mean, and the smoothed deviation from it. A
//! time includes the wait inside the engine, so the estimate follows its load. It is kept per quarter of a power of
//! two of the request's bytes. Cached prompts, or a changing load, increase the deviation.
//!
//! ```text
//!               expected - bound/2   expected
//! ──────────────────────┼────────────────┼──────────────▶ time since the prefill was sent
//!  half-close at once   │  wait for the reply, at most for the bound; then half-close
//! ```
//!
//! A stock engine drops a finished reply if it sees the half-close before it has written the reply, and the reply is
//! the only copy of the handoff. The rule keeps both possible instants of a half-close, now and after the bound, half a
//! bound away from the expected reply. If the deviation exceeds the bound, both are equally dangerous, and nothing is
//! gained by a wait.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Powers of two with sizes of their own: 2^8 (256 bytes) to 2^25 (32 MiB, the default bound of a body).
const OCTAVE_MIN: u32 = 8;
const OCTAVES: usize = 18;
/// Sizes per power of two: within one of them a prefill's time varies by a fifth at most.
const PER_OCTAVE: usize = 4;
/// Weights of a new time in the mean and of its error in the deviation, as shifts: 1/8 and 1/4 (RFC 6298, 2.3).
const MEAN_SHIFT: u32 = 3;
const DEVIATION_SHIFT: u32 = 2;

/// The times of one engine: 576 bytes, allocated with its first time.
#[derive(Debug, Default)]
pub(crate) struct PrefillTimes(OnceLock<Box<[AtomicU64]>>);

/// When the reply to a prefill is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefillEstimate {
    /// From the request to the reply.
    pub expected: Duration,
    /// Mean deviation of earlier replies from their estimate.
    pub deviation: Duration,
}

impl PrefillTimes {
    /// Adds the time of a prefill whose request has this many bytes. Returns the estimate before.
    pub(crate) fn record(&self, bytes: usize, took: Duration) -> Option<PrefillEstimate> {
        let times = self.0.get_or_init(|| (0..OCTAVES * PER_OCTAVE).map(|_| AtomicU64::new(0)).collect());
        let time_us = u32::try_from(took.as_micros()).unwrap_or(u32::MAX).max(1);
        let slot = &times[size_class(bytes)];
        let before = slot.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |packed| {
            Some(
                PrefillEstimate::of(packed)
                    .map_or_else(|| pack(time_us, time_us / 2), |before| before.with(time_us)),
            )
        });
        PrefillEstimate::of(before.unwrap_or_default())
    }

    /// The estimate for a request of this many bytes; `None` without a time of this size.
    pub(crate) fn estimate(&self, bytes: usize) -> Option<PrefillEstimate> {
        PrefillEstimate::of(self.0.get()?[size_class(bytes)].load(Ordering::Relaxed))
    }
}

impl PrefillEstimate {
    /// Whether the reply to a prefill is worth a wait of at most `bound`, when its client leaves after `elapsed`.
    pub(crate) fn is_worth_wait(self, elapsed: Duration, bound: Duration) -> bool {
        !bound.is_zero() && self.deviation <= bound && elapsed + bound / 2 >= self.expected
    }

    /// The difference between the expected time and the actual one.
    pub(crate) fn error(self, took: Duration) -> Duration {
        self.expected.abs_diff(took)
    }

    fn of(packed: u64) -> Option<Self> {
        let us = |bits: u64| Duration::from_micros(bits & u64::from(u32::MAX));
        (packed != 0).then(|| Self { expected: us(packed >> 32), deviation: us(packed) })
    }

    /// The next state of a slot.
    fn with(self, time_us: u32) -> u64 {
        let us = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        let (mean, deviation) = (us(self.expected), us(self.deviation));
        let mean_now = approach(mean, time_us, MEAN_SHIFT);
        pack(mean_now, approach(deviation, mean.abs_diff(time_us), DEVIATION_SHIFT))
    }
}

/// `from`, moved towards `to` by a part of the difference.
fn approach(from: u32, to: u32, shift: u32) -> u32 {
    let step = from.abs_diff(to) >> shift;
    if to > from { from + step } else { from - step }
}

/// Microseconds of mean and deviation in one word. The mean is never 0, so an empty slot is.
fn pack(mean_us: u32, deviation_us: u32) -> u64 {
    u64::from(mean_us.max(1)) << 32 | u64::from(deviation_us)
}

/// The index of a size. Sizes below the first and above the last class belong to these.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(1 << OCTAVE_MIN);
    let octave = bytes.ilog2();
    // The two bits behind the leading one.
    let quarter = bytes >> (octave - 2) & (PER_OCTAVE - 1);
    let class = (octave - OCTAVE_MIN) as usize * PER_OCTAVE + quarter;
    class.min(OCTAVES * PER_OCTAVE - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_millis(20);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn steady(times: &PrefillTimes, bytes: usize, took: Duration) -> PrefillEstimate {
        for _ in 0..40 {
            times.record(bytes, took);
        }
        times.estimate(bytes).expect("it has times")
    }

    #[test]
    fn without_a_time_of_the_size_there_is_no_estimate() {
        let times = PrefillTimes::default();
        assert_eq!(times.estimate(1000), None);
        assert_eq!(times.record(1000, ms(50)), None);
        let first = PrefillEstimate { expected: ms(50), deviation: ms(25) };
        assert_eq!((times.estimate(1000), times.estimate(2000)), (Some(first), None));
        assert_eq!(times.record(1000, ms(50)), Some(first), "the estimate before");
    }

    #[test]
    fn the_first_times_are_in_doubt_and_steady_ones_are_not() {
        let times = PrefillTimes::default();
        times.record(1000, ms(50));
        let first = times.estimate(1000).expect("one time");
        assert!(!first.is_worth_wait(ms(49), BOUND), "{first:?}");
        let steady = steady(&times, 1000, ms(50));
        assert!(steady.deviation < ms(1) && steady.error(ms(50)) < ms(1), "{steady:?}");
        assert!(steady.is_worth_wait(ms(49), BOUND));
    }

    #[test]
    fn a_wait_begins_half_a_bound_before_the_expected_reply_and_has_no_end() {
        let estimate = PrefillEstimate { expected: ms(100), deviation: ms(2) };
        let waits = |elapsed| estimate.is_worth_wait(ms(elapsed), BOUND);
        assert_eq!([0, 50, 89].map(waits), [false; 3], "the reply is far");
        assert_eq!([90, 99, 100, 130, 9_000].map(waits), [true; 5], "it is due");
        assert!(!estimate.is_worth_wait(ms(100), Duration::ZERO), "off");
    }

    #[test]
    fn times_that_differ_by_more_than_the_bound_are_no_estimate() {
        let times = PrefillTimes::default();
        for n in 0..40 {
            // As with prompts of which every second one is cached.
            times.record(1000, ms(if n % 2 == 0 { 20 } else { 200 }));
        }
        let estimate = times.estimate(1000).expect("times");
        assert!(estimate.deviation > BOUND);
        assert!([10, 100, 110, 300].iter().all(|elapsed| !estimate.is_worth_wait(ms(*elapsed), BOUND)));
    }

    #[test]
    fn the_estimate_follows_the_load_of_the_engine() {
        let times = PrefillTimes::default();
        steady(&times, 1000, ms(50));
        let loaded = steady(&times, 1000, ms(400));
        assert!(loaded.error(ms(400)) < ms(5) && loaded.deviation < ms(5), "{loaded:?}");
        let idle = steady(&times, 1000, ms(50));
        assert!(idle.error(ms(50)) < ms(5) && idle.deviation < ms(5), "{idle:?}");
    }

    #[test]
    fn sizes_are_separate_by_a_quarter_of_an_octave_and_bounded() {
        assert_eq!([0, 1, 256, 319].map(size_class), [0; 4]);
        assert_eq!([320, 384, 448, 512].map(size_class), [1, 2, 3, 4]);
        assert_eq!([32 << 20, 56 << 20, 63 << 20, usize::MAX].map(size_class), [68, 71, 71, 71]);
        let all: Vec<_> = (0..usize::BITS).map(|bits| size_class(1 << bits)).collect();
        assert!(all.is_sorted() && all.iter().all(|class| *class < OCTAVES * PER_OCTAVE));
    }

    #[test]
    fn extreme_times_neither_overflow_nor_look_empty() {
        let times = PrefillTimes::default();
        for took in [Duration::ZERO, Duration::MAX, Duration::ZERO, Duration::MAX] {
            times.record(1, took);
            assert!(times.estimate(1).is_some());
        }
    }
}
