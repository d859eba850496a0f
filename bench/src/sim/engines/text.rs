//! Prompts and responses of simulated engines. A token is a word, or eight bytes of a long one. The content of a
//! block is one number, derived from every token up to its end. Every word of a response follows from the current
//! contents of the blocks.
//!
//! The same prompt therefore always has the same response, on every engine. A block with another request's content
//! changes the response.

use baton_openai::{Input, Prompt};
use serde_json::Value;

use crate::load::rng::mix;

/// Ids are below this.
const VOCABULARY: u64 = 1 << 20;
/// Bytes of a word that are one token.
const TOKEN_BYTES: usize = 8;

/// The words of responses.
const WORDS: [&str; 64] = [
    " amber", " anvil", " apple", " arrow", " basin", " birch", " bread", " brook", " cabin", " cedar",
    " chalk", " cliff", " cloud", " coral", " crane", " delta", " ember", " fable", " fern", " field",
    " flint", " forge", " frost", " glade", " grain", " grove", " harbor", " hazel", " heron", " ivory",
    " jetty", " kelp", " kettle", " lantern", " linen", " lotus", " maple", " marsh", " meadow", " mill",
    " moss", " north", " oak", " ocean", " olive", " orchard", " otter", " pebble", " pine", " quartz",
    " quill", " raven", " reed", " ridge", " river", " saddle", " sage", " shore", " slate", " stone",
    " thorn", " tide", " walnut", " willow",
];

/// Appends the tokens of a text.
pub(super) fn tokenize(text: &str, into: &mut Vec<u32>) {
    for word in text.split_ascii_whitespace() {
        for piece in word.as_bytes().chunks(TOKEN_BYTES) {
            let mut bytes = [0; TOKEN_BYTES];
            bytes[..piece.len()].copy_from_slice(piece);
            into.push((mix(u64::from_le_bytes(bytes)) % VOCABULARY) as u32);
        }
    }
}

/// The tokens of a request's prompt, if there is exactly one.
pub(super) fn prompt(input: &Input) -> Option<Vec<u32>> {
    let mut tokens = Vec::new();
    match input {
        Input::Prompts(prompts) => match prompts.as_slice() {
            [Prompt::Text(text)] => tokenize(text, &mut tokens),
            [Prompt::Tokens(ids)] => tokens.clone_from(ids),
            _ => return None,
        },
        Input::Chat(chat) => {
            for message in &chat.messages {
                tokenize(message["role"].as_str().unwrap_or_default(), &mut tokens);
                match &message["content"] {
                    Value::String(text) => tokenize(text, &mut tokens),
                    Value::Array(parts) => {
                        parts.iter().for_each(|part| {
                            tokenize(part["text"].as_str().unwrap_or_default(), &mut tokens)
                        });
                    }
                    _ => {}
                }
            }
        }
    }
    if tokens.is_empty() {
        // As an engine's beginning of sequence.
        tokens.push(1);
    }
    Some(tokens)
}

/// The content of each block of a prompt.
pub(super) fn contents(tokens: &[u32], block_tokens: usize) -> Vec<u64> {
    let mut content = 0;
    let end_of_block = |block: &[u32]| {
        content = block.iter().fold(content, |content, &token| mix(content ^ u64::from(token)));
        content
    };
    tokens.chunks(block_tokens).map(end_of_block).collect()
}

/// The content of a block of generated tokens, from that of the block before.
pub(super) fn next_content(before: u64) -> u64 {
    mix(before ^ u64::MAX)
}

/// Word `number` of a response, from these contents.
pub(super) fn word(contents: impl Iterator<Item = u64>, number: usize) -> &'static str {
    let all = contents.fold(0, |all, content| mix(all ^ content));
    WORDS[(mix(all ^ number as u64) % WORDS.len() as u64) as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_contents_depend_on_all_earlier_tokens() {
        let mut tokens = Vec::new();
        tokenize("one two three four five six internationalization", &mut tokens);
        assert_eq!(tokens.len(), 9, "three pieces of the long word");
        let before = contents(&tokens, 4);
        assert_eq!(before.len(), 3);
        tokens[0] += 1;
        assert!(contents(&tokens, 4).iter().zip(&before).all(|(now, before)| now != before));
    }

    #[test]
    fn generated_words_depend_on_the_block_contents() {
        let words =
            |contents: &[u64]| -> String { (0..32).map(|n| word(contents.iter().copied(), n)).collect() };
        assert_eq!(words(&[1, 2, 3]), words(&[1, 2, 3]));
        assert_ne!(words(&[1, 2, 3]), words(&[1, 2, 4]));
        assert_ne!(words(&[1, 2, 3]), words(&[2, 1, 3]));
    }
}
