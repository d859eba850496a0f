//! The engines of a pair as far as its halves concern each other (SGLang 0.5.23, vLLM 0.33), and the prefill engine's
//! half. The decode engine's half is in [`super::decode`].
//!
//! | event | SGLang's P | pushing P |
//! |---|---|---|
//! | request | waits for D's registration | computes, answers, leases for 30 s |
//! | registration | computes, writes, answers | writes, or keeps it for the prefill |
//! | abort, closed connection | ends after a running write, tells D | ends while it computes |
//!
//! | event | SGLang's D | D of a push |
//! |---|---|---|
//! | request | waits for pages, registers them | the same |
//! | abort, closed connection | frees pages, registered ones after P's ACK | frees pages, registered ones after the write |
//! | failure of P | ends | does not know it |

use std::collections::BTreeMap;

use super::decode::{DecodeHalf, DecodeLeg};
use super::net::{ConnId, Packet, PeerMessage};
use super::setup::PairMutation;
use super::{Event, Leg, Node, Pair, PairSim, Process, Timer};
use crate::setup::SECOND;
use crate::sim::Micros;

/// SGLang: P's wait for a registration.
const WAIT: Micros = 300 * SECOND;
/// SGLang: a server looks for closed connections this often.
const POLL: Micros = 4 * SECOND;
/// SGLang: two heartbeats that are not answered.
const HEARTBEATS: Micros = 10 * SECOND;
/// vLLM's lease, and its wait for the prefill of a registration.
const LEASE: Micros = 30 * SECOND;
const REGISTRATION: Micros = 480 * SECOND;

/// D's pages for a pair.
#[derive(Clone, Debug)]
pub struct Registration {
    pub pair: Pair,
    pub room: u64,
    /// D's process.
    pub decode: (usize, u32),
    pub pages: Vec<usize>,
}

#[derive(Clone, Debug)]
pub enum PrefillHalf {
    /// SGLang: for D's registration.
    Waiting,
    Computing(Option<Registration>),
    /// vLLM push.
    Leased,
    /// `ended`: the leg is over at the end of the write. `ack`: D waits for that end.
    Writing {
        ended: bool,
        ack: bool,
    },
}

#[derive(Debug)]
pub struct PrefillLeg {
    conn: ConnId,
    room: u64,
    pub half: PrefillHalf,
}

#[derive(Debug)]
pub struct PrefillEngine {
    pub process: Process,
    pub legs: BTreeMap<Pair, PrefillLeg>,
    /// Registrations without a prefill that waits for them.
    pub registrations: BTreeMap<Pair, Registration>,
}

/// A write in flight. It needs no permission, and it cannot be stopped.
#[derive(Clone, Debug)]
pub struct Write {
    /// P's process, and its pair.
    prefill: (usize, u32),
    pair: Pair,
    to: Registration,
}

impl PrefillEngine {
    pub fn new() -> Self {
        Self { process: Process::NEW, legs: BTreeMap::new(), registrations: BTreeMap::new() }
    }
}

impl PairSim {
    pub fn engine_receives(&mut self, conn: ConnId, packet: Packet) {
        let at = self.conns[conn.0];
        match (at.engine, packet) {
            (_, Packet::End) if at.verb => {}
            (_, Packet::Request { .. }) if self.refuses(conn) => {}
            (Node::Prefill(p), Packet::Request { room, .. }) => self.take_prefill(p, conn, at.pair, room),
            (Node::Decode(d), Packet::Request { room, prefill, identity }) => {
                let half = DecodeHalf::Queued;
                self.decodes[d].legs.insert(at.pair, DecodeLeg { conn, room, prefill, identity, half });
                self.decodes[d].queue.push_back(at.pair);
                self.allocate(d);
            }
            (node, Packet::Abort) => self.abort(node, at.pair, at.leg),
            (node, Packet::End) => match self.setup.pushes() {
                true => self.end_leg(node, at.pair, false),
                false => {
                    let after = self.dice.below(POLL);
                    self.later(node, after, Event::Timer(node, at.pair, Timer::Closed));
                }
            },
            _ => unreachable!("no engine receives it"),
        }
    }

    /// Refuses a leg, because of its content or because the engine is full.
    fn refuses(&mut self, conn: ConnId) -> bool {
        let one_in = self.setup.refuses_one_in;
        if one_in == 0 || !self.dice.one_in(one_in) {
            return false;
        }
        self.counts.refused += 1;
        // The write of this pair never comes.
        let pair = self.conns[conn.0].pair;
        self.excuse(pair);
        let packet = if self.dice.percent(50) { Packet::Refused } else { Packet::Failed };
        self.send(conn, false, packet);
        true
    }

    fn take_prefill(&mut self, p: usize, conn: ConnId, pair: Pair, room: u64) {
        let half = PrefillHalf::Waiting;
        self.prefills[p].legs.insert(pair, PrefillLeg { conn, room, half });
        if self.setup.pushes() {
            return self.compute(p, pair, None);
        }
        let early = self.prefills[p].registrations.values().find(|early| early.room == room).cloned();
        match early {
            Some(registration) => {
                self.prefills[p].registrations.remove(&registration.pair);
                self.compute(p, pair, Some(registration));
            }
            None => {
                self.later(Node::Prefill(p), WAIT, Event::Timer(Node::Prefill(p), pair, Timer::PrefillWait))
            }
        }
    }

    fn compute(&mut self, p: usize, pair: Pair, registration: Option<Registration>) {
        let (low, high) = self.setup.compute;
        let takes = self.dice.between(low, high);
        if let Some(leg) = self.prefills[p].legs.get_mut(&pair) {
            leg.half = PrefillHalf::Computing(registration);
        }
        self.later(Node::Prefill(p), takes, Event::Timer(Node::Prefill(p), pair, Timer::Computed));
    }

    /// SGLang's scheduler ends every leg whose `rid` begins with the given one. Stock vLLM has no such command.
    fn abort(&mut self, node: Node, pair: Pair, leg: Leg) {
        let rid = self.rid(pair);
        let pairs: Vec<Pair> = match node {
            Node::Prefill(p) => self.prefills[p].legs.keys().copied().collect(),
            Node::Decode(d) => self.decodes[d].legs.keys().copied().collect(),
            Node::Router => Vec::new(),
        };
        for other in pairs {
            if !self.rid(other).starts_with(&rid) {
                continue;
            }
            if !self.given_up.contains(&(other, leg)) {
                self.wrong(format!(
                    "the abort of {pair:?} ends the {leg:?} leg of {other:?}, which was not given up"
                ));
            }
            self.end_leg(node, other, true);
        }
    }

    fn rid(&self, pair: Pair) -> String {
        let Pair { request, number } = pair;
        match number {
            0 if self.setup.has(PairMutation::RidIsAPrefix) => format!("r{request}"),
            _ if self.setup.has(PairMutation::RidIsAPrefix) => format!("r{request}-p{number}"),
            _ => format!("r{request:04}-p{number:02}"),
        }
    }

    fn end_leg(&mut self, node: Node, pair: Pair, answers: bool) {
        match node {
            Node::Prefill(p) => self.end_prefill(p, pair, answers),
            Node::Decode(d) => self.end_decode(d, pair, answers),
            Node::Router => unreachable!("no engine"),
        }
    }

    fn end_prefill(&mut self, p: usize, pair: Pair, answers: bool) {
        let Some(leg) = self.prefills[p].legs.get_mut(&pair) else { return };
        let conn = leg.conn;
        match &mut leg.half {
            PrefillHalf::Writing { ended, .. } => return *ended = true,
            PrefillHalf::Leased => return,
            PrefillHalf::Waiting | PrefillHalf::Computing(_) => {}
        }
        let leg = self.prefills[p].legs.remove(&pair).expect("just seen");
        if let PrefillHalf::Computing(Some(registration)) = leg.half {
            self.tell_decode(p, &registration, PeerMessage::Failed(registration.pair));
        }
        if answers {
            self.send(conn, false, Packet::Failed);
        }
    }

    pub fn peer_arrives(&mut self, node: Node, message: PeerMessage) {
        match (node, message) {
            (Node::Prefill(p), PeerMessage::Register(registration)) => self.register(p, registration),
            (Node::Prefill(p), PeerMessage::AbortRoom(registration)) => self.abort_room(p, &registration),
            (Node::Decode(d), PeerMessage::AbortAck(pair) | PeerMessage::Failed(pair))
                if self.half_of(d, pair).is_some_and(|half| matches!(half, DecodeHalf::Aborted(..))) =>
            {
                self.free_decode(d, pair);
            }
            (Node::Decode(d), PeerMessage::Failed(pair)) => {
                if let Some(DecodeHalf::Registered(..)) = self.half_of(d, pair) {
                    let conn = self.decodes[d].legs[&pair].conn;
                    self.free_decode(d, pair);
                    self.send(conn, false, Packet::Failed);
                }
            }
            _ => {}
        }
    }

    fn register(&mut self, p: usize, registration: Registration) {
        let pushes = self.setup.pushes();
        let fits = |pair: &Pair, leg: &PrefillLeg| match leg.half {
            PrefillHalf::Waiting => leg.room == registration.room,
            PrefillHalf::Leased => *pair == registration.pair,
            PrefillHalf::Computing(_) | PrefillHalf::Writing { .. } => false,
        };
        let found = self.prefills[p].legs.iter().find(|(pair, leg)| fits(pair, leg)).map(|(pair, _)| *pair);
        if let Some(pair) = found {
            return match pushes {
                true => self.begin_write(p, pair, registration),
                false => self.compute(p, pair, Some(registration)),
            };
        }
        let (pair, node) = (registration.pair, Node::Prefill(p));
        if pushes && !self.setup.calm && !self.prefills[p].legs.contains_key(&pair) {
            // A delayed message, perhaps after the lease. In a calm run the router prevents that.
            self.excuse(pair);
        }
        self.prefills[p].registrations.insert(pair, registration);
        let wait = if pushes { REGISTRATION } else { WAIT };
        self.later(node, wait, Event::Timer(node, pair, Timer::RegistrationWait));
    }

    fn abort_room(&mut self, p: usize, from: &Registration) {
        self.prefills[p].registrations.remove(&from.pair);
        let of_room = self.prefills[p].legs.iter().filter(|(_, leg)| leg.room == from.room);
        let pairs: Vec<Pair> = of_room.map(|(pair, _)| *pair).collect();
        let mut writes = false;
        for pair in pairs {
            let leg = self.prefills[p].legs.get_mut(&pair).expect("just seen");
            if let PrefillHalf::Writing { ack, .. } = &mut leg.half {
                (*ack, writes) = (true, true);
                continue;
            }
            let conn = leg.conn;
            self.prefills[p].legs.remove(&pair);
            self.send(conn, false, Packet::Failed);
        }
        if !writes {
            self.tell_decode(p, from, PeerMessage::AbortAck(from.pair));
        }
    }

    fn tell_decode(&mut self, p: usize, registration: &Registration, message: PeerMessage) {
        let (decode, life) = registration.decode;
        self.tell(Node::Prefill(p), (Node::Decode(decode), life), message);
    }

    fn begin_write(&mut self, p: usize, pair: Pair, to: Registration) {
        let (low, high) = self.setup.write;
        let takes = self.dice.between(low, high);
        let prefill = (p, self.prefills[p].process.life);
        let leg = self.prefills[p].legs.get_mut(&pair).expect("a leg with a prompt");
        leg.half = PrefillHalf::Writing { ended: false, ack: false };
        self.writes.push(Write { prefill, pair, to });
        self.at(self.now + takes, Event::Lands(self.writes.len() - 1));
    }

    /// The blocks land in D's pages, even if these belong to another pair now.
    pub fn lands(&mut self, write: usize) {
        let Write { prefill: (p, p_life), pair, to } = self.writes[write].clone();
        let (d, life) = to.decode;
        let decode = self.decodes[d].process;
        let reached = decode.up && decode.life == life;
        for &page in to.pages.iter().filter(|_| reached) {
            let (owner, content) = &mut self.decodes[d].pages[page];
            *content = Some(pair.request);
            let owner = *owner;
            if owner != Some(pair) {
                let whose =
                    owner.map_or("were given away".to_owned(), |owner| format!("belong to {owner:?}"));
                self.wrong(format!("I3: a write of {pair:?} lands in pages that {whose}"));
            }
        }
        let process = self.prefills[p].process;
        if !process.up || process.life != p_life {
            // P has crashed and tells nothing.
            return;
        }
        let Some(leg) = self.prefills[p].legs.get(&pair) else { return };
        let (&PrefillHalf::Writing { ended, ack }, conn) = (&leg.half, leg.conn) else { return };
        self.prefills[p].legs.remove(&pair);
        if !self.setup.pushes() && (ended || ack || !reached) {
            if reached {
                let message = if ack { PeerMessage::AbortAck(to.pair) } else { PeerMessage::Failed(to.pair) };
                self.tell_decode(p, &to, message);
            }
            return self.send(conn, false, Packet::Failed);
        }
        self.counts.landed += 1;
        if !self.setup.pushes() {
            self.send(conn, false, Packet::Prefilled(p_life));
        }
        if reached {
            self.later_for(
                (Node::Decode(d), life),
                self.now,
                Event::Timer(Node::Decode(d), to.pair, Timer::Noticed),
            );
        }
    }

    pub fn timer(&mut self, node: Node, pair: Pair, timer: Timer) {
        match (node, timer) {
            (_, Timer::Closed) => self.end_leg(node, pair, false),
            (Node::Prefill(p), Timer::Computed) => self.computed(p, pair),
            (Node::Prefill(p), Timer::PrefillWait) => self.prefill_waited(p, pair),
            (Node::Prefill(p), Timer::RegistrationWait) => drop(self.prefills[p].registrations.remove(&pair)),
            (Node::Decode(d), Timer::DecodeWait) => {
                if let Some(DecodeHalf::Registered(..)) = self.half_of(d, pair) {
                    self.timed_out(pair, "D's wait for the write");
                    self.end_decode(d, pair, true);
                }
            }
            (Node::Decode(d), Timer::AckWait) => {
                if let Some(DecodeHalf::Aborted(..)) = self.half_of(d, pair) {
                    self.timed_out(pair, "D's wait for P's ACK");
                    self.free_decode(d, pair);
                }
            }
            (Node::Decode(d), Timer::Noticed) => self.written(d, pair),
            (Node::Decode(d), Timer::Token) => self.token(d, pair),
            _ => unreachable!("no engine has this timer"),
        }
    }

    fn computed(&mut self, p: usize, pair: Pair) {
        let Some(leg) = self.prefills[p].legs.get_mut(&pair) else { return };
        let PrefillHalf::Computing(registration) = leg.half.clone() else { return };
        let conn = leg.conn;
        if self.setup.pushes() {
            leg.half = PrefillHalf::Leased;
            let life = self.prefills[p].process.life;
            self.send(conn, false, Packet::Prefilled(life));
            let node = Node::Prefill(p);
            self.later(node, LEASE, Event::Timer(node, pair, Timer::PrefillWait));
        }
        let early = self.prefills[p].registrations.remove(&pair);
        if let Some(registration) = registration.or(early) {
            self.begin_write(p, pair, registration);
        }
    }

    /// SGLang's P has waited for a registration; or a lease of a push ends.
    fn prefill_waited(&mut self, p: usize, pair: Pair) {
        let Some(leg) = self.prefills[p].legs.get(&pair) else { return };
        let conn = leg.conn;
        match leg.half {
            PrefillHalf::Waiting => {
                self.timed_out(pair, "P's wait for a registration");
                self.prefills[p].legs.remove(&pair);
                self.send(conn, false, Packet::Failed);
            }
            PrefillHalf::Leased => {
                self.counts.expired += 1;
                self.prefills[p].legs.remove(&pair);
            }
            PrefillHalf::Computing(_) | PrefillHalf::Writing { .. } => {}
        }
    }

    /// A leg fails at its engine before it has or gives blocks.
    pub fn fail_one(&mut self, node: Node) {
        let fails = match node {
            Node::Prefill(p) => self.prefills[p].legs.iter().find_map(|(pair, leg)| {
                matches!(leg.half, PrefillHalf::Waiting | PrefillHalf::Computing(_)).then_some(*pair)
            }),
            Node::Decode(d) => self.decodes[d].legs.iter().find_map(|(pair, leg)| {
                matches!(leg.half, DecodeHalf::Queued | DecodeHalf::Registered(..)).then_some(*pair)
            }),
            Node::Router => None,
        };
        if let Some(pair) = fails.filter(|_| self.process(node).up) {
            self.counts.failed_legs += 1;
            self.excuse(pair);
            self.end_leg(node, pair, true);
        }
    }

    pub fn prefill_dies(&mut self, p: usize) {
        let life = self.prefills[p].process.life;
        let legs = std::mem::take(&mut self.prefills[p].legs);
        let registrations = std::mem::take(&mut self.prefills[p].registrations);
        legs.into_keys().chain(registrations.into_keys()).for_each(|pair| self.excuse(pair));
        // Also for a registration that is on its way.
        for d in 0..self.decodes.len() {
            let waits = self.decodes[d].legs.iter().filter(|(_, leg)| match leg.half {
                DecodeHalf::Registered(_, of) | DecodeHalf::Aborted(of) => (leg.prefill, of) == (p, life),
                DecodeHalf::Queued | DecodeHalf::Streaming(_) => false,
            });
            let waits: Vec<Pair> = waits.map(|(pair, _)| *pair).collect();
            waits.into_iter().for_each(|pair| self.excuse(pair));
            if !self.setup.pushes() {
                self.at(self.now + HEARTBEATS, Event::PrefillLost(d, p, life));
            }
        }
    }
}
