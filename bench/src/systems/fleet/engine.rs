//! A simulated engine of the fleet, with the production ledger and individually counted blocks.
//!
//! Every lease is recorded when it is opened. The record is removed when the ledger reports the end of the lease.
//! Violations are counted, and any of them fails the run: a lease that ends twice, a freed block that was not
//! allocated, or an expired lease that should have been released.

use std::collections::HashMap;

use baton_connector::lease::{CloseCause, LeaseTerms};
use baton_connector::ledger::{ClosedLease, LeaseSpec, Ledger};
use baton_connector::{BlockId, Handle, RequestId, Time};
use serde::Serialize;

/// Maximum cached prompt beginnings of an engine.
const CACHED_MAX: usize = 64;

/// Violations of leases and blocks. All must be 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Violations {
    /// Leases that expired although the request could have released them.
    pub(crate) stranded_leases: u64,
    /// Leases that were settled without being open.
    pub(crate) settled_twice: u64,
    /// Freed blocks that were not allocated.
    pub(crate) freed_twice: u64,
    /// Leases that are live in the end.
    pub(crate) leases_left: u64,
    /// Blocks that are allocated in the end.
    pub(crate) blocks_left: u64,
    /// Requests that a router counts at an engine in the end.
    pub(crate) requests_left: u64,
    /// Requests that did not end exactly once.
    pub(crate) endings_wrong: u64,
}

/// How leases ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct LeaseCounts {
    pub(crate) opened: u64,
    pub(crate) fetched: u64,
    pub(crate) released: u64,
    pub(crate) expired: u64,
    /// Lost with the engine that opened the lease.
    pub(crate) lost_with_engine: u64,
}

/// A deliberate fault, to check that it is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests break something on purpose"))]
pub(crate) enum PlantedFault {
    /// One release is not delivered.
    DroppedRelease,
    /// The blocks of one settled lease are not freed.
    KeptBlocks,
    /// The blocks of one settled lease are freed twice.
    FreedTwice,
}

/// Numbered blocks. If none is free, more are created, because full pools are measured elsewhere.
#[derive(Debug, Default)]
struct Blocks {
    free: Vec<BlockId>,
    allocated: Vec<bool>,
}

impl Blocks {
    fn take(&mut self, count: usize) -> Vec<BlockId> {
        let take = |blocks: &mut Self| {
            let block = blocks.free.pop().unwrap_or_else(|| {
                blocks.allocated.push(false);
                BlockId(u32::try_from(blocks.allocated.len() - 1).expect("fewer blocks than that"))
            });
            blocks.allocated[block.index()] = true;
            block
        };
        (0..count).map(|_| take(self)).collect()
    }

    /// Frees blocks. Returns the number of blocks that were not allocated.
    fn give_back(&mut self, blocks: &[BlockId]) -> u64 {
        let mut wrong = 0;
        for block in blocks {
            if std::mem::replace(&mut self.allocated[block.index()], false) {
                self.free.push(*block);
            } else {
                wrong += 1;
            }
        }
        wrong
    }

    fn left(&self) -> u64 {
        self.allocated.iter().filter(|out| **out).count() as u64
    }
}

/// The record of a lease.
#[derive(Clone, Copy, Debug)]
struct LeaseRecord {
    blocks: u64,
    /// Whether the lease should end by expiry.
    abandoned: bool,
}

/// One engine.
#[derive(Debug)]
pub(crate) struct FleetEngine {
    /// Incremented with each start. Leases of earlier epochs are lost.
    pub(crate) epoch: u32,
    pub(crate) alive: bool,
    ledger: Ledger,
    notes: HashMap<Handle, LeaseRecord>,
    blocks: Blocks,
    /// Allocated blocks that handoffs land in.
    landing: u64,
    /// Cached beginnings, and when each was last used.
    cached: HashMap<u32, u64>,
    uses: u64,
}

impl FleetEngine {
    pub(crate) fn new() -> Self {
        Self {
            epoch: 0,
            alive: true,
            ledger: Ledger::new(LeaseTerms::default()),
            notes: HashMap::new(),
            blocks: Blocks::default(),
            landing: 0,
            cached: HashMap::new(),
            uses: 0,
        }
    }

    /// The engine dies and loses its memory.
    pub(crate) fn die(&mut self, leases: &mut LeaseCounts, faults: &mut Violations) {
        // All allocated blocks must belong to a lease or a landing.
        let meant = self.notes.values().map(|note| note.blocks).sum::<u64>() + self.landing;
        faults.blocks_left += self.blocks.left().abs_diff(meant);
        leases.lost_with_engine += self.notes.len() as u64;
        *self = Self { epoch: self.epoch + 1, alive: false, ..Self::new() };
    }

    /// Allocates blocks and records a lease.
    pub(crate) fn open_lease(&mut self, handle: Handle, request: &RequestId, blocks: usize) -> LeaseSpec {
        self.notes.insert(handle, LeaseRecord { blocks: blocks as u64, abandoned: false });
        LeaseSpec { handle, request: request.clone(), blocks: self.blocks.take(blocks), expected: 1 }
    }

    pub(crate) fn ledger(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// Whether this lease is live.
    pub(crate) fn has_lease(&self, handle: Handle) -> bool {
        self.notes.contains_key(&handle)
    }

    /// No component will release or renew this lease, which should then expire.
    pub(crate) fn leave_to_expiry(&mut self, handle: Handle) {
        if let Some(note) = self.notes.get_mut(&handle) {
            note.abandoned = true;
        }
    }

    /// Frees the blocks of leases that have ended.
    pub(crate) fn reclaim(
        &mut self,
        settled: Vec<ClosedLease>,
        leases: &mut LeaseCounts,
        faults: &mut Violations,
        plant: &mut Option<PlantedFault>,
    ) {
        for lease in settled {
            let Some(note) = self.notes.remove(&lease.handle) else {
                faults.settled_twice += 1;
                continue;
            };
            match lease.cause {
                CloseCause::Fetched => leases.fetched += 1,
                CloseCause::Released => leases.released += 1,
                CloseCause::Expired => {
                    leases.expired += 1;
                    faults.stranded_leases += u64::from(!note.abandoned);
                }
            }
            match plant.take_if(|plant| *plant != PlantedFault::DroppedRelease) {
                Some(PlantedFault::KeptBlocks) => continue,
                Some(PlantedFault::FreedTwice) => faults.freed_twice += self.blocks.give_back(&lease.blocks),
                Some(PlantedFault::DroppedRelease) | None => {}
            }
            faults.freed_twice += self.blocks.give_back(&lease.blocks);
        }
    }

    /// Allocates blocks for a handoff to land in.
    pub(crate) fn land(&mut self, blocks: usize) -> Vec<BlockId> {
        self.landing += blocks as u64;
        self.blocks.take(blocks)
    }

    /// Frees landing blocks.
    pub(crate) fn free(&mut self, blocks: &[BlockId], faults: &mut Violations) {
        self.landing = self.landing.saturating_sub(blocks.len() as u64);
        faults.freed_twice += self.blocks.give_back(blocks);
    }

    /// Computes a prompt with this beginning. Returns whether the beginning was cached.
    pub(crate) fn computes(&mut self, beginning: u32) -> bool {
        self.uses += 1;
        if self.cached.insert(beginning, self.uses).is_some() {
            return true;
        }
        if self.cached.len() > CACHED_MAX
            && let Some((&oldest, _)) = self.cached.iter().min_by_key(|(_, used)| **used)
        {
            self.cached.remove(&oldest);
        }
        false
    }

    /// Counts what remains in the end.
    pub(crate) fn audit(&self, faults: &mut Violations) {
        faults.leases_left += self.notes.len().max(self.ledger.len()) as u64;
        faults.blocks_left += self.blocks.left();
    }

    /// When the ledger must be ticked.
    pub(crate) fn next_deadline(&self) -> Option<Time> {
        self.ledger.next_deadline()
    }
}

impl Violations {
    pub(crate) fn is_any(&self) -> bool {
        *self != Self::default()
    }

    /// By the names in the report.
    pub(crate) fn named(&self) -> [(&'static str, u64); 7] {
        [
            ("stranded_leases", self.stranded_leases),
            ("settled_twice", self.settled_twice),
            ("freed_twice", self.freed_twice),
            ("leases_left", self.leases_left),
            ("blocks_left", self.blocks_left),
            ("requests_left", self.requests_left),
            ("endings_wrong", self.endings_wrong),
        ]
    }
}
