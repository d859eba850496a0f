//! The network: connections that deliver in order, and their faults.
//!
//! A connection delays, is stopped by a partition (one way or both), or goes silent without a notice (half-open). Its
//! end reaches the other side like a message. There is no order between connections. A request for which a repetition
//! is harmless by contract may be delivered twice. The second delivery uses a connection whose replies have no
//! receiver. Processes on one host (shared memory) have no network between them.

use std::collections::{BTreeMap, BTreeSet};

use crate::messages::{Msg, Node, Purpose};
use crate::rng::SimRng;
use crate::sim::{Event, Micros, Sim};

/// A connection, by its place in [`Net::conns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnId(pub usize);

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that opened the connection.
    Caller,
    /// The side that accepted the connection.
    Callee,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Caller => Self::Callee,
            Self::Callee => Self::Caller,
        }
    }
}

#[derive(Clone, Debug)]
struct ConnEnd {
    node: Node,
    life: u32,
    open: bool,
    /// The arrival time of the last packet to this end, which keeps the order.
    latest: Micros,
}

#[derive(Debug)]
pub struct Conn {
    ends: [ConnEnd; 2],
    /// The caller's use of the connection.
    pub purpose: Purpose,
    /// The connection delivers nothing any more, without a notice.
    silent: bool,
    /// The time of the caller's last received message.
    pub last_received: Micros,
}

impl Conn {
    pub fn end(&self, side: Side) -> (Node, u32) {
        let end = &self.ends[side as usize];
        (end.node, end.life)
    }

    pub fn is_open(&self, side: Side) -> bool {
        self.ends[side as usize].open
    }
}

/// A message or an end on a connection.
#[derive(Clone, Debug)]
pub enum Packet {
    Message(Msg),
    End,
}

/// The severity of the network's faults.
#[derive(Clone, Debug, Default)]
pub struct NetworkFaults {
    pub latency: (Micros, Micros),
    /// One in this many messages silences its connection; 0 is never.
    pub loss_one_in: u64,
    pub duplicate_one_in: u64,
    pub delay_one_in: u64,
    /// Maximum delay.
    pub delay_max: Micros,
}

#[derive(Debug)]
pub struct Net {
    pub conns: Vec<Conn>,
    pub network_faults: NetworkFaults,
    dice: SimRng,
    /// Pairs of processes between which nothing is delivered, from the first to the second.
    cut: BTreeSet<(Node, Node)>,
    held: Vec<(ConnId, Side, Packet)>,
    /// The arrival time of the last packet between two processes.
    latest: BTreeMap<(Node, Node), Micros>,
}

impl Net {
    pub fn new(seed: u64, network_faults: NetworkFaults) -> Self {
        Self {
            conns: Vec::new(),
            network_faults,
            dice: SimRng::new(seed, 3),
            cut: BTreeSet::new(),
            held: Vec::new(),
            latest: BTreeMap::new(),
        }
    }
}

impl Sim {
    /// Opens a connection; `None` when the other process is down and its host refuses.
    pub fn connect(&mut self, from: Node, to: Node, purpose: Purpose) -> Option<ConnId> {
        let end = |node: Node| ConnEnd { node, life: self.life(node), open: true, latest: 0 };
        if !self.is_up(to) && !self.net.cut.contains(&(from, to)) {
            return None;
        }
        let ends = [end(from), end(to)];
        self.net.conns.push(Conn { ends, purpose, silent: false, last_received: self.now });
        Some(ConnId(self.net.conns.len() - 1))
    }

    /// Sends to the other end. Nothing is sent over a connection that this side has closed.
    pub fn send(&mut self, conn: ConnId, from: Side, msg: Msg) {
        if !self.net.conns[conn.0].is_open(from) {
            return;
        }
        let repeatable = from == Side::Caller && msg.may_repeat();
        if repeatable
            && self.rough(conn)
            && chance(&mut self.net.dice, self.net.network_faults.duplicate_one_in)
        {
            self.counts.duplicated += 1;
            self.counts.duplicate_id += u64::from(matches!(msg, Msg::Prefill(_) | Msg::Decode(..)));
            let ends = self.net.conns[conn.0].ends.clone();
            self.net.conns.push(Conn {
                ends,
                purpose: Purpose::Ghost,
                silent: false,
                last_received: self.now,
            });
            let ghost = ConnId(self.net.conns.len() - 1);
            let copy = msg.clone();
            self.carry(ghost, from.other(), Packet::Message(copy));
        }
        self.carry(conn, from.other(), Packet::Message(msg));
    }

    /// Closes this side. The other side receives the end.
    pub fn close(&mut self, conn: ConnId, side: Side) {
        if !std::mem::replace(&mut self.net.conns[conn.0].ends[side as usize].open, false) {
            return;
        }
        self.carry(conn, side.other(), Packet::End);
    }

    /// Breaks a connection without a notice.
    pub fn silence(&mut self, conn: ConnId) {
        self.net.conns[conn.0].silent = true;
    }

    fn rough(&self, conn: ConnId) -> bool {
        let ends = &self.net.conns[conn.0].ends;
        !self.calm_now() && !self.same_host(ends[0].node, ends[1].node)
    }

    fn carry(&mut self, conn: ConnId, to: Side, packet: Packet) {
        let rough = self.rough(conn);
        let (from_node, to_node) = {
            let ends = &self.net.conns[conn.0].ends;
            (ends[to.other() as usize].node, ends[to as usize].node)
        };
        if self.net.conns[conn.0].silent {
            return;
        }
        if self.net.cut.contains(&(from_node, to_node)) {
            self.net.held.push((conn, to, packet));
            return;
        }
        let (low, high) = self.net.network_faults.latency;
        let mut delay = self.net.dice.between(low, high);
        if rough && chance(&mut self.net.dice, self.net.network_faults.loss_one_in) {
            self.counts.lost += 1;
            self.net.conns[conn.0].silent = true;
            return;
        }
        if rough && chance(&mut self.net.dice, self.net.network_faults.delay_one_in) {
            self.counts.delayed += 1;
            delay += self.net.dice.stretch(1_000, self.net.network_faults.delay_max);
        }
        let end = &mut self.net.conns[conn.0].ends[to as usize];
        let at = (self.now + delay).max(end.latest + 1);
        end.latest = at;
        let latest = self.net.latest.entry((from_node, to_node)).or_default();
        self.counts.reordered += u64::from(at < *latest);
        *latest = at.max(*latest);
        self.at(at, Event::Arrives(conn, to, packet));
    }

    /// Delivers a packet. Returns the process that receives it, if that process still has the connection.
    pub fn arrives(&mut self, conn: ConnId, to: Side, packet: &Packet) -> Option<Node> {
        let (node, life) = self.net.conns[conn.0].end(to);
        if self.net.conns[conn.0].silent {
            return None;
        }
        if self.life(node) != life || !self.is_up(node) {
            // The process has no such connection.
            self.net.conns[conn.0].ends[to as usize].open = false;
            if !matches!(packet, Packet::End) && self.net.conns[conn.0].is_open(to.other()) {
                self.carry(conn, to.other(), Packet::End);
            }
            return None;
        }
        if !self.net.conns[conn.0].is_open(to) {
            return None;
        }
        if to == Side::Caller {
            self.net.conns[conn.0].last_received = self.now;
        }
        if matches!(packet, Packet::End) {
            self.net.conns[conn.0].ends[to as usize].open = false;
        }
        Some(node)
    }

    /// A process has died: its connections end. They go silent instead if its host died with it.
    pub fn cut_off(&mut self, node: Node, life: u32, host_too: bool) {
        for index in 0..self.net.conns.len() {
            for side in [Side::Caller, Side::Callee] {
                if self.net.conns[index].end(side) == (node, life) && self.net.conns[index].is_open(side) {
                    if host_too {
                        self.net.conns[index].silent = true;
                        self.net.conns[index].ends[side as usize].open = false;
                    } else {
                        self.close(ConnId(index), side);
                    }
                }
            }
        }
    }

    pub fn partition(&mut self, from: Node, to: Node) {
        self.net.cut.insert((from, to));
    }

    pub fn heal(&mut self, from: Node, to: Node) {
        self.net.cut.remove(&(from, to));
        let (free, held) = std::mem::take(&mut self.net.held).into_iter().partition(|(conn, side, _)| {
            let ends = &self.net.conns[conn.0].ends;
            (ends[side.other() as usize].node, ends[*side as usize].node) == (from, to)
        });
        self.net.held = held;
        let free: Vec<_> = free;
        for (conn, side, packet) in free {
            self.carry(conn, side, packet);
        }
    }

    pub fn heal_all(&mut self) {
        for (from, to) in std::mem::take(&mut self.net.cut) {
            self.heal(from, to);
        }
    }
}

fn chance(dice: &mut SimRng, one_in: u64) -> bool {
    one_in > 0 && dice.one_in(one_in)
}
