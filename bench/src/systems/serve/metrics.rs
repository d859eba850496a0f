//! Statistics of calls. Pure.
//!
//! | word | means |
//! |---|---|
//! | scheduled | when a request was due; in a closed loop, when its lane was free |
//! | sent | when its client began: before a connection was made, where none was kept |
//! | token | an event of the stream with text. If events contain more than one token each, token counts are those of `usage`, and `tokens_per_event` is their ratio |
//! | TTFT | first token − scheduled |
//! | E2E | end of the response (`[DONE]` or the last byte) − scheduled |
//! | TPOT | (E2E − TTFT) / (tokens − 1), for responses of at least two tokens |
//! | ITL | every gap between two tokens of a response |
//! | lag | sent − scheduled: how late this client was, or how long it waited for `--max-concurrency`; for an overdue one, until the run sent nothing more |
//! | overdue | was due, and was not sent before the run's time was over |
//! | goodput | requests within every limit, over all requests that were sent or overdue; per second and as a share. A failed or overdue request is within no limit; TPOT counts as 0 without a second token |
//!
//! Latencies are those of complete responses. Failures are counted separately. Requests that Ctrl-C interrupted do
//! not count.

use std::collections::BTreeMap;

use serde::Serialize;

use super::error::OptionError;
use crate::common::stats::{SampleSummary, rounded};
use crate::load::runner::{MeasuredCall, RunResult};

/// Limits of a good request, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Slo {
    pub(crate) ttft_ms: Option<f64>,
    pub(crate) tpot_ms: Option<f64>,
    pub(crate) e2e_ms: Option<f64>,
}

/// The number of good requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Goodput {
    pub(crate) limits: Slo,
    pub(crate) good: usize,
    /// Fraction of the due requests: those that were sent and not interrupted by the end of the run, or overdue.
    pub(crate) share: f64,
    pub(crate) per_second: f64,
}

/// One kind of failure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct FailureCount {
    pub(crate) count: usize,
    /// Text of the first failure.
    pub(crate) first: String,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RunReport {
    pub(crate) run: usize,
    /// Microseconds since the Unix epoch.
    pub(crate) began_us: u64,
    pub(crate) duration_s: f64,
    pub(crate) sent: usize,
    pub(crate) completed: usize,
    pub(crate) failed: usize,
    /// Interrupted because the run was stopped.
    pub(crate) stopped: usize,
    /// Planned but not sent before the end of the run.
    pub(crate) unsent: usize,
    /// Those of the unsent requests that were due. Their wait in the client is caused by the endpoint.
    pub(crate) overdue: usize,
    /// Attempts after the first.
    pub(crate) retries: usize,
    /// By status and code.
    pub(crate) failures: BTreeMap<String, FailureCount>,
    pub(crate) finish_reasons: BTreeMap<String, usize>,
    /// Complete responses with fewer tokens than requested.
    pub(crate) short_answers: usize,
    /// Prompt tokens of completed requests, as counted by the endpoint, or else as planned.
    pub(crate) prompt_tokens: u64,
    pub(crate) planned_prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// Absent if the endpoint does not report them.
    pub(crate) cached_tokens: Option<u64>,
    pub(crate) tokens_per_event: Option<f64>,
    pub(crate) requests_per_second: f64,
    pub(crate) output_tokens_per_second: f64,
    pub(crate) total_tokens_per_second: f64,
    pub(crate) peak_in_flight: usize,
    pub(crate) goodput: Option<Goodput>,
    pub(crate) ttft_ms: Option<SampleSummary>,
    pub(crate) ttft_from_sent_ms: Option<SampleSummary>,
    pub(crate) tpot_ms: Option<SampleSummary>,
    pub(crate) itl_ms: Option<SampleSummary>,
    pub(crate) e2e_ms: Option<SampleSummary>,
    pub(crate) e2e_from_sent_ms: Option<SampleSummary>,
    pub(crate) lag_ms: Option<SampleSummary>,
}

impl Slo {
    /// Parses `ttft:MS`, `tpot:MS` and `e2e:MS` (or `e2el`, vLLM's name).
    ///
    /// # Errors
    /// [`OptionError::Goodput`].
    pub(crate) fn parse(texts: &[String]) -> Result<Self, OptionError> {
        let mut slo = Self::default();
        for text in texts {
            let wrong = || OptionError::Goodput(text.clone());
            let (name, limit) = text.split_once(':').ok_or_else(wrong)?;
            let limit =
                limit.parse::<f64>().ok().filter(|ms| ms.is_finite() && *ms > 0.0).ok_or_else(wrong)?;
            let slot = match name {
                "ttft" => &mut slo.ttft_ms,
                "tpot" => &mut slo.tpot_ms,
                "e2e" | "e2el" => &mut slo.e2e_ms,
                _ => return Err(wrong()),
            };
            *slot = Some(limit);
        }
        Ok(slo)
    }

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a request is within all limits.
    pub(crate) fn is_kept_by(&self, measured: &MeasuredCall) -> bool {
        let within = |limit: Option<f64>, value: Option<f64>| match (limit, value) {
            (None, _) => true,
            (Some(limit), Some(value)) => value <= limit,
            (Some(_), None) => false,
        };
        measured.call.is_done()
            && within(self.ttft_ms, measured.ttft().map(ms))
            && within(self.tpot_ms, Some(measured.tpot().map_or(0.0, ms)))
            && within(self.e2e_ms, Some(ms(measured.e2e())))
    }
}

fn ms(duration: std::time::Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

impl RunReport {
    /// Computes all counts and statistics.
    pub(crate) fn of(number: usize, run: &RunResult, percentiles: &[f64], slo: &Slo) -> Self {
        let duration_s = run.ended.since(run.began).as_secs_f64().max(1e-9);
        let done: Vec<&MeasuredCall> = run.calls.iter().filter(|one| one.call.is_done()).collect();
        let stopped = run.calls.iter().filter(|one| one.was_stopped()).count();
        let mut failures = BTreeMap::<String, FailureCount>::new();
        for one in &run.calls {
            if let Some(kind) = one.failure() {
                let failures = failures.entry(kind).or_default();
                if failures.count == 0 {
                    failures.first = one.call.outcome.to_string();
                }
                failures.count += 1;
            }
        }
        let mut finish_reasons = BTreeMap::<String, usize>::new();
        for one in &done {
            let reason = one.call.finish_reason.as_deref().unwrap_or("none");
            *finish_reasons.entry(reason.chars().take(32).collect()).or_default() += 1;
        }
        let sum = |of: &dyn Fn(&MeasuredCall) -> u64| done.iter().map(|one| of(one)).sum::<u64>();
        let planned = |one: &MeasuredCall| u64::from(one.planned_input_tokens);
        let prompt_tokens =
            sum(&|one| one.call.usage.map_or_else(|| planned(one), |usage| u64::from(usage.prompt_tokens)));
        let completion_tokens = sum(&|one| u64::from(one.call.completion_tokens()));
        let events = sum(&|one| one.call.tokens.len() as u64);
        let cached = done.iter().filter_map(|one| one.call.usage?.cached_tokens).map(u64::from);
        let summary = |of: &dyn Fn(&MeasuredCall) -> Option<std::time::Duration>| {
            SampleSummary::of(done.iter().filter_map(|one| of(one).map(ms)).collect(), percentiles)
        };
        let gaps = done.iter().flat_map(|one| one.call.gaps().map(ms)).collect();
        let waited = run.waited.iter().map(|one| ms(one.waited));
        let lags = run.calls.iter().map(|one| ms(one.lag())).chain(waited).collect();
        let counted = run.calls.len() - stopped + run.waited.len();
        let good = run.calls.iter().filter(|one| slo.is_kept_by(one)).count();
        Self {
            run: number,
            began_us: run.began.us(),
            duration_s: rounded(duration_s),
            sent: run.calls.len(),
            completed: done.len(),
            failed: failures.values().map(|failures| failures.count).sum(),
            stopped,
            unsent: run.unsent,
            overdue: run.waited.len(),
            retries: run.calls.iter().map(|one| one.attempts.saturating_sub(1)).sum(),
            failures,
            finish_reasons,
            short_answers: done
                .iter()
                .filter(|one| one.call.completion_tokens() < one.planned_output_tokens)
                .count(),
            prompt_tokens,
            planned_prompt_tokens: sum(&planned),
            completion_tokens,
            cached_tokens: cached.reduce(|a, b| a + b),
            tokens_per_event: (events > 0).then(|| rounded(completion_tokens as f64 / events as f64)),
            requests_per_second: rounded(done.len() as f64 / duration_s),
            output_tokens_per_second: rounded(completion_tokens as f64 / duration_s),
            total_tokens_per_second: rounded((prompt_tokens + completion_tokens) as f64 / duration_s),
            peak_in_flight: peak(&run.calls),
            goodput: (!slo.is_empty() && counted > 0).then(|| Goodput {
                limits: slo.clone(),
                good,
                share: rounded(good as f64 / counted as f64),
                per_second: rounded(good as f64 / duration_s),
            }),
            ttft_ms: summary(&|one| one.ttft()),
            ttft_from_sent_ms: summary(&|one| one.call.ttft()),
            tpot_ms: summary(&|one| one.tpot()),
            itl_ms: SampleSummary::of(gaps, percentiles),
            e2e_ms: summary(&|one| Some(one.e2e())),
            e2e_from_sent_ms: summary(&|one| Some(one.call.e2e())),
            lag_ms: SampleSummary::of(lags, percentiles),
        }
    }
}

/// Maximum concurrent calls. A call that ends when another begins is not concurrent with it.
fn peak(calls: &[MeasuredCall]) -> usize {
    let mut changes: Vec<_> =
        calls.iter().flat_map(|one| [(one.call.began, true), (one.call.ended, false)]).collect();
    changes.sort_unstable();
    let (mut now, mut most) = (0_usize, 0);
    for (_, begins) in changes {
        now = if begins { now + 1 } else { now.saturating_sub(1) };
        most = most.max(now);
    }
    most
}
