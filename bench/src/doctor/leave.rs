//! One forced disconnect per phase, and the proof that every block came back, from the engines' own event logs.
//!
//! Two calm requests show when each phase comes; then clients leave in them. A phase may be shorter than the way of a
//! message: what it was when the client left is judged by the engines' times, and what missed proves something about the
//! phase that it hit.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Map, json};
use tokio_util::sync::CancellationToken;

use super::checkup::Checkup;
use super::life::{Life, Phase};
use super::log::Log;
use super::look::Engine;
use crate::load::rng::Rng;
use crate::load::{Call, Client, Endpoint, Leave, Manner, Moment, Outcome, Prompt, Streaming, Wish};
use crate::top::source::now_us;

/// Tokens of an answer: long enough to be left in the middle.
pub(super) const TOKENS: u32 = 64;
/// Times that a phase is left, where it can be hit so often.
const HITS: u32 = 3;
/// For so long nothing more may come, when all that was told of is back.
const QUIET: Duration = Duration::from_millis(150);
/// A timer of the system is this late at most, as a rule. The rest is spun.
const TIMER_IS_LATE: Duration = Duration::from_micros(1_300);
/// Words of prompts.
const WORDS: [&str; 16] = [
    "the", "red", "box", "holds", "a", "key", "and", "dog", "runs", "to", "house", "of", "Paris", "with",
    "two", "old",
];

/// What is asked and how often.
pub(super) struct Terms {
    pub(super) model: String,
    pub(super) tries: u32,
    pub(super) words: usize,
    pub(super) within: Duration,
}

/// What is known of a phase.
#[derive(Default)]
struct Proof {
    left: u32,
    /// From the client's leaving to the last block back, the longest.
    longest_us: u64,
    blocks: u64,
    engines: usize,
}

/// Leaves once in each phase, exactly.
pub(super) async fn exactly(client: &Client, engines: &[&Engine], terms: &Terms, checkup: &mut Checkup) {
    let prefix = format!("baton-doctor-{:x}-{:x}-", std::process::id(), now_us());
    let log = match Log::follow(engines, &prefix).await {
        Ok(log) => log,
        Err(error) => {
            return checkup.fail("disconnects", "", format!("the event logs cannot be followed: {error}"));
        }
    };
    let mut doctor =
        Doctor { client, log, terms, prefix, number: 0, spans: BTreeMap::new(), proofs: BTreeMap::new() };
    if !doctor.calm(checkup).await {
        return;
    }
    for phase in Phase::ALL {
        if !doctor.phase(phase, checkup).await {
            // Blocks that are not back would spoil what follows.
            for rest in Phase::ALL.iter().filter(|rest| **rest > phase) {
                checkup.skip("disconnect", rest.label(), "a phase before it failed");
            }
            return;
        }
    }
}

struct Doctor<'a> {
    client: &'a Client,
    log: Log,
    terms: &'a Terms,
    prefix: String,
    number: u64,
    /// When each phase was in the latest request that came so far, after that request began.
    spans: BTreeMap<Phase, (u64, u64)>,
    proofs: BTreeMap<Phase, Proof>,
}

/// One call, and what the engines told of it in the end.
struct Made {
    call: Call,
    life: Life,
}

impl Doctor<'_> {
    /// Requests that nobody leaves. False: there is nothing to be left.
    async fn calm(&mut self, checkup: &mut Checkup) -> bool {
        for streaming in [Streaming::Streamed, Streaming::Whole] {
            let made = self.make(streaming, Aim::Never).await;
            let how = if streaming == Streaming::Whole { "in one piece" } else { "streamed" };
            match &made.call.outcome {
                Outcome::Done => {}
                other => {
                    checkup.fail("request", how, told(other));
                    return false;
                }
            }
            if made.life.is_empty() {
                checkup.skip(
                    "disconnects",
                    "",
                    "no engine in view told of our request: it went elsewhere, or its `user` field was taken out",
                );
                return false;
            }
            let open = made.life.open();
            if !open.is_empty() {
                checkup.fail("request", how, format!("it was answered, and {}", open.join("; ")));
                return false;
            }
            let (blocks, engines) = made.life.freed();
            let path = if made.life.was_handed_over() {
                "prefilled and decoded apart"
            } else {
                "served by one engine"
            };
            let took = made.call.e2e().as_secs_f64() * 1e3;
            checkup.ok(
                "request",
                how,
                format!("{path}, {took:.1} ms; {blocks} blocks of {engines} engines came back"),
            );
        }
        true
    }

    /// Tries to leave in a phase. False: blocks did not come back.
    async fn phase(&mut self, phase: Phase, checkup: &mut Checkup) -> bool {
        let mut hit: BTreeMap<&'static str, u32> = BTreeMap::new();
        for attempt in 0..self.terms.tries {
            if self.proofs.get(&phase).is_some_and(|proof| proof.left >= HITS) {
                break;
            }
            let streaming = if phase == Phase::Unary { Streaming::Whole } else { Streaming::Streamed };
            let Some(aim) = self.aim(phase, attempt) else { break };
            let made = self.make(streaming, aim).await;
            let was = match made.call.left {
                Some(left) => {
                    let first = made.call.tokens.first().map(|token| token.us());
                    made.life.phase(left.us(), first, streaming == Streaming::Streamed)
                }
                None => {
                    *hit.entry("its end").or_insert(0) += 1;
                    if !matches!(made.call.outcome, Outcome::Done) {
                        checkup.fail("disconnect", phase.label(), told(&made.call.outcome));
                        return true;
                    }
                    continue;
                }
            };
            *hit.entry(was.label()).or_insert(0) += 1;
            let open = made.life.open();
            if !open.is_empty() {
                let within = self.terms.within.as_secs();
                let told = format!("{within} s after the client left: {}", open.join("; "));
                checkup.fail("disconnect", was.label(), told);
                return false;
            }
            self.prove(was, &made);
        }
        self.tell(phase, &hit, checkup);
        true
    }

    fn prove(&mut self, phase: Phase, made: &Made) {
        let proof = self.proofs.entry(phase).or_default();
        proof.left += 1;
        let (blocks, engines) = made.life.freed();
        if let (Some(home), Some(left)) = (made.life.home_us(), made.call.left) {
            proof.longest_us = proof.longest_us.max(home.saturating_sub(left.us()));
        }
        proof.blocks = proof.blocks.max(blocks);
        proof.engines = proof.engines.max(engines);
    }

    fn tell(&self, phase: Phase, hit: &BTreeMap<&'static str, u32>, checkup: &mut Checkup) {
        let Some(proof) = self.proofs.get(&phase) else {
            let seen =
                hit.iter().map(|(what, times)| format!("{times} in {what}")).collect::<Vec<_>>().join(", ");
            let why = if seen.is_empty() {
                "no request here comes through this phase".to_owned()
            } else {
                format!("over too quickly to be hit in {} tries: {seen}", self.terms.tries)
            };
            return checkup.skip("disconnect", phase.label(), why);
        };
        let times =
            if proof.left == 1 { "left once".to_owned() } else { format!("left {} times", proof.left) };
        let told = if proof.blocks == 0 {
            format!("{times}: no engine held a block for it")
        } else {
            let longest = proof.longest_us as f64 / 1e3;
            let engines = if proof.engines == 1 { "engine" } else { "engines" };
            format!(
                "{times}: all blocks (up to {} of {} {engines}) were back {longest:.1} ms after the client had gone, at \
                 the latest",
                proof.blocks, proof.engines
            )
        };
        checkup.ok("disconnect", phase.label(), told);
    }

    /// When to leave; `None` where the phase does not occur.
    fn aim(&self, phase: Phase, attempt: u32) -> Option<Aim> {
        match phase {
            Phase::Queued => return Some(Aim::At(Duration::from_micros(u64::from(attempt) * 50))),
            Phase::Stream => return Some(Aim::Tokens(2)),
            Phase::Prefill | Phase::Gap | Phase::Fetch | Phase::FirstToken | Phase::Unary => {}
        }
        let (from, to) = *self.spans.get(&phase)?;
        // An engine's word that the phase has begun may come in time; if not, the clock may hit it.
        let begins = match phase {
            Phase::Gap => Some("lent"),
            Phase::Fetch => Some("fetching"),
            Phase::FirstToken => Some("fetched"),
            _ => None,
        };
        if let Some(kind) = begins.filter(|_| attempt.is_multiple_of(2)) {
            return Some(Aim::Told(kind));
        }
        // First the middle, then around it: phases move from one request to the next.
        const SHARES: [f64; 8] = [0.5, 0.25, 0.75, 0.1, 0.9, 0.0, 1.0, -0.3];
        let share = SHARES[(attempt / 2) as usize % SHARES.len()];
        let at = from as f64 + (to - from) as f64 * share;
        Some(Aim::At(Duration::from_micros(at.max(0.0) as u64)))
    }

    /// Makes one call and waits until every block of it is back.
    async fn make(&mut self, streaming: Streaming, aim: Aim) -> Made {
        self.number += 1;
        let tag = format!("{}{}", self.prefix, self.number);
        let prompt = Prompt::Text(prompt(&tag, self.terms.words));
        let extra = Map::from_iter([("temperature".to_owned(), json!(0))]);
        let wish = Wish {
            ignore_eos: true,
            streaming,
            user: Some(&tag),
            extra: Some(&extra),
            ..Wish::new(Endpoint::Completions, &self.terms.model, &prompt, TOKENS)
        };
        let began = Instant::now();
        let (leave, leaving) = match aim {
            Aim::Never => (Leave::Never, None),
            Aim::Tokens(tokens) => (Leave::AfterTokens(tokens), None),
            Aim::Told(kind) => (Leave::When(self.log.when(&tag, kind)), None),
            Aim::At(delay) => {
                let now = CancellationToken::new();
                let leaving = now.clone();
                let task = tokio::spawn(async move {
                    until(began + delay).await;
                    leaving.cancel();
                });
                (Leave::When(now), Some(task))
            }
        };
        let call = self.client.call(&wish.ask(), &leave, Manner::Fin).await;
        leaving.inspect(|task| task.abort());
        let life = self.settled(&tag).await;
        let began_us = Moment::of(began).us();
        let first = call.tokens.first().map(|token| token.us());
        for (phase, (from, to)) in life.spans(call.sent.unwrap_or(call.began).us(), first) {
            // A request that was left shows the phases before its end only.
            if call.left.is_none_or(|left| to < left.us()) {
                self.spans.insert(phase, (from.saturating_sub(began_us), to.saturating_sub(began_us)));
            }
        }
        Made { call, life }
    }

    /// Waits until nobody holds anything of a request, and nothing more is told of it for a moment.
    async fn settled(&self, tag: &str) -> Life {
        let deadline = Instant::now() + self.terms.within;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let life = self.log.until(tag, left, |life| !life.is_empty() && life.open().is_empty()).await;
            if !life.open().is_empty() || left.is_zero() {
                return life;
            }
            tokio::time::sleep(QUIET).await;
            let life = self.log.life(tag);
            if life.open().is_empty() {
                return life;
            }
        }
    }
}

/// When a client leaves.
#[derive(Clone, Copy)]
enum Aim {
    Never,
    Tokens(usize),
    /// When an engine tells this.
    Told(&'static str),
    /// So long after it began.
    At(Duration),
}

/// Waits as exactly as a thread can: the last millisecond it looks at the clock.
async fn until(moment: Instant) {
    if let Some(early) = moment.checked_sub(TIMER_IS_LATE)
        && early > Instant::now()
    {
        tokio::time::sleep_until(early.into()).await;
    }
    while Instant::now() < moment {
        tokio::task::yield_now().await;
    }
}

/// A prompt that no prefix cache knows.
pub(super) fn prompt(tag: &str, words: usize) -> String {
    let mut rng = Rng::stream(0, tag);
    let mut text = format!("{:08x}", rng.next() as u32);
    for _ in 1..words {
        text.push(' ');
        text.push_str(WORDS[rng.below(WORDS.len() as u64) as usize]);
    }
    text
}

/// What became of a call that should have been answered.
pub(super) fn told(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Done => "answered".to_owned(),
        Outcome::Left => "left".to_owned(),
        Outcome::Refused { status, message, .. } => format!("refused with {status}: {message}"),
        Outcome::Failed { message, .. } => format!("an error in the stream: {message}"),
        Outcome::Broken { stage, why } => format!("broken ({}): {why}", stage.as_str()),
        Outcome::TimedOut { stage } => format!("no answer in time ({})", stage.as_str()),
    }
}
