//! The buffers between the phases of a step.

use super::arena::AlignedBuffer;
use super::bf16::{Bf16Unit, PackedBuffer, ProductInputs};
use super::kernel::PANEL;
use super::network::CpuNetwork;
use super::rows::{Rows, SharedPtr};

/// Buffers of one step. They grow to the largest batch seen.
#[derive(Debug, Default)]
pub(super) struct CpuActivations {
    hidden: RowBuffer,
    normed: RowBuffer,
    qkv: RowBuffer,
    attended: RowBuffer,
    projected: RowBuffer,
    gate: RowBuffer,
    up: RowBuffer,
    /// Cosines, then sines, of each row's angles.
    angles: RowBuffer,
    /// Packed inputs of products, if the unit of bfloat16 mode needs them.
    packed_normed: PackedBuffer,
    packed_attended: PackedBuffer,
    packed_gate: PackedBuffer,
}

/// The rows of all buffers, shared by the workers.
#[derive(Clone, Copy, Debug)]
pub(super) struct ActivationRows {
    pub(super) hidden: Rows,
    pub(super) normed: ProductInputs,
    pub(super) qkv: Rows,
    pub(super) attended: ProductInputs,
    pub(super) projected: Rows,
    pub(super) gate: ProductInputs,
    pub(super) up: Rows,
    /// Cosines, then sines, of each row's angles.
    pub(super) angles: Rows,
}

#[derive(Debug)]
struct RowBuffer {
    values: AlignedBuffer<f32>,
    rows: usize,
    stride: usize,
}

impl Default for RowBuffer {
    fn default() -> Self {
        Self { values: AlignedBuffer::zeroed(0), rows: 0, stride: 0 }
    }
}

impl RowBuffer {
    /// Makes space for `rows` rows of whole panels. The 16 extra values keep rows of a power-of-two width out of the
    /// same cache sets.
    fn fit(&mut self, rows: usize, width: usize) {
        let stride = width.next_multiple_of(PANEL) + 16;
        if self.rows < rows || self.stride != stride {
            *self = Self { values: AlignedBuffer::zeroed(rows * stride), rows, stride };
        }
    }

    fn share(&mut self) -> Rows {
        Rows { base: SharedPtr(self.values.as_mut_ptr()), stride: self.stride }
    }
}

impl CpuActivations {
    pub(super) fn fit(&mut self, network: &CpuNetwork, rows: usize) {
        let config = &network.config;
        if network.bf16.is_some_and(Bf16Unit::packs) {
            self.packed_normed.fit(rows, config.hidden);
            self.packed_attended.fit(rows, config.query_width());
            self.packed_gate.fit(rows, config.intermediate);
        }
        self.hidden.fit(rows, config.hidden);
        self.normed.fit(rows, config.hidden);
        self.qkv.fit(rows, config.query_width() + 2 * config.kv_width());
        self.attended.fit(rows, config.query_width());
        self.projected.fit(rows, config.hidden);
        self.gate.fit(rows, config.intermediate);
        self.up.fit(rows, config.intermediate);
        self.angles.fit(rows, config.head_dim);
    }

    /// The rows of the buffers, and the packed inputs for `unit`.
    pub(super) fn share(&mut self, unit: Option<Bf16Unit>) -> ActivationRows {
        let inputs = |buffer: &mut RowBuffer, packed: &mut PackedBuffer| ProductInputs {
            wide: buffer.share(),
            bf16: unit.map(|unit| (unit, packed.share())),
        };
        ActivationRows {
            hidden: self.hidden.share(),
            normed: inputs(&mut self.normed, &mut self.packed_normed),
            qkv: self.qkv.share(),
            attended: inputs(&mut self.attended, &mut self.packed_attended),
            projected: self.projected.share(),
            gate: inputs(&mut self.gate, &mut self.packed_gate),
            up: self.up.share(),
            angles: self.angles.share(),
        }
    }
}
