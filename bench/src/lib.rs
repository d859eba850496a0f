//! Measures running systems and their parts, against baselines from the same run.
#![deny(clippy::print_stderr)] // `eprintln!` panics if standard error is closed, `note` does not

pub mod chart;
pub mod common;
pub mod disconnect;
mod load;
pub mod ops;
pub mod parts;
pub mod sim;
pub mod systems;

use std::io::Write;

use clap::Subcommand;

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum Benchmark {
    /// Measure the CPU engine against this machine's read bandwidth and a matrix library
    Engine(parts::engine::EngineBench),
    /// Check every CUDA kernel against its reference kernel, then measure speeds against the GPU's limits
    Gpu(parts::gpu::GpuBench),
    /// Compile every kernel with NVIDIA's run-time compiler for every architecture; needs no GPU
    GpuCompile(parts::gpu::compile::GpuCompile),
    /// Run every kernel on emulated CUDA threads against its reference kernel; needs a C++ compiler, no GPU
    GpuEmulate(parts::gpu::emulate::GpuEmulate),
    /// Measure KV block transfers between two processes on one device, beside copies inside it
    GpuIpc(parts::gpu::ipc::GpuIpc),
    /// Check and measure KV block transfers by NIXL between device memories, including interrupted ones
    GpuNixl(parts::gpu::nixl::GpuNixl),
    /// Measure how long a client waits for a handoff, with early and with late reads
    Handoff(parts::handoff::HandoffOptions),
    /// Measure the time between a stream's tokens beside a long prompt, with and without a time target of steps
    Steps(parts::steps::StepsOptions),
    /// Measure KV block transfers against a bare writev/readv loop and memcpy
    Transfer(parts::transfer::TransferOptions),
    /// Measure one lease from open to close, with up to 100,000 other live leases
    Lease(parts::lease::LeaseOptions),
    /// Simulate fleets of up to 1,000 engines: measure routing decisions and check that every lease is
    /// settled
    Fleet(systems::fleet::FleetOptions),
    /// Measure what the router adds to a request, against a client that makes both hops itself
    Router(systems::router::RouterArgs),
    /// Measure a choice by the endpoint picker, beside a whole request through the router
    Picker(systems::picker::PickerArgs),
    /// Compare prefix routing by token blocks with routing by chunks of JSON, on a trace of multi-turn chats
    Prefix(systems::prefix::PrefixArgs),
    /// Load an OpenAI-compatible endpoint and measure it as its clients see it
    Serve(Box<systems::serve::ServeArgs>),
    /// Measure what cancelled requests cost a deployment, and write a report with all raw events
    Disconnect(Box<disconnect::plan::options::DisconnectOptions>),
    /// Write the report of `disconnect` again from its raw events
    Report(disconnect::plan::options::ReportOptions),
    /// Draw the charts of the documentation from the reports in `bench/results`
    Chart(chart::ChartArgs),
    /// Compare gateways under the same workload: speed, and blocks stranded by cancels in the gap
    Compare(Box<systems::compare::CompareArgs>),
    /// Run simulated engines with the prefill/decode protocol of vLLM or SGLang, and faults on demand
    Sim(Box<systems::sim::SimArgs>),
}

/// Writes one line to standard error. A closed standard error is ignored.
fn note(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Why a benchmark did not finish.
pub type BenchError = Box<dyn std::error::Error>;

/// Runs one benchmark and prints its table, or one JSON object.
///
/// # Errors
/// If a part under test fails, or its options are invalid.
pub fn run(benchmark: Benchmark, out: &mut dyn Write) -> Result<(), BenchError> {
    match benchmark {
        Benchmark::Engine(options) => Ok(parts::engine::run(&options, out)?),
        Benchmark::Gpu(options) => parts::gpu::run(&options, out),
        Benchmark::GpuEmulate(options) => parts::gpu::emulate::run(&options, out),
        Benchmark::GpuCompile(options) => parts::gpu::compile::run(&options, out),
        Benchmark::GpuIpc(options) => parts::gpu::ipc::run(&options, out),
        Benchmark::GpuNixl(options) => parts::gpu::nixl::run(&options, out),
        Benchmark::Handoff(options) => parts::handoff::run(&options, out),
        Benchmark::Steps(options) => parts::steps::run(&options, out),
        Benchmark::Transfer(options) => Ok(parts::transfer::run(&options, out)?),
        Benchmark::Lease(options) => Ok(parts::lease::run(&options, out)?),
        Benchmark::Fleet(options) => Ok(systems::fleet::run(&options, out)?),
        Benchmark::Router(options) => Ok(systems::router::run(&options, out)?),
        Benchmark::Picker(options) => Ok(systems::picker::run(&options, out)?),
        Benchmark::Prefix(options) => Ok(systems::prefix::run(&options, out)?),
        Benchmark::Serve(options) => systems::serve::run(&options, out),
        Benchmark::Disconnect(options) => disconnect::run(&options, out),
        Benchmark::Report(options) => disconnect::report(&options, out),
        Benchmark::Chart(options) => chart::run(&options, out),
        Benchmark::Compare(options) => systems::compare::run(&options, out),
        Benchmark::Sim(options) => systems::sim::run(&options, out),
    }
}
