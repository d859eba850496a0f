//! `prompt` of `/v1/completions`: a text, token ids, or an array of either.

use serde_json::Value;

use crate::error::ApiError;
use crate::field::{Fields, must_be, token};
use crate::limits::ParseLimits;

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text to encode. Not empty, but its encoding may be.
    Text(String),
    /// Token ids. Not empty.
    Tokens(Vec<u32>),
}

pub(super) fn prompts(fields: Fields<'_>, limits: &ParseLimits) -> Result<Vec<Prompt>, ApiError> {
    let Some(value) = fields.get("prompt") else {
        return Err(ApiError::invalid("prompt", "`prompt` is missing"));
    };
    match value {
        Value::String(_) => Ok(vec![one(value, "prompt", limits)?]),
        Value::Array(items) if items.is_empty() => Err(ApiError::invalid("prompt", "`prompt` is empty")),
        Value::Array(items) if items[0].is_number() => Ok(vec![one(value, "prompt", limits)?]),
        Value::Array(items) if items.len() > limits.prompts => {
            let message =
                format!("`prompt` has {} prompts; at most {} are allowed", items.len(), limits.prompts);
            Err(ApiError::invalid("prompt", message))
        }
        Value::Array(items) => {
            let read = |(index, item)| one(item, &format!("prompt[{index}]"), limits);
            items.iter().enumerate().map(read).collect()
        }
        other => Err(must_be("prompt", "a string, an array of strings, or token ids", other)),
    }
}

fn one(value: &Value, name: &str, limits: &ParseLimits) -> Result<Prompt, ApiError> {
    match value {
        Value::String(text) if text.is_empty() => Err(ApiError::invalid(name, format!("`{name}` is empty"))),
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(ids) if ids.is_empty() => Err(ApiError::invalid(name, format!("`{name}` is empty"))),
        Value::Array(ids) => Ok(Prompt::Tokens(tokens(ids, name, limits)?)),
        other => Err(must_be(name, "a string or an array of token ids", other)),
    }
}

/// Token ids, bounded in number and value.
pub(super) fn tokens(ids: &[Value], name: &str, limits: &ParseLimits) -> Result<Vec<u32>, ApiError> {
    if ids.len() > limits.prompt_tokens {
        let message =
            format!("`{name}` has {} tokens; at most {} are allowed", ids.len(), limits.prompt_tokens);
        return Err(ApiError::invalid(name, message));
    }
    // The name of an element is created only for an error, because a prompt has up to a million elements.
    let read = |id: &Value| token(id, limits.vocab, "").ok();
    let tokens: Vec<u32> = ids.iter().map_while(read).collect();
    match ids.get(tokens.len()) {
        Some(wrong) => token(wrong, limits.vocab, &format!("{name}[{}]", tokens.len())).map(|_| tokens),
        None => Ok(tokens),
    }
}
