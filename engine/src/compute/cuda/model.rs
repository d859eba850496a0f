//! A model's weights in device memory.

use super::device::{Device, DeviceError, Element, Event, Host, HostAt, Slice, Stream};
use super::software::narrow;
use crate::compute::cpu::LoadProgress;
use crate::model::ModelError;
use crate::model::config::ModelConfig;
use crate::model::weights::{Tensor, WeightDtype, Weights, parameter_count};

/// Bytes that are converted and copied at a time.
const STAGING_BYTES: usize = 16 << 20;
/// Small tensors share allocations of this size: a device gives out memory in pieces of 2 MiB.
const SLAB_BYTES: usize = 2 << 20;
/// Alignment of tensors, for 16-byte loads and the matrix library.
const ALIGN_BYTES: usize = 256;

/// Why a model is not on the device.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint cannot be served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// There are no kernels for it, or an option is out of range.
    #[error("{0}")]
    Unsupported(String),
}

/// One layer. Matrices are of the model's element, everything else is f32.
pub(super) struct Layer {
    pub(super) attention_norm: Slice,
    pub(super) qkv: Slice,
    pub(super) qkv_bias: Option<Slice>,
    pub(super) qk_norm: Option<(Slice, Slice)>,
    pub(super) output: Slice,
    pub(super) output_bias: Option<Slice>,
    pub(super) mlp_norm: Slice,
    /// Gate, then up.
    pub(super) gate_up: Slice,
    pub(super) gate_up_bias: Option<Slice>,
    pub(super) down: Slice,
    pub(super) down_bias: Option<Slice>,
}

/// All of it.
pub(super) struct Network {
    pub(super) layers: Vec<Layer>,
    pub(super) embedding: Slice,
    pub(super) final_norm: Slice,
    pub(super) head: Slice,
    /// Cosines, then sines, of each position.
    pub(super) angles: Slice,
    /// What all of it takes of the device's memory.
    pub(super) bytes: usize,
}

impl Network {
    pub(super) fn load(
        device: &mut dyn Device,
        on: Stream,
        weights: &Weights,
        config: &ModelConfig,
        (element, positions): (Element, usize),
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let mut loader = Loader::new(device, on, weights, element, progress)?;
        loader.total = (parameter_count(config) * element.bytes()) as u64;
        let (hidden, vocab) = (config.hidden, config.vocab);
        const EMBEDDING: &str = "model.embed_tokens.weight";
        let embedding = loader.matrix(&[(EMBEDDING.into(), vocab)], hidden)?;
        let head = if config.tied {
            embedding
        } else {
            loader.matrix(&[("lm_head.weight".into(), vocab)], hidden)?
        };
        let layers = (0..config.layers).map(|layer| loader.layer(config, layer));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let final_norm = loader.vector(&[("model.norm.weight".into(), hidden)])?;
        let angles = loader.angles(config, positions)?;
        loader.finish()?;
        Ok(Self { layers, embedding, final_norm, head, angles, bytes: loader.taken })
    }
}

struct Loader<'a> {
    device: &'a mut dyn Device,
    on: Stream,
    /// Two, with the events at which their copies have landed: one is written while the other is copied.
    staging: [(Host, Event); 2],
    turn: usize,
    weights: &'a Weights,
    element: Element,
    progress: &'a mut dyn FnMut(LoadProgress),
    slab: Option<Slice>,
    /// Bytes of device memory.
    taken: usize,
    done: u64,
    total: u64,
}

impl<'a> Loader<'a> {
    fn new(
        device: &'a mut dyn Device,
        on: Stream,
        weights: &'a Weights,
        element: Element,
        progress: &'a mut dyn FnMut(LoadProgress),
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
            progress,
            slab: None,
            taken: 0,
            done: 0,
            total: 0,
        })
    }

    fn layer(&mut self, config: &ModelConfig, layer: usize) -> Result<Layer, LoadError> {
        let (hidden, inter) = (config.hidden, config.intermediate);
        let (query, kv) = (config.query_width(), config.kv_width());
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let qkv = [("q_proj", query), ("k_proj", kv), ("v_proj", kv)];
        let of_qkv = |kind: &str| qkv.map(|(part, width)| (name(&format!("self_attn.{part}.{kind}")), width));
        let of_mlp =
            |kind: &str| ["gate_proj", "up_proj"].map(|part| (name(&format!("mlp.{part}.{kind}")), inter));
        let qk_norm = match config.qk_norm() {
            false => None,
            true => Some((
                self.vector(&[(name("self_attn.q_norm.weight"), config.head_dim)])?,
                self.vector(&[(name("self_attn.k_norm.weight"), config.head_dim)])?,
            )),
        };
        Ok(Layer {
            attention_norm: self.vector(&[(name("input_layernorm.weight"), hidden)])?,
            qkv: self.matrix(&of_qkv("weight"), hidden)?,
            qkv_bias: self.optional(config.qkv_bias, &of_qkv("bias"))?,
            qk_norm,
            output: self.matrix(&[(name("self_attn.o_proj.weight"), hidden)], query)?,
            output_bias: self.optional(config.output_bias, &[(name("self_attn.o_proj.bias"), hidden)])?,
            mlp_norm: self.vector(&[(name("post_attention_layernorm.weight"), hidden)])?,
            gate_up: self.matrix(&of_mlp("weight"), hidden)?,
            gate_up_bias: self.optional(config.mlp_bias, &of_mlp("bias"))?,
            down: self.matrix(&[(name("mlp.down_proj.weight"), hidden)], inter)?,
            down_bias: self.optional(config.mlp_bias, &[(name("mlp.down_proj.bias"), hidden)])?,
        })
    }

    /// Matrices of so many rows each, one below the other.
    fn matrix(&mut self, parts: &[(String, usize)], inputs: usize) -> Result<Slice, LoadError> {
        let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
        let to = self.room(rows * inputs * self.element.bytes())?;
        let mut at = 0;
        for (name, rows) in parts {
            let tensor = self.weights.tensor(name, &[*rows, inputs])?;
            at += self.upload(&tensor, rows * inputs, self.element, to, at)?;
        }
        Ok(to)
    }

    /// Vectors one after the other, in f32.
    fn vector(&mut self, parts: &[(String, usize)]) -> Result<Slice, LoadError> {
        let len: usize = parts.iter().map(|(_, len)| len).sum();
        let to = self.room(len * 4)?;
        let mut at = 0;
        for (name, len) in parts {
            let tensor = self.weights.tensor(name, &[*len])?;
            at += self.upload(&tensor, *len, Element::F32, to, at)?;
        }
        Ok(to)
    }

    fn optional(&mut self, has: bool, parts: &[(String, usize)]) -> Result<Option<Slice>, LoadError> {
        if has { self.vector(parts).map(Some) } else { Ok(None) }
    }

    /// As the CPU executor computes them: the angle rounded to f32, its functions exact.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    fn angles(&mut self, config: &ModelConfig, positions: usize) -> Result<Slice, LoadError> {
        let (frequencies, factor) =
            (config.rope.frequencies(config.head_dim), config.rope.attention_factor());
        let to = self.room(positions * config.head_dim * 4)?;
        let at_once = STAGING_BYTES / (config.head_dim * 4);
        for first in (0..positions).step_by(at_once) {
            let mut bytes = Vec::with_capacity(at_once.min(positions - first) * config.head_dim * 4);
            for position in first..positions.min(first + at_once) {
                let angle = |frequency: &f32| f64::from(position as f32 * frequency).sin_cos();
                let cosines = frequencies.iter().map(|frequency| angle(frequency).1 as f32 * factor);
                let sines = frequencies.iter().map(|frequency| angle(frequency).0 as f32 * factor);
                bytes.extend(cosines.chain(sines).flat_map(f32::to_le_bytes));
            }
            self.send(&bytes, to.part(first * config.head_dim * 4, bytes.len()))?;
        }
        Ok(to)
    }

    /// Device memory for one tensor.
    fn room(&mut self, bytes: usize) -> Result<Slice, DeviceError> {
        let whole = bytes.next_multiple_of(ALIGN_BYTES);
        if whole > SLAB_BYTES / 2 {
            self.taken += whole;
            return Ok(Slice::of(self.device.alloc(whole)?, bytes));
        }
        let slab = match self.slab.filter(|slab| slab.bytes >= whole) {
            Some(slab) => slab,
            None => {
                self.taken += SLAB_BYTES;
                Slice::of(self.device.alloc(SLAB_BYTES)?, SLAB_BYTES)
            }
        };
        self.slab = Some(slab.part(whole, slab.bytes - whole));
        Ok(slab.part(0, bytes))
    }

    /// Converts and copies a tensor to byte `at` of `to`; its bytes there.
    fn upload(
        &mut self,
        tensor: &Tensor<'_>,
        len: usize,
        element: Element,
        to: Slice,
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
        self.done += (len * element.bytes()) as u64;
        (self.progress)(LoadProgress { bytes_done: self.done, bytes_total: self.total.max(self.done) });
        Ok(len * element.bytes())
    }

    fn send(&mut self, bytes: &[u8], to: Slice) -> Result<(), DeviceError> {
        self.turn = 1 - self.turn;
        let (host, landed) = self.staging[self.turn];
        // What it held before has landed.
        self.device.synchronize(landed)?;
        let from = HostAt { host, offset: 0 };
        self.device.write_host(from, bytes)?;
        self.device.upload(self.on, from, to)?;
        self.device.record(landed, self.on)
    }

    /// Waits until everything that was sent has landed.
    fn finish(&mut self) -> Result<(), DeviceError> {
        self.staging.into_iter().try_for_each(|(_, landed)| self.device.synchronize(landed))
    }
}
