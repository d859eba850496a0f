//! The step loop: the one thread that owns an engine's state.
//!
//! ```text
//!  mail ─▶ take in ─▶ schedule ─▶ carry out effects ─▶ execute ─▶ mail again: aborts first ─▶ commit ─▶ publish
//! ```
//!
//! Invariants:
//! - 6: a sequence sends exactly one [`SeqEvent`] that ends it, and nothing after it.
//! - 7: aborts that arrived during a forward pass are applied before that step's results: abort wins.
//! - A lease is opened only for a reply that somebody will read; if nobody does, it is released in the same step.
//! - An engine with leases but no work sleeps.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_connector::fetch::{FailureKind, Reason};
use baton_connector::ledger::Grant;
use baton_connector::limits::{TOMBSTONE_KEPT, TOMBSTONES_MAX};
use baton_connector::transport::Producer;
use baton_connector::{EngineId, Handle, Handoff, RequestId};
use tokio::sync::mpsc::Sender;

use crate::block_hash::prompt_fingerprint;
use crate::digests::{DigestAsk, DigestPage, page_blocks};
use crate::executor::{Executor, Logits, LogitsWanted, SeqStep};
use crate::lease_desk::LeaseDesk;
use crate::mailbox::{Legs, Mail, Mailbox};
use crate::metrics::EngineMetrics;
use crate::peers::{FetchTarget, Peers};
use crate::sampling::{Place, Sampled, SamplingParams, Scratch, TokenCounts, sample};
use crate::scheduler::{Effect, Finished, Planned, Refusal, Scheduler};
use crate::sequence::{FinishReason, NewSequence, Purpose, SeqId};
use crate::status::StatusBoard;

/// After the drain deadline, how long transfers get to become quiet before the engine ends anyway.
const QUIET_GRACE: Duration = Duration::from_secs(2);

/// What a front end hands in: a sequence, how to sample it, and where its events go.
#[derive(Debug)]
pub struct Submission {
    /// The scheduler's part.
    pub sequence: NewSequence,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// Which choice of its request it is.
    pub index: u32,
    /// Takes every event of the sequence; room for all of them (`max_new + 2`) or more.
    pub outbox: Sender<(u32, SeqEvent)>,
    /// Where its blocks come from.
    pub target: Option<FetchTarget>,
    /// When the request arrived.
    pub arrived: Instant,
}

/// What a sequence tells its front end.
#[derive(Debug)]
pub enum SeqEvent {
    /// Before the first token: how many of the prompt's tokens nobody computed for this request. They come from
    /// this engine's prefix cache, or from the producer's if the prompt came from there; what was merely fetched
    /// does not count.
    Started {
        /// That many.
        cached: usize,
    },
    /// One more token.
    Token(Sampled),
    /// The end.
    Finished(Box<SeqEnd>),
    /// The end: it was not accepted.
    Refused(Refusal),
    /// The end: its blocks could not be fetched, and the policy is to fail.
    LoadFailed(FailureKind),
    /// The end: the engine is shutting down or its device failed.
    Unavailable(&'static str),
}

/// How a sequence ended.
#[derive(Debug)]
pub struct SeqEnd {
    /// Why.
    pub reason: FinishReason,
    /// For a producer: the handoff, and the key to release it with.
    pub handoff: Option<Box<Handoff>>,
}

/// What identifies a producer in its handoffs.
#[derive(Clone, Debug)]
pub struct ProducerAddress {
    /// The engine's id.
    pub engine_id: EngineId,
    /// Host of the side channel, as peers reach it.
    pub host: String,
    /// Its port.
    pub port: u16,
}

/// The parts a step loop is made of.
pub struct Parts {
    /// The device.
    pub executor: Box<dyn Executor>,
    /// The scheduler over the device's blocks.
    pub scheduler: Scheduler,
    /// Where messages arrive.
    pub mailbox: Arc<Mailbox>,
    /// This engine's leases.
    pub desk: Arc<LeaseDesk>,
    /// Dealings with other engines.
    pub peers: Arc<Peers>,
    /// Counters.
    pub metrics: Arc<EngineMetrics>,
    /// What is shown at `/debug/kv`.
    pub status: Arc<StatusBoard>,
    /// How peers reach the leases.
    pub address: ProducerAddress,
}

/// What a handoff says of its prompt.
struct Prompt {
    tokens: usize,
    fingerprint: u64,
    cached: usize,
}

struct Live {
    request: RequestId,
    sampling: SamplingParams,
    counts: TokenCounts,
    index: u32,
    outbox: Sender<(u32, SeqEvent)>,
    target: Option<FetchTarget>,
    arrived: Instant,
    last_token: Option<Instant>,
}

/// See the module's documentation.
pub struct StepLoop {
    parts: Parts,
    live: HashMap<SeqId, Live>,
    by_request: HashMap<RequestId, Vec<SeqId>>,
    /// Handoffs of sequences that are off the books while their transfer comes to rest.
    stopping: HashMap<SeqId, FetchTarget>,
    logits: Logits,
    scratch: Scratch,
    closing: Option<Instant>,
    /// Requests to decode that were aborted by name before they arrived, oldest first.
    aborted_early: VecDeque<(Instant, RequestId)>,
    /// The same by name: every submission is looked up.
    aborted_early_at: HashMap<RequestId, Instant>,
    /// Sequences are being ended with an answer that a router takes elsewhere.
    refusing: bool,
}

impl StepLoop {
    /// A loop that has not started.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self {
            parts,
            live: HashMap::new(),
            by_request: HashMap::new(),
            stopping: HashMap::new(),
            logits: Logits::default(),
            scratch: Scratch::default(),
            closing: None,
            aborted_early: VecDeque::new(),
            aborted_early_at: HashMap::new(),
            refusing: false,
        }
    }

    /// Runs until the mailbox is closed and the books are empty, or the drain deadline has passed.
    pub fn run(mut self) {
        let mut blocked = true;
        loop {
            let mailbox = &self.parts.mailbox;
            let mail = if blocked { mailbox.wait(self.deadline()) } else { mailbox.collect() };
            self.take_in(mail);
            let plan = self.parts.scheduler.schedule();
            let acted = self.carry_out_effects();
            if plan.is_empty() {
                // Only mail can change anything now, unless an effect has freed blocks just now.
                blocked = !acted;
            } else {
                blocked = false;
                // A forward pass takes its time: who looks meanwhile must see who is in it.
                self.publish();
                self.step(&plan);
                self.parts.status.stepped();
            }
            self.publish();
            if self.over() {
                return;
            }
        }
    }

    fn step(&mut self, plan: &[Planned]) {
        let scheduler = &self.parts.scheduler;
        let batch: Vec<SeqStep<'_>> = plan
            .iter()
            .map(|part| {
                let sequence = scheduler.sequence(part.id).expect("what is planned is on the books");
                SeqStep {
                    tokens: &sequence.tokens()[part.start..part.start + part.count],
                    start: part.start,
                    block_table: sequence.blocks(),
                    logits: if part.samples { LogitsWanted::Last } else { LogitsWanted::No },
                }
            })
            .collect();
        if let Err(error) = self.parts.executor.execute(&batch, &mut self.logits) {
            tracing::error!(%error, "forward pass failed; ending every request");
            self.parts.status.set_failed(error.to_string());
            self.end_all(FinishReason::Error, || SeqEvent::Unavailable("the engine's device failed"));
            return;
        }
        // Abort wins over finish in the same step.
        let mail = self.parts.mailbox.collect();
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
        let Some(live) = self.live.get_mut(&part.id) else { return };
        let Some(row) = row else {
            self.parts.scheduler.commit(part, None);
            return;
        };
        let sequence = self.parts.scheduler.sequence(part.id).expect("live sequences are on the books");
        let place =
            Place { position: sequence.tokens().len() as u64, generated: sequence.generated() as u32 };
        let (prompt, (cached, fetched)) = (sequence.prompt_len(), sequence.reused());
        let sampled = sample(self.logits.row(row), &live.sampling, &live.counts, place, &mut self.scratch);
        let Ok(sampled) = sampled else {
            tracing::error!(request = %live.request, "a row of logits without a number");
            self.end_with(
                part.id,
                FinishReason::Error,
                SeqEvent::Unavailable("the model produced no number"),
            );
            return;
        };
        live.counts.push(sampled.token);
        let now = Instant::now();
        match live.last_token.replace(now) {
            None => {
                self.parts.metrics.first_token(now - live.arrived, prompt, cached, fetched);
                let cached = live.target.as_ref().map_or(cached, FetchTarget::cached);
                // If its front end has left, the token's own delivery says so.
                let _ = live.outbox.try_send((live.index, SeqEvent::Started { cached }));
            }
            Some(last) => self.parts.metrics.next_token(now - last),
        }
        let token = sampled.token;
        let gone = live.outbox.try_send((live.index, SeqEvent::Token(sampled))).is_err();
        let ended = self.parts.scheduler.commit(part, Some(token));
        if gone {
            self.end(part.id, FinishReason::Abort);
        } else if let Some(reason) = ended {
            self.end(part.id, reason);
        }
    }

    fn take_in(&mut self, mail: Mail) {
        if mail.closing.is_some() {
            self.closing = mail.closing;
        }
        for settled in mail.settled {
            self.parts.scheduler.lease_ended(&settled.blocks);
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
            self.parts.scheduler.fetch_event(id, event);
        }
        for ask in mail.digests {
            self.answer_digests(ask);
        }
        if mail.reset_cache {
            self.parts.scheduler.reset_prefix_cache();
        }
        self.carry_out_effects();
        if self.closing.is_some_and(|deadline| Instant::now() >= deadline) {
            self.end_all(FinishReason::Abort, || SeqEvent::Unavailable("the engine is shutting down"));
            self.parts.desk.release_all("shutdown");
        }
    }

    fn answer_digests(&self, ask: DigestAsk) {
        let region = self.parts.executor.region();
        // One more than a page shows tells whether there is another.
        let limit = page_blocks(region.block_bytes()) + 1;
        let cached = self.parts.scheduler.cached_blocks(ask.after, limit);
        // An asker that has left needs no answer.
        let _ = ask.reply.send(DigestPage::of(&cached, region));
    }

    /// Ends a request by name. One that decodes here and has not arrived yet is remembered (one that lends is
    /// remembered by the ledger).
    fn abort(&mut self, request: RequestId, legs: Legs) {
        let mut found = false;
        for id in self.by_request.get(&request).cloned().unwrap_or_default() {
            let lends = self.parts.scheduler.sequence(id).is_some_and(|sequence| sequence.is_producer());
            if legs == Legs::Both || (legs == Legs::Prefill) == lends {
                self.end(id, FinishReason::Abort);
                found = true;
            }
        }
        if !found && legs != Legs::Prefill {
            while self.aborted_early.len() >= TOMBSTONES_MAX
                || self.aborted_early.front().is_some_and(|(at, _)| at.elapsed() >= TOMBSTONE_KEPT)
            {
                if let Some((at, oldest)) = self.aborted_early.pop_front()
                    && self.aborted_early_at.get(&oldest) == Some(&at)
                {
                    self.aborted_early_at.remove(&oldest);
                }
            }
            let now = Instant::now();
            self.aborted_early_at.insert(request.clone(), now);
            self.aborted_early.push_back((now, request));
        }
    }

    /// Whether a request was given up before it arrived.
    fn was_aborted_early(&self, request: &RequestId, lends: bool) -> bool {
        if lends {
            return self.parts.desk.was_released_early(request);
        }
        self.aborted_early_at.get(request).is_some_and(|at| at.elapsed() < TOMBSTONE_KEPT)
    }

    fn accept(&mut self, submission: Submission) {
        let Submission { sequence, sampling, index, outbox, target, arrived } = submission;
        let (id, request) = (sequence.id, sequence.request.clone());
        if self.was_aborted_early(&request, matches!(sequence.purpose, Purpose::Produce)) {
            tracing::debug!(%request, "given up before it arrived");
            let end = SeqEnd { reason: FinishReason::Abort, handoff: None };
            self.turn_away(
                &outbox,
                index,
                target.as_ref(),
                SeqEvent::Finished(Box::new(end)),
                "aborted_early",
            );
            return;
        }
        let counts = TokenCounts::for_params(&sampling, &sequence.prompt);
        let prompt_len = sequence.prompt.len();
        if let Err((_, refusal)) = self.parts.scheduler.submit(sequence) {
            self.turn_away(&outbox, index, target.as_ref(), SeqEvent::Refused(refusal), "refused");
            return;
        }
        if let Some(target) = &target {
            self.parts.metrics.handed_off(prompt_len);
            self.parts.peers.keep_alive(id, target);
        }
        self.by_request.entry(request.clone()).or_default().push(id);
        let live = Live { request, sampling, counts, index, outbox, target, arrived, last_token: None };
        self.live.insert(id, live);
    }

    /// Refuses a sequence; whatever its producer lends for it is given up at once.
    fn turn_away(
        &self,
        outbox: &Sender<(u32, SeqEvent)>,
        index: u32,
        target: Option<&FetchTarget>,
        event: SeqEvent,
        reason: &'static str,
    ) {
        if let Some(target) = target {
            if !target.survives_refusal() || reason != "refused" {
                self.parts.peers.release(target, Reason::Rejected.label());
            }
            self.parts.metrics.early_rejection(reason);
        }
        // A front end that has left needs no answer.
        let _ = outbox.try_send((index, event));
    }

    /// Carries out what the scheduler asks for; says whether there was anything.
    fn carry_out_effects(&mut self) -> bool {
        let mut acted = false;
        loop {
            let effects = self.parts.scheduler.take_effects();
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
        let peers = Arc::clone(&self.parts.peers);
        match effect {
            Effect::StartRead { id, first, into } => {
                let target = self.target(id).expect("a sequence that fetches has a target");
                peers.read(id, &target, first, into);
            }
            Effect::StopRead(id) => peers.stop_read(id),
            Effect::StopHeartbeat(id) => peers.let_go(id),
            Effect::ReleaseAtProducer(id, reason) => {
                let target = self.target(id).filter(|target| match reason {
                    Reason::LoadFailed => !target.survives_failure(),
                    Reason::Aborted => !(self.refusing && target.survives_refusal()),
                    Reason::Rejected | Reason::NotNeeded => true,
                });
                if let Some(target) = target {
                    peers.release(&target, reason.label());
                }
                self.stopping.remove(&id);
            }
            Effect::FetchFailed(id, kind) => {
                self.parts.metrics.load_failed("fail");
                self.end_with(id, FinishReason::Error, SeqEvent::LoadFailed(kind));
            }
            Effect::Recomputing(id) => {
                self.parts.metrics.load_failed("recompute");
                tracing::info!(seq = id.0, "handoff could not be used; computing the prompt here");
            }
        }
    }

    fn target(&self, id: SeqId) -> Option<FetchTarget> {
        self.live.get(&id).and_then(|live| live.target.clone()).or_else(|| self.stopping.get(&id).cloned())
    }

    /// Ends a sequence in the ordinary way. A second call for the same sequence changes nothing.
    fn end(&mut self, id: SeqId, reason: FinishReason) {
        let cached = self.parts.scheduler.sequence(id).map_or(0, |sequence| sequence.reused().0);
        let fingerprint = self.prompt_of(id);
        let Some((finished, live)) = self.strike(id, reason) else { return };
        let handoff = match finished {
            Finished::Lent(blocks) => {
                let (tokens, prompt) = fingerprint.expect("it was on the books");
                self.lend(&live, blocks, Prompt { tokens, fingerprint: prompt, cached })
            }
            Finished::FreeNow => None,
        };
        let key = handoff.as_ref().map(|handoff| handoff.handle);
        let end = SeqEnd { reason, handoff };
        let sent = live.outbox.try_send((live.index, SeqEvent::Finished(Box::new(end))));
        if let (Err(_), Some(handle)) = (sent, key) {
            // Nobody will ever learn this handle.
            self.parts.desk.release(handle, "client_gone");
        }
    }

    /// Ends a sequence with another last word.
    fn end_with(&mut self, id: SeqId, reason: FinishReason, event: SeqEvent) {
        if let Some((finished, live)) = self.strike(id, reason) {
            if let Finished::Lent(blocks) = finished {
                self.parts.scheduler.lease_ended(&blocks);
            }
            // A front end that has left needs no answer.
            let _ = live.outbox.try_send((live.index, event));
        }
    }

    fn end_all(&mut self, reason: FinishReason, event: impl Fn() -> SeqEvent) {
        let ids: Vec<SeqId> = self.live.keys().copied().collect();
        self.refusing = true;
        for id in ids {
            self.end_with(id, reason, event());
        }
        self.carry_out_effects();
        self.refusing = false;
    }

    /// Takes a sequence off all books.
    fn strike(&mut self, id: SeqId, reason: FinishReason) -> Option<(Finished, Live)> {
        let finished = self.parts.scheduler.finish(id, reason)?;
        let live = self.live.remove(&id).expect("what is scheduled is live");
        if let Some(target) = &live.target {
            self.stopping.insert(id, target.clone());
        }
        if let Some(ids) = self.by_request.get_mut(&live.request) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.by_request.remove(&live.request);
            }
        }
        self.parts.metrics.finished(reason, live.arrived.elapsed());
        self.carry_out_effects();
        self.forget_rested(id);
        Some((finished, live))
    }

    /// A struck sequence's target is needed only while its transfer comes to rest.
    fn forget_rested(&mut self, id: SeqId) {
        if !self.parts.scheduler.is_stopping(id) {
            self.stopping.remove(&id);
        }
    }

    fn prompt_of(&self, id: SeqId) -> Option<(usize, u64)> {
        let sequence = self.parts.scheduler.sequence(id)?;
        let prompt = &sequence.tokens()[..sequence.prompt_len()];
        sequence.is_producer().then(|| (prompt.len(), prompt_fingerprint(prompt)))
    }

    /// Opens the lease of a finished producer's sequence.
    fn lend(
        &mut self,
        live: &Live,
        blocks: Vec<baton_connector::BlockId>,
        prompt: Prompt,
    ) -> Option<Box<Handoff>> {
        let mut random = [0; 16];
        if getrandom::fill(&mut random).is_err() {
            tracing::error!("no randomness for a handle; the blocks are freed");
            self.parts.scheduler.lease_ended(&blocks);
            return None;
        }
        let handle = Handle(u128::from_ne_bytes(random));
        let grant = Grant { handle, request: live.request.clone(), blocks: blocks.clone(), expected: 1 };
        match self.parts.desk.open(grant) {
            Ok(left) => {
                let address = &self.parts.address;
                Some(Box::new(Handoff {
                    handle,
                    epoch: self.parts.desk.epoch(),
                    engine_id: address.engine_id.to_string(),
                    request: live.request.clone(),
                    host: address.host.clone(),
                    port: address.port,
                    blocks,
                    tokens: prompt.tokens,
                    lease_left: Some(left),
                    layout: self.parts.desk.fingerprint(),
                    prompt: prompt.fingerprint,
                    cached: prompt.cached,
                }))
            }
            Err(refused) => {
                tracing::debug!(request = %live.request, why = ?refused.why, "not lent");
                self.parts.scheduler.lease_ended(&refused.grant.blocks);
                None
            }
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let deadline = self.closing?;
        Some(if Instant::now() < deadline { deadline } else { deadline + QUIET_GRACE })
    }

    fn over(&self) -> bool {
        let Some(deadline) = self.closing else { return false };
        let (now, load) = (Instant::now(), self.parts.scheduler.load());
        let settled = self.live.is_empty() && load.stopping == 0 && self.parts.desk.live() == 0;
        settled || now >= deadline + QUIET_GRACE
    }

    fn publish(&self) {
        let (usage, load) = (self.parts.scheduler.usage(), self.parts.scheduler.load());
        self.parts.metrics.publish(usage, load, self.parts.desk.live());
        self.parts.status.publish(usage, load);
    }
}
