//! Widening: a slice of a panel as f32, before it is multiplied with many rows.

use super::super::isa::Isa;
use super::super::kernel::{PANEL, PanelElement};

/// Widens `rows` rows of a panel, in the order of their columns. The scales of each group are in front of it.
///
/// # Safety
/// `start` begins a group and is valid for this number of rows and their scales. Wide elements are f32, and `out` has
/// space for all of them. `isa` comes from [`Isa::available`].
pub(super) unsafe fn widen<E: PanelElement>(isa: Isa, start: *const E, rows: usize, out: &mut [f32]) {
    // SAFETY: the caller's contract; the `Isa` is one of this machine.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512(start, rows, out),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2(start, rows, out),
            Isa::Portable => each_row(
                start,
                rows,
                out,
                |group, out| *out = E::scales(group),
                |rows, row, out| *out = E::load(rows, row),
            ),
        }
    }
}

/// `scales` and `load` each write one row: the group's scales, or row `.1` of the rows that are stored together at
/// `.0`.
///
/// # Safety
/// As [`widen`].
#[inline(always)]
unsafe fn each_row<E: PanelElement>(
    start: *const E,
    rows: usize,
    out: &mut [f32],
    scales: impl Fn(*const E, &mut [f32; PANEL]),
    load: impl Fn(*const E, usize, &mut [f32; PANEL]),
) {
    let (mut from, mut row) = (start, 0);
    let mut out = out.as_chunks_mut::<PANEL>().0.iter_mut();
    let mut next = || out.next().expect("room for every row");
    while row < rows {
        if E::SCALED {
            scales(from, next());
        }
        let end = rows.min(row.saturating_add(E::GROUP));
        // SAFETY: the contract of `widen`.
        unsafe { from = from.add(E::HEADER) };
        while row < end {
            for together in 0..E::TOGETHER.min(end - row) {
                load(from, together, next());
            }
            // SAFETY: as above.
            unsafe { from = from.add(E::TOGETHER * PANEL) };
            row += E::TOGETHER;
        }
        row = end;
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512<E: PanelElement>(start: *const E, rows: usize, out: &mut [f32]) {
    use std::arch::x86_64::_mm512_storeu_ps;
    // SAFETY: the contract of `widen`; a row is two vectors.
    unsafe {
        each_row(
            start,
            rows,
            out,
            |group, out| {
                let [low, high] = E::scales_avx512(group);
                _mm512_storeu_ps(out.as_mut_ptr(), low);
                _mm512_storeu_ps(out.as_mut_ptr().add(16), high);
            },
            |rows, row, out| {
                let [low, high] = E::load_avx512(rows, row);
                _mm512_storeu_ps(out.as_mut_ptr(), low);
                _mm512_storeu_ps(out.as_mut_ptr().add(16), high);
            },
        );
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2<E: PanelElement>(start: *const E, rows: usize, out: &mut [f32]) {
    use std::arch::x86_64::_mm256_storeu_ps;
    // SAFETY: the contract of `widen`; half a row is two vectors.
    unsafe {
        each_row(
            start,
            rows,
            out,
            |group, out| {
                for half in 0..2 {
                    let [low, high] = E::scales_avx2(group, half);
                    _mm256_storeu_ps(out.as_mut_ptr().add(16 * half), low);
                    _mm256_storeu_ps(out.as_mut_ptr().add(16 * half + 8), high);
                }
            },
            |rows, row, out| {
                for half in 0..2 {
                    let [low, high] = E::load_avx2(rows, half, row);
                    _mm256_storeu_ps(out.as_mut_ptr().add(16 * half), low);
                    _mm256_storeu_ps(out.as_mut_ptr().add(16 * half + 8), high);
                }
            },
        );
    }
}
