//! How fast a queue drains, and so when somebody who is refused had better come back. Pure.

use std::time::{Duration, Instant};

/// Gaps that must have been seen before anybody is refused because of them.
const KNOWN_AFTER: u32 = 8;
/// Weight of the newest gap: of the last ten or so.
const NEWEST: f64 = 0.2;
/// When to come back, where nothing is known or the estimate is shorter or longer.
const COME_BACK: Duration = Duration::from_secs(1);
const COME_BACK_MIN: Duration = Duration::from_millis(100);
/// OpenAI's SDKs do not obey more than 60 s.
const COME_BACK_MAX: Duration = Duration::from_secs(60);

/// The pace at which requests leave a queue in which others still wait.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    gap_s: f64,
    gaps: u32,
    last: Option<Instant>,
    refused: u32,
}

impl Drain {
    /// One request was served. `others_wait`: the next gap tells how fast the queue drains.
    pub(crate) fn served(&mut self, now: Instant, others_wait: bool) {
        if let Some(last) = self.last {
            let gap = now.saturating_duration_since(last).as_secs_f64();
            self.gap_s = if self.gaps == 0 { gap } else { self.gap_s + NEWEST * (gap - self.gap_s) };
            self.gaps = self.gaps.saturating_add(1);
        }
        self.last = others_wait.then_some(now);
    }

    /// How long a request waits that has so many ahead of it; `None` as long as that is not known.
    pub(crate) fn wait(&self, ahead: usize) -> Option<Duration> {
        (self.gaps >= KNOWN_AFTER)
            .then(|| Duration::try_from_secs_f64(self.gap_s * (ahead + 1) as f64).ok())?
    }

    /// When somebody who is refused with so many ahead had better come back. Spread by a quarter either way:
    /// SDKs obey to the millisecond, and those who were refused together would come back together.
    pub(crate) fn come_back(&mut self, ahead: usize) -> Duration {
        self.refused = self.refused.wrapping_add(1);
        // Multiples of the golden ratio lie as far apart as can be, however many there are.
        let spread = 0.75 + 0.5 * (f64::from(self.refused) * 0.618_033_988_749_895).fract();
        let after = self.wait(ahead).unwrap_or(COME_BACK);
        after.clamp(COME_BACK_MIN, COME_BACK_MAX).mul_f64(spread).min(COME_BACK_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(gap: Duration, times: u32) -> Drain {
        let (mut drain, start) = (Drain::default(), Instant::now());
        (0..=times).for_each(|n| drain.served(start + gap * n, true));
        drain
    }

    #[test]
    fn nothing_is_claimed_before_enough_is_known() {
        assert_eq!(drained(Duration::from_secs(1), KNOWN_AFTER - 1).wait(3), None);
        assert!(drained(Duration::from_secs(1), KNOWN_AFTER).wait(3).is_some());
    }

    #[test]
    fn a_wait_is_as_many_gaps_as_there_are_requests_ahead_and_one() {
        let wait = drained(Duration::from_millis(200), 20).wait(9).expect("known");
        assert!((wait.as_secs_f64() - 2.0).abs() < 0.01, "{wait:?}");
    }

    #[test]
    fn idle_time_between_two_rushes_is_no_gap() {
        let mut drain = drained(Duration::from_millis(10), 20);
        let later = Instant::now() + Duration::from_secs(3600);
        drain.served(later, false);
        drain.served(later + Duration::from_secs(3600), true);
        let after_rest = drain.gaps;
        drain.served(later + Duration::from_secs(3601), true);
        assert_eq!(drain.gaps, after_rest + 1);
    }

    #[test]
    fn those_who_are_refused_are_told_different_times_within_bounds() {
        let mut drain = drained(Duration::from_millis(100), 20);
        let told: Vec<_> = (0..100).map(|_| drain.come_back(19)).collect();
        let distinct: std::collections::BTreeSet<_> = told.iter().collect();
        assert!(distinct.len() > 90, "{}", distinct.len());
        assert!(told.iter().all(|t| (1.4..2.6).contains(&t.as_secs_f64())), "{told:?}");
        assert!(drain.come_back(1_000_000) <= COME_BACK_MAX);
        assert!(drain.come_back(0) >= COME_BACK_MIN.mul_f64(0.7));
    }
}
