//! The sampling parameters of a request. All are optional: the model's `generation_config.json` has the defaults.

use serde_json::Value;

use crate::error::ApiError;
use crate::field::{Fields, must_be, token};
use crate::limits::{LOGIT_BIAS_MAX, ParseLimits, Scope, TEMPERATURE_MAX};

const UP_TO_TEMPERATURE_MAX: &str = "a number from 0 to 100";
const _: () = assert!(TEMPERATURE_MAX == 100.0);

/// The sampling parameters that the request contains.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOptions {
    /// 0 is greedy; up to [`TEMPERATURE_MAX`].
    pub temperature: Option<f32>,
    /// 0 < p <= 1.
    pub top_p: Option<f32>,
    /// The k most likely tokens; `Some(0)` is off (clients send 0 or -1).
    pub top_k: Option<u32>,
    /// 0..=1, times the probability of the most likely token.
    pub min_p: Option<f32>,
    /// Seed of the random choices; any 64-bit integer.
    pub seed: Option<i64>,
    /// -2..=2, times a token's count in the output.
    pub frequency_penalty: Option<f32>,
    /// -2..=2, once for each token in the output.
    pub presence_penalty: Option<f32>,
    /// Over 0, up to 100; 1 is off.
    pub repetition_penalty: Option<f32>,
    /// Tokens and the biases of their logits, -100..=100; each token once.
    pub logit_bias: Vec<(u32, f32)>,
}

impl SamplingOptions {
    pub(super) fn read(fields: Fields<'_>, limits: &ParseLimits) -> Result<Self, ApiError> {
        let penalty = |name| fields.number(name, "a number from -2 to 2", |x| (-2.0..=2.0).contains(&x));
        let fraction = "a number from 0 to 1";
        // The upper limits depend on the engine.
        let any = limits.scope == Scope::AnyEngine;
        Ok(Self {
            temperature: fields.number(
                "temperature",
                if any { "a number from 0 that a 32-bit float can hold" } else { UP_TO_TEMPERATURE_MAX },
                |x| x >= 0.0 && if any { (x as f32).is_finite() } else { x <= TEMPERATURE_MAX },
            )?,
            top_p: fields.number("top_p", "a number over 0, up to 1", |x| x > 0.0 && x <= 1.0)?,
            top_k: top_k(fields)?,
            min_p: fields.number("min_p", fraction, |x| (0.0..=1.0).contains(&x))?,
            seed: fields.integer("seed", i64::MIN..=i64::MAX)?,
            frequency_penalty: penalty("frequency_penalty")?,
            presence_penalty: penalty("presence_penalty")?,
            repetition_penalty: fields.number(
                "repetition_penalty",
                if any { "a number over 0" } else { "a number over 0, up to 100" },
                |x| x > 0.0 && (any || x <= 100.0) && x as f32 > 0.0,
            )?,
            logit_bias: logit_bias(fields, limits)?,
        })
    }
}

fn top_k(fields: Fields<'_>) -> Result<Option<u32>, ApiError> {
    let k = fields.integer("top_k", -1..=i64::from(i32::MAX))?;
    Ok(k.map(|k| u32::try_from(k).unwrap_or(0)))
}

fn logit_bias(fields: Fields<'_>, limits: &ParseLimits) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(entries) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    if entries.len() > limits.scope.most(LOGIT_BIAS_MAX) {
        let message =
            format!("`logit_bias` has {} entries; at most {LOGIT_BIAS_MAX} are allowed", entries.len());
        return Err(ApiError::invalid("logit_bias", message));
    }
    let mut biases = Vec::with_capacity(entries.len());
    for (key, value) in entries {
        // Only one spelling of a number is accepted, so that no token occurs twice: a lenient parser reads `"007"` and
        // `"+7"` as 7.
        let id = key.parse::<u32>().ok().filter(|id| id.to_string() == *key);
        let id = id.map_or_else(|| Value::String(key.clone()), Value::from);
        let id = token(&id, limits.vocab, "logit_bias")?;
        // Some engines clamp larger values (vLLM), others refuse them.
        let any = limits.scope == Scope::AnyEngine;
        let bias = value.as_f64().filter(|bias| any || (-100.0..=100.0).contains(bias));
        let name = format!("logit_bias.{id}");
        let expected = if any { "a number" } else { "a number from -100 to 100" };
        biases.push((id, bias.ok_or_else(|| must_be(&name, expected, value))? as f32));
    }
    Ok(biases)
}
