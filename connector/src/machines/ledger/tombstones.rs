//! What a producer remembers of leases that have ended and of requests that were given up before they were known:
//! a bounded number, for a bounded time.

use std::collections::{HashMap, VecDeque};

use crate::limits::{TOMBSTONE_KEPT, TOMBSTONES_MAX};
use crate::machines::lease::Cause;
use crate::{Handle, Reader, RequestId, Time};

#[derive(Debug)]
enum Tombstone {
    Handle(Handle),
    Request(RequestId),
}

#[derive(Debug, Default)]
pub(super) struct Tombstones {
    /// With the readers whose bytes were valid.
    ended: HashMap<Handle, (Cause, Vec<Reader>)>,
    /// With the reason that was given.
    released: HashMap<RequestId, Box<str>>,
    /// The oldest first.
    order: VecDeque<(Time, Tombstone)>,
}

impl Tombstones {
    /// The lease has ended; these readers had finished.
    pub(super) fn bury(&mut self, handle: Handle, cause: Cause, finished: Vec<Reader>, now: Time) {
        self.push(Tombstone::Handle(handle), now);
        self.ended.insert(handle, (cause, finished));
    }

    /// The request was given up before it was known.
    pub(super) fn bury_request(&mut self, request: &RequestId, reason: &str, now: Time) {
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

    /// Whether the request was given up before it was known.
    pub(super) fn has_request(&self, request: &RequestId) -> bool {
        self.released.contains_key(request)
    }

    /// Every lease that has ended, with why, and who had finished.
    pub(super) fn ended(&self) -> impl Iterator<Item = (Handle, Cause, Vec<Reader>)> {
        self.ended.iter().map(|(handle, (cause, finished))| (*handle, *cause, finished.clone()))
    }

    /// Every request that was given up before it was known.
    pub(super) fn released(&self) -> impl Iterator<Item = &RequestId> {
        self.released.keys()
    }

    /// Forgets what is old.
    pub(super) fn tick(&mut self, now: Time) {
        while self.order.front().is_some_and(|(since, _)| now.since(*since) >= TOMBSTONE_KEPT) {
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
