//! Conversion between f32 and the 16-bit types of a KV cache, a vector at a time. Widening is exact. Narrowing rounds
//! to nearest, ties to even, the same on every instruction set.
//!
//! Pointers to 16-bit values need not be aligned: a block can begin at any address of the pool.
#![allow(unsafe_code, reason = "raw pointers into KV blocks, vector intrinsics; see each block")]

use half::{bf16, f16};

use super::isa::{Isa, for_each_isa};

/// A source of 16-bit values that workers may read.
#[derive(Clone, Copy, Debug)]
struct Bits(*const u16);

/// A destination of 16-bit values.
#[derive(Clone, Copy, Debug)]
struct BitsMut(*mut u16);

impl Bits {
    /// # Safety
    /// The pointer is valid for value `index`.
    #[inline(always)]
    unsafe fn read(self, index: usize) -> u16 {
        // SAFETY: the caller's contract.
        unsafe { self.0.add(index).read_unaligned() }
    }
}

impl BitsMut {
    /// # Safety
    /// The pointer is valid for value `index`.
    #[inline(always)]
    unsafe fn write(self, index: usize, bits: u16) {
        // SAFETY: the caller's contract.
        unsafe { self.0.add(index).write_unaligned(bits) }
    }
}

/// Widens `out.len()` bf16 values.
///
/// # Safety
/// `from` is valid for this number of values.
pub(super) unsafe fn widen_bf16(isa: Isa, from: *const u16, out: &mut [f32]) {
    for_each_isa! {
        fn widen(from: Bits, out: &mut [f32]) {
            for (index, out) in out.iter_mut().enumerate() {
                // SAFETY: the contract of `widen_bf16`.
                *out = f32::from_bits(u32::from(unsafe { from.read(index) }) << 16);
            }
        }
    }
    widen(isa, Bits(from), out);
}

/// Rounds values to bf16; NaN stays NaN.
///
/// # Safety
/// `to` is valid for as many values, and no other code uses them meanwhile.
pub(super) unsafe fn narrow_bf16(isa: Isa, values: &[f32], to: *mut u16) {
    for_each_isa! {
        fn narrow(values: &[f32], to: BitsMut) {
            for (index, value) in values.iter().enumerate() {
                // SAFETY: the contract of `narrow_bf16`.
                unsafe { to.write(index, bf16::from_f32(*value).to_bits()) };
            }
        }
    }
    narrow(isa, values, BitsMut(to));
}

/// Widens `out.len()` f16 values.
///
/// # Safety
/// `from` is valid for this number of values, and `isa` comes from [`Isa::available`].
pub(super) unsafe fn widen_f16(isa: Isa, from: *const u16, out: &mut [f32]) {
    let done = match isa {
        // SAFETY: the caller's contract.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx2 => unsafe { widen_f16_f16c(from, out) },
        Isa::Portable => 0,
    };
    for (index, out) in out.iter_mut().enumerate().skip(done) {
        // SAFETY: the caller's contract.
        *out = f16::from_bits(unsafe { Bits(from).read(index) }).to_f32();
    }
}

/// Rounds values to f16. Values beyond its range become infinite.
///
/// # Safety
/// `to` is valid for as many values, no other code uses them meanwhile, and `isa` comes from [`Isa::available`].
pub(super) unsafe fn narrow_f16(isa: Isa, values: &[f32], to: *mut u16) {
    let done = match isa {
        // SAFETY: the caller's contract.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx2 => unsafe { narrow_f16_f16c(values, to) },
        Isa::Portable => 0,
    };
    for (index, value) in values.iter().enumerate().skip(done) {
        // SAFETY: the caller's contract.
        unsafe { BitsMut(to).write(index, f16::from_f32(*value).to_bits()) };
    }
}

/// Converts whole groups of 8 and returns the number of converted values.
///
/// # Safety
/// As [`widen_f16`], on a machine with F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,f16c")]
unsafe fn widen_f16_f16c(from: *const u16, out: &mut [f32]) -> usize {
    use std::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
    let groups = out.as_chunks_mut::<8>().0;
    for (index, group) in groups.iter_mut().enumerate() {
        // SAFETY: the caller's contract; the group has 8 values.
        unsafe {
            let bits = _mm_loadu_si128(from.add(8 * index).cast());
            _mm256_storeu_ps(group.as_mut_ptr(), _mm256_cvtph_ps(bits));
        }
    }
    8 * groups.len()
}

/// Converts whole groups of 8 and returns the number of converted values.
///
/// # Safety
/// As [`narrow_f16`], on a machine with F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,f16c")]
unsafe fn narrow_f16_f16c(values: &[f32], to: *mut u16) -> usize {
    use std::arch::x86_64::{_MM_FROUND_TO_NEAREST_INT, _mm_storeu_si128, _mm256_cvtps_ph, _mm256_loadu_ps};
    let groups = values.as_chunks::<8>().0;
    for (index, group) in groups.iter().enumerate() {
        // SAFETY: the caller's contract; the group has 8 values.
        unsafe {
            let bits = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(group.as_ptr()));
            _mm_storeu_si128(to.add(8 * index).cast(), bits);
        }
    }
    8 * groups.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every exponent, both signs, halves of the last place, subnormals, zeros, infinities.
    fn values() -> Vec<f32> {
        let exponents = (0..=255_u32).map(|exponent| exponent << 23);
        let mantissas = [0, 1, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0x18000, 0x7f_ffff];
        let bits = exponents.flat_map(|exponent| mantissas.map(|mantissa| exponent | mantissa));
        let all = bits.flat_map(|bits| [bits, bits | 1 << 31]).map(f32::from_bits);
        all.filter(|value| !value.is_nan()).collect()
    }

    #[test]
    fn sixteen_bit_values_are_those_of_the_half_crate_on_every_instruction_set() {
        let values = values();
        for isa in Isa::available() {
            for len in [1, 7, 8, 9, 31, values.len()] {
                let values = &values[..len];
                let mut bits = vec![0_u16; len];
                let mut wide = vec![0.0_f32; len];
                // SAFETY: the buffers have `len` values.
                unsafe {
                    narrow_f16(isa, values, bits.as_mut_ptr());
                    widen_f16(isa, bits.as_ptr(), &mut wide);
                }
                for ((value, bits), wide) in values.iter().zip(&bits).zip(&wide) {
                    assert_eq!(*bits, f16::from_f32(*value).to_bits(), "{isa:?} {value:e}");
                    assert_eq!(wide.to_bits(), f16::from_bits(*bits).to_f32().to_bits(), "{isa:?} {value:e}");
                }
                // SAFETY: as above.
                unsafe {
                    narrow_bf16(isa, values, bits.as_mut_ptr());
                    widen_bf16(isa, bits.as_ptr(), &mut wide);
                }
                for ((value, bits), wide) in values.iter().zip(&bits).zip(&wide) {
                    assert_eq!(*bits, bf16::from_f32(*value).to_bits(), "{isa:?} {value:e}");
                    assert_eq!(wide.to_bits(), u32::from(*bits) << 16, "{isa:?} {value:e}");
                }
            }
        }
        let mut bits = [0_u16; 9];
        // SAFETY: the buffer has 9 values.
        unsafe { narrow_bf16(Isa::detect(), &[f32::NAN; 9], bits.as_mut_ptr()) };
        assert!(bits.iter().all(|bits| bf16::from_bits(*bits).is_nan()));
    }
}
