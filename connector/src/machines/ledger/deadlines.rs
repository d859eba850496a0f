//! Deadlines in order, some of them stale.
//!
//! All leases have the same initial duration, so most deadlines arrive in the order in which they are due. Those are in
//! a queue, and only the others (renewed leases, drains) in a heap. Opening a lease and expiring one without renewals
//! are O(1), the rest is O(log n).
//!
//! A heartbeat or an early end leaves a stale entry behind, which is discarded when it is due. So neither costs
//! anything here. A live lease has at most two entries: its expiry and its drain. With more than four entries per live
//! lease, the entries of ended leases are removed. At least half of all entries go then, so the cost per entry is O(1)
//! on average.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::live::LeaseSlot;
use crate::Time;

/// Stale entries that never cause a compaction, however few leases there are.
const SLACK: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Deadlines {
    /// Entries in order of their time.
    queue: VecDeque<(Time, LeaseSlot)>,
    /// Entries that arrived out of order.
    heap: BinaryHeap<Reverse<(Time, LeaseSlot)>>,
}

impl Deadlines {
    /// Schedules a check of this lease at that time.
    pub(super) fn push(&mut self, due: Time, slot: LeaseSlot) {
        if self.queue.back().is_none_or(|(last, _)| *last <= due) {
            self.queue.push_back((due, slot));
        } else {
            self.heap.push(Reverse((due, slot)));
        }
    }

    /// The next lease whose check is due.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<LeaseSlot> {
        let queued = self.queue.front().map(|(due, _)| *due);
        let heaped = self.heap.peek().map(|Reverse((due, _))| *due);
        match (queued, heaped) {
            (Some(queued), heaped) if queued <= now && heaped.is_none_or(|heaped| queued <= heaped) => {
                self.queue.pop_front().map(|(_, slot)| slot)
            }
            (_, Some(heaped)) if heaped <= now => self.heap.pop().map(|Reverse((_, slot))| slot),
            _ => None,
        }
    }

    /// The time of the next entry; no deadline is earlier.
    pub(super) fn next(&self) -> Option<Time> {
        let queued = self.queue.front().map(|(due, _)| *due);
        let heaped = self.heap.peek().map(|Reverse((due, _))| *due);
        queued.into_iter().chain(heaped).min()
    }

    /// Whether so many entries are stale that [`Self::retain`] is worth its scan.
    pub(super) fn needs_compaction(&self, live: usize) -> bool {
        self.len() > 4 * live + SLACK
    }

    /// Keeps the entries of live leases.
    pub(super) fn retain(&mut self, lives: impl Fn(LeaseSlot) -> bool) {
        self.queue.retain(|(_, slot)| lives(*slot));
        self.heap.retain(|Reverse((_, slot))| lives(*slot));
    }

    /// Entries, stale ones included.
    pub(super) fn len(&self) -> usize {
        self.queue.len() + self.heap.len()
    }

    /// Whether a check of the lease is scheduled by that time. A scan, for checks only.
    pub(super) fn is_scheduled(&self, slot: LeaseSlot, due: Time) -> bool {
        let mut all = self.queue.iter().chain(self.heap.iter().map(|Reverse(entry)| entry));
        all.any(|(at, entry)| *entry == slot && *at <= due)
    }
}
