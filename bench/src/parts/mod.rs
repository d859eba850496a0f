//! Benchmarks of one part against its own limit: engines, GPUs, transfers, leases, handoffs.

pub mod engine;
pub mod gpu;
pub mod handoff;
pub mod lease;
pub mod transfer;
