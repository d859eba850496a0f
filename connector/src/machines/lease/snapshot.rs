//! A lease as a value: everything that its future depends on, with times relative to now.
//!
//! Leases are not `Clone`. The model checker (`tests/model/main.rs`) therefore compares snapshots, and reaches a state
//! again by repeating the events that led to it.

use std::time::Duration;

use super::{Lease, State};
use crate::{Reader, Time};

/// Two leases with equal snapshots answer every future event alike.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseSnapshot {
    /// State of the lease.
    pub state: State,
    /// Whether every block is final.
    pub sealed: bool,
    /// Time until [`super::Event::Tick`] changes something; zero when that is due, or when the lease is closed.
    pub remaining: Duration,
    /// Number of expected consumers.
    pub expected: usize,
    /// Readers in flight.
    pub reading: Vec<Reader>,
    /// Readers with the verdict "valid". The complete consumers follow from them.
    pub done: Vec<Reader>,
    /// Consumers that have left.
    pub left: Vec<u64>,
}

impl Lease {
    /// The lease as a value.
    #[must_use]
    pub fn snapshot(&self, now: Time) -> LeaseSnapshot {
        // Every field by name: a new field does not compile until it is handled here.
        let Self {
            state,
            sealed,
            terms: _,
            expiry: _,
            drain_deadline: _,
            expected,
            reading,
            done,
            complete: _,
            left,
        } = self;
        LeaseSnapshot {
            state: *state,
            sealed: *sealed,
            remaining: self.deadline().map_or(Duration::ZERO, |deadline| deadline.since(now)),
            expected: *expected,
            reading: reading.iter().copied().collect(),
            done: done.iter().copied().collect(),
            left: left.iter().copied().collect(),
        }
    }
}
