//! The model's vocabulary as a trie of bytes.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::model::tokenizer::Tokenizer;

/// Bytes of a token. The trie's nodes count at most 1,024 levels; longer tokens are never chosen by a grammar.
const TOKEN_BYTES_MAX: usize = 512;

/// Bytes of all tokens: the trie has at most 4 Mi nodes. Vocabularies of 256,000 tokens have about 1.7 MB.
const VOCABULARY_BYTES_MAX: usize = 4_000_000;

/// Ids of a vocabulary: the trie has 24 bits for them.
const VOCABULARY_MAX: usize = 1 << 23;

/// The tokens of a model with `rows` rows and these end-of-text tokens. The trie has one more id if there is none.
///
/// # Errors
/// The vocabulary is larger than any known one.
pub(super) fn token_trie(tokenizer: &Tokenizer, rows: usize, eos: &[u32]) -> Result<TokEnv, String> {
    let mut words: Vec<Vec<u8>> = (0..rows as u32).map(|id| word(tokenizer, id)).collect();
    let bytes: usize = words.iter().map(Vec::len).sum();
    if rows > VOCABULARY_MAX || bytes > VOCABULARY_BYTES_MAX {
        return Err("the model's vocabulary is too large for structured output".into());
    }
    let mut ends: Vec<u32> = eos.iter().copied().filter(|id| (*id as usize) < rows).collect();
    if ends.is_empty() {
        // A grammar without an end token to permit still ends where it permits nothing else.
        ends.push(rows as u32);
        words.push(Vec::new());
    }
    for end in &ends {
        let word = &mut words[*end as usize];
        if word.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
            *word = special(format!("<|end-{end}|>").as_bytes());
        }
    }
    let info = TokRxInfo::new(words.len() as u32, ends[0]);
    let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
    // Any division of a text into tokens is permitted: the model chooses.
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}

/// A token's bytes. No bytes: never permitted.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.bytes(id);
    if bytes.len() > TOKEN_BYTES_MAX {
        return Vec::new();
    }
    if tokenizer.is_special(id) {
        return special(bytes);
    }
    // The marker, 0xFF, occurs in no UTF-8 text.
    if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) { Vec::new() } else { bytes.to_vec() }
}

/// A token that no text contains.
fn special(spelling: &[u8]) -> Vec<u8> {
    let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
    word.extend_from_slice(spelling);
    word
}
