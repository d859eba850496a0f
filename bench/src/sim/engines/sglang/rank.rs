//! One data-parallel rank of a simulated SGLang engine, without sockets and clock: legs, rooms, steps and pages.
//!
//! ```text
//!  P: bootstrapping ─ D's page indices ─▶ waiting ─ pages ─▶ running ─ prompt ─▶ transferring ─ written ─▶ done
//!  D: preallocating ─ P found, pages ───▶ transferring ─ written ─▶ waiting ──▶ running ─ tokens ──▶ done
//! ```
//!
//! Invariants, checked in [`tests`]:
//! - A leg ends once. Its pages are freed once, and not before the last write into them if aborts are exchanged.
//! - When no message is in flight and every wait is over, all pages are free and no room has a leg.
//!
//! P's pages are leased in the event log while the transfer reads them. SGLang's own words of the source are in the
//! error texts.

mod peers;
mod steps;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_connector::RequestId;
use baton_connector_leases::event_log::{EventLog, RequestEvent};
use tokio::sync::Notify;

use super::super::plan::EnginePlan;
use super::super::pool::{BlockHolder, PoolUsage, SimPool};
use super::super::role::Role;
use super::message::{DecodeLeg, Envelope, LegTicket, PeerRank};
use super::plan::{AbortExchange, Waits};
use super::rooms::{JoinOutcome, RoomTable};
use steps::RankStep;

/// The reason of a leg that was aborted by request id.
const ABORTED_BY_REQUEST: &str = "Aborted by AbortReq.";

/// The properties of a rank.
#[derive(Clone, Debug)]
pub(super) struct RankTraits {
    pub plan: EnginePlan,
    pub waits: Waits,
    pub aborts: AbortExchange,
    pub role: Role,
    pub number: usize,
    /// Ranks of the engine.
    pub ranks: usize,
    /// The engine's address for messages.
    pub at: SocketAddr,
}

/// A parsed and checked request.
#[derive(Debug)]
pub(super) struct LegSubmission {
    /// The request's name in the event log.
    pub id: RequestId,
    pub rid: String,
    pub tag: Option<Arc<str>>,
    pub room: u64,
    /// `HOST:PORT` of P's bootstrap server, for D.
    pub bootstrap: String,
    /// P's rank, for D, if the request has one (`disagg_prefill_dp_rank`).
    pub prefill_rank: Option<usize>,
    pub prompt: usize,
    /// The content of each page of the prompt.
    pub contents: Vec<u64>,
    pub max_tokens: usize,
    /// Notified of all progress.
    pub progress: Arc<Notify>,
}

/// How a leg has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RankLegEnd {
    /// The response is complete.
    Length,
    /// An abort ended it in a queue or a batch: the response is complete, with `finish_reason` abort.
    Aborted,
    /// The response is an error.
    Failed { status: u16, message: String },
}

/// The output of a leg since it was last taken.
#[derive(Debug, Default)]
pub(super) struct LegOutput {
    pub words: Vec<Cow<'static, str>>,
    pub end: Option<RankLegEnd>,
}

/// An action of the I/O layer.
#[derive(Debug)]
pub(super) enum RankAction {
    Send(SocketAddr, Envelope),
    /// Find P's rank and call [`SglangRank::resolved`].
    Resolve {
        ticket: LegTicket,
        bootstrap: String,
        room: u64,
        prefill_rank: Option<usize>,
    },
}

/// How a leg's end was caused, for the event log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EndCause {
    Disconnect,
    Verb,
    /// The other leg's engine.
    Peer,
    /// A timeout, a duplicate, a conflict.
    Error,
}

impl EndCause {
    /// The word for an abort. `None` for an error.
    fn abort(self) -> Option<&'static str> {
        match self {
            Self::Disconnect => Some("disconnect"),
            Self::Verb => Some("verb"),
            Self::Peer => Some("peer"),
            Self::Error => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LegPhase {
    /// P waits for D's page indices.
    Bootstrapping,
    /// D waits for P's address and for pages.
    Preallocating,
    /// D's pages are reserved and P writes them, or P writes.
    Transferring,
    /// For a place in a batch.
    Waiting,
    Running,
    Done,
}

#[derive(Debug)]
struct SglangLeg {
    sent: LegSubmission,
    phase: LegPhase,
    /// P's rank, for D.
    prefill: Option<PeerRank>,
    pages: Vec<u32>,
    /// Prompt tokens that are present, computed or written.
    there: usize,
    words: Vec<Cow<'static, str>>,
    taken: usize,
    end: Option<RankLegEnd>,
    /// The leg ends at the end of the step, for this cause.
    aborting: Option<EndCause>,
    /// The caller has disconnected and will not take the end.
    orphan: bool,
    /// When the phase ends by time.
    timer_us: Option<u64>,
    /// When the phase began.
    since_us: u64,
}

/// Pages or a write that outlive their leg.
#[derive(Debug)]
enum Drain {
    /// D: pages that P may still write.
    Pages { id: RequestId, pages: Vec<u32> },
    /// P: a write in flight, and whether D waits for its end.
    Write { room: u64, to: DecodeLeg, pages: Vec<u32>, contents: Vec<u64>, acks: bool },
}

/// A due time: of a leg's phase, or of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TimerOf {
    Leg(LegTicket),
    Drain(LegTicket),
}

/// Counts for `/metrics`.
#[derive(Clone, Debug, Default)]
pub(super) struct RankCounts {
    pub steps: u64,
    pub prompt_tokens: u64,
    pub generation_tokens: u64,
    pub requests: u64,
    pub aborted: u64,
    pub bootstrap_failed: u64,
    pub transfer_failed: u64,
}

/// Numbers of legs by queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RankLoad {
    /// P's bootstrap queue, or D's preallocation queue.
    pub opening: usize,
    pub transferring: usize,
    pub waiting: usize,
    pub running: usize,
    /// D's aborted transfers whose pages are kept.
    pub deferred: usize,
    pub waiting_tokens: usize,
}

/// The state of one rank. See the module documentation.
pub(super) struct SglangRank {
    traits: RankTraits,
    log: Arc<EventLog>,
    pool: SimPool,
    legs: HashMap<LegTicket, SglangLeg>,
    rooms: RoomTable,
    /// D's legs without pages, P's and D's legs without a place, and legs with one.
    opening: VecDeque<LegTicket>,
    waiting: VecDeque<LegTicket>,
    running: Vec<LegTicket>,
    step: Option<RankStep>,
    drains: HashMap<LegTicket, Drain>,
    timers: BTreeSet<(u64, TimerOf)>,
    actions: Vec<RankAction>,
    pub(super) counts: RankCounts,
    next: u64,
    stalled_until_us: u64,
    /// When the driver wakes next.
    pub(super) sleeps_until_us: u64,
}

fn us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl SglangRank {
    /// `first`: before the number of the first leg. Numbers of two processes differ, so that a late message of an
    /// earlier one matches no leg.
    pub(super) fn new(traits: RankTraits, log: Arc<EventLog>, first: u64) -> Self {
        Self {
            pool: SimPool::new(traits.plan.blocks),
            traits,
            log,
            legs: HashMap::new(),
            rooms: RoomTable::default(),
            opening: VecDeque::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            step: None,
            drains: HashMap::new(),
            timers: BTreeSet::new(),
            actions: Vec::new(),
            counts: RankCounts::default(),
            next: first,
            stalled_until_us: 0,
            sleeps_until_us: 0,
        }
    }

    /// Adds a leg. `None` if the queue is full.
    pub(super) fn submit(&mut self, sent: LegSubmission, now_us: u64) -> Option<LegTicket> {
        if self.opening.len() + self.waiting.len() >= self.traits.plan.waiting_max {
            return None;
        }
        self.next += 1;
        let (ticket, role) = (LegTicket(self.next), self.traits.role);
        let queued = RequestEvent::Queued { leg: role.label(), prompt: sent.prompt, tag: sent.tag.clone() };
        self.log.emit(self.traits.number, &sent.id, 0, queued);
        self.counts.requests += 1;
        let phase = match role {
            Role::Prefill => LegPhase::Bootstrapping,
            Role::Decode => LegPhase::Preallocating,
        };
        let room = sent.room;
        let leg = SglangLeg {
            sent,
            phase,
            prefill: None,
            pages: Vec::new(),
            there: 0,
            words: Vec::new(),
            taken: 0,
            end: None,
            aborting: None,
            orphan: false,
            timer_us: None,
            since_us: now_us,
        };
        self.legs.insert(ticket, leg);
        self.opening.push_back(ticket);
        if let Some(conflict) = self.rank_conflict(room) {
            self.fail(ticket, &conflict, EndCause::Error, now_us);
            return Some(ticket);
        }
        match (self.rooms.join(room, ticket), role) {
            (JoinOutcome::Duplicate(other), _) => {
                // Both share the entry of SGLang's status table.
                for ticket in [other, ticket] {
                    self.fail(ticket, "Duplicate or cancelled bootstrap room", EndCause::Error, now_us);
                }
            }
            (JoinOutcome::Failed, _) => {
                self.fail(ticket, "Duplicate or cancelled bootstrap room", EndCause::Peer, now_us);
            }
            (JoinOutcome::Met, Role::Prefill) => self.queue(ticket),
            (JoinOutcome::HalfOpen, Role::Prefill) => {
                self.set_timer(ticket, now_us + us(self.traits.waits.bootstrap));
            }
            (JoinOutcome::Met | JoinOutcome::HalfOpen, Role::Decode) => {
                let sent = &self.legs[&ticket].sent;
                let (bootstrap, prefill_rank) = (sent.bootstrap.clone(), sent.prefill_rank);
                self.actions.push(RankAction::Resolve { ticket, bootstrap, room, prefill_rank });
            }
        }
        Some(ticket)
    }

    /// Why a room does not fit P's rank (`follow_bootstrap_room`).
    fn rank_conflict(&self, room: u64) -> Option<String> {
        let RankTraits { role, number, ranks, .. } = self.traits;
        let implied = (room % ranks as u64) as usize;
        (role == Role::Prefill && implied != number).then(|| {
            format!(
                "follow_bootstrap_room conflict: dispatched to dp_rank {number} but bootstrap_room {room} implies \
                 dp_rank {implied}. Set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing."
            )
        })
    }

    /// Moves a leg from its opening queue to the queue for a batch.
    fn queue(&mut self, ticket: LegTicket) {
        self.clear_timer(ticket);
        self.opening.retain(|of| *of != ticket);
        self.leg(ticket).phase = LegPhase::Waiting;
        self.waiting.push_back(ticket);
    }

    fn leg(&mut self, ticket: LegTicket) -> &mut SglangLeg {
        self.legs.get_mut(&ticket).expect("a known ticket")
    }

    fn emit(&self, ticket: LegTicket, event: RequestEvent) {
        self.log.emit(self.traits.number, &self.legs[&ticket].sent.id, 0, event);
    }

    fn set_timer(&mut self, ticket: LegTicket, at_us: u64) {
        self.clear_timer(ticket);
        self.leg(ticket).timer_us = Some(at_us);
        self.timers.insert((at_us, TimerOf::Leg(ticket)));
    }

    fn clear_timer(&mut self, ticket: LegTicket) {
        if let Some(at_us) = self.leg(ticket).timer_us.take() {
            self.timers.remove(&(at_us, TimerOf::Leg(ticket)));
        }
    }

    /// Takes new output. If it contains the end, the leg is removed.
    pub(super) fn take(&mut self, ticket: LegTicket) -> LegOutput {
        let Some(leg) = self.legs.get_mut(&ticket) else { return LegOutput::default() };
        let words = leg.words[leg.taken..].to_vec();
        leg.taken = leg.words.len();
        let end = leg.end.take();
        if end.is_some() {
            self.legs.remove(&ticket);
        }
        LegOutput { words, end }
    }

    /// No caller takes the leg's end.
    pub(super) fn abandon(&mut self, ticket: LegTicket) {
        let Some(leg) = self.legs.get_mut(&ticket) else { return };
        leg.orphan = true;
        if leg.phase == LegPhase::Done {
            self.legs.remove(&ticket);
        }
    }

    /// Aborts every leg whose `rid` begins with this text.
    pub(super) fn abort_prefix(&mut self, prefix: &str, cause: EndCause, now_us: u64) {
        let matches = |leg: &SglangLeg| leg.phase != LegPhase::Done && leg.sent.rid.starts_with(prefix);
        let mut found: Vec<_> =
            self.legs.iter().filter(|(_, leg)| matches(leg)).map(|(ticket, _)| *ticket).collect();
        found.sort_unstable();
        for ticket in found {
            self.abort(ticket, cause, now_us);
        }
    }

    fn abort(&mut self, ticket: LegTicket, cause: EndCause, now_us: u64) {
        let (faults, role) = (self.traits.plan.faults, self.traits.role);
        let ignores = match role {
            Role::Prefill => faults.never_aborts_prefill,
            Role::Decode => faults.never_aborts_decode,
        };
        let phase = self.leg(ticket).phase;
        if ignores || phase == LegPhase::Done || self.leg(ticket).aborting.is_some() {
            return;
        }
        if let Some(pause) = faults.stalls_bystanders {
            self.stall(us(pause), now_us);
        }
        match phase {
            LegPhase::Bootstrapping | LegPhase::Preallocating | LegPhase::Transferring => {
                self.fail(ticket, ABORTED_BY_REQUEST, cause, now_us);
            }
            LegPhase::Waiting => {
                self.log_abort(ticket, cause);
                self.end(ticket, RankLegEnd::Aborted, now_us);
            }
            LegPhase::Running => {
                self.log_abort(ticket, cause);
                self.leg(ticket).aborting = Some(cause);
            }
            LegPhase::Done => unreachable!("looked at above"),
        }
    }

    fn log_abort(&mut self, ticket: LegTicket, cause: EndCause) {
        if let Some(how) = cause.abort() {
            self.counts.aborted += 1;
            self.emit(ticket, RequestEvent::Abort(how));
        }
    }

    fn stall(&mut self, stall_us: u64, now_us: u64) {
        if let Some(step) = &mut self.step {
            step.ends_us = step.ends_us.max(now_us) + stall_us;
        }
        self.stalled_until_us = self.stalled_until_us.max(now_us) + stall_us;
    }

    /// Ends a leg with SGLang's error for its phase.
    fn fail(&mut self, ticket: LegTicket, reason: &str, cause: EndCause, now_us: u64) {
        if self.leg(ticket).phase == LegPhase::Done {
            return;
        }
        self.log_abort(ticket, cause);
        let (role, number) = (self.traits.role, self.traits.number);
        let leg = self.leg(ticket);
        let (rid, room) = (&leg.sent.rid, leg.sent.room);
        let (what, field) = match (role, leg.phase) {
            (Role::Prefill, LegPhase::Transferring) => ("Prefill transfer", "req"),
            (Role::Prefill, _) => ("Prefill bootstrap", "req"),
            (Role::Decode, LegPhase::Preallocating) => ("Decode handshake", "decode_req.req"),
            (Role::Decode, _) => ("Decode transfer", "decode_req.req"),
        };
        let message = format!(
            "{what} failed for request rank={number} {field}.rid='{rid}' {field}.bootstrap_room={room} with exception \
             KVTransferError(bootstrap_room={room}): {reason}"
        );
        if leg.phase == LegPhase::Transferring {
            self.counts.transfer_failed += 1;
        } else {
            self.counts.bootstrap_failed += 1;
        }
        self.end_for(ticket, RankLegEnd::Failed { status: 500, message }, cause, reason, now_us);
    }

    /// Ends a leg as its response reports it.
    fn end(&mut self, ticket: LegTicket, end: RankLegEnd, now_us: u64) {
        self.end_for(ticket, end, EndCause::Verb, ABORTED_BY_REQUEST, now_us);
    }

    fn end_for(&mut self, ticket: LegTicket, end: RankLegEnd, cause: EndCause, reason: &str, now_us: u64) {
        self.clear_timer(ticket);
        for queue in [&mut self.opening, &mut self.waiting] {
            queue.retain(|of| *of != ticket);
        }
        self.running.retain(|of| *of != ticket);
        let leg = self.leg(ticket);
        let (phase, room) = (std::mem::replace(&mut leg.phase, LegPhase::Done), leg.sent.room);
        let (generated, computed, blocks) = (leg.words.len(), leg.there, leg.pages.len());
        // P's leg has ended in the log when its transfer began. P wrote what D's has not computed.
        let computed = if self.traits.role == Role::Prefill { computed } else { 0 };
        if (self.traits.role, phase) != (Role::Prefill, LegPhase::Transferring) {
            let outcome = match &end {
                RankLegEnd::Length => "length",
                RankLegEnd::Aborted => "abort",
                RankLegEnd::Failed { .. } => cause.abort().map_or("error", |_| "abort"),
            };
            self.emit(ticket, RequestEvent::Ended { outcome, generated, computed, blocks });
        }
        let peer = self.rooms.close(room, ticket);
        match self.traits.role {
            Role::Prefill => self.leave_prefill(ticket, phase, peer, &end, reason, now_us),
            Role::Decode => self.leave_decode(ticket, phase, now_us),
        }
        let leg = self.leg(ticket);
        leg.end = Some(end);
        leg.sent.progress.notify_one();
        if leg.orphan {
            self.legs.remove(&ticket);
        }
    }

    /// Frees a leg's pages.
    fn free(&mut self, ticket: LegTicket, held: BlockHolder) {
        let pages = std::mem::take(&mut self.leg(ticket).pages);
        if !pages.is_empty() {
            self.pool.give_back(&pages, held);
            self.emit(ticket, RequestEvent::Freed(pages.len()));
        }
    }

    pub(super) fn take_actions(&mut self) -> Vec<RankAction> {
        std::mem::take(&mut self.actions)
    }

    pub(super) fn usage(&self) -> PoolUsage {
        self.pool.usage()
    }

    pub(super) fn load(&self) -> RankLoad {
        let transferring = self.legs.values().filter(|leg| leg.phase == LegPhase::Transferring).count();
        let queued = self.opening.iter().chain(&self.waiting);
        RankLoad {
            opening: self.opening.len(),
            transferring,
            waiting: self.waiting.len(),
            running: self.running.len(),
            deferred: self.drains.values().filter(|drain| matches!(drain, Drain::Pages { .. })).count(),
            waiting_tokens: queued.map(|ticket| self.legs[ticket].sent.prompt).sum(),
        }
    }
}
