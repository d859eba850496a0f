//! The network: connections that deliver in order, and what can happen to them.
//!
//! A connection delays, is held up by a partition (one way or both), or goes silent without a word (half-open). Its
//! end is told to the other side like a message. Between connections there is no order. A request for which a
//! repetition is harmless by contract may be delivered twice, the second time over a connection whose answers nobody
//! hears. Processes on one host (shared memory) have no network between them.

use std::collections::{BTreeMap, BTreeSet};

use crate::dice::Dice;
use crate::sim::{Event, Micros, Sim};
use crate::words::{Msg, Node, Purpose};

/// A connection, by its place in [`Net::conns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnId(pub usize);

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Who opened it.
    Caller,
    /// Who was called.
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
struct End {
    node: Node,
    life: u32,
    open: bool,
    /// When the last thing sent to this end arrives: order is kept.
    latest: Micros,
}

#[derive(Debug)]
pub struct Conn {
    ends: [End; 2],
    /// What the caller uses it for.
    pub purpose: Purpose,
    /// Nothing gets through any more, and nobody is told.
    silent: bool,
    /// When the caller last heard something.
    pub heard: Micros,
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

/// What travels on a connection.
#[derive(Clone, Debug)]
pub enum Parcel {
    Message(Msg),
    End,
}

/// How bad it is.
#[derive(Clone, Debug, Default)]
pub struct Weather {
    pub latency: (Micros, Micros),
    /// One message in so many silences its connection; 0 is never.
    pub loss_one_in: u64,
    pub duplicate_one_in: u64,
    pub delay_one_in: u64,
    /// The longest delay.
    pub delay_max: Micros,
}

#[derive(Debug)]
pub struct Net {
    pub conns: Vec<Conn>,
    pub weather: Weather,
    dice: Dice,
    /// From here nothing reaches there.
    cut: BTreeSet<(Node, Node)>,
    held: Vec<(ConnId, Side, Parcel)>,
    /// When the latest parcel between two processes arrives.
    latest: BTreeMap<(Node, Node), Micros>,
}

impl Net {
    pub fn new(seed: u64, weather: Weather) -> Self {
        Self {
            conns: Vec::new(),
            weather,
            dice: Dice::new(seed, 3),
            cut: BTreeSet::new(),
            held: Vec::new(),
            latest: BTreeMap::new(),
        }
    }
}

impl Sim {
    /// Opens a connection; `None` when the other process is down and its host says so.
    pub fn connect(&mut self, from: Node, to: Node, purpose: Purpose) -> Option<ConnId> {
        let end = |node: Node| End { node, life: self.life(node), open: true, latest: 0 };
        if !self.is_up(to) && !self.net.cut.contains(&(from, to)) {
            return None;
        }
        let ends = [end(from), end(to)];
        self.net.conns.push(Conn { ends, purpose, silent: false, heard: self.now });
        Some(ConnId(self.net.conns.len() - 1))
    }

    /// Sends to the other end. What was sent over a connection that is closed here goes nowhere.
    pub fn send(&mut self, conn: ConnId, from: Side, msg: Msg) {
        if !self.net.conns[conn.0].is_open(from) {
            return;
        }
        let repeatable = from == Side::Caller && msg.may_repeat();
        if repeatable && self.rough(conn) && chance(&mut self.net.dice, self.net.weather.duplicate_one_in) {
            self.counts.duplicated += 1;
            self.counts.duplicate_id += u64::from(matches!(msg, Msg::Prefill(_) | Msg::Decode(..)));
            let ends = self.net.conns[conn.0].ends.clone();
            self.net.conns.push(Conn { ends, purpose: Purpose::Ghost, silent: false, heard: self.now });
            let ghost = ConnId(self.net.conns.len() - 1);
            let twin = msg.clone();
            self.carry(ghost, from.other(), Parcel::Message(twin));
        }
        self.carry(conn, from.other(), Parcel::Message(msg));
    }

    /// Closes this side. The other side learns of it.
    pub fn close(&mut self, conn: ConnId, side: Side) {
        if !std::mem::replace(&mut self.net.conns[conn.0].ends[side as usize].open, false) {
            return;
        }
        self.carry(conn, side.other(), Parcel::End);
    }

    /// Breaks a connection without a word.
    pub fn silence(&mut self, conn: ConnId) {
        self.net.conns[conn.0].silent = true;
    }

    fn rough(&self, conn: ConnId) -> bool {
        let ends = &self.net.conns[conn.0].ends;
        !self.calm_now() && !self.same_host(ends[0].node, ends[1].node)
    }

    fn carry(&mut self, conn: ConnId, to: Side, parcel: Parcel) {
        let rough = self.rough(conn);
        let (from_node, to_node) = {
            let ends = &self.net.conns[conn.0].ends;
            (ends[to.other() as usize].node, ends[to as usize].node)
        };
        if self.net.conns[conn.0].silent {
            return;
        }
        if self.net.cut.contains(&(from_node, to_node)) {
            self.net.held.push((conn, to, parcel));
            return;
        }
        let (low, high) = self.net.weather.latency;
        let mut delay = self.net.dice.between(low, high);
        if rough && chance(&mut self.net.dice, self.net.weather.loss_one_in) {
            self.counts.lost += 1;
            self.net.conns[conn.0].silent = true;
            return;
        }
        if rough && chance(&mut self.net.dice, self.net.weather.delay_one_in) {
            self.counts.delayed += 1;
            delay += self.net.dice.stretch(1_000, self.net.weather.delay_max);
        }
        let end = &mut self.net.conns[conn.0].ends[to as usize];
        let at = (self.now + delay).max(end.latest + 1);
        end.latest = at;
        let latest = self.net.latest.entry((from_node, to_node)).or_default();
        self.counts.reordered += u64::from(at < *latest);
        *latest = at.max(*latest);
        self.at(at, Event::Arrives(conn, to, parcel));
    }

    /// A parcel is there. Says whose life it reaches, if it reaches anybody.
    pub fn arrives(&mut self, conn: ConnId, to: Side, parcel: &Parcel) -> Option<Node> {
        let (node, life) = self.net.conns[conn.0].end(to);
        if self.net.conns[conn.0].silent {
            return None;
        }
        if self.life(node) != life || !self.is_up(node) {
            // Nobody here knows this connection.
            self.net.conns[conn.0].ends[to as usize].open = false;
            if !matches!(parcel, Parcel::End) && self.net.conns[conn.0].is_open(to.other()) {
                self.carry(conn, to.other(), Parcel::End);
            }
            return None;
        }
        if !self.net.conns[conn.0].is_open(to) {
            return None;
        }
        if to == Side::Caller {
            self.net.conns[conn.0].heard = self.now;
        }
        if matches!(parcel, Parcel::End) {
            self.net.conns[conn.0].ends[to as usize].open = false;
        }
        Some(node)
    }

    /// A process has died: its connections end, or fall silent if its host died with it.
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
        for (conn, side, parcel) in free {
            self.carry(conn, side, parcel);
        }
    }

    pub fn heal_all(&mut self) {
        for (from, to) in std::mem::take(&mut self.net.cut) {
            self.heal(from, to);
        }
    }
}

fn chance(dice: &mut Dice, one_in: u64) -> bool {
    one_in > 0 && dice.one_in(one_in)
}
