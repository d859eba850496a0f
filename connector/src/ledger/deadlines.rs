//! When time next ends something: a heap of deadlines, of which some are no longer true.
//!
//! A lease whose deadline moves on (a heartbeat) or that ends early leaves its entry behind; the entry is looked at
//! when it comes up. So a heartbeat costs nothing here, and an end costs nothing here. What is left behind is
//! bounded: when there are more than twice as many entries as live leases (and a few), the heap is made anew, with
//! one entry for each. Since the last time, at least as many were pushed, so that is O(1) per push on the average.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::live::Slot;
use crate::Time;

/// Entries that are no longer true and not worth a new heap, however few leases there are.
const SLACK: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Deadlines(BinaryHeap<Reverse<(Time, Slot)>>);

impl Deadlines {
    /// Looks at this lease at that time.
    pub(super) fn push(&mut self, due: Time, slot: Slot) {
        self.0.push(Reverse((due, slot)));
    }

    /// The next lease to be looked at by now.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<Slot> {
        self.0.peek().filter(|Reverse((due, _))| *due <= now)?;
        self.0.pop().map(|Reverse((_, slot))| slot)
    }

    /// The time of the next entry; no deadline is earlier.
    pub(super) fn next(&self) -> Option<Time> {
        self.0.peek().map(|Reverse((due, _))| *due)
    }

    /// Whether it holds so much that is no longer true that it should be made anew.
    pub(super) fn is_overgrown(&self, live: usize) -> bool {
        self.0.len() > 2 * live + SLACK
    }

    /// Makes it anew from the deadline of every live lease.
    pub(super) fn renew(&mut self, deadlines: impl Iterator<Item = (Time, Slot)>) {
        let mut entries = std::mem::take(&mut self.0).into_vec();
        entries.clear();
        entries.extend(deadlines.map(Reverse));
        self.0 = entries.into();
    }

    /// Whether the lease is looked at by that time. A scan: for checks only.
    pub(super) fn wake(&self, slot: Slot, due: Time) -> bool {
        self.0.iter().any(|Reverse((at, whose))| *whose == slot && *at <= due)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
