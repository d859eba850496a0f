//! A simulated engine of the fleet: its ledger is the one that ships; its blocks are counted one by one.
//!
//! Every lease is noted when it is opened, and taken out of the notes when the ledger says that it is settled. What is
//! wrong with that (a lease that ends twice, a block that comes back and was not out, a lease that nobody gave up and
//! that only the clock ended) is counted, and any of it makes the run fail.

use std::collections::HashMap;

use baton_connector::lease::{Cause, LeaseTerms};
use baton_connector::ledger::{Grant, Ledger, Settled};
use baton_connector::{BlockId, Handle, RequestId, Time};

/// Prompt beginnings that an engine's cache has room for.
const CACHED_MAX: usize = 64;

/// What went wrong with leases and blocks. All of it must be 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// Leases that ended by the clock although somebody was there to end them.
    pub(crate) stranded_leases: u64,
    /// Leases that were settled and had not been opened, or had been settled before.
    pub(crate) settled_twice: u64,
    /// Blocks that came back and were not out.
    pub(crate) freed_twice: u64,
    /// Leases that are still live when everything is over.
    pub(crate) leases_left: u64,
    /// Blocks that are still out when everything is over.
    pub(crate) blocks_left: u64,
    /// Requests that are still counted at some engine by some router when everything is over.
    pub(crate) requests_left: u64,
    /// Requests that ended in no way, or in more than one.
    pub(crate) endings_wrong: u64,
}

/// How leases ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Leases {
    pub(crate) opened: u64,
    pub(crate) fetched: u64,
    pub(crate) released: u64,
    pub(crate) expired: u64,
    /// Gone with the engine that had lent.
    pub(crate) lost_with_engine: u64,
}

/// A fault that is built in on purpose, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests break something on purpose"))]
pub(crate) enum Plant {
    /// One release is not delivered.
    DroppedRelease,
    /// The blocks of one settled lease are not given back.
    KeptBlocks,
    /// The blocks of one settled lease are given back twice.
    FreedTwice,
}

/// Numbered blocks; more are made when none is free, because what a full pool does is measured elsewhere.
#[derive(Debug, Default)]
struct Blocks {
    free: Vec<BlockId>,
    out: Vec<bool>,
}

impl Blocks {
    fn take(&mut self, count: usize) -> Vec<BlockId> {
        let take = |blocks: &mut Self| {
            let block = blocks.free.pop().unwrap_or_else(|| {
                blocks.out.push(false);
                BlockId(u32::try_from(blocks.out.len() - 1).expect("fewer blocks than that"))
            });
            blocks.out[block.index()] = true;
            block
        };
        (0..count).map(|_| take(self)).collect()
    }

    /// How many of them were not out.
    fn give_back(&mut self, blocks: &[BlockId]) -> u64 {
        let mut wrong = 0;
        for block in blocks {
            if std::mem::replace(&mut self.out[block.index()], false) {
                self.free.push(*block);
            } else {
                wrong += 1;
            }
        }
        wrong
    }

    fn left(&self) -> u64 {
        self.out.iter().filter(|out| **out).count() as u64
    }
}

/// What is noted of a lease.
#[derive(Clone, Copy, Debug)]
struct Note {
    blocks: u64,
    /// The clock is meant to end it.
    abandoned: bool,
}

/// One engine.
#[derive(Debug)]
pub(crate) struct Engine {
    /// One more with each start. What was lent before the last one is gone.
    pub(crate) epoch: u32,
    pub(crate) alive: bool,
    ledger: Ledger,
    notes: HashMap<Handle, Note>,
    blocks: Blocks,
    /// Blocks in which handoffs land, or have landed.
    landing: u64,
    /// Beginnings that its cache holds, and when each was used.
    cached: HashMap<u32, u64>,
    uses: u64,
}

impl Engine {
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

    /// It dies, and its memory with it.
    pub(crate) fn die(&mut self, leases: &mut Leases, faults: &mut Faults) {
        // Nobody will ask later: what is out now must be out for somebody.
        let meant = self.notes.values().map(|note| note.blocks).sum::<u64>() + self.landing;
        faults.blocks_left += self.blocks.left().abs_diff(meant);
        leases.lost_with_engine += self.notes.len() as u64;
        *self = Self { epoch: self.epoch + 1, alive: false, ..Self::new() };
    }

    /// Lends so many blocks.
    pub(crate) fn lend(&mut self, handle: Handle, request: &RequestId, blocks: usize) -> Grant {
        self.notes.insert(handle, Note { blocks: blocks as u64, abandoned: false });
        Grant { handle, request: request.clone(), blocks: self.blocks.take(blocks), expected: 1 }
    }

    pub(crate) fn ledger(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// Whether this lease is live.
    pub(crate) fn lends(&self, handle: Handle) -> bool {
        self.notes.contains_key(&handle)
    }

    /// Nobody will read or renew this lease any more, or say so: the clock is to end it.
    pub(crate) fn abandon(&mut self, handle: Handle) {
        if let Some(note) = self.notes.get_mut(&handle) {
            note.abandoned = true;
        }
    }

    /// Takes back what leases that have ended held.
    pub(crate) fn take_back(
        &mut self,
        settled: Vec<Settled>,
        leases: &mut Leases,
        faults: &mut Faults,
        plant: &mut Option<Plant>,
    ) {
        for lease in settled {
            let Some(note) = self.notes.remove(&lease.handle) else {
                faults.settled_twice += 1;
                continue;
            };
            match lease.cause {
                Cause::Fetched => leases.fetched += 1,
                Cause::Released => leases.released += 1,
                Cause::Expired => {
                    leases.expired += 1;
                    faults.stranded_leases += u64::from(!note.abandoned);
                }
            }
            match plant.take_if(|plant| *plant != Plant::DroppedRelease) {
                Some(Plant::KeptBlocks) => continue,
                Some(Plant::FreedTwice) => faults.freed_twice += self.blocks.give_back(&lease.blocks),
                Some(Plant::DroppedRelease) | None => {}
            }
            faults.freed_twice += self.blocks.give_back(&lease.blocks);
        }
    }

    /// Blocks for a handoff to land in.
    pub(crate) fn land(&mut self, blocks: usize) -> Vec<BlockId> {
        self.landing += blocks as u64;
        self.blocks.take(blocks)
    }

    /// They are not needed any more.
    pub(crate) fn free(&mut self, blocks: &[BlockId], faults: &mut Faults) {
        self.landing = self.landing.saturating_sub(blocks.len() as u64);
        faults.freed_twice += self.blocks.give_back(blocks);
    }

    /// Computes a prompt with this beginning; whether the beginning was cached.
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

    /// What is left when everything is over.
    pub(crate) fn audit(&self, faults: &mut Faults) {
        faults.leases_left += self.notes.len().max(self.ledger.len()) as u64;
        faults.blocks_left += self.blocks.left();
    }

    /// When its ledger wants to be looked at.
    pub(crate) fn next_deadline(&self) -> Option<Time> {
        self.ledger.next_deadline()
    }
}

impl Faults {
    pub(crate) fn is_any(&self) -> bool {
        *self != Self::default()
    }

    /// By the names of the report.
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
