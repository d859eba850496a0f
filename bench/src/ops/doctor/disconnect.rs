//! One forced disconnect per phase. The engines' event logs prove that all blocks are freed.
//!
//! Two requests without a disconnect show when each phase occurs. Then clients disconnect in each phase. A phase may
//! be shorter than the delay of a message. The engines' times therefore decide in which phase a disconnect took
//! effect. A disconnect that missed its phase counts for the phase that it hit.
//!
//! The gap between prefill and decode is the shortest phase, and the one that gateways forget. If timing alone does
//! not hit the gap, decode engines compute another prompt just before the handoff, which delays its acceptance. The
//! client then disconnects when the prefill engine reports the lease ([`occupy`]).
//!
//! Before the gap is the reply window, in which the prefill engine's reply is on its way. An engine that logs `replied`
//! shows both of its ends. On other engines an abort by request id that ends the lease shows that the router had no
//! reply.

mod occupy;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, json};

use super::checkup::Checkup;
use super::engine::EngineInfo;
use crate::disconnect::drive::phase_times::{CancelPoint, PhaseTimes};
use crate::disconnect::plan::phase::{Phase, REPLY_DROPPED};
use crate::disconnect::record::raw::ClientTimes;
use crate::disconnect::record::recorder::Recorder;
use crate::disconnect::record::timeline::Timeline;
use crate::disconnect::record::watch::{self, EngineEndpoint, EngineWatch, Milestone};
use crate::load::plan::prompts::plain;
use crate::load::rng::Rng;
use crate::load::{
    Call, CallOutcome, CancelTrigger, Client, CompletionSpec, DisconnectKind, Endpoint, Moment, Prompt,
    Streaming,
};
use crate::ops::top::source::now_us;
use occupy::DecodeOccupier;

/// Tokens of a response: enough to disconnect in the middle.
pub(super) const TOKENS: u32 = 64;
/// Maximum number of hits per phase.
const HITS: u32 = 3;
/// How often a prompt is halved to find one that is computed in one step. An early handoff has no gap.
const HALVED: u32 = 4;
/// Minimum words of a prompt.
const WORDS_MIN: usize = 16;
/// After all blocks are freed, no event may arrive for this time.
const QUIET: Duration = Duration::from_millis(150);
/// Interval of reads of the engines' state. This check needs only the event logs.
const ENGINE_STATE_INTERVAL: Duration = Duration::from_secs(5);

/// The requests, and how many.
pub(super) struct ProbeOptions {
    pub(super) model: String,
    pub(super) tries: u32,
    pub(super) words: usize,
    pub(super) within: Duration,
}

/// Verified facts about a phase.
#[derive(Default)]
struct PhaseProof {
    left: u32,
    /// The longest time from a disconnect until the last block was freed.
    longest_us: u64,
    blocks: u64,
    engines: usize,
}

/// Cancels requests in each phase.
pub(super) async fn probe_phases(
    client: &Client,
    engines: &[&EngineInfo],
    terms: &ProbeOptions,
    checkup: &mut Checkup,
) {
    let prefix = format!("baton-doctor-{:x}-{:x}-", std::process::id(), now_us());
    let watched = engines.iter().map(|engine| EngineEndpoint {
        name: engine.name.clone(),
        role: engine.role.clone(),
        service: engine.service.clone(),
    });
    let watching =
        watch::WatchOptions { prefix: prefix.clone(), every: ENGINE_STATE_INTERVAL, metrics_only: false };
    let watch = match EngineWatch::begin(watched.collect(), &watching, &Arc::new(Recorder::discard())).await {
        Ok(watch) => watch,
        Err(error) => {
            return checkup.fail("disconnects", "", format!("cannot read the event logs: {error}"));
        }
    };
    let mut doctor = DisconnectProbe {
        client,
        watch,
        terms,
        prefix,
        number: 0,
        words: terms.words,
        short_words: None,
        aims: PhaseTimes::default(),
        proofs: BTreeMap::new(),
        occupier: DecodeOccupier::of(engines, &terms.model),
        actions: Vec::new(),
    };
    if !doctor.calm(checkup).await {
        return;
    }
    for phase in Phase::ALL {
        if !doctor.phase(phase, checkup).await {
            // Blocks that are not freed would distort later phases.
            let failed = |of: &Phase| checkup.has_failed("disconnect", of.label());
            let rest: Vec<_> = Phase::ALL.into_iter().filter(|rest| *rest > phase && !failed(rest)).collect();
            for rest in rest {
                checkup.skip("disconnect", rest.label(), "not tried: another phase failed");
            }
            return;
        }
    }
}

struct DisconnectProbe<'a> {
    client: &'a Client,
    watch: EngineWatch,
    terms: &'a ProbeOptions,
    prefix: String,
    number: u64,
    /// Words of a prompt.
    words: usize,
    /// Words of a prompt that is leased when complete, if longer ones have an early handoff.
    short_words: Option<usize>,
    aims: PhaseTimes,
    proofs: BTreeMap<Phase, PhaseProof>,
    occupier: DecodeOccupier,
    /// Measures taken to hit the current phase, besides timing.
    actions: Vec<String>,
}

/// One call and the engines' events about it.
struct ProbeCall {
    call: Call,
    times: ClientTimes,
    /// Has no legs if no engine reported an event.
    line: Timeline,
}

impl DisconnectProbe<'_> {
    /// Makes requests without a disconnect. Returns false if phases cannot be tested.
    async fn calm(&mut self, checkup: &mut Checkup) -> bool {
        for streaming in [Streaming::Streamed, Streaming::Whole] {
            let made = self.make_call(streaming, None).await;
            let how = if streaming == Streaming::Whole { "unary" } else { "streamed" };
            match &made.call.outcome {
                CallOutcome::Done => {}
                other => {
                    checkup.fail("request", how, describe_outcome(other));
                    return false;
                }
            }
            if made.line.legs.is_empty() {
                let message = "no known engine logged the request: other engines served it, or a component removed its `user` \
                     field (then use --metrics-only)";
                checkup.skip("disconnects", "", message);
                return false;
            }
            let generated: u64 =
                made.line.legs.iter().filter_map(|leg| Some(leg.ended.as_ref()?.generated)).sum();
            // One event may report several tokens. The token of a prefill engine alone is one.
            if generated < made.call.tokens.len() as u64 / 2 {
                let message = format!(
                    "known engines generated {generated} of {} tokens: the decode engine is unknown (add --engine)",
                    made.call.tokens.len()
                );
                checkup.skip("disconnects", "", message);
                return false;
            }
            let open = self.open(&made.line);
            if !open.is_empty() {
                checkup.fail("request", how, format!("completed, but {}", open.join("; ")));
                return false;
            }
            let (blocks, engines) = freed(&made.line);
            let path = if made.line.had_handoff() {
                "prefill and decode on two engines"
            } else {
                "served by one engine"
            };
            let took = made.call.e2e().as_secs_f64() * 1e3;
            let message = format!("{path}, {took:.1} ms; {blocks} blocks of {engines} engines freed");
            checkup.ok("request", how, message);
        }
        true
    }

    /// Tries to disconnect in a phase. Returns false if blocks were not freed.
    async fn phase(&mut self, phase: Phase, checkup: &mut Checkup) -> bool {
        let mut hit: BTreeMap<&'static str, u32> = BTreeMap::new();
        self.actions.clear();
        self.words = self.terms.words;
        if matches!(phase, Phase::Reply | Phase::Gap) {
            self.find_a_gap().await;
        }
        for attempt in 0..self.terms.tries {
            if self.proofs.get(&phase).is_some_and(|proof| proof.left >= HITS) {
                break;
            }
            let streaming = if phase == Phase::Unary { Streaming::Whole } else { Streaming::Streamed };
            let Some(when) = self.when(phase, attempt) else { break };
            let aided = phase == Phase::Gap && attempt >= self.terms.tries / 3;
            let made = match self.aims.median(phase).filter(|_| aided && self.occupier.is_there()) {
                None => self.make_call(streaming, Some(when)).await,
                Some((lent_after, _)) => self.make_call_while_occupied(streaming, lent_after, attempt).await,
            };
            let was = match made.call.left {
                Some(left) => made.line.phase_at(&made.times, left.us()),
                None if matches!(made.call.outcome, CallOutcome::Done) => None,
                None => {
                    checkup.fail("disconnect", phase.label(), describe_outcome(&made.call.outcome));
                    return true;
                }
            };
            // The request ended before the client disconnected.
            let Some(was) = was else {
                *hit.entry("completed").or_insert(0) += 1;
                continue;
            };
            *hit.entry(was.label()).or_insert(0) += 1;
            let open = self.open(&made.line);
            if !open.is_empty() {
                let within = self.terms.within.as_secs();
                let dropped = made.line.dropped_reply();
                let cause = if dropped { format!("; {REPLY_DROPPED}") } else { String::new() };
                let message = format!("{within} s after the disconnect: {}{cause}", open.join("; "));
                checkup.fail("disconnect", was.label(), message);
                return false;
            }
            self.prove(was, &made);
        }
        if phase == Phase::Gap {
            self.note_occupancy();
        }
        self.report_phase(phase, &hit, checkup);
        true
    }

    /// A request with an early handoff has neither a gap nor a reply after its prefill. A shorter prompt, computed in
    /// one step, has both.
    async fn find_a_gap(&mut self) {
        if let Some(words) = self.short_words {
            return self.shorten_to(words);
        }
        for _ in 0..HALVED {
            if self.aims.median(Phase::Gap).is_some() || self.words / 2 < WORDS_MIN {
                return;
            }
            self.words /= 2;
            let made = self.make_call(Streaming::Streamed, None).await;
            if !made.line.had_handoff() {
                break;
            }
            if self.aims.median(Phase::Gap).is_some() {
                return self.shorten_to(self.words);
            }
        }
        self.words = self.terms.words;
    }

    fn shorten_to(&mut self, words: usize) {
        (self.words, self.short_words) = (words, Some(words));
        self.actions.push(format!("with prompts of {words} words, leased when complete"));
    }

    /// Makes a call whose client disconnects as soon as its blocks are leased, while decode engines compute another
    /// prompt.
    async fn make_call_while_occupied(
        &mut self,
        streaming: Streaming,
        lent_after: Duration,
        attempt: u32,
    ) -> ProbeCall {
        let tag = format!("{}{}", self.prefix, self.number + 1);
        let mut rng = Rng::stream(u64::from(attempt), &tag);
        let prompts = self.occupier.occupy(&self.terms.model, &tag, self.words, lent_after, attempt);
        let delay = Duration::from_micros(rng.below(occupy::LEAVES_WITHIN_US));
        // Times of occupied engines are not typical and must not be learnt.
        let learnt = std::mem::take(&mut self.aims);
        let made = self
            .make_call(streaming, Some(CancelTiming::Aim(CancelPoint::After(Milestone::Lent, delay))))
            .await;
        self.aims = learnt;
        self.occupier.rest(prompts).await;
        made
    }

    fn note_occupancy(&mut self) {
        let (taken, refused) = self.occupier.counts();
        if let (1.., Some((from, to))) = (taken + refused, self.aims.median(Phase::Gap)) {
            let short = to.saturating_sub(from).as_secs_f64() * 1e3;
            let prompts = if taken == 1 { "a prompt".to_owned() } else { format!("{taken} prompts") };
            let no = if refused > 0 { format!(" ({refused} refused)") } else { String::new() };
            self.actions.push(format!(
                "the gap is {short:.1} ms, so the doctor delayed decode engines by {prompts}{no}"
            ));
        }
    }

    fn prove(&mut self, phase: Phase, made: &ProbeCall) {
        let proof = self.proofs.entry(phase).or_default();
        proof.left += 1;
        let (blocks, engines) = freed(&made.line);
        if let (Some(freed), Some(left)) = (made.line.all_freed_at(), made.call.left) {
            proof.longest_us = proof.longest_us.max(freed.saturating_sub(left.us()));
        }
        proof.blocks = proof.blocks.max(blocks);
        proof.engines = proof.engines.max(engines);
    }

    fn report_phase(&self, phase: Phase, hit: &BTreeMap<&'static str, u32>, checkup: &mut Checkup) {
        let Some(proof) = self.proofs.get(&phase) else {
            let hits =
                hit.iter().map(|(what, times)| format!("{times} × {what}")).collect::<Vec<_>>().join(", ");
            let why = if hits.is_empty() {
                "no request has this phase".to_owned()
            } else {
                format!("too short to hit in {} requests: {hits}{}", self.terms.tries, self.aside())
            };
            return checkup.skip("disconnect", phase.label(), why);
        };
        let times = if proof.left == 1 {
            "cancelled once".to_owned()
        } else {
            format!("cancelled {} times", proof.left)
        };
        let message = if proof.blocks == 0 {
            format!("{times}: the request ended, and no engine held blocks for it")
        } else {
            let longest = proof.longest_us as f64 / 1e3;
            let engines = if proof.engines == 1 { "engine" } else { "engines" };
            format!(
                "{times}: all blocks (up to {} of {} {engines}) freed within {longest:.1} ms",
                proof.blocks, proof.engines
            )
        };
        checkup.ok("disconnect", phase.label(), message + &self.aside());
    }

    fn aside(&self) -> String {
        self.actions.iter().map(|did| format!("; {did}")).collect()
    }

    /// When to disconnect. `None` if the phase does not occur.
    fn when(&self, phase: Phase, attempt: u32) -> Option<CancelTiming> {
        match phase {
            Phase::Queued => {
                Some(CancelTiming::Aim(CancelPoint::At(Duration::from_micros(u64::from(attempt) * 50))))
            }
            Phase::Stream => Some(CancelTiming::Tokens(2)),
            Phase::Prefill | Phase::Reply | Phase::Gap | Phase::Fetch | Phase::FirstToken | Phase::Unary => {
                let mut rng = Rng::stream(u64::from(attempt), phase.label());
                self.aims.at(phase, true, &mut rng).map(CancelTiming::Aim)
            }
        }
    }

    /// The engines that still hold blocks of a request.
    fn open(&self, line: &Timeline) -> Vec<String> {
        let named = |(engine, what): (usize, &str)| {
            let name = self.watch.engines.get(engine).map(|engine| engine.record().name).unwrap_or_default();
            format!("{name}: {what}")
        };
        line.unfinished().map(named).collect()
    }

    /// Makes one call and waits until all its blocks are freed.
    async fn make_call(&mut self, streaming: Streaming, when: Option<CancelTiming>) -> ProbeCall {
        self.number += 1;
        let tag = format!("{}{}", self.prefix, self.number);
        let prompt = Prompt::Text(prompt(&tag, self.words));
        let extra = Map::from_iter([("temperature".to_owned(), json!(0))]);
        let spec = CompletionSpec {
            ignore_eos: true,
            streaming,
            user: Some(&tag),
            extra: Some(&extra),
            ..CompletionSpec::new(Endpoint::Completions, &self.terms.model, &prompt, TOKENS)
        };
        let began = Instant::now();
        let (leave, leaving) = match when {
            None => (CancelTrigger::Never, None),
            Some(CancelTiming::Tokens(tokens)) => (CancelTrigger::AfterTokens(tokens), None),
            Some(CancelTiming::Aim(aim)) => {
                let (leave, leaving) = aim.leave(began, &self.watch.feed, &tag);
                (leave, Some(leaving))
            }
        };
        let call = self.client.call(&spec.prepare(), &leave, DisconnectKind::Fin).await;
        leaving.inspect(|task| task.abort());
        let line = self.wait_until_settled(&tag).await;
        let times = ClientTimes {
            began: Moment::of(began).us(),
            stream: streaming == Streaming::Streamed,
            first_token: call.tokens.first().map(|token| token.us()),
            last_token: call.tokens.last().map(|token| token.us()),
            done: call.is_done().then_some(call.ended.us()),
        };
        self.aims.learn(&times, Some(&line));
        ProbeCall { call, times, line }
    }

    /// Waits until no engine holds blocks of a request and no further event arrives for [`QUIET`].
    async fn wait_until_settled(&self, tag: &str) -> Timeline {
        let deadline = Instant::now() + self.terms.within;
        let settled = |line: &Timeline| !line.legs.is_empty() && line.unfinished().next().is_none();
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

/// When a client disconnects.
#[derive(Clone, Copy)]
enum CancelTiming {
    Tokens(usize),
    Aim(CancelPoint),
}

/// Freed blocks, and the number of engines that held them.
fn freed(line: &Timeline) -> (u64, usize) {
    let freed = line.legs.iter().filter_map(|leg| leg.freed.first());
    (freed.clone().map(|(_, blocks)| *blocks).sum(), freed.count())
}

/// A prompt that no prefix cache contains.
pub(super) fn prompt(tag: &str, words: usize) -> String {
    let mut rng = Rng::stream(0, tag);
    let first = format!("{:08x}", rng.next() as u32);
    plain(&first, words, &mut rng)
}

/// How a call ended that should have been answered.
pub(super) fn describe_outcome(outcome: &CallOutcome) -> String {
    match outcome {
        CallOutcome::Done => "completed".to_owned(),
        CallOutcome::Left => "cancelled".to_owned(),
        CallOutcome::Refused { status, message, .. } => format!("refused with {status}: {message}"),
        CallOutcome::Failed { message, .. } => format!("error in the stream: {message}"),
        CallOutcome::Broken { stage, why } => format!("broken ({}): {why}", stage.as_str()),
        CallOutcome::TimedOut { stage } => format!("no response in time ({})", stage.as_str()),
    }
}
