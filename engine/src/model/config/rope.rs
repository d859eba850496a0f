//! Rotary position embedding: its description in `config.json`, and the resulting frequencies.
//!
//! The formulas are those of transformers 5 (`modeling_rope_utils.py`); llama3 and yarn are from the papers of the same
//! names. Frequencies are rounded to single precision in the same places, because checkpoints were trained with those
//! values. At position 350 one unit in the last place already changes a logit by 3e-4 on the oracle models.

use std::f64::consts::PI;

use super::json::JsonFields;
use crate::model::ModelError;

const SUPPORTED: &str = "default, linear, llama3, yarn";

/// Rotary position embedding of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Stretching of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// Stretching of frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No stretching.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor; at least 1.
        factor: f64,
    },
    /// Llama 3: long wavelengths divided, short ones kept, a ramp between.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Context length before stretching, in tokens.
        original_positions: f64,
    },
    /// YaRN: a ramp over dimensions, and cos and sin multiplied by `attention_factor`.
    Yarn {
        /// Divisor of the long wavelengths.
        factor: f64,
        /// Multiplier of cos and sin.
        attention_factor: f64,
        /// Rotations over the original context above which a dimension is kept.
        beta_fast: f64,
        /// Rotations below which a dimension is divided by `factor`.
        beta_slow: f64,
        /// Context length before stretching, in tokens.
        original_positions: f64,
        /// Whether the ramp's ends are rounded outward to whole dimensions.
        truncate: bool,
    },
}

impl Rope {
    pub(super) fn parse(config: &JsonFields<'_>, max_positions: usize) -> Result<Self, ModelError> {
        // `rope_parameters` (transformers 5) contains theta and scaling. The older dialect has separate fields.
        let parameters = config.object("rope_parameters")?;
        if parameters
            .as_ref()
            .is_some_and(|fields| fields.object("full_attention").is_ok_and(|p| p.is_some()))
        {
            return Err(config.unsupported("rope_parameters per layer type", SUPPORTED));
        }
        let scaling = match &parameters {
            Some(_) => parameters.clone(),
            None => config.object("rope_scaling")?,
        };
        let theta = parameters.as_ref().map_or(Ok(None), |fields| fields.number("rope_theta"))?;
        let theta = match theta {
            Some(theta) => theta,
            None => config.number("rope_theta")?.unwrap_or(10_000.0),
        };
        if !(theta > 1.0 && theta.is_finite()) {
            return Err(config.malformed(format!("rope_theta {theta} must be above 1")));
        }
        let scaling = match scaling {
            None => RopeScaling::None,
            Some(fields) => RopeScaling::parse(&fields, max_positions)?,
        };
        Ok(Self { theta, scaling })
    }

    /// Radians per position of each of the `head_dim / 2` pairs.
    #[must_use]
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let dim = head_dim as f64;
        (0..head_dim / 2)
            .map(|pair| {
                let wavelength = self.theta.powf(2.0 * pair as f64 / dim) as f32;
                let frequency = 1.0 / wavelength;
                match self.scaling {
                    RopeScaling::None => frequency,
                    RopeScaling::Linear { factor } => frequency / factor as f32,
                    RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                        let wavelength = 2.0 * PI as f32 / frequency;
                        let divided = frequency / factor as f32;
                        if wavelength > (original_positions / low_freq_factor) as f32 {
                            divided
                        } else if wavelength < (original_positions / high_freq_factor) as f32 {
                            frequency
                        } else {
                            let smooth = (original_positions as f32 / wavelength - low_freq_factor as f32)
                                / (high_freq_factor - low_freq_factor) as f32;
                            (1.0 - smooth) * divided + smooth * frequency
                        }
                    }
                    RopeScaling::Yarn {
                        factor, beta_fast, beta_slow, original_positions, truncate, ..
                    } => {
                        let turns_at = |turns: f64| {
                            dim * (original_positions / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
                        };
                        let (mut low, mut high) = (turns_at(beta_fast), turns_at(beta_slow));
                        if truncate {
                            (low, high) = (low.floor(), high.ceil());
                        }
                        (low, high) = (low.max(0.0), high.min(dim - 1.0));
                        if low == high {
                            high += 0.001;
                        }
                        let ramp = (((pair as f64 - low) / (high - low)) as f32).clamp(0.0, 1.0);
                        let kept = 1.0 - ramp;
                        1.0 / (factor as f32 * wavelength) * (1.0 - kept) + frequency * kept
                    }
                }
            })
            .collect()
    }

    /// Positions of a checkpoint with `declared` ones (`max_position_embeddings`) after stretching, derived as vLLM's
    /// `max_model_len`. Yarn multiplies its original context, linear the declared one. Llama3 declares the stretched
    /// context.
    #[must_use]
    pub fn positions(&self, declared: usize) -> usize {
        // Factors and contexts have been checked to be positive. A product beyond `usize` saturates.
        match self.scaling {
            RopeScaling::Yarn { factor, original_positions, .. } => (original_positions * factor) as usize,
            RopeScaling::Linear { factor } => (declared as f64 * factor) as usize,
            RopeScaling::None | RopeScaling::Llama3 { .. } => declared,
        }
    }

    /// Multiplier of cos and sin.
    #[must_use]
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
        }
    }
}

impl RopeScaling {
    fn parse(fields: &JsonFields<'_>, max_positions: usize) -> Result<Self, ModelError> {
        if fields.number("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
            return Err(fields.unsupported("partial_rotary_factor", "rotary embedding of whole heads"));
        }
        let kind = match fields.text("rope_type")? {
            Some(kind) => Some(kind),
            None => fields.text("type")?,
        };
        let positive = |name: &str| match fields.number(name)? {
            Some(value) if value > 0.0 && value.is_finite() => Ok(Some(value)),
            Some(value) => Err(fields.malformed(format!("rope {name} {value} must be positive"))),
            None => Ok(None),
        };
        let required = |name: &str| positive(name)?.ok_or_else(|| fields.absent(&format!("rope {name}")));
        match kind {
            None | Some("default") => Ok(Self::None),
            Some("linear") => Ok(Self::Linear { factor: required("factor")? }),
            Some("llama3") => {
                let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
                if low >= high {
                    return Err(fields.malformed(format!(
                        "rope low_freq_factor {low} must be below high_freq_factor {high}"
                    )));
                }
                Ok(Self::Llama3 {
                    factor: required("factor")?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_positions: required("original_max_position_embeddings")?,
                })
            }
            Some("yarn") => {
                let factor = required("factor")?;
                let stretch =
                    |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
                let attention_factor = match (
                    positive("attention_factor")?,
                    fields.number("mscale")?.filter(|weight| *weight != 0.0),
                    fields.number("mscale_all_dim")?.filter(|weight| *weight != 0.0),
                ) {
                    (Some(given), _, _) => given,
                    (None, Some(weight), Some(all)) => stretch(weight) / stretch(all),
                    (None, _, _) => stretch(1.0),
                };
                Ok(Self::Yarn {
                    factor,
                    attention_factor,
                    beta_fast: positive("beta_fast")?.unwrap_or(32.0),
                    beta_slow: positive("beta_slow")?.unwrap_or(1.0),
                    original_positions: positive("original_max_position_embeddings")?
                        .unwrap_or(max_positions as f64),
                    truncate: fields.flag("truncate")?.unwrap_or(true),
                })
            }
            Some(other) => Err(fields.unsupported(&format!("rope type {other}"), SUPPORTED)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Rope {
        Rope { theta: 10_000.0, scaling }
    }

    #[test]
    fn plain_frequencies_fall_geometrically_from_one() {
        let plain = rope(RopeScaling::None).frequencies(8);
        for (frequency, wanted) in plain.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((frequency - wanted).abs() < 1e-7, "{plain:?}");
        }
    }

    #[test]
    fn llama3_keeps_short_wavelengths_and_divides_long_ones() {
        let plain = rope(RopeScaling::None).frequencies(64);
        let scaled = rope(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 64.0,
        })
        .frequencies(64);
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[31], plain[31] / 8.0);
        assert!(scaled.windows(2).all(|pair| pair[1] < pair[0]), "{scaled:?}");
    }

    #[test]
    fn yarn_multiplies_cos_and_sin() {
        let fields = JsonFields::parse(
            "config.json",
            br#"{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}"#,
        )
        .unwrap();
        let scaled = rope(RopeScaling::parse(&fields, 256).unwrap());
        assert!((f64::from(scaled.attention_factor()) - (0.1 * 4.0_f64.ln() + 1.0)).abs() < 1e-7);
        let plain = rope(RopeScaling::None).frequencies(64);
        let frequencies = scaled.frequencies(64);
        assert_eq!(frequencies[0], plain[0]);
        assert_eq!(frequencies[31], plain[31] / 4.0);
    }
}
