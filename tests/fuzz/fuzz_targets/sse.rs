//! A stream of events, in pieces.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_router::fuzzing::sse(bytes));
