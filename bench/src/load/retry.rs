//! Retries as in OpenAI's SDKs. Every attempt is returned.
//!
//! The rules are those of openai-python's `_base_client.py`:
//!
//! - There are up to 2 retries, after a timeout, no connection, 408, 409, 429 and 5xx. `x-should-retry` overrides
//!   this.
//! - A wait that the endpoint names (`retry-after-ms`, `retry-after` in seconds) is used if it is at most a minute.
//! - Otherwise the wait is 0.5 s, doubled each time up to 8 s, less up to a quarter.
//! - After a response head there is no retry.

use std::time::Duration;

use super::call::{Call, CallOutcome, CallStage};
use super::client::{CancelTrigger, Client, DisconnectKind};
use super::request::PreparedRequest;
use super::rng::Rng;
use super::target::TargetError;

/// Longer waits that the endpoint names are ignored.
const NAMED_WAIT_MAX: Duration = Duration::from_secs(60);
const FIRST_WAIT: Duration = Duration::from_millis(500);
const WAIT_MAX: Duration = Duration::from_secs(8);

/// Maximum number of retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RetryLimit(pub(crate) u32);

impl RetryLimit {
    /// Makes a call and its retries. The last attempt counts.
    ///
    /// # Errors
    /// Never for a [`PreparedRequest`] without `x-stainless-retry-count`.
    pub(crate) async fn call(
        self,
        client: &Client,
        ask: &PreparedRequest,
        leave: &CancelTrigger,
        manner: DisconnectKind,
        rng: &mut Rng,
    ) -> Result<Vec<Call>, TargetError> {
        let mut attempts = Vec::new();
        for attempt in 0..=self.0 {
            let counted = ask.clone().with_header("x-stainless-retry-count", &attempt.to_string())?;
            let call = client.call(&counted, leave, manner).await;
            let wait = (attempt < self.0 && is_worth_another(&call)).then(|| pause(attempt, &call, rng));
            attempts.push(call);
            let Some(wait) = wait else { break };
            match leave {
                CancelTrigger::When(token) | CancelTrigger::WhenOrAfterTokens(token, _) => {
                    if token.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                        break;
                    }
                }
                _ => tokio::time::sleep(wait).await,
            }
        }
        Ok(attempts)
    }
}

/// Whether an SDK would retry.
pub(crate) fn is_worth_another(call: &Call) -> bool {
    match &call.outcome {
        CallOutcome::Refused { status, .. } => {
            call.should_retry.unwrap_or(matches!(status, 408 | 409 | 429 | 500..))
        }
        CallOutcome::Broken { stage, .. } | CallOutcome::TimedOut { stage } => *stage != CallStage::Body,
        CallOutcome::Done | CallOutcome::Left | CallOutcome::Failed { .. } => false,
    }
}

/// How long an SDK waits after this attempt. The first attempt is 0.
pub(crate) fn pause(attempt: u32, call: &Call, rng: &mut Rng) -> Duration {
    let named = call.retry_after.filter(|after| !after.is_zero() && *after <= NAMED_WAIT_MAX);
    named.unwrap_or_else(|| {
        let doubled = FIRST_WAIT.saturating_mul(1 << attempt.min(16)).min(WAIT_MAX);
        doubled.mul_f64(1.0 - 0.25 * rng.unit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(outcome: CallOutcome, should_retry: Option<bool>, retry_after: Option<u64>) -> Call {
        let retry_after = retry_after.map(Duration::from_millis);
        Call { outcome, should_retry, retry_after, ..Call::begin() }
    }

    fn refused(status: u16) -> CallOutcome {
        CallOutcome::Refused { status, code: None, kind: None, message: String::new() }
    }

    #[test]
    fn statuses_that_sdks_retry_are_retried() {
        for (status, again) in
            [(400, false), (404, false), (408, true), (409, true), (429, true), (500, true), (503, true)]
        {
            assert_eq!(is_worth_another(&ended(refused(status), None, None)), again, "{status}");
            assert!(!is_worth_another(&ended(refused(status), Some(false), None)), "{status}");
            assert!(is_worth_another(&ended(refused(status), Some(true), None)), "{status}");
        }
        let broken = |stage| CallOutcome::Broken { stage, why: String::new() };
        assert!(is_worth_another(&ended(broken(CallStage::Connect), None, None)));
        assert!(is_worth_another(&ended(CallOutcome::TimedOut { stage: CallStage::Head }, None, None)));
        assert!(!is_worth_another(&ended(CallOutcome::TimedOut { stage: CallStage::Body }, None, None)));
        assert!(!is_worth_another(&ended(broken(CallStage::Body), None, None)));
        assert!(!is_worth_another(&ended(CallOutcome::Done, Some(true), None)));
    }

    #[test]
    fn retry_after_is_capped_at_a_minute() {
        let mut rng = Rng::new(1);
        assert_eq!(pause(0, &ended(refused(429), None, Some(1_250)), &mut rng), Duration::from_millis(1_250));
        for (attempt, most) in [(0, 500), (1, 1_000), (3, 4_000), (4, 8_000), (40, 8_000)] {
            for named in [None, Some(0), Some(61_000)] {
                let pause = pause(attempt, &ended(refused(429), None, named), &mut rng);
                let most = Duration::from_millis(most);
                assert!(pause <= most && pause >= most.mul_f64(0.75), "{attempt}: {pause:?}");
            }
        }
    }
}
