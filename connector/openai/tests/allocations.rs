//! What a router pays for a body in allocations: with locks and caches they are most of what reading and writing costs.

#![allow(unsafe_code, reason = "an allocator that counts cannot be had without it")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use baton_openai::{Endpoint, ParseLimits, RawBody};
use bytes::Bytes;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: every call is passed on as it is; the counter is the thread's own and does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are those that `System` asks for.
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
static ALLOCATOR: Counting = Counting;

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
        let came = Bytes::from_static(text.as_bytes());
        let (read, reading) = allocations(|| RawBody::generate(came, endpoint, &limits, &()));
        let (body, _) = read.expect("an ordinary body");
        let handoff = [b'7'; 600];
        let ours: [(&str, &[u8]); 2] = [("model", b"\"n\""), ("kv_transfer_params", &handoff)];
        let (pieces, writing) = allocations(|| body.write(&ours, &[]));
        assert!(pieces.concat().len() > text.len() + 600);
        assert!(reading <= READING && writing <= WRITING, "{endpoint:?}: {reading} and {writing}");
    }
}

/// The fields; their names; the few that are looked at; the model's name, there and in the outline; and the names that
/// are open at a time in the walk.
const READING: usize = 6;
/// The text, its count of owners, and the list of pieces.
const WRITING: usize = 3;
