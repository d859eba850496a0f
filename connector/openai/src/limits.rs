//! Bounds of a request. A request beyond a bound is refused with the bound in the message.
//!
//! There are two kinds. Bounds of an engine's work belong to the engine and do not apply with [`Scope::AnyEngine`].
//! Bounds of the cost to read a request apply to every process.

use std::ops::RangeInclusive;

/// Levels of nesting of a body: serde_json's recursion limit, which prevents a stack overflow.
pub const NESTING_MAX: usize = 128;
/// Stop strings of one request. OpenAI accepts 4; evaluation harnesses send up to about ten.
pub const STOP_STRINGS_MAX: usize = 16;
/// Bytes of one stop string, and the most text that the matcher withholds.
pub const STOP_STRING_BYTES_MAX: usize = 1024;
/// Stop tokens of one request.
pub const STOP_TOKENS_MAX: usize = 128;
/// Words of `bad_words`, and their token sequences (vLLM's `VLLM_MAX_NUM_BAD_WORDS`): each is compared at each token.
pub const BAD_WORDS_MAX: usize = 128;
/// Bytes of one of them.
pub const BAD_WORD_BYTES_MAX: usize = 1024;
/// Tokens of all sequences of `bad_words` together (vLLM's `VLLM_MAX_BAD_WORDS_TOTAL_TOKENS`).
pub const BAD_WORD_TOKENS_MAX: usize = 1024;
/// Entries of `allowed_token_ids`: as many as the largest vocabularies have.
pub const ALLOWED_TOKENS_MAX: usize = 1 << 18;
/// Log-probabilities of prompts in one reply: positions times alternatives, the token itself included, in each choice
/// that has them. One takes about 70 bytes.
pub const PROMPT_LOGPROBS_MAX: usize = 1 << 20;
/// Alternatives per token (OpenAI's and vLLM's limit).
pub const LOGPROBS_MAX: u32 = 20;
/// Entries of `logit_bias` (OpenAI accepts 300, vLLM has no documented limit).
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Completions of one prompt.
pub const N_MAX: u32 = 16;
/// Completions of one prompt for any engine: vLLM's `VLLM_MAX_N_SEQUENCES`.
pub(crate) const N_MAX_ANYWHERE: u32 = 16_384;
/// Maximum temperature. Above it a distribution over f32 logits is flat. OpenAI's limit is 2.
pub const TEMPERATURE_MAX: f64 = 100.0;
/// Default of `max_tokens` for `/v1/completions` (OpenAI and vLLM).
pub const COMPLETIONS_MAX_TOKENS_DEFAULT: u32 = 16;
/// Largest count of tokens in a field. Below it the model's context is the limit.
pub const TOKENS_MAX: u32 = i32::MAX as u32;

/// Bytes of JSON text of a field other than the prompt.
pub const SMALL_FIELD_BYTES_MAX: usize = 64 << 10;
/// Bytes of `logit_bias`: as [`SMALL_FIELD_BYTES_MAX`], but enough for long spellings of biases.
pub const LOGIT_BIAS_BYTES_MAX: usize = 1 << 20;
/// Bytes of all fields other than the prompt as trees, estimated as for [`TREE_BYTES_MAX`]. Valid fields take less than
/// 2 MiB: 1,024 biases at 410 bytes, 128 stop tokens, 16 stop strings of 1 KiB.
pub(crate) const SMALL_TREE_BYTES_MAX: usize = 32 << 20;

/// Shorter fields cannot exceed [`SMALL_TREE_BYTES_MAX`]; see [`UNWEIGHED_BYTES_MAX`].
pub(crate) const SMALL_UNWEIGHED_BYTES_MAX: usize = 80 << 10;

/// Bytes of a body as a tree. `[[],[],…` of 32 MiB would be 11 million arrays of 448 bytes: 5 GB. A prompt of
/// [`ParseLimits::prompt_tokens`] ids is a tree of 151 MB, and the rest of such a request is small.
pub(crate) const TREE_BYTES_MAX: usize = 192 << 20;
/// A shorter text cannot exceed [`TREE_BYTES_MAX`]: the heaviest value per byte is `{}`, with 656 bytes for two.
pub(crate) const UNWEIGHED_BYTES_MAX: usize = 512 << 10;

/// The configurable bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseLimits {
    /// Bytes of a body. If a body must be parsed completely, its tree takes at most 192 MiB (estimated) while the
    /// request is read.
    pub body_bytes: usize,
    /// Prompts of one `/v1/completions` request.
    pub prompts: usize,
    /// Sequences that one request may start: prompts × n.
    pub sequences: usize,
    /// Tokens of a prompt of token ids.
    pub prompt_tokens: usize,
    /// Token ids must be below this, if known.
    pub vocab: Option<u32>,
    /// Messages of one chat request.
    pub messages: usize,
    /// Tools, and documents, of one chat request.
    pub tools: usize,
    /// The kind of engine that gets the requests.
    pub scope: Scope,
}

/// The kind of engine that gets a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// An engine with exactly the features of this crate. Other features, such as images, are refused by name.
    #[default]
    ThisEngine,
    /// An engine that may have more features. Known fields must be well formed. The engine checks unknown fields and
    /// amounts.
    AnyEngine,
}

impl Scope {
    /// A bound of an engine's work, in items or bytes. For any engine there is none; the length of the body bounds its
    /// content.
    pub(crate) fn most(self, of_this_engine: usize) -> usize {
        match self {
            Self::ThisEngine => of_this_engine,
            Self::AnyEngine => usize::MAX,
        }
    }

    /// The largest `n`.
    pub(crate) fn n(self) -> u32 {
        match self {
            Self::ThisEngine => N_MAX,
            Self::AnyEngine => N_MAX_ANYWHERE,
        }
    }

    /// Range of alternatives per token; a value below zero requests all.
    pub(crate) fn logprobs(self) -> RangeInclusive<i64> {
        match self {
            Self::ThisEngine => 0..=LOGPROBS_MAX.into(),
            Self::AnyEngine => -1..=TOKENS_MAX.into(),
        }
    }
}

impl ParseLimits {
    /// The limits of a router for bodies of at most `body_bytes` bytes.
    #[must_use]
    pub fn of_any_engine(body_bytes: usize) -> Self {
        let scope = Scope::AnyEngine;
        let Self { prompts, sequences, prompt_tokens, vocab, messages, tools, .. } = Self::default();
        Self {
            body_bytes,
            prompts: scope.most(prompts),
            sequences: scope.most(sequences),
            prompt_tokens: scope.most(prompt_tokens),
            vocab,
            messages: scope.most(messages),
            tools: scope.most(tools),
            scope,
        }
    }
}

impl Default for ParseLimits {
    fn default() -> Self {
        Self {
            body_bytes: 32 << 20,
            prompts: 256,
            sequences: 256,
            prompt_tokens: 1 << 20,
            vocab: None,
            messages: 4096,
            tools: 512,
            scope: Scope::ThisEngine,
        }
    }
}
