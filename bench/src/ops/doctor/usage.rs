//! Disconnects judged by engines' metrics alone: coarser, because only sums are known, and other users' requests are in
//! them. Right on a deployment that nobody else uses at the moment, and it says so.

use std::time::{Duration, Instant};

use serde_json::{Map, json};

use super::checkup::Checkup;
use super::leave::{TOKENS, Terms, prompt, told};
use super::look::{Engine, PATIENCE};
use crate::disconnect::plan::phase::Phase;
use crate::load::{Client, Endpoint, Leave, Manner, Outcome, Prompt, Streaming, Wish};
use crate::ops::top::source::now_us;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);
/// Answers are as long as it takes to tell an abort from their own end, but no longer than this.
const TOKENS_MAX: u32 = 1_000;
/// Looks that an answer's own end must be away for an abort to be told from it.
const LOOKS_APART: u32 = 5;
/// Looks at which usage must be back, one after the other, before it is believed: blocks of a request whose client left
/// before its engine had it come later than the first look, and would be held against the phase that is tried next.
const LOOKS_BACK: u32 = 5;
/// A usage that is this much above what it was has come back: it is told with few digits.
const USAGE_SLACK: f64 = 0.000_5;

/// What the engines' metrics say together.
#[derive(Clone, Copy, Debug, Default)]
struct Usage {
    /// Sum of shares.
    kv: f64,
    requests: f64,
    expired: f64,
    /// Prompts' and answers', since the engines started; `None` where one of them does not count.
    tokens: Option<f64>,
}

impl Usage {
    async fn of(engines: &[&Engine]) -> Option<Self> {
        let mut sum = Self { tokens: Some(0.0), ..Self::default() };
        for engine in engines {
            let samples = engine.origin.samples(PATIENCE).await.ok()?;
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

/// Whether usage has come back and stays so.
struct Stay {
    long: Duration,
    since: Option<Duration>,
}

impl Stay {
    fn new(long: Duration) -> Self {
        Self { long, since: None }
    }

    /// After one more look: since when it has been back, once that is long enough ago.
    fn look(&mut self, back: bool, at: Duration) -> Option<Duration> {
        if !back {
            self.since = None;
            return None;
        }
        let since = *self.since.get_or_insert(at);
        (at.saturating_sub(since) >= self.long).then_some(since)
    }
}

/// Whether the engines counted tokens since then, or do not count any. What they do not compute leaves their usage as it
/// is, which would look like blocks that came back.
async fn was_counted(engines: &[&Engine], before: &Usage, within: Duration) -> bool {
    let Some(then) = before.tokens else { return true };
    let begun = Instant::now();
    loop {
        let now = Usage::of(engines).await.and_then(|usage| usage.tokens);
        if now.is_some_and(|now| now > then) {
            return true;
        }
        if begun.elapsed() > within {
            return false;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Leaves at parts of a request's time.
pub(super) async fn coarsely(
    client: &Client,
    engines: &[Engine],
    terms: &Terms,
    why: &str,
    checkup: &mut Checkup,
) {
    let engines: Vec<&Engine> = engines.iter().filter(|engine| engine.up).collect();
    if engines.is_empty() {
        return checkup.skip("disconnects", "", "no engine is known: add --admin or --engine");
    }
    let Some(idle) = Usage::of(&engines).await else {
        return checkup.skip("disconnects", "", "the engines have neither event logs nor usage metrics");
    };
    checkup.skip(
        "disconnects",
        "",
        format!("{why}: judged by usage, which requests of other clients disturb"),
    );
    let prefix = format!("baton-doctor-{:x}-", now_us());
    let call = |number: u32, tokens: u32, streaming: Streaming, leave: Leave| {
        let tag = format!("{prefix}{number}");
        let text = Prompt::Text(prompt(&tag, terms.words));
        async move {
            let extra = Map::from_iter([("temperature".to_owned(), json!(0))]);
            let wish = Wish {
                ignore_eos: true,
                streaming,
                extra: Some(&extra),
                ..Wish::new(Endpoint::Completions, &terms.model, &text, tokens)
            };
            client.call(&wish.ask(), &leave, Manner::Fin).await
        }
    };
    let calm = call(0, TOKENS, Streaming::Streamed, Leave::Never).await;
    let Some(ttft) = calm.ttft().filter(|_| calm.is_done()) else {
        return checkup.fail("request", "streamed", told(&calm.outcome));
    };
    checkup.ok("request", "streamed", format!("completed after {:.1} ms", calm.e2e().as_secs_f64() * 1e3));
    if !was_counted(&engines, &idle, terms.within).await {
        return checkup.skip(
            "disconnects",
            "",
            "it completed, but no known engine counted its tokens: other engines served it",
        );
    }
    let each = calm.e2e().saturating_sub(ttft) / (TOKENS - 1);
    let enough = 2.0 * terms.within.as_secs_f64() / each.as_secs_f64().max(1e-6);
    let tokens = (enough as u32).clamp(TOKENS, TOKENS_MAX);
    let whole = ttft + each * tokens;
    let mut expired = None;
    for (number, phase) in (1..).zip(Phase::COMMON) {
        let (streaming, leave) = match phase {
            Phase::Queued => (Streaming::Streamed, Leave::After(Duration::ZERO)),
            Phase::Prefill => (Streaming::Streamed, Leave::After(ttft.mul_f64(0.4))),
            Phase::FirstToken => (Streaming::Streamed, Leave::After(ttft.mul_f64(0.9))),
            Phase::Stream => (Streaming::Streamed, Leave::AfterTokens(2)),
            Phase::Unary => (Streaming::Whole, Leave::After((ttft * 2).min(whole / 2))),
            Phase::Reply | Phase::Gap | Phase::Fetch => {
                checkup.skip("disconnect", phase.label(), "not visible in metrics");
                continue;
            }
        };
        let Some(before) = Usage::of(&engines).await else {
            checkup.skip("disconnect", phase.label(), "no usage metrics before the request");
            continue;
        };
        expired.get_or_insert(before.expired);
        let begun = Instant::now();
        let made = call(number, tokens, streaming, leave).await;
        match (made.left, &made.outcome) {
            (Some(_), _) => {}
            (None, Outcome::Done) => {
                checkup.skip("disconnect", phase.label(), "the response was complete before the disconnect");
                continue;
            }
            (None, other) => {
                checkup.fail("disconnect", phase.label(), told(other));
                continue;
            }
        }
        // When the answer would have ended by itself.
        let own_end = whole.saturating_sub(begun.elapsed());
        let begun = Instant::now();
        let mut stay = Stay::new((LOOK * LOOKS_BACK).max(ttft * 2));
        let after = loop {
            let now = Usage::of(&engines).await;
            let back = now.is_some_and(|now| now.is_back_to(&before));
            let at = begun.elapsed();
            if let Some(since) = stay.look(back, at) {
                break Ok(since);
            }
            // A stay that has begun in time is waited for.
            if !back && at > terms.within {
                break Err(now);
            }
            tokio::time::sleep(LOOK).await;
        };
        match after {
            Ok(took) => {
                let seconds = took.as_secs_f64();
                if own_end < LOOK * LOOKS_APART {
                    let told = format!(
                        "usage was freed within {seconds:.1} s, but the response would have ended by then"
                    );
                    checkup.skip("disconnect", phase.label(), told);
                } else if took > own_end.mul_f64(0.8) {
                    let told = format!(
                        "usage was freed after {seconds:.1} s, at the response's own end: the engines did not abort it"
                    );
                    checkup.fail("disconnect", phase.label(), told);
                } else {
                    let told = format!("usage was freed within about {seconds:.1} s (by metrics)");
                    checkup.ok("disconnect", phase.label(), told);
                }
            }
            Err(None) => {
                let told = format!("{} s after the disconnect: no usage metrics", terms.within.as_secs());
                checkup.fail("disconnect", phase.label(), told);
                break;
            }
            Err(Some(now)) => {
                let told = format!(
                    "{} s after the disconnect: usage is {:.2} % of a pool higher, with {:+.0} requests: blocks are not freed, \
                     or another client uses the deployment (the phase is the intended one)",
                    terms.within.as_secs(),
                    (now.kv - before.kv).max(0.0) * 100.0,
                    now.requests - before.requests,
                );
                checkup.fail("disconnect", phase.label(), told);
                break;
            }
        }
    }
    let after = Usage::of(&engines).await.map_or(0.0, |usage| usage.expired);
    let ended = after - expired.unwrap_or(after);
    if ended > 0.0 {
        checkup.fail("expiries", "", format!("{ended:.0} leases ended by expiry meanwhile"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_back_when_it_stays_back() {
        let ms = Duration::from_millis;
        let mut stay = Stay::new(ms(500));
        // The engine has not begun yet: nothing is held, for a moment.
        assert_eq!(stay.look(true, ms(0)), None);
        assert_eq!(stay.look(true, ms(100)), None);
        assert_eq!(stay.look(false, ms(200)), None, "here are its blocks");
        assert_eq!(stay.look(true, ms(300)), None);
        assert_eq!(stay.look(true, ms(700)), None);
        assert_eq!(stay.look(true, ms(800)), Some(ms(300)), "back since then");
    }
}
