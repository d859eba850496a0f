//! The layers of a model and their loading.

use super::WeightLoadProgress;
use super::arena::{AlignedBuffer, WeightArena};
use super::bf16::Bf16Unit;
use super::matrix::{Matrix, WeightMode};
use super::thread_pool::{JobPanicked, ThreadPool};
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::weights::{Tensor, WeightDtype, Weights, parameter_count};

/// A loaded model.
#[derive(Debug)]
pub(super) struct CpuNetwork {
    pub(super) config: ModelConfig,
    pub(super) layers: Vec<CpuLayer>,
    pub(super) final_norm: Vec<f32>,
    /// The output matrix; with tied embeddings also the embedding.
    pub(super) head: Matrix,
    embedding: Option<Embedding>,
    /// Radians per position of each rotated pair.
    pub(super) frequencies: Vec<f32>,
    /// Multiplier of cos and sin.
    pub(super) rope_factor: f32,
    /// The unit that multiplies in bfloat16 mode.
    pub(super) bf16: Option<Bf16Unit>,
}

/// One transformer layer. A bias is `None` if the model has none.
#[derive(Debug)]
pub(super) struct CpuLayer {
    pub(super) attention_norm: Vec<f32>,
    /// Rows of q, then k, then v.
    pub(super) qkv: Matrix,
    pub(super) qkv_bias: Option<Vec<f32>>,
    /// Weights of the norms of each head of q and of k.
    pub(super) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) output: Matrix,
    pub(super) output_bias: Option<Vec<f32>>,
    pub(super) mlp_norm: Vec<f32>,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) gate_up_bias: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) down: Matrix,
    pub(super) down_bias: Option<Vec<f32>>,
}

/// Rows of an embedding that is not the output matrix, in the checkpoint's precision.
#[derive(Debug)]
enum Embedding {
    F32(AlignedBuffer<f32>),
    Bf16(AlignedBuffer<u16>),
}

impl CpuNetwork {
    pub(super) fn load(
        weights: &Weights,
        config: &ModelConfig,
        mode: WeightMode,
        unit: Bf16Unit,
        threads: &mut ThreadPool,
        progress: &mut dyn FnMut(WeightLoadProgress),
    ) -> Result<Self, ModelError> {
        let arena = WeightArena::default();
        let mut loader = CpuLoader { weights, mode, unit, threads, arena, progress, done: 0, total: 0 };
        let (hidden, vocab) = (config.hidden, config.vocab);
        const EMBEDDING: &str = "model.embed_tokens.weight";
        let embedding = loader.weights.tensor(EMBEDDING, &[vocab, hidden])?;
        // An estimate from the first tensor's bytes for each value. Progress is only displayed.
        let size = embedding.bytes() as f64 / (vocab * hidden) as f64;
        loader.total = (parameter_count(config) as f64 * size) as u64;
        let (embedding, head) = if config.tied {
            drop(embedding);
            (None, loader.matrix(&[(EMBEDDING, vocab)], hidden)?)
        } else {
            let rows = loader.embedding(&embedding, vocab * hidden);
            drop(embedding);
            (Some(rows), loader.matrix(&[("lm_head.weight", vocab)], hidden)?)
        };
        let layers =
            (0..config.layers).map(|layer| loader.layer(config, layer)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            layers,
            final_norm: loader.vector("model.norm.weight", hidden)?,
            head,
            embedding,
            frequencies: config.rope.frequencies(config.head_dim),
            rope_factor: config.rope.attention_factor(),
            config: config.clone(),
            bf16: (mode == WeightMode::Bf16).then_some(unit),
        })
    }

    /// Writes a token's embedding.
    pub(super) fn embed(&self, token: u32, out: &mut [f32]) {
        let start = token as usize * self.config.hidden;
        match &self.embedding {
            None => self.head.row(token as usize, out),
            Some(Embedding::F32(values)) => out.copy_from_slice(&values[start..start + out.len()]),
            Some(Embedding::Bf16(values)) => {
                for (out, bits) in out.iter_mut().zip(&values[start..]) {
                    *out = half::bf16::from_bits(*bits).to_f32();
                }
            }
        }
    }

    /// Bytes of the matrices that every step reads.
    pub(super) fn streamed_bytes(&self) -> usize {
        let layer = |layer: &CpuLayer| {
            [&layer.qkv, &layer.output, &layer.gate, &layer.up, &layer.down]
                .map(Matrix::bytes)
                .iter()
                .sum::<usize>()
        };
        self.layers.iter().map(layer).sum::<usize>() + self.head.bytes()
    }
}

struct CpuLoader<'a> {
    weights: &'a Weights,
    mode: WeightMode,
    unit: Bf16Unit,
    threads: &'a mut ThreadPool,
    arena: WeightArena,
    progress: &'a mut dyn FnMut(WeightLoadProgress),
    done: u64,
    total: u64,
}

impl CpuLoader<'_> {
    fn layer(&mut self, config: &ModelConfig, layer: usize) -> Result<CpuLayer, ModelError> {
        let (hidden, inter) = (config.hidden, config.intermediate);
        let (query, kv) = (config.query_width(), config.kv_width());
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let attention = |part: &str| name(&format!("self_attn.{part}"));
        let qkv = [("q_proj", query), ("k_proj", kv), ("v_proj", kv)];
        let weights = qkv.map(|(part, width)| (attention(&format!("{part}.weight")), width));
        let qkv_bias = if config.qkv_bias {
            let mut all = Vec::with_capacity(query + 2 * kv);
            for (part, width) in qkv {
                all.extend(self.vector(&attention(&format!("{part}.bias")), width)?);
            }
            Some(all)
        } else {
            None
        };
        let q_norm = self.optional(config.qk_norm(), &attention("q_norm.weight"), config.head_dim)?;
        let k_norm = self.optional(config.qk_norm(), &attention("k_norm.weight"), config.head_dim)?;
        let gate_bias = self.optional(config.mlp_bias, &name("mlp.gate_proj.bias"), inter)?;
        let up_bias = self.optional(config.mlp_bias, &name("mlp.up_proj.bias"), inter)?;
        Ok(CpuLayer {
            attention_norm: self.vector(&name("input_layernorm.weight"), hidden)?,
            qkv: self.matrix(&weights.each_ref().map(|(name, width)| (name.as_str(), *width)), hidden)?,
            qkv_bias,
            qk_norm: q_norm.zip(k_norm),
            output: self.matrix(&[(&attention("o_proj.weight"), hidden)], query)?,
            output_bias: self.optional(config.output_bias, &attention("o_proj.bias"), hidden)?,
            mlp_norm: self.vector(&name("post_attention_layernorm.weight"), hidden)?,
            gate: self.matrix(&[(&name("mlp.gate_proj.weight"), inter)], hidden)?,
            up: self.matrix(&[(&name("mlp.up_proj.weight"), inter)], hidden)?,
            gate_up_bias: gate_bias.zip(up_bias),
            down: self.matrix(&[(&name("mlp.down_proj.weight"), hidden)], inter)?,
            down_bias: self.optional(config.mlp_bias, &name("mlp.down_proj.bias"), hidden)?,
        })
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.weights.tensor(name, &[len])?;
        let mut values = vec![0.0; len];
        tensor.read_f32(0, &mut values);
        self.count(tensor.bytes());
        Ok(values)
    }

    fn optional(&mut self, has: bool, name: &str, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        if has { self.vector(name, len).map(Some) } else { Ok(None) }
    }

    fn matrix(&mut self, parts: &[(&str, usize)], inputs: usize) -> Result<Matrix, ModelError> {
        let mut tensors = Vec::with_capacity(parts.len());
        for (name, outputs) in parts {
            tensors.push((self.weights.tensor(name, &[*outputs, inputs])?, *outputs));
        }
        let bytes = tensors.iter().map(|(tensor, _)| tensor.bytes()).sum();
        let packed = Matrix::pack(self.threads, &mut self.arena, &tensors, inputs, self.mode, self.unit);
        self.count(bytes);
        // A read beyond a mapped file's end raises a signal, not a panic. This error is a damaged header that passed
        // the checks.
        packed.map_err(|JobPanicked(what)| ModelError::Malformed { file: parts[0].0.to_owned(), what })
    }

    fn embedding(&mut self, tensor: &Tensor<'_>, len: usize) -> Embedding {
        self.count(tensor.bytes());
        if tensor.dtype() == WeightDtype::Bf16 && self.mode != WeightMode::F32 {
            let mut values = self.arena.zeroed(len);
            tensor.read_bf16_bits(0, &mut values);
            Embedding::Bf16(values)
        } else {
            let mut values = self.arena.zeroed(len);
            tensor.read_f32(0, &mut values);
            Embedding::F32(values)
        }
    }

    fn count(&mut self, bytes: usize) {
        self.done += bytes as u64;
        (self.progress)(WeightLoadProgress { bytes_done: self.done, bytes_total: self.total.max(self.done) });
    }
}
