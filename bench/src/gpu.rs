//! `baton bench gpu`: whether the CUDA executor is right on this GPU, and how fast it is beside what the GPU can do.
//!
//! First every kernel against its twin in Rust ([`baton_engine::executor::cuda::check`]); what is wrong fails the
//! command. Then speeds, each beside a limit that was measured a moment before: copies inside the device, copies over the
//! link, and one large bf16 product. Without a GPU it does nothing and says so ([`Skipped`]).

pub mod compile;
pub mod emulate;
mod speed;

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use baton_engine::executor::ExecutorError;
use baton_engine::executor::cuda::driver::CudaDevice;
use baton_engine::executor::cuda::{Device, DeviceError, Element, LoadError, check, cubins};
use baton_engine::model::ModelError;
use clap::Args;
use serde::Serialize;

pub use self::speed::Speed;

/// Head widths whose kernels are checked, with both element types: those of the tiny checkpoints and of large models.
const HEAD_DIMS: [usize; 4] = [16, 32, 64, 128];

/// Options of `baton bench gpu`.
#[derive(Args, Clone, Debug)]
pub struct GpuBench {
    /// Which GPU, by the driver's number
    #[arg(long, default_value_t = 0)]
    pub device: usize,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Check kernels only
    #[arg(long)]
    pub check_only: bool,
    /// Layers of the model whose speed is measured; 32 are Llama 3.1 8B's, of 16 GB of weights
    #[arg(long, default_value_t = 32)]
    pub layers: usize,
}

/// Nothing was checked or measured, and why.
#[derive(Debug, thiserror::Error)]
#[error("SKIPPED, NOTHING WAS CHECKED OR MEASURED: {0}")]
pub struct Skipped(pub String);

/// Why the benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum GpuBenchError {
    /// A kernel computes something else than its twin.
    #[error("{0} of the kernels' results are wrong")]
    Wrong(usize),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The made-up model cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Its configuration is wrong.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A forward pass failed.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// The report cannot be written.
    #[error("cannot write the report: {0}")]
    Report(#[from] std::io::Error),
}

/// One JSON object of `--json`.
#[derive(Debug, Serialize)]
pub struct GpuReport {
    /// Seconds since 1970 at the start.
    pub unix_time_s: u64,
    /// The GPU's own name.
    pub device: String,
    /// What its kernels were compiled for.
    pub arch: String,
    /// Results of kernels that are what their twins computed.
    pub kernels_right: usize,
    /// What was measured.
    pub speeds: Vec<Speed>,
}

/// Checks, measures and reports.
///
/// # Errors
/// [`Skipped`] without a GPU, [`GpuBenchError`].
pub fn run(options: &GpuBench, out: &mut dyn Write) -> Result<(), crate::BenchError> {
    let unix_time_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let first = match open(options, Element::Bf16, HEAD_DIMS[0]) {
        Err(error @ (DeviceError::Library { .. } | DeviceError::Absent(_))) => {
            return Err(Skipped(error.to_string()).into());
        }
        // A driver without a device answers its first call so.
        Err(DeviceError::Call { call: call @ "cuInit", what }) => {
            return Err(Skipped(format!("{call}: {what}")).into());
        }
        other => other?,
    };
    let (device, arch) = (first.name(), first.arch().to_owned());
    drop(first);
    if !options.json {
        writeln!(out, "{device}, kernels for {arch}")?;
    }
    let right = check_kernels(options, out)?;
    let mut report = GpuReport { unix_time_s, device, arch, kernels_right: right, speeds: Vec::new() };
    if !options.check_only {
        report.speeds = speed::measure(options)?;
    }
    if options.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report).map_err(std::io::Error::other)?)?;
    } else {
        writeln!(out, "{right} results of kernels are what their twins computed")?;
        speed::print(&report.speeds, out)?;
    }
    Ok(())
}

fn open(options: &GpuBench, element: Element, head_dim: usize) -> Result<CudaDevice, DeviceError> {
    CudaDevice::open(options.device, element, head_dim, cubins::folder().as_deref())
}

/// How many results are right; every wrong one is written out.
fn check_kernels(options: &GpuBench, out: &mut dyn Write) -> Result<usize, GpuBenchError> {
    let (mut right, mut wrong) = (0, 0);
    for element in [Element::F32, Element::Bf16] {
        for head_dim in HEAD_DIMS {
            let mut device = open(options, element, head_dim)?;
            for line in check::kernels(&mut device, element, head_dim)? {
                if line.passed {
                    right += 1;
                } else {
                    wrong += 1;
                    writeln!(out, "FAIL  {:<70} {}", line.what, line.numbers)?;
                }
            }
        }
    }
    if wrong > 0 { Err(GpuBenchError::Wrong(wrong)) } else { Ok(right) }
}
