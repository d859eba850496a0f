//! The matrix kernel: a few rows of activations against a panel of 32 output columns.
//!
//! ```text
//!   C[m][0..32] (=|+=)  Σ_k A[m][k] · B[k][0..32]      k strictly in order, one fused multiply-add each
//!
//!   with scales, group by group:   C[m] (=|+=)  scales · Σ_k A[m][k] · B[k]      each group's chain begins from zero
//! ```
//!
//! Projections use it with weight panels, attention with (transposed) keys and values. Every output is one chain in the
//! order of k (with quantized weights one chain per group), for any number of rows. Prefill, decode and any batch
//! therefore give the same bits. `accumulate` continues a stored chain, which is exact.
#![allow(unsafe_code, reason = "vector intrinsics on raw pointers; the contract is on `TileOperands`")]

mod element;

pub(super) use self::element::{INTEGER_UNIT, PanelBf16, PanelElement, PanelInt8};
use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::isa::is_amd;

/// Output columns of a panel.
pub(super) const PANEL: usize = 32;
/// Most rows one call computes on any instruction set.
pub(super) const MAX_ROWS: usize = 12;
/// Prefetch distance after the current row of a panel, in bytes. 4 to 8 KiB are the fastest on a Xeon.
const PREFETCH_BYTES: usize = 4096;
/// The same for narrow panels and more than four rows, into the second-level cache. Each line takes longer here, and
/// prefetched lines in the first-level cache would block further prefetches.
const PREFETCH_BYTES_MANY_ROWS: usize = 8192;

/// The same for four panels side by side, into the second-level cache. Both shorter and longer distances are slower on
/// a Xeon.
const PREFETCH_BYTES_FOUR: usize = 2048;

/// Operands of one call.
#[derive(Debug)]
pub(super) struct TileOperands<E> {
    /// First activation; row m begins `m * a_stride` values later and has `depth` values.
    pub(super) a: *const f32,
    pub(super) a_stride: usize,
    /// First row of the panel, or the scales before it: the start of a group. Row k begins `k * b_stride` elements
    /// after the first, plus the scales of the groups between, and has [`PANEL`] elements. Rows that are stored
    /// together begin together.
    pub(super) b: *const E,
    pub(super) b_stride: usize,
    /// First output; row m begins `m * c_stride` values later and has [`PANEL`] values.
    pub(super) c: *mut f32,
    pub(super) c_stride: usize,
    /// Length of the chain, at least 1.
    pub(super) depth: usize,
    /// Continue the chain whose value is in C, instead of starting from zero.
    pub(super) accumulate: bool,
    /// Prefetch rows of B, if B is read forward from memory. Otherwise prefetches would load unused lines.
    pub(super) ahead: bool,
}

impl<E> Clone for TileOperands<E> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E> Copy for TileOperands<E> {}

/// Rows of one call on this instruction set.
pub(super) fn rows_at_once(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => MAX_ROWS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => 6,
        Isa::Portable => 4,
    }
}

/// Calls a kernel that is compiled for `$rows` rows, `$name` in the call. The number must be in the list.
macro_rules! by_rows {
    ($rows:expr, [$($n:literal),*], |$name:ident| $call:expr) => {
        match $rows {
            $($n => {
                const $name: usize = $n;
                // SAFETY: the caller's contract is this function's.
                unsafe { $call }
            })*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}

/// Computes `rows` rows (any number) of one panel.
///
/// # Safety
/// The ranges described by `tile` are valid for `rows` rows, C overlaps neither A nor B, no other code writes them
/// meanwhile, and `isa` comes from [`Isa::available`].
pub(super) unsafe fn multiply<E: PanelElement>(isa: Isa, rows: usize, tile: &TileOperands<E>) {
    debug_assert!(tile.depth > 0, "a chain of nothing leaves C as it was");
    let step = rows_at_once(isa);
    let mut done = 0;
    while done < rows {
        let now = (rows - done).min(step);
        // SAFETY: both offsets stay inside ranges that are valid for `rows` rows.
        let part = unsafe {
            TileOperands { a: tile.a.add(done * tile.a_stride), c: tile.c.add(done * tile.c_stride), ..*tile }
        };
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                by_rows!(now, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], |M| avx512::<E, M, 1>(&part, 0))
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => by_rows!(now, [1, 2, 3, 4, 5, 6], |M| avx2::<E, M>(&part)),
            Isa::Portable => by_rows!(now, [1, 2, 3, 4], |M| portable::<E, M>(&part)),
        }
        done += now;
    }
}

/// Most panels that [`multiply_beside`] computes at once for `rows` rows.
///
/// AMD's processors (Zen 4, Zen 5) read one stream faster than several.
pub(super) fn panels_at_once(isa: Isa, rows: usize) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if is_amd() => 1,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if rows <= 2 => 4,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if rows <= 4 => 2,
        _ => 1,
    }
}

/// Computes `rows` rows of `panels` panels, `panel_stride` values apart in B and [`PANEL`] apart in C. With few rows
/// several panels are computed side by side, at most `at_once` (of [`panels_at_once`]). A single panel has too few
/// chains to fill the pipeline, and some memory delivers more when it is read in several places. The chains and the
/// bits are the same.
///
/// # Safety
/// As [`multiply`], for all panels.
pub(super) unsafe fn multiply_beside<E: PanelElement>(
    isa: Isa,
    rows: usize,
    tile: &TileOperands<E>,
    panels: usize,
    panel_stride: usize,
    at_once: usize,
) {
    let mut done = 0;
    while done < panels {
        // SAFETY: the caller's contract covers all panels.
        let tile = unsafe {
            TileOperands { b: tile.b.add(done * panel_stride), c: tile.c.add(done * PANEL), ..*tile }
        };
        let left = panels - done;
        done += match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if at_once >= 4 && left >= 4 => {
                by_rows!(rows, [1, 2], |M| avx512::<E, M, 4>(&tile, panel_stride));
                4
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if at_once >= 2 && left >= 2 => {
                by_rows!(rows, [1, 2, 3, 4], |M| avx512::<E, M, 2>(&tile, panel_stride));
                2
            }
            _ => {
                // SAFETY: the caller's contract.
                unsafe { multiply(isa, rows, &tile) };
                1
            }
        };
    }
}

/// `P` panels side by side.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
#[allow(
    clippy::needless_range_loop,
    reason = "with iterators over nested arrays the compiler keeps the sums in memory"
)]
unsafe fn avx512<E: PanelElement, const M: usize, const P: usize>(
    tile: &TileOperands<E>,
    panel_stride: usize,
) {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_loadu_ps, _mm512_setzero_ps, _mm512_storeu_ps};
    // SAFETY: by the contract of `multiply` every pointer below stays inside A, B and C, for all panels.
    unsafe {
        let (mut b, mut k) = (tile.b, 0);
        while k < tile.depth {
            let (group, begun) = (b, tile.accumulate || k > 0);
            let end = tile.depth.min(k.saturating_add(E::GROUP));
            let mut sums = [[[_mm512_setzero_ps(); 2]; P]; M];
            if begun && !E::SCALED {
                for m in 0..M {
                    for panel in 0..P {
                        let c = tile.c.add(m * tile.c_stride + panel * PANEL);
                        sums[m][panel] = [_mm512_loadu_ps(c), _mm512_loadu_ps(c.add(16))];
                    }
                }
            }
            b = b.add(E::HEADER);
            while k < end {
                if tile.ahead {
                    for panel in 0..P {
                        request_ahead::<E, M, P>(b.add(panel * panel_stride));
                    }
                }
                // The last rows that are stored together may be incomplete.
                let rows = E::TOGETHER.min(end - k);
                add_row_avx512::<E, M, P, 0>(&mut sums, tile, b, panel_stride, k);
                if rows > 1 {
                    add_row_avx512::<E, M, P, 1>(&mut sums, tile, b, panel_stride, k);
                }
                if rows > 2 {
                    add_row_avx512::<E, M, P, 2>(&mut sums, tile, b, panel_stride, k);
                }
                if rows > 3 {
                    add_row_avx512::<E, M, P, 3>(&mut sums, tile, b, panel_stride, k);
                }
                b = b.add(E::TOGETHER * tile.b_stride);
                k += rows;
            }
            for panel in 0..P {
                let scales = if E::SCALED {
                    E::scales_avx512(group.add(panel * panel_stride))
                } else {
                    [_mm512_setzero_ps(); 2]
                };
                for m in 0..M {
                    let c = tile.c.add(m * tile.c_stride + panel * PANEL);
                    let [mut low, mut high] = sums[m][panel];
                    if E::SCALED {
                        let mut before = [_mm512_setzero_ps(); 2];
                        if begun {
                            before = [_mm512_loadu_ps(c), _mm512_loadu_ps(c.add(16))];
                        }
                        low = _mm512_fmadd_ps(scales[0], low, before[0]);
                        high = _mm512_fmadd_ps(scales[1], high, before[1]);
                    }
                    _mm512_storeu_ps(c, low);
                    _mm512_storeu_ps(c.add(16), high);
                }
            }
        }
    }
}

/// Adds the products with row `ROW` of the rows that are stored together at `b`. The first of them is row `k` of the
/// panel.
///
/// # Safety
/// As [`avx512`]; there is such a row.
#[cfg(target_arch = "x86_64")]
#[allow(clippy::needless_range_loop, reason = "as in `avx512`")]
#[inline(always)]
unsafe fn add_row_avx512<E: PanelElement, const M: usize, const P: usize, const ROW: usize>(
    sums: &mut [[[std::arch::x86_64::__m512; 2]; P]; M],
    tile: &TileOperands<E>,
    b: *const E,
    panel_stride: usize,
    k: usize,
) {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_set1_ps};
    for panel in 0..P {
        // SAFETY: the caller's contract.
        unsafe {
            let [low, high] = E::load_avx512(b.add(panel * panel_stride), ROW);
            for m in 0..M {
                let a = _mm512_set1_ps(*tile.a.add(m * tile.a_stride + k + ROW));
                sums[m][panel][0] = _mm512_fmadd_ps(a, low, sums[m][panel][0]);
                sums[m][panel][1] = _mm512_fmadd_ps(a, high, sums[m][panel][1]);
            }
        }
    }
}

/// Prefetches the lines after the rows at `b`, at the distance for these numbers of rows of A and panels.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn request_ahead<E: PanelElement, const M: usize, const P: usize>(b: *const E) {
    use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
    for line in 0..(E::TOGETHER * PANEL * size_of::<E>()).div_ceil(64) {
        let at = b.cast::<i8>().wrapping_add(64 * line);
        // SAFETY: a prefetch may point anywhere.
        unsafe {
            if P == 4 {
                _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(PREFETCH_BYTES_FOUR));
            } else if M > 4 && size_of::<E>() < 4 {
                _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(PREFETCH_BYTES_MANY_ROWS));
            } else {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(PREFETCH_BYTES));
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
#[allow(clippy::needless_range_loop, reason = "as in `avx512`")]
unsafe fn avx2<E: PanelElement, const M: usize>(tile: &TileOperands<E>) {
    use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_storeu_ps};
    // SAFETY: by the contract of `multiply` every pointer below stays inside A, B and C.
    unsafe {
        let (mut group, mut from) = (tile.b, 0);
        while from < tile.depth {
            let begun = tile.accumulate || from > 0;
            let end = tile.depth.min(from.saturating_add(E::GROUP));
            // Half of the columns, then the other half: there are too few registers for both.
            let mut b = group;
            for half in 0..2 {
                let mut sums = [[_mm256_setzero_ps(); 2]; M];
                if begun && !E::SCALED {
                    for m in 0..M {
                        let c = tile.c.add(m * tile.c_stride + 16 * half);
                        sums[m] = [_mm256_loadu_ps(c), _mm256_loadu_ps(c.add(8))];
                    }
                }
                b = group.add(E::HEADER);
                let mut k = from;
                while k < end {
                    // Half of the columns of four rows is every other line, which hardware prefetchers follow badly:
                    // int8 weights need the prefetch.
                    if tile.ahead && E::TOGETHER > 1 && half == 0 {
                        request_ahead::<E, M, 1>(b);
                    }
                    // As in `avx512`.
                    let rows = E::TOGETHER.min(end - k);
                    add_row_avx2::<E, M, 0>(&mut sums, tile, b, half, k);
                    if rows > 1 {
                        add_row_avx2::<E, M, 1>(&mut sums, tile, b, half, k);
                    }
                    if rows > 2 {
                        add_row_avx2::<E, M, 2>(&mut sums, tile, b, half, k);
                    }
                    if rows > 3 {
                        add_row_avx2::<E, M, 3>(&mut sums, tile, b, half, k);
                    }
                    b = b.add(E::TOGETHER * tile.b_stride);
                    k += rows;
                }
                let scales = if E::SCALED { E::scales_avx2(group, half) } else { [_mm256_setzero_ps(); 2] };
                for m in 0..M {
                    let c = tile.c.add(m * tile.c_stride + 16 * half);
                    let [mut low, mut high] = sums[m];
                    if E::SCALED {
                        let mut before = [_mm256_setzero_ps(); 2];
                        if begun {
                            before = [_mm256_loadu_ps(c), _mm256_loadu_ps(c.add(8))];
                        }
                        low = _mm256_fmadd_ps(scales[0], low, before[0]);
                        high = _mm256_fmadd_ps(scales[1], high, before[1]);
                    }
                    _mm256_storeu_ps(c, low);
                    _mm256_storeu_ps(c.add(8), high);
                }
            }
            (group, from) = (b, end);
        }
    }
}

/// As [`add_row_avx512`], for half of the columns.
///
/// # Safety
/// As there, on AVX2.
#[cfg(target_arch = "x86_64")]
#[allow(clippy::needless_range_loop, reason = "as in `avx512`")]
#[inline(always)]
unsafe fn add_row_avx2<E: PanelElement, const M: usize, const ROW: usize>(
    sums: &mut [[std::arch::x86_64::__m256; 2]; M],
    tile: &TileOperands<E>,
    b: *const E,
    half: usize,
    k: usize,
) {
    use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps};
    // SAFETY: the caller's contract.
    unsafe {
        let [low, high] = E::load_avx2(b, half, ROW);
        for m in 0..M {
            let a = _mm256_set1_ps(*tile.a.add(m * tile.a_stride + k + ROW));
            sums[m][0] = _mm256_fmadd_ps(a, low, sums[m][0]);
            sums[m][1] = _mm256_fmadd_ps(a, high, sums[m][1]);
        }
    }
}

unsafe fn portable<E: PanelElement, const M: usize>(tile: &TileOperands<E>) {
    // SAFETY: by the contract of `multiply` every pointer below stays inside A, B and C.
    unsafe {
        let stored = |m: usize| tile.c.add(m * tile.c_stride).cast::<[f32; PANEL]>();
        let (mut b, mut k) = (tile.b, 0);
        while k < tile.depth {
            let (group, begun) = (b, tile.accumulate || k > 0);
            let end = tile.depth.min(k.saturating_add(E::GROUP));
            let mut sums = [[0.0_f32; PANEL]; M];
            if begun && !E::SCALED {
                for (m, sums) in sums.iter_mut().enumerate() {
                    *sums = stored(m).read_unaligned();
                }
            }
            b = b.add(E::HEADER);
            while k < end {
                let rows = E::TOGETHER.min(end - k);
                for row in 0..rows {
                    let values = E::load(b, row);
                    for (m, sums) in sums.iter_mut().enumerate() {
                        let a = *tile.a.add(m * tile.a_stride + k + row);
                        for (sum, value) in sums.iter_mut().zip(values) {
                            *sum = a.mul_add(value, *sum);
                        }
                    }
                }
                b = b.add(E::TOGETHER * tile.b_stride);
                k += rows;
            }
            if E::SCALED {
                let scales = E::scales(group);
                for (m, sums) in sums.iter_mut().enumerate() {
                    let before = if begun { stored(m).read_unaligned() } else { [0.0; PANEL] };
                    for ((sum, scale), before) in sums.iter_mut().zip(scales).zip(before) {
                        *sum = scale.mul_add(*sum, before);
                    }
                }
            }
            for (m, sums) in sums.iter().enumerate() {
                stored(m).write_unaligned(*sums);
            }
        }
    }
}
