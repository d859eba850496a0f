//! `baton bench gpu-compile`: every kernel, for every architecture, by NVIDIA's run-time compiler. No GPU is needed.
//!
//! What the assembler says of registers and shared memory is printed; a hot kernel that spills registers fails the
//! command. Without the compiler it does nothing and says so.

use std::io::Write;

use baton_engine::executor::cuda::{DeviceError, Element, nvrtc};
use clap::Args;

use super::Skipped;

/// Kernels that a step spends its time in; spilled registers cost them memory traffic.
const HOT: [&str; 10] = [
    "decode_attention",
    "prefill_attention",
    "merge_attention",
    "rope_kv",
    "add_rms_norm",
    "silu_mul",
    "best_of_parts",
    "few_rows_wide",
    "few_rows_deep",
    "few_rows_gated",
];
/// Head widths of released models that are computed in bf16, and of the tiny checkpoints.
const HEAD_DIMS: [usize; 5] = [16, 32, 64, 96, 128];

/// Options of `baton bench gpu-compile`.
#[derive(Args, Clone, Debug)]
pub struct GpuCompile {
    /// Architectures
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_90a,sm_100a")]
    pub arch: Vec<String>,
}

/// Compiles and reports.
///
/// # Errors
/// [`Skipped`] without a compiler; what does not compile, or spills.
pub fn run(options: &GpuCompile, out: &mut dyn Write) -> Result<(), crate::BenchError> {
    let version = match nvrtc::version() {
        Err(error @ DeviceError::Library { .. }) => return Err(Skipped(error.to_string()).into()),
        other => other?,
    };
    writeln!(out, "NVRTC {}.{}", version.0, version.1)?;
    writeln!(
        out,
        "{:<9} {:<5} {:>8}  {:<18} {:>9} {:>13} {:>12}",
        "arch", "type", "head_dim", "kernel", "registers", "static shared", "spilled"
    )?;
    let mut spilled = Vec::new();
    for arch in &options.arch {
        for element in [Element::Bf16, Element::F32] {
            for head_dim in HEAD_DIMS {
                let compiled = nvrtc::compile_kernels(element, head_dim, arch)?;
                for usage in compiled.usage {
                    writeln!(
                        out,
                        "{arch:<9} {:<5} {head_dim:>8}  {:<18} {:>9} {:>13} {:>12}",
                        element.label(),
                        usage.kernel,
                        usage.registers,
                        usage.shared_bytes,
                        usage.spill_bytes
                    )?;
                    // f32 is for checks of exactness.
                    let hot = element == Element::Bf16 && HOT.contains(&usage.kernel.as_str());
                    if hot && usage.spill_bytes > 0 {
                        spilled.push(format!("{} for {arch}, head_dim {head_dim}", usage.kernel));
                    }
                }
            }
        }
    }
    if spilled.is_empty() {
        writeln!(out, "no hot kernel spills in bf16; f32 is for checks of exactness and is not judged")?;
        Ok(())
    } else {
        Err(format!("hot kernels spill registers: {}", spilled.join("; ")).into())
    }
}
