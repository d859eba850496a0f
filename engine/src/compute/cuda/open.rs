//! The values of `--device`, and the executor of each.

use std::fmt;
use std::str::FromStr;

use super::driver::CudaDevice;
use super::kernels::KernelTarget;
use super::{CudaExecutor, DeviceOptions, LoadError, cubins, supported};
use crate::compute::Executor;
use crate::compute::cpu::WeightLoadProgress;
use crate::model::config::ModelConfig;
use crate::model::weights::Weights;

/// The device on which an engine computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// On the CPU.
    #[default]
    Cpu,
    /// On an accelerator.
    Accelerator(Accelerator),
}

/// A device with memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// A GPU, by the driver's number.
    Cuda(usize),
    /// A device of another crate.
    Provided(ProvidedDevice),
}

/// Loads a model to a device and returns its executor.
pub type OpenExecutor = fn(
    &Weights,
    &ModelConfig,
    &DeviceOptions,
    &mut dyn FnMut(WeightLoadProgress),
) -> Result<Box<dyn Executor>, LoadError>;

/// A device of another crate, such as the software device of `baton-engine-check`.
#[derive(Clone, Copy, Debug)]
pub struct ProvidedDevice {
    /// The value of `--device`.
    pub name: &'static str,
    /// Opens it.
    pub open: OpenExecutor,
}

impl PartialEq for ProvidedDevice {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for ProvidedDevice {}

/// Share of a GPU's memory that an engine uses, as vLLM's default.
pub const GPU_MEMORY_UTILIZATION: f64 = 0.9;

/// Additional options for each of `engines` engines on one GPU, so that each gets an equal share. Empty if `options`
/// select no GPU or set the size of a KV pool.
#[must_use]
pub fn shared_out(options: &[String], engines: usize) -> Vec<String> {
    let value = |name: &str| {
        let at = options.iter().rposition(|word| word.split('=').next() == Some(name))?;
        let inline = options[at].split_once('=').map(|(_, value)| value);
        inline.or_else(|| options.get(at + 1).map(String::as_str))
    };
    let is_gpu = value("--device").is_some_and(|device| device.starts_with("cuda"));
    let sized = ["--kv-cache-mib", "--kv-blocks", "--gpu-memory-utilization"];
    if !is_gpu || engines < 2 || sized.into_iter().any(|name| value(name).is_some()) {
        return Vec::new();
    }
    let share = GPU_MEMORY_UTILIZATION / engines as f64;
    vec!["--gpu-memory-utilization".to_owned(), share.to_string()]
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Provided(device) => f.write_str(device.name),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => write!(f, "cpu"),
            Self::Accelerator(accelerator) => accelerator.fmt(f),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let cuda = |ordinal: &str| ordinal.parse().map(Accelerator::Cuda).map(Self::Accelerator);
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Accelerator(Accelerator::Cuda(0))),
            Some(("cuda", ordinal)) if cuda(ordinal).is_ok() => Ok(cuda(ordinal).expect("it was parsed")),
            _ => Err(format!("unknown device {text:?}, expected cpu or cuda:N (cuda is cuda:0)")),
        }
    }
}

/// A model on a device.
///
/// # Errors
/// [`LoadError`]: the missing part and the places that were searched.
pub fn open(
    accelerator: Accelerator,
    weights: &Weights,
    config: &ModelConfig,
    options: &DeviceOptions,
    progress: &mut dyn FnMut(WeightLoadProgress),
) -> Result<Box<dyn Executor>, LoadError> {
    supported::computed(config, options.element).map_err(LoadError::Unsupported)?;
    Ok(match accelerator {
        Accelerator::Cuda(ordinal) => {
            let target = KernelTarget::of(config, options.element);
            let device = CudaDevice::open(ordinal, &target, cubins::folder().as_deref())?;
            let mut executor = CudaExecutor::load(device, weights, config, options, progress)?;
            executor.warm_up()?;
            Box::new(executor)
        }
        Accelerator::Provided(device) => (device.open)(weights, config, options, progress)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_of_one_gpu_share_its_memory_unless_the_options_say_how() {
        let shared = |line: &str, engines| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            shared_out(&words, engines).join(" ")
        };
        for line in ["--device cuda:0", "--threads 1 --device=cuda", "--device cpu --device cuda:3"] {
            assert_eq!(shared(line, 2), "--gpu-memory-utilization 0.45", "{line}");
            assert_eq!(shared(line, 1), "", "{line}");
        }
        for line in [
            "",
            "--device",
            "--device cpu",
            "--device cuda:0 --device software",
            "--device cuda:0 --kv-cache-mib 512",
            "--device cuda:0 --kv-blocks=9",
            "--gpu-memory-utilization 0.3 --device cuda:0",
        ] {
            assert_eq!(shared(line, 2), "", "{line}");
        }
    }

    #[test]
    fn devices_have_names() {
        let accelerator = |text: &str| match text.parse() {
            Ok(DeviceChoice::Accelerator(accelerator)) => accelerator,
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!("cpu".parse(), Ok(DeviceChoice::Cpu));
        assert_eq!(accelerator("cuda"), Accelerator::Cuda(0));
        for text in ["cuda:0", "cuda:7"] {
            assert_eq!(accelerator(text).to_string(), text);
        }
        for text in ["cpu", "cuda:7"] {
            assert_eq!(text.parse::<DeviceChoice>().map(|device| device.to_string()), Ok(text.into()));
        }
        for wrong in ["", "cuda:", "cuda:x", "cuda:-1", "gpu", "cpu:0", "software"] {
            let error = wrong.parse::<DeviceChoice>().unwrap_err();
            assert!(error.contains("cuda:N"), "{error}");
        }
    }
}
