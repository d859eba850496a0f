//! The disk tier's files: one record per block in a folder of this layout and model, which survives restarts.
//!
//! ```text
//!   DIR/kv1-<layout>-<model>/lock               one engine per folder
//!   DIR/kv1-<layout>-<model>/3f/3fa9….kv        a record, written as 3fa9….tmp and renamed
//! ```
//!
//! The tier is a cache, not a database: no write is synced to the device. The length or the checksum shows a file
//! that a crash or a power cut has damaged, and its block is recomputed. Foreign files in the folder are left alone.
//!
//! KV blocks reveal prompts: only their owner can read folders and files.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::OffloadFault;
use super::record::{HEADER_BYTES, TierIdentity, header, verify};
use crate::blocks::hash::BlockHash;

/// Limit of the files that are scanned when the folder is opened. Further ones are ignored.
const FILES_MAX: usize = 8 << 20;

/// The allocation unit of a file system, in bytes.
const CLUSTER_BYTES: u64 = 4096;

/// A store of records, by block. The implementation is a folder; tests use others that fail.
pub trait Volume: Send + Sync {
    /// Replaces a block's record.
    ///
    /// # Errors
    /// The system's. The record from before may be lost, but it is never replaced in part.
    fn put(&self, hash: BlockHash, header: &[u8], block: &[u8]) -> io::Result<()>;

    /// At most `bytes_max` bytes of a block's record.
    ///
    /// # Errors
    /// The system's.
    fn get(&self, hash: BlockHash, bytes_max: usize) -> io::Result<Vec<u8>>;

    /// Deletes a block's record, if there is one.
    ///
    /// # Errors
    /// The system's.
    fn remove(&self, hash: BlockHash) -> io::Result<()>;
}

/// Records of one identity on a volume.
pub struct DiskTier {
    volume: Box<dyn Volume>,
    identity: TierIdentity,
    block_bytes: usize,
}

impl DiskTier {
    /// The records of blocks of `block_bytes` bytes.
    #[must_use]
    pub fn new(volume: Box<dyn Volume>, identity: TierIdentity, block_bytes: usize) -> Self {
        Self { volume, identity, block_bytes }
    }

    /// Writes a block's record.
    ///
    /// # Errors
    /// [`OffloadFault::Full`] or [`OffloadFault::Io`].
    pub fn write(&self, hash: BlockHash, block: &[u8]) -> Result<(), OffloadFault> {
        let header = header(&self.identity, hash, block);
        self.volume.put(hash, &header, block).map_err(|error| fault(&error, "write"))
    }

    /// A block's record, verified; the block begins at [`HEADER_BYTES`].
    ///
    /// # Errors
    /// [`OffloadFault::Missing`], [`OffloadFault::Corrupt`] (the file is deleted then), or [`OffloadFault::Io`].
    pub fn read(&self, hash: BlockHash) -> Result<Vec<u8>, OffloadFault> {
        let file = self
            .volume
            // One more byte shows that the file is too long.
            .get(hash, HEADER_BYTES + self.block_bytes + 1)
            .map_err(|error| fault(&error, "read"))?;
        if let Err(why) = verify(&self.identity, hash, self.block_bytes, &file) {
            tracing::warn!(
                event = "disk_tier_file_damaged", block = %hash, error = %why,
                "damaged disk tier file deleted"
            );
            // A file that cannot be deleted fails again at its next read.
            let _ = self.volume.remove(hash);
            return Err(OffloadFault::Corrupt);
        }
        Ok(file)
    }

    /// Deletes records.
    ///
    /// # Errors
    /// [`OffloadFault::Io`]; some records may have been deleted.
    pub fn delete(&self, hashes: &[BlockHash]) -> Result<(), OffloadFault> {
        hashes.iter().try_for_each(|&hash| self.volume.remove(hash).map_err(|error| fault(&error, "delete")))
    }

    /// Writes, reads and deletes a record of no block, to test whether the disk works again.
    ///
    /// # Errors
    /// As the three.
    pub fn probe(&self) -> Result<(), OffloadFault> {
        let probe = BlockHash([0; 32]);
        self.write(probe, &vec![0x5a; self.block_bytes])?;
        self.read(probe)?;
        self.delete(&[probe])
    }
}

fn fault(error: &io::Error, operation: &str) -> OffloadFault {
    tracing::debug!(event = "disk_tier_operation_failed", %error, operation, "disk tier operation failed");
    match error.kind() {
        ErrorKind::NotFound => OffloadFault::Missing,
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => OffloadFault::Full,
        _ => OffloadFault::Io,
    }
}

/// Bytes that a block takes on disk.
#[must_use]
pub fn record_bytes(block_bytes: usize) -> u64 {
    ((HEADER_BYTES + block_bytes) as u64).next_multiple_of(CLUSTER_BYTES)
}

/// A folder of records. One engine at a time.
#[derive(Debug)]
pub struct DiskFolder {
    path: PathBuf,
    _lock: File,
}

/// Why a directory cannot hold a disk tier.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// Another engine uses it.
    #[error("{0} is in use by another engine; give each engine its own directory")]
    InUse(PathBuf),
    /// The system's error.
    #[error("{path}: {source}")]
    System {
        /// The path.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// The files in a folder when it was opened.
#[derive(Debug, Default)]
pub struct FolderScan {
    /// Blocks with a record of the right length, least recently used first.
    pub blocks: Vec<BlockHash>,
    /// Records of a wrong length and unfinished ones, which were deleted.
    pub damaged: usize,
    /// Foreign files, which were left alone.
    pub foreign: usize,
}

impl DiskFolder {
    /// Opens the folder of an identity below `root`, which is created if missing, and scans it.
    ///
    /// # Errors
    /// [`FolderError`]. A single unreadable file is not an error.
    pub fn open(
        root: &Path,
        identity: &TierIdentity,
        block_bytes: usize,
    ) -> Result<(Self, FolderScan), FolderError> {
        let path = root.join(identity.folder());
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| FolderError::System { path, source }
        };
        make_folder(&path).map_err(failed(&path))?;
        let lock_path = path.join("lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&lock_path);
        let lock = lock.map_err(failed(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(FolderError::InUse(path)),
            Err(fs::TryLockError::Error(source)) => {
                return Err(FolderError::System { path: lock_path, source });
            }
        }
        let found = scan(&path, (HEADER_BYTES + block_bytes) as u64).map_err(failed(&path))?;
        Ok((Self { path, _lock: lock }, found))
    }

    fn file(&self, hash: BlockHash, extension: &str) -> PathBuf {
        let name = hash.to_string();
        self.path.join(&name[..2]).join(format!("{name}.{extension}"))
    }
}

impl Volume for DiskFolder {
    fn put(&self, hash: BlockHash, header: &[u8], block: &[u8]) -> io::Result<()> {
        let (unfinished, file) = (self.file(hash, "tmp"), self.file(hash, "kv"));
        let written = create(&unfinished).and_then(|mut out| {
            out.write_all(header)?;
            out.write_all(block)?;
            drop(out);
            fs::rename(&unfinished, &file)
        });
        if written.is_err() {
            // It may not exist.
            let _ = fs::remove_file(&unfinished);
        }
        written
    }

    fn get(&self, hash: BlockHash, bytes_max: usize) -> io::Result<Vec<u8>> {
        let path = self.file(hash, "kv");
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        let mut bytes = Vec::with_capacity(bytes_max);
        (&file).take(bytes_max as u64).read_to_end(&mut bytes)?;
        // The modification time keeps the order of use across restarts. A file system without one is not an error.
        let _ = file.set_modified(SystemTime::now());
        Ok(bytes)
    }

    fn remove(&self, hash: BlockHash) -> io::Result<()> {
        match fs::remove_file(self.file(hash, "kv")) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn create(path: &Path) -> io::Result<File> {
    let open = || {
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path)
    };
    match (open(), path.parent()) {
        (Err(error), Some(folder)) if error.kind() == ErrorKind::NotFound => {
            // The first record with these two digits, or its folder was deleted.
            make_folder(folder)?;
            open()
        }
        (opened, _) => opened,
    }
}

fn scan(path: &Path, bytes: u64) -> io::Result<FolderScan> {
    let mut found = FolderScan::default();
    let mut blocks: Vec<(SystemTime, BlockHash)> = Vec::new();
    for folder in fs::read_dir(path)? {
        let folder = folder?;
        if !folder.file_type()?.is_dir() {
            found.foreign += usize::from(folder.file_name() != "lock");
            continue;
        }
        // A folder that cannot be read contains no loadable record.
        let Ok(files) = fs::read_dir(folder.path()) else { continue };
        for file in files.flatten() {
            if blocks.len() >= FILES_MAX {
                tracing::warn!(
                    event = "disk_tier_files_ignored",
                    limit = FILES_MAX,
                    "too many files in the disk tier, the rest are ignored"
                );
                break;
            }
            let path = file.path();
            match (parse(&path), file.metadata()) {
                (Some((hash, "kv")), Ok(facts)) if facts.is_file() && facts.len() == bytes => {
                    blocks.push((facts.modified().unwrap_or(SystemTime::UNIX_EPOCH), hash));
                }
                (Some((_, "kv" | "tmp")), Ok(facts)) if facts.is_file() => {
                    found.damaged += 1;
                    // A remaining file does no harm.
                    let _ = fs::remove_file(&path);
                }
                _ => found.foreign += 1,
            }
        }
    }
    // The hash orders files of the same time, so that the order is the same in every run.
    blocks.sort_unstable();
    found.blocks = blocks.into_iter().map(|(_, hash)| hash).collect();
    Ok(found)
}

/// The block and the extension of a file with the name and the place of a record.
fn parse(path: &Path) -> Option<(BlockHash, &str)> {
    let (stem, extension) = (path.file_stem()?.to_str()?, path.extension()?.to_str()?);
    let folder = path.parent()?.file_name()?.to_str()?;
    let hash: BlockHash = stem.parse().ok()?;
    (hash.to_string() == stem && folder == &stem[..2]).then_some((hash, extension))
}

#[cfg(test)]
mod tests;
