//! Aligned memory for weights and activations.
//!
//! Large buffers are aligned to 2 MiB and marked for huge pages before they are first touched: reading weights
//! through 4 KiB pages can cost half of the memory bandwidth (measured on a 2-core Xeon guest: 33 against
//! 67 GB/s). Weights lie side by side in an [`Arena`] of large chunks, because each matrix rounded up to huge pages, with
//! the allocator's own room for the alignment, costs a third more memory than the weights (a 427 MB model took 600).
#![allow(unsafe_code)] // raw allocation with an alignment `Vec` cannot give; see each block

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

const CACHE_LINE_BYTES: usize = 64;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Least size of an arena's chunk. What is not used of the last one is never touched, but for a part of a huge page.
const CHUNK_BYTES: usize = 64 << 20;

/// Types for which all-zero bytes are a value: the only ones an [`Aligned`] buffer holds.
pub(super) trait Plain: Copy + Send + Sync + 'static {}
impl Plain for f32 {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for i8 {}

/// A fixed-size buffer of zeros to begin with, aligned to a cache line or, if large, to a huge page.
#[derive(Debug)]
pub(super) struct Aligned<T: Plain> {
    base: *mut T,
    len: usize,
    memory: Memory,
}

/// Whose memory a buffer is.
#[derive(Debug)]
enum Memory {
    Own(Layout),
    /// Kept for its `Drop`.
    #[allow(dead_code)] // the chunk lives as long as its buffers
    Part(Arc<Chunk>),
}

/// Memory for many buffers that live as long as each other.
#[derive(Debug, Default)]
pub(super) struct Arena {
    chunk: Option<Arc<Chunk>>,
    used: usize,
}

/// Zeroed memory from the system, aligned to a huge page.
#[derive(Debug)]
struct Chunk {
    base: *mut u8,
    bytes: usize,
    #[cfg(target_os = "linux")]
    mapping: (*mut libc::c_void, usize),
}

// SAFETY: a chunk is memory; who writes which part is decided by the buffers, each of which has its own.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Arena {
    /// As [`Aligned::zeroed`], beside the buffers before it.
    pub(super) fn zeroed<T: Plain>(&mut self, len: usize) -> Aligned<T> {
        let bytes = len.checked_mul(size_of::<T>()).expect("a buffer fits into the address space");
        let bytes = bytes.next_multiple_of(CACHE_LINE_BYTES);
        let chunk = match &self.chunk {
            Some(chunk) if chunk.bytes - self.used >= bytes => Arc::clone(chunk),
            _ => {
                self.used = 0;
                let chunk = Arc::new(Chunk::new(bytes.max(CHUNK_BYTES)));
                Arc::clone(self.chunk.insert(chunk))
            }
        };
        // SAFETY: `used` is within the chunk, and a multiple of a cache line.
        let base = unsafe { chunk.base.add(self.used) }.cast();
        self.used += bytes;
        Aligned { base, len, memory: Memory::Part(chunk) }
    }
}

#[cfg(target_os = "linux")]
impl Chunk {
    fn new(bytes: usize) -> Self {
        let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        // Room to begin at a huge page; what is before it and after the end is never touched.
        let whole = bytes.checked_add(HUGE_PAGE_BYTES).expect("a chunk fits into the address space");
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping of nothing else's memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), whole, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            handle_alloc_error(Layout::from_size_align(bytes, HUGE_PAGE_BYTES).expect("checked above"));
        }
        let base = start.cast::<u8>();
        // SAFETY: less than a huge page further, inside the mapping.
        let base = unsafe { base.add(base.addr().next_multiple_of(HUGE_PAGE_BYTES) - base.addr()) };
        advise_huge_pages(base, bytes);
        Self { base, bytes, mapping: (start, whole) }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: the mapping is this chunk's own, and no buffer of it is left.
        let _ = unsafe { libc::munmap(self.mapping.0, self.mapping.1) };
    }
}

#[cfg(not(target_os = "linux"))]
impl Chunk {
    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, HUGE_PAGE_BYTES).expect("a chunk fits into the address space")
    }

    fn new(bytes: usize) -> Self {
        let layout = Self::layout(bytes);
        // SAFETY: a chunk is not empty.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        Self { base, bytes }
    }
}

#[cfg(not(target_os = "linux"))]
impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: `base` came from the allocator with this layout and is freed once.
        unsafe { dealloc(self.base, Self::layout(self.bytes)) };
    }
}

// SAFETY: the buffer owns plain values.
unsafe impl<T: Plain> Send for Aligned<T> {}
// SAFETY: as above; shared access is read-only through `Deref`.
unsafe impl<T: Plain> Sync for Aligned<T> {}

impl<T: Plain> Aligned<T> {
    pub(super) fn zeroed(len: usize) -> Self {
        let bytes = len.checked_mul(size_of::<T>()).expect("a buffer fits into the address space").max(1);
        let huge = bytes >= HUGE_PAGE_BYTES;
        let align = if huge { HUGE_PAGE_BYTES } else { CACHE_LINE_BYTES };
        // A tail shorter than a huge page gets one too, where that costs less than half as much again.
        let whole = bytes.next_multiple_of(align);
        let bytes = if whole - bytes <= bytes / 2 { whole } else { bytes };
        let layout = Layout::from_size_align(bytes, align).expect("a buffer fits into the address space");
        let base = if huge {
            // SAFETY: the layout has a non-zero size.
            let base = unsafe { alloc(layout) };
            if !base.is_null() {
                advise_huge_pages(base, bytes);
                // SAFETY: `base` is valid for `bytes` bytes. Zeroing follows the advice, so that the first
                // touch of each page already gets a huge one.
                unsafe { base.write_bytes(0, bytes) };
            }
            base
        } else {
            // SAFETY: the layout has a non-zero size.
            unsafe { alloc_zeroed(layout) }
        };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        Self { base: base.cast(), len, memory: Memory::Own(layout) }
    }
}

impl<T: Plain> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `base` is aligned and valid for `len` initialized values while `self` lives.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}

impl<T: Plain> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

impl<T: Plain> Drop for Aligned<T> {
    fn drop(&mut self) {
        if let Memory::Own(layout) = self.memory {
            // SAFETY: `base` came from the allocator with this layout and is freed once.
            unsafe { dealloc(self.base.cast(), layout) };
        }
    }
}

/// Asks for huge pages; without them everything works, only slower.
#[cfg(target_os = "linux")]
fn advise_huge_pages(base: *mut u8, bytes: usize) {
    // SAFETY: advice about memory we have just allocated; it changes no contents.
    let _ = unsafe { libc::madvise(base.cast(), bytes, libc::MADV_HUGEPAGE) };
}

/// Asks for huge pages in memory that has been touched already. Where the system has no such thing (before
/// Linux 6.1), its own compaction follows later.
#[cfg(target_os = "linux")]
pub(super) fn collapse_into_huge_pages(base: *mut u8, bytes: usize) {
    advise_huge_pages(base, bytes);
    // SAFETY: advice that moves pages and changes no contents.
    let _ = unsafe { libc::madvise(base.cast(), bytes, libc::MADV_COLLAPSE) };
}

#[cfg(not(target_os = "linux"))]
pub(super) fn collapse_into_huge_pages(_base: *mut u8, _bytes: usize) {}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_base: *mut u8, _bytes: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_an_arena_lie_apart_and_outlive_it() {
        let mut arena = Arena::default();
        // The last two do not fit into the first chunk beside the others.
        let lens = [1, 0, 1000, HUGE_PAGE_BYTES, CHUNK_BYTES / 4, CHUNK_BYTES / 2];
        let mut buffers: Vec<Aligned<f32>> = lens.iter().map(|len| arena.zeroed(*len)).collect();
        drop(arena);
        for (number, buffer) in buffers.iter_mut().enumerate() {
            assert_eq!(buffer.len(), lens[number]);
            assert!(buffer.as_ptr().addr().is_multiple_of(CACHE_LINE_BYTES));
            assert!(buffer.iter().all(|value| *value == 0.0), "buffer {number} is not its own");
            buffer.fill(number as f32 + 1.0);
        }
        for (number, buffer) in buffers.iter().enumerate() {
            assert!(buffer.iter().all(|value| *value == number as f32 + 1.0), "buffer {number}");
        }
    }

    #[test]
    fn buffers_are_zeroed_and_aligned() {
        for len in [0, 1, 100, HUGE_PAGE_BYTES] {
            let mut buffer = Aligned::<f32>::zeroed(len);
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|value| *value == 0.0));
            assert!(buffer.as_ptr().addr().is_multiple_of(CACHE_LINE_BYTES));
            buffer.fill(1.0);
        }
    }
}
