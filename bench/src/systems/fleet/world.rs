//! The simulated fleet in virtual time: clients that come, stay and leave, engines that die and come back, and between
//! them the router's own decisions and the connector's own machines.
//!
//! ```text
//! begin ─▶ D is set aside ─▶ P computes ─▶ lends ─▶ (gap) ─▶ D queues, renews ─▶ reads ─▶ verdict ─▶ streams ─▶ over
//!    └ refused                 ├ client leaves ├ client leaves       ├ client leaves, D dies, D falls silent  ├ client leaves
//!                              └ P dies: another                     └ another D, or computed anew            └ D dies: another goes on
//! ```
//!
//! One thread; what is drawn follows from the seed, so that a run can be repeated. Nothing here decides where a request
//! goes, what is owed for it, or when a lease ends.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use baton_connector::Time;
use baton_connector::exchange::Phase;
use baton_connector::ledger::Ledger;
use baton_router::sim_router::{self, Rehearsal};
use baton_router::{GenerationError, RouterConfig};

use super::costs::{Costs, Kind};
use super::engine::{Engine, Faults, Leases, Plant};
use super::life::{Life, Stage};
use super::memory::resident_bytes;
use crate::load::rng::Rng;

/// Virtual time between two looks at loads and at what the clock ends.
const LOOK_US: u64 = 1_000_000;
/// After the last request: longer than any lease, its drain, and what is remembered of it.
const QUIET_US: u64 = 200_000_000;
/// Virtual time in which the first requests come.
const RAMP_US: u64 = 15_000_000;
/// Means of when an engine dies, and of how long it stays away.
const DIES_EVERY_US: f64 = 2e6;
const AWAY_US: f64 = 10e6;

/// What is simulated.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) engines: usize,
    /// Alive at once.
    pub(crate) requests: usize,
    /// Requests for each of those, after the first.
    pub(crate) turnover: f64,
    /// As a configuration writes it.
    pub(crate) policy: String,
    pub(crate) routers: usize,
    /// Of each router at each engine.
    pub(crate) max_in_flight: Option<usize>,
    /// Requests waiting in a decode engine from which on it is full.
    pub(crate) max_waiting: Option<u32>,
    /// Requests that a decode engine works on at once.
    pub(crate) room: Option<u32>,
    pub(crate) explain: bool,
    pub(crate) seed: u64,
    pub(crate) plant: Option<Plant>,
}

impl Setup {
    /// Requests that begin.
    fn target(&self) -> u64 {
        self.requests as u64 + (self.requests as f64 * self.turnover) as u64
    }
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) costs: Costs,
    pub(crate) leases: Leases,
    pub(crate) faults: Faults,
    /// By the exchange's own words.
    pub(crate) endings: BTreeMap<&'static str, u64>,
    pub(crate) begun: u64,
    pub(crate) alive_most: usize,
    pub(crate) engines_died: u64,
    pub(crate) virtual_s: f64,
    /// Most loaded engine over the mean of all, at each look: prefill and decode.
    pub(crate) imbalance: [Imbalance; 2],
    pub(crate) crowd: Crowd,
    /// Most requests that one engine had at any moment.
    pub(crate) most_at_one: [u32; 2],
    /// Chunks of shared beginnings that the prefill engine's cache had, of all that came to one.
    pub(crate) hits: [u64; 2],
    pub(crate) bytes_per_engine: f64,
    pub(crate) bytes_per_request: f64,
    /// Of everything that happened, in order.
    pub(crate) digest: u64,
}

/// The share of the most loaded engine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Imbalance {
    sum: f64,
    pub(crate) worst: f64,
    looks: u32,
}

impl Imbalance {
    fn look(&mut self, loads: impl Iterator<Item = u32> + Clone) {
        let (count, sum) =
            loads.clone().fold((0_u32, 0_u64), |(n, sum), load| (n + 1, sum + u64::from(load)));
        if sum > 0 {
            let share = f64::from(loads.max().unwrap_or(0)) * f64::from(count) / sum as f64;
            self.worst = self.worst.max(share);
            self.sum += share;
            self.looks += 1;
        }
    }

    pub(crate) fn mean(&self) -> f64 {
        self.sum / f64::from(self.looks.max(1))
    }
}

/// How full decode engines are, summed over all looks while requests come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Crowd {
    pub(crate) looks: u64,
    /// Engines that were looked at, and those that had more requests than room.
    pub(crate) engines: u64,
    pub(crate) over: u64,
    /// Requests that had no room, and places that were free.
    pub(crate) waiting: u64,
    pub(crate) free: u64,
    /// Clients that had been refused, and had not asked again.
    pub(crate) turned_away: u64,
}

impl Crowd {
    fn look(&mut self, loads: impl Iterator<Item = u32>, room: u32, turned_away: usize) {
        self.looks += 1;
        self.turned_away += turned_away as u64;
        for load in loads {
            self.engines += 1;
            self.over += u64::from(load > room);
            self.waiting += u64::from(load.saturating_sub(room));
            self.free += u64::from(room.saturating_sub(load));
        }
    }
}

/// What happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum What {
    Begin(u32),
    /// Of a request, if nothing else has come between.
    Comes(u32, u32, Stage),
    Dies,
    Back(u32),
    Look,
}

/// Everything.
pub(super) struct World {
    pub(super) setup: Setup,
    pub(super) routers: Vec<Rehearsal>,
    /// Those that prefill, then those that decode.
    pub(super) engines: Vec<Engine>,
    pub(super) lives: Vec<Life>,
    events: BinaryHeap<Reverse<(u64, u64, What)>>,
    sequence: u64,
    pub(super) now: Time,
    pub(super) rng: Rng,
    pub(super) costs: Costs,
    pub(super) leases: Leases,
    pub(super) faults: Faults,
    pub(super) plant: Option<Plant>,
    pub(super) endings: BTreeMap<&'static str, u64>,
    pub(super) begun: u64,
    pub(super) living: usize,
    /// Clients that were refused, and have not asked again.
    pub(super) turned_away: usize,
    pub(super) hits: [u64; 2],
    /// Requests at each engine, of all routers.
    pub(super) at: Vec<u32>,
    pub(super) most_at_one: [u32; 2],
    alive_most: usize,
    died: u64,
    imbalance: [Imbalance; 2],
    crowd: Crowd,
    digest: u64,
}

/// Simulates to the end.
///
/// # Errors
/// When no router can be made of the configuration.
pub(crate) fn simulate(setup: &Setup) -> Result<Outcome, GenerationError> {
    sim_router::reseed(setup.seed);
    let before = resident_bytes();
    let mut world = World::new(setup)?;
    let with_routers = resident_bytes();
    world.fill();
    let target = setup.target();
    let mut with_requests = None;
    let mut quiet_from = None;
    while let Some(Reverse((at, _, what))) = world.events.pop() {
        world.now = Time(at);
        world.digest = (world.digest ^ at ^ (what_number(what) << 40)).wrapping_mul(0x0000_0100_0000_01b3);
        match what {
            What::Begin(slot) if world.begun < target => world.begin(slot as usize),
            What::Begin(_) => {}
            What::Comes(slot, turn, stage) => world.comes(slot as usize, turn, stage),
            What::Dies if quiet_from.is_none() => world.one_dies(),
            What::Dies => {}
            What::Back(engine) => world.comes_back(engine as usize),
            What::Look => world.look(),
        }
        world.alive_most = world.alive_most.max(world.living);
        if with_requests.is_none() && world.begun >= setup.requests as u64 {
            world.costs.counting = true;
            with_requests = Some(resident_bytes());
        }
        if world.begun >= target && world.living == 0 {
            let from = *quiet_from.get_or_insert(at);
            if at > from + QUIET_US {
                break;
            }
        }
    }
    let per = |more: usize, less: usize, of: usize| more.saturating_sub(less) as f64 / of.max(1) as f64;
    let bytes_per_engine = per(with_routers, before, setup.engines * setup.routers);
    let bytes_per_request = per(with_requests.unwrap_or(0), with_routers, setup.requests);
    Ok(world.outcome(bytes_per_engine, bytes_per_request))
}

fn what_number(what: What) -> u64 {
    match what {
        What::Begin(slot) => u64::from(slot) << 3,
        What::Comes(slot, _, stage) => u64::from(slot) << 3 | 1 | (stage as u64) << 20,
        What::Dies => 2,
        What::Back(engine) => u64::from(engine) << 3 | 3,
        What::Look => 4,
    }
}

impl World {
    fn new(setup: &Setup) -> Result<Self, GenerationError> {
        let names: Vec<String> = (0..setup.engines).map(|n| format!("engine-{n}.fleet:8000")).collect();
        let yaml = configuration(setup, &names);
        let router = || {
            let config = RouterConfig::from_yaml(&yaml, "fleet.yaml")?;
            Rehearsal::new(config, &names)
        };
        let routers = (0..setup.routers).map(|_| router()).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            routers,
            engines: (0..setup.engines).map(|_| Engine::new()).collect(),
            lives: Vec::with_capacity(setup.requests),
            events: BinaryHeap::new(),
            sequence: 0,
            now: Time::ZERO,
            rng: Rng::new(setup.seed),
            costs: Costs::new(),
            leases: Leases::default(),
            faults: Faults::default(),
            plant: setup.plant,
            endings: BTreeMap::new(),
            begun: 0,
            living: 0,
            turned_away: 0,
            hits: [0; 2],
            at: vec![0; setup.engines],
            most_at_one: [0; 2],
            alive_most: 0,
            died: 0,
            imbalance: Default::default(),
            crowd: Crowd::default(),
            digest: 0xcbf2_9ce4_8422_2325,
            setup: setup.clone(),
        })
    }

    /// Engines before this number prefill.
    pub(super) fn prefills(&self) -> usize {
        self.setup.engines / 2
    }

    fn fill(&mut self) {
        for slot in 0..self.setup.requests {
            self.lives.push(Life::new(slot % self.setup.routers));
            let at = self.rng.below(RAMP_US);
            self.after(at, What::Begin(slot as u32));
        }
        self.after(LOOK_US, What::Look);
        let at = self.mean(DIES_EVERY_US);
        self.after(at, What::Dies);
    }

    /// Something happens in so many microseconds.
    pub(super) fn after(&mut self, us: u64, what: What) {
        self.sequence += 1;
        self.events.push(Reverse((self.now.0 + us, self.sequence, what)));
    }

    /// Exponentially distributed.
    pub(super) fn mean(&mut self, us: f64) -> u64 {
        (self.rng.exponential() * us) as u64
    }

    /// Does something with the ledger that lent to a request, and takes back what ends with it. `None`: that engine is
    /// gone, and the lease with it.
    pub(super) fn on_ledger<T>(
        &mut self,
        slot: usize,
        run: impl FnOnce(&mut Ledger, Time) -> T,
    ) -> Option<T> {
        let now = self.now;
        let life = &mut self.lives[slot];
        let lent = life.lent?;
        let engine = &mut self.engines[lent.engine];
        if !engine.alive || engine.epoch != lent.epoch {
            return None;
        }
        let ((result, settled), ns) = self.costs.timed(|| {
            let result = run(engine.ledger(), now);
            (result, engine.ledger().take_settled())
        });
        life.lease_ns += ns;
        if settled.iter().any(|settled| settled.handle == lent.handle) {
            self.costs.count(Kind::Lease, life.lease_ns);
        }
        engine.take_back(settled, &mut self.leases, &mut self.faults, &mut self.plant);
        Some(result)
    }

    fn look(&mut self) {
        for engine in &mut self.engines {
            if engine.next_deadline().is_some_and(|due| due <= self.now) {
                engine.ledger().tick(self.now);
                let settled = engine.ledger().take_settled();
                engine.take_back(settled, &mut self.leases, &mut self.faults, &mut self.plant);
            }
        }
        if self.costs.counting && self.living * 2 > self.setup.requests {
            let prefills = self.prefills();
            for (leg, range) in [0..prefills, prefills..self.engines.len()].into_iter().enumerate() {
                let alive = range.filter(|&engine| self.engines[engine].alive).map(|engine| self.at[engine]);
                self.imbalance[leg].look(alive);
            }
        }
        if let Some(room) = self.setup.room {
            self.look_at_room(room);
        }
        self.after(LOOK_US, What::Look);
    }

    fn look_at_room(&mut self, room: u32) {
        let alive = (self.prefills()..self.engines.len()).filter(|&engine| self.engines[engine].alive);
        if self.costs.counting && self.begun < self.setup.target() {
            self.crowd.look(alive.clone().map(|engine| self.at[engine]), room, self.turned_away);
        }
        if self.setup.max_waiting.is_some() {
            for engine in alive {
                let (running, waiting) = (self.at[engine].min(room), self.at[engine].saturating_sub(room));
                self.routers.iter().for_each(|router| router.told(engine, running, waiting));
            }
        }
    }

    /// One engine dies, if its leg has enough others; what it had in flight breaks.
    fn one_dies(&mut self) {
        let at = self.mean(DIES_EVERY_US);
        self.after(at, What::Dies);
        let victim = self.rng.below(self.setup.engines as u64) as usize;
        let prefills = self.prefills();
        let leg = if victim < prefills { 0..prefills } else { prefills..self.engines.len() };
        let dead = leg.clone().filter(|&engine| !self.engines[engine].alive).count();
        if !self.engines[victim].alive || dead >= (leg.len() / 20).max(1) || leg.len() - dead < 2 {
            return;
        }
        self.died += 1;
        self.engines[victim].die(&mut self.leases, &mut self.faults);
        let back = self.mean(AWAY_US);
        self.after(back, What::Back(victim as u32));
        let broken: Vec<(usize, Phase)> = (0..self.lives.len())
            .filter_map(|slot| Some((slot, self.lives[slot].exchange.phase()?)))
            .filter(|(slot, phase)| self.lives[*slot].works_at(*phase) == Some(victim))
            .collect();
        let mut told = vec![false; self.routers.len()];
        for (slot, phase) in broken {
            let router = self.lives[slot].router;
            if !std::mem::replace(&mut told[router], true) {
                self.routers[router].unreachable(victim);
            }
            self.breaks(slot, phase, victim);
        }
    }

    fn comes_back(&mut self, engine: usize) {
        self.engines[engine].alive = true;
        self.routers.iter().for_each(|router| router.answers_again(engine));
    }

    fn outcome(mut self, bytes_per_engine: f64, bytes_per_request: f64) -> Outcome {
        for engine in &self.engines {
            engine.audit(&mut self.faults);
        }
        let left: usize = self.routers.iter().flat_map(Rehearsal::loads).sum();
        self.faults.requests_left = left as u64 + self.at.iter().map(|&at| u64::from(at)).sum::<u64>();
        let ended: u64 = self.endings.values().sum();
        self.faults.endings_wrong += ended.abs_diff(self.begun);
        Outcome {
            costs: self.costs,
            leases: self.leases,
            faults: self.faults,
            endings: self.endings,
            begun: self.begun,
            alive_most: self.alive_most,
            engines_died: self.died,
            virtual_s: self.now.0 as f64 / 1e6,
            imbalance: self.imbalance,
            crowd: self.crowd,
            most_at_one: self.most_at_one,
            hits: self.hits,
            bytes_per_engine,
            bytes_per_request,
            digest: self.digest,
        }
    }
}

/// What a router is told; the first half of the engines prefill, the others decode.
fn configuration(setup: &Setup, names: &[String]) -> String {
    let (prefill, decode) = names.split_at(setup.engines / 2);
    let in_flight = setup.max_in_flight.map(|most| format!("max_in_flight: {most}"));
    let waiting = setup.max_waiting.map(|most| format!("max_waiting: {most}"));
    let capacity: Vec<String> = in_flight.into_iter().chain(waiting).collect();
    let capacity = format!("      capacity: {{{}}}\n", capacity.join(", "));
    // Readings grow old by the real clock, and here they are taken by the virtual one.
    let load = if setup.max_waiting.is_some() { "{interval_ms: 1000, stale_ms: 3600000}" } else { "{}" };
    let pool = |engines: &[String], capacity: &str| {
        let engines: String = engines.iter().map(|name| format!("        - url: http://{name}\n")).collect();
        format!("      policy: {}\n{capacity}      engines:\n{engines}", setup.policy)
    };
    format!(
        "listen: 127.0.0.1:0\nhealth: {{active: {{interval_ms: 0}}, outlier: {{interval_ms: 0}}, load: {load}}}\n\
         explain: {{requests: {}}}\nmodels:\n  - name: m\n    prefill:\n{}    decode:\n{}",
        if setup.explain { 4_096 } else { 0 },
        pool(prefill, ""),
        pool(decode, &capacity),
    )
}

/// All bits of a number differ from those of the next.
pub(super) fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
