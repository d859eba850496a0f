//! A ledger as a value: everything that its future depends on, with times relative to now and every table in order.
//! See [`crate::machines::lease::LeaseSnapshot`] for its use.

use super::Ledger;
use crate::machines::lease::{CloseCause, LeaseSnapshot};
use crate::{BlockId, Handle, Reader, RequestId, Time};

/// One live lease.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LiveSnapshot {
    /// The handle of the lease.
    pub handle: Handle,
    /// The request that computed the blocks.
    pub request: RequestId,
    /// The block table.
    pub blocks: Vec<BlockId>,
    /// Number of final blocks.
    pub ready: usize,
    /// The state of the lease.
    pub lease: LeaseSnapshot,
}

/// Two ledgers with equal snapshots answer every future call alike, but may forget tombstones at different times. The
/// ages of tombstones, the counters and the reasons for the log are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LedgerSnapshot {
    /// Live leases by handle.
    pub live: Vec<LiveSnapshot>,
    /// Remembered ended leases, and their readers with the verdict "valid".
    pub ended: Vec<(Handle, CloseCause, Vec<Reader>)>,
    /// Requests that were released before they were known.
    pub released_early: Vec<RequestId>,
}

impl Ledger {
    /// The ledger as a value.
    ///
    /// # Panics
    /// When [`Ledger::take_closed`] or [`Ledger::take_unfinished`] would return something, or when the deadline of a
    /// live lease is not scheduled: that lease would never expire.
    #[must_use]
    pub fn snapshot(&self, now: Time) -> LedgerSnapshot {
        // Every field by name: a new field does not compile until it is handled here.
        let Self { terms: _, live, deadlines, tombstones, closed, unfinished, counts: _ } = self;
        assert!(closed.is_empty() && unfinished.is_empty(), "they belong to the caller");
        let mut snapshot = LedgerSnapshot::default();
        for (slot, entry) in live.iter() {
            let scheduled = entry.lease.deadline().is_none_or(|due| deadlines.is_scheduled(slot, due));
            assert!(scheduled, "nothing would wake the ledger for a live lease");
            snapshot.live.push(LiveSnapshot {
                handle: entry.handle,
                request: entry.request.clone(),
                blocks: entry.blocks.clone(),
                ready: entry.ready,
                lease: entry.lease.snapshot(now),
            });
        }
        snapshot.live.sort();
        snapshot.ended = tombstones.ended().collect();
        snapshot.ended.sort();
        snapshot.released_early = tombstones.released().cloned().collect();
        snapshot.released_early.sort();
        snapshot
    }
}
