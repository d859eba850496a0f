//! One forced disconnect per phase, and the proof that every block came back, from the engines' own event logs.
//!
//! Two calm requests show when each phase comes; then clients leave in them. A phase may be shorter than the way of a
//! message: what it was when the client left is judged by the engines' times, and what missed proves something about the
//! phase that it hit.
//!
//! The gap between prefill and decode is the shortest of them, and the one that gateways forget. Where the clock alone
//! does not hit it, decode engines are given a prompt to compute just before the handoff comes, so that they look at it
//! later, and clients leave when the prefill engine says that it has lent ([`occupy`]).

mod occupy;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, json};

use super::checkup::Checkup;
use super::look::Engine;
use crate::disconnect::drive::timing::{Aim, Aims};
use crate::disconnect::plan::phase::Phase;
use crate::disconnect::record::recorder::Recorder;
use crate::disconnect::record::timeline::{Seen, Timeline};
use crate::disconnect::record::watch::{self, Mark, Watch};
use crate::load::plan::prompts::plain;
use crate::load::rng::Rng;
use crate::load::{Call, Client, Endpoint, Leave, Manner, Moment, Outcome, Prompt, Streaming, Wish};
use crate::ops::top::source::now_us;
use occupy::Crew;

/// Tokens of an answer: long enough to be left in the middle.
pub(super) const TOKENS: u32 = 64;
/// Times that a phase is left, where it can be hit so often.
const HITS: u32 = 3;
/// A prompt that is lent while it is computed has no gap; it is halved so often to find one that is computed in one step.
const HALVED: u32 = 4;
/// A prompt has at least so many words.
const WORDS_MIN: usize = 16;
/// For so long nothing more may come, when all that was told of is back.
const QUIET: Duration = Duration::from_millis(150);
/// Between two looks at books, which nobody here needs: the event logs say it.
const BOOKS_EVERY: Duration = Duration::from_secs(5);

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
    let watched =
        engines.iter().map(|engine| (engine.name.clone(), engine.role.clone(), engine.origin.clone()));
    let watching = watch::Terms { prefix: prefix.clone(), every: BOOKS_EVERY, metrics_only: false };
    let watch = match Watch::begin(watched.collect(), &watching, &Arc::new(Recorder::nowhere())).await {
        Ok(watch) => watch,
        Err(error) => {
            return checkup.fail("disconnects", "", format!("cannot read the event logs: {error}"));
        }
    };
    let mut doctor = Doctor {
        client,
        watch,
        terms,
        prefix,
        number: 0,
        words: terms.words,
        aims: Aims::default(),
        proofs: BTreeMap::new(),
        crew: Crew::of(engines, &terms.model),
        did: Vec::new(),
    };
    if !doctor.calm(checkup).await {
        return;
    }
    for phase in Phase::COMMON {
        if !doctor.phase(phase, checkup).await {
            // Blocks that are not back would spoil what follows.
            let failed = |of: &Phase| checkup.has_failed("disconnect", of.label());
            let rest: Vec<_> =
                Phase::COMMON.into_iter().filter(|rest| *rest > phase && !failed(rest)).collect();
            for rest in rest {
                checkup.skip("disconnect", rest.label(), "not tried: another phase failed");
            }
            return;
        }
    }
}

struct Doctor<'a> {
    client: &'a Client,
    watch: Watch,
    terms: &'a Terms,
    prefix: String,
    number: u64,
    /// Of a prompt.
    words: usize,
    aims: Aims,
    proofs: BTreeMap<Phase, Proof>,
    crew: Crew,
    /// What was done besides to hit the phase that is tried.
    did: Vec<String>,
}

/// One call, and what the engines told of it in the end.
struct Made {
    call: Call,
    seen: Seen,
    /// Without legs where no engine told anything.
    line: Timeline,
}

impl Doctor<'_> {
    /// Requests that nobody leaves. False: there is nothing to be left.
    async fn calm(&mut self, checkup: &mut Checkup) -> bool {
        for streaming in [Streaming::Streamed, Streaming::Whole] {
            let made = self.make(streaming, None).await;
            let how = if streaming == Streaming::Whole { "unary" } else { "streamed" };
            match &made.call.outcome {
                Outcome::Done => {}
                other => {
                    checkup.fail("request", how, told(other));
                    return false;
                }
            }
            if made.line.legs.is_empty() {
                checkup.skip(
                    "disconnects",
                    "",
                    "no known engine logged the request: other engines served it, or a component removed its `user` \
                     field (then use --metrics-only)",
                );
                return false;
            }
            let generated: u64 =
                made.line.legs.iter().filter_map(|leg| Some(leg.ended.as_ref()?.generated)).sum();
            // Some are told of in one event; what a prefill engine alone generates is one.
            if generated < made.call.tokens.len() as u64 / 2 {
                let told = format!(
                    "known engines generated {generated} of {} tokens: the decode engine is unknown (add --engine)",
                    made.call.tokens.len()
                );
                checkup.skip("disconnects", "", told);
                return false;
            }
            let open = self.open(&made.line);
            if !open.is_empty() {
                checkup.fail("request", how, format!("completed, but {}", open.join("; ")));
                return false;
            }
            let (blocks, engines) = freed(&made.line);
            let path = if made.line.was_handed_over() {
                "prefill and decode on two engines"
            } else {
                "served by one engine"
            };
            let took = made.call.e2e().as_secs_f64() * 1e3;
            checkup.ok(
                "request",
                how,
                format!("{path}, {took:.1} ms; {blocks} blocks of {engines} engines freed"),
            );
        }
        true
    }

    /// Tries to leave in a phase. False: blocks did not come back.
    async fn phase(&mut self, phase: Phase, checkup: &mut Checkup) -> bool {
        let mut hit: BTreeMap<&'static str, u32> = BTreeMap::new();
        self.did.clear();
        self.words = self.terms.words;
        if phase == Phase::Gap {
            self.find_a_gap().await;
        }
        for attempt in 0..self.terms.tries {
            if self.proofs.get(&phase).is_some_and(|proof| proof.left >= HITS) {
                break;
            }
            let streaming = if phase == Phase::Unary { Streaming::Whole } else { Streaming::Streamed };
            let Some(when) = self.when(phase, attempt) else { break };
            let aided = phase == Phase::Gap && attempt >= self.terms.tries / 3;
            let made = match self.aims.median(phase).filter(|_| aided && self.crew.is_there()) {
                None => self.make(streaming, Some(when)).await,
                Some((lent_after, _)) => self.make_while_occupied(streaming, lent_after, attempt).await,
            };
            let was = match made.call.left {
                Some(left) => made.line.phase_at(&made.seen, left.us()),
                None if matches!(made.call.outcome, Outcome::Done) => None,
                None => {
                    checkup.fail("disconnect", phase.label(), told(&made.call.outcome));
                    return true;
                }
            };
            // Its end was there before the client left.
            let Some(was) = was else {
                *hit.entry("completed").or_insert(0) += 1;
                continue;
            };
            *hit.entry(was.label()).or_insert(0) += 1;
            let open = self.open(&made.line);
            if !open.is_empty() {
                let within = self.terms.within.as_secs();
                let told = format!("{within} s after the disconnect: {}", open.join("; "));
                checkup.fail("disconnect", was.label(), told);
                return false;
            }
            self.prove(was, &made);
        }
        if phase == Phase::Gap {
            self.say_of_the_crew();
            self.words = self.terms.words;
        }
        self.tell(phase, &hit, checkup);
        true
    }

    /// Blocks that are lent while they are computed are read before the prefill is over: such a request has no gap. A
    /// shorter prompt, computed in one step, has one.
    async fn find_a_gap(&mut self) {
        for _ in 0..HALVED {
            if self.aims.median(Phase::Gap).is_some() || self.words / 2 < WORDS_MIN {
                return;
            }
            self.words /= 2;
            let made = self.make(Streaming::Streamed, None).await;
            if !made.line.was_handed_over() {
                break;
            }
            if self.aims.median(Phase::Gap).is_some() {
                self.did.push(format!("with prompts of {} words, leased when complete", self.words));
                return;
            }
        }
        self.words = self.terms.words;
    }

    /// Makes a call whose client leaves as soon as its blocks are lent, while decode engines compute something else.
    async fn make_while_occupied(
        &mut self,
        streaming: Streaming,
        lent_after: Duration,
        attempt: u32,
    ) -> Made {
        let tag = format!("{}{}", self.prefix, self.number + 1);
        let mut rng = Rng::stream(u64::from(attempt), &tag);
        let prompts = self.crew.occupy(&self.terms.model, &tag, self.words, lent_after, attempt);
        let delay = Duration::from_micros(rng.below(occupy::LEAVES_WITHIN_US));
        // Learnt from it would be what is so only while engines are occupied.
        let learnt = std::mem::take(&mut self.aims);
        let made = self.make(streaming, Some(When::Aim(Aim::After(Mark::Lent, delay)))).await;
        self.aims = learnt;
        self.crew.rest(prompts).await;
        made
    }

    fn say_of_the_crew(&mut self) {
        let (taken, refused) = self.crew.counts();
        if let (1.., Some((from, to))) = (taken + refused, self.aims.median(Phase::Gap)) {
            let short = to.saturating_sub(from).as_secs_f64() * 1e3;
            let prompts = if taken == 1 { "a prompt".to_owned() } else { format!("{taken} prompts") };
            let no = if refused > 0 { format!(" ({refused} refused)") } else { String::new() };
            self.did.push(format!(
                "the gap is {short:.1} ms, so the doctor delayed decode engines by {prompts}{no}"
            ));
        }
    }

    fn prove(&mut self, phase: Phase, made: &Made) {
        let proof = self.proofs.entry(phase).or_default();
        proof.left += 1;
        let (blocks, engines) = freed(&made.line);
        if let (Some(home), Some(left)) = (made.line.home_at(), made.call.left) {
            proof.longest_us = proof.longest_us.max(home.saturating_sub(left.us()));
        }
        proof.blocks = proof.blocks.max(blocks);
        proof.engines = proof.engines.max(engines);
    }

    fn tell(&self, phase: Phase, hit: &BTreeMap<&'static str, u32>, checkup: &mut Checkup) {
        let Some(proof) = self.proofs.get(&phase) else {
            let seen =
                hit.iter().map(|(what, times)| format!("{times} × {what}")).collect::<Vec<_>>().join(", ");
            let why = if seen.is_empty() {
                "no request has this phase".to_owned()
            } else {
                format!("too short to hit in {} requests: {seen}{}", self.terms.tries, self.aside())
            };
            return checkup.skip("disconnect", phase.label(), why);
        };
        let times = if proof.left == 1 {
            "cancelled once".to_owned()
        } else {
            format!("cancelled {} times", proof.left)
        };
        let told = if proof.blocks == 0 {
            format!("{times}: the request ended, and no engine held blocks for it")
        } else {
            let longest = proof.longest_us as f64 / 1e3;
            let engines = if proof.engines == 1 { "engine" } else { "engines" };
            format!(
                "{times}: all blocks (up to {} of {} {engines}) freed within {longest:.1} ms",
                proof.blocks, proof.engines
            )
        };
        checkup.ok("disconnect", phase.label(), told + &self.aside());
    }

    fn aside(&self) -> String {
        self.did.iter().map(|did| format!("; {did}")).collect()
    }

    /// When to leave; `None` where the phase does not occur.
    fn when(&self, phase: Phase, attempt: u32) -> Option<When> {
        match phase {
            Phase::Queued => Some(When::Aim(Aim::At(Duration::from_micros(u64::from(attempt) * 50)))),
            Phase::Stream => Some(When::Tokens(2)),
            Phase::Prefill | Phase::Reply | Phase::Gap | Phase::Fetch | Phase::FirstToken | Phase::Unary => {
                let mut rng = Rng::stream(u64::from(attempt), phase.label());
                self.aims.at(phase, true, &mut rng).map(When::Aim)
            }
        }
    }

    /// Who still holds something of a request, and what.
    fn open(&self, line: &Timeline) -> Vec<String> {
        let named = |(engine, what): (usize, &str)| {
            let name = self.watch.engines.get(engine).map(|engine| engine.facts().name).unwrap_or_default();
            format!("{name}: {what}")
        };
        line.open().map(named).collect()
    }

    /// Makes one call and waits until every block of it is back.
    async fn make(&mut self, streaming: Streaming, when: Option<When>) -> Made {
        self.number += 1;
        let tag = format!("{}{}", self.prefix, self.number);
        let prompt = Prompt::Text(prompt(&tag, self.words));
        let extra = Map::from_iter([("temperature".to_owned(), json!(0))]);
        let wish = Wish {
            ignore_eos: true,
            streaming,
            user: Some(&tag),
            extra: Some(&extra),
            ..Wish::new(Endpoint::Completions, &self.terms.model, &prompt, TOKENS)
        };
        let began = Instant::now();
        let (leave, leaving) = match when {
            None => (Leave::Never, None),
            Some(When::Tokens(tokens)) => (Leave::AfterTokens(tokens), None),
            Some(When::Aim(aim)) => {
                let (leave, leaving) = aim.leave(began, &self.watch.feed, &tag);
                (leave, Some(leaving))
            }
        };
        let call = self.client.call(&wish.ask(), &leave, Manner::Fin).await;
        leaving.inspect(|task| task.abort());
        let line = self.settled(&tag).await;
        let seen = Seen {
            began: Moment::of(began).us(),
            stream: streaming == Streaming::Streamed,
            first_token: call.tokens.first().map(|token| token.us()),
            last_token: call.tokens.last().map(|token| token.us()),
            done: call.is_done().then_some(call.ended.us()),
        };
        self.aims.learn(&seen, Some(&line));
        Made { call, seen, line }
    }

    /// Waits until nobody holds anything of a request, and nothing more is told of it for a moment.
    async fn settled(&self, tag: &str) -> Timeline {
        let deadline = Instant::now() + self.terms.within;
        let settled = |line: &Timeline| !line.legs.is_empty() && line.open().next().is_none();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.watch.feed.until(tag, left, settled).await.unwrap_or_default();
            if !settled(&line) || left.is_zero() {
                return line;
            }
            tokio::time::sleep(QUIET).await;
            let line = self.watch.feed.forget(tag).unwrap_or_default();
            if settled(&line) {
                return line;
            }
        }
    }
}

/// When a client leaves.
#[derive(Clone, Copy)]
enum When {
    Tokens(usize),
    Aim(Aim),
}

/// Blocks that were held and are back, and engines that held them.
fn freed(line: &Timeline) -> (u64, usize) {
    let freed = line.legs.iter().filter_map(|leg| leg.freed.first());
    (freed.clone().map(|(_, blocks)| *blocks).sum(), freed.count())
}

/// A prompt that no prefix cache knows.
pub(super) fn prompt(tag: &str, words: usize) -> String {
    let mut rng = Rng::stream(0, tag);
    let first = format!("{:08x}", rng.next() as u32);
    plain(&first, words, &mut rng)
}

/// What became of a call that should have been answered.
pub(super) fn told(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Done => "completed".to_owned(),
        Outcome::Left => "cancelled".to_owned(),
        Outcome::Refused { status, message, .. } => format!("refused with {status}: {message}"),
        Outcome::Failed { message, .. } => format!("error in the stream: {message}"),
        Outcome::Broken { stage, why } => format!("broken ({}): {why}", stage.as_str()),
        Outcome::TimedOut { stage } => format!("no response in time ({})", stage.as_str()),
    }
}
