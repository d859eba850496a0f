//! Matrices of 8-bit floats (E4M3) with scales: one for the matrix, one for each output, or one for each block.
//!
//! A value is one f32 product: the float, which f32 represents exactly, times its scale. Scales of activations are not
//! used, because activations stay f32 or bf16.

use half::{bf16, f16};
use safetensors::Dtype;

use super::TensorPart;

/// Side of a block, in DeepSeek's and Qwen's checkpoints.
pub(super) const BLOCK: usize = 128;

/// A matrix and its scales.
#[derive(Clone)]
pub(in crate::model) struct Fp8Matrix<'a> {
    columns: usize,
    values: &'a [u8],
    scales: Vec<f32>,
    /// Scales of a row of blocks.
    scales_per_row: usize,
    block_rows: usize,
    block_columns: usize,
}

impl<'a> Fp8Matrix<'a> {
    /// Finds the scales of the matrix `{prefix}weight`.
    pub(super) fn new(
        prefix: &str,
        (rows, columns): (usize, usize),
        values: &'a [u8],
        part: &dyn Fn(&str) -> Option<TensorPart<'a>>,
    ) -> Result<Self, String> {
        // The first name is DeepSeek's, and means the factor of the stored value too.
        let names = ["weight_scale_inv", "weight_scale"].map(|name| format!("{prefix}{name}"));
        let found = names.iter().find_map(|name| part(name).map(|found| (name, found)));
        let (name, (dtype, shape, bytes)) = found.ok_or_else(|| format!("tensor {} is missing", names[1]))?;
        let blocks = [rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)];
        let (block_rows, block_columns, scales_per_row) = match shape {
            [] | [1] | [1, 1] => (rows, columns, 1),
            [outputs] | [outputs, 1] if *outputs == rows => (1, columns, 1),
            shape if shape == blocks => (BLOCK, BLOCK, blocks[1]),
            other => return Err(format!("tensor {name} has shape {other:?} for {rows} by {columns} values")),
        };
        let scales = scales(dtype, bytes).ok_or_else(|| format!("tensor {name} is of type {dtype:?}"))?;
        Ok(Self { columns, values, scales, scales_per_row, block_rows, block_columns })
    }

    pub(super) fn bytes(&self) -> usize {
        self.values.len()
    }

    pub(super) fn read_f32(&self, start: usize, out: &mut [f32]) {
        let values = &self.values[start..start + out.len()];
        for (at, (out, value)) in (start..).zip(out.iter_mut().zip(values)) {
            let (row, column) = (at / self.columns, at % self.columns);
            let scale = row / self.block_rows * self.scales_per_row + column / self.block_columns;
            *out = e4m3(*value) * self.scales[scale];
        }
    }
}

/// The values of a tensor of scales. `None` for another type.
pub(super) fn scales(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    let pairs = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        Dtype::F32 => Some(bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()),
        Dtype::F16 => Some(pairs().map(|raw| f16::from_le_bytes(*raw).to_f32()).collect()),
        Dtype::BF16 => Some(pairs().map(|raw| bf16::from_le_bytes(*raw).to_f32()).collect()),
        _ => None,
    }
}

/// An E4M3 float: sign, 4 bits of exponent with bias 7, 3 bits of fraction. No infinities; all ones is NaN.
fn e4m3(bits: u8) -> f32 {
    let (exponent, fraction) = ((bits >> 3) & 15, bits & 7);
    let magnitude = match (exponent, fraction) {
        (15, 7) => f32::NAN,
        // Multiples of 2^-9.
        (0, fraction) => f32::from(fraction) / 512.0,
        (exponent, fraction) => {
            f32::from_bits(((u32::from(exponent) + 120) << 23) | (u32::from(fraction) << 20))
        }
    };
    if bits & 128 == 0 { magnitude } else { -magnitude }
}
