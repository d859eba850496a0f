//! A body from a client.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_router::fuzzing::request_json(bytes));
