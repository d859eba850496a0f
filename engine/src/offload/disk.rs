//! The disk tier's files: one record per block in a folder of this layout and model, found again after a restart.
//!
//! ```text
//!   DIR/kv1-<layout>-<model>/lock               one engine per folder
//!   DIR/kv1-<layout>-<model>/3f/3fa9….kv        a record, written as 3fa9….tmp and renamed
//! ```
//!
//! A cache, not a database: nothing is synced to the device. What a crash or a power cut leaves behind is found out by
//! its length or its checksum, and computed again. What is not ours in the folder is left alone.
//!
//! Prompts can be read out of KV blocks: folders and files are for their owner only.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::Fault;
use super::record::{HEADER_BYTES, TierIdentity, header, verify};
use crate::blocks::hash::BlockHash;

/// Files looked at when the folder is opened. More than this are left alone.
const FILES_MAX: usize = 8 << 20;

/// A file system holds files in pieces of this many bytes.
const CLUSTER_BYTES: u64 = 4096;

/// Where records lie, by block. One implementation is a folder; tests have others that fail.
pub trait Volume: Send + Sync {
    /// Replaces a block's record.
    ///
    /// # Errors
    /// The system's. What was there before may be gone, but never replaced in part.
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
    /// [`Fault::Full`] or [`Fault::Io`].
    pub fn write(&self, hash: BlockHash, block: &[u8]) -> Result<(), Fault> {
        let header = header(&self.identity, hash, block);
        self.volume.put(hash, &header, block).map_err(|error| fault(&error, "write"))
    }

    /// A block's record, verified; the block begins at [`HEADER_BYTES`].
    ///
    /// # Errors
    /// [`Fault::Missing`], [`Fault::Corrupt`] (the file is deleted then), or [`Fault::Io`].
    pub fn read(&self, hash: BlockHash) -> Result<Vec<u8>, Fault> {
        let file = self
            .volume
            // One byte more shows that it is too long.
            .get(hash, HEADER_BYTES + self.block_bytes + 1)
            .map_err(|error| fault(&error, "read"))?;
        if let Err(why) = verify(&self.identity, hash, self.block_bytes, &file) {
            tracing::warn!(block = %hash, error = %why, "damaged disk tier file deleted");
            // If it cannot be deleted it will be found out again.
            let _ = self.volume.remove(hash);
            return Err(Fault::Corrupt);
        }
        Ok(file)
    }

    /// Deletes records.
    ///
    /// # Errors
    /// [`Fault::Io`]; some may have been deleted.
    pub fn delete(&self, hashes: &[BlockHash]) -> Result<(), Fault> {
        hashes.iter().try_for_each(|&hash| self.volume.remove(hash).map_err(|error| fault(&error, "delete")))
    }

    /// Writes, reads and deletes a record that is no block's: whether the disk works again.
    ///
    /// # Errors
    /// As the three.
    pub fn try_out(&self) -> Result<(), Fault> {
        let probe = BlockHash([0; 32]);
        self.write(probe, &vec![0x5a; self.block_bytes])?;
        self.read(probe)?;
        self.delete(&[probe])
    }
}

fn fault(error: &io::Error, operation: &str) -> Fault {
    tracing::debug!(%error, operation, "disk tier operation failed");
    match error.kind() {
        ErrorKind::NotFound => Fault::Missing,
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Fault::Full,
        _ => Fault::Io,
    }
}

/// Bytes that a block takes on disk.
#[must_use]
pub fn record_bytes(block_bytes: usize) -> u64 {
    ((HEADER_BYTES + block_bytes) as u64).next_multiple_of(CLUSTER_BYTES)
}

/// A folder of records. One engine at a time.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    _lock: File,
}

/// Why a directory cannot hold a disk tier.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another engine uses it.
    #[error("{0} is in use by another engine; give each engine its own directory")]
    InUse(PathBuf),
    /// The system says no.
    #[error("{path}: {source}")]
    System {
        /// Where.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// What was found in a folder when it was opened.
#[derive(Debug, Default)]
pub struct Found {
    /// Blocks with a record of the right length, least recently used first.
    pub blocks: Vec<BlockHash>,
    /// Records of a wrong length and unfinished ones; they were deleted.
    pub damaged: usize,
    /// Files that are not ours; they were left alone.
    pub foreign: usize,
}

impl Folder {
    /// Opens the folder of an identity below `root`, which is made if it is not there, and looks through it.
    ///
    /// # Errors
    /// [`OpenError`]; a single file that cannot be looked at is none.
    pub fn open(
        root: &Path,
        identity: &TierIdentity,
        block_bytes: usize,
    ) -> Result<(Self, Found), OpenError> {
        let path = root.join(identity.folder());
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| OpenError::System { path, source }
        };
        make_folder(&path).map_err(failed(&path))?;
        let lock_path = path.join("lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&lock_path);
        let lock = lock.map_err(failed(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(OpenError::InUse(path)),
            Err(fs::TryLockError::Error(source)) => {
                return Err(OpenError::System { path: lock_path, source });
            }
        }
        let found = look_through(&path, (HEADER_BYTES + block_bytes) as u64).map_err(failed(&path))?;
        Ok((Self { path, _lock: lock }, found))
    }

    fn file(&self, hash: BlockHash, extension: &str) -> PathBuf {
        let name = hash.to_string();
        self.path.join(&name[..2]).join(format!("{name}.{extension}"))
    }
}

impl Volume for Folder {
    fn put(&self, hash: BlockHash, header: &[u8], block: &[u8]) -> io::Result<()> {
        let (unfinished, file) = (self.file(hash, "tmp"), self.file(hash, "kv"));
        let written = create(&unfinished).and_then(|mut out| {
            out.write_all(header)?;
            out.write_all(block)?;
            drop(out);
            fs::rename(&unfinished, &file)
        });
        if written.is_err() {
            // It may not even have been made.
            let _ = fs::remove_file(&unfinished);
        }
        written
    }

    fn get(&self, hash: BlockHash, bytes_max: usize) -> io::Result<Vec<u8>> {
        let path = self.file(hash, "kv");
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        let mut bytes = Vec::with_capacity(bytes_max);
        (&file).take(bytes_max as u64).read_to_end(&mut bytes)?;
        // The order of use survives a restart this way; a file system that cannot say when is no reason to fail.
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
            // The first with these two digits, or somebody has tidied up.
            make_folder(folder)?;
            open()
        }
        (opened, _) => opened,
    }
}

fn look_through(path: &Path, bytes: u64) -> io::Result<Found> {
    let mut found = Found::default();
    let mut blocks: Vec<(SystemTime, BlockHash)> = Vec::new();
    for folder in fs::read_dir(path)? {
        let folder = folder?;
        if !folder.file_type()?.is_dir() {
            found.foreign += usize::from(folder.file_name() != "lock");
            continue;
        }
        // A folder that cannot be read holds nothing that could be loaded.
        let Ok(files) = fs::read_dir(folder.path()) else { continue };
        for file in files.flatten() {
            if blocks.len() >= FILES_MAX {
                tracing::warn!(limit = FILES_MAX, "too many files in the disk tier, the rest are ignored");
                break;
            }
            let path = file.path();
            match (parse(&path), file.metadata()) {
                (Some((hash, "kv")), Ok(facts)) if facts.is_file() && facts.len() == bytes => {
                    blocks.push((facts.modified().unwrap_or(SystemTime::UNIX_EPOCH), hash));
                }
                (Some((_, "kv" | "tmp")), Ok(facts)) if facts.is_file() => {
                    found.damaged += 1;
                    // If it stays, it is in nobody's way.
                    let _ = fs::remove_file(&path);
                }
                _ => found.foreign += 1,
            }
        }
    }
    // The hash decides between files of one moment, so that the order is the same in every run.
    blocks.sort_unstable();
    found.blocks = blocks.into_iter().map(|(_, hash)| hash).collect();
    Ok(found)
}

/// The block and the extension of a file that is named as ours are and lies where ours lie.
fn parse(path: &Path) -> Option<(BlockHash, &str)> {
    let (stem, extension) = (path.file_stem()?.to_str()?, path.extension()?.to_str()?);
    let folder = path.parent()?.file_name()?.to_str()?;
    let hash: BlockHash = stem.parse().ok()?;
    (hash.to_string() == stem && folder == &stem[..2]).then_some((hash, extension))
}

#[cfg(test)]
mod tests;
