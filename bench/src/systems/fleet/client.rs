//! One request: the actions of its client, its router and its engines, one step at a time.
//!
//! The exchange and the fetch determine settlements and actions. This module delivers them to engines, which may
//! have died in the meantime.

use std::time::Duration;

use baton_connector::exchange::{Attempt, Event, Exchange, Failure, Outcome, Phase, Settlement, Step};
use baton_connector::fetch::{
    self, Action, FailureKind, Fetch, FetchActions, LoadFailurePolicy, Verification,
};
use baton_connector::transport::Verdict;
use baton_connector::{BlockId, Handle, Reader, RequestId};
use baton_router::sim_router::{SimInFlight, SimRequest, SimReservation};

use super::costs::DecisionKind;
use super::engine::PlantedFault;
use super::probabilities::{
    BEAT_US, CHUNK_US, COMES_BACK_US, LEAVES_GAP, LEAVES_PREFILL, LEAVES_QUEUE, LEAVES_READ, LEAVES_STREAM,
    QUEUE_US, READ_US, REPLY_ON_ITS_WAY, SILENT, SILENT_US, STREAM_US, THINKS_US,
};
use super::simulation::{FleetEvent, FleetSim};
use crate::load::rng::mix;

/// Attempts of one leg, as the router's `attempts`.
const TRIES: usize = 3;
/// Number of shared beginnings of prompts, per engine.
const BEGINNINGS_PER_ENGINE: u64 = 16;
/// Chunks of a shared beginning, and maximum chunks of the rest.
const SHARED_CHUNKS: u64 = 16;
const OWN_CHUNKS: u64 = 8;
/// Tokens of a chunk. A chunk is also one KV block.
const CHUNK_TOKENS: u64 = 128;

/// The next step of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RequestStage {
    Leaves,
    Prefilled,
    /// The reply of an abandoned prefill arrives.
    LateReply,
    AskDecode,
    /// The request is in the decode engine's queue.
    Waits,
    Transferred,
    /// A stopped read has ended.
    Stopped,
    /// The decode engine has all blocks and generates.
    Speaks,
    Over,
}

/// The lease of a request's blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeaseRef {
    pub(super) engine: usize,
    pub(super) epoch: u32,
    pub(super) handle: Handle,
}

/// A client of the simulation and its current request.
pub(super) struct ClientSlot {
    pub(super) router: usize,
    /// Incremented with every step. Earlier scheduled steps are void.
    turn: u32,
    id: RequestId,
    entered: Option<SimInFlight>,
    asked: SimRequest,
    beginning: u32,
    pub(super) exchange: Exchange,
    attempts: u16,
    prefill: Option<SimReservation>,
    decode: Option<SimReservation>,
    /// The prefill engine of the last attempt, and its epoch.
    computing: (usize, u32),
    /// The decode engine of the last attempt.
    decoding: usize,
    /// The attempts of the reservations.
    tries: [Attempt; 2],
    tried: [Vec<usize>; 2],
    pub(super) lent: Option<LeaseRef>,
    fetch: Option<Fetch>,
    reader: Reader,
    landing: Vec<BlockId>,
    /// The decode engine's epoch at the time of the request.
    epoch: u32,
    queued_until: u64,
    pub(super) lease_ns: u64,
    finish_ns: u64,
    ended: u32,
    /// There was no decode engine with capacity.
    turned_away: bool,
}

impl ClientSlot {
    pub(super) fn new(router: usize) -> Self {
        Self {
            router,
            turn: 0,
            id: RequestId::new("none").expect("printable"),
            entered: None,
            asked: SimRequest::default(),
            beginning: 0,
            exchange: Exchange::new(),
            attempts: 0,
            prefill: None,
            decode: None,
            computing: (0, 0),
            decoding: 0,
            tries: [Attempt(0); 2],
            tried: Default::default(),
            lent: None,
            fetch: None,
            reader: Reader::sole(0),
            landing: Vec::new(),
            epoch: 0,
            queued_until: 0,
            lease_ns: 0,
            finish_ns: 0,
            ended: 0,
            turned_away: false,
        }
    }

    /// The engine whose death affects a request in this phase.
    pub(super) fn works_at(&self, phase: Phase) -> Option<usize> {
        match phase {
            Phase::Queue | Phase::Gap => None,
            Phase::Prefill => self.prefill.as_ref().map(|reservation| reservation.engine),
            Phase::DecodePreFirst | Phase::DecodeStream => {
                self.decode.as_ref().map(|reservation| reservation.engine)
            }
        }
    }

    fn attempt(&mut self, leg: usize) -> Attempt {
        self.attempts += 1;
        self.tries[leg] = Attempt(self.attempts);
        self.tries[leg]
    }

    fn blocks(&self) -> usize {
        self.asked.prefix.len()
    }
}

impl FleetSim<'_> {
    /// Schedules the next step of a request, which replaces earlier ones.
    fn schedule(&mut self, slot: usize, us: u64, stage: RequestStage) {
        let client = &mut self.clients[slot];
        client.turn += 1;
        let turn = client.turn;
        self.after(us, FleetEvent::Comes(slot as u32, turn, stage));
    }

    /// The same, unless the client disconnects before.
    fn schedule_unless_cancelled(&mut self, slot: usize, us: u64, stage: RequestStage, leaves: f64) {
        if self.rng.chance(leaves) {
            let us = self.rng.below(us.max(1));
            self.schedule(slot, us, RequestStage::Leaves);
        } else {
            self.schedule(slot, us, stage);
        }
    }

    /// A client begins a request.
    pub(super) fn begin(&mut self, slot: usize) {
        self.outcome.begun += 1;
        self.living += 1;
        let beginnings = BEGINNINGS_PER_ENGINE * self.setup.engines as u64;
        // The bound is drawn too, so that some beginnings are far more frequent than others.
        let bound = 1 + self.rng.below(beginnings);
        let beginning = self.rng.below(bound);
        let own = 1 + self.rng.below(OWN_CHUNKS);
        let number = self.outcome.begun;
        let now = self.now;
        let client = &mut self.clients[slot];
        let (router, turn) = (client.router, client.turn);
        self.turned_away -= usize::from(client.turned_away);
        *client = ClientSlot::new(router);
        client.turn = turn;
        client.id = RequestId::new(&format!("cmpl-{number:032x}")).expect("printable");
        client.beginning = beginning as u32;
        let shared = (0..SHARED_CHUNKS).map(|n| mix(beginning << 8 | n));
        let own = (0..own).map(|n| mix((number + (1 << 32)) << 8 | n));
        client.asked.prefix = shared.chain(own).collect();
        client.asked.tokens = client.blocks() as u64 * CHUNK_TOKENS;
        client.asked.chunk_tokens = CHUNK_TOKENS as f64;
        client.asked.session = Some(mix(slot as u64));
        client.entered = Some(self.routers[router].begin_request(&client.id, now));
        if self.choose_decode(slot) {
            self.ask_prefill(slot);
        } else {
            self.clients[slot].turned_away = true;
            self.turned_away += 1;
            self.apply(slot, Event::NotAdmitted);
        }
    }

    /// Reserves a decode engine, if there is one.
    fn choose_decode(&mut self, slot: usize) -> bool {
        let client = &self.clients[slot];
        let router = &self.routers[client.router];
        let (reservation, ns) =
            self.outcome.costs.timed(|| router.reserve_decode(&client.asked, &client.tried[1]));
        self.outcome.costs.count(DecisionKind::ChooseDecode, ns);
        let Ok(reservation) = reservation else { return false };
        self.arrives(1, reservation.engine);
        self.clients[slot].decoding = reservation.engine;
        self.clients[slot].decode = Some(reservation);
        true
    }

    fn arrives(&mut self, leg: usize, engine: usize) {
        self.at[engine] += 1;
        self.outcome.most_at_one[leg] = self.outcome.most_at_one[leg].max(self.at[engine]);
    }

    /// Releases a reservation, after it has reported the response time of an engine that served. Returns the
    /// duration of the release.
    fn release_reservation(&mut self, reservation: Option<SimReservation>, served: Option<Duration>) -> u64 {
        let Some(reservation) = reservation else { return 0 };
        self.at[reservation.engine] -= 1;
        let give_back = || {
            if let Some(after) = served {
                reservation.respond(after);
                reservation.complete();
            }
        };
        self.outcome.costs.timed(give_back).1
    }

    fn ask_prefill(&mut self, slot: usize) {
        while self.clients[slot].tried[0].len() < TRIES {
            let client = &self.clients[slot];
            let decode = client.decode.as_ref().expect("a decode engine is set aside before");
            let router = &self.routers[client.router];
            let (chosen, ns) =
                self.outcome.costs.timed(|| router.reserve_prefill(&client.asked, decode, &client.tried[0]));
            self.outcome.costs.count(DecisionKind::ChoosePrefill, ns);
            let Ok(Some(reservation)) = chosen else { break };
            let engine = reservation.engine;
            let attempt = self.clients[slot].attempt(0);
            self.apply(slot, Event::PrefillSent(attempt));
            if !self.engines[engine].alive {
                let router = self.clients[slot].router;
                self.routers[router].fail_connection(engine);
                drop(reservation);
                self.clients[slot].tried[0].push(engine);
                self.apply(slot, Event::PrefillFailed(attempt, Failure::NotReached));
                continue;
            }
            self.arrives(0, engine);
            let epoch = self.engines[engine].epoch;
            let client = &mut self.clients[slot];
            client.prefill = Some(reservation);
            client.computing = (engine, epoch);
            let (beginning, mut chunks) = (client.beginning, client.blocks() as u64);
            let cached = self.engines[engine].computes(beginning);
            if self.outcome.costs.counting {
                self.outcome.hits[0] += if cached { SHARED_CHUNKS } else { 0 };
                self.outcome.hits[1] += SHARED_CHUNKS;
            }
            chunks -= if cached { SHARED_CHUNKS } else { 0 };
            let us = self.mean(CHUNK_US * chunks as f64);
            return self.schedule_unless_cancelled(slot, us, RequestStage::Prefilled, LEAVES_PREFILL);
        }
        self.apply(slot, Event::PrefillSkipped);
        self.schedule(slot, 0, RequestStage::AskDecode);
    }

    /// Runs a scheduled step, unless another one has replaced it.
    pub(super) fn run_stage(&mut self, slot: usize, turn: u32, stage: RequestStage) {
        if self.clients[slot].turn != turn {
            return;
        }
        match stage {
            RequestStage::Leaves => self.apply(slot, Event::ClientGone),
            RequestStage::Prefilled => {
                let attempt = self.clients[slot].tries[0];
                let handle = self.open_lease(slot);
                let reservation = self.clients[slot].prefill.take();
                self.clients[slot].finish_ns =
                    self.release_reservation(reservation, Some(Duration::from_millis(300)));
                self.apply(slot, Event::PrefillLeased(attempt, Some(handle)));
                self.schedule_unless_cancelled(slot, 1_000, RequestStage::AskDecode, LEAVES_GAP);
            }
            RequestStage::LateReply => {
                let (attempt, (engine, epoch)) = (self.clients[slot].tries[0], self.clients[slot].computing);
                let there = self.engines[engine].alive && self.engines[engine].epoch == epoch;
                let event = if there {
                    Event::PrefillLeased(attempt, Some(self.open_lease(slot)))
                } else {
                    Event::PrefillFailed(attempt, Failure::Unknown)
                };
                self.apply(slot, event);
                self.finish_request(slot);
            }
            RequestStage::AskDecode => self.ask_decode(slot),
            RequestStage::Waits => self.waits(slot),
            RequestStage::Transferred => self.transferred(slot),
            RequestStage::Stopped => {
                let reader = self.clients[slot].reader;
                let handle = self.clients[slot].lent.map(|lent| lent.handle);
                self.on_ledger(slot, |ledger, now| {
                    handle.into_iter().for_each(|handle| ledger.fail_read(handle, reader, now));
                });
                self.fetches(slot, fetch::Event::WorkerLost);
                self.finish_request(slot);
            }
            RequestStage::Speaks => {
                let attempt = self.clients[slot].tries[1];
                self.apply(slot, Event::DecodeAccepted(attempt));
                self.apply(slot, Event::FirstChunk(attempt));
                let us = self.mean(STREAM_US);
                self.schedule_unless_cancelled(slot, us, RequestStage::Over, LEAVES_STREAM);
            }
            RequestStage::Over => {
                let attempt = self.clients[slot].tries[1];
                self.apply(slot, Event::StreamEnded(attempt));
            }
        }
    }

    /// The prefill engine opens a lease of the computed blocks.
    fn open_lease(&mut self, slot: usize) -> Handle {
        let handle = Handle(u128::from(self.rng.next()) << 64 | u128::from(self.rng.next()));
        let client = &mut self.clients[slot];
        let (id, blocks) = (client.id.clone(), client.blocks());
        let (engine, epoch) = client.computing;
        let grant = self.engines[engine].open_lease(handle, &id, blocks);
        let client = &mut self.clients[slot];
        client.lent = Some(LeaseRef { engine, epoch, handle });
        client.lease_ns = 0;
        self.outcome.leases.opened += 1;
        self.on_ledger(slot, |ledger, now| {
            assert!(
                ledger.open(grant, now).is_ok(),
                "a ledger has room for more leases than there are requests"
            );
        });
        handle
    }

    /// Sends the request to the reserved decode engine, or to another one if that is dead.
    fn ask_decode(&mut self, slot: usize) {
        loop {
            let engine = self.clients[slot].decode.as_ref().expect("it was set aside").engine;
            let attempt = self.clients[slot].attempt(1);
            self.apply(slot, Event::DecodeSent(attempt));
            if self.engines[engine].alive {
                return self.decodes(slot, engine);
            }
            let router = self.clients[slot].router;
            self.routers[router].fail_connection(engine);
            self.apply(slot, Event::DecodeFailed(attempt, Failure::NotReached));
            if !self.another_decode(slot, engine) {
                return self.apply(slot, Event::Exhausted);
            }
        }
    }

    fn another_decode(&mut self, slot: usize, failed: usize) -> bool {
        let reservation = self.clients[slot].decode.take();
        self.release_reservation(reservation, None);
        self.clients[slot].tried[1].push(failed);
        self.clients[slot].tried[1].len() < TRIES && self.choose_decode(slot)
    }

    /// A decode engine accepts the request.
    fn decodes(&mut self, slot: usize, engine: usize) {
        let epoch = self.engines[engine].epoch;
        let has_handoff = self.has_handoff(slot);
        let consumer = self.rng.next();
        let client = &mut self.clients[slot];
        client.epoch = epoch;
        if !has_handoff {
            return self.recompute(slot);
        }
        client.fetch = Some(Fetch::new(LoadFailurePolicy::Recompute));
        client.reader = Reader::sole(consumer);
        let handle = client.lent.map(|lent| lent.handle);
        if self.rng.chance(SILENT) {
            if let Some((lent, handle)) = self.clients[slot].lent.zip(handle) {
                let producer = &mut self.engines[lent.engine];
                if producer.epoch == lent.epoch {
                    producer.leave_to_expiry(handle);
                }
            }
            self.clients[slot].queued_until = 0;
            return self.schedule(slot, SILENT_US, RequestStage::Waits);
        }
        let us = self.mean(QUEUE_US);
        self.clients[slot].queued_until = self.now.0 + us;
        self.schedule_unless_cancelled(slot, us.min(BEAT_US), RequestStage::Waits, LEAVES_QUEUE);
    }

    /// Whether the lease may still be readable, as far as the router knows.
    fn has_handoff(&self, slot: usize) -> bool {
        use baton_connector::exchange::{PrefillHalf, State};
        matches!(self.clients[slot].exchange.state(), State::Decoding(_, PrefillHalf::Leased(_)))
    }

    fn recompute(&mut self, slot: usize) {
        let us = self.mean(CHUNK_US * self.clients[slot].blocks() as f64);
        self.schedule_unless_cancelled(slot, us, RequestStage::Speaks, LEAVES_QUEUE);
    }

    /// In the decode engine's queue: a heartbeat, or the start of the read.
    fn waits(&mut self, slot: usize) {
        let (until, reader, blocks) = {
            let client = &self.clients[slot];
            (client.queued_until, client.reader, client.blocks())
        };
        let handle = self.clients[slot].lent.expect("it queues with a handoff").handle;
        if until > self.now.0 {
            self.on_ledger(slot, |ledger, now| ledger.heartbeat(handle, now));
            let us = (until - self.now.0).min(BEAT_US);
            return self.schedule_unless_cancelled(slot, us, RequestStage::Waits, LEAVES_QUEUE);
        }
        self.fetches(slot, fetch::Event::Admitted);
        let engine = self.clients[slot].decode.as_ref().expect("it queues at one").engine;
        self.clients[slot].landing = self.engines[engine].land(blocks);
        self.fetches(slot, fetch::Event::BlocksReserved);
        let granted =
            self.on_ledger(slot, |ledger, now| ledger.begin_read(handle, reader, 0, blocks, now).is_ok());
        let refused = match granted {
            Some(true) => {
                let us = self.mean(READ_US);
                return self.schedule_unless_cancelled(slot, us, RequestStage::Transferred, LEAVES_READ);
            }
            Some(false) => FailureKind::Gone,
            None => FailureKind::Unreachable,
        };
        self.fetches(slot, fetch::Event::TransferFailed(refused));
        self.recompute(slot);
    }

    /// The read has ended. It fails if the prefill engine died meanwhile.
    fn transferred(&mut self, slot: usize) {
        let client = &self.clients[slot];
        let (handle, reader) = (client.lent.expect("it was read").handle, client.reader);
        let Some(verdict) = self.on_ledger(slot, |ledger, now| ledger.finish_read(handle, reader, now))
        else {
            self.fetches(slot, fetch::Event::TransferFailed(FailureKind::Transfer));
            return self.recompute(slot);
        };
        self.fetches(slot, fetch::Event::TransferDone);
        let answer = if verdict == Verdict::Valid { Verification::Valid } else { Verification::Gone };
        self.fetches(slot, fetch::Event::Verdict(answer));
        if answer == Verification::Valid {
            self.schedule(slot, 10_000, RequestStage::Speaks)
        } else {
            self.recompute(slot)
        }
    }

    /// Advances the decode engine's fetch and runs its actions.
    fn fetches(&mut self, slot: usize, event: fetch::Event) {
        let Some(fetch) = &mut self.clients[slot].fetch else { return };
        let actions: FetchActions = fetch.apply(event);
        for action in actions {
            match action {
                Action::FreeLanding => self.free_landing(slot),
                Action::ReleaseAtProducer(reason) => self.release(slot, reason.label()),
                Action::StopRead => self.schedule(slot, 2_000, RequestStage::Stopped),
                // The caller handles the other actions.
                Action::StartRead
                | Action::AskVerdict
                | Action::Land
                | Action::Recompute
                | Action::Fail(_)
                | Action::StopHeartbeat => {}
            }
        }
    }

    fn free_landing(&mut self, slot: usize) {
        let client = &mut self.clients[slot];
        let landing = std::mem::take(&mut client.landing);
        let engine = &mut self.engines[client.decoding];
        if engine.epoch == client.epoch {
            engine.free(&landing, &mut self.outcome.faults);
        }
    }

    /// Releases the request's lease.
    fn release(&mut self, slot: usize, reason: &str) {
        let Some(lent) = self.clients[slot].lent else { return };
        let alone = self.clients[slot].fetch.is_none() && self.engines[lent.engine].has_lease(lent.handle);
        if alone && self.plant.take_if(|plant| *plant == PlantedFault::DroppedRelease).is_some() {
            return;
        }
        self.on_ledger(slot, |ledger, now| ledger.release(lent.handle, reason, now));
    }

    /// An engine of a request has died.
    pub(super) fn engine_failed(&mut self, slot: usize, phase: Phase, failed_engine: usize) {
        let [prefill, decode] = self.clients[slot].tries;
        match phase {
            Phase::Queue | Phase::Gap => {}
            Phase::Prefill => {
                let reservation = self.clients[slot].prefill.take();
                self.release_reservation(reservation, None);
                self.clients[slot].tried[0].push(failed_engine);
                self.apply(slot, Event::PrefillFailed(prefill, Failure::Unknown));
                self.ask_prefill(slot);
            }
            Phase::DecodePreFirst | Phase::DecodeStream => {
                let reading = self.clients[slot].fetch.take().is_some_and(|fetch| fetch.holds_landing());
                let (reader, lent) = (self.clients[slot].reader, self.clients[slot].lent);
                if let (true, Some(lent)) = (reading, lent) {
                    self.on_ledger(slot, |ledger, now| ledger.fail_read(lent.handle, reader, now));
                }
                // The engine's memory is lost.
                self.clients[slot].landing.clear();
                self.apply(
                    slot,
                    match phase {
                        Phase::DecodeStream => Event::StreamCut(decode),
                        _ => Event::DecodeFailed(decode, Failure::Unknown),
                    },
                );
                if self.another_decode(slot, failed_engine) {
                    self.schedule(slot, 0, RequestStage::AskDecode);
                } else {
                    self.apply(slot, Event::Exhausted);
                }
            }
        }
    }

    /// Advances the exchange and runs its settlements.
    fn apply(&mut self, slot: usize, event: Event) {
        let now = self.now;
        let Step { settlements, ended, .. } = self.clients[slot].exchange.apply(event, now);
        let mut reply_comes = false;
        for settlement in settlements {
            match settlement {
                Settlement::ReleasePrefill(_, cause) => self.release(slot, cause.label()),
                Settlement::AbortPrefill(_) => {
                    reply_comes = ended.is_some() && self.rng.chance(REPLY_ON_ITS_WAY);
                }
                Settlement::AbortDecode(_) => self.abort_decode(slot),
            }
        }
        if let Some(outcome) = ended {
            self.ends(slot, outcome, reply_comes);
        }
    }

    fn abort_decode(&mut self, slot: usize) {
        let client = &self.clients[slot];
        let engine = &self.engines[client.decoding];
        if engine.alive && engine.epoch == client.epoch {
            self.fetches(slot, fetch::Event::Abort);
        }
    }

    /// A request has ended for its client and its router.
    fn ends(&mut self, slot: usize, outcome: Outcome, reply_comes: bool) {
        let client = &mut self.clients[slot];
        client.ended += 1;
        self.outcome.faults.endings_wrong += u64::from(client.ended != 1);
        *self.outcome.endings.entry(outcome.label()).or_default() += 1;
        let completed = outcome == Outcome::Completed;
        let (prefill, decode, entered) = (client.prefill.take(), client.decode.take(), client.entered.take());
        let (router, mut ns) = (client.router, client.finish_ns);
        self.release_reservation(prefill, None);
        ns += self.release_reservation(decode, completed.then_some(Duration::from_millis(600)));
        let leave = || entered.into_iter().for_each(|entered| self.routers[router].end_request(entered));
        ns += self.outcome.costs.timed(leave).1;
        if completed {
            self.outcome.costs.count(DecisionKind::Finish, ns);
        }
        if self.clients[slot].fetch.as_ref().is_some_and(|fetch| !fetch.is_over()) {
            // The landing blocks are freed when the fetch is over.
            return;
        }
        self.free_landing(slot);
        if reply_comes {
            self.schedule(slot, 5_000, RequestStage::LateReply)
        } else {
            self.finish_request(slot)
        }
    }

    /// Removes the request. The client begins another one later.
    fn finish_request(&mut self, slot: usize) {
        let client = &mut self.clients[slot];
        client.turn += 1;
        client.fetch = None;
        self.living -= 1;
        let us = if client.turned_away { COMES_BACK_US } else { THINKS_US };
        let us = self.mean(us);
        self.after(us, FleetEvent::Begin(slot as u32));
    }
}
