//! Tokens that a request excludes: those outside `allowed_token_ids`, the ends of `bad_words`, and before `min_tokens`
//! every token that would end the text.
//!
//! The order of the exclusions does not matter: each sets logits to minus infinity, and neither a bias nor a penalty
//! changes that. The rules are vLLM's:
//!
//! - A bad word counts with and without a space before it. With the space only if that begins with another token and
//!   has as many tokens.
//! - The last token of a bad word is excluded where the tokens before it are the last generated ones. Tokens of the
//!   prompt do not count.

use std::sync::Arc;

use baton_openai::limits::{BAD_WORD_TOKENS_MAX, BAD_WORDS_MAX};
use baton_openai::{ApiError, GenerateRequest};

use super::mask::TokenMask;
use crate::model::tokenizer::{SpecialTokens, Tokenizer};

/// The excluded tokens of one sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenExclusions {
    /// Number of tokens before which `before_min` cannot be chosen.
    pub min_tokens: u32,
    /// EOS and stop tokens.
    pub before_min: Vec<u32>,
    /// The only tokens that can be chosen; `None` for all.
    pub allowed: Option<Arc<TokenMask>>,
    /// Token sequences that are not generated; none is empty.
    pub bad_words: Arc<Vec<Vec<u32>>>,
}

impl TokenExclusions {
    /// The exclusions of `min_tokens` only. `eos` are the model's end-of-sequence tokens, which are excluded even if
    /// they end nothing, as in vLLM.
    #[must_use]
    pub fn before_min_tokens(request: &GenerateRequest, eos: &[u32]) -> Self {
        Self {
            min_tokens: request.min_tokens,
            before_min: [eos, &request.stop_token_ids].concat(),
            ..Self::default()
        }
    }

    /// All exclusions of a request, for a model with `vocab` rows of logits.
    ///
    /// # Errors
    /// 400 if a bad word has no token, if the words have too many, or if no token is left to choose.
    pub fn resolve(
        request: &GenerateRequest,
        eos: &[u32],
        tokenizer: &Tokenizer,
        vocab: usize,
    ) -> Result<Self, ApiError> {
        let restrictions = &request.restrictions;
        let allowed = restrictions.allowed_token_ids.as_ref();
        let exclusions = Self {
            allowed: allowed.map(|ids| Arc::new(TokenMask::of(ids, vocab))),
            bad_words: Arc::new(sequences_of(&restrictions.bad_words, tokenizer)?),
            ..Self::before_min_tokens(request, eos)
        };
        match exclusions.leave_a_first_token(vocab) {
            true => Ok(exclusions),
            false => {
                let words = !restrictions.bad_words.is_empty();
                let other = if words { "bad_words" } else { "min_tokens" };
                let field = if allowed.is_some() { "allowed_token_ids" } else { other };
                let message = format!("`{field}` leaves no token that could be generated first");
                Err(ApiError::invalid(field, message))
            }
        }
    }

    /// Whether the exclusions can change a row at a position with so many generated tokens before it.
    #[must_use]
    pub fn apply_at(&self, generated: u32) -> bool {
        self.allowed.is_some() || !self.bad_words.is_empty() || self.are_before_min(generated)
    }

    fn are_before_min(&self, generated: u32) -> bool {
        generated < self.min_tokens && !self.before_min.is_empty()
    }

    /// Excludes tokens from a row of logits. `output` are the generated tokens before it.
    pub(super) fn apply(&self, output: &[u32], generated: u32, row: &mut [f32]) {
        if let Some(allowed) = &self.allowed {
            allowed.apply(row);
        }
        let ends = self.bad_words.iter().filter_map(|word| end_of(word, output));
        let early = if self.are_before_min(generated) { &self.before_min[..] } else { &[] };
        for id in ends.chain(early.iter().copied()) {
            if let Some(logit) = row.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// Whether any token can be the first.
    fn leave_a_first_token(&self, vocab: usize) -> bool {
        // Without an allowed set a vocabulary has more tokens than are excluded, unless it is tiny.
        if self.allowed.is_none() && self.before_min.len() + self.bad_words.len() < vocab {
            return true;
        }
        let mut row = vec![0.0; vocab];
        self.apply(&[], 0, &mut row);
        row.contains(&0.0)
    }
}

/// The last token of a word, if `output` ends with the tokens before it.
fn end_of(word: &[u32], output: &[u32]) -> Option<u32> {
    let (last, before) = word.split_last()?;
    output.ends_with(before).then_some(*last)
}

/// The token sequences of words.
fn sequences_of(words: &[String], tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, ApiError> {
    let encode = |text: &str, index: usize| {
        let tokens = tokenizer.encode(text, SpecialTokens::AsWritten, BAD_WORD_TOKENS_MAX);
        tokens.map_err(|error| ApiError::invalid(format!("bad_words[{index}]"), error.to_string()))
    };
    let mut sequences: Vec<Vec<u32>> = Vec::new();
    for (index, word) in words.iter().enumerate() {
        let word = word.trim_start();
        let plain = encode(word, index)?;
        let Some(&first) = plain.first() else {
            let message = format!("`bad_words[{index}]` has no token");
            return Err(ApiError::invalid(format!("bad_words[{index}]"), message));
        };
        let spaced = encode(&format!(" {word}"), index)?;
        let differs = spaced.len() == plain.len() && spaced.first() != Some(&first);
        sequences.push(plain);
        if differs {
            sequences.push(spaced);
        }
    }
    let tokens: usize = sequences.iter().map(Vec::len).sum();
    if sequences.len() > BAD_WORDS_MAX || tokens > BAD_WORD_TOKENS_MAX {
        let message = format!(
            "`bad_words` are {} sequences of together {tokens} tokens; at most {BAD_WORDS_MAX} and \
             {BAD_WORD_TOKENS_MAX} are allowed",
            sequences.len()
        );
        return Err(ApiError::invalid("bad_words", message));
    }
    Ok(sequences)
}

#[cfg(test)]
mod tests {
    use baton_openai::{Endpoint, ParseLimits};

    use super::*;
    use crate::model::tests::fixture;

    fn resolved(fields: &str) -> Result<TokenExclusions, ApiError> {
        let (tokenizer, _) = fixture("qwen3");
        let body = format!("{{\"prompt\":\"x\"{fields}}}");
        let request = baton_openai::parse(Endpoint::Completions, body.as_bytes(), &ParseLimits::default());
        TokenExclusions::resolve(&request.expect("sound"), &[7], &tokenizer, tokenizer.vocab())
    }

    #[test]
    fn a_bad_word_is_excluded_with_a_space_too_if_that_begins_with_another_token() {
        let (tokenizer, _) = fixture("qwen3");
        let tokens = |text: &str| tokenizer.encode(text, SpecialTokens::AsWritten, 99).expect("short");
        for word in ["a", "the", "Hello", "no"] {
            let (plain, spaced) = (tokens(word), tokens(&format!(" {word}")));
            let mut wanted = vec![plain.clone()];
            if plain.len() == spaced.len() && plain[0] != spaced[0] {
                wanted.push(spaced);
            }
            // Spaces that the client writes do not count.
            for written in [word.to_owned(), format!("  {word}")] {
                let found = resolved(&format!(",\"bad_words\":[\"{written}\"]")).expect("sound");
                assert_eq!(*found.bad_words, wanted, "{written:?}");
            }
        }
    }

    #[test]
    fn the_end_of_a_bad_word_is_excluded_only_after_its_beginning_in_the_output() {
        let exclusions = TokenExclusions {
            bad_words: Arc::new(vec![vec![3], vec![1, 2], vec![1, 1, 4]]),
            ..TokenExclusions::default()
        };
        let excluded = |output: &[u32]| -> Vec<u32> {
            let mut row = [0.0; 6];
            exclusions.apply(output, output.len() as u32, &mut row);
            (0..6).filter(|id| row[*id as usize] == f32::NEG_INFINITY).collect()
        };
        assert_eq!(excluded(&[]), [3]);
        assert_eq!(excluded(&[1]), [2, 3]);
        assert_eq!(excluded(&[5, 1, 1]), [2, 3, 4]);
        assert_eq!(excluded(&[1, 5]), [3]);
    }

    #[test]
    fn restrictions_that_leave_no_token_are_refused_by_name() {
        let refused = |fields: &str| {
            let error = resolved(fields).expect_err(fields);
            (error.status, error.param.expect("a field"))
        };
        // EOS is 7, and excluded before `min_tokens`.
        assert_eq!(refused(r#","allowed_token_ids":[7],"min_tokens":1"#), (400, "allowed_token_ids".into()));
        assert!(resolved(r#","allowed_token_ids":[7]"#).is_ok());
        assert!(resolved(r#","allowed_token_ids":[7,8],"min_tokens":1"#).is_ok());
        assert_eq!(refused(r#","bad_words":["ok","  "]"#), (400, "bad_words[1]".into()));
        let long = "some words ".repeat(90);
        let many = serde_json::json!(vec![long; 20]).to_string();
        assert_eq!(refused(&format!(",\"bad_words\":{many}")), (400, "bad_words".into()));
    }

    #[test]
    fn exclusions_are_only_in_effect_where_they_can_change_a_row() {
        let plain = resolved("").expect("sound");
        assert!(!plain.apply_at(0));
        let early = resolved(r#","min_tokens":2"#).expect("sound");
        assert_eq!([0, 1, 2].map(|generated| early.apply_at(generated)), [true, true, false]);
        assert!(resolved(r#","allowed_token_ids":[1]"#).expect("sound").apply_at(9));
    }
}
