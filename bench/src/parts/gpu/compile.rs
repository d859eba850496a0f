//! `baton bench gpu-compile`: compiles every kernel for every architecture with NVIDIA's run-time compiler. Needs no
//! GPU.
//!
//! Prints the registers and shared memory that the assembler reports. The command fails if a bf16 kernel spills
//! registers or the assembler reports nothing about it. Without the compiler, the command only reports that. A type
//! with a plus is that of models with all features.

use std::io::Write;

use baton_engine::compute::cuda::kernels::{
    COPY_KERNEL, DECODE_STAGES, KernelFeatures, KernelTarget, decode_stages, source,
};
use baton_engine::compute::cuda::nvrtc::{self, KernelUsage};
use baton_engine::compute::cuda::{DeviceError, Element};
use clap::Args;

use super::{ELEMENTS_AND_FEATURES, HEAD_DIMS, Skipped};

/// Options of `baton bench gpu-compile`.
#[derive(Args, Clone, Debug)]
pub struct GpuCompile {
    /// Architectures, separated by commas
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "sm_80,sm_90a,sm_100a")]
    pub arch: Vec<String>,
}

/// Compiles and reports.
///
/// # Errors
/// [`Skipped`] without a compiler. An error if a kernel does not compile or spills.
pub fn run(options: &GpuCompile, out: &mut dyn Write) -> Result<(), crate::BenchError> {
    let version = match nvrtc::version() {
        Err(error @ DeviceError::Library { .. }) => return Err(Skipped(error.to_string()).into()),
        other => other?,
    };
    writeln!(out, "NVRTC {}.{}", version.0, version.1)?;
    writeln!(out, "arch      type  head_dim  kernel             registers static shared      spilled")?;
    let mut wrong = Vec::new();
    for arch in &options.arch {
        for (element, features) in ELEMENTS_AND_FEATURES {
            // With 99 KiB of shared memory per block, wide heads have fewer stages.
            let all =
                HEAD_DIMS.into_iter().flat_map(|head_dim| DECODE_STAGES.map(|stages| (head_dim, stages)));
            for (head_dim, stages) in
                all.filter(|(head_dim, stages)| *stages >= decode_stages(*head_dim, 99 << 10))
            {
                let target = KernelTarget { element, head_dim, features };
                let compiled = nvrtc::compile(&source(&target, stages), arch)?;
                let found = judge(&target, &compiled.usage);
                let plus = if features == KernelFeatures::NONE { "" } else { "+" };
                let kind = format!("{}{plus}", element.label());
                wrong.extend(found.into_iter().map(|what| format!("{what} for {arch}, head_dim {head_dim}")));
                for usage in compiled.usage {
                    writeln!(
                        out,
                        "{arch:<9} {kind:<5} {head_dim:>8}  {:<18} {:>9} {:>13} {:>12}",
                        usage.kernel, usage.registers, usage.shared_bytes, usage.spill_bytes
                    )?;
                }
            }
        }
    }
    if wrong.is_empty() {
        writeln!(out, "no kernel spills in bf16; f32 is for checks of exactness and is not judged")?;
        Ok(())
    } else {
        Err(wrong.join("; ").into())
    }
}

/// Errors of the kernels of a target. All bf16 kernels are judged, because spilled registers cost memory
/// traffic. f32 is only for exactness checks.
fn judge(target: &KernelTarget, usage: &[KernelUsage]) -> Vec<String> {
    let element = target.element;
    let spills = |usage: &&KernelUsage| element == Element::Bf16 && usage.spill_bytes > 0;
    let spilled = usage.iter().filter(spills);
    let mut wrong: Vec<_> =
        spilled.map(|usage| format!("{} spills {} bytes", usage.kernel, usage.spill_bytes)).collect();
    let kernels = target.kernels().into_iter().map(|kernel| kernel.label()).chain([COPY_KERNEL]);
    let missing = kernels.filter(|name| usage.iter().all(|usage| usage.kernel != *name));
    wrong.extend(missing.map(|name| format!("the assembler says nothing of {name} in {}", element.label())));
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(target: &KernelTarget) -> Vec<KernelUsage> {
        let names = target.kernels().into_iter().map(|kernel| kernel.label()).chain([COPY_KERNEL]);
        let usage =
            |name: &str| KernelUsage { kernel: name.into(), registers: 32, shared_bytes: 0, spill_bytes: 0 };
        names.map(usage).collect()
    }

    #[test]
    fn every_kernel_of_bf16_is_judged_and_none_may_be_missing() {
        for features in [KernelFeatures::NONE, KernelFeatures::ALL] {
            let target = KernelTarget { element: Element::Bf16, head_dim: 64, features };
            for at in 0..all(&target).len() {
                let mut usage = all(&target);
                assert!(judge(&target, &usage).is_empty());
                usage[at].spill_bytes = 8;
                let wrong = judge(&target, &usage);
                assert!(wrong.len() == 1 && wrong[0].starts_with(&usage[at].kernel), "{wrong:?}");
                usage.remove(at);
                assert_eq!(judge(&target, &usage).len(), 1);
            }
        }
        let target = KernelTarget::plain(Element::F32, 64);
        let mut usage = all(&target);
        usage[0].spill_bytes = 8;
        assert!(judge(&target, &usage).is_empty(), "it is not judged");
    }
}
