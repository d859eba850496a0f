//! Simulated engines: a fleet with vLLM's protocol and faults, and engines that answer at once.

pub mod engines;
pub mod instant;
