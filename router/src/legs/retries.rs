//! The budget of retries, for the whole router.
//!
//! A retry is allowed while concurrent retries are below a share of the requests in flight; beyond it, a fixed number
//! per second is allowed. `attempts` limits the attempts of one request. Without a limit on all requests together,
//! engines that fail for lack of capacity would get more work the more they fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use baton_connector::Time;

use crate::config::RetriesConfig;

/// The part of the budget in use.
#[derive(Debug, Default)]
pub(crate) struct RetryBudget {
    at_once: AtomicUsize,
    /// The second, shifted by 32, and the number of retries allowed in it.
    second: AtomicU64,
}

/// One retry, until it is dropped.
#[derive(Debug)]
pub(crate) struct RetryPermit(Arc<RetryBudget>);

impl RetryBudget {
    /// A permit for one more attempt; `None` when the budget is exhausted.
    pub(crate) fn take(
        self: &Arc<Self>,
        in_flight: usize,
        now: Time,
        terms: &RetriesConfig,
    ) -> Option<RetryPermit> {
        let at_once = self.at_once.fetch_add(1, Ordering::Relaxed);
        let retry = RetryPermit(Arc::clone(self));
        let share = in_flight.saturating_mul(terms.budget_percent as usize) / 100;
        (at_once < share || self.spend(now, terms.min_per_second)).then_some(retry)
    }

    /// Takes one retry from this second's allowance.
    fn spend(&self, now: Time, per_second: u32) -> bool {
        let second = now.0 / 1_000_000;
        let spent = self.second.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
            let spent = if word >> 32 == second { word & u64::from(u32::MAX) } else { 0 };
            (spent < u64::from(per_second)).then_some(second << 32 | (spent + 1))
        });
        spent.is_ok()
    }
}

impl Drop for RetryPermit {
    fn drop(&mut self) {
        self.0.at_once.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The pause after `attempts` attempts; `jitter` is a random number from 0 to 1.
pub(crate) fn pause(attempts: usize, jitter: f64, terms: &RetriesConfig) -> Duration {
    let Some(doublings) = attempts.checked_sub(2) else { return Duration::ZERO };
    let whole = Duration::from_millis(terms.pause_ms).saturating_mul(1 << doublings.min(16));
    whole.min(Duration::from_millis(terms.pause_max_ms)).mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: RetriesConfig =
        RetriesConfig { budget_percent: 20, min_per_second: 2, pause_ms: 25, pause_max_ms: 60 };

    #[test]
    fn the_retry_budget_is_a_share_of_requests_plus_a_rate() {
        let budget = Arc::new(RetryBudget::default());
        let now = Time::ZERO.after(Duration::from_secs(5));
        let taken: Vec<RetryPermit> = (0..100).map_while(|_| budget.take(50, now, &TERMS)).collect();
        assert_eq!(taken.len(), 12, "a fifth of 50, and 2 in this second");
        assert!(budget.take(50, now, &TERMS).is_none());
        assert!(budget.take(50, now.after(Duration::from_secs(1)), &TERMS).is_some(), "the next second");
        drop(taken);
        assert!(budget.take(50, now, &TERMS).is_some(), "retries that ended are returned");
        assert_eq!(budget.at_once.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_zero_budget_allows_no_retry() {
        let none = RetriesConfig { budget_percent: 0, min_per_second: 0, ..TERMS };
        assert!(Arc::new(RetryBudget::default()).take(1000, Time::ZERO, &none).is_none());
    }

    #[test]
    fn the_first_retry_is_immediate_and_later_ones_back_off_up_to_a_bound() {
        let ms = |attempts, jitter| pause(attempts, jitter, &TERMS).as_millis();
        assert_eq!([ms(0, 1.0), ms(1, 1.0), ms(2, 1.0), ms(3, 1.0), ms(4, 1.0)], [0, 0, 25, 50, 60]);
        assert_eq!((ms(3, 0.0), ms(60, 1.0)), (25, 60));
    }
}
