//! A configuration file.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_router::fuzzing::config(bytes));
