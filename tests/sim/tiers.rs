//! The offload workers of one engine in virtual time: slots that die with the process, files that do not, and the
//! faults of both. The end of a store checks the block's content, because a block that is being stored may not change.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use baton_connector::offload::TransferId;
use baton_engine::blocks::hash::BlockHash;
use baton_engine::offload::{HostSlot, LoadSource, OffloadFault, OffloadOrder, OffloadReport};

use crate::device::Slot;
use crate::messages::Node;
use crate::setup::{Mutation, SECOND};
use crate::sim::{Event, Sim};

/// Maximum waiting orders. The queue refuses one more.
const QUEUE_MAX: usize = 24;

/// The contents of an engine's disk, kept between processes.
pub type Disk = Arc<Mutex<BTreeMap<BlockHash, Vec<Slot>>>>;

/// One order.
#[derive(Debug)]
struct OffloadJob {
    order: OffloadOrder,
    /// Set past the commitment point. For a store, the block's content at that point.
    begun: Option<Vec<Slot>>,
}

/// The workers of one process.
#[derive(Debug, Default)]
pub struct OffloadWorkers {
    jobs: BTreeMap<TransferId, OffloadJob>,
    slots: BTreeMap<HostSlot, Vec<Slot>>,
    pub disk: Disk,
    /// The time until which nothing is done on disk.
    rests: bool,
    /// Planted: the worker carries out a revoked order.
    goes_on: bool,
    /// Orders that were accepted and have no event yet.
    pub fresh: Vec<TransferId>,
}

impl OffloadWorkers {
    pub fn new(disk: Disk, mutation: Mutation) -> Self {
        Self { disk, goes_on: mutation == Mutation::RevokedLoadWrites, ..Self::default() }
    }

    /// Accepts an order, or refuses it if the queue is full, as the real queue does.
    pub fn take(&mut self, order: OffloadOrder) -> bool {
        if self.jobs.len() >= QUEUE_MAX {
            return false;
        }
        self.fresh.push(order.id());
        self.jobs.insert(order.id(), OffloadJob { order, begun: None });
        true
    }

    /// Revokes an order. Returns true if no worker has begun it.
    pub fn revoke(&mut self, id: TransferId) -> bool {
        let waits = self.jobs.get(&id).is_some_and(|job| job.begun.is_none());
        if waits && !self.goes_on {
            self.jobs.remove(&id);
        }
        waits
    }
}

impl Sim {
    /// Schedules the start of the core's new orders.
    pub fn schedule_orders(&mut self, engine: usize) {
        let fresh = std::mem::take(&mut self.engine(engine).world().workers.fresh);
        for id in fresh {
            let longest = if self.dice_slow() { 3 * SECOND } else { 20_000 };
            let wait = self.dice.stretch(10, longest);
            self.later(Node::Engine(engine), wait, Event::OrderBegins(engine, id));
        }
    }

    fn dice_slow(&mut self) -> bool {
        !self.setup.calm && self.setup.bad_disks && self.dice.percent(20)
    }

    pub fn order_begins(&mut self, engine: usize, id: TransferId) {
        let memory = Arc::clone(&self.engines[engine].memory);
        let workers = &mut self.engine(engine).world().workers;
        let Some(job) = workers.jobs.get_mut(&id) else { return };
        job.begun = Some(match &job.order {
            OffloadOrder::Store { block, .. } => {
                memory.lock().unwrap_or_else(PoisonError::into_inner).block(*block).to_vec()
            }
            _ => Vec::new(),
        });
        let takes = self.dice.stretch(10, 50_000);
        self.later(Node::Engine(engine), takes, Event::OrderEnds(engine, id));
    }

    pub fn order_ends(&mut self, engine: usize, id: TransferId) {
        let Some(job) = self.engine(engine).world().workers.jobs.remove(&id) else { return };
        let outcome = self.do_order(engine, &job);
        let wide_awake = self.calm_now() || !self.setup.bad_disks;
        let disk_failed = matches!(outcome, Err(OffloadFault::Full | OffloadFault::Io));
        let mail = &mut self.engines[engine].mail.offloads;
        mail.push(OffloadReport::Ended(id, outcome));
        if !wide_awake && self.dice.percent(3) {
            // A second report of the same end, which the core counts and ignores.
            self.engines[engine].mail.offloads.push(OffloadReport::Ended(id, outcome));
        }
        let workers = &mut self.engine(engine).world().workers;
        if disk_failed && !workers.rests {
            workers.rests = true;
            self.engines[engine].mail.offloads.push(OffloadReport::DiskSuspended);
            let rest = self.dice.between(SECOND / 10, 5 * SECOND);
            self.later(Node::Engine(engine), rest, Event::DiskIsBack(engine));
        }
        self.poke(engine);
    }

    pub fn disk_is_back(&mut self, engine: usize) {
        self.engine(engine).world().workers.rests = false;
        self.engines[engine].mail.offloads.push(OffloadReport::DiskResumed);
        self.poke(engine);
    }

    fn do_order(&mut self, engine: usize, job: &OffloadJob) -> Result<(), OffloadFault> {
        let memory = Arc::clone(&self.engines[engine].memory);
        let memory = || memory.lock().unwrap_or_else(PoisonError::into_inner);
        match &job.order {
            OffloadOrder::Store { block, slot, .. } => {
                let contents = memory().block(*block).to_vec();
                if job.begun.as_ref() != Some(&contents) {
                    self.wrong(format!("I3: block {} changed while it was being stored", block.0));
                }
                self.counts.stored += 1;
                self.engine(engine).world().workers.slots.insert(*slot, contents);
                Ok(())
            }
            OffloadOrder::Load { hash, from, block, .. } => {
                let contents = match from {
                    LoadSource::Host(slot) => self.engine(engine).world().workers.slots.get(slot).cloned(),
                    LoadSource::Disk { .. } => {
                        self.disk_trouble(engine)?;
                        if self.setup.bad_disks && !self.calm_now() && self.dice.percent(6) {
                            // The checksum detects the damage.
                            self.counts.disk_corrupt += 1;
                            let damaged = self.disk(engine, |disk| disk.remove(hash));
                            if self.mutated(Mutation::DamageBelieved)
                                && let Some(mut contents) = damaged
                            {
                                contents[0] ^= 1 << 40;
                                self.land(engine, *block, &contents);
                                return Ok(());
                            }
                            return Err(OffloadFault::Corrupt);
                        }
                        self.disk(engine, |disk| disk.get(hash).cloned())
                    }
                };
                let contents = contents.ok_or(OffloadFault::Missing)?;
                if let LoadSource::Disk { slot: Some(slot) } = from {
                    self.engine(engine).world().workers.slots.insert(*slot, contents.clone());
                }
                self.counts.loaded += 1;
                self.land(engine, *block, &contents);
                Ok(())
            }
            OffloadOrder::Write { hash, slot, evict, .. } => {
                self.disk_trouble(engine)?;
                let contents = self.engine(engine).world().workers.slots.get(slot).cloned();
                let contents = contents.ok_or(OffloadFault::Broken)?;
                let bound = self.engines[engine].setup.disk_blocks;
                let files = self.disk(engine, |disk| {
                    evict.iter().for_each(|hash| drop(disk.remove(hash)));
                    disk.insert(*hash, contents);
                    disk.len()
                });
                if files > bound {
                    self.wrong(format!("I10: {files} files where {bound} are allowed"));
                }
                Ok(())
            }
            OffloadOrder::Delete { hashes, .. } => {
                self.disk_trouble(engine)?;
                self.disk(engine, |disk| hashes.iter().for_each(|hash| drop(disk.remove(hash))));
                Ok(())
            }
        }
    }

    fn disk_trouble(&mut self, engine: usize) -> Result<(), OffloadFault> {
        if self.engine(engine).world().workers.rests {
            return Err(OffloadFault::Suspended);
        }
        if !self.setup.bad_disks || self.calm_now() {
            return Ok(());
        }
        match self.dice.below(40) {
            0 => {
                self.counts.disk_full += 1;
                Err(OffloadFault::Full)
            }
            1 => {
                self.counts.disk_error += 1;
                Err(OffloadFault::Io)
            }
            2 => Err(OffloadFault::Slow),
            _ => Ok(()),
        }
    }

    fn disk<T>(&mut self, engine: usize, with: impl FnOnce(&mut BTreeMap<BlockHash, Vec<Slot>>) -> T) -> T {
        let disk = Arc::clone(&self.engine(engine).world().workers.disk);
        let mut disk = disk.lock().unwrap_or_else(PoisonError::into_inner);
        with(&mut disk)
    }
}

/// The files that a new process finds in its directory, the oldest first.
pub fn found(disk: &Disk) -> Vec<BlockHash> {
    disk.lock().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
}
