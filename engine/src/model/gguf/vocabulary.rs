//! The tokenizer in GGUF metadata, as `tokenizer.json` and `tokenizer_config.json`.
//!
//! Two kinds are read: `gpt2` (byte-level BPE: tokens and merges) and `llama` (SentencePiece: tokens and scores). The
//! result is loaded like that of a Hugging Face checkpoint, and gives the same tokens.
//!
//! SentencePiece merges the pair whose result has the highest score. As in `transformers`, the merges are all divisions
//! of all tokens into two tokens, by the score of the whole.

use std::cmp::Ordering;
use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::header::GgufHeader;
use super::pre_tokenizer::PreTokenizer;
use crate::model::ModelError;

const TOKENS_KEY: &str = "tokenizer.ggml.tokens";
const MODEL_KEY: &str = "tokenizer.ggml.model";
const PRE_KEY: &str = "tokenizer.ggml.pre";
const ARCHITECTURE_KEY: &str = "general.architecture";
const TEMPLATE_KEY: &str = "tokenizer.chat_template";

/// Most tokens, as in `config.json`.
const MAX_TOKENS: usize = 1 << 22;
/// Bytes of the longest token: twice a run of 1024 spaces, as byte-level BPE spells them.
const MAX_TOKEN_BYTES: usize = 4096;
/// Bytes of the longest token of SentencePiece that merges form. Its trainer stops at 16 characters, of 4 bytes.
const MAX_MERGED_BYTES: usize = 256;

/// Most merges for each token of SentencePiece, on average. Released vocabularies have 2.
const MAX_MERGES_PER_TOKEN: usize = 64;

/// Types of `tokenizer.ggml.token_type`.
const UNKNOWN: i128 = 2;
const CONTROL: i128 = 3;
const USER_DEFINED: i128 = 4;
const UNUSED: i128 = 5;

/// Control tokens that end a text in every model that has them. Most files name only one end.
const ENDS: [&str; 8] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
];

/// Kind of a vocabulary.
#[derive(Clone, Copy, Debug)]
enum VocabularyKind {
    ByteLevel(PreTokenizer),
    SentencePiece,
}

/// The vocabulary of a file.
#[derive(Debug)]
pub(super) struct Vocabulary<'a> {
    header: &'a GgufHeader<'a>,
    kind: VocabularyKind,
    tokens: Vec<&'a str>,
    /// Types of the tokens. Empty if the file has none.
    types: Vec<i128>,
}

impl<'a> Vocabulary<'a> {
    /// Reads and checks tokens and their types.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for another kind of tokenizer. [`ModelError::Malformed`].
    pub(super) fn read(header: &'a GgufHeader<'a>) -> Result<Self, ModelError> {
        let absent = |key: &str| header.malformed(format!("{key} is absent"));
        let kind = match header.text(MODEL_KEY)?.ok_or_else(|| absent(MODEL_KEY))? {
            "llama" => VocabularyKind::SentencePiece,
            "gpt2" => {
                let name = header.text(PRE_KEY)?.ok_or_else(|| {
                    let what = format!("byte-level BPE without {PRE_KEY}");
                    header.unsupported(&what, "convert the model again with a llama.cpp of May 2024 or later")
                })?;
                VocabularyKind::ByteLevel(PreTokenizer::named(name).ok_or_else(|| {
                    header.unsupported(&format!("{PRE_KEY} {name}"), &PreTokenizer::supported())
                })?)
            }
            other => {
                return Err(header.unsupported(&format!("{MODEL_KEY} {other}"), "supported: gpt2, llama"));
            }
        };
        let array = header.array(TOKENS_KEY)?.ok_or_else(|| absent(TOKENS_KEY))?;
        if array.len() > MAX_TOKENS {
            return Err(header.malformed(format!("{} tokens, more than {MAX_TOKENS}", array.len())));
        }
        let wrong = || header.malformed(format!("{TOKENS_KEY} is not an array of UTF-8 texts"));
        let tokens = array.texts().ok_or_else(wrong)?;
        if let Some(token) = tokens.iter().find(|token| token.len() > MAX_TOKEN_BYTES) {
            let len = token.len();
            return Err(header.malformed(format!("a token of {len} bytes, more than {MAX_TOKEN_BYTES}")));
        }
        let types = match header.array("tokenizer.ggml.token_type")? {
            None => Vec::new(),
            Some(types) => types.wholes().filter(|types| types.len() == tokens.len()).ok_or_else(|| {
                header.malformed(format!("{} token types for {} tokens", types.len(), tokens.len()))
            })?,
        };
        Ok(Self { header, kind, tokens, types })
    }

    /// The BOS token.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] for an id without a token.
    pub(super) fn bos(&self) -> Result<Option<u32>, ModelError> {
        self.special("bos", Some(1))
    }

    /// Tokens that end a text: those that the file names, and control tokens that end a turn in every model.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] for an id without a token.
    pub(super) fn ends(&self) -> Result<Vec<u32>, ModelError> {
        let named = [self.special("eos", Some(2))?, self.special("eot", None)?, self.special("eom", None)?];
        let mut ends: Vec<u32> = Vec::new();
        let known = (0_u32..).zip(&self.tokens).filter(|(id, token)| {
            ENDS.contains(token) && matches!(self.type_of(*id as usize), CONTROL | USER_DEFINED)
        });
        for id in named.into_iter().flatten().chain(known.map(|(id, _)| id)) {
            if !ends.contains(&id) {
                ends.push(id);
            }
        }
        Ok(ends)
    }

    /// The contents of `tokenizer.json`.
    ///
    /// # Errors
    /// [`ModelError::Malformed`] for merges or scores that are absent or do not fit the tokens.
    pub(super) fn tokenizer(&self) -> Result<Value, ModelError> {
        let mut ids = HashMap::with_capacity(self.tokens.len());
        let mut vocab = Map::new();
        for (id, token) in self.tokens.iter().enumerate().filter(|(id, token)| !self.is_padding(*id, token)) {
            if ids.insert(*token, id).is_some() {
                return Err(self.header.malformed(format!("token {token:?} appears twice")));
            }
            vocab.insert((*token).to_owned(), json!(id));
        }
        let trims = self.trims_after_markers()?;
        let tokens = self.tokens.iter().enumerate();
        let added: Vec<Value> = tokens.filter_map(|(id, token)| self.added(id, token, trims)).collect();
        let mut model = json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        });
        let (normalizer, pre_tokenizer, decoder) = match self.kind {
            VocabularyKind::ByteLevel(pre) => {
                model["ignore_merges"] = json!(pre.ignore_merges);
                model["merges"] = self.listed_merges(&ids)?;
                let decoder = json!({
                    "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true
                });
                let normalizer = if pre.is_normalized { json!({ "type": "NFC" }) } else { Value::Null };
                (normalizer, pre.json(), decoder)
            }
            VocabularyKind::SentencePiece => {
                if let Some(unknown) = self.special("unknown", Some(0))? {
                    model["unk_token"] = json!(self.tokens[unknown as usize]);
                }
                model["fuse_unk"] = json!(true);
                model["byte_fallback"] = json!(true);
                model["merges"] = self.scored_merges(&ids)?;
                let prefixed = self.header.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
                let (normalizer, decoder) = sentencepiece_text(prefixed);
                (normalizer, Value::Null, decoder)
            }
        };
        model["vocab"] = Value::Object(vocab);
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": self.frame()?,
            "decoder": decoder, "model": model,
        }))
    }

    /// The contents of `tokenizer_config.json`: named special tokens and the chat template.
    ///
    /// # Errors
    /// [`ModelError::Malformed`].
    pub(super) fn config(&self) -> Result<Value, ModelError> {
        let mut config = Map::new();
        let names = [("bos", Some(1)), ("eos", Some(2)), ("unknown", Some(0)), ("padding", None)];
        for ((name, default), field) in names.into_iter().zip(["bos", "eos", "unk", "pad"]) {
            if let Some(id) = self.special(name, default)? {
                config.insert(format!("{field}_token"), json!(self.tokens[id as usize]));
            }
        }
        let template = self.header.text(TEMPLATE_KEY)?;
        let others = self.header.array("tokenizer.chat_templates")?.and_then(|names| names.texts());
        let mut templates: Vec<Value> = Vec::new();
        for name in others.unwrap_or_default() {
            if let Some(source) = self.header.text(&format!("{TEMPLATE_KEY}.{name}"))? {
                templates.push(json!({ "name": name, "template": source }));
            }
        }
        match (template, templates.is_empty()) {
            (Some(source), true) => _ = config.insert("chat_template".into(), json!(source)),
            (None, true) => {}
            (source, false) => {
                templates.extend(source.map(|source| json!({ "name": "default", "template": source })));
                config.insert("chat_template".into(), Value::Array(templates));
            }
        }
        Ok(Value::Object(config))
    }

    /// A special token that the file names, or SentencePiece's own id.
    fn special(&self, name: &str, default: Option<u32>) -> Result<Option<u32>, ModelError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let has = |id: &u32| (*id as usize) < self.tokens.len();
        match self.header.size(&key)? {
            None => match self.kind {
                VocabularyKind::SentencePiece => Ok(default.filter(has)),
                VocabularyKind::ByteLevel(_) => Ok(None),
            },
            Some(id) => match u32::try_from(id).ok().filter(has) {
                Some(id) => Ok(Some(id)),
                None => {
                    let tokens = self.tokens.len();
                    Err(self.header.malformed(format!("{key} {id} is outside the vocabulary of {tokens}")))
                }
            },
        }
    }

    fn type_of(&self, id: usize) -> i128 {
        self.types.get(id).copied().unwrap_or_default()
    }

    /// Whether a token stands for a row that pads the embedding. Such a row has no text.
    fn is_padding(&self, id: usize, token: &str) -> bool {
        self.type_of(id) == UNUSED && token.starts_with("[PAD")
    }

    /// A token that is found in a text before anything else.
    fn added(&self, id: usize, token: &str, trims: bool) -> Option<Value> {
        let special = match self.type_of(id) {
            CONTROL | UNKNOWN => true,
            USER_DEFINED => false,
            _ => return None,
        };
        Some(json!({
            "id": id, "content": token, "single_word": false, "lstrip": false,
            "rstrip": trims && (is_marker(token) || token == "</s>"),
            "normalized": false, "special": special,
        }))
    }

    /// Whether spaces behind a marker belong to it, as in Phi-3's tokenizer. A file does not say so, and llama.cpp
    /// knows it from the model's name.
    fn trims_after_markers(&self) -> Result<bool, ModelError> {
        let is_phi3 = self.header.text(ARCHITECTURE_KEY)? == Some("phi3");
        Ok(is_phi3 && matches!(self.kind, VocabularyKind::SentencePiece))
    }

    /// The merges of byte-level BPE, in order.
    fn listed_merges(&self, ids: &HashMap<&str, usize>) -> Result<Value, ModelError> {
        const KEY: &str = "tokenizer.ggml.merges";
        let array = self.header.array(KEY)?;
        let array = array.ok_or_else(|| self.header.malformed(format!("{KEY} is absent")))?;
        let wrong = || self.header.malformed(format!("{KEY} is not an array of UTF-8 texts"));
        let merges = array.texts().ok_or_else(wrong)?;
        let mut pairs = Vec::with_capacity(merges.len());
        for merge in merges {
            // A token can begin with a space, but the first character is never the separator.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let pair = merge[first..].find(' ').map(|at| (&merge[..first + at], &merge[first + at + 1..]));
            let known = |(left, right): &(&str, &str)| {
                let whole = format!("{left}{right}");
                [*left, *right, &whole].into_iter().all(|token| ids.contains_key(token))
            };
            let Some((left, right)) = pair.filter(known) else {
                return Err(self
                    .header
                    .malformed(format!("merge {merge:?} is not one of two tokens to a third")));
            };
            pairs.push(json!([left, right]));
        }
        Ok(Value::Array(pairs))
    }

    /// The merges of SentencePiece: divisions of every token into two, the highest score first.
    fn scored_merges(&self, ids: &HashMap<&str, usize>) -> Result<Value, ModelError> {
        const KEY: &str = "tokenizer.ggml.scores";
        let scores = self.header.array(KEY)?.filter(|scores| scores.len() == self.tokens.len());
        let scores = scores.and_then(|scores| scores.floats());
        let scores = scores
            .ok_or_else(|| self.header.malformed(format!("{KEY} does not have a number for each token")))?;
        let mut merges = Vec::new();
        for (whole, token) in self.tokens.iter().enumerate() {
            if token.len() > MAX_MERGED_BYTES || self.is_padding(whole, token) {
                continue;
            }
            let first = merges.len();
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if let (Some(left), Some(right)) = (ids.get(left), ids.get(right)) {
                    merges.push((whole, *left, *right));
                }
            }
            let (most, tokens) = (MAX_MERGES_PER_TOKEN, self.tokens.len());
            if merges.len() > most * tokens {
                let what = format!("{tokens} tokens have more than {most} merges each on average");
                return Err(self.header.malformed(what));
            }
            merges[first..].sort_by_key(|(_, left, right)| (*left, *right));
        }
        let counts: Vec<usize> = self.tokens.iter().map(|token| token.chars().count()).collect();
        // Stable: equal ones keep the order of their tokens. As in transformers, the longer parts are first.
        let key = |merge: &(usize, usize, usize)| (scores[merge.0], counts[merge.1], counts[merge.2]);
        merges.sort_by(|one, other| {
            let (one, other) = (key(one), key(other));
            let by_score = other.0.partial_cmp(&one.0).unwrap_or(Ordering::Equal);
            by_score.then(other.1.cmp(&one.1)).then(other.2.cmp(&one.2))
        });
        let pair =
            |(_, left, right): &(usize, usize, usize)| json!([self.tokens[*left], self.tokens[*right]]);
        Ok(merges.iter().map(pair).collect())
    }

    /// The special tokens around a text, as `post_processor`.
    fn frame(&self) -> Result<Value, ModelError> {
        let default = match self.kind {
            VocabularyKind::ByteLevel(pre) => pre.add_bos,
            VocabularyKind::SentencePiece => true,
        };
        let wanted = |name: &str, default: bool| -> Result<Option<u32>, ModelError> {
            let id = match name {
                "bos" => self.bos()?,
                _ => self.special(name, Some(2))?,
            };
            let add = self.header.flag(&format!("tokenizer.ggml.add_{name}_token"))?.unwrap_or(default);
            Ok(id.filter(|_| add))
        };
        let (bos, eos) = (wanted("bos", default)?, wanted("eos", false)?);
        let token = |id: u32| self.tokens[id as usize];
        let piece = |id: u32, of: usize| json!({ "SpecialToken": { "id": token(id), "type_id": of } });
        let part = |name: &str, of: usize| {
            let text = json!({ "Sequence": { "id": name, "type_id": of } });
            let (before, after) = (bos.map(|id| piece(id, of)), eos.map(|id| piece(id, of)));
            before.into_iter().chain([text]).chain(after).collect::<Vec<Value>>()
        };
        let mut used = Map::new();
        for id in bos.into_iter().chain(eos) {
            used.insert(token(id).to_owned(), json!({ "id": token(id), "ids": [id], "tokens": [token(id)] }));
        }
        if used.is_empty() {
            return Ok(Value::Null);
        }
        let pair = [part("A", 0), part("B", 1)].concat();
        Ok(json!({
            "type": "TemplateProcessing",
            "single": part("A", 0),
            "pair": pair,
            "special_tokens": used,
        }))
    }
}

/// Whether a token of Phi-3 marks a part of a chat.
fn is_marker(token: &str) -> bool {
    token.starts_with("<|") && token != "<|endoftext|>"
}

/// Normalizer and decoder of SentencePiece: spaces are `▁`, and a text begins with one if it is prefixed.
fn sentencepiece_text(prefixed: bool) -> (Value, Value) {
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let restore = json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " });
    let mut normalizers = vec![replace];
    let mut decoders = vec![restore, json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
    if prefixed {
        normalizers.insert(0, json!({ "type": "Prepend", "prepend": "▁" }));
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    (
        json!({ "type": "Sequence", "normalizers": normalizers }),
        json!({ "type": "Sequence", "decoders": decoders }),
    )
}
