//! Element types of GGUF tensors, and their conversion to f32.
//!
//! A quantized type divides a row into blocks of 32 or 256 values. A block contains its scales as f16 and small
//! integers. The definition of each type is that of ggml (`ggml-quants.c`): scales are widened to f32, a scale of a
//! sub-block is one f32 product, and a value is one f32 product, and one subtraction or addition where the type has a
//! minimum. The results equal those of the `gguf` Python package bit for bit.

mod groups;

use half::{bf16, f16};

/// Values of a K-quant's block.
const SUPER_BLOCK: usize = 256;
/// Values of the other blocks, and of a sub-block of Q4_K and Q5_K.
const BLOCK: usize = 32;

/// Element type of a GGUF tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum GgmlType {
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// bfloat16.
    Bf16,
    /// 4 bits and a scale.
    Q4_0,
    /// 4 bits, a scale and a minimum.
    Q4_1,
    /// 5 bits and a scale.
    Q5_0,
    /// 5 bits, a scale and a minimum.
    Q5_1,
    /// 8 bits and a scale.
    Q8_0,
    /// 2 bits, with scales and minima of 4 bits.
    Q2K,
    /// 3 bits, with scales of 6 bits.
    Q3K,
    /// 4 bits, with scales and minima of 6 bits.
    Q4K,
    /// 5 bits, with scales and minima of 6 bits.
    Q5K,
    /// 6 bits, with scales of 8 bits.
    Q6K,
    /// 4 bits that select one of 16 values, and a scale.
    Iq4Nl,
    /// The same, with scales of 6 bits.
    Iq4Xs,
}

/// Types that are refused, for messages: number in the file and name.
const OTHER_TYPES: [(u32, &str); 19] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

impl GgmlType {
    /// The types that can be read, for refusals.
    pub(in crate::model) const SUPPORTED: &str = "supported: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS";

    /// The type of a number in a file.
    ///
    /// # Errors
    /// The name of a type that is not supported, or its number.
    pub(in crate::model) fn of(id: u32) -> Result<Self, String> {
        match id {
            0 => Ok(Self::F32),
            1 => Ok(Self::F16),
            2 => Ok(Self::Q4_0),
            3 => Ok(Self::Q4_1),
            6 => Ok(Self::Q5_0),
            7 => Ok(Self::Q5_1),
            8 => Ok(Self::Q8_0),
            10 => Ok(Self::Q2K),
            11 => Ok(Self::Q3K),
            12 => Ok(Self::Q4K),
            13 => Ok(Self::Q5K),
            14 => Ok(Self::Q6K),
            20 => Ok(Self::Iq4Nl),
            23 => Ok(Self::Iq4Xs),
            30 => Ok(Self::Bf16),
            other => {
                let named = OTHER_TYPES.iter().find(|(id, _)| *id == other);
                Err(named.map_or_else(|| format!("number {other}"), |(_, name)| (*name).to_owned()))
            }
        }
    }

    /// Values of one block.
    pub(in crate::model) fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Iq4Nl => BLOCK,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => SUPER_BLOCK,
        }
    }

    /// Bytes of one block.
    pub(in crate::model) fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Iq4Xs => 136,
        }
    }

    /// Values `start .. start + out.len()` of a tensor, whose rows are whole blocks.
    ///
    /// # Panics
    /// When the range is outside the tensor.
    pub(in crate::model) fn read_f32(self, bytes: &[u8], start: usize, out: &mut [f32]) {
        let (len, size) = (self.block_len(), self.block_bytes());
        let mut block = [0.0; SUPER_BLOCK];
        let (mut at, mut out) = (start, out);
        while !out.is_empty() {
            let (index, skipped) = (at / len, at % len);
            let raw = &bytes[index * size..(index + 1) * size];
            let now = (len - skipped).min(out.len());
            let (head, rest) = std::mem::take(&mut out).split_at_mut(now);
            if now == len {
                self.decode(raw, head);
            } else {
                self.decode(raw, &mut block[..len]);
                head.copy_from_slice(&block[skipped..skipped + now]);
            }
            out = rest;
            at += now;
        }
    }

    /// Converts one block.
    fn decode(self, raw: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => out[0] = f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]),
            Self::F16 => out[0] = half_at(raw, 0),
            Self::Bf16 => out[0] = bf16::from_le_bytes([raw[0], raw[1]]).to_f32(),
            Self::Q8_0 => {
                let scale = half_at(raw, 0);
                for (out, quant) in out.iter_mut().zip(&raw[2..]) {
                    *out = f32::from(quant.cast_signed()) * scale;
                }
            }
            Self::Q4_0 => {
                let scale = half_at(raw, 0);
                nibbles(&raw[2..], out, |_, quant| scale * (f32::from(quant) - 8.0));
            }
            Self::Q4_1 => {
                let (scale, minimum) = (half_at(raw, 0), half_at(raw, 2));
                nibbles(&raw[4..], out, |_, quant| scale * f32::from(quant) + minimum);
            }
            Self::Q5_0 => {
                let (scale, high) = (half_at(raw, 0), word_at(raw, 2));
                nibbles(&raw[6..], out, |index, quant| {
                    scale * (f32::from(quant | fifth_bit(high, index)) - 16.0)
                });
            }
            Self::Q5_1 => {
                let (scale, minimum, high) = (half_at(raw, 0), half_at(raw, 2), word_at(raw, 4));
                nibbles(&raw[8..], out, |index, quant| {
                    scale * f32::from(quant | fifth_bit(high, index)) + minimum
                });
            }
            Self::Q4K => {
                let scales = SubBlockScales::read(raw);
                for (index, out) in out.chunks_exact_mut(BLOCK).enumerate() {
                    let (scale, minimum) = scales.of(index);
                    let quants = &raw[16 + index / 2 * BLOCK..][..BLOCK];
                    for (out, pair) in out.iter_mut().zip(quants) {
                        *out = scale * f32::from(nibble(*pair, index)) - minimum;
                    }
                }
            }
            Self::Q5K => {
                let scales = SubBlockScales::read(raw);
                let high = &raw[16..16 + BLOCK];
                for (index, out) in out.chunks_exact_mut(BLOCK).enumerate() {
                    let (scale, minimum) = scales.of(index);
                    let quants = &raw[16 + BLOCK + index / 2 * BLOCK..][..BLOCK];
                    for ((out, pair), bits) in out.iter_mut().zip(quants).zip(high) {
                        let quant = nibble(*pair, index) | (((bits >> index) & 1) << 4);
                        *out = scale * f32::from(quant) - minimum;
                    }
                }
            }
            Self::Q2K => decode_q2k(raw, out),
            Self::Q3K => decode_q3k(raw, out),
            Self::Q6K => decode_q6k(raw, out),
            Self::Iq4Nl => {
                let scale = half_at(raw, 0);
                nibbles(&raw[2..], out, |_, quant| scale * IQ4_VALUES[usize::from(quant)]);
            }
            Self::Iq4Xs => decode_iq4xs(raw, out),
        }
    }
}

/// The values that 4 bits select in IQ4_NL and IQ4_XS.
const IQ4_VALUES: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

/// 16 bytes of scales and minima, 64 bytes of bit pairs, and their f16 factors.
fn decode_q2k(raw: &[u8], out: &mut [f32]) {
    let (factor, minimum_factor) = (half_at(raw, 80), half_at(raw, 82));
    for (index, out) in out.iter_mut().enumerate() {
        let scale = factor * f32::from(raw[index / 16] & 15);
        let minimum = minimum_factor * f32::from(raw[index / 16] >> 4);
        *out = scale * f32::from(bit_pair(&raw[16..80], index)) - minimum;
    }
}

/// 32 bytes of upper bits, 64 bytes of bit pairs, 12 bytes of scales, and their f16 factor.
fn decode_q3k(raw: &[u8], out: &mut [f32]) {
    let (low, high) = (&raw[96..104], &raw[104..108]);
    let factor = half_at(raw, 108);
    for (index, out) in out.iter_mut().enumerate() {
        let sub = index / 16;
        let upper = (high[sub % 4] >> (2 * (sub / 4))) & 3;
        let scale = nibble(low[sub % 8], sub / 8) | (upper << 4);
        let scale = factor * (f32::from(scale) - 32.0);
        // An upper bit that is not set means 4 less.
        let is_set = (raw[index % BLOCK] >> (index / BLOCK)) & 1 == 1;
        let quant = f32::from(bit_pair(&raw[32..96], index)) - if is_set { 0.0 } else { 4.0 };
        *out = scale * quant;
    }
}

/// An f16 factor, 16 and 32 bits of scales, and 128 bytes of nibbles.
fn decode_iq4xs(raw: &[u8], out: &mut [f32]) {
    let (factor, high) = (half_at(raw, 0), u16::from_le_bytes([raw[2], raw[3]]));
    for (index, out) in out.chunks_exact_mut(BLOCK).enumerate() {
        let upper = if (high >> (2 * index)) & 1 == 1 { 16 } else { 0 };
        let top = if (high >> (2 * index + 1)) & 1 == 1 { 32 } else { 0 };
        let scale = nibble(raw[4 + index / 2], index) | upper | top;
        let scale = factor * (f32::from(scale) - 32.0);
        let quants = &raw[8 + index * BLOCK / 2..][..BLOCK / 2];
        nibbles(quants, out, |_, quant| scale * IQ4_VALUES[usize::from(quant)]);
    }
}

/// Two bits of a value of a super-block: four groups of 32 values share 32 bytes.
fn bit_pair(packed: &[u8], index: usize) -> u8 {
    let (half, group, lane) = (index / 128, index / BLOCK % 4, index % BLOCK);
    (packed[half * BLOCK + lane] >> (2 * group)) & 3
}

/// 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales, and their common f16 factor.
fn decode_q6k(raw: &[u8], out: &mut [f32]) {
    let (low, rest) = raw.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, factor) = rest.split_at(16);
    let factor = half_at(factor, 0);
    for (index, out) in out.iter_mut().enumerate() {
        // Each half of 128 values has four groups of 32. Groups 0 and 2 share bytes, as do 1 and 3.
        let (half, group, lane) = (index / 128, index / BLOCK % 4, index % BLOCK);
        let pair = low[half * 64 + group % 2 * BLOCK + lane];
        let bits = (high[half * BLOCK + lane] >> (2 * group)) & 3;
        let quant = nibble(pair, group / 2) | (bits << 4);
        let scale = factor * f32::from(scales[index / 16].cast_signed());
        *out = scale * (f32::from(quant) - 32.0);
    }
}

/// Eight scales and eight minima of 6 bits each, in 12 bytes, with their f16 factors before them.
struct SubBlockScales<'a> {
    factor: f32,
    minimum_factor: f32,
    packed: &'a [u8],
}

impl<'a> SubBlockScales<'a> {
    fn read(raw: &'a [u8]) -> Self {
        Self { factor: half_at(raw, 0), minimum_factor: half_at(raw, 2), packed: &raw[4..16] }
    }

    /// Scale and minimum of one sub-block.
    fn of(&self, index: usize) -> (f32, f32) {
        let (scale, minimum) = self.integers(index);
        (self.factor * f32::from(scale), self.minimum_factor * f32::from(minimum))
    }

    /// Both without their factors. The last four have their upper two bits in the bytes of the first four.
    fn integers(&self, index: usize) -> (u8, u8) {
        let packed = self.packed;
        match index.checked_sub(4) {
            None => (packed[index] & 63, packed[index + 4] & 63),
            Some(upper) => (
                (packed[upper + 8] & 15) | ((packed[upper] >> 6) << 4),
                (packed[upper + 8] >> 4) | ((packed[upper + 4] >> 6) << 4),
            ),
        }
    }
}

/// The lower nibbles of 16 bytes, then the upper ones.
fn nibbles(packed: &[u8], out: &mut [f32], value: impl Fn(usize, u8) -> f32) {
    for (index, out) in out.iter_mut().enumerate() {
        *out = value(index, nibble(packed[index % 16], index / 16));
    }
}

/// The lower nibble for an even index, the upper one for an odd one.
fn nibble(pair: u8, index: usize) -> u8 {
    if index.is_multiple_of(2) { pair & 15 } else { pair >> 4 }
}

/// Bit `index` of a word, as bit 4 of a number.
fn fifth_bit(word: u32, index: usize) -> u8 {
    if (word >> index) & 1 == 1 { 16 } else { 0 }
}

fn half_at(raw: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([raw[at], raw[at + 1]]).to_f32()
}

fn word_at(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]])
}
