//! A frame of the side channel.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_connector_channel::fuzzing::frame(bytes));
