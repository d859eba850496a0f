//! Rounding to bf16, as in the units that multiply it: to nearest, ties to even, subnormal values to zero.

use super::super::isa::{Isa, for_each_isa};
use super::{Bf16Unit, CHUNK};

/// The nearest bf16, ties to even. Subnormal values become zero, NaN stays NaN.
#[inline(always)]
pub(in crate::compute::cpu) fn round(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let magnitude = bits & 0x7fff_ffff;
    let kept = if magnitude > 0x7f80_0000 { bits >> 16 | 0x40 } else { rounded };
    let kept = if magnitude < 0x0080_0000 { bits >> 16 & 0x8000 } else { kept };
    kept as u16
}

for_each_isa! {
    /// Each value becomes the nearest bf16.
    pub(super) fn round_in_place(values: &mut [f32]) {
        for value in values {
            *value = f32::from_bits(u32::from(round(*value)) << 16);
        }
    }
}

for_each_isa! {
    /// As [`round`], value by value.
    fn round_each(values: &[f32], out: &mut [u16]) {
        for (out, value) in out.iter_mut().zip(values) {
            *out = round(*value);
        }
    }
}

/// As [`round`], value by value. Whole chunks use the instruction for it if there is one.
pub(in crate::compute::cpu) fn round_into(isa: Isa, values: &[f32], out: &mut [u16]) {
    let whole = values.len().min(out.len()) / CHUNK * CHUNK;
    // SAFETY: `out` has as many values as there are whole chunks, side by side.
    unsafe { round_chunks(isa, None, values[..whole].as_chunks().0, out.as_mut_ptr(), CHUNK) };
    round_each(isa, &values[whole..], &mut out[whole..]);
}

/// Rounds rows of `width` values. Whole chunks of a row are written in the order of the unit, the remainder in its own
/// order.
pub(in crate::compute::cpu) fn round_rows(
    isa: Isa,
    unit: Bf16Unit,
    values: &[f32],
    width: usize,
    out: &mut [u16],
) {
    let width = if width.is_multiple_of(CHUNK) { values.len().max(1) } else { width };
    for (values, out) in values.chunks(width).zip(out.chunks_mut(width)) {
        let (whole, rest) = values.as_chunks();
        let (out, out_rest) = out[..values.len()].split_at_mut(values.len() - rest.len());
        // SAFETY: `out` has as many values as there are whole chunks, side by side.
        unsafe { round_chunks(isa, Some(unit), whole, out.as_mut_ptr(), CHUNK) };
        round_each(isa, rest, out_rest);
    }
}

/// Rounds chunks to `out`, at a distance of `stride` values, in the order of the unit if there is one.
///
/// # Safety
/// `out` is valid for all of them, and no other code uses it meanwhile; `isa` comes from [`Isa::available`].
pub(super) unsafe fn round_chunks(
    isa: Isa,
    unit: Option<Bf16Unit>,
    chunks: &[[f32; CHUNK]],
    out: *mut u16,
    stride: usize,
) {
    let order = unit.and_then(Bf16Unit::order);
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 && is_x86_feature_detected!("avx512bf16") {
        // SAFETY: the caller's contract; the machine has the instruction, and with this `isa` AVX512-BW.
        unsafe { round_chunks_avx512(order, chunks, out, stride) };
        return;
    }
    for (index, chunk) in chunks.iter().enumerate() {
        // SAFETY: the caller's contract.
        let out = unsafe { std::slice::from_raw_parts_mut(out.add(index * stride), CHUNK) };
        match order {
            None => round_each(isa, chunk, out),
            Some(order) => {
                let mut rounded = [0; CHUNK];
                round_each(isa, chunk, &mut rounded);
                for (out, input) in out.iter_mut().zip(order) {
                    *out = rounded[usize::from(*input)];
                }
            }
        }
    }
}

/// # Safety
/// As [`round_chunks`], on AVX512-BF16 and AVX512-BW.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn round_chunks_avx512(
    order: Option<&[u16; CHUNK]>,
    chunks: &[[f32; CHUNK]],
    out: *mut u16,
    stride: usize,
) {
    use std::arch::x86_64::{
        __m512bh, __m512i, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_loadu_si512,
        _mm512_permutexvar_epi16, _mm512_storeu_si512,
    };
    // SAFETY: 32 numbers of two bytes.
    let order = order.map(|order| unsafe { _mm512_loadu_si512(order.as_ptr().cast()) });
    for (index, chunk) in chunks.iter().enumerate() {
        let (lower, upper) = (chunk.as_ptr(), chunk[CHUNK / 2..].as_ptr());
        // SAFETY: halves of 16 values; the caller's contract for `out`, whose 64 bytes are all written.
        unsafe {
            let rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(upper), _mm512_loadu_ps(lower));
            let rounded = std::mem::transmute::<__m512bh, __m512i>(rounded);
            let ordered = order.map_or(rounded, |order| _mm512_permutexvar_epi16(order, rounded));
            _mm512_storeu_si512(out.add(index * stride).cast(), ordered);
        }
    }
}

/// Part of a chunk of rounded values of one column as words, padded with zeros.
pub(in crate::compute::cpu) fn to_words(unit: Bf16Unit, values: &[u16], out: &mut [u32; CHUNK / 2]) {
    let mut ordered = [0; CHUNK];
    for (input, bits) in values.iter().enumerate() {
        ordered[unit.position(input)] = *bits;
    }
    *out = words(&ordered);
}

/// A chunk in the order of its unit as words.
pub(in crate::compute::cpu) fn words(ordered: &[u16; CHUNK]) -> [u32; CHUNK / 2] {
    std::array::from_fn(|word| u32::from(ordered[2 * word]) | u32::from(ordered[2 * word + 1]) << 16)
}
