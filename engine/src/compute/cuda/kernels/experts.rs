//! Launches of layers with experts.
//!
//! ```text
//!   router's logits ▶ route ▶ group_experts ▶ expert_gate_up ▶ expert_down ▶ combine_experts
//! ```
//!
//! Pairs of a row and one of its experts are ordered by expert and cut into tiles. The grid of a product has the most
//! tiles that the pairs can need, and tiles without pairs end at once. Launches therefore depend on the number of rows
//! only, and recorded steps fit every choice.

use super::{Kernel, KernelArg, Launch, activation_arg, grid, launch, n};
use crate::compute::cuda::device::{DeviceSlice, Element};
use crate::model::spec::Activation;

/// Pairs of one tile.
pub const EXPERT_ROWS: usize = 64;
/// Most experts of a layer.
pub const EXPERTS_MAX: usize = 1024;
/// Most experts of a row.
pub const CHOSEN_MAX: usize = 64;
/// Outputs of a block of gate and up, and of the last projection.
const OUTPUTS: [usize; 2] = [32, 64];
/// Shared memory of a block of a product in bf16, see `experts_bf16.cu`: three stages of two sides of 64 rows.
const SHARED_BYTES: u32 = 3 * 2 * 64 * (64 * 2 + 16);

/// Sizes of a layer with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Element type.
    pub element: Element,
    /// Experts of the layer.
    pub count: usize,
    /// Experts of a row.
    pub per_token: usize,
    /// Width of the rows.
    pub hidden: usize,
    /// Width between the projections of an expert.
    pub intermediate: usize,
    /// Whether the weights of a row's experts are divided by their sum.
    pub normalized: bool,
    /// Activation of gate.
    pub activation: Activation,
}

/// Memory of a layer with experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertArgs {
    /// Logits of the router, f32.
    pub logits: DeviceSlice,
    /// Slot of each row, negative for padding.
    pub slots: DeviceSlice,
    /// Experts of each row.
    pub chosen: DeviceSlice,
    /// Their weights, f32.
    pub weights: DeviceSlice,
    /// The pairs, ordered by expert.
    pub order: DeviceSlice,
    /// Tiles of three integers.
    pub tiles: DeviceSlice,
    /// Normed rows.
    pub x: DeviceSlice,
    /// Gate, then up, of each expert.
    pub gate_up: DeviceSlice,
    /// The last projection of each expert.
    pub down: DeviceSlice,
    /// Activated rows, by place.
    pub activated: DeviceSlice,
    /// Results of each pair, f32.
    pub results: DeviceSlice,
    /// Sums of each row, f32.
    pub projected: DeviceSlice,
}

impl ExpertShape {
    /// Most tiles of this number of rows.
    #[must_use]
    pub fn tiles(&self, rows: usize) -> usize {
        let pairs = rows * self.per_token;
        self.count.min(pairs) + pairs / EXPERT_ROWS
    }

    /// The launches that compute the experts of `rows` rows.
    #[must_use]
    pub fn launches(&self, parts: &ExpertArgs, rows: usize) -> [Launch; 5] {
        let ExpertArgs { logits, slots, chosen, weights, order, tiles, .. } = *parts;
        let (pairs, tile_count) = (rows * self.per_token, self.tiles(rows));
        let (input, output) = (KernelArg::In, KernelArg::Out);
        let normalized = usize::from(self.normalized);
        let sizes = [rows, self.count, self.per_token, normalized].map(n);
        let args = [&[input(logits), input(slots), output(chosen), output(weights)][..], &sizes].concat();
        let route = launch(Kernel::Route, [grid(rows.div_ceil(4)), 1, 1], 128, args);
        let sizes = [pairs, self.count, tile_count].map(n);
        let args = [&[input(chosen), output(order), output(tiles)][..], &sizes].concat();
        let group = launch(Kernel::GroupExperts, [1, 1, 1], 1024, args);
        let product = |kernel, [x, matrix, out]: [DeviceSlice; 3], sizes: [usize; 2], at_once: usize| {
            let read = [x, matrix, order, tiles].map(KernelArg::In);
            let args = [&read[..], &[output(out)], &sizes.map(n)].concat();
            let blocks = [grid(sizes[1].div_ceil(at_once)), grid(tile_count), 1];
            let shared_bytes = if self.element == Element::Bf16 { SHARED_BYTES } else { 0 };
            Launch { shared_bytes, ..launch(kernel, blocks, 128, args) }
        };
        let sizes = [self.hidden, self.intermediate];
        let memory = [parts.x, parts.gate_up, parts.activated];
        let mut gate_up = product(Kernel::ExpertGateUp, memory, sizes, OUTPUTS[0]);
        gate_up.args.push(n(self.per_token));
        gate_up.args.extend(activation_arg(self.activation));
        let memory = [parts.activated, parts.down, parts.results];
        let down = product(Kernel::ExpertDown, memory, [self.intermediate, self.hidden], OUTPUTS[1]);
        let read = [parts.results, chosen, weights].map(KernelArg::In);
        let sizes = [self.hidden, self.per_token].map(n);
        let args = [&read[..], &[output(parts.projected)], &sizes].concat();
        let blocks = [grid(self.hidden.div_ceil(256)), grid(rows), 1];
        [route, group, gate_up, down, launch(Kernel::CombineExperts, blocks, 256, args)]
    }
}
