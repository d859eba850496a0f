//! A prefill engine's reply.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_router::fuzzing::prefill_reply(bytes));
