//! The tiers' books: which block is in which tier, what makes room for what, and which copy is in flight. Pure.
//!
//! ```text
//!   host:  absent ─ store, keep ─▶ Filling(slot) ─ done ─▶ Ready(slot, readers) ─ evicted (no reader) ─▶ absent
//!   disk:  absent ─ write ──────▶ Writing ─────── done ─▶ Ready(readers) ────── evicted (no reader) ─▶ owed ─▶ deleted
//! ```
//!
//! A file that is to go is *owed* until a worker has confirmed that it is deleted; what is owed goes before
//! anything more is written, so that the directory keeps to its bound.
//!
//! Invariants:
//! - A slot belongs to one block at most, and is given out again only when nothing reads or writes it.
//! - Least recently used goes first, by access; what is being read or written is never evicted.
//! - Files, those being written included, are at most `disk_blocks`; what is owed is deleted before more is written.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{HostSlot, Source, Tier, TierCounts};
use crate::blocks::hash::BlockHash;

/// Slots that a disk tier without a host tier passes its blocks through.
pub const STAGING_SLOTS: usize = 64;

/// Writes to disk in flight; each keeps its slot. A block that finds none free is not written.
pub const WRITES_MAX: usize = 256;

/// Owed deletions that go with one order.
const EVICTIONS_PER_ORDER_MAX: usize = 64;

/// Deletions of one order that does nothing else.
const DELETIONS_PER_ORDER_MAX: usize = 1024;

/// The tiers' sizes, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierConfig {
    /// Slots of the host tier; 0 is none.
    pub host_blocks: usize,
    /// Files of the disk tier; 0 is none.
    pub disk_blocks: usize,
}

impl TierConfig {
    /// Slots to set aside: the host tier's, or those that the disk tier passes through.
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
enum Host {
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
enum Disk {
    #[default]
    Absent,
    Writing,
    /// `gone`: a reader did not find it whole; nobody else is sent there, and it goes with its last reader.
    Ready {
        readers: u32,
        used: u64,
        gone: bool,
    },
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    host: Host,
    disk: Disk,
    /// Everything was to be forgotten while this was in use: it goes when it is not.
    doomed: bool,
}

/// A write that is to be ordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The slot to write.
    pub slot: HostSlot,
    /// Files to delete before.
    pub evict: Vec<BlockHash>,
}

/// How a load ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// The block is on the device.
    Whole,
    /// It is not, and the tier still has it.
    Not,
    /// It is not, and the tier has not got it either.
    Gone,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct TierBooks {
    config: TierConfig,
    entries: HashMap<BlockHash, Entry>,
    free: Vec<HostSlot>,
    /// Blocks that may be evicted, by last use.
    host_idle: BTreeMap<u64, BlockHash>,
    disk_idle: BTreeMap<u64, BlockHash>,
    /// Files that are to be deleted.
    owed: BTreeSet<BlockHash>,
    on_disk: usize,
    writes: usize,
    /// A deletion is in flight.
    deleting: bool,
    /// Everything was to be forgotten: what is owed does not wait for a write to go along with.
    purging: bool,
    clock: u64,
    disk_rests: bool,
    host: TierCounts,
    disk: TierCounts,
}

impl TierBooks {
    /// Empty tiers.
    #[must_use]
    pub fn new(config: TierConfig) -> Self {
        let slots = u32::try_from(config.slots()).expect("slots are counted in 32 bits");
        Self {
            config,
            entries: HashMap::new(),
            free: (0..slots).rev().map(HostSlot).collect(),
            host_idle: BTreeMap::new(),
            disk_idle: BTreeMap::new(),
            owed: BTreeSet::new(),
            on_disk: 0,
            writes: 0,
            deleting: false,
            purging: false,
            clock: 0,
            disk_rests: false,
            host: TierCounts { capacity: config.slots(), ..TierCounts::default() },
            disk: TierCounts { capacity: config.disk_blocks, ..TierCounts::default() },
        }
    }

    /// Files that were found at the start, least recently used first. What is too much is owed.
    pub fn adopt(&mut self, files: impl IntoIterator<Item = BlockHash>) {
        for hash in files {
            let used = self.tick();
            let entry = self.entries.entry(hash).or_default();
            if entry.disk == Disk::Absent {
                entry.disk = Disk::Ready { readers: 0, used, gone: false };
                self.disk_idle.insert(used, hash);
                self.on_disk += 1;
            }
        }
        while self.on_disk > self.config.disk_blocks && self.evict_file() {}
    }

    /// Counts of a tier.
    #[must_use]
    pub fn counts(&self, tier: Tier) -> TierCounts {
        match tier {
            Tier::Host => TierCounts { blocks: self.config.slots() - self.free.len(), ..self.host },
            Tier::Disk => TierCounts { blocks: self.on_disk, ..self.disk },
        }
    }

    /// Whether the disk is left alone.
    #[must_use]
    pub fn disk_rests(&self) -> bool {
        self.disk_rests
    }

    /// The disk fails, or works again.
    pub fn set_disk_rests(&mut self, rests: bool) {
        self.disk_rests = rests;
    }

    /// How many blocks at the start of this chain can be loaded.
    #[must_use]
    pub fn run(&self, chain: &[BlockHash]) -> usize {
        chain.iter().take_while(|hash| self.has(**hash)).count()
    }

    fn has(&self, hash: BlockHash) -> bool {
        self.entries.get(&hash).is_some_and(|entry| {
            let on_disk = matches!(entry.disk, Disk::Ready { gone: false, .. }) && !self.disk_rests;
            !entry.doomed && (matches!(entry.host, Host::Ready { .. }) || on_disk)
        })
    }

    /// Whether a block need not be stored: it is in a tier or on its way there.
    #[must_use]
    pub fn knows(&self, hash: BlockHash) -> bool {
        self.entries.contains_key(&hash)
    }

    /// A slot for a block that is not in any tier. `None` when all are in use.
    pub fn begin_store(&mut self, hash: BlockHash) -> Option<HostSlot> {
        debug_assert!(!self.knows(hash), "asked before");
        let slot = self.take_slot()?;
        self.entries.insert(hash, Entry { host: Host::Filling(slot), ..Entry::default() });
        Some(slot)
    }

    /// A store is over. If the block is to go on to the disk, says how.
    pub fn end_store(&mut self, hash: BlockHash, whole: bool) -> Option<Write> {
        self.end_filling(hash, whole);
        let write = if whole { self.begin_write(hash) } else { None };
        self.pass_through(hash);
        write
    }

    /// The write that a block in a slot should get, if it may have one now.
    fn begin_write(&mut self, hash: BlockHash) -> Option<Write> {
        let entry = self.entries.get(&hash)?;
        let (Host::Ready { slot, .. }, Disk::Absent, false) = (entry.host, entry.disk, entry.doomed) else {
            return None;
        };
        if self.config.disk_blocks == 0 || self.disk_rests || self.writes >= WRITES_MAX {
            return None;
        }
        while self.on_disk >= self.config.disk_blocks {
            if !self.evict_file() {
                return None;
            }
        }
        // A file that is written anew is not to be deleted afterwards.
        self.owed.remove(&hash);
        if self.on_disk + self.owed.len().saturating_sub(EVICTIONS_PER_ORDER_MAX) >= self.config.disk_blocks {
            // Too much is owed to go with one order; [`Self::begin_delete`] comes first.
            return None;
        }
        let evict: Vec<_> = self.owed.iter().take(EVICTIONS_PER_ORDER_MAX).copied().collect();
        self.writes += 1;
        self.on_disk += 1;
        self.entry(hash).disk = Disk::Writing;
        self.pin_host(hash);
        Some(Write { slot, evict })
    }

    /// Whether the disk could not take a block that reached the host tier: too many writes are in flight, it rests, or
    /// everything on it is being read.
    #[must_use]
    pub fn lacks_file(&self, hash: BlockHash) -> bool {
        self.config.disk_blocks > 0
            && self.entries.get(&hash).is_some_and(|entry| entry.disk == Disk::Absent && !entry.doomed)
    }

    /// A write is over. `evicted` are the files that went with the order; without success they stay owed.
    pub fn end_write(&mut self, hash: BlockHash, evicted: &[BlockHash], whole: bool) {
        self.writes -= 1;
        if whole {
            self.deleted(evicted);
            self.disk.stored += 1;
            let used = self.tick();
            self.entry(hash).disk = Disk::Ready { readers: 0, used, gone: false };
            self.disk_idle.insert(used, hash);
        } else {
            // Something may have been left of it.
            self.on_disk -= 1;
            self.entry(hash).disk = Disk::Absent;
            self.owed.insert(hash);
        }
        self.unpin_host(hash);
        self.pass_through(hash);
        self.settle(hash);
    }

    /// Files to delete by themselves: when more is owed than goes along with writes.
    pub fn begin_delete(&mut self) -> Option<Vec<BlockHash>> {
        if self.purging && self.owed.is_empty() {
            // What was in use is owed when it is not.
            self.purging = self.entries.values().any(|entry| entry.doomed);
        }
        let waits = self.owed.len() <= EVICTIONS_PER_ORDER_MAX && !self.purging;
        if self.owed.is_empty() || waits || self.deleting || self.disk_rests {
            return None;
        }
        self.deleting = true;
        Some(self.owed.iter().take(DELETIONS_PER_ORDER_MAX).copied().collect())
    }

    /// A deletion is over.
    pub fn end_delete(&mut self, hashes: &[BlockHash], whole: bool) {
        self.deleting = false;
        if whole {
            self.deleted(hashes);
        } else {
            // Not again at once: what is owed goes along with later writes.
            self.purging = false;
        }
    }

    fn deleted(&mut self, hashes: &[BlockHash]) {
        for hash in hashes {
            self.owed.remove(hash);
        }
    }

    /// Starts to read a block for the device. `None` when no tier has it (any more).
    pub fn begin_load(&mut self, hash: BlockHash) -> Option<Source> {
        if !self.has(hash) {
            return None;
        }
        if let Host::Ready { slot, .. } = self.entry(hash).host {
            self.pin_host(hash);
            return Some(Source::Host(slot));
        }
        self.pin_disk(hash);
        let filling = self.entry(hash).host != Host::Absent;
        let keep = if filling || self.config.host_blocks == 0 { None } else { self.take_slot() };
        if let Some(slot) = keep {
            self.entry(hash).host = Host::Filling(slot);
        }
        Some(Source::Disk { keep })
    }

    /// Starts to read a chain of blocks that [`Self::run`] has counted. What is in the host tier is taken first, so that
    /// a block that comes from disk does not push out one that is about to be read.
    pub fn begin_loads(&mut self, chain: &[BlockHash]) -> Vec<Source> {
        let mut sources = vec![None; chain.len()];
        for (source, &hash) in sources.iter_mut().zip(chain) {
            if matches!(self.entries.get(&hash), Some(Entry { host: Host::Ready { .. }, .. })) {
                *source = self.begin_load(hash);
            }
        }
        for (source, &hash) in sources.iter_mut().zip(chain) {
            *source = source.or_else(|| self.begin_load(hash));
        }
        sources.into_iter().map(|source| source.expect("the tiers have it")).collect()
    }

    /// A load is over.
    pub fn end_load(&mut self, hash: BlockHash, from: Source, how: Loaded) {
        let whole = how == Loaded::Whole;
        match from {
            Source::Host(_) => {
                self.host.loaded += u64::from(whole);
                self.unpin_host(hash);
                self.touch_disk(hash);
                self.pass_through(hash);
            }
            Source::Disk { keep } => {
                self.disk.loaded += u64::from(whole);
                if keep.is_some() {
                    self.end_filling(hash, whole);
                }
                self.unpin_disk(hash, how == Loaded::Gone);
            }
        }
        self.settle(hash);
    }

    /// A request that used this chain is over: its blocks are used now, the first of them last, so that a prefix
    /// outlives its tail.
    pub fn touch(&mut self, chain: &[BlockHash]) {
        for &hash in chain.iter().rev() {
            let now = self.tick();
            if let Some(Entry { host: Host::Ready { readers: 0, used, .. }, .. }) =
                self.entries.get_mut(&hash)
            {
                let before = std::mem::replace(used, now);
                self.host_idle.remove(&before);
                self.host_idle.insert(now, hash);
            }
            if self.entries.contains_key(&hash) {
                self.touch_disk(hash);
            }
        }
    }

    /// Forgets everything that is not in use now, and the rest as soon as it is not. The files are owed.
    pub fn clear(&mut self) {
        let mut all: Vec<BlockHash> = self.entries.keys().copied().collect();
        all.sort_unstable();
        self.purging = true;
        for hash in all {
            self.entry(hash).doomed = true;
            self.settle(hash);
        }
    }

    /// Copies that are read or written now, for checks.
    #[must_use]
    pub fn in_use(&self) -> usize {
        let busy = |entry: &Entry| {
            matches!(entry.host, Host::Filling(_) | Host::Ready { readers: 1.., .. })
                || matches!(entry.disk, Disk::Writing | Disk::Ready { readers: 1.., .. })
        };
        self.entries.values().filter(|entry| busy(entry)).count()
    }

    fn entry(&mut self, hash: BlockHash) -> &mut Entry {
        self.entries.get_mut(&hash).expect("a copy in flight keeps its entry")
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn take_slot(&mut self) -> Option<HostSlot> {
        if self.free.is_empty() {
            let (_, hash) = self.host_idle.pop_first()?;
            let Host::Ready { slot, readers: 0, .. } = self.entry(hash).host else {
                unreachable!("only what is ready and unread is idle")
            };
            self.entry(hash).host = Host::Absent;
            self.host.evicted += 1;
            self.free.push(slot);
            self.settle(hash);
        }
        self.free.pop()
    }

    fn end_filling(&mut self, hash: BlockHash, whole: bool) {
        let Host::Filling(slot) = self.entry(hash).host else { unreachable!("it was being filled") };
        if whole {
            let used = self.tick();
            self.entry(hash).host = Host::Ready { slot, readers: 0, used };
            self.host_idle.insert(used, hash);
            self.host.stored += 1;
        } else {
            self.entry(hash).host = Host::Absent;
            self.free.push(slot);
        }
        self.settle(hash);
    }

    /// Without a host tier a block leaves its slot when nobody reads it there any more.
    fn pass_through(&mut self, hash: BlockHash) {
        if self.config.host_blocks == 0
            && let Some(Entry { host: host @ Host::Ready { readers: 0, .. }, .. }) =
                self.entries.get_mut(&hash)
            && let Host::Ready { slot, used, .. } = std::mem::take(host)
        {
            self.host_idle.remove(&used);
            self.free.push(slot);
            self.settle(hash);
        }
    }

    fn pin_host(&mut self, hash: BlockHash) {
        let Host::Ready { readers, used, .. } = &mut self.entry(hash).host else {
            unreachable!("only what is ready is read")
        };
        *readers += 1;
        let used = *used;
        self.host_idle.remove(&used);
    }

    fn unpin_host(&mut self, hash: BlockHash) {
        let now = self.tick();
        let Host::Ready { readers, used, .. } = &mut self.entry(hash).host else {
            unreachable!("what is read is ready")
        };
        *readers -= 1;
        *used = now;
        if *readers == 0 {
            self.host_idle.insert(now, hash);
        }
    }

    fn pin_disk(&mut self, hash: BlockHash) {
        let Disk::Ready { readers, used, .. } = &mut self.entry(hash).disk else {
            unreachable!("only what is ready is read")
        };
        *readers += 1;
        let used = *used;
        self.disk_idle.remove(&used);
    }

    fn unpin_disk(&mut self, hash: BlockHash, found_gone: bool) {
        let now = self.tick();
        let Disk::Ready { readers, used, gone } = &mut self.entry(hash).disk else {
            unreachable!("what is read is ready")
        };
        *readers -= 1;
        *used = now;
        *gone |= found_gone;
        match (*readers, *gone) {
            (0, false) => drop(self.disk_idle.insert(now, hash)),
            (0, true) => {
                // A corrupt file was deleted where it was found; should that have failed, it is deleted later.
                self.entry(hash).disk = Disk::Absent;
                self.on_disk -= 1;
                self.owed.insert(hash);
            }
            (_, _) => {}
        }
    }

    /// What is used in the host tier is used: its file outlives others.
    fn touch_disk(&mut self, hash: BlockHash) {
        let now = self.tick();
        if let Disk::Ready { readers: 0, used, .. } = &mut self.entry(hash).disk {
            let before = std::mem::replace(used, now);
            self.disk_idle.remove(&before);
            self.disk_idle.insert(now, hash);
        }
    }

    fn evict_file(&mut self) -> bool {
        let Some((_, hash)) = self.disk_idle.pop_first() else { return false };
        self.entry(hash).disk = Disk::Absent;
        self.on_disk -= 1;
        self.disk.evicted += 1;
        self.owed.insert(hash);
        self.settle(hash);
        true
    }

    /// Drops what is doomed and not in use, and an entry that stands for nothing.
    fn settle(&mut self, hash: BlockHash) {
        let Some(entry) = self.entries.get_mut(&hash) else { return };
        if entry.doomed {
            if let Host::Ready { slot, readers: 0, used } = entry.host {
                entry.host = Host::Absent;
                self.host_idle.remove(&used);
                self.free.push(slot);
            }
            if let Disk::Ready { readers: 0, used, .. } = entry.disk {
                entry.disk = Disk::Absent;
                self.disk_idle.remove(&used);
                self.on_disk -= 1;
                self.owed.insert(hash);
            }
        }
        if entry.host == Host::Absent && entry.disk == Disk::Absent {
            self.entries.remove(&hash);
        }
    }
}

#[cfg(test)]
mod tests;
