//! Elements of a panel: how each weight type is stored, and how a row of 32 becomes f32. All of it is exact.
//!
//! ```text
//!   f32     row of 32 × 4 bytes
//!   bf16    row of 32 × 2 bytes, its halves interleaved: a shift and a mask widen it
//!   int8    per 64 rows: 32 bf16 scales, stored as a bf16 row; then rows of 32 × 1 byte
//! ```
//!
//! A scale has 8 significant bits and an int8 has 7, so that their product is exact in f32: int8 weights are
//! plain f32 weights to everything that follows, with the same chain of multiply-adds.

use half::bf16;

use super::PANEL;

/// Element of a panel.
pub(in super::super) trait Element: Copy + Send + Sync + 'static {
    /// Rows that share a row of scales; all of them where there are no scales.
    const GROUP: usize = usize::MAX;
    /// Elements that a row of scales takes, in front of the group's rows.
    const HEADER: usize = 0;
    /// The scales of a group.
    type Scales: Copy;
    /// The scales in vectors of 16.
    #[cfg(target_arch = "x86_64")]
    type Scales512: Copy;
    /// Scales of half a row in vectors of 8.
    #[cfg(target_arch = "x86_64")]
    type Scales256: Copy;

    /// Elements of a panel of so many rows, and where row `rows` begins if it begins a group.
    fn panel_len(rows: usize) -> usize {
        rows * PANEL + rows.div_ceil(Self::GROUP) * Self::HEADER
    }

    /// # Safety
    /// `group` is the start of a group.
    unsafe fn scales(group: *const Self) -> Self::Scales;
    /// A row in the order of its columns.
    ///
    /// # Safety
    /// `row` is valid for [`PANEL`] elements.
    unsafe fn load(row: *const Self, scales: &Self::Scales) -> [f32; PANEL];
    /// # Safety
    /// As [`Self::scales`], on AVX-512.
    #[cfg(target_arch = "x86_64")]
    unsafe fn scales_avx512(group: *const Self) -> Self::Scales512;
    /// Columns `0..16` and `16..32` of one row.
    ///
    /// # Safety
    /// As [`Self::load`], on AVX-512.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_avx512(
        row: *const Self,
        scales: Self::Scales512,
    ) -> (std::arch::x86_64::__m512, std::arch::x86_64::__m512);
    /// # Safety
    /// As [`Self::scales`], on AVX2.
    #[cfg(target_arch = "x86_64")]
    unsafe fn scales_avx2(group: *const Self, half: usize) -> Self::Scales256;
    /// Columns `16 * half ..` of one row, 8 and 8.
    ///
    /// # Safety
    /// As [`Self::load`], on AVX2.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_avx2(
        row: *const Self,
        half: usize,
        scales: Self::Scales256,
    ) -> (std::arch::x86_64::__m256, std::arch::x86_64::__m256);
}

impl Element for f32 {
    type Scales = ();
    #[cfg(target_arch = "x86_64")]
    type Scales512 = ();
    #[cfg(target_arch = "x86_64")]
    type Scales256 = ();

    #[inline(always)]
    unsafe fn scales(_: *const Self) {}
    #[inline(always)]
    unsafe fn load(row: *const Self, (): &()) -> [f32; PANEL] {
        // SAFETY: the caller's contract.
        unsafe { row.cast::<[f32; PANEL]>().read_unaligned() }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn scales_avx512(_: *const Self) {}
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx512(
        row: *const Self,
        (): (),
    ) -> (std::arch::x86_64::__m512, std::arch::x86_64::__m512) {
        use std::arch::x86_64::_mm512_loadu_ps;
        // SAFETY: the caller runs on AVX-512 and `row` is valid for 32 values.
        unsafe { (_mm512_loadu_ps(row), _mm512_loadu_ps(row.add(16))) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn scales_avx2(_: *const Self, _: usize) {}
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(
        row: *const Self,
        half: usize,
        (): (),
    ) -> (std::arch::x86_64::__m256, std::arch::x86_64::__m256) {
        use std::arch::x86_64::_mm256_loadu_ps;
        // SAFETY: the caller runs on AVX2 and `row` is valid for 32 values.
        unsafe { (_mm256_loadu_ps(row.add(16 * half)), _mm256_loadu_ps(row.add(16 * half + 8))) }
    }
}

/// bf16 bits as stored in a panel.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(in super::super) struct Bf16(pub(in super::super) u16);

impl Bf16 {
    /// Column of the panel at storage position `position` of a row.
    pub(in super::super) fn column(position: usize) -> usize {
        position / 2 + PANEL / 2 * (position % 2)
    }

    /// Exact.
    pub(in super::super) fn widen(self) -> f32 {
        bf16::from_bits(self.0).to_f32()
    }
}

impl Element for Bf16 {
    type Scales = ();
    #[cfg(target_arch = "x86_64")]
    type Scales512 = ();
    #[cfg(target_arch = "x86_64")]
    type Scales256 = ();

    #[inline(always)]
    unsafe fn scales(_: *const Self) {}
    #[inline(always)]
    unsafe fn load(row: *const Self, (): &()) -> [f32; PANEL] {
        // SAFETY: the caller's contract.
        let row = unsafe { row.cast::<[Self; PANEL]>().read_unaligned() };
        let mut values = [0.0; PANEL];
        for (position, element) in row.into_iter().enumerate() {
            values[Self::column(position)] = element.widen();
        }
        values
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn scales_avx512(_: *const Self) {}
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx512(
        row: *const Self,
        (): (),
    ) -> (std::arch::x86_64::__m512, std::arch::x86_64::__m512) {
        use std::arch::x86_64::{
            _mm512_and_si512, _mm512_castsi512_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_slli_epi32,
        };
        // SAFETY: the caller runs on AVX-512 and `row` is valid for 32 values of 2 bytes.
        unsafe {
            let both = _mm512_loadu_si512(row.cast());
            let high_half = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
            (
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)),
                _mm512_castsi512_ps(_mm512_and_si512(both, high_half)),
            )
        }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn scales_avx2(_: *const Self, _: usize) {}
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(
        row: *const Self,
        half: usize,
        (): (),
    ) -> (std::arch::x86_64::__m256, std::arch::x86_64::__m256) {
        use std::arch::x86_64::{
            _mm256_and_si256, _mm256_castsi256_ps, _mm256_loadu_si256, _mm256_set1_epi32, _mm256_slli_epi32,
        };
        // SAFETY: the caller runs on AVX2 and `row` is valid for 32 values of 2 bytes.
        unsafe {
            let low = _mm256_loadu_si256(row.cast());
            let high = _mm256_loadu_si256(row.add(16).cast());
            if half == 0 {
                (
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                )
            } else {
                let mask = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
                (
                    _mm256_castsi256_ps(_mm256_and_si256(low, mask)),
                    _mm256_castsi256_ps(_mm256_and_si256(high, mask)),
                )
            }
        }
    }
}

/// A quantized weight, or a byte of a group's scales.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(in super::super) struct Int8(pub(in super::super) i8);

impl Element for Int8 {
    const GROUP: usize = 64;
    const HEADER: usize = 2 * PANEL;
    type Scales = [f32; PANEL];
    #[cfg(target_arch = "x86_64")]
    type Scales512 = (std::arch::x86_64::__m512, std::arch::x86_64::__m512);
    #[cfg(target_arch = "x86_64")]
    type Scales256 = (std::arch::x86_64::__m256, std::arch::x86_64::__m256);

    #[inline(always)]
    unsafe fn scales(group: *const Self) -> [f32; PANEL] {
        // SAFETY: a group begins with a row of bf16; it is read without regard to alignment.
        unsafe { Bf16::load(group.cast(), &()) }
    }
    #[inline(always)]
    unsafe fn load(row: *const Self, scales: &[f32; PANEL]) -> [f32; PANEL] {
        // SAFETY: the caller's contract.
        let row = unsafe { row.cast::<[Self; PANEL]>().read_unaligned() };
        let mut values = [0.0; PANEL];
        for ((value, element), scale) in values.iter_mut().zip(row).zip(scales) {
            *value = f32::from(element.0) * scale;
        }
        values
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn scales_avx512(group: *const Self) -> Self::Scales512 {
        // SAFETY: a group begins with a row of bf16, and the caller runs on AVX-512.
        unsafe { Bf16::load_avx512(group.cast(), ()) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx512(
        row: *const Self,
        scales: Self::Scales512,
    ) -> (std::arch::x86_64::__m512, std::arch::x86_64::__m512) {
        use std::arch::x86_64::{_mm_loadu_si128, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_mul_ps};
        // SAFETY: the caller runs on AVX-512 and `row` is valid for 32 bytes.
        unsafe {
            let low = _mm512_cvtepi8_epi32(_mm_loadu_si128(row.cast()));
            let high = _mm512_cvtepi8_epi32(_mm_loadu_si128(row.add(16).cast()));
            (
                _mm512_mul_ps(_mm512_cvtepi32_ps(low), scales.0),
                _mm512_mul_ps(_mm512_cvtepi32_ps(high), scales.1),
            )
        }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn scales_avx2(group: *const Self, half: usize) -> Self::Scales256 {
        // SAFETY: a group begins with a row of bf16, and the caller runs on AVX2.
        unsafe { Bf16::load_avx2(group.cast(), half, ()) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(
        row: *const Self,
        half: usize,
        scales: Self::Scales256,
    ) -> (std::arch::x86_64::__m256, std::arch::x86_64::__m256) {
        use std::arch::x86_64::{_mm_loadl_epi64, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_mul_ps};
        // SAFETY: the caller runs on AVX2 and `row` is valid for 32 bytes.
        unsafe {
            let row = row.add(16 * half);
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(row.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(row.add(8).cast()));
            (
                _mm256_mul_ps(_mm256_cvtepi32_ps(low), scales.0),
                _mm256_mul_ps(_mm256_cvtepi32_ps(high), scales.1),
            )
        }
    }
}
