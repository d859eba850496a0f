//! `/tokenize` and `/detokenize`, as vLLM has them.

use serde_json::{Map, Value};

use super::{Input, Prompt, chat, completion};
use crate::error::ApiError;
use crate::field::Fields;
use crate::limits::ParseLimits;

/// `POST /tokenize`: a prompt or a conversation to tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizeRequest {
    /// The requested model.
    pub model: Option<String>,
    /// Exactly one prompt, or a conversation.
    pub input: Input,
    /// Whether BOS and similar tokens are added; `None`: yes for a prompt, no for a conversation.
    pub add_special_tokens: Option<bool>,
    /// Whether the reply also contains each token's text.
    pub return_token_strs: bool,
}

/// `POST /detokenize`: tokens to text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// The requested model.
    pub model: Option<String>,
    /// The tokens to decode; may be empty.
    pub tokens: Vec<u32>,
}

impl TokenizeRequest {
    /// Reads a request from a parsed body.
    ///
    /// # Errors
    /// 400 with the field.
    pub fn from_map(map: &Map<String, Value>, limits: &ParseLimits) -> Result<Self, ApiError> {
        let fields = Fields::new(map);
        let input = match (fields.get("prompt"), fields.get("messages")) {
            (Some(_), Some(_)) => {
                return Err(ApiError::invalid("prompt", "`prompt` and `messages` cannot both be given"));
            }
            (None, Some(_)) => Input::Chat(Box::new(chat::read(fields, limits)?)),
            (Some(_), None) => {
                Input::Prompts(vec![Prompt::Text(fields.string("prompt")?.unwrap_or_default().to_owned())])
            }
            (None, None) => return Err(ApiError::invalid("prompt", "`prompt` or `messages` is missing")),
        };
        Ok(Self {
            model: super::non_empty_string(fields, "model")?,
            input,
            add_special_tokens: fields.boolean("add_special_tokens")?,
            return_token_strs: fields.boolean("return_token_strs")?.unwrap_or(false),
        })
    }
}

impl DetokenizeRequest {
    /// Reads a request from a parsed body.
    ///
    /// # Errors
    /// 400 with the field.
    pub fn from_map(map: &Map<String, Value>, limits: &ParseLimits) -> Result<Self, ApiError> {
        let fields = Fields::new(map);
        let ids = fields.array("tokens", limits.prompt_tokens)?;
        let ids = ids.ok_or_else(|| ApiError::invalid("tokens", "`tokens` is missing"))?;
        Ok(Self {
            model: super::non_empty_string(fields, "model")?,
            tokens: completion::tokens(ids, "tokens", limits)?,
        })
    }
}
