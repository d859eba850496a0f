//! The limits of a key and of its tenant, taken together or not at all.

use std::sync::Arc;
use std::time::Duration;

use baton_openai::ApiError;
use hyper::header::{HeaderName, HeaderValue};

use super::bucket::{Bucket, BucketLevel, Meter, RateLimitError};
use super::shared::{SharedError, SharedLimits, SharedTake};
use super::{Identity, TenantRegistry};
use crate::metrics::tenants::LimitKind;

/// `Retry-After` when the limit of requests in flight is reached.
const CONCURRENCY_RETRY_AFTER: Duration = Duration::from_secs(1);

/// `Retry-After` while the shared limits are required and unavailable.
const SHARED_RETRY_AFTER: Duration = Duration::from_secs(1);

/// A request within its limits. Dropping it ends the request.
pub(crate) struct Permit {
    pub identity: Arc<Identity>,
    registry: Arc<TenantRegistry>,
    tokens: u64,
    /// Time of the take.
    taken_ns: u64,
    shared: Option<SharedPermit>,
}

/// What a request has taken from the limits that several routers share.
struct SharedPermit {
    limits: Arc<SharedLimits>,
    /// `None`: this router's own limits apply.
    requests: Option<SharedTake>,
    tokens: Option<SharedTake>,
}

/// The owners of a request's meters, as messages name them.
const OWNERS: [&str; 2] = ["this API key", "this tenant"];

impl Permit {
    /// Counts a request of this identity.
    ///
    /// # Errors
    /// 429 with a `Retry-After`, or 503 if the shared limits are unavailable and required.
    pub(crate) async fn begin(
        identity: Arc<Identity>,
        registry: &Arc<TenantRegistry>,
        shared: Option<&Arc<SharedLimits>>,
    ) -> Result<Self, ApiError> {
        let meters = [&identity.meter, &identity.tenant.meter];
        if !meters[0].enter() {
            return Err(concurrency_error(0, registry));
        }
        if !meters[1].enter() {
            meters[0].exit();
            return Err(concurrency_error(1, registry));
        }
        let shared = shared.map(|limits| {
            let limits = Arc::clone(limits);
            SharedPermit { limits, requests: None, tokens: None }
        });
        // From here on, dropping the permit decrements both counts.
        let mut permit = Self { identity, registry: Arc::clone(registry), tokens: 0, taken_ns: 0, shared };
        permit.take(LimitKind::Requests, 1).await?;
        permit.identity.tenant.counters.requests.increment(1);
        tracing::debug!(
            event = "request_admitted", key = permit.identity.name, tenant = %permit.identity.tenant.name,
            "request admitted"
        );
        Ok(permit)
    }

    /// Takes the tokens that the request may cost.
    ///
    /// # Errors
    /// As [`Self::begin`], and 429 without a `Retry-After` if the tokens never fit.
    pub(crate) async fn take_tokens(&mut self, tokens: u64) -> Result<(), ApiError> {
        self.take(LimitKind::Tokens, tokens).await?;
        (self.tokens, self.taken_ns) = (tokens, self.registry.now_ns());
        Ok(())
    }

    /// Takes from the shared limits, or else from this router's. Without shared limits it never waits.
    async fn take(&mut self, kind: LimitKind, amount: u64) -> Result<(), ApiError> {
        let meters = [&*self.identity.meter, &*self.identity.tenant.meter];
        let buckets =
            meters.map(|meter| if kind == LimitKind::Requests { &meter.requests } else { &meter.tokens });
        if let Some(shared) = &mut self.shared {
            match Box::pin(shared.limits.take(meters, kind, amount)).await {
                Ok(take) => {
                    // The router's own buckets follow, so that they are not full when the server fails.
                    let now = self.registry.now_ns();
                    buckets.into_iter().flatten().for_each(|bucket| bucket.debit(amount, now));
                    let taken =
                        if kind == LimitKind::Requests { &mut shared.requests } else { &mut shared.tokens };
                    *taken = Some(take);
                    return Ok(());
                }
                Err(SharedError::Local) => {}
                Err(SharedError::Limit(at, limit, error)) => {
                    self.registry.metrics().count_limited(kind);
                    return Err(limit_error(OWNERS[at], what(kind), limit, amount, error));
                }
                Err(SharedError::Concurrent(at)) => return Err(concurrency_error(at, &self.registry)),
                Err(SharedError::Unavailable) => {
                    return Err(ApiError::unavailable(
                        "the shared limits are unavailable",
                        SHARED_RETRY_AFTER,
                    ));
                }
            }
        }
        let buckets = buckets.map(Option::as_ref);
        take_both(buckets, amount, self.registry.now_ns()).map_err(|(at, error)| {
            self.registry.metrics().count_limited(kind);
            limit_error(OWNERS[at], what(kind), buckets[at].map_or(0, Bucket::limit), amount, error)
        })
    }

    /// Returns unused tokens of a request that was sent to no engine.
    pub(crate) fn return_tokens(&mut self) {
        let tokens = std::mem::take(&mut self.tokens);
        if tokens > 0 {
            let now = self.registry.now_ns();
            for meter in [&self.identity.meter, &self.identity.tenant.meter] {
                meter.tokens.iter().for_each(|bucket| bucket.give_back(tokens, self.taken_ns, now));
            }
            if let Some(SharedPermit { limits, tokens: Some(taken), .. }) = &self.shared {
                limits.give_back(taken, tokens);
            }
        }
    }

    /// Charges the tokens that the request has cost beyond those taken, even where the bucket is empty.
    pub(crate) fn settle_cost(&mut self, tokens: u64) {
        let more = tokens.saturating_sub(self.tokens);
        if more > 0 {
            self.tokens = tokens;
            let now = self.registry.now_ns();
            for meter in [&self.identity.meter, &self.identity.tenant.meter] {
                meter.tokens.iter().for_each(|bucket| bucket.debit(more, now));
            }
            if let Some(SharedPermit { limits, tokens: Some(taken), .. }) = &self.shared {
                limits.charge(taken, more);
            }
        }
    }

    /// `x-ratelimit-*` headers as OpenAI names them, of the limit that leaves less. None without limits.
    pub(crate) fn headers(&self) -> Vec<(HeaderName, HeaderValue)> {
        let now = self.registry.now_ns();
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
        let own = [tightest(|meter| &meter.requests), tightest(|meter| &meter.tokens)];
        let shared =
            self.shared.as_ref().map_or([None, None], |shared| [&shared.requests, &shared.tokens].map(level));
        let levels = shared.into_iter().zip(own).map(|(shared, own)| shared.or(own));
        for (names, level) in names.into_iter().zip(levels) {
            let Some(BucketLevel { limit, remaining, reset }) = level else { continue };
            for (name, text) in
                names.into_iter().zip([limit.to_string(), remaining.to_string(), format_duration(reset)])
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

/// The level of the shared bucket that leaves less.
fn level(taken: &Option<SharedTake>) -> Option<BucketLevel> {
    let (limit, until_full) = taken.as_ref()?.tightest?;
    Some(BucketLevel::of(limit, until_full))
}

fn what(kind: LimitKind) -> &'static str {
    if kind == LimitKind::Tokens { "tokens" } else { "requests" }
}

fn concurrency_error(owner: usize, registry: &TenantRegistry) -> ApiError {
    registry.metrics().count_limited(LimitKind::Concurrent);
    let message = format!("{} has reached its limit of requests in flight", OWNERS[owner]);
    ApiError::rate_limited(message, CONCURRENCY_RETRY_AFTER)
}

/// Takes from both or from neither. An error contains the index of the bucket that refused.
fn take_both(buckets: [Option<&Bucket>; 2], amount: u64, now: u64) -> Result<(), (usize, RateLimitError)> {
    for (at, bucket) in buckets.iter().enumerate() {
        if let Some(Err(error)) = bucket.map(|bucket| bucket.take(amount, now)) {
            buckets[..at].iter().flatten().for_each(|taken| taken.give_back(amount, now, now));
            return Err((at, error));
        }
    }
    Ok(())
}

fn limit_error(owner: &str, what: &str, limit: u64, requested: u64, error: RateLimitError) -> ApiError {
    match error {
        RateLimitError::RetryAfter(wait) => {
            let message =
                format!("{owner} may use {limit} {what} per minute; retry in {}", format_duration(wait));
            ApiError::rate_limited(message, wait)
        }
        RateLimitError::AboveLimit => {
            let message =
                format!("the request needs {requested} {what}, and {owner} may use {limit} per minute");
            let mut error = ApiError::rate_limited(message, CONCURRENCY_RETRY_AFTER).do_not_retry();
            error.retry_after = None;
            error
        }
    }
}

/// As OpenAI writes durations: `1m0s`, `6s`, `120ms`.
fn format_duration(duration: Duration) -> String {
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
    fn a_refusal_by_the_second_bucket_refunds_the_first() {
        let (wide, narrow) = (Bucket::new(100), Bucket::new(5));
        assert_eq!(take_both([Some(&wide), Some(&narrow)], 5, 0), Ok(()));
        let refused = take_both([Some(&wide), Some(&narrow)], 5, 0);
        assert!(matches!(refused, Err((1, RateLimitError::RetryAfter(_)))), "{refused:?}");
        assert_eq!(wide.level(0).remaining, 95);
        assert_eq!(take_both([None, Some(&narrow)], 6, 0), Err((1, RateLimitError::AboveLimit)));
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
            assert_eq!(format_duration(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn a_request_above_the_limit_is_not_retryable() {
        let error = limit_error("this API key", "tokens", 10, 11, RateLimitError::AboveLimit);
        assert_eq!((error.status, error.should_retry, error.retry_after), (429, Some(false), None));
    }
}
