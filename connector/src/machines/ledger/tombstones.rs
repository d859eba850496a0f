//! A producer's memory of ended leases and of requests that were released before they were known. It is bounded in
//! number and in time.

use std::collections::{HashMap, VecDeque};

use crate::limits::{TOMBSTONE_TTL, TOMBSTONES_MAX};
use crate::machines::lease::CloseCause;
use crate::{Handle, Reader, RequestId, Time};

#[derive(Debug)]
enum Tombstone {
    Handle(Handle),
    Request(RequestId),
}

#[derive(Debug, Default)]
pub(super) struct Tombstones {
    /// Ended leases, with the readers whose bytes were valid.
    ended: HashMap<Handle, (CloseCause, Vec<Reader>)>,
    /// Requests released early, with the reason.
    released: HashMap<RequestId, Box<str>>,
    /// The oldest first.
    order: VecDeque<(Time, Tombstone)>,
}

impl Tombstones {
    /// Records the end of a lease and the readers that had finished.
    pub(super) fn record_ended(
        &mut self,
        handle: Handle,
        cause: CloseCause,
        finished: Vec<Reader>,
        now: Time,
    ) {
        self.push(Tombstone::Handle(handle), now);
        self.ended.insert(handle, (cause, finished));
    }

    /// Records the release of a request that is not known yet.
    pub(super) fn record_released(&mut self, request: &RequestId, reason: &str, now: Time) {
        if !self.released.contains_key(request) {
            self.push(Tombstone::Request(request.clone()), now);
            self.released.insert(request.clone(), reason.into());
        }
    }

    /// Whether a lease of this handle has ended.
    pub(super) fn has(&self, handle: Handle) -> bool {
        self.ended.contains_key(&handle)
    }

    /// Whether this reader had finished before the lease ended.
    pub(super) fn had_finished(&self, handle: Handle, reader: Reader) -> bool {
        self.ended.get(&handle).is_some_and(|(_, finished)| finished.contains(&reader))
    }

    /// Whether the request was released before it was known.
    pub(super) fn has_request(&self, request: &RequestId) -> bool {
        self.released.contains_key(request)
    }

    /// Every ended lease, with its cause and the readers that had finished.
    pub(super) fn ended(&self) -> impl Iterator<Item = (Handle, CloseCause, Vec<Reader>)> {
        self.ended.iter().map(|(handle, (cause, finished))| (*handle, *cause, finished.clone()))
    }

    /// Every request that was released before it was known.
    pub(super) fn released(&self) -> impl Iterator<Item = &RequestId> {
        self.released.keys()
    }

    /// Forgets tombstones older than [`TOMBSTONE_TTL`].
    pub(super) fn tick(&mut self, now: Time) {
        while self.order.front().is_some_and(|(since, _)| now.since(*since) >= TOMBSTONE_TTL) {
            self.forget_oldest();
        }
    }

    fn push(&mut self, tombstone: Tombstone, now: Time) {
        if self.order.len() >= TOMBSTONES_MAX {
            self.forget_oldest();
        }
        self.order.push_back((now, tombstone));
    }

    fn forget_oldest(&mut self) {
        match self.order.pop_front() {
            Some((_, Tombstone::Handle(handle))) => drop(self.ended.remove(&handle)),
            Some((_, Tombstone::Request(request))) => drop(self.released.remove(&request)),
            None => {}
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        assert_eq!(self.ended.len() + self.released.len(), self.order.len());
        self.order.len()
    }
}
