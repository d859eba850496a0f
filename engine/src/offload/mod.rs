//! Offload tiers: KV blocks written down from the device to host memory and to disk while requests run, and loaded
//! again when a prompt needs them.
//!
//! ```text
//!   scheduler (pure)                                        workers (threads)
//!   TierBooks: which block is where, what to evict          arena (host), volume (disk)
//!        │ Order: store, load, write, delete ────────────────▶ │ bounded queues; full = refused
//!        ◀──────────────────────────────── Report, by mail ────┘
//!
//!   device ── store ──▶ host slot ── write ──▶ file            a disk tier alone has a few slots to pass through
//!   device ◀── load ─── host slot ◀── kept ─── file
//! ```
//!
//! Everything is decided in [`tier_index`], without I/O, so that the simulator drives the same code; [`workers`] only carry
//! out. What a tier cannot take is not cached and counted; what it cannot give is computed. Neither is ever an error to
//! a request.

pub mod arena;
pub mod disk;
mod health;
pub mod open;
pub mod record;
pub mod tier_index;
pub mod workers;

use baton_connector::BlockId;
use baton_connector::offload::TransferId;

use crate::blocks::hash::BlockHash;

/// A block-sized piece of the host tier's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostSlot(pub u32);

/// A tier below the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Host memory.
    Host,
    /// Files in a directory.
    Disk,
}

impl Tier {
    /// The word in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Disk => "disk",
        }
    }
}

/// Where a block is loaded from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// A slot of the host tier.
    Host(HostSlot),
    /// Its file; verified on the way, and left in this slot too if there is one.
    Disk {
        /// The slot.
        keep: Option<HostSlot>,
    },
}

impl Source {
    /// Its tier.
    #[must_use]
    pub fn tier(self) -> Tier {
        match self {
            Self::Host(_) => Tier::Host,
            Self::Disk { .. } => Tier::Disk,
        }
    }
}

/// What the workers are to do. Each order is answered by exactly one [`Report::Ended`] with its name, unless it was
/// refused or revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Copy a block of the device into a slot.
    Store {
        /// The order's name.
        id: TransferId,
        /// What the block holds.
        hash: BlockHash,
        /// From.
        block: BlockId,
        /// Into.
        slot: HostSlot,
    },
    /// Copy a block into a landing block of the device.
    Load {
        /// The order's name.
        id: TransferId,
        /// What the block holds.
        hash: BlockHash,
        /// From.
        from: Source,
        /// Into.
        block: BlockId,
    },
    /// Write a slot to a file, after making room.
    Write {
        /// The order's name.
        id: TransferId,
        /// What the slot holds.
        hash: BlockHash,
        /// From.
        slot: HostSlot,
        /// Files to delete first.
        evict: Vec<BlockHash>,
    },
    /// Delete files.
    Delete {
        /// The order's name.
        id: TransferId,
        /// Theirs.
        hashes: Vec<BlockHash>,
    },
}

impl Order {
    /// Its name.
    #[must_use]
    pub fn id(&self) -> TransferId {
        match self {
            Self::Store { id, .. }
            | Self::Load { id, .. }
            | Self::Write { id, .. }
            | Self::Delete { id, .. } => *id,
        }
    }
}

/// Why an order was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// The workers' queue is at its bound, or there are no workers (any more).
    Refused,
    /// The file is not what was written: checksum, header or length.
    Corrupt,
    /// There is no such file.
    Missing,
    /// The disk is full.
    Full,
    /// The system said no in another way.
    Io,
    /// The disk failed lately and is left alone for a while.
    Resting,
    /// It took too long; the block can be computed meanwhile.
    Slow,
    /// The worker broke down.
    Broken,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Refused,
        Self::Corrupt,
        Self::Missing,
        Self::Full,
        Self::Io,
        Self::Resting,
        Self::Slow,
        Self::Broken,
    ];

    /// The word in metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Corrupt => "corrupt",
            Self::Missing => "missing",
            Self::Full => "full",
            Self::Io => "io",
            Self::Resting => "resting",
            Self::Slow => "slow",
            Self::Broken => "broken",
        }
    }
}

/// What the workers tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// An order is over. Nothing reads or writes its blocks and slots any more.
    Ended(TransferId, Result<(), Fault>),
    /// The disk fails and is left alone for a while: nothing is to be written to it or loaded from it.
    DiskRests,
    /// The disk works again.
    DiskIsBack,
}

/// What the tiers hold and did, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounts {
    /// Blocks in it.
    pub blocks: usize,
    /// Blocks it can hold.
    pub capacity: usize,
    /// Blocks that were copied into it.
    pub stored: u64,
    /// Blocks that were copied from it to the device.
    pub loaded: u64,
    /// Blocks that made room for others.
    pub evicted: u64,
}

/// All counts of a scheduler's tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadCounts {
    /// Of the host tier (or of the slots that the disk tier passes through).
    pub host: TierCounts,
    /// Of the disk tier.
    pub disk: TierCounts,
    /// Prompt tokens that were loaded instead of computed.
    pub hit_tokens: u64,
    /// Blocks that were not stored because no slot or worker was to be had.
    pub not_stored: u64,
    /// Blocks that were not written to disk because too many writes were in flight, or the disk rests.
    pub not_written: u64,
    /// Orders that failed, in the order of [`Fault::ALL`].
    pub faults: [u64; Fault::ALL.len()],
    /// The disk is left alone for a while.
    pub disk_rests: bool,
}
