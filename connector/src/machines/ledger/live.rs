//! The live leases, in reused slots, with an index by handle and one by request.
//!
//! The entries are contiguous in memory. A reused slot gets another generation, so a [`LeaseSlot`] of an ended lease
//! finds nothing. The indices contain numbers only, to stay small: with 100,000 leases, cache misses in them dominate.
//! The leases of one request are a chain through their entries.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use super::LeaseView;
use crate::machines::lease::Lease;
use crate::{BlockId, Handle, RequestId, Time};

/// A slot, and the generation of its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LeaseSlot {
    index: u32,
    generation: u32,
}

#[derive(Debug)]
pub(super) struct LeaseEntry {
    pub(super) lease: Lease,
    pub(super) handle: Handle,
    pub(super) request: RequestId,
    pub(super) blocks: Vec<BlockId>,
    /// Number of final blocks, from the first on.
    pub(super) ready: usize,
    pub(super) opened: Time,
    pub(super) reason: Option<Box<str>>,
}

impl LeaseEntry {
    pub(super) fn view(&self, now: Time) -> LeaseView {
        LeaseView {
            request: self.request.clone(),
            blocks: self.blocks.len(),
            state: self.lease.state(),
            age: now.since(self.opened),
            remaining: self.lease.deadline().map_or(Duration::ZERO, |deadline| deadline.since(now)),
            readers: self.lease.progress(),
        }
    }
}

#[derive(Debug)]
struct SlabSlot {
    generation: u32,
    chained: Option<ChainedEntry>,
}

#[derive(Debug)]
struct ChainedEntry {
    entry: LeaseEntry,
    /// The hash of the request id.
    key: u64,
    /// The neighbours in the chain of that key, by the index of their slots.
    older: Option<u32>,
    newer: Option<u32>,
}

/// A handle as a key. It needs no alignment to 16 bytes, which makes the index smaller.
type HandleKey = [u32; 4];

fn handle_key(handle: Handle) -> HandleKey {
    let number = handle.0;
    [number as u32, (number >> 32) as u32, (number >> 64) as u32, (number >> 96) as u32]
}

#[derive(Debug, Default)]
pub(super) struct LiveLeases {
    slots: Vec<SlabSlot>,
    /// The slot that was freed last is reused first.
    free: Vec<u32>,
    by_handle: HashMap<HandleKey, u32>,
    /// The newest lease for each hash of a request id. Clients choose the ids, so the hash is seeded.
    by_request: HashMap<u64, u32>,
    names: RandomState,
}

impl LiveLeases {
    pub(super) fn len(&self) -> usize {
        self.by_handle.len()
    }

    /// The slot of the live lease with this handle.
    pub(super) fn find(&self, handle: Handle) -> Option<LeaseSlot> {
        self.by_handle.get(&handle_key(handle)).map(|&index| self.slot(index))
    }

    /// The slots of this request's leases, the oldest first.
    pub(super) fn find_request(&self, request: &RequestId) -> Vec<LeaseSlot> {
        let mut found = Vec::new();
        let mut next = self.by_request.get(&self.names.hash_one(request)).copied();
        while let Some(chained) = next.and_then(|index| self.chained(index)) {
            // Two ids may have one hash.
            if chained.entry.request == *request {
                found.extend(next.map(|index| self.slot(index)));
            }
            next = chained.older;
        }
        found.reverse();
        found
    }

    pub(super) fn get(&self, slot: LeaseSlot) -> Option<&LeaseEntry> {
        let chained = self.chained(slot.index)?;
        (self.slot(slot.index) == slot).then_some(&chained.entry)
    }

    pub(super) fn get_mut(&mut self, slot: LeaseSlot) -> Option<&mut LeaseEntry> {
        let cell = self.slots.get_mut(slot.index as usize)?;
        cell.chained.as_mut().filter(|_| cell.generation == slot.generation).map(|chained| &mut chained.entry)
    }

    /// # Panics
    /// When a live lease has the same handle: handles are 128 random bits.
    pub(super) fn insert(&mut self, entry: LeaseEntry) -> LeaseSlot {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(SlabSlot { generation: 0, chained: None });
            u32::try_from(self.slots.len() - 1).expect("LEASES_MAX fits into 32 bits")
        });
        let clash = self.by_handle.insert(handle_key(entry.handle), index);
        assert!(clash.is_none(), "handles are 128 random bits");
        let key = self.names.hash_one(&entry.request);
        let older = self.by_request.insert(key, index);
        self.link(older, |chained| chained.newer = Some(index));
        self.slots[index as usize].chained = Some(ChainedEntry { entry, key, older, newer: None });
        self.slot(index)
    }

    pub(super) fn remove(&mut self, slot: LeaseSlot) -> Option<LeaseEntry> {
        self.get(slot)?;
        let cell = &mut self.slots[slot.index as usize];
        cell.generation = cell.generation.wrapping_add(1);
        self.free.push(slot.index);
        let ChainedEntry { entry, key, older, newer } = cell.chained.take()?;
        self.by_handle.remove(&handle_key(entry.handle));
        self.link(older, |chained| chained.newer = newer);
        self.link(newer, |chained| chained.older = older);
        match (newer, older) {
            (Some(_), _) => {}
            (None, Some(older)) => drop(self.by_request.insert(key, older)),
            (None, None) => drop(self.by_request.remove(&key)),
        }
        Some(entry)
    }

    /// Every live lease, in the order of their slots.
    pub(super) fn iter(&self) -> impl Iterator<Item = (LeaseSlot, &LeaseEntry)> {
        self.slots.iter().enumerate().filter_map(|(index, cell)| {
            let slot = LeaseSlot { index: index as u32, generation: cell.generation };
            cell.chained.as_ref().map(|chained| (slot, &chained.entry))
        })
    }

    fn slot(&self, index: u32) -> LeaseSlot {
        LeaseSlot { index, generation: self.slots[index as usize].generation }
    }

    fn chained(&self, index: u32) -> Option<&ChainedEntry> {
        self.slots.get(index as usize)?.chained.as_ref()
    }

    /// Changes the neighbours of the lease in this slot, if any.
    fn link(&mut self, index: Option<u32>, change: impl FnOnce(&mut ChainedEntry)) {
        let cell = index.and_then(|index| self.slots.get_mut(index as usize));
        if let Some(chained) = cell.and_then(|cell| cell.chained.as_mut()) {
            change(chained);
        }
    }
}
