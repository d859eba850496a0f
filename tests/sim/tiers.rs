//! The tiers below one engine's pool: the real books and slots, with workers that are slow, refuse, fail, tell twice,
//! damage files and notice it. A store reads its block when it ends, a load writes half of its block when it begins:
//! whoever reuses a block in between is found out by the device.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use baton_connector::offload::TransferId;
use baton_engine::block_hash::BlockHash;
use baton_engine::offload::books::TierConfig;
use baton_engine::offload::{Fault, HostSlot, Order, Report, Source};

use crate::device::Slot;
use crate::dice::Dice;
use crate::engine::Engine;
use crate::faults;
use crate::setup::{EngineSetup, Mutation, SECOND};
use crate::sim::{Event, Micros, Sim};
use crate::words::Node;

/// Orders that wait at the workers; more are refused.
const QUEUE_MAX: usize = 24;

/// What a seed says of an engine's tiers.
#[derive(Clone, Copy, Debug)]
pub struct TierSetup {
    pub sizes: TierConfig,
    /// From order to beginning, and from there to the end.
    pub takes: (Micros, Micros),
    /// One order in so many fails; 0 is never.
    pub fails_one_in: u64,
    /// One report in so many comes twice; 0 is never.
    pub repeats_one_in: u64,
}

/// Every second engine has tiers; drawn apart, so that nothing else of a seed depends on it. Some runs are made for
/// them: caches are reset again and again, so that what is asked again comes from the tiers, which take their time.
pub fn draw(
    seed: u64,
    calm: bool,
    span: Micros,
    engines: &mut [EngineSetup],
    faults: &mut Vec<(Micros, faults::Fault)>,
) {
    let dice = &mut Dice::new(seed, 9);
    let busy = dice.percent(20);
    for _ in 0..if busy { dice.between(10, 40) } else { 0 } {
        let engine = dice.below(engines.len() as u64) as usize;
        faults.push((dice.below(span), faults::Fault::ResetCache(engine)));
    }
    for engine in engines {
        let host_blocks = if dice.percent(60) { dice.between(1, 24) } else { 0 } as usize;
        let disk_blocks = if dice.percent(60) { dice.between(1, 48) } else { 0 } as usize;
        let slow = !calm && dice.percent(20);
        let setup = TierSetup {
            sizes: TierConfig { host_blocks, disk_blocks },
            takes: match (busy, slow) {
                (true, _) => (1_000, SECOND / 4),
                (false, true) => (1_000, 3 * SECOND),
                (false, false) => (10, 20_000),
            },
            fails_one_in: if calm || dice.percent(50) { 0 } else { dice.between(2, 30) },
            repeats_one_in: if calm || dice.percent(50) { 0 } else { dice.between(3, 30) },
        };
        engine.tiers = ((busy || dice.percent(50)) && setup.sizes.any()).then_some(setup);
    }
}

#[derive(Debug)]
struct Flight {
    order: Order,
    /// Past its commitment point.
    begun: bool,
}

/// A file: what is in it, and whether that is not what was written.
#[derive(Clone, Debug)]
pub struct File {
    contents: Vec<Slot>,
    damaged: bool,
}

/// Files outlive the process.
pub type Disk = BTreeMap<BlockHash, File>;

/// The workers of one process.
#[derive(Debug, Default)]
pub struct Workers {
    slots: BTreeMap<HostSlot, Vec<Slot>>,
    flights: BTreeMap<TransferId, Flight>,
    /// Orders that were revoked, for the planted fault that carries them out all the same.
    revoked: BTreeMap<TransferId, Order>,
    /// Told to leave the disk alone, and not told otherwise.
    rests: bool,
}

impl Workers {
    pub fn order(&mut self, order: Order) -> bool {
        let room = self.flights.len() < QUEUE_MAX;
        if room {
            self.flights.insert(order.id(), Flight { order, begun: false });
        }
        room
    }

    pub fn revoke(&mut self, id: TransferId) -> bool {
        let waiting = self.flights.get(&id).is_some_and(|flight| !flight.begun);
        let flight = if waiting { self.flights.remove(&id) } else { None };
        if let Some(flight) = flight {
            self.revoked.insert(id, flight.order);
        }
        waiting
    }
}

impl Sim {
    /// A worker will look at this order.
    pub fn tier_order(&mut self, index: usize, id: TransferId) {
        let after = self.tier_takes(index);
        self.later(Node::Engine(index), after, Event::TierBegins(index, id));
    }

    pub fn tier_begins(&mut self, index: usize, id: TransferId) {
        let after = self.tier_takes(index);
        let writes_revoked = self.setup.mutation == Mutation::RevokedLoadWrites;
        let engine = self.engine(index);
        let workers = &mut engine.world().workers;
        let Some(flight) = workers.flights.get_mut(&id) else {
            if let Some(order) = workers.revoked.remove(&id)
                && writes_revoked
            {
                // All of it: whose the block is by now is not asked.
                let _ = carry_out(engine, &order, false, true);
            }
            return;
        };
        // A file is read and verified apart before anybody commits to its block.
        flight.begun = !matches!(flight.order, Order::Load { from: Source::Disk { .. }, .. });
        let order = flight.order.clone();
        if matches!(order, Order::Load { from: Source::Host(_), .. }) {
            begin_load(engine, &order);
        }
        self.later(Node::Engine(index), after, Event::TierEnds(index, id));
    }

    pub fn tier_ends(&mut self, index: usize, id: TransferId) {
        let (calm, believed) = (self.calm_now(), self.setup.mutation == Mutation::DamageBelieved);
        let engine = self.engine(index);
        let Some(setup) = engine.setup.tiers else { return };
        // It may have been revoked meanwhile.
        let Some(Flight { order, .. }) = engine.world().workers.flights.remove(&id) else { return };
        let fails = !calm && setup.fails_one_in > 0 && engine.dice.one_in(setup.fails_one_in);
        let fault = *engine.dice.pick(&[Fault::Io, Fault::Full, Fault::Slow, Fault::Broken]);
        let damages = !calm && setup.fails_one_in > 0 && engine.dice.one_in(setup.fails_one_in);
        let outcome = if fails { Err(fault) } else { carry_out(engine, &order, damages, believed) };
        let again = !calm && setup.repeats_one_in > 0 && engine.dice.one_in(setup.repeats_one_in);
        let rests = fails && fault != Fault::Broken && engine.dice.one_in(3) && !engine.world().workers.rests;
        engine.mail.offloads.push(Report::Ended(id, outcome));
        if again {
            engine.mail.offloads.push(Report::Ended(id, Err(Fault::Io)));
        }
        if rests {
            engine.world().workers.rests = true;
            engine.mail.offloads.push(Report::DiskRests);
            self.later(Node::Engine(index), 5 * SECOND, Event::TierBack(index));
        }
        self.counts.tier_failed += u64::from(fails);
        self.counts.tier_damaged += u64::from(outcome == Err(Fault::Corrupt));
        self.counts.tier_rested += u64::from(rests);
        if outcome.is_ok() {
            match order {
                Order::Store { .. } => self.counts.tier_stored += 1,
                Order::Load { .. } => self.counts.tier_loaded += 1,
                Order::Write { .. } | Order::Delete { .. } => {}
            }
        }
        self.poke(index);
    }

    pub fn tier_back(&mut self, index: usize) {
        let engine = self.engine(index);
        engine.world().workers.rests = false;
        engine.mail.offloads.push(Report::DiskIsBack);
        self.poke(index);
    }

    fn tier_takes(&mut self, index: usize) -> Micros {
        let engine = &mut self.engines[index];
        let (low, high) = engine.setup.tiers.map_or((1, 1), |setup| setup.takes);
        engine.dice.stretch(low, high)
    }
}

/// The first half of a slot's contents is in the block as soon as a worker has begun.
fn begin_load(engine: &mut Engine, order: &Order) {
    let Order::Load { from: Source::Host(slot), block, .. } = order else { return };
    let contents = engine.world().workers.slots[slot].clone();
    let mut memory = engine.memory.lock().unwrap_or_else(PoisonError::into_inner);
    let mut mixed = memory.block(*block).to_vec();
    mixed[..contents.len() / 2].copy_from_slice(&contents[..contents.len() / 2]);
    memory.write(*block, &mixed);
}

fn carry_out(engine: &mut Engine, order: &Order, damages: bool, believed: bool) -> Result<(), Fault> {
    match order {
        Order::Store { block, slot, .. } => {
            let contents =
                engine.memory.lock().unwrap_or_else(PoisonError::into_inner).block(*block).to_vec();
            engine.world().workers.slots.insert(*slot, contents);
        }
        Order::Load { from: Source::Host(slot), block, .. } => {
            let contents = engine.world().workers.slots[slot].clone();
            engine.memory.lock().unwrap_or_else(PoisonError::into_inner).write(*block, &contents);
        }
        Order::Load { hash, from: Source::Disk { keep }, block, .. } => {
            let File { contents, damaged } = engine.disk.get(hash).cloned().ok_or(Fault::Missing)?;
            if damaged && !believed {
                engine.disk.remove(hash);
                return Err(Fault::Corrupt);
            }
            engine.memory.lock().unwrap_or_else(PoisonError::into_inner).write(*block, &contents);
            if let Some(slot) = keep {
                engine.world().workers.slots.insert(*slot, contents);
            }
        }
        Order::Write { hash, slot, evict, .. } => {
            evict.iter().for_each(|gone| drop(engine.disk.remove(gone)));
            let mut contents = engine.world().workers.slots[slot].clone();
            if damages {
                contents[0] ^= 1 << 20;
            }
            engine.disk.insert(*hash, File { contents, damaged: damages });
        }
        Order::Delete { hashes, .. } => hashes.iter().for_each(|gone| drop(engine.disk.remove(gone))),
    }
    Ok(())
}
