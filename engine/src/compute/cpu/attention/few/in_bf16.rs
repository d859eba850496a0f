//! The same in bfloat16 mode: keys and values are rounded when they are read and stay in registers for `vdpbf16ps`.
//!
//! The chains are those of [`bf16`](super::super::super::bf16): chunks of 32 elements or positions, one chain over the
//! even and one over the odd inputs. The bits therefore equal those of the passes that pack panels first, which are
//! used for more rows.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_add_ps, _mm512_and_si512, _mm512_castsi512_ps, _mm512_dpbf16_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_permutexvar_epi16, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_storeu_ps,
};
use std::mem::transmute;
use std::ops::Range;

use baton_connector::layout::KvDtype;

use super::{AHEAD, CacheBf16, CacheElement, CacheF16, HeadCache, KvHalf, LANES, later, transposed};
use crate::compute::cpu::bf16::{Bf16Unit, CHUNK};
use crate::compute::cpu::isa::{Isa, request};

/// The order of queries and weights, independent of the unit in use: words of two even or of two odd inputs.
pub(in crate::compute::cpu::attention) const ORDER: Bf16Unit = Bf16Unit::Avx512Bf16;
/// Words of one parity in a chunk.
const WORDS: usize = CHUNK / 4;
/// Alternates 16-bit values from the two halves of a register. The lower value of a word is from the lower half.
const INTERLEAVED: [u16; CHUNK] = {
    let mut from = [0; CHUNK];
    let mut at = 0;
    while at < CHUNK as u16 {
        from[at as usize] = at / 2 + at % 2 * LANES as u16;
        at += 1;
    }
    from
};

/// Whether this module supports this number of rows of this cache.
pub(in crate::compute::cpu::attention) fn suits(
    isa: Isa,
    unit: Bf16Unit,
    cache: &HeadCache<'_>,
    rows: usize,
) -> bool {
    unit.packs()
        && super::suits(isa, cache, rows)
        && cache.layout.head_dim.is_multiple_of(CHUNK)
        && is_x86_feature_detected!("avx512bf16")
}

/// As [`super::scores`]; queries are rounded, in [`ORDER`].
///
/// # Safety
/// As there, with [`suits`].
pub(in crate::compute::cpu::attention) unsafe fn scores(
    cache: &HeadCache<'_>,
    range: Range<usize>,
    rows: usize,
    queries: &[u16],
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

/// As [`super::values`]; weights are rounded, in [`ORDER`], and zero from the range's end to that of its chunk.
///
/// # Safety
/// As there, with [`suits`].
pub(in crate::compute::cpu::attention) unsafe fn values(
    cache: &HeadCache<'_>,
    range: Range<usize>,
    rows: usize,
    weights: &[u16],
    weights_stride: usize,
    outputs: &mut [f32],
    outputs_stride: usize,
) {
    assert!(weights.len() >= (rows - 1) * weights_stride + range.end.next_multiple_of(CHUNK));
    assert!(outputs.len() >= (rows - 1) * outputs_stride + cache.layout.head_dim);
    for outputs in outputs.chunks_mut(outputs_stride).take(rows) {
        outputs[..cache.layout.head_dim].fill(0.0);
    }
    let (weights, outputs) = (weights.as_ptr(), outputs.as_mut_ptr());
    // SAFETY: the caller's contract, and the assertions above.
    unsafe {
        by_rows!(
            rows,
            cache.layout.dtype,
            values_of(cache, range, weights, weights_stride, outputs, outputs_stride)
        );
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn scores_of<E: CacheElement, const R: usize>(
    cache: &HeadCache<'_>,
    range: Range<usize>,
    queries: *const u16,
    scores: *mut f32,
    stride: usize,
) {
    let (begin, context) = (range.start, range.end);
    let dim = cache.layout.head_dim;
    let group_bytes = LANES * dim * size_of::<E>();
    for from in (begin..context.min(begin + AHEAD)).step_by(LANES) {
        request(cache.vector(KvHalf::Keys, from), group_bytes);
    }
    let order = ORDER.order().expect("an order of its own");
    // SAFETY: the contract of `scores`; the order is 64 bytes long.
    unsafe {
        let order = _mm512_loadu_si512(order.as_ptr().cast());
        for from in (begin..context).step_by(LANES) {
            let keys = cache.vector(KvHalf::Keys, from).cast_const().cast::<E>();
            let later = later(cache, from, context);
            let mut sums = [_mm512_setzero_ps(); R];
            for element in (0..dim).step_by(CHUNK) {
                let mut rows = [_mm512_setzero_ps(); LANES];
                for (key, row) in rows.iter_mut().enumerate() {
                    let key = keys.add(key * dim + element);
                    let rounded = E::rounded(key, key.add(LANES));
                    *row = _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, rounded));
                }
                let words = transposed(rows);
                let part = LANES * CHUNK * size_of::<E>();
                request(later.wrapping_add(element / CHUNK * part), part);
                add_products(&mut sums, &words, queries.add(element), dim);
            }
            for (row, sum) in sums.into_iter().enumerate() {
                _mm512_storeu_ps(scores.add(row * stride + from), sum);
            }
        }
    }
}

/// Adds the products of a chunk to each row's sum. A row's inputs, in [`ORDER`], begin `stride` values after those of
/// the row before.
///
/// # Safety
/// There are as many inputs as `words` need; this machine has AVX512-BF16.
#[inline(always)]
unsafe fn add_products<const R: usize>(
    sums: &mut [__m512; R],
    words: &[__m512; 2 * WORDS],
    inputs: *const u16,
    stride: usize,
) {
    // SAFETY: the caller's contract; a register of words may be seen as any of the three types.
    unsafe {
        let (mut even, mut odd) = ([_mm512_setzero_ps(); R], [_mm512_setzero_ps(); R]);
        for word in 0..WORDS {
            let even_words = transmute::<__m512, __m512bh>(words[word]);
            let odd_words = transmute::<__m512, __m512bh>(words[WORDS + word]);
            for row in 0..R {
                let inputs = inputs.add(row * stride).cast::<i32>().add(word);
                let even_inputs = transmute::<__m512i, __m512bh>(_mm512_set1_epi32(inputs.read_unaligned()));
                let odd_inputs =
                    transmute::<__m512i, __m512bh>(_mm512_set1_epi32(inputs.add(WORDS).read_unaligned()));
                even[row] = _mm512_dpbf16_ps(even[row], even_inputs, even_words);
                odd[row] = _mm512_dpbf16_ps(odd[row], odd_inputs, odd_words);
            }
        }
        for row in 0..R {
            sums[row] = _mm512_add_ps(sums[row], _mm512_add_ps(even[row], odd[row]));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn values_of<E: CacheElement, const R: usize>(
    cache: &HeadCache<'_>,
    range: Range<usize>,
    weights: *const u16,
    weights_stride: usize,
    outputs: *mut f32,
    stride: usize,
) {
    let context = range.end;
    for from in (range.start..context).step_by(CHUNK) {
        let run = |start: usize| cache.vector(KvHalf::Values, start.min(context - 1) / LANES * LANES);
        let runs = [run(from), run(from + LANES)].map(|run| run.cast_const().cast::<E>());
        // Beyond the end, the last run is prefetched again, which is in the cache already.
        let later = [run(from + AHEAD), run(from + AHEAD + LANES)];
        // SAFETY: the contract of `values`; runs of sixteen positions lie in one block.
        unsafe {
            let weights = weights.add(from);
            match context - from {
                CHUNK.. => chunk_of::<E, R, true>(
                    cache,
                    runs,
                    CHUNK,
                    later,
                    weights,
                    weights_stride,
                    outputs,
                    stride,
                ),
                seen => chunk_of::<E, R, false>(
                    cache,
                    runs,
                    seen,
                    later,
                    weights,
                    weights_stride,
                    outputs,
                    stride,
                ),
            }
        }
    }
}

/// Adds the weighted values of a chunk of positions. Only the first `seen` positions exist: all of them if the chunk is
/// `WHOLE`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
#[allow(clippy::too_many_arguments, reason = "the coordinates of one chunk")]
unsafe fn chunk_of<E: CacheElement, const R: usize, const WHOLE: bool>(
    cache: &HeadCache<'_>,
    runs: [*const E; 2],
    seen: usize,
    later: [*mut u8; 2],
    weights: *const u16,
    weights_stride: usize,
    outputs: *mut f32,
    stride: usize,
) {
    let dim = cache.layout.head_dim;
    // SAFETY: the contract of `values`; columns are inside the head.
    unsafe {
        let interleaved = _mm512_loadu_si512(INTERLEAVED.as_ptr().cast());
        for column in (0..dim).step_by(LANES) {
            let part = LANES * LANES * size_of::<E>();
            for later in later {
                request(later.wrapping_add(column / LANES * part), part);
            }
            let mut words = [_mm512_setzero_ps(); 2 * WORDS];
            for (word, words) in words.iter_mut().enumerate() {
                // The upper of a word's two positions comes first.
                let upper = word % WORDS * 4 + word / WORDS;
                let lower = upper + 2;
                let last = if WHOLE { CHUNK } else { seen } - 1;
                let (near, far) = (lower.min(last), upper.min(last));
                let near = runs[near / LANES].add(near % LANES * dim + column);
                let far = runs[far / LANES].add(far % LANES * dim + column);
                let mut both = _mm512_permutexvar_epi16(interleaved, E::rounded(near, far));
                if !WHOLE {
                    let kept =
                        if upper < seen { 0xffff_0000 } else { 0 } | if lower < seen { 0xffff } else { 0 };
                    both = _mm512_and_si512(both, _mm512_set1_epi32(u32::cast_signed(kept)));
                }
                *words = _mm512_castsi512_ps(both);
            }
            let mut sums = [_mm512_setzero_ps(); R];
            let out = outputs.add(column);
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_loadu_ps(out.add(row * stride));
            }
            add_products(&mut sums, &words, weights, weights_stride);
            for (row, sum) in sums.into_iter().enumerate() {
                _mm512_storeu_ps(out.add(row * stride), sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_connector::layout::KvLayout;

    use super::super::super::{AttentionScratch, QueryShape};
    use super::*;

    /// Values without a pattern, of both signs.
    fn noise(seed: usize, count: usize) -> Vec<f32> {
        let mixed =
            |i: usize| (i as u32).wrapping_mul(2_654_435_761).rotate_left(13).wrapping_mul(2_246_822_519);
        (seed..seed + count).map(|i| (mixed(i) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    /// The bits of the attention output of `count` positions from `start`.
    fn attended(shape: &QueryShape<'_>, cache: &HeadCache<'_>, start: usize, count: usize) -> Vec<u32> {
        let dim = cache.layout.head_dim;
        let width = shape.group * dim;
        let queries: Vec<_> = (start..start + count).map(|position| noise(31 * position, width)).collect();
        let mut outputs = vec![f32::NAN; count * width];
        let out = outputs.as_mut_ptr();
        // SAFETY: only this test uses blocks and buffers.
        unsafe {
            shape.attend(
                cache,
                start,
                count,
                &mut AttentionScratch::default(),
                |i, g| queries[i][g * dim..].as_ptr(),
                |i, g| out.add(i * width + g * dim),
            );
        }
        outputs.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn a_position_has_the_same_bits_alone_and_in_a_pair() {
        let units = Bf16Unit::available().into_iter().filter(|unit| unit.packs());
        for (unit, (dtype, block_tokens, head_dim)) in units.flat_map(|unit| {
            [
                (KvDtype::F32, 16, 64),
                (KvDtype::F16, 32, 96),
                (KvDtype::Bf16, 16, 128),
                (KvDtype::Bf16, 48, 32),
                (KvDtype::F32, 48, 32),
            ]
            .map(|layout| (unit, layout))
        }) {
            let layout = KvLayout { layers: 2, kv_heads: 2, head_dim, block_tokens, dtype };
            for context in [2, 3, 16, 17, 32, 33, 34, 47, 48, 65, 130] {
                // The contents of slots without a key must not affect the result.
                let mut memory = vec![vec![f32::NAN; layout.block_bytes() / 4]; layout.blocks_for(context)];
                let blocks: Vec<*mut u8> = memory.iter_mut().map(|block| block.as_mut_ptr().cast()).collect();
                let cache = HeadCache { layout: &layout, layer: 1, head: 1, blocks: &blocks };
                for position in 0..context {
                    for (half, seed) in [(KvHalf::Keys, 7), (KvHalf::Values, 1_000_007)] {
                        // SAFETY: only this test uses the blocks.
                        unsafe {
                            let vector = noise(seed + 999 * position, head_dim);
                            cache.store(Isa::Avx512, half, position, &vector);
                        }
                    }
                }
                // A window of whole chunks, one of none, and all keys; a cap in the range of the scores; sinks.
                let kinds = [(None, None, true), (Some(21), None, false), (Some(64), Some(1.5), false)];
                let each = (1..=8).flat_map(|group| kinds.map(|kind| (group, kind)));
                for (group, (window, cap, has_sinks)) in each {
                    let sinks = noise(5, group);
                    let shape = QueryShape {
                        isa: Isa::Avx512,
                        group,
                        factor: 0.7,
                        cap,
                        sinks: has_sinks.then_some(sinks.as_slice()),
                        window,
                        bf16: Some(unit),
                    };
                    assert!(suits(Isa::Avx512, unit, &cache, group));
                    let beside = attended(&shape, &cache, context - 2, 2);
                    let alone = [context - 2, context - 1].map(|at| attended(&shape, &cache, at, 1));
                    assert!(
                        alone.concat() == beside,
                        "{unit:?} {layout:?}: {group} heads, context {context}, window {window:?}"
                    );
                }
            }
        }
    }
}
