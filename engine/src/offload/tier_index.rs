//! The index of the tiers: which block is in which tier, what to evict, and which copies are pending. Pure.
//!
//! ```text
//!   host:  absent ─ store, load ─▶ Filling(slot) ─ done ─▶ Ready(slot, readers) ─ evicted (no reader) ─▶ absent
//!   disk:  absent ─ write ──────▶ Writing ─ done ─▶ Ready(readers) ─ evicted (no reader) ─▶ pending delete ─▶ deleted
//! ```
//!
//! An evicted file is a *pending delete* until a worker has confirmed its deletion. Pending deletes are carried out
//! before further writes, so that the directory stays within its bound.
//!
//! Invariants:
//! - A slot belongs to one block at most, and is reused only when no worker reads or writes it.
//! - The least recently used copy is evicted first. A copy that is being read or written is never evicted.
//! - Files, including those being written, are at most `disk_blocks`. Pending deletes are carried out before further
//!   writes.

mod announcing;
mod files;

use std::collections::{BTreeMap, HashMap};

use self::announcing::AnnouncedCopies;
pub use self::announcing::TierChange;
use self::files::TierFiles;
use super::{HostSlot, LoadSource, Tier, TierCounts};
use crate::blocks::hash::BlockHash;

/// Staging slots of a disk tier without a host tier.
pub const STAGING_SLOTS: usize = 64;

/// Limit of the pending writes to disk. Each holds its slot. Beyond the limit a block is not written.
pub const WRITES_MAX: usize = 256;

/// The tiers' sizes, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierConfig {
    /// Slots of the host tier; 0 is none.
    pub host_blocks: usize,
    /// Files of the disk tier; 0 is none.
    pub disk_blocks: usize,
}

impl TierConfig {
    /// Slots to allocate: the host tier's, or the staging slots of the disk tier.
    #[must_use]
    pub fn slots(self) -> usize {
        match (self.host_blocks, self.disk_blocks) {
            (0, 0) => 0,
            (0, disk) => STAGING_SLOTS.min(disk),
            (host, _) => host,
        }
    }

    /// Whether there is any tier.
    #[must_use]
    pub fn any(self) -> bool {
        self.slots() > 0
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum HostState {
    #[default]
    Absent,
    Filling(HostSlot),
    Ready {
        slot: HostSlot,
        readers: u32,
        used: u64,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum DiskState {
    #[default]
    Absent,
    Writing,
    /// `lost`: a reader found the file damaged or missing. No new reader is sent there, and the last reader removes
    /// it.
    Ready {
        readers: u32,
        used: u64,
        lost: bool,
    },
}

#[derive(Clone, Copy, Debug, Default)]
struct TierEntry {
    host: HostState,
    disk: DiskState,
    /// The index was cleared while a copy was in use. The copy is forgotten when it is idle.
    forget_when_idle: bool,
    announced: AnnouncedCopies,
}

/// A write to order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WritePlan {
    /// The slot to write.
    pub slot: HostSlot,
    /// Files to delete first.
    pub evict: Vec<BlockHash>,
}

/// How a store, a write or a deletion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderOutcome {
    /// All of it is done.
    Complete,
    /// Some of it may be missing.
    Failed,
}

/// How a load ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadOutcome {
    /// The block is on the device.
    Complete,
    /// The block is not on the device. The tier still has it.
    Failed,
    /// The block is not on the device, and the tier has lost it.
    Lost,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct TierIndex {
    config: TierConfig,
    entries: HashMap<BlockHash, TierEntry>,
    host: HostSlots,
    disk: TierFiles,
    clock: u64,
    /// Changes of the announced copies since the last drain.
    changes: Vec<TierChange>,
}

/// The slots of the host tier, or the staging slots of the disk tier.
#[derive(Debug)]
struct HostSlots {
    free: Vec<HostSlot>,
    /// Blocks that may be evicted, by last use.
    idle: BTreeMap<u64, BlockHash>,
    counts: TierCounts,
}

impl HostSlots {
    fn new(capacity: usize) -> Self {
        let slots = u32::try_from(capacity).expect("slots are counted in 32 bits");
        Self {
            free: (0..slots).rev().map(HostSlot).collect(),
            idle: BTreeMap::new(),
            counts: TierCounts { capacity, ..TierCounts::default() },
        }
    }

    fn counts(&self) -> TierCounts {
        TierCounts { blocks: self.counts.capacity - self.free.len(), ..self.counts }
    }
}

impl TierIndex {
    /// Empty tiers.
    #[must_use]
    pub fn new(config: TierConfig) -> Self {
        let (host, disk) = (HostSlots::new(config.slots()), TierFiles::new(config.disk_blocks));
        Self { config, entries: HashMap::new(), host, disk, clock: 0, changes: Vec::new() }
    }

    /// Adopts the files that were found at the start, least recently used first. Excess files are deleted.
    pub fn adopt(&mut self, files: impl IntoIterator<Item = BlockHash>) {
        for hash in files {
            let used = self.tick();
            let entry = self.entries.entry(hash).or_default();
            if entry.disk == DiskState::Absent {
                entry.disk = DiskState::Ready { readers: 0, used, lost: false };
                self.disk.idle.insert(used, hash);
                self.disk.used += 1;
            }
        }
        while self.disk.used > self.config.disk_blocks && self.evict_file() {}
    }

    /// Counts of a tier.
    #[must_use]
    pub fn counts(&self, tier: Tier) -> TierCounts {
        match tier {
            Tier::Host => self.host.counts(),
            Tier::Disk => self.disk.counts(),
        }
    }

    /// Whether the disk is suspended.
    #[must_use]
    pub fn is_disk_suspended(&self) -> bool {
        self.disk.suspended
    }

    /// Suspends or resumes the disk.
    pub fn set_disk_suspended(&mut self, suspended: bool) {
        self.disk.suspended = suspended;
    }

    /// The number of blocks at the start of this chain that can be loaded.
    #[must_use]
    pub fn prefix_len(&self, chain: &[BlockHash]) -> usize {
        chain.iter().take_while(|hash| self.is_loadable(**hash)).count()
    }

    fn is_loadable(&self, hash: BlockHash) -> bool {
        self.entries.get(&hash).is_some_and(|entry| {
            let on_disk = matches!(entry.disk, DiskState::Ready { lost: false, .. }) && !self.disk.suspended;
            !entry.forget_when_idle && (matches!(entry.host, HostState::Ready { .. }) || on_disk)
        })
    }

    /// Whether a tier has the block or is about to. Such a block need not be stored.
    #[must_use]
    pub fn contains(&self, hash: BlockHash) -> bool {
        self.entries.contains_key(&hash)
    }

    /// A slot for a block that is not in any tier. `None` when all are in use.
    pub fn begin_store(&mut self, hash: BlockHash) -> Option<HostSlot> {
        debug_assert!(!self.contains(hash), "a tier has this block");
        let slot = self.take_slot()?;
        self.entries.insert(hash, TierEntry { host: HostState::Filling(slot), ..TierEntry::default() });
        Some(slot)
    }

    /// Ends a store. Returns the write to order, if the block is to go on to the disk.
    pub fn end_store(&mut self, hash: BlockHash, how: OrderOutcome) -> Option<WritePlan> {
        let whole = how == OrderOutcome::Complete;
        self.end_filling(hash, whole);
        let write = if whole { self.begin_write(hash) } else { None };
        self.pass_through(hash);
        write
    }

    /// The write of a block in a slot, if it can begin now.
    fn begin_write(&mut self, hash: BlockHash) -> Option<WritePlan> {
        let entry = self.entries.get(&hash)?;
        let (HostState::Ready { slot, .. }, DiskState::Absent, false) =
            (entry.host, entry.disk, entry.forget_when_idle)
        else {
            return None;
        };
        if !self.disk.takes_writes() {
            return None;
        }
        while self.disk.used >= self.config.disk_blocks {
            if !self.evict_file() {
                return None;
            }
        }
        let evict = self.disk.begin_write(hash)?;
        self.entry(hash).disk = DiskState::Writing;
        self.pin_host(hash);
        Some(WritePlan { slot, evict })
    }

    /// Whether the disk could not take a block of the host tier. Too many writes are pending, the disk is suspended,
    /// or all its files are being read.
    #[must_use]
    pub fn lacks_file(&self, hash: BlockHash) -> bool {
        self.config.disk_blocks > 0
            && self
                .entries
                .get(&hash)
                .is_some_and(|entry| entry.disk == DiskState::Absent && !entry.forget_when_idle)
    }

    /// Ends a write. `evicted` are the files that the order deleted first. After a failure they are still to be
    /// deleted.
    pub fn end_write(&mut self, hash: BlockHash, evicted: &[BlockHash], how: OrderOutcome) {
        self.disk.writes -= 1;
        if how == OrderOutcome::Complete {
            self.disk.deleted(evicted);
            self.disk.counts.stored += 1;
            let used = self.tick();
            self.entry(hash).disk = DiskState::Ready { readers: 0, used, lost: false };
            self.disk.idle.insert(used, hash);
        } else {
            // A part of the file may remain.
            self.entry(hash).disk = DiskState::Absent;
            self.disk.delete_later(hash);
        }
        self.unpin_host(hash);
        self.pass_through(hash);
        self.settle(hash);
    }

    /// Files to delete in an order of their own, when there are more than writes can carry along.
    pub fn begin_delete(&mut self) -> Option<Vec<BlockHash>> {
        if self.disk.purging && self.disk.pending_deletes.is_empty() {
            // Copies in use are deleted when they are idle.
            self.disk.purging = self.entries.values().any(|entry| entry.forget_when_idle);
        }
        self.disk.begin_delete()
    }

    /// Ends a delete order.
    pub fn end_delete(&mut self, hashes: &[BlockHash], how: OrderOutcome) {
        self.disk.deleting = false;
        if how == OrderOutcome::Complete {
            self.disk.deleted(hashes);
        } else {
            // No retry at once: later writes carry the deletes along.
            self.disk.purging = false;
        }
    }

    /// Begins to read a block for the device. `None` when no tier has it any more.
    pub fn begin_load(&mut self, hash: BlockHash) -> Option<LoadSource> {
        if !self.is_loadable(hash) {
            return None;
        }
        if let HostState::Ready { slot, .. } = self.entry(hash).host {
            self.pin_host(hash);
            return Some(LoadSource::Host(slot));
        }
        self.pin_disk(hash);
        let filling = self.entry(hash).host != HostState::Absent;
        let slot = if filling || self.config.host_blocks == 0 { None } else { self.take_slot() };
        if let Some(slot) = slot {
            self.entry(hash).host = HostState::Filling(slot);
        }
        Some(LoadSource::Disk { slot })
    }

    /// Begins to read a chain of blocks that [`Self::prefix_len`] has counted. Blocks in the host tier are pinned
    /// first, so that a block from disk does not evict one that is about to be read.
    pub fn begin_loads(&mut self, chain: &[BlockHash]) -> Vec<LoadSource> {
        let mut sources = vec![None; chain.len()];
        for (source, &hash) in sources.iter_mut().zip(chain) {
            if matches!(self.entries.get(&hash), Some(TierEntry { host: HostState::Ready { .. }, .. })) {
                *source = self.begin_load(hash);
            }
        }
        for (source, &hash) in sources.iter_mut().zip(chain) {
            *source = source.or_else(|| self.begin_load(hash));
        }
        sources.into_iter().map(|source| source.expect("the tiers have it")).collect()
    }

    /// Ends a load.
    pub fn end_load(&mut self, hash: BlockHash, from: LoadSource, how: LoadOutcome) {
        let whole = how == LoadOutcome::Complete;
        match from {
            LoadSource::Host(_) => {
                self.host.counts.loaded += u64::from(whole);
                self.unpin_host(hash);
                self.touch_disk(hash);
                self.pass_through(hash);
            }
            LoadSource::Disk { slot } => {
                self.disk.counts.loaded += u64::from(whole);
                if slot.is_some() {
                    self.end_filling(hash, whole);
                }
                self.unpin_disk(hash, how == LoadOutcome::Lost);
            }
        }
        self.settle(hash);
    }

    /// Marks a chain as used now, after its request has ended. Its first block is marked last, so that a prefix
    /// outlives its tail.
    pub fn touch(&mut self, chain: &[BlockHash]) {
        for &hash in chain.iter().rev() {
            let now = self.tick();
            if let Some(TierEntry { host: HostState::Ready { readers: 0, used, .. }, .. }) =
                self.entries.get_mut(&hash)
            {
                let before = std::mem::replace(used, now);
                self.host.idle.remove(&before);
                self.host.idle.insert(now, hash);
            }
            if self.entries.contains_key(&hash) {
                self.touch_disk(hash);
            }
        }
    }

    /// Forgets all idle copies now, and the others as soon as they are idle. The files are deleted.
    pub fn clear(&mut self) {
        let mut all: Vec<BlockHash> = self.entries.keys().copied().collect();
        all.sort_unstable();
        self.disk.purging = true;
        for hash in all {
            self.entry(hash).forget_when_idle = true;
            self.settle(hash);
        }
    }

    /// Copies that are being read or written, for checks.
    #[must_use]
    pub fn in_use(&self) -> usize {
        let busy = |entry: &TierEntry| {
            matches!(entry.host, HostState::Filling(_) | HostState::Ready { readers: 1.., .. })
                || matches!(entry.disk, DiskState::Writing | DiskState::Ready { readers: 1.., .. })
        };
        self.entries.values().filter(|entry| busy(entry)).count()
    }

    fn entry(&mut self, hash: BlockHash) -> &mut TierEntry {
        self.entries.get_mut(&hash).expect("a copy in flight keeps its entry")
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn take_slot(&mut self) -> Option<HostSlot> {
        if self.host.free.is_empty() {
            let (_, hash) = self.host.idle.pop_first()?;
            let HostState::Ready { slot, readers: 0, .. } = self.entry(hash).host else {
                unreachable!("only what is ready and unread is idle")
            };
            self.entry(hash).host = HostState::Absent;
            self.host.counts.evicted += 1;
            self.host.free.push(slot);
            self.settle(hash);
        }
        self.host.free.pop()
    }

    fn end_filling(&mut self, hash: BlockHash, whole: bool) {
        let HostState::Filling(slot) = self.entry(hash).host else { unreachable!("it was being filled") };
        if whole {
            let used = self.tick();
            self.entry(hash).host = HostState::Ready { slot, readers: 0, used };
            self.host.idle.insert(used, hash);
            self.host.counts.stored += 1;
        } else {
            self.entry(hash).host = HostState::Absent;
            self.host.free.push(slot);
        }
        self.settle(hash);
    }

    /// Without a host tier a block leaves its slot after its last reader.
    fn pass_through(&mut self, hash: BlockHash) {
        if self.config.host_blocks == 0
            && let Some(TierEntry { host: host @ HostState::Ready { readers: 0, .. }, .. }) =
                self.entries.get_mut(&hash)
            && let HostState::Ready { slot, used, .. } = std::mem::take(host)
        {
            self.host.idle.remove(&used);
            self.host.free.push(slot);
            self.settle(hash);
        }
    }

    fn pin_host(&mut self, hash: BlockHash) {
        let HostState::Ready { readers, used, .. } = &mut self.entry(hash).host else {
            unreachable!("only what is ready is read")
        };
        *readers += 1;
        let used = *used;
        self.host.idle.remove(&used);
    }

    fn unpin_host(&mut self, hash: BlockHash) {
        let now = self.tick();
        let HostState::Ready { readers, used, .. } = &mut self.entry(hash).host else {
            unreachable!("what is read is ready")
        };
        *readers -= 1;
        *used = now;
        if *readers == 0 {
            self.host.idle.insert(now, hash);
        }
    }

    fn pin_disk(&mut self, hash: BlockHash) {
        let DiskState::Ready { readers, used, .. } = &mut self.entry(hash).disk else {
            unreachable!("only what is ready is read")
        };
        *readers += 1;
        let used = *used;
        self.disk.idle.remove(&used);
    }

    fn unpin_disk(&mut self, hash: BlockHash, found_lost: bool) {
        let now = self.tick();
        let DiskState::Ready { readers, used, lost } = &mut self.entry(hash).disk else {
            unreachable!("what is read is ready")
        };
        *readers -= 1;
        *used = now;
        *lost |= found_lost;
        match (*readers, *lost) {
            (0, false) => drop(self.disk.idle.insert(now, hash)),
            (0, true) => {
                // A reader deletes a damaged file. If that failed, the file is deleted later.
                self.entry(hash).disk = DiskState::Absent;
                self.disk.delete_later(hash);
            }
            (_, _) => {}
        }
    }

    /// Marks the file as used when its copy in the host tier is used.
    fn touch_disk(&mut self, hash: BlockHash) {
        let now = self.tick();
        if let DiskState::Ready { readers: 0, used, .. } = &mut self.entry(hash).disk {
            let before = std::mem::replace(used, now);
            self.disk.idle.remove(&before);
            self.disk.idle.insert(now, hash);
        }
    }

    fn evict_file(&mut self) -> bool {
        let Some((_, hash)) = self.disk.idle.pop_first() else { return false };
        self.entry(hash).disk = DiskState::Absent;
        self.disk.counts.evicted += 1;
        self.disk.delete_later(hash);
        self.settle(hash);
        true
    }

    /// Removes cleared copies that are idle, and an entry without copies.
    fn settle(&mut self, hash: BlockHash) {
        let Some(entry) = self.entries.get_mut(&hash) else { return };
        if entry.forget_when_idle {
            if let HostState::Ready { slot, readers: 0, used } = entry.host {
                entry.host = HostState::Absent;
                self.host.idle.remove(&used);
                self.host.free.push(slot);
            }
            if let DiskState::Ready { readers: 0, used, .. } = entry.disk {
                entry.disk = DiskState::Absent;
                self.disk.idle.remove(&used);
                self.disk.delete_later(hash);
            }
        }
        entry.withdraw(hash, &mut self.changes);
        if entry.host == HostState::Absent && entry.disk == DiskState::Absent {
            self.entries.remove(&hash);
        }
    }
}

#[cfg(test)]
mod tests;
