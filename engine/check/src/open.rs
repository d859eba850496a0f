//! The software device as a value of `--device`.

use baton_engine::compute::Executor;
use baton_engine::compute::cpu::WeightLoadProgress;
use baton_engine::compute::cuda::{
    Accelerator, CudaExecutor, DeviceChoice, DeviceOptions, LoadError, ProvidedDevice,
};
use baton_engine::model::config::ModelConfig;
use baton_engine::model::weights::Weights;

use crate::software::SoftwareDevice;

/// Memory of the software device, for small models.
const MEMORY_BYTES: usize = 4 << 30;

/// The software device: the CPU runs and checks the calls of a GPU. Slow, for checks of the engine.
pub const SOFTWARE: DeviceChoice =
    DeviceChoice::Accelerator(Accelerator::Provided(ProvidedDevice { name: "software", open }));

fn open(
    weights: &Weights,
    config: &ModelConfig,
    options: &DeviceOptions,
    progress: &mut dyn FnMut(WeightLoadProgress),
) -> Result<Box<dyn Executor>, LoadError> {
    let device = SoftwareDevice::new(MEMORY_BYTES, options.element, config.head_dim);
    Ok(Box::new(CudaExecutor::load(device, weights, config, options, progress)?))
}

/// A value of `--device`: those of the engine, and `software`.
///
/// # Errors
/// The supported values.
pub fn parse_device(text: &str) -> Result<DeviceChoice, String> {
    match text {
        "software" => Ok(SOFTWARE),
        _ => text.parse().map_err(|_| {
            format!("unknown device {text:?}, expected cpu, cuda:N (cuda is cuda:0) or software")
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_device_accepts_engine_devices_and_software() {
        for text in ["cpu", "cuda:7", "software"] {
            assert_eq!(parse_device(text).map(|device| device.to_string()), Ok(text.into()));
        }
        let error = parse_device("gpu").unwrap_err();
        assert_eq!(error, "unknown device \"gpu\", expected cpu, cuda:N (cuda is cuda:0) or software");
    }
}
