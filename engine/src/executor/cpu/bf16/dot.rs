//! `vdpbf16ps`: AVX512-BF16.
//!
//! The instruction adds two products to each of 16 sums, the upper first. With words of two even or of two odd inputs it
//! walks along the chains of a chunk as tiles do.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm512_add_ps, _mm512_dpbf16_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::mem::transmute;
use std::ptr::null;

use super::{CHUNK, Operands, PANEL_CHUNK, ROW_STEP, TILE_ROWS, Unit};

/// Rows of a block with both halves of a panel: three sums for each, 24 of 32 registers.
const ROWS: usize = 4;
/// Rows of a block with one half after the other, so that a panel is streamed from memory once for all of them. What is added up
/// over the chunks is in memory then, and each input is read for either half: with many rows, which find panels in the cache,
/// that is slower.
const STREAMED_ROWS: usize = 8;
/// Words of one parity in a chunk.
const WORDS: usize = CHUNK / 4;
/// Values of a word for all columns of half a panel.
const WORD_VALUES: usize = 2 * TILE_ROWS;
/// How far ahead the lines of a panel that is streamed are requested.
const PREFETCH_BYTES: usize = 4096;
/// The same for more rows than [`ROWS`], where each line is worked on for longer.
const PREFETCH_BYTES_STREAMED: usize = 8192;
/// Bytes and values of a line of the cache.
const LINE_BYTES: usize = 64;
const LINE_VALUES: usize = LINE_BYTES / size_of::<u16>();

/// Which input of a chunk lies at each position.
pub(super) const ORDER: [u16; CHUNK] = {
    let mut inputs = [0; CHUNK];
    let mut input = 0;
    while input < CHUNK {
        inputs[Unit::Avx512Bf16.position(input)] = input as u16; // below 32
        input += 1;
    }
    inputs
};

/// # Safety
/// As [`super::multiply`], on AVX512-BF16.
pub(super) unsafe fn multiply(rows: usize, operands: &Operands) {
    if rows > ROW_STEP {
        // SAFETY: the caller's contract.
        unsafe { blocks(rows, operands) };
        return;
    }
    let none = Requests { inputs: null(), next: null(), lines: 0 };
    for row in (0..rows).step_by(STREAMED_ROWS) {
        // SAFETY: the rows of a block are among the operands' and in one tile of 16.
        unsafe {
            match STREAMED_ROWS.min(rows - row) {
                1 => block::<1, 2, true>(operands, row, none),
                2 => block::<2, 2, true>(operands, row, none),
                3 => block::<3, 2, true>(operands, row, none),
                4 => block::<ROWS, 2, true>(operands, row, none),
                5 => block::<5, 1, true>(operands, row, none),
                6 => block::<6, 1, true>(operands, row, none),
                7 => block::<7, 1, true>(operands, row, none),
                _ => block::<STREAMED_ROWS, 1, true>(operands, row, none),
            }
        }
    }
}

/// So many rows that the first ones leave the panel's chunks in the cache for the others. Each block requests its part of what
/// is multiplied next, and the inputs of the block after it: those are a line in each KiB, which no hardware
/// prefetcher follows.
///
/// # Safety
/// As [`multiply`].
unsafe fn blocks(rows: usize, operands: &Operands) {
    let lines = if operands.next.is_null() { 0 } else { operands.chunks() * PANEL_CHUNK / LINE_VALUES };
    let mut requested = 0;
    for row in (0..rows).step_by(ROWS) {
        let now = ROWS.min(rows - row);
        let upto = lines * (row + now) / rows;
        // After the last rows, the first ones meet the next panel.
        let after = if row + now < rows { row + now } else { 0 };
        let requests = Requests {
            inputs: inputs(operands, after),
            next: operands.next.wrapping_add(requested * LINE_BYTES),
            lines: upto - requested,
        };
        requested = upto;
        // SAFETY: the rows of a block are among the operands' and in one tile of 16.
        unsafe {
            match now {
                1 => block::<1, 2, false>(operands, row, requests),
                2 => block::<2, 2, false>(operands, row, requests),
                3 => block::<3, 2, false>(operands, row, requests),
                _ => block::<ROWS, 2, false>(operands, row, requests),
            }
        }
    }
}

/// What a block that finds its panel in the cache requests while it multiplies.
#[derive(Clone, Copy)]
struct Requests {
    /// Of as many rows as the block's, chunk by chunk as it goes, into the first cache.
    inputs: *const u16,
    /// So many lines from here on, into the second cache.
    next: *const u8,
    lines: usize,
}

/// The first chunk of a row's inputs.
fn inputs(operands: &Operands, row: usize) -> *const u16 {
    operands.a.wrapping_add(row / TILE_ROWS * operands.a_tile + row % TILE_ROWS * CHUNK)
}

/// `H` halves of the panel at a time, which comes from memory (`STREAMED`) or is in the cache.
///
/// # Safety
/// As [`multiply`], for rows `row .. row + M`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn block<const M: usize, const H: usize, const STREAMED: bool>(
    operands: &Operands,
    row: usize,
    mut requests: Requests,
) {
    let ahead = if M > ROWS { PREFETCH_BYTES_STREAMED } else { PREFETCH_BYTES };
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
        let mut a = inputs(operands, row);
        let mut b = operands.b;
        let lines = requests.lines.div_ceil(operands.chunks().max(1));
        for _ in 0..operands.chunks() {
            if !STREAMED {
                for m in 0..M {
                    _mm_prefetch::<_MM_HINT_T0>(requests.inputs.wrapping_add(m * CHUNK).cast());
                }
                requests.inputs = requests.inputs.wrapping_add(TILE_ROWS * CHUNK);
                let now = lines.min(requests.lines);
                for line in 0..now {
                    _mm_prefetch::<_MM_HINT_T1>(requests.next.wrapping_add(line * LINE_BYTES).cast());
                }
                requests.next = requests.next.wrapping_add(now * LINE_BYTES);
                requests.lines -= now;
            }
            for first in (0..2).step_by(H) {
                let mut even = [[_mm512_setzero_ps(); H]; M];
                let mut odd = [[_mm512_setzero_ps(); H]; M];
                for word in 0..WORDS {
                    let weights = |word: usize, half: usize| {
                        let at = b.add((first + half) * PANEL_CHUNK / 2 + word * WORD_VALUES);
                        transmute::<__m512i, __m512bh>(_mm512_loadu_si512(at.cast()))
                    };
                    if STREAMED {
                        // In the order of memory, whatever order the lines are used in.
                        let next = b
                            .add((first * WORDS + word * H) * 2 * WORD_VALUES)
                            .cast::<i8>()
                            .wrapping_add(ahead);
                        for line in 0..2 * H {
                            _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(LINE_BYTES * line));
                        }
                    }
                    let even_weights: [__m512bh; H] = std::array::from_fn(|half| weights(word, half));
                    let odd_weights: [__m512bh; H] = std::array::from_fn(|half| weights(WORDS + word, half));
                    for m in 0..M {
                        let words = a.add(m * CHUNK).cast::<i32>();
                        let spread =
                            |word| transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*words.add(word)));
                        let (even_inputs, odd_inputs) = (spread(word), spread(WORDS + word));
                        for half in 0..H {
                            even[m][half] = _mm512_dpbf16_ps(even[m][half], even_inputs, even_weights[half]);
                            odd[m][half] = _mm512_dpbf16_ps(odd[m][half], odd_inputs, odd_weights[half]);
                        }
                    }
                }
                let added = |sum: __m512, even, odd| _mm512_add_ps(sum, _mm512_add_ps(even, odd));
                for m in 0..M {
                    for half in 0..H {
                        sums[m][first + half] = added(sums[m][first + half], even[m][half], odd[m][half]);
                    }
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
