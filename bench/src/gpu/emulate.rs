//! `baton bench gpu-emulate`: the kernels' own code against their twins, without a GPU.
//!
//! The sources are compiled by this machine's C++ compiler and run on a CPU emulation of CUDA's threads and of the PTX
//! instructions they use (`emulation.cpp` of the engine): which lane holds what of a matrix, when an asynchronous copy
//! lands, who waits for whom. It says nothing of speed, of a GPU's memory model, or of what NVIDIA's compiler does.

use std::io::Write;

use baton_engine::executor::cuda::software::{Emulation, EmulationError, SoftDevice};
use baton_engine::executor::cuda::{Element, check};
use clap::Args;

use super::{HEAD_DIMS, Skipped};

/// Memory of the device.
const BYTES: usize = 1 << 30;

/// Options of `baton bench gpu-emulate`.
#[derive(Args, Clone, Debug)]
pub struct GpuEmulate {
    /// Head widths
    #[arg(long, value_delimiter = ',', default_values_t = HEAD_DIMS)]
    pub head_dim: Vec<usize>,
}

/// Compiles, runs, compares and reports.
///
/// # Errors
/// [`Skipped`] without a C++ compiler; results that are not the twins'.
pub fn run(options: &GpuEmulate, out: &mut dyn Write) -> Result<(), crate::BenchError> {
    let mut wrong = 0;
    for element in [Element::Bf16, Element::F32] {
        for &head_dim in &options.head_dim {
            let emulation = match Emulation::new(element, head_dim) {
                Err(error @ EmulationError::NoCompiler(_)) => return Err(Skipped(error.to_string()).into()),
                other => other?,
            };
            let mut device = SoftDevice::new(BYTES, element, head_dim).emulating(emulation);
            let lines = check::kernels(&mut device, element, head_dim)?;
            for line in lines.iter().filter(|line| !line.passed) {
                writeln!(out, "FAIL  {:<70} {}", line.what, line.numbers)?;
                wrong += 1;
            }
            let right = lines.iter().filter(|line| line.passed).count();
            writeln!(
                out,
                "{:<5} head_dim {head_dim:>4}: {right} of {} results are the twins'",
                element.label(),
                lines.len()
            )?;
        }
    }
    if wrong > 0 { Err(format!("{wrong} results of kernels are wrong").into()) } else { Ok(()) }
}
