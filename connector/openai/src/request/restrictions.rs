//! Restrictions of the tokens that may be generated: `allowed_token_ids` and `bad_words`, in vLLM's spelling.
//!
//! Only an engine reads them. A router passes them on, because other engines have other bounds.

use serde_json::Value;

use super::completion;
use crate::error::ApiError;
use crate::field::{Fields, must_be};
use crate::limits::{ALLOWED_TOKENS_MAX, BAD_WORD_BYTES_MAX, BAD_WORDS_MAX, ParseLimits, Scope};

/// The tokens and texts that a request allows and forbids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenRestrictions {
    /// Only these tokens may be chosen; `None` for all. Not empty.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Texts whose last token may not be chosen where it would complete them. None is empty.
    pub bad_words: Vec<String>,
}

impl TokenRestrictions {
    pub(super) fn read(fields: Fields<'_>, limits: &ParseLimits) -> Result<Self, ApiError> {
        if limits.scope == Scope::AnyEngine {
            return Ok(Self::default());
        }
        Ok(Self { allowed_token_ids: allowed_token_ids(fields, limits)?, bad_words: bad_words(fields)? })
    }
}

fn allowed_token_ids(fields: Fields<'_>, limits: &ParseLimits) -> Result<Option<Vec<u32>>, ApiError> {
    let name = "allowed_token_ids";
    let Some(ids) = fields.array(name, ALLOWED_TOKENS_MAX)? else { return Ok(None) };
    if ids.is_empty() {
        return Err(ApiError::invalid(name, format!("`{name}` is empty: no token could be chosen")));
    }
    completion::tokens(ids, name, limits).map(Some)
}

fn bad_words(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
    let values = fields.array("bad_words", BAD_WORDS_MAX)?.unwrap_or_default();
    let read = |(index, value): (usize, &Value)| {
        let fits = |text: &&str| (1..=BAD_WORD_BYTES_MAX).contains(&text.len());
        let text = value.as_str().filter(fits).map(str::to_owned);
        let expected = || format!("a string of 1 to {BAD_WORD_BYTES_MAX} bytes");
        text.ok_or_else(|| must_be(&format!("bad_words[{index}]"), &expected(), value))
    };
    values.iter().enumerate().map(read).collect()
}
