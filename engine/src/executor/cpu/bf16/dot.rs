//! `vdpbf16ps`: AVX512-BF16.
//!
//! The instruction adds two products to each of 16 sums, the upper first. With words of two even or of two odd inputs it
//! walks along the chains of a chunk as tiles do.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::mem::transmute;

use super::{CHUNK, Operands, PANEL_CHUNK, TILE_ROWS};

/// Rows of a block: three sums for each half of a panel, 24 of 32 registers.
const ROWS: usize = 4;
/// Words of one parity in a chunk.
const WORDS: usize = CHUNK / 4;
/// Values of a word for all columns of half a panel.
const WORD_VALUES: usize = 2 * TILE_ROWS;
/// How far ahead a panel's lines are requested.
const PREFETCH_BYTES: usize = 4096;

/// # Safety
/// As [`super::multiply`], on AVX512-BF16.
pub(super) unsafe fn multiply(rows: usize, operands: &Operands) {
    for row in (0..rows).step_by(ROWS) {
        // SAFETY: the rows of a block are among the operands' and in one tile of 16.
        unsafe {
            match rows - row {
                1 => block::<1>(operands, row),
                2 => block::<2>(operands, row),
                3 => block::<3>(operands, row),
                _ => block::<ROWS>(operands, row),
            }
        }
    }
}

/// # Safety
/// As [`multiply`], for rows `row .. row + M`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn block<const M: usize>(operands: &Operands, row: usize) {
    let mut sums = [[_mm512_setzero_ps(); 2]; M];
    // SAFETY: every pointer stays inside A, B and C by the contract of `multiply`; a prefetch may point anywhere.
    unsafe {
        let c = operands.c.add(row * operands.c_stride);
        if operands.accumulate {
            for (m, sums) in sums.iter_mut().enumerate() {
                let c = c.add(m * operands.c_stride);
                *sums = [_mm512_loadu_ps(c), _mm512_loadu_ps(c.add(TILE_ROWS))];
            }
        }
        let mut a = operands.a.add(row / TILE_ROWS * operands.a_tile + row % TILE_ROWS * CHUNK);
        let mut b = operands.b;
        for _ in 0..operands.chunks() {
            let mut even = [[_mm512_setzero_ps(); 2]; M];
            let mut odd = [[_mm512_setzero_ps(); 2]; M];
            for word in 0..WORDS {
                let weights = |word: usize, half: usize| {
                    let at = b.add(half * PANEL_CHUNK / 2 + word * WORD_VALUES);
                    _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(PREFETCH_BYTES));
                    transmute::<__m512i, __m512bh>(_mm512_loadu_si512(at.cast()))
                };
                let even_weights = [weights(word, 0), weights(word, 1)];
                let odd_weights = [weights(WORDS + word, 0), weights(WORDS + word, 1)];
                for m in 0..M {
                    let words = a.add(m * CHUNK).cast::<i32>();
                    let spread = |word| transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*words.add(word)));
                    let (even_inputs, odd_inputs) = (spread(word), spread(WORDS + word));
                    for half in 0..2 {
                        even[m][half] = _mm512_dpbf16_ps(even[m][half], even_inputs, even_weights[half]);
                        odd[m][half] = _mm512_dpbf16_ps(odd[m][half], odd_inputs, odd_weights[half]);
                    }
                }
            }
            let added = |sum: __m512, even, odd| _mm512_add_ps(sum, _mm512_add_ps(even, odd));
            for m in 0..M {
                for half in 0..2 {
                    sums[m][half] = added(sums[m][half], even[m][half], odd[m][half]);
                }
            }
            a = a.add(TILE_ROWS * CHUNK);
            b = b.add(PANEL_CHUNK);
        }
        for (m, sums) in sums.iter().enumerate() {
            let c = c.add(m * operands.c_stride);
            _mm512_storeu_ps(c, sums[0]);
            _mm512_storeu_ps(c.add(TILE_ROWS), sums[1]);
        }
    }
}
