//! Chooses the request rate of calm, storm and faults by the capacity of the deployment.

use crate::disconnect::drive::stall::Stall;
use crate::disconnect::record::rate::{CalibratedRate, RateSource};

/// The default rate as a share of the capacity.
const SHARE: f64 = 0.5;
/// The maximum rate per second without `--rate`. Above it, a client on the same machine may limit the result.
const RATE_MAX: f64 = 150.0;
/// The minimum rate per second.
const RATE_MIN: f64 = 1.0;

impl CalibratedRate {
    /// `asked`: the value of `--rate`.
    pub(crate) fn of(able_per_s: f64, asked: Option<f64>, stall: Stall) -> Self {
        let half = able_per_s * SHARE;
        let (rate_per_s, chosen) = match asked {
            Some(rate) => (rate, RateSource::Asked),
            None if half > RATE_MAX => (RATE_MAX, RateSource::AtMost),
            None if half >= RATE_MIN => (half, RateSource::Half),
            // Also if the deployment completed no request in time.
            None => (RATE_MIN, RateSource::AtLeast),
        };
        let (stall_ms, stall_max_tokens) = (stall.hold.as_secs_f64() * 1e3, stall.max_tokens);
        Self { able_per_s, rate_per_s, chosen, stall_ms, stall_max_tokens }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_rate_is_half_of_the_capacity_within_bounds_or_the_option() {
        for (able, asked, rate, chosen) in [
            (100.0, None, 50.0, RateSource::Half),
            (301.0, None, 150.0, RateSource::AtMost),
            (300.0, None, 150.0, RateSource::Half),
            (1.5, None, 1.0, RateSource::AtLeast),
            (0.0, None, 1.0, RateSource::AtLeast),
            (100.0, Some(400.0), 400.0, RateSource::Asked),
        ] {
            let found = CalibratedRate::of(able, asked, Stall::usual(48, Duration::from_millis(500)));
            assert_eq!((found.able_per_s, found.rate_per_s, found.chosen), (able, rate, chosen));
            assert_eq!((found.stall_ms, found.stall_max_tokens), (500.0, 48));
        }
    }
}
