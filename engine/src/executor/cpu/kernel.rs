//! The one matrix kernel: a few rows of activations against a panel of 32 output columns.
//!
//! ```text
//!   C[m][0..32] (=|+=)  Σ_k A[m][k] · B[k][0..32]      k strictly in order, one fused multiply-add each
//! ```
//!
//! Projections use it with weight panels, attention with keys (transposed) and values. Every output is one
//! chain in the order of k, whatever the number of rows, so prefill, decode and any batch give the same bits.
//! `accumulate` continues a chain that was stored, which is exact.
#![allow(unsafe_code)] // vector intrinsics on raw pointers; the contract is on `Tile`

mod element;

pub(super) use self::element::{Bf16, Element, Int8};
use super::isa::Isa;

/// Output columns of a panel.
pub(super) const PANEL: usize = 32;
/// Most rows one call computes on any instruction set.
pub(super) const MAX_ROWS: usize = 12;
/// How far ahead of the current row of a panel the next lines are requested, in bytes. Measured from memory on
/// a 2-core Xeon guest: 27 GB/s without, 34 at 2 KiB, 37 to 48 at 4 KiB, the same at 8, less at 16.
const PREFETCH_BYTES: usize = 4096;
/// The same for narrow panels and more than four rows, into the second cache: each line is worked on for longer, and lines
/// that wait in the first take the place of requests. With 8 rows, three runs on a busy guest: 17.6, 15.7 and 16.9
/// GB/s against 13.6, 9.5 and 13.6 with 4 KiB into the first; 16 KiB, or both together, could not be told from it.
const PREFETCH_BYTES_MANY_ROWS: usize = 8192;

/// Operands of one call.
#[derive(Debug)]
pub(super) struct Tile<E> {
    /// First activation; row m begins `m * a_stride` values later and has `depth` values.
    pub(super) a: *const f32,
    pub(super) a_stride: usize,
    /// First row of the panel, or the scales before it: the start of a group. Row k begins `k * b_stride` elements
    /// after the first, plus the scales of the groups between, and has [`PANEL`] elements.
    pub(super) b: *const E,
    pub(super) b_stride: usize,
    /// First output; row m begins `m * c_stride` values later and has [`PANEL`] values.
    pub(super) c: *mut f32,
    pub(super) c_stride: usize,
    /// Length of the chain.
    pub(super) depth: usize,
    /// Continue the chain whose value is in C, instead of starting from zero.
    pub(super) accumulate: bool,
}

impl<E> Clone for Tile<E> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E> Copy for Tile<E> {}

/// Rows that suit one call on this instruction set.
pub(super) fn rows_at_once(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => MAX_ROWS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => 6,
        Isa::Portable => 4,
    }
}

/// Calls a kernel compiled for `$rows` rows, which must be one of the listed numbers.
macro_rules! by_rows {
    ($rows:expr, $tile:expr, $kernel:ident::<$element:ident>, [$($n:literal),*]) => {
        match $rows {
            // SAFETY: the caller's contract is this function's.
            $($n => unsafe { $kernel::<$element, $n>($tile) },)*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}

/// Computes `rows` rows (any number) of one panel.
///
/// # Safety
/// The ranges described by `tile` are valid for `rows` rows, C overlaps neither A nor B, nobody else writes
/// them meanwhile, and `isa` comes from [`Isa::available`].
pub(super) unsafe fn multiply<E: Element>(isa: Isa, rows: usize, tile: &Tile<E>) {
    let step = rows_at_once(isa);
    let mut done = 0;
    while done < rows {
        let now = (rows - done).min(step);
        // SAFETY: both offsets stay inside ranges that are valid for `rows` rows.
        let part = unsafe {
            Tile { a: tile.a.add(done * tile.a_stride), c: tile.c.add(done * tile.c_stride), ..*tile }
        };
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => by_rows!(now, &part, avx512::<E>, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => by_rows!(now, &part, avx2::<E>, [1, 2, 3, 4, 5, 6]),
            Isa::Portable => by_rows!(now, &part, portable::<E>, [1, 2, 3, 4]),
        }
        done += now;
    }
}

/// Computes up to 4 rows of two panels at once, `panel_stride` values apart in B and [`PANEL`] apart in C: with
/// few rows one panel has too few chains to fill the pipeline. Same chains, same bits.
///
/// # Safety
/// As [`multiply`], for both panels.
pub(super) unsafe fn multiply_two<E: Element>(isa: Isa, rows: usize, tile: &Tile<E>, panel_stride: usize) {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 && rows <= 4 {
        // SAFETY: the caller's contract is these functions'.
        unsafe {
            match rows {
                1 => avx512_two::<E, 1>(tile, panel_stride),
                2 => avx512_two::<E, 2>(tile, panel_stride),
                3 => avx512_two::<E, 3>(tile, panel_stride),
                _ => avx512_two::<E, 4>(tile, panel_stride),
            }
        }
        return;
    }
    // SAFETY: the caller's contract covers both panels.
    unsafe {
        multiply(isa, rows, tile);
        let second = Tile { b: tile.b.add(panel_stride), c: tile.c.add(PANEL), ..*tile };
        multiply(isa, rows, &second);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512<E: Element, const M: usize>(tile: &Tile<E>) {
    use std::arch::x86_64::{
        _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps,
        _mm512_setzero_ps, _mm512_storeu_ps,
    };
    let mut sums = [[_mm512_setzero_ps(); 2]; M];
    // SAFETY: by the contract of `multiply` every pointer below stays inside A, B and C; a prefetch may point
    // anywhere.
    unsafe {
        if tile.accumulate {
            for (m, sums) in sums.iter_mut().enumerate() {
                let c = tile.c.add(m * tile.c_stride);
                *sums = [_mm512_loadu_ps(c), _mm512_loadu_ps(c.add(16))];
            }
        }
        let (mut b, mut k) = (tile.b, 0);
        while k < tile.depth {
            let scales = E::scales_avx512(b);
            b = b.add(E::HEADER);
            let end = tile.depth.min(k.saturating_add(E::GROUP));
            for k in k..end {
                let (low, high) = E::load_avx512(b, scales);
                if size_of::<E>() < 4 && M > 4 {
                    _mm_prefetch::<_MM_HINT_T1>(b.cast::<i8>().wrapping_add(PREFETCH_BYTES_MANY_ROWS));
                } else {
                    _mm_prefetch::<_MM_HINT_T0>(b.cast::<i8>().wrapping_add(PREFETCH_BYTES));
                }
                if size_of::<E>() == 4 {
                    _mm_prefetch::<_MM_HINT_T0>(b.cast::<i8>().wrapping_add(PREFETCH_BYTES + 64));
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let a = _mm512_set1_ps(*tile.a.add(m * tile.a_stride + k));
                    sums[0] = _mm512_fmadd_ps(a, low, sums[0]);
                    sums[1] = _mm512_fmadd_ps(a, high, sums[1]);
                }
                b = b.add(tile.b_stride);
            }
            k = end;
        }
        for (m, sums) in sums.iter().enumerate() {
            let c = tile.c.add(m * tile.c_stride);
            _mm512_storeu_ps(c, sums[0]);
            _mm512_storeu_ps(c.add(16), sums[1]);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512_two<E: Element, const M: usize>(tile: &Tile<E>, panel_stride: usize) {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_prefetch, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_storeu_ps,
    };
    let mut sums = [[_mm512_setzero_ps(); 4]; M];
    // SAFETY: as in `avx512`, for both panels.
    unsafe {
        if tile.accumulate {
            for (m, sums) in sums.iter_mut().enumerate() {
                let c = tile.c.add(m * tile.c_stride);
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm512_loadu_ps(c.add(16 * i));
                }
            }
        }
        let (mut b, mut k) = (tile.b, 0);
        while k < tile.depth {
            let (scales, scales_two) = (E::scales_avx512(b), E::scales_avx512(b.add(panel_stride)));
            b = b.add(E::HEADER);
            let end = tile.depth.min(k.saturating_add(E::GROUP));
            for k in k..end {
                let (low, high) = E::load_avx512(b, scales);
                let (low_two, high_two) = E::load_avx512(b.add(panel_stride), scales_two);
                for ahead in [0, panel_stride] {
                    let b = b.wrapping_add(ahead).cast::<i8>();
                    _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(PREFETCH_BYTES));
                    if size_of::<E>() == 4 {
                        _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(PREFETCH_BYTES + 64));
                    }
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let a = _mm512_set1_ps(*tile.a.add(m * tile.a_stride + k));
                    sums[0] = _mm512_fmadd_ps(a, low, sums[0]);
                    sums[1] = _mm512_fmadd_ps(a, high, sums[1]);
                    sums[2] = _mm512_fmadd_ps(a, low_two, sums[2]);
                    sums[3] = _mm512_fmadd_ps(a, high_two, sums[3]);
                }
                b = b.add(tile.b_stride);
            }
            k = end;
        }
        for (m, sums) in sums.iter().enumerate() {
            let c = tile.c.add(m * tile.c_stride);
            for (i, sum) in sums.iter().enumerate() {
                _mm512_storeu_ps(c.add(16 * i), *sum);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn avx2<E: Element, const M: usize>(tile: &Tile<E>) {
    use std::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
    };
    for half in 0..2 {
        let mut sums = [[_mm256_setzero_ps(); 2]; M];
        // SAFETY: by the contract of `multiply` every pointer below stays inside A, B and C.
        unsafe {
            let c = tile.c.add(16 * half);
            if tile.accumulate {
                for (m, sums) in sums.iter_mut().enumerate() {
                    let c = c.add(m * tile.c_stride);
                    *sums = [_mm256_loadu_ps(c), _mm256_loadu_ps(c.add(8))];
                }
            }
            let (mut b, mut k) = (tile.b, 0);
            while k < tile.depth {
                let scales = E::scales_avx2(b, half);
                b = b.add(E::HEADER);
                let end = tile.depth.min(k.saturating_add(E::GROUP));
                for k in k..end {
                    let (low, high) = E::load_avx2(b, half, scales);
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let a = _mm256_set1_ps(*tile.a.add(m * tile.a_stride + k));
                        sums[0] = _mm256_fmadd_ps(a, low, sums[0]);
                        sums[1] = _mm256_fmadd_ps(a, high, sums[1]);
                    }
                    b = b.add(tile.b_stride);
                }
                k = end;
            }
            for (m, sums) in sums.iter().enumerate() {
                let c = c.add(m * tile.c_stride);
                _mm256_storeu_ps(c, sums[0]);
                _mm256_storeu_ps(c.add(8), sums[1]);
            }
        }
    }
}

unsafe fn portable<E: Element, const M: usize>(tile: &Tile<E>) {
    let mut sums = [[0.0_f32; PANEL]; M];
    // SAFETY: by the contract of `multiply` every pointer below stays inside A, B and C.
    unsafe {
        if tile.accumulate {
            for (m, sums) in sums.iter_mut().enumerate() {
                *sums = tile.c.add(m * tile.c_stride).cast::<[f32; PANEL]>().read_unaligned();
            }
        }
        let (mut b, mut k) = (tile.b, 0);
        while k < tile.depth {
            let scales = E::scales(b);
            b = b.add(E::HEADER);
            let end = tile.depth.min(k.saturating_add(E::GROUP));
            for k in k..end {
                let values = E::load(b, &scales);
                for (m, sums) in sums.iter_mut().enumerate() {
                    let a = *tile.a.add(m * tile.a_stride + k);
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = a.mul_add(value, *sum);
                    }
                }
                b = b.add(tile.b_stride);
            }
            k = end;
        }
        for (m, sums) in sums.iter().enumerate() {
            tile.c.add(m * tile.c_stride).cast::<[f32; PANEL]>().write_unaligned(*sums);
        }
    }
}
