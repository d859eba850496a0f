//! A model's weights in device memory.

use half::bf16;

use super::device::{Device, DeviceError, DeviceSlice, Element, HostBuffer, HostSlice, Stream, StreamEvent};
use crate::compute::cpu::WeightLoadProgress;
use crate::model::ModelError;
use crate::model::config::{ModelConfig, Rope};
use crate::model::tensors::{DenseTensors, MlpTensors, TensorRows};
use crate::model::weights::{Tensor, WeightDtype, Weights, parameter_count};

/// Bytes that are converted and copied at a time.
const STAGING_BYTES: usize = 16 << 20;
/// Small tensors share allocations of this size, because a device allocates memory in pieces of 2 MiB.
const SLAB_BYTES: usize = 2 << 20;
/// Alignment of tensors, for 16-byte loads and the matrix library.
const ALIGN_BYTES: usize = 256;

/// Why a model cannot be loaded to the device.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint cannot be served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device has no kernels for the model, or an option is out of range.
    #[error("{0}")]
    Unsupported(String),
}

/// One layer. Matrices have the model's element type, all other values are f32.
pub(super) struct CudaLayer {
    pub(super) attention_norm: DeviceSlice,
    pub(super) qkv: DeviceSlice,
    pub(super) qkv_bias: Option<DeviceSlice>,
    pub(super) qk_norm: Option<(DeviceSlice, DeviceSlice)>,
    /// The angles of its rope.
    pub(super) angles: DeviceSlice,
    pub(super) output: DeviceSlice,
    pub(super) output_bias: Option<DeviceSlice>,
    /// The norm of attention's output before it is added.
    pub(super) attention_post_norm: Option<DeviceSlice>,
    pub(super) mlp_norm: DeviceSlice,
    pub(super) mlp: CudaMlp,
    /// The norm of the feed-forward layer's output before it is added.
    pub(super) mlp_post_norm: Option<DeviceSlice>,
}

/// A feed-forward layer.
#[derive(Clone, Copy)]
pub(super) enum CudaMlp {
    Dense(CudaDense),
    Experts(CudaExperts),
}

impl CudaMlp {
    /// The bias of its last projection.
    pub(super) fn down_bias(&self) -> Option<DeviceSlice> {
        match self {
            Self::Dense(dense) => dense.down_bias,
            Self::Experts(_) => None,
        }
    }
}

/// One feed-forward network.
#[derive(Clone, Copy)]
pub(super) struct CudaDense {
    /// Gate, then up.
    pub(super) gate_up: DeviceSlice,
    pub(super) gate_up_bias: Option<DeviceSlice>,
    pub(super) down: DeviceSlice,
    pub(super) down_bias: Option<DeviceSlice>,
}

/// A router and the matrices of its experts, in the order of their numbers.
#[derive(Clone, Copy)]
pub(super) struct CudaExperts {
    pub(super) router: DeviceSlice,
    /// Gate, then up, of each expert.
    pub(super) gate_up: DeviceSlice,
    pub(super) down: DeviceSlice,
}

/// All weights of a model.
pub(super) struct CudaNetwork {
    pub(super) layers: Vec<CudaLayer>,
    pub(super) embedding: DeviceSlice,
    /// Multiplier of embeddings. Checkpoints were trained with the root rounded to the type of the embedding.
    pub(super) embedding_scale: Option<f32>,
    pub(super) final_norm: DeviceSlice,
    pub(super) head: DeviceSlice,
    /// Bytes of device memory of all weights.
    pub(super) bytes: usize,
}

impl CudaNetwork {
    pub(super) fn load(
        device: &mut dyn Device,
        on: Stream,
        weights: &Weights,
        config: &ModelConfig,
        (element, positions): (Element, usize),
        progress: &mut dyn FnMut(WeightLoadProgress),
    ) -> Result<Self, LoadError> {
        weights.check(config)?;
        let mut loader = CudaLoader::new(device, on, weights, element, progress)?;
        loader.total = (parameter_count(config) * element.bytes()) as u64;
        loader.norm_offset = config.spec.norm_offset;
        let (hidden, vocab) = (config.hidden, config.vocab);
        let (names, prefix) = (&config.spec.tensors, config.spec.prefix());
        let weight = |part: &str| format!("{prefix}{part}.weight");
        let stored = weights.tensor(&weight(names.embedding), &[vocab, hidden])?.dtype();
        let embedding_scale = config.embedding_scale().map(|scale| stored.rounded(scale));
        let embedding = loader.whole_matrix(weight(names.embedding), vocab, hidden)?;
        let head =
            if config.tied { embedding } else { loader.whole_matrix(weight(names.head), vocab, hidden)? };
        let rope = loader.angles(config, &config.attention.rope, positions)?;
        let local = config.attention.local_rope.as_ref();
        let local = local.map(|rope| loader.angles(config, rope, positions)).transpose()?.unwrap_or(rope);
        let layers = (0..config.layers).map(|layer| {
            let has_window = config.attention.window(layer).is_some();
            loader.layer(config, layer, if has_window { local } else { rope })
        });
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let final_norm = loader.norm(&weight(names.final_norm), hidden)?;
        loader.finish()?;
        Ok(Self { layers, embedding, embedding_scale, final_norm, head, bytes: loader.taken })
    }
}

struct CudaLoader<'a> {
    device: &'a mut dyn Device,
    on: Stream,
    /// Two buffers, each with the event of its last copy: one is written while the other is copied.
    staging: [(HostBuffer, StreamEvent); 2],
    turn: usize,
    weights: &'a Weights,
    element: Element,
    /// Added to the weights of norms.
    norm_offset: f32,
    progress: &'a mut dyn FnMut(WeightLoadProgress),
    slab: Option<DeviceSlice>,
    /// Bytes of device memory.
    taken: usize,
    done: u64,
    total: u64,
}

impl<'a> CudaLoader<'a> {
    fn new(
        device: &'a mut dyn Device,
        on: Stream,
        weights: &'a Weights,
        element: Element,
        progress: &'a mut dyn FnMut(WeightLoadProgress),
    ) -> Result<Self, DeviceError> {
        let mut staging = || Ok::<_, DeviceError>((device.host(STAGING_BYTES)?, device.event()?));
        let staging = [staging()?, staging()?];
        Ok(Self {
            device,
            on,
            staging,
            turn: 0,
            weights,
            element,
            norm_offset: 0.0,
            progress,
            slab: None,
            taken: 0,
            done: 0,
            total: 0,
        })
    }

    fn layer(
        &mut self,
        config: &ModelConfig,
        layer: usize,
        angles: DeviceSlice,
    ) -> Result<CudaLayer, LoadError> {
        let (hidden, dim) = (config.hidden, config.head_dim);
        let names = config.layer_tensors(layer);
        let qk_norm = match &names.qk_norm {
            Some([q, k]) => Some((self.norm(q, dim)?, self.norm(k, dim)?)),
            None => None,
        };
        Ok(CudaLayer {
            attention_norm: self.norm(&names.attention_norm, hidden)?,
            qkv: self.matrix(&names.qkv, hidden)?,
            qkv_bias: names.qkv_bias.as_ref().map(|parts| self.vector(parts)).transpose()?,
            qk_norm,
            angles,
            output: self.whole_matrix(names.output, hidden, config.query_width())?,
            output_bias: self.optional(names.output_bias.as_deref(), hidden)?,
            attention_post_norm: self.optional_norm(names.attention_post_norm.as_deref(), hidden)?,
            mlp_norm: self.norm(&names.mlp_norm, hidden)?,
            mlp: match names.mlp {
                MlpTensors::Dense(dense) => CudaMlp::Dense(self.dense(dense, hidden)?),
                MlpTensors::Experts { router, experts } => {
                    CudaMlp::Experts(self.experts(router, experts, hidden)?)
                }
                MlpTensors::Fused(_) => {
                    unreachable!("`supported` refuses the only family with fused experts")
                }
            },
            mlp_post_norm: self.optional_norm(names.mlp_post_norm.as_deref(), hidden)?,
        })
    }

    fn dense(&mut self, names: DenseTensors, hidden: usize) -> Result<CudaDense, LoadError> {
        Ok(CudaDense {
            gate_up: self.matrix(&names.gate_up, hidden)?,
            gate_up_bias: names.gate_up_bias.as_ref().map(|parts| self.vector(parts)).transpose()?,
            down: self.whole_matrix(names.down, hidden, names.intermediate)?,
            down_bias: self.optional(names.down_bias.as_deref(), hidden)?,
        })
    }

    fn experts(
        &mut self,
        router: String,
        experts: Vec<DenseTensors>,
        hidden: usize,
    ) -> Result<CudaExperts, LoadError> {
        let (count, inputs) = (experts.len(), experts.first().map_or(0, |expert| expert.intermediate));
        let (mut gate_up, mut down) = (Vec::with_capacity(2 * count), Vec::with_capacity(count));
        for expert in experts {
            gate_up.extend(expert.gate_up);
            down.push(TensorRows { name: expert.down, total: hidden, first: 0, count: hidden });
        }
        Ok(CudaExperts {
            router: self.whole_matrix(router, count, hidden)?,
            gate_up: self.matrix(&gate_up, hidden)?,
            down: self.matrix(&down, inputs)?,
        })
    }

    /// Matrices with the same inputs, their rows in sequence.
    fn matrix(&mut self, parts: &[TensorRows], inputs: usize) -> Result<DeviceSlice, LoadError> {
        let rows: usize = parts.iter().map(|part| part.count).sum();
        let to = self.room(rows * inputs * self.element.bytes())?;
        let mut at = 0;
        for TensorRows { name, total, first, count } in parts {
            let tensor = self.weights.tensor(name, &[*total, inputs])?;
            let tensor = tensor.into_part(first * inputs, count * inputs);
            at += self.upload(&tensor, count * inputs, self.element, to, at)?;
        }
        Ok(to)
    }

    fn whole_matrix(&mut self, name: String, rows: usize, inputs: usize) -> Result<DeviceSlice, LoadError> {
        self.matrix(&[TensorRows { name, total: rows, first: 0, count: rows }], inputs)
    }

    /// Vectors in sequence, in f32.
    fn vector(&mut self, parts: &[TensorRows]) -> Result<DeviceSlice, LoadError> {
        let len: usize = parts.iter().map(|part| part.count).sum();
        let to = self.room(len * 4)?;
        let mut at = 0;
        for TensorRows { name, total, first, count } in parts {
            let tensor = self.weights.tensor(name, &[*total])?.into_part(*first, *count);
            at += self.upload(&tensor, *count, Element::F32, to, at)?;
        }
        Ok(to)
    }

    fn whole_vector(&mut self, name: &str, len: usize) -> Result<DeviceSlice, LoadError> {
        self.vector(&[TensorRows { name: name.to_owned(), total: len, first: 0, count: len }])
    }

    fn optional(&mut self, name: Option<&str>, len: usize) -> Result<Option<DeviceSlice>, LoadError> {
        name.map(|name| self.whole_vector(name, len)).transpose()
    }

    /// The weights of a norm, with the family's offset.
    fn norm(&mut self, name: &str, len: usize) -> Result<DeviceSlice, LoadError> {
        if self.norm_offset == 0.0 {
            return self.whole_vector(name, len);
        }
        let mut values = vec![0.0; len];
        self.weights.tensor(name, &[len])?.read_f32(0, &mut values);
        let to = self.room(len * 4)?;
        for (at, values) in values.chunks_mut(STAGING_BYTES / 4).enumerate() {
            values.iter_mut().for_each(|weight| *weight += self.norm_offset);
            let mut bytes = vec![0; values.len() * 4];
            narrow(values, Element::F32, &mut bytes);
            self.send(&bytes, to.part(at * STAGING_BYTES, bytes.len()))?;
        }
        self.count(len * 4);
        Ok(to)
    }

    fn optional_norm(&mut self, name: Option<&str>, len: usize) -> Result<Option<DeviceSlice>, LoadError> {
        name.map(|name| self.norm(name, len)).transpose()
    }

    /// The same values as in the CPU executor: the angle rounded to f32, its sine and cosine exact. Pairs that are not
    /// rotated have the angle zero.
    fn angles(
        &mut self,
        config: &ModelConfig,
        rope: &Rope,
        positions: usize,
    ) -> Result<DeviceSlice, LoadError> {
        let (frequencies, factor) = (rope.frequencies(config.attention.rotary_dim), rope.attention_factor());
        let fixed = config.head_dim / 2 - frequencies.len();
        let to = self.room(positions * config.head_dim * 4)?;
        let at_once = STAGING_BYTES / (config.head_dim * 4);
        for first in (0..positions).step_by(at_once) {
            let mut bytes = Vec::with_capacity(at_once.min(positions - first) * config.head_dim * 4);
            for position in first..positions.min(first + at_once) {
                let angle = |frequency: &f32| f64::from(position as f32 * frequency).sin_cos();
                let cosines = frequencies.iter().map(|frequency| angle(frequency).1 as f32 * factor);
                let sines = frequencies.iter().map(|frequency| angle(frequency).0 as f32 * factor);
                let cosines = cosines.chain(std::iter::repeat_n(1.0, fixed));
                let sines = sines.chain(std::iter::repeat_n(0.0, fixed));
                bytes.extend(cosines.chain(sines).flat_map(f32::to_le_bytes));
            }
            self.send(&bytes, to.part(first * config.head_dim * 4, bytes.len()))?;
        }
        Ok(to)
    }

    /// Device memory for one tensor.
    fn room(&mut self, bytes: usize) -> Result<DeviceSlice, DeviceError> {
        let whole = bytes.next_multiple_of(ALIGN_BYTES);
        if whole > SLAB_BYTES / 2 {
            self.taken += whole;
            return Ok(DeviceSlice::of(self.device.alloc(whole)?, bytes));
        }
        let slab = match self.slab.filter(|slab| slab.bytes >= whole) {
            Some(slab) => slab,
            None => {
                self.taken += SLAB_BYTES;
                DeviceSlice::of(self.device.alloc(SLAB_BYTES)?, SLAB_BYTES)
            }
        };
        self.slab = Some(slab.part(whole, slab.bytes - whole));
        Ok(slab.part(0, bytes))
    }

    /// Converts and copies a tensor to byte `at` of `to`. Returns its bytes there.
    fn upload(
        &mut self,
        tensor: &Tensor<'_>,
        len: usize,
        element: Element,
        to: DeviceSlice,
        at: usize,
    ) -> Result<usize, DeviceError> {
        let at_once = STAGING_BYTES / element.bytes();
        for first in (0..len).step_by(at_once) {
            let now = at_once.min(len - first);
            let to = to.part(at + first * element.bytes(), now * element.bytes());
            if element == Element::Bf16 && tensor.dtype() == WeightDtype::Bf16 {
                self.send(tensor.bf16_bytes(first, now), to)?;
                continue;
            }
            let (mut values, mut bytes) = (vec![0.0; now], vec![0; to.bytes]);
            tensor.read_f32(first, &mut values);
            narrow(&values, element, &mut bytes);
            self.send(&bytes, to)?;
        }
        self.count(len * element.bytes());
        Ok(len * element.bytes())
    }

    fn count(&mut self, bytes: usize) {
        self.done += bytes as u64;
        (self.progress)(WeightLoadProgress { bytes_done: self.done, bytes_total: self.total.max(self.done) });
    }

    fn send(&mut self, bytes: &[u8], to: DeviceSlice) -> Result<(), DeviceError> {
        self.turn = 1 - self.turn;
        let (host, landed) = self.staging[self.turn];
        // The buffer's earlier copy has landed.
        self.device.synchronize(landed)?;
        let from = HostSlice { host, offset: 0 };
        self.device.write_host(from, bytes)?;
        self.device.upload(self.on, from, to)?;
        self.device.record(landed, self.on)
    }

    /// Waits until all copies have landed.
    fn finish(&mut self) -> Result<(), DeviceError> {
        self.staging.into_iter().try_for_each(|(_, landed)| self.device.synchronize(landed))
    }
}

/// Converts f32 to elements, rounded to nearest.
pub fn narrow(values: &[f32], element: Element, out: &mut [u8]) {
    match element {
        Element::F32 => {
            for (out, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                *out = value.to_le_bytes();
            }
        }
        Element::Bf16 => {
            for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *out = bf16::from_f32(*value).to_le_bytes();
            }
        }
    }
}
