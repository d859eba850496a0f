//! The division of a text before byte-level BPE, by its name in `tokenizer.ggml.pre`.
//!
//! A file contains only the name. The patterns are those of the tokenizers that llama.cpp knows by these names, and a
//! wrong one gives other tokens than the model was trained with. An unknown name is therefore refused.

use serde_json::{Value, json};

/// One division, and what llama.cpp derives from its name besides.
#[derive(Clone, Copy, Debug)]
pub(super) struct PreTokenizer {
    names: &'static [&'static str],
    /// Patterns, applied one after the other. A match is a piece, and so is the text between two.
    patterns: &'static [&'static str],
    /// Whether a piece that is a token is not divided further.
    pub(super) ignore_merges: bool,
    /// Whether a text begins with BOS, unless the file says otherwise.
    pub(super) add_bos: bool,
    /// Whether the text is first put into normal form C.
    pub(super) is_normalized: bool,
}

const LLAMA3: &[&str] = &[concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)];
const QWEN2: &[&str] = &[concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)];
const TEKKEN: &[&str] = &[concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)];
const GPT4O: &[&str] = &[concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)];
const GPT2_PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const GPT2: &[&str] = &[GPT2_PATTERN];
const SINGLE_DIGITS: &[&str] = &[r"\p{N}", GPT2_PATTERN];
const UNNAMED: &[&str] = &[r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"];

const PLAIN: PreTokenizer =
    PreTokenizer { names: &[], patterns: &[], ignore_merges: false, add_bos: false, is_normalized: false };

const KNOWN: [PreTokenizer; 9] = [
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"],
        patterns: LLAMA3,
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["dbrx", "smaug-bpe"], patterns: LLAMA3, ..PLAIN },
    // The tokenizers of Qwen's checkpoints normalize; llama.cpp does not.
    PreTokenizer { names: &["qwen2"], patterns: QWEN2, is_normalized: true, ..PLAIN },
    PreTokenizer { names: &["deepseek-r1-qwen", "megrez"], patterns: QWEN2, ..PLAIN },
    PreTokenizer { names: &["tekken"], patterns: TEKKEN, ignore_merges: true, add_bos: true, ..PLAIN },
    PreTokenizer { names: &["gpt-4o"], patterns: GPT4O, ..PLAIN },
    PreTokenizer { names: &["smollm", "starcoder", "refact"], patterns: SINGLE_DIGITS, ..PLAIN },
    PreTokenizer { names: &["gpt-2", "olmo", "exaone4"], patterns: GPT2, ..PLAIN },
    PreTokenizer { names: &["default"], patterns: UNNAMED, ..PLAIN },
];

impl PreTokenizer {
    /// The division with a name.
    pub(super) fn named(name: &str) -> Option<Self> {
        KNOWN.into_iter().find(|known| known.names.contains(&name))
    }

    /// All names, for refusals.
    pub(super) fn supported() -> String {
        let names: Vec<&str> = KNOWN.iter().flat_map(|known| known.names.iter().copied()).collect();
        format!("supported: {}", names.join(", "))
    }

    /// `pre_tokenizer` of `tokenizer.json`.
    pub(super) fn json(&self) -> Value {
        let split = |pattern: &&str| {
            json!({
                "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false
            })
        };
        let bytes = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
        });
        let steps: Vec<Value> = self.patterns.iter().map(split).chain([bytes]).collect();
        json!({ "type": "Sequence", "pretokenizers": steps })
    }
}
