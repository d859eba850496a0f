//! A GGUF file.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_engine::model::gguf::check(bytes));
