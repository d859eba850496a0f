//! How fast a queue drains, and the `Retry-After` that follows from it. Pure.

use std::time::{Duration, Instant};

/// Minimum number of gaps before a request is refused because of them.
const GAPS_MIN: u32 = 8;
/// Weight of the newest gap: an average of about the last ten.
const NEWEST_WEIGHT: f64 = 0.2;
/// `Retry-After` where the pace is unknown, and its bounds.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);
const RETRY_AFTER_MIN: Duration = Duration::from_millis(100);
/// OpenAI's SDKs ignore more than 60 s.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// The pace at which requests leave a queue in which others still wait.
#[derive(Debug, Default)]
pub(crate) struct DrainRate {
    gap_s: f64,
    gaps: u32,
    last: Option<Instant>,
    refused: u32,
}

impl DrainRate {
    /// Records a served request. The next gap measures how fast the queue drains, unless [`Self::pause`] follows.
    pub(crate) fn served(&mut self, now: Instant) {
        if let Some(last) = self.last {
            let gap = now.saturating_duration_since(last).as_secs_f64();
            self.gap_s = if self.gaps == 0 { gap } else { self.gap_s + NEWEST_WEIGHT * (gap - self.gap_s) };
            self.gaps = self.gaps.saturating_add(1);
        }
        self.last = Some(now);
    }

    /// Records that no other request waits.
    pub(crate) fn pause(&mut self) {
        self.last = None;
    }

    /// Expected wait of a request with so many ahead of it; `None` while the pace is unknown.
    pub(crate) fn expected_wait(&self, ahead: usize) -> Option<Duration> {
        (self.gaps >= GAPS_MIN).then(|| Duration::try_from_secs_f64(self.gap_s * (ahead + 1) as f64).ok())?
    }

    /// `Retry-After` of a refused request with so many ahead of it. A spread of a quarter either way separates the
    /// retries of requests that were refused together: SDKs obey to the millisecond.
    pub(crate) fn retry_after(&mut self, ahead: usize) -> Duration {
        self.refused = self.refused.wrapping_add(1);
        // Multiples of the golden ratio are spread as far apart as possible, whatever their number.
        let spread = 0.75 + 0.5 * (f64::from(self.refused) * 0.618_033_988_749_895).fract();
        let after = self.expected_wait(ahead).unwrap_or(RETRY_AFTER_DEFAULT);
        after.clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX).mul_f64(spread).min(RETRY_AFTER_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(gap: Duration, times: u32) -> DrainRate {
        let (mut drain, start) = (DrainRate::default(), Instant::now());
        (0..=times).for_each(|n| drain.served(start + gap * n));
        drain
    }

    #[test]
    fn no_drain_rate_is_estimated_before_enough_samples() {
        assert_eq!(drained(Duration::from_secs(1), GAPS_MIN - 1).expected_wait(3), None);
        assert!(drained(Duration::from_secs(1), GAPS_MIN).expected_wait(3).is_some());
    }

    #[test]
    fn a_wait_is_as_many_gaps_as_there_are_requests_ahead_and_one() {
        let wait = drained(Duration::from_millis(200), 20).expected_wait(9).expect("known");
        assert!((wait.as_secs_f64() - 2.0).abs() < 0.01, "{wait:?}");
    }

    #[test]
    fn idle_time_between_two_rushes_is_no_gap() {
        let mut drain = drained(Duration::from_millis(10), 20);
        let later = Instant::now() + Duration::from_secs(3600);
        drain.served(later);
        drain.pause();
        drain.served(later + Duration::from_secs(3600));
        let after_rest = drain.gaps;
        drain.served(later + Duration::from_secs(3601));
        assert_eq!(drain.gaps, after_rest + 1);
    }

    #[test]
    fn refused_requests_get_spread_retry_times_within_bounds() {
        let mut drain = drained(Duration::from_millis(100), 20);
        let delays: Vec<_> = (0..100).map(|_| drain.retry_after(19)).collect();
        let distinct: std::collections::BTreeSet<_> = delays.iter().collect();
        assert!(distinct.len() > 90, "{}", distinct.len());
        assert!(delays.iter().all(|t| (1.4..2.6).contains(&t.as_secs_f64())), "{delays:?}");
        assert!(drain.retry_after(1_000_000) <= RETRY_AFTER_MAX);
        assert!(drain.retry_after(0) >= RETRY_AFTER_MIN.mul_f64(0.7));
    }
}
