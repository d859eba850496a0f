//! The KV pool of a device, for transports and tiers. Transports land blocks in the device's memory, let other engines
//! read it, or use its mirror. An engine without handoffs has no mirror, and only tiers use the pool. All calls come
//! from their threads, concurrently with the executor's steps.
//!
//! Three rules keep the data correct:
//! - No call here touches a block that the executor may write: copied blocks are leased, and target blocks are
//!   reserved.
//! - The mirror's bytes of a leased block are read only after [`SharedKvPool::download`] has copied them.
//! - A lease can end during a copy to the mirror, and its block can then belong to another sequence. Therefore nothing
//!   is written to the mirror before that copy is over: neither landing bytes ([`SharedKvPool::wait_for_downloads`])
//!   nor the executor's own copies (`SharedKvPool::begin_sync`).
//!
//! A transport that has landed blocks in the mirror uploads them ([`SharedKvPool::upload`]) before it reports them as
//! landed, while they are still reserved. No step waits for the upload. Tiers do not use the mirror: they copy between
//! their memory and the device directly ([`SharedKvPool::store`], [`SharedKvPool::load`]), and the block is held until
//! the copy is over.
//!
//! A copy that is not over in time ([`DeviceError::Hung`]) may still write. After failed work of the executor, it is
//! unknown which side has which bytes. The device is therefore disabled before a waiting thread gets the error. From
//! then on the executor computes nothing and publishes nothing ([`SharedKvPool::usable`]).

use std::fmt::Debug;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use metrics::Counter;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector_device::{CopyRun, DevicePool, ImportedPool, Offer, PoolExport};
use baton_connector_nixl::api::Memory;

use super::device::{DeviceError, HostRun, PoolMemory};
use super::mirror_map::MirrorMap;

/// See the module's documentation.
#[derive(Debug)]
pub struct SharedKvPool {
    memory: Arc<dyn PoolMemory>,
    block_bytes: usize,
    /// The mirror, if there is one.
    region: Option<Region>,
    mirror: Mutex<MirrorMap>,
    /// Locked during copies for readers of the mirror, so that a second reader of a block finds it copied.
    copying: Mutex<()>,
    /// Notified when a copy to the mirror is over.
    copied: Condvar,
    /// Longest wait for the end of such a copy.
    copy_timeout: Duration,
    failure: DeviceFailure,
    /// The engine is shutting down: no thread waits for copies any more.
    closed: AtomicBool,
    counters: OnceLock<CopyCounters>,
}

/// Longest wait for another thread's copy. A copy ends by itself after one minute, or after two if it fails.
const COPY_TIMEOUT: Duration = Duration::from_secs(150);

/// Counters of blocks that were copied.
#[derive(Debug)]
pub struct CopyCounters {
    /// From the device to the mirror.
    pub to_host: Counter,
    /// From the mirror to the device, by the transport that landed them.
    pub to_device: Counter,
    /// The same by the executor, while a step or a lease waited.
    pub in_step: Counter,
}

/// Why the device is disabled.
#[derive(Clone, Debug, Default)]
struct DeviceFailure(Arc<OnceLock<DeviceError>>);

impl DeviceFailure {
    /// Records a failure of any work.
    fn record(&self, error: &DeviceError) {
        // The first failure is the reason.
        let _ = self.0.set(error.clone());
    }

    /// Records a failure of a copy by another thread. A copy that failed and is over concerns its reader only.
    fn record_hung(&self, error: &DeviceError) {
        if matches!(error, DeviceError::Hung { .. }) {
            self.record(error);
        }
    }

    fn usable(&self) -> Result<(), DeviceError> {
        self.0.get().cloned().map_or(Ok(()), Err)
    }
}

/// Blocks whose sides differ, found by [`SharedKvPool::begin_sync`].
#[derive(Debug)]
pub(super) struct SyncPlan {
    /// All blocks whose sides are the same after the copies.
    pub(super) blocks: Vec<BlockId>,
    /// Blocks to copy to the mirror. No other thread copies them there before [`SharedKvPool::end_sync`].
    pub(super) downloads: Vec<BlockId>,
    /// Blocks to copy to the device.
    pub(super) uploads: Vec<BlockId>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedKvPool {
    /// Combines a pool's memory and its mirror, which have the same size.
    #[must_use]
    pub fn new(memory: Arc<dyn PoolMemory>, region: Region) -> Self {
        let (blocks, block_bytes) = (region.blocks(), region.block_bytes());
        Self { region: Some(region), ..Self::without_mirror(memory, blocks, block_bytes) }
    }

    /// The memory of a pool of `blocks` blocks of `block_bytes` without a mirror, for tiers only.
    #[must_use]
    pub fn without_mirror(memory: Arc<dyn PoolMemory>, blocks: usize, block_bytes: usize) -> Self {
        let mirror = Mutex::new(MirrorMap::new(blocks));
        let (copying, copied, failure) = (Mutex::new(()), Condvar::new(), DeviceFailure::default());
        let (closed, counters) = (AtomicBool::new(false), OnceLock::new());
        Self {
            memory,
            block_bytes,
            region: None,
            mirror,
            copying,
            copied,
            copy_timeout: COPY_TIMEOUT,
            failure,
            closed,
            counters,
        }
    }

    /// Sets the longest wait for another thread's copy.
    #[cfg(test)]
    pub(super) fn with_copy_timeout(mut self, copy_timeout: Duration) -> Self {
        self.copy_timeout = copy_timeout;
        self
    }

    /// The engine and its step loop are shutting down. Threads that wait here for copies return an error.
    pub fn close(&self) {
        // Under the lock, so that no thread checks before this and waits after it.
        let mirror = self.mirror();
        self.closed.store(true, Ordering::Release);
        drop(mirror);
        self.copied.notify_all();
    }

    /// Counts blocks that are copied between device and mirror from now on.
    pub fn set_counters(&self, counters: CopyCounters) {
        // The first counters stay.
        let _ = self.counters.set(counters);
    }

    fn add_count(&self, which: impl FnOnce(&CopyCounters) -> &Counter, blocks: usize) {
        if let Some(counters) = self.counters.get() {
            which(counters).increment(blocks as u64);
        }
    }

    /// Whether the device may be used.
    ///
    /// # Errors
    /// The reason. Permanent after the first work that was not over in time, or the first failure of the executor's own
    /// work.
    pub fn usable(&self) -> Result<(), DeviceError> {
        self.failure.usable()
    }

    /// Records a failure of the executor's own work, which disables the device. A refused step did not begin and does
    /// not count.
    pub(super) fn record_failure(&self, error: &DeviceError) {
        if !matches!(error, DeviceError::Step(_)) {
            self.failure.record(error);
        }
    }

    /// The mirror map. It is locked for short times only: no thread copies under the lock.
    pub(super) fn mirror(&self) -> MutexGuard<'_, MirrorMap> {
        lock(&self.mirror)
    }

    /// Bytes of one block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The mirror, which is the pool's host side for transports.
    ///
    /// # Panics
    /// Without a mirror: an engine without one opens no transport.
    #[must_use]
    pub fn region(&self) -> &Region {
        self.region.as_ref().expect("an engine with transports has a mirror")
    }

    /// Copies blocks to the mirror that are leased and not there yet. Blocks until its own and earlier copies are over,
    /// so the thread of the steps must not call it.
    ///
    /// # Errors
    /// [`DeviceError`]. The blocks must not be read in the mirror.
    pub fn download(&self, blocks: &[BlockId]) -> Result<(), DeviceError> {
        let Some(region) = &self.region else {
            return Err(DeviceError::Undefined("no block is read on the host without a mirror".into()));
        };
        let _copying = lock(&self.copying);
        if self.closed.load(Ordering::Acquire) {
            return Err(DeviceError::Closed);
        }
        let mut pending = {
            let mut mirror = self.lock_when_quiet(blocks)?;
            let pending = mirror.pending_copies(blocks);
            mirror.begin_download(pending.iter().map(|copy| copy.block));
            pending
        };
        if pending.is_empty() {
            return Ok(());
        }
        pending.sort_unstable_by_key(|copy| copy.block.0);
        pending.dedup();
        let runs = self.block_runs(pending.iter().map(|copy| copy.block));
        let copied = self.memory.copy_out(&runs, region);
        let copied = copied.inspect_err(|error| self.failure.record_hung(error));
        let mut mirror = self.mirror();
        if copied.is_ok() {
            mirror.finish_copies(&pending);
            self.add_count(|counts| &counts.to_host, pending.len());
        }
        mirror.end_download(pending.iter().map(|copy| copy.block));
        drop(mirror);
        self.copied.notify_all();
        copied
    }

    /// Copies blocks to the device that have landed in the mirror. The transport calls it before it reports them as
    /// landed, while no other code uses them, so that no step waits for the copy. Leaves out blocks whose newer bytes
    /// are on the device. Blocks until the copies are over.
    ///
    /// # Errors
    /// [`DeviceError`]. The landed bytes must not be used.
    pub fn upload(&self, blocks: &[BlockId]) -> Result<(), DeviceError> {
        self.usable()?;
        let mut landed = self.mirror().pending_uploads(blocks);
        landed.sort_unstable_by_key(|block| block.0);
        landed.dedup();
        if landed.is_empty() {
            return Ok(());
        }
        let copied = self.memory.copy_in(&self.block_runs(landed.iter().copied()), self.region());
        copied.inspect_err(|error| self.failure.record_hung(error))?;
        self.mirror().take_pending_uploads(landed.iter().copied());
        self.add_count(|counts| &counts.to_device, landed.len());
        Ok(())
    }

    /// Runs of these sorted blocks, at the same offsets in the pool and in the mirror. Adjacent blocks form one run.
    fn block_runs(&self, blocks: impl Iterator<Item = BlockId>) -> Vec<HostRun> {
        let bytes = self.block_bytes;
        let mut runs: Vec<HostRun> = Vec::new();
        for block in blocks {
            let at = block.index() * bytes;
            match runs.last_mut() {
                Some(last) if last.pool + last.bytes == at => last.bytes += bytes,
                _ => runs.push(HostRun { pool: at, host: at, bytes }),
            }
        }
        runs
    }

    /// The run between one block and a slot of a tier's memory.
    fn slot_run(&self, block: BlockId, slots: &Region, slot: BlockId) -> [HostRun; 1] {
        let bytes = self.block_bytes;
        assert!(bytes == slots.block_bytes() && slot.index() < slots.blocks(), "a slot of one block");
        [HostRun { pool: block.index() * bytes, host: slot.index() * bytes, bytes }]
    }

    /// Page-locks a tier's memory.
    pub fn pin(&self, slots: &Region) {
        self.memory.pin(slots);
    }

    /// Copies a block into a slot of a tier's memory, from the side with the newer bytes. The caller guarantees that no
    /// other code writes the block or touches the slot. Blocks until the copy is over.
    ///
    /// # Errors
    /// [`DeviceError`]. The slot's bytes are undefined.
    pub fn store(&self, block: BlockId, slots: &Region, slot: BlockId) -> Result<(), DeviceError> {
        self.upload(&[block])?;
        let copied = self.memory.copy_out(&self.slot_run(block, slots, slot), slots);
        copied.inspect_err(|error| self.failure.record_hung(error))
    }

    /// Copies a slot of a tier's memory into a landing block of the device. The caller guarantees that no other code
    /// writes the slot. Blocks until the copy is over.
    ///
    /// # Errors
    /// [`DeviceError`]; the block's bytes are undefined.
    pub fn load(&self, slots: &Region, slot: BlockId, block: BlockId) -> Result<(), DeviceError> {
        self.wait_for_downloads(&[block])?;
        let copied = self.memory.copy_in(&self.slot_run(block, slots, slot), slots);
        copied.inspect_err(|error| self.failure.record_hung(error))?;
        self.mirror().mark_device_newer(block);
        Ok(())
    }

    /// Locks the mirror map when none of these blocks is being copied to the mirror.
    fn lock_when_quiet(&self, blocks: &[BlockId]) -> Result<MutexGuard<'_, MirrorMap>, DeviceError> {
        let closed = || self.closed.load(Ordering::Acquire);
        let in_flight = |mirror: &mut MirrorMap| !closed() && mirror.is_in_flight(blocks);
        let waited = self.copied.wait_timeout_while(self.mirror(), self.copy_timeout, in_flight);
        let (mirror, late) = waited.unwrap_or_else(PoisonError::into_inner);
        if closed() && mirror.is_in_flight(blocks) {
            return Err(DeviceError::Closed);
        }
        if late.timed_out() {
            // The copying thread has panicked, or will record the failure itself.
            let what = "a copy of KV blocks into host memory";
            self.failure.record(&DeviceError::Hung { what, waited: self.copy_timeout });
        }
        self.usable()?;
        Ok(mirror)
    }

    /// Reserves these blocks to be written from outside. Waits for no copy, because the thread of the steps calls it.
    /// Without a mirror they can only be written on the device.
    pub(crate) fn reserve(&self, blocks: &[BlockId]) {
        let mut mirror = self.mirror();
        blocks.iter().for_each(|block| match &self.region {
            Some(_) => mirror.reserve(*block),
            None => mirror.mark_device_newer(*block),
        });
    }

    /// Waits for copies of the earlier contents of these blocks to the mirror, which may take minutes. The thread that
    /// lands the blocks calls it before it writes to the mirror.
    ///
    /// # Errors
    /// As [`Self::usable`]. Nothing may be written then.
    pub fn wait_for_downloads(&self, blocks: &[BlockId]) -> Result<(), DeviceError> {
        self.lock_when_quiet(blocks).map(drop)
    }

    /// The copies that make both sides of these blocks the same. The executor runs them before [`Self::end_sync`].
    /// Blocks with a copy to the mirror in flight are left out, because the thread of the steps waits for no other
    /// copy.
    ///
    /// # Errors
    /// As [`Self::usable`].
    pub(super) fn begin_sync(&self, blocks: &[BlockId]) -> Result<SyncPlan, DeviceError> {
        self.usable()?;
        let mut mirror = self.mirror();
        let blocks: Vec<_> = blocks.iter().copied().filter(|block| !mirror.is_in_flight(&[*block])).collect();
        let (down, up) =
            (mirror.pending_downloads(&blocks), mirror.take_pending_uploads(blocks.iter().copied()));
        mirror.begin_download(down.iter().copied());
        Ok(SyncPlan { blocks, downloads: down, uploads: up })
    }

    /// The copies of the plan are over or have failed.
    pub(super) fn end_sync(&self, plan: &SyncPlan, copied: &Result<(), DeviceError>) {
        match copied {
            Ok(()) => {
                self.add_count(|counts| &counts.to_host, plan.downloads.len());
                self.add_count(|counts| &counts.in_step, plan.uploads.len());
            }
            // Before a waiting thread continues.
            Err(error) => self.record_failure(error),
        }
        let mut mirror = self.mirror();
        if copied.is_ok() {
            // Only after the copies, because readers of the mirror rely on this mark.
            mirror.mark_downloaded(&plan.downloads);
        }
        mirror.end_download(plan.downloads.iter().copied());
        drop(mirror);
        self.copied.notify_all();
    }

    /// Of these blocks, those that the executor copies to the device before a step, because their transport has not
    /// uploaded them. They count as copied.
    pub(super) fn take_step_uploads(&self, blocks: impl Iterator<Item = BlockId>) -> Vec<BlockId> {
        let taken = self.mirror().take_pending_uploads(blocks);
        self.add_count(|counts| &counts.in_step, taken.len());
        taken
    }
}

impl DevicePool for SharedKvPool {
    fn export(&self) -> io::Result<PoolExport> {
        self.memory.export()
    }

    fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn ImportedPool>> {
        if offer.is_own_process() {
            let why = "a process cannot open memory that it exported itself";
            return Err(io::Error::new(ErrorKind::Unsupported, why));
        }
        let opened = self.memory.open(offer, descriptor)?;
        Ok(Box::new(PeerPool { opened, region: self.region().clone(), failure: self.failure.clone() }))
    }

    fn landed(&self, blocks: &[BlockId]) {
        let mut mirror = self.mirror();
        blocks.iter().for_each(|block| mirror.mark_device_newer(*block));
    }
}

impl baton_connector_nixl::DevicePool for SharedKvPool {
    fn memory(&self) -> io::Result<Memory> {
        self.memory.place()
    }

    fn region(&self) -> &Region {
        Self::region(self)
    }

    fn enter(&self) -> io::Result<()> {
        self.memory.enter()
    }

    fn landed(&self, blocks: &[BlockId]) {
        DevicePool::landed(self, blocks);
    }
}

/// Another engine's pool. Its blocks are copied into this engine's pool, which the mirror's region identifies.
#[derive(Debug)]
struct PeerPool {
    opened: Box<dyn ImportedPool>,
    region: Region,
    failure: DeviceFailure,
}

impl ImportedPool for PeerPool {
    fn copy(&self, runs: &[CopyRun], region: &Region) -> io::Result<()> {
        let first = BlockId(0);
        if region.block_ptr(first) != self.region.block_ptr(first) {
            return Err(io::Error::new(ErrorKind::InvalidInput, "the read target is not the device's pool"));
        }
        self.failure.usable().map_err(io::Error::other)?;
        self.opened.copy(runs, region).inspect_err(|error| {
            // The blocks may be reused as soon as this returns.
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<DeviceError>());
            inner.into_iter().for_each(|error| self.failure.record_hung(error));
        })
    }
}

#[cfg(test)]
#[path = "tests/shared_kv_pool.rs"]
mod tests;
