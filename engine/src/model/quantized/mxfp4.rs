//! Matrices of 4-bit floats in blocks of 32 with a power of two each: MXFP4, in which gpt-oss has its experts.
//!
//! One tensor has the matrices of all experts, and another their scales:
//!
//! ```text
//! NAME_blocks   [experts][outputs][inputs / 32][16]   two values to a byte, the first in the lower half
//! NAME_scales   [experts][outputs][inputs / 32]       the exponent of a power of two, plus 127
//! ```
//!
//! A value is one f32 product, of a float (E2M1) and the power. It is exact, or infinite beyond f32, and bf16 has every
//! such value too. The scale 255 is NaN. Source: Open Compute Project, Microscaling Formats (MX) 1.0.

use safetensors::Dtype;

use super::TensorPart;

/// Values with a common scale.
const BLOCK: usize = 32;
/// The floats of the sixteen codes.
const FLOATS: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The matrices of all experts, `[experts, outputs, inputs]`.
#[derive(Clone)]
pub(in crate::model) struct Mxfp4Matrix<'a> {
    blocks: &'a [u8],
    scales: &'a [u8],
}

impl<'a> Mxfp4Matrix<'a> {
    /// Finds the matrices `name`, in a checkpoint of floats a tensor `[experts, inputs, outputs]`. `None` if they have
    /// no blocks.
    pub(super) fn find(
        name: &str,
        shape: &[usize],
        part: &dyn Fn(&str) -> Option<TensorPart<'a>>,
    ) -> Option<Result<Self, String>> {
        let &[experts, inputs, outputs] = shape else { return None };
        let blocks = part(&format!("{name}_blocks"))?;
        if !inputs.is_multiple_of(BLOCK) {
            return Some(Err(format!("{name}_blocks: {inputs} inputs are not whole blocks of {BLOCK}")));
        }
        let of_expert = inputs / BLOCK;
        let blocks = checked(name, "blocks", Some(blocks), &[experts, outputs, of_expert, BLOCK / 2]);
        let scales = part(&format!("{name}_scales"));
        Some(blocks.and_then(|blocks| {
            let scales = checked(name, "scales", scales, &[experts, outputs, of_expert])?;
            Ok(Self { blocks, scales })
        }))
    }

    pub(super) fn bytes(&self) -> usize {
        self.blocks.len() + self.scales.len()
    }

    pub(super) fn read_f32(&self, start: usize, out: &mut [f32]) {
        for (at, out) in (start..).zip(out.iter_mut()) {
            *out = self.value(at);
        }
    }

    /// The same values in bf16, which is exact.
    pub(in crate::model) fn read_bf16_bits(&self, start: usize, out: &mut [u16]) {
        for (at, out) in (start..).zip(out.iter_mut()) {
            *out = (self.value(at).to_bits() >> 16) as u16;
        }
    }

    #[inline(always)]
    fn value(&self, at: usize) -> f32 {
        let code = (self.blocks[at / 2] >> (4 * (at % 2))) & 15;
        FLOATS[usize::from(code)] * power(self.scales[at / BLOCK])
    }
}

/// The bytes of a part of this shape.
fn checked<'a>(
    name: &str,
    suffix: &str,
    part: Option<TensorPart<'a>>,
    wanted: &[usize],
) -> Result<&'a [u8], String> {
    match part {
        Some((Dtype::U8, shape, bytes)) if shape == wanted => Ok(bytes),
        Some((dtype, shape, _)) => {
            Err(format!("tensor {name}_{suffix} is {dtype:?} of shape {shape:?}, not U8 of shape {wanted:?}"))
        }
        None => Err(format!("tensor {name}_{suffix} is missing")),
    }
}

/// Two to the power `scale - 127`.
fn power(scale: u8) -> f32 {
    match scale {
        u8::MAX => f32::NAN,
        // Half of the smallest normal number.
        0 => f32::from_bits(1 << 22),
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::quantized::QuantScheme;

    const NAME: &str = "mlp.experts.down_proj";
    const BLOCKS: &[u8] = &[0x21; 2 * 3 * 2 * 16];
    const SCALES: &[u8] = &[127; 2 * 3 * 2];
    const SHAPE_OF_BLOCKS: &[usize] = &[2, 3, 2, 16];
    const SHAPE_OF_SCALES: &[usize] = &[2, 3, 2];
    const WRONG_SHAPE: &[usize] = &[2, 3, 32];

    #[test]
    fn every_code_times_every_power_is_exact() {
        // Each byte has two codes: 2 c + 1 above 2 c.
        let blocks: Vec<u8> = (0..=255).flat_map(|_| (0..16_u8).map(|c| c % 8 * 0x22 + 0x10)).collect();
        let scales: Vec<u8> = (0..=255).collect();
        let matrix = Mxfp4Matrix { blocks: &blocks, scales: &scales };
        let mut values = vec![0.0; 256 * BLOCK];
        matrix.read_f32(0, &mut values);
        for (at, value) in values.iter().enumerate() {
            let (scale, code) = (at / BLOCK, at % 16);
            // Sign, two bits of exponent with bias 1, one bit of fraction; exact in f64.
            let (exponent, fraction) = (code >> 1 & 3, (code & 1) as f64);
            let magnitude = match exponent {
                0 => fraction / 2.0,
                1 => 1.0 + fraction / 2.0,
                2 => 2.0 + fraction,
                _ => 4.0 + 2.0 * fraction,
            };
            let exact = magnitude * 2.0_f64.powi(scale as i32 - 127);
            match scale {
                255 => assert!(value.is_nan()),
                _ if exact > f64::from(f32::MAX) => assert!(value.is_infinite()),
                _ => assert_eq!(f64::from(value.abs()), exact, "code {code}, scale {scale}"),
            }
            assert!(value.is_nan() || value.is_sign_negative() == (code >= 8));
        }
        // A part that begins in the middle of a byte, and ends in another block.
        let mut part = [0.0; 40];
        matrix.read_f32(100 * BLOCK + 3, &mut part);
        assert_eq!(part, values[100 * BLOCK + 3..][..40]);
        let mut bits = vec![0; 256 * BLOCK];
        matrix.read_bf16_bits(0, &mut bits);
        for (bits, value) in bits.into_iter().zip(values) {
            let widened = half::bf16::from_bits(bits).to_f32();
            assert!(widened == value || widened.is_nan() && value.is_nan(), "{value}");
        }
    }

    /// The matrices of 2 experts, 64 inputs and 3 outputs, with one of the parts changed.
    fn found(changed: &str, part: Option<TensorPart<'static>>) -> Option<Result<usize, String>> {
        let find = |name: &str| match name {
            _ if name == changed => part,
            "mlp.experts.down_proj_blocks" => Some((Dtype::U8, SHAPE_OF_BLOCKS, BLOCKS)),
            "mlp.experts.down_proj_scales" => Some((Dtype::U8, SHAPE_OF_SCALES, SCALES)),
            _ => None,
        };
        let found = QuantScheme::Mxfp4.matrix(NAME, &[2, 64, 3], &find)?;
        Some(found.map(|matrix| {
            let mut values = [0.0; 2];
            matrix.read_f32(0, &mut values);
            assert_eq!(values, [0.5, 1.0]);
            matrix.bytes()
        }))
    }

    #[test]
    fn parts_that_do_not_fit_the_experts_are_refused() {
        assert_eq!(found("", None), Some(Ok(BLOCKS.len() + SCALES.len())));
        // Without blocks the tensor is one of floats.
        assert_eq!(found("mlp.experts.down_proj_blocks", None), None);
        for (name, part, words) in [
            ("mlp.experts.down_proj_scales", None, "scales is missing"),
            ("mlp.experts.down_proj_scales", Some((Dtype::U8, WRONG_SHAPE, BLOCKS)), "[2, 3, 2]"),
            ("mlp.experts.down_proj_blocks", Some((Dtype::U8, WRONG_SHAPE, BLOCKS)), "[2, 3, 2, 16]"),
            ("mlp.experts.down_proj_blocks", Some((Dtype::I8, SHAPE_OF_BLOCKS, BLOCKS)), "I8"),
        ] {
            let error = found(name, part).expect("blocks").expect_err(words);
            assert!(error.contains(words), "{error}");
        }
        let blocks = |name: &str| name.ends_with("_blocks").then_some((Dtype::U8, SHAPE_OF_BLOCKS, BLOCKS));
        let uneven = QuantScheme::Mxfp4.matrix(NAME, &[2, 48, 3], &blocks).expect("blocks").map(|_| ());
        assert!(uneven.expect_err("no whole blocks").contains("48 inputs"));
        // Only experts have the format.
        assert!(QuantScheme::Mxfp4.matrix("self_attn.o_proj.weight", &[64, 64], &blocks).is_none());
    }
}
