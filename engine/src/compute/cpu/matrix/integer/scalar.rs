//! The reference kernel: the definition of a product with grouped integers.
//!
//! ```text
//!   s    = Σ quant·x                  exact: |s| < 2^24 with its scale, and a zero point's part is an integer too
//!   acc  = fma(factor · scale_x, s · scale, acc)
//!   acc  = fma(minimum_factor · scale_x, -(minimum · Σ x), acc)       only with minima
//! ```
//!
//! Groups follow one another, from zero. Scale and minimum are integers, so all products but those with `scale_x` are
//! exact in f32. Only the multiply-adds and the products with `scale_x` round, in the same order everywhere.

use super::form::{BIAS, FIRST_BIAS, Form, GROUP, GROUP_WORDS, Offset, SCALE, STRIP, SUM, StripOperands};

/// The sums of one row.
///
/// # Safety
/// Strip, row and output are valid for what `call` says.
pub(super) unsafe fn row<F: Form>(call: &StripOperands) {
    let mut acc = [0.0_f32; STRIP];
    if call.first > 0 {
        // SAFETY: the caller's contract.
        unsafe { acc.as_mut_ptr().copy_from_nonoverlapping(call.out, STRIP) };
    }
    let group_bytes = F::GROUP_HEADER + F::VALUES;
    for group in call.first..call.end {
        let (at, span_at) = F::position(group, call.span);
        // SAFETY: the caller's contract.
        let (span, bytes, x) = unsafe {
            (
                std::slice::from_raw_parts(call.strip.add(span_at), F::SPAN_HEADER),
                std::slice::from_raw_parts(call.strip.add(at), group_bytes),
                std::slice::from_raw_parts(call.x.add(group * GROUP_WORDS), GROUP_WORDS),
            )
        };
        let (header, values) = bytes.split_at(F::GROUP_HEADER);
        let (scale, total) = (f32::from_bits(x[SCALE]), f32::from_bits(x[SUM]));
        let parts = dots::<F>(values, x);
        for (output, acc) in acc.iter_mut().enumerate() {
            let [first, second] = [parts[0][output] as f32, parts[1][output] as f32];
            let scaled = |part: usize| f32::from(header[part * STRIP + output]);
            let signed = |part: usize| f32::from(header[part * STRIP + output].cast_signed());
            let sum = match F::SCALES {
                0 => first + second,
                1 => scaled(0) * (first + second),
                _ => signed(0) * first + signed(1) * second,
            };
            let factor = f32_at(span, output);
            *acc = match F::OFFSET {
                Offset::None => (factor * scale).mul_add(sum, *acc),
                Offset::Zero => {
                    let zero = f32::from(span[4 * STRIP + output]);
                    (factor * scale).mul_add(sum - zero * total, *acc)
                }
                Offset::Minimum => {
                    let acc = (factor * scale).mul_add(sum, *acc);
                    let minimum_factor = f32_at(span, STRIP + output);
                    (minimum_factor * scale).mul_add(-(scaled(F::SCALES) * total), acc)
                }
            };
        }
    }
    // SAFETY: the caller's contract.
    unsafe { call.out.copy_from_nonoverlapping(acc.as_ptr(), STRIP) };
}

/// The exact sums of the two halves of a group, for each output.
fn dots<F: Form>(values: &[u8], x: &[u32]) -> [[i32; STRIP]; 2] {
    let quants: [[i8; 4]; GROUP / 4] = std::array::from_fn(|quad| x[quad].to_le_bytes().map(u8::cast_signed));
    let mut parts = [[0; STRIP]; 2];
    if F::BIASED {
        let first = x[FIRST_BIAS].cast_signed();
        parts = [[first; STRIP], [x[BIAS].cast_signed() - first; STRIP]];
    }
    for (quad, four) in quants.iter().enumerate() {
        let (line, shift) = if F::NIBBLES { (quad % 4, 4 * (quad / 4)) } else { (quad, 0) };
        let line = &values[line * 4 * STRIP..][..4 * STRIP];
        for (weights, sum) in line.as_chunks::<4>().0.iter().zip(&mut parts[quad / 4]) {
            let product = |index: usize| {
                let byte = if F::NIBBLES { (weights[index] >> shift) & 15 } else { weights[index] };
                i32::from(byte) * i32::from(four[index])
            };
            *sum += product(0) + product(1) + product(2) + product(3);
        }
    }
    parts
}

/// A number of a header.
pub(super) fn f32_at(header: &[u8], index: usize) -> f32 {
    let bytes = header[4 * index..].first_chunk().expect("a header has a number for every output");
    f32::from_le_bytes(*bytes)
}
