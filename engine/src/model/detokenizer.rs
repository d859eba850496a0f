//! Tokens to text, one at a time, never half of a character.
//!
//! Two methods, because there are two kinds of tokenizers:
//!
//! - *Byte-level* (Llama 3, Qwen, GPT-2): the text is the tokens' bytes. An incomplete character is held back. Bytes
//!   that can never become a character are replaced, exactly as in [`String::from_utf8_lossy`].
//! - *All others* (SentencePiece-like: Llama 2, Mistral): the text depends on neighbours (a leading space is stripped,
//!   byte tokens fuse). A short window is decoded with and without the new token, and the difference is the new text.
//!
//! Invariants:
//! - Byte-level: the concatenation of all `push` and `finish` is exactly `Tokenizer::decode` of all ids. Otherwise the
//!   same, except that a sent character is not taken back when later byte tokens turn out to be invalid.
//! - At most [`HELD_BYTES_MAX`] (byte-level) or [`HELD_TOKENS_MAX`] tokens are held back.

use std::sync::Arc;

use super::tokenizer::{DecodeMode, Tokenizer};

/// A character has at most four bytes, so at most three can be held back.
pub const HELD_BYTES_MAX: usize = 3;
/// A longer window is sent. Four byte tokens make any character.
pub const HELD_TOKENS_MAX: usize = 16;
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// The growing text of one sequence.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    decode: DecodeMode,
    /// Special tokens that are text even if the others are left out.
    shown: Vec<u32>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Bytes that may still become a character.
    Bytes(Vec<u8>),
    Window(TokenWindow),
}

/// The last tokens whose text is known, then those whose text has not been sent.
#[derive(Debug, Default)]
struct TokenWindow {
    ids: Vec<u32>,
    /// Number of `ids` that have been sent.
    sent: usize,
    /// The text of these ids alone.
    sent_text: String,
}

impl Detokenizer {
    /// Text that starts with the first token pushed.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, decode: DecodeMode) -> Self {
        let state = if tokenizer.is_byte_level() {
            State::Bytes(Vec::new())
        } else {
            State::Window(TokenWindow::default())
        };
        Self { tokenizer, decode, shown: Vec::new(), state }
    }

    /// Text that continues a prompt. A tokenizer that strips the space at the start of a text does not strip the one
    /// between prompt and continuation. The prompt's last few tokens suffice.
    #[must_use]
    pub fn after_prompt(tokenizer: Arc<Tokenizer>, decode: DecodeMode, prompt: &[u32]) -> Self {
        let mut new = Self::new(tokenizer, decode);
        if let State::Window(window) = &mut new.state {
            let shown = |id: &&u32| !(decode == DecodeMode::SkipSpecial && new.tokenizer.is_special(**id));
            let tail = prompt.len().saturating_sub(4);
            let ids: Vec<u32> = prompt[tail..].iter().filter(shown).copied().collect();
            *window =
                TokenWindow { sent: ids.len(), sent_text: new.tokenizer.decode(&ids, DecodeMode::All), ids };
        }
        new
    }

    /// The same, with the special tokens among these as text.
    #[must_use]
    pub fn showing(mut self, tokens: &[&str]) -> Self {
        self.shown = tokens.iter().filter_map(|token| self.tokenizer.id(token)).collect();
        self
    }

    /// Adds a token. Returns the text that is complete now, often empty.
    pub fn push(&mut self, id: u32) -> String {
        let skips = self.decode == DecodeMode::SkipSpecial && !self.shown.contains(&id);
        if skips && self.tokenizer.is_special(id) {
            return String::new();
        }
        match &mut self.state {
            State::Bytes(held) => {
                held.extend_from_slice(self.tokenizer.bytes(id));
                take_characters(held)
            }
            State::Window(window) => window.push(&self.tokenizer, id),
        }
    }

    /// Ends the text. Returns the held-back text, replaced if it is not a character. For comparisons with whole
    /// decodings only: responses leave it out.
    pub fn finish(&mut self) -> String {
        match &mut self.state {
            State::Bytes(held) => {
                let rest = String::from_utf8_lossy(held).into_owned();
                held.clear();
                rest
            }
            State::Window(window) => window.flush(&self.tokenizer),
        }
    }
}

/// Removes and returns all text except a possible beginning of a character at the end.
fn take_characters(held: &mut Vec<u8>) -> String {
    let mut text = String::with_capacity(held.len());
    let mut waiting = 0;
    for chunk in held.utf8_chunks() {
        text.push_str(chunk.valid());
        let invalid = chunk.invalid();
        // Invalid bytes at the end of the input may be an incomplete character. In the middle they never are.
        let at_end = invalid.as_ptr_range().end == held.as_ptr_range().end;
        if at_end && is_unfinished(invalid) {
            waiting = invalid.len();
        } else if !invalid.is_empty() {
            text.push(REPLACEMENT);
        }
    }
    held.drain(..held.len() - waiting);
    text
}

fn is_unfinished(bytes: &[u8]) -> bool {
    !bytes.is_empty() && std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

impl TokenWindow {
    fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.ids.push(id);
        let text = tokenizer.decode(&self.ids, DecodeMode::All);
        let held = self.ids.len() - self.sent;
        if text.ends_with(REPLACEMENT) && held < HELD_TOKENS_MAX {
            return String::new();
        }
        self.send(tokenizer, &text)
    }

    fn flush(&mut self, tokenizer: &Tokenizer) -> String {
        if self.sent == self.ids.len() {
            return String::new();
        }
        let text = tokenizer.decode(&self.ids, DecodeMode::All);
        self.send(tokenizer, &text)
    }

    /// Returns the part of `text`, the whole window's text, that has not been sent. If there is any, the window
    /// advances.
    fn send(&mut self, tokenizer: &Tokenizer, text: &str) -> String {
        let new = match text.strip_prefix(self.sent_text.as_str()) {
            Some(new) => new.to_owned(),
            // New byte tokens invalidated a character that has been sent: only their own text is sent.
            None => tokenizer.decode(&self.ids[self.sent..], DecodeMode::All),
        };
        if !new.is_empty() {
            self.ids.drain(..self.sent);
            self.sent = self.ids.len();
            self.sent_text = tokenizer.decode(&self.ids, DecodeMode::All);
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::fixture;
    use super::super::tokenizer::SpecialTokens;
    use super::*;

    fn stream(tokenizer: &Arc<Tokenizer>, decode: DecodeMode, ids: &[u32]) -> Vec<String> {
        let mut stream = Detokenizer::new(Arc::clone(tokenizer), decode);
        let mut pieces: Vec<String> = ids.iter().map(|id| stream.push(*id)).collect();
        pieces.push(stream.finish());
        pieces
    }

    fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer.encode(text, SpecialTokens::AsWritten, 10_000).expect("short enough")
    }

    const DECODES: [DecodeMode; 2] = [DecodeMode::All, DecodeMode::SkipSpecial];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn a_byte_level_stream_of_any_ids_is_exactly_their_decoding(
            ids in prop::collection::vec(prop_oneof![0u32..1100, 0u32..256], 0..60),
        ) {
            for name in ["llama3", "qwen3"] {
                let (tokenizer, _) = fixture(name);
                for decode in DECODES {
                    prop_assert_eq!(stream(&tokenizer, decode, &ids).concat(), tokenizer.decode(&ids, decode));
                }
            }
        }

        #[test]
        fn decoded_pieces_form_the_whole_text_without_partial_characters(text in "[ a-zA-Zé🙂👩‍🚀数据\u{301}\n▁<>]{0,40}") {
            for name in ["llama3", "qwen3", "sentencepiece"] {
                let (tokenizer, _) = fixture(name);
                let ids = encode(&tokenizer, &text);
                let pieces = stream(&tokenizer, DecodeMode::All, &ids);
                prop_assert!(pieces.iter().all(|piece| !piece.contains(REPLACEMENT)), "{:?}", pieces);
                prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids, DecodeMode::All));
            }
        }

        #[test]
        fn a_windowed_stream_without_byte_tokens_is_exactly_the_decoding(
            ids in prop::collection::vec(prop_oneof![259u32..360, 0u32..3, 340u32..400], 0..40),
        ) {
            let (tokenizer, _) = fixture("sentencepiece");
            for decode in DECODES {
                prop_assert_eq!(stream(&tokenizer, decode, &ids).concat(), tokenizer.decode(&ids, decode));
            }
        }

        #[test]
        fn a_windowed_stream_of_any_ids_holds_back_little(ids in prop::collection::vec(0u32..360, 0..80)) {
            let (tokenizer, _) = fixture("sentencepiece");
            let mut stream = Detokenizer::new(tokenizer, DecodeMode::All);
            for id in ids {
                stream.push(id);
                let State::Window(window) = &stream.state else { panic!("not byte-level") };
                prop_assert!(window.ids.len() - window.sent < HELD_TOKENS_MAX);
                prop_assert!(window.ids.len() <= 3 * HELD_TOKENS_MAX, "{} in the window", window.ids.len());
            }
        }
    }

    #[test]
    fn an_incomplete_character_is_replaced_at_the_end() {
        let (tokenizer, _) = fixture("qwen3");
        let ids = encode(&tokenizer, "🙂");
        assert!(ids.len() > 1, "the fixture spreads the character over tokens");
        let mut stream = Detokenizer::new(Arc::clone(&tokenizer), DecodeMode::All);
        assert_eq!(stream.push(ids[0]), "");
        assert_eq!(stream.finish(), "\u{FFFD}");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn a_continuation_keeps_the_space_that_a_text_on_its_own_loses() {
        let (tokenizer, _) = fixture("sentencepiece");
        let (prompt, world) = (encode(&tokenizer, "hello"), encode(&tokenizer, "world"));
        let push = |mut stream: Detokenizer| {
            let text: String = world.iter().map(|id| stream.push(*id)).collect();
            text + &stream.finish()
        };
        assert_eq!(push(Detokenizer::new(Arc::clone(&tokenizer), DecodeMode::All)), "world");
        assert_eq!(push(Detokenizer::after_prompt(tokenizer, DecodeMode::All, &prompt)), " world");
    }

    #[test]
    fn special_tokens_are_shown_only_on_request() {
        let (tokenizer, _) = fixture("qwen3");
        let ids = encode(&tokenizer, "a<|im_end|>b<think>c");
        assert_eq!(stream(&tokenizer, DecodeMode::SkipSpecial, &ids).concat(), "ab<think>c");
        assert_eq!(stream(&tokenizer, DecodeMode::All, &ids).concat(), "a<|im_end|>b<think>c");
        let mut shown = Detokenizer::new(Arc::clone(&tokenizer), DecodeMode::SkipSpecial);
        shown = shown.showing(&["<|im_end|>", "no token"]);
        let ids = encode(&tokenizer, "a<|im_end|>b<|im_start|>c");
        let text: String = ids.iter().map(|id| shown.push(*id)).collect();
        assert_eq!(text, "a<|im_end|>bc");
    }
}
