//! Connections between router and engines, messages between engines, and their faults. A connection keeps its order,
//! and so do the messages from one engine to another. Everything else overtakes.

use super::engines::Registration;
use super::{Event, Leg, Node, Pair, PairFault, PairSim, Process};
use crate::setup::SECOND;
use crate::sim::Micros;

/// A connection from the router to an engine, by its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnId(pub usize);

/// The longest delay of a message. Far below the 30 s for which SGLang keeps pages, and a lease.
const DELAY_MAX: Micros = 4 * SECOND;

#[derive(Clone, Copy, Debug)]
pub struct Conn {
    pub pair: Pair,
    pub leg: Leg,
    /// For an abort by `rid`.
    pub verb: bool,
    /// The engine, and both processes' lives: the router's and the engine's.
    pub engine: Node,
    lives: [u32; 2],
    /// By side: the router's and the engine's.
    pub open: [bool; 2],
    latest: [Micros; 2],
    silent: bool,
}

/// The engine's answers and the router's legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packet {
    /// Both legs have the same values. `identity` is the process of P with which D registers.
    Request {
        room: u64,
        prefill: usize,
        identity: u32,
    },
    Abort,
    /// P's reply, with the life of its process.
    Prefilled(u32),
    Accepted,
    /// A token, computed from a page that holds this request's prompt.
    Token(usize),
    Complete,
    /// Because of the request's content, so another engine refuses too.
    Refused,
    Failed,
    End,
}

/// Between engines.
#[derive(Clone, Debug)]
pub enum PeerMessage {
    Register(Registration),
    /// SGLang: D's leg has ended.
    AbortRoom(Registration),
    /// SGLang: no write into the pair's pages is in flight, and none follows.
    AbortAck(Pair),
    /// SGLang: P's leg has failed.
    Failed(Pair),
}

impl PairSim {
    /// Opens a connection to an engine; `None` when it is down.
    pub fn connect(&mut self, engine: Node, pair: Pair, leg: Leg) -> Option<ConnId> {
        let Process { up, life, .. } = self.process(engine);
        if !up {
            return None;
        }
        let (lives, open) = ([self.router.life, life], [true; 2]);
        let (verb, latest, silent) = (false, [0; 2], false);
        self.conns.push(Conn { pair, leg, verb, engine, lives, open, latest, silent });
        Some(ConnId(self.conns.len() - 1))
    }

    /// Sends to the engine, or to the router.
    pub fn send(&mut self, conn: ConnId, to_engine: bool, packet: Packet) {
        if self.conns[conn.0].open[usize::from(!to_engine)] || packet == Packet::End {
            self.carry(conn, to_engine, packet);
        }
    }

    /// The router, or the engine, closes its side. The other side receives the end.
    pub fn close(&mut self, conn: ConnId, by_router: bool) {
        let side = usize::from(!by_router);
        if std::mem::replace(&mut self.conns[conn.0].open[side], false) {
            self.carry(conn, by_router, Packet::End);
        }
    }

    fn carry(&mut self, conn: ConnId, to_engine: bool, packet: Packet) {
        if self.conns[conn.0].silent {
            return;
        }
        if self.is_lost() {
            // Nothing arrives any more, without a notice.
            self.counts.lost += 1;
            self.conns[conn.0].silent = true;
            let Conn { pair, .. } = self.conns[conn.0];
            return self.excuse(pair);
        }
        let delay = self.delay();
        let link = &mut self.conns[conn.0];
        let at = (self.now + delay).max(link.latest[usize::from(to_engine)] + 1);
        link.latest[usize::from(to_engine)] = at;
        let whose = match to_engine {
            true => (link.engine, link.lives[1]),
            false => (Node::Router, link.lives[0]),
        };
        self.later_for(whose, at, Event::Packet(conn, to_engine, packet));
    }

    /// Sends a message from one engine to another process of an engine.
    pub fn tell(&mut self, from: Node, to: (Node, u32), message: PeerMessage) {
        if self.is_lost() {
            self.counts.lost += 1;
            if let PeerMessage::Register(registration) = message {
                self.excuse(registration.pair);
            }
            return;
        }
        let at = self.now + self.delay();
        let latest = self.peer_latest.entry((from, to.0)).or_default();
        let at = at.max(*latest + 1);
        *latest = at;
        self.later_for(to, at, Event::Peer(to.0, message));
    }

    fn is_lost(&mut self) -> bool {
        let one_in = self.setup.loss_one_in;
        !self.is_calm() && one_in > 0 && self.dice.one_in(one_in)
    }

    fn delay(&mut self) -> Micros {
        let (low, high) = self.setup.latency;
        let delay = self.dice.between(low, high);
        let one_in = self.setup.delay_one_in;
        if self.is_calm() || one_in == 0 || !self.dice.one_in(one_in) {
            return delay;
        }
        self.counts.delayed += 1;
        delay + self.dice.stretch(1_000, DELAY_MAX)
    }

    /// A packet arrives at a process that still has the connection.
    pub fn arrives(&mut self, conn: ConnId, to_engine: bool, packet: Packet) {
        let side = usize::from(to_engine);
        if self.conns[conn.0].silent || !self.conns[conn.0].open[side] {
            return;
        }
        if packet == Packet::End {
            self.conns[conn.0].open[side] = false;
        }
        let Conn { pair, leg, .. } = self.conns[conn.0];
        match to_engine {
            true => self.engine_receives(conn, packet),
            false => self.router_receives(conn, pair, leg, packet),
        }
    }

    pub fn fault(&mut self, fault: PairFault) {
        if self.is_calm() && !matches!(fault, PairFault::Restart(_)) {
            return;
        }
        match fault {
            PairFault::Crash(node, back_after) => self.crash(node, back_after),
            PairFault::Restart(node) => self.process_mut(node).up = true,
            PairFault::Pause(node, time) => {
                self.counts.paused += 1;
                let until = self.now + time;
                let process = self.process_mut(node);
                process.paused_until = process.paused_until.max(until);
            }
            PairFault::Fail(node) => self.fail_one(node),
        }
    }

    fn crash(&mut self, node: Node, back_after: Micros) {
        if !self.process(node).up {
            return;
        }
        let life = self.process(node).life;
        match node {
            Node::Router => {
                self.counts.crash_router += 1;
                self.router_dies();
            }
            Node::Prefill(at) => {
                self.counts.crash_prefill += 1;
                self.prefill_dies(at);
            }
            Node::Decode(at) => {
                self.counts.crash_decode += 1;
                self.decode_dies(at);
            }
        }
        for index in 0..self.conns.len() {
            let conn = self.conns[index];
            let (by_router, of) = match node {
                Node::Router => (true, (Node::Router, conn.lives[0])),
                _ => (false, (conn.engine, conn.lives[1])),
            };
            if of == (node, life) {
                self.close(ConnId(index), by_router);
            }
        }
        let process = self.process_mut(node);
        (process.up, process.life) = (false, life + 1);
        self.at(self.now + back_after, Event::Fault(PairFault::Restart(node)));
    }

    /// Ends all faults: every process is up. A stopped process continues when its pause is over.
    pub fn repair_all(&mut self) {
        self.router.up = true;
        self.prefills.iter_mut().for_each(|engine| engine.process.up = true);
        self.decodes.iter_mut().for_each(|engine| engine.process.up = true);
    }
}
