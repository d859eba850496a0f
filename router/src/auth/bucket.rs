//! A token bucket stored as one number: the moment at which it will be full again (GCRA, as ATM networks meter
//! cells). Pure: the time is an argument, and every step is one compare-and-swap of that number.
//!
//! ```text
//!      now                          full again
//!  ─────┼──────────────────────────────┼───────▶ time
//!       └── tokens taken, as time ─────┘ at most a minute
//! ```
//!
//! Invariants:
//! - In any span of time t, at most `per_minute × (1 + t / minute)` tokens are taken.
//! - Returned tokens never exceed what time has not yet refilled by itself.
//! - Tokens used beyond those taken must be refilled before another take succeeds, up to a day's worth. So an
//!   engine that counts wrongly locks a key out for a day at most.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::keys::hex;
use crate::config::RateLimitsConfig;

/// One limit per minute. Its capacity is one minute's worth.
#[derive(Debug)]
pub(crate) struct Bucket {
    per_minute: u64,
    /// Nanoseconds of the caller's clock.
    full_at: AtomicU64,
}

/// The level of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BucketLevel {
    pub limit: u64,
    pub remaining: u64,
    /// Time until it is full again.
    pub reset: Duration,
}

impl BucketLevel {
    /// The level of a bucket that is full after this time.
    pub(crate) fn of(limit: u64, reset: Duration) -> Self {
        let window = u128::from(Bucket::WINDOW_NS);
        let left = window.saturating_sub(reset.as_nanos()) * u128::from(limit) / window;
        Self { limit, remaining: u64::try_from(left).unwrap_or(limit), reset }
    }
}

/// Why a take failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RateLimitError {
    /// The bucket will have that much after this time.
    RetryAfter(Duration),
    /// The amount is above the bucket's capacity.
    AboveLimit,
}

impl Bucket {
    /// Its capacity, as time.
    const WINDOW_NS: u64 = 60_000_000_000;

    pub(crate) fn new(per_minute: u64) -> Self {
        Self { per_minute: per_minute.max(1), full_at: AtomicU64::new(0) }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.per_minute
    }

    /// Takes `amount` at `now`, in nanoseconds of a clock that does not go back.
    ///
    /// # Errors
    /// [`RateLimitError`]. Nothing was taken.
    pub(crate) fn take(&self, amount: u64, now: u64) -> Result<(), RateLimitError> {
        if amount > self.per_minute {
            return Err(RateLimitError::AboveLimit);
        }
        let refill = self.refill_time(amount);
        let mut full_at = self.full_at.load(Ordering::Relaxed);
        loop {
            let next = full_at.max(now).saturating_add(refill);
            let over = next.saturating_sub(now).saturating_sub(Self::WINDOW_NS);
            if over > 0 {
                return Err(RateLimitError::RetryAfter(Duration::from_nanos(over)));
            }
            match self.full_at.compare_exchange_weak(full_at, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(found) => full_at = found,
            }
        }
    }

    /// Returns at `now` unused tokens that were taken at `taken`. What was refilled since then is not returned:
    /// the refill happens whether the tokens are used or not.
    pub(crate) fn give_back(&self, amount: u64, taken: u64, now: u64) {
        let refill = self.refill_time(amount).saturating_sub(now.saturating_sub(taken));
        // The closure always returns a value.
        let _ = self.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |full_at| {
            Some(full_at.saturating_sub(refill))
        });
    }

    /// Maximum overuse, as time.
    const OVERUSE_NS_MAX: u64 = 24 * 60 * Self::WINDOW_NS;

    /// Takes tokens that were used already, even beyond the level.
    pub(crate) fn debit(&self, amount: u64, now: u64) {
        let refill = self.refill_time(amount);
        let most = now.saturating_add(Self::WINDOW_NS + Self::OVERUSE_NS_MAX);
        // The closure always returns a value.
        let _ = self.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |full_at| {
            Some(full_at.max(now).saturating_add(refill).min(most).max(full_at))
        });
    }

    pub(crate) fn level(&self, now: u64) -> BucketLevel {
        let until_full = self.full_at.load(Ordering::Relaxed).saturating_sub(now);
        BucketLevel::of(self.per_minute, Duration::from_nanos(until_full))
    }

    /// The time in which `amount` is refilled, rounded up: rounding never exceeds the limit.
    fn refill_time(&self, amount: u64) -> u64 {
        let refill = (u128::from(amount) * u128::from(Self::WINDOW_NS)).div_ceil(u128::from(self.per_minute));
        u64::try_from(refill).unwrap_or(u64::MAX)
    }
}

/// The limits of one key or tenant, and their use.
#[derive(Debug)]
pub(crate) struct Meter {
    /// Its name at the server of shared limits.
    pub(super) shared_id: String,
    pub(super) requests: Option<Bucket>,
    pub(super) tokens: Option<Bucket>,
    pub(super) concurrent: Option<u32>,
    in_flight: AtomicU32,
}

impl Meter {
    /// `name` is that of the key or tenant; two owners never have one name.
    pub(super) fn new(name: &str, limits: &RateLimitsConfig) -> Self {
        Self {
            // 128 bits of a hash: names are of any length and characters, and the server's are not.
            shared_id: hex(&Sha256::digest(name.as_bytes())[..16]),
            requests: limits.requests_per_minute.map(Bucket::new),
            tokens: limits.tokens_per_minute.map(Bucket::new),
            concurrent: limits.concurrent_requests,
            in_flight: AtomicU32::new(0),
        }
    }

    pub(super) fn enter(&self) -> bool {
        let most = self.concurrent.unwrap_or(u32::MAX);
        let one_more = |now: u32| (now < most).then_some(now + 1);
        self.in_flight.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    /// Whether no request is in flight and every bucket is full: its use may be forgotten.
    pub(super) fn is_unused(&self, now: u64) -> bool {
        let is_full = |bucket: &Bucket| bucket.level(now).reset.is_zero();
        self.in_flight.load(Ordering::Relaxed) == 0
            && [&self.requests, &self.tokens].into_iter().flatten().all(is_full)
    }

    pub(super) fn exit(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_full_bucket_holds_a_minute_and_refills_evenly() {
        let bucket = Bucket::new(60);
        (0..60).for_each(|_| bucket.take(1, SECOND).unwrap());
        assert_eq!(bucket.take(1, SECOND), Err(RateLimitError::RetryAfter(Duration::from_secs(1))));
        assert_eq!(
            bucket.level(SECOND),
            BucketLevel { limit: 60, remaining: 0, reset: Duration::from_secs(60) }
        );
        assert_eq!(bucket.take(1, 2 * SECOND), Ok(()));
        assert_eq!(bucket.take(1, 2 * SECOND), Err(RateLimitError::RetryAfter(Duration::from_secs(1))));
        assert_eq!(bucket.level(92 * SECOND).remaining, 60);
    }

    #[test]
    fn a_cost_above_the_bucket_size_is_above_limit() {
        assert_eq!(Bucket::new(10).take(11, 0), Err(RateLimitError::AboveLimit));
        assert_eq!(Bucket::new(10).take(10, 0), Ok(()));
    }

    #[test]
    fn refunded_tokens_are_available_again() {
        let bucket = Bucket::new(10);
        bucket.take(10, 5).unwrap();
        bucket.give_back(4, 5, 5);
        assert_eq!(bucket.level(5).remaining, 4);
        assert_eq!((bucket.take(4, 5), bucket.take(1, 5).is_err()), (Ok(()), true));
    }

    #[test]
    fn a_refund_excludes_tokens_refilled_since_the_charge() {
        let bucket = Bucket::new(60);
        (0..60).for_each(|_| bucket.take(1, SECOND).unwrap());
        // Thirty of them are refilled and taken by others.
        (0..30).for_each(|_| bucket.take(1, 31 * SECOND).unwrap());
        bucket.give_back(60, SECOND, 31 * SECOND);
        assert_eq!(bucket.level(31 * SECOND).remaining, 30);
        bucket.give_back(30, SECOND, 31 * SECOND);
        assert_eq!(bucket.level(31 * SECOND).remaining, 30, "all of it has flowed in");
    }

    #[test]
    fn an_overdraft_is_bounded_by_a_day() {
        let bucket = Bucket::new(60);
        bucket.debit(90, SECOND);
        let level = BucketLevel { limit: 60, remaining: 0, reset: Duration::from_secs(90) };
        assert_eq!(bucket.level(SECOND), level);
        assert_eq!(bucket.take(1, SECOND), Err(RateLimitError::RetryAfter(Duration::from_secs(31))));
        // Half an hour's worth takes half an hour.
        bucket.debit(30 * 60, SECOND);
        let wait = 31 + 30 * 60;
        assert_eq!(bucket.take(1, SECOND), Err(RateLimitError::RetryAfter(Duration::from_secs(wait))));
        assert!(bucket.take(1, wait * SECOND).is_err());
        assert_eq!(bucket.take(1, (wait + 1) * SECOND), Ok(()));
        let full = bucket.level(0).reset;
        bucket.debit(0, 0);
        assert_eq!(bucket.level(0).reset, full, "a debit gives nothing");
        let day = 24 * 60 * 60;
        bucket.debit(u64::MAX, SECOND);
        assert_eq!(bucket.take(1, SECOND), Err(RateLimitError::RetryAfter(Duration::from_secs(day + 1))));
        assert_eq!(bucket.take(1, (day + 2) * SECOND), Ok(()));
    }

    proptest! {
        /// For any amounts and times: takes never exceed the burst plus the refill since any earlier moment.
        #[test]
        fn no_span_of_time_gets_more_than_its_share(
            per_minute in 1..5000_u64,
            asks in proptest::collection::vec((1..100_u64, 0..5 * SECOND), 1..200),
        ) {
            let bucket = Bucket::new(per_minute);
            let (mut now, mut given) = (SECOND, Vec::new());
            for (amount, pause) in asks {
                now += pause;
                if bucket.take(amount, now).is_ok() {
                    given.push((now, amount));
                }
                prop_assert!(bucket.level(now).remaining <= per_minute);
            }
            for (n, &(from, _)) in given.iter().enumerate() {
                let mut sum = 0_u128;
                for &(at, amount) in &given[n..] {
                    sum += u128::from(amount);
                    let span = u128::from(at - from);
                    let most = u128::from(per_minute) * (60 * u128::from(SECOND) + span) / (60 * u128::from(SECOND));
                    prop_assert!(sum <= most, "{sum} > {most}");
                }
            }
        }

        /// The returned wait suffices, and is at most a nanosecond too long.
        #[test]
        fn a_request_after_the_returned_wait_is_served(per_minute in 1..100_000_u64, amount in 1..100_u64) {
            let amount = amount.min(per_minute);
            let bucket = Bucket::new(per_minute);
            while bucket.take(amount, SECOND).is_ok() {}
            let Err(RateLimitError::RetryAfter(wait)) = bucket.take(amount, SECOND) else { panic!("it is empty") };
            let wait = u64::try_from(wait.as_nanos()).unwrap();
            prop_assert!(bucket.take(amount, SECOND + wait - 1).is_err());
            prop_assert!(bucket.take(amount, SECOND + wait).is_ok());
        }
    }
}
