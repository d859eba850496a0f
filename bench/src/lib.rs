//! Measurements of running systems and their parts, each against a baseline from the same run.

pub mod engine;
