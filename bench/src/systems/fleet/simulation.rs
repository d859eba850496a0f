//! The simulated fleet in virtual time: clients that arrive, stay and disconnect, engines that die and restart, and
//! between them the router's own decisions and the connector's own state machines.
//!
//! ```text
//! begin ─▶ D is reserved ─▶ P computes ─▶ leases ─▶ (gap) ─▶ D queues, renews ─▶ reads ─▶ verdict ─▶ streams ─▶ over
//!    └ refused              ├ cancel                ├ cancel  ├ cancel, D dies, D stops renewing      ├ cancel
//!                           └ P dies: another P               └ another D, or computed again          └ D dies: another D
//! ```
//!
//! The simulation has one thread, and all draws follow from the seed, so that a run is reproducible. Routing,
//! settlement and the end of leases are decided by production code only.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use baton_connector::Time;
use baton_connector::exchange::Phase;
use baton_connector::ledger::Ledger;
use baton_router::sim_router::{self, SimRouter};
use baton_router::{GenerationError, RouterConfig};

use super::FleetOptions;
use super::client::{ClientSlot, RequestStage};
use super::costs::{DecisionCosts, DecisionKind};
use super::engine::{FleetEngine, LeaseCounts, PlantedFault, Violations};
use crate::common::machine;
use crate::load::rng::Rng;

/// Virtual time between two looks at loads and expired leases.
const LOOK_US: u64 = 1_000_000;
/// Virtual time after the last request: longer than a lease, its drain, and its tombstone.
const QUIET_US: u64 = 200_000_000;
/// Virtual time in which the first requests arrive.
const RAMP_US: u64 = 15_000_000;
/// Mean interval of engine deaths, and mean time until a restart.
const DIES_EVERY_US: f64 = 2e6;
const AWAY_US: f64 = 10e6;

/// Parameters of a simulation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FleetSetup<'a> {
    /// The options of all simulations.
    pub(crate) options: &'a FleetOptions,
    pub(crate) engines: usize,
    /// As in a configuration.
    pub(crate) policy: &'a str,
    pub(crate) plant: Option<PlantedFault>,
}

impl FleetSetup<'_> {
    /// Number of requests of the run.
    fn target(&self) -> u64 {
        self.options.requests as u64 + (self.options.requests as f64 * self.options.turnover) as u64
    }
}

/// The result of a simulation, filled in as it goes on.
#[derive(Debug, Default)]
pub(crate) struct FleetOutcome {
    pub(crate) costs: DecisionCosts,
    pub(crate) leases: LeaseCounts,
    pub(crate) faults: Violations,
    /// By the exchange's labels.
    pub(crate) endings: BTreeMap<&'static str, u64>,
    pub(crate) begun: u64,
    pub(crate) alive_most: usize,
    pub(crate) engines_died: u64,
    pub(crate) virtual_s: f64,
    /// Load of the busiest engine over the mean, over all looks: prefill and decode.
    pub(crate) imbalance: [Imbalance; 2],
    pub(crate) crowd: CapacityStats,
    /// Maximum requests of one engine.
    pub(crate) most_at_one: [u32; 2],
    /// Chunks of shared beginnings that prefill engines had cached, and all of them.
    pub(crate) hits: [u64; 2],
    pub(crate) bytes_per_engine: f64,
    pub(crate) bytes_per_request: f64,
    /// Digest of all events in order.
    pub(crate) digest: u64,
}

/// The load of the busiest engine over the mean.
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

/// Load of decode engines, summed over all looks while requests arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CapacityStats {
    pub(crate) looks: u64,
    /// Observed engines, and those with more requests than capacity.
    pub(crate) engines: u64,
    pub(crate) over: u64,
    /// Requests above capacity, and free capacity.
    pub(crate) waiting: u64,
    pub(crate) free: u64,
    /// Clients that were refused and have not retried.
    pub(crate) turned_away: u64,
}

impl CapacityStats {
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

/// A scheduled event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FleetEvent {
    Begin(u32),
    /// A step of a request, unless another one has replaced it.
    Comes(u32, u32, RequestStage),
    Dies,
    Back(u32),
    Look,
}

/// The simulation.
pub(super) struct FleetSim<'a> {
    pub(super) setup: FleetSetup<'a>,
    pub(super) routers: Vec<SimRouter>,
    /// Prefill engines, then decode engines.
    pub(super) engines: Vec<FleetEngine>,
    pub(super) clients: Vec<ClientSlot>,
    events: BinaryHeap<Reverse<(u64, u64, FleetEvent)>>,
    sequence: u64,
    pub(super) now: Time,
    pub(super) rng: Rng,
    pub(super) outcome: FleetOutcome,
    pub(super) plant: Option<PlantedFault>,
    pub(super) living: usize,
    /// Clients that were refused and have not retried.
    pub(super) turned_away: usize,
    /// Requests at each engine, from all routers.
    pub(super) at: Vec<u32>,
}

/// Simulates to the end.
///
/// # Errors
/// If the configuration allows no router.
pub(crate) fn simulate(setup: FleetSetup<'_>) -> Result<FleetOutcome, GenerationError> {
    sim_router::reseed(setup.options.seed);
    // 0 without `/proc`.
    let resident = || machine::resident_bytes("self").unwrap_or(0);
    let before = resident();
    let mut world = FleetSim::new(setup)?;
    let with_routers = resident();
    world.fill();
    let target = setup.target();
    let mut with_requests = None;
    let mut quiet_from = None;
    while let Some(Reverse((at, _, what))) = world.events.pop() {
        world.now = Time(at);
        world.outcome.digest =
            (world.outcome.digest ^ at ^ (event_order(what) << 40)).wrapping_mul(0x0000_0100_0000_01b3);
        match what {
            FleetEvent::Begin(slot) if world.outcome.begun < target => world.begin(slot as usize),
            FleetEvent::Begin(_) => {}
            FleetEvent::Comes(slot, turn, stage) => world.run_stage(slot as usize, turn, stage),
            FleetEvent::Dies if quiet_from.is_none() => world.kill_engine(),
            FleetEvent::Dies => {}
            FleetEvent::Back(engine) => world.restart_engine(engine as usize),
            FleetEvent::Look => world.look(),
        }
        world.outcome.alive_most = world.outcome.alive_most.max(world.living);
        if with_requests.is_none() && world.outcome.begun >= setup.options.requests as u64 {
            world.outcome.costs.counting = true;
            with_requests = Some(resident());
        }
        if world.outcome.begun >= target && world.living == 0 {
            let from = *quiet_from.get_or_insert(at);
            if at > from + QUIET_US {
                break;
            }
        }
    }
    let per = |more: u64, less: u64, of: usize| more.saturating_sub(less) as f64 / of.max(1) as f64;
    let mut outcome = world.finish();
    outcome.bytes_per_engine = per(with_routers, before, setup.engines * setup.options.routers);
    outcome.bytes_per_request = per(with_requests.unwrap_or(0), with_routers, setup.options.requests);
    Ok(outcome)
}

fn event_order(what: FleetEvent) -> u64 {
    match what {
        FleetEvent::Begin(slot) => u64::from(slot) << 3,
        FleetEvent::Comes(slot, _, stage) => u64::from(slot) << 3 | 1 | (stage as u64) << 20,
        FleetEvent::Dies => 2,
        FleetEvent::Back(engine) => u64::from(engine) << 3 | 3,
        FleetEvent::Look => 4,
    }
}

impl<'a> FleetSim<'a> {
    fn new(setup: FleetSetup<'a>) -> Result<Self, GenerationError> {
        let names: Vec<String> = (0..setup.engines).map(|n| format!("engine-{n}.fleet:8000")).collect();
        let yaml = configuration(setup, &names);
        let router = || {
            let config = RouterConfig::from_yaml(&yaml, "fleet.yaml")?;
            SimRouter::new(config, &names)
        };
        let routers = (0..setup.options.routers).map(|_| router()).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            routers,
            engines: (0..setup.engines).map(|_| FleetEngine::new()).collect(),
            clients: Vec::with_capacity(setup.options.requests),
            events: BinaryHeap::new(),
            sequence: 0,
            now: Time::ZERO,
            rng: Rng::new(setup.options.seed),
            outcome: FleetOutcome { digest: 0xcbf2_9ce4_8422_2325, ..FleetOutcome::default() },
            plant: setup.plant,
            living: 0,
            turned_away: 0,
            at: vec![0; setup.engines],
            setup,
        })
    }

    /// Number of prefill engines, which come first.
    pub(super) fn prefills(&self) -> usize {
        self.setup.engines / 2
    }

    fn fill(&mut self) {
        for slot in 0..self.setup.options.requests {
            self.clients.push(ClientSlot::new(slot % self.setup.options.routers));
            let at = self.rng.below(RAMP_US);
            self.after(at, FleetEvent::Begin(slot as u32));
        }
        self.after(LOOK_US, FleetEvent::Look);
        let at = self.mean(DIES_EVERY_US);
        self.after(at, FleetEvent::Dies);
    }

    /// Schedules an event.
    pub(super) fn after(&mut self, us: u64, what: FleetEvent) {
        self.sequence += 1;
        self.events.push(Reverse((self.now.0 + us, self.sequence, what)));
    }

    /// An exponentially distributed time with this mean.
    pub(super) fn mean(&mut self, us: f64) -> u64 {
        (self.rng.exponential() * us) as u64
    }

    /// Calls the ledger of a request's lease and frees the blocks of leases that ended. `None` if the engine has
    /// died, and the lease with it.
    pub(super) fn on_ledger<T>(
        &mut self,
        slot: usize,
        run: impl FnOnce(&mut Ledger, Time) -> T,
    ) -> Option<T> {
        let now = self.now;
        let client = &mut self.clients[slot];
        let lent = client.lent?;
        let engine = &mut self.engines[lent.engine];
        if !engine.alive || engine.epoch != lent.epoch {
            return None;
        }
        let ((result, settled), ns) = self.outcome.costs.timed(|| {
            let result = run(engine.ledger(), now);
            (result, engine.ledger().take_closed())
        });
        client.lease_ns += ns;
        if settled.iter().any(|settled| settled.handle == lent.handle) {
            self.outcome.costs.count(DecisionKind::Lease, client.lease_ns);
        }
        engine.reclaim(settled, &mut self.outcome.leases, &mut self.outcome.faults, &mut self.plant);
        Some(result)
    }

    fn look(&mut self) {
        for engine in &mut self.engines {
            if engine.next_deadline().is_some_and(|due| due <= self.now) {
                engine.ledger().tick(self.now);
                let settled = engine.ledger().take_closed();
                engine.reclaim(settled, &mut self.outcome.leases, &mut self.outcome.faults, &mut self.plant);
            }
        }
        if self.outcome.costs.counting && self.living * 2 > self.setup.options.requests {
            let prefills = self.prefills();
            for (leg, range) in [0..prefills, prefills..self.engines.len()].into_iter().enumerate() {
                let alive = range.filter(|&engine| self.engines[engine].alive).map(|engine| self.at[engine]);
                self.outcome.imbalance[leg].look(alive);
            }
        }
        if let Some(room) = self.setup.options.engine_capacity {
            self.sample_capacity(room);
        }
        self.after(LOOK_US, FleetEvent::Look);
    }

    fn sample_capacity(&mut self, room: u32) {
        let alive = (self.prefills()..self.engines.len()).filter(|&engine| self.engines[engine].alive);
        if self.outcome.costs.counting && self.outcome.begun < self.setup.target() {
            self.outcome.crowd.look(alive.clone().map(|engine| self.at[engine]), room, self.turned_away);
        }
        if self.setup.options.max_waiting.is_some() {
            for engine in alive {
                let (running, waiting) = (self.at[engine].min(room), self.at[engine].saturating_sub(room));
                self.routers.iter().for_each(|router| router.report_load(engine, running, waiting));
            }
        }
    }

    /// One engine dies, if its leg has enough others. Its requests fail.
    fn kill_engine(&mut self) {
        let at = self.mean(DIES_EVERY_US);
        self.after(at, FleetEvent::Dies);
        let failed_engine = self.rng.below(self.setup.engines as u64) as usize;
        let prefills = self.prefills();
        let leg = if failed_engine < prefills { 0..prefills } else { prefills..self.engines.len() };
        let dead = leg.clone().filter(|&engine| !self.engines[engine].alive).count();
        if !self.engines[failed_engine].alive || dead >= (leg.len() / 20).max(1) || leg.len() - dead < 2 {
            return;
        }
        self.outcome.engines_died += 1;
        self.engines[failed_engine].die(&mut self.outcome.leases, &mut self.outcome.faults);
        let back = self.mean(AWAY_US);
        self.after(back, FleetEvent::Back(failed_engine as u32));
        let broken: Vec<(usize, Phase)> = (0..self.clients.len())
            .filter_map(|slot| Some((slot, self.clients[slot].exchange.phase()?)))
            .filter(|(slot, phase)| self.clients[*slot].works_at(*phase) == Some(failed_engine))
            .collect();
        let mut notified = vec![false; self.routers.len()];
        for (slot, phase) in broken {
            let router = self.clients[slot].router;
            if !std::mem::replace(&mut notified[router], true) {
                self.routers[router].fail_connection(failed_engine);
            }
            self.engine_failed(slot, phase, failed_engine);
        }
    }

    fn restart_engine(&mut self, engine: usize) {
        self.engines[engine].alive = true;
        self.routers.iter().for_each(|router| router.recover(engine));
    }

    fn finish(mut self) -> FleetOutcome {
        for engine in &self.engines {
            engine.audit(&mut self.outcome.faults);
        }
        let left: usize = self.routers.iter().flat_map(SimRouter::loads).sum();
        let at: u64 = self.at.iter().map(|&at| u64::from(at)).sum();
        self.outcome.faults.requests_left = left as u64 + at;
        let ended: u64 = self.outcome.endings.values().sum();
        self.outcome.faults.endings_wrong += ended.abs_diff(self.outcome.begun);
        self.outcome.virtual_s = self.now.0 as f64 / 1e6;
        self.outcome
    }
}

/// A router's configuration. The first half of the engines prefill, the others decode.
fn configuration(setup: FleetSetup<'_>, names: &[String]) -> String {
    let (prefill, decode) = names.split_at(setup.engines / 2);
    let in_flight = setup.options.max_in_flight.map(|most| format!("max_in_flight: {most}"));
    let waiting = setup.options.max_waiting.map(|most| format!("max_waiting: {most}"));
    let capacity: Vec<String> = in_flight.into_iter().chain(waiting).collect();
    let capacity = format!("      capacity: {{{}}}\n", capacity.join(", "));
    // Load reports expire by the real clock, but arrive by the virtual one.
    let load =
        if setup.options.max_waiting.is_some() { "{interval_ms: 1000, stale_ms: 3600000}" } else { "{}" };
    let pool = |engines: &[String], capacity: &str| {
        let engines: String = engines.iter().map(|name| format!("        - url: http://{name}\n")).collect();
        format!("      policy: {}\n{capacity}      engines:\n{engines}", setup.policy)
    };
    format!(
        "listen: 127.0.0.1:0\nhealth: {{active: {{interval_ms: 0}}, outlier: {{interval_ms: 0}}, load: {load}}}\n\
         explain: {{requests: {}}}\nmodels:\n  - name: m\n    prefill:\n{}    decode:\n{}",
        if setup.options.no_explain { 0 } else { 4_096 },
        pool(prefill, ""),
        pool(decode, &capacity),
    )
}
