//! Activations rounded to 8 bits, for products with integers (`matrix::integer`).
//!
//! A group of 32 values of a row has one scale: the largest magnitude over 127. A value over its scale is rounded to the
//! nearest integer, the even one of two. Values are f32 on every machine, so the integers are the same everywhere.
#![allow(
    unsafe_code,
    reason = "rows that workers share through a pointer; the contracts are on the functions"
)]

use crate::compute::cpu::arena::AlignedBuffer;
use crate::compute::cpu::isa::{Isa, for_each_isa};
use crate::compute::cpu::rows::SharedPtr;

/// Values of a group.
pub(in crate::compute::cpu) const GROUP: usize = 32;
/// Words of a group: its integers, and the words below.
pub(in crate::compute::cpu) const GROUP_WORDS: usize = 12;
/// The scale (f32).
pub(in crate::compute::cpu) const SCALE: usize = 8;
/// The sum of the integers (f32, exact).
pub(in crate::compute::cpu) const SUM: usize = 9;
/// -128 times the sum of the first 16 integers (i32).
pub(in crate::compute::cpu) const FIRST_BIAS: usize = 10;
/// -128 times the sum of all integers (i32).
pub(in crate::compute::cpu) const BIAS: usize = 11;

/// Rows of rounded activations: for each group of 32 its integers, its scale and its sums.
#[derive(Clone, Copy, Debug)]
pub(in crate::compute::cpu) struct IntegerRows {
    base: SharedPtr<u32>,
    /// Words of a row.
    stride: usize,
}

impl IntegerRows {
    /// The rows from `row` on.
    ///
    /// # Safety
    /// The row is inside the buffer.
    pub(in crate::compute::cpu) unsafe fn after(self, row: usize) -> Self {
        // SAFETY: the caller's contract.
        Self { base: SharedPtr(unsafe { self.base.at(row * self.stride) }), ..self }
    }

    /// Row `row`, and the words of a row.
    ///
    /// # Safety
    /// As [`Self::after`].
    pub(in crate::compute::cpu) unsafe fn at(self, row: usize) -> (*const u32, usize) {
        // SAFETY: the caller's contract.
        (unsafe { self.base.at(row * self.stride) }.cast_const(), self.stride)
    }

    /// Rounds the values of columns `column ..` of a row.
    ///
    /// # Safety
    /// Row and columns are inside the buffer. The values are whole groups, but for the last group of a row. No other
    /// code uses these groups meanwhile, and `isa` is of this machine.
    pub(in crate::compute::cpu) unsafe fn finish(self, isa: Isa, row: usize, column: usize, values: &[f32]) {
        assert!(column.is_multiple_of(GROUP), "whole groups of activations");
        let words = values.len().div_ceil(GROUP) * GROUP_WORDS;
        // SAFETY: the caller's contract.
        let groups = unsafe {
            let first = self.base.at(row * self.stride + column / GROUP * GROUP_WORDS);
            std::slice::from_raw_parts_mut(first, words)
        };
        round_groups(isa, values, groups);
    }
}

for_each_isa! {
    /// Rounds values, group by group.
    fn round_groups(values: &[f32], groups: &mut [u32]) {
        for (values, words) in values.chunks(GROUP).zip(groups.as_chunks_mut::<GROUP_WORDS>().0) {
            round_group(values, words);
        }
    }
}

/// Rounds up to 32 values. What is not a number makes the scale none, and so the sums.
#[inline(always)]
fn round_group(values: &[f32], words: &mut [u32; GROUP_WORDS]) {
    let mut whole = [0.0_f32; GROUP];
    whole[..values.len()].copy_from_slice(values);
    // Magnitudes are in the order of their bits, and NaN is above all.
    let largest = whole.iter().fold(0, |largest: u32, value| largest.max(value.to_bits() & 0x7fff_ffff));
    let scale = f32::from_bits(largest) / 127.0;
    let mut quants = [0_i8; GROUP];
    if scale > 0.0 {
        for (quant, value) in quants.iter_mut().zip(whole) {
            *quant = (value / scale).round_ties_even().clamp(-127.0, 127.0) as i8;
        }
    }
    for (word, four) in words.iter_mut().zip(quants.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(four.map(i8::cast_unsigned));
    }
    let sum = |quants: &[i8]| quants.iter().map(|quant| i32::from(*quant)).sum::<i32>();
    let (first, second) = quants.split_at(GROUP / 2);
    let (first, total) = (sum(first), sum(first) + sum(second));
    words[SCALE] = scale.to_bits();
    words[SUM] = (total as f32).to_bits();
    words[FIRST_BIAS] = (-128 * first).cast_unsigned();
    words[BIAS] = (-128 * total).cast_unsigned();
}

/// Memory of rounded rows.
#[derive(Debug)]
pub(in crate::compute::cpu) struct IntegerBuffer {
    words: AlignedBuffer<u32>,
    rows: usize,
    stride: usize,
}

impl Default for IntegerBuffer {
    fn default() -> Self {
        Self { words: AlignedBuffer::zeroed(0), rows: 0, stride: 0 }
    }
}

impl IntegerBuffer {
    /// Makes space for `rows` rows of `width` values.
    pub(in crate::compute::cpu) fn fit(&mut self, rows: usize, width: usize) {
        let stride = width.div_ceil(GROUP) * GROUP_WORDS;
        if self.rows < rows || self.stride != stride {
            *self = Self { words: AlignedBuffer::zeroed(rows * stride), rows, stride };
        }
    }

    /// The rows, shared by the workers. `None` without space for any.
    pub(in crate::compute::cpu) fn share(&mut self) -> Option<IntegerRows> {
        (self.rows > 0).then(|| IntegerRows { base: SharedPtr(self.words.as_mut_ptr()), stride: self.stride })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(isa: Isa, values: &[f32]) -> Vec<u32> {
        let mut words = vec![0; values.len().div_ceil(GROUP) * GROUP_WORDS];
        round_groups(isa, values, &mut words);
        words
    }

    #[test]
    fn values_are_rounded_to_the_nearest_integer_of_their_group_on_every_instruction_set() {
        // Ties, a partial last group, and numbers far apart.
        let mut values: Vec<f32> = (0..90).map(|index| ((index * 53 + 7) % 89) as f32 / 22.0 - 2.0).collect();
        values[..4].copy_from_slice(&[127.0, 0.5, 1.5, -2.5]);
        values[40] = 1.0e30;
        let words = rounded(Isa::Portable, &values);
        for isa in Isa::available() {
            assert_eq!(rounded(isa, &values), words, "{isa:?}");
        }
        for (values, words) in values.chunks(GROUP).zip(words.chunks_exact(GROUP_WORDS)) {
            let scale = f32::from_bits(words[SCALE]);
            let quants: Vec<i32> = words[..8]
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .map(|byte| i32::from(byte as i8))
                .collect();
            for (value, quant) in values.iter().zip(&quants) {
                assert!((*quant as f32 * scale - value).abs() <= 0.5001 * scale, "{value} became {quant}");
            }
            assert!(quants[values.len()..].iter().all(|quant| *quant == 0));
            assert_eq!(f32::from_bits(words[SUM]), quants.iter().sum::<i32>() as f32);
            assert_eq!(words[FIRST_BIAS] as i32, -128 * quants[..16].iter().sum::<i32>());
            assert_eq!(words[BIAS] as i32, -128 * quants.iter().sum::<i32>());
        }
        // Ties go to the even integer.
        assert_eq!(words[0].to_le_bytes().map(|byte| byte as i8), [127, 0, 2, -2]);
    }

    #[test]
    fn zeros_stay_zeros_and_what_is_not_a_number_remains_visible() {
        for isa in Isa::available() {
            assert!(rounded(isa, &[0.0; GROUP]).iter().all(|word| *word == 0));
            let mut values = [1.0; GROUP];
            values[5] = f32::NAN;
            assert!(f32::from_bits(rounded(isa, &values)[SCALE]).is_nan(), "{isa:?}");
            // Far below the smallest scale.
            let tiny = rounded(isa, &[1.0e-45; GROUP]);
            assert!(tiny[..8].iter().all(|word| *word == 0), "{isa:?}");
        }
    }
}
