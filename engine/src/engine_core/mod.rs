//! The engine core: everything an engine decides between two forward passes. No thread, no lock, no clock of its
//! own: mail comes in, and what is to be done in the world goes out through [`Surroundings`]. The step loop drives it
//! in an engine, the simulator under virtual time; the code is the same.
//!
//! ```text
//!  take_in(mail) ─▶ schedule ─▶ execute ─▶ finish_step(mail again: aborts first, then the results) ─▶ …
//! ```
//!
//! Invariants:
//! - 6: a sequence sends exactly one [`SeqEvent`] that ends it, and nothing after it.
//! - 7: aborts that arrived during a forward pass are applied before that step's results: abort wins.
//! - A lease is opened only for a reply that somebody will read; if nobody does, it is released in the same step.

mod aborted_early;
mod device;
mod env;
mod events;
pub mod fetch_target;
mod lending;
pub mod mailbox;
mod messages;
pub mod status;

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use baton_connector::fetch::{Event, Reason};
use baton_connector::ledger::Settled;
use baton_connector::limits::DRAIN_DEADLINE;
use baton_connector::{BlockId, RequestId};
use tokio::sync::mpsc::Sender;

use self::aborted_early::AbortedEarly;
pub use self::env::{Fact, Surroundings};
use self::events::Resting;
use self::lending::EarlyLease;
pub use self::messages::{ProducerAddress, SeqEnd, SeqEvent, Submission};
use crate::blocks::digests::{DigestAsk, DigestPage, page_blocks};
use crate::blocks::pool::BlockUsage;
use crate::compute::{Executor, Logits, LogitsWanted, SeqStep};
use crate::engine_core::fetch_target::FetchTarget;
use crate::engine_core::mailbox::{Legs, Mail};
use crate::event_log::What;
use crate::offload::{Fault, Report};
use crate::sampling::{Draw, Place, Sampled, SamplingParams, Scratch, TokenCounts, sample};
use crate::scheduler::sequence::{FinishReason, Purpose, SeqId, Sequence};
use crate::scheduler::{Effect, Finished, Load, Planned, Refusal, Scheduler};

/// The label of a refusal that another engine may not share.
const QUEUE_FULL: &str = "queue_full";

/// The label of a request that was given up before it arrived.
const ABORTED_EARLY: &str = "aborted_early";

/// After the drain deadline, how long transfers get to become quiet before the engine ends anyway.
const QUIET_GRACE: Duration = Duration::from_secs(2);

struct Live {
    request: RequestId,
    sampling: SamplingParams,
    counts: TokenCounts,
    index: u32,
    outbox: Sender<(u32, SeqEvent)>,
    target: Option<FetchTarget>,
    arrived: Instant,
    last_token: Option<Instant>,
    /// The lease that was opened while its prompt is computed.
    early: Option<EarlyLease>,
    /// It has been told of that it computes.
    started: bool,
}

/// See the module's documentation.
pub struct EngineCore<S> {
    executor: Box<dyn Executor>,
    scheduler: Scheduler,
    surroundings: S,
    live: HashMap<SeqId, Live>,
    by_request: HashMap<RequestId, Vec<SeqId>>,
    /// Handoffs of sequences that are off the books while their transfer comes to rest.
    stopping: HashMap<SeqId, FetchTarget>,
    /// Sequences off the books whose blocks are not back yet: who, and how many.
    resting: HashMap<SeqId, Resting>,
    logits: Logits,
    scratch: Scratch,
    closing: Option<Instant>,
    /// Since when nothing but leases holds blocks, and nobody can go on.
    waits_since: Option<Instant>,
    aborted_early: AbortedEarly,
    /// Sequences are being ended with an answer that a router takes elsewhere.
    refusing: bool,
}

impl<S: Surroundings> EngineCore<S> {
    /// An engine without requests: a device, a scheduler over its blocks, and the world around them.
    #[must_use]
    pub fn new(executor: Box<dyn Executor>, scheduler: Scheduler, surroundings: S) -> Self {
        Self {
            executor,
            scheduler,
            surroundings,
            live: HashMap::new(),
            by_request: HashMap::new(),
            stopping: HashMap::new(),
            resting: HashMap::new(),
            logits: Logits::default(),
            scratch: Scratch::default(),
            closing: None,
            waits_since: None,
            aborted_early: AbortedEarly::default(),
            refusing: false,
        }
    }

    /// The world around it.
    pub fn surroundings(&mut self) -> &mut S {
        &mut self.surroundings
    }

    /// Blocks by state, and requests by phase.
    #[must_use]
    pub fn books(&self) -> (BlockUsage, Load) {
        (self.scheduler.usage(), self.scheduler.load())
    }

    /// Whether a transfer may write into this block.
    #[must_use]
    pub fn is_landing(&self, block: BlockId) -> bool {
        self.scheduler.is_landing(block)
    }

    /// Sequences that have not ended.
    #[must_use]
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// Chooses the next step and starts what it needs. The plan is empty when nothing can run; the flag says whether
    /// something else was done that may change this without new mail.
    pub fn schedule(&mut self) -> (Vec<Planned>, bool) {
        let plan = self.scheduler.schedule();
        let acted = self.carry_out_effects();
        let broke_up = self.break_deadlock(plan.is_empty() && !acted);
        self.tell_started(&plan);
        (plan, acted || broke_up)
    }

    /// An engine that serves both legs can wait for blocks that only leases hold, while the consumers of those leases
    /// wait for blocks here, or on an engine that waits for this one. Whoever has waited like that for a while gives
    /// up its first handoff; its producer has the blocks back, and somebody can go on.
    fn break_deadlock(&mut self, idle: bool) -> bool {
        if !(idle && self.scheduler.waits_for_leases()) {
            self.waits_since = None;
            return false;
        }
        let now = self.surroundings.now();
        let since = *self.waits_since.get_or_insert(now);
        if now.saturating_duration_since(since) < DRAIN_DEADLINE {
            return false;
        }
        self.waits_since = None;
        let Some(id) = self.scheduler.first_waiting_consumer() else { return false };
        tracing::warn!(seq = id.0, "handoff given up: leases hold all blocks and no sequence can proceed");
        self.scheduler.fetch_event(id, Event::LeaseGone);
        self.carry_out_effects();
        true
    }

    /// Runs the forward pass of a plan. False when the device has failed; every request has then been ended.
    ///
    /// Meanwhile it asks again and again which leases have ended: their blocks are in the books as free, and told so, before
    /// the step is over. Nobody is given one before the next step is planned.
    pub fn execute(&mut self, plan: &[Planned], settled: &mut dyn FnMut() -> Vec<Settled>) -> bool {
        let (sequences, mut beside) = self.scheduler.in_step();
        let (live, resting, surroundings) = (&self.live, &mut self.resting, &self.surroundings);
        let batch: Vec<SeqStep<'_>> = plan
            .iter()
            .map(|part| {
                let sequence = sequences.get(&part.id).expect("a planned sequence is known");
                let draw = || Draw::of(&live.get(&part.id)?.sampling, place_of(sequence));
                SeqStep {
                    tokens: &sequence.tokens()[part.start..part.start + part.count],
                    start: part.start,
                    block_table: sequence.blocks(),
                    logits: match part.samples {
                        true => draw().map_or(LogitsWanted::Last, LogitsWanted::Draw),
                        false => LogitsWanted::No,
                    },
                }
            })
            .collect();
        // A mistake in the books is the core's own, and not the device's that happens to call.
        let mut mistake = None;
        let mut meanwhile = || {
            let booked = catch_unwind(AssertUnwindSafe(|| {
                for lease in settled() {
                    beside.lease_ended(&lease.blocks);
                    events::tell_home(beside.take_home(), resting, surroundings);
                }
            }));
            mistake = mistake.take().or(booked.err());
        };
        let executed = self.executor.run(&batch, &mut self.logits, &mut meanwhile);
        if let Some(mistake) = mistake {
            resume_unwind(mistake);
        }
        executed.map_err(|error| self.device_failed(&error)).is_ok()
    }

    /// Books the results of a forward pass. `mail` is what arrived during it: abort wins over finish.
    pub fn finish_step(&mut self, plan: &[Planned], mail: Mail) {
        self.take_in(mail);
        let mut row = 0;
        for part in plan {
            let values = part.samples.then(|| {
                row += 1;
                row - 1
            });
            self.commit(part, values);
        }
    }

    /// Books one planned part and tells its front end.
    fn commit(&mut self, part: &Planned, row: Option<usize>) {
        self.tell_computed(part);
        let Some(live) = self.live.get_mut(&part.id) else { return };
        let Some(row) = row else {
            self.scheduler.commit(part, None);
            self.grow(part.id);
            return;
        };
        let sequence = self.scheduler.sequence(part.id).expect("live sequences are known");
        let place = place_of(sequence);
        let (prompt, (cached, fetched)) = (sequence.prompt_len(), sequence.reused());
        let sampled = match self.logits.drawn(row) {
            Some(token) => token.map(|token| Sampled { token, logprobs: None }),
            None => {
                let row = self.logits.row(row);
                sample(row, &live.sampling, &live.counts, place, &mut self.scratch).ok()
            }
        };
        let Some(sampled) = sampled else {
            tracing::error!(request = %live.request, "logits row contains no number");
            self.end_with(
                part.id,
                FinishReason::Error,
                SeqEvent::Unavailable("the model produced no number"),
            );
            return;
        };
        live.counts.push(sampled.token);
        let now = self.surroundings.now();
        match live.last_token.replace(now) {
            None => {
                self.surroundings.note(Fact::FirstToken {
                    after: now - live.arrived,
                    prompt,
                    cached,
                    fetched,
                });
                self.surroundings.tell(&live.request, live.index, What::FirstToken);
                let cached = live.target.as_ref().map_or(cached, FetchTarget::cached);
                // If its front end has left, the token's own delivery says so.
                let _ = live.outbox.try_send((live.index, SeqEvent::Started { cached }));
            }
            Some(last) => self.surroundings.note(Fact::NextToken(now - last)),
        }
        let token = sampled.token;
        let gone = live.outbox.try_send((live.index, SeqEvent::Token(sampled))).is_err();
        let ended = self.scheduler.commit(part, Some(token));
        if gone {
            self.end(part.id, FinishReason::Abort);
        } else if let Some(reason) = ended {
            self.end(part.id, reason);
        }
    }

    /// Takes in what has arrived.
    pub fn take_in(&mut self, mail: Mail) {
        if mail.closing.is_some() {
            self.closing = mail.closing;
        }
        self.look_after_device();
        for settled in mail.settled {
            self.scheduler.lease_ended(&settled.blocks);
        }
        for handle in mail.unfinished {
            self.end_prefill_of(handle);
        }
        for submission in mail.submissions {
            self.accept(submission);
        }
        for (id, reason) in mail.endings {
            self.end(id, reason);
        }
        for (request, legs) in mail.aborts {
            self.abort(request, legs);
        }
        for (id, event) in mail.fetches {
            self.tell_fetched(id, event);
            self.scheduler.fetch_event(id, event);
        }
        for report in mail.offloads {
            self.scheduler.offload_event(report);
        }
        for ask in mail.digests {
            self.answer_digests(ask);
        }
        if mail.reset_cache {
            self.scheduler.reset_prefix_cache();
        }
        if mail.reset_tiers {
            self.scheduler.reset_tiers();
        }
        self.carry_out_effects();
        if self.closing.is_some_and(|deadline| self.surroundings.now() >= deadline) {
            self.end_all(FinishReason::Abort, || SeqEvent::Unavailable("the engine is shutting down"));
            self.surroundings.release_all("shutdown");
        }
    }

    fn answer_digests(&mut self, ask: DigestAsk) {
        let geometry = self.executor.geometry();
        // One more than a page shows tells whether there is another.
        let limit = page_blocks(geometry.whole().block_bytes()) + 1;
        let cached = self.scheduler.cached_blocks(ask.after, limit);
        let blocks: Vec<_> = cached.iter().map(|&(_, block)| block).collect();
        let Some(readable) = self.publish(&blocks) else { return };
        let readable: HashSet<BlockId> = readable.into_iter().collect();
        let is_readable = |block| readable.contains(&block);
        // An asker that has left needs no answer.
        let _ = ask.reply.send(DigestPage::of(&cached, is_readable, &geometry, self.executor.regions()));
    }

    /// Ends a request by name. One that decodes here and has not arrived yet is remembered (one that lends is
    /// remembered by the ledger).
    fn abort(&mut self, request: RequestId, legs: Legs) {
        let mut found = false;
        for id in self.by_request.get(&request).cloned().unwrap_or_default() {
            let lends = self.scheduler.sequence(id).is_some_and(|sequence| sequence.is_producer());
            if legs == Legs::Both || (legs == Legs::Prefill) == lends {
                self.end(id, FinishReason::Abort);
                found = true;
            }
        }
        if !found && legs != Legs::Prefill {
            let now = self.surroundings.now();
            self.aborted_early.remember(request, now);
        }
    }

    /// Whether a request was given up before it arrived.
    fn was_aborted_early(&self, request: &RequestId, lends: bool) -> bool {
        if lends {
            return self.surroundings.was_released_early(request);
        }
        self.aborted_early.knows(request, self.surroundings.now())
    }

    fn accept(&mut self, submission: Submission) {
        let Submission { sequence, sampling, index, tag, outbox, target, arrived } = submission;
        let (id, request) = (sequence.id, sequence.request.clone());
        if self.was_aborted_early(&request, matches!(sequence.purpose, Purpose::Produce { .. })) {
            tracing::debug!(%request, "request aborted before it arrived");
            self.surroundings.tell(&request, index, What::Refused { reason: ABORTED_EARLY, tag });
            let end = SeqEnd { reason: FinishReason::Abort, handoff: None };
            self.turn_away(&outbox, index, target.as_ref(), SeqEvent::Finished(Box::new(end)), ABORTED_EARLY);
            return;
        }
        let counts = TokenCounts::for_params(&sampling, &sequence.prompt);
        let prompt_len = sequence.prompt.len();
        let queued = events::queued(&sequence, tag.clone());
        if let Err((_, refusal)) = self.scheduler.submit(sequence) {
            let reason = match refusal {
                Refusal::QueueFull { .. } => QUEUE_FULL,
                Refusal::TooLong { .. } => "too_long",
            };
            self.surroundings.tell(&request, index, What::Refused { reason, tag });
            self.turn_away(&outbox, index, target.as_ref(), SeqEvent::Refused(refusal), reason);
            return;
        }
        if let Some(target) = &target {
            self.surroundings.note(Fact::HandedOff(prompt_len));
            self.surroundings.keep_alive(id, target);
        }
        self.surroundings.tell(&request, index, queued);
        self.by_request.entry(request.clone()).or_default().push(id);
        let (last_token, early, started) = (None, None, false);
        let live =
            Live { request, sampling, counts, index, outbox, target, arrived, last_token, early, started };
        self.live.insert(id, live);
    }

    /// Refuses a sequence; whatever its producer lends for it is given up at once.
    fn turn_away(
        &mut self,
        outbox: &Sender<(u32, SeqEvent)>,
        index: u32,
        target: Option<&FetchTarget>,
        event: SeqEvent,
        reason: &'static str,
    ) {
        if let Some(target) = target {
            // Another engine may have room; a router that settles takes the lease there.
            if target.survives_refusal() && reason == QUEUE_FULL {
                self.surroundings.note(Fact::EarlyRejection("left_to_router"));
            } else {
                self.surroundings.release_at_producer(target, Reason::Rejected.label());
                self.surroundings.note(Fact::EarlyRejection(reason));
            }
        }
        // A front end that has left needs no answer.
        let _ = outbox.try_send((index, event));
    }

    /// Carries out what the scheduler asks for; says whether there was anything.
    fn carry_out_effects(&mut self) -> bool {
        let mut acted = false;
        loop {
            events::tell_home(self.scheduler.take_home(), &mut self.resting, &self.surroundings);
            let effects = self.scheduler.take_effects();
            if effects.is_empty() {
                return acted;
            }
            acted = true;
            for effect in effects {
                self.carry_out(effect);
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::StartRead { id, first, into } => {
                let target = self.target(id).expect("a sequence that fetches has a target");
                self.executor.landing(&into);
                self.tell_of(id, What::Fetching(into.len()));
                self.surroundings.read(id, &target, first, into);
            }
            Effect::StopRead(id) => self.surroundings.stop_read(id),
            Effect::StopHeartbeat(id) => self.surroundings.let_go(id),
            Effect::ReleaseAtProducer(id, reason) => {
                let target = self.target(id).filter(|target| match reason {
                    Reason::LoadFailed => !target.survives_failure(),
                    Reason::Aborted => !(self.refusing && target.survives_refusal()),
                    Reason::Rejected | Reason::NotNeeded => true,
                });
                if let Some(target) = target {
                    self.surroundings.release_at_producer(&target, reason.label());
                }
                self.stopping.remove(&id);
            }
            Effect::FetchFailed(id, kind) => {
                self.surroundings.note(Fact::LoadFailed("fail"));
                self.end_with(id, FinishReason::Error, SeqEvent::LoadFailed(kind));
            }
            Effect::Recomputing(id) => {
                self.surroundings.note(Fact::LoadFailed("recompute"));
                tracing::info!(seq = id.0, "handoff not usable, prompt computed locally");
            }
            Effect::LendEarly(id) => self.lend_early(id),
            Effect::Offload(order) => {
                let id = order.id();
                if !(self.prepare(&order) && self.surroundings.offload(order)) {
                    self.scheduler.offload_event(Report::Ended(id, Err(Fault::Refused)));
                }
            }
            Effect::Revoke(id) => {
                let revoked = self.surroundings.revoke(id);
                self.scheduler.offload_revoked(id, revoked);
            }
        }
    }

    fn target(&self, id: SeqId) -> Option<FetchTarget> {
        self.live.get(&id).and_then(|live| live.target.clone()).or_else(|| self.stopping.get(&id).cloned())
    }

    /// Ends a sequence in the ordinary way. A second call for the same sequence changes nothing.
    fn end(&mut self, id: SeqId, reason: FinishReason) {
        let prompt = self.prompt_of(id);
        let Some((finished, live)) = self.strike(id, reason) else { return };
        let (reason, handoff, key) = match finished {
            Finished::Lent(blocks) => {
                let handoff = self.lend(&live, blocks, prompt.expect("it was known as a producer"));
                let key = handoff.as_ref().map(|handoff| handoff.handle);
                (reason, handoff, key)
            }
            Finished::Sealed(blocks) => {
                let key = self.seal(&live, &blocks);
                (key.map_or(FinishReason::Abort, |_| reason), None, key)
            }
            Finished::FreeNow | Finished::Unfinished => (reason, None, None),
        };
        let end = SeqEnd { reason, handoff };
        let sent = live.outbox.try_send((live.index, SeqEvent::Finished(Box::new(end))));
        if let (Err(_), Some(handle)) = (sent, key) {
            // Nobody will ever learn this handle.
            self.surroundings.release(handle, "client_gone");
        }
    }

    /// Ends a sequence with another last word.
    fn end_with(&mut self, id: SeqId, reason: FinishReason, event: SeqEvent) {
        if let Some((finished, live)) = self.strike(id, reason) {
            match (finished, &live.early) {
                (Finished::Lent(blocks), _) => self.scheduler.lease_ended(&blocks),
                (Finished::Sealed(_), Some(early)) => self.surroundings.release(early.handle, "not_lent"),
                (Finished::Sealed(_) | Finished::FreeNow | Finished::Unfinished, _) => {}
            }
            // A front end that has left needs no answer.
            let _ = live.outbox.try_send((live.index, event));
        }
    }

    fn end_all(&mut self, reason: FinishReason, event: impl Fn() -> SeqEvent) {
        let mut ids: Vec<SeqId> = self.live.keys().copied().collect();
        // In the order of their arrival: a run can be repeated exactly.
        ids.sort_unstable();
        self.refusing = true;
        for id in ids {
            self.end_with(id, reason, event());
        }
        self.carry_out_effects();
        self.refusing = false;
    }

    /// Takes a sequence off all books.
    fn strike(&mut self, id: SeqId, reason: FinishReason) -> Option<(Finished, Live)> {
        let told = self.scheduler.sequence(id).map(events::told_at_end);
        let finished = self.scheduler.finish(id, reason)?;
        let live = self.live.remove(&id).expect("what is scheduled is live");
        if let Some(told) = told {
            self.tell_ended(id, &live, reason, told);
        }
        if let (Finished::Unfinished, Some(early)) = (&finished, &live.early) {
            self.surroundings.release(early.handle, "unfinished");
        }
        if let Some(target) = &live.target {
            self.stopping.insert(id, target.clone());
        }
        if let Some(ids) = self.by_request.get_mut(&live.request) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_request.remove(&live.request);
            }
        }
        let after = self.surroundings.now().saturating_duration_since(live.arrived);
        self.surroundings.note(Fact::Finished { id, reason, after });
        self.carry_out_effects();
        self.forget_rested(id);
        Some((finished, live))
    }

    /// A struck sequence's target is needed only while its transfer comes to rest.
    fn forget_rested(&mut self, id: SeqId) {
        if !self.scheduler.is_stopping(id) {
            self.stopping.remove(&id);
        }
    }

    /// Until when the loop may sleep without mail.
    #[must_use]
    pub fn wake_at(&self) -> Option<Instant> {
        let stuck = self.waits_since.map(|since| since + DRAIN_DEADLINE);
        let closing = self.closing.map(|deadline| {
            if self.surroundings.now() < deadline { deadline } else { deadline + QUIET_GRACE }
        });
        stuck.into_iter().chain(closing).min()
    }

    /// Whether the engine was told to close and has nothing left, or no time left.
    #[must_use]
    pub fn over(&self) -> bool {
        let Some(deadline) = self.closing else { return false };
        let load = self.scheduler.load();
        let settled = self.live.is_empty()
            && load.stopping == 0
            && load.offloading == 0
            && self.surroundings.live_leases() == 0;
        settled || self.surroundings.now() >= deadline + QUIET_GRACE
    }
}

/// Where the next token of a sequence will be.
fn place_of(sequence: &Sequence) -> Place {
    Place { position: sequence.tokens().len() as u64, generated: sequence.generated() as u32 }
}
