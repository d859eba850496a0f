//! Benchmarks of single parts against their own limits: engines, GPUs, transfers, leases, handoffs, steps.

pub mod engine;
pub mod gpu;
pub mod handoff;
pub mod lease;
pub mod steps;
pub mod transfer;
