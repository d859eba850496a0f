//! Opens the tiers of an engine's configuration: their sizes, directories and existing files.

use std::path::PathBuf;

use super::OffloadReport;
use super::disk::{DiskFolder, DiskTier, record_bytes};
use super::host_arena::{HostArena, TieredPool};
use super::record::TierIdentity;
use super::tier_index::TierConfig;
use super::workers::{OffloadWorkers, WorkerTimeouts};
use crate::blocks::hash::BlockHash;

/// Limit of the files of one disk tier, which are scanned when it is opened.
const DISK_BLOCKS_MAX: u64 = 8 << 20;

/// Options of an engine's tiers. Its data-parallel ranks share the sizes equally.
#[derive(Clone, Debug, Default)]
pub struct OffloadOptions {
    /// Bytes of the host tier; 0 is none.
    pub host_bytes: usize,
    /// The disk tier.
    pub disk: Option<DiskOptions>,
    /// Timeouts of the workers.
    pub timeouts: WorkerTimeouts,
}

/// Options of a disk tier.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Its directory, which is created if missing.
    pub dir: PathBuf,
    /// Bytes of all its files.
    pub bytes: u64,
}

/// Opened tiers without threads.
pub(crate) struct OpenTiers {
    pub(crate) config: TierConfig,
    /// Blocks on disk from an earlier run, least recently used first.
    pub(crate) on_disk: Vec<BlockHash>,
    arena: HostArena,
    disk: Option<DiskTier>,
    timeouts: WorkerTimeouts,
}

impl OpenTiers {
    /// Opens the tiers of data-parallel rank `rank` of `ranks`, below its pool. `None` without tiers. `model` is the
    /// identity of the weights, `layout` the fingerprint of a shard.
    ///
    /// # Errors
    /// The problem with the options, as a message.
    pub(crate) fn open(
        options: &OffloadOptions,
        rank: usize,
        ranks: usize,
        pool: TieredPool,
        layout: u64,
        model: &str,
    ) -> Result<Option<Self>, String> {
        let block_bytes = pool.block_bytes();
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
            let identity = TierIdentity::new(layout, model, pool.shards());
            // A rank looks up only its own blocks: each has its own directory.
            let dir = if ranks > 1 { wanted.dir.join(format!("dp{rank}")) } else { wanted.dir.clone() };
            let (folder, there) = DiskFolder::open(&dir, &identity, block_bytes)
                .map_err(|error| format!("cannot open the disk tier: {error}"))?;
            tracing::info!(
                event = "disk_tier_opened",
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
        // Reserved and released at once: too large a size is an error here, not an abort later.
        let granted = bytes.is_some_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
        if !granted {
            return Err(format!("no memory for a host tier of {} bytes", options.host_bytes));
        }
        let arena = HostArena::new(config.slots(), pool);
        Ok(Some(Self { config, on_disk: found, arena, disk, timeouts: options.timeouts }))
    }

    /// Starts the threads, which call `report` with each result.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub(crate) fn start(
        self,
        report: impl Fn(OffloadReport) + Send + Sync + 'static,
    ) -> std::io::Result<OffloadWorkers> {
        OffloadWorkers::start(self.arena, self.disk, self.timeouts, report)
    }
}
