//! A read-only mapping of another process's pool. No action of the other side can end this process.
#![allow(unsafe_code, reason = "fstat, and a copy out of a mapping; each block states why it is sound")]

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use crate::memory::{Access, FileMapping, NEEDED_SEALS, seals_of};
use crate::pool::PoolShape;

/// A mapping of a producer's pool.
#[derive(Debug)]
pub struct PoolMapping {
    map: FileMapping,
    pool: PoolShape,
}

/// The identity of a descriptor's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

/// A descriptor that a producer has sent.
#[derive(Debug)]
pub struct PoolDescriptor(File);

impl PoolDescriptor {
    /// An unchecked descriptor.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self(File::from(fd))
    }

    pub(crate) fn id(&self) -> io::Result<FileId> {
        let metadata = self.0.metadata()?;
        Ok(FileId { device: metadata.dev(), inode: metadata.ino() })
    }

    /// Maps a pool of this shape.
    ///
    /// # Errors
    /// If the file is not sealed against shrinking (the other side could then end this process), is shorter than the
    /// pool, or cannot be mapped.
    pub fn map(&self, pool: PoolShape) -> io::Result<PoolMapping> {
        let refused = |why: &str| io::Error::new(ErrorKind::InvalidData, why.to_owned());
        if seals_of(self.0.as_fd())? & NEEDED_SEALS != NEEDED_SEALS {
            return Err(refused("the producer's memory is not sealed against shrinking"));
        }
        let len = usize::try_from(self.0.metadata()?.len()).map_err(io::Error::other)?;
        let bytes = pool.bytes().filter(|&bytes| bytes > 0 && bytes <= len);
        bytes.ok_or_else(|| refused("the producer's memory is shorter than its pool"))?;
        let map = FileMapping::new(self.0.as_fd(), len, Access::Read)?;
        map.keep_out_of_dumps();
        Ok(PoolMapping { map, pool })
    }
}

impl PoolMapping {
    /// The shape of the pool.
    #[must_use]
    pub fn pool(&self) -> PoolShape {
        self.pool
    }

    /// Address of a block, valid for the size of a block; `None` for a block outside the pool.
    #[must_use]
    pub fn block(&self, block: u32) -> Option<*const u8> {
        let at = usize::try_from(self.pool.block_bytes).ok()?.checked_mul(block as usize)?;
        // SAFETY: the pool is inside the mapping (checked in `map`), and the block inside the pool.
        (u64::from(block) < self.pool.blocks).then(|| unsafe { self.map.base.add(at).cast_const() })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use baton_connector::region::Memory;

    use super::*;
    use crate::memory::SharedMemory;

    fn passed(memory: &SharedMemory) -> PoolDescriptor {
        PoolDescriptor::new(memory.read_only().try_clone_to_owned().expect("a descriptor"))
    }

    #[test]
    fn a_block_outside_the_pool_has_no_address() {
        let memory = SharedMemory::zeroed(8192).expect("memory");
        let mapping = passed(&memory).map(PoolShape { block_bytes: 100, blocks: 81 }).expect("it fits");
        let base = mapping.block(0).expect("the first");
        assert_eq!(mapping.block(80).map(|at| at.addr() - base.addr()), Some(8000));
        assert_eq!((mapping.block(81), mapping.block(u32::MAX)), (None, None));
    }

    #[test]
    fn a_pool_that_is_not_all_there_is_refused() {
        let memory = SharedMemory::zeroed(8192).expect("memory");
        for (block_bytes, blocks) in [(8193, 1), (u64::MAX, 2), (0, 5), (1, 0)] {
            let refused = passed(&memory).map(PoolShape { block_bytes, blocks });
            assert_eq!(
                refused.err().map(|e| e.kind()),
                Some(ErrorKind::InvalidData),
                "{block_bytes} × {blocks}"
            );
        }
        assert!(
            memory.len() == 8192 && passed(&memory).map(PoolShape { block_bytes: 8192, blocks: 1 }).is_ok()
        );
    }

    #[test]
    fn memory_that_could_be_taken_away_is_refused() {
        // SAFETY: a zero-terminated name, and flags.
        let fd =
            unsafe { libc::memfd_create(c"unsealed".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        assert!(fd >= 0);
        // SAFETY: a new descriptor without another owner.
        let file = File::from(unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) });
        file.set_len(8192).expect("a size");
        assert_eq!(file.as_raw_fd(), fd);
        let refused = PoolDescriptor(file).map(PoolShape { block_bytes: 4096, blocks: 2 });
        assert_eq!(refused.err().map(|error| error.kind()), Some(ErrorKind::InvalidData));
        let null = File::open("/dev/null").expect("it is there");
        assert!(
            PoolDescriptor(null).map(PoolShape { block_bytes: 4096, blocks: 2 }).is_err(),
            "not even a memfd"
        );
    }

    #[test]
    fn a_mapping_outlives_the_producer() {
        let memory = SharedMemory::zeroed(4096).expect("memory");
        // SAFETY: the first byte of memory that is not used elsewhere yet.
        unsafe { memory.base().write(9) };
        let mapping = passed(&memory).map(PoolShape { block_bytes: 4096, blocks: 1 }).expect("it fits");
        drop(memory);
        // SAFETY: the first byte of a live mapping.
        assert_eq!(mapping.block(0).map(|at| unsafe { at.read() }), Some(9));
    }
}
