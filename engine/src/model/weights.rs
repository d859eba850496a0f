//! The tensors of a checkpoint: `model.safetensors`, the shards that its index names, or GGUF files.
//!
//! Files are memory-mapped and read once, when an executor copies them into its own layout. Other `*.safetensors` files
//! in the folder are ignored: the index, if there is one, lists the model's files. The alignment of tensor data is that
//! of the file (often 8 bytes), so values are read as bytes. Quantized values are converted when they are read.
//!
//! [`Weights::random`] has the same interface without files, for benchmarks of a shape.

mod tensor;

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};

use half::bf16;
use safetensors::{Dtype, SafeTensors};

use self::tensor::TensorValues;
pub use self::tensor::{Tensor, WeightDtype};
use super::config::{CONFIG_FILE, ModelConfig};
use super::gguf::{self, GgufChange, GgufFiles};
use super::quantized::ggml::GgmlType;
pub(crate) use super::quantized::groups::{GROUP, IntegerForm, IntegerGroup, IntegerKind};
use super::quantized::{QuantScheme, QuantizedMatrix};
use super::{FileBytes, ModelError, ModelFiles};

/// The file of an unsharded checkpoint.
const SINGLE_FILE: &str = "model.safetensors";
/// The list of shards of a sharded checkpoint.
const INDEX_FILE: &str = "model.safetensors.index.json";
/// Most shards of a checkpoint; the largest released ones have a few hundred.
const MAX_SHARDS: usize = 4096;

/// All tensors of a model.
#[derive(Debug)]
pub struct Weights(WeightSource);

#[derive(Debug)]
enum WeightSource {
    Files { shards: Vec<Shard>, tensors: HashMap<String, TensorEntry>, scheme: QuantScheme },
    Random { seed: u64 },
}

#[derive(Debug)]
struct Shard {
    name: String,
    bytes: FileBytes,
}

#[derive(Debug)]
struct TensorEntry {
    shard: usize,
    stored: Stored,
    shape: Vec<usize>,
    /// Byte range in the file.
    start: usize,
    end: usize,
}

/// How a tensor's values are stored.
#[derive(Clone, Copy, Debug)]
enum Stored {
    /// In a safetensors file.
    Safetensors(Dtype),
    /// In a GGUF file, changed by its converter.
    Gguf(GgmlType, GgufChange),
}

impl Weights {
    /// Opens the checkpoint's files and reads their headers.
    ///
    /// # Errors
    /// [`ModelError`]: no weights, a shard that the index names but the folder lacks, or a damaged header.
    pub fn open(files: &ModelFiles) -> Result<Self, ModelError> {
        if let ModelFiles::Gguf(gguf) = files {
            return Self::from_gguf(files, gguf);
        }
        let scheme = match files.open(CONFIG_FILE)? {
            Some(config) => QuantScheme::of_config(&config, CONFIG_FILE)?,
            None => QuantScheme::None,
        };
        let (mut shards, mut tensors) = (Vec::new(), HashMap::new());
        for name in weight_files(files)? {
            let bytes = files.open(&name)?.ok_or_else(|| ModelError::Missing(name.clone()))?;
            let malformed = |what: String| ModelError::Malformed { file: name.clone(), what };
            let (header, metadata) =
                SafeTensors::read_metadata(&bytes).map_err(|error| malformed(error.to_string()))?;
            let data = header + 8;
            for (tensor, info) in metadata.tensors() {
                let entry = TensorEntry {
                    shard: shards.len(),
                    stored: Stored::Safetensors(info.dtype),
                    shape: info.shape.clone(),
                    start: data + info.data_offsets.0,
                    end: data + info.data_offsets.1,
                };
                if tensors.insert(tensor.clone(), entry).is_some() {
                    return Err(malformed(format!("{tensor} is in another shard too")));
                }
            }
            shards.push(Shard { name, bytes });
        }
        Ok(Self(WeightSource::Files { shards, tensors, scheme }))
    }

    fn from_gguf(files: &ModelFiles, gguf: &GgufFiles) -> Result<Self, ModelError> {
        let mut shards = Vec::new();
        for name in gguf.names() {
            let bytes = files.open(&name)?.ok_or_else(|| ModelError::Missing(name.clone()))?;
            shards.push(Shard { name, bytes });
        }
        let mut tensors = HashMap::new();
        for found in gguf.entries()? {
            let entry = TensorEntry {
                shard: found.shard,
                stored: Stored::Gguf(found.kind, found.change),
                shape: found.shape,
                start: found.start,
                end: found.end,
            };
            if tensors.insert(found.name.clone(), entry).is_some() {
                let what = format!("{} is there twice", found.name);
                return Err(ModelError::Malformed { file: shards[found.shard].name.clone(), what });
            }
        }
        Ok(Self(WeightSource::Files { shards, tensors, scheme: QuantScheme::None }))
    }

    /// bf16 weights of any shape, generated from `seed`. Every linear map keeps the scale of its input, and norms are
    /// near 1. For speed measurements; the text is meaningless.
    #[must_use]
    pub fn random(seed: u64) -> Self {
        Self(WeightSource::Random { seed })
    }

    /// Compares names, shapes and types of all tensors of a model with the headers. No float is read but the scales of
    /// quantized matrices.
    ///
    /// # Errors
    /// As [`Self::tensor`]. [`ModelError::Unsupported`] for a tensor of a GGUF file that the model does not read. Other
    /// checkpoints may contain more, such as the part of a model that reads images.
    pub fn check(&self, config: &ModelConfig) -> Result<(), ModelError> {
        match &self.0 {
            WeightSource::Random { .. } => Ok(()),
            WeightSource::Files { shards, tensors, scheme } => {
                let mut read = HashSet::new();
                config.tensor_shapes(&mut |name, shape| {
                    find(shards, tensors, *scheme, name, shape)?;
                    read.insert(name.to_owned());
                    Ok(())
                })?;
                refuse_unread(shards, tensors, &read)
            }
        }
    }

    /// One tensor of the expected shape.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if it is absent or of another shape, or if the scales of a quantized one are.
    /// [`ModelError::Unsupported`] for an element type that is neither a float nor a supported quantized type.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let found = match &self.0 {
            WeightSource::Random { seed } => return Ok(random_tensor(*seed, name, shape)),
            WeightSource::Files { shards, tensors, scheme } => find(shards, tensors, *scheme, name, shape)?,
        };
        let values = match found {
            FoundTensor::Matrix(matrix) => TensorValues::Matrix(matrix),
            FoundTensor::Plain(dtype, bytes) => TensorValues::Plain(dtype, Cow::Borrowed(bytes)),
            FoundTensor::Gguf(kind, change, bytes) => {
                let (kind, bytes) = gguf::restored(kind, change, bytes, shape);
                match kind {
                    GgmlType::F32 => TensorValues::Plain(WeightDtype::F32, bytes),
                    GgmlType::F16 => TensorValues::Plain(WeightDtype::F16, bytes),
                    GgmlType::Bf16 => TensorValues::Plain(WeightDtype::Bf16, bytes),
                    quantized => TensorValues::Blocks(quantized, bytes),
                }
            }
        };
        Ok(Tensor::new(values, shape))
    }
}

/// A tensor whose name, shape and type have been checked.
enum FoundTensor<'a> {
    /// A matrix whose scales are tensors of their own.
    Matrix(QuantizedMatrix<'a>),
    /// Floats of a safetensors file.
    Plain(WeightDtype, &'a [u8]),
    /// Values of a GGUF file, changed by its converter.
    Gguf(GgmlType, GgufChange, &'a [u8]),
}

/// The tensor of this name in the files.
fn find<'a>(
    shards: &'a [Shard],
    tensors: &'a HashMap<String, TensorEntry>,
    scheme: QuantScheme,
    name: &str,
    shape: &[usize],
) -> Result<FoundTensor<'a>, ModelError> {
    let part = |name: &str| {
        let entry = tensors.get(name)?;
        let Stored::Safetensors(dtype) = entry.stored else { return None };
        Some((dtype, entry.shape.as_slice(), &shards[entry.shard].bytes[entry.start..entry.end]))
    };
    let file = || match shards {
        [only] => only.name.clone(),
        _ => INDEX_FILE.to_owned(),
    };
    if let Some(matrix) = scheme.matrix(name, shape, &part) {
        let matrix = matrix.map_err(|what| ModelError::Malformed { file: file(), what })?;
        return Ok(FoundTensor::Matrix(matrix));
    }
    let entry = tensors
        .get(name)
        .ok_or_else(|| ModelError::Malformed { file: file(), what: format!("tensor {name} is missing") })?;
    let shard = &shards[entry.shard];
    if entry.shape != shape {
        return Err(ModelError::Malformed {
            file: shard.name.clone(),
            what: format!("tensor {name} has shape {:?}, the configuration says {shape:?}", entry.shape),
        });
    }
    let bytes = &shard.bytes[entry.start..entry.end];
    match entry.stored {
        Stored::Gguf(kind, change) => Ok(FoundTensor::Gguf(kind, change, bytes)),
        Stored::Safetensors(dtype) => match plain(dtype) {
            Some(dtype) => Ok(FoundTensor::Plain(dtype, bytes)),
            None => Err(ModelError::Unsupported {
                file: shard.name.clone(),
                what: format!("tensor {name} of type {dtype:?}"),
                supported: "supported: F32, F16, BF16".into(),
            }),
        },
    }
}

/// Refuses a GGUF file with a tensor that is not among those that were read: it would change the result.
fn refuse_unread(
    shards: &[Shard],
    tensors: &HashMap<String, TensorEntry>,
    read: &HashSet<String>,
) -> Result<(), ModelError> {
    let unread = tensors
        .iter()
        .filter(|(name, entry)| matches!(entry.stored, Stored::Gguf(..)) && !read.contains(*name))
        .min_by_key(|(_, entry)| (entry.shard, entry.start));
    match unread {
        None => Ok(()),
        Some((name, entry)) => Err(ModelError::Unsupported {
            file: shards[entry.shard].name.clone(),
            what: format!("tensor {name} beside those of the configuration"),
            supported: "supported: the tensors of the architecture's layers".into(),
        }),
    }
}

/// The element type of a tensor without scales. `None` for others.
fn plain(dtype: Dtype) -> Option<WeightDtype> {
    match dtype {
        Dtype::F32 => Some(WeightDtype::F32),
        Dtype::F16 => Some(WeightDtype::F16),
        Dtype::BF16 => Some(WeightDtype::Bf16),
        _ => None,
    }
}

/// Number of weights of a configuration, for progress and benchmarks.
#[must_use]
pub fn parameter_count(config: &ModelConfig) -> usize {
    let attention = config.hidden * (2 * config.query_width() + 2 * config.kv_width());
    let mlp: usize = (0..config.layers).map(|layer| config.mlp_parameters(layer)).sum();
    let embeddings = config.vocab * config.hidden * if config.tied { 1 } else { 2 };
    config.layers * (attention + 2 * config.hidden) + mlp + embeddings + config.hidden
}

/// The checkpoint's weight files, in order.
pub(super) fn weight_files(files: &ModelFiles) -> Result<Vec<String>, ModelError> {
    if let ModelFiles::Gguf(gguf) = files {
        return Ok(gguf.names());
    }
    match files.open(INDEX_FILE)? {
        Some(index) => shard_names(&index),
        None => Ok(vec![SINGLE_FILE.to_owned()]),
    }
}

/// The distinct shards of an index, in order.
fn shard_names(index: &[u8]) -> Result<Vec<String>, ModelError> {
    let malformed = |what: String| ModelError::Malformed { file: INDEX_FILE.into(), what };
    let index: serde_json::Value =
        serde_json::from_slice(index).map_err(|error| malformed(error.to_string()))?;
    let map = index
        .get("weight_map")
        .and_then(|map| map.as_object())
        .ok_or_else(|| malformed("weight_map is absent".into()))?;
    let mut names = BTreeSet::new();
    for (tensor, shard) in map {
        let shard = shard.as_str().ok_or_else(|| malformed(format!("{tensor} has no file name")))?;
        // A downloaded index must not make the engine open files outside the checkpoint's folder.
        if shard.is_empty() || shard.starts_with('.') || shard.contains(['/', '\\']) {
            return Err(malformed(format!("{shard:?} is not a plain file name")));
        }
        names.insert(shard.to_owned());
        if names.len() > MAX_SHARDS {
            return Err(malformed(format!("more than {MAX_SHARDS} shards")));
        }
    }
    if names.is_empty() {
        return Err(malformed("weight_map is empty".into()));
    }
    Ok(names.into_iter().collect())
}

/// Elements that are generated from one state, so that several threads can generate a large tensor.
const RANDOM_RUN: usize = 1 << 20;

/// Uniform values with the scale of a usable initialization. Seed and name determine them.
fn random_tensor(seed: u64, name: &str, shape: &[usize]) -> Tensor<'static> {
    let count: usize = shape.iter().product();
    let named = name.bytes().fold(seed ^ 0x9e37_79b9_7f4a_7c15, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let (center, spread) = match shape {
        [_] => (1.0, 0.1),
        // Experts by inputs by outputs.
        [_, inputs, _] => (0.0, (3.0 / *inputs as f32).sqrt()),
        _ => (0.0, (3.0 / shape[shape.len() - 1] as f32).sqrt()),
    };
    let mut bytes = vec![0; count * 2];
    let fill = |run: usize, bytes: &mut [u8]| {
        let mut state = named.wrapping_add((run as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1;
        for raw in bytes.as_chunks_mut::<2>().0 {
            // xorshift64*: fast, and good enough for weights whose output is not read.
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            let bits = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
            let unit = bits as f32 / (1 << 23) as f32 - 1.0;
            *raw = bf16::from_f32(center + spread * unit).to_le_bytes();
        }
    };
    let runs: Vec<_> = bytes.chunks_mut(RANDOM_RUN * 2).enumerate().collect();
    if runs.len() == 1 {
        runs.into_iter().for_each(|(run, bytes)| fill(run, bytes));
    } else {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let (of_each, mut runs, fill) = (runs.len().div_ceil(threads), runs, &fill);
        std::thread::scope(|scope| {
            while !runs.is_empty() {
                let mine = runs.split_off(runs.len().saturating_sub(of_each));
                scope.spawn(move || mine.into_iter().for_each(|(run, bytes)| fill(run, bytes)));
            }
        });
    }
    Tensor::new(TensorValues::Plain(WeightDtype::Bf16, Cow::Owned(bytes)), shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use safetensors::tensor::TensorView;

    fn write(dir: &std::path::Path, file: &str, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) {
        let views: Vec<(String, TensorView<'_>)> = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| {
                ((*name).to_owned(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
            })
            .collect();
        std::fs::write(dir.join(file), safetensors::serialize(views, None).unwrap()).unwrap();
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn every_float_type_reads_exactly() {
        let dir = tempfile::tempdir().unwrap();
        let values = [1.5_f32, -0.25];
        write(
            dir.path(),
            "model.safetensors",
            &[
                ("a", Dtype::F32, vec![2], floats(&values)),
                (
                    "b",
                    Dtype::F16,
                    vec![2],
                    values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
                ),
                (
                    "c",
                    Dtype::BF16,
                    vec![2],
                    values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
                ),
            ],
        );
        let weights = Weights::open(&ModelFiles::Dir(dir.path().into())).unwrap();
        for name in ["a", "b", "c"] {
            let mut out = [0.0; 2];
            weights.tensor(name, &[2]).unwrap().read_f32(0, &mut out);
            assert_eq!(out, values, "{name}");
        }
    }

    #[test]
    fn multipliers_are_rounded_to_the_type_as_in_torch() {
        // Roots of the widths of Gemma 3 270M, 1B and 4B, and of Gemma 2 9B.
        for (width, in_bf16) in [(640.0_f32, 25.25), (1152.0, 34.0), (2560.0, 50.5), (3584.0, 59.75)] {
            assert_eq!(WeightDtype::Bf16.rounded(width.sqrt()), in_bf16, "{width}");
            assert_eq!(WeightDtype::F32.rounded(width.sqrt()), width.sqrt());
        }
        assert_eq!(WeightDtype::F16.rounded(1152.0_f32.sqrt()), 33.9375);
    }

    #[test]
    fn a_part_of_a_tensor_has_its_rows_only() {
        let weights = Weights::random(3);
        let whole = weights.tensor("a", &[4, 2]).unwrap();
        let (mut all, mut part) = ([0.0; 8], [0.0; 4]);
        whole.read_f32(0, &mut all);
        let rows = whole.clone().into_part(2, 4);
        rows.read_f32(0, &mut part);
        assert_eq!((rows.bytes(), &part[..]), (8, &all[2..6]));
        assert_eq!(whole.into_part(0, 8).bytes(), 16);
    }

    #[test]
    fn missing_tensors_and_wrong_shapes_are_named() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "model.safetensors", &[("a", Dtype::F32, vec![2], floats(&[1.0, 2.0]))]);
        let weights = Weights::open(&ModelFiles::Dir(dir.path().into())).unwrap();
        assert!(weights.tensor("norm", &[2]).unwrap_err().to_string().contains("norm"));
        let error = weights.tensor("a", &[3]).unwrap_err().to_string();
        assert!(error.contains("[2]") && error.contains("[3]"), "{error}");
    }

    #[test]
    fn integer_weights_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "model.safetensors", &[("a", Dtype::I8, vec![2], vec![1, 2])]);
        let weights = Weights::open(&ModelFiles::Dir(dir.path().into())).unwrap();
        assert!(matches!(weights.tensor("a", &[2]), Err(ModelError::Unsupported { .. })));
    }

    #[test]
    fn a_missing_shard_is_named_and_strays_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let files = ModelFiles::Dir(dir.path().into());
        write(dir.path(), "one.safetensors", &[("a", Dtype::F32, vec![1], floats(&[1.0]))]);
        write(dir.path(), "stray.safetensors", &[("a", Dtype::F32, vec![1], floats(&[9.0]))]);
        let index = |map: &str| std::fs::write(dir.path().join(INDEX_FILE), map).unwrap();
        index(r#"{"weight_map": {"a": "one.safetensors"}}"#);
        let mut out = [0.0];
        Weights::open(&files).unwrap().tensor("a", &[1]).unwrap().read_f32(0, &mut out);
        assert_eq!(out, [1.0]);
        index(r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#);
        assert!(matches!(Weights::open(&files), Err(ModelError::Missing(name)) if name == "two.safetensors"));
        index(r#"{"weight_map": {"a": "../one.safetensors"}}"#);
        assert!(matches!(Weights::open(&files), Err(ModelError::Malformed { .. })));
    }

    #[test]
    fn a_truncated_file_is_refused_when_opened() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "model.safetensors", &[("a", Dtype::F32, vec![2], floats(&[1.0, 2.0]))]);
        let path = dir.path().join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let error = Weights::open(&ModelFiles::Dir(dir.path().into())).unwrap_err();
        assert!(matches!(error, ModelError::Malformed { .. }), "{error}");
    }
}
