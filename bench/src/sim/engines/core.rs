//! One simulated engine without sockets and clock: requests, steps, blocks and leases, driven by calls that say what
//! time it is (microseconds on the clock of its event log).
//!
//! ```text
//!  submit ─▶ waiting ─ a place and blocks ─┬─▶ running ─ steps ─▶ first token ─▶ … ─▶ done, or lent
//!                                          └─▶ fetching ─ landed ─▶ ready ─▶ running
//!  abort: at once, but for a request that is part of the step under way: at its end
//! ```
//!
//! A step computes the next prompt tokens of every running request, up to `step_tokens` over all, and one token for each
//! that decodes; it takes the time that the plan says. Blocks for the whole request are taken when it begins, so that
//! nobody is preempted. There is no prefix cache.

mod steps;
mod verbs;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_engine::event_log::{EventLog, What};
use tokio::sync::Notify;

use super::leases::{Closed, Lease, LeaseKey, Leases};
use super::plan::{Dialect, EnginePlan, LoadFailure};
use super::pool::{Held, Pool, Usage};
use super::text;

/// A request's place in the books.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Ticket(u64);

/// Which part of a request an engine is asked for.
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

/// Where the blocks of a handoff are.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// The producer.
    pub engine: String,
    pub lease: LeaseKey,
    pub blocks: Vec<u32>,
    pub tokens: usize,
}

/// A request, read and checked.
#[derive(Debug)]
pub(super) struct Submission {
    /// What the router calls it.
    pub id: RequestId,
    /// What this engine calls it; in vLLM's dialect they differ.
    pub internal: RequestId,
    pub tag: Option<Arc<str>>,
    pub leg: Leg,
    pub prompt: usize,
    /// The content of each block of its prompt.
    pub contents: Vec<u64>,
    pub max_tokens: usize,
    pub source: Option<Source>,
    /// Told of every progress.
    pub progress: Arc<Notify>,
}

/// What was lent, for the reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lent {
    pub handle: u128,
    pub blocks: Vec<u32>,
}

/// How a request has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It said what it was to say.
    Length,
    /// As that, and its blocks are lent.
    Lent(Lent),
    Aborted,
    /// Its blocks could not be read: `gone` or `failed`.
    Unread(&'static str),
}

impl End {
    fn label(&self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Lent(_) => "lent",
            Self::Aborted => "abort",
            Self::Unread(_) => "error",
        }
    }
}

/// What there is to say to a caller since it was asked last.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub words: Vec<&'static str>,
    pub end: Option<End>,
}

/// What the shell must do.
#[derive(Debug)]
pub(super) enum Action {
    /// Read these blocks and tell [`Core::fetched`].
    Fetch(Ticket, Source),
    /// Read no further.
    StopFetch(Ticket),
    /// Tell a producer that nobody will read.
    Release(Source, &'static str),
}

/// How an engine learns that nobody waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    Disconnect,
    Verb,
}

impl Notice {
    fn label(self) -> &'static str {
        match self {
            Self::Disconnect => "disconnect",
            Self::Verb => "verb",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    Fetching,
    Ready,
    Running,
    Done,
}

#[derive(Debug)]
struct Request {
    sent: Submission,
    phase: Phase,
    blocks: Vec<u32>,
    /// Prompt tokens that are there, computed or read.
    there: usize,
    /// Of those, computed here.
    computed: usize,
    /// Blocks that were read, and are not written again.
    read: usize,
    /// Whether its prompt has been part of a step.
    begun: bool,
    words: Vec<&'static str>,
    taken: usize,
    end: Option<End>,
    /// To be aborted at the end of a step, or of a read.
    aborting: bool,
    /// Nobody will ask for its end.
    orphan: bool,
}

#[derive(Debug)]
struct Step {
    ends_us: u64,
    /// Prompt tokens of each; 0: it decodes.
    work: Vec<(Ticket, usize)>,
}

/// Counted for `/metrics` and `/debug/kv`.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
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
    /// Reads that a producer was told of after its lease had ended.
    pub after_expiry: u64,
}

/// `finished_reason`, in the order of [`Counts::ended`].
pub(super) const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

/// See the module's documentation.
pub(super) struct Core {
    plan: EnginePlan,
    log: Arc<EventLog>,
    pool: Pool,
    leases: Leases,
    requests: HashMap<Ticket, Request>,
    waiting: VecDeque<Ticket>,
    ready: VecDeque<Ticket>,
    running: Vec<Ticket>,
    step: Option<Step>,
    stalled_until_us: u64,
    actions: Vec<Action>,
    pub(super) counts: Counts,
    /// Requests that were aborted before they came, with the leg that is meant; and in order, with their ends.
    early: HashMap<RequestId, Option<Leg>>,
    early_ends: VecDeque<(RequestId, u64)>,
    next: u64,
    refused: f64,
    /// When its driver looks again by itself.
    pub(super) sleeps_until_us: u64,
}

/// A queue that is full.
#[derive(Debug)]
pub(super) struct QueueFull {
    pub waiting: usize,
}

/// Reasons of releases that are counted apart.
const REASONS_KEPT: usize = 32;

/// After a pause that was nobody's (a stopped process) steps begin anew instead of catching up.
const CATCH_UP_US: u64 = 100_000;

fn us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl Core {
    pub(super) fn new(plan: EnginePlan, log: Arc<EventLog>, seed: u64) -> Self {
        Self {
            pool: Pool::new(plan.blocks),
            leases: Leases::new(plan.dialect),
            plan,
            log,
            requests: HashMap::new(),
            waiting: VecDeque::new(),
            ready: VecDeque::new(),
            running: Vec::new(),
            step: None,
            stalled_until_us: 0,
            actions: Vec::new(),
            counts: Counts::default(),
            early: HashMap::new(),
            early_ends: VecDeque::new(),
            next: text::mix(seed),
            refused: 0.0,
            sleeps_until_us: 0,
        }
    }

    pub(super) fn contents(&self) -> &super::pool::Contents {
        self.pool.contents()
    }

    /// Puts a request into the queue.
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
        self.log.tell(0, &sent.internal, 0, What::Queued { leg, prompt, tag });
        let aborted = self.was_aborted_early(&sent, now_us);
        let request = Request {
            sent,
            phase: Phase::Waiting,
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
            self.abort(ticket, Notice::Verb, now_us);
        }
        Ok(ticket)
    }

    /// Whether the share of requests that is refused has this one in it.
    pub(super) fn refuses(&mut self) -> bool {
        self.refused += self.plan.faults.refuses.unwrap_or(0.0);
        let refuses = self.refused >= 1.0;
        self.refused -= f64::from(u8::from(refuses));
        refuses
    }

    /// What a caller has not been told yet. With the end the request leaves the books.
    pub(super) fn take(&mut self, ticket: Ticket) -> Progress {
        let Some(request) = self.requests.get_mut(&ticket) else { return Progress::default() };
        let words = request.words[request.taken..].to_vec();
        request.taken = request.words.len();
        let end = request.end.take();
        if end.is_some() {
            self.requests.remove(&ticket);
        }
        Progress { words, end }
    }

    /// The caller of a request has left, and will not ask for its end.
    pub(super) fn leave(&mut self, ticket: Ticket, now_us: u64) {
        let Some(request) = self.requests.get_mut(&ticket) else { return };
        request.orphan = true;
        if request.phase != Phase::Done {
            return self.abort(ticket, Notice::Disconnect, now_us);
        }
        if let Some(end) = self.requests.remove(&ticket).and_then(|request| request.end) {
            self.unsent(&end, now_us);
        }
    }

    /// The reply that carries this end has reached no caller.
    pub(super) fn unsent(&mut self, end: &End, now_us: u64) {
        let End::Lent(lent) = end else { return };
        // Baton's engine gives back what no caller can have learnt of; vLLM's waits for the lease's end.
        if self.plan.dialect == Dialect::Baton && !self.plan.faults.never_aborts_prefill {
            self.release(&LeaseKey::Handle(lent.handle), "client_gone", now_us);
        }
    }

    /// Nobody waits for a request.
    pub(super) fn abort(&mut self, ticket: Ticket, notice: Notice, now_us: u64) {
        let faults = self.plan.faults;
        let Some(request) = self.requests.get_mut(&ticket) else { return };
        if request.phase == Phase::Done || request.aborting {
            return;
        }
        let ignored = match request.sent.leg {
            Leg::Prefill => faults.never_aborts_prefill,
            Leg::Decode | Leg::Whole => faults.never_aborts_decode,
        };
        if ignored {
            return;
        }
        self.log.tell(0, &request.sent.internal, 0, What::Abort(notice.label()));
        request.aborting = true;
        let phase = request.phase;
        if let Some(pause) = faults.stalls_bystanders {
            self.stall(pause, now_us);
        }
        let computes = self.step.as_ref().is_some_and(|step| step.work.iter().any(|(of, _)| *of == ticket));
        match phase {
            Phase::Fetching if self.plan.dialect == Dialect::Baton => {
                self.actions.push(Action::StopFetch(ticket))
            }
            // vLLM cannot stop a read.
            Phase::Fetching => {}
            // It takes effect at the end of the step.
            Phase::Ready | Phase::Running if computes => {}
            Phase::Waiting | Phase::Ready | Phase::Running => self.end(ticket, End::Aborted),
            Phase::Done => unreachable!("looked at above"),
        }
    }

    fn stall(&mut self, pause: Duration, now_us: u64) {
        let stall = us(pause);
        if let Some(step) = &mut self.step {
            step.ends_us = step.ends_us.max(now_us) + stall;
        }
        self.stalled_until_us = self.stalled_until_us.max(now_us) + stall;
    }

    /// A read has ended: with the contents of the blocks, or a reason.
    pub(super) fn fetched(&mut self, ticket: Ticket, result: Result<Vec<u64>, &'static str>) {
        let Some(request) = self.requests.get_mut(&ticket).filter(|request| request.phase == Phase::Fetching)
        else {
            return;
        };
        let word = result.as_ref().map_or_else(|why| *why, |_| "landed");
        self.log.tell(0, &request.sent.internal, 0, What::Fetched(word));
        self.counts.fetches += 1;
        self.pool.become_of(request.blocks.len(), Held::Landing, Held::Active);
        request.phase = Phase::Ready;
        let tokens = request.sent.source.as_ref().map_or(0, |source| source.tokens);
        match result {
            _ if request.aborting => return self.end(ticket, End::Aborted),
            Ok(contents) => {
                self.counts.fetched_blocks += contents.len() as u64;
                // A block that goes on here is written again.
                let whole = tokens / self.plan.block_tokens;
                request.read = if tokens < request.sent.prompt { whole } else { contents.len() };
                for (&block, content) in request.blocks.iter().zip(contents) {
                    self.pool.contents().write(block, content);
                }
                // The last token is computed here, for the first that is said.
                request.there = tokens.min(request.sent.prompt - 1);
            }
            Err(why) => {
                self.counts.failed_fetches += 1;
                if self.plan.after_failed_read() == LoadFailure::Fail {
                    return self.end(ticket, End::Unread(why));
                }
            }
        }
        self.ready.push_back(ticket);
    }

    /// Takes a request out of the books of whoever computes.
    fn end(&mut self, ticket: Ticket, end: End) {
        let request = self.requests.get_mut(&ticket).expect("it is in the books");
        match request.phase {
            Phase::Waiting => self.waiting.retain(|of| *of != ticket),
            Phase::Ready => self.ready.retain(|of| *of != ticket),
            Phase::Running => self.running.retain(|of| *of != ticket),
            Phase::Fetching | Phase::Done => {}
        }
        let waited = request.phase == Phase::Waiting;
        request.phase = Phase::Done;
        let (generated, computed, blocks) = (request.words.len(), request.computed, request.blocks.len());
        let at = REASONS.iter().position(|reason| *reason == end.label()).unwrap_or(1);
        self.counts.ended[at] += 1;
        let internal = request.sent.internal.clone();
        self.log.tell(0, &internal, 0, What::Ended { outcome: end.label(), generated, computed, blocks });
        let blocks = std::mem::take(&mut request.blocks);
        if waited && let Some(source) = request.sent.source.take() {
            // Both engines tell the producer that a request which never read will not.
            self.actions.push(Action::Release(source, "consumer_aborted"));
        }
        if !matches!(end, End::Lent(_)) && !blocks.is_empty() {
            self.pool.give_back(&blocks, Held::Active);
            self.log.tell(0, &internal, 0, What::Freed(blocks.len()));
        }
        request.end = Some(end);
        request.sent.progress.notify_one();
        if request.orphan {
            self.requests.remove(&ticket);
        }
    }

    /// Opens a lease of what a request has computed.
    fn lend(&mut self, ticket: Ticket, now_us: u64) {
        self.next += 1;
        let handle = u128::from(text::mix(self.next)) << 64 | u128::from(text::mix(!self.next));
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
        self.pool.become_of(blocks.len(), Held::Active, Held::Leased);
        self.leases.open(lease);
        self.log.tell(0, &internal, 0, What::Lent { blocks: blocks.len(), left: Some(left) });
        self.end(ticket, End::Lent(Lent { handle, blocks }));
    }

    fn closed(&mut self, closed: Closed, now_us: u64) {
        let Closed { lease, reason, fetched } = closed;
        let held_us = now_us.saturating_sub(lease.opened_us);
        let count = lease.blocks.len();
        let expired = &*reason == super::leases::EXPIRED;
        let readers = (usize::from(fetched), 1);
        let held = Duration::from_micros(held_us);
        self.log.tell(
            0,
            &lease.request,
            0,
            What::LeaseEnded { reason: reason.clone(), blocks: count, readers, held },
        );
        self.pool.give_back(&lease.blocks, Held::Leased);
        if self.plan.faults.double_free && !fetched && !expired {
            self.pool.free_again(&lease.blocks);
        }
        self.log.tell(0, &lease.request, 0, What::Freed(count));
        if expired {
            self.counts.expired += 1;
            self.counts.stranded_block_us += held_us * count as u64;
        }
        // A caller may give any reason.
        let full = self.counts.releases.len() >= REASONS_KEPT && !self.counts.releases.contains_key(&reason);
        *self.counts.releases.entry(if full { "other".into() } else { reason }).or_default() += 1;
    }

    pub(super) fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    pub(super) fn usage(&self) -> Usage {
        self.pool.usage()
    }

    pub(super) fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Requests that wait, run, and fetch.
    pub(super) fn load(&self) -> (usize, usize, usize) {
        let fetching = self.requests.values().filter(|request| request.phase == Phase::Fetching).count();
        (self.waiting.len(), self.running.len() + self.ready.len(), fetching)
    }

    /// What waiting requests will read: their producers must keep it.
    pub(super) fn awaited(&self) -> Vec<Source> {
        let sources = self.waiting.iter().filter_map(|ticket| self.requests[ticket].sent.source.clone());
        sources.collect()
    }
}
