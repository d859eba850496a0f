//! The pool as everybody but the executor sees it: transports that land in the device's memory or let others read it, and
//! those that read its mirror. Called from their threads, beside the executor's steps.
//!
//! Three rules keep it right. Nothing here touches a block that the executor may write: what is copied is lent, and what is
//! landed in is set aside. A block's bytes are never read in the mirror before [`Port::in_region`] has put there what
//! was lent. And since a lease can end under a copy to the mirror, whose block is then somebody else's, nothing is written
//! there before that copy is over: neither what lands from outside ([`Port::quiet`]) nor what the executor copies there
//! itself (`Port::begin_level`).
//!
//! Whoever has landed blocks in the mirror brings them to the device ([`Port::onto_device`]) before it says that they are
//! there: no step waits for that, and the blocks are still set aside. Tiers do without the mirror: their memory is copied
//! from and to directly ([`Port::store`], [`Port::load`]), by whoever stores or loads, and the block is held until that is
//! over.
//!
//! A copy that is not over in time ([`DeviceError::Hung`]) may still write, and after any work of the executor's that has
//! failed nobody knows which side has what. So the device is given up before whoever waited hears of it: from then on the
//! executor computes nothing and publishes nothing, whatever blocks are given to whom ([`Port::usable`]).

use std::fmt::Debug;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use metrics::Counter;

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_connector_device::{DevicePool, Export, Offer, Opened, Run};
use baton_connector_nixl::api::Memory;

use super::device::{DeviceError, HostRun, PoolMemory};
use super::mirror::Mirror;

/// See the module's documentation.
#[derive(Debug)]
pub struct Port {
    memory: Arc<dyn PoolMemory>,
    region: Region,
    mirror: Mutex<Mirror>,
    /// Held by whoever copies for readers of the mirror, so that a second reader of a block finds it copied.
    copying: Mutex<()>,
    /// A copy to the mirror is over.
    copied: Condvar,
    /// How long the end of such a copy is waited for.
    patience: Duration,
    given_up: GivenUp,
    /// The engine ends: no copy is waited for any more.
    closed: AtomicBool,
    counts: OnceLock<Counts>,
}

/// Longest that a copy of somebody else's is waited for: those end by themselves after a minute, or two where they fail.
const PATIENCE: Duration = Duration::from_secs(150);

/// Counters of blocks that were copied.
#[derive(Debug)]
pub struct Counts {
    /// From the device to the mirror.
    pub to_host: Counter,
    /// From the mirror to the device, by who has landed them.
    pub to_device: Counter,
    /// The same by the executor, while a step or a loan waited.
    pub in_step: Counter,
}

/// Why the device is used no more.
#[derive(Clone, Debug, Default)]
struct GivenUp(Arc<OnceLock<DeviceError>>);

impl GivenUp {
    /// Of any work.
    fn note(&self, error: &DeviceError) {
        // The first is the reason.
        let _ = self.0.set(error.clone());
    }

    /// Of a copy by another thread. One that has failed and is over is its reader's alone.
    fn note_hung(&self, error: &DeviceError) {
        if matches!(error, DeviceError::Hung { .. }) {
            self.note(error);
        }
    }

    fn usable(&self) -> Result<(), DeviceError> {
        self.0.get().cloned().map_or(Ok(()), Err)
    }
}

/// What [`Port::begin_level`] found out of step.
#[derive(Debug)]
pub(super) struct Level {
    /// All that are the same on both sides then.
    pub(super) level: Vec<BlockId>,
    /// To be copied to the mirror. Nobody else copies them there before [`Port::end_level`].
    pub(super) down: Vec<BlockId>,
    /// To be copied to the device.
    pub(super) up: Vec<BlockId>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Port {
    /// The port of a pool and its mirror, of which each has as many bytes.
    #[must_use]
    pub fn new(memory: Arc<dyn PoolMemory>, region: Region) -> Self {
        let mirror = Mutex::new(Mirror::new(region.blocks()));
        let (copying, copied, given_up) = (Mutex::new(()), Condvar::new(), GivenUp::default());
        let (closed, counts) = (AtomicBool::new(false), OnceLock::new());
        Self { memory, region, mirror, copying, copied, patience: PATIENCE, given_up, closed, counts }
    }

    /// One that waits so long for the end of somebody else's copy.
    #[cfg(test)]
    pub(super) fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The engine ends, and its step loop has: threads that wait here for others' copies are let go, with an error.
    pub fn close(&self) {
        // Under the lock, so that none looks before this and waits after it.
        let mirror = self.mirror();
        self.closed.store(true, Ordering::Release);
        drop(mirror);
        self.copied.notify_all();
    }

    /// From now on counts blocks that are copied between device and mirror.
    pub fn count(&self, counts: Counts) {
        // Those of the first stay.
        let _ = self.counts.set(counts);
    }

    fn counted(&self, which: impl FnOnce(&Counts) -> &Counter, blocks: usize) {
        if let Some(counts) = self.counts.get() {
            which(counts).increment(blocks as u64);
        }
    }

    /// Whether the device may be used.
    ///
    /// # Errors
    /// Why not, for ever after the first work that was not over in time, or the first of the executor's that failed.
    pub fn usable(&self) -> Result<(), DeviceError> {
        self.given_up.usable()
    }

    /// The executor's own work has failed: nobody uses the device any more. A step that was refused was not begun.
    pub(super) fn failed(&self, error: &DeviceError) {
        if !matches!(error, DeviceError::Step(_)) {
            self.given_up.note(error);
        }
    }

    /// Who has what. The executor's lock is short: nobody copies under it.
    pub(super) fn mirror(&self) -> MutexGuard<'_, Mirror> {
        lock(&self.mirror)
    }

    /// The mirror, which is the pool's host side.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Copies blocks to the mirror that are lent, or to be stored, and not there yet. Blocks for as long as that takes, and
    /// for others' copies before it: not for the thread of the steps.
    ///
    /// # Errors
    /// [`DeviceError`]; nobody may read them in the mirror.
    pub fn in_region(&self, blocks: &[BlockId]) -> Result<(), DeviceError> {
        let _copying = lock(&self.copying);
        if self.closed.load(Ordering::Acquire) {
            return Err(DeviceError::Closed);
        }
        let mut owed = {
            let mut mirror = self.at_rest(blocks)?;
            let owed = mirror.owed(blocks);
            mirror.begin(owed.iter().map(|owed| owed.block));
            owed
        };
        if owed.is_empty() {
            return Ok(());
        }
        owed.sort_unstable_by_key(|owed| owed.block.0);
        owed.dedup();
        let copied = self.memory.copy_out(&self.in_place(owed.iter().map(|owed| owed.block)), &self.region);
        let copied = copied.inspect_err(|error| self.given_up.note_hung(error));
        let mut mirror = self.mirror();
        if copied.is_ok() {
            mirror.paid(&owed);
            self.counted(|counts| &counts.to_host, owed.len());
        }
        mirror.over(owed.iter().map(|owed| owed.block));
        drop(mirror);
        self.copied.notify_all();
        copied
    }

    /// Copies blocks to the device that have landed in the mirror. Whoever has landed them calls this before it says so, while
    /// nobody else uses them: no step is to wait for it. Blocks that the device has are left as they are. Blocks for as long
    /// as the copies take.
    ///
    /// # Errors
    /// [`DeviceError`]; what has landed may not be used.
    pub fn onto_device(&self, blocks: &[BlockId]) -> Result<(), DeviceError> {
        self.usable()?;
        let mut landed = self.mirror().on_host(blocks);
        landed.sort_unstable_by_key(|block| block.0);
        landed.dedup();
        if landed.is_empty() {
            return Ok(());
        }
        let copied = self.memory.copy_in(&self.in_place(landed.iter().copied()), &self.region);
        copied.inspect_err(|error| self.given_up.note_hung(error))?;
        self.mirror().take_to_device(landed.iter().copied());
        self.counted(|counts| &counts.to_device, landed.len());
        Ok(())
    }

    /// These blocks, which are sorted, at the same places in the pool and in the mirror; neighbours are one run.
    fn in_place(&self, blocks: impl Iterator<Item = BlockId>) -> Vec<HostRun> {
        let bytes = self.region.block_bytes();
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

    /// One block, and a slot of a tier's memory.
    fn with_slot(&self, block: BlockId, slots: &Region, slot: BlockId) -> [HostRun; 1] {
        let bytes = self.region.block_bytes();
        assert!(bytes == slots.block_bytes() && slot.index() < slots.blocks(), "a slot of one block");
        [HostRun { pool: block.index() * bytes, host: slot.index() * bytes, bytes }]
    }

    /// Page-locks a tier's memory.
    pub fn pin(&self, slots: &Region) {
        self.memory.pin(slots);
    }

    /// Copies a block into a slot of a tier's memory, from the side that has it. The caller keeps the contract: nobody writes
    /// the block, and nobody else touches the slot. Blocks for as long as that takes.
    ///
    /// # Errors
    /// [`DeviceError`]; what is in the slot is of no use.
    pub fn store(&self, block: BlockId, slots: &Region, slot: BlockId) -> Result<(), DeviceError> {
        self.onto_device(&[block])?;
        let copied = self.memory.copy_out(&self.with_slot(block, slots, slot), slots);
        copied.inspect_err(|error| self.given_up.note_hung(error))
    }

    /// Copies a slot of a tier's memory into a block of the device, which is landing. The caller keeps the contract: nobody
    /// writes the slot. Blocks for as long as that takes.
    ///
    /// # Errors
    /// [`DeviceError`]; the block's bytes are undefined.
    pub fn load(&self, slots: &Region, slot: BlockId, block: BlockId) -> Result<(), DeviceError> {
        self.quiet(&[block])?;
        let copied = self.memory.copy_in(&self.with_slot(block, slots, slot), slots);
        copied.inspect_err(|error| self.given_up.note_hung(error))?;
        self.mirror().computed(block);
        Ok(())
    }

    /// The books, at a moment at which none of these blocks is being copied to the mirror.
    fn at_rest(&self, blocks: &[BlockId]) -> Result<MutexGuard<'_, Mirror>, DeviceError> {
        let closed = || self.closed.load(Ordering::Acquire);
        let in_flight = |mirror: &mut Mirror| !closed() && mirror.is_in_flight(blocks);
        let waited = self.copied.wait_timeout_while(self.mirror(), self.patience, in_flight);
        let (mirror, late) = waited.unwrap_or_else(PoisonError::into_inner);
        if closed() && mirror.is_in_flight(blocks) {
            return Err(DeviceError::Closed);
        }
        if late.timed_out() {
            // Whoever copies them has died of it, or will give the device up itself.
            let what = "a copy of KV blocks into host memory";
            self.given_up.note(&DeviceError::Hung { what, waited: self.patience });
        }
        self.usable()?;
        Ok(mirror)
    }

    /// These blocks are set aside to be written from outside. The thread of the steps calls it, and waits for no copy.
    pub(crate) fn landing(&self, blocks: &[BlockId]) {
        let mut mirror = self.mirror();
        blocks.iter().for_each(|block| mirror.landing(*block));
    }

    /// Waits for copies to the mirror of what these blocks held before, which may take minutes: for the thread that lands
    /// them, before it writes there.
    ///
    /// # Errors
    /// As [`Self::usable`]; nothing may be written.
    pub fn quiet(&self, blocks: &[BlockId]) -> Result<(), DeviceError> {
        self.at_rest(blocks).map(drop)
    }

    /// What the executor copies so that both sides of these blocks are the same, which it does before
    /// [`Self::end_level`]. Blocks of which a copy to the mirror is under way are left out: the thread of the steps waits for
    /// no other's copy.
    ///
    /// # Errors
    /// As [`Self::usable`].
    pub(super) fn begin_level(&self, blocks: &[BlockId]) -> Result<Level, DeviceError> {
        self.usable()?;
        let mut mirror = self.mirror();
        let level: Vec<_> = blocks.iter().copied().filter(|block| !mirror.is_in_flight(&[*block])).collect();
        let (down, up) = (mirror.to_host(&level), mirror.take_to_device(level.iter().copied()));
        mirror.begin(down.iter().copied());
        Ok(Level { level, down, up })
    }

    /// They are the same, or that has failed.
    pub(super) fn end_level(&self, level: &Level, copied: &Result<(), DeviceError>) {
        match copied {
            Ok(()) => {
                self.counted(|counts| &counts.to_host, level.down.len());
                self.counted(|counts| &counts.in_step, level.up.len());
            }
            // Before anybody goes on who has waited.
            Err(error) => self.failed(error),
        }
        let mut mirror = self.mirror();
        if copied.is_ok() {
            // Not before they have landed: whoever reads the mirror trusts this.
            mirror.copied_to_host(&level.down);
        }
        mirror.over(level.down.iter().copied());
        drop(mirror);
        self.copied.notify_all();
    }

    /// Of these blocks, those that the executor copies to the device before a step, because whoever has landed them did not.
    /// They count as copied.
    pub(super) fn onboard(&self, blocks: impl Iterator<Item = BlockId>) -> Vec<BlockId> {
        let taken = self.mirror().take_to_device(blocks);
        self.counted(|counts| &counts.in_step, taken.len());
        taken
    }
}

impl DevicePool for Port {
    fn export(&self) -> io::Result<Export> {
        self.memory.export()
    }

    fn open(&self, offer: &Offer, descriptor: Option<OwnedFd>) -> io::Result<Box<dyn Opened>> {
        if offer.is_ours() {
            let why = "a process cannot open memory that it exported itself";
            return Err(io::Error::new(ErrorKind::Unsupported, why));
        }
        let opened = self.memory.open(offer, descriptor)?;
        Ok(Box::new(Landing { opened, region: self.region.clone(), given_up: self.given_up.clone() }))
    }

    fn landed(&self, blocks: &[BlockId]) {
        let mut mirror = self.mirror();
        blocks.iter().for_each(|block| mirror.computed(*block));
    }
}

impl baton_connector_nixl::DevicePool for Port {
    fn memory(&self) -> io::Result<Memory> {
        self.memory.place()
    }

    fn region(&self) -> &Region {
        &self.region
    }

    fn enter(&self) -> io::Result<()> {
        self.memory.enter()
    }

    fn landed(&self, blocks: &[BlockId]) {
        DevicePool::landed(self, blocks);
    }
}

/// Another engine's pool, and the only mirror that stands for ours.
#[derive(Debug)]
struct Landing {
    opened: Box<dyn Opened>,
    region: Region,
    given_up: GivenUp,
}

impl Opened for Landing {
    fn copy(&self, runs: &[Run], region: &Region) -> io::Result<()> {
        let first = BlockId(0);
        if region.block_ptr(first) != self.region.block_ptr(first) {
            return Err(io::Error::new(ErrorKind::InvalidInput, "the read target is not the device's pool"));
        }
        self.given_up.usable().map_err(io::Error::other)?;
        self.opened.copy(runs, region).inspect_err(|error| {
            // The blocks are somebody else's as soon as this returns.
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<DeviceError>());
            inner.into_iter().for_each(|error| self.given_up.note_hung(error));
        })
    }
}

#[cfg(test)]
#[path = "tests/port.rs"]
mod tests;
