//! The threads that move blocks between the tiers. They decide nothing but one thing: who was first, a worker or the
//! order's revocation.
//!
//! | thread | does |
//! |---|---|
//! | `offload-copy` | between device and slots, a device's own memory too; also gives up loads that take too long |
//! | `offload-load-n` | file to device: read and verified apart, then copied, to a device's own memory too |
//! | `offload-disk` | slot to file, deletions; tries a failing disk out before it is used again |
//!
//! Invariants:
//! - Every order that was taken is answered once, unless it was revoked or the workers were stopped.
//! - **The commitment point** of a store, a load from a slot and a write is their leaving the queue; that of a load from
//!   disk is after the file has been read and verified. Both happen under the one lock under which orders are revoked.
//!   A hanging disk therefore never holds a block of the device: its loads are given up.
//! - Every queue is bounded; an order that finds its queue full is refused.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::BlockId;
use baton_connector::offload::TransferId;

use super::arena::Arena;
use super::disk::DiskTier;
use super::health::{Health, Turn};
use super::record::HEADER_BYTES;
use super::{Fault, HostSlot, Order, Report, Source};
use crate::blocks::hash::BlockHash;

/// Orders that wait in one queue. A context of 131,072 tokens in blocks of 16 is 8,192 loads.
pub const QUEUE_MAX: usize = 8_192;

/// Threads that load: two reads of a disk overlap.
const LOADERS: usize = 2;

/// Times of the workers.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// After so long a load is given up: its block can be computed meanwhile.
    pub load_patience: Duration,
    /// How long a disk that fails is left alone.
    pub disk_rest: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { load_patience: Duration::from_secs(5), disk_rest: Duration::from_secs(30) }
    }
}

/// A copy between a block of the device and a slot.
#[derive(Clone, Copy)]
struct Pair {
    block: BlockId,
    slot: HostSlot,
}

struct FileLoad {
    hash: BlockHash,
    keep: Option<HostSlot>,
    block: BlockId,
    since: Instant,
}

enum DiskJob {
    Write { hash: BlockHash, slot: HostSlot, evict: Vec<BlockHash> },
    Delete(Vec<BlockHash>),
}

struct Queues {
    stores: BTreeMap<TransferId, Pair>,
    slot_loads: BTreeMap<TransferId, Pair>,
    /// In the order in which they came, as everywhere here: names count upwards.
    file_loads: BTreeMap<TransferId, FileLoad>,
    disk: BTreeMap<TransferId, DiskJob>,
    /// Loads whose file is being read: they can still be revoked.
    reading: BTreeMap<TransferId, Instant>,
    health: Health,
    stop: bool,
}

struct Shared {
    queues: Mutex<Queues>,
    to_copy: Condvar,
    to_load: Condvar,
    to_disk: Condvar,
    arena: Arena,
    disk: Option<DiskTier>,
    pace: Pace,
    tell: Box<dyn Fn(Report) + Send + Sync>,
}

/// See the module's documentation. Dropped, the threads end by themselves.
pub struct Workers {
    shared: Arc<Shared>,
    /// Disconnected when all threads have ended.
    ended: Mutex<Receiver<()>>,
}

impl Workers {
    /// Starts the threads; `tell` hears their reports and must not wait.
    ///
    /// # Errors
    /// When a thread cannot be had.
    pub fn start(
        arena: Arena,
        disk: Option<DiskTier>,
        pace: Pace,
        tell: impl Fn(Report) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let queues = Queues {
            stores: BTreeMap::new(),
            slot_loads: BTreeMap::new(),
            file_loads: BTreeMap::new(),
            disk: BTreeMap::new(),
            reading: BTreeMap::new(),
            health: Health::new(pace.disk_rest),
            stop: false,
        };
        let has_disk = disk.is_some();
        let shared = Arc::new(Shared {
            queues: Mutex::new(queues),
            to_copy: Condvar::new(),
            to_load: Condvar::new(),
            to_disk: Condvar::new(),
            arena,
            disk,
            pace,
            tell: Box::new(tell),
        });
        let (end, ended) = sync_channel(1);
        let workers = Self { shared: Arc::clone(&shared), ended: Mutex::new(ended) };
        spawn("offload-copy".into(), &shared, &end, Shared::copy_on)?;
        for n in 0..LOADERS {
            spawn(format!("offload-load-{n}"), &shared, &end, Shared::load_on)?;
        }
        if has_disk {
            spawn("offload-disk".into(), &shared, &end, Shared::write_on)?;
        }
        Ok(workers)
    }

    /// Takes an order, without waiting. False: it was refused, and nothing will come of it.
    #[must_use]
    pub fn order(&self, order: Order) -> bool {
        let shared = &self.shared;
        let mut queues = shared.lock();
        if queues.stop {
            return false;
        }
        match order {
            Order::Store { id, block, slot, .. } if queues.stores.len() < QUEUE_MAX => {
                queues.stores.insert(id, Pair { block, slot });
                shared.to_copy.notify_one();
            }
            Order::Load { id, from: Source::Host(slot), block, .. }
                if queues.slot_loads.len() < QUEUE_MAX =>
            {
                queues.slot_loads.insert(id, Pair { block, slot });
                shared.to_copy.notify_one();
            }
            Order::Load { id, hash, from: Source::Disk { keep }, block }
                if queues.file_loads.len() < QUEUE_MAX =>
            {
                queues.file_loads.insert(id, FileLoad { hash, keep, block, since: Instant::now() });
                shared.to_load.notify_one();
                // It watches how long this takes.
                shared.to_copy.notify_one();
            }
            Order::Write { id, hash, slot, evict }
                if queues.disk.len() < QUEUE_MAX && shared.disk.is_some() =>
            {
                queues.disk.insert(id, DiskJob::Write { hash, slot, evict });
                shared.to_disk.notify_one();
            }
            Order::Delete { id, hashes } if queues.disk.len() < QUEUE_MAX && shared.disk.is_some() => {
                queues.disk.insert(id, DiskJob::Delete(hashes));
                shared.to_disk.notify_one();
            }
            Order::Store { .. } | Order::Load { .. } | Order::Write { .. } | Order::Delete { .. } => {
                return false;
            }
        }
        true
    }

    /// Takes a store or a load back. True: no worker has begun, and none will; nothing more is reported of it.
    #[must_use]
    pub fn revoke(&self, id: TransferId) -> bool {
        let mut queues = self.shared.lock();
        queues.stores.remove(&id).is_some()
            || queues.slot_loads.remove(&id).is_some()
            || queues.file_loads.remove(&id).is_some()
            || queues.reading.remove(&id).is_some()
    }

    /// Stops the threads and waits until they have ended, at most until `deadline`: one that hangs in a system call is
    /// left behind.
    pub fn shutdown(&self, deadline: Instant) {
        self.stop();
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        if ended.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("offload thread did not end in time");
        }
    }

    fn stop(&self) {
        self.shared.lock().stop = true;
        self.shared.to_copy.notify_all();
        self.shared.to_load.notify_all();
        self.shared.to_disk.notify_all();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop();
    }
}

fn spawn(
    name: String,
    shared: &Arc<Shared>,
    end: &SyncSender<()>,
    run: impl Fn(&Shared) + Send + 'static,
) -> std::io::Result<()> {
    let (shared, end) = (Arc::clone(shared), end.clone());
    std::thread::Builder::new().name(name).spawn(move || {
        run(&shared);
        drop(end);
    })?;
    Ok(())
}

/// What a job does, if it does not panic: a worker outlives its jobs, and every order is answered.
fn guarded(job: impl FnOnce() -> Result<(), Fault>) -> Result<(), Fault> {
    catch_unwind(AssertUnwindSafe(job)).unwrap_or(Err(Fault::Broken))
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        // Queues hold whole values: a panic elsewhere leaves nothing half-written.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, report: Report) {
        (self.tell)(report);
    }

    /// The life of `offload-copy`.
    fn copy_on(&self) {
        let mut queues = self.lock();
        while !queues.stop {
            let (late, turn) = self.give_up_late(&mut queues, Instant::now());
            // A request waits for a load; nobody waits for a store.
            let load = queues.slot_loads.pop_first();
            let store = if load.is_none() { queues.stores.pop_first() } else { None };
            if late.is_empty() && load.is_none() && store.is_none() {
                let oldest = queues.file_loads.values().next().map(|job| job.since);
                let oldest = oldest.into_iter().chain(queues.reading.values().copied()).min();
                queues = match oldest {
                    None => self.to_copy.wait(queues).unwrap_or_else(PoisonError::into_inner),
                    Some(since) => {
                        let left =
                            (since + self.pace.load_patience).saturating_duration_since(Instant::now());
                        self.to_copy.wait_timeout(queues, left).unwrap_or_else(PoisonError::into_inner).0
                    }
                };
                continue;
            }
            drop(queues);
            for id in late {
                self.tell(Report::Ended(id, Err(Fault::Slow)));
            }
            self.tell_turn(turn);
            if let Some((id, Pair { block, slot })) = load {
                let outcome = guarded(|| self.arena.load(slot, block));
                self.tell(Report::Ended(id, outcome));
            }
            if let Some((id, Pair { block, slot })) = store {
                let outcome = guarded(|| self.arena.store(block, slot));
                self.tell(Report::Ended(id, outcome));
            }
            queues = self.lock();
        }
    }

    /// Loads that no worker has committed to in time.
    fn give_up_late(&self, queues: &mut Queues, now: Instant) -> (Vec<TransferId>, Turn) {
        let late = |since: Instant| now.saturating_duration_since(since) >= self.pace.load_patience;
        let waiting = queues.file_loads.iter().take_while(|(_, job)| late(job.since)).map(|(&id, _)| id);
        let reading = queues.reading.iter().filter(|(_, since)| late(**since)).map(|(&id, _)| id);
        let (waiting, reading): (Vec<_>, Vec<_>) = (waiting.collect(), reading.collect());
        let mut turn = Turn::None;
        for id in &reading {
            queues.reading.remove(id);
            if queues.health.heard(Err(Fault::Slow), now) == Turn::Rests {
                turn = Turn::Rests;
            }
        }
        for id in &waiting {
            queues.file_loads.remove(id);
        }
        ([waiting, reading].concat(), turn)
    }

    /// The life of an `offload-load` thread.
    fn load_on(&self) {
        let mut queues = self.lock();
        while !queues.stop {
            let Some((id, job)) = queues.file_loads.pop_first() else {
                queues = self.to_load.wait(queues).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queues.reading.insert(id, job.since);
            drop(queues);
            self.load_file(id, &job);
            queues = self.lock();
        }
    }

    fn load_file(&self, id: TransferId, job: &FileLoad) {
        let mut file = Vec::new();
        let read = guarded(|| {
            file = self.disk.as_ref().ok_or(Fault::Missing)?.read(job.hash)?;
            Ok(())
        });
        let mut queues = self.lock();
        let turn = queues.health.heard(read, Instant::now());
        let committed = queues.reading.remove(&id).is_some();
        drop(queues);
        self.tell_turn(turn);
        if !committed {
            // Revoked or given up meanwhile: the blocks are somebody else's.
            return;
        }
        let outcome = read.and_then(|()| {
            guarded(|| {
                let block = &file[HEADER_BYTES..];
                self.arena.land(block, job.block)?;
                if let Some(slot) = job.keep {
                    self.arena.keep(block, slot);
                }
                Ok(())
            })
        });
        self.tell(Report::Ended(id, outcome));
    }

    /// The life of `offload-disk`.
    fn write_on(&self) {
        let disk = self.disk.as_ref().expect("it is started with a disk only");
        let mut queues = self.lock();
        while !queues.stop {
            let rests_until = queues.health.rests_until();
            let (now, job) = (Instant::now(), queues.disk.pop_first());
            match (job, rests_until) {
                (Some((id, _)), Some(_)) => {
                    drop(queues);
                    self.tell(Report::Ended(id, Err(Fault::Resting)));
                }
                (Some((id, job)), None) => {
                    drop(queues);
                    let outcome = guarded(|| self.carry_out(disk, job));
                    let turn = self.lock().health.heard(outcome, Instant::now());
                    self.tell(Report::Ended(id, outcome));
                    self.tell_turn(turn);
                }
                (None, Some(until)) if until <= now => {
                    drop(queues);
                    let outcome = guarded(|| disk.try_out());
                    if self.lock().health.tried(outcome, Instant::now()) {
                        tracing::info!("disk tier recovered");
                        self.tell(Report::DiskIsBack);
                    }
                }
                (None, Some(until)) => {
                    let left = until.saturating_duration_since(now);
                    let waited = self.to_disk.wait_timeout(queues, left);
                    drop(waited.unwrap_or_else(PoisonError::into_inner));
                }
                (None, None) => drop(self.to_disk.wait(queues).unwrap_or_else(PoisonError::into_inner)),
            }
            queues = self.lock();
        }
    }

    fn carry_out(&self, disk: &DiskTier, job: DiskJob) -> Result<(), Fault> {
        match job {
            DiskJob::Write { hash, slot, evict } => {
                disk.delete(&evict)?;
                disk.write(hash, &self.arena.bytes(slot))
            }
            DiskJob::Delete(hashes) => disk.delete(&hashes),
        }
    }

    fn tell_turn(&self, turn: Turn) {
        if turn == Turn::Rests {
            tracing::warn!(seconds = self.pace.disk_rest.as_secs_f64(), "disk tier suspended after failures");
            self.tell(Report::DiskRests);
            self.to_disk.notify_one();
        }
    }
}

#[cfg(test)]
mod tests;
