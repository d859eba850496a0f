//! Quantized weights, which are converted to f32 when an executor reads them.
//!
//! Every conversion computes in f32 what its format defines, value by value: a result is the same on every machine and
//! for every range that is read, and does not depend on the other values of the range.
//!
//! Matrices of integers can be read without a conversion too, in `groups`.
//!
//! `ggml` has the types of GGUF files. A quantized Hugging Face checkpoint describes its format in `config.json`
//! ([`QuantScheme`]), and its matrices are several tensors each ([`QuantizedMatrix`]).

mod fp8;
pub(in crate::model) mod ggml;
pub(in crate::model) mod groups;
mod int4;
mod mxfp4;

use safetensors::Dtype;
use serde_json::{Map, Value, json};

use self::fp8::Fp8Matrix;
use self::groups::{IntegerForm, IntegerGroup};
use self::int4::{Int4Layout, Int4Matrix};
use self::mxfp4::Mxfp4Matrix;
use super::ModelError;

/// Formats that are read, for refusals.
pub(in crate::model) const SUPPORTED: &str =
    "4-bit gptq and awq, fp8, mxfp4, compressed-tensors with 4-bit integers or 8-bit floats, GGUF files";
/// Largest group or block side. Released checkpoints have 128.
const MAX_GROUP: u64 = 1 << 20;

/// The format of a checkpoint's quantized matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum QuantScheme {
    /// No matrix is quantized.
    None,
    /// 8-bit floats with scales.
    Fp8,
    /// 4-bit integers with scales and zero points. `group` is the inputs that share them; `None` for all inputs.
    Int4 {
        /// The order of the integers.
        layout: Int4Layout,
        /// Inputs of a group.
        group: Option<usize>,
    },
    /// 4-bit floats in blocks with a power of two each, of all experts together.
    Mxfp4,
}

/// A tensor of a file: element type, shape and bytes.
pub(in crate::model) type TensorPart<'a> = (Dtype, &'a [usize], &'a [u8]);

/// A matrix of outputs by inputs, as it is stored.
#[derive(Clone)]
pub(in crate::model) enum QuantizedMatrix<'a> {
    /// 8-bit floats.
    Fp8(Fp8Matrix<'a>),
    /// 4-bit integers.
    Int4(Int4Matrix<'a>),
    /// 4-bit floats of all experts.
    Mxfp4(Mxfp4Matrix<'a>),
}

impl QuantScheme {
    /// The format that `quantization_config` in the contents of a `config.json` describes.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] with the name of the format or of its variant.
    pub(in crate::model) fn of_config(config: &[u8], file: &str) -> Result<Self, ModelError> {
        let config: Value = serde_json::from_slice(config)
            .map_err(|error| ModelError::Malformed { file: file.to_owned(), what: error.to_string() })?;
        match config.get("quantization_config").filter(|value| !value.is_null()) {
            None => Ok(Self::None),
            Some(value) => Self::parse(value).map_err(|what| ModelError::Unsupported {
                file: file.to_owned(),
                what,
                supported: format!("supported: {SUPPORTED}"),
            }),
        }
    }

    /// Parses `quantization_config`.
    ///
    /// # Errors
    /// What is not supported.
    pub(in crate::model) fn parse(config: &Value) -> Result<Self, String> {
        let method = config.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed");
        let parsed = match method {
            "gptq" => gptq(config),
            "awq" => awq(config),
            "fp8" => fp8(config),
            "compressed-tensors" => compressed(config),
            // Matrices with blocks have the format, whatever the lists of modules say.
            "mxfp4" => Ok(Self::Mxfp4),
            _ => return Err(format!("quantization_config ({method})")),
        };
        parsed.map_err(|what| format!("quantization_config ({method}) with {what}"))
    }

    /// A quantized matrix, by the name that it has in a checkpoint that is not quantized. `None` if the tensor of this
    /// name is not quantized or absent. `part` finds a tensor of the files.
    ///
    /// Errors say what is wrong with the parts.
    pub(in crate::model) fn matrix<'a>(
        self,
        name: &str,
        shape: &[usize],
        part: &dyn Fn(&str) -> Option<TensorPart<'a>>,
    ) -> Option<Result<QuantizedMatrix<'a>, String>> {
        if self == Self::Mxfp4 {
            return Mxfp4Matrix::find(name, shape, part).map(|found| found.map(QuantizedMatrix::Mxfp4));
        }
        let (prefix, [rows, columns]) = (name.strip_suffix("weight")?, shape) else { return None };
        let size = (*rows, *columns);
        let found = part(name);
        match self {
            Self::None | Self::Mxfp4 => None,
            Self::Fp8 => {
                let (_, found, bytes) = found.filter(|(dtype, ..)| *dtype == Dtype::F8_E4M3)?;
                if found != shape {
                    let what = format!("tensor {name} has shape {found:?}, the configuration says {shape:?}");
                    return Some(Err(what));
                }
                Some(Fp8Matrix::new(prefix, size, bytes, part).map(QuantizedMatrix::Fp8))
            }
            Self::Int4 { layout, group } => {
                if found.is_some() {
                    return None;
                }
                let quants = part(&format!("{prefix}{}", layout.quants()))?;
                let group = group.unwrap_or(size.1);
                Some(Int4Matrix::new(prefix, size, layout, group, quants, part).map(QuantizedMatrix::Int4))
            }
        }
    }
}

impl QuantizedMatrix<'_> {
    /// Bytes of the stored values.
    pub(in crate::model) fn bytes(&self) -> usize {
        match self {
            Self::Fp8(matrix) => matrix.bytes(),
            Self::Int4(matrix) => matrix.bytes(),
            Self::Mxfp4(matrix) => matrix.bytes(),
        }
    }

    /// How the integers are grouped, if these are integers with scales for whole groups of 32 inputs.
    pub(in crate::model) fn integer_form(&self) -> Option<IntegerForm> {
        match self {
            Self::Int4(matrix) => matrix.integer_form(),
            Self::Fp8(_) | Self::Mxfp4(_) => None,
        }
    }

    /// The group of 32 integers that begins at element `start`.
    ///
    /// # Panics
    /// When the group is outside the matrix, or these are no integers.
    pub(in crate::model) fn read_group(&self, start: usize) -> IntegerGroup {
        match self {
            Self::Int4(matrix) => matrix.read_group(start),
            Self::Fp8(_) | Self::Mxfp4(_) => panic!("a matrix of integers"),
        }
    }

    /// Elements `start .. start + out.len()`, row by row.
    ///
    /// # Panics
    /// When the range is outside the matrix.
    pub(in crate::model) fn read_f32(&self, start: usize, out: &mut [f32]) {
        match self {
            Self::Fp8(matrix) => matrix.read_f32(start, out),
            Self::Int4(matrix) => matrix.read_f32(start, out),
            Self::Mxfp4(matrix) => matrix.read_f32(start, out),
        }
    }
}

fn gptq(config: &Value) -> Result<QuantScheme, String> {
    only(config, "bits", &json!(4))?;
    absent_or(config, "is_marlin_format", &json!(false))?;
    if config.get("dynamic").and_then(Value::as_object).is_some_and(|rules| !rules.is_empty()) {
        return Err("dynamic".to_owned());
    }
    let layout = match config.get("checkpoint_format").and_then(Value::as_str) {
        None | Some("gptq") => Int4Layout::Gptq,
        Some("gptq_v2") => Int4Layout::GptqV2,
        Some(other) => return Err(format!("checkpoint_format {other}")),
    };
    Ok(QuantScheme::Int4 { layout, group: group(config)? })
}

fn awq(config: &Value) -> Result<QuantScheme, String> {
    // Older files have AutoAWQ's own names.
    let bits = if config.get("bits").is_some() { "bits" } else { "w_bit" };
    only(config, bits, &json!(4))?;
    absent_or(config, "zero_point", &json!(true))?;
    let version = config.get("version").and_then(Value::as_str).unwrap_or("gemm");
    if !version.eq_ignore_ascii_case("gemm") {
        return Err(format!("version {version}"));
    }
    Ok(QuantScheme::Int4 { layout: Int4Layout::Awq, group: group(config)? })
}

fn fp8(config: &Value) -> Result<QuantScheme, String> {
    absent_or(config, "fmt", &json!("e4m3"))?;
    // The sides of blocks follow from the shapes of the scales: `fp8` compares them with this.
    match config.get("weight_block_size").filter(|size| !size.is_null()) {
        None => {}
        Some(size) if *size == json!([fp8::BLOCK, fp8::BLOCK]) => {}
        Some(size) => return Err(format!("weight_block_size {size}")),
    }
    Ok(QuantScheme::Fp8)
}

fn compressed(config: &Value) -> Result<QuantScheme, String> {
    if config.get("kv_cache_scheme").is_some_and(|scheme| !scheme.is_null()) {
        return Err("kv_cache_scheme".to_owned());
    }
    // Rotations of activations belong to the weights: without them the model computes something else.
    if config.get("transform_config").is_some_and(is_a_transform) {
        return Err("transform_config".to_owned());
    }
    if let Some(sparsity) = config.get("sparsity_config").filter(|sparsity| !sparsity.is_null()) {
        absent_or(sparsity, "format", &json!("dense")).map_err(|what| format!("sparsity_config: {what}"))?;
    }
    let format = config.get("format").and_then(Value::as_str).unwrap_or("unnamed");
    let scheme = match format {
        "float-quantized" => compressed_floats,
        "pack-quantized" => compressed_integers,
        other => return Err(format!("format {other}")),
    };
    let mut found: Option<QuantScheme> = None;
    let groups = config.get("config_groups").and_then(Value::as_object);
    for group in groups.ok_or("no config_groups")?.values() {
        absent_or(group, "format", &json!(format)).map_err(|what| format!("a group of {what}"))?;
        let weights = group.get("weights").filter(|weights| weights.is_object()).ok_or("no weights")?;
        let scheme = scheme(weights)?;
        if found.is_some_and(|found| found != scheme) {
            return Err("groups of several formats".to_owned());
        }
        found = Some(scheme);
    }
    found.ok_or_else(|| "no config_groups".to_owned())
}

/// Whether a `transform_config` has transforms.
fn is_a_transform(config: &Value) -> bool {
    let is_empty = |value: &Value| value.is_null() || value.as_object().is_some_and(Map::is_empty);
    match config.as_object() {
        Some(fields) => !fields.iter().all(|(name, value)| name == "config_groups" && is_empty(value)),
        None => !config.is_null(),
    }
}

fn compressed_floats(weights: &Value) -> Result<QuantScheme, String> {
    only(weights, "num_bits", &json!(8))?;
    only(weights, "type", &json!("float"))?;
    absent_or(weights, "symmetric", &json!(true))?;
    match weights.get("strategy").and_then(Value::as_str).unwrap_or("unnamed") {
        "tensor" | "channel" => {}
        "block" => only(weights, "block_structure", &json!([fp8::BLOCK, fp8::BLOCK]))?,
        other => return Err(format!("strategy {other}")),
    }
    Ok(QuantScheme::Fp8)
}

fn compressed_integers(weights: &Value) -> Result<QuantScheme, String> {
    only(weights, "num_bits", &json!(4))?;
    only(weights, "type", &json!("int"))?;
    let group = match weights.get("strategy").and_then(Value::as_str).unwrap_or("unnamed") {
        "channel" => None,
        "group" => group(weights)?,
        other => return Err(format!("strategy {other}")),
    };
    let layout = match weights.get("symmetric").and_then(Value::as_bool) {
        Some(false) => Int4Layout::CompressedZeros,
        Some(true) | None => Int4Layout::Compressed,
    };
    Ok(QuantScheme::Int4 { layout, group })
}

/// Inputs of a group; -1 means all.
fn group(config: &Value) -> Result<Option<usize>, String> {
    let name = if config.get("group_size").is_some() { "group_size" } else { "q_group_size" };
    let value = config.get(name).unwrap_or(&Value::Null);
    match (value.as_i64(), value.as_u64()) {
        (Some(-1), _) => Ok(None),
        (_, Some(size)) if (1..=MAX_GROUP).contains(&size) => Ok(Some(size as usize)),
        _ => Err(format!("{name} {value}")),
    }
}

/// Accepts one value of a field only.
fn only(config: &Value, name: &str, wanted: &Value) -> Result<(), String> {
    match config.get(name).unwrap_or(&Value::Null) {
        value if value == wanted => Ok(()),
        value => Err(format!("{name} {value}")),
    }
}

/// Accepts one value of a field, or none.
fn absent_or(config: &Value, name: &str, wanted: &Value) -> Result<(), String> {
    match config.get(name) {
        None | Some(Value::Null) => Ok(()),
        Some(_) => only(config, name, wanted),
    }
}

#[cfg(test)]
mod tests;
