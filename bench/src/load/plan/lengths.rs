//! Lengths of prompts and responses: distributions in tokens, drawn by seed.

use std::fmt;
use std::str::FromStr;

use crate::load::rng::Rng;

/// Maximum length. A prompt of this size is about 40 MB of text.
const TOKENS_MAX: u32 = 10_000_000;
/// Where a heavy tail without a natural end is cut off.
const TAIL: f64 = 16.0;

/// A distribution of lengths in tokens. Draws are at least 1 and at most the limit of each variant.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Lengths {
    /// `N` or `fixed:N`.
    Fixed(u32),
    /// `uniform:A-B`, both ends included.
    Uniform(u32, u32),
    /// `normal:MEAN:DEVIATION`, at most 16 deviations above the mean.
    Normal(f64, f64),
    /// `lognormal:MEDIAN:SIGMA`. Sigma is the deviation of the logarithm. At most 16 times the 84th percentile.
    LogNormal(f64, f64),
    /// `zipf:A-B:S`: the length of rank k (A is the first) has a probability proportional to 1/k^S.
    Zipf { least: u32, cumulated: Vec<f64>, exponent: f64 },
}

/// Why a text is no distribution.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no distribution of lengths: N, fixed:N, uniform:A-B, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA or zipf:A-B:S"
)]
pub(crate) struct LengthsError(String);

/// Maximum ranks of a Zipf distribution. Its table is kept in memory.
const RANKS_MAX: u32 = 1 << 20;

impl FromStr for Lengths {
    type Err = LengthsError;

    fn from_str(text: &str) -> Result<Self, LengthsError> {
        Self::read(text).ok_or_else(|| LengthsError(text.to_owned()))
    }
}

impl Lengths {
    fn read(text: &str) -> Option<Self> {
        let tokens = |text: &str| text.parse::<u32>().ok().filter(|tokens| (1..=TOKENS_MAX).contains(tokens));
        let number = |text: &str| text.parse::<f64>().ok().filter(|x| x.is_finite() && *x >= 0.0);
        let positive = |text: &str| number(text).filter(|x| *x >= 1.0 && *x <= f64::from(TOKENS_MAX));
        let range = |text: &str| {
            let (least, most) = text.split_once('-')?;
            let (least, most) = (tokens(least)?, tokens(most)?);
            (least <= most).then_some((least, most))
        };
        let parts: Vec<_> = text.split(':').collect();
        match parts[..] {
            [fixed] | ["fixed", fixed] => tokens(fixed).map(Self::Fixed),
            ["uniform", ends] => range(ends).map(|(least, most)| Self::Uniform(least, most)),
            ["normal", mean, deviation] => Some(Self::Normal(positive(mean)?, number(deviation)?)),
            ["lognormal", median, sigma] => {
                Some(Self::LogNormal(positive(median)?, number(sigma).filter(|sigma| *sigma <= 10.0)?))
            }
            ["zipf", ends, exponent] => {
                let (least, most) = range(ends).filter(|(least, most)| most - least < RANKS_MAX)?;
                Some(Self::zipf(least, most, number(exponent).filter(|exponent| *exponent <= 100.0)?))
            }
            _ => None,
        }
    }

    fn zipf(least: u32, most: u32, exponent: f64) -> Self {
        let mut sum = 0.0;
        let cumulated = (1..=most - least + 1).map(|rank| {
            sum += f64::from(rank).powf(-exponent);
            sum
        });
        Self::Zipf { least, cumulated: cumulated.collect(), exponent }
    }

    pub(crate) fn draw(&self, rng: &mut Rng) -> u32 {
        match self {
            Self::Fixed(tokens) => *tokens,
            Self::Uniform(least, most) => {
                least + u32::try_from(rng.below(u64::from(most - least) + 1)).unwrap_or_default()
            }
            Self::Normal(mean, deviation) => within(mean + deviation * rng.normal(), mean + TAIL * deviation),
            Self::LogNormal(median, sigma) => {
                within(median * (sigma * rng.normal()).exp(), median * sigma.exp() * TAIL)
            }
            Self::Zipf { least, cumulated, .. } => {
                let total = cumulated.last().copied().unwrap_or_default();
                let drawn = rng.unit() * total;
                let rank = cumulated.partition_point(|sum| *sum <= drawn).min(cumulated.len() - 1);
                least + u32::try_from(rank).unwrap_or_default()
            }
        }
    }
}

fn within(drawn: f64, most: f64) -> u32 {
    // A cast of floats saturates.
    drawn.round().clamp(1.0, most.clamp(1.0, f64::from(TOKENS_MAX))) as u32
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(tokens) => write!(f, "fixed:{tokens}"),
            Self::Uniform(least, most) => write!(f, "uniform:{least}-{most}"),
            Self::Normal(mean, deviation) => write!(f, "normal:{mean}:{deviation}"),
            Self::LogNormal(median, sigma) => write!(f, "lognormal:{median}:{sigma}"),
            Self::Zipf { least, cumulated, exponent } => {
                write!(f, "zipf:{least}-{}:{exponent}", *least as usize + cumulated.len() - 1)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(text: &str) -> Vec<u32> {
        let lengths: Lengths = text.parse().unwrap_or_else(|error| panic!("{error}"));
        let mut rng = Rng::new(5);
        (0..20_000).map(|_| lengths.draw(&mut rng)).collect()
    }

    fn mean(values: &[u32]) -> f64 {
        values.iter().copied().map(f64::from).sum::<f64>() / values.len() as f64
    }

    #[test]
    fn lengths_are_drawn_as_written() {
        assert!(drawn("512").iter().all(|tokens| *tokens == 512));
        assert_eq!(drawn("fixed:7")[0], 7);
        let uniform = drawn("uniform:64-1024");
        assert_eq!((uniform.iter().min(), uniform.iter().max()), (Some(&64), Some(&1024)));
        assert!((mean(&uniform) - 544.0).abs() < 10.0, "{}", mean(&uniform));
        let normal = drawn("normal:512:128");
        assert!((mean(&normal) - 512.0).abs() < 5.0, "{}", mean(&normal));
        assert!(drawn("normal:4:100").iter().all(|tokens| *tokens >= 1));
        let mut lognormal = drawn("lognormal:300:1");
        lognormal.sort_unstable();
        assert!(lognormal[10_000].abs_diff(300) < 15 && mean(&lognormal) > 450.0, "{}", lognormal[10_000]);
        let zipf = drawn("zipf:10-1000:1.2");
        assert!(zipf.iter().all(|tokens| (10..=1_000).contains(tokens)));
        let first = zipf.iter().filter(|tokens| **tokens == 10).count() as f64;
        let second = zipf.iter().filter(|tokens| **tokens == 11).count() as f64;
        assert!((first / second - 2_f64.powf(1.2)).abs() < 0.25, "{first} {second}");
    }

    #[test]
    fn a_text_that_is_no_distribution_is_refused() {
        for good in ["1", "fixed:2", "uniform:1-2", "normal:5:1.5", "lognormal:5:0.5", "zipf:1-9:1"] {
            let lengths: Lengths = good.parse().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(lengths.to_string().parse(), Ok(lengths), "{good}");
        }
        for bad in [
            "",
            "0",
            "-1",
            "1.5",
            "fixed:",
            "fixed:99999999999",
            "uniform:9-1",
            "uniform:5",
            "normal:5",
            "normal:nan:1",
            "normal:inf:1",
            "normal:5:-1",
            "lognormal:0:1",
            "lognormal:5:11",
            "zipf:1-9",
            "zipf:1-9999999:1",
            "gauss:1:1",
        ] {
            assert!(bad.parse::<Lengths>().is_err(), "{bad}");
        }
    }
}
