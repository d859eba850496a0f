//! Simulated engines: a fleet with vLLM's protocol and faults, and one that answers at once.

pub mod engines;
pub mod instant;
