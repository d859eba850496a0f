//! One simulated engine without sockets and clock: requests, steps, blocks and leases. Callers pass the time in
//! microseconds of the event log's clock.
//!
//! ```text
//!  submit ─▶ waiting ─ a slot and blocks ──┬─▶ running ─ steps ─▶ first token ─▶ … ─▶ done, or leased
//!                                          └─▶ fetching ─ landed ─▶ ready ─▶ running
//!  abort: at once, but at the end of the current step for a request that is part of that step
//! ```
//!
//! A step computes the next prompt tokens of all running requests, up to `step_tokens` in total, and one token for
//! each request that decodes. Its duration follows from the plan. Blocks for the whole request are allocated when it
//! begins, so that no request is preempted. There is no prefix cache. With vLLM's push connector a fetch is a write of
//! the producer ([`push`]).

mod push;
mod steps;
mod verbs;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_connector_leases::event_log::{EventLog, RequestEvent};
use tokio::sync::Notify;

use super::leases::{ClosedLease, Lease, LeaseKey, Leases};
use super::plan::{Dialect, EnginePlan, LoadFailure};
use super::pool::{BlockHolder, PoolUsage, SimPool};
use crate::load::rng::mix;
use push::PushTable;
pub(super) use push::Registration;

/// Key of a request in the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Ticket(u64);

/// The part of a request that an engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leg {
    Prefill,
    Decode,
    Whole,
}

impl Leg {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Whole => "whole",
        }
    }
}

/// Location of the blocks of a handoff.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// The producer.
    pub engine: String,
    pub lease: LeaseKey,
    pub blocks: Vec<u32>,
    pub tokens: usize,
}

/// A parsed and checked request.
#[derive(Debug)]
pub(super) struct Submission {
    /// The router's name of the request.
    pub id: RequestId,
    /// This engine's name of the request. In vLLM's dialect it differs from the router's.
    pub internal: RequestId,
    pub tag: Option<Arc<str>>,
    pub leg: Leg,
    pub prompt: usize,
    /// The content of each block of the prompt.
    pub contents: Vec<u64>,
    pub max_tokens: usize,
    pub source: Option<Source>,
    /// Notified of all progress.
    pub progress: Arc<Notify>,
}

/// An opened lease, for the reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OpenedLease {
    pub handle: u128,
    pub blocks: Vec<u32>,
}

/// How a request has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RequestEnd {
    /// The response is complete.
    Length,
    /// The response is complete, and the blocks are leased.
    Leased(OpenedLease),
    Aborted,
    /// The blocks could not be read: `gone` or `failed`.
    Unread(&'static str),
}

impl RequestEnd {
    fn label(&self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Leased(_) => "lent",
            Self::Aborted => "abort",
            Self::Unread(_) => "error",
        }
    }
}

/// The output of a request since it was last taken.
#[derive(Debug, Default)]
pub(super) struct RequestOutput {
    pub words: Vec<&'static str>,
    pub end: Option<RequestEnd>,
}

/// An action of the I/O layer.
#[derive(Debug)]
pub(super) enum Action {
    /// Read these blocks and call [`Core::fetched`].
    Fetch(Ticket, Source),
    /// Register these blocks with the producer, by [`Core::register`].
    Register(Ticket, Source, Registration),
    /// The producer has written the blocks of a registration: [`Core::land`].
    Written(Registration, Vec<u64>),
    /// Stop the read.
    StopFetch(Ticket),
    /// Release the producer's lease.
    Release(Source, &'static str),
}

/// How an engine learns of a cancel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AbortSource {
    Disconnect,
    Verb,
}

impl AbortSource {
    fn label(self) -> &'static str {
        match self {
            Self::Disconnect => "disconnect",
            Self::Verb => "verb",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestPhase {
    Waiting,
    Fetching,
    Ready,
    Running,
    Done,
}

#[derive(Debug)]
struct Request {
    sent: Submission,
    phase: RequestPhase,
    blocks: Vec<u32>,
    /// Prompt tokens that are present, computed or read.
    there: usize,
    /// Prompt tokens that were computed here.
    computed: usize,
    /// Blocks that were read and are not written again.
    read: usize,
    /// Whether the prompt was part of a step.
    begun: bool,
    words: Vec<&'static str>,
    taken: usize,
    end: Option<RequestEnd>,
    /// The request is aborted at the end of a step or a read.
    aborting: bool,
    /// The caller has disconnected and will not take the end.
    orphan: bool,
}

#[derive(Debug)]
struct Step {
    ends_us: u64,
    /// Prompt tokens of each request. 0 if the request decodes.
    work: Vec<(Ticket, usize)>,
}

/// Counts for `/metrics` and `/debug/kv`.
#[derive(Clone, Debug, Default)]
pub(super) struct EngineCounts {
    pub steps: u64,
    pub prompt_tokens: u64,
    pub generation_tokens: u64,
    pub ended: [u64; 4],
    pub releases: HashMap<Box<str>, u64>,
    pub expired: u64,
    pub stranded_block_us: u64,
    pub fetches: u64,
    pub fetched_blocks: u64,
    pub failed_fetches: u64,
    /// Reads that ended after their lease.
    pub after_expiry: u64,
    /// Writes into blocks that their request no longer had.
    pub stray_writes: u64,
}

/// `finished_reason`, in the order of [`EngineCounts::ended`].
pub(super) const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// The state of one engine. See the module documentation.
pub(super) struct Core {
    plan: EnginePlan,
    log: Arc<EventLog>,
    pool: SimPool,
    leases: Leases,
    push: PushTable,
    requests: HashMap<Ticket, Request>,
    waiting: VecDeque<Ticket>,
    ready: VecDeque<Ticket>,
    running: Vec<Ticket>,
    step: Option<Step>,
    stalled_until_us: u64,
    actions: Vec<Action>,
    pub(super) counts: EngineCounts,
    /// Requests that were aborted before they arrived, with the aborted leg. The queue contains their expiry in
    /// order.
    early: HashMap<RequestId, Option<Leg>>,
    early_ends: VecDeque<(RequestId, u64)>,
    next: u64,
    refused: f64,
    /// When the driver wakes next.
    pub(super) sleeps_until_us: u64,
}

/// The queue is full.
#[derive(Debug)]
pub(super) struct QueueFull {
    pub waiting: usize,
}

/// Maximum release reasons with separate counts.
const REASONS_KEPT: usize = 32;

/// After a longer pause (of a stopped process), steps are not caught up.
const CATCH_UP_US: u64 = 100_000;

fn us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl Core {
    pub(super) fn new(plan: EnginePlan, log: Arc<EventLog>, seed: u64) -> Self {
        Self {
            pool: SimPool::new(plan.blocks),
            leases: Leases::new(plan.dialect),
            push: PushTable::default(),
            plan,
            log,
            requests: HashMap::new(),
            waiting: VecDeque::new(),
            ready: VecDeque::new(),
            running: Vec::new(),
            step: None,
            stalled_until_us: 0,
            actions: Vec::new(),
            counts: EngineCounts::default(),
            early: HashMap::new(),
            early_ends: VecDeque::new(),
            next: mix(seed),
            refused: 0.0,
            sleeps_until_us: 0,
        }
    }

    pub(super) fn contents(&self) -> &super::pool::Contents {
        self.pool.contents()
    }

    /// Adds a request to the queue.
    pub(super) fn submit(
        &mut self,
        sent: Submission,
        now_us: u64,
    ) -> Result<Ticket, Box<(Submission, QueueFull)>> {
        if self.waiting.len() >= self.plan.waiting_max {
            let full = QueueFull { waiting: self.waiting.len() };
            return Err(Box::new((sent, full)));
        }
        self.next += 1;
        let ticket = Ticket(self.next);
        let (leg, prompt, tag) = (sent.leg.label(), sent.prompt, sent.tag.clone());
        self.log.emit(0, &sent.internal, 0, RequestEvent::Queued { leg, prompt, tag });
        let aborted = self.was_aborted_early(&sent, now_us);
        let request = Request {
            sent,
            phase: RequestPhase::Waiting,
            blocks: Vec::new(),
            there: 0,
            computed: 0,
            read: 0,
            begun: false,
            words: Vec::new(),
            taken: 0,
            end: None,
            aborting: false,
            orphan: false,
        };
        self.requests.insert(ticket, request);
        self.waiting.push_back(ticket);
        if aborted {
            self.abort(ticket, AbortSource::Verb, now_us);
        }
        Ok(ticket)
    }

    /// Whether this request is refused, so that the fraction of refusals is as planned.
    pub(super) fn refuses(&mut self) -> bool {
        self.refused += self.plan.faults.refuses.unwrap_or(0.0);
        let refuses = self.refused >= 1.0;
        self.refused -= f64::from(u8::from(refuses));
        refuses
    }

    /// Takes new output. If it contains the end, the request is removed.
    pub(super) fn take(&mut self, ticket: Ticket) -> RequestOutput {
        let Some(request) = self.requests.get_mut(&ticket) else { return RequestOutput::default() };
        let words = request.words[request.taken..].to_vec();
        request.taken = request.words.len();
        let end = request.end.take();
        if end.is_some() {
            self.requests.remove(&ticket);
        }
        RequestOutput { words, end }
    }

    /// The caller of a request has disconnected and will not take its end.
    pub(super) fn disconnect(&mut self, ticket: Ticket, now_us: u64) {
        let Some(request) = self.requests.get_mut(&ticket) else { return };
        request.orphan = true;
        if request.phase != RequestPhase::Done {
            return self.abort(ticket, AbortSource::Disconnect, now_us);
        }
        if let Some(end) = self.requests.remove(&ticket).and_then(|request| request.end) {
            self.reply_not_sent(&end, now_us);
        }
    }

    /// The reply with this end was not delivered.
    pub(super) fn reply_not_sent(&mut self, end: &RequestEnd, now_us: u64) {
        let RequestEnd::Leased(lent) = end else { return };
        // Baton's engine releases the lease, because no caller can have received the handle. vLLM's waits for
        // expiry.
        if self.plan.dialect == Dialect::Baton && !self.plan.faults.never_aborts_prefill {
            self.release(&LeaseKey::Handle(lent.handle), "client_gone", now_us);
        }
    }

    /// Aborts a request.
    pub(super) fn abort(&mut self, ticket: Ticket, notice: AbortSource, now_us: u64) {
        let faults = self.plan.faults;
        let Some(request) = self.requests.get_mut(&ticket) else { return };
        if request.phase == RequestPhase::Done || request.aborting {
            return;
        }
        let ignored = match request.sent.leg {
            Leg::Prefill => faults.never_aborts_prefill,
            Leg::Decode | Leg::Whole => faults.never_aborts_decode,
        };
        if ignored {
            return;
        }
        self.log.emit(0, &request.sent.internal, 0, RequestEvent::Abort(notice.label()));
        request.aborting = true;
        let phase = request.phase;
        if let Some(pause) = faults.stalls_bystanders {
            self.stall(pause, now_us);
        }
        let computes = self.step.as_ref().is_some_and(|step| step.work.iter().any(|(of, _)| *of == ticket));
        match phase {
            RequestPhase::Fetching if self.plan.dialect == Dialect::Baton => {
                self.actions.push(Action::StopFetch(ticket))
            }
            RequestPhase::Fetching if faults.frees_before_write => {
                let blocks = self.requests[&ticket].blocks.len();
                self.pool.become_of(blocks, BlockHolder::Landing, BlockHolder::Active);
                self.end(ticket, RequestEnd::Aborted);
            }
            // vLLM cannot stop a read, and no write of its producer.
            RequestPhase::Fetching => {}
            // The abort takes effect at the end of the step.
            RequestPhase::Ready | RequestPhase::Running if computes => {}
            RequestPhase::Waiting | RequestPhase::Ready | RequestPhase::Running => {
                self.end(ticket, RequestEnd::Aborted)
            }
            RequestPhase::Done => unreachable!("looked at above"),
        }
    }

    fn stall(&mut self, pause: Duration, now_us: u64) {
        let stall = us(pause);
        if let Some(step) = &mut self.step {
            step.ends_us = step.ends_us.max(now_us) + stall;
        }
        self.stalled_until_us = self.stalled_until_us.max(now_us) + stall;
    }

    /// A read has ended, with the contents of the blocks or an error.
    pub(super) fn fetched(&mut self, ticket: Ticket, result: Result<Vec<u64>, &'static str>) {
        let Some(request) =
            self.requests.get_mut(&ticket).filter(|request| request.phase == RequestPhase::Fetching)
        else {
            return;
        };
        let word = result.as_ref().map_or_else(|why| *why, |_| "landed");
        self.log.emit(0, &request.sent.internal, 0, RequestEvent::Fetched(word));
        self.counts.fetches += 1;
        self.pool.become_of(request.blocks.len(), BlockHolder::Landing, BlockHolder::Active);
        request.phase = RequestPhase::Ready;
        let tokens = request.sent.source.as_ref().map_or(0, |source| source.tokens);
        match result {
            _ if request.aborting => return self.end(ticket, RequestEnd::Aborted),
            Ok(contents) => {
                self.counts.fetched_blocks += contents.len() as u64;
                // A partial block is continued here and written again.
                let whole = tokens / self.plan.block_tokens;
                request.read = if tokens < request.sent.prompt { whole } else { contents.len() };
                for (&block, content) in request.blocks.iter().zip(contents) {
                    self.pool.contents().write(block, content);
                }
                // The last token is computed here, for the first token of the response.
                request.there = tokens.min(request.sent.prompt - 1);
            }
            Err(why) => {
                self.counts.failed_fetches += 1;
                if self.plan.after_failed_read() == LoadFailure::Fail {
                    return self.end(ticket, RequestEnd::Unread(why));
                }
            }
        }
        self.ready.push_back(ticket);
    }

    /// Ends a request and removes it from the queues.
    fn end(&mut self, ticket: Ticket, end: RequestEnd) {
        let request = self.requests.get_mut(&ticket).expect("a known ticket");
        match request.phase {
            RequestPhase::Waiting => self.waiting.retain(|of| *of != ticket),
            RequestPhase::Ready => self.ready.retain(|of| *of != ticket),
            RequestPhase::Running => self.running.retain(|of| *of != ticket),
            RequestPhase::Fetching | RequestPhase::Done => {}
        }
        let waited = request.phase == RequestPhase::Waiting;
        request.phase = RequestPhase::Done;
        let (generated, computed, blocks) = (request.words.len(), request.computed, request.blocks.len());
        let at = REASONS.iter().position(|reason| *reason == end.label()).unwrap_or(1);
        self.counts.ended[at] += 1;
        let internal = request.sent.internal.clone();
        let ended = RequestEvent::Ended { outcome: end.label(), generated, computed, blocks };
        self.log.emit(0, &internal, 0, ended);
        let blocks = std::mem::take(&mut request.blocks);
        if waited && let Some(source) = request.sent.source.take() {
            // Both dialects notify the producer of a request that will not read.
            self.actions.push(Action::Release(source, "consumer_aborted"));
        }
        if !matches!(end, RequestEnd::Leased(_)) && !blocks.is_empty() {
            self.pool.give_back(&blocks, BlockHolder::Active);
            self.log.emit(0, &internal, 0, RequestEvent::Freed(blocks.len()));
        }
        request.end = Some(end);
        request.sent.progress.notify_one();
        if request.orphan {
            self.requests.remove(&ticket);
        }
    }

    /// Opens a lease of a request's computed blocks.
    fn open_lease(&mut self, ticket: Ticket, now_us: u64) {
        self.next += 1;
        let handle = u128::from(mix(self.next)) << 64 | u128::from(mix(!self.next));
        let request = &self.requests[&ticket];
        let (blocks, left) = (request.blocks.clone(), self.plan.lease);
        let lease = Lease {
            handle,
            request: request.sent.internal.clone(),
            id: request.sent.id.clone(),
            blocks: blocks.clone(),
            opened_us: now_us,
            ends_us: now_us + us(left),
            readers: 0,
            draining: None,
        };
        let internal = lease.request.clone();
        self.pool.become_of(blocks.len(), BlockHolder::Active, BlockHolder::Leased);
        self.leases.open(lease);
        self.log.emit(0, &internal, 0, RequestEvent::LeaseOpened { blocks: blocks.len(), left: Some(left) });
        self.end(ticket, RequestEnd::Leased(OpenedLease { handle, blocks }));
        self.match_lease(handle, now_us);
    }

    fn record_closed_lease(&mut self, closed: ClosedLease, now_us: u64) {
        let ClosedLease { lease, reason, fetched } = closed;
        let held_us = now_us.saturating_sub(lease.opened_us);
        let count = lease.blocks.len();
        let expired = &*reason == super::leases::EXPIRED;
        let readers = (usize::from(fetched), 1);
        let held = Duration::from_micros(held_us);
        let ended = RequestEvent::LeaseEnded { reason: reason.clone(), blocks: count, readers, held };
        self.log.emit(0, &lease.request, 0, ended);
        self.pool.give_back(&lease.blocks, BlockHolder::Leased);
        if self.plan.faults.double_free && !fetched && !expired {
            self.pool.free_again(&lease.blocks);
        }
        self.log.emit(0, &lease.request, 0, RequestEvent::Freed(count));
        if expired {
            self.counts.expired += 1;
            self.counts.stranded_block_us += held_us * count as u64;
        }
        // Reasons are chosen by callers.
        let full = self.counts.releases.len() >= REASONS_KEPT && !self.counts.releases.contains_key(&reason);
        *self.counts.releases.entry(if full { "other".into() } else { reason }).or_default() += 1;
    }

    pub(super) fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    pub(super) fn usage(&self) -> PoolUsage {
        self.pool.usage()
    }

    pub(super) fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Numbers of requests that wait, run and fetch.
    pub(super) fn load(&self) -> (usize, usize, usize) {
        let fetching =
            self.requests.values().filter(|request| request.phase == RequestPhase::Fetching).count();
        (self.waiting.len(), self.running.len() + self.ready.len(), fetching)
    }

    /// Leases of waiting requests, which must be renewed.
    pub(super) fn pending_sources(&self) -> Vec<Source> {
        let sources = self.waiting.iter().filter_map(|ticket| self.requests[ticket].sent.source.clone());
        sources.collect()
    }
}
