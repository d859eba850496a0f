//! One step as launches.
//!
//! ```text
//!   embed ▶ norm ▶ [ qkv ▶ rope_kv ▶ attention ▶ output ▶ add+norm ▶ gate, up ▶ silu ▶ down ▶ add+norm ]×layers
//!         ▶ norm of wanted rows ▶ logits ▶ choose
//! ```
//!
//! Products of few rows use Baton's own kernels, with gate, up and silu in one; the library computes the others. The
//! residual stream and the values that are added to it are f32. The inputs of matrices have the model's element type.

use super::device::{Device, DeviceError, DeviceSlice, Element, Matmul};
use super::kernels::{self, AttentionArgs, ChooseArgs, KernelShape, NormArgs, RopeKvArgs};
use super::plan::{Section, StepBounds, StepPlan, padded_rows};
use super::{CudaExecutor, ModelConfig};

/// Buffers of one step with the most rows.
#[derive(Clone, Copy)]
pub(super) struct CudaActivations {
    hidden: DeviceSlice,
    normed: DeviceSlice,
    qkv: DeviceSlice,
    attended: DeviceSlice,
    projected: DeviceSlice,
    gate_up: DeviceSlice,
    activated: DeviceSlice,
    partial: DeviceSlice,
    summary: DeviceSlice,
    /// Best value of each part of each wanted row, and its index.
    best_values: DeviceSlice,
    best_places: DeviceSlice,
}

impl CudaActivations {
    pub(super) fn new(
        room: &mut dyn FnMut(usize) -> Result<DeviceSlice, DeviceError>,
        shape: &KernelShape,
        config: &ModelConfig,
        bounds: &StepBounds,
        multiprocessors: u32,
    ) -> Result<Self, DeviceError> {
        let rows = padded_rows(bounds.rows);
        let size = shape.element.bytes();
        let splits = |sequences: usize| sequences * shape.splits(sequences, multiprocessors);
        let splits = (1..=bounds.sequences.max(bounds.bucket)).map(splits).max().unwrap_or(1) * shape.heads;
        Ok(Self {
            hidden: room(rows * config.hidden * 4)?,
            normed: room(rows * config.hidden * size)?,
            qkv: room(rows * shape.qkv_width() * size)?,
            attended: room(rows * config.query_width() * size)?,
            projected: room(rows * config.hidden * 4)?,
            gate_up: room(rows * 2 * config.intermediate * size)?,
            activated: room(rows * config.intermediate * size)?,
            partial: room(splits * shape.head_dim * 4)?,
            summary: room(splits * 2 * 4)?,
            best_values: room(bounds.bucket * kernels::PARTS * 4)?,
            best_places: room(bounds.bucket * kernels::PARTS * 4)?,
        })
    }
}

impl<D: Device> CudaExecutor<D> {
    fn section(&self, section: Section) -> DeviceSlice {
        self.buffers.words.part(section.at * 4, section.len * 4)
    }

    fn product(
        &mut self,
        x: DeviceSlice,
        weights: DeviceSlice,
        out: DeviceSlice,
        rows: usize,
        (inputs, outputs): (usize, usize),
        result: Element,
    ) -> Result<(), DeviceError> {
        let element = self.shape.element;
        let matmul = Matmul { x, weights, out, rows: padded_rows(rows), inputs, outputs, element, result };
        self.multiply(&matmul)
    }

    /// Runs Baton's own kernel if it is faster, otherwise the library.
    fn multiply(&mut self, matmul: &Matmul) -> Result<(), DeviceError> {
        match kernels::few_rows(matmul, self.device.multiprocessors()) {
            Some(launch) => self.device.launch(self.streams.compute, &launch),
            None => self.device.matmul(self.streams.compute, matmul),
        }
    }

    /// `activated = silu(gate + bias) * (up + bias)` of the normed rows.
    fn gated(
        &mut self,
        weights: DeviceSlice,
        bias: Option<DeviceSlice>,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let (at, width, element) = (self.activations, self.config.intermediate, self.shape.element);
        let matmul = Matmul {
            x: at.normed,
            weights,
            out: at.gate_up,
            rows: padded_rows(rows),
            inputs: self.config.hidden,
            outputs: 2 * width,
            element,
            result: element,
        };
        if let Some(launch) = kernels::few_rows_gated(&matmul, bias, at.activated) {
            return self.device.launch(self.streams.compute, &launch);
        }
        self.device.matmul(self.streams.compute, &matmul)?;
        let silu = kernels::silu_mul(at.gate_up, bias, at.activated, width, rows);
        self.device.launch(self.streams.compute, &silu)
    }

    fn norm(&mut self, norm: &NormArgs, rows: usize) -> Result<(), DeviceError> {
        let launch = kernels::add_rms_norm(norm, self.config.hidden, self.config.norm_eps, rows);
        self.device.launch(self.streams.compute, &launch)
    }

    /// Runs everything up to the last layer's output. [`Self::head`] adds this output to the residual stream.
    pub(super) fn layers(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        let (rows, hidden, inter) = (plan.rows, self.config.hidden, self.config.intermediate);
        let (query, qkv, element) = (self.config.query_width(), self.shape.qkv_width(), self.shape.element);
        let at = self.activations;
        let tokens = self.section(plan.sections.tokens);
        let embed = kernels::embed(tokens, self.network.embedding, at.hidden, hidden, rows);
        self.device.launch(self.streams.compute, &embed)?;
        let first = self.network.layers[0].attention_norm;
        self.norm(
            &NormArgs { hidden: at.hidden, delta: None, weight: first, rows: None, out: at.normed },
            rows,
        )?;
        for index in 0..self.network.layers.len() {
            let layer = &self.network.layers[index];
            let (weights, output_bias, down_bias) =
                ([layer.qkv, layer.output, layer.gate_up, layer.down], layer.output_bias, layer.down_bias);
            let (mlp_norm, gate_up_bias) = (layer.mlp_norm, layer.gate_up_bias);
            let parts = RopeKvArgs {
                qkv: at.qkv,
                bias: layer.qkv_bias,
                norms: layer.qk_norm,
                angles: self.network.angles,
                positions: self.section(plan.sections.positions),
                slots: self.section(plan.sections.slots),
                pool: self.kv.pool,
            };
            self.product(at.normed, weights[0], at.qkv, rows, (hidden, qkv), element)?;
            self.device.launch(self.streams.compute, &kernels::rope_kv(&self.shape, &parts, index, rows))?;
            self.attend(plan, index)?;
            self.product(at.attended, weights[1], at.projected, rows, (query, hidden), Element::F32)?;
            let delta = Some((at.projected, output_bias));
            self.norm(
                &NormArgs { hidden: at.hidden, delta, weight: mlp_norm, rows: None, out: at.normed },
                rows,
            )?;
            self.gated(weights[2], gate_up_bias, rows)?;
            self.product(at.activated, weights[3], at.projected, rows, (inter, hidden), Element::F32)?;
            if let Some(next) = self.network.layers.get(index + 1) {
                let (delta, weight) = (Some((at.projected, down_bias)), next.attention_norm);
                self.norm(&NormArgs { hidden: at.hidden, delta, weight, rows: None, out: at.normed }, rows)?;
            }
        }
        Ok(())
    }

    fn attend(&mut self, plan: &StepPlan, layer: usize) -> Result<(), DeviceError> {
        let parts = |entries: DeviceSlice| AttentionArgs {
            qkv: self.activations.qkv,
            pool: self.kv.pool,
            // The tables section ends at the end of the buffer, so that a recorded launch can read the tables of any
            // step.
            tables: self
                .buffers
                .words
                .part(plan.sections.tables.at * 4, self.buffers.words.bytes - plan.sections.tables.at * 4),
            entries,
            out: self.activations.attended,
            partial: self.activations.partial,
            summary: self.activations.summary,
        };
        if plan.sequences > 0 {
            let splits = self.shape.splits(plan.sequences, self.device.multiprocessors());
            let parts = parts(self.section(plan.sections.decode));
            for launch in kernels::decode_attention(&self.shape, &parts, layer, plan.sequences, splits) {
                self.device.launch(self.streams.compute, &launch)?;
            }
        }
        if plan.tile_count > 0 {
            let parts = parts(self.section(plan.sections.tiles));
            let launch = kernels::prefill_attention(&self.shape, &parts, layer, plan.tile_count);
            self.device.launch(self.streams.compute, &launch)?;
        }
        Ok(())
    }

    /// Computes the logits of `rows` wanted rows from `first` on, and the tokens drawn from them.
    pub(super) fn head(&mut self, plan: &StepPlan, first: usize, rows: usize) -> Result<(), DeviceError> {
        let Some(last) = self.network.layers.last() else { return Ok(()) };
        let (at, down_bias) = (self.activations, last.down_bias);
        let wanted = self.section(plan.sections.wanted).part(first * 4, rows * 4);
        let norm = NormArgs {
            hidden: at.hidden,
            delta: Some((at.projected, down_bias)),
            weight: self.network.final_norm,
            rows: Some(wanted),
            out: at.normed,
        };
        self.norm(&norm, rows)?;
        let logits = self
            .buffers
            .results
            .part(self.buffers.chosen_bytes, self.buffers.results.bytes - self.buffers.chosen_bytes);
        let matmul = Matmul {
            x: at.normed,
            weights: self.network.head,
            out: logits,
            rows: padded_rows(rows),
            inputs: self.config.hidden,
            outputs: self.config.vocab,
            element: self.shape.element,
            result: Element::F32,
        };
        self.multiply(&matmul)?;
        if !plan.sampled {
            return Ok(());
        }
        let words = kernels::DRAW_WORDS * 4;
        let choice = ChooseArgs {
            logits,
            values: self.activations.best_values,
            indices: self.activations.best_places,
            draws: self.section(plan.sections.draws).part(first * words, rows * words),
            chosen: self.buffers.results.part(0, self.buffers.chosen_bytes),
        };
        for launch in kernels::choose(&choice, self.config.vocab, rows) {
            self.device.launch(self.streams.compute, &launch)?;
        }
        Ok(())
    }
}
