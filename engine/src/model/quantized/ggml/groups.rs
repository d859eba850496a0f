//! The integers of GGUF's types in groups of 32, without a conversion to f32.

use super::{
    BLOCK, GgmlType, IQ4_VALUES, SUPER_BLOCK, SubBlockScales, bit_pair, fifth_bit, half_at, nibble, word_at,
};
use crate::model::quantized::groups::{GROUP, IntegerForm, IntegerGroup, IntegerKind};

const _: () = assert!(GROUP == BLOCK);

impl GgmlType {
    /// How the integers of this type are grouped. `None` for floats, and for Q2_K, which has minima for 16 values.
    pub(in crate::model) fn integer_form(self) -> Option<IntegerForm> {
        let (kind, span) = match self {
            Self::Q8_0 | Self::Q5_0 | Self::Iq4Nl => (IntegerKind::Plain8, 1),
            Self::Q4_0 => (IntegerKind::Zero4, 1),
            Self::Q4_1 => (IntegerKind::Minimum4, 1),
            Self::Q5_1 => (IntegerKind::Minimum8, 1),
            Self::Q4K => (IntegerKind::Minimum4, SUPER_BLOCK / GROUP),
            Self::Q5K => (IntegerKind::Minimum8, SUPER_BLOCK / GROUP),
            Self::Q3K | Self::Q6K | Self::Iq4Xs => (IntegerKind::Halves8, SUPER_BLOCK / GROUP),
            Self::F32 | Self::F16 | Self::Bf16 | Self::Q2K => return None,
        };
        Some(IntegerForm { kind, span })
    }

    /// The group that begins at value `start` of a tensor, a multiple of 32.
    ///
    /// # Panics
    /// When the group is outside the tensor, or the type has no integers.
    pub(in crate::model) fn read_group(self, bytes: &[u8], start: usize) -> IntegerGroup {
        let (len, size) = (self.block_len(), self.block_bytes());
        let raw = &bytes[start / len * size..][..size];
        let index = start % len / GROUP;
        let mut group = IntegerGroup { factor: half_at(raw, 0), ..IntegerGroup::default() };
        let quants = &mut group.quants;
        match self {
            Self::Q8_0 => fill(quants, |value| raw[2 + value].cast_signed()),
            Self::Q4_0 => {
                fill(quants, |value| nibble(raw[2 + value % 16], value / 16).cast_signed());
                group.offset = 8;
            }
            Self::Iq4Nl => fill(quants, |value| iq4(nibble(raw[2 + value % 16], value / 16))),
            Self::Q5_0 => {
                let high = word_at(raw, 2);
                fill(quants, |value| {
                    (nibble(raw[6 + value % 16], value / 16) | fifth_bit(high, value)).cast_signed() - 16
                });
            }
            Self::Q4_1 => {
                fill(quants, |value| nibble(raw[4 + value % 16], value / 16).cast_signed());
                (group.minimum_factor, group.offset) = (-half_at(raw, 2), 1);
            }
            Self::Q5_1 => {
                let high = word_at(raw, 4);
                fill(quants, |value| {
                    (nibble(raw[8 + value % 16], value / 16) | fifth_bit(high, value)).cast_signed()
                });
                (group.minimum_factor, group.offset) = (-half_at(raw, 2), 1);
            }
            Self::Q4K => {
                fill(quants, |value| nibble(raw[16 + index / 2 * BLOCK + value], index).cast_signed());
                with_minimum(&mut group, raw, index);
            }
            Self::Q5K => {
                fill(quants, |value| {
                    let bit = ((raw[16 + value] >> index) & 1) << 4;
                    (nibble(raw[16 + BLOCK + index / 2 * BLOCK + value], index) | bit).cast_signed()
                });
                with_minimum(&mut group, raw, index);
            }
            Self::Q6K => q6k(&mut group, raw, index),
            Self::Q3K => q3k(&mut group, raw, index),
            Self::Iq4Xs => {
                fill(quants, |value| iq4(nibble(raw[8 + index * 16 + value % 16], value / 16)));
                let high = u16::from_le_bytes([raw[2], raw[3]]) >> (2 * index);
                let upper = (high & 3).to_le_bytes()[0] << 4;
                group.scales = [(nibble(raw[4 + index / 2], index) | upper).cast_signed() - 32; 2];
            }
            Self::F32 | Self::F16 | Self::Bf16 | Self::Q2K => panic!("a type with integers"),
        }
        group
    }
}

fn fill(quants: &mut [i8; GROUP], quant: impl Fn(usize) -> i8) {
    for (value, out) in quants.iter_mut().enumerate() {
        *out = quant(value);
    }
}

/// The value that 4 bits select, a whole number.
fn iq4(bits: u8) -> i8 {
    IQ4_VALUES[usize::from(bits)] as i8
}

/// Scale and minimum of a sub-block.
fn with_minimum(group: &mut IntegerGroup, raw: &[u8], index: usize) {
    let scales = SubBlockScales::read(raw);
    let (scale, minimum) = scales.integers(index);
    (group.scales, group.offset) = ([scale.cast_signed(); 2], minimum);
    (group.factor, group.minimum_factor) = (scales.factor, scales.minimum_factor);
}

fn q6k(group: &mut IntegerGroup, raw: &[u8], index: usize) {
    let (half, part) = (index / 4, index % 4);
    fill(&mut group.quants, |lane| {
        let pair = raw[half * 64 + part % 2 * BLOCK + lane];
        let bits = (raw[128 + half * BLOCK + lane] >> (2 * part)) & 3;
        (nibble(pair, part / 2) | (bits << 4)).cast_signed() - 32
    });
    group.scales = [0, 1].map(|sub| raw[192 + 2 * index + sub].cast_signed());
    group.factor = half_at(raw, 208);
}

fn q3k(group: &mut IntegerGroup, raw: &[u8], index: usize) {
    fill(&mut group.quants, |lane| {
        let is_set = (raw[lane] >> index) & 1 == 1;
        bit_pair(&raw[32..96], index * GROUP + lane).cast_signed() - if is_set { 0 } else { 4 }
    });
    group.scales = [0, 1].map(|sub| {
        let sub = 2 * index + sub;
        let upper = (raw[104 + sub % 4] >> (2 * (sub / 4))) & 3;
        (nibble(raw[96 + sub % 8], sub / 8) | (upper << 4)).cast_signed() - 32
    });
    group.factor = half_at(raw, 108);
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPES: [GgmlType; 11] = [
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q8_0,
        GgmlType::Q3K,
        GgmlType::Q4K,
        GgmlType::Q5K,
        GgmlType::Q6K,
        GgmlType::Iq4Nl,
        GgmlType::Iq4Xs,
    ];

    #[test]
    fn the_integers_of_every_type_give_the_bits_of_its_conversion() {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut byte = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        };
        for kind in TYPES {
            let blocks = 40;
            let mut bytes: Vec<u8> = (0..blocks * kind.block_bytes()).map(|_| byte()).collect();
            // Finite factors, wherever they are: no f16 has both of these bits of its exponent.
            for raw in bytes.chunks_exact_mut(kind.block_bytes()) {
                let last = raw.len();
                for at in [1, 3, last - 1] {
                    raw[at] &= 0b1011_1111;
                }
            }
            let form = kind.integer_form().expect("integers");
            let mut values = vec![0.0; blocks * kind.block_len()];
            kind.read_f32(&bytes, 0, &mut values);
            for (number, values) in values.chunks_exact(GROUP).enumerate() {
                let group = kind.read_group(&bytes, number * GROUP);
                for (input, value) in values.iter().enumerate() {
                    let ours = group.value(form.kind, input);
                    assert!(ours == *value, "{kind:?}, group {number}, input {input}: {ours}, not {value}");
                }
            }
        }
    }
}
