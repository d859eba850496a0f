//! LoRA adapters in PEFT's format: additions of low rank to the projections of a model, each served under a name of its
//! own.
//!
//! An adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`. A projection `y = W x` becomes
//! `y = W x + scale * B (A x)`, where `A` has `rank` rows and `B` has `rank` columns. Names, shapes and types of all
//! tensors are checked before a value is read. What would change the result and is not computed is refused by name.

mod config;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

use self::config::LoraConfig;
use super::config::ModelConfig;
use super::tensors::{MlpTensors, TensorRows};
use super::{ModelError, ModelFiles};

/// Most adapters of one engine.
pub const ADAPTERS_MAX: usize = 64;
/// Highest rank of an adapter; vLLM's is 512, and published adapters rarely have more than 128.
pub const RANK_MAX: usize = 256;

/// The configuration of an adapter.
const CONFIG_FILE: &str = "adapter_config.json";
/// The matrices of an adapter.
const WEIGHTS_FILE: &str = "adapter_model.safetensors";
/// Prefix of all tensors: PEFT's wrappers around the model.
const WRAPPERS: &str = "base_model.model.";
/// What an adapter may change, for refusals.
const SUPPORTED: &str =
    "supported: lora_A and lora_B of the projections of attention and of feed-forward layers without experts";

/// The number of an adapter among those of its engine, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AdapterIndex(pub usize);

/// An adapter whose matrices are in memory.
#[derive(Clone, Debug)]
pub struct LoraAdapter {
    /// Digest of all values and scales: equal for copies of one adapter, whatever their folders and element types.
    pub digest: [u8; 32],
    /// Highest rank of its parts.
    pub rank: usize,
    layers: Vec<LoraLayer>,
}

/// The products of a layer that an adapter can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraSite {
    /// q, then k, then v.
    Qkv,
    /// The output projection of attention.
    Output,
    /// Gate, then up.
    GateUp,
    /// The last projection of the feed-forward layer.
    Down,
}

impl LoraSite {
    const ALL: [Self; 4] = [Self::Qkv, Self::Output, Self::GateUp, Self::Down];
    /// Most parts of one site: q, k and v.
    pub const PARTS_MAX: usize = 3;
}

/// The parts of one layer, by site.
#[derive(Clone, Debug, Default)]
struct LoraLayer {
    sites: [Vec<LoraPart>; 4],
}

/// The addition to one projection.
#[derive(Clone, Debug)]
pub struct LoraPart {
    /// Its first column among the outputs of its site.
    pub first: usize,
    /// Outputs of the projection.
    pub outputs: usize,
    /// Inputs of the projection.
    pub inputs: usize,
    /// Rows of `a` and of `b`; at least one.
    pub rank: usize,
    /// Multiplier of `A x`.
    pub scale: f32,
    /// `A`: `rank` rows of the inputs.
    pub a: Vec<f32>,
    /// `B`, transposed: `rank` rows of the outputs.
    pub b: Vec<f32>,
}

/// The place of a projection in the model.
#[derive(Clone, Copy, Debug)]
struct LoraSlot {
    layer: usize,
    site: LoraSite,
    first: usize,
    outputs: usize,
    inputs: usize,
}

/// Both matrices of a projection.
type LoraPair<'a> = (TensorView<'a>, TensorView<'a>);

impl LoraAdapter {
    /// Reads the adapter in `folder` for a model.
    ///
    /// # Errors
    /// [`ModelError`]: a file is missing, unreadable or malformed, a tensor does not fit the model, or the adapter has
    /// something that this engine does not compute.
    pub fn open(folder: &Path, model: &ModelConfig) -> Result<Self, ModelError> {
        let files = ModelFiles::Dir(folder.to_owned());
        let config = LoraConfig::read(&files)?;
        let bytes = files.open(WEIGHTS_FILE)?.ok_or_else(|| ModelError::Missing(WEIGHTS_FILE.into()))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| malformed(error.to_string()))?;
        let slots = as_in_file(slots(model), model, &tensors);
        config.check_targets(slots.keys().map(String::as_str))?;
        let mut pairs = Vec::new();
        for (module, (a, b)) in pairs_of(&tensors, &slots)? {
            let slot = slots[&module];
            check_pair(&config, &module, slot, (&a, &b))?;
            pairs.push((module, slot, (a, b)));
        }
        config.check_complete(slots.keys().map(String::as_str), &|module| {
            pairs.iter().any(|(found, ..)| found == module)
        })?;
        if pairs.is_empty() {
            return Err(malformed("has no tensors".into()));
        }
        // Every shape is checked: the values take at most the bytes of the model at the highest rank.
        let mut layers = vec![LoraLayer::default(); model.layers];
        for (module, slot, pair) in &pairs {
            let part = LoraPart::read(&config, module, *slot, pair)?;
            layers[slot.layer].sites[slot.site as usize].push(part);
        }
        for parts in layers.iter_mut().flat_map(|layer| &mut layer.sites) {
            parts.sort_by_key(|part| part.first);
        }
        let rank = layers.iter().flat_map(|layer| layer.sites.iter().flatten()).map(|part| part.rank).max();
        Ok(Self { digest: digest(&layers), rank: rank.unwrap_or(0), layers })
    }

    /// The parts at a site of a layer, in the order of their columns; none if the adapter leaves the site alone.
    #[must_use]
    pub fn parts(&self, layer: usize, site: LoraSite) -> &[LoraPart] {
        &self.layers[layer].sites[site as usize]
    }
}

impl LoraPart {
    /// Reads the values of a pair whose shapes fit.
    fn read(
        config: &LoraConfig,
        module: &str,
        slot: LoraSlot,
        (a, b): &LoraPair<'_>,
    ) -> Result<Self, ModelError> {
        let LoraSlot { first, outputs, inputs, .. } = slot;
        let (rank, scale) = config.rank_and_scale(module);
        let by_output = values(&half_name(module, 'B'), b)?;
        let mut transposed = vec![0.0; rank * outputs];
        for (output, row) in by_output.chunks_exact(rank).enumerate() {
            for (row, value) in row.iter().enumerate() {
                transposed[row * outputs + output] = *value;
            }
        }
        let a = values(&half_name(module, 'A'), a)?;
        Ok(Self { first, outputs, inputs, rank, scale, a, b: transposed })
    }
}

fn malformed(what: String) -> ModelError {
    ModelError::Malformed { file: WEIGHTS_FILE.into(), what }
}

/// Name of a matrix in the file.
fn half_name(module: &str, half: char) -> String {
    format!("{WRAPPERS}{module}.lora_{half}.weight")
}

/// Every projection that an adapter can change, by the name of its module.
fn slots(model: &ModelConfig) -> HashMap<String, LoraSlot> {
    let mut slots = HashMap::new();
    for layer in 0..model.layers {
        let names = model.layer_tensors(layer);
        let mut put = |site, inputs, parts: &[TensorRows]| {
            let mut first = 0;
            for part in parts {
                let slot = LoraSlot { layer, site, first, outputs: part.total, inputs };
                // A tensor with the rows of all parts is one projection, which begins with the first.
                slots.entry(module_of_weight(&part.name)).or_insert(slot);
                first += part.count;
            }
        };
        let whole = |name: &str| {
            [TensorRows { name: name.into(), total: model.hidden, first: 0, count: model.hidden }]
        };
        put(LoraSite::Qkv, model.hidden, &names.qkv);
        put(LoraSite::Output, model.query_width(), &whole(&names.output));
        if let MlpTensors::Dense(dense) = &names.mlp {
            put(LoraSite::GateUp, model.hidden, &dense.gate_up);
            put(LoraSite::Down, dense.intermediate, &whole(&dense.down));
        }
    }
    slots
}

/// The projections by the names that the file has for them. Checkpoints with images name the modules of their text
/// model `language_model.model.…`, and so do older adapters. Later versions of transformers say
/// `model.language_model.…`.
fn as_in_file(
    slots: HashMap<String, LoraSlot>,
    model: &ModelConfig,
    tensors: &SafeTensors<'_>,
) -> HashMap<String, LoraSlot> {
    let prefix = model.spec.prefix();
    let (stored, later) = (format!("{prefix}model."), format!("model.{prefix}"));
    let is_later = |name: &&str| name.strip_prefix(WRAPPERS).is_some_and(|path| path.starts_with(&later));
    if prefix.is_empty() || !tensors.names().iter().any(is_later) {
        return slots;
    }
    let renamed = |(module, slot): (String, LoraSlot)| {
        let rest = module.strip_prefix(&stored).map(|rest| format!("{later}{rest}"));
        (rest.unwrap_or(module), slot)
    };
    slots.into_iter().map(renamed).collect()
}

/// The module with this weight.
fn module_of_weight(tensor: &str) -> String {
    tensor.strip_suffix(".weight").unwrap_or(tensor).to_owned()
}

/// The matrices of each module, by its name. Every tensor of the file is one of them.
fn pairs_of<'a>(
    tensors: &SafeTensors<'a>,
    slots: &HashMap<String, LoraSlot>,
) -> Result<BTreeMap<String, LoraPair<'a>>, ModelError> {
    let mut halves: BTreeMap<String, [Option<TensorView<'a>>; 2]> = BTreeMap::new();
    for (name, view) in tensors.tensors() {
        let path = name.strip_prefix(WRAPPERS);
        let found = path.and_then(|path| {
            let [a, b] = [".lora_A.weight", ".lora_B.weight"].map(|suffix| path.strip_suffix(suffix));
            a.map(|module| (module, 0_usize)).or(b.map(|module| (module, 1)))
        });
        match found.filter(|(module, _)| slots.contains_key(*module)) {
            Some((module, half)) => {
                halves.entry(module.to_owned()).or_default()[half] = Some(view);
            }
            None => return Err(refusal(&name)),
        }
    }
    let pair = |(module, halves): (String, [Option<TensorView<'a>>; 2])| match halves {
        [Some(a), Some(b)] => Ok((module, (a, b))),
        [a, _] => {
            let missing = half_name(&module, if a.is_none() { 'A' } else { 'B' });
            Err(malformed(format!("tensor {missing} is missing")))
        }
    };
    halves.into_iter().map(pair).collect()
}

/// Why a tensor that belongs to no projection is refused.
fn refusal(name: &str) -> ModelError {
    let what = if name.contains("lora_magnitude_vector") {
        "DoRA"
    } else if name.contains("lora_embedding_") || name.contains("embed_tokens") {
        "an adapter of the embedding"
    } else if name.contains("lm_head") {
        "an adapter of the output matrix"
    } else if name.contains(".experts") || name.contains("block_sparse_moe") || name.contains(".mlp.gate.") {
        "an adapter of experts or of their router"
    } else if name.ends_with(".bias") {
        "a bias in an adapter"
    } else {
        "a tensor that belongs to no projection of the model"
    };
    ModelError::Unsupported {
        file: WEIGHTS_FILE.into(),
        what: format!("tensor {name}: {what}"),
        supported: SUPPORTED.into(),
    }
}

/// Compares shapes and types of a module's matrices with the model and with the rank.
fn check_pair(
    config: &LoraConfig,
    module: &str,
    slot: LoraSlot,
    (a, b): (&TensorView<'_>, &TensorView<'_>),
) -> Result<(), ModelError> {
    config.check_module(module)?;
    let (rank, _) = config.rank_and_scale(module);
    for (half, view, wanted) in [('A', a, [rank, slot.inputs]), ('B', b, [slot.outputs, rank])] {
        let name = half_name(module, half);
        if view.shape() != wanted {
            let found = view.shape();
            return Err(malformed(format!(
                "tensor {name} has shape {found:?}; the model and rank {rank} of {CONFIG_FILE} need {wanted:?}"
            )));
        }
        if !matches!(view.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(ModelError::Unsupported {
                file: WEIGHTS_FILE.into(),
                what: format!("tensor {name} of type {:?}", view.dtype()),
                supported: "supported: F32, F16, BF16".into(),
            });
        }
    }
    Ok(())
}

/// The values of a tensor of floats. A value that is not finite would make every text meaningless.
fn values(name: &str, view: &TensorView<'_>) -> Result<Vec<f32>, ModelError> {
    let bytes = view.data();
    let halves = || bytes.as_chunks::<2>().0.iter();
    let values: Vec<f32> = match view.dtype() {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
        Dtype::F16 => halves().map(|raw| f16::from_le_bytes(*raw).to_f32()).collect(),
        _ => halves().map(|raw| bf16::from_le_bytes(*raw).to_f32()).collect(),
    };
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => Err(malformed(format!("tensor {name} has the value {} at {at}", values[at]))),
    }
}

/// Digest of all that an adapter's results depend on beside the model.
fn digest(layers: &[LoraLayer]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"baton lora 1");
    for (layer, sites) in layers.iter().enumerate() {
        for site in LoraSite::ALL {
            for part in &sites.sites[site as usize] {
                let LoraPart { first, outputs, inputs, rank, scale, a, b } = part;
                for number in [layer, site as usize, *first, *outputs, *inputs, *rank] {
                    hash.update((number as u64).to_le_bytes());
                }
                hash.update(scale.to_le_bytes());
                for row in a.chunks(*inputs).chain(b.chunks(*outputs)) {
                    let bytes: Vec<u8> = row.iter().flat_map(|value| value.to_le_bytes()).collect();
                    hash.update(&bytes);
                }
            }
        }
    }
    hash.finalize().into()
}

#[cfg(test)]
pub(crate) mod tests;
