//! The vector instruction set in use, chosen once at run time.
//!
//! Every kernel has the same order of operations on every instruction set. Each output is one chain of fused
//! multiply-adds (with int8 weights one chain per group of weights). Each sum runs over 16 lanes that are added in one
//! fixed order. All instruction sets therefore give the same bits, and a prefill engine with AVX-512 may feed a decode
//! engine without it.
#![allow(
    unsafe_code,
    reason = "a prefetch, which may point anywhere; and the calls that `for_each_isa` makes"
)]

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 (F, BW, DQ, VL).
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The compiler's baseline. Very slow if the baseline has no fused multiply-add.
    Portable,
}

impl Isa {
    /// The best instruction set of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// All instruction sets of this machine, the best first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            [(avx512, Self::Avx512), (avx2, Self::Avx2), (true, Self::Portable)]
                .into_iter()
                .filter_map(|(has, isa)| has.then_some(isa))
                .collect()
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            vec![Self::Portable]
        }
    }

    /// The name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }
}

/// Whether this is an AMD processor. AMD and Intel need different memory access patterns; the bits are the same.
#[cfg(target_arch = "x86_64")]
pub(super) fn is_amd() -> bool {
    use std::sync::LazyLock;
    static AMD: LazyLock<bool> = LazyLock::new(|| {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
    });
    *AMD
}

/// Whether this processor reads the panels of bfloat16 mode faster without software prefetches: AMD's family 19h, of
/// which Zen 4 has the instruction. With prefetches 4 or 8 KiB ahead, Zen 4 loses about a tenth of the bandwidth. The
/// panels of f32 arithmetic are prefetched on Zen 4 too: eight rows of bf16 weights need it.
#[cfg(target_arch = "x86_64")]
pub(super) fn follows_streams() -> bool {
    use std::sync::LazyLock;
    static FOLLOWS: LazyLock<bool> = LazyLock::new(|| {
        let signature = std::arch::x86_64::__cpuid(1).eax;
        // A family above 15 is encoded in two fields.
        let family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
        is_amd() && family == 0x19
    });
    *FOLLOWS
}

/// Prefetches the cache lines of `bytes` bytes from any address into the first-level cache.
#[inline(always)]
pub(super) fn request(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for offset in (0..bytes).step_by(64) {
            // SAFETY: a prefetch may point anywhere.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(offset).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, bytes);
}

/// Defines a function whose plain Rust body is compiled once per instruction set. The first argument selects the
/// compiled version.
macro_rules! for_each_isa {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::compute::cpu::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn avx512($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
            match isa {
                // SAFETY: an executor is only created with an `Isa` of `Isa::available`, which has checked that this
                // machine has the features. Other callers are tests only, with the same values.
                #[cfg(target_arch = "x86_64")]
                $crate::compute::cpu::isa::Isa::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::compute::cpu::isa::Isa::Avx2 => unsafe { avx2($($arg),*) },
                $crate::compute::cpu::isa::Isa::Portable => body($($arg),*),
            }
        }
    };
}
pub(super) use for_each_isa;
