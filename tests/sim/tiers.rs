//! The offload workers of one engine, under virtual time: slots that die with the process, files that do not, and
//! what can go wrong with either. What is stored while a request runs is checked when the copy is done: a block that
//! is being stored may not change.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use baton_connector::offload::TransferId;
use baton_engine::blocks::hash::BlockHash;
use baton_engine::offload::{Fault, HostSlot, Order, Report, Source};

use crate::device::Slot;
use crate::setup::{Mutation, SECOND};
use crate::sim::{Event, Sim};
use crate::words::Node;

/// Orders that wait; one more is refused.
const QUEUE_MAX: usize = 24;

/// What lies on an engine's disk, from one life to the next.
pub type Disk = Arc<Mutex<BTreeMap<BlockHash, Vec<Slot>>>>;

/// One order.
#[derive(Debug)]
struct Job {
    order: Order,
    /// Past the commitment point; what a store found in its block then.
    begun: Option<Vec<Slot>>,
}

/// What the workers of one life hold.
#[derive(Debug, Default)]
pub struct Workers {
    jobs: BTreeMap<TransferId, Job>,
    slots: BTreeMap<HostSlot, Vec<Slot>>,
    pub disk: Disk,
    /// Nothing is done on disk until then.
    rests: bool,
    /// Planted: what was revoked is done all the same.
    goes_on: bool,
    /// Orders that were taken and have no event yet.
    pub fresh: Vec<TransferId>,
}

impl Workers {
    pub fn new(disk: Disk, mutation: Mutation) -> Self {
        Self { disk, goes_on: mutation == Mutation::RevokedLoadWrites, ..Self::default() }
    }

    /// As the real queue: full is refused.
    pub fn take(&mut self, order: Order) -> bool {
        if self.jobs.len() >= QUEUE_MAX {
            return false;
        }
        self.fresh.push(order.id());
        self.jobs.insert(order.id(), Job { order, begun: None });
        true
    }

    /// True: nobody had begun, and nobody will.
    pub fn revoke(&mut self, id: TransferId) -> bool {
        let waits = self.jobs.get(&id).is_some_and(|job| job.begun.is_none());
        if waits && !self.goes_on {
            self.jobs.remove(&id);
        }
        waits
    }
}

impl Sim {
    /// Orders that the core has just given are begun after a while.
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
            Order::Store { block, .. } => {
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
        let disk_failed = matches!(outcome, Err(Fault::Full | Fault::Io));
        let mail = &mut self.engines[engine].mail.offloads;
        mail.push(Report::Ended(id, outcome));
        if !wide_awake && self.dice.percent(3) {
            // Told twice: counted and ignored.
            self.engines[engine].mail.offloads.push(Report::Ended(id, outcome));
        }
        let workers = &mut self.engine(engine).world().workers;
        if disk_failed && !workers.rests {
            workers.rests = true;
            self.engines[engine].mail.offloads.push(Report::DiskRests);
            let rest = self.dice.between(SECOND / 10, 5 * SECOND);
            self.later(Node::Engine(engine), rest, Event::DiskIsBack(engine));
        }
        self.poke(engine);
    }

    pub fn disk_is_back(&mut self, engine: usize) {
        self.engine(engine).world().workers.rests = false;
        self.engines[engine].mail.offloads.push(Report::DiskIsBack);
        self.poke(engine);
    }

    fn do_order(&mut self, engine: usize, job: &Job) -> Result<(), Fault> {
        let memory = Arc::clone(&self.engines[engine].memory);
        let memory = || memory.lock().unwrap_or_else(PoisonError::into_inner);
        match &job.order {
            Order::Store { block, slot, .. } => {
                let contents = memory().block(*block).to_vec();
                if job.begun.as_ref() != Some(&contents) {
                    self.wrong(format!("I3: block {} changed while it was being stored", block.0));
                }
                self.counts.stored += 1;
                self.engine(engine).world().workers.slots.insert(*slot, contents);
                Ok(())
            }
            Order::Load { hash, from, block, .. } => {
                let contents = match from {
                    Source::Host(slot) => self.engine(engine).world().workers.slots.get(slot).cloned(),
                    Source::Disk { .. } => {
                        self.disk_trouble(engine)?;
                        if self.setup.bad_disks && !self.calm_now() && self.dice.percent(6) {
                            // The checksum tells.
                            self.counts.disk_corrupt += 1;
                            let damaged = self.disk(engine, |disk| disk.remove(hash));
                            if self.mutated(Mutation::DamageBelieved)
                                && let Some(mut contents) = damaged
                            {
                                contents[0] ^= 1 << 40;
                                self.land(engine, *block, &contents);
                                return Ok(());
                            }
                            return Err(Fault::Corrupt);
                        }
                        self.disk(engine, |disk| disk.get(hash).cloned())
                    }
                };
                let contents = contents.ok_or(Fault::Missing)?;
                if let Source::Disk { keep: Some(slot) } = from {
                    self.engine(engine).world().workers.slots.insert(*slot, contents.clone());
                }
                self.counts.loaded += 1;
                self.land(engine, *block, &contents);
                Ok(())
            }
            Order::Write { hash, slot, evict, .. } => {
                self.disk_trouble(engine)?;
                let contents = self.engine(engine).world().workers.slots.get(slot).cloned();
                let contents = contents.ok_or(Fault::Broken)?;
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
            Order::Delete { hashes, .. } => {
                self.disk_trouble(engine)?;
                self.disk(engine, |disk| hashes.iter().for_each(|hash| drop(disk.remove(hash))));
                Ok(())
            }
        }
    }

    fn disk_trouble(&mut self, engine: usize) -> Result<(), Fault> {
        if self.engine(engine).world().workers.rests {
            return Err(Fault::Resting);
        }
        if !self.setup.bad_disks || self.calm_now() {
            return Ok(());
        }
        match self.dice.below(40) {
            0 => {
                self.counts.disk_full += 1;
                Err(Fault::Full)
            }
            1 => {
                self.counts.disk_error += 1;
                Err(Fault::Io)
            }
            2 => Err(Fault::Slow),
            _ => Ok(()),
        }
    }

    fn disk<T>(&mut self, engine: usize, with: impl FnOnce(&mut BTreeMap<BlockHash, Vec<Slot>>) -> T) -> T {
        let disk = Arc::clone(&self.engine(engine).world().workers.disk);
        let mut disk = disk.lock().unwrap_or_else(PoisonError::into_inner);
        with(&mut disk)
    }
}

/// What a new life finds in its directory, the oldest first.
pub fn found(disk: &Disk) -> Vec<BlockHash> {
    disk.lock().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
}
