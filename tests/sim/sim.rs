//! One run: the processes, the queue of events in virtual time, and the loop.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use baton_connector::offload::TransferId;

use crate::clients::Clients;
use crate::counts::Counts;
use crate::engine::Engine;
use crate::faults::Fault;
use crate::messages::Node;
use crate::net::{ConnId, Net, Packet, Side};
use crate::rng::{SimRng, mix};
use crate::router::Router;
use crate::setup::Setup;

/// Virtual time, in microseconds since the run's start.
pub type Micros = u64;

/// Maximum events of a run: a run that has not ended by then never ends.
const EVENTS_MAX: u64 = 400_000;

/// Limit after the last fault until all blocks are free: the longest network delay, timeouts and leases after it, and
/// queues in between.
const FREE_WITHIN: Micros = 900 * crate::setup::SECOND;

#[derive(Debug)]
pub enum Event {
    Arrives(ConnId, Side, Packet),
    /// The engine core reads its mailbox.
    Wake(usize),
    /// A forward pass has ended.
    StepEnds(usize),
    /// A lease or tombstone may be due.
    LeaseTimer(usize),
    /// A consumer's timers: heartbeats and notices.
    PeersTimer(usize),
    /// The next batch of a read goes out, or the next block is copied.
    Batch(usize, ConnId),
    CopyBlock(usize, u64),
    /// A fetch worker reads the stop flag of its read.
    StopSeen(usize, u64),
    /// An offload worker begins an order, and ends it.
    OrderBegins(usize, TransferId),
    OrderEnds(usize, TransferId),
    DiskIsBack(usize),
    /// The caller's timeout on this connection.
    Silence(ConnId, Micros),
    /// A router tries a settlement again.
    SettleAgain(usize, usize),
    /// The router stops reading an abandoned prefill.
    StopListening(ConnId),
    ClientSends(usize),
    ClientCancels(usize),
    Fault(Fault),
    /// No faults happen from now on.
    Calm,
}

struct QueuedEvent {
    at: Micros,
    /// The planned time and a number. Events that wait for a stopped process stay in this order.
    due: (Micros, u64),
    /// The process that receives the event. A later process with the same address does not.
    whose: Option<(Node, u32)>,
    event: Event,
}

impl PartialEq for QueuedEvent {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}
impl Eq for QueuedEvent {}
impl PartialOrd for QueuedEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for QueuedEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.due).cmp(&(other.at, other.due))
    }
}

pub struct Sim {
    pub now: Micros,
    pub setup: Setup,
    pub dice: SimRng,
    pub net: Net,
    pub engines: Vec<Engine>,
    pub routers: Vec<Router>,
    pub clients: Clients,
    pub counts: Counts,
    /// The first violation.
    pub violation: Option<String>,
    calm: bool,
    queue: BinaryHeap<Reverse<QueuedEvent>>,
    order: u64,
    trace: u64,
    narrate: bool,
}

/// The result of a run.
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
            dice: SimRng::new(seed, 2),
            net: Net::new(seed, setup.network_faults.clone()),
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
            sim.at(sim.clients.asks[client].arrives, Event::ClientSends(client));
            if let Some(after) = sim.clients.asks[client].cancel_after {
                sim.at(sim.clients.asks[client].arrives + after, Event::ClientCancels(client));
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
            if queued.at > self.setup.calm_from + FREE_WITHIN {
                break;
            }
            self.now = queued.at;
            events += 1;
            let receiver = match (&queued.whose, &queued.event) {
                (Some((node, life)), _) if self.life(*node) != *life => continue,
                (Some((node, _)), _) => Some(*node),
                (None, Event::Arrives(conn, side, _)) => Some(self.net.conns[conn.0].end(*side).0),
                (None, _) => None,
            };
            if let Some(until) = receiver.and_then(|node| self.paused(node)) {
                // A stopped process does nothing. Messages wait in its sockets.
                self.queue.push(Reverse(QueuedEvent { at: until, ..queued }));
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
            Event::Arrives(conn, side, packet) => match self.arrives(conn, side, &packet) {
                None => {}
                Some(Node::Clients) => self.client_receives(conn, packet),
                Some(Node::Router(router)) => self.router_receives(router, conn, side, packet),
                Some(Node::Engine(engine)) => self.engine_receives(engine, conn, side, packet),
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
            Event::SettleAgain(router, settlement) => self.settle(router, settlement),
            Event::StopListening(conn) => self.close(conn, Side::Caller),
            Event::ClientSends(client) => self.client_sends(client),
            Event::ClientCancels(client) => self.client_cancels(client),
            Event::Fault(fault) => self.fault(fault),
            Event::Calm => self.calm_down(),
        }
    }

    /// Queues an event that happens whether or not processes crash.
    pub fn at(&mut self, at: Micros, event: Event) {
        self.push(at, None, event);
    }

    /// Queues an event of one process. It is dropped when the process ends and waits while the process is stopped.
    pub fn later(&mut self, node: Node, after: Micros, event: Event) {
        let whose = Some((node, self.life(node)));
        self.push(self.now + after, whose, event);
    }

    fn push(&mut self, at: Micros, whose: Option<(Node, u32)>, event: Event) {
        self.order += 1;
        let at = at.max(self.now);
        self.queue.push(Reverse(QueuedEvent { at, due: (at, self.order), whose, event }));
    }

    /// Sets a timeout on a connection: at most `bound` without a message.
    pub fn watch_silence(&mut self, conn: ConnId, bound: Micros) {
        let (node, _) = self.net.conns[conn.0].end(Side::Caller);
        self.later(node, bound, Event::Silence(conn, bound));
    }

    fn silent(&mut self, conn: ConnId, bound: Micros) {
        let open = &self.net.conns[conn.0];
        if !open.is_open(Side::Caller) {
            return;
        }
        let quiet_for = self.now - open.last_received;
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

    /// Adds an event to the hash of the trace: the same seed gives the same hash.
    pub fn mark(&mut self, what: u64) {
        self.trace = mix(self.trace.rotate_left(7) ^ what);
    }

    pub fn narrate(&self, what: impl FnOnce() -> String) {
        if self.narrate {
            crate::print_line(&format!("{:>12} {}", self.now, what()));
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
            Event::SettleAgain(_, settlement) => 9 | (*settlement as u64) << 8,
            Event::StopListening(conn) => 10 | (conn.0 as u64) << 8,
            Event::ClientSends(client) => 11 | (*client as u64) << 8,
            Event::ClientCancels(client) => 12 | (*client as u64) << 8,
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
