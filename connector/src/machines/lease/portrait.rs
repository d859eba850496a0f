//! A lease as a value: all that its future depends on, with times as distances from now.
//!
//! Leases are not `Clone`, so whoever explores every state of a system (`tests/model/main.rs`) compares portraits and
//! reaches a state again by repeating what led there.

use std::time::Duration;

use super::{Lease, State};
use crate::{Reader, Time};

/// Two leases with equal portraits answer every future event alike.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeasePortrait {
    /// Where it stands.
    pub state: State,
    /// Whether every block is final.
    pub sealed: bool,
    /// Until [`super::Event::Tick`] changes something; zero when that is due, or when the lease is closed.
    pub left: Duration,
    /// What must be done before it ends by itself.
    pub expected: usize,
    /// In flight.
    pub reading: Vec<Reader>,
    /// Answered "valid". Who is complete follows from it.
    pub done: Vec<Reader>,
    /// Consumers that have left.
    pub left_by: Vec<u64>,
}

impl Lease {
    /// The lease as a value.
    #[must_use]
    pub fn portrait(&self, now: Time) -> LeasePortrait {
        // Every field by name: one that is added must be decided about here.
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
        LeasePortrait {
            state: *state,
            sealed: *sealed,
            left: self.deadline().map_or(Duration::ZERO, |deadline| deadline.since(now)),
            expected: *expected,
            reading: reading.iter().copied().collect(),
            done: done.iter().copied().collect(),
            left_by: left.iter().copied().collect(),
        }
    }
}
