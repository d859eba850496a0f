//! A pool's memory in a memfd that other processes can map and only read.
//!
//! Three measures, so that a consumer needs to trust only the kernel, and a producer no other process:
//! - The memfd is sealed against shrinking and growing: no access of either side can end in SIGBUS.
//! - After the producer's own mapping, the memfd is sealed against further writing (`F_SEAL_FUTURE_WRITE`). No other
//!   mapping and no `write` can change it, through any descriptor.
//! - Consumers get a descriptor that was opened for reading. The writable descriptor is closed.
//!
//! The pool uses huge pages if possible: reserved ones if enough are free, otherwise transparent ones, into which the
//! kernel collapses the pool. That allocates the whole pool at once.
#![allow(unsafe_code, reason = "memfd, mmap and madvise; each block states why it is sound")]

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use baton_connector::region::{Memory, Region};

/// One huge page of x86-64 and of 64-bit Arm with 4 KiB pages, in bytes.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Unit of alignment and size for memory below a huge page.
const PAGE_BYTES: usize = 4096;

/// The seals that fix the size of the file. No descriptor can remove them.
const FIXED_SIZE: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Seals that a consumer requires: without them an access could end in SIGBUS.
pub(crate) const NEEDED_SEALS: libc::c_int = libc::F_SEAL_SHRINK;

/// Memory of this process that other processes can read through a descriptor. Freed with its last mapping.
#[derive(Debug)]
pub struct SharedMemory {
    map: FileMapping,
    /// Opened for reading only.
    read_only: File,
}

impl SharedMemory {
    /// At least `bytes` zeroed bytes, aligned to a huge page if there are that many.
    ///
    /// # Errors
    /// A system error: no memfd, no such seals (before Linux 5.1), no `/proc`, no memory.
    pub fn zeroed(bytes: usize) -> io::Result<Self> {
        if bytes == 0 {
            return Err(io::Error::new(ErrorKind::InvalidInput, "a pool has at least one byte"));
        }
        if bytes >= HUGE_PAGE_BYTES && free_huge_pages() >= bytes.div_ceil(HUGE_PAGE_BYTES) {
            // Another process may take the huge pages first. Then the pool uses plain pages.
            if let Ok(memory) = Self::make(bytes, libc::MFD_HUGETLB) {
                return Ok(memory);
            }
        }
        let memory = Self::make(bytes, 0)?;
        memory.map.collapse_into_huge_pages();
        Ok(memory)
    }

    fn make(bytes: usize, flags: libc::c_uint) -> io::Result<Self> {
        let unit = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let len = bytes.checked_next_multiple_of(unit).ok_or(ErrorKind::InvalidInput)?;
        let flags = flags | libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: a zero-terminated name, and flags.
        let fd = unsafe { libc::memfd_create(c"baton-kv-pool".as_ptr(), flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has just created the descriptor, which has no other owner.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(len as u64)?;
        seal(&file, FIXED_SIZE)?;
        let map = FileMapping::new(file.as_fd(), len, Access::ReadWrite)?;
        seal(&file, libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let read_only = OpenOptions::new().read(true).custom_flags(libc::O_CLOEXEC).open(path)?;
        Ok(Self { map, read_only })
    }

    /// The read-only descriptor for consumers.
    #[must_use]
    pub fn read_only(&self) -> BorrowedFd<'_> {
        self.read_only.as_fd()
    }
}

// SAFETY: one mapping of `len` bytes, aligned to a page, readable and writable until the map is dropped; its
// size is sealed.
unsafe impl Memory for SharedMemory {
    fn base(&self) -> *mut u8 {
        self.map.base
    }

    fn len(&self) -> usize {
        self.map.len
    }
}

/// A pool of `blocks` zeroed blocks of `block_bytes` bytes that consumers of this host can map.
///
/// # Errors
/// As [`SharedMemory::zeroed`]. The engine then uses private memory, and its blocks are sent over TCP.
pub fn shared_pool(blocks: usize, block_bytes: usize) -> io::Result<Region> {
    let bytes = blocks.checked_mul(block_bytes).ok_or(ErrorKind::InvalidInput)?;
    Ok(Region::with_memory(Box::new(SharedMemory::zeroed(bytes)?), blocks, block_bytes))
}

fn seal(file: &File, seals: libc::c_int) -> io::Result<()> {
    // SAFETY: a call on an owned descriptor with a number as argument.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The seals of a file; an error for a file without seals.
pub(crate) fn seals_of(file: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    // SAFETY: a call on a live descriptor without an argument.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 { Err(io::Error::last_os_error()) } else { Ok(seals) }
}

/// Number of free reserved huge pages; 0 on systems without them.
fn free_huge_pages() -> usize {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// The access of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    ReadWrite,
    Read,
}

/// A shared mapping of the start of a file, aligned to a huge page if it is that long.
#[derive(Debug)]
pub(crate) struct FileMapping {
    pub(crate) base: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for FileMapping {}
// SAFETY: as above. The contract governs concurrent access to the bytes.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps `len` bytes, a multiple of the page size.
    pub(crate) fn new(file: BorrowedFd<'_>, len: usize, access: Access) -> io::Result<Self> {
        let align = if len >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let room = len.checked_add(align).ok_or(ErrorKind::InvalidInput)?;
        let (private, none) =
            (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, libc::PROT_NONE);
        // SAFETY: a new reservation of addresses that the kernel chooses.
        let room_at = unsafe { libc::mmap(std::ptr::null_mut(), room, none, private, -1, 0) };
        if room_at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let skip = room_at.addr().next_multiple_of(align) - room_at.addr();
        let base = room_at.wrapping_byte_add(skip);
        let protection = match access {
            Access::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
            Access::Read => libc::PROT_READ,
        };
        // SAFETY: replaces a part of the new reservation, which is not used elsewhere.
        let mapped = unsafe {
            libc::mmap(base, len, protection, libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd(), 0)
        };
        let failed = (mapped == libc::MAP_FAILED).then(io::Error::last_os_error);
        if let Some(error) = failed {
            // SAFETY: the whole reservation, which is not used.
            unsafe { libc::munmap(room_at, room) };
            return Err(error);
        }
        let behind = room - skip - len;
        // SAFETY: the parts of the reservation before and after the mapping. Both are whole pages.
        unsafe {
            if skip > 0 {
                libc::munmap(room_at, skip);
            }
            if behind > 0 {
                libc::munmap(base.wrapping_byte_add(len), behind);
            }
        }
        Ok(Self { base: base.cast(), len })
    }

    /// Requests transparent huge pages for new memory, also on systems that create none by default. The kernel may
    /// refuse. The pool then works with plain pages, only slower.
    fn collapse_into_huge_pages(&self) {
        if self.len < HUGE_PAGE_BYTES {
            return;
        }
        for at in (0..self.len).step_by(HUGE_PAGE_BYTES) {
            // SAFETY: inside the mapping, which is writable, zeroed and not used elsewhere yet. The kernel collapses
            // only existing pages (Linux 6.18: EINVAL without).
            unsafe { self.base.add(at).write_volatile(0) };
        }
        // SAFETY: advice about an owned mapping, which does not change its contents.
        unsafe {
            libc::madvise(self.base.cast(), self.len, libc::MADV_HUGEPAGE);
            libc::madvise(self.base.cast(), self.len, libc::MADV_COLLAPSE);
        }
    }

    /// Excludes the mapping from this process's core dumps, because the bytes belong to another process.
    pub(crate) fn keep_out_of_dumps(&self) {
        // SAFETY: advice about an owned mapping, which does not change its contents.
        unsafe { libc::madvise(self.base.cast(), self.len, libc::MADV_DONTDUMP) };
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: a mapping that `new` created, unmapped once.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use baton_connector::BlockId;

    use super::*;

    fn writable(file: BorrowedFd<'_>, len: usize) -> Result<(), Option<i32>> {
        FileMapping::new(file, len, Access::ReadWrite).map(drop).map_err(|error| error.raw_os_error())
    }

    #[test]
    fn a_pool_is_zeroed_aligned_and_shared_with_its_readers() {
        for (blocks, block_bytes) in [(3, 96), (5, 1 << 20), (1, HUGE_PAGE_BYTES)] {
            let memory = SharedMemory::zeroed(blocks * block_bytes).expect("memory");
            let reader =
                FileMapping::new(memory.read_only(), memory.len(), Access::Read).expect("it may be read");
            let region = Region::with_memory(Box::new(memory), blocks, block_bytes);
            assert!(region.read_block(BlockId(0)).iter().all(|byte| *byte == 0));
            let align = if blocks * block_bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
            assert!(region.block_ptr(BlockId(0)).addr().is_multiple_of(align));
            region.write_block(BlockId(0), &vec![7; block_bytes]);
            // SAFETY: the first byte of a live mapping.
            assert_eq!(unsafe { reader.base.read_volatile() }, 7);
        }
    }

    #[test]
    fn the_readers_mapping_is_read_only() {
        let memory = SharedMemory::zeroed(8192).expect("memory");
        let fd = memory.read_only();
        assert_eq!(writable(fd, 8192), Err(Some(libc::EACCES)), "opened for reading");
        let map = FileMapping::new(fd, 8192, Access::Read).expect("it may be read");
        // SAFETY: an owned mapping.
        let made_writable =
            unsafe { libc::mprotect(map.base.cast(), 8192, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(made_writable, -1, "a mapping for reading stays one");
        // The same file opened again for writing: its permissions allow that, its seals do not.
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let again = OpenOptions::new().read(true).write(true).open(path).expect("it is ours");
        assert_eq!(writable(again.as_fd(), 8192), Err(Some(libc::EPERM)), "sealed");
        let written = again.write_at(b"x", 0).map_err(|error| error.raw_os_error());
        assert_eq!(written, Err(Some(libc::EPERM)), "sealed");
    }

    #[test]
    fn the_memory_cannot_shrink_under_a_reader() {
        let memory = SharedMemory::zeroed(8192).expect("memory");
        let path = format!("/proc/self/fd/{}", memory.read_only().as_raw_fd());
        let again = OpenOptions::new().write(true).open(path).expect("it is ours");
        for len in [0, 4096, 16384] {
            let resized = again.set_len(len).map_err(|error| error.raw_os_error());
            assert_eq!(resized, Err(Some(libc::EPERM)), "{len}");
        }
        let unsealed = seal(&again, libc::F_SEAL_EXEC);
        assert!(unsealed.is_err(), "the seals are sealed");
        assert_eq!(seals_of(memory.read_only()).expect("a memfd") & NEEDED_SEALS, NEEDED_SEALS);
    }

    #[test]
    fn an_empty_pool_is_refused() {
        assert!(SharedMemory::zeroed(0).is_err());
        assert!(shared_pool(usize::MAX, 2).is_err());
    }
}
