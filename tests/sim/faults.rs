//! The faults of a run and their times.

use std::sync::atomic::Ordering;

use crate::messages::Node;
use crate::rng::SimRng;
use crate::setup::{EngineSetup, SECOND};
use crate::sim::{Event, Micros, Sim};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A process crashes and restarts after this time with the same address. If its host crashes too, its connections
    /// end without a notice.
    Crash(Node, Micros, bool),
    Restart(Node),
    /// SIGSTOP for this long.
    Pause(Node, Micros),
    Partition(Node, Node, bool, Micros),
    Heal(Node, Node),
    /// The next forward pass fails.
    Device(usize),
    /// An engine whose device has failed is replaced.
    Supervise(usize),
    Drain(usize),
    ResetCache(usize),
    /// A router's configuration removes an engine, or adds it again.
    Reload(usize, usize),
}

/// Draws the faults of a run: mostly few, so that the effects of each one are visible, sometimes many.
pub fn plan(
    dice: &mut SimRng,
    routers: usize,
    engines: &[EngineSetup],
    busy: Micros,
    until: Micros,
) -> Vec<(Micros, Fault)> {
    let many = if dice.percent(15) { 16 } else { 5 };
    let mut nodes: Vec<Node> = (0..engines.len()).map(Node::Engine).collect();
    nodes.extend((0..routers).map(Node::Router));
    let mut faults = Vec::new();
    for _ in 0..dice.below(many) {
        // Most faults happen while requests are active.
        let at = if dice.percent(75) { dice.below(busy + SECOND) } else { dice.below(until) };
        let engine = dice.below(engines.len() as u64) as usize;
        let (a, b) = (*dice.pick(&nodes), *dice.pick(&nodes));
        let fault = match dice.below(16) {
            0..=3 => Fault::Crash(Node::Engine(engine), dice.stretch(1_000, 20 * SECOND), dice.percent(30)),
            4 => {
                let router = Node::Router(dice.below(routers as u64) as usize);
                Fault::Crash(router, dice.stretch(1_000, 5 * SECOND), dice.percent(30))
            }
            5..=7 => Fault::Pause(a, dice.stretch(10_000, 60 * SECOND)),
            8..=10 if a != b => Fault::Partition(a, b, dice.percent(50), dice.stretch(10_000, 60 * SECOND)),
            11 => Fault::Device(engine),
            12 => Fault::Drain(engine),
            13 => Fault::ResetCache(engine),
            14 => Fault::Reload(dice.below(routers as u64) as usize, engine),
            _ => Fault::Crash(Node::Engine(engine), dice.stretch(1_000, SECOND), false),
        };
        faults.push((at, fault));
    }
    faults
}

impl Sim {
    pub fn fault(&mut self, fault: Fault) {
        if self.calm_now() && !matches!(fault, Fault::Restart(_) | Fault::Heal(..) | Fault::Supervise(_)) {
            return;
        }
        match fault {
            Fault::Crash(node, back_after, host_too) => {
                if !self.is_up(node) {
                    return;
                }
                match node {
                    Node::Engine(engine) => {
                        self.counts.crash_prefill += u64::from(self.engines[engine].setup.prefills);
                        self.counts.crash_decode += u64::from(self.engines[engine].setup.decodes);
                        self.counts.crash_host += u64::from(host_too);
                        self.crash_engine(engine, host_too, back_after);
                    }
                    Node::Router(router) => {
                        self.counts.crash_router += 1;
                        let life = self.routers[router].life;
                        self.routers[router].die();
                        self.cut_off(node, life, host_too);
                        self.at(self.now + back_after, Event::Fault(Fault::Restart(node)));
                    }
                    Node::Clients => {}
                }
            }
            Fault::Restart(node) => self.restart(node),
            Fault::Pause(node, time) => {
                self.counts.paused += 1;
                let until = match node {
                    Node::Engine(engine) => {
                        self.engines[engine].was_paused = true;
                        &mut self.engines[engine].paused_until
                    }
                    Node::Router(router) => &mut self.routers[router].paused_until,
                    Node::Clients => return,
                };
                // Never earlier than before: messages wait in the sockets in order.
                *until = (self.now + time).max(*until);
            }
            Fault::Partition(a, b, one_way, time) => {
                self.partition(a, b);
                if one_way {
                    self.counts.partitioned_one_way += 1;
                } else {
                    self.counts.partitioned += 1;
                    self.partition(b, a);
                }
                self.at(self.now + time, Event::Fault(Fault::Heal(a, b)));
            }
            Fault::Heal(a, b) => {
                self.heal(a, b);
                self.heal(b, a);
            }
            Fault::Device(engine) => {
                self.counts.device += 1;
                self.engines[engine].breaks.store(true, Ordering::Relaxed);
            }
            Fault::Supervise(engine) => self.crash_engine(engine, false, SECOND),
            Fault::Drain(engine) => self.drain_engine(engine),
            Fault::ResetCache(engine) => {
                self.counts.cache_reset += 1;
                if self.is_up(Node::Engine(engine)) {
                    self.engines[engine].mail.reset_cache = true;
                    self.poke(engine);
                }
            }
            Fault::Reload(router, engine) => {
                self.counts.reload += 1;
                let out = &mut self.routers[router].out;
                match out.iter().position(|e| *e == engine) {
                    Some(at) => drop(out.remove(at)),
                    None => out.push(engine),
                }
            }
        }
    }

    pub fn crash_engine(&mut self, engine: usize, host_too: bool, back_after: Micros) {
        if !self.is_up(Node::Engine(engine)) {
            return;
        }
        let life = self.engines[engine].life;
        self.engines[engine].die();
        self.cut_off(Node::Engine(engine), life, host_too);
        self.at(self.now + back_after, Event::Fault(Fault::Restart(Node::Engine(engine))));
    }

    fn restart(&mut self, node: Node) {
        if self.is_up(node) {
            return;
        }
        match node {
            Node::Engine(engine) => {
                let now = self.now;
                let (setup, engine) = (&self.setup, &mut self.engines[engine]);
                engine.start(setup, now);
            }
            Node::Router(router) => self.routers[router].up = true,
            Node::Clients => {}
        }
    }

    /// Ends all faults: every process is up and configured. A stopped process continues when its pause is over.
    pub fn repair_all(&mut self) {
        for engine in 0..self.engines.len() {
            self.restart(Node::Engine(engine));
        }
        for router in 0..self.routers.len() {
            self.restart(Node::Router(router));
            self.routers[router].out.clear();
        }
    }
}
