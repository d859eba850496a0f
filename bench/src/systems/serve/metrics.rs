//! What calls say together. Pure.
//!
//! | word | means |
//! |---|---|
//! | scheduled | when a request was due; in a closed loop, when its lane was free |
//! | sent | when its client began: before a connection was made, where none was kept |
//! | token | an event of the stream that brought text. Where events bring more than one token each, the numbers of tokens are those of `usage`, and `tokens_per_event` says it |
//! | TTFT | first token − scheduled |
//! | E2E | end of the answer (`[DONE]` or the last byte) − scheduled |
//! | TPOT | (E2E − TTFT) / (tokens − 1), for answers of at least two tokens |
//! | ITL | every gap between two tokens of an answer |
//! | lag | sent − scheduled: how late this client was, or how long it waited for `--max-concurrency`; for an overdue one, until the run sent nothing more |
//! | overdue | was due, and was not sent before the run's time was over |
//! | goodput | requests that keep every limit, over all that were sent and all that were overdue; per second and as a share. A failed one keeps none, an overdue one neither; TPOT counts as 0 where there is no second token |
//!
//! Latencies are those of whole answers. Failures are counted apart; requests that Ctrl-C broke off are neither.

use std::collections::BTreeMap;

use serde::Serialize;

use super::options::OptionError;
use crate::common::stats::{Summary, rounded};
use crate::load::runner::{Measured, Run};

/// What a good request keeps, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Slo {
    pub(crate) ttft_ms: Option<f64>,
    pub(crate) tpot_ms: Option<f64>,
    pub(crate) e2e_ms: Option<f64>,
}

/// How many requests were good.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Goodput {
    pub(crate) limits: Slo,
    pub(crate) good: usize,
    /// Of those that were due: sent and not broken off by the end of the run, or overdue.
    pub(crate) share: f64,
    pub(crate) per_second: f64,
}

/// One kind of failure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Failures {
    pub(crate) count: usize,
    /// What the first of them said.
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
    /// Broken off because the run was stopped.
    pub(crate) stopped: usize,
    /// Planned, and not sent before the run's end.
    pub(crate) unsent: usize,
    /// Of those, the ones that were due: what waits in the client for an endpoint is part of what the endpoint does.
    pub(crate) overdue: usize,
    /// Attempts besides the first.
    pub(crate) retries: usize,
    /// By status and code.
    pub(crate) failures: BTreeMap<String, Failures>,
    pub(crate) finish_reasons: BTreeMap<String, usize>,
    /// Completed with fewer tokens than were asked for.
    pub(crate) short_answers: usize,
    /// Of completed requests, as the endpoint counted; as planned where it did not.
    pub(crate) prompt_tokens: u64,
    pub(crate) planned_prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// Where the endpoint says.
    pub(crate) cached_tokens: Option<u64>,
    pub(crate) tokens_per_event: Option<f64>,
    pub(crate) requests_per_second: f64,
    pub(crate) output_tokens_per_second: f64,
    pub(crate) total_tokens_per_second: f64,
    pub(crate) peak_in_flight: usize,
    pub(crate) goodput: Option<Goodput>,
    pub(crate) ttft_ms: Option<Summary>,
    pub(crate) ttft_from_sent_ms: Option<Summary>,
    pub(crate) tpot_ms: Option<Summary>,
    pub(crate) itl_ms: Option<Summary>,
    pub(crate) e2e_ms: Option<Summary>,
    pub(crate) e2e_from_sent_ms: Option<Summary>,
    pub(crate) lag_ms: Option<Summary>,
}

impl Slo {
    /// Reads `ttft:MS`, `tpot:MS` and `e2e:MS` (or `e2el`, as vLLM says).
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

    /// Whether a request is good.
    pub(crate) fn is_kept_by(&self, measured: &Measured) -> bool {
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
    /// Counts and measures.
    pub(crate) fn of(number: usize, run: &Run, percentiles: &[f64], slo: &Slo) -> Self {
        let duration_s = run.ended.since(run.began).as_secs_f64().max(1e-9);
        let done: Vec<&Measured> = run.calls.iter().filter(|one| one.call.is_done()).collect();
        let stopped = run.calls.iter().filter(|one| one.was_stopped()).count();
        let mut failures = BTreeMap::<String, Failures>::new();
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
        let sum = |of: &dyn Fn(&Measured) -> u64| done.iter().map(|one| of(one)).sum::<u64>();
        let planned = |one: &Measured| u64::from(one.planned_input_tokens);
        let prompt_tokens =
            sum(&|one| one.call.usage.map_or_else(|| planned(one), |usage| u64::from(usage.prompt_tokens)));
        let completion_tokens = sum(&|one| u64::from(one.call.completion_tokens()));
        let events = sum(&|one| one.call.tokens.len() as u64);
        let cached = done.iter().filter_map(|one| one.call.usage?.cached_tokens).map(u64::from);
        let summary = |of: &dyn Fn(&Measured) -> Option<std::time::Duration>| {
            Summary::of(done.iter().filter_map(|one| of(one).map(ms)).collect(), percentiles)
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
            itl_ms: Summary::of(gaps, percentiles),
            e2e_ms: summary(&|one| Some(one.e2e())),
            e2e_from_sent_ms: summary(&|one| Some(one.call.e2e())),
            lag_ms: Summary::of(lags, percentiles),
        }
    }
}

/// The most calls that were there at once; one that ends when another begins makes place for it.
fn peak(calls: &[Measured]) -> usize {
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
