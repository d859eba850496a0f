//! One request's life: what its client, its router and its engines do, one step at a time.
//!
//! The exchange and the fetch say what is owed and what is to be done; this delivers it, to engines that may be dead by
//! then.

use std::time::Duration;

use baton_connector::exchange::{Attempt, Event, Exchange, Failure, Outcome, Phase, Settlement, Step};
use baton_connector::fetch::{self, Action, Actions, Answer, FailureKind, Fetch, LoadFailurePolicy};
use baton_connector::transport::Verdict;
use baton_connector::{BlockId, Handle, Reader, RequestId};
use baton_router::sim_router::{Asked, Entered, Place};

use super::costs::Kind;
use super::engine::Plant;
use super::odds::{
    BEAT_US, CHUNK_US, COMES_BACK_US, LEAVES_GAP, LEAVES_PREFILL, LEAVES_QUEUE, LEAVES_READ, LEAVES_STREAM,
    QUEUE_US, READ_US, REPLY_ON_ITS_WAY, SILENT, SILENT_US, STREAM_US, THINKS_US,
};
use super::world::{What, World, mixed};

/// Tries of one leg, as the router's `attempts`.
const TRIES: usize = 3;
/// Beginnings that prompts share, as many for each engine.
const BEGINNINGS_PER_ENGINE: u64 = 16;
/// Chunks of a shared beginning, and of what follows it at most.
const SHARED_CHUNKS: u64 = 16;
const OWN_CHUNKS: u64 = 8;
/// Tokens of a chunk, and chunks of a KV block that is lent.
const CHUNK_TOKENS: u64 = 128;

/// What comes next in a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Leaves,
    Prefilled,
    /// The reply of a prefill that was given up.
    LateReply,
    AskDecode,
    /// Still in the decode engine's queue.
    Waits,
    Transferred,
    /// The read that was told to stop has.
    Stopped,
    /// Its blocks are here, by whichever way.
    Speaks,
    Over,
}

/// Where a request's blocks were lent.
#[derive(Clone, Copy, Debug)]
pub(super) struct LentBy {
    pub(super) engine: usize,
    pub(super) epoch: u32,
    pub(super) handle: Handle,
}

/// A client's place in the simulation, and the request that it has.
pub(super) struct Life {
    pub(super) router: usize,
    /// One more with every step: what was to come before it does not.
    turn: u32,
    id: RequestId,
    entered: Option<Entered>,
    asked: Asked,
    beginning: u32,
    pub(super) exchange: Exchange,
    attempts: u16,
    prefill: Option<Place>,
    decode: Option<Place>,
    /// Which prefill engine was asked last, and in which of its lives.
    computing: (usize, u32),
    /// Which decode engine was asked last.
    decoding: usize,
    /// The attempts that the places are of.
    tries: [Attempt; 2],
    tried: [Vec<usize>; 2],
    pub(super) lent: Option<LentBy>,
    fetch: Option<Fetch>,
    reader: Reader,
    landing: Vec<BlockId>,
    /// The decode engine's, when it was asked.
    epoch: u32,
    queued_until: u64,
    pub(super) lease_ns: u64,
    finish_ns: u64,
    ended: u32,
    /// It found no decode engine with a place.
    turned_away: bool,
}

impl Life {
    pub(super) fn new(router: usize) -> Self {
        Self {
            router,
            turn: 0,
            id: RequestId::new("none").expect("printable"),
            entered: None,
            asked: Asked::default(),
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

    /// The engine whose death a request of this phase feels.
    pub(super) fn works_at(&self, phase: Phase) -> Option<usize> {
        match phase {
            Phase::Queue | Phase::Gap => None,
            Phase::Prefill => self.prefill.as_ref().map(|place| place.engine),
            Phase::DecodePreFirst | Phase::DecodeStream => self.decode.as_ref().map(|place| place.engine),
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

impl World {
    /// What comes next of a request, instead of all that was to come.
    fn then(&mut self, slot: usize, us: u64, stage: Stage) {
        let life = &mut self.lives[slot];
        life.turn += 1;
        let turn = life.turn;
        self.after(us, What::Comes(slot as u32, turn, stage));
    }

    /// The same, unless its client leaves before.
    fn then_unless(&mut self, slot: usize, us: u64, stage: Stage, leaves: f64) {
        if self.rng.chance(leaves) {
            let us = self.rng.below(us.max(1));
            self.then(slot, us, Stage::Leaves);
        } else {
            self.then(slot, us, stage);
        }
    }

    /// A client asks.
    pub(super) fn begin(&mut self, slot: usize) {
        self.begun += 1;
        self.living += 1;
        let beginnings = BEGINNINGS_PER_ENGINE * self.setup.engines as u64;
        // Twice drawn: some beginnings are far more popular than others.
        let bound = 1 + self.rng.below(beginnings);
        let beginning = self.rng.below(bound);
        let own = 1 + self.rng.below(OWN_CHUNKS);
        let number = self.begun;
        let now = self.now;
        let life = &mut self.lives[slot];
        let (router, turn) = (life.router, life.turn);
        self.turned_away -= usize::from(life.turned_away);
        *life = Life::new(router);
        life.turn = turn;
        life.id = RequestId::new(&format!("cmpl-{number:032x}")).expect("printable");
        life.beginning = beginning as u32;
        let shared = (0..SHARED_CHUNKS).map(|n| mixed(beginning << 8 | n));
        let own = (0..own).map(|n| mixed((number + (1 << 32)) << 8 | n));
        life.asked.prefix = shared.chain(own).collect();
        life.asked.tokens = life.blocks() as u64 * CHUNK_TOKENS;
        life.asked.chunk_tokens = CHUNK_TOKENS as f64;
        life.asked.session = Some(mixed(slot as u64));
        life.entered = Some(self.routers[router].enter(&life.id, now));
        if self.choose_decode(slot) {
            self.ask_prefill(slot);
        } else {
            self.lives[slot].turned_away = true;
            self.turned_away += 1;
            self.apply(slot, Event::NotAdmitted);
        }
    }

    /// A decode engine is set aside, if there is one.
    fn choose_decode(&mut self, slot: usize) -> bool {
        let life = &self.lives[slot];
        let router = &self.routers[life.router];
        let (place, ns) = self.costs.timed(|| router.decode(&life.asked, &life.tried[1]));
        self.costs.count(Kind::ChooseDecode, ns);
        let place = place.ok();
        let Some(place) = place else { return false };
        self.arrives(1, place.engine);
        self.lives[slot].decoding = place.engine;
        self.lives[slot].decode = Some(place);
        true
    }

    fn arrives(&mut self, leg: usize, engine: usize) {
        self.at[engine] += 1;
        self.most_at_one[leg] = self.most_at_one[leg].max(self.at[engine]);
    }

    /// A place is given back; before that, what its engine did is told, if it did its part so long after it was asked.
    /// The time that took.
    fn gives_back(&mut self, place: Option<Place>, served: Option<Duration>) -> u64 {
        let Some(place) = place else { return 0 };
        self.at[place.engine] -= 1;
        let give_back = || {
            if let Some(after) = served {
                place.spoke(after);
                place.served();
            }
        };
        self.costs.timed(give_back).1
    }

    fn ask_prefill(&mut self, slot: usize) {
        while self.lives[slot].tried[0].len() < TRIES {
            let life = &self.lives[slot];
            let decode = life.decode.as_ref().expect("a decode engine is set aside before");
            let router = &self.routers[life.router];
            let (chosen, ns) = self.costs.timed(|| router.prefill(&life.asked, decode, &life.tried[0]));
            self.costs.count(Kind::ChoosePrefill, ns);
            let Ok(Some(place)) = chosen else { break };
            let engine = place.engine;
            let attempt = self.lives[slot].attempt(0);
            self.apply(slot, Event::PrefillSent(attempt));
            if !self.engines[engine].alive {
                let router = self.lives[slot].router;
                self.routers[router].unreachable(engine);
                drop(place);
                self.lives[slot].tried[0].push(engine);
                self.apply(slot, Event::PrefillFailed(attempt, Failure::NotReached));
                continue;
            }
            self.arrives(0, engine);
            let epoch = self.engines[engine].epoch;
            let life = &mut self.lives[slot];
            life.prefill = Some(place);
            life.computing = (engine, epoch);
            let (beginning, mut chunks) = (life.beginning, life.blocks() as u64);
            let cached = self.engines[engine].computes(beginning);
            if self.costs.counting {
                self.hits[0] += if cached { SHARED_CHUNKS } else { 0 };
                self.hits[1] += SHARED_CHUNKS;
            }
            chunks -= if cached { SHARED_CHUNKS } else { 0 };
            let us = self.mean(CHUNK_US * chunks as f64);
            return self.then_unless(slot, us, Stage::Prefilled, LEAVES_PREFILL);
        }
        self.apply(slot, Event::PrefillSkipped);
        self.then(slot, 0, Stage::AskDecode);
    }

    /// What was to come has come, unless something else came before.
    pub(super) fn comes(&mut self, slot: usize, turn: u32, stage: Stage) {
        if self.lives[slot].turn != turn {
            return;
        }
        match stage {
            Stage::Leaves => self.apply(slot, Event::ClientGone),
            Stage::Prefilled => {
                let attempt = self.lives[slot].tries[0];
                let handle = self.lend(slot);
                let place = self.lives[slot].prefill.take();
                self.lives[slot].finish_ns = self.gives_back(place, Some(Duration::from_millis(300)));
                self.apply(slot, Event::PrefillLent(attempt, Some(handle)));
                self.then_unless(slot, 1_000, Stage::AskDecode, LEAVES_GAP);
            }
            Stage::LateReply => {
                let (attempt, (engine, epoch)) = (self.lives[slot].tries[0], self.lives[slot].computing);
                let there = self.engines[engine].alive && self.engines[engine].epoch == epoch;
                let event = if there {
                    Event::PrefillLent(attempt, Some(self.lend(slot)))
                } else {
                    Event::PrefillFailed(attempt, Failure::Unknown)
                };
                self.apply(slot, event);
                self.rests(slot);
            }
            Stage::AskDecode => self.ask_decode(slot),
            Stage::Waits => self.waits(slot),
            Stage::Transferred => self.transferred(slot),
            Stage::Stopped => {
                let reader = self.lives[slot].reader;
                let handle = self.lives[slot].lent.map(|lent| lent.handle);
                self.on_ledger(slot, |ledger, now| {
                    handle.into_iter().for_each(|handle| ledger.read_failed(handle, reader, now));
                });
                self.fetches(slot, fetch::Event::Quiet);
                self.rests(slot);
            }
            Stage::Speaks => {
                let attempt = self.lives[slot].tries[1];
                self.apply(slot, Event::DecodeAccepted(attempt));
                self.apply(slot, Event::FirstChunk(attempt));
                let us = self.mean(STREAM_US);
                self.then_unless(slot, us, Stage::Over, LEAVES_STREAM);
            }
            Stage::Over => {
                let attempt = self.lives[slot].tries[1];
                self.apply(slot, Event::StreamEnded(attempt));
            }
        }
    }

    /// The prefill engine lends what it computed.
    fn lend(&mut self, slot: usize) -> Handle {
        let handle = Handle(u128::from(self.rng.next()) << 64 | u128::from(self.rng.next()));
        let life = &mut self.lives[slot];
        let (id, blocks) = (life.id.clone(), life.blocks());
        let (engine, epoch) = life.computing;
        let grant = self.engines[engine].lend(handle, &id, blocks);
        let life = &mut self.lives[slot];
        life.lent = Some(LentBy { engine, epoch, handle });
        life.lease_ns = 0;
        self.leases.opened += 1;
        self.on_ledger(slot, |ledger, now| {
            assert!(
                ledger.open(grant, now).is_ok(),
                "a ledger has room for more leases than there are requests"
            );
        });
        handle
    }

    /// The decode engine that was set aside is asked; another one if it is dead.
    fn ask_decode(&mut self, slot: usize) {
        loop {
            let engine = self.lives[slot].decode.as_ref().expect("it was set aside").engine;
            let attempt = self.lives[slot].attempt(1);
            self.apply(slot, Event::DecodeSent(attempt));
            if self.engines[engine].alive {
                return self.decodes(slot, engine);
            }
            let router = self.lives[slot].router;
            self.routers[router].unreachable(engine);
            self.apply(slot, Event::DecodeFailed(attempt, Failure::NotReached));
            if !self.another_decode(slot, engine) {
                return self.apply(slot, Event::GaveUp);
            }
        }
    }

    fn another_decode(&mut self, slot: usize, failed: usize) -> bool {
        let place = self.lives[slot].decode.take();
        self.gives_back(place, None);
        self.lives[slot].tried[1].push(failed);
        self.lives[slot].tried[1].len() < TRIES && self.choose_decode(slot)
    }

    /// A decode engine takes the request in.
    fn decodes(&mut self, slot: usize, engine: usize) {
        let epoch = self.engines[engine].epoch;
        let has_handoff = self.has_handoff(slot);
        let consumer = self.rng.next();
        let life = &mut self.lives[slot];
        life.epoch = epoch;
        if !has_handoff {
            return self.computes_anew(slot);
        }
        life.fetch = Some(Fetch::new(LoadFailurePolicy::Recompute));
        life.reader = Reader::sole(consumer);
        let handle = life.lent.map(|lent| lent.handle);
        if self.rng.chance(SILENT) {
            if let Some((lent, handle)) = self.lives[slot].lent.zip(handle) {
                let producer = &mut self.engines[lent.engine];
                if producer.epoch == lent.epoch {
                    producer.abandon(handle);
                }
            }
            self.lives[slot].queued_until = 0;
            return self.then(slot, SILENT_US, Stage::Waits);
        }
        let us = self.mean(QUEUE_US);
        self.lives[slot].queued_until = self.now.0 + us;
        self.then_unless(slot, us.min(BEAT_US), Stage::Waits, LEAVES_QUEUE);
    }

    /// What was lent may still be read, as far as the router knows.
    fn has_handoff(&self, slot: usize) -> bool {
        use baton_connector::exchange::State;
        matches!(self.lives[slot].exchange.state(), State::Decoding(_, Some(_)))
    }

    fn computes_anew(&mut self, slot: usize) {
        let us = self.mean(CHUNK_US * self.lives[slot].blocks() as f64);
        self.then_unless(slot, us, Stage::Speaks, LEAVES_QUEUE);
    }

    /// In the decode engine's queue: a heartbeat, or its turn.
    fn waits(&mut self, slot: usize) {
        let (until, reader, blocks) = {
            let life = &self.lives[slot];
            (life.queued_until, life.reader, life.blocks())
        };
        let handle = self.lives[slot].lent.expect("it queues with a handoff").handle;
        if until > self.now.0 {
            self.on_ledger(slot, |ledger, now| ledger.heartbeat(handle, now));
            let us = (until - self.now.0).min(BEAT_US);
            return self.then_unless(slot, us, Stage::Waits, LEAVES_QUEUE);
        }
        self.fetches(slot, fetch::Event::Admitted);
        let engine = self.lives[slot].decode.as_ref().expect("it queues at one").engine;
        self.lives[slot].landing = self.engines[engine].land(blocks);
        self.fetches(slot, fetch::Event::BlocksReserved);
        let granted =
            self.on_ledger(slot, |ledger, now| ledger.read_begun(handle, reader, 0, blocks, now).is_ok());
        let refused = match granted {
            Some(true) => {
                let us = self.mean(READ_US);
                return self.then_unless(slot, us, Stage::Transferred, LEAVES_READ);
            }
            Some(false) => FailureKind::Gone,
            None => FailureKind::Unreachable,
        };
        self.fetches(slot, fetch::Event::TransferFailed(refused));
        self.computes_anew(slot);
    }

    /// Every byte is here, unless the prefill engine died meanwhile.
    fn transferred(&mut self, slot: usize) {
        let life = &self.lives[slot];
        let (handle, reader) = (life.lent.expect("it was read").handle, life.reader);
        let Some(verdict) = self.on_ledger(slot, |ledger, now| ledger.read_done(handle, reader, now)) else {
            self.fetches(slot, fetch::Event::TransferFailed(FailureKind::Transfer));
            return self.computes_anew(slot);
        };
        self.fetches(slot, fetch::Event::TransferDone);
        let answer = if verdict == Verdict::Valid { Answer::Valid } else { Answer::Gone };
        self.fetches(slot, fetch::Event::Verdict(answer));
        if answer == Answer::Valid {
            self.then(slot, 10_000, Stage::Speaks)
        } else {
            self.computes_anew(slot)
        }
    }

    /// Moves the decode engine's fetch, and does what it asks for.
    fn fetches(&mut self, slot: usize, event: fetch::Event) {
        let Some(fetch) = &mut self.lives[slot].fetch else { return };
        let actions: Actions = fetch.apply(event);
        for action in actions {
            match action {
                Action::FreeLanding => self.free_landing(slot),
                Action::ReleaseAtProducer(reason) => self.release(slot, reason.label()),
                Action::StopRead => self.then(slot, 2_000, Stage::Stopped),
                // What follows from the others is in the caller, who knows what came.
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
        let life = &mut self.lives[slot];
        let landing = std::mem::take(&mut life.landing);
        let engine = &mut self.engines[life.decoding];
        if engine.epoch == life.epoch {
            engine.free(&landing, &mut self.faults);
        }
    }

    /// Whoever has the handle gives the lease up.
    fn release(&mut self, slot: usize, reason: &str) {
        let Some(lent) = self.lives[slot].lent else { return };
        let alone = self.lives[slot].fetch.is_none() && self.engines[lent.engine].lends(lent.handle);
        if alone && self.plant.take_if(|plant| *plant == Plant::DroppedRelease).is_some() {
            return;
        }
        self.on_ledger(slot, |ledger, now| ledger.release(lent.handle, reason, now));
    }

    /// An engine that works on a request died.
    pub(super) fn breaks(&mut self, slot: usize, phase: Phase, victim: usize) {
        let [prefill, decode] = self.lives[slot].tries;
        match phase {
            Phase::Queue | Phase::Gap => {}
            Phase::Prefill => {
                let place = self.lives[slot].prefill.take();
                self.gives_back(place, None);
                self.lives[slot].tried[0].push(victim);
                self.apply(slot, Event::PrefillFailed(prefill, Failure::Unknown));
                self.ask_prefill(slot);
            }
            Phase::DecodePreFirst | Phase::DecodeStream => {
                let reading = self.lives[slot].fetch.take().is_some_and(|fetch| fetch.holds_landing());
                let (reader, lent) = (self.lives[slot].reader, self.lives[slot].lent);
                if let (true, Some(lent)) = (reading, lent) {
                    self.on_ledger(slot, |ledger, now| ledger.read_failed(lent.handle, reader, now));
                }
                // Its memory is gone with it.
                self.lives[slot].landing.clear();
                self.apply(
                    slot,
                    match phase {
                        Phase::DecodeStream => Event::StreamCut(decode),
                        _ => Event::DecodeFailed(decode, Failure::Unknown),
                    },
                );
                if self.another_decode(slot, victim) {
                    self.then(slot, 0, Stage::AskDecode);
                } else {
                    self.apply(slot, Event::GaveUp);
                }
            }
        }
    }

    /// Moves the exchange, and pays what it says is owed.
    fn apply(&mut self, slot: usize, event: Event) {
        let now = self.now;
        let Step { settle, ended, .. } = self.lives[slot].exchange.apply(event, now);
        let mut reply_comes = false;
        for debt in settle {
            match debt {
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
        let life = &self.lives[slot];
        let engine = &self.engines[life.decoding];
        if engine.alive && engine.epoch == life.epoch {
            self.fetches(slot, fetch::Event::Abort);
        }
    }

    /// A request is over, for its client and its router.
    fn ends(&mut self, slot: usize, outcome: Outcome, reply_comes: bool) {
        let life = &mut self.lives[slot];
        life.ended += 1;
        self.faults.endings_wrong += u64::from(life.ended != 1);
        *self.endings.entry(outcome.label()).or_default() += 1;
        let completed = outcome == Outcome::Completed;
        let (prefill, decode, entered) = (life.prefill.take(), life.decode.take(), life.entered.take());
        let (router, mut ns) = (life.router, life.finish_ns);
        self.gives_back(prefill, None);
        ns += self.gives_back(decode, completed.then_some(Duration::from_millis(600)));
        let leave = || entered.into_iter().for_each(|entered| self.routers[router].leave(entered));
        ns += self.costs.timed(leave).1;
        if completed {
            self.costs.count(Kind::Finish, ns);
        }
        if self.lives[slot].fetch.as_ref().is_some_and(|fetch| !fetch.is_over()) {
            // Its landing blocks are free when nothing writes into them any more.
            return;
        }
        self.free_landing(slot);
        if reply_comes { self.then(slot, 5_000, Stage::LateReply) } else { self.rests(slot) }
    }

    /// Nothing is left of the request; its client will have another.
    fn rests(&mut self, slot: usize) {
        let life = &mut self.lives[slot];
        life.turn += 1;
        life.fetch = None;
        self.living -= 1;
        let us = if life.turned_away { COMES_BACK_US } else { THINKS_US };
        let us = self.mean(us);
        self.after(us, What::Begin(slot as u32));
    }
}
