//! `prompt_logprobs`, `truncate_prompt_tokens` and `truncation_side`, in vLLM's spelling.
//!
//! Only an engine reads them. A router passes them on, because other engines have other bounds.

use crate::error::ApiError;
use crate::field::Fields;
use crate::limits::{LOGPROBS_MAX, Scope, TOKENS_MAX};

/// What a request wants of its prompt's tokens, other than a continuation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptOptions {
    /// Number of alternatives with the log-probabilities of the prompt's tokens, 0..=20; `None` for none. Always
    /// `None` for a stream, which has no place for them.
    pub logprobs: Option<u32>,
    /// Whether a longer prompt is cut off.
    pub truncation: Option<Truncation>,
}

/// The cut of a long prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncation {
    /// Tokens that stay, at least 1; `None` for as many as the model's context holds beside one new token.
    pub tokens: Option<u32>,
    /// The side that is cut off; `None` for the side that the model's tokenizer names.
    pub side: Option<TruncationSide>,
}

/// The side of a prompt that is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TruncationSide {
    /// The last tokens stay.
    Left,
    /// The first tokens stay.
    Right,
}

impl TruncationSide {
    /// The side with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "left" => Some(Self::Left),
            "right" => Some(Self::Right),
            _ => None,
        }
    }
}

impl PromptOptions {
    pub(super) fn read(fields: Fields<'_>, stream: bool, scope: Scope) -> Result<Self, ApiError> {
        if scope == Scope::AnyEngine {
            return Ok(Self::default());
        }
        Ok(Self { logprobs: logprobs(fields, stream)?, truncation: truncation(fields)? })
    }
}

/// As in vLLM, a stream may ask for 0 alternatives, and gets no log-probabilities of its prompt.
fn logprobs(fields: Fields<'_>, stream: bool) -> Result<Option<u32>, ApiError> {
    let name = "prompt_logprobs";
    let top = fields.integer(name, 0..=LOGPROBS_MAX.into())?;
    if stream && top.is_some_and(|top| top > 0) {
        return Err(ApiError::invalid(name, format!("`{name}` cannot be streamed; leave `stream` out")));
    }
    Ok(top.filter(|_| !stream).map(|top| u32::try_from(top).unwrap_or(LOGPROBS_MAX)))
}

fn truncation(fields: Fields<'_>) -> Result<Option<Truncation>, ApiError> {
    let (name, side) = ("truncate_prompt_tokens", "truncation_side");
    let side = match fields.string(side)? {
        None => None,
        Some(text) => {
            let known = TruncationSide::named(text);
            let wrong = || ApiError::invalid(side, format!("`{side}` must be \"left\" or \"right\""));
            Some(known.ok_or_else(wrong)?)
        }
    };
    match fields.integer(name, -1..=TOKENS_MAX.into())? {
        None => Ok(None),
        Some(0) => Err(ApiError::invalid(name, format!("`{name}` 0 leaves no prompt; -1 keeps what fits"))),
        Some(tokens) => Ok(Some(Truncation { tokens: u32::try_from(tokens).ok(), side })),
    }
}
