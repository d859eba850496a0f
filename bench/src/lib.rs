//! Measures running systems and their parts, against baselines from the same run.
#![deny(clippy::print_stderr)] // it panics where standard error is closed: `note`

pub mod chart;
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
    /// Measure the CPU engine against this machine's read bandwidth and a matrix library
    Engine(engine::EngineBench),
    /// Check every CUDA kernel against its reference kernel, then measure speeds against the GPU's limits
    Gpu(gpu::GpuBench),
    /// Compile every kernel with NVIDIA's run-time compiler for every architecture; needs no GPU
    GpuCompile(gpu::compile::GpuCompile),
    /// Run every kernel on emulated CUDA threads against its reference kernel; needs a C++ compiler, no GPU
    GpuEmulate(gpu::emulate::GpuEmulate),
    /// Measure KV block transfers between two processes on one device, beside copies inside it
    GpuIpc(gpu::ipc::GpuIpc),
    /// Check and measure KV block transfers by NIXL between device memories, including interrupted ones
    GpuNixl(gpu::nixl::GpuNixl),
    /// Measure how long a client waits for a handoff, with early and with late reads
    Handoff(handoff::HandoffOptions),
    /// Measure KV block transfers against a bare writev/readv loop and memcpy
    Transfer(transfer::TransferOptions),
    /// Measure one lease from open to close, with up to 100,000 other live leases
    Lease(lease::LeaseOptions),
    /// Simulate fleets of up to 1,000 engines: measure routing decisions and check that every lease is
    /// settled
    Fleet(fleet::FleetOptions),
    /// Measure what the router adds to a request, against a client that makes both hops itself
    Router(router::RouterArgs),
    /// Load an OpenAI-compatible endpoint and measure it as its clients see it
    Serve(Box<serve::ServeArgs>),
    /// Measure what cancelled requests cost a deployment, and write a report with all raw events
    Disconnect(Box<disconnect::DisconnectOptions>),
    /// Write the report of `disconnect` again from its raw events
    Report(disconnect::ReportOptions),
    /// Draw the charts of the documentation from the reports in `bench/results`
    Chart(chart::ChartArgs),
    /// Compare gateways under the same workload: speed, and blocks stranded by cancels in the gap
    Compare(Box<compare::CompareArgs>),
    /// Run simulated engines with vLLM's prefill/decode protocol and faults on demand
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
        Benchmark::Chart(options) => chart::run(&options, out),
        Benchmark::Compare(options) => compare::run(&options, out),
        Benchmark::Sim(options) => sim::run(&options, out),
    }
}
