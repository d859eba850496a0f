//! Measures running systems and their parts, against baselines from the same run.
#![deny(clippy::print_stderr)] // it panics where standard error is closed: `note`

pub mod compare;
pub mod disconnect;
pub mod doctor;
pub mod engine;
pub mod fleet;
pub mod gpu;
pub mod handoff;
pub mod lease;
mod load;
mod machine;
pub mod router;
mod running;
pub mod serve;
pub mod sim;
pub mod sim_engine;
pub mod sim_fleet;
mod stats;
pub mod top;
pub mod transfer;
mod web;

use std::io::Write;

use clap::Subcommand;

/// What can be measured.
#[derive(Debug, Subcommand)]
pub enum Benchmark {
    /// The CPU engine, against this machine's read bandwidth and its matrix library
    Engine(engine::EngineBench),
    /// The CUDA executor on a GPU: every kernel against its twin, then speeds beside the GPU's own limits
    Gpu(gpu::GpuBench),
    /// Every kernel through NVIDIA's run-time compiler, for every architecture; needs no GPU
    GpuCompile(gpu::compile::GpuCompile),
    /// Every kernel's own code on an emulation of CUDA's threads, against its twin; needs a C++ compiler and no GPU
    GpuEmulate(gpu::emulate::GpuEmulate),
    /// KV blocks from one process to another on one device, beside copies inside it
    GpuIpc(gpu::ipc::GpuIpc),
    /// KV blocks from one process to another by NIXL, from device memory to device memory, and broken off on the way
    GpuNixl(gpu::nixl::GpuNixl),
    /// What of a handoff a client waits for, when blocks are read while they are computed and when afterwards
    Handoff(handoff::HandoffOptions),
    /// KV blocks over the transport, against a bare writev/readv loop and memcpy
    Transfer(transfer::TransferOptions),
    /// One lease from open to close, with up to 100,000 others alive
    Lease(lease::LeaseOptions),
    /// A simulated fleet: what a decision costs with up to 1,000 engines and 100,000 requests alive, and every lease settled
    Fleet(fleet::FleetOptions),
    /// What the router adds to a request, against a client that makes both hops itself
    Router(router::RouterArgs),
    /// Load on any OpenAI-compatible endpoint, and what its clients see of it
    Serve(Box<serve::ServeArgs>),
    /// What clients that leave cost a deployment: a report, and every raw event beside it
    Disconnect(Box<disconnect::DisconnectOptions>),
    /// The report of `disconnect` again, from its raw events
    Report(disconnect::ReportOptions),
    /// The same workload through several front doors, side by side: speed, and what clients strand that leave in the gap
    Compare(Box<compare::CompareArgs>),
    /// Simulated engines in the foreground, with vLLM's prefill/decode protocol and faults on demand
    Sim(Box<sim::SimArgs>),
}

/// One line on standard error, which nothing may read.
fn note(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Why a benchmark did not finish.
pub type BenchError = Box<dyn std::error::Error>;

/// Runs one benchmark and prints its table, or one JSON object.
///
/// # Errors
/// When a part under test fails, or its options make no sense.
pub fn run(benchmark: Benchmark, out: &mut dyn Write) -> Result<(), BenchError> {
    match benchmark {
        Benchmark::Engine(options) => Ok(engine::run(&options, out)?),
        Benchmark::Gpu(options) => gpu::run(&options, out),
        Benchmark::GpuEmulate(options) => gpu::emulate::run(&options, out),
        Benchmark::GpuCompile(options) => gpu::compile::run(&options, out),
        Benchmark::GpuIpc(options) => gpu::ipc::run(&options, out),
        Benchmark::GpuNixl(options) => gpu::nixl::run(&options, out),
        Benchmark::Handoff(options) => handoff::run(&options, out),
        Benchmark::Transfer(options) => Ok(transfer::run(&options, out)?),
        Benchmark::Lease(options) => Ok(lease::run(&options, out)?),
        Benchmark::Fleet(options) => Ok(fleet::run(&options, out)?),
        Benchmark::Router(options) => Ok(router::run(&options, out)?),
        Benchmark::Serve(options) => serve::run(&options, out),
        Benchmark::Disconnect(options) => disconnect::run(&options, out),
        Benchmark::Report(options) => disconnect::report(&options, out),
        Benchmark::Compare(options) => compare::run(&options, out),
        Benchmark::Sim(options) => sim::run(&options, out),
    }
}
