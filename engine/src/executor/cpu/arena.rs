//! Aligned memory for weights and activations.
//!
//! Large buffers are aligned to 2 MiB and marked for huge pages before they are first touched: reading weights
//! through 4 KiB pages can cost half of the memory bandwidth (measured on a 2-core Xeon guest: 33 against
//! 67 GB/s).
#![allow(unsafe_code)] // raw allocation with an alignment `Vec` cannot give; see each block

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};

const CACHE_LINE_BYTES: usize = 64;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Types for which all-zero bytes are a value: the only ones an [`Aligned`] buffer holds.
pub(super) trait Plain: Copy + Send + Sync + 'static {}
impl Plain for f32 {}
impl Plain for u16 {}
impl Plain for i8 {}

/// A fixed-size buffer of zeros to begin with, aligned to a cache line or, if large, to a huge page.
#[derive(Debug)]
pub(super) struct Aligned<T: Plain> {
    base: *mut T,
    len: usize,
    layout: Layout,
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
        Self { base: base.cast(), len, layout }
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
        // SAFETY: `base` came from the allocator with this layout and is freed once.
        unsafe { dealloc(self.base.cast(), self.layout) };
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
