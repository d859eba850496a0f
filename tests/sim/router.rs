//! A router process: the real exchange with simulated I/O. It sends requests to engines, reports events to the machine,
//! and makes the machine's settlements with bounded retries.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_connector::exchange::{
    Attempt, Event as Fact, EventEffect, Exchange, Failure, Outcome, Settlement, State,
};
use baton_connector::{Handoff, Time};
use baton_engine::engine_core::mailbox::LegFilter;

use crate::messages::{ClientRequest, Msg, Node, Purpose};
use crate::net::{ConnId, Packet, Side};
use crate::rng::SimRng;
use crate::setup::SECOND;
use crate::sim::{Event, Micros, Sim};

const SETTLE_TRIES: u32 = 5;
const SETTLE_TIMEOUT: Micros = 2 * SECOND;
const SETTLE_PAUSE: Micros = SECOND / 20;

/// One request.
pub struct RouterRequest {
    exchange: Exchange,
    ask: Arc<ClientRequest>,
    /// The client's connection.
    client: ConnId,
    aggregate: bool,
    /// The engine of each attempt, by its number.
    attempts: Vec<usize>,
    prefills: Vec<usize>,
    decodes: Vec<usize>,
    handoff: Option<Box<Handoff>>,
    prefill: Option<ConnId>,
    /// The connection of a prefill that still computes after its early lease.
    computing: Option<ConnId>,
    decode: Option<ConnId>,
}

/// One settlement and its retries.
#[derive(Clone)]
struct SettlementCall {
    engine: usize,
    verb: Msg,
    tries: u32,
    pause: Micros,
    done: bool,
}

pub struct Router {
    pub index: usize,
    pub life: u32,
    pub up: bool,
    pub paused_until: Micros,
    pub requests: BTreeMap<usize, RouterRequest>,
    settlements: Vec<SettlementCall>,
    /// Engines that the configuration does not contain at the moment.
    pub out: Vec<usize>,
    dice: SimRng,
}

impl Router {
    pub fn new(seed: u64, index: usize) -> Self {
        Self {
            index,
            life: 1,
            up: true,
            paused_until: 0,
            requests: BTreeMap::new(),
            settlements: Vec::new(),
            out: Vec::new(),
            dice: SimRng::new(seed, 200 + index as u64),
        }
    }

    pub fn die(&mut self) {
        self.life += 1;
        self.up = false;
        self.requests.clear();
        self.settlements.clear();
    }

    /// The outcome of a client's request, if this process has served it to its end.
    pub fn outcome(&self, client: usize) -> Option<Outcome> {
        self.requests.get(&client)?.exchange.outcome()
    }

    /// Requests that have not ended.
    pub fn open(&self) -> usize {
        self.requests.values().filter(|request| request.exchange.outcome().is_none()).count()
    }
}

impl Sim {
    pub fn router_receives(&mut self, router: usize, conn: ConnId, side: Side, packet: Packet) {
        if side == Side::Callee {
            return match packet {
                Packet::Message(Msg::Ask(client)) => self.take_request(router, conn, client),
                Packet::Message(_) => {}
                Packet::End => {
                    let gone =
                        self.routers[router].requests.iter().find(|(_, r)| r.client == conn).map(|(k, _)| *k);
                    if let Some(client) = gone {
                        self.step_exchange(router, client, Fact::ClientGone);
                    }
                }
            };
        }
        match self.net.conns[conn.0].purpose.clone() {
            Purpose::Prefill(client, attempt) => self.prefill_answered(router, conn, client, attempt, packet),
            Purpose::Decode(client, attempt) => self.decode_answered(router, conn, client, attempt, packet),
            Purpose::Settle(settlement) => {
                self.close(conn, Side::Caller);
                match packet {
                    Packet::Message(_) => self.routers[router].settlements[settlement].done = true,
                    Packet::End => self.settlement_failed(router, settlement),
                }
            }
            _ => {}
        }
    }

    /// Handles the timeout of a leg or a settlement.
    pub fn router_waited(&mut self, router: usize, conn: ConnId) {
        match self.net.conns[conn.0].purpose.clone() {
            Purpose::Prefill(client, attempt) => {
                let waiting =
                    self.routers[router].requests.get(&client).is_some_and(|r| r.prefill == Some(conn));
                if waiting {
                    self.step_exchange(router, client, Fact::PrefillFailed(attempt, Failure::Unknown));
                    self.next_prefill(router, client);
                }
                if self.routers[router].requests.get(&client).is_some_and(|r| r.computing == Some(conn)) {
                    self.computing_failed(router, conn, client);
                }
            }
            Purpose::Decode(client, attempt) => {
                self.close(conn, Side::Caller);
                self.decode_broke(router, client, attempt, Failure::Unknown);
            }
            Purpose::Settle(settlement) => {
                self.close(conn, Side::Caller);
                self.settlement_failed(router, settlement);
            }
            _ => {}
        }
    }

    fn take_request(&mut self, router: usize, conn: ConnId, client: usize) {
        let ask = Arc::clone(&self.clients.asks[client].ask);
        let aggregate = self.clients.asks[client].aggregate;
        let request = RouterRequest {
            exchange: Exchange::new(),
            ask,
            client: conn,
            aggregate,
            attempts: Vec::new(),
            prefills: Vec::new(),
            decodes: Vec::new(),
            handoff: None,
            prefill: None,
            computing: None,
            decode: None,
        };
        self.routers[router].requests.insert(client, request);
        if aggregate {
            self.step_exchange(router, client, Fact::PrefillSkipped);
            self.next_decode(router, client);
        } else {
            self.next_prefill(router, client);
        }
    }

    /// Reports an event to the machine, starts its settlements, and reports the outcome to the client.
    fn step_exchange(&mut self, router: usize, client: usize, fact: Fact) {
        let now = Time(self.now);
        let Some(request) = self.routers[router].requests.get_mut(&client) else { return };
        let over = request.exchange.outcome().is_some();
        let step = request.exchange.apply(fact, now);
        if step.effect == EventEffect::Ignored {
            self.counts.ignored += 1;
        }
        self.narrate(|| format!("  router {router}, request {client}: {fact:?} -> {step:?}"));
        for settlement in step.settlements {
            if over {
                self.counts.late_handles += 1;
            }
            self.start_settlement(router, client, settlement);
        }
        if let Some(outcome) = step.ended {
            let request = self.request(router, client);
            let (conn, decode, computing) = (request.client, request.decode, request.computing.take());
            if let Some(computing) = computing {
                self.close(computing, Side::Caller);
            }
            if outcome == Outcome::Completed {
                self.send(conn, Side::Callee, Msg::Complete);
            } else {
                if let Some(decode) = decode {
                    self.close(decode, Side::Caller);
                }
                self.send(conn, Side::Callee, Msg::Error);
            }
            self.close(conn, Side::Callee);
        }
    }

    fn choose(&mut self, router: usize, among: &[usize], tried: &[usize]) -> Option<usize> {
        let router = &mut self.routers[router];
        let left: Vec<usize> =
            among.iter().copied().filter(|e| !tried.contains(e) && !router.out.contains(e)).collect();
        (!left.is_empty()).then(|| *router.dice.pick(&left))
    }

    fn next_prefill(&mut self, router: usize, client: usize) {
        let all = self.setup.prefills();
        loop {
            let request = &self.routers[router].requests[&client];
            if request.exchange.outcome().is_some() {
                return;
            }
            let (tried, ask) = (request.prefills.clone(), Arc::clone(&request.ask));
            let engine = if tried.len() < self.setup.prefill_attempts {
                self.choose(router, &all, &tried)
            } else {
                None
            };
            let Some(engine) = engine else {
                if self.setup.fall_back {
                    self.step_exchange(router, client, Fact::PrefillSkipped);
                    return self.next_decode(router, client);
                }
                return self.step_exchange(router, client, Fact::Exhausted);
            };
            let attempt = self.attempt(router, client, engine);
            self.request(router, client).prefills.push(engine);
            self.step_exchange(router, client, Fact::PrefillSent(attempt));
            let purpose = Purpose::Prefill(client, attempt);
            let Some(conn) = self.connect(Node::Router(router), Node::Engine(engine), purpose) else {
                self.step_exchange(router, client, Fact::PrefillFailed(attempt, Failure::NotReached));
                continue;
            };
            self.request(router, client).prefill = Some(conn);
            self.watch_silence(conn, self.setup.prefill_silence);
            return self.send(conn, Side::Caller, Msg::Prefill(ask));
        }
    }

    fn prefill_answered(
        &mut self,
        router: usize,
        conn: ConnId,
        client: usize,
        attempt: Attempt,
        packet: Packet,
    ) {
        let Some(request) = self.routers[router].requests.get_mut(&client) else {
            return self.close(conn, Side::Caller);
        };
        if request.computing == Some(conn) {
            return match packet {
                Packet::Message(Msg::PrefillOver(Ok(()))) => {
                    request.computing = None;
                    self.close(conn, Side::Caller);
                    self.step_exchange(router, client, Fact::PrefillEnded(attempt));
                }
                _ => self.computing_failed(router, conn, client),
            };
        }
        let current = request.prefill == Some(conn);
        let early = matches!(&packet, Packet::Message(Msg::Prefilled(Ok(Some(handoff)))) if handoff.growing);
        if current && early {
            (request.prefill, request.computing) = (None, Some(conn));
        } else {
            request.prefill = request.prefill.filter(|_| !current);
            self.close(conn, Side::Caller);
        }
        let fact = match packet {
            Packet::Message(Msg::Prefilled(Ok(Some(handoff)))) => {
                let handle = handoff.handle;
                if current {
                    self.request(router, client).handoff = Some(handoff);
                }
                Fact::PrefillLeased(attempt, Some(handle))
            }
            Packet::Message(Msg::Prefilled(Ok(None))) => Fact::PrefillEmpty(attempt),
            Packet::Message(Msg::Prefilled(Err(status))) if status < 500 => Fact::PrefillRefused(attempt),
            Packet::Message(_) => Fact::PrefillFailed(attempt, Failure::Answered),
            Packet::End => Fact::PrefillFailed(attempt, Failure::Unknown),
        };
        self.step_exchange(router, client, fact);
        if current {
            match fact {
                Fact::PrefillLeased(..) | Fact::PrefillEmpty(_) => self.next_decode(router, client),
                Fact::PrefillFailed(..) => self.next_prefill(router, client),
                _ => {}
            }
        }
    }

    /// A prefill has failed after its early lease: the blocks that a decode engine waits for will not be computed.
    fn computing_failed(&mut self, router: usize, conn: ConnId, client: usize) {
        self.close(conn, Side::Caller);
        let request = self.request(router, client);
        request.computing = None;
        if let (State::Decoding(attempt, _), Some(decode)) = (request.exchange.state(), request.decode) {
            self.close(decode, Side::Caller);
            self.decode_broke(router, client, attempt, Failure::Unknown);
        }
    }

    fn next_decode(&mut self, router: usize, client: usize) {
        let all = self.setup.decodes();
        loop {
            let request = &self.routers[router].requests[&client];
            if request.exchange.outcome().is_some() {
                return;
            }
            let (tried, ask) = (request.decodes.clone(), Arc::clone(&request.ask));
            let handoff = if request.aggregate { None } else { request.handoff.clone() };
            let engine = if tried.len() < self.setup.decode_attempts {
                self.choose(router, &all, &tried)
            } else {
                None
            };
            let Some(engine) = engine else { return self.step_exchange(router, client, Fact::Exhausted) };
            self.counts.second_decode += u64::from(!tried.is_empty() && handoff.is_some());
            let attempt = self.attempt(router, client, engine);
            self.request(router, client).decodes.push(engine);
            self.step_exchange(router, client, Fact::DecodeSent(attempt));
            let purpose = Purpose::Decode(client, attempt);
            let Some(conn) = self.connect(Node::Router(router), Node::Engine(engine), purpose) else {
                self.step_exchange(router, client, Fact::DecodeFailed(attempt, Failure::NotReached));
                continue;
            };
            self.request(router, client).decode = Some(conn);
            self.watch_silence(conn, self.setup.decode_silence);
            return self.send(conn, Side::Caller, Msg::Decode(ask, handoff));
        }
    }

    fn decode_answered(
        &mut self,
        router: usize,
        conn: ConnId,
        client: usize,
        attempt: Attempt,
        packet: Packet,
    ) {
        let Some(request) = self.routers[router].requests.get(&client) else { return };
        let (to, accepted) = (request.client, self.accepted(router, client));
        match packet {
            Packet::Message(Msg::Accepted) => {
                self.step_exchange(router, client, Fact::DecodeAccepted(attempt))
            }
            Packet::Message(Msg::Chunk { choice, token }) => {
                if !accepted {
                    self.step_exchange(router, client, Fact::DecodeAccepted(attempt));
                }
                if !self.streaming(router, client) {
                    self.step_exchange(router, client, Fact::FirstChunk(attempt));
                }
                self.send(to, Side::Callee, Msg::Text { choice, token });
            }
            Packet::Message(Msg::Decoded) => {
                self.close(conn, Side::Caller);
                self.step_exchange(router, client, Fact::StreamEnded(attempt));
            }
            Packet::Message(Msg::Refused(status)) => {
                self.close(conn, Side::Caller);
                match (accepted, status < 500) {
                    (true, _) => self.step_exchange(router, client, Fact::StreamBroken(attempt)),
                    (false, true) => self.step_exchange(router, client, Fact::DecodeRefused(attempt)),
                    (false, false) => self.decode_broke(router, client, attempt, Failure::Answered),
                }
            }
            Packet::Message(_) => {}
            Packet::End => self.decode_broke(router, client, attempt, Failure::Unknown),
        }
    }

    fn decode_broke(&mut self, router: usize, client: usize, attempt: Attempt, failure: Failure) {
        if self.accepted(router, client) {
            self.step_exchange(router, client, Fact::StreamBroken(attempt));
        } else {
            self.step_exchange(router, client, Fact::DecodeFailed(attempt, failure));
            if self.routers[router].requests.get(&client).is_some_and(|r| r.exchange.outcome().is_none()) {
                self.next_decode(router, client);
            }
        }
    }

    fn accepted(&self, router: usize, client: usize) -> bool {
        self.routers[router]
            .requests
            .get(&client)
            .is_some_and(|r| matches!(r.exchange.state(), State::Accepted(..) | State::Streaming(..)))
    }

    fn streaming(&self, router: usize, client: usize) -> bool {
        let request = self.routers[router].requests.get(&client);
        request.is_some_and(|r| matches!(r.exchange.state(), State::Streaming(..)))
    }

    fn start_settlement(&mut self, router: usize, client: usize, settlement: Settlement) {
        let request = &self.routers[router].requests[&client];
        let id = request.ask.request.clone();
        let at = |attempt: Attempt| request.attempts[usize::from(attempt.0)];
        let (engine, verb) = match settlement {
            Settlement::AbortPrefill(attempt) => {
                let engine = at(attempt);
                if let Some(conn) = self.request(router, client).prefill.take() {
                    // Reads on for a while, because the reply on the wire is the only copy of the handle.
                    self.later(Node::Router(router), SETTLE_TIMEOUT, Event::StopListening(conn));
                }
                (engine, Msg::AbortVerb(id, LegFilter::Prefill))
            }
            Settlement::ReleasePrefill(lent, cause) => match lent.handle {
                Some(handle) => (at(lent.attempt), Msg::ReleaseVerb(handle, cause.label())),
                None => (at(lent.attempt), Msg::AbortVerb(id, LegFilter::Prefill)),
            },
            Settlement::AbortDecode(attempt) => {
                let engine = at(attempt);
                if let Some(conn) = self.request(router, client).decode.take() {
                    self.close(conn, Side::Caller);
                }
                (engine, Msg::AbortVerb(id, LegFilter::Decode))
            }
        };
        if self.setup.naive_router || self.mutated(crate::setup::Mutation::ReleasesNotSent) {
            return;
        }
        let settlement =
            SettlementCall { engine, verb, tries: SETTLE_TRIES, pause: SETTLE_PAUSE, done: false };
        self.routers[router].settlements.push(settlement);
        let number = self.routers[router].settlements.len() - 1;
        self.settle(router, number);
    }

    pub fn settle(&mut self, router: usize, number: usize) {
        let settlement = &mut self.routers[router].settlements[number];
        if settlement.done || settlement.tries == 0 {
            return;
        }
        settlement.tries -= 1;
        let (engine, verb) = (settlement.engine, settlement.verb.clone());
        match self.connect(Node::Router(router), Node::Engine(engine), Purpose::Settle(number)) {
            Some(conn) => {
                self.watch_silence(conn, SETTLE_TIMEOUT);
                self.send(conn, Side::Caller, verb);
            }
            None => self.settlement_failed(router, number),
        }
    }

    fn settlement_failed(&mut self, router: usize, number: usize) {
        let settlement = &mut self.routers[router].settlements[number];
        let pause = settlement.pause;
        settlement.pause *= 2;
        self.later(Node::Router(router), pause, Event::SettleAgain(router, number));
    }

    fn attempt(&mut self, router: usize, client: usize, engine: usize) -> Attempt {
        let request = self.request(router, client);
        request.attempts.push(engine);
        Attempt(request.attempts.len() as u16 - 1)
    }

    fn request(&mut self, router: usize, client: usize) -> &mut RouterRequest {
        self.routers[router].requests.get_mut(&client).expect("it is being worked on")
    }
}
