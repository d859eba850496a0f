//! `generation_config.json`: which tokens end a completion, and the checkpoint's default sampling parameters.

use super::json::Fields;
use crate::model::ModelError;

/// The optional file.
pub(super) const FILE: &str = "generation_config.json";

/// Default sampling parameters of a checkpoint; `None` where it names none. vLLM serves these by default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Whether the checkpoint's authors sample at all; without it they decode greedily.
    pub do_sample: bool,
    /// Divisor of the logits.
    pub temperature: Option<f32>,
    /// Keep the smallest set of tokens with at least this probability.
    pub top_p: Option<f32>,
    /// Keep this many tokens; 0 keeps all.
    pub top_k: Option<u32>,
    /// Keep tokens with at least this share of the best token's probability.
    pub min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens already seen.
    pub repetition_penalty: Option<f32>,
}

/// The end-of-sequence tokens of both files, and the sampling defaults.
pub(super) fn read(
    config: &Fields<'_>,
    generation: Option<&[u8]>,
) -> Result<(Vec<u32>, GenerationDefaults), ModelError> {
    let mut eos = config.tokens("eos_token_id")?.unwrap_or_default();
    let Some(bytes) = generation else { return Ok((eos, GenerationDefaults::default())) };
    let fields = Fields::parse(FILE, bytes)?;
    if let Some(list) = fields.tokens("eos_token_id")? {
        eos = list;
    }
    #[allow(clippy::cast_possible_truncation)] // sampling parameters need no more than f32
    let number = |name, low: f64, high: f64| match fields.number(name)? {
        Some(value) if (low..=high).contains(&value) => Ok(Some(value as f32)),
        Some(value) => Err(fields.malformed(format!("{name} {value} is not between {low} and {high}"))),
        None => Ok(None),
    };
    let defaults = GenerationDefaults {
        do_sample: fields.flag("do_sample")?.unwrap_or(false),
        temperature: number("temperature", 0.0, 1e3)?,
        top_p: number("top_p", 0.0, 1.0)?,
        top_k: fields
            .get("top_k")
            // Some checkpoints write -1 for "all tokens".
            .map(|value| value.as_i64().and_then(|k| u32::try_from(k.max(0)).ok()))
            .map(|k| k.ok_or_else(|| fields.malformed("top_k is not a whole number".into())))
            .transpose()?,
        min_p: number("min_p", 0.0, 1.0)?,
        repetition_penalty: number("repetition_penalty", 1e-3, 1e3)?,
    };
    Ok((eos, defaults))
}
