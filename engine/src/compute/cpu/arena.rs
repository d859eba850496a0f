//! Aligned memory for weights and activations.
//!
//! Large buffers are aligned to 2 MiB and marked for huge pages before the first access. With 4 KiB pages, reading
//! weights can lose half of the memory bandwidth. Weights are placed next to each other in a [`WeightArena`] of large
//! chunks. Separate buffers, each rounded up to huge pages, would take a third more memory than the weights.
#![allow(
    unsafe_code,
    reason = "raw allocation with an alignment that `Vec` does not support; see each block"
)]

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

const CACHE_LINE_BYTES: usize = 64;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Smallest chunk of an arena. The unused part of the last chunk is never touched, except in its first huge page.
const CHUNK_BYTES: usize = 64 << 20;

/// Types for which all-zero bytes are a valid value: the only element types of an [`AlignedBuffer`].
pub(super) trait Zeroable: Copy + Send + Sync + 'static {}
impl Zeroable for f32 {}
impl Zeroable for u16 {}
impl Zeroable for u32 {}
impl Zeroable for i8 {}
impl Zeroable for u8 {}

/// A zero-initialized buffer of fixed size, aligned to a cache line or, if large, to a huge page.
#[derive(Debug)]
pub(super) struct AlignedBuffer<T: Zeroable> {
    base: *mut T,
    len: usize,
    memory: BufferMemory,
}

/// Owner of a buffer's memory.
#[derive(Debug)]
enum BufferMemory {
    Own(Layout),
    /// Kept for its `Drop`.
    #[allow(dead_code, reason = "the chunk lives as long as its buffers")]
    Part(Arc<Chunk>),
}

/// Memory for many buffers with the same lifetime.
#[derive(Debug, Default)]
pub(super) struct WeightArena {
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

// SAFETY: a chunk is plain memory, and each of its buffers writes a part of its own.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl WeightArena {
    /// As [`AlignedBuffer::zeroed`], in the same chunk as earlier buffers if it fits.
    pub(super) fn zeroed<T: Zeroable>(&mut self, len: usize) -> AlignedBuffer<T> {
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
        AlignedBuffer { base, len, memory: BufferMemory::Part(chunk) }
    }
}

#[cfg(target_os = "linux")]
impl Chunk {
    fn new(bytes: usize) -> Self {
        let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        // Larger by one huge page, to start at a huge page boundary. The bytes before the start and after the end are
        // never touched.
        let whole = bytes.checked_add(HUGE_PAGE_BYTES).expect("a chunk fits into the address space");
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping that overlaps no other memory.
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
unsafe impl<T: Zeroable> Send for AlignedBuffer<T> {}
// SAFETY: as above; shared access is read-only through `Deref`.
unsafe impl<T: Zeroable> Sync for AlignedBuffer<T> {}

impl<T: Zeroable> AlignedBuffer<T> {
    pub(super) fn zeroed(len: usize) -> Self {
        let bytes = len.checked_mul(size_of::<T>()).expect("a buffer fits into the address space").max(1);
        let huge = bytes >= HUGE_PAGE_BYTES;
        let align = if huge { HUGE_PAGE_BYTES } else { CACHE_LINE_BYTES };
        // A tail shorter than a huge page gets a huge page too, unless that adds more than half of the size.
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
        Self { base: base.cast(), len, memory: BufferMemory::Own(layout) }
    }
}

impl<T: Zeroable> Deref for AlignedBuffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `base` is aligned and valid for `len` initialized values while `self` lives.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }
}

impl<T: Zeroable> DerefMut for AlignedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }
}

impl<T: Zeroable> Drop for AlignedBuffer<T> {
    fn drop(&mut self) {
        if let BufferMemory::Own(layout) = self.memory {
            // SAFETY: `base` came from the allocator with this layout and is freed once.
            unsafe { dealloc(self.base.cast(), layout) };
        }
    }
}

/// Asks for huge pages. Without them, memory is only slower.
#[cfg(target_os = "linux")]
fn advise_huge_pages(base: *mut u8, bytes: usize) {
    // SAFETY: advice about memory we have just allocated; it changes no contents.
    let _ = unsafe { libc::madvise(base.cast(), bytes, libc::MADV_HUGEPAGE) };
}

/// Asks for huge pages in memory that has been touched already. On systems without this call (before Linux 6.1), the
/// kernel compacts the memory later.
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
        let mut arena = WeightArena::default();
        // The last two do not fit into the first chunk beside the others.
        let lens = [1, 0, 1000, HUGE_PAGE_BYTES, CHUNK_BYTES / 4, CHUNK_BYTES / 2];
        let mut buffers: Vec<AlignedBuffer<f32>> = lens.iter().map(|len| arena.zeroed(*len)).collect();
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
            let mut buffer = AlignedBuffer::<f32>::zeroed(len);
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|value| *value == 0.0));
            assert!(buffer.as_ptr().addr().is_multiple_of(CACHE_LINE_BYTES));
            buffer.fill(1.0);
        }
    }
}
