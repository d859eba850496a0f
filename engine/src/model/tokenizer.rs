//! Text to tokens and back: `tokenizer.json`, as Hugging Face's own library reads it.
//!
//! Facts that callers rely on:
//! - **Literal special tokens in text become special tokens** (`<|im_end|>` typed by a user ends the turn), as in
//!   Hugging Face and vLLM. A service that must prevent this escapes them in advance.
//! - A rendered chat template already contains BOS if the model needs one: encode it with [`SpecialTokens::AsWritten`],
//!   otherwise BOS appears twice.
//! - Ids without a token (rows that pad the embedding) decode to nothing.
//! - `clean_up_tokenization_spaces` is not applied, as in vLLM: a stream cannot take a space back.
//! - Truncation and padding of a `tokenizer.json`, which are left from training, are switched off.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value};
use tokenizers::decoders::DecoderWrapper;

use super::{ModelError, ModelFiles};

const TOKENIZER: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";
const SPECIALS: &str = "special_tokens_map.json";
/// Special tokens with names, which templates use as variables.
const NAMES: [&str; 5] = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token"];

/// A checkpoint's tokenizer. Immutable; can be shared in an `Arc`.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pieces: TokenBytes,
    special: Vec<bool>,
    byte_level: bool,
    names: BTreeMap<String, String>,
    config: Map<String, Value>,
}

/// Whether encoding adds the tokenizer's special tokens around a text (usually BOS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Yes: plain prompts.
    Add,
    /// No: rendered chat templates.
    AsWritten,
}

/// Whether decoding returns special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeMode {
    /// Special tokens are left out.
    SkipSpecial,
    /// All tokens are decoded.
    All,
}

/// Why a text cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The text cannot fit, for any division into tokens.
    #[error("the text has {bytes} bytes; {max_tokens} tokens hold {max_bytes} at most")]
    TooLong {
        /// Bytes of the text.
        bytes: usize,
        /// Bytes of the longest token times the tokens allowed.
        max_bytes: usize,
        /// Tokens allowed.
        max_tokens: usize,
    },
    /// The tokenizer refused the text.
    #[error("the text cannot be encoded: {0}")]
    Refused(String),
}

impl Tokenizer {
    /// Reads `tokenizer.json`, and `tokenizer_config.json` and `special_tokens_map.json` where they exist.
    ///
    /// # Errors
    /// A file is absent, unreadable or malformed.
    pub fn load(files: &ModelFiles) -> Result<Self, ModelError> {
        let bytes = files.open(TOKENIZER)?.ok_or_else(|| ModelError::Missing(TOKENIZER.into()))?;
        let malformed = |what: String| ModelError::Malformed { file: TOKENIZER.into(), what };
        let mut inner =
            tokenizers::Tokenizer::from_bytes(&*bytes).map_err(|error| malformed(error.to_string()))?;
        inner.with_truncation(None).map_err(|error| malformed(error.to_string()))?;
        inner.with_padding(None);
        let config = json_object(files, CONFIG)?.unwrap_or_default();
        let specials = json_object(files, SPECIALS)?.unwrap_or_default();
        let byte_level = inner.get_decoder().is_some_and(is_byte_level);
        let ids = inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let mut special = vec![false; ids];
        for (id, token) in inner.get_added_tokens_decoder() {
            if let Some(flag) = special.get_mut(id as usize) {
                *flag = token.special;
            }
        }
        let pieces = TokenBytes::of(&inner, ids, byte_level);
        Ok(Self { pieces, special, byte_level, names: names(&config, &specials), config, inner })
    }

    /// Encodes a text. A text that cannot fit into `max_tokens` is refused before the work is done. The result may
    /// still be longer than `max_tokens`: the caller compares.
    ///
    /// Takes linear time, about 0.4 ms per kilobyte of prose and at most 3 ms per kilobyte of hostile text. Must not
    /// run on the thread of the step loop or of the network.
    ///
    /// # Errors
    /// [`EncodeError`].
    pub fn encode(
        &self,
        text: &str,
        special: SpecialTokens,
        max_tokens: usize,
    ) -> Result<Vec<u32>, EncodeError> {
        let max_bytes = self.max_bytes(max_tokens);
        if text.len() > max_bytes {
            return Err(EncodeError::TooLong { bytes: text.len(), max_bytes, max_tokens });
        }
        let encoded = self.inner.encode_fast(text, special == SpecialTokens::Add);
        let encoded = encoded.map_err(|error| EncodeError::Refused(error.to_string()))?;
        Ok(encoded.get_ids().to_vec())
    }

    /// Bytes of the longest text of so many tokens.
    #[must_use]
    pub fn max_bytes(&self, tokens: usize) -> usize {
        tokens.saturating_mul(self.pieces.longest)
    }

    /// Decodes tokens. Ids without a token are left out.
    #[must_use]
    pub fn decode(&self, ids: &[u32], decode: DecodeMode) -> String {
        let skip = decode == DecodeMode::SkipSpecial;
        // No decoder fails on the inputs that are possible here. If one does, the result is the bytes of the tokens.
        self.inner.decode(ids, skip).unwrap_or_else(|_| {
            let shown = ids.iter().filter(|id| !(skip && self.is_special(**id)));
            let bytes: Vec<u8> = shown.flat_map(|id| self.bytes(*id).iter().copied()).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }

    /// A token's bytes. Empty for an id without a token. The bytes of a character may be spread over tokens.
    #[must_use]
    pub fn bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id)
    }

    /// A token's text, for log-probabilities. A part of a character gives replacement characters.
    #[must_use]
    pub fn text(&self, id: u32) -> Cow<'_, str> {
        String::from_utf8_lossy(self.bytes(id))
    }

    /// The token as the vocabulary spells it (`Ġthe`), for `/tokenize`.
    #[must_use]
    pub fn spelling(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token, by its spelling.
    #[must_use]
    pub fn id(&self, spelling: &str) -> Option<u32> {
        self.inner.token_to_id(spelling)
    }

    /// Whether an id is a special token, which [`DecodeMode::SkipSpecial`] leaves out.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The largest id with a token, plus one. A model's rows beyond it are padding.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.special.len()
    }

    /// Spelling of the named special tokens that the checkpoint defines: `bos_token`, `eos_token`, ….
    #[must_use]
    pub fn names(&self) -> &BTreeMap<String, String> {
        &self.names
    }

    /// The EOS token's id. `generation_config.json` and `config.json` may name more.
    #[must_use]
    pub fn eos(&self) -> Option<u32> {
        self.names.get("eos_token").and_then(|token| self.id(token))
    }

    /// The BOS token's id.
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.names.get("bos_token").and_then(|token| self.id(token))
    }

    /// The whole `tokenizer_config.json`.
    #[must_use]
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// Whether a text consists of exactly its tokens' bytes, so that a stream can be decoded byte by byte.
    #[must_use]
    pub fn is_byte_level(&self) -> bool {
        self.byte_level
    }
}

/// A file of the checkpoint that contains a JSON object; `None` if it is absent.
pub(crate) fn json_object(files: &ModelFiles, name: &str) -> Result<Option<Map<String, Value>>, ModelError> {
    let Some(bytes) = files.open(name)? else { return Ok(None) };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|error| ModelError::Malformed { file: name.into(), what: error.to_string() })
}

/// Byte-level BPE without other changes of the text.
fn is_byte_level(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        DecoderWrapper::Sequence(steps) => {
            matches!(steps.get_decoders(), [DecoderWrapper::ByteLevel(_)])
                || matches!(steps.get_decoders(), [DecoderWrapper::ByteLevel(_), DecoderWrapper::Fuse(_)])
        }
        _ => false,
    }
}

/// Named special tokens: a string, an object with `content`, or null. `tokenizer_config.json` has priority.
fn names(config: &Map<String, Value>, specials: &Map<String, Value>) -> BTreeMap<String, String> {
    let spelling = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(token) => token.get("content").and_then(Value::as_str).map(str::to_owned),
        _ => None,
    };
    let find = |name: &str| {
        let token = config.get(name).or_else(|| specials.get(name)).and_then(spelling)?;
        Some((name.to_owned(), token))
    };
    NAMES.iter().filter_map(|name| find(name)).collect()
}

/// Every token's bytes, in one allocation.
#[derive(Debug)]
struct TokenBytes {
    bytes: Vec<u8>,
    /// `ends[id]` is the end of the token's bytes, which begin at the end of the token before.
    ends: Vec<u32>,
    longest: usize,
}

impl TokenBytes {
    fn of(tokenizer: &tokenizers::Tokenizer, ids: usize, byte_level: bool) -> Self {
        let from_char = byte_of_char();
        let (mut bytes, mut ends, mut longest) = (Vec::new(), Vec::with_capacity(ids), 1);
        for id in 0..ids as u32 {
            let start = bytes.len();
            if let Some(token) = tokenizer.id_to_token(id) {
                if byte_level {
                    push_byte_level(&mut bytes, &token, &from_char);
                } else {
                    push_sentencepiece(&mut bytes, &token);
                }
            }
            longest = longest.max(bytes.len() - start);
            ends.push(u32::try_from(bytes.len()).expect("a vocabulary is far smaller than 4 GiB"));
        }
        Self { bytes, ends, longest }
    }

    fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..*end as usize]
    }
}

/// A token with a character outside the alphabet (an added token with a space) is its own text, as in the library's
/// decoder.
fn push_byte_level(bytes: &mut Vec<u8>, token: &str, from_char: &BTreeMap<char, u8>) {
    let start = bytes.len();
    for character in token.chars() {
        match from_char.get(&character) {
            Some(byte) => bytes.push(*byte),
            None => {
                bytes.truncate(start);
                bytes.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// `<0xE4>` is a byte; `▁` is a space.
fn push_sentencepiece(bytes: &mut Vec<u8>, token: &str) {
    let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match hex.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => bytes.push(byte),
        None => bytes.extend_from_slice(token.replace('▁', " ").as_bytes()),
    }
}

/// The alphabet of byte-level BPE (GPT-2's `bytes_to_unicode`): printable bytes map to themselves, the others to U+0100
/// and up, in order.
fn byte_of_char() -> BTreeMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let moved = (0x100u32..).filter_map(char::from_u32);
    let mut map: BTreeMap<char, u8> =
        (0..=255).filter(|b| printable(*b)).map(|b| (char::from(b), b)).collect();
    map.extend(moved.zip((0..=255u8).filter(|byte| !printable(*byte))));
    map
}

#[cfg(test)]
mod tests {
    use super::super::tests::{fixture, fixture_files};
    use super::*;

    #[test]
    fn special_tokens_typed_by_a_user_become_special_tokens() {
        let (tokenizer, _) = fixture("qwen3");
        let ids = tokenizer.encode("a<|im_end|>", SpecialTokens::AsWritten, 100).expect("short");
        assert_eq!(ids.last().copied(), tokenizer.eos());
        assert!(tokenizer.is_special(ids[1]) && !tokenizer.is_special(ids[0]));
    }

    #[test]
    fn names_are_read_as_strings_or_objects_and_null_is_none() {
        let (llama, _) = fixture("llama3");
        assert_eq!(llama.names()["bos_token"], "<|begin_of_text|>");
        assert_eq!(llama.bos(), llama.id("<|begin_of_text|>"));
        let (qwen, _) = fixture("qwen3");
        assert_eq!((qwen.bos(), qwen.names().contains_key("bos_token")), (None, false));
        let (sentencepiece, _) = fixture("sentencepiece");
        assert_eq!((sentencepiece.bos(), sentencepiece.eos()), (Some(1), Some(2)));
    }

    #[test]
    fn a_text_that_no_tokens_can_hold_is_refused_unread() {
        let (tokenizer, _) = fixture("llama3");
        let longest =
            (0..tokenizer.vocab() as u32).map(|id| tokenizer.bytes(id).len()).max().expect("a vocabulary");
        let text = "a".repeat(longest * 10 + 1);
        let error = EncodeError::TooLong { bytes: text.len(), max_bytes: longest * 10, max_tokens: 10 };
        assert_eq!(tokenizer.encode(&text, SpecialTokens::Add, 10), Err(error));
        assert!(tokenizer.encode(&text[1..], SpecialTokens::Add, 10).is_ok());
    }

    #[test]
    fn ids_without_a_token_decode_to_nothing() {
        let (tokenizer, _) = fixture("qwen3");
        let beyond = tokenizer.vocab() as u32;
        assert_eq!(tokenizer.decode(&[beyond, u32::MAX], DecodeMode::All), "");
        assert!(tokenizer.bytes(beyond).is_empty() && tokenizer.bytes(u32::MAX).is_empty());
        assert_eq!((tokenizer.spelling(beyond), tokenizer.is_special(beyond)), (None, false));
    }

    #[test]
    fn a_tokens_bytes_are_what_it_decodes_to() {
        for name in ["llama3", "qwen3"] {
            let (tokenizer, _) = fixture(name);
            for id in 0..tokenizer.vocab() as u32 {
                assert_eq!(tokenizer.text(id), tokenizer.decode(&[id], DecodeMode::All), "{name} {id}");
            }
        }
        let (tokenizer, _) = fixture("sentencepiece");
        let id = |token| tokenizer.id(token).expect("in the vocabulary");
        assert_eq!(tokenizer.bytes(id("<0xE4>")), [0xE4]);
        assert_eq!(tokenizer.bytes(id("▁the")), b" the");
    }

    #[test]
    fn truncation_and_padding_from_training_are_off() {
        let ModelFiles::Dir(dir) = fixture_files("sentencepiece") else { panic!("a folder") };
        let file = std::fs::read(dir.join(TOKENIZER)).expect("readable");
        let mut json: Value = serde_json::from_slice(&file).expect("JSON");
        json["truncation"] = serde_json::json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
            "stride": 0});
        json["padding"] = serde_json::json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0,
            "pad_to_multiple_of": null, "pad_type_id": 0, "pad_token": "<unk>"});
        let temp = tempfile::tempdir().expect("a folder");
        std::fs::write(temp.path().join(TOKENIZER), json.to_string()).expect("written");
        let tokenizer = Tokenizer::load(&ModelFiles::Dir(temp.path().into())).expect("loads");
        let (plain, _) = fixture("sentencepiece");
        let encode = |tokenizer: &Tokenizer| tokenizer.encode("hello the world", SpecialTokens::Add, 99);
        assert_eq!(encode(&tokenizer), encode(&plain));
    }

    #[test]
    fn an_absent_or_broken_tokenizer_is_an_error_that_names_the_file() {
        let temp = tempfile::tempdir().expect("a folder");
        let files = ModelFiles::Dir(temp.path().into());
        assert!(matches!(Tokenizer::load(&files), Err(ModelError::Missing(name)) if name == TOKENIZER));
        std::fs::write(temp.path().join(TOKENIZER), "{}").expect("written");
        assert!(
            matches!(Tokenizer::load(&files), Err(ModelError::Malformed { file, .. }) if file == TOKENIZER)
        );
    }
}
