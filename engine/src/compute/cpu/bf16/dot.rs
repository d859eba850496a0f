//! `vdpbf16ps`: AVX512-BF16.
//!
//! The instruction adds two products to each of 16 sums, the upper one first. With words of two even or of two odd
//! inputs it computes the chains of a chunk in the order of tiles.

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm512_add_ps, _mm512_dpbf16_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::mem::transmute;

use super::{Bf16Operands, Bf16Unit, CHUNK, LINE_VALUES, PANEL_CHUNK, ROW_STEP, TILE_ROWS};
use crate::compute::cpu::isa::follows_streams;

/// Rows of a block whose panel is in the cache: one sum per row and half for each parity, 24 of 32 registers.
const ROWS: usize = 4;
/// Rows of a block that streams a panel from memory, once for all of them. One sum per row and half is in registers,
/// because the odd chains begin after the even ones. For panels in the cache this is slower, because sums must be
/// spilled.
const STREAMED_ROWS: usize = 8;
/// Words of one parity in a chunk.
const WORDS: usize = CHUNK / 4;
/// Prefetch distance for the lines of a streamed panel, if they are prefetched.
const PREFETCH_BYTES: usize = 4096;
/// The same for more rows than [`ROWS`], where each line takes longer.
const PREFETCH_BYTES_STREAMED: usize = 8192;
/// Bytes of a cache line, which is a line of a panel.
const LINE_BYTES: usize = 64;
const _: () = assert!(LINE_VALUES * size_of::<u16>() == LINE_BYTES);

/// The input of a chunk at each position.
pub(super) const ORDER: [u16; CHUNK] = {
    let mut inputs = [0; CHUNK];
    let mut input = 0;
    while input < CHUNK {
        inputs[Bf16Unit::Avx512Bf16.position(input)] = input as u16; // below 32
        input += 1;
    }
    inputs
};

/// # Safety
/// As [`super::multiply`], on AVX512-BF16.
pub(super) unsafe fn multiply(rows: usize, operands: &Bf16Operands) {
    // SAFETY: the caller's contract.
    unsafe {
        match (rows > ROW_STEP, follows_streams()) {
            (true, _) => blocks(rows, operands),
            (false, true) => stream::<false>(rows, operands),
            (false, false) => stream::<true>(rows, operands),
        }
    }
}

/// Few rows: the panel is read from memory, once per [`STREAMED_ROWS`] rows, and prefetched if `AHEAD`.
///
/// # Safety
/// As [`multiply`].
unsafe fn stream<const AHEAD: bool>(rows: usize, operands: &Bf16Operands) {
    for row in (0..rows).step_by(STREAMED_ROWS) {
        // SAFETY: the rows of a block are among the operands' and in one tile of 16.
        unsafe {
            match STREAMED_ROWS.min(rows - row) {
                1 => streamed::<1, AHEAD>(operands, row),
                2 => streamed::<2, AHEAD>(operands, row),
                3 => streamed::<3, AHEAD>(operands, row),
                4 => streamed::<4, AHEAD>(operands, row),
                5 => streamed::<5, AHEAD>(operands, row),
                6 => streamed::<6, AHEAD>(operands, row),
                7 => streamed::<7, AHEAD>(operands, row),
                _ => streamed::<STREAMED_ROWS, AHEAD>(operands, row),
            }
        }
    }
}

/// Many rows: the first ones leave the panel's chunks in the cache for the others. Each block prefetches its part of
/// the next panel and the inputs of the next block. Those inputs are one line in each KiB, which no hardware prefetcher
/// follows.
///
/// # Safety
/// As [`multiply`].
unsafe fn blocks(rows: usize, operands: &Bf16Operands) {
    let lines = if operands.next.is_null() { 0 } else { operands.chunks() * PANEL_CHUNK / LINE_VALUES };
    let mut requested = 0;
    for row in (0..rows).step_by(ROWS) {
        let now = ROWS.min(rows - row);
        let upto = lines * (row + now) / rows;
        // The block after the last rows is the first one, with the next panel.
        let after = if row + now < rows { row + now } else { 0 };
        let requests = Prefetches {
            inputs: inputs(operands, after),
            next: operands.next.wrapping_add(requested * LINE_BYTES),
            lines: upto - requested,
        };
        requested = upto;
        // SAFETY: the rows of a block are among the operands' and in one tile of 16.
        unsafe {
            match now {
                1 => block::<1>(operands, row, requests),
                2 => block::<2>(operands, row, requests),
                3 => block::<3>(operands, row, requests),
                _ => block::<ROWS>(operands, row, requests),
            }
        }
    }
}

/// Prefetches of a block whose panel is in the cache.
#[derive(Clone, Copy)]
struct Prefetches {
    /// Inputs of as many rows as the block's, chunk by chunk, into the first-level cache.
    inputs: *const u16,
    /// `lines` lines from this address, into the second-level cache.
    next: *const u8,
    lines: usize,
}

/// The first chunk of a row's inputs.
fn inputs(operands: &Bf16Operands, row: usize) -> *const u16 {
    operands.a.wrapping_add(row / TILE_ROWS * operands.a_tile + row % TILE_ROWS * CHUNK)
}

/// Words of inputs and of weights.
///
/// # Safety
/// One word, or a line of a panel, may be read at `at`, on a machine with AVX-512.
#[inline(always)]
unsafe fn spread(at: *const i32) -> __m512bh {
    // SAFETY: the caller's contract.
    unsafe { transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*at)) }
}

/// # Safety
/// As [`spread`].
#[inline(always)]
unsafe fn line(chunk: *const u16, word: usize, half: usize) -> __m512bh {
    // SAFETY: the caller's contract.
    unsafe {
        let at = chunk.add(Bf16Unit::Avx512Bf16.line(word, half) * LINE_VALUES);
        transmute::<__m512i, __m512bh>(_mm512_loadu_si512(at.cast()))
    }
}

/// The sums in C, or zeros.
///
/// # Safety
/// As [`multiply`], for rows `row .. row + M`.
#[inline(always)]
unsafe fn begun<const M: usize>(operands: &Bf16Operands, row: usize) -> [[__m512; 2]; M] {
    // SAFETY: the caller's contract.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        if operands.accumulate {
            for (m, sums) in sums.iter_mut().enumerate() {
                let c = operands.c.add((row + m) * operands.c_stride);
                *sums = [_mm512_loadu_ps(c), _mm512_loadu_ps(c.add(TILE_ROWS))];
            }
        }
        sums
    }
}

/// # Safety
/// As [`begun`].
#[inline(always)]
unsafe fn keep<const M: usize>(operands: &Bf16Operands, row: usize, sums: &[[__m512; 2]; M]) {
    for (m, sums) in sums.iter().enumerate() {
        // SAFETY: the caller's contract.
        unsafe {
            let c = operands.c.add((row + m) * operands.c_stride);
            _mm512_storeu_ps(c, sums[0]);
            _mm512_storeu_ps(c.add(TILE_ROWS), sums[1]);
        }
    }
}

/// A panel from memory, line by line in storage order.
///
/// # Safety
/// As [`multiply`], for rows `row .. row + M`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn streamed<const M: usize, const AHEAD: bool>(operands: &Bf16Operands, row: usize) {
    let ahead = if M > ROWS { PREFETCH_BYTES_STREAMED } else { PREFETCH_BYTES };
    // SAFETY: every pointer stays inside A, B and C by the contract of `multiply`; a prefetch may point anywhere.
    unsafe {
        let mut sums = begun::<M>(operands, row);
        let (mut a, mut b) = (inputs(operands, row), operands.b);
        for _ in 0..operands.chunks() {
            let mut parities = [[[_mm512_setzero_ps(); 2]; M]; 2];
            for (parity, chains) in parities.iter_mut().enumerate() {
                for word in parity * WORDS..(parity + 1) * WORDS {
                    let weights = [line(b, word, 0), line(b, word, 1)];
                    if AHEAD {
                        let next =
                            b.wrapping_add(Bf16Unit::Avx512Bf16.line(word, 0) * LINE_VALUES).cast::<i8>();
                        _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(ahead));
                        _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(ahead + LINE_BYTES));
                    }
                    for (m, chains) in chains.iter_mut().enumerate() {
                        let inputs = spread(a.add(m * CHUNK).cast::<i32>().add(word));
                        for (chain, weights) in chains.iter_mut().zip(weights) {
                            *chain = _mm512_dpbf16_ps(*chain, inputs, weights);
                        }
                    }
                }
            }
            add_chains(&mut sums, &parities[0], &parities[1]);
            a = a.add(TILE_ROWS * CHUNK);
            b = b.add(PANEL_CHUNK);
        }
        keep(operands, row, &sums);
    }
}

/// # Safety
/// On a machine with AVX-512.
#[inline(always)]
unsafe fn add_chains<const M: usize>(
    sums: &mut [[__m512; 2]; M],
    even: &[[__m512; 2]; M],
    odd: &[[__m512; 2]; M],
) {
    for m in 0..M {
        for half in 0..2 {
            // SAFETY: the caller's contract.
            sums[m][half] =
                unsafe { _mm512_add_ps(sums[m][half], _mm512_add_ps(even[m][half], odd[m][half])) };
        }
    }
}

/// A panel that is in the cache: even and odd chains side by side.
///
/// # Safety
/// As [`multiply`], for rows `row .. row + M`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn block<const M: usize>(operands: &Bf16Operands, row: usize, mut requests: Prefetches) {
    // SAFETY: every pointer stays inside A, B and C by the contract of `multiply`; a prefetch may point anywhere.
    unsafe {
        let mut sums = begun::<M>(operands, row);
        let (mut a, mut b) = (inputs(operands, row), operands.b);
        let lines = requests.lines.div_ceil(operands.chunks().max(1));
        for _ in 0..operands.chunks() {
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
            let mut even = [[_mm512_setzero_ps(); 2]; M];
            let mut odd = [[_mm512_setzero_ps(); 2]; M];
            for word in 0..WORDS {
                let even_weights = [line(b, word, 0), line(b, word, 1)];
                let odd_weights = [line(b, WORDS + word, 0), line(b, WORDS + word, 1)];
                for m in 0..M {
                    let words = a.add(m * CHUNK).cast::<i32>();
                    let (even_inputs, odd_inputs) =
                        (spread(words.add(word)), spread(words.add(WORDS + word)));
                    for half in 0..2 {
                        even[m][half] = _mm512_dpbf16_ps(even[m][half], even_inputs, even_weights[half]);
                        odd[m][half] = _mm512_dpbf16_ps(odd[m][half], odd_inputs, odd_weights[half]);
                    }
                }
            }
            add_chains(&mut sums, &even, &odd);
            a = a.add(TILE_ROWS * CHUNK);
            b = b.add(PANEL_CHUNK);
        }
        keep(operands, row, &sums);
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::null;

    use super::*;
    use crate::compute::cpu::kernel::PANEL;

    #[test]
    fn requests_change_no_bit() {
        if !Bf16Unit::available().contains(&Bf16Unit::Avx512Bf16) {
            return;
        }
        let (chunks, rows) = (3, TILE_ROWS);
        // Bits of bf16 between 0.5 and 2, of both signs.
        let noise = |i: usize| (i as u32).wrapping_mul(2_654_435_761).rotate_left(13);
        let bf16 = |i: usize| (noise(i) & 0x80ff) as u16 | 0x3f00;
        let a: Vec<u16> = (0..chunks * rows * CHUNK).map(bf16).collect();
        let b: Vec<u16> = (0..chunks * PANEL_CHUNK).map(|i| bf16(i + 99_999)).collect();
        for now in 1..=rows {
            let (mut with, mut without) = (vec![0.0_f32; rows * PANEL], vec![0.0_f32; rows * PANEL]);
            let operands = |c: &mut Vec<f32>| Bf16Operands {
                a: a.as_ptr(),
                a_tile: a.len(),
                wide: null(),
                wide_stride: 0,
                b: b.as_ptr(),
                c: c.as_mut_ptr(),
                c_stride: PANEL,
                inputs: chunks * CHUNK,
                accumulate: false,
                next: null(),
            };
            // SAFETY: sixteen rows and a panel of `chunks` chunks, on a machine that has the instruction.
            unsafe {
                stream::<true>(now, &operands(&mut with));
                stream::<false>(now, &operands(&mut without));
            }
            assert!(with.iter().zip(&without).all(|(with, without)| with.to_bits() == without.to_bits()));
            assert!(with[..now * PANEL].iter().all(|sum| *sum != 0.0), "{now} rows");
        }
    }
}
