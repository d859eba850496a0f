//! `baton bench gpu`: checks the CUDA executor on this GPU and measures its speed against the GPU's limits.
//!
//! First every kernel is compared with its reference kernel ([`baton_engine_check::kernels`]). A difference fails
//! the command. Then speeds are measured, each with a limit from the same run: copies inside the device, copies over
//! the link, and one large bf16 product. Without a GPU, the command only reports that ([`Skipped`]).

pub mod compile;
pub mod emulate;
pub mod ipc;
pub mod nixl;
mod pool;
mod process;
mod speed;

use std::io::Write;

use baton_engine::compute::ExecutorError;
use baton_engine::compute::cuda::driver::CudaDevice;
use baton_engine::compute::cuda::kernels::{KernelFeatures, KernelTarget};
use baton_engine::compute::cuda::{Device, DeviceError, Element, LoadError, cubins};
use baton_engine::model::ModelError;
use baton_engine_check::kernels;
use clap::Args;
use serde::Serialize;

use self::speed::Sizes;
pub use self::speed::Speed;
use crate::common::machine::Provenance;
use crate::common::report::print_report;

/// Head widths whose kernels are checked with both element types. These are the widths of released models and of the
/// tiny checkpoints, and those between.
const HEAD_DIMS: [usize; 9] = [16, 32, 48, 64, 80, 96, 112, 128, 256];
/// Element types and features whose kernels are checked: those of Llama, and all.
const ELEMENTS_AND_FEATURES: [(Element, KernelFeatures); 4] = [
    (Element::F32, KernelFeatures::NONE),
    (Element::Bf16, KernelFeatures::NONE),
    (Element::F32, KernelFeatures::ALL),
    (Element::Bf16, KernelFeatures::ALL),
];

fn features_label(features: KernelFeatures) -> &'static str {
    if features == KernelFeatures::NONE { "no features" } else { "all features" }
}

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

/// The reason why nothing was checked or measured.
#[derive(Debug, thiserror::Error)]
#[error("SKIPPED, NOTHING WAS CHECKED OR MEASURED: {0}")]
pub struct Skipped(pub String);

/// Why the benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum GpuBenchError {
    /// Kernels differ from their reference kernels, or parts could not run.
    #[error("{0} checks or measurements have failed")]
    Failed(usize),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The generated model cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The configuration of the generated model is invalid.
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
    /// Date, commit, machine and command.
    #[serde(flatten)]
    origin: Provenance,
    /// The GPU's own name.
    pub device: String,
    /// The architecture for which the kernels were compiled.
    pub arch: String,
    /// Number of kernel results that match the reference kernels.
    pub kernels_right: usize,
    /// Results that differ, and parts that could not run.
    pub failed: Vec<String>,
    /// All measurements.
    pub speeds: Vec<Speed>,
}

/// Checks, measures and reports.
///
/// # Errors
/// [`Skipped`] without a GPU, [`GpuBenchError`].
pub fn run(options: &GpuBench, out: &mut dyn Write) -> Result<(), crate::BenchError> {
    let first = open(options.device, &plain(HEAD_DIMS[0])).map_err(unusable)?;
    let (device, arch, origin) = (first.name(), first.arch().to_owned(), Provenance::of(first.driver()));
    drop(first);
    if !options.json {
        writeln!(out, "{device}, kernels for {arch}; {}", origin.line())?;
    }
    let (kernels_right, failed) = check_kernels(options);
    let mut report = GpuReport { origin, device, arch, kernels_right, failed, speeds: Vec::new() };
    if !options.check_only {
        let open = |head_dim| open(options.device, &plain(head_dim));
        let (speeds, failed) = speed::measure(&Sizes::llama(options.layers), open);
        report.speeds = speeds;
        report.failed.extend(failed);
    }
    print_report(&report, options.json, out, |report, out| {
        report.failed.iter().try_for_each(|what| writeln!(out, "FAIL  {what}"))?;
        writeln!(out, "{kernels_right} kernel results match their reference kernels")?;
        speed::print(&report.speeds, out)
    })?;
    match report.failed.len() {
        0 => Ok(()),
        failed => Err(GpuBenchError::Failed(failed).into()),
    }
}

/// The error for a device that cannot be opened: [`Skipped`] if there is none.
fn unusable(error: DeviceError) -> crate::BenchError {
    match error {
        // A driver without a device fails its first call with this error.
        DeviceError::Library { .. } | DeviceError::Absent(_) | DeviceError::Call { call: "cuInit", .. } => {
            Skipped(error.to_string()).into()
        }
        other => GpuBenchError::from(other).into(),
    }
}

/// The GPU's name and its driver.
pub(crate) fn named(ordinal: usize) -> Result<(Option<String>, Option<String>), crate::BenchError> {
    let device = open(ordinal, &plain(HEAD_DIMS[0])).map_err(unusable)?;
    Ok((Some(device.name()), device.driver()))
}

/// Kernels for Llama in bf16.
fn plain(head_dim: usize) -> KernelTarget {
    KernelTarget::plain(Element::Bf16, head_dim)
}

fn open(ordinal: usize, target: &KernelTarget) -> Result<CudaDevice, DeviceError> {
    CudaDevice::open(ordinal, target, cubins::folder().as_deref())
}

/// The number of correct results, and a description of each failure.
fn check_kernels(options: &GpuBench) -> (usize, Vec<String>) {
    let (mut right, mut failed) = (0, Vec::new());
    for (element, features) in ELEMENTS_AND_FEATURES {
        for head_dim in HEAD_DIMS {
            let target = KernelTarget { element, head_dim, features };
            let lines =
                open(options.device, &target).and_then(|mut device| kernels::kernels(&mut device, &target));
            match lines {
                Err(error) => {
                    let (element, features) = (element.label(), features_label(features));
                    failed.push(format!("{element} {head_dim}, {features}: {error}"));
                }
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
