//! A ledger as a value: all that its future depends on, with times as distances from now and every table in order.
//! See [`crate::lease::LeasePortrait`] for what it is good for.

use super::Ledger;
use crate::lease::{Cause, LeasePortrait};
use crate::{BlockId, Handle, Reader, RequestId, Time};

/// One live lease.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LivePortrait {
    /// Its name.
    pub handle: Handle,
    /// The request that computed the blocks.
    pub request: RequestId,
    /// Its block table.
    pub blocks: Vec<BlockId>,
    /// Its machine.
    pub lease: LeasePortrait,
}

/// Two ledgers with equal portraits answer every future call alike, except that tombstones may be forgotten at
/// different times: their ages are left out, and so are counters and the reasons for the log.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LedgerPortrait {
    /// Live leases by handle.
    pub live: Vec<LivePortrait>,
    /// Ended leases that are remembered, and who was answered "valid".
    pub ended: Vec<(Handle, Cause, Vec<Reader>)>,
    /// Requests that were given up before they were known.
    pub released_early: Vec<RequestId>,
}

impl Ledger {
    /// The ledger as a value.
    ///
    /// # Panics
    /// When blocks wait in [`Ledger::take_settled`], or when the deadline of a live lease is not in the heap: that
    /// lease would never expire.
    #[must_use]
    pub fn portrait(&self, now: Time) -> LedgerPortrait {
        // Every field by name: one that is added must be decided about here.
        let Self { terms: _, live, deadlines, tombstones, settled, counts: _ } = self;
        assert!(settled.is_empty(), "settled blocks belong to the caller");
        let mut portrait = LedgerPortrait::default();
        for (slot, entry) in live.iter() {
            let due = entry.lease.deadline().expect("a live lease has a deadline");
            assert!(deadlines.wake(slot, due), "nothing would wake the ledger for a live lease");
            portrait.live.push(LivePortrait {
                handle: entry.handle,
                request: entry.request.clone(),
                blocks: entry.blocks.clone(),
                lease: entry.lease.portrait(now),
            });
        }
        portrait.live.sort();
        portrait.ended = tombstones.ended().collect();
        portrait.ended.sort();
        portrait.released_early = tombstones.released().cloned().collect();
        portrait.released_early.sort();
        portrait
    }
}
