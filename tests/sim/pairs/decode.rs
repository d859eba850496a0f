//! The decode engine's half of a pair: pages, their registration, the response, and the end of both.

use std::collections::{BTreeMap, VecDeque};

use super::engines::Registration;
use super::net::{ConnId, Packet, PeerMessage};
use super::setup::PairMutation;
use super::{Event, Node, Pair, PairSim, Process, Timer};
use crate::setup::SECOND;
use crate::sim::Micros;

/// SGLang: the wait for the write, and for P's ACK.
const WRITE_WAIT: Micros = 300 * SECOND;
const ACK_WAIT: Micros = 30 * SECOND;

#[derive(Clone, Debug)]
pub enum DecodeHalf {
    /// For pages.
    Queued,
    /// It waits for the write of this process of P.
    Registered(Registration, u32),
    /// With the tokens that are left.
    Streaming(u32),
    /// The pages are kept until P writes nothing more into them.
    Aborted(u32),
}

#[derive(Debug)]
pub struct DecodeLeg {
    pub conn: ConnId,
    pub room: u64,
    pub prefill: usize,
    pub identity: u32,
    pub half: DecodeHalf,
}

#[derive(Debug)]
pub struct DecodeEngine {
    pub process: Process,
    pub legs: BTreeMap<Pair, DecodeLeg>,
    pub queue: VecDeque<Pair>,
    /// The pair that a page belongs to, and the request whose prompt it contains.
    pub pages: Vec<(Option<Pair>, Option<usize>)>,
}

impl DecodeEngine {
    pub fn new(pages: usize) -> Self {
        let pages = vec![(None, None); pages];
        Self { process: Process::NEW, legs: BTreeMap::new(), queue: VecDeque::new(), pages }
    }

    /// The pair of each page that is not free.
    pub fn owners(&self) -> impl Iterator<Item = Pair> {
        self.pages.iter().filter_map(|(owner, _)| *owner)
    }

    fn free(&mut self, pair: Pair) {
        for (owner, _) in self.pages.iter_mut().filter(|(owner, _)| *owner == Some(pair)) {
            *owner = None;
        }
    }

    /// Reserves pages for a pair, if there are enough.
    fn reserve(&mut self, pair: Pair, count: usize) -> Option<Vec<usize>> {
        let free: Vec<_> =
            (0..self.pages.len()).filter(|&page| self.pages[page].0.is_none()).take(count).collect();
        if free.len() < count {
            return None;
        }
        free.iter().for_each(|&page| self.pages[page].0 = Some(pair));
        Some(free)
    }
}

impl PairSim {
    pub fn end_decode(&mut self, d: usize, pair: Pair, answers: bool) {
        let Some(leg) = self.decodes[d].legs.get_mut(&pair) else { return };
        let conn = leg.conn;
        match leg.half.clone() {
            DecodeHalf::Aborted(..) => return,
            DecodeHalf::Queued | DecodeHalf::Streaming(_) => self.free_decode(d, pair),
            DecodeHalf::Registered(registration, life) => {
                leg.half = DecodeHalf::Aborted(life);
                let prefill = (leg.prefill, life);
                self.abort_registration(d, registration, prefill);
            }
        }
        if answers {
            self.send(conn, false, Packet::Failed);
        }
    }

    /// D's leg ends before the write.
    fn abort_registration(&mut self, d: usize, registration: Registration, prefill: (usize, u32)) {
        if self.setup.pushes() {
            self.counts.kept_pages += 1;
            return;
        }
        let (pair, node) = (registration.pair, Node::Decode(d));
        let to = (Node::Prefill(prefill.0), prefill.1);
        self.tell(node, to, PeerMessage::AbortRoom(registration));
        if self.setup.has(PairMutation::PagesGivenAwayAtOnce) {
            return self.free_decode(d, pair);
        }
        self.counts.kept_pages += 1;
        self.later(node, ACK_WAIT, Event::Timer(node, pair, Timer::AckWait));
    }

    /// D's leg is over, and its pages are free.
    pub fn free_decode(&mut self, d: usize, pair: Pair) {
        let engine = &mut self.decodes[d];
        engine.legs.remove(&pair);
        engine.queue.retain(|queued| *queued != pair);
        engine.free(pair);
        self.allocate(d);
    }

    /// Reserves pages in order, and registers them.
    pub fn allocate(&mut self, d: usize) {
        while let Some(&pair) = self.decodes[d].queue.front() {
            let count = self.setup.clients[pair.request].pages;
            let Some(pages) = self.decodes[d].reserve(pair, count) else { return };
            self.decodes[d].queue.pop_front();
            let life = self.decodes[d].process.life;
            let leg = self.decodes[d].legs.get_mut(&pair).expect("a queued leg");
            let (p, conn) = (leg.prefill, leg.conn);
            let registration = Registration { pair, room: leg.room, decode: (d, life), pages };
            let prefill = self.prefills[p].process;
            let is_other = self.setup.pushes() && leg.identity != prefill.life;
            if !prefill.up || is_other {
                // The handshake fails.
                self.decodes[d].legs.remove(&pair);
                self.decodes[d].free(pair);
                self.send(conn, false, Packet::Failed);
                continue;
            }
            leg.half = DecodeHalf::Registered(registration.clone(), prefill.life);
            let (from, to) = (Node::Decode(d), (Node::Prefill(p), prefill.life));
            self.tell(from, to, PeerMessage::Register(registration));
            if !self.setup.pushes() {
                self.later(from, WRITE_WAIT, Event::Timer(from, pair, Timer::DecodeWait));
            }
        }
    }

    pub fn half_of(&self, d: usize, pair: Pair) -> Option<&DecodeHalf> {
        self.decodes[d].legs.get(&pair).map(|leg| &leg.half)
    }

    /// D has the blocks.
    pub fn written(&mut self, d: usize, pair: Pair) {
        match self.half_of(d, pair) {
            Some(DecodeHalf::Registered(..)) => {
                let tokens = self.setup.clients[pair.request].tokens;
                let leg = self.decodes[d].legs.get_mut(&pair).expect("just seen");
                leg.half = DecodeHalf::Streaming(tokens);
                let conn = leg.conn;
                self.send(conn, false, Packet::Accepted);
                self.next_token(d, pair);
            }
            // SGLang's P still acknowledges the abort.
            Some(DecodeHalf::Aborted(..)) if self.setup.pushes() => {
                self.counts.freed_by_write += 1;
                self.free_decode(d, pair);
            }
            _ => {}
        }
    }

    fn next_token(&mut self, d: usize, pair: Pair) {
        let (low, high) = self.setup.token;
        let (node, takes) = (Node::Decode(d), self.dice.between(low, high));
        self.later(node, takes, Event::Timer(node, pair, Timer::Token));
    }

    /// A token depends on the contents of all pages.
    pub fn token(&mut self, d: usize, pair: Pair) {
        let Some(leg) = self.decodes[d].legs.get_mut(&pair) else { return };
        let DecodeHalf::Streaming(left) = &mut leg.half else { return };
        *left -= 1;
        let (conn, left) = (leg.conn, *left);
        let pages = self.decodes[d].pages.iter().filter(|(owner, _)| *owner == Some(pair));
        let other = pages.filter_map(|(_, content)| *content).find(|content| *content != pair.request);
        self.send(conn, false, Packet::Token(other.unwrap_or(pair.request)));
        if left > 0 {
            return self.next_token(d, pair);
        }
        self.send(conn, false, Packet::Complete);
        self.free_decode(d, pair);
    }

    /// SGLang's D notices that a process of P has ended.
    pub fn prefill_lost(&mut self, d: usize, p: usize, life: u32) {
        let lost = self.decodes[d].legs.iter().filter(|(_, leg)| match leg.half {
            DecodeHalf::Registered(_, of) | DecodeHalf::Aborted(of) => (leg.prefill, of) == (p, life),
            DecodeHalf::Queued | DecodeHalf::Streaming(_) => false,
        });
        let lost: Vec<(Pair, ConnId)> = lost.map(|(pair, leg)| (*pair, leg.conn)).collect();
        for (pair, conn) in lost {
            self.send(conn, false, Packet::Failed);
            self.free_decode(d, pair);
        }
    }

    pub fn decode_dies(&mut self, d: usize) {
        let engine = &mut self.decodes[d];
        engine.legs.clear();
        engine.queue.clear();
        engine.pages.iter_mut().for_each(|page| *page = (None, None));
    }
}
