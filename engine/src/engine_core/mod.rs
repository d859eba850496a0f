//! The engine core: all decisions of an engine between two forward passes. The core has no thread, no lock and no
//! clock: mail comes in, and actions go out through [`EngineEnv`]. The step loop drives the core in an engine, the
//! simulator drives the same code under virtual time.
//!
//! ```text
//!  take_in(mail) ─▶ schedule ─▶ execute ─▶ finish_step(mail again: aborts first, then the results) ─▶ …
//! ```
//!
//! Invariants:
//! - 6: a sequence sends exactly one [`SeqEvent`] that ends it, and nothing after it.
//! - 7: aborts that arrived during a forward pass are applied before that step's results: abort wins.
//! - A lease is opened only for a reply that has a reader. If the reader has left, the core releases the lease in the
//!   same step.

mod deadlock;
mod device;
mod early_aborts;
mod env;
mod events;
pub mod fetch_target;
mod leasing;
pub mod mailbox;
mod masked_rows;
mod messages;
mod pooling;
mod prompt_scores;
mod sampler;
pub mod status;
mod step_batch;
mod step_time;
mod timers;
mod verifying;

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use baton_connector::fetch::ReleaseReason;
use baton_connector::ledger::ClosedLease;
use baton_connector::{BlockId, RequestId};
use baton_connector_leases::event_log::RequestEvent;
use tokio::sync::mpsc::Sender;

use self::early_aborts::EarlyAborts;
pub use self::env::{CoreEvent, EngineEnv};
use self::events::PendingFree;
use self::leasing::EarlyLease;
pub use self::messages::{
    DeadlineKind, Deadlines, DraftOutcome, ProducerAddress, SeqEnd, SeqEvent, Submission,
};
use self::pooling::PromptCollector;
use self::sampler::{RowOutcome, Sampler};
use self::timers::{CoreTimers, TOO_LATE};
use crate::blocks::pool::BlockUsage;
use crate::compute::{Executor, SeqStep};
use crate::engine_core::fetch_target::FetchTarget;
use crate::engine_core::mailbox::{LegFilter, MailBatch};
use crate::grammar::TokenGate;
use crate::log_span::request_span;
use crate::offload::{OffloadFault, OffloadReport};
use crate::sampling::{SamplingParams, TokenCounts, TokenPosition};
use crate::scheduler::sequence::{FinishReason, Purpose, SeqId, Sequence};
use crate::scheduler::{Effect, FinishOutcome, Refusal, Scheduler, SchedulerLoad, StepPart};

/// The label of a refusal that another engine may not share.
const QUEUE_FULL: &str = "queue_full";

/// The label of a request that was aborted before it arrived.
const ABORTED_EARLY: &str = "aborted_early";

/// How long transfers may take to stop after the drain deadline. Then the engine ends anyway.
const QUIET_GRACE: Duration = Duration::from_secs(2);

struct LiveSequence {
    request: RequestId,
    sampling: SamplingParams,
    counts: TokenCounts,
    /// The tokens that its request permits.
    grammar: Option<TokenGate>,
    index: u32,
    outbox: Sender<(u32, SeqEvent)>,
    target: Option<FetchTarget>,
    arrived: Instant,
    last_token: Option<Instant>,
    /// The lease that was opened while its prompt is computed.
    early: Option<EarlyLease>,
    /// The event log has the start of its computation.
    start_emitted: bool,
    /// What is collected while its prompt is computed.
    collected: PromptCollector,
}

/// See the module's documentation.
pub struct EngineCore<S> {
    executor: Box<dyn Executor>,
    scheduler: Scheduler,
    env: S,
    live: HashMap<SeqId, LiveSequence>,
    by_request: HashMap<RequestId, Vec<SeqId>>,
    /// Handoffs of removed sequences whose transfer has not stopped yet.
    stopping: HashMap<SeqId, FetchTarget>,
    /// Removed sequences whose blocks are not all free yet.
    pending_free: HashMap<SeqId, PendingFree>,
    sampler: Sampler,
    timers: CoreTimers,
    aborted_early: EarlyAborts,
    /// The core ends sequences with an answer that a router retries on another engine.
    refusing: bool,
}

impl<S: EngineEnv> EngineCore<S> {
    /// An engine core without requests: a device, a scheduler over its blocks, and an environment.
    #[must_use]
    pub fn new(executor: Box<dyn Executor>, scheduler: Scheduler, env: S) -> Self {
        Self {
            executor,
            scheduler,
            env,
            live: HashMap::new(),
            by_request: HashMap::new(),
            stopping: HashMap::new(),
            pending_free: HashMap::new(),
            sampler: Sampler::default(),
            timers: CoreTimers::default(),
            aborted_early: EarlyAborts::default(),
            refusing: false,
        }
    }

    /// The environment of this core.
    pub fn env(&mut self) -> &mut S {
        &mut self.env
    }

    /// Blocks by state, and requests by phase.
    #[must_use]
    pub fn usage_and_load(&self) -> (BlockUsage, SchedulerLoad) {
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

    /// Chooses the next step and starts what it needs. The plan is empty when no sequence can run. The flag is true
    /// if another action may change this without new mail.
    pub fn schedule(&mut self) -> (Vec<StepPart>, bool) {
        let plan = self.plan_step();
        let acted = self.carry_out_effects();
        let broke_up = self.break_deadlock(plan.is_empty() && !acted);
        let begun = self.emit_started(&plan);
        self.measure_pace(begun);
        (plan, acted || broke_up)
    }

    /// Runs the forward pass of a plan. False when the device has failed; every request has then been ended.
    ///
    /// Meanwhile the device polls `settled` for leases that have ended. Their blocks are free, and `freed` is
    /// emitted, before the step is over. The scheduler allocates none of them before it plans the next step.
    pub fn execute(&mut self, plan: &[StepPart], settled: &mut dyn FnMut() -> Vec<ClosedLease>) -> bool {
        let (sequences, mut outside_step) = self.scheduler.in_step();
        let (live, pending_free, env) = (&self.live, &mut self.pending_free, &self.env);
        let step = |part: &StepPart| step_batch::step_of(part, sequences, live.get(&part.id));
        let batch: Vec<SeqStep<'_>> = plan.iter().map(step).collect();
        self.sampler.expect_rows(&batch);
        // A panic in the bookkeeping is an error of the core, not of the device that calls it.
        let mut mistake = None;
        let mut meanwhile = || {
            let recorded = catch_unwind(AssertUnwindSafe(|| {
                for lease in settled() {
                    outside_step.lease_ended(&lease.blocks);
                    events::emit_freed(outside_step.take_released(), pending_free, env);
                }
            }));
            mistake = mistake.take().or(recorded.err());
        };
        let executed = self.executor.run(&batch, &mut self.sampler.logits, &mut meanwhile);
        if let Some(mistake) = mistake {
            resume_unwind(mistake);
        }
        executed.map_err(|error| self.device_failed(&error)).is_ok()
    }

    /// Records one planned part without drafts, whose logits are in `rows`, and sends its events. `drafts` are those of
    /// its token and of the tokens behind it.
    fn commit(&mut self, part: &StepPart, rows: Range<usize>, drafts: &[u32]) {
        self.emit_computed(part);
        let Some(live) = self.live.get_mut(&part.id) else { return };
        let sequence = self.scheduler.sequence(part.id).expect("live sequences are known");
        let (prompt, (cached, fetched)) = (sequence.prompt_len(), sequence.reused());
        if let PromptCollector::Pool(_) = live.collected {
            return self.commit_pooled(part, rows);
        }
        let row = part.samples.then(|| rows.end - 1);
        if let PromptCollector::Scores(scores) = &mut live.collected
            && sequence.scores_prompt(part.start, part.count)
        {
            self.sampler.score(scores, rows, part.start, &sequence.tokens()[..prompt]);
        }
        let Some(row) = row else {
            self.scheduler.commit(part, None);
            self.grow(part.id);
            return;
        };
        let sampled = self.sampler.token_of(row, &live.sampling_row(sequence));
        let sampled = match sampled {
            RowOutcome::Token(sampled) => sampled,
            RowOutcome::Excluded => return self.end_without_token(part),
            RowOutcome::Invalid => return self.logits_invalid(part.id),
        };
        live.counts.push(sampled.token);
        let now = self.env.now();
        match live.last_token.replace(now) {
            None => {
                self.env.record(CoreEvent::FirstToken { after: now - live.arrived, prompt, cached, fetched });
                self.env.emit(&live.request, live.index, RequestEvent::FirstToken);
                live.send_started(cached);
            }
            Some(last) => self.env.record(CoreEvent::NextToken(now - last)),
        }
        let token = sampled.token;
        let event = SeqEvent::Token(sampled, DraftOutcome::of(drafts, token));
        let gone = live.outbox.try_send((live.index, event)).is_err();
        let ended = self.scheduler.commit(part, Some(token));
        let ended = live.grammar.as_mut().map_or(ended, |grammar| grammar.end_after(token, ended));
        if gone {
            self.end(part.id, FinishReason::Abort);
        } else if let Some(reason) = ended {
            self.end(part.id, reason);
        }
    }

    /// Processes the mail that has arrived.
    pub fn take_in(&mut self, mail: MailBatch) {
        if mail.closing.is_some() {
            self.timers.closing = mail.closing;
        }
        self.check_device();
        for settled in mail.settled {
            self.scheduler.lease_ended(&settled.blocks);
        }
        for handle in mail.unfinished {
            self.end_prefill(handle);
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
            self.emit_fetched(id, event);
            self.scheduler.fetch_event(id, event);
        }
        for report in mail.offloads {
            self.scheduler.offload_event(report);
        }
        for request in mail.digests {
            self.answer_digests(request);
        }
        if mail.reset_cache {
            self.scheduler.reset_prefix_cache();
        }
        if mail.reset_tiers {
            self.scheduler.reset_tiers();
        }
        self.end_late();
        self.carry_out_effects();
        if self.timers.closing.is_some_and(|deadline| self.env.now() >= deadline) {
            self.end_all(FinishReason::Abort, || SeqEvent::Unavailable("the engine is shutting down"));
            self.env.release_all("shutdown");
        }
    }

    /// Ends a request by name. The core remembers a decode request that has not arrived yet; the ledger remembers a
    /// prefill.
    fn abort(&mut self, request: RequestId, legs: LegFilter) {
        let mut found = false;
        for id in self.by_request.get(&request).cloned().unwrap_or_default() {
            let lends = self.scheduler.sequence(id).is_some_and(|sequence| sequence.is_producer());
            if legs == LegFilter::Both || (legs == LegFilter::Prefill) == lends {
                self.end(id, FinishReason::Abort);
                found = true;
            }
        }
        if !found && legs != LegFilter::Prefill {
            let now = self.env.now();
            self.aborted_early.remember(request, now);
        }
    }

    /// Whether a request was aborted before it arrived.
    fn was_aborted_early(&self, request: &RequestId, lends: bool) -> bool {
        if lends {
            return self.env.was_released_early(request);
        }
        self.aborted_early.contains(request, self.env.now())
    }

    fn accept(&mut self, submission: Submission) {
        let Submission { sequence, sampling, grammar, index, tag, outbox, target, arrived, deadlines } =
            submission;
        let (id, request) = (sequence.id, sequence.request.clone());
        if self.was_aborted_early(&request, matches!(sequence.purpose, Purpose::Produce { .. })) {
            tracing::debug!(parent: request_span!(&request), event = "request_aborted_early",
                "request aborted before it arrived");
            self.env.emit(&request, index, RequestEvent::Refused { reason: ABORTED_EARLY, tag });
            let end = SeqEnd { reason: FinishReason::Abort, handoff: None, embedding: None };
            self.refuse(&outbox, index, target.as_ref(), SeqEvent::Finished(Box::new(end)), ABORTED_EARLY);
            return;
        }
        if let Some((event, reason)) = self.refuses_late(&sequence, deadlines) {
            self.env.emit(&request, index, RequestEvent::Refused { reason, tag });
            self.refuse(&outbox, index, target.as_ref(), event, reason);
            return;
        }
        let counts = TokenCounts::for_params(&sampling, &sequence.prompt);
        let collected = PromptCollector::of(&sequence);
        let prompt_len = sequence.prompt.len();
        let may_draft = grammar.is_none();
        let queued = events::queued(&sequence, tag.clone());
        if let Err((_, refusal)) = self.scheduler.submit(sequence) {
            let reason = match refusal {
                Refusal::QueueFull { .. } => QUEUE_FULL,
                Refusal::TooLong { .. } => "too_long",
                Refusal::TooLate { .. } => TOO_LATE,
            };
            self.env.emit(&request, index, RequestEvent::Refused { reason, tag });
            self.refuse(&outbox, index, target.as_ref(), SeqEvent::Refused(refusal), reason);
            return;
        }
        if may_draft {
            self.scheduler.allow_drafts(id);
        }
        if let Some(target) = &target {
            self.env.record(CoreEvent::HandoffQueued(prompt_len));
            self.env.keep_alive(id, target);
        }
        self.env.emit(&request, index, queued);
        self.by_request.entry(request.clone()).or_default().push(id);
        self.timers.deadlines.add(id, deadlines);
        let (last_token, early, start_emitted) = (None, None, false);
        let live = LiveSequence {
            request,
            sampling,
            counts,
            grammar,
            index,
            outbox,
            target,
            arrived,
            last_token,
            early,
            start_emitted,
            collected,
        };
        self.live.insert(id, live);
    }

    /// Refuses a sequence. The lease of its producer is released at once, unless a router settles it.
    fn refuse(
        &mut self,
        outbox: &Sender<(u32, SeqEvent)>,
        index: u32,
        target: Option<&FetchTarget>,
        event: SeqEvent,
        reason: &'static str,
    ) {
        if let Some(target) = target {
            // Another engine may have capacity. A router that settles retries the lease there.
            if target.survives_refusal && [QUEUE_FULL, TOO_LATE].contains(&reason) {
                self.env.record(CoreEvent::EarlyRejection("left_to_router"));
            } else {
                self.env.release_at_producer(target, ReleaseReason::Rejected.label());
                self.env.record(CoreEvent::EarlyRejection(reason));
            }
        }
        // A front end that has left needs no answer.
        let _ = outbox.try_send((index, event));
    }

    /// Carries out the scheduler's effects. Returns whether there was one.
    fn carry_out_effects(&mut self) -> bool {
        let mut acted = false;
        loop {
            events::emit_freed(self.scheduler.take_released(), &mut self.pending_free, &self.env);
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
                self.executor.reserve(&into);
                self.emit_for(id, RequestEvent::Fetching(into.len()));
                self.env.read(id, &target, first, into);
            }
            Effect::StopRead(id) => self.env.stop_read(id),
            Effect::StopHeartbeat(id) => self.env.stop_renewing(id),
            Effect::ReleaseAtProducer(id, reason) => {
                let target = self.target(id).filter(|target| match reason {
                    ReleaseReason::LoadFailed => !target.survives_failure,
                    ReleaseReason::Aborted => !(self.refusing && target.survives_refusal),
                    ReleaseReason::Rejected | ReleaseReason::NotNeeded => true,
                });
                if let Some(target) = target {
                    self.env.release_at_producer(&target, reason.label());
                }
                self.stopping.remove(&id);
            }
            Effect::FetchFailed(id, kind) => {
                self.env.record(CoreEvent::LoadFailed("fail"));
                self.end_with(id, FinishReason::Error, SeqEvent::LoadFailed(kind));
            }
            Effect::Recomputing(id) => {
                self.env.record(CoreEvent::LoadFailed("recompute"));
                tracing::info!(
                    parent: request_span!(self.request_of(id)), event = "handoff_unusable", seq = id.0,
                    "handoff not usable, prompt computed locally"
                );
            }
            Effect::OpenLeaseEarly(id) => self.open_lease_early(id),
            Effect::Offload(order) => {
                let id = order.id();
                if !(self.prepare(&order) && self.env.offload(order)) {
                    self.scheduler.offload_event(OffloadReport::Ended(id, Err(OffloadFault::Refused)));
                }
            }
            Effect::Revoke(id) => {
                let revoked = self.env.revoke(id);
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
        let Some((finished, live)) = self.remove(id, reason) else { return };
        let (reason, handoff, key) = match finished {
            FinishOutcome::Leased(blocks) => {
                let handoff = self.open_lease(&live, blocks, prompt.expect("it was known as a producer"));
                let key = handoff.as_ref().map(|handoff| handoff.handle);
                (reason, handoff, key)
            }
            FinishOutcome::Sealed(blocks) => {
                let key = self.seal(&live, &blocks);
                (key.map_or(FinishReason::Abort, |_| reason), None, key)
            }
            FinishOutcome::Freed | FinishOutcome::Unfinished => (reason, None, None),
        };
        let end = SeqEnd { reason, handoff, embedding: live.collected.embedding() };
        let sent = live.outbox.try_send((live.index, SeqEvent::Finished(Box::new(end))));
        if let (Err(_), Some(handle)) = (sent, key) {
            // No client receives this handle.
            self.env.release(handle, "client_gone");
        }
    }

    /// Ends a sequence with `event` as its last event.
    fn end_with(&mut self, id: SeqId, reason: FinishReason, event: SeqEvent) {
        if let Some((finished, live)) = self.remove(id, reason) {
            match (finished, &live.early) {
                (FinishOutcome::Leased(blocks), _) => self.scheduler.lease_ended(&blocks),
                (FinishOutcome::Sealed(_), Some(early)) => self.env.release(early.handle, "not_lent"),
                (FinishOutcome::Sealed(_) | FinishOutcome::Freed | FinishOutcome::Unfinished, _) => {}
            }
            // A front end that has left needs no answer.
            let _ = live.outbox.try_send((live.index, event));
        }
    }

    fn end_all(&mut self, reason: FinishReason, event: impl Fn() -> SeqEvent) {
        let mut ids: Vec<SeqId> = self.live.keys().copied().collect();
        // In the order of arrival: a run must be repeatable exactly.
        ids.sort_unstable();
        self.refusing = true;
        for id in ids {
            self.end_with(id, reason, event());
        }
        self.carry_out_effects();
        self.refusing = false;
    }

    /// Removes a sequence from the scheduler and from all maps of the core.
    fn remove(&mut self, id: SeqId, reason: FinishReason) -> Option<(FinishOutcome, LiveSequence)> {
        let summary = self.scheduler.sequence(id).map(events::end_summary);
        let finished = self.scheduler.finish(id, reason)?;
        let live = self.live.remove(&id).expect("what is scheduled is live");
        self.timers.deadlines.remove(id);
        if let Some(summary) = summary {
            self.emit_ended(id, &live, reason, summary);
        }
        if let (FinishOutcome::Unfinished, Some(early)) = (&finished, &live.early) {
            self.env.release(early.handle, "unfinished");
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
        let after = self.env.now().saturating_duration_since(live.arrived);
        self.env.record(CoreEvent::Finished { id, reason, after });
        self.carry_out_effects();
        // The target of a removed sequence is needed only until its transfer has stopped.
        if !self.scheduler.is_stopping(id) {
            self.stopping.remove(&id);
        }
        Some((finished, live))
    }
}

/// The position of the next token of a sequence.
fn token_position(sequence: &Sequence) -> TokenPosition {
    TokenPosition { position: sequence.tokens().len() as u64, generated: sequence.generated() as u32 }
}
