//! One position against its whole context: attention of a decode step, whose time is spent on reading keys and values.
//!
//! The chains and therefore the bits are the same as in the matrix kernel: a score is a chain over the head's elements,
//! an output is one over key positions. Only the storage differs. Sixteen keys are transposed and multiplied in
//! registers, and sums stay in registers from the first element or position to the last.
#![allow(
    unsafe_code,
    reason = "vector intrinsics on raw pointers into KV blocks; the contract is on each function"
)]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm256_loadu_si256, _mm512_castpd_ps, _mm512_castps_pd,
    _mm512_castsi256_si512, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh, _mm512_cvtph_ps,
    _mm512_fmadd_ps, _mm512_inserti64x4, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_shuffle_f32x4, _mm512_slli_epi32, _mm512_storeu_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps,
    _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};

use std::ops::Range;

use baton_connector::layout::KvDtype;

use super::{HeadCache, KvHalf};
use crate::compute::cpu::isa::{Isa, request};

/// Keys that are transposed at once, and values of a vector register.
const LANES: usize = 16;
/// Most rows. Their sums share 32 registers with sixteen keys, or with the values of a position.
const MAX_ROWS: usize = 8;
/// Prefetch distance in positions. Sixteen positions of an f32 cache with heads of 64 are a run of 4 KiB, far from the
/// next one, and no hardware prefetcher follows. Two runs ahead into the first-level cache are the fastest on Zen 4;
/// one run, three to eight runs, or the second-level cache are slower.
const AHEAD: usize = 2 * LANES;

/// Whether this module supports this number of rows of this cache.
pub(super) fn suits(isa: Isa, cache: &HeadCache<'_>, rows: usize) -> bool {
    isa == Isa::Avx512
        && rows <= MAX_ROWS
        && cache.layout.head_dim.is_multiple_of(LANES)
        && cache.layout.block_tokens.is_multiple_of(LANES)
}

/// An element type of the cache.
trait CacheElement: Copy {
    /// Sixteen elements, widened.
    ///
    /// # Safety
    /// The elements may be read, on a machine with AVX-512.
    unsafe fn load(from: *const Self) -> __m512;

    /// Sixteen elements from each place as bf16, rounded as in the units of bfloat16 mode. The lower half of the
    /// register is from `lower`.
    ///
    /// # Safety
    /// As [`Self::load`], on a machine with AVX512-BF16.
    #[inline(always)]
    unsafe fn rounded(lower: *const Self, upper: *const Self) -> __m512i {
        // SAFETY: the caller's contract.
        unsafe {
            let both = _mm512_cvtne2ps_pbh(Self::load(upper), Self::load(lower));
            std::mem::transmute::<__m512bh, __m512i>(both)
        }
    }
}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct CacheF16(u16);

#[derive(Clone, Copy)]
#[repr(transparent)]
struct CacheBf16(u16);

impl CacheElement for f32 {
    #[inline(always)]
    unsafe fn load(from: *const Self) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_loadu_ps(from) }
    }
}

impl CacheElement for CacheF16 {
    #[inline(always)]
    unsafe fn load(from: *const Self) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
}

impl CacheElement for CacheBf16 {
    #[inline(always)]
    unsafe fn load(from: *const Self) -> __m512 {
        // SAFETY: the caller's contract.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    /// Unchanged; products treat subnormal values as zero.
    #[inline(always)]
    unsafe fn rounded(lower: *const Self, upper: *const Self) -> __m512i {
        // SAFETY: the caller's contract.
        unsafe {
            let (lower, upper) = (_mm256_loadu_si256(lower.cast()), _mm256_loadu_si256(upper.cast()));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(lower), upper)
        }
    }
}

/// Calls a kernel that is compiled for this number of rows and element type.
macro_rules! by_rows {
    ($rows:expr, $dtype:expr, $kernel:ident $arguments:tt) => {
        by_rows!(@ $rows, $dtype, $kernel $arguments, [1 2 3 4 5 6 7 8])
    };
    (@ $rows:expr, $dtype:expr, $kernel:ident $arguments:tt, [$($n:literal)*]) => {
        match ($rows, $dtype) {
            $(
                ($n, KvDtype::F32) => $kernel::<f32, $n> $arguments,
                ($n, KvDtype::F16) => $kernel::<CacheF16, $n> $arguments,
                ($n, KvDtype::Bf16) => $kernel::<CacheBf16, $n> $arguments,
            )*
            (rows, _) => unreachable!("{rows} rows"),
        }
    };
}

pub(super) mod in_bf16;

/// Scores of `rows` queries, which are contiguous in `queries`, with a range of keys. It begins at a multiple of the
/// block and of 32. Scores up to the next multiple of sixteen are written too, without a meaning.
///
/// # Safety
/// [`suits`]; keys of all slots in the blocks may be read, and no other code writes those of the range meanwhile.
pub(super) unsafe fn scores(
    cache: &HeadCache<'_>,
    range: Range<usize>,
    rows: usize,
    queries: &[f32],
    scores: &mut [f32],
    stride: usize,
) {
    assert!(queries.len() >= rows * cache.layout.head_dim);
    assert!(scores.len() >= (rows - 1) * stride + range.end.next_multiple_of(LANES));
    // SAFETY: the caller's contract, and the assertions above.
    unsafe {
        by_rows!(
            rows,
            cache.layout.dtype,
            scores_of(cache, range, queries.as_ptr(), scores.as_mut_ptr(), stride)
        );
    }
}

/// Sums of the values of a range, weighted by each row's scores.
///
/// # Safety
/// As [`scores`], of values.
pub(super) unsafe fn values(
    cache: &HeadCache<'_>,
    range: Range<usize>,
    rows: usize,
    scores: &[f32],
    scores_stride: usize,
    outputs: &mut [f32],
    outputs_stride: usize,
) {
    assert!(scores.len() >= (rows - 1) * scores_stride + range.end);
    assert!(outputs.len() >= (rows - 1) * outputs_stride + cache.layout.head_dim);
    let (scores, outputs) = (scores.as_ptr(), outputs.as_mut_ptr());
    // SAFETY: the caller's contract, and the assertions above.
    unsafe {
        by_rows!(
            rows,
            cache.layout.dtype,
            values_of(cache, range, scores, scores_stride, outputs, outputs_stride)
        );
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn scores_of<E: CacheElement, const R: usize>(
    cache: &HeadCache<'_>,
    range: Range<usize>,
    queries: *const f32,
    scores: *mut f32,
    stride: usize,
) {
    let (begin, context) = (range.start, range.end);
    let dim = cache.layout.head_dim;
    let group_bytes = LANES * dim * size_of::<E>();
    for from in (begin..context.min(begin + AHEAD)).step_by(LANES) {
        request(cache.vector(KvHalf::Keys, from), group_bytes);
    }
    // SAFETY: the contract of `scores`.
    unsafe {
        for from in (begin..context).step_by(LANES) {
            let keys = cache.vector(KvHalf::Keys, from).cast_const().cast::<E>();
            let later = later(cache, from, context);
            let mut sums = [_mm512_setzero_ps(); R];
            for element in (0..dim).step_by(LANES) {
                let mut rows = [_mm512_setzero_ps(); LANES];
                for (key, row) in rows.iter_mut().enumerate() {
                    *row = E::load(keys.add(key * dim + element));
                }
                let columns = transposed(rows);
                let part = LANES * LANES * size_of::<E>();
                request(later.wrapping_add(element / LANES * part), part);
                for (index, column) in columns.into_iter().enumerate() {
                    for (row, sum) in sums.iter_mut().enumerate() {
                        let query = _mm512_set1_ps(*queries.add(row * dim + element + index));
                        *sum = _mm512_fmadd_ps(query, column, *sum);
                    }
                }
            }
            for (row, sum) in sums.into_iter().enumerate() {
                _mm512_storeu_ps(scores.add(row * stride + from), sum);
            }
        }
    }
}

/// The next address after the sixteen keys from `from` and the keys requested before: further keys, or the first
/// values.
fn later(cache: &HeadCache<'_>, from: usize, context: usize) -> *mut u8 {
    match (from + AHEAD).checked_sub(context.next_multiple_of(LANES)) {
        None => cache.vector(KvHalf::Keys, from + AHEAD),
        Some(values) => cache.vector(KvHalf::Values, values.min(context - 1)),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn values_of<E: CacheElement, const R: usize>(
    cache: &HeadCache<'_>,
    range: Range<usize>,
    scores: *const f32,
    scores_stride: usize,
    outputs: *mut f32,
    stride: usize,
) {
    let columns = cache.layout.head_dim / LANES;
    let mut column = 0;
    while column < columns {
        // SAFETY: the caller's contract; columns are inside the head.
        unsafe {
            let out = outputs.add(column * LANES);
            column += match columns - column {
                4.. if R <= 4 => {
                    values_beside::<E, R, 4>(cache, range.clone(), column, scores, scores_stride, out, stride)
                }
                2.. => {
                    values_beside::<E, R, 2>(cache, range.clone(), column, scores, scores_stride, out, stride)
                }
                _ => {
                    values_beside::<E, R, 1>(cache, range.clone(), column, scores, scores_stride, out, stride)
                }
            };
        }
    }
}

/// Computes `C` times sixteen elements, from the `column`th sixteen; returns `C`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn values_beside<E: CacheElement, const R: usize, const C: usize>(
    cache: &HeadCache<'_>,
    range: Range<usize>,
    column: usize,
    scores: *const f32,
    scores_stride: usize,
    outputs: *mut f32,
    stride: usize,
) -> usize {
    let (dim, block_tokens) = (cache.layout.head_dim, cache.layout.block_tokens);
    let context = range.end;
    let mut sums = [[_mm512_setzero_ps(); C]; R];
    let ahead = AHEAD.next_multiple_of(block_tokens);
    // SAFETY: the contract of `values`.
    unsafe {
        for from in (range.start..context).step_by(block_tokens) {
            let run = cache.vector(KvHalf::Values, from).cast_const().cast::<E>();
            let later = (from + ahead < context).then(|| cache.vector(KvHalf::Values, from + ahead));
            for slot in 0..block_tokens.min(context - from) {
                let element = slot * dim + column * LANES;
                if let Some(later) = later {
                    request(later.wrapping_add(element * size_of::<E>()), C * LANES * size_of::<E>());
                }
                let mut values = [_mm512_setzero_ps(); C];
                for (i, values) in values.iter_mut().enumerate() {
                    *values = E::load(run.add(element + i * LANES));
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    let score = _mm512_set1_ps(*scores.add(row * scores_stride + from + slot));
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = _mm512_fmadd_ps(score, value, *sum);
                    }
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (i, sum) in sums.iter().enumerate() {
                _mm512_storeu_ps(outputs.add(row * stride + i * LANES), *sum);
            }
        }
    }
    C
}

/// Sixteen rows of sixteen values as columns.
///
/// Always inlined, because a call would pass 32 registers through memory. Every caller has the instructions.
///
/// # Safety
/// This machine has AVX-512.
#[inline(always)]
pub(super) unsafe fn transposed(rows: [__m512; LANES]) -> [__m512; LANES] {
    let (mut quads, mut columns) = (rows, rows);
    // SAFETY: the caller's contract.
    unsafe {
        for group in 0..4 {
            let [a, b, c, d] =
                [rows[4 * group], rows[4 * group + 1], rows[4 * group + 2], rows[4 * group + 3]];
            let (ab, cd) =
                (_mm512_castps_pd(_mm512_unpacklo_ps(a, b)), _mm512_castps_pd(_mm512_unpacklo_ps(c, d)));
            quads[4 * group] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
            quads[4 * group + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
            let (ab, cd) =
                (_mm512_castps_pd(_mm512_unpackhi_ps(a, b)), _mm512_castps_pd(_mm512_unpackhi_ps(c, d)));
            quads[4 * group + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
            quads[4 * group + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        }
        // Quarter q of `quads[4 g + j]` now holds column 4 q + j of rows 4 g .. 4 g + 4.
        for j in 0..4 {
            let even = _mm512_shuffle_f32x4::<0x88>(quads[j], quads[4 + j]);
            let odd = _mm512_shuffle_f32x4::<0xdd>(quads[j], quads[4 + j]);
            let even_two = _mm512_shuffle_f32x4::<0x88>(quads[8 + j], quads[12 + j]);
            let odd_two = _mm512_shuffle_f32x4::<0xdd>(quads[8 + j], quads[12 + j]);
            columns[j] = _mm512_shuffle_f32x4::<0x88>(even, even_two);
            columns[4 + j] = _mm512_shuffle_f32x4::<0x88>(odd, odd_two);
            columns[8 + j] = _mm512_shuffle_f32x4::<0xdd>(even, even_two);
            columns[12 + j] = _mm512_shuffle_f32x4::<0xdd>(odd, odd_two);
        }
    }
    columns
}

#[cfg(test)]
mod tests {
    use baton_connector::layout::KvLayout;

    use super::*;

    /// Values without a pattern, of both signs.
    fn noise(seed: u32) -> impl Iterator<Item = f32> {
        (seed..).map(|i| {
            let mixed = i.wrapping_mul(2_654_435_761).rotate_left(13).wrapping_mul(2_246_822_519) >> 8;
            mixed as f32 / (1 << 23) as f32 - 1.0
        })
    }

    #[test]
    fn scores_and_sums_add_in_the_documented_order() {
        if !Isa::available().contains(&Isa::Avx512) {
            return;
        }
        for (dtype, block_tokens, head_dim) in [
            (KvDtype::F32, 16, 64),
            (KvDtype::F16, 32, 80),
            (KvDtype::Bf16, 16, 128),
            (KvDtype::F32, 48, 16),
            (KvDtype::F16, 16, 112),
        ] {
            let layout = KvLayout { layers: 2, kv_heads: 2, head_dim, block_tokens, dtype };
            for context in [1, 5, 16, 17, 33, 70, 130] {
                // The contents of slots without a key must not affect the result.
                let mut memory = vec![vec![f32::NAN; layout.block_bytes() / 4]; layout.blocks_for(context)];
                let blocks: Vec<*mut u8> = memory.iter_mut().map(|block| block.as_mut_ptr().cast()).collect();
                let cache = HeadCache { layout: &layout, layer: 1, head: 1, blocks: &blocks };
                let mut vectors = [vec![0.0; context * head_dim], vec![0.0; context * head_dim]];
                for (half, vectors) in [KvHalf::Keys, KvHalf::Values].into_iter().zip(&mut vectors) {
                    for (position, vector) in vectors.chunks_exact_mut(head_dim).enumerate() {
                        let made: Vec<f32> = noise(7 + position as u32 * 999).take(head_dim).collect();
                        // SAFETY: only this test uses the blocks.
                        unsafe {
                            cache.store(Isa::Portable, half, position, &made);
                            cache.load(Isa::Portable, half, position, 1, head_dim, vector);
                        }
                    }
                }
                for rows in 1..=MAX_ROWS {
                    assert!(suits(Isa::Avx512, &cache, rows));
                    check(&cache, context, rows, &vectors);
                }
                assert!(!suits(Isa::Avx512, &cache, MAX_ROWS + 1));
            }
        }
    }

    fn check(cache: &HeadCache<'_>, context: usize, rows: usize, [keys, weighed]: &[Vec<f32>; 2]) {
        let dim = cache.layout.head_dim;
        let queries: Vec<f32> = noise(5).take(rows * dim).collect();
        let (stride, out_stride) = (context.next_multiple_of(LANES) + 3, dim + 5);
        let (mut seen, mut outputs) = (vec![7.0; rows * stride], vec![7.0; rows * out_stride]);
        // SAFETY: only this test uses blocks and buffers, and this machine has AVX-512.
        unsafe {
            scores(cache, 0..context, rows, &queries, &mut seen, stride);
            values(cache, 0..context, rows, &seen, stride, &mut outputs, out_stride);
        }
        for row in 0..rows {
            let seen = &seen[row * stride..][..context];
            for (score, key) in seen.iter().zip(keys.chunks_exact(dim)) {
                let chain = key.iter().zip(&queries[row * dim..]).fold(0.0, |sum, (k, q)| q.mul_add(*k, sum));
                assert_eq!(score.to_bits(), chain.to_bits(), "{rows} rows, context {context}");
            }
            for (element, output) in outputs[row * out_stride..][..dim].iter().enumerate() {
                let chain = seen.iter().enumerate().fold(0.0, |sum: f32, (position, score)| {
                    score.mul_add(weighed[position * dim + element], sum)
                });
                assert_eq!(output.to_bits(), chain.to_bits(), "{rows} rows, context {context}");
            }
        }
    }
}
