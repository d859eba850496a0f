//! Chains of multiply-adds in registers: the most arithmetic a core can do.
//!
//! The operands are opaque to the compiler: of a function without inputs it computes the result once and reports
//! thousands of times the speed of any core.

use std::hint::black_box;

/// Rounds of every chain: some milliseconds.
const ROUNDS: usize = 1 << 20;
/// Independent chains: more than the latency times the units of any core so far.
const CHAINS: usize = 16;

/// The widest multiply-add of this machine.
#[derive(Clone, Copy, Debug)]
pub(super) enum Chains {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
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
    /// Of one run.
    pub(super) fn flops(self) -> usize {
        let lanes = match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => 16,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => 8,
        };
        2 * lanes * CHAINS * ROUNDS
    }

    /// The sum of everything, so that nothing is left out.
    pub(super) fn run(self) -> f32 {
        match self {
            // SAFETY: `detect` has seen the feature.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512() },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2() },
        }
    }
}

/// One named variable for each chain: without optimization an array would live in memory.
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// No core does more than this many multiply-adds of the widest kind in a nanosecond.
    const FLOPS_PER_NANOSECOND_MAX: f64 = 2000.0;

    #[test]
    fn every_run_does_its_arithmetic_and_none_is_remembered() {
        let Some(chains) = detect() else { return };
        let fastest = (0..20).map(|_| {
            let start = Instant::now();
            black_box(chains.run());
            start.elapsed()
        });
        let fastest = fastest.min().unwrap_or(Duration::ZERO);
        let least = Duration::from_nanos((chains.flops() as f64 / FLOPS_PER_NANOSECOND_MAX) as u64);
        assert!(fastest > least, "{fastest:?} for {} operations", chains.flops());
    }
}
