//! The replies of an engine: one reply, or a stream of chunks, in either dialect.
//!
//! An engine produces choices ([`FinishedChoice`], [`ChoiceDelta`]). [`ReplyHead`] and [`ChunkEncoder`] encode them in
//! the form of the endpoint. The names of the fields, and which are optional, follow vLLM 0.33, whose replies follow
//! OpenAI's. `stop_reason`, `token_ids`, `prompt_token_ids` and `kv_transfer_params` are vLLM's.
//!
//! ```text
//!  chat:         role ─▶ delta … delta(finish) ─▶ usage? ─▶ [DONE]
//!  completions:          delta … delta(finish) ─▶ usage? ─▶ [DONE]
//!  either, when it fails midway:          … ─▶ ApiError::to_sse ─▶ [DONE]
//! ```

mod choice;
mod embedding;
mod logprobs;
mod models;
mod parts;
mod stream;

pub use embedding::EmbeddingReply;
pub use logprobs::{PromptTokenLogprob, TokenLogprob, TopLogprob};
pub use models::{DetokenizeReply, ModelCard, TokenizeReply, models};
pub use parts::{CallDelta, MessageParts, ToolCall};
pub use stream::ChunkEncoder;

use bytes::Bytes;
use serde::ser::{Serialize, SerializeStruct, Serializer};
use serde_json::Value;

use crate::request::Endpoint;
use choice::Choice;
use logprobs::PromptLogprobs;

/// The common part of all chunks of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyHead {
    /// The dialect.
    pub endpoint: Endpoint,
    /// The reply's id, with its prefix ([`Endpoint::id_prefix`]).
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The served model's name.
    pub model: String,
    /// The name of the engine's configuration.
    pub system_fingerprint: Option<String>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// EOS, a stop token or a stop string.
    Stop,
    /// `max_tokens`, or the end of the context.
    Length,
    /// Aborted, by the client or an operator.
    Abort,
    /// The sequence failed; the error frame contains the reason.
    Error,
}

impl FinishReason {
    /// The word in the reply and in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// The stop string or token that ended a sequence; `None` instead means EOS.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(untagged)]
pub enum StopReason {
    /// A stop string.
    Text(String),
    /// One of `stop_token_ids`.
    Token(u32),
}

/// The end of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// The reason.
    pub reason: FinishReason,
    /// The stop string or token, if any.
    pub stop: Option<StopReason>,
}

/// The counts of `usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts.
    pub prompt_tokens: u32,
    /// Tokens of all choices.
    pub completion_tokens: u32,
    /// Prompt tokens whose KV was not computed for this request; `None` omits `prompt_tokens_details`.
    pub cached_tokens: Option<u32>,
    /// Tokens of all choices that are reasoning; `None` omits the count.
    pub reasoning_tokens: Option<u32>,
    /// What became of drafts of tokens; `None` omits both counts. Without any count there are no
    /// `completion_tokens_details`.
    pub predictions: Option<PredictionTokens>,
}

/// Draft tokens of all choices, with OpenAI's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PredictionTokens {
    /// Those that are tokens of a choice.
    pub accepted: u32,
    /// Those that are not, and that are not part of `completion_tokens`.
    pub rejected: u32,
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(serde::Serialize)]
        struct UsageDetails {
            cached_tokens: u32,
        }
        #[derive(serde::Serialize)]
        struct CompletionDetails {
            #[serde(skip_serializing_if = "Option::is_none")]
            reasoning_tokens: Option<u32>,
            #[serde(skip_serializing_if = "Option::is_none")]
            accepted_prediction_tokens: Option<u32>,
            #[serde(skip_serializing_if = "Option::is_none")]
            rejected_prediction_tokens: Option<u32>,
        }
        let mut usage = serializer.serialize_struct("Usage", 5)?;
        usage.serialize_field("prompt_tokens", &self.prompt_tokens)?;
        usage.serialize_field("completion_tokens", &self.completion_tokens)?;
        let total = u64::from(self.prompt_tokens) + u64::from(self.completion_tokens);
        usage.serialize_field("total_tokens", &total)?;
        if let Some(cached_tokens) = self.cached_tokens {
            usage.serialize_field("prompt_tokens_details", &UsageDetails { cached_tokens })?;
        }
        if self.reasoning_tokens.is_some() || self.predictions.is_some() {
            let details = CompletionDetails {
                reasoning_tokens: self.reasoning_tokens,
                accepted_prediction_tokens: self.predictions.map(|tokens| tokens.accepted),
                rejected_prediction_tokens: self.predictions.map(|tokens| tokens.rejected),
            };
            usage.serialize_field("completion_tokens_details", &details)?;
        }
        usage.end()
    }
}

/// A complete choice.
#[derive(Clone, Debug, PartialEq)]
pub struct FinishedChoice {
    /// The index: prompt × n + the number of the choice.
    pub index: u32,
    /// The text; with `echo` after the prompt.
    pub text: String,
    /// Chat: what the message has beside its text.
    pub parts: MessageParts,
    /// Log-probabilities of the tokens, if requested.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// The end of the choice.
    pub finish: Finish,
    /// The tokens, if requested (`return_token_ids`).
    pub token_ids: Option<Vec<u32>>,
    /// The tokens of the prompt, if requested.
    pub prompt_token_ids: Option<Vec<u32>>,
    /// For each token of the prompt its log-probability and those of alternatives, if requested (`prompt_logprobs`). The
    /// first token has none.
    pub prompt_logprobs: Option<Vec<Vec<PromptTokenLogprob>>>,
}

/// The addition of one step to a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceDelta<'a> {
    /// The index of the choice.
    pub index: u32,
    /// New text; may be empty (half a character, a possible stop string, the end).
    pub text: &'a str,
    /// Chat: new reasoning. An empty one announces that reasoning may follow.
    pub reasoning: Option<&'a str>,
    /// Chat: additions to calls.
    pub calls: &'a [CallDelta],
    /// Chat: as [`MessageParts::called`], for the reason of its end.
    pub called: bool,
    /// Log-probabilities of the new tokens, if requested.
    pub logprobs: Option<&'a [TokenLogprob]>,
    /// Completions: number of characters before the new tokens, for `text_offset`.
    pub text_offset: usize,
    /// The end of the choice, in the last delta.
    pub finish: Option<&'a Finish>,
    /// The new tokens, if requested.
    pub token_ids: Option<&'a [u32]>,
    /// The tokens of the prompt, in the first delta, if requested.
    pub prompt_token_ids: Option<&'a [u32]>,
}

impl ReplyHead {
    /// The reply in one piece. `kv_transfer_params` is the producer's handoff.
    #[must_use]
    pub fn full(
        &self,
        choices: &[FinishedChoice],
        usage: &Usage,
        kv_transfer_params: Option<&Value>,
    ) -> Bytes {
        #[derive(serde::Serialize)]
        struct Reply<'a> {
            id: &'a str,
            object: &'static str,
            created: u64,
            model: &'a str,
            choices: Vec<Choice<'a>>,
            usage: &'a Usage,
            system_fingerprint: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            prompt_token_ids: Option<&'a [u32]>,
            #[serde(skip_serializing_if = "Option::is_none")]
            prompt_logprobs: Option<PromptLogprobs<'a>>,
            #[serde(skip_serializing_if = "Option::is_none")]
            kv_transfer_params: Option<&'a Value>,
        }
        // A chat has one prompt, whose values stand beside the choices.
        let (object, of_prompt) = match self.endpoint {
            Endpoint::Completions => ("text_completion", None),
            Endpoint::Chat => ("chat.completion", choices.first()),
        };
        let reply = Reply {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices: choices.iter().map(|choice| Choice::finished(self.endpoint, choice)).collect(),
            usage,
            system_fingerprint: self.system_fingerprint.as_deref(),
            prompt_token_ids: of_prompt.and_then(|choice| choice.prompt_token_ids.as_deref()),
            prompt_logprobs: of_prompt
                .and_then(|choice| choice.prompt_logprobs.as_deref())
                .map(PromptLogprobs),
            kv_transfer_params,
        };
        Bytes::from(json(&reply))
    }

    /// The reply as a stream of SSE frames.
    #[must_use]
    pub fn chunks(&self) -> ChunkEncoder {
        ChunkEncoder::new(self)
    }
}

/// Serializes a type of this crate. This cannot fail: string keys, finite numbers, no I/O.
fn json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("types of this crate serialize")
}
