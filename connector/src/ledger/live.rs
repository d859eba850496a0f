//! The live leases, in places that are used again, with an index by handle and one by request.
//!
//! The entries lie close together whatever the handles are, and who refers to one ([`Slot`]) sees whether it is
//! still the same: a place that is used again has another generation.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::time::Duration;

use super::LeaseView;
use crate::lease::Lease;
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
    entry: Option<Entry>,
}

/// The leases of one request: nearly always one.
#[derive(Debug)]
struct OfRequest {
    first: Slot,
    more: Vec<Slot>,
}

#[derive(Debug, Default)]
pub(super) struct Live {
    places: Vec<Place>,
    /// Used last, given out first.
    free: Vec<u32>,
    by_handle: HashMap<Handle, Slot>,
    by_request: HashMap<RequestId, OfRequest>,
}

impl Live {
    pub(super) fn len(&self) -> usize {
        self.by_handle.len()
    }

    /// Where the lease of this handle is, if it lives.
    pub(super) fn find(&self, handle: Handle) -> Option<Slot> {
        self.by_handle.get(&handle).copied()
    }

    /// Where the leases of this request are.
    pub(super) fn find_request(&self, request: &RequestId) -> Vec<Slot> {
        let of = self.by_request.get(request);
        of.map_or_else(Vec::new, |of| [&[of.first][..], &of.more].concat())
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&Entry> {
        let place = self.places.get(slot.index as usize)?;
        place.entry.as_ref().filter(|_| place.generation == slot.generation)
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> Option<&mut Entry> {
        let place = self.places.get_mut(slot.index as usize)?;
        place.entry.as_mut().filter(|_| place.generation == slot.generation)
    }

    /// # Panics
    /// When a lease of the same handle lives: handles are 128 random bits.
    pub(super) fn insert(&mut self, entry: Entry) -> Slot {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place { generation: 0, entry: None });
            u32::try_from(self.places.len() - 1).expect("LEASES_MAX fits into 32 bits")
        });
        let place = &mut self.places[index as usize];
        let slot = Slot { index, generation: place.generation };
        let clash = self.by_handle.insert(entry.handle, slot);
        assert!(clash.is_none(), "handles are 128 random bits");
        match self.by_request.entry(entry.request.clone()) {
            MapEntry::Vacant(vacant) => drop(vacant.insert(OfRequest { first: slot, more: Vec::new() })),
            MapEntry::Occupied(mut of) => of.get_mut().more.push(slot),
        }
        place.entry = Some(entry);
        slot
    }

    pub(super) fn remove(&mut self, slot: Slot) -> Option<Entry> {
        self.get(slot)?;
        let place = &mut self.places[slot.index as usize];
        place.generation = place.generation.wrapping_add(1);
        self.free.push(slot.index);
        let entry = place.entry.take()?;
        self.by_handle.remove(&entry.handle);
        if let MapEntry::Occupied(mut occupied) = self.by_request.entry(entry.request.clone()) {
            let of = occupied.get_mut();
            if of.first != slot {
                of.more.retain(|other| *other != slot);
            } else if let Some(next) = of.more.pop() {
                of.first = next;
            } else {
                occupied.remove();
            }
        }
        Some(entry)
    }

    /// Every live lease, in the order of their places.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &Entry)> {
        self.places.iter().enumerate().filter_map(|(index, place)| {
            let slot = Slot { index: index as u32, generation: place.generation };
            place.entry.as_ref().map(|entry| (slot, entry))
        })
    }
}
