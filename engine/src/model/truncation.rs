//! The truncation of a long prompt: `truncate_prompt_tokens`, by vLLM's rules.
//!
//! The side that is cut off is the request's, or that of the tokenizer's configuration, or the right one. Tokens are cut
//! off after the text is encoded. A text that is longer than any prompt can be is cut off before, because encoding
//! costs time.

use baton_openai::{ApiError, Truncation, TruncationSide};

use super::tokenizer::Tokenizer;

/// What stays of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptCut {
    tokens: usize,
    side: TruncationSide,
}

impl PromptCut {
    /// The cut for a context of `capacity` tokens. -1 leaves a place for one new token.
    ///
    /// # Errors
    /// 400 if more tokens shall stay than the context has.
    pub fn of(truncation: Truncation, capacity: usize, tokenizer: &Tokenizer) -> Result<Self, ApiError> {
        let tokens = truncation.tokens.map_or(capacity.saturating_sub(1), |tokens| tokens as usize);
        if tokens > capacity {
            let message =
                format!("`truncate_prompt_tokens` {tokens} is more than the context of {capacity} tokens");
            return Err(ApiError::invalid("truncate_prompt_tokens", message));
        }
        let configured =
            || tokenizer.config().get("truncation_side")?.as_str().and_then(TruncationSide::named);
        let side = truncation.side.or_else(configured).unwrap_or(TruncationSide::Right);
        Ok(Self { tokens, side })
    }

    /// At most `bytes` bytes of a text.
    #[must_use]
    pub fn text(self, text: &str, bytes: usize) -> &str {
        if text.len() <= bytes {
            return text;
        }
        match self.side {
            TruncationSide::Left => {
                let mut start = text.len() - bytes;
                while !text.is_char_boundary(start) {
                    start += 1;
                }
                &text[start..]
            }
            TruncationSide::Right => {
                let mut end = bytes;
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                &text[..end]
            }
        }
    }

    /// The tokens that stay.
    #[must_use]
    pub fn apply(self, mut tokens: Vec<u32>) -> Vec<u32> {
        match self.side {
            TruncationSide::Left => tokens.split_off(tokens.len().saturating_sub(self.tokens)),
            TruncationSide::Right => {
                tokens.truncate(self.tokens);
                tokens
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::fixture;

    fn cut(tokens: Option<u32>, side: Option<TruncationSide>) -> Result<PromptCut, ApiError> {
        PromptCut::of(Truncation { tokens, side }, 10, &fixture("qwen3").0)
    }

    #[test]
    fn the_first_tokens_stay_unless_the_left_side_is_named() {
        let prompt = |most: u32| (0..most).collect::<Vec<u32>>();
        let (left, right) = (Some(TruncationSide::Left), Some(TruncationSide::Right));
        let kept = |tokens, side, most| cut(tokens, side).expect("it fits").apply(prompt(most));
        assert_eq!(kept(Some(3), right, 5), [0, 1, 2]);
        assert_eq!(kept(Some(3), left, 5), [2, 3, 4]);
        assert_eq!(kept(Some(3), left, 2), [0, 1]);
        assert_eq!(kept(Some(3), right, 2), [0, 1]);
        // As much as fits beside one new token.
        assert_eq!(kept(None, right, 30), prompt(9));
        let error = cut(Some(11), None).expect_err("longer than the context");
        assert_eq!((error.status, error.param.as_deref()), (400, Some("truncate_prompt_tokens")));
    }

    #[test]
    fn a_text_is_cut_between_characters() {
        let text = "aé🙂b";
        let of = |side, bytes| cut(Some(1), Some(side)).expect("it fits").text(text, bytes);
        let right: Vec<&str> = (0..9).map(|bytes| of(TruncationSide::Right, bytes)).collect();
        assert_eq!(right, ["", "a", "a", "aé", "aé", "aé", "aé", "aé🙂", "aé🙂b"]);
        let left: Vec<&str> = (0..9).map(|bytes| of(TruncationSide::Left, bytes)).collect();
        assert_eq!(left, ["", "b", "b", "b", "b", "🙂b", "🙂b", "é🙂b", "aé🙂b"]);
    }
}
