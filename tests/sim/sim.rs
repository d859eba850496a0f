//! One run: the processes, the queue of events in virtual time, and the loop.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use baton_connector::offload::TransferId;

use crate::clients::Clients;
use crate::counts::Counts;
use crate::dice::{Dice, mix};
use crate::engine::Engine;
use crate::faults::Fault;
use crate::net::{ConnId, Net, Parcel, Side};
use crate::router::Router;
use crate::setup::Setup;
use crate::words::Node;

/// Virtual time, in microseconds since the run's start.
pub type Micros = u64;

/// A run that has not come to rest after so many events never will.
const EVENTS_MAX: u64 = 400_000;

/// How long after the last fault everything must be home: the longest delay in the network, silences and leases
/// after it, and queues in between.
const HOME_WITHIN: Micros = 900 * crate::setup::SECOND;

#[derive(Debug)]
pub enum Event {
    Arrives(ConnId, Side, Parcel),
    /// The engine core looks at its mail.
    Wake(usize),
    /// A forward pass is over.
    StepEnds(usize),
    /// A lease or tombstone may be due.
    LeaseTimer(usize),
    /// A consumer's timers: heartbeats and notices.
    PeersTimer(usize),
    /// The next batch of a read goes out, or the next block is copied.
    Batch(usize, ConnId),
    CopyBlock(usize, u64),
    /// A fetch worker sees that its read is no longer wanted.
    StopSeen(usize, u64),
    /// An offload worker takes an order up, and is done with it.
    OrderBegins(usize, TransferId),
    OrderEnds(usize, TransferId),
    DiskIsBack(usize),
    /// The caller has waited long enough on this connection.
    Silence(ConnId, Micros),
    /// A router tries a settlement again.
    SettleAgain(usize, usize),
    /// An abandoned prefill is no longer listened to.
    StopListening(ConnId),
    ClientAsks(usize),
    ClientLeaves(usize),
    Fault(Fault),
    /// From now on nothing goes wrong any more.
    Calm,
}

struct Queued {
    at: Micros,
    /// When it should have happened: what waits for a stopped process goes on waiting in order.
    due: (Micros, u64),
    /// The life of the process that it is for; a later life does not know it.
    whose: Option<(Node, u32)>,
    event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
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
        (self.at, self.due).cmp(&(other.at, other.due))
    }
}

pub struct Sim {
    pub now: Micros,
    pub setup: Setup,
    pub dice: Dice,
    pub net: Net,
    pub engines: Vec<Engine>,
    pub routers: Vec<Router>,
    pub clients: Clients,
    pub counts: Counts,
    /// What was found wrong, first of all.
    pub violation: Option<String>,
    calm: bool,
    queue: BinaryHeap<Reverse<Queued>>,
    order: u64,
    trace: u64,
    narrate: bool,
}

/// How a run went.
pub struct Verdict {
    pub violation: Option<String>,
    pub trace: u64,
    pub counts: Counts,
    pub virtual_micros: Micros,
    pub events: u64,
}

impl Sim {
    pub fn new(setup: Setup, narrate: bool) -> Self {
        let seed = setup.seed;
        let mut sim = Self {
            now: 0,
            dice: Dice::new(seed, 2),
            net: Net::new(seed, setup.weather.clone()),
            engines: (0..setup.engines.len()).map(|e| Engine::new(&setup, e)).collect(),
            routers: (0..setup.routers).map(|r| Router::new(seed, r)).collect(),
            clients: Clients::new(&setup),
            counts: Counts::default(),
            violation: None,
            calm: setup.calm,
            queue: BinaryHeap::new(),
            order: 0,
            trace: seed,
            narrate,
            setup,
        };
        for client in 0..sim.clients.asks.len() {
            sim.at(sim.clients.asks[client].arrives, Event::ClientAsks(client));
            if let Some(after) = sim.clients.asks[client].leaves {
                sim.at(sim.clients.asks[client].arrives + after, Event::ClientLeaves(client));
            }
        }
        for (at, fault) in sim.setup.faults.clone() {
            sim.at(at, Event::Fault(fault));
        }
        sim.at(sim.setup.calm_from, Event::Calm);
        sim
    }

    /// Runs until nothing is left to happen.
    pub fn run(mut self) -> Verdict {
        let mut events = 0;
        while let Some(Reverse(queued)) = self.queue.pop() {
            if queued.at > self.setup.calm_from + HOME_WITHIN {
                break;
            }
            self.now = queued.at;
            events += 1;
            let for_whom = match (&queued.whose, &queued.event) {
                (Some((node, life)), _) if self.life(*node) != *life => continue,
                (Some((node, _)), _) => Some(*node),
                (None, Event::Arrives(conn, side, _)) => Some(self.net.conns[conn.0].end(*side).0),
                (None, _) => None,
            };
            if let Some(until) = for_whom.and_then(|node| self.paused(node)) {
                // A stopped process does nothing; what came meanwhile waits in its sockets.
                self.queue.push(Reverse(Queued { at: until, ..queued }));
                continue;
            }
            self.note(&queued.event);
            self.dispatch(queued.event);
            self.check();
            if events > EVENTS_MAX {
                self.wrong("I11: the run does not come to rest".into());
            }
            if self.violation.is_some() {
                break;
            }
        }
        if self.violation.is_none() {
            self.check_rest();
        }
        self.sum_up();
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
            Event::Arrives(conn, side, parcel) => match self.arrives(conn, side, &parcel) {
                None => {}
                Some(Node::Clients) => self.client_hears(conn, parcel),
                Some(Node::Router(router)) => self.router_hears(router, conn, side, parcel),
                Some(Node::Engine(engine)) => self.engine_hears(engine, conn, side, parcel),
            },
            Event::Wake(engine) => self.wake(engine),
            Event::StepEnds(engine) => self.step_ends(engine),
            Event::LeaseTimer(engine) => self.lease_timer(engine),
            Event::PeersTimer(engine) => self.peers_timer(engine),
            Event::Batch(engine, conn) => self.send_batch(engine, conn),
            Event::CopyBlock(engine, seq) => self.copy_block(engine, seq),
            Event::StopSeen(engine, seq) => self.stop_seen(engine, seq),
            Event::OrderBegins(engine, id) => self.order_begins(engine, id),
            Event::OrderEnds(engine, id) => self.order_ends(engine, id),
            Event::DiskIsBack(engine) => self.disk_is_back(engine),
            Event::Silence(conn, bound) => self.silent(conn, bound),
            Event::SettleAgain(router, debt) => self.settle(router, debt),
            Event::StopListening(conn) => self.close(conn, Side::Caller),
            Event::ClientAsks(client) => self.client_asks(client),
            Event::ClientLeaves(client) => self.client_leaves(client),
            Event::Fault(fault) => self.fault(fault),
            Event::Calm => self.calm_down(),
        }
    }

    /// Puts an event into the queue; it happens whatever becomes of anybody.
    pub fn at(&mut self, at: Micros, event: Event) {
        self.push(at, None, event);
    }

    /// An event of one process's life: gone with it, and waiting while it is stopped.
    pub fn later(&mut self, node: Node, after: Micros, event: Event) {
        let whose = Some((node, self.life(node)));
        self.push(self.now + after, whose, event);
    }

    fn push(&mut self, at: Micros, whose: Option<(Node, u32)>, event: Event) {
        self.order += 1;
        let at = at.max(self.now);
        self.queue.push(Reverse(Queued { at, due: (at, self.order), whose, event }));
    }

    /// Waits for something on a connection, at most `bound` without a word.
    pub fn watch_silence(&mut self, conn: ConnId, bound: Micros) {
        let (node, _) = self.net.conns[conn.0].end(Side::Caller);
        self.later(node, bound, Event::Silence(conn, bound));
    }

    fn silent(&mut self, conn: ConnId, bound: Micros) {
        let open = &self.net.conns[conn.0];
        if !open.is_open(Side::Caller) {
            return;
        }
        let quiet_for = self.now - open.heard;
        if quiet_for < bound {
            let (node, _) = open.end(Side::Caller);
            return self.later(node, bound - quiet_for, Event::Silence(conn, bound));
        }
        let (node, _) = open.end(Side::Caller);
        match node {
            Node::Clients => {
                self.close(conn, Side::Caller);
                self.client_waited(conn);
            }
            Node::Router(router) => self.router_waited(router, conn),
            Node::Engine(engine) => {
                self.close(conn, Side::Caller);
                self.engine_call_failed(engine, conn);
            }
        }
    }

    pub fn calm_now(&self) -> bool {
        self.calm
    }

    fn calm_down(&mut self) {
        self.calm = true;
        self.heal_all();
        self.repair_all();
    }

    pub fn life(&self, node: Node) -> u32 {
        match node {
            Node::Clients => 0,
            Node::Router(router) => self.routers[router].life,
            Node::Engine(engine) => self.engines[engine].life,
        }
    }

    pub fn is_up(&self, node: Node) -> bool {
        match node {
            Node::Clients => true,
            Node::Router(router) => self.routers[router].up,
            Node::Engine(engine) => self.engines[engine].core.is_some(),
        }
    }

    fn paused(&self, node: Node) -> Option<Micros> {
        let until = match node {
            Node::Clients => 0,
            Node::Router(router) => self.routers[router].paused_until,
            Node::Engine(engine) => self.engines[engine].paused_until,
        };
        (until > self.now).then_some(until)
    }

    /// Whether two processes share a host, and so memory.
    pub fn same_host(&self, a: Node, b: Node) -> bool {
        match (a, b) {
            (Node::Engine(a), Node::Engine(b)) => self.setup.engines[a].host == self.setup.engines[b].host,
            _ => false,
        }
    }

    pub fn wrong(&mut self, what: String) {
        if self.violation.is_none() {
            self.violation = Some(format!("at {} us: {what}", self.now));
        }
    }

    /// What happened goes into the trace's hash: the same seed gives the same hash.
    pub fn mark(&mut self, what: u64) {
        self.trace = mix(self.trace.rotate_left(7) ^ what);
    }

    pub fn narrate(&self, what: impl FnOnce() -> String) {
        if self.narrate {
            crate::say(&format!("{:>12} {}", self.now, what()));
        }
    }

    fn note(&mut self, event: &Event) {
        let kind = match event {
            Event::Arrives(conn, side, _) => 1 | (conn.0 as u64) << 8 | (*side as u64) << 4,
            Event::Wake(engine) => 2 | (*engine as u64) << 8,
            Event::StepEnds(engine) => 3 | (*engine as u64) << 8,
            Event::LeaseTimer(engine) => 4 | (*engine as u64) << 8,
            Event::PeersTimer(engine) => 5 | (*engine as u64) << 8,
            Event::Batch(_, conn) => 6 | (conn.0 as u64) << 8,
            Event::CopyBlock(_, seq) => 7 | seq << 8,
            Event::Silence(conn, _) => 8 | (conn.0 as u64) << 8,
            Event::SettleAgain(_, debt) => 9 | (*debt as u64) << 8,
            Event::StopListening(conn) => 10 | (conn.0 as u64) << 8,
            Event::ClientAsks(client) => 11 | (*client as u64) << 8,
            Event::ClientLeaves(client) => 12 | (*client as u64) << 8,
            Event::Fault(_) => 13,
            Event::Calm => 14,
            Event::StopSeen(_, seq) => 15 | seq << 8,
            Event::OrderBegins(_, id) => 16 | id.0 << 8,
            Event::OrderEnds(_, id) => 17 | id.0 << 8,
            Event::DiskIsBack(engine) => 18 | (*engine as u64) << 8,
        };
        self.mark(self.now ^ kind << 40 ^ kind);
        self.narrate(|| format!("{event:?}"));
    }
}
