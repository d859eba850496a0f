//! `e^x` for x <= 0, in a form that the compiler turns into vector code. The bits are the same on every machine (libm's
//! differ), because prefill and decode engine must draw the same token.

/// Below this the result is 0 instead of a subnormal value.
const LOWEST: f32 = -87.0;
/// Adding this leaves the nearest integer in the low bits of the mantissa: 1.5 × 2^23.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has zeros at the end, so that its multiples are exact (Cody and Waite).
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// `e^x` for x <= 0 with a relative error under 3e-7; 0 for NaN and for x < -87.
#[inline(always)]
pub(super) fn exp_neg(x: f32) -> f32 {
    let bounded = x.max(LOWEST);
    let rounded = bounded * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = bounded - n * LN2_HIGH - n * LN2_LOW;
    // Taylor's polynomial of degree 7 on |r| <= ln 2 / 2: remainder under 6e-9.
    let p = 1.0
        + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0))))));
    let scale = f32::from_bits((rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127)) << 23);
    if x >= LOWEST { p * scale } else { 0.0 }
}

/// The sum of `e^((x - max) × factor)` over a row, in a fixed order; with `out`, the terms too.
pub(super) fn weigh(row: &[f32], max: f32, factor: f32, out: &mut Vec<f32>) -> f64 {
    out.clear();
    out.extend(row.iter().map(|x| exp_neg((x - max) * factor)));
    sum(out)
}

/// The same sum without the terms.
pub(super) fn sum_of_exp(row: &[f32], max: f32) -> f64 {
    let mut total = 0.0;
    for chunk in row.chunks(256) {
        let mut lanes = [0.0f32; 16];
        let (whole, rest) = chunk.as_chunks::<16>();
        for part in whole {
            for (lane, x) in lanes.iter_mut().zip(part) {
                *lane += exp_neg(x - max);
            }
        }
        total += lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>();
        total += rest.iter().map(|x| f64::from(exp_neg(x - max))).sum::<f64>();
    }
    total
}

fn sum(values: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (whole, rest) = values.as_chunks::<8>();
    for part in whole {
        for (lane, value) in lanes.iter_mut().zip(part) {
            *lane += f64::from(*value);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|value| f64::from(*value)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_a_few_ulps_down_to_its_floor() {
        let mut worst = 0.0f64;
        for step in 0..870_000 {
            let x = -(step as f32) * 1e-4;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp_neg(x)) - exact).abs() / exact);
        }
        assert!(worst < 3e-7, "relative error {worst}");
        assert_eq!(exp_neg(0.0), 1.0);
        assert_eq!(exp_neg(-0.0), 1.0);
    }

    #[test]
    fn masked_and_nan_entries_have_zero_weight() {
        for x in [f32::NEG_INFINITY, f32::NAN, -87.1, f32::MIN] {
            assert_eq!(exp_neg(x), 0.0);
        }
    }

    #[test]
    fn both_sums_agree() {
        let row: Vec<f32> = (0..1003).map(|i| -((i * 37 % 1003) as f32) / 40.0).collect();
        let mut terms = Vec::new();
        let a = weigh(&row, 0.0, 1.0, &mut terms);
        let b = sum_of_exp(&row, 0.0);
        assert!((a - b).abs() / a < 1e-6, "{a} {b}");
    }
}
