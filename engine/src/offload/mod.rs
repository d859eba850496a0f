//! Offload tiers: copies of KV blocks in host memory and on disk. Blocks are copied while requests run, and loaded
//! again when a prompt needs them.
//!
//! ```text
//!   scheduler (pure)                                        workers (threads)
//!   TierIndex: which block is where, what to evict          arena (host), volume (disk)
//!        │ OffloadOrder: store, load, write, delete ─────────▶ │ bounded queues; full = refused
//!        ◀───────────────────────── OffloadReport, by mail ────┘
//!
//!   device ── store ──▶ host slot ── write ──▶ file            a disk tier alone has a few staging slots
//!   device ◀── load ─── host slot ◀── copy ─── file
//! ```
//!
//! [`tier_index`] decides everything, without I/O, so that the simulator drives the same code. [`workers`] only carry
//! out orders. A block that a tier cannot take is not cached, and counted. A block that a tier cannot load is
//! computed. Neither is ever an error to a request.

pub mod disk;
mod health;
pub mod host_arena;
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

baton_connector::labelled! {
    /// A tier below the device.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Tier {
        /// Host memory.
        Host => "host",
        /// Files in a directory.
        Disk => "disk",
    }
}

/// The source of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoadSource {
    /// A slot of the host tier.
    Host(HostSlot),
    /// Its file. The file is verified, and the block is also copied into this slot if there is one.
    Disk {
        /// The slot.
        slot: Option<HostSlot>,
    },
}

impl LoadSource {
    /// Its tier.
    #[must_use]
    pub fn tier(self) -> Tier {
        match self {
            Self::Host(_) => Tier::Host,
            Self::Disk { .. } => Tier::Disk,
        }
    }
}

/// An order to the workers. Exactly one [`OffloadReport::Ended`] with its id follows, unless the order was refused or
/// revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OffloadOrder {
    /// Copy a block of the device into a slot.
    Store {
        /// The order's id.
        id: TransferId,
        /// The block's hash.
        hash: BlockHash,
        /// Source.
        block: BlockId,
        /// Destination.
        slot: HostSlot,
    },
    /// Copy a block into a landing block of the device.
    Load {
        /// The order's id.
        id: TransferId,
        /// The block's hash.
        hash: BlockHash,
        /// Source.
        from: LoadSource,
        /// Destination.
        block: BlockId,
    },
    /// Write a slot to a file, after deleting others.
    Write {
        /// The order's id.
        id: TransferId,
        /// The hash of the slot's block.
        hash: BlockHash,
        /// Source.
        slot: HostSlot,
        /// Files to delete first.
        evict: Vec<BlockHash>,
    },
    /// Delete files.
    Delete {
        /// The order's id.
        id: TransferId,
        /// Their blocks.
        hashes: Vec<BlockHash>,
    },
}

impl OffloadOrder {
    /// Its id.
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

baton_connector::labelled! {
    /// Why an order was not carried out.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum OffloadFault {
        /// The workers' queue is at its bound, or the workers have ended.
        Refused => "refused",
        /// The file differs from the written one: checksum, header or length.
        Corrupt => "corrupt",
        /// The file does not exist.
        Missing => "missing",
        /// The disk is full.
        Full => "full",
        /// Another error of the system.
        Io => "io",
        /// The disk failed lately and is suspended.
        Suspended => "resting",
        /// The load timed out; the block can be computed instead.
        Slow => "slow",
        /// The worker panicked.
        Broken => "broken",
    }
}

/// A report of the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadReport {
    /// An order has ended. No worker reads or writes its blocks and slots any more.
    Ended(TransferId, Result<(), OffloadFault>),
    /// The disk fails and is suspended: no block may be written to it or loaded from it.
    DiskSuspended,
    /// The disk works again.
    DiskResumed,
}

/// The contents of one tier, and its counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounts {
    /// Blocks in it.
    pub blocks: usize,
    /// Limit of its blocks.
    pub capacity: usize,
    /// Blocks that were copied into it.
    pub stored: u64,
    /// Blocks that were copied from it to the device.
    pub loaded: u64,
    /// Blocks that were evicted for others.
    pub evicted: u64,
}

/// All counts of a scheduler's tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadCounts {
    /// Of the host tier (or of the disk tier's staging slots).
    pub host: TierCounts,
    /// Of the disk tier.
    pub disk: TierCounts,
    /// Prompt tokens that were loaded instead of computed.
    pub hit_tokens: u64,
    /// Blocks that were not stored because no slot or worker was free.
    pub not_stored: u64,
    /// Blocks that were not written to disk, because too many writes were pending or the disk was suspended.
    pub not_written: u64,
    /// Orders that failed, in the order of [`OffloadFault::ALL`].
    pub faults: [u64; OffloadFault::ALL.len()],
    /// Whether the disk is suspended.
    pub disk_suspended: bool,
}
