//! The limits of a key and of its tenant, taken together: all of them, or none.

use std::sync::Arc;
use std::time::Duration;

use baton_openai::ApiError;
use hyper::header::{HeaderName, HeaderValue};

use super::bucket::{Bucket, Denied, Level, Meter};
use super::{Identity, Tenants};
use crate::metrics::tenants::Limit;

/// When to come back for one of the requests in flight to end.
const COME_BACK: Duration = Duration::from_secs(1);

/// A request that may go on. Ends with it.
pub(crate) struct Permit {
    pub identity: Arc<Identity>,
    tenants: Arc<Tenants>,
    tokens: u64,
    /// When they were taken.
    taken_ns: u64,
}

impl Permit {
    /// Counts a request of this identity.
    ///
    /// # Errors
    /// 429 that says when to come back.
    pub(crate) fn begin(identity: Arc<Identity>, tenants: &Arc<Tenants>) -> Result<Self, ApiError> {
        let meters = [&identity.meter, &identity.tenant.meter];
        let whose = ["this API key", "this tenant"];
        let refused = |limit, error: ApiError| {
            tenants.metrics().limited(limit);
            Err(error)
        };
        if !meters[0].enter() {
            let message = format!("{} has reached its limit of requests in flight", whose[0]);
            return refused(Limit::Concurrent, ApiError::rate_limited(message, COME_BACK));
        }
        if !meters[1].enter() {
            meters[0].exit();
            let message = format!("{} has reached its limit of requests in flight", whose[1]);
            return refused(Limit::Concurrent, ApiError::rate_limited(message, COME_BACK));
        }
        // From here on its drop lets others in.
        let permit =
            Self { identity: Arc::clone(&identity), tenants: Arc::clone(tenants), tokens: 0, taken_ns: 0 };
        let buckets = meters.map(|meter| meter.requests.as_ref());
        if let Err((at, denied)) = take_both(buckets, 1, tenants.now_ns()) {
            let limit = buckets[at].map_or(0, Bucket::limit);
            return refused(Limit::Requests, told(whose[at], "requests", limit, 1, denied));
        }
        identity.tenant.requests.increment(1);
        tracing::debug!(key = identity.name, tenant = %identity.tenant.name, "request admitted");
        Ok(permit)
    }

    /// Takes what the request may cost.
    ///
    /// # Errors
    /// 429 that says when to come back, or that it never fits.
    pub(crate) fn take_tokens(&mut self, tokens: u64) -> Result<(), ApiError> {
        let whose = ["this API key", "this tenant"];
        let buckets = [&self.identity.meter, &self.identity.tenant.meter].map(|meter| meter.tokens.as_ref());
        let now = self.tenants.now_ns();
        if let Err((at, denied)) = take_both(buckets, tokens, now) {
            let limit = buckets[at].map_or(0, Bucket::limit);
            self.tenants.metrics().limited(Limit::Tokens);
            return Err(told(whose[at], "tokens", limit, tokens, denied));
        }
        (self.tokens, self.taken_ns) = (tokens, now);
        Ok(())
    }

    /// No engine was asked: the tokens were not used.
    pub(crate) fn give_tokens_back(&mut self) {
        let tokens = std::mem::take(&mut self.tokens);
        if tokens > 0 {
            let now = self.tenants.now_ns();
            for meter in [&self.identity.meter, &self.identity.tenant.meter] {
                meter.tokens.iter().for_each(|bucket| bucket.give_back(tokens, self.taken_ns, now));
            }
        }
    }

    /// The request has cost so many tokens: what was not taken before is taken now, or owed.
    pub(crate) fn has_cost(&mut self, tokens: u64) {
        let more = tokens.saturating_sub(self.tokens);
        if more > 0 {
            self.tokens = tokens;
            let now = self.tenants.now_ns();
            for meter in [&self.identity.meter, &self.identity.tenant.meter] {
                meter.tokens.iter().for_each(|bucket| bucket.debit(more, now));
            }
        }
    }

    /// `x-ratelimit-*` as OpenAI names them, of whichever limit leaves less. None without limits.
    pub(crate) fn headers(&self) -> Vec<(HeaderName, HeaderValue)> {
        let now = self.tenants.now_ns();
        let meters = [&self.identity.meter, &self.identity.tenant.meter];
        let tightest = |of: fn(&Meter) -> &Option<Bucket>| {
            let levels = meters.iter().filter_map(|meter| of(meter).as_ref()).map(|bucket| bucket.level(now));
            levels.min_by_key(|level| level.remaining)
        };
        let mut headers = Vec::new();
        let names = [
            ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"],
            ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"],
        ];
        let levels = [tightest(|meter| &meter.requests), tightest(|meter| &meter.tokens)];
        for (names, level) in names.into_iter().zip(levels) {
            let Some(Level { limit, remaining, reset }) = level else { continue };
            for (name, text) in
                names.into_iter().zip([limit.to_string(), remaining.to_string(), spoken(reset)])
            {
                let value = HeaderValue::try_from(text).expect("digits and letters");
                headers.push((HeaderName::from_static(name), value));
            }
        }
        headers
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.identity.meter.exit();
        self.identity.tenant.meter.exit();
    }
}

/// From both, or from neither; an error says which of them it was.
fn take_both(buckets: [Option<&Bucket>; 2], amount: u64, now: u64) -> Result<(), (usize, Denied)> {
    for (at, bucket) in buckets.iter().enumerate() {
        if let Some(Err(denied)) = bucket.map(|bucket| bucket.take(amount, now)) {
            buckets[..at].iter().flatten().for_each(|taken| taken.give_back(amount, now, now));
            return Err((at, denied));
        }
    }
    Ok(())
}

fn told(whose: &str, what: &str, limit: u64, wanted: u64, denied: Denied) -> ApiError {
    match denied {
        Denied::Wait(wait) => {
            let message = format!("{whose} may use {limit} {what} per minute; retry in {}", spoken(wait));
            ApiError::rate_limited(message, wait)
        }
        Denied::TooMuch => {
            let message =
                format!("the request needs {wanted} {what}, and {whose} may use {limit} per minute");
            let mut error = ApiError::rate_limited(message, COME_BACK).do_not_retry();
            error.retry_after = None;
            error
        }
    }
}

/// As OpenAI writes durations: `1m0s`, `6s`, `120ms`.
fn spoken(duration: Duration) -> String {
    let millis = duration.as_nanos().div_ceil(1_000_000);
    match millis {
        0..1000 => format!("{millis}ms"),
        1000..60_000 if millis.is_multiple_of(1000) => format!("{}s", millis / 1000),
        1000..60_000 => format!("{}.{:03}s", millis / 1000, millis % 1000),
        60_000..3_600_000 => format!("{}m{}s", millis / 60_000, millis % 60_000 / 1000),
        _ => format!("{}h{}m{}s", millis / 3_600_000, millis % 3_600_000 / 60_000, millis % 60_000 / 1000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_second_bucket_refuses_is_not_taken_from_the_first() {
        let (wide, narrow) = (Bucket::new(100), Bucket::new(5));
        assert_eq!(take_both([Some(&wide), Some(&narrow)], 5, 0), Ok(()));
        let refused = take_both([Some(&wide), Some(&narrow)], 5, 0);
        assert!(matches!(refused, Err((1, Denied::Wait(_)))), "{refused:?}");
        assert_eq!(wide.level(0).remaining, 95);
        assert_eq!(take_both([None, Some(&narrow)], 6, 0), Err((1, Denied::TooMuch)));
    }

    #[test]
    fn durations_are_written_as_openai_writes_them() {
        for (millis, text) in [
            (0, "0ms"),
            (120, "120ms"),
            (6000, "6s"),
            (1500, "1.500s"),
            (60_000, "1m0s"),
            (5_400_000, "1h30m0s"),
        ] {
            assert_eq!(spoken(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn what_never_fits_is_not_to_be_tried_again() {
        let error = told("this API key", "tokens", 10, 11, Denied::TooMuch);
        assert_eq!((error.status, error.should_retry, error.retry_after), (429, Some(false), None));
    }
}
