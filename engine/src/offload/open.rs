//! Tiers as an engine is configured: how large, where, and what is there already.

use std::path::PathBuf;
use std::sync::Arc;

use baton_connector::region::Region;

use super::Report;
use super::arena::Arena;
use super::disk::{DiskTier, Folder, record_bytes};
use super::record::TierIdentity;
use super::tier_index::TierConfig;
use super::workers::{Pace, Workers};
use crate::blocks::hash::BlockHash;
use crate::compute::cuda::port::Port;

/// Files of one disk tier at most: what is looked at when it is opened.
const DISK_BLOCKS_MAX: u64 = 8 << 20;

/// What can be set about the tiers of an engine. Its data-parallel ranks share the sizes equally.
#[derive(Clone, Debug, Default)]
pub struct OffloadOptions {
    /// Bytes of the host tier; 0 is none.
    pub host_bytes: usize,
    /// The disk tier.
    pub disk: Option<DiskOptions>,
    /// How patient the workers are.
    pub pace: Pace,
}

/// What can be set about a disk tier.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Its directory, which is made if it is not there.
    pub dir: PathBuf,
    /// Bytes of all its files.
    pub bytes: u64,
}

/// Tiers that were opened and have no threads yet.
pub(crate) struct Tiers {
    pub(crate) config: TierConfig,
    /// Blocks on disk from an earlier life, least recently used first.
    pub(crate) found: Vec<BlockHash>,
    arena: Arena,
    disk: Option<DiskTier>,
    pace: Pace,
}

impl Tiers {
    /// The tiers of data-parallel rank `rank.0` of `rank.1`, over the shards of its blocks, which mirror the memory of a
    /// device where they have a port. `None` when none are wanted. `model` is the identity of the weights, `layout` the fingerprint of a shard.
    ///
    /// # Errors
    /// What is wrong with the options, for people.
    pub(crate) fn open(
        options: &OffloadOptions,
        rank: (usize, usize),
        (device, port): (Vec<Region>, Option<Arc<Port>>),
        layout: u64,
        model: &str,
    ) -> Result<Option<Self>, String> {
        let (rank, ranks) = rank;
        let block_bytes: usize = device.iter().map(Region::block_bytes).sum();
        let host_blocks = options.host_bytes / ranks / block_bytes;
        if options.host_bytes > 0 && host_blocks == 0 {
            let given = options.host_bytes;
            return Err(format!("a host tier of {given} bytes cannot hold a block of {block_bytes} bytes"));
        }
        let mut config = TierConfig { host_blocks, disk_blocks: 0 };
        let (mut disk, mut found) = (None, Vec::new());
        if let Some(wanted) = &options.disk {
            let blocks = wanted.bytes / ranks as u64 / record_bytes(block_bytes);
            if blocks == 0 {
                let (given, record) = (wanted.bytes, record_bytes(block_bytes));
                return Err(format!("a disk tier of {given} bytes cannot hold a file of {record} bytes"));
            }
            config.disk_blocks = usize::try_from(blocks.min(DISK_BLOCKS_MAX)).expect("it is bounded");
            let identity = TierIdentity::new(layout, model, device.len());
            // A rank looks up its own blocks only: each has its own directory.
            let dir = if ranks > 1 { wanted.dir.join(format!("dp{rank}")) } else { wanted.dir.clone() };
            let (folder, there) = Folder::open(&dir, &identity, block_bytes)
                .map_err(|error| format!("cannot open the disk tier: {error}"))?;
            tracing::info!(
                blocks = there.blocks.len(), damaged = there.damaged, foreign = there.foreign,
                dir = %dir.display(), "disk tier opened"
            );
            found = there.blocks;
            disk = Some(DiskTier::new(Box::new(folder), identity, block_bytes));
        }
        if !config.any() {
            return Ok(None);
        }
        let bytes = config.slots().checked_mul(block_bytes).filter(|_| u32::try_from(config.slots()).is_ok());
        // Asked for and given back: what the system would never give is an error here, not an abort later.
        let granted = bytes.is_some_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
        if !granted {
            return Err(format!("no memory for a host tier of {} bytes", options.host_bytes));
        }
        let arena = Arena::new(config.slots(), device).mirroring(port);
        Ok(Some(Self { config, found, arena, disk, pace: options.pace }))
    }

    /// Starts the threads, which call `report` with each result.
    ///
    /// # Errors
    /// When a thread cannot be had.
    pub(crate) fn start(self, report: impl Fn(Report) + Send + Sync + 'static) -> std::io::Result<Workers> {
        Workers::start(self.arena, self.disk, self.pace, report)
    }
}
