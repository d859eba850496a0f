//! The buffers between the phases of a step.

use super::arena::AlignedBuffer;
use super::bf16::{Bf16Unit, IntegerBuffer, PackedBuffer, ProductInputs, ROW_STEP};
use super::kernel::PANEL;
use super::network::CpuNetwork;
use super::routing::{Routes, RoutingSizes};
use super::rows::{Rows, SharedPtr};
use crate::model::config::ExpertConfig;
use crate::model::lora::LoraSite;

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
    packed: PackedActivations,
    experts: ExpertActivations,
    /// Inputs of each row's adapter in its rank, part by part.
    adapted: RowBuffer,
}

/// Packed inputs of products, if the unit of bfloat16 mode or products with integers need them.
#[derive(Debug, Default)]
struct PackedActivations {
    normed: PackedInputs,
    attended: PackedInputs,
    gate: PackedInputs,
}

/// The packed rows of one buffer. Both stay empty if they are not used.
#[derive(Debug, Default)]
struct PackedInputs {
    bf16: PackedBuffer,
    integers: IntegerBuffer,
}

/// Which inputs of products are packed.
#[derive(Clone, Copy, Debug)]
enum Packing {
    None,
    Bf16,
    Integers,
}

impl Packing {
    fn of(network: &CpuNetwork) -> Self {
        if network.bf16.is_some_and(Bf16Unit::packs) {
            Self::Bf16
        } else if network.integers {
            Self::Integers
        } else {
            Self::None
        }
    }
}

impl PackedInputs {
    fn fit(&mut self, packing: Packing, rows: usize, width: usize) {
        match packing {
            Packing::None => {}
            Packing::Bf16 => self.bf16.fit(rows, width),
            Packing::Integers => self.integers.fit(rows, width),
        }
    }
}

/// Buffers of layers with experts. They stay empty without them.
#[derive(Debug)]
struct ExpertActivations {
    sizes: RoutingSizes,
    logits: RowBuffer,
    /// Inputs of the experts, expert by expert, and later their results.
    inputs: RowBuffer,
    gate: RowBuffer,
    up: RowBuffer,
    packed_inputs: PackedInputs,
    packed_gate: PackedInputs,
    numbers: AlignedBuffer<u32>,
    weights: AlignedBuffer<f32>,
}

/// The rows of these buffers, shared by the workers.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertRows {
    pub(super) logits: Rows,
    pub(super) inputs: ProductInputs,
    pub(super) gate: ProductInputs,
    pub(super) up: Rows,
    pub(super) routes: Routes,
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
    pub(super) experts: ExpertRows,
    /// Inputs of each row's adapter in its rank, part by part.
    pub(super) adapted: Rows,
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

impl Default for ExpertActivations {
    fn default() -> Self {
        Self {
            sizes: RoutingSizes::default(),
            logits: RowBuffer::default(),
            inputs: RowBuffer::default(),
            gate: RowBuffer::default(),
            up: RowBuffer::default(),
            packed_inputs: PackedInputs::default(),
            packed_gate: PackedInputs::default(),
            numbers: AlignedBuffer::zeroed(0),
            weights: AlignedBuffer::zeroed(0),
        }
    }
}

impl ExpertActivations {
    fn fit(&mut self, experts: &ExpertConfig, hidden: usize, rows: usize, packing: Packing) {
        let align = match packing {
            Packing::Bf16 => ROW_STEP,
            Packing::None | Packing::Integers => 1,
        };
        let &ExpertConfig { per_token, count, intermediate, .. } = experts;
        self.sizes = RoutingSizes { rows, per_token, experts: count, align };
        let places = self.sizes.places();
        self.logits.fit(rows, count);
        self.inputs.fit(places, hidden);
        self.gate.fit(places, intermediate);
        self.up.fit(places, intermediate);
        self.packed_inputs.fit(packing, places, hidden);
        self.packed_gate.fit(packing, places, intermediate);
        if self.numbers.len() < self.sizes.numbers() {
            self.numbers = AlignedBuffer::zeroed(self.sizes.numbers());
            self.weights = AlignedBuffer::zeroed(self.sizes.pairs());
        }
    }

    fn share(&mut self, unit: Option<Bf16Unit>) -> ExpertRows {
        ExpertRows {
            logits: self.logits.share(),
            inputs: inputs(&mut self.inputs, &mut self.packed_inputs, unit),
            gate: inputs(&mut self.gate, &mut self.packed_gate, unit),
            up: self.up.share(),
            routes: Routes {
                sizes: self.sizes,
                numbers: SharedPtr(self.numbers.as_mut_ptr()),
                weights: SharedPtr(self.weights.as_mut_ptr()),
            },
        }
    }
}

/// The rows of a buffer as inputs of products, with the packed ones for `unit` or for integers.
fn inputs(buffer: &mut RowBuffer, packed: &mut PackedInputs, unit: Option<Bf16Unit>) -> ProductInputs {
    ProductInputs {
        wide: buffer.share(),
        bf16: unit.map(|unit| (unit, packed.bf16.share())),
        integers: packed.integers.share(),
    }
}

impl CpuActivations {
    pub(super) fn fit(&mut self, network: &CpuNetwork, rows: usize) {
        let config = &network.config;
        let packing = Packing::of(network);
        self.packed.normed.fit(packing, rows, config.hidden);
        self.packed.attended.fit(packing, rows, config.query_width());
        self.packed.gate.fit(packing, rows, config.intermediate);
        self.hidden.fit(rows, config.hidden);
        self.normed.fit(rows, config.hidden);
        self.qkv.fit(rows, config.query_width() + 2 * config.kv_width());
        self.attended.fit(rows, config.query_width());
        self.projected.fit(rows, config.hidden);
        self.gate.fit(rows, config.intermediate);
        self.up.fit(rows, config.intermediate);
        self.angles.fit(rows, config.attention.rotary_dim * network.ropes.len());
        if let Some(experts) = &config.mlp.experts {
            self.experts.fit(experts, config.hidden, rows, packing);
        }
        let rank = network.adapters.iter().map(|adapter| adapter.rank).max();
        if let Some(rank) = rank {
            self.adapted.fit(rows, LoraSite::PARTS_MAX * rank);
        }
    }

    /// The rows of the buffers, and the packed inputs for `unit`.
    pub(super) fn share(&mut self, unit: Option<Bf16Unit>) -> ActivationRows {
        ActivationRows {
            hidden: self.hidden.share(),
            normed: inputs(&mut self.normed, &mut self.packed.normed, unit),
            qkv: self.qkv.share(),
            attended: inputs(&mut self.attended, &mut self.packed.attended, unit),
            projected: self.projected.share(),
            gate: inputs(&mut self.gate, &mut self.packed.gate, unit),
            up: self.up.share(),
            angles: self.angles.share(),
            experts: self.experts.share(unit),
            adapted: self.adapted.share(),
        }
    }
}
