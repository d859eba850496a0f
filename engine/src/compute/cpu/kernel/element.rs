//! Elements of a panel: the storage of each weight type, and its exact conversion of a row of 32 to f32.
//!
//! ```text
//!   f32     row of 32 × 4 bytes
//!   bf16    row of 32 × 2 bytes, its halves interleaved: a shift and a mask widen it
//!   int8    per 64 rows: 32 bf16 scales, stored as a bf16 row; then per four rows: 16 columns × 4 rows and 16 × 4
//! ```
//!
//! A widened int8 is in the uppermost byte of 32 bits: a shift or a mask moves it there, for each of the four rows. The
//! kernel therefore multiplies the integer times 2^24, which is equally exact, and scales are stored accordingly. A
//! chain of multiply-adds runs over the integers of a group. One more multiply-add adds its sum times the scale to the
//! output.

use half::bf16;

use super::PANEL;

/// Factor of the integers of quantized weights after widening.
pub(in crate::compute::cpu) const INTEGER_UNIT: f32 = (1 << 24) as f32;

/// Element of a panel.
pub(in crate::compute::cpu) trait PanelElement: Copy + Send + Sync + 'static {
    /// The element type of widened panels, for many rows.
    type Wide: PanelElement;
    /// Rows that are stored together.
    const TOGETHER: usize = 1;
    /// Rows that share a row of scales; all rows if there are no scales.
    const GROUP: usize = usize::MAX;
    /// Elements of a row of scales, in front of the group's rows; zero if there are no scales.
    const HEADER: usize = 0;
    /// Whether there are scales.
    const SCALED: bool = Self::HEADER > 0;

    /// Elements of a panel of `rows` rows. Also the start of row `rows`, if that row begins a group.
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
    /// Row `row` of the rows that are stored together, in the order of its columns.
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

impl PanelElement for f32 {
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
pub(in crate::compute::cpu) struct PanelBf16(pub(in crate::compute::cpu) u16);

impl PanelBf16 {
    /// Column of the panel at storage position `position` of a row.
    pub(in crate::compute::cpu) fn column(position: usize) -> usize {
        position / 2 + PANEL / 2 * (position % 2)
    }

    /// Widens without loss.
    pub(in crate::compute::cpu) fn widen(self) -> f32 {
        bf16::from_bits(self.0).to_f32()
    }
}

impl PanelElement for PanelBf16 {
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
pub(in crate::compute::cpu) struct PanelInt8(pub(in crate::compute::cpu) i8);

impl PanelInt8 {
    /// Position of the weight of `column` after the scales of its group. `row` is counted from the group's first row.
    pub(in crate::compute::cpu) fn position(row: usize, column: usize) -> usize {
        let (together, half) = (row / Self::TOGETHER, column / 16);
        ((2 * together + half) * 16 + column % 16) * Self::TOGETHER + row % Self::TOGETHER
    }
}

impl PanelElement for PanelInt8 {
    type Wide = WidenedInt8;
    const TOGETHER: usize = 4;
    const GROUP: usize = 64;
    const HEADER: usize = 2 * PANEL;

    #[inline(always)]
    unsafe fn scales(group: *const Self) -> [f32; PANEL] {
        // SAFETY: a group begins with a row of bf16; the read is unaligned.
        unsafe { PanelBf16::load(group.cast(), 0) }
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
        unsafe { PanelBf16::load_avx512(group.cast(), 0) }
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
        unsafe { PanelBf16::load_avx2(group.cast(), half, 0) }
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

/// An integer of quantized weights as f32, or a group's scale: the widened [`PanelInt8`].
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(in crate::compute::cpu) struct WidenedInt8(f32);

impl PanelElement for WidenedInt8 {
    type Wide = Self;
    const GROUP: usize = PanelInt8::GROUP;
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
