//! A ledger as a value: all that its future depends on, with times as distances from now and every table in order.
//! See [`crate::machines::lease::LeasePortrait`] for what it is good for.

use super::Ledger;
use crate::machines::lease::{Cause, LeasePortrait};
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
    /// How many of them are final.
    pub ready: usize,
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
    /// When something waits in [`Ledger::take_settled`] or [`Ledger::take_unfinished`], or when the deadline of a live lease is not in the heap: that
    /// lease would never expire.
    #[must_use]
    pub fn portrait(&self, now: Time) -> LedgerPortrait {
        // Every field by name: one that is added must be decided about here.
        let Self { terms: _, live, deadlines, tombstones, settled, unfinished, counts: _ } = self;
        assert!(settled.is_empty() && unfinished.is_empty(), "they belong to the caller");
        let mut portrait = LedgerPortrait::default();
        for (slot, entry) in live.iter() {
            let woken = entry.lease.deadline().is_none_or(|due| deadlines.wake(slot, due));
            assert!(woken, "nothing would wake the ledger for a live lease");
            portrait.live.push(LivePortrait {
                handle: entry.handle,
                request: entry.request.clone(),
                blocks: entry.blocks.clone(),
                ready: entry.ready,
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
