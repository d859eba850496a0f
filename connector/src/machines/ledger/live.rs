//! The live leases, in places that are used again, with an index by handle and one by request.
//!
//! The entries lie close together whatever the handles are, and who refers to one ([`Slot`]) sees whether it is
//! still the same: a place that is used again has another generation. The indices hold numbers only, so that they are
//! small: with 100,000 leases it is the misses in them that cost. The leases of one request are a chain through
//! their entries.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use super::LeaseView;
use crate::machines::lease::Lease;
use crate::{BlockId, Handle, RequestId, Time};

/// A place, and which of its tenants is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot {
    index: u32,
    generation: u32,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) lease: Lease,
    pub(super) handle: Handle,
    pub(super) request: RequestId,
    pub(super) blocks: Vec<BlockId>,
    /// How many of them are final, from the first.
    pub(super) ready: usize,
    pub(super) opened: Time,
    pub(super) reason: Option<Box<str>>,
}

impl Entry {
    pub(super) fn view(&self, now: Time) -> LeaseView {
        LeaseView {
            request: self.request.clone(),
            blocks: self.blocks.len(),
            state: self.lease.state(),
            age: now.since(self.opened),
            left: self.lease.deadline().map_or(Duration::ZERO, |deadline| deadline.since(now)),
            readers: self.lease.progress(),
        }
    }
}

#[derive(Debug)]
struct Place {
    generation: u32,
    tenant: Option<Tenant>,
}

#[derive(Debug)]
struct Tenant {
    entry: Entry,
    /// The hash of its request's name.
    key: u64,
    /// Its neighbours in the chain of that key, by the index of their places.
    older: Option<u32>,
    newer: Option<u32>,
}

/// A handle as a key: half as large, for it needs no alignment to 16 bytes.
type HandleKey = [u32; 4];

fn handle_key(handle: Handle) -> HandleKey {
    let number = handle.0;
    [number as u32, (number >> 32) as u32, (number >> 64) as u32, (number >> 96) as u32]
}

#[derive(Debug, Default)]
pub(super) struct Live {
    places: Vec<Place>,
    /// Used last, given out first.
    free: Vec<u32>,
    by_handle: HashMap<HandleKey, u32>,
    /// The newest lease for each hash of a request's name. Names come from outside, so the hash is seeded.
    by_request: HashMap<u64, u32>,
    names: RandomState,
}

impl Live {
    pub(super) fn len(&self) -> usize {
        self.by_handle.len()
    }

    /// Where the lease of this handle is, if it lives.
    pub(super) fn find(&self, handle: Handle) -> Option<Slot> {
        self.by_handle.get(&handle_key(handle)).map(|&index| self.slot(index))
    }

    /// Where the leases of this request are, the oldest first.
    pub(super) fn find_request(&self, request: &RequestId) -> Vec<Slot> {
        let mut found = Vec::new();
        let mut next = self.by_request.get(&self.names.hash_one(request)).copied();
        while let Some(tenant) = next.and_then(|index| self.tenant(index)) {
            // Two names may have one hash.
            if tenant.entry.request == *request {
                found.extend(next.map(|index| self.slot(index)));
            }
            next = tenant.older;
        }
        found.reverse();
        found
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&Entry> {
        let tenant = self.tenant(slot.index)?;
        (self.slot(slot.index) == slot).then_some(&tenant.entry)
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> Option<&mut Entry> {
        let place = self.places.get_mut(slot.index as usize)?;
        place.tenant.as_mut().filter(|_| place.generation == slot.generation).map(|tenant| &mut tenant.entry)
    }

    /// # Panics
    /// When a lease of the same handle lives: handles are 128 random bits.
    pub(super) fn insert(&mut self, entry: Entry) -> Slot {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place { generation: 0, tenant: None });
            u32::try_from(self.places.len() - 1).expect("LEASES_MAX fits into 32 bits")
        });
        let clash = self.by_handle.insert(handle_key(entry.handle), index);
        assert!(clash.is_none(), "handles are 128 random bits");
        let key = self.names.hash_one(&entry.request);
        let older = self.by_request.insert(key, index);
        self.link(older, |tenant| tenant.newer = Some(index));
        self.places[index as usize].tenant = Some(Tenant { entry, key, older, newer: None });
        self.slot(index)
    }

    pub(super) fn remove(&mut self, slot: Slot) -> Option<Entry> {
        self.get(slot)?;
        let place = &mut self.places[slot.index as usize];
        place.generation = place.generation.wrapping_add(1);
        self.free.push(slot.index);
        let Tenant { entry, key, older, newer } = place.tenant.take()?;
        self.by_handle.remove(&handle_key(entry.handle));
        self.link(older, |tenant| tenant.newer = newer);
        self.link(newer, |tenant| tenant.older = older);
        match (newer, older) {
            (Some(_), _) => {}
            (None, Some(older)) => drop(self.by_request.insert(key, older)),
            (None, None) => drop(self.by_request.remove(&key)),
        }
        Some(entry)
    }

    /// Every live lease, in the order of their places.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &Entry)> {
        self.places.iter().enumerate().filter_map(|(index, place)| {
            let slot = Slot { index: index as u32, generation: place.generation };
            place.tenant.as_ref().map(|tenant| (slot, &tenant.entry))
        })
    }

    fn slot(&self, index: u32) -> Slot {
        Slot { index, generation: self.places[index as usize].generation }
    }

    fn tenant(&self, index: u32) -> Option<&Tenant> {
        self.places.get(index as usize)?.tenant.as_ref()
    }

    /// Changes the neighbours of a lease, if there is one there.
    fn link(&mut self, index: Option<u32>, change: impl FnOnce(&mut Tenant)) {
        let place = index.and_then(|index| self.places.get_mut(index as usize));
        if let Some(tenant) = place.and_then(|place| place.tenant.as_mut()) {
            change(tenant);
        }
    }
}
