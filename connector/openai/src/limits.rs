//! Bounds of a request. A request beyond them is refused with the bound in the message.
//!
//! Two kinds: what a request may ask of an engine, which is each engine's to say ([`Scope::AnyEngine`] leaves it to
//! them), and what reading it may take of the process that reads, which holds for everybody.

use std::ops::RangeInclusive;

/// Levels of nesting of a body; serde_json's recursion limit. Keeps hostile bodies off the stack's end.
pub const NESTING_MAX: usize = 128;
/// Stop strings of one request. OpenAI takes 4; evaluation harnesses send up to about ten.
pub const STOP_STRINGS_MAX: usize = 16;
/// Bytes of one stop string. The matcher holds back this much text at most.
pub const STOP_STRING_BYTES_MAX: usize = 1024;
/// Stop tokens of one request.
pub const STOP_TOKENS_MAX: usize = 128;
/// Alternatives per token (OpenAI's and vLLM's limit).
pub const LOGPROBS_MAX: u32 = 20;
/// Entries of `logit_bias` (OpenAI takes 300, vLLM does not say).
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Completions of one prompt.
pub const N_MAX: u32 = 16;
/// Completions of one prompt where the engine is another's: vLLM's `VLLM_MAX_N_SEQUENCES`.
pub(crate) const N_MAX_ANYWHERE: u32 = 16_384;
/// Above this temperature a distribution over f32 logits is flat; more is a mistake. OpenAI's limit is 2.
pub const TEMPERATURE_MAX: f64 = 100.0;
/// `max_tokens` when `/v1/completions` does not say (OpenAI and vLLM).
pub const COMPLETIONS_MAX_TOKENS_DEFAULT: u32 = 16;
/// Largest count of tokens that a field may name; the model's context decides below it.
pub const TOKENS_MAX: u32 = i32::MAX as u32;

/// Bytes of a field that is read besides the prompt, as JSON text.
pub const SMALL_FIELD_BYTES_MAX: usize = 64 << 10;
/// Bytes of `logit_bias`: as [`SMALL_FIELD_BYTES_MAX`], with room for biases that are written at length.
pub const LOGIT_BIAS_BYTES_MAX: usize = 1 << 20;
/// Bytes that all the fields besides the prompt may take once they are read, estimated as [`TREE_BYTES_MAX`] is. What
/// is well formed takes less than 2 MiB: 1,024 biases at 410 bytes, 128 stop tokens, 16 stop strings of 1 KiB.
pub(crate) const SMALL_TREE_BYTES_MAX: usize = 32 << 20;

/// Shorter ones cannot become a larger tree; see [`UNWEIGHED_BYTES_MAX`].
pub(crate) const SMALL_UNWEIGHED_BYTES_MAX: usize = 80 << 10;

/// Bytes that a body may take as a tree. `[[],[],…` of 32 MiB would be 11 million arrays of 448 bytes: 5 GB. A prompt of
/// [`ParseLimits::prompt_tokens`] ids is a tree of 151 MB, and the rest of such a request is small.
pub(crate) const TREE_BYTES_MAX: usize = 192 << 20;
/// A shorter text cannot become a larger tree: what weighs most is `{}`, 656 bytes for two.
pub(crate) const UNWEIGHED_BYTES_MAX: usize = 512 << 10;

/// The bounds that a process can set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseLimits {
    /// Bytes of a body. Where one has to be parsed whole, its tree takes at most 192 MiB (estimated), for as
    /// long as the request is being read.
    pub body_bytes: usize,
    /// Prompts of one `/v1/completions` request.
    pub prompts: usize,
    /// Sequences that one request may start: prompts × n.
    pub sequences: usize,
    /// Tokens of a prompt that comes as ids.
    pub prompt_tokens: usize,
    /// Token ids must be below this, where known.
    pub vocab: Option<u32>,
    /// Messages of one chat request.
    pub messages: usize,
    /// Tools, and documents, of one chat request.
    pub tools: usize,
    /// Whose requests these are.
    pub scope: Scope,
}

/// For whom a request is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// For an engine that implements what this crate describes. What it would have to ignore is refused by name:
    /// structured output, forced tool calls, images.
    #[default]
    ThisEngine,
    /// For engines that may do more than this crate describes. What is known must be well formed; what is not, and how
    /// much of it, is theirs to judge.
    AnyEngine,
}

impl Scope {
    /// A bound on what an engine may be asked, in items or bytes. For any engine there is none: what a body holds is
    /// bounded by its length.
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

    /// Alternatives per token: the least, where below zero is all of them, and the most.
    pub(crate) fn logprobs(self) -> RangeInclusive<i64> {
        match self {
            Self::ThisEngine => 0..=LOGPROBS_MAX.into(),
            Self::AnyEngine => -1..=TOKENS_MAX.into(),
        }
    }
}

impl ParseLimits {
    /// As a router reads bodies of at most so many bytes.
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
