//! Protocols that send both legs at once, in virtual time: the real exchange, and engines that exchange blocks by
//! themselves.
//!
//! ```text
//! cargo test --release --test sim -- --pairs --seeds N [--from S]   runs seeds S to S+N-1
//! cargo test --release --test sim -- --pairs --seed S               runs one seed and prints its events
//! ```
//!
//! | protocol | the engines meet by | D's pages are freed by | abort |
//! |---|---|---|---|
//! | SGLang | the room | the end of D's leg, and after an abort P's ACK or failure, or 30 s | by `rid`, at both |
//! | vLLM push | the request id | the end of D's leg, and after an abort only P's write | the end of a connection |
//!
//! Invariants: a write lands only in pages of its own pair (3). An abort ends only legs that were given up. No room is
//! used twice. A settlement is made once, and a request has one end (6), which its client receives once. At the end no
//! engine works and no page is held (5). If only clients leave and engines refuse, no engine needs a timeout for that.
//! With vLLM push two things may remain: D's pages of a pair whose write a fault prevented, and until the end of its
//! lease P's half of a pair whose D never registered.
//!
//! | file | what |
//! |---|---|
//! | `pairs/setup.rs` | the parameters of a seed, and the planted bugs |
//! | `pairs/net.rs` | connections, and messages between engines |
//! | `pairs/router.rs` | a router process around the real exchange, as `router/src/exchange/driver/pair.rs` drives it |
//! | `pairs/engines.rs`, `pairs/decode.rs` | P and D |

mod decode;
mod engines;
mod net;
mod router;
mod setup;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use crate::counts::Counts;
use crate::rng::{SimRng, mix};
use crate::setup::SECOND;
use crate::sim::{Micros, Verdict};
use decode::DecodeEngine;
use engines::{PrefillEngine, Write};
use net::{Conn, ConnId, Packet, PeerMessage};
use router::PairRequest;
pub use setup::PairMutation;
use setup::{PairFault, PairSetup};

/// Maximum events of a run: a run that has not ended by then never ends.
const EVENTS_MAX: u64 = 400_000;
/// Limit after the last fault until all pages are free: the timeouts of engines and routers, one after the other.
const FREE_WITHIN: Micros = 2_000 * SECOND;

/// One pair: the request, and the pair's number within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pair {
    pub request: usize,
    pub number: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Leg {
    Prefill,
    Decode,
}

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Node {
    Router,
    Prefill(usize),
    Decode(usize),
}

/// Timers of an engine's half of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timer {
    /// P has computed the prompt.
    Computed,
    /// SGLang's P waits for a registration; a lease of a pushing P.
    PrefillWait,
    /// SGLang's D waits for the write.
    DecodeWait,
    /// SGLang's D waits for P's ACK.
    AckWait,
    /// SGLang's server sees that the router has closed a connection.
    Closed,
    /// D has the write, and sees it.
    Noticed,
    Token,
    /// P forgets a registration without a prefill.
    RegistrationWait,
}

#[derive(Clone, Debug)]
pub enum Event {
    Packet(ConnId, bool, Packet),
    Peer(Node, PeerMessage),
    Timer(Node, Pair, Timer),
    /// A write ends.
    Lands(usize),
    /// SGLang's heartbeats show D that a process of P has ended.
    PrefillLost(usize, usize, u32),
    /// The router's timeout for a leg.
    Silence(Pair, Leg),
    /// P's own error has not arrived shortly after D's.
    GraceEnds(Pair),
    /// An abort is sent, or repeated.
    Abort(Pair, Leg, usize),
    ClientSends(usize),
    ClientLeaves(usize),
    Fault(PairFault),
    Calm,
}

struct Queued {
    at: Micros,
    order: u64,
    /// The process that receives the event. A later process with the same address does not.
    whose: Option<(Node, u32)>,
    event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl Eq for Queued {}
impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Queued {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// A process's state, whatever it does.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    pub up: bool,
    pub life: u32,
    pub paused_until: Micros,
}

impl Process {
    pub const NEW: Self = Self { up: true, life: 1, paused_until: 0 };
}

/// How a client's request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientEnd {
    Complete,
    Error,
    /// The router ended with the connection.
    Cut,
    Left,
}

pub struct PairSim {
    pub now: Micros,
    pub setup: PairSetup,
    pub dice: SimRng,
    pub conns: Vec<Conn>,
    /// The arrival of the last message between two engines, which keeps their order.
    pub peer_latest: BTreeMap<(Node, Node), Micros>,
    pub router: Process,
    pub requests: BTreeMap<usize, PairRequest>,
    /// The process of each P from whose reply the router knows the identity.
    pub identities: Vec<Option<u32>>,
    pub prefills: Vec<PrefillEngine>,
    pub decodes: Vec<DecodeEngine>,
    pub writes: Vec<Write>,
    pub clients: Vec<Option<ClientEnd>>,
    /// Legs that the router has given up, or has forgotten in a crash.
    pub given_up: BTreeSet<(Pair, Leg)>,
    /// Rooms that were sent, with their pairs.
    pub rooms: BTreeMap<u64, BTreeSet<Pair>>,
    /// vLLM push: pairs whose write a fault has prevented.
    pub excused: BTreeSet<Pair>,
    pub counts: Counts,
    violation: Option<String>,
    calm: bool,
    queue: BinaryHeap<Reverse<Queued>>,
    order: u64,
    trace: u64,
    narrate: bool,
}

impl PairSim {
    pub fn new(seed: u64, mutation: PairMutation, narrate: bool) -> Self {
        let setup = PairSetup::of(seed, mutation);
        let mut sim = Self {
            now: 0,
            dice: SimRng::new(seed, 22),
            conns: Vec::new(),
            peer_latest: BTreeMap::new(),
            router: Process::NEW,
            requests: BTreeMap::new(),
            identities: vec![None; setup.prefills],
            prefills: (0..setup.prefills).map(|_| PrefillEngine::new()).collect(),
            decodes: setup.pages.iter().map(|&pages| DecodeEngine::new(pages)).collect(),
            writes: Vec::new(),
            clients: vec![None; setup.clients.len()],
            given_up: BTreeSet::new(),
            rooms: BTreeMap::new(),
            excused: BTreeSet::new(),
            counts: Counts::default(),
            violation: None,
            calm: setup.calm,
            queue: BinaryHeap::new(),
            order: 0,
            trace: seed,
            narrate,
            setup,
        };
        for (client, asked) in sim.setup.clients.clone().into_iter().enumerate() {
            sim.at(asked.arrives, Event::ClientSends(client));
            if let Some(after) = asked.leaves_after {
                sim.at(asked.arrives + after, Event::ClientLeaves(client));
            }
        }
        for (at, fault) in sim.setup.faults.clone() {
            sim.at(at, Event::Fault(fault));
        }
        sim.at(sim.setup.calm_from, Event::Calm);
        sim
    }

    /// Runs until no events are left.
    pub fn run(mut self) -> Verdict {
        let mut events = 0;
        while let Some(Reverse(queued)) = self.queue.pop() {
            if queued.at > self.setup.calm_from + FREE_WITHIN || self.violation.is_some() {
                break;
            }
            self.now = queued.at;
            if let Some((node, life)) = queued.whose {
                let process = self.process(node);
                if !process.up || process.life != life {
                    continue;
                }
                if process.paused_until > self.now {
                    // A stopped process does nothing. Messages wait in its sockets, in order.
                    let at = process.paused_until;
                    self.queue.push(Reverse(Queued { at, ..queued }));
                    continue;
                }
            }
            events += 1;
            self.note(&queued.event);
            self.dispatch(queued.event);
            if events > EVENTS_MAX {
                self.wrong("I11: the run does not come to rest".into());
            }
        }
        if self.violation.is_none() {
            self.check_rest();
        }
        Verdict {
            violation: self.violation,
            trace: self.trace,
            counts: self.counts,
            virtual_micros: self.now,
            events,
        }
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::Packet(conn, to_engine, packet) => self.arrives(conn, to_engine, packet),
            Event::Peer(node, message) => self.peer_arrives(node, message),
            Event::Timer(node, pair, timer) => self.timer(node, pair, timer),
            Event::Lands(write) => self.lands(write),
            Event::PrefillLost(decode, prefill, life) => self.prefill_lost(decode, prefill, life),
            Event::Silence(pair, leg) => self.silence(pair, leg),
            Event::GraceEnds(pair) => self.grace_ends(pair),
            Event::Abort(pair, leg, tries) => self.send_abort(pair, leg, tries),
            Event::ClientSends(client) => self.client_sends(client),
            Event::ClientLeaves(client) => self.client_leaves(client),
            Event::Fault(fault) => self.fault(fault),
            Event::Calm => {
                self.calm = true;
                self.repair_all();
            }
        }
    }

    /// Queues an event that happens whether or not processes crash.
    pub fn at(&mut self, at: Micros, event: Event) {
        self.push(at, None, event);
    }

    /// Queues an event of one process, which ends with it.
    pub fn later(&mut self, node: Node, after: Micros, event: Event) {
        let life = self.process(node).life;
        self.push(self.now + after, Some((node, life)), event);
    }

    /// Queues an event of the process that has this life.
    pub fn later_for(&mut self, whose: (Node, u32), at: Micros, event: Event) {
        self.push(at, Some(whose), event);
    }

    fn push(&mut self, at: Micros, whose: Option<(Node, u32)>, event: Event) {
        self.order += 1;
        self.queue.push(Reverse(Queued { at: at.max(self.now), order: self.order, whose, event }));
    }

    pub fn process(&self, node: Node) -> Process {
        match node {
            Node::Router => self.router,
            Node::Prefill(at) => self.prefills[at].process,
            Node::Decode(at) => self.decodes[at].process,
        }
    }

    pub fn process_mut(&mut self, node: Node) -> &mut Process {
        match node {
            Node::Router => &mut self.router,
            Node::Prefill(at) => &mut self.prefills[at].process,
            Node::Decode(at) => &mut self.decodes[at].process,
        }
    }

    /// Only clients leave, and engines refuse.
    pub fn is_calm(&self) -> bool {
        self.calm
    }

    /// With vLLM push, the write of this pair may never come.
    pub fn excuse(&mut self, pair: Pair) {
        self.excused.insert(pair);
    }

    /// SGLang has a command or a timeout for every end.
    fn is_excused(&self, pair: Pair) -> bool {
        self.setup.pushes() && self.excused.contains(&pair)
    }

    pub fn wrong(&mut self, what: String) {
        if self.violation.is_none() {
            self.violation = Some(format!("at {} us: {what}", self.now));
        }
    }

    /// Records an engine's timeout. In a run without faults none is needed.
    pub fn timed_out(&mut self, pair: Pair, what: &str) {
        self.counts.engine_timeouts += 1;
        if self.setup.calm {
            self.wrong(format!("I11: {what} of {pair:?} needs its timeout, and nothing had gone wrong"));
        }
    }

    fn note(&mut self, event: &Event) {
        let kind = match event {
            Event::Packet(conn, to_engine, _) => 1 | (conn.0 as u64) << 8 | u64::from(*to_engine) << 4,
            Event::Peer(..) => 2,
            Event::Timer(_, pair, timer) => 3 | (pair.request as u64) << 8 | (*timer as u64) << 4,
            Event::Lands(write) => 4 | (*write as u64) << 8,
            Event::PrefillLost(..) => 5,
            Event::Silence(pair, _) => 6 | (pair.request as u64) << 8,
            Event::GraceEnds(pair) => 7 | (pair.request as u64) << 8,
            Event::Abort(pair, ..) => 8 | (pair.request as u64) << 8,
            Event::ClientSends(client) => 9 | (*client as u64) << 8,
            Event::ClientLeaves(client) => 10 | (*client as u64) << 8,
            Event::Fault(_) => 11,
            Event::Calm => 12,
        };
        self.trace = mix(self.trace.rotate_left(7) ^ self.now ^ kind << 40 ^ kind);
        if self.narrate {
            crate::print_line(&format!("{:>12} {event:?}", self.now));
        }
    }

    /// The state at the end of a run.
    fn check_rest(&mut self) {
        let mut found = Vec::new();
        for (at, engine) in self.prefills.iter().enumerate() {
            if !engine.legs.is_empty() || !engine.registrations.is_empty() {
                found.push(format!("I5: P {at} has legs {:?}, {:?}", engine.legs, engine.registrations));
            }
        }
        for (at, engine) in self.decodes.iter().enumerate() {
            let held = engine.owners().find(|owner| !self.is_excused(*owner));
            if let Some(owner) = held {
                found.push(format!("I5: D {at} holds pages of {owner:?}"));
            }
            if let Some((pair, half)) = engine.legs.iter().find(|(pair, _)| !self.is_excused(**pair)) {
                found.push(format!("I5: D {at} has {pair:?}: {half:?}"));
            }
        }
        for (client, request) in &self.requests {
            if request.exchange.outcome().is_none() {
                found.push(format!("I6: request {client} has no outcome"));
            }
        }
        if let Some(client) = self.clients.iter().position(Option::is_none) {
            found.push(format!("I6: client {client} received no end"));
        }
        if let Some((room, pairs)) = self.rooms.iter().find(|(_, pairs)| pairs.len() > 1) {
            found.push(format!("the room {room} is used twice: {pairs:?}"));
        }
        self.counts.unwritten +=
            self.decodes.iter().map(|engine| engine.owners().count() as u64).sum::<u64>();
        if let Some(first) = found.into_iter().next() {
            self.wrong(first);
        }
    }
}
