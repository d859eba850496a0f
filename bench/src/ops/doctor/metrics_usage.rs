//! Verifies disconnects by engines' metrics alone. The result is coarse, because metrics are sums that include other
//! clients' requests. It is correct only if no other client uses the deployment, which the report states.

use std::time::{Duration, Instant};

use serde_json::{Map, json};

use super::checkup::Checkup;
use super::disconnect::{ProbeOptions, TOKENS, describe_outcome, prompt};
use super::engine::{EngineInfo, PATIENCE};
use crate::disconnect::plan::phase::Phase;
use crate::load::{
    Call, CallOutcome, CancelTrigger, Client, CompletionSpec, DisconnectKind, Endpoint, Prompt, Streaming,
};
use crate::ops::top::source::now_us;

/// Interval between two reads.
const LOOK: Duration = Duration::from_millis(100);
/// Maximum tokens of a response. Responses should last long enough to distinguish an abort from their own end.
const TOKENS_MAX: u32 = 1_000;
/// Minimum reads between an abort and the response's own end, to distinguish them.
const LOOKS_APART: u32 = 5;
/// Consecutive reads after which usage counts as freed. The blocks of a request that an engine accepts late appear
/// only after the first read. They must not count against the next phase.
const LOOKS_BACK: u32 = 5;
/// Usage counts as freed if it exceeds the earlier value by at most this. Metrics have few digits.
const USAGE_SLACK: f64 = 0.000_5;

/// Why leases may be left without an event log that shows it. `docs/how-to/stuck-blocks.md` explains the reply window.
const LEASED: &str = ": a release was lost, or a stock engine's server dropped a reply, the only copy of the handoff (the \
                      reply window)";

/// Sums over the engines' metrics.
#[derive(Clone, Copy, Debug, Default)]
struct MetricsUsage {
    /// Sum of fractions.
    kv: f64,
    requests: f64,
    expired: f64,
    /// Prompt and response tokens since the engines started. `None` if an engine does not report them.
    tokens: Option<f64>,
}

impl MetricsUsage {
    async fn of(engines: &[&EngineInfo]) -> Option<Self> {
        let mut sum = Self { tokens: Some(0.0), ..Self::default() };
        for engine in engines {
            let samples = engine.service.samples(PATIENCE).await.ok()?;
            let first = |names: &[&str]| names.iter().find_map(|name| samples.sum(name, &[]));
            sum.kv += first(&["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"])?;
            sum.requests += first(&["vllm:num_requests_running"])?;
            sum.requests += first(&["vllm:num_requests_waiting"]).unwrap_or(0.0);
            let expired = ["vllm:nixl_num_kv_expired_reqs", "vllm:nixl_num_kv_expired_reqs_total"];
            sum.expired += first(&expired).unwrap_or(0.0);
            let counted = ["vllm:prompt_tokens_total", "vllm:generation_tokens_total"];
            let counted = counted.iter().filter_map(|name| samples.sum(name, &[])).reduce(|a, b| a + b);
            sum.tokens = sum.tokens.zip(counted).map(|(all, its)| all + its);
        }
        Some(sum)
    }

    fn is_back_to(&self, before: &Self) -> bool {
        self.kv <= before.kv + USAGE_SLACK && self.requests <= before.requests
    }
}

/// Whether usage is freed and stays freed.
struct StabilityTimer {
    long: Duration,
    since: Option<Duration>,
}

impl StabilityTimer {
    fn new(long: Duration) -> Self {
        Self { long, since: None }
    }

    /// Adds one read. Returns since when usage has been freed, once that is long enough ago.
    fn look(&mut self, back: bool, at: Duration) -> Option<Duration> {
        if !back {
            self.since = None;
            return None;
        }
        let since = *self.since.get_or_insert(at);
        (at.saturating_sub(since) >= self.long).then_some(since)
    }
}

/// Whether the engines counted tokens since `before`, or count none. If an engine has not computed anything, its
/// usage has not changed, which would look like freed blocks.
async fn was_counted(engines: &[&EngineInfo], before: &MetricsUsage, within: Duration) -> bool {
    let Some(then) = before.tokens else { return true };
    let begun = Instant::now();
    loop {
        let now = MetricsUsage::of(engines).await.and_then(|usage| usage.tokens);
        if now.is_some_and(|now| now > then) {
            return true;
        }
        if begun.elapsed() > within {
            return false;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// The requests of this check.
struct UsageProbe<'a> {
    client: &'a Client,
    engines: Vec<&'a EngineInfo>,
    terms: &'a ProbeOptions,
    prefix: String,
}

/// How long requests last, from one without a disconnect.
struct ExpectedTimes {
    ttft: Duration,
    /// Tokens of a response whose client disconnects.
    tokens: u32,
    /// The duration of such a request without a disconnect.
    whole: Duration,
}

impl ExpectedTimes {
    /// How to cancel in this phase. `None` if the phase is not visible in metrics.
    fn cancel(&self, phase: Phase) -> Option<(Streaming, CancelTrigger)> {
        let Self { ttft, whole, .. } = *self;
        Some(match phase {
            Phase::Queued => (Streaming::Streamed, CancelTrigger::After(Duration::ZERO)),
            Phase::Prefill => (Streaming::Streamed, CancelTrigger::After(ttft.mul_f64(0.4))),
            Phase::FirstToken => (Streaming::Streamed, CancelTrigger::After(ttft.mul_f64(0.9))),
            Phase::Stream => (Streaming::Streamed, CancelTrigger::AfterTokens(2)),
            Phase::Unary => (Streaming::Whole, CancelTrigger::After((ttft * 2).min(whole / 2))),
            Phase::Reply | Phase::Gap | Phase::Fetch => return None,
        })
    }
}

impl UsageProbe<'_> {
    async fn call(&self, number: u32, tokens: u32, streaming: Streaming, leave: CancelTrigger) -> Call {
        let text = Prompt::Text(prompt(&format!("{}{number}", self.prefix), self.terms.words));
        let extra = Map::from_iter([("temperature".to_owned(), json!(0))]);
        let spec = CompletionSpec {
            ignore_eos: true,
            streaming,
            extra: Some(&extra),
            ..CompletionSpec::new(Endpoint::Completions, &self.terms.model, &text, tokens)
        };
        self.client.call(&spec.prepare(), &leave, DisconnectKind::Fin).await
    }

    /// Makes a request without a disconnect. `None` if disconnects cannot be tested.
    async fn measure(&self, idle: &MetricsUsage, checkup: &mut Checkup) -> Option<ExpectedTimes> {
        let calm = self.call(0, TOKENS, Streaming::Streamed, CancelTrigger::Never).await;
        let Some(ttft) = calm.ttft().filter(|_| calm.is_done()) else {
            checkup.fail("request", "streamed", describe_outcome(&calm.outcome));
            return None;
        };
        let message = format!("completed after {:.1} ms", calm.e2e().as_secs_f64() * 1e3);
        checkup.ok("request", "streamed", message);
        if !was_counted(&self.engines, idle, self.terms.within).await {
            let message = "it completed, but no known engine counted its tokens: other engines served it";
            checkup.skip("disconnects", "", message);
            return None;
        }
        let each = calm.e2e().saturating_sub(ttft) / (TOKENS - 1);
        let enough = 2.0 * self.terms.within.as_secs_f64() / each.as_secs_f64().max(1e-6);
        let tokens = (enough as u32).clamp(TOKENS, TOKENS_MAX);
        Some(ExpectedTimes { ttft, tokens, whole: ttft + each * tokens })
    }

    /// Waits until usage is freed and stays freed for `long`, and returns the time from now until it was freed.
    ///
    /// # Errors
    /// The last usage if it was not freed in time; `None` without metrics.
    async fn wait_until_freed(
        &self,
        before: &MetricsUsage,
        long: Duration,
    ) -> Result<Duration, Option<MetricsUsage>> {
        let begun = Instant::now();
        let mut stay = StabilityTimer::new(long);
        loop {
            let now = MetricsUsage::of(&self.engines).await;
            let back = now.is_some_and(|now| now.is_back_to(before));
            let at = begun.elapsed();
            if let Some(since) = stay.look(back, at) {
                return Ok(since);
            }
            // If usage was freed in time, the loop waits until it is stable.
            if !back && at > self.terms.within {
                return Err(now);
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Disconnects at fractions of a request's duration.
pub(super) async fn probe_by_metrics(
    client: &Client,
    engines: &[EngineInfo],
    terms: &ProbeOptions,
    why: &str,
    checkup: &mut Checkup,
) {
    let engines: Vec<&EngineInfo> = engines.iter().filter(|engine| engine.up).collect();
    if engines.is_empty() {
        return checkup.skip("disconnects", "", "no engine is known: add --admin or --engine");
    }
    let Some(idle) = MetricsUsage::of(&engines).await else {
        return checkup.skip("disconnects", "", "the engines have neither event logs nor usage metrics");
    };
    let message = format!("{why}: judged by usage, which requests of other clients disturb");
    checkup.skip("disconnects", "", message);
    let probe = UsageProbe { client, engines, terms, prefix: format!("baton-doctor-{:x}-", now_us()) };
    let Some(times) = probe.measure(&idle, checkup).await else { return };
    let mut expired = None;
    for (number, phase) in (1..).zip(Phase::ALL) {
        let Some((streaming, leave)) = times.cancel(phase) else {
            checkup.skip("disconnect", phase.label(), "not visible in metrics");
            continue;
        };
        let Some(before) = MetricsUsage::of(&probe.engines).await else {
            checkup.skip("disconnect", phase.label(), "no usage metrics before the request");
            continue;
        };
        expired.get_or_insert(before.expired);
        let begun = Instant::now();
        let made = probe.call(number, times.tokens, streaming, leave).await;
        match (made.left, &made.outcome) {
            (Some(_), _) => {}
            (None, CallOutcome::Done) => {
                checkup.skip("disconnect", phase.label(), "the response was complete before the disconnect");
                continue;
            }
            (None, other) => {
                checkup.fail("disconnect", phase.label(), describe_outcome(other));
                continue;
            }
        }
        // When the response would have ended without a disconnect.
        let own_end = times.whole.saturating_sub(begun.elapsed());
        match probe.wait_until_freed(&before, (LOOK * LOOKS_BACK).max(times.ttft * 2)).await {
            Ok(took) => judge_freed(phase, took, own_end, checkup),
            Err(now) => {
                let message = describe_used(now, &before, terms.within.as_secs());
                checkup.fail("disconnect", phase.label(), message);
                break;
            }
        }
    }
    let after = MetricsUsage::of(&probe.engines).await.map_or(0.0, |usage| usage.expired);
    let ended = after - expired.unwrap_or(after);
    if ended > 0.0 {
        checkup.fail("expiries", "", format!("{ended:.0} leases ended by expiry meanwhile{LEASED}"));
    }
}

/// Judges usage that was freed. `own_end`: the time until the response would have ended.
fn judge_freed(phase: Phase, took: Duration, own_end: Duration, checkup: &mut Checkup) {
    let seconds = took.as_secs_f64();
    if own_end < LOOK * LOOKS_APART {
        let message =
            format!("usage was freed within {seconds:.1} s, but the response would have ended by then");
        checkup.skip("disconnect", phase.label(), message);
    } else if took > own_end.mul_f64(0.8) {
        let message = format!(
            "usage was freed after {seconds:.1} s, at the response's own end: the engines did not abort it"
        );
        checkup.fail("disconnect", phase.label(), message);
    } else {
        let message = format!("usage was freed within about {seconds:.1} s (by metrics)");
        checkup.ok("disconnect", phase.label(), message);
    }
}

/// Usage that was not freed in time.
fn describe_used(now: Option<MetricsUsage>, before: &MetricsUsage, within_s: u64) -> String {
    let Some(now) = now else {
        return format!("{within_s} s after the disconnect: no usage metrics");
    };
    // Blocks that no request holds are leased.
    let leased = if now.requests <= before.requests { LEASED } else { "" };
    format!(
        "{within_s} s after the disconnect: usage is {:.2} % of a pool higher, with {:+.0} requests: blocks are not freed, \
         or another client uses the deployment (the phase is the intended one){leased}",
        (now.kv - before.kv).max(0.0) * 100.0,
        now.requests - before.requests,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_counts_as_freed_only_when_it_stays_stable() {
        let ms = Duration::from_millis;
        let mut stay = StabilityTimer::new(ms(500));
        // The engine has not begun: for a moment no blocks are held.
        assert_eq!(stay.look(true, ms(0)), None);
        assert_eq!(stay.look(true, ms(100)), None);
        assert_eq!(stay.look(false, ms(200)), None, "here are its blocks");
        assert_eq!(stay.look(true, ms(300)), None);
        assert_eq!(stay.look(true, ms(700)), None);
        assert_eq!(stay.look(true, ms(800)), Some(ms(300)), "back since then");
    }
}
