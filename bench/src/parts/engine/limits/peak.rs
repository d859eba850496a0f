//! Chains of multiply-adds in registers, the maximum arithmetic of a core.
//!
//! The operands are opaque to the compiler. It would otherwise compute the result once and report thousands of times
//! the speed of any core.

use std::hint::black_box;

use baton_engine::compute::cpu::Bf16Unit;

/// Rounds of every chain, which take some milliseconds.
const ROUNDS: usize = 1 << 20;
/// Rounds of four tiles, each of which equals 512 chains of a multiply-add.
const TILE_ROUNDS: usize = 1 << 17;
/// Independent chains: more than latency times units of any known core.
const CHAINS: usize = 16;

/// The widest multiply-add of this machine.
#[derive(Clone, Copy, Debug)]
pub(super) enum Chains {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// Four tiles of sums, as in the engine's own blocks.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// The chains of a unit of bfloat16 mode. The unit comes from [`Bf16Unit::available`].
pub(super) fn of_unit(unit: Bf16Unit) -> Option<Chains> {
    match unit {
        #[cfg(target_arch = "x86_64")]
        Bf16Unit::Amx => Some(Chains::Amx),
        #[cfg(target_arch = "x86_64")]
        Bf16Unit::Avx512Bf16 => Some(Chains::Avx512Bf16),
        Bf16Unit::Widened => None,
    }
}

pub(super) fn detect() -> Option<Chains> {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            return Some(Chains::Avx512);
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Some(Chains::Avx2);
        }
    }
    None
}

impl Chains {
    /// Operations of one run.
    pub(super) fn flops(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => 2 * 16 * CHAINS * ROUNDS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => 2 * 8 * CHAINS * ROUNDS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => 2 * 32 * CHAINS * ROUNDS,
            // 16 rows, 16 columns, 32 inputs.
            #[cfg(target_arch = "x86_64")]
            Self::Amx => 2 * 16 * 16 * 32 * 4 * TILE_ROUNDS,
        }
    }

    /// Returns the sum of all chains, so that the compiler omits none.
    pub(super) fn run(self) -> f32 {
        match self {
            // SAFETY: `detect` has checked the feature.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512() },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2() },
            // SAFETY: the unit is available.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => unsafe { avx512_bf16() },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Amx => unsafe { amx() },
        }
    }
}

/// One named variable for each chain: without optimization an array would be in memory.
#[cfg(target_arch = "x86_64")]
macro_rules! chains {
    ($set:ident, $fma:ident, $add:ident, [$($chain:ident)*]) => {{
        let (factor, term) = ($set(black_box(0.999)), $set(black_box(1e-3)));
        $(let mut $chain = $set(1.0);)*
        for _ in 0..ROUNDS {
            $($chain = $fma($chain, factor, term);)*
        }
        let mut sum = $set(0.0);
        $(sum = $add(sum, $chain);)*
        sum
    }};
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn avx512() -> f32 {
    use std::arch::x86_64::{_mm512_add_ps, _mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
    let sum = chains!(_mm512_set1_ps, _mm512_fmadd_ps, _mm512_add_ps, [a b c d e f g h i j k l m n o p]);
    _mm512_reduce_add_ps(sum)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2() -> f32 {
    use std::arch::x86_64::{_mm256_add_ps, _mm256_cvtss_f32, _mm256_fmadd_ps, _mm256_set1_ps};
    let sum = chains!(_mm256_set1_ps, _mm256_fmadd_ps, _mm256_add_ps, [a b c d e f g h i j k l m n o p]);
    _mm256_cvtss_f32(sum)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn avx512_bf16() -> f32 {
    use std::arch::x86_64::{
        __m512bh, __m512i, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_reduce_add_ps, _mm512_set1_epi16,
        _mm512_set1_ps,
    };
    let spread = |bits: i16| -> __m512bh {
        // SAFETY: 32 values of two bytes each.
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi16(black_box(bits))) }
    };
    // 0.5 and 2^-7.
    let (a, b) = (spread(0x3f00), spread(0x3c00));
    macro_rules! rounds {
        ($($chain:ident)*) => {{
            $(let mut $chain = _mm512_set1_ps(black_box(1.0));)*
            for _ in 0..ROUNDS {
                $($chain = _mm512_dpbf16_ps($chain, a, b);)*
            }
            let mut sum = _mm512_set1_ps(0.0);
            $(sum = _mm512_add_ps(sum, $chain);)*
            sum
        }};
    }
    _mm512_reduce_add_ps(rounds!(a1 b1 c1 d1 e1 f1 g1 h1 i1 j1 k1 l1 m1 n1 o1 p1))
}

/// Products of tiles. The intrinsics are not stable, so this is assembly, as in the engine.
///
/// # Safety
/// This process may use AMX.
#[cfg(target_arch = "x86_64")]
unsafe fn amx() -> f32 {
    /// Palette 1: eight tiles of 16 rows of 64 bytes.
    #[repr(C, align(64))]
    struct TileConfig([u8; 64]);
    let mut config = TileConfig([0; 64]);
    config.0[0] = 1;
    for tile in 0..8 {
        (config.0[16 + 2 * tile], config.0[48 + tile]) = (64, 16);
    }
    let mut sums = [0.0_f32; 256];
    // SAFETY: the caller's contract. Only `sums` is written.
    unsafe {
        std::arch::asm!(
            "ldtilecfg [{config}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tilezero tmm4",
            "tilezero tmm5",
            "tilezero tmm6",
            "tilezero tmm7",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {rounds}",
            "jnz 2b",
            "tilestored [{sums} + {row}], tmm0",
            "tilerelease",
            config = in(reg) &raw const config,
            sums = in(reg) sums.as_mut_ptr(),
            row = in(reg) 64_usize,
            rounds = inout(reg) TILE_ROUNDS => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        );
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// No core does more operations per nanosecond.
    const FLOPS_PER_NANOSECOND_MAX: f64 = 2000.0;

    #[test]
    fn every_run_computes_and_no_result_is_reused() {
        for chains in detect().into_iter().chain(Bf16Unit::available().into_iter().filter_map(of_unit)) {
            let most = match chains {
                #[cfg(target_arch = "x86_64")]
                Chains::Amx => 5.0 * FLOPS_PER_NANOSECOND_MAX,
                _ => FLOPS_PER_NANOSECOND_MAX,
            };
            let fastest = (0..20).map(|_| {
                let start = Instant::now();
                black_box(chains.run());
                start.elapsed()
            });
            let fastest = fastest.min().unwrap_or(Duration::ZERO);
            let least = Duration::from_nanos((chains.flops() as f64 / most) as u64);
            assert!(fastest > least, "{chains:?}: {fastest:?} for {} operations", chains.flops());
        }
    }
}
