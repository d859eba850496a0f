//! A pool's memory in a memfd that other processes can map and only read.
//!
//! Three locks, so that a consumer needs to trust the kernel only, and the producer nobody:
//! - sealed against shrinking and growing: no access of either side can ever end in SIGBUS;
//! - sealed against further writing (`F_SEAL_FUTURE_WRITE`) once the producer's own mapping is made: no other
//!   mapping, and no `write`, can change it, through whatever descriptor;
//! - what is handed out is a descriptor opened for reading, and the one that could write is closed.
//!
//! Huge pages where there are any: reserved ones if enough are free, else the kernel is asked to collapse the
//! pool into transparent ones, which allocates all of it now.
#![allow(unsafe_code)] // memfd, mmap and madvise; each block says why it is sound

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use baton_connector::region::{Memory, Region};

/// One huge page of x86-64 and of 64-bit Arm with 4 KiB pages, in bytes.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory below this many bytes is aligned and rounded to this.
const PAGE_BYTES: usize = 4096;

/// What no descriptor can undo, from the moment the file has its size.
const FIXED_SIZE: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Seals that a consumer insists on: without them an access could end in SIGBUS.
pub(crate) const NEEDED_SEALS: libc::c_int = libc::F_SEAL_SHRINK;

/// Memory of this process that others can be let read. Freed when this and every mapping of it are gone.
#[derive(Debug)]
pub struct SharedMemory {
    map: Map,
    /// Opened for reading only.
    readers: File,
}

impl SharedMemory {
    /// At least `bytes` zeroed bytes, aligned to a huge page if there are that many.
    ///
    /// # Errors
    /// The system's: no memfd, no such seals (before Linux 5.1), no `/proc`, no memory.
    pub fn zeroed(bytes: usize) -> io::Result<Self> {
        if bytes == 0 {
            return Err(io::Error::new(ErrorKind::InvalidInput, "a pool has at least one byte"));
        }
        if bytes >= HUGE_PAGE_BYTES && free_huge_pages() >= bytes.div_ceil(HUGE_PAGE_BYTES) {
            // Somebody may take them first: then in plain pages.
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
        // SAFETY: a name that ends in zero, and flags.
        let fd = unsafe { libc::memfd_create(c"baton-kv-pool".as_ptr(), flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has just made it, and nobody else owns it.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(len as u64)?;
        seal(&file, FIXED_SIZE)?;
        let map = Map::new(file.as_fd(), len, Access::ReadWrite)?;
        seal(&file, libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let readers = OpenOptions::new().read(true).custom_flags(libc::O_CLOEXEC).open(path)?;
        Ok(Self { map, readers })
    }

    /// What a consumer is given: a descriptor that can only be read.
    #[must_use]
    pub fn readers(&self) -> BorrowedFd<'_> {
        self.readers.as_fd()
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

/// A pool of `blocks` zeroed blocks of `block_bytes` bytes that consumers of this host can be let read.
///
/// # Errors
/// As [`SharedMemory::zeroed`]; an engine then takes memory of its own, and its blocks travel over TCP.
pub fn shared_pool(blocks: usize, block_bytes: usize) -> io::Result<Region> {
    let bytes = blocks.checked_mul(block_bytes).ok_or(ErrorKind::InvalidInput)?;
    Ok(Region::over(Box::new(SharedMemory::zeroed(bytes)?), blocks, block_bytes))
}

fn seal(file: &File, seals: libc::c_int) -> io::Result<()> {
    // SAFETY: a call on a descriptor of ours that takes a number.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The seals of a file; an error when it is not of a kind that has any.
pub(crate) fn seals_of(file: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    // SAFETY: a call on a live descriptor that takes no argument.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 { Err(io::Error::last_os_error()) } else { Ok(seals) }
}

/// Reserved huge pages that nobody uses; 0 where there is no such thing.
fn free_huge_pages() -> usize {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// What a mapping is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    ReadWrite,
    Read,
}

/// A shared mapping of the start of a file, aligned to a huge page if it is that long.
#[derive(Debug)]
pub(crate) struct Map {
    pub(crate) base: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Map {}
// SAFETY: as above; who touches which byte when is the contract's business.
unsafe impl Sync for Map {}

impl Map {
    /// Maps `len` bytes, a multiple of the page size.
    pub(crate) fn new(file: BorrowedFd<'_>, len: usize, access: Access) -> io::Result<Self> {
        let align = if len >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let room = len.checked_add(align).ok_or(ErrorKind::InvalidInput)?;
        let (private, none) =
            (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, libc::PROT_NONE);
        // SAFETY: a fresh reservation of addresses at a place of the kernel's choice.
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
        // SAFETY: replaces a part of the reservation just made, which nobody else knows.
        let mapped = unsafe {
            libc::mmap(base, len, protection, libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd(), 0)
        };
        let failed = (mapped == libc::MAP_FAILED).then(io::Error::last_os_error);
        if let Some(error) = failed {
            // SAFETY: the whole reservation, used by nobody.
            unsafe { libc::munmap(room_at, room) };
            return Err(error);
        }
        let behind = room - skip - len;
        // SAFETY: the parts of the reservation before and behind the mapping; both are whole pages.
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

    /// Asks for transparent huge pages for memory that nobody has touched yet, also where the system makes none by
    /// itself. It may refuse: everything works without them, only slower.
    fn collapse_into_huge_pages(&self) {
        if self.len < HUGE_PAGE_BYTES {
            return;
        }
        for at in (0..self.len).step_by(HUGE_PAGE_BYTES) {
            // SAFETY: inside the mapping, which is writable and which nobody else knows yet; it holds zeros already.
            // The kernel collapses only where there is a page (measured on Linux 6.18: EINVAL without).
            unsafe { self.base.add(at).write_volatile(0) };
        }
        // SAFETY: advice about a mapping of ours; it changes no contents.
        unsafe {
            libc::madvise(self.base.cast(), self.len, libc::MADV_HUGEPAGE);
            libc::madvise(self.base.cast(), self.len, libc::MADV_COLLAPSE);
        }
    }

    /// Keeps these bytes out of this process's core dumps: they are somebody else's.
    pub(crate) fn keep_out_of_dumps(&self) {
        // SAFETY: advice about a mapping of ours; it changes no contents.
        unsafe { libc::madvise(self.base.cast(), self.len, libc::MADV_DONTDUMP) };
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: a mapping that `new` made, given back once.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use baton_connector::BlockId;

    use super::*;

    fn writable(file: BorrowedFd<'_>, len: usize) -> Result<(), Option<i32>> {
        Map::new(file, len, Access::ReadWrite).map(drop).map_err(|error| error.raw_os_error())
    }

    #[test]
    fn a_pool_is_zeroed_aligned_and_shared_with_its_readers() {
        for (blocks, block_bytes) in [(3, 96), (5, 1 << 20), (1, HUGE_PAGE_BYTES)] {
            let memory = SharedMemory::zeroed(blocks * block_bytes).expect("memory");
            let reader = Map::new(memory.readers(), memory.len(), Access::Read).expect("it may be read");
            let region = Region::over(Box::new(memory), blocks, block_bytes);
            assert!(region.read_block(BlockId(0)).iter().all(|byte| *byte == 0));
            let align = if blocks * block_bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
            assert!(region.block_ptr(BlockId(0)).addr().is_multiple_of(align));
            region.write_block(BlockId(0), &vec![7; block_bytes]);
            // SAFETY: the first byte of a live mapping.
            assert_eq!(unsafe { reader.base.read_volatile() }, 7);
        }
    }

    #[test]
    fn nobody_can_write_through_what_readers_are_given() {
        let memory = SharedMemory::zeroed(8192).expect("memory");
        let fd = memory.readers();
        assert_eq!(writable(fd, 8192), Err(Some(libc::EACCES)), "opened for reading");
        let map = Map::new(fd, 8192, Access::Read).expect("it may be read");
        // SAFETY: a mapping of ours.
        let made_writable =
            unsafe { libc::mprotect(map.base.cast(), 8192, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(made_writable, -1, "a mapping for reading stays one");
        // The same file opened again, for writing: the permissions of the file allow it, its seals do not.
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let again = OpenOptions::new().read(true).write(true).open(path).expect("it is ours");
        assert_eq!(writable(again.as_fd(), 8192), Err(Some(libc::EPERM)), "sealed");
        let written = again.write_at(b"x", 0).map_err(|error| error.raw_os_error());
        assert_eq!(written, Err(Some(libc::EPERM)), "sealed");
    }

    #[test]
    fn nobody_can_take_the_memory_away_under_a_reader() {
        let memory = SharedMemory::zeroed(8192).expect("memory");
        let path = format!("/proc/self/fd/{}", memory.readers().as_raw_fd());
        let again = OpenOptions::new().write(true).open(path).expect("it is ours");
        for len in [0, 4096, 16384] {
            let resized = again.set_len(len).map_err(|error| error.raw_os_error());
            assert_eq!(resized, Err(Some(libc::EPERM)), "{len}");
        }
        let unsealed = seal(&again, libc::F_SEAL_EXEC);
        assert!(unsealed.is_err(), "the seals are sealed");
        assert_eq!(seals_of(memory.readers()).expect("a memfd") & NEEDED_SEALS, NEEDED_SEALS);
    }

    #[test]
    fn nothing_is_not_a_pool() {
        assert!(SharedMemory::zeroed(0).is_err());
        assert!(shared_pool(usize::MAX, 2).is_err());
    }
}
