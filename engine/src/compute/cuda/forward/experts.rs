//! Layers with experts.
//!
//! The router's logits of all rows come first. Then a bounded number of rows at a time choose their experts, and the
//! matrices of these multiply them. The sums of a row do not depend on the other rows, nor on where this division is.

use crate::compute::cuda::CudaExecutor;
use crate::compute::cuda::device::{Device, DeviceError, DeviceSlice, Element};
use crate::compute::cuda::kernels::{ExpertArgs, ExpertShape, KernelShape};
use crate::compute::cuda::model::CudaExperts;
use crate::compute::cuda::plan::StepPlan;
use crate::model::config::{ExpertConfig, ModelConfig};

/// Pairs of a row and one of its experts that are computed at a time. Enough for 64 rows of each of 128 experts.
const PAIRS: usize = 8192;

/// Buffers of layers with experts.
#[derive(Clone, Copy)]
pub(super) struct ExpertBuffers {
    shape: ExpertShape,
    /// Rows that are computed at a time.
    rows: usize,
    logits: DeviceSlice,
    chosen: DeviceSlice,
    weights: DeviceSlice,
    order: DeviceSlice,
    tiles: DeviceSlice,
    activated: DeviceSlice,
    results: DeviceSlice,
}

impl ExpertBuffers {
    /// Buffers for steps of at most `rows` rows, padding included.
    pub(super) fn new(
        room: &mut dyn FnMut(usize) -> Result<DeviceSlice, DeviceError>,
        shape: &KernelShape,
        config: &ModelConfig,
        experts: &ExpertConfig,
        rows: usize,
    ) -> Result<Self, DeviceError> {
        let &ExpertConfig { count, per_token, intermediate, normalized, .. } = experts;
        let (element, hidden) = (shape.element, config.hidden);
        let activation = config.mlp.activation;
        let shape = ExpertShape { element, count, per_token, hidden, intermediate, normalized, activation };
        let at_once = (PAIRS / per_token).clamp(1, rows);
        let pairs = at_once * per_token;
        Ok(Self {
            shape,
            rows: at_once,
            logits: room(rows * count * 4)?,
            chosen: room(pairs * 4)?,
            weights: room(pairs * 4)?,
            order: room(pairs * 4)?,
            tiles: room(shape.tiles(at_once) * 3 * 4)?,
            activated: room(pairs * intermediate * element.bytes())?,
            results: room(pairs * hidden * 4)?,
        })
    }
}

impl<D: Device> CudaExecutor<D> {
    /// `projected = the sum over each row's experts` of the normed rows.
    pub(super) fn experts(&mut self, plan: &StepPlan, layer: &CudaExperts) -> Result<(), DeviceError> {
        let (at, slots) = (self.activations, self.section(plan.sections.slots));
        let Some(buffers) = at.experts else { return Ok(()) };
        let ExpertShape { element, count, hidden, .. } = buffers.shape;
        self.product(at.normed, layer.router, buffers.logits, plan.rows, (hidden, count), Element::F32)?;
        for first in (0..plan.rows).step_by(buffers.rows) {
            let rows = buffers.rows.min(plan.rows - first);
            let part = |of: DeviceSlice, row_bytes: usize| of.part(first * row_bytes, rows * row_bytes);
            let parts = ExpertArgs {
                logits: part(buffers.logits, count * 4),
                slots: part(slots, 4),
                chosen: buffers.chosen,
                weights: buffers.weights,
                order: buffers.order,
                tiles: buffers.tiles,
                x: part(at.normed, hidden * element.bytes()),
                gate_up: layer.gate_up,
                down: layer.down,
                activated: buffers.activated,
                results: buffers.results,
                projected: part(at.projected, hidden * 4),
            };
            for launch in buffers.shape.launches(&parts, rows) {
                self.device.launch(self.streams.compute, &launch)?;
            }
        }
        Ok(())
    }
}
