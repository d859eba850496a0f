//! Elements of a panel: how each weight type is stored, and how a row of 32 becomes f32. All of it is exact.
//!
//! ```text
//!   f32     row of 32 × 4 bytes
//!   bf16    row of 32 × 2 bytes, its halves interleaved: a shift and a mask widen it
//!   int8    per 64 rows: 32 bf16 scales, stored as a bf16 row; then four rows at a time, 16 columns × 4 rows and 16 × 4
//! ```
//!
//! An int8 lies in the uppermost byte of 32 bits when it is widened: a shift or a mask takes it there, whichever of the four
//! rows it is of. So what is multiplied is the integer times 2^24, which is as exact, and scales are stored for that. A chain of
//! multiply-adds runs over the integers of a group; its sum times the scale is added to the output by one more.

use half::bf16;

use super::PANEL;

/// What the integers of quantized weights are multiplied with when they are widened.
pub(in crate::compute::cpu) const INTEGER_UNIT: f32 = (1 << 24) as f32;

/// Element of a panel.
pub(in crate::compute::cpu) trait Element: Copy + Send + Sync + 'static {
    /// What panels of it become where many rows use them.
    type Wide: Element;
    /// Rows that are stored together.
    const TOGETHER: usize = 1;
    /// Rows that share a row of scales; all of them where there are no scales.
    const GROUP: usize = usize::MAX;
    /// Elements that a row of scales takes, in front of the group's rows; none where there are no scales.
    const HEADER: usize = 0;
    /// Whether there are scales.
    const SCALED: bool = Self::HEADER > 0;

    /// Elements of a panel of so many rows, and where row `rows` begins if it begins a group.
    fn panel_len(rows: usize) -> usize {
        rows.next_multiple_of(Self::TOGETHER) * PANEL + rows.div_ceil(Self::GROUP) * Self::HEADER
    }

    /// The scales of a group, in the order of the columns.
    ///
    /// # Safety
    /// `group` is the start of a group.
    unsafe fn scales(_group: *const Self) -> [f32; PANEL] {
        unreachable!("no scales")
    }
    /// Row `row` of those that are stored together, in the order of its columns.
    ///
    /// # Safety
    /// `rows` is valid for [`PANEL`] elements of each.
    unsafe fn load(rows: *const Self, row: usize) -> [f32; PANEL];
    /// Scales of the columns `0..16` and `16..32`.
    ///
    /// # Safety
    /// As [`Self::scales`], on AVX-512.
    #[cfg(target_arch = "x86_64")]
    unsafe fn scales_avx512(_group: *const Self) -> [std::arch::x86_64::__m512; 2] {
        unreachable!("no scales")
    }
    /// Columns `0..16` and `16..32` of one row.
    ///
    /// # Safety
    /// As [`Self::load`], on AVX-512.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_avx512(rows: *const Self, row: usize) -> [std::arch::x86_64::__m512; 2];
    /// Scales of the columns `16 * half ..`, 8 and 8.
    ///
    /// # Safety
    /// As [`Self::scales`], on AVX2.
    #[cfg(target_arch = "x86_64")]
    unsafe fn scales_avx2(_group: *const Self, _half: usize) -> [std::arch::x86_64::__m256; 2] {
        unreachable!("no scales")
    }
    /// Columns `16 * half ..` of one row, 8 and 8.
    ///
    /// # Safety
    /// As [`Self::load`], on AVX2.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_avx2(rows: *const Self, half: usize, row: usize) -> [std::arch::x86_64::__m256; 2];
}

impl Element for f32 {
    type Wide = Self;

    #[inline(always)]
    unsafe fn load(row: *const Self, _: usize) -> [f32; PANEL] {
        // SAFETY: the caller's contract.
        unsafe { row.cast::<[f32; PANEL]>().read_unaligned() }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx512(row: *const Self, _: usize) -> [std::arch::x86_64::__m512; 2] {
        use std::arch::x86_64::_mm512_loadu_ps;
        // SAFETY: the caller runs on AVX-512 and `row` is valid for 32 values.
        unsafe { [_mm512_loadu_ps(row), _mm512_loadu_ps(row.add(16))] }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(row: *const Self, half: usize, _: usize) -> [std::arch::x86_64::__m256; 2] {
        use std::arch::x86_64::_mm256_loadu_ps;
        // SAFETY: the caller runs on AVX2 and `row` is valid for 32 values.
        unsafe { [_mm256_loadu_ps(row.add(16 * half)), _mm256_loadu_ps(row.add(16 * half + 8))] }
    }
}

/// bf16 bits as stored in a panel.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(in crate::compute::cpu) struct Bf16(pub(in crate::compute::cpu) u16);

impl Bf16 {
    /// Column of the panel at storage position `position` of a row.
    pub(in crate::compute::cpu) fn column(position: usize) -> usize {
        position / 2 + PANEL / 2 * (position % 2)
    }

    /// Exact.
    pub(in crate::compute::cpu) fn widen(self) -> f32 {
        bf16::from_bits(self.0).to_f32()
    }
}

impl Element for Bf16 {
    type Wide = f32;

    #[inline(always)]
    unsafe fn load(row: *const Self, _: usize) -> [f32; PANEL] {
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
    unsafe fn load_avx512(row: *const Self, _: usize) -> [std::arch::x86_64::__m512; 2] {
        use std::arch::x86_64::{
            _mm512_and_si512, _mm512_castsi512_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_slli_epi32,
        };
        // SAFETY: the caller runs on AVX-512 and `row` is valid for 32 values of 2 bytes.
        unsafe {
            let both = _mm512_loadu_si512(row.cast());
            let high_half = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
            [
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)),
                _mm512_castsi512_ps(_mm512_and_si512(both, high_half)),
            ]
        }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(row: *const Self, half: usize, _: usize) -> [std::arch::x86_64::__m256; 2] {
        use std::arch::x86_64::{
            _mm256_and_si256, _mm256_castsi256_ps, _mm256_loadu_si256, _mm256_set1_epi32, _mm256_slli_epi32,
        };
        // SAFETY: the caller runs on AVX2 and `row` is valid for 32 values of 2 bytes.
        unsafe {
            let low = _mm256_loadu_si256(row.cast());
            let high = _mm256_loadu_si256(row.add(16).cast());
            if half == 0 {
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                ]
            } else {
                let mask = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
                [
                    _mm256_castsi256_ps(_mm256_and_si256(low, mask)),
                    _mm256_castsi256_ps(_mm256_and_si256(high, mask)),
                ]
            }
        }
    }
}

/// A quantized weight, or a byte of a group's scales.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(in crate::compute::cpu) struct Int8(pub(in crate::compute::cpu) i8);

impl Int8 {
    /// Where the weight of `column` lies behind the scales of its group; `row` is counted from the group's first.
    pub(in crate::compute::cpu) fn position(row: usize, column: usize) -> usize {
        let (together, half) = (row / Self::TOGETHER, column / 16);
        ((2 * together + half) * 16 + column % 16) * Self::TOGETHER + row % Self::TOGETHER
    }
}

impl Element for Int8 {
    type Wide = Integer;
    const TOGETHER: usize = 4;
    const GROUP: usize = 64;
    const HEADER: usize = 2 * PANEL;

    #[inline(always)]
    unsafe fn scales(group: *const Self) -> [f32; PANEL] {
        // SAFETY: a group begins with a row of bf16; it is read without regard to alignment.
        unsafe { Bf16::load(group.cast(), 0) }
    }
    #[inline(always)]
    unsafe fn load(rows: *const Self, row: usize) -> [f32; PANEL] {
        // SAFETY: the caller's contract.
        let rows = unsafe { rows.cast::<[i8; Self::TOGETHER * PANEL]>().read_unaligned() };
        std::array::from_fn(|column| f32::from(rows[Self::position(row, column)]) * INTEGER_UNIT)
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn scales_avx512(group: *const Self) -> [std::arch::x86_64::__m512; 2] {
        // SAFETY: a group begins with a row of bf16, and the caller runs on AVX-512.
        unsafe { Bf16::load_avx512(group.cast(), 0) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx512(rows: *const Self, row: usize) -> [std::arch::x86_64::__m512; 2] {
        use std::arch::x86_64::{
            _mm512_and_si512, _mm512_cvtepi32_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_slli_epi32,
        };
        // SAFETY: the caller runs on AVX-512 and `rows` is valid for 128 bytes.
        unsafe {
            let uppermost = _mm512_set1_epi32(0xff00_0000_u32.cast_signed());
            let mut halves = [_mm512_loadu_si512(rows.cast()), _mm512_loadu_si512(rows.add(64).cast())];
            for four in &mut halves {
                *four = match row {
                    0 => _mm512_slli_epi32::<24>(*four),
                    1 => _mm512_and_si512(_mm512_slli_epi32::<16>(*four), uppermost),
                    2 => _mm512_and_si512(_mm512_slli_epi32::<8>(*four), uppermost),
                    _ => _mm512_and_si512(*four, uppermost),
                };
            }
            [_mm512_cvtepi32_ps(halves[0]), _mm512_cvtepi32_ps(halves[1])]
        }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn scales_avx2(group: *const Self, half: usize) -> [std::arch::x86_64::__m256; 2] {
        // SAFETY: a group begins with a row of bf16, and the caller runs on AVX2.
        unsafe { Bf16::load_avx2(group.cast(), half, 0) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(rows: *const Self, half: usize, row: usize) -> [std::arch::x86_64::__m256; 2] {
        use std::arch::x86_64::{
            _mm256_and_si256, _mm256_cvtepi32_ps, _mm256_loadu_si256, _mm256_set1_epi32, _mm256_slli_epi32,
        };
        // SAFETY: the caller runs on AVX2 and `rows` is valid for 128 bytes.
        unsafe {
            let uppermost = _mm256_set1_epi32(0xff00_0000_u32.cast_signed());
            let rows = rows.add(64 * half);
            let mut quarters = [_mm256_loadu_si256(rows.cast()), _mm256_loadu_si256(rows.add(32).cast())];
            for four in &mut quarters {
                *four = match row {
                    0 => _mm256_slli_epi32::<24>(*four),
                    1 => _mm256_and_si256(_mm256_slli_epi32::<16>(*four), uppermost),
                    2 => _mm256_and_si256(_mm256_slli_epi32::<8>(*four), uppermost),
                    _ => _mm256_and_si256(*four, uppermost),
                };
            }
            [_mm256_cvtepi32_ps(quarters[0]), _mm256_cvtepi32_ps(quarters[1])]
        }
    }
}

/// An integer of quantized weights as f32, or a group's scale: what [`Int8`] is widened to.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(in crate::compute::cpu) struct Integer(f32);

impl Element for Integer {
    type Wide = Self;
    const GROUP: usize = Int8::GROUP;
    const HEADER: usize = PANEL;

    #[inline(always)]
    unsafe fn scales(group: *const Self) -> [f32; PANEL] {
        // SAFETY: a group begins with a row of scales.
        unsafe { f32::load(group.cast(), 0) }
    }
    #[inline(always)]
    unsafe fn load(row: *const Self, _: usize) -> [f32; PANEL] {
        // SAFETY: the caller's contract.
        unsafe { f32::load(row.cast(), 0) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn scales_avx512(group: *const Self) -> [std::arch::x86_64::__m512; 2] {
        // SAFETY: as `scales`, on AVX-512.
        unsafe { f32::load_avx512(group.cast(), 0) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx512(row: *const Self, _: usize) -> [std::arch::x86_64::__m512; 2] {
        // SAFETY: the caller's contract.
        unsafe { f32::load_avx512(row.cast(), 0) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn scales_avx2(group: *const Self, half: usize) -> [std::arch::x86_64::__m256; 2] {
        // SAFETY: as `scales`, on AVX2.
        unsafe { f32::load_avx2(group.cast(), half, 0) }
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(row: *const Self, half: usize, _: usize) -> [std::arch::x86_64::__m256; 2] {
        // SAFETY: the caller's contract.
        unsafe { f32::load_avx2(row.cast(), half, 0) }
    }
}
