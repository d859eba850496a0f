//! Rotary position embedding: its description in `config.json`, and the resulting frequencies.
//!
//! The formulas are those of transformers 5 (`modeling_rope_utils.py`); llama3 and yarn are from the papers of the same
//! names. Frequencies are rounded to single precision in the same places, because checkpoints were trained with those
//! values. At position 350 one unit in the last place already changes a logit by 3e-4 on the oracle models.

use std::f64::consts::PI;

use super::json::JsonFields;
use crate::model::ModelError;
use crate::model::spec::{RopeRule, RopeStretch};

const SUPPORTED: &str = "default, linear, llama3, yarn; longrope of Phi-3";

/// Original context of LongRoPE if no field has it: the default of transformers for Phi-3.
const PHI3_ORIGINAL_POSITIONS: f64 = 4096.0;

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
    /// LongRoPE: each frequency is divided by a number of its own, and cos and sin multiplied by `attention_factor`.
    Long {
        /// Divisors if no sequence is longer than the original context.
        short: Vec<f32>,
        /// Divisors otherwise.
        long: Vec<f32>,
        /// Whether `long` counts.
        is_long: bool,
        /// Multiplier of cos and sin.
        attention_factor: f64,
        /// Context length before stretching, in tokens.
        original_positions: f64,
    },
}

impl Rope {
    /// The rope of the model, and that of layers with a window if they have one of their own.
    pub(super) fn of_layers(
        config: &JsonFields<'_>,
        max_positions: usize,
        rule: &RopeRule,
    ) -> Result<(Self, Option<Self>), ModelError> {
        let parameters = config.object("rope_parameters")?;
        let of_kind = |kind: &str| parameters.as_ref().map_or(Ok(None), |fields| fields.object(kind));
        // A flat object contains the same names with other types.
        let per_layer = parameters.as_ref().is_some_and(|fields| {
            ["full_attention", "sliding_attention"].iter().any(|kind| fields.has(kind))
        });
        let Some(local_theta) = rule.local_theta else {
            if per_layer {
                return Err(config.unsupported("rope_parameters per layer type", SUPPORTED));
            }
            return Ok((Self::parse(config, max_positions, rule)?, None));
        };
        if per_layer {
            let rope = |kind, theta| match of_kind(kind)? {
                Some(fields) => {
                    Self::with_scaling(config, (&fields, Some(&fields)), theta, max_positions, rule)
                }
                None => Ok(Self { theta, scaling: RopeScaling::None }),
            };
            let whole = rope("full_attention", rule.theta)?;
            return Ok((whole, Some(rope("sliding_attention", local_theta)?)));
        }
        let theta = base(config, "rope_local_base_freq", local_theta)?;
        let local = Self { theta, scaling: RopeScaling::None };
        Ok((Self::parse(config, max_positions, rule)?, Some(local)))
    }

    fn parse(config: &JsonFields<'_>, max_positions: usize, rule: &RopeRule) -> Result<Self, ModelError> {
        // `rope_parameters` (transformers 5) contains theta and scaling. The older dialect has separate fields.
        let parameters = config.object("rope_parameters")?;
        let scaling = match &parameters {
            Some(_) => parameters.clone(),
            None => config.object("rope_scaling")?,
        };
        let fields = parameters.as_ref().filter(|fields| fields.get("rope_theta").is_some());
        let fields = fields.unwrap_or(config);
        Self::with_scaling(config, (fields, scaling.as_ref()), rule.theta, max_positions, rule)
    }

    /// A rope with the base of `fields` and the stretching of `scaling`. `config` has the fields of the whole model.
    fn with_scaling(
        config: &JsonFields<'_>,
        (fields, scaling): (&JsonFields<'_>, Option<&JsonFields<'_>>),
        theta: f64,
        max_positions: usize,
        rule: &RopeRule,
    ) -> Result<Self, ModelError> {
        let theta = base(fields, "rope_theta", theta)?;
        let scaling = match scaling {
            None => RopeScaling::of_family(rule),
            Some(scaling) if rule.stretch == RopeStretch::Long => {
                RopeScaling::parse_long(scaling, config, max_positions)?
            }
            Some(scaling) => RopeScaling::parse(scaling, max_positions)?,
        };
        Ok(Self { theta, scaling })
    }

    /// Radians per position of each of the `head_dim / 2` pairs.
    #[must_use]
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let dim = head_dim as f64;
        (0..head_dim / 2)
            .map(|pair| {
                let exponent = (2.0 * pair as f64 / dim) as f32;
                let wavelength = self.theta.powf(f64::from(exponent)) as f32;
                let frequency = 1.0 / wavelength;
                match &self.scaling {
                    RopeScaling::None => frequency,
                    RopeScaling::Linear { factor } => frequency / *factor as f32,
                    RopeScaling::Long { short, long, is_long, .. } => {
                        let divisors = if *is_long { long } else { short };
                        1.0 / (divisors[pair] * wavelength)
                    }
                    &RopeScaling::Llama3 {
                        factor,
                        low_freq_factor,
                        high_freq_factor,
                        original_positions,
                    } => {
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
                    &RopeScaling::Yarn {
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
                        // Each operation is rounded, which shows if the ends are no whole numbers.
                        let ramp = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
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
            RopeScaling::None | RopeScaling::Llama3 { .. } | RopeScaling::Long { .. } => declared,
        }
    }

    /// Chooses the divisors of LongRoPE for an engine whose sequences have at most this number of positions. All keys
    /// of an engine are rotated alike, whatever the length of their sequence, so that blocks can be shared.
    pub(super) fn choose_for(&mut self, positions: usize) {
        if let RopeScaling::Long { is_long, original_positions, .. } = &mut self.scaling {
            *is_long = positions as f64 > *original_positions;
        }
    }

    /// Whether LongRoPE divides by the numbers of the original context.
    pub(super) fn is_short(&self) -> bool {
        matches!(self.scaling, RopeScaling::Long { is_long: false, .. })
    }

    /// Numbers of divisors of LongRoPE.
    pub(super) fn divisors(&self) -> Option<[usize; 2]> {
        match &self.scaling {
            RopeScaling::Long { short, long, .. } => Some([short.len(), long.len()]),
            _ => None,
        }
    }

    /// Multiplier of cos and sin.
    #[must_use]
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::Long { attention_factor, .. } => {
                attention_factor as f32
            }
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
        }
    }
}

/// The base of a series of wavelengths.
fn base(fields: &JsonFields<'_>, name: &str, default: f64) -> Result<f64, ModelError> {
    match fields.number(name)?.unwrap_or(default) {
        theta if theta > 1.0 && theta.is_finite() => Ok(theta),
        theta => Err(fields.malformed(format!("{name} {theta} must be above 1"))),
    }
}

/// The kind of scaling.
fn kind<'a>(fields: &'a JsonFields<'_>) -> Result<Option<&'a str>, ModelError> {
    match fields.text("rope_type")? {
        Some(kind) => Ok(Some(kind)),
        None => fields.text("type"),
    }
}

/// A list of positive numbers.
fn divisors(fields: &JsonFields<'_>, name: &str) -> Result<Vec<f32>, ModelError> {
    let list = fields.get(name).ok_or_else(|| fields.absent(name))?;
    let numbers = list.as_array().and_then(|list| {
        let number = |value: &serde_json::Value| {
            value.as_f64().map(|number| number as f32).filter(|number| *number > 0.0 && number.is_finite())
        };
        list.iter().map(number).collect::<Option<Vec<f32>>>()
    });
    numbers.ok_or_else(|| fields.malformed(format!("rope {name} is not a list of positive numbers")))
}

impl RopeScaling {
    /// The scaling of a checkpoint that does not describe one.
    fn of_family(rule: &RopeRule) -> Self {
        let RopeStretch::Yarn { factor, original_positions } = rule.stretch else { return Self::None };
        let factor = f64::from(factor);
        Self::Yarn {
            factor,
            attention_factor: 0.1 * factor.ln() + 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_positions: f64::from(original_positions),
            truncate: false,
        }
    }

    /// The scaling of Phi-3, which has several names. The original context is a field of `config`, which wins as in
    /// transformers, or of `fields`.
    fn parse_long(
        fields: &JsonFields<'_>,
        config: &JsonFields<'_>,
        max_positions: usize,
    ) -> Result<Self, ModelError> {
        match kind(fields)? {
            None | Some("default") => return Ok(Self::None),
            Some("longrope" | "su" | "yarn") => {}
            Some(other) => {
                return Err(fields.unsupported(&format!("rope type {other} of this family"), "longrope"));
            }
        }
        if let Some(scale) = ["short_mscale", "long_mscale"].iter().find(|scale| fields.has(scale)) {
            return Err(fields.unsupported(&format!("rope {scale}"), "longrope without scales of its own"));
        }
        const ORIGINAL: &str = "original_max_position_embeddings";
        let original = config.positive(ORIGINAL)?.or(fields.positive(ORIGINAL)?);
        let original = original.unwrap_or(PHI3_ORIGINAL_POSITIONS);
        let factor = fields.positive("factor")?.unwrap_or(max_positions as f64 / original);
        let attention_factor = match fields.positive("attention_factor")? {
            Some(given) => given,
            None if factor <= 1.0 => 1.0,
            None if original > 1.0 => (1.0 + factor.ln() / original.ln()).sqrt(),
            None => return Err(fields.malformed(format!("{ORIGINAL} {original} must be above 1"))),
        };
        Ok(Self::Long {
            short: divisors(fields, "short_factor")?,
            long: divisors(fields, "long_factor")?,
            is_long: max_positions as f64 > original,
            attention_factor,
            original_positions: original,
        })
    }

    fn parse(fields: &JsonFields<'_>, max_positions: usize) -> Result<Self, ModelError> {
        let kind = kind(fields)?;
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
    fn exponents_are_rounded_to_f32_as_in_transformers() {
        // Bits that torch computes for heads of 48 elements, whose exponents are not exact.
        let frequencies = Rope { theta: 1e6, scaling: RopeScaling::None }.frequencies(48);
        let bits = [1, 5, 11, 23].map(|pair| frequencies[pair].to_bits());
        assert_eq!(bits, [1_058_010_522, 1_030_116_804, 988_353_829, 904_834_363]);
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
    fn longrope_divides_by_the_list_of_the_engines_context() {
        let text = br#"{"type": "longrope", "short_factor": [1, 2], "long_factor": [4, 8]}"#;
        let fields = JsonFields::parse("config.json", text).unwrap();
        let config =
            JsonFields::parse("config.json", br#"{"original_max_position_embeddings": 64}"#).unwrap();
        let mut scaled = rope(RopeScaling::parse_long(&fields, &config, 256).unwrap());
        let plain = rope(RopeScaling::None).frequencies(4);
        assert_eq!(scaled.frequencies(4), [plain[0] / 4.0, plain[1] / 8.0]);
        let factor = (1.0 + 4.0_f64.ln() / 64.0_f64.ln()).sqrt();
        assert!((f64::from(scaled.attention_factor()) - factor).abs() < 1e-7);
        scaled.choose_for(64);
        assert!(scaled.is_short());
        assert_eq!(scaled.frequencies(4), [plain[0], plain[1] / 2.0]);
        scaled.choose_for(65);
        assert!(!scaled.is_short());
        let text = br#"{"type": "longrope", "short_factor": [1, 0], "long_factor": [4, 8]}"#;
        let wrong = JsonFields::parse("config.json", text).unwrap();
        let error = RopeScaling::parse_long(&wrong, &config, 256).unwrap_err();
        assert!(error.to_string().contains("short_factor"), "{error}");
    }

    #[test]
    fn a_ramp_between_whole_dimensions_is_rounded_as_in_transformers() {
        let scaling = RopeScaling::Yarn {
            factor: 8.0,
            attention_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_positions: 40.0,
            truncate: false,
        };
        let frequencies = Rope { theta: 150_000.0, scaling }.frequencies(32);
        // Bits that transformers computes.
        let bits = [1, 2, 9, 12].map(|pair| frequencies[pair].to_bits());
        assert_eq!(bits, [1_050_508_692, 1_032_358_028, 958_442_950, 931_762_828]);
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
