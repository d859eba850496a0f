//! When time next ends something: deadlines in order, of which some are no longer true.
//!
//! Every lease lives as long as every other when it is opened, so most deadlines come in the order in which they
//! will be due: those stand in a queue, and only the others (renewed leases, drains) in a heap. Opening a lease and
//! expiring one that nobody renewed are O(1), the rest is O(log n).
//!
//! A lease whose deadline moves on (a heartbeat) or that ends early leaves its entry behind; the entry is looked at
//! when it comes up. So a heartbeat costs nothing here, and an end costs nothing here. What is left behind is
//! bounded: a live lease has at most two entries (its expiry and its drain), and when there are more than four for
//! each, those of leases that have ended are taken out. At least half of them go, so that is O(1) per entry on the
//! average.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::live::Slot;
use crate::Time;

/// Entries that are no longer true and not worth a look, however few leases there are.
const SLACK: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Deadlines {
    /// In order.
    queue: VecDeque<(Time, Slot)>,
    /// What came out of order.
    heap: BinaryHeap<Reverse<(Time, Slot)>>,
}

impl Deadlines {
    /// Looks at this lease at that time.
    pub(super) fn push(&mut self, due: Time, slot: Slot) {
        if self.queue.back().is_none_or(|(last, _)| *last <= due) {
            self.queue.push_back((due, slot));
        } else {
            self.heap.push(Reverse((due, slot)));
        }
    }

    /// The next lease to be looked at by now.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<Slot> {
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

    /// Whether so much of it is no longer true that it should be looked through.
    pub(super) fn is_overgrown(&self, live: usize) -> bool {
        self.len() > 4 * live + SLACK
    }

    /// Keeps the entries of leases that live.
    pub(super) fn retain(&mut self, lives: impl Fn(Slot) -> bool) {
        self.queue.retain(|(_, slot)| lives(*slot));
        self.heap.retain(|Reverse((_, slot))| lives(*slot));
    }

    /// Entries, true or not.
    pub(super) fn len(&self) -> usize {
        self.queue.len() + self.heap.len()
    }

    /// Whether the lease is looked at by that time. A scan: for checks only.
    pub(super) fn wake(&self, slot: Slot, due: Time) -> bool {
        let mut all = self.queue.iter().chain(self.heap.iter().map(|Reverse(entry)| entry));
        all.any(|(at, whose)| *whose == slot && *at <= due)
    }
}
