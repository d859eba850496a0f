//! Multiply-adds of f32 on widened values, in the order of tiles: for machines without bf16 arithmetic.
//!
//! Activations are f32 that were rounded to bf16. A word of weights contains an even input in the lower half and an odd
//! one in the upper half. A shift and a mask widen it.

use super::{Bf16Operands, Bf16Unit, CHUNK, LINE_VALUES, PANEL_CHUNK, TILE_ROWS};
use crate::compute::cpu::isa::Isa;
use crate::compute::cpu::kernel::PANEL;

/// Rows of a block.
const ROWS: usize = 4;
/// Columns that the plain kernel computes together.
const COLUMNS: usize = 8;
/// Prefetch distance for a panel's lines.
#[cfg(target_arch = "x86_64")]
const PREFETCH_BYTES: usize = 4096;

/// # Safety
/// As [`super::multiply`].
pub(super) unsafe fn multiply(isa: Isa, rows: usize, operands: &Bf16Operands) {
    for row in (0..rows).step_by(ROWS) {
        // SAFETY: the rows of a block are among the operands'; the `Isa` is one of this machine.
        unsafe {
            match rows - row {
                1 => block::<1>(isa, operands, row),
                2 => block::<2>(isa, operands, row),
                3 => block::<3>(isa, operands, row),
                _ => block::<ROWS>(isa, operands, row),
            }
        }
    }
}

/// # Safety
/// As [`multiply`], for rows `row .. row + M`.
unsafe fn block<const M: usize>(isa: Isa, operands: &Bf16Operands, row: usize) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<const M: usize>(operands: &Bf16Operands, row: usize) {
        // SAFETY: the contract of `block`.
        unsafe { plain::<M, true>(operands, row) }
    }
    // SAFETY: the caller's contract.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::<M>(operands, row),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::<M>(operands, row),
            Isa::Portable => plain::<M, false>(operands, row),
        }
    }
}

/// # Safety
/// As [`block`], on AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512<const M: usize>(operands: &Bf16Operands, row: usize) {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_prefetch, _mm512_add_ps, _mm512_and_si512, _mm512_castsi512_ps, _mm512_fmadd_ps,
        _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_slli_epi32, _mm512_storeu_ps,
    };
    let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
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
        let a = operands.wide.add(row * operands.wide_stride);
        for chunk in 0..operands.chunks() {
            let first = chunk * CHUNK;
            let inputs = CHUNK.min(operands.inputs - first);
            let b = operands.b.add(chunk * PANEL_CHUNK);
            let mut even = [[_mm512_setzero_ps(); 2]; M];
            let mut odd = [[_mm512_setzero_ps(); 2]; M];
            for word in 0..inputs.div_ceil(2) {
                let words = [0, 1].map(|half| {
                    let at = b.add(Bf16Unit::Widened.line(word, half) * LINE_VALUES);
                    _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(PREFETCH_BYTES));
                    _mm512_loadu_si512(at.cast())
                });
                for (m, even) in even.iter_mut().enumerate() {
                    let a = _mm512_set1_ps(*a.add(m * operands.wide_stride + first + 2 * word));
                    for (even, words) in even.iter_mut().zip(words) {
                        let weights = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
                        *even = _mm512_fmadd_ps(a, weights, *even);
                    }
                }
                if 2 * word + 1 == inputs {
                    break;
                }
                for (m, odd) in odd.iter_mut().enumerate() {
                    let a = _mm512_set1_ps(*a.add(m * operands.wide_stride + first + 2 * word + 1));
                    for (odd, words) in odd.iter_mut().zip(words) {
                        let weights = _mm512_castsi512_ps(_mm512_and_si512(words, upper));
                        *odd = _mm512_fmadd_ps(a, weights, *odd);
                    }
                }
            }
            for m in 0..M {
                for half in 0..2 {
                    sums[m][half] = _mm512_add_ps(sums[m][half], _mm512_add_ps(even[m][half], odd[m][half]));
                }
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            let c = c.add(m * operands.c_stride);
            _mm512_storeu_ps(c, sums[0]);
            _mm512_storeu_ps(c.add(TILE_ROWS), sums[1]);
        }
    }
}

/// Plain Rust that the compiler turns into vector code. The product is exact, so without fused multiply-add a product
/// and an addition give the same bits.
///
/// # Safety
/// As [`block`]; with `FUSED`, on a machine that has it.
#[inline(always)]
unsafe fn plain<const M: usize, const FUSED: bool>(operands: &Bf16Operands, row: usize) {
    let add = |sum: f32, a: f32, b: f32| if FUSED { a.mul_add(b, sum) } else { a * b + sum };
    for column in (0..PANEL).step_by(COLUMNS) {
        let mut sums = [[0.0_f32; COLUMNS]; M];
        // SAFETY: every pointer stays inside A, B and C by the contract of `multiply`.
        unsafe {
            let c = operands.c.add(row * operands.c_stride + column);
            if operands.accumulate {
                for (m, sums) in sums.iter_mut().enumerate() {
                    *sums = c.add(m * operands.c_stride).cast::<[f32; COLUMNS]>().read_unaligned();
                }
            }
            let a = operands.wide.add(row * operands.wide_stride);
            let half = column / TILE_ROWS;
            let b = operands.b.add(2 * (column % TILE_ROWS));
            for chunk in 0..operands.chunks() {
                let first = chunk * CHUNK;
                let inputs = CHUNK.min(operands.inputs - first);
                let b = b.add(chunk * PANEL_CHUNK);
                let mut even = [[0.0_f32; COLUMNS]; M];
                let mut odd = [[0.0_f32; COLUMNS]; M];
                for word in 0..inputs.div_ceil(2) {
                    let line = b.add(Bf16Unit::Widened.line(word, half) * LINE_VALUES);
                    let pairs = line.cast::<[[u16; 2]; COLUMNS]>().read_unaligned();
                    let widen = |which: usize| pairs.map(|pair| f32::from_bits(u32::from(pair[which]) << 16));
                    let weights = widen(0);
                    for (m, even) in even.iter_mut().enumerate() {
                        let a = *a.add(m * operands.wide_stride + first + 2 * word);
                        for (even, weight) in even.iter_mut().zip(weights) {
                            *even = add(*even, a, weight);
                        }
                    }
                    if 2 * word + 1 == inputs {
                        break;
                    }
                    let weights = widen(1);
                    for (m, odd) in odd.iter_mut().enumerate() {
                        let a = *a.add(m * operands.wide_stride + first + 2 * word + 1);
                        for (odd, weight) in odd.iter_mut().zip(weights) {
                            *odd = add(*odd, a, weight);
                        }
                    }
                }
                for ((sums, even), odd) in sums.iter_mut().zip(&even).zip(&odd) {
                    for ((sum, even), odd) in sums.iter_mut().zip(even).zip(odd) {
                        *sum += even + odd;
                    }
                }
            }
            for (m, sums) in sums.iter().enumerate() {
                c.add(m * operands.c_stride).cast::<[f32; COLUMNS]>().write_unaligned(*sums);
            }
        }
    }
}
