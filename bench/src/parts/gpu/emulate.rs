//! `baton bench gpu-emulate`: compares the kernels' own code with the reference kernels, without a GPU.
//!
//! This machine's C++ compiler compiles the sources. They run on a CPU emulation of CUDA's threads and of the PTX
//! instructions in use (`emulation.cpp` of `baton-engine-check`). The emulation includes the layout of matrix fragments, the
//! completion of asynchronous copies, and barriers. It does not cover speed, a GPU's memory model, or NVIDIA's
//! compiler.

use std::io::Write;

use baton_engine::compute::cuda::Element;
use baton_engine::compute::cuda::kernels::{self, KernelTarget};
use baton_engine_check::software::{Emulation, EmulationError, SoftwareDevice};
use clap::Args;

use super::{ELEMENTS_AND_FEATURES, HEAD_DIMS, Skipped, features_label};

/// Memory of the device.
const BYTES: usize = 1 << 30;

/// Shared memory of a block on compute capability 9.0, and on 8.6 and 8.9, where wide heads have fewer stages.
const SHARED_BYTES: [usize; 2] = [227 << 10, 99 << 10];

/// Options of `baton bench gpu-emulate`.
#[derive(Args, Clone, Debug)]
pub struct GpuEmulate {
    /// Head widths, separated by commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = HEAD_DIMS)]
    pub head_dim: Vec<usize>,
}

/// Compiles, runs, compares and reports.
///
/// # Errors
/// [`Skipped`] without a C++ compiler. An error if results differ from the reference kernels.
pub fn run(options: &GpuEmulate, out: &mut dyn Write) -> Result<(), crate::BenchError> {
    let mut wrong = 0;
    for (element, features) in ELEMENTS_AND_FEATURES {
        let all = options.head_dim.iter().flat_map(|head_dim| SHARED_BYTES.map(|most| (*head_dim, most)));
        for (head_dim, most) in all {
            let target = KernelTarget { element, head_dim, features };
            let stages = kernels::decode_stages(head_dim, most);
            let is_same = element == Element::F32 || stages == kernels::DECODE_STAGES[0];
            if most != SHARED_BYTES[0] && is_same {
                continue;
            }
            let emulation = match Emulation::new(&target, stages) {
                Err(error @ EmulationError::NoCompiler(_)) => return Err(Skipped(error.to_string()).into()),
                other => other?,
            };
            let mut device =
                SoftwareDevice::new(BYTES, element, head_dim).emulating(emulation).with_shared_bytes(most);
            let lines = baton_engine_check::kernels::kernels(&mut device, &target)?;
            for line in lines.iter().filter(|line| !line.passed) {
                writeln!(out, "FAIL  {:<70} {}", line.what, line.numbers)?;
                wrong += 1;
            }
            let right = lines.iter().filter(|line| line.passed).count();
            writeln!(
                out,
                "{:<5} head_dim {head_dim:>4}, {stages} stages, {}: {right} of {} results match the reference kernels",
                element.label(),
                features_label(features),
                lines.len()
            )?;
        }
    }
    if wrong > 0 { Err(format!("{wrong} results of kernels are wrong").into()) } else { Ok(()) }
}
