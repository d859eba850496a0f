//! The threads that move blocks between the tiers. Their only decision is the order of a worker's start and a
//! revocation.
//!
//! | thread | does |
//! |---|---|
//! | `offload-copy` | copies between device and slots, also to a device's own memory; times out loads |
//! | `offload-load-n` | loads a file: reads and verifies, then copies to the device |
//! | `offload-disk` | writes slots to files, deletes files; probes a suspended disk |
//!
//! Invariants:
//! - Every accepted order is answered once, unless it was revoked or the workers were stopped.
//! - **The commitment point** of a store, a load from a slot and a write is their removal from the queue. A load from
//!   disk commits after its file has been read and verified. Both happen under the lock under which orders are
//!   revoked. A hanging disk therefore never holds a block of the device: its loads time out.
//! - Every queue is bounded; an order that finds its queue full is refused.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_connector::BlockId;
use baton_connector::offload::TransferId;

use super::disk::DiskTier;
use super::health::{DiskHealth, HealthChange};
use super::host_arena::HostArena;
use super::record::HEADER_BYTES;
use super::{HostSlot, LoadSource, OffloadFault, OffloadOrder, OffloadReport};
use crate::blocks::hash::BlockHash;

/// Limit of the orders in one queue. A context of 131,072 tokens in blocks of 16 is 8,192 loads.
pub const QUEUE_MAX: usize = 8_192;

/// Loading threads: two reads of a disk overlap.
const LOADERS: usize = 2;

/// Timeouts of the workers.
#[derive(Clone, Copy, Debug)]
pub struct WorkerTimeouts {
    /// Timeout of a load. Its block can be computed instead.
    pub load_timeout: Duration,
    /// How long a failing disk is suspended.
    pub disk_suspension: Duration,
}

impl Default for WorkerTimeouts {
    fn default() -> Self {
        Self { load_timeout: Duration::from_secs(5), disk_suspension: Duration::from_secs(30) }
    }
}

/// A copy between a block of the device and a slot.
#[derive(Clone, Copy)]
struct SlotCopy {
    block: BlockId,
    slot: HostSlot,
}

struct FileLoad {
    hash: BlockHash,
    slot: Option<HostSlot>,
    block: BlockId,
    since: Instant,
}

enum DiskJob {
    Write { hash: BlockHash, slot: HostSlot, evict: Vec<BlockHash> },
    Delete(Vec<BlockHash>),
}

struct WorkerQueues {
    stores: BTreeMap<TransferId, SlotCopy>,
    slot_loads: BTreeMap<TransferId, SlotCopy>,
    /// In the order of arrival, as all queues here: ids increase.
    file_loads: BTreeMap<TransferId, FileLoad>,
    disk: BTreeMap<TransferId, DiskJob>,
    /// Loads whose file is being read, which can still be revoked.
    reading: BTreeMap<TransferId, Instant>,
    health: DiskHealth,
    stop: bool,
}

struct WorkersShared {
    queues: Mutex<WorkerQueues>,
    to_copy: Condvar,
    to_load: Condvar,
    to_disk: Condvar,
    arena: HostArena,
    disk: Option<DiskTier>,
    timeouts: WorkerTimeouts,
    report: Box<dyn Fn(OffloadReport) + Send + Sync>,
}

/// See the module's documentation. When dropped, the threads end by themselves.
pub struct OffloadWorkers {
    shared: Arc<WorkersShared>,
    /// Disconnected when all threads have ended.
    ended: Mutex<Receiver<()>>,
}

impl OffloadWorkers {
    /// Starts the threads. `report` receives their reports and must not wait.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(
        arena: HostArena,
        disk: Option<DiskTier>,
        timeouts: WorkerTimeouts,
        report: impl Fn(OffloadReport) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let queues = WorkerQueues {
            stores: BTreeMap::new(),
            slot_loads: BTreeMap::new(),
            file_loads: BTreeMap::new(),
            disk: BTreeMap::new(),
            reading: BTreeMap::new(),
            health: DiskHealth::new(timeouts.disk_suspension),
            stop: false,
        };
        let has_disk = disk.is_some();
        let shared = Arc::new(WorkersShared {
            queues: Mutex::new(queues),
            to_copy: Condvar::new(),
            to_load: Condvar::new(),
            to_disk: Condvar::new(),
            arena,
            disk,
            timeouts,
            report: Box::new(report),
        });
        let (end, ended) = sync_channel(1);
        let workers = Self { shared: Arc::clone(&shared), ended: Mutex::new(ended) };
        spawn("offload-copy".into(), &shared, &end, WorkersShared::run_copies)?;
        for n in 0..LOADERS {
            spawn(format!("offload-load-{n}"), &shared, &end, WorkersShared::run_loads)?;
        }
        if has_disk {
            spawn("offload-disk".into(), &shared, &end, WorkersShared::run_disk)?;
        }
        Ok(workers)
    }

    /// Accepts an order, without waiting. False: it was refused, and no report comes.
    #[must_use]
    pub fn submit(&self, order: OffloadOrder) -> bool {
        let shared = &self.shared;
        let mut queues = shared.lock();
        if queues.stop {
            return false;
        }
        match order {
            OffloadOrder::Store { id, block, slot, .. } if queues.stores.len() < QUEUE_MAX => {
                queues.stores.insert(id, SlotCopy { block, slot });
                shared.to_copy.notify_one();
            }
            OffloadOrder::Load { id, from: LoadSource::Host(slot), block, .. }
                if queues.slot_loads.len() < QUEUE_MAX =>
            {
                queues.slot_loads.insert(id, SlotCopy { block, slot });
                shared.to_copy.notify_one();
            }
            OffloadOrder::Load { id, hash, from: LoadSource::Disk { slot }, block }
                if queues.file_loads.len() < QUEUE_MAX =>
            {
                queues.file_loads.insert(id, FileLoad { hash, slot, block, since: Instant::now() });
                shared.to_load.notify_one();
                // The copy thread watches the timeout.
                shared.to_copy.notify_one();
            }
            OffloadOrder::Write { id, hash, slot, evict }
                if queues.disk.len() < QUEUE_MAX && shared.disk.is_some() =>
            {
                queues.disk.insert(id, DiskJob::Write { hash, slot, evict });
                shared.to_disk.notify_one();
            }
            OffloadOrder::Delete { id, hashes } if queues.disk.len() < QUEUE_MAX && shared.disk.is_some() => {
                queues.disk.insert(id, DiskJob::Delete(hashes));
                shared.to_disk.notify_one();
            }
            OffloadOrder::Store { .. }
            | OffloadOrder::Load { .. }
            | OffloadOrder::Write { .. }
            | OffloadOrder::Delete { .. } => {
                return false;
            }
        }
        true
    }

    /// Revokes a store or a load. True: no worker has begun, none will, and no report comes.
    #[must_use]
    pub fn revoke(&self, id: TransferId) -> bool {
        let mut queues = self.shared.lock();
        queues.stores.remove(&id).is_some()
            || queues.slot_loads.remove(&id).is_some()
            || queues.file_loads.remove(&id).is_some()
            || queues.reading.remove(&id).is_some()
    }

    /// Stops the threads and waits until they have ended, at most until `deadline`. A thread that hangs in a system
    /// call is left behind.
    pub fn shutdown(&self, deadline: Instant) {
        self.stop();
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        if ended.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(event = "offload_thread_not_ended", "offload thread did not end in time");
        }
    }

    fn stop(&self) {
        self.shared.lock().stop = true;
        self.shared.to_copy.notify_all();
        self.shared.to_load.notify_all();
        self.shared.to_disk.notify_all();
    }
}

impl Drop for OffloadWorkers {
    fn drop(&mut self) {
        self.stop();
    }
}

fn spawn(
    name: String,
    shared: &Arc<WorkersShared>,
    end: &SyncSender<()>,
    run: impl Fn(&WorkersShared) + Send + 'static,
) -> std::io::Result<()> {
    let (shared, end) = (Arc::clone(shared), end.clone());
    std::thread::Builder::new().name(name).spawn(move || {
        run(&shared);
        drop(end);
    })?;
    Ok(())
}

/// The outcome of a job, also if it panics: a worker outlives its jobs, and every order is answered.
fn guarded(job: impl FnOnce() -> Result<(), OffloadFault>) -> Result<(), OffloadFault> {
    catch_unwind(AssertUnwindSafe(job)).unwrap_or(Err(OffloadFault::Broken))
}

impl WorkersShared {
    fn lock(&self) -> MutexGuard<'_, WorkerQueues> {
        // Queues hold whole values: a panic in another thread leaves none half-written.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, report: OffloadReport) {
        (self.report)(report);
    }

    /// The loop of `offload-copy`.
    fn run_copies(&self) {
        let mut queues = self.lock();
        while !queues.stop {
            let (late, change) = self.take_late(&mut queues, Instant::now());
            // Loads first: a request waits for a load, and none for a store.
            let load = queues.slot_loads.pop_first();
            let store = if load.is_none() { queues.stores.pop_first() } else { None };
            if late.is_empty() && load.is_none() && store.is_none() {
                let oldest = queues.file_loads.values().next().map(|job| job.since);
                let oldest = oldest.into_iter().chain(queues.reading.values().copied()).min();
                queues = match oldest {
                    None => self.to_copy.wait(queues).unwrap_or_else(PoisonError::into_inner),
                    Some(since) => {
                        let left =
                            (since + self.timeouts.load_timeout).saturating_duration_since(Instant::now());
                        self.to_copy.wait_timeout(queues, left).unwrap_or_else(PoisonError::into_inner).0
                    }
                };
                continue;
            }
            drop(queues);
            for id in late {
                self.report(OffloadReport::Ended(id, Err(OffloadFault::Slow)));
            }
            self.report_health(change);
            if let Some((id, SlotCopy { block, slot })) = load {
                let outcome = guarded(|| self.arena.load(slot, block));
                self.report(OffloadReport::Ended(id, outcome));
            }
            if let Some((id, SlotCopy { block, slot })) = store {
                let outcome = guarded(|| self.arena.store(block, slot));
                self.report(OffloadReport::Ended(id, outcome));
            }
            queues = self.lock();
        }
    }

    /// Removes the loads that have timed out before a worker committed to them.
    fn take_late(&self, queues: &mut WorkerQueues, now: Instant) -> (Vec<TransferId>, HealthChange) {
        let late = |since: Instant| now.saturating_duration_since(since) >= self.timeouts.load_timeout;
        let waiting = queues.file_loads.iter().take_while(|(_, job)| late(job.since)).map(|(&id, _)| id);
        let reading = queues.reading.iter().filter(|(_, since)| late(**since)).map(|(&id, _)| id);
        let (waiting, reading): (Vec<_>, Vec<_>) = (waiting.collect(), reading.collect());
        let mut change = HealthChange::None;
        for id in &reading {
            queues.reading.remove(id);
            if queues.health.record(Err(OffloadFault::Slow), now) == HealthChange::Suspended {
                change = HealthChange::Suspended;
            }
        }
        for id in &waiting {
            queues.file_loads.remove(id);
        }
        ([waiting, reading].concat(), change)
    }

    /// The loop of an `offload-load` thread.
    fn run_loads(&self) {
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
            file = self.disk.as_ref().ok_or(OffloadFault::Missing)?.read(job.hash)?;
            Ok(())
        });
        let mut queues = self.lock();
        let change = queues.health.record(read, Instant::now());
        let committed = queues.reading.remove(&id).is_some();
        drop(queues);
        self.report_health(change);
        if !committed {
            // Revoked or timed out meanwhile: the block and the slot may have other users.
            return;
        }
        let outcome = read.and_then(|()| {
            guarded(|| {
                let block = &file[HEADER_BYTES..];
                self.arena.write_block(block, job.block)?;
                if let Some(slot) = job.slot {
                    self.arena.write_slot(block, slot);
                }
                Ok(())
            })
        });
        self.report(OffloadReport::Ended(id, outcome));
    }

    /// The loop of `offload-disk`.
    fn run_disk(&self) {
        let disk = self.disk.as_ref().expect("it is started with a disk only");
        let mut queues = self.lock();
        while !queues.stop {
            let suspended_until = queues.health.suspended_until();
            let (now, job) = (Instant::now(), queues.disk.pop_first());
            match (job, suspended_until) {
                (Some((id, _)), Some(_)) => {
                    drop(queues);
                    self.report(OffloadReport::Ended(id, Err(OffloadFault::Suspended)));
                }
                (Some((id, job)), None) => {
                    drop(queues);
                    let outcome = guarded(|| self.carry_out(disk, job));
                    let change = self.lock().health.record(outcome, Instant::now());
                    self.report(OffloadReport::Ended(id, outcome));
                    self.report_health(change);
                }
                (None, Some(until)) if until <= now => {
                    drop(queues);
                    let outcome = guarded(|| disk.probe());
                    if self.lock().health.record_probe(outcome, Instant::now()) {
                        tracing::info!(event = "disk_tier_recovered", "disk tier recovered");
                        self.report(OffloadReport::DiskResumed);
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

    fn carry_out(&self, disk: &DiskTier, job: DiskJob) -> Result<(), OffloadFault> {
        match job {
            DiskJob::Write { hash, slot, evict } => {
                disk.delete(&evict)?;
                disk.write(hash, &self.arena.bytes(slot))
            }
            DiskJob::Delete(hashes) => disk.delete(&hashes),
        }
    }

    fn report_health(&self, change: HealthChange) {
        if change == HealthChange::Suspended {
            tracing::warn!(
                event = "disk_tier_suspended",
                seconds = self.timeouts.disk_suspension.as_secs_f64(),
                "disk tier suspended after failures"
            );
            self.report(OffloadReport::DiskSuspended);
            self.to_disk.notify_one();
        }
    }
}

#[cfg(test)]
mod tests;
