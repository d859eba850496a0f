//! Elementwise and row-wise arithmetic: norms, activation, rotation, softmax.
//!
//! Plain Rust over slices that the compiler turns into vector code per instruction set. Sums run over 16 lanes by
//! absolute index and are added in one fixed order, so a value never depends on how its row was divided.
#![allow(
    unsafe_code,
    reason = "calls into functions compiled for detected instruction sets, see `for_each_isa`"
)]

use super::bf16::round;
use super::isa::for_each_isa;

/// Lanes of every sum.
const LANES: usize = 16;

/// e to the x, within 2 units in the last place between -87 and 88; clamped outside, NaN stays NaN.
///
/// Range reduction by a multiple of ln 2 in two parts, then the degree-6 polynomial of Cephes' `expf`.
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "the constants are split as published")]
fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let whole = shifted - ROUND;
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let r = whole.mul_add(-0.693_359_375, x);
    let r = whole.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_15e-4_f32;
    let p = p.mul_add(r, 1.398_199_950_7e-3);
    let p = p.mul_add(r, 8.333_451_907_3e-3);
    let p = p.mul_add(r, 4.166_579_589_4e-2);
    let p = p.mul_add(r, 1.666_666_545_9e-1);
    let p = p.mul_add(r, 5.000_000_120_1e-1);
    let e = p.mul_add(r * r, r) + 1.0;
    // At most 254, so no add wraps. An overflow check would prevent vectorization in development builds.
    e * f32::from_bits((power.wrapping_add(127) << 23) as u32)
}

/// The hyperbolic tangent, within 3 units in the last place; NaN stays NaN.
///
/// Cephes' `tanhf`: a polynomial near zero, `exp` elsewhere. Both are computed and one is selected, so that the compiler
/// can vectorize it.
#[inline(always)]
#[allow(clippy::excessive_precision, reason = "the constants as published")]
fn tanh(x: f32) -> f32 {
    let z = x * x;
    let p = (-5.704_988_727_45e-3_f32).mul_add(z, 2.063_908_879_54e-2);
    let p = p.mul_add(z, -5.373_971_555_31e-2);
    let p = p.mul_add(z, 1.333_144_220_36e-1);
    let p = p.mul_add(z, -3.333_328_194_22e-1);
    let near = (p * z).mul_add(x, x);
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

/// The lanes of a sum, added pairwise.
#[inline(always)]
fn add_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Turns scores into `exp(factor * (score - max))`, where the maximum is at least `floor`. Returns the sum of these,
/// and the maximum.
#[inline(always)]
fn numerators(scores: &mut [f32], factor: f32, floor: f32) -> (f32, f32) {
    let mut highest = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = scores.as_chunks::<LANES>();
    for chunk in chunks {
        for (highest, score) in highest.iter_mut().zip(chunk) {
            *highest = if *score > *highest { *score } else { *highest };
        }
    }
    // The largest value does not depend on the order, so any reduction is correct.
    let highest = highest.iter().chain(rest).fold(floor, |a, b| a.max(*b));
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = scores.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (lane, score) in lanes.iter_mut().zip(chunk) {
            *score = exp((*score - highest) * factor);
            *lane += *score;
        }
    }
    for (lane, score) in lanes.iter_mut().zip(rest) {
        *score = exp((*score - highest) * factor);
        *lane += *score;
    }
    (add_lanes(lanes), highest)
}

/// Sum of squares.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = x.mul_add(*x, *lane);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = x.mul_add(*x, *lane);
    }
    add_lanes(lanes)
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt()
}

for_each_isa! {
    /// `out = x / rms(x) * weight`.
    pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let scale = inverse_rms(x, eps);
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * weight;
        }
    }
}

for_each_isa! {
    /// `x = x / rms(x) * weight`, in place.
    pub(super) fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
        let scale = inverse_rms(x, eps);
        for (x, weight) in x.iter_mut().zip(weight) {
            *x = *x * scale * weight;
        }
    }
}

for_each_isa! {
    /// `x += y`.
    pub(super) fn add(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

for_each_isa! {
    /// `out = x * factor`.
    pub(super) fn scale_into(x: &[f32], factor: f32, out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x * factor;
        }
    }
}

for_each_isa! {
    /// `gate = gate * sigmoid(gate) * up`.
    pub(super) fn silu_mul(gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = *gate / (1.0 + exp(-*gate)) * up;
        }
    }
}

for_each_isa! {
    /// `gate = gelu(gate) * up`, with the approximation of GELU by a hyperbolic tangent.
    pub(super) fn gelu_mul(gate: &mut [f32], up: &[f32]) {
        // The root of 2 / pi.
        const SCALE: f32 = 0.797_884_6;
        for (gate, up) in gate.iter_mut().zip(up) {
            let x = *gate;
            let inner = SCALE * (x + 0.044_715 * (x * x * x));
            *gate = 0.5 * x * (1.0 + tanh(inner)) * up;
        }
    }
}

for_each_isa! {
    /// `gate = gate * sigmoid(1.702 * gate) * (up + 1)`, of gates up to the limit and ups within it.
    pub(super) fn swiglu_mul(gate: &mut [f32], up: &[f32], limit: f32) {
        for (gate, up) in gate.iter_mut().zip(up) {
            // NaN stays NaN.
            let x = if *gate > limit { limit } else { *gate };
            *gate = x / (1.0 + exp(-1.702 * x)) * (up.clamp(-limit, limit) + 1.0);
        }
    }
}

for_each_isa! {
    /// `x = cap * tanh(factor * x / cap)`.
    pub(super) fn soft_cap(x: &mut [f32], factor: f32, cap: f32) {
        for x in x {
            *x = cap * tanh(*x * factor / cap);
        }
    }
}

for_each_isa! {
    /// `x += factor * y`, rounded twice.
    pub(super) fn add_scaled(x: &mut [f32], y: &[f32], factor: f32) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y * factor;
        }
    }
}

/// Sum of products of `read(x)` and `y`, which have the same length.
#[inline(always)]
fn sum_of_products(x: &[f32], y: &[f32], read: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in x.iter().zip(y) {
        for ((lane, x), y) in lanes.iter_mut().zip(x).zip(y) {
            *lane = read(*x).mul_add(*y, *lane);
        }
    }
    for ((lane, x), y) in lanes.iter_mut().zip(x_rest).zip(y_rest) {
        *lane = read(*x).mul_add(*y, *lane);
    }
    add_lanes(lanes)
}

for_each_isa! {
    /// Sum of products. Both have the same length.
    pub(super) fn dot(x: &[f32], y: &[f32]) -> f32 {
        sum_of_products(x, y, |x| x)
    }
}

for_each_isa! {
    /// As [`dot`], with the values of `x` rounded to bf16.
    pub(super) fn dot_rounded(x: &[f32], y: &[f32]) -> f32 {
        sum_of_products(x, y, |x| f32::from_bits(u32::from(round(x)) << 16))
    }
}

for_each_isa! {
    /// `x *= factor`.
    pub(super) fn scale(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }
}

for_each_isa! {
    /// Rotates the pairs `(x[i], x[i + half])` of one head by the given angles' cosines and sines.
    pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
        let (low, high) = head.split_at_mut(cos.len());
        for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            let (x, y) = (*low, *high);
            *low = x * cos - y * sin;
            *high = y * cos + x * sin;
        }
    }
}

for_each_isa! {
    /// Turns scores into `exp(factor * (score - max))` and returns the sum of these.
    pub(super) fn softmax_numerators(scores: &mut [f32], factor: f32) -> f32 {
        numerators(scores, factor, f32::NEG_INFINITY).0
    }
}

for_each_isa! {
    /// As [`softmax_numerators`] with one more score, whose numerator is the last one that is added to the sum.
    pub(super) fn softmax_numerators_beside(scores: &mut [f32], factor: f32, sink: f32) -> f32 {
        let (sum, highest) = numerators(scores, factor, sink);
        sum + exp((sink - highest) * factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::cpu::isa::Isa;

    fn ramp(len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) / 13.0).collect()
    }

    #[test]
    fn exp_is_accurate_to_a_few_units_in_the_last_place() {
        for i in -8700..8800 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.5e-7, "exp({x}) is off by {error:e}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(-1000.0) < 1e-37);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_and_gelu_are_accurate_to_a_few_units_in_the_last_place() {
        for i in -12_000..12_000 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).tanh();
            let error = (f64::from(tanh(x)) - exact).abs();
            assert!(error <= 3e-7 * exact.abs(), "tanh({x}) is off by {error:e}");
            let mut gate = [x];
            gelu_mul(Isa::Portable, &mut gate, &[2.0]);
            let wide = f64::from(x);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044_715 * wide.powi(3));
            let exact = wide * (1.0 + inner.tanh());
            assert!((f64::from(gate[0]) - exact).abs() <= 2e-6 * wide.abs().max(1e-3), "gelu({x})");
        }
        assert_eq!((tanh(0.0), tanh(90.0), tanh(-90.0)), (0.0, 1.0, -1.0));
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn soft_caps_bound_their_values() {
        let mut values = [-1e6, -0.5, 0.0, 0.5, 1e6];
        soft_cap(Isa::detect(), &mut values, 2.0, 5.0);
        assert_eq!((values[0], values[2], values[4]), (-5.0, 0.0, 5.0));
        assert!((f64::from(values[3]) - 5.0 * 0.2_f64.tanh()).abs() < 1e-6, "{values:?}");
        assert_eq!(values[1], -values[3]);
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        for len in [1, 15, 16, 17, 64, 1000] {
            let (x, y) = (ramp(len), ramp(len + 7)[7..].to_vec());
            let all: Vec<_> = Isa::available()
                .into_iter()
                .map(|isa| {
                    let (mut norm, mut act, mut soft) = (vec![0.0; len], x.clone(), x.clone());
                    rms_norm(isa, &x, &y, 1e-5, &mut norm);
                    silu_mul(isa, &mut act, &y);
                    let sum = softmax_numerators(isa, &mut soft, 0.125);
                    let (mut gelu, mut capped) = (x.clone(), x.clone());
                    gelu_mul(isa, &mut gelu, &y);
                    soft_cap(isa, &mut capped, 0.7, 3.0);
                    add_scaled(isa, &mut capped, &gelu, 0.3);
                    scale(isa, &mut capped, 1.7);
                    let (mut swiglu, mut beside) = (x.clone(), x.clone());
                    swiglu_mul(isa, &mut swiglu, &y, 2.5);
                    let sum_beside = softmax_numerators_beside(isa, &mut beside, 0.125, 1.5);
                    swiglu.append(&mut beside);
                    let bits = |v: &[f32]| v.iter().map(|f| f.to_bits()).collect::<Vec<_>>();
                    let sums =
                        [sum, sum_beside, dot(isa, &x, &y), dot_rounded(isa, &x, &y)].map(f32::to_bits);
                    (bits(&norm), bits(&act), bits(&soft), bits(&capped), bits(&swiglu), sums)
                })
                .collect();
            assert!(all.iter().all(|one| *one == all[0]), "length {len}");
        }
    }

    #[test]
    fn a_sink_is_one_more_score_of_the_softmax() {
        // Below, between and above the others, and so far above that nothing is left of them.
        for sink in [-1000.0, -7.0, 0.3, 20.0, 1000.0] {
            let mut beside = ramp(37);
            let mut with = [ramp(37), vec![sink]].concat();
            let sums = [
                softmax_numerators_beside(Isa::detect(), &mut beside, 0.5, sink),
                softmax_numerators(Isa::detect(), &mut with, 0.5),
            ];
            assert_eq!(beside, with[..37], "sink {sink}");
            assert!((sums[0] - sums[1]).abs() <= 2e-6 * sums[1], "sink {sink}: {sums:?}");
            let exact: f64 = ramp(37).iter().map(|score| (f64::from(*score - sink) * 0.5).exp()).sum();
            let share: f64 = beside.iter().map(|score| f64::from(*score) / f64::from(sums[0])).sum();
            assert!((share - exact / (exact + 1.0)).abs() < 1e-6, "sink {sink}");
        }
    }

    #[test]
    fn clamped_swiglu_has_the_values_of_its_formula() {
        for i in -1200..1200 {
            let (gate, up) = (i as f32 / 100.0, (i * 37 % 1001) as f32 / 50.0);
            let mut out = [gate];
            swiglu_mul(Isa::Portable, &mut out, &[up], 7.0);
            let (x, y) = (f64::from(gate).min(7.0), f64::from(up).clamp(-7.0, 7.0));
            let exact = x / (1.0 + (-1.702 * x).exp()) * (y + 1.0);
            assert!((f64::from(out[0]) - exact).abs() <= 3e-6 * exact.abs().max(1e-3), "{gate}, {up}");
        }
        let of = |gate: f32, up: f32| {
            let mut out = [gate];
            swiglu_mul(Isa::detect(), &mut out, &[up], 7.0);
            out[0]
        };
        assert_eq!(of(1e9, 1e9), of(7.0, 7.0));
        assert_eq!(of(2.0, -1e9), of(2.0, -7.0));
        // A gate has no lower limit.
        assert_ne!(of(-8.0, 0.5), of(-7.0, 0.5));
        assert!(of(f32::NAN, 1.0).is_nan() && of(1.0, f32::NAN).is_nan());
    }

    #[test]
    fn softmax_numerators_are_exponentials_relative_to_the_largest() {
        let mut scores = ramp(100);
        let exact: Vec<f64> =
            scores.iter().map(|s| (f64::from(*s) - 50.0 / 13.0).mul_add(0.5, 0.0).exp()).collect();
        let sum = softmax_numerators(Isa::detect(), &mut scores, 0.5);
        for (score, exact) in scores.iter().zip(&exact) {
            assert!((f64::from(*score) - exact).abs() < 1e-6);
        }
        assert!((f64::from(sum) - exact.iter().sum::<f64>()).abs() < 1e-4);
    }
}
