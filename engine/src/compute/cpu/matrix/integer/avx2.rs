//! The kernel of AVX2. `vpmaddubsw` adds two products of an unsigned and a signed byte to 16 bits.
//!
//! Its saturation is out of reach: of a signed integer the magnitude is multiplied, at most 128, with the activation of
//! the integer's sign, at most 127. Two such products are at most 32,512. Unsigned integers have at most 5 bits.

use std::arch::x86_64::{
    __m256, __m256i, _mm_loadl_epi64, _mm256_abs_epi8, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256,
    _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_fmadd_ps, _mm256_fnmadd_ps,
    _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_mul_ps,
    _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_setzero_si256, _mm256_sign_epi8, _mm256_srli_epi16, _mm256_storeu_ps, _mm256_xor_si256,
};

use super::form::{Form, GROUP_WORDS, Offset, SCALE, STRIP, SUM, StripOperands};

/// The sums of `R` rows.
///
/// # Safety
/// As the reference kernel's, for `R` rows, on a machine with AVX2 and FMA.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn rows<F: Form, const R: usize>(call: &StripOperands) {
    let mut acc = [[_mm256_setzero_ps(); 2]; R];
    if call.first > 0 {
        for (row, acc) in acc.iter_mut().enumerate() {
            for (half, acc) in acc.iter_mut().enumerate() {
                // SAFETY: the caller's contract.
                *acc = unsafe { _mm256_loadu_ps(call.out.add(row * call.out_stride + 8 * half)) };
            }
        }
    }
    for group in call.first..call.end {
        let (at, span_at) = F::position(group, call.span);
        // SAFETY: the caller's contract.
        unsafe {
            let (at, span, x) =
                (call.strip.add(at), call.strip.add(span_at), call.x.add(group * GROUP_WORDS));
            for half in 0..2 {
                let first = 8 * half;
                let values = at.add(F::GROUP_HEADER + 32 * half);
                let sums = dots::<F, R>(values, x, call.x_stride);
                let factors = _mm256_loadu_ps(span.add(4 * first).cast());
                for row in 0..R {
                    let words = x.add(row * call.x_stride);
                    let scale = _mm256_set1_ps(f32::from_bits(*words.add(SCALE)));
                    let total = _mm256_set1_ps(f32::from_bits(*words.add(SUM)));
                    let [one, two] = sums[row].map(|sums| _mm256_cvtepi32_ps(sums));
                    let header = at.add(first);
                    let mut sum = match F::SCALES {
                        0 => one,
                        1 => _mm256_mul_ps(unsigned(header), one),
                        _ => _mm256_add_ps(
                            _mm256_mul_ps(signed(header), one),
                            _mm256_mul_ps(signed(header.add(STRIP)), two),
                        ),
                    };
                    if F::OFFSET == Offset::Zero {
                        sum = _mm256_fnmadd_ps(unsigned(span.add(4 * STRIP + first)), total, sum);
                    }
                    let acc = &mut acc[row][half];
                    *acc = _mm256_fmadd_ps(_mm256_mul_ps(factors, scale), sum, *acc);
                    if F::OFFSET == Offset::Minimum {
                        let minimum_factors = _mm256_loadu_ps(span.add(4 * (STRIP + first)).cast());
                        *acc = _mm256_fnmadd_ps(
                            _mm256_mul_ps(minimum_factors, scale),
                            _mm256_mul_ps(unsigned(header.add(F::SCALES * STRIP)), total),
                            *acc,
                        );
                    }
                }
            }
        }
    }
    for (row, acc) in acc.iter().enumerate() {
        for (half, acc) in acc.iter().enumerate() {
            // SAFETY: the caller's contract.
            unsafe { _mm256_storeu_ps(call.out.add(row * call.out_stride + 8 * half), *acc) };
        }
    }
}

/// The sums of both parts of a group for 8 outputs. Without scales of parts, all is in the first.
///
/// # Safety
/// As [`rows`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots<F: Form, const R: usize>(
    values: *const u8,
    x: *const u32,
    stride: usize,
) -> [[__m256i; 2]; R] {
    let mut sums = [[_mm256_setzero_si256(); 2]; R];
    for line in 0..4 {
        // SAFETY: the caller's contract.
        unsafe {
            let weights = if F::NIBBLES {
                let both = _mm256_loadu_si256(values.add(64 * line).cast());
                let low = _mm256_set1_epi8(15);
                [_mm256_and_si256(both, low), _mm256_and_si256(_mm256_srli_epi16::<4>(both), low)]
            } else {
                [line, line + 4].map(|line| _mm256_loadu_si256(values.add(64 * line).cast()))
            };
            for (row, sums) in sums.iter_mut().enumerate() {
                for (part, weights) in weights.into_iter().enumerate() {
                    let word = *x.add(row * stride + line + 4 * part);
                    let four = _mm256_set1_epi32(word.cast_signed());
                    let pairs = if F::BIASED {
                        let weights = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
                        _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(four, weights))
                    } else {
                        _mm256_maddubs_epi16(weights, four)
                    };
                    let to = if F::SCALES == 2 { part } else { 0 };
                    sums[to] = _mm256_add_epi32(sums[to], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                }
            }
        }
    }
    sums
}

/// 8 bytes as numbers.
///
/// # Safety
/// They can be read, on this machine.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn unsigned(bytes: *const u8) -> __m256 {
    // SAFETY: the caller's contract.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.cast()))) }
}

/// 8 signed bytes as numbers.
///
/// # Safety
/// As [`unsigned`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn signed(bytes: *const u8) -> __m256 {
    // SAFETY: the caller's contract.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(bytes.cast()))) }
}
