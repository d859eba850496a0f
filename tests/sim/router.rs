//! A router process: the real exchange, and a shell that does what the proxy's does: asks engines, tells the machine,
//! pays what the machine says, with bounded tries.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_connector::exchange::{Attempt, Event as Fact, Exchange, Failure, Fit, Outcome, Settlement, State};
use baton_connector::{Handoff, Time};
use baton_engine::engine_core::mailbox::Legs;

use crate::dice::Dice;
use crate::net::{ConnId, Parcel, Side};
use crate::setup::SECOND;
use crate::sim::{Event, Micros, Sim};
use crate::words::{Ask, Msg, Node, Purpose};

const SETTLE_TRIES: u32 = 5;
const SETTLE_TIMEOUT: Micros = 2 * SECOND;
const SETTLE_PAUSE: Micros = SECOND / 20;

/// One request.
pub struct Request {
    exchange: Exchange,
    ask: Arc<Ask>,
    /// The client's connection.
    client: ConnId,
    aggregate: bool,
    /// The engine of each attempt, by its number.
    attempts: Vec<usize>,
    prefills: Vec<usize>,
    decodes: Vec<usize>,
    handoff: Option<Box<Handoff>>,
    prefill: Option<ConnId>,
    /// A prefill that lent before its end.
    computing: Option<ConnId>,
    decode: Option<ConnId>,
}

/// One debt that is being paid.
#[derive(Clone)]
struct Debt {
    engine: usize,
    verb: Msg,
    tries: u32,
    pause: Micros,
    paid: bool,
}

pub struct Router {
    pub index: usize,
    pub life: u32,
    pub up: bool,
    pub paused_until: Micros,
    pub requests: BTreeMap<usize, Request>,
    debts: Vec<Debt>,
    /// Engines that the configuration does not name at the moment.
    pub out: Vec<usize>,
    dice: Dice,
}

impl Router {
    pub fn new(seed: u64, index: usize) -> Self {
        Self {
            index,
            life: 1,
            up: true,
            paused_until: 0,
            requests: BTreeMap::new(),
            debts: Vec::new(),
            out: Vec::new(),
            dice: Dice::new(seed, 200 + index as u64),
        }
    }

    pub fn die(&mut self) {
        self.life += 1;
        self.up = false;
        self.requests.clear();
        self.debts.clear();
    }

    /// How a client's request ended here, if this life of the router has had it and it has ended.
    pub fn outcome(&self, client: usize) -> Option<Outcome> {
        self.requests.get(&client)?.exchange.outcome()
    }

    /// Requests that have not ended.
    pub fn open(&self) -> usize {
        self.requests.values().filter(|request| request.exchange.outcome().is_none()).count()
    }
}

impl Sim {
    pub fn router_hears(&mut self, router: usize, conn: ConnId, side: Side, parcel: Parcel) {
        if side == Side::Callee {
            return match parcel {
                Parcel::Message(Msg::Ask(client)) => self.take_request(router, conn, client),
                Parcel::Message(_) => {}
                Parcel::End => {
                    let gone =
                        self.routers[router].requests.iter().find(|(_, r)| r.client == conn).map(|(k, _)| *k);
                    if let Some(client) = gone {
                        self.tell(router, client, Fact::ClientGone);
                    }
                }
            };
        }
        match self.net.conns[conn.0].purpose.clone() {
            Purpose::Prefill(client, attempt) => self.prefill_answered(router, conn, client, attempt, parcel),
            Purpose::Decode(client, attempt) => self.decode_answered(router, conn, client, attempt, parcel),
            Purpose::Settle(debt) => {
                self.close(conn, Side::Caller);
                match parcel {
                    Parcel::Message(_) => self.routers[router].debts[debt].paid = true,
                    Parcel::End => self.debt_unpaid(router, debt),
                }
            }
            _ => {}
        }
    }

    /// A leg or a settlement was silent for too long.
    pub fn router_waited(&mut self, router: usize, conn: ConnId) {
        match self.net.conns[conn.0].purpose.clone() {
            Purpose::Prefill(client, attempt) => {
                let waiting =
                    self.routers[router].requests.get(&client).is_some_and(|r| r.prefill == Some(conn));
                if waiting {
                    self.tell(router, client, Fact::PrefillFailed(attempt, Failure::Unknown));
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
            Purpose::Settle(debt) => {
                self.close(conn, Side::Caller);
                self.debt_unpaid(router, debt);
            }
            _ => {}
        }
    }

    fn take_request(&mut self, router: usize, conn: ConnId, client: usize) {
        let ask = Arc::clone(&self.clients.asks[client].ask);
        let aggregate = self.clients.asks[client].aggregate;
        let request = Request {
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
            self.tell(router, client, Fact::PrefillSkipped);
            self.next_decode(router, client);
        } else {
            self.next_prefill(router, client);
        }
    }

    /// Tells the machine, pays what it says, and tells the client of the end.
    fn tell(&mut self, router: usize, client: usize, fact: Fact) {
        let now = Time(self.now);
        let Some(request) = self.routers[router].requests.get_mut(&client) else { return };
        let over = request.exchange.outcome().is_some();
        let step = request.exchange.apply(fact, now);
        if step.fit == Fit::Ignored {
            self.counts.ignored += 1;
        }
        self.narrate(|| format!("  router {router}, request {client}: {fact:?} -> {step:?}"));
        for debt in step.settle {
            if over {
                self.counts.late_handles += 1;
            }
            self.pay(router, client, debt);
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
                    self.tell(router, client, Fact::PrefillSkipped);
                    return self.next_decode(router, client);
                }
                return self.tell(router, client, Fact::GaveUp);
            };
            let attempt = self.attempt(router, client, engine);
            self.request(router, client).prefills.push(engine);
            self.tell(router, client, Fact::PrefillSent(attempt));
            let purpose = Purpose::Prefill(client, attempt);
            let Some(conn) = self.connect(Node::Router(router), Node::Engine(engine), purpose) else {
                self.tell(router, client, Fact::PrefillFailed(attempt, Failure::NotReached));
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
        parcel: Parcel,
    ) {
        let Some(request) = self.routers[router].requests.get_mut(&client) else {
            return self.close(conn, Side::Caller);
        };
        if request.computing == Some(conn) {
            return match parcel {
                Parcel::Message(Msg::PrefillOver(Ok(()))) => {
                    request.computing = None;
                    self.close(conn, Side::Caller);
                    self.tell(router, client, Fact::PrefillEnded(attempt));
                }
                _ => self.computing_failed(router, conn, client),
            };
        }
        let current = request.prefill == Some(conn);
        let early = matches!(&parcel, Parcel::Message(Msg::Prefilled(Ok(Some(handoff)))) if handoff.growing);
        if current && early {
            (request.prefill, request.computing) = (None, Some(conn));
        } else {
            request.prefill = request.prefill.filter(|_| !current);
            self.close(conn, Side::Caller);
        }
        let fact = match parcel {
            Parcel::Message(Msg::Prefilled(Ok(Some(handoff)))) => {
                let handle = handoff.handle;
                if current {
                    self.request(router, client).handoff = Some(handoff);
                }
                Fact::PrefillLent(attempt, Some(handle))
            }
            Parcel::Message(Msg::Prefilled(Ok(None))) => Fact::PrefillEmpty(attempt),
            Parcel::Message(Msg::Prefilled(Err(status))) if status < 500 => Fact::PrefillRefused(attempt),
            Parcel::Message(_) => Fact::PrefillFailed(attempt, Failure::Answered),
            Parcel::End => Fact::PrefillFailed(attempt, Failure::Unknown),
        };
        self.tell(router, client, fact);
        if current {
            match fact {
                Fact::PrefillLent(..) | Fact::PrefillEmpty(_) => self.next_decode(router, client),
                Fact::PrefillFailed(..) => self.next_prefill(router, client),
                _ => {}
            }
        }
    }

    /// A prefill that lent before its end has failed: what a decode engine waits for will not come.
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
            let Some(engine) = engine else { return self.tell(router, client, Fact::GaveUp) };
            self.counts.second_decode += u64::from(!tried.is_empty() && handoff.is_some());
            let attempt = self.attempt(router, client, engine);
            self.request(router, client).decodes.push(engine);
            self.tell(router, client, Fact::DecodeSent(attempt));
            let purpose = Purpose::Decode(client, attempt);
            let Some(conn) = self.connect(Node::Router(router), Node::Engine(engine), purpose) else {
                self.tell(router, client, Fact::DecodeFailed(attempt, Failure::NotReached));
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
        parcel: Parcel,
    ) {
        let Some(request) = self.routers[router].requests.get(&client) else { return };
        let (to, accepted) = (request.client, self.accepted(router, client));
        match parcel {
            Parcel::Message(Msg::Accepted) => self.tell(router, client, Fact::DecodeAccepted(attempt)),
            Parcel::Message(Msg::Chunk { choice, token }) => {
                if !accepted {
                    self.tell(router, client, Fact::DecodeAccepted(attempt));
                }
                if !self.streaming(router, client) {
                    self.tell(router, client, Fact::FirstChunk(attempt));
                }
                self.send(to, Side::Callee, Msg::Text { choice, token });
            }
            Parcel::Message(Msg::Decoded) => {
                self.close(conn, Side::Caller);
                self.tell(router, client, Fact::StreamEnded(attempt));
            }
            Parcel::Message(Msg::Refused(status)) => {
                self.close(conn, Side::Caller);
                match (accepted, status < 500) {
                    (true, _) => self.tell(router, client, Fact::StreamBroken(attempt)),
                    (false, true) => self.tell(router, client, Fact::DecodeRefused(attempt)),
                    (false, false) => self.decode_broke(router, client, attempt, Failure::Answered),
                }
            }
            Parcel::Message(_) => {}
            Parcel::End => self.decode_broke(router, client, attempt, Failure::Unknown),
        }
    }

    fn decode_broke(&mut self, router: usize, client: usize, attempt: Attempt, failure: Failure) {
        if self.accepted(router, client) {
            self.tell(router, client, Fact::StreamBroken(attempt));
        } else {
            self.tell(router, client, Fact::DecodeFailed(attempt, failure));
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

    fn pay(&mut self, router: usize, client: usize, debt: Settlement) {
        let request = &self.routers[router].requests[&client];
        let id = request.ask.request.clone();
        let at = |attempt: Attempt| request.attempts[usize::from(attempt.0)];
        let (engine, verb) = match debt {
            Settlement::AbortPrefill(attempt) => {
                let engine = at(attempt);
                if let Some(conn) = self.request(router, client).prefill.take() {
                    // Read on for a while: the reply on the wire is the only copy of the handle.
                    self.later(Node::Router(router), SETTLE_TIMEOUT, Event::StopListening(conn));
                }
                (engine, Msg::AbortVerb(id, Legs::Prefill))
            }
            Settlement::ReleasePrefill(lent, cause) => match lent.handle {
                Some(handle) => (at(lent.by), Msg::ReleaseVerb(handle, cause.label())),
                None => (at(lent.by), Msg::AbortVerb(id, Legs::Prefill)),
            },
            Settlement::AbortDecode(attempt) => {
                let engine = at(attempt);
                if let Some(conn) = self.request(router, client).decode.take() {
                    self.close(conn, Side::Caller);
                }
                (engine, Msg::AbortVerb(id, Legs::Decode))
            }
        };
        if self.setup.naive_router || self.mutated(crate::setup::Mutation::ReleasesNotSent) {
            return;
        }
        let debt = Debt { engine, verb, tries: SETTLE_TRIES, pause: SETTLE_PAUSE, paid: false };
        self.routers[router].debts.push(debt);
        let number = self.routers[router].debts.len() - 1;
        self.settle(router, number);
    }

    pub fn settle(&mut self, router: usize, number: usize) {
        let debt = &mut self.routers[router].debts[number];
        if debt.paid || debt.tries == 0 {
            return;
        }
        debt.tries -= 1;
        let (engine, verb) = (debt.engine, debt.verb.clone());
        match self.connect(Node::Router(router), Node::Engine(engine), Purpose::Settle(number)) {
            Some(conn) => {
                self.watch_silence(conn, SETTLE_TIMEOUT);
                self.send(conn, Side::Caller, verb);
            }
            None => self.debt_unpaid(router, number),
        }
    }

    fn debt_unpaid(&mut self, router: usize, number: usize) {
        let debt = &mut self.routers[router].debts[number];
        let pause = debt.pause;
        debt.pause *= 2;
        self.later(Node::Router(router), pause, Event::SettleAgain(router, number));
    }

    fn attempt(&mut self, router: usize, client: usize, engine: usize) -> Attempt {
        let request = self.request(router, client);
        request.attempts.push(engine);
        Attempt(request.attempts.len() as u16 - 1)
    }

    fn request(&mut self, router: usize, client: usize) -> &mut Request {
        self.routers[router].requests.get_mut(&client).expect("it is being worked on")
    }
}
