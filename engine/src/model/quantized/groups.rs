//! The integers of quantized matrices as they are stored, in groups of 32 inputs of one output.
//!
//! ```text
//!   weight = factor * scale * quant                                    Plain8 (scale 1), Halves8
//!   weight = factor * (quant - offset)                                 Zero4
//!   weight = factor * scale * quant - minimum_factor * offset          Minimum4, Minimum8
//! ```
//!
//! A group has the integers, scales and minima of the file. Nothing is rounded, so [`IntegerGroup::value`] is the bits
//! that a conversion to f32 gives.

/// Inputs of a group.
pub(crate) const GROUP: usize = 32;

/// What the integers of a matrix have beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IntegerKind {
    /// Signed integers of 8 bits, with a factor.
    Plain8,
    /// 4 bits, with a factor and a zero point for each span.
    Zero4,
    /// 4 bits, with a scale and a minimum for each group.
    Minimum4,
    /// The same with more bits: at most 31.
    Minimum8,
    /// Signed integers of 8 bits, with a signed scale for 16 of them.
    Halves8,
}

/// How the integers of a matrix are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IntegerForm {
    /// What the integers have beside them.
    pub(crate) kind: IntegerKind,
    /// Groups that share factors and zero points; at least one.
    pub(crate) span: usize,
}

/// 32 integers of one output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IntegerGroup {
    /// The integers, in the order of the inputs.
    pub(crate) quants: [i8; GROUP],
    /// Factor of the span.
    pub(crate) factor: f32,
    /// Factor of the span's minima.
    pub(crate) minimum_factor: f32,
    /// Scales of both halves.
    pub(crate) scales: [i8; 2],
    /// Zero point or minimum.
    pub(crate) offset: u8,
}

impl Default for IntegerGroup {
    fn default() -> Self {
        Self { quants: [0; GROUP], factor: 0.0, minimum_factor: 0.0, scales: [1; 2], offset: 0 }
    }
}

impl IntegerGroup {
    /// A weight as f32.
    pub(crate) fn value(&self, kind: IntegerKind, input: usize) -> f32 {
        let quant = f32::from(self.quants[input]);
        let scale = || self.factor * f32::from(self.scales[input / (GROUP / 2)]);
        match kind {
            IntegerKind::Plain8 => self.factor * quant,
            IntegerKind::Zero4 => (quant - f32::from(self.offset)) * self.factor,
            IntegerKind::Minimum4 | IntegerKind::Minimum8 => {
                scale() * quant - self.minimum_factor * f32::from(self.offset)
            }
            IntegerKind::Halves8 => scale() * quant,
        }
    }

    /// Rounds up to 32 weights to signed 8 bits: the factor is the largest magnitude over 127.
    pub(crate) fn rounded_to_8(weights: &[f32]) -> Self {
        let largest = weights.iter().fold(0.0_f32, |largest, weight| largest.max(weight.abs()));
        let factor = largest / 127.0;
        let mut group = Self { factor, ..Self::default() };
        for (quant, weight) in group.quants.iter_mut().zip(weights) {
            *quant = quotient(*weight, factor).clamp(-127.0, 127.0) as i8;
        }
        group
    }

    /// Rounds up to 32 weights to 4 bits with a zero point: zero is exact, and 15 steps cover the range.
    pub(crate) fn rounded_to_4(weights: &[f32]) -> Self {
        let (least, most) = weights
            .iter()
            .fold((0.0_f32, 0.0_f32), |(least, most), weight| (least.min(*weight), most.max(*weight)));
        // Divided first, so that the difference of two large numbers is finite.
        let factor = (most / 15.0) - (least / 15.0);
        let zero = quotient(-least, factor).clamp(0.0, 15.0);
        let mut group = Self { factor, offset: zero as u8, ..Self::default() };
        for (quant, weight) in group.quants.iter_mut().zip(weights) {
            *quant = (quotient(*weight, factor) + zero).clamp(0.0, 15.0) as i8;
        }
        group
    }
}

/// The nearest integer to a quotient, the even one of two; 0 without a factor.
fn quotient(weight: f32, factor: f32) -> f32 {
    if factor > 0.0 { (weight / factor).round_ties_even() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rounded_weight_is_off_by_at_most_half_a_step() {
        let weights: [f32; GROUP] = std::array::from_fn(|index| ((index * 37 + 11) % 64) as f32 / 24.0 - 0.9);
        let eight = IntegerGroup::rounded_to_8(&weights);
        let four = IntegerGroup::rounded_to_4(&weights);
        for (input, weight) in weights.iter().enumerate() {
            let error = (eight.value(IntegerKind::Plain8, input) - weight).abs();
            assert!(error <= 0.5001 * eight.factor, "{weight}: {error}");
            // The zero point is rounded too, so the ends of the range may be off by a whole step.
            let error = (four.value(IntegerKind::Zero4, input) - weight).abs();
            assert!(error <= 1.0001 * four.factor, "{weight}: {error}");
        }
    }

    #[test]
    fn zeros_infinities_and_what_is_not_a_number_do_no_harm() {
        for weights in [[0.0; GROUP], [f32::NAN; GROUP]] {
            for (group, kind) in [
                (IntegerGroup::rounded_to_8(&weights), IntegerKind::Plain8),
                (IntegerGroup::rounded_to_4(&weights), IntegerKind::Zero4),
            ] {
                assert!((0..GROUP).all(|input| group.value(kind, input) == 0.0));
            }
        }
        let mut weights = [0.0; GROUP];
        (weights[3], weights[4]) = (-3.0e38, 3.0e38);
        let four = IntegerGroup::rounded_to_4(&weights);
        assert!(four.factor.is_finite() && four.value(IntegerKind::Zero4, 0) == 0.0);
    }
}
