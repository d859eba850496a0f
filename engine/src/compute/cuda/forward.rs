//! One step as launches.
//!
//! ```text
//!   embed ▶ norm ▶ [ qkv ▶ rope_kv ▶ attention ▶ output ▶ add+norm ▶ gate, up ▶ silu ▶ down ▶ add+norm ]×layers
//!         ▶ norm of wanted rows ▶ logits ▶ cap ▶ choose
//! ```
//!
//! Products of few rows use Baton's own kernels, with gate, up and silu in one; the library computes the others. The
//! residual stream and the values that are added to it are f32. The inputs of matrices have the model's element type.
//! Layers with experts are in `experts`.

mod experts;

use super::device::{Device, DeviceError, DeviceSlice, Element, Matmul};
use super::kernels::{self, AttentionArgs, ChooseArgs, KernelShape, NormArgs, RopeKvArgs};
use super::model::{CudaDense, CudaMlp};
use super::plan::{Section, StepBounds, StepPlan, padded_rows};
use super::{CudaExecutor, ModelConfig};

use self::experts::ExpertBuffers;

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
    /// Buffers of layers with experts, if the model has any.
    experts: Option<ExpertBuffers>,
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
        let has_dense = (0..config.layers).any(|layer| config.experts_of(layer).is_none());
        let intermediate = if has_dense { config.intermediate } else { 0 };
        let experts = config.mlp.experts.as_ref();
        let splits = (1..=bounds.sequences.max(bounds.bucket)).map(splits).max().unwrap_or(1) * shape.heads;
        Ok(Self {
            hidden: room(rows * config.hidden * 4)?,
            normed: room(rows * config.hidden * size)?,
            qkv: room(rows * shape.qkv_width() * size)?,
            attended: room(rows * config.query_width() * size)?,
            projected: room(rows * config.hidden * 4)?,
            gate_up: room(rows * 2 * intermediate * size)?,
            activated: room(rows * intermediate * size)?,
            partial: room(splits * shape.head_dim * 4)?,
            summary: room(splits * 2 * 4)?,
            best_values: room(bounds.bucket * kernels::PARTS * 4)?,
            best_places: room(bounds.bucket * kernels::PARTS * 4)?,
            experts: experts
                .map(|experts| ExpertBuffers::new(room, shape, config, experts, rows))
                .transpose()?,
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

    /// `projected = down · (activation(gate + bias) * (up + bias))` of the normed rows.
    fn dense(&mut self, dense: &CudaDense, rows: usize) -> Result<(), DeviceError> {
        let (at, sizes) = (self.activations, (self.config.intermediate, self.config.hidden));
        self.gated(dense, rows)?;
        self.product(at.activated, dense.down, at.projected, rows, sizes, Element::F32)
    }

    fn gated(&mut self, dense: &CudaDense, rows: usize) -> Result<(), DeviceError> {
        let (at, width, element) = (self.activations, self.config.intermediate, self.shape.element);
        let (bias, activation) = (dense.gate_up_bias, self.config.mlp.activation);
        let matmul = Matmul {
            x: at.normed,
            weights: dense.gate_up,
            out: at.gate_up,
            rows: padded_rows(rows),
            inputs: self.config.hidden,
            outputs: 2 * width,
            element,
            result: element,
        };
        if let Some(launch) = kernels::few_rows_gated(&matmul, bias, at.activated, activation) {
            return self.device.launch(self.streams.compute, &launch);
        }
        self.device.matmul(self.streams.compute, &matmul)?;
        let silu = kernels::silu_mul(at.gate_up, bias, at.activated, (width, rows), activation);
        self.device.launch(self.streams.compute, &silu)
    }

    fn norm(&mut self, norm: &NormArgs, rows: usize) -> Result<(), DeviceError> {
        let ModelConfig { hidden, norm_eps, .. } = self.config;
        let launch = kernels::add_rms_norm(self.shape.features, norm, hidden, norm_eps, rows);
        self.device.launch(self.streams.compute, &launch)
    }

    /// Runs everything up to the last layer's output. [`Self::head`] adds this output to the residual stream.
    pub(super) fn layers(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        let (rows, hidden, at) = (plan.rows, self.config.hidden, self.activations);
        let tables = [self.section(plan.sections.tokens), self.network.embedding, at.hidden];
        let embed = kernels::embed(tables, hidden, rows, self.network.embedding_scale);
        self.device.launch(self.streams.compute, &embed)?;
        let weight = self.network.layers[0].attention_norm;
        let (normed, stream) = (at.normed, at.hidden);
        self.norm(
            &NormArgs { hidden: stream, delta: None, post: None, weight, rows: None, out: normed },
            rows,
        )?;
        for index in 0..self.network.layers.len() {
            let layer = &self.network.layers[index];
            let (mlp, mlp_post) = (layer.mlp, layer.mlp_post_norm);
            let attended = NormArgs {
                hidden: stream,
                delta: Some((at.projected, layer.output_bias)),
                post: layer.attention_post_norm,
                weight: layer.mlp_norm,
                rows: None,
                out: normed,
            };
            self.attention(plan, index)?;
            self.norm(&attended, rows)?;
            match mlp {
                CudaMlp::Dense(dense) => self.dense(&dense, rows)?,
                CudaMlp::Experts(experts) => self.experts(plan, &experts)?,
            }
            if let Some(next) = self.network.layers.get(index + 1) {
                let (delta, weight) = (Some((at.projected, mlp.down_bias())), next.attention_norm);
                let added =
                    NormArgs { hidden: stream, delta, post: mlp_post, weight, rows: None, out: normed };
                self.norm(&added, rows)?;
            }
        }
        Ok(())
    }

    /// Attention of the normed rows, up to its output projection.
    fn attention(&mut self, plan: &StepPlan, index: usize) -> Result<(), DeviceError> {
        let (rows, hidden, at) = (plan.rows, self.config.hidden, self.activations);
        let (query, qkv, element) = (self.config.query_width(), self.shape.qkv_width(), self.shape.element);
        let layer = &self.network.layers[index];
        let (qkv_weights, output) = (layer.qkv, layer.output);
        let parts = RopeKvArgs {
            qkv: at.qkv,
            bias: layer.qkv_bias,
            norms: layer.qk_norm,
            angles: layer.angles,
            positions: self.section(plan.sections.positions),
            slots: self.section(plan.sections.slots),
            pool: self.kv.pool,
        };
        self.product(at.normed, qkv_weights, at.qkv, rows, (hidden, qkv), element)?;
        self.device.launch(self.streams.compute, &kernels::rope_kv(&self.shape, &parts, index, rows))?;
        self.attend(plan, index)?;
        self.product(at.attended, output, at.projected, rows, (query, hidden), Element::F32)
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
            window: self.config.attention.window(layer),
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
        let (at, down_bias, post) = (self.activations, last.mlp.down_bias(), last.mlp_post_norm);
        let wanted = self.section(plan.sections.wanted).part(first * 4, rows * 4);
        let norm = NormArgs {
            hidden: at.hidden,
            delta: Some((at.projected, down_bias)),
            post,
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
        if let Some(cap) = self.config.logit_cap {
            let capped = kernels::cap_logits(logits, self.config.vocab, rows, cap);
            self.device.launch(self.streams.compute, &capped)?;
        }
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
