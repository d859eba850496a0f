//! Random numbers by seed: xoshiro256++, seeded by SplitMix64 (Blackman and Vigna, 2018), the same on every machine.

/// The increment of SplitMix64.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// One step of SplitMix64: a hash.
pub(crate) fn mix(of: u64) -> u64 {
    let of = of.wrapping_add(GAMMA);
    let of = (of ^ (of >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let of = (of ^ (of >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    of ^ (of >> 31)
}

/// A sequence of numbers determined by a seed.
#[derive(Clone, Debug)]
pub(crate) struct Rng([u64; 4]);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self([0, 1, 2, 3].map(|step: u64| mix(seed.wrapping_add(GAMMA.wrapping_mul(step)))))
    }

    /// Another stream of the same seed. Each quantity has its own stream, so that drawing more of one changes no
    /// other.
    pub(crate) fn stream(seed: u64, name: &str) -> Self {
        let named = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self::new(seed ^ named)
    }

    pub(crate) fn next(&mut self) -> u64 {
        let state = &mut self.0;
        let drawn = state[0].wrapping_add(state[3]).rotate_left(23).wrapping_add(state[0]);
        let shifted = state[1] << 17;
        state[2] ^= state[0];
        state[3] ^= state[1];
        state[1] ^= state[2];
        state[0] ^= state[3];
        state[2] ^= shifted;
        state[3] = state[3].rotate_left(45);
        drawn
    }

    /// From 0 to 1, excluding 1, with 53 bits.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform below `bound` (Lemire, 2019). 0 for a bound of 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        let wide = |drawn: u64| u128::from(drawn) * u128::from(bound);
        let mut product = wide(self.next());
        if (product as u64) < bound {
            let threshold = bound.wrapping_neg() % bound;
            while (product as u64) < threshold {
                product = wide(self.next());
            }
        }
        (product >> 64) as u64
    }

    /// True with this probability.
    pub(crate) fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// Exponential with mean 1.
    pub(crate) fn exponential(&mut self) -> f64 {
        // 1 - unit is never 0.
        -(1.0 - self.unit()).ln()
    }

    /// Normal with mean 0 and standard deviation 1 (Box and Muller, one of the pair).
    pub(crate) fn normal(&mut self) -> f64 {
        let (radius, angle) = ((2.0 * self.exponential()).sqrt(), std::f64::consts::TAU * self.unit());
        radius * angle.cos()
    }

    /// Gamma of this shape with scale 1 (Marsaglia and Tsang, 2000).
    pub(crate) fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            // The boost for small shapes.
            let boost = (1.0 - self.unit()).powf(1.0 / shape);
            return self.gamma(shape + 1.0) * boost;
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && (1.0 - self.unit()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_stream() {
        // The reference implementation's first numbers for the state 1, 2, 3, 4.
        let mut reference = Rng([1, 2, 3, 4]);
        let drawn: Vec<_> = (0..4).map(|_| reference.next()).collect();
        assert_eq!(drawn, [41_943_041, 58_720_359, 3_588_806_011_781_223, 3_591_011_842_654_386]);
        let draw = |mut rng: Rng| (0..8).map(|_| rng.next()).collect::<Vec<_>>();
        assert_eq!(draw(Rng::new(7)), draw(Rng::new(7)));
        assert_ne!(draw(Rng::new(7)), draw(Rng::new(8)));
        assert_ne!(draw(Rng::stream(7, "lengths")), draw(Rng::stream(7, "arrivals")));
    }

    /// Mean and variance of 100,000 numbers. The standard error of the mean is 0.3 % of the deviation.
    fn moments(mut draw: impl FnMut() -> f64) -> (f64, f64) {
        let drawn: Vec<f64> = (0..100_000).map(|_| draw()).collect();
        let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
        (mean, drawn.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / drawn.len() as f64)
    }

    #[test]
    fn draws_have_the_moments_of_their_distributions() {
        let mut rng = Rng::new(3);
        let near = |(mean, variance): (f64, f64), expected: (f64, f64), name: &str| {
            let deviation = expected.1.sqrt();
            assert!((mean - expected.0).abs() < 0.02 * deviation, "{name}: mean {mean}");
            assert!((variance / expected.1 - 1.0).abs() < 0.06, "{name}: variance {variance}");
        };
        near(moments(|| rng.unit()), (0.5, 1.0 / 12.0), "unit");
        near(moments(|| rng.exponential()), (1.0, 1.0), "exponential");
        near(moments(|| rng.normal()), (0.0, 1.0), "normal");
        near(moments(|| rng.below(10) as f64), (4.5, 8.25), "below");
        for shape in [0.25, 1.0, 4.0] {
            near(moments(|| rng.gamma(shape)), (shape, shape), "gamma");
        }
        let counts = (0..10_000).filter(|_| rng.chance(0.3)).count();
        assert!((2_700..3_300).contains(&counts), "{counts}");
        assert_eq!(rng.below(0), 0);
    }
}
