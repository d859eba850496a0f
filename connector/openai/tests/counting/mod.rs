//! An allocator that counts the allocations of each thread. A test of another crate includes it:
//!
//! ```text
//! #[path = "../../connector/openai/tests/counting/mod.rs"]
//! mod counting;
//! ```

#![allow(unsafe_code, reason = "an allocator that counts cannot be had without it")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct CountingAllocator;

fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: every call is forwarded unchanged. The counter is thread-local and does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the contract of the caller is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(block, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The result of `of`, and the allocations that this thread has made for it.
pub(crate) fn allocations<T>(of: impl FnOnce() -> T) -> (T, usize) {
    let before = ALLOCATIONS.get();
    let made = of();
    (made, ALLOCATIONS.get() - before)
}
