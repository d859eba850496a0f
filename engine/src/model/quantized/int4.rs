//! Matrices of 4-bit integers with a scale and a zero point for each group of inputs: GPTQ, AWQ and compressed-tensors.
//!
//! A value is one f32 product: the integer minus the zero point, times the scale. The scale is f16 or bf16 in the file,
//! so the product is exact.
//!
//! Integers are packed eight to a word of 32 bits:
//!
//! ```text
//!                     integers                              zero points            scales
//! GPTQ                [inputs / 8][outputs]                 [groups][outputs / 8]  [groups][outputs]
//! AWQ                 [inputs][outputs / 8] in its order    the same, in its order [groups][outputs]
//! compressed-tensors  [outputs][inputs / 8]                 [outputs / 8][groups]  [outputs][groups]
//! ```

use safetensors::Dtype;

use super::TensorPart;
use super::fp8::scales;
use super::groups::{GROUP, IntegerForm, IntegerGroup, IntegerKind};

/// Integers of a word.
const PACKED: usize = 8;
/// Position in a word of each of eight outputs, in AWQ.
const AWQ_ORDER: [usize; PACKED] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Order of the integers, and the meaning of the zero points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum Int4Layout {
    /// GPTQ as AutoGPTQ writes it: zero points are stored minus one, modulo 16.
    Gptq,
    /// GPTQ with zero points as they are.
    GptqV2,
    /// AWQ in the order of its GEMM kernel.
    Awq,
    /// compressed-tensors without zero points: each is 8.
    Compressed,
    /// compressed-tensors with zero points.
    CompressedZeros,
}

impl Int4Layout {
    /// Names of integers, zero points, scales and groups behind the matrix's prefix.
    fn names(self) -> [&'static str; 4] {
        match self {
            Self::Gptq | Self::GptqV2 | Self::Awq => ["qweight", "qzeros", "scales", "g_idx"],
            Self::Compressed | Self::CompressedZeros => {
                ["weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"]
            }
        }
    }

    /// Name of the integers behind the matrix's prefix.
    pub(super) fn quants(self) -> &'static str {
        self.names()[0]
    }
}

/// A matrix with its scales and zero points.
#[derive(Clone)]
pub(in crate::model) struct Int4Matrix<'a> {
    layout: Int4Layout,
    rows: usize,
    columns: usize,
    quants: &'a [u8],
    zeros: Option<&'a [u8]>,
    /// In the order of the file.
    scales: Vec<f32>,
    /// Number of groups.
    count: usize,
    groups: InputGroups,
}

/// The group of an input.
#[derive(Clone)]
enum InputGroups {
    /// Groups of consecutive inputs.
    Even(usize),
    /// One entry for each input, in the order of the activations (`desc_act`).
    Listed(Vec<usize>),
}

impl<'a> Int4Matrix<'a> {
    /// Finds zero points, scales and groups of the matrix `{prefix}weight`, and checks all sizes.
    pub(super) fn new(
        prefix: &str,
        (rows, columns): (usize, usize),
        layout: Int4Layout,
        group: usize,
        quants: TensorPart<'a>,
        part: &dyn Fn(&str) -> Option<TensorPart<'a>>,
    ) -> Result<Self, String> {
        let [quants_name, zeros_name, scales_name, groups_name] = layout.names();
        let find = |name: &str| part(&format!("{prefix}{name}"));
        let needed = |name: &str| find(name).ok_or_else(|| format!("tensor {prefix}{name} is missing"));
        let packed = |name: &str, found: TensorPart<'a>, wanted: [usize; 2]| match found {
            (Dtype::I32, shape, bytes) if shape == wanted => Ok(bytes),
            (dtype, shape, _) => Err(format!(
                "tensor {prefix}{name} is {dtype:?} of shape {shape:?}, not I32 of shape {wanted:?}"
            )),
        };
        if !rows.is_multiple_of(PACKED) || !columns.is_multiple_of(PACKED) || !columns.is_multiple_of(group) {
            return Err(format!(
                "{prefix}{quants_name}: {rows} by {columns} values are not whole words and groups of {group}"
            ));
        }
        let (count, words) = (columns / group, rows / PACKED);
        let (of_quants, of_zeros, of_scales) = match layout {
            Int4Layout::Gptq | Int4Layout::GptqV2 => {
                ([columns / PACKED, rows], [count, words], [count, rows])
            }
            Int4Layout::Awq => ([columns, words], [count, words], [count, rows]),
            Int4Layout::Compressed | Int4Layout::CompressedZeros => {
                ([rows, columns / PACKED], [words, count], [rows, count])
            }
        };
        let quants = packed(quants_name, quants, of_quants)?;
        let zeros = if layout == Int4Layout::Compressed { None } else { Some(needed(zeros_name)?) };
        let zeros = zeros.map(|zeros| packed(zeros_name, zeros, of_zeros)).transpose()?;
        let (dtype, shape, bytes) = needed(scales_name)?;
        if shape != of_scales {
            return Err(format!("tensor {prefix}{scales_name} has shape {shape:?}, not {of_scales:?}"));
        }
        let scales = scales(dtype, bytes)
            .ok_or_else(|| format!("tensor {prefix}{scales_name} is of type {dtype:?}"))?;
        let groups = match find(groups_name).filter(|_| layout != Int4Layout::Awq) {
            None => InputGroups::Even(group),
            Some(found) => {
                let name = format!("{prefix}{groups_name}");
                InputGroups::Listed(listed_groups(&name, found, columns, count)?)
            }
        };
        Ok(Self { layout, rows, columns, quants, zeros, scales, count, groups })
    }

    pub(super) fn bytes(&self) -> usize {
        self.quants.len()
    }

    /// How the integers are grouped. `None` if a group of the file is not whole groups of consecutive inputs.
    pub(super) fn integer_form(&self) -> Option<IntegerForm> {
        match self.groups {
            InputGroups::Even(group) if group.is_multiple_of(GROUP) => {
                Some(IntegerForm { kind: IntegerKind::Zero4, span: group / GROUP })
            }
            InputGroups::Even(_) | InputGroups::Listed(_) => None,
        }
    }

    /// The group that begins at element `start`, a multiple of 32 like the columns.
    pub(super) fn read_group(&self, start: usize) -> IntegerGroup {
        let mut group = IntegerGroup::default();
        for (at, quant) in (start..).zip(&mut group.quants) {
            let (integer, zero, scale) = self.element(at);
            *quant = integer.cast_signed();
            (group.offset, group.factor) = (zero, scale);
        }
        group
    }

    pub(super) fn read_f32(&self, start: usize, out: &mut [f32]) {
        for (at, out) in (start..).zip(out.iter_mut()) {
            let (quant, zero, scale) = self.element(at);
            *out = (f32::from(quant) - f32::from(zero)) * scale;
        }
    }

    /// Integer, zero point and scale of an element.
    fn element(&self, at: usize) -> (u8, u8, f32) {
        let (output, input) = (at / self.columns, at % self.columns);
        assert!(output < self.rows, "an element of the matrix");
        let group = match &self.groups {
            InputGroups::Even(group) => input / group,
            InputGroups::Listed(groups) => groups[input],
        };
        let words = self.rows / PACKED;
        let (word, lane) = (output / PACKED, output % PACKED);
        // Positions of integer, zero point and scale.
        let (quant, zero, scale) = match self.layout {
            Int4Layout::Gptq | Int4Layout::GptqV2 => (
                (input / PACKED * self.rows + output, input % PACKED),
                (group * words + word, lane),
                group * self.rows + output,
            ),
            Int4Layout::Awq => (
                (input * words + word, AWQ_ORDER[lane]),
                (group * words + word, AWQ_ORDER[lane]),
                group * self.rows + output,
            ),
            Int4Layout::Compressed | Int4Layout::CompressedZeros => (
                (output * (self.columns / PACKED) + input / PACKED, input % PACKED),
                (word * self.count + group, lane),
                output * self.count + group,
            ),
        };
        let zero = match (self.zeros, self.layout) {
            (None, _) => 8,
            (Some(zeros), Int4Layout::Gptq) => (nibble(zeros, zero) + 1) & 15,
            (Some(zeros), _) => nibble(zeros, zero),
        };
        (nibble(self.quants, quant), zero, self.scales[scale])
    }
}

/// The group of each input, checked.
fn listed_groups(
    name: &str,
    (dtype, shape, bytes): TensorPart<'_>,
    columns: usize,
    groups: usize,
) -> Result<Vec<usize>, String> {
    if dtype != Dtype::I32 || shape != [columns] {
        return Err(format!("tensor {name} is {dtype:?} of shape {shape:?}, not I32 of shape [{columns}]"));
    }
    let group =
        |raw: &[u8; 4]| usize::try_from(i32::from_le_bytes(*raw)).ok().filter(|group| *group < groups);
    let listed: Option<Vec<usize>> = bytes.as_chunks::<4>().0.iter().map(group).collect();
    listed.ok_or_else(|| format!("tensor {name} names a group beyond the {groups} groups"))
}

/// One of eight integers of a little-endian word.
fn nibble(words: &[u8], (word, lane): (usize, usize)) -> u8 {
    (words[word * 4 + lane / 2] >> (4 * (lane % 2))) & 15
}
