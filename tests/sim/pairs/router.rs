//! A router process: the real exchange, driven as in `router/src/exchange/driver/pair.rs`. A failed leg ends the other
//! one, and the next attempt is a new pair under a new id.

use baton_connector::Time;
use baton_connector::exchange::{
    Attempt, Event as Fact, Exchange, Failure, Outcome, Settlement, SettlementCause, State,
};

use super::net::{ConnId, Packet};
use super::setup::PairMutation;
use super::{ClientEnd, Event, Leg, Node, Pair, PairSim};
use crate::setup::SECOND;
use crate::sim::Micros;

/// The router's timeouts for the legs of a pair.
const SILENCE: Micros = 120 * SECOND;
/// Wait for a decode engine after a pushing prefill engine's answer.
const PUSH_WAIT: Micros = 20 * SECOND;
/// Wait for the prefill engine's own error after the decode engine's.
const GRACE: Micros = SECOND / 10;
/// The pauses before an abort is repeated: an engine may not know the request yet.
const ABORT_PAUSES: [Micros; 4] = [SECOND / 20, SECOND / 4, SECOND, 4 * SECOND];

/// A call to a prefill engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    /// The request waits for it.
    Open,
    /// The response has begun without its reply.
    Followed,
    /// Given up, and read to its end.
    Abandoned,
    Ended,
}

/// One pair of a request.
#[derive(Debug)]
struct PairLegs {
    engines: [usize; 2],
    conns: [Option<ConnId>; 2],
    prefill: Call,
    decode_open: bool,
    /// P's process with which D registers.
    identity: Option<u32>,
    /// D may hold pages that only P's write frees.
    ends_by_write: bool,
    /// D's error may only report P's.
    grace: bool,
    settled: [bool; 2],
    /// When the timeout for D's next packet ends.
    decode_until: Micros,
}

#[derive(Debug)]
pub struct PairRequest {
    pub exchange: Exchange,
    pairs: Vec<PairLegs>,
    /// Engines that have failed the request, by leg.
    failed: [Vec<usize>; 2],
    last_failed: Leg,
    got: u32,
    ends: u32,
}

fn attempt(pair: Pair, leg: Leg) -> Attempt {
    Attempt(u16::from(pair.number) << 1 | leg as u16)
}

impl PairSim {
    pub fn client_sends(&mut self, client: usize) {
        if !self.router.up {
            self.clients[client] = self.clients[client].or(Some(ClientEnd::Error));
            return;
        }
        if self.clients[client].is_some() {
            return;
        }
        self.requests.insert(
            client,
            PairRequest {
                exchange: Exchange::new(),
                pairs: Vec::new(),
                failed: [Vec::new(), Vec::new()],
                last_failed: Leg::Prefill,
                got: 0,
                ends: 0,
            },
        );
        self.next_pair(client);
    }

    pub fn client_leaves(&mut self, client: usize) {
        if self.clients[client].is_some() {
            return;
        }
        self.clients[client] = Some(ClientEnd::Left);
        self.counts.client_cancelled += 1;
        if self.requests.contains_key(&client) {
            self.step(client, Fact::ClientGone);
        }
    }

    fn request(&mut self, client: usize) -> &mut PairRequest {
        self.requests.get_mut(&client).expect("it is being worked on")
    }

    fn legs(&mut self, pair: Pair) -> &mut PairLegs {
        &mut self.request(pair.request).pairs[usize::from(pair.number)]
    }

    fn state(&self, client: usize) -> State {
        self.requests[&client].exchange.state()
    }

    /// Reports a fact to the machine and makes its settlements.
    fn step(&mut self, client: usize, fact: Fact) {
        let now = Time(self.now);
        let step = self.request(client).exchange.apply(fact, now);
        if self.setup.pushes() {
            for settlement in &step.settlements {
                if let Settlement::AbortDecode(attempt) = settlement {
                    self.request(client).pairs[usize::from(attempt.0 >> 1)].ends_by_write = true;
                }
            }
        }
        for settlement in step.settlements {
            self.settle(client, settlement, fact);
        }
        let Some(outcome) = step.ended else { return };
        self.request(client).ends += 1;
        if self.request(client).ends > 1 {
            self.wrong(format!("I6: request {client} has two ends"));
        }
        if self.clients[client] == Some(ClientEnd::Left) {
            return;
        }
        if self.clients[client].is_some() {
            self.wrong(format!("I6: client {client} receives {outcome:?} after its end"));
        }
        let is_complete = outcome == Outcome::Completed;
        self.counts.completed += u64::from(is_complete);
        self.counts.failed += u64::from(!is_complete);
        self.clients[client] = Some(if is_complete { ClientEnd::Complete } else { ClientEnd::Error });
        if is_complete && self.requests[&client].got != self.setup.clients[client].tokens {
            self.wrong(format!("wrong text: client {client} got it as complete, and it is not"));
        }
    }

    fn settle(&mut self, client: usize, settlement: Settlement, fact: Fact) {
        let (Attempt(number), leg) = match settlement {
            Settlement::AbortPrefill(attempt) => (attempt, Leg::Prefill),
            Settlement::AbortDecode(attempt) => (attempt, Leg::Decode),
            Settlement::ReleasePrefill(..) if self.setup.pushes() => return,
            Settlement::ReleasePrefill(..) => {
                return self.wrong("I6: a lease is released, and there is none".into());
            }
        };
        let pair = Pair { request: client, number: (number >> 1) as u8 };
        if std::mem::replace(&mut self.legs(pair).settled[leg as usize], true) {
            self.wrong(format!("I6: the {leg:?} leg of {pair:?} is aborted twice"));
        }
        let forgotten = match (fact, leg) {
            (Fact::PrefillFailed(..) | Fact::PrefillRefused(_), Leg::Decode) => {
                self.setup.has(PairMutation::FailedPrefillLeavesDecode)
            }
            (Fact::DecodeFailed(..) | Fact::DecodeRefused(_), Leg::Prefill) => {
                self.setup.has(PairMutation::FailedDecodeLeavesPrefill)
            }
            _ => false,
        };
        if forgotten {
            return;
        }
        let aborts = self.setup.has(PairMutation::PrefillOfAPushIsAborted);
        let legs = self.legs(pair);
        match leg {
            Leg::Prefill if legs.ends_by_write && !aborts => {
                legs.prefill = if legs.prefill == Call::Ended { Call::Ended } else { Call::Abandoned };
                return;
            }
            Leg::Prefill => legs.prefill = Call::Ended,
            Leg::Decode => legs.decode_open = false,
        }
        self.given_up.insert((pair, leg));
        if let Some(conn) = self.legs(pair).conns[leg as usize] {
            self.close(conn, true);
        }
        if !self.setup.pushes() {
            self.send_abort(pair, leg, 0);
        }
    }

    /// Sends an abort by `rid`, and plans its repetition.
    pub fn send_abort(&mut self, pair: Pair, leg: Leg, tries: usize) {
        let at = self.legs(pair).engines[leg as usize];
        let engine = if leg == Leg::Prefill { Node::Prefill(at) } else { Node::Decode(at) };
        if let Some(conn) = self.connect(engine, pair, leg) {
            self.conns[conn.0].verb = true;
            self.send(conn, true, Packet::Abort);
        }
        if let Some(&pause) = ABORT_PAUSES.get(tries) {
            self.later(Node::Router, pause, Event::Abort(pair, leg, tries + 1));
        }
    }

    fn choose(&mut self, client: usize, leg: Leg) -> Option<usize> {
        let engines = if leg == Leg::Prefill { self.prefills.len() } else { self.decodes.len() };
        let failed = &self.requests[&client].failed[leg as usize];
        // A decode engine also answers with an error if its prefill engine has failed.
        let again = leg == Leg::Decode && failed.len() >= engines;
        let left: Vec<usize> = (0..engines).filter(|at| again || !failed.contains(at)).collect();
        (!left.is_empty()).then(|| *self.dice.pick(&left))
    }

    fn next_pair(&mut self, client: usize) {
        loop {
            if let State::ReadyToDecode(Some(_)) = self.state(client) {
                // A handoff belongs to one pair.
                self.step(client, Fact::HandoffUnusable);
            }
            if self.requests[&client].exchange.outcome().is_some() {
                return;
            }
            let number = self.requests[&client].pairs.len();
            let engines = (self.choose(client, Leg::Prefill), self.choose(client, Leg::Decode));
            let (Some(prefill), Some(decode), true) = (engines.0, engines.1, number < self.setup.attempts)
            else {
                return self.give_up(client);
            };
            self.counts.pairs += 1;
            self.counts.second_pairs += u64::from(number > 0);
            let pair = Pair { request: client, number: number as u8 };
            let legs = PairLegs {
                engines: [prefill, decode],
                conns: [None; 2],
                prefill: Call::Open,
                decode_open: false,
                identity: self.identities[prefill],
                ends_by_write: false,
                grace: false,
                settled: [false; 2],
                decode_until: 0,
            };
            self.request(client).pairs.push(legs);
            let room = self.room(pair);
            self.rooms.entry(room).or_default().insert(pair);
            self.step(client, Fact::PrefillSent(attempt(pair, Leg::Prefill)));
            let Some(conn) = self.connect(Node::Prefill(prefill), pair, Leg::Prefill) else {
                self.legs(pair).prefill = Call::Ended;
                self.leg_failed(pair, Leg::Prefill, Failure::NotReached);
                continue;
            };
            self.legs(pair).conns[0] = Some(conn);
            self.send(conn, true, Packet::Request { room, prefill, identity: 0 });
            self.later(Node::Router, SILENCE, Event::Silence(pair, Leg::Prefill));
            if self.setup.pushes() && self.legs(pair).identity.is_none() {
                // The reply shows where decode engines register.
                return;
            }
            if self.send_decode(pair) {
                return;
            }
        }
    }

    fn room(&self, pair: Pair) -> u64 {
        let number = if self.setup.has(PairMutation::RoomIsReused) { 0 } else { u64::from(pair.number) };
        1 + pair.request as u64 * 16 + number
    }

    fn give_up(&mut self, client: usize) {
        let request = &self.requests[&client];
        let fact = match (request.pairs.is_empty(), request.last_failed) {
            (true, _) => Fact::NoEngine,
            (false, Leg::Decode) => Fact::ExhaustedFor(SettlementCause::DecodeFailed),
            (false, Leg::Prefill) => Fact::Exhausted,
        };
        self.step(client, fact);
    }

    /// Sends the decode leg; `false` if its engine cannot be reached.
    fn send_decode(&mut self, pair: Pair) -> bool {
        let client = pair.request;
        let [prefill, decode] = self.legs(pair).engines;
        self.step(client, Fact::DecodeSent(attempt(pair, Leg::Decode)));
        let Some(conn) = self.connect(Node::Decode(decode), pair, Leg::Decode) else {
            self.leg_failed(pair, Leg::Decode, Failure::NotReached);
            return false;
        };
        let (room, until) = (self.room(pair), self.now + SILENCE);
        let legs = self.legs(pair);
        (legs.conns[1], legs.decode_open, legs.decode_until) = (Some(conn), true, until);
        let identity = legs.identity.unwrap_or_default();
        self.send(conn, true, Packet::Request { room, prefill, identity });
        self.later(Node::Router, SILENCE, Event::Silence(pair, Leg::Decode));
        true
    }

    /// A leg has failed before the response. The caller begins the next pair.
    fn leg_failed(&mut self, pair: Pair, leg: Leg, failure: Failure) {
        let [prefill, decode] = self.legs(pair).engines;
        let request = self.request(pair.request);
        request.failed[leg as usize].push(if leg == Leg::Prefill { prefill } else { decode });
        request.last_failed = leg;
        // Its process may be another one.
        self.identities[prefill] = None;
        let by = attempt(pair, leg);
        let fact = match leg {
            Leg::Prefill => Fact::PrefillFailed(by, failure),
            Leg::Decode => Fact::DecodeFailed(by, failure),
        };
        self.step(pair.request, fact);
    }

    pub fn router_receives(&mut self, conn: ConnId, pair: Pair, leg: Leg, packet: Packet) {
        if self.conns[conn.0].verb {
            return;
        }
        match leg {
            Leg::Prefill => self.prefill_answered(pair, packet),
            Leg::Decode => self.decode_answered(pair, packet),
        }
    }

    fn prefill_answered(&mut self, pair: Pair, packet: Packet) {
        let by = attempt(pair, Leg::Prefill);
        let call = std::mem::replace(&mut self.legs(pair).prefill, Call::Ended);
        if call == Call::Ended {
            return;
        }
        let failure = match packet {
            Packet::Failed => Some(Failure::Answered),
            Packet::End => Some(Failure::Unknown),
            _ => None,
        };
        let fact = match (packet, failure) {
            (Packet::Prefilled(life), _) if self.setup.pushes() => {
                let prefill = self.legs(pair).engines[0];
                self.identities[prefill] = Some(life);
                Fact::PrefillLeased(by, None)
            }
            (Packet::Prefilled(_), _) => Fact::PrefillEmpty(by),
            (Packet::Refused, _) => Fact::PrefillRefused(by),
            (_, Some(failure)) => Fact::PrefillFailed(by, failure),
            (other, None) => unreachable!("a prefill engine does not send {other:?}"),
        };
        if call != Call::Open {
            // Late. What it settles is for the prefill engine alone.
            return self.step(pair.request, fact);
        }
        if let Some(failure) = failure {
            self.leg_failed(pair, Leg::Prefill, failure);
            return self.next_pair(pair.request);
        }
        self.step(pair.request, fact);
        if self.requests[&pair.request].exchange.outcome().is_some() {
            return;
        }
        if self.legs(pair).grace {
            self.leg_failed(pair, Leg::Decode, Failure::Answered);
            return self.next_pair(pair.request);
        }
        if self.setup.pushes() {
            self.pushed(pair, packet);
        }
    }

    /// A pushing prefill engine has answered.
    fn pushed(&mut self, pair: Pair, packet: Packet) {
        let Packet::Prefilled(life) = packet else { return };
        match self.legs(pair).identity.replace(life) {
            None => {
                if !self.send_decode(pair) {
                    return self.next_pair(pair.request);
                }
            }
            Some(known) if known != life => {
                // Another process has the blocks than the one with which D registers.
                self.excuse(pair);
                self.leg_failed(pair, Leg::Decode, Failure::Unknown);
                return self.next_pair(pair.request);
            }
            Some(_) => {}
        }
        if !self.setup.has(PairMutation::PushWaitsWithoutEnd) {
            let until = self.now + PUSH_WAIT;
            let legs = self.legs(pair);
            legs.decode_until = legs.decode_until.min(until);
            self.later(Node::Router, PUSH_WAIT, Event::Silence(pair, Leg::Decode));
        }
    }

    fn decode_answered(&mut self, pair: Pair, packet: Packet) {
        let until = self.now + SILENCE;
        let legs = self.legs(pair);
        if !legs.decode_open {
            return;
        }
        let is_prefill_open = legs.prefill == Call::Open;
        let (client, by) = (pair.request, attempt(pair, Leg::Decode));
        let accepted = matches!(self.state(client), State::Accepted(..) | State::Streaming(..));
        self.legs(pair).decode_open =
            !matches!(packet, Packet::Complete | Packet::Refused | Packet::Failed | Packet::End);
        match packet {
            Packet::Accepted => {
                self.legs(pair).decode_until = until;
                self.step(client, Fact::DecodeAccepted(by));
                if is_prefill_open {
                    // From now on a failure of the prefill ends nothing.
                    self.legs(pair).prefill = Call::Followed;
                    self.step(client, Fact::FirstChunk(by));
                }
            }
            Packet::Token(content) => {
                self.legs(pair).decode_until = until;
                if matches!(self.state(client), State::Accepted(..)) {
                    self.step(client, Fact::FirstChunk(by));
                }
                self.request(client).got += 1;
                if content != client {
                    self.wrong(format!("wrong text: client {client} gets tokens of request {content}"));
                }
            }
            Packet::Complete => self.step(client, Fact::StreamEnded(by)),
            Packet::Refused | Packet::Failed | Packet::End if accepted => {
                self.step(client, Fact::StreamBroken(by));
            }
            Packet::Refused => self.step(client, Fact::DecodeRefused(by)),
            Packet::Failed if is_prefill_open => {
                self.legs(pair).grace = true;
                self.later(Node::Router, GRACE, Event::GraceEnds(pair));
            }
            Packet::Failed | Packet::End => {
                let failure = if packet == Packet::End { Failure::Unknown } else { Failure::Answered };
                self.leg_failed(pair, Leg::Decode, failure);
                self.next_pair(client);
            }
            other => unreachable!("a decode engine does not send {other:?}"),
        }
    }

    /// Whether the request still waits for this pair.
    fn is_current(&self, pair: Pair) -> bool {
        let request = &self.requests[&pair.request];
        request.exchange.outcome().is_none() && usize::from(pair.number) + 1 == request.pairs.len()
    }

    pub fn grace_ends(&mut self, pair: Pair) {
        if self.is_current(pair) && self.legs(pair).prefill == Call::Open {
            self.leg_failed(pair, Leg::Decode, Failure::Answered);
            self.next_pair(pair.request);
        }
    }

    /// An engine has been silent for too long.
    pub fn silence(&mut self, pair: Pair, leg: Leg) {
        let legs = self.legs(pair);
        if leg == Leg::Prefill {
            let call = legs.prefill;
            if !matches!(call, Call::Open | Call::Followed) {
                return;
            }
            // The call is still open: its abort reads the reply.
            if call == Call::Followed {
                let by = attempt(pair, Leg::Prefill);
                return self.step(pair.request, Fact::PrefillFailed(by, Failure::Unknown));
            }
            self.leg_failed(pair, Leg::Prefill, Failure::Unknown);
            return self.next_pair(pair.request);
        }
        let until = legs.decode_until;
        if !legs.decode_open || !self.is_current(pair) {
            return;
        }
        if until > self.now {
            let after = until - self.now;
            return self.later(Node::Router, after, Event::Silence(pair, leg));
        }
        match self.state(pair.request) {
            State::Decoding(..) => {
                self.leg_failed(pair, Leg::Decode, Failure::Unknown);
                self.next_pair(pair.request);
            }
            _ => self.step(pair.request, Fact::StreamBroken(attempt(pair, Leg::Decode))),
        }
    }

    /// The router forgets everything and aborts nothing any more. Its connections end.
    pub fn router_dies(&mut self) {
        for (client, request) in std::mem::take(&mut self.requests) {
            for number in 0..request.pairs.len() {
                let pair = Pair { request: client, number: number as u8 };
                self.given_up.extend([(pair, Leg::Prefill), (pair, Leg::Decode)]);
                self.excuse(pair);
            }
            if self.clients[client].is_none() {
                self.clients[client] = Some(ClientEnd::Cut);
                self.counts.failed += 1;
            }
        }
        self.identities.iter_mut().for_each(|identity| *identity = None);
    }
}
