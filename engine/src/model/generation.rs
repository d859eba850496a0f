//! `generation_config.json`: the checkpoint's defaults for sampling.

use serde_json::{Map, Value};

use super::tokenizer::json_object;
use super::{ModelError, ModelFiles};

/// Sampling values of `generation_config.json`. As in vLLM, `do_sample` is ignored: a request without a temperature is
/// sampled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Temperature.
    pub temperature: Option<f32>,
    /// Top-p.
    pub top_p: Option<f32>,
    /// Top-k; `Some(0)` is off.
    pub top_k: Option<u32>,
    /// Min-p.
    pub min_p: Option<f32>,
    /// Repetition penalty.
    pub repetition_penalty: Option<f32>,
    /// `max_tokens` of a request without a value.
    pub max_new_tokens: Option<u32>,
    /// End-of-sequence tokens, which replace those of `config.json`. Empty if the file has none.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationDefaults {
    /// Reads `generation_config.json`; a checkpoint without one has no defaults.
    ///
    /// # Errors
    /// The file exists and is not readable, not JSON, or has a value that no request could have.
    pub fn load(files: &ModelFiles) -> Result<Self, ModelError> {
        json_object(files, FILE)?.map_or_else(|| Ok(Self::default()), |config| Self::from_map(&config))
    }

    fn from_map(config: &Map<String, Value>) -> Result<Self, ModelError> {
        let malformed = |name: &str, value: &Value| ModelError::Malformed {
            file: FILE.into(),
            what: format!("`{name}` is {value}"),
        };
        let number = |name: &str, accept: fn(f64) -> bool| match config.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let number = value.as_f64().filter(|number| accept(*number));
                number.map(|number| Some(number as f32)).ok_or_else(|| malformed(name, value))
            }
        };
        let count = |name: &str| match config.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) if value.as_i64() == Some(-1) => Ok(Some(0)),
            Some(value) => {
                let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
                count.map(Some).ok_or_else(|| malformed(name, value))
            }
        };
        // -1 means "no bound" in checkpoints of older tools.
        let max_new_tokens = match config.get("max_new_tokens") {
            Some(value) if value.as_i64() == Some(-1) => None,
            Some(value) if value.as_u64() == Some(0) => return Err(malformed("max_new_tokens", value)),
            _ => count("max_new_tokens")?,
        };
        let eos_token_ids = match config.get("eos_token_id") {
            None | Some(Value::Null) => Vec::new(),
            Some(value) => {
                let ids = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
                let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
                ids.iter().map(id).collect::<Option<_>>().ok_or_else(|| malformed("eos_token_id", value))?
            }
        };
        Ok(Self {
            temperature: number("temperature", |x| (0.0..=100.0).contains(&x))?,
            top_p: number("top_p", |x| x > 0.0 && x <= 1.0)?,
            top_k: count("top_k")?,
            min_p: number("min_p", |x| (0.0..=1.0).contains(&x))?,
            repetition_penalty: number("repetition_penalty", |x| x > 0.0 && x <= 100.0)?,
            max_new_tokens,
            eos_token_ids,
        })
    }
}

const FILE: &str = "generation_config.json";
