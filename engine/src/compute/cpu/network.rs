//! The layers of a model and their loading.

use std::sync::Arc;

use super::WeightLoadProgress;
use super::arena::{AlignedBuffer, WeightArena};
use super::bf16::Bf16Unit;
use super::matrix::{Matrix, WeightMode};
use super::thread_pool::{JobPanicked, ThreadPool};
use crate::model::ModelError;
use crate::model::config::{ModelConfig, Rope};
use crate::model::lora::LoraAdapter;
use crate::model::tensors::{DenseTensors, ExpertOutputs, FusedExperts, MlpTensors, TensorRows};
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
    /// Multiplier of embeddings. Checkpoints were trained with the root rounded to the type of the embedding.
    pub(super) embedding_scale: Option<f32>,
    /// The ropes of the layers.
    pub(super) ropes: Vec<RopeAngles>,
    /// The unit that multiplies in bfloat16 mode.
    pub(super) bf16: Option<Bf16Unit>,
    /// Whether the inputs of products are rounded to 8 bits, for matrices of integers.
    pub(super) integers: bool,
    /// Adapters, by their index in steps.
    pub(super) adapters: Arc<[LoraAdapter]>,
}

/// The angles of one rope.
#[derive(Debug)]
pub(super) struct RopeAngles {
    /// Radians per position of each rotated pair.
    pub(super) frequencies: Vec<f32>,
    /// Multiplier of cos and sin.
    pub(super) factor: f32,
}

/// One transformer layer. A bias or norm is `None` if the model has none.
#[derive(Debug)]
pub(super) struct CpuLayer {
    pub(super) attention_norm: Vec<f32>,
    /// Rows of q, then k, then v.
    pub(super) qkv: Matrix,
    pub(super) qkv_bias: Option<Vec<f32>>,
    /// Weights of the norms of each head of q and of k.
    pub(super) qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    /// Attention sinks of the heads of q.
    pub(super) sinks: Option<Vec<f32>>,
    /// The rope's index.
    pub(super) rope: usize,
    pub(super) output: Matrix,
    pub(super) output_bias: Option<Vec<f32>>,
    /// The norm of attention's output before it is added.
    pub(super) attention_post_norm: Option<Vec<f32>>,
    pub(super) mlp_norm: Vec<f32>,
    pub(super) mlp: CpuMlp,
    /// The norm of the feed-forward layer's output before it is added.
    pub(super) mlp_post_norm: Option<Vec<f32>>,
}

/// A feed-forward layer.
#[derive(Debug)]
pub(super) enum CpuMlp {
    Dense(CpuDense),
    Experts { router: Matrix, router_bias: Option<Vec<f32>>, experts: Vec<CpuDense> },
}

/// One feed-forward network.
#[derive(Debug)]
pub(super) struct CpuDense {
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) gate_up_bias: Option<(Vec<f32>, Vec<f32>)>,
    pub(super) down: Matrix,
    pub(super) down_bias: Option<Vec<f32>>,
}

impl CpuDense {
    fn bytes(&self) -> usize {
        self.gate.bytes() + self.up.bytes() + self.down.bytes()
    }
}

/// Rows of an embedding that is not the output matrix, in the checkpoint's precision.
#[derive(Debug)]
enum Embedding {
    F32(AlignedBuffer<f32>),
    Bf16(AlignedBuffer<u16>),
    /// Integers as they are stored.
    Packed(Matrix),
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
        weights.check(config)?;
        let (arena, norm_offset) = (WeightArena::default(), config.spec.norm_offset);
        let mut loader =
            CpuLoader { weights, mode, unit, norm_offset, threads, arena, progress, done: 0, total: 0 };
        let (hidden, vocab) = (config.hidden, config.vocab);
        let (names, prefix) = (&config.spec.tensors, config.spec.prefix());
        let weight = |part: &str| format!("{prefix}{part}.weight");
        let name = weight(names.embedding);
        let embedding = loader.weights.tensor(&name, &[vocab, hidden])?;
        // An estimate from the first tensor's bytes for each value. Progress is only displayed.
        let size = embedding.bytes() as f64 / (vocab * hidden) as f64;
        loader.total = (parameter_count(config) as f64 * size) as u64;
        let dtype = embedding.dtype();
        let (embedding, head) = if config.tied {
            drop(embedding);
            (None, loader.whole_matrix(&name, vocab, hidden)?)
        } else {
            let rows = if mode.multiplies_integers() && embedding.integer_form(hidden).is_some() {
                Embedding::Packed(loader.whole_matrix(&name, vocab, hidden)?)
            } else {
                loader.embedding(&embedding, vocab * hidden)
            };
            drop(embedding);
            (Some(rows), loader.whole_matrix(&weight(names.head), vocab, hidden)?)
        };
        let layers =
            (0..config.layers).map(|layer| loader.layer(config, layer)).collect::<Result<Vec<_>, _>>()?;
        let ropes = [Some(&config.attention.rope), config.attention.local_rope.as_ref()];
        let angles = |rope: &Rope| RopeAngles {
            frequencies: rope.frequencies(config.attention.rotary_dim),
            factor: rope.attention_factor(),
        };
        Ok(Self {
            layers,
            final_norm: loader.norm(&weight(names.final_norm), hidden)?,
            head,
            embedding,
            embedding_scale: config.embedding_scale().map(|scale| dtype.rounded(scale)),
            ropes: ropes.into_iter().flatten().map(angles).collect(),
            config: config.clone(),
            bf16: (mode == WeightMode::Bf16).then_some(unit),
            integers: mode.multiplies_integers(),
            adapters: Arc::default(),
        })
    }

    /// Writes a token's embedding.
    pub(super) fn embed(&self, token: u32, out: &mut [f32]) {
        let start = token as usize * self.config.hidden;
        match &self.embedding {
            None => self.head.row(token as usize, out),
            Some(Embedding::Packed(matrix)) => matrix.row(token as usize, out),
            Some(Embedding::F32(values)) => out.copy_from_slice(&values[start..start + out.len()]),
            Some(Embedding::Bf16(values)) => {
                for (out, bits) in out.iter_mut().zip(&values[start..]) {
                    *out = half::bf16::from_bits(*bits).to_f32();
                }
            }
        }
    }

    /// Bytes of the matrices that a step of one token reads.
    pub(super) fn streamed_bytes(&self) -> usize {
        let per_token = self.config.mlp.experts.as_ref().map_or(0, |experts| experts.per_token);
        let layer = |layer: &CpuLayer| {
            let mlp = match &layer.mlp {
                CpuMlp::Dense(dense) => dense.bytes(),
                CpuMlp::Experts { router, experts, .. } => {
                    router.bytes() + experts.iter().take(per_token).map(CpuDense::bytes).sum::<usize>()
                }
            };
            layer.qkv.bytes() + layer.output.bytes() + mlp
        };
        self.layers.iter().map(layer).sum::<usize>() + self.head.bytes()
    }
}

struct CpuLoader<'a> {
    weights: &'a Weights,
    mode: WeightMode,
    unit: Bf16Unit,
    /// Added to the weights of norms.
    norm_offset: f32,
    threads: &'a mut ThreadPool,
    arena: WeightArena,
    progress: &'a mut dyn FnMut(WeightLoadProgress),
    done: u64,
    total: u64,
}

impl CpuLoader<'_> {
    fn layer(&mut self, config: &ModelConfig, layer: usize) -> Result<CpuLayer, ModelError> {
        let (hidden, dim) = (config.hidden, config.head_dim);
        let names = config.layer_tensors(layer);
        let qkv_bias = names.qkv_bias.as_ref().map(|parts| self.vectors(parts)).transpose()?;
        let qk_norm = match &names.qk_norm {
            Some([q, k]) => Some((self.norm(q, dim)?, self.norm(k, dim)?)),
            None => None,
        };
        let has_window = config.attention.window(layer).is_some();
        Ok(CpuLayer {
            attention_norm: self.norm(&names.attention_norm, hidden)?,
            qkv: self.matrix(&names.qkv, hidden)?,
            qkv_bias,
            qk_norm,
            sinks: self.optional(names.sinks.as_ref(), config.heads)?,
            rope: usize::from(has_window && config.attention.local_rope.is_some()),
            output: self.whole_matrix(&names.output, hidden, config.query_width())?,
            output_bias: self.optional(names.output_bias.as_ref(), hidden)?,
            attention_post_norm: self.optional_norm(names.attention_post_norm.as_ref(), hidden)?,
            mlp_norm: self.norm(&names.mlp_norm, hidden)?,
            mlp: match &names.mlp {
                MlpTensors::Dense(dense) => CpuMlp::Dense(self.dense(dense, hidden)?),
                MlpTensors::Experts { router, experts } => CpuMlp::Experts {
                    router: self.router(router, experts.len(), hidden)?,
                    router_bias: None,
                    experts: experts
                        .iter()
                        .map(|expert| self.dense(expert, hidden))
                        .collect::<Result<Vec<_>, _>>()?,
                },
                MlpTensors::Fused(fused) => self.fused(fused, hidden)?,
            },
            mlp_post_norm: self.optional_norm(names.mlp_post_norm.as_ref(), hidden)?,
        })
    }

    fn dense(&mut self, names: &DenseTensors, hidden: usize) -> Result<CpuDense, ModelError> {
        let [gate, up] = &names.gate_up;
        let gate_up_bias = match &names.gate_up_bias {
            Some([gate, up]) => {
                Some((self.vectors(std::slice::from_ref(gate))?, self.vectors(std::slice::from_ref(up))?))
            }
            None => None,
        };
        let (gate, up) = self.gate_up(gate, up, hidden)?;
        Ok(CpuDense {
            gate,
            up,
            gate_up_bias,
            down: self.whole_matrix(&names.down, hidden, names.intermediate)?,
            down_bias: self.optional(names.down_bias.as_ref(), hidden)?,
        })
    }

    /// Two matrices whose products are divided alike: both of integers, or none.
    fn gate_up(
        &mut self,
        gate: &TensorRows,
        up: &TensorRows,
        hidden: usize,
    ) -> Result<(Matrix, Matrix), ModelError> {
        let both = |loader: &mut Self| -> Result<(Matrix, Matrix), ModelError> {
            let gate = loader.matrix(std::slice::from_ref(gate), hidden)?;
            Ok((gate, loader.matrix(std::slice::from_ref(up), hidden)?))
        };
        let (gate, up) = both(self)?;
        if gate.has_integers() == up.has_integers() {
            return Ok((gate, up));
        }
        let mode = std::mem::replace(&mut self.mode, WeightMode::Stored);
        let stored = both(self);
        self.mode = mode;
        stored
    }

    /// Experts whose projections share tensors.
    fn fused(&mut self, names: &FusedExperts, hidden: usize) -> Result<CpuMlp, ModelError> {
        let (weights, count, width) = (self.weights, names.count, names.intermediate);
        let gate_up = weights.tensor(&names.gate_up, &[count, hidden, 2 * width])?;
        let gate_up_bias = weights.tensor(&names.gate_up_bias, &[count, 2 * width])?;
        let down = weights.tensor(&names.down, &[count, width, hidden])?;
        let down_bias = weights.tensor(&names.down_bias, &[count, hidden])?;
        let bias = |tensor: &Tensor<'_>, part: ExpertOutputs| {
            let mut values = vec![0.0; part.count()];
            tensor.of_expert(&ExpertOutputs { inputs: 1, ..part }).read_f32(0, &mut values);
            values
        };
        let mut experts = Vec::with_capacity(count);
        for expert in 0..count {
            let [gate, up] = [0, 1].map(|first| ExpertOutputs {
                expert,
                inputs: hidden,
                outputs: 2 * width,
                first,
                step: 2,
            });
            let out = ExpertOutputs { expert, inputs: width, outputs: hidden, first: 0, step: 1 };
            experts.push(CpuDense {
                gate: self.expert(&names.gate_up, &gate_up, &gate)?,
                up: self.expert(&names.gate_up, &gate_up, &up)?,
                gate_up_bias: Some((bias(&gate_up_bias, gate), bias(&gate_up_bias, up))),
                down: self.expert(&names.down, &down, &out)?,
                down_bias: Some(bias(&down_bias, out)),
            });
        }
        let read = [&gate_up, &gate_up_bias, &down, &down_bias];
        self.count(read.iter().map(|tensor| tensor.bytes()).sum());
        let router = self.router(&names.router, count, hidden)?;
        Ok(CpuMlp::Experts { router, router_bias: Some(self.vector(&names.router_bias, count)?), experts })
    }

    /// One matrix of an expert.
    fn expert(
        &mut self,
        name: &str,
        tensor: &Tensor<'_>,
        part: &ExpertOutputs,
    ) -> Result<Matrix, ModelError> {
        self.pack(name, &[(tensor.of_expert(part), part.count())], part.inputs)
    }

    /// The matrix of a router. It is small and decides which experts compute a row, so it is not quantized.
    fn router(&mut self, name: &str, experts: usize, hidden: usize) -> Result<Matrix, ModelError> {
        let mode = self.mode;
        if mode == WeightMode::Int8 || mode.multiplies_integers() {
            self.mode = WeightMode::Stored;
        }
        let router = self.whole_matrix(name, experts, hidden);
        self.mode = mode;
        router
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.weights.tensor(name, &[len])?;
        let mut values = vec![0.0; len];
        tensor.read_f32(0, &mut values);
        self.count(tensor.bytes());
        Ok(values)
    }

    /// The vectors of all parts, in order.
    fn vectors(&mut self, parts: &[TensorRows]) -> Result<Vec<f32>, ModelError> {
        let mut all = Vec::new();
        for TensorRows { name, total, first, count } in parts {
            let tensor = self.weights.tensor(name, &[*total])?.into_part(*first, *count);
            let start = all.len();
            all.resize(start + count, 0.0);
            tensor.read_f32(0, &mut all[start..]);
            self.count(tensor.bytes());
        }
        Ok(all)
    }

    fn optional(&mut self, name: Option<&String>, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        name.map(|name| self.vector(name, len)).transpose()
    }

    /// The weights of a norm, with the family's offset.
    fn norm(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let mut weights = self.vector(name, len)?;
        if self.norm_offset != 0.0 {
            weights.iter_mut().for_each(|weight| *weight += self.norm_offset);
        }
        Ok(weights)
    }

    fn optional_norm(&mut self, name: Option<&String>, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        name.map(|name| self.norm(name, len)).transpose()
    }

    fn whole_matrix(&mut self, name: &str, outputs: usize, inputs: usize) -> Result<Matrix, ModelError> {
        let rows = TensorRows { name: name.to_owned(), total: outputs, first: 0, count: outputs };
        self.matrix(&[rows], inputs)
    }

    fn matrix(&mut self, parts: &[TensorRows], inputs: usize) -> Result<Matrix, ModelError> {
        let mut tensors = Vec::with_capacity(parts.len());
        for TensorRows { name, total, first, count } in parts {
            let tensor = self.weights.tensor(name, &[*total, inputs])?;
            tensors.push((tensor.into_part(first * inputs, count * inputs), *count));
        }
        let bytes = tensors.iter().map(|(tensor, _)| tensor.bytes()).sum();
        let packed = self.pack(&parts[0].name, &tensors, inputs);
        self.count(bytes);
        packed
    }

    fn pack(
        &mut self,
        name: &str,
        tensors: &[(Tensor<'_>, usize)],
        inputs: usize,
    ) -> Result<Matrix, ModelError> {
        let packed = Matrix::pack(self.threads, &mut self.arena, tensors, inputs, self.mode, self.unit);
        // A read beyond a mapped file's end raises a signal, not a panic. This error is a damaged header that passed
        // the checks.
        packed.map_err(|JobPanicked(what)| ModelError::Malformed { file: name.to_owned(), what })
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
