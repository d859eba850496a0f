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
#[cfg(target_arch = "x86_64")]
use super::isa::is_amd;

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

/// The same for four panels side by side, into the second cache. One row from memory, on a 2-core Xeon guest that read
/// 39.4 GB/s in plain loops (2026-11-21): four panels 36.9 GB/s, and 33.9, 34.4 and 32.7 at 1, 4 and 8 KiB; two
/// panels 32 to 33.5 at any distance and into either cache. On AMD into the first cache: a whole step of one sequence with int8
/// weights is 1.5 to 3.5 % faster (Zen 5, 2026-11-24; 1.5 KiB the same, less at 1, 2.5 and 4).
const PREFETCH_BYTES_FOUR: usize = 2048;

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
    /// Request rows of B ahead, because it is read forward from far away. Otherwise that fetches what nobody needs.
    pub(super) ahead: bool,
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

/// How many panels [`multiply_beside`] computes at once for so many rows, at most.
///
/// AMD's processors follow one stream better than several. A single row of int8 weights needs more chains than one panel has.
pub(super) fn panels_at_once<E: Element>(isa: Isa, rows: usize) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if is_amd() && (rows > 1 || size_of::<E>() > 1) => 1,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if rows <= 2 => 4,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if rows <= 4 => 2,
        _ => 1,
    }
}

/// Computes `rows` rows of `panels` panels, `panel_stride` values apart in B and [`PANEL`] apart in C. With few rows
/// several are computed side by side: one has too few chains to fill the pipeline, and memory delivers more when it is
/// read in several places. Same chains, same bits.
///
/// # Safety
/// As [`multiply`], for all panels.
pub(super) unsafe fn multiply_beside<E: Element>(
    isa: Isa,
    rows: usize,
    tile: &Tile<E>,
    panel_stride: usize,
    panels: usize,
) {
    let most = panels_at_once::<E>(isa, rows);
    let mut done = 0;
    while done < panels {
        // SAFETY: the caller's contract covers all panels.
        let tile =
            unsafe { Tile { b: tile.b.add(done * panel_stride), c: tile.c.add(done * PANEL), ..*tile } };
        let left = panels - done;
        // SAFETY: as above; the caller's contract is these functions'.
        done += unsafe {
            match (isa, rows) {
                #[cfg(target_arch = "x86_64")]
                (_, 1) if most == 4 && left >= 4 => avx512_beside::<E, 1, 4>(&tile, panel_stride),
                #[cfg(target_arch = "x86_64")]
                (_, 2) if most == 4 && left >= 4 => avx512_beside::<E, 2, 4>(&tile, panel_stride),
                #[cfg(target_arch = "x86_64")]
                (_, 1) if most >= 2 && left >= 2 => avx512_beside::<E, 1, 2>(&tile, panel_stride),
                #[cfg(target_arch = "x86_64")]
                (_, 2) if most >= 2 && left >= 2 => avx512_beside::<E, 2, 2>(&tile, panel_stride),
                #[cfg(target_arch = "x86_64")]
                (_, 3) if most >= 2 && left >= 2 => avx512_beside::<E, 3, 2>(&tile, panel_stride),
                #[cfg(target_arch = "x86_64")]
                (_, 4) if most >= 2 && left >= 2 => avx512_beside::<E, 4, 2>(&tile, panel_stride),
                _ => {
                    multiply(isa, rows, &tile);
                    1
                }
            }
        };
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
                if tile.ahead {
                    if size_of::<E>() < 4 && M > 4 {
                        _mm_prefetch::<_MM_HINT_T1>(b.cast::<i8>().wrapping_add(PREFETCH_BYTES_MANY_ROWS));
                    } else {
                        _mm_prefetch::<_MM_HINT_T0>(b.cast::<i8>().wrapping_add(PREFETCH_BYTES));
                    }
                    if size_of::<E>() == 4 {
                        _mm_prefetch::<_MM_HINT_T0>(b.cast::<i8>().wrapping_add(PREFETCH_BYTES + 64));
                    }
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

/// `P` panels side by side; returns `P`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512_beside<E: Element, const M: usize, const P: usize>(
    tile: &Tile<E>,
    panel_stride: usize,
) -> usize {
    use std::arch::x86_64::{
        _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps,
        _mm512_setzero_ps, _mm512_storeu_ps,
    };
    let near = is_amd();
    let mut sums = [[[_mm512_setzero_ps(); 2]; P]; M];
    // SAFETY: as in `avx512`, for all panels.
    unsafe {
        if tile.accumulate {
            for (m, sums) in sums.iter_mut().enumerate() {
                let c = tile.c.add(m * tile.c_stride);
                for (i, sum) in sums.as_flattened_mut().iter_mut().enumerate() {
                    *sum = _mm512_loadu_ps(c.add(16 * i));
                }
            }
        }
        let (mut b, mut k) = (tile.b, 0);
        while k < tile.depth {
            let scales: [_; P] = std::array::from_fn(|panel| E::scales_avx512(b.add(panel * panel_stride)));
            b = b.add(E::HEADER);
            let end = tile.depth.min(k.saturating_add(E::GROUP));
            for k in k..end {
                for panel in 0..P {
                    let b = b.add(panel * panel_stride);
                    let (low, high) = E::load_avx512(b, scales[panel]);
                    for line in 0..size_of::<E>().div_ceil(2) {
                        let ahead = b.cast::<i8>().wrapping_add(64 * line);
                        if P == 4 && near {
                            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(PREFETCH_BYTES_FOUR));
                        } else if P == 4 {
                            _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(PREFETCH_BYTES_FOUR));
                        } else {
                            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(PREFETCH_BYTES));
                        }
                    }
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let a = _mm512_set1_ps(*tile.a.add(m * tile.a_stride + k));
                        sums[panel][0] = _mm512_fmadd_ps(a, low, sums[panel][0]);
                        sums[panel][1] = _mm512_fmadd_ps(a, high, sums[panel][1]);
                    }
                }
                b = b.add(tile.b_stride);
            }
            k = end;
        }
        for (m, sums) in sums.iter().enumerate() {
            let c = tile.c.add(m * tile.c_stride);
            for (i, sum) in sums.as_flattened().iter().enumerate() {
                _mm512_storeu_ps(c.add(16 * i), *sum);
            }
        }
    }
    P
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
