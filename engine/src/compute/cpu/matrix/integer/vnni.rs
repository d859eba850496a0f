//! The kernel of AVX512-VNNI: `vpdpbusd` adds four products of an unsigned and a signed byte to 32 bits, exactly.

use std::arch::x86_64::{
    __m512, __m512i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm512_add_epi32, _mm512_add_ps,
    _mm512_and_si512, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_dpbusd_epi32,
    _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_set1_epi8,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_srli_epi16,
    _mm512_storeu_ps, _mm512_sub_epi32,
};

use super::form::{BIAS, FIRST_BIAS, Form, GROUP_WORDS, Offset, SCALE, STRIP, SUM, StripOperands};

/// Bytes ahead of the current group that are requested from memory.
const AHEAD: usize = 4096;

/// The sums of `R` rows.
///
/// # Safety
/// As the reference kernel's, for `R` rows, on a machine with AVX512-VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn rows<F: Form, const R: usize>(call: &StripOperands) {
    let mut acc = [_mm512_setzero_ps(); R];
    if call.first > 0 {
        for (row, acc) in acc.iter_mut().enumerate() {
            // SAFETY: the caller's contract.
            *acc = unsafe { _mm512_loadu_ps(call.out.add(row * call.out_stride)) };
        }
    }
    let mut at = call.strip.wrapping_add(F::position(call.first, call.span).1);
    let (mut factors, mut others) = (_mm512_setzero_ps(), _mm512_setzero_ps());
    let mut left = 0;
    for group in call.first..call.end {
        // SAFETY: the caller's contract; a prefetch may point anywhere.
        unsafe {
            if left == 0 {
                left = call.span;
                factors = _mm512_loadu_ps(at.cast());
                match F::OFFSET {
                    Offset::None => {}
                    Offset::Zero => others = unsigned(at.add(4 * STRIP)),
                    Offset::Minimum => others = _mm512_loadu_ps(at.add(4 * STRIP).cast()),
                }
                at = at.add(F::SPAN_HEADER);
            }
            left -= 1;
            if call.ahead {
                for line in (0..F::GROUP_HEADER + F::VALUES).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD + line).cast());
                }
            }
            let x = call.x.add(group * GROUP_WORDS);
            let sums = dots::<F, R>(at.add(F::GROUP_HEADER), x, call.x_stride);
            let scaled = sums_of_group::<F, R>(at, sums, x, call.x_stride, others);
            for (row, acc) in acc.iter_mut().enumerate() {
                let words = x.add(row * call.x_stride);
                let scale = _mm512_set1_ps(f32::from_bits(*words.add(SCALE)));
                *acc = _mm512_fmadd_ps(_mm512_mul_ps(factors, scale), scaled[row], *acc);
                if F::OFFSET == Offset::Minimum {
                    let minima = unsigned(at.add(F::SCALES * STRIP));
                    let total = _mm512_set1_ps(f32::from_bits(*words.add(SUM)));
                    *acc = _mm512_fnmadd_ps(_mm512_mul_ps(others, scale), _mm512_mul_ps(minima, total), *acc);
                }
            }
            at = at.add(F::GROUP_HEADER + F::VALUES);
        }
    }
    for (row, acc) in acc.into_iter().enumerate() {
        // SAFETY: the caller's contract.
        unsafe { _mm512_storeu_ps(call.out.add(row * call.out_stride), acc) };
    }
}

/// The sums of both parts of a group. Without scales of parts, all is in the first.
///
/// # Safety
/// As [`rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn dots<F: Form, const R: usize>(
    values: *const u8,
    x: *const u32,
    stride: usize,
) -> [[__m512i; 2]; R] {
    let parts = if F::SCALES == 2 { 2 } else { 1 };
    let mut sums = [[_mm512_setzero_si512(); 2]; R];
    // SAFETY: the caller's contract.
    unsafe {
        let word = |row: usize, word: usize| _mm512_set1_epi32((*x.add(row * stride + word)).cast_signed());
        if F::BIASED {
            for (row, sums) in sums.iter_mut().enumerate() {
                *sums = match parts {
                    1 => [word(row, BIAS), _mm512_setzero_si512()],
                    _ => {
                        let first = word(row, FIRST_BIAS);
                        [first, _mm512_sub_epi32(word(row, BIAS), first)]
                    }
                };
            }
        }
        for line in 0..4 {
            let weights = if F::NIBBLES {
                let both = _mm512_loadu_si512(values.add(64 * line).cast());
                let low = _mm512_set1_epi8(15);
                [_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16::<4>(both), low)]
            } else {
                [line, line + 4].map(|line| _mm512_loadu_si512(values.add(64 * line).cast()))
            };
            for (row, sums) in sums.iter_mut().enumerate() {
                sums[0] = _mm512_dpbusd_epi32(sums[0], weights[0], word(row, line));
                // With few rows, two chains are faster than one.
                let second = if parts == 2 || R <= 2 { 1 } else { 0 };
                sums[second] = _mm512_dpbusd_epi32(sums[second], weights[1], word(row, line + 4));
            }
        }
        if parts == 1 && R <= 2 {
            for sums in &mut sums {
                sums[0] = _mm512_add_epi32(sums[0], sums[1]);
            }
        }
    }
    sums
}

/// The sums with their scales and less the zero points: integers, exactly.
///
/// # Safety
/// As [`rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn sums_of_group<F: Form, const R: usize>(
    header: *const u8,
    sums: [[__m512i; 2]; R],
    x: *const u32,
    stride: usize,
    zeros: __m512,
) -> [__m512; R] {
    let mut out = [_mm512_setzero_ps(); R];
    for (row, (out, sums)) in out.iter_mut().zip(sums).enumerate() {
        let [first, second] = sums.map(|sums| _mm512_cvtepi32_ps(sums));
        // SAFETY: the caller's contract.
        unsafe {
            *out = match F::SCALES {
                0 => first,
                1 => _mm512_mul_ps(unsigned(header), first),
                _ => _mm512_add_ps(
                    _mm512_mul_ps(signed(header), first),
                    _mm512_mul_ps(signed(header.add(STRIP)), second),
                ),
            };
            if F::OFFSET == Offset::Zero {
                let total = _mm512_set1_ps(f32::from_bits(*x.add(row * stride + SUM)));
                *out = _mm512_fnmadd_ps(zeros, total, *out);
            }
        }
    }
    out
}

/// 16 bytes as numbers.
///
/// # Safety
/// They can be read, on this machine.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn unsigned(bytes: *const u8) -> __m512 {
    // SAFETY: the caller's contract.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.cast()))) }
}

/// 16 signed bytes as numbers.
///
/// # Safety
/// As [`unsigned`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn signed(bytes: *const u8) -> __m512 {
    // SAFETY: the caller's contract.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes.cast()))) }
}
