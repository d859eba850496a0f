//! `baton bench gpu`: whether the CUDA executor is right on this GPU, and how fast it is beside what the GPU can do.
//!
//! First every kernel against its twin in Rust ([`baton_engine::check::kernels`]); what is wrong fails the
//! command. Then speeds, each beside a limit that was measured a moment before: copies inside the device, copies over the
//! link, and one large bf16 product. Without a GPU it does nothing and says so ([`Skipped`]).

pub mod compile;
pub mod emulate;
pub mod ipc;
pub mod nixl;
mod pool;
mod speed;

use std::io::Write;

use baton_engine::check::kernels;
use baton_engine::compute::ExecutorError;
use baton_engine::compute::cuda::driver::CudaDevice;
use baton_engine::compute::cuda::{Device, DeviceError, Element, LoadError, cubins};
use baton_engine::model::ModelError;
use clap::Args;
use serde::Serialize;

use self::speed::Sizes;
pub use self::speed::Speed;
use crate::common::machine::Origin;

/// Head widths whose kernels are checked, with both element types: all that are computed in bf16, which are those of released
/// models, of the tiny checkpoints, and what is between.
const HEAD_DIMS: [usize; 8] = [16, 32, 48, 64, 80, 96, 112, 128];

/// Options of `baton bench gpu`.
#[derive(Args, Clone, Debug)]
pub struct GpuBench {
    /// Number of the GPU, as the driver counts
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: usize,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Check kernels and measure nothing
    #[arg(long)]
    pub check_only: bool,
    /// Layers of the measured model; 32 is the depth of Llama 3.1 8B, with 16 GB of weights
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub layers: usize,
}

/// Nothing was checked or measured, and why.
#[derive(Debug, thiserror::Error)]
#[error("SKIPPED, NOTHING WAS CHECKED OR MEASURED: {0}")]
pub struct Skipped(pub String);

/// Why the benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum GpuBenchError {
    /// Kernels that compute something else than their twins, or parts that could not be run.
    #[error("{0} checks or measurements have failed")]
    Failed(usize),
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
    /// Of what, when, where and by which call.
    #[serde(flatten)]
    origin: Origin,
    /// The GPU's own name.
    pub device: String,
    /// What its kernels were compiled for.
    pub arch: String,
    /// Results of kernels that are what their twins computed.
    pub kernels_right: usize,
    /// Those that are not, and whatever could not be run.
    pub failed: Vec<String>,
    /// What was measured.
    pub speeds: Vec<Speed>,
}

/// Checks, measures and reports.
///
/// # Errors
/// [`Skipped`] without a GPU, [`GpuBenchError`].
pub fn run(options: &GpuBench, out: &mut dyn Write) -> Result<(), crate::BenchError> {
    let first = open(options, Element::Bf16, HEAD_DIMS[0]).map_err(unusable)?;
    let (device, arch, origin) = (first.name(), first.arch().to_owned(), Origin::of(first.driver()));
    drop(first);
    if !options.json {
        writeln!(out, "{device}, kernels for {arch}; {}", origin.line())?;
    }
    let (kernels_right, failed) = check_kernels(options);
    let mut report = GpuReport { origin, device, arch, kernels_right, failed, speeds: Vec::new() };
    if !options.check_only {
        let open = |head_dim| open(options, Element::Bf16, head_dim);
        let (speeds, failed) = speed::measure(&Sizes::llama(options.layers), open);
        report.speeds = speeds;
        report.failed.extend(failed);
    }
    if options.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report).map_err(std::io::Error::other)?)?;
    } else {
        report.failed.iter().try_for_each(|what| writeln!(out, "FAIL  {what}"))?;
        writeln!(out, "{kernels_right} results of kernels are what their twins computed")?;
        speed::print(&report.speeds, out)?;
    }
    match report.failed.len() {
        0 => Ok(()),
        failed => Err(GpuBenchError::Failed(failed).into()),
    }
}

/// Why a device could not be opened: [`Skipped`] where there is none.
fn unusable(error: DeviceError) -> crate::BenchError {
    match error {
        // A driver without a device answers its first call so.
        DeviceError::Library { .. } | DeviceError::Absent(_) | DeviceError::Call { call: "cuInit", .. } => {
            Skipped(error.to_string()).into()
        }
        other => GpuBenchError::from(other).into(),
    }
}

/// A GPU's own name, and its driver.
pub(crate) fn named(ordinal: usize) -> Result<(Option<String>, Option<String>), crate::BenchError> {
    let folder = cubins::folder();
    let device =
        CudaDevice::open(ordinal, Element::Bf16, HEAD_DIMS[0], folder.as_deref()).map_err(unusable)?;
    Ok((Some(device.name()), device.driver()))
}

fn open(options: &GpuBench, element: Element, head_dim: usize) -> Result<CudaDevice, DeviceError> {
    CudaDevice::open(options.device, element, head_dim, cubins::folder().as_deref())
}

/// How many results are right, and what is not.
fn check_kernels(options: &GpuBench) -> (usize, Vec<String>) {
    let (mut right, mut failed) = (0, Vec::new());
    for element in [Element::F32, Element::Bf16] {
        for head_dim in HEAD_DIMS {
            let lines = open(options, element, head_dim)
                .and_then(|mut device| kernels::kernels(&mut device, element, head_dim));
            match lines {
                Err(error) => failed.push(format!("{} {head_dim}: {error}", element.label())),
                Ok(lines) => {
                    right += lines.iter().filter(|line| line.passed).count();
                    let wrong = lines.into_iter().filter(|line| !line.passed);
                    failed.extend(wrong.map(|line| format!("{:<70} {}", line.what, line.numbers)));
                }
            }
        }
    }
    (right, failed)
}
