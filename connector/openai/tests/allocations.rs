//! The allocations of a router for one body. With locks and caches, they are most of the cost of reading and writing.

#![allow(unsafe_code, reason = "an allocator that counts cannot be had without it")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use baton_openai::{Endpoint, ParseLimits, RawBody};
use bytes::Bytes;

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

fn allocations<T>(of: impl FnOnce() -> T) -> (T, usize) {
    let before = ALLOCATIONS.get();
    let made = of();
    (made, ALLOCATIONS.get() - before)
}

#[test]
fn an_ordinary_body_is_read_and_written_twice_with_few_allocations() {
    let limits = ParseLimits::of_any_engine(1 << 20);
    let chat = r#"{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}],
        "stream":true,"max_tokens":64,"temperature":0.7,"top_p":0.9}"#;
    let completion = r#"{"model":"m","prompt":"a prompt","stream":true,"max_tokens":64,"temperature":0}"#;
    for (endpoint, text) in [(Endpoint::Chat, chat), (Endpoint::Completions, completion)] {
        let bytes = Bytes::from_static(text.as_bytes());
        let (read, reading) = allocations(|| RawBody::generate(bytes, endpoint, &limits, &()));
        let (body, _) = read.expect("an ordinary body");
        let handoff = [b'7'; 600];
        let ours: [(&str, &[u8]); 2] = [("model", b"\"n\""), ("kv_transfer_params", &handoff)];
        let (pieces, writing) = allocations(|| body.write(&ours, &[]));
        assert!(pieces.concat().len() > text.len() + 600);
        assert!(reading <= READING && writing <= WRITING, "{endpoint:?}: {reading} and {writing}");
    }
}

/// The fields; their names; the small fields; the model's name, there and in the outline; and the open names of the
/// walk.
const READING: usize = 6;
/// The text, its reference count, and the list of pieces.
const WRITING: usize = 3;
