//! Requests to generate, checked field by field.
//!
//! `/v1/completions` and `/v1/chat/completions` have the same type and differ in [`Input`]. Fields with a default in
//! the model's `generation_config.json` stay `Option`s, which the engine resolves. Unknown fields are ignored. Fields
//! that would change the response, but that the engine does not implement, are refused by name (`unsupported.rs`).

mod chat;
mod completion;
mod embedding;
mod forced;
mod prompt_options;
mod restrictions;
mod sampling;
mod schema_work;
mod structured;
mod timeouts;
mod tokens;
mod unsupported;

pub use chat::{ChatInput, ToolChoice};
pub(crate) use chat::{ROLES, TOOL_CALLS_MAX};
pub use completion::Prompt;
pub use embedding::{EmbeddingFormat, EmbeddingRequest, of_input};
pub use prompt_options::{PromptOptions, Truncation, TruncationSide};
pub use restrictions::TokenRestrictions;
pub use sampling::SamplingOptions;
pub(crate) use structured::CONSTRAINT_JSON_BYTES_MAX;
pub use structured::{JsonWhitespace, OutputConstraint, StructuredOutput, is_constraint};
pub use timeouts::{FIRST_TOKEN_TIMEOUT, REQUEST_TIMEOUT, TIMEOUT_MAX_MS, TimeLeft};
pub use tokens::{DetokenizeRequest, TokenizeRequest};

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::field::{Fields, must_be, token};
use crate::limits::{
    ParseLimits, STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, STOP_TOKENS_MAX, Scope, TOKENS_MAX,
};

/// The dialect of request and reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/chat/completions`.
    Chat,
}

impl Endpoint {
    /// The endpoint of a path that generates.
    #[must_use]
    pub fn at(path: &str) -> Option<Self> {
        match path {
            "/v1/completions" => Some(Self::Completions),
            "/v1/chat/completions" => Some(Self::Chat),
            _ => None,
        }
    }

    /// The path of the endpoint.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }

    /// The prefix of the reply's `id`.
    #[must_use]
    pub const fn id_prefix(self) -> &'static str {
        match self {
            Self::Completions => "cmpl-",
            Self::Chat => "chatcmpl-",
        }
    }
}

/// A request to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// The endpoint of the request.
    pub endpoint: Endpoint,
    /// The requested model; `None` for the default one.
    pub model: Option<String>,
    /// The input to continue.
    pub input: Input,
    /// Completions of each prompt, 1..=[`N_MAX`](crate::limits::N_MAX); for any engine, up to 16,384 (vLLM's bound).
    pub n: u32,
    /// Maximum number of tokens to generate. `None`: [`crate::limits::COMPLETIONS_MAX_TOKENS_DEFAULT`] for completions,
    /// the rest of the context for chat. 0 only with `echo`.
    pub max_tokens: Option<u32>,
    /// Number of tokens before which neither EOS nor a stop token or string ends the sequence.
    pub min_tokens: u32,
    /// The sampling parameters.
    pub sampling: SamplingOptions,
    /// The tokens that may be generated.
    pub restrictions: TokenRestrictions,
    /// Log-probabilities of the prompt, and its truncation.
    pub prompt: PromptOptions,
    /// The texts that are permitted; `None` for all.
    pub structured: Option<StructuredOutput>,
    /// Maximum number of tokens of a chat's reasoning; `None` for no bound of its own (vLLM's extension).
    pub thinking_token_budget: Option<u32>,
    /// Texts that end the sequence.
    pub stop: Vec<String>,
    /// Tokens that end the sequence, in addition to EOS.
    pub stop_token_ids: Vec<u32>,
    /// Whether the matched stop string stays in the text.
    pub include_stop_str_in_output: bool,
    /// Whether EOS is treated like any other token.
    pub ignore_eos: bool,
    /// Whether special tokens are left out of the text. Default true.
    pub skip_special_tokens: bool,
    /// Whether the encoding of text adds BOS and similar tokens. `None`: yes for completions, no for chat, where the
    /// template writes them.
    pub add_special_tokens: Option<bool>,
    /// Number of alternatives with log-probabilities, 0..=20; `None` for no log-probabilities. For any engine any
    /// number, and `u32::MAX` for all (vLLM's -1).
    pub logprobs: Option<u32>,
    /// Completions only: whether the reply's text contains the prompt.
    pub echo: bool,
    /// Whether the reply is a stream of server-sent events.
    pub stream: bool,
    /// Options of a stream.
    pub stream_options: StreamOptions,
    /// Whether the reply contains token ids (vLLM's extension).
    pub return_token_ids: bool,
    /// Separates prefix caches: only requests with the same salt share blocks (vLLM's extension).
    pub cache_salt: Option<String>,
    /// Lower is served first, where the engine schedules by priority (vLLM's extension). Default 0; a router leaves it
    /// to the engine.
    pub priority: i32,
    /// An opaque name for logs and quotas.
    pub user: Option<String>,
    /// The handoff, not parsed here. A router removes a client's, an engine passes it to its connector.
    pub kv_transfer_params: Option<Value>,
}

/// The fields of a request other than its input and the fields that belong to the input.
const SMALL_FIELDS: [&str; 34] = [
    "model",
    "n",
    "echo",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "add_special_tokens",
    "logprobs",
    "top_logprobs",
    "stream_options",
    "return_token_ids",
    "cache_salt",
    "user",
    "tool_choice",
    "parallel_tool_calls",
    "include_reasoning",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
];

/// Fields that only an engine reads. A router leaves their bounds to the engine.
const ENGINE_FIELDS: [&str; 7] = [
    "allowed_token_ids",
    "bad_words",
    "priority",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "truncation_side",
    "thinking_token_budget",
];

/// The input to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// One or more prompts; each gets `n` choices, in order.
    Prompts(Vec<Prompt>),
    /// A conversation, for the model's chat template.
    Chat(Box<ChatInput>),
}

impl Input {
    /// Number of prompts.
    #[must_use]
    pub fn prompts(&self) -> usize {
        match self {
            Self::Prompts(prompts) => prompts.len(),
            Self::Chat(_) => 1,
        }
    }
}

/// `stream_options`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// Whether the stream ends with a chunk with usage and no choices.
    pub include_usage: bool,
    /// Whether every chunk has usage (vLLM's extension).
    pub continuous_usage_stats: bool,
}

impl GenerateRequest {
    /// Reads a request from a parsed body.
    ///
    /// # Errors
    /// 400 with the field.
    pub fn from_map(
        endpoint: Endpoint,
        map: &Map<String, Value>,
        limits: &ParseLimits,
    ) -> Result<Self, ApiError> {
        let fields = Fields::new(map);
        unsupported::check(fields, endpoint, limits.scope)?;
        let input = match endpoint {
            Endpoint::Completions => Input::Prompts(completion::prompts(fields, limits)?),
            Endpoint::Chat => Input::Chat(Box::new(chat::read(fields, limits)?)),
        };
        let prompts = input.prompts();
        Self::from_fields(endpoint, fields, input, prompts, limits)
    }

    /// As [`Self::from_map`] without the large fields, whose shapes are already checked and which contain `prompts`
    /// prompts. An error here is an error there too, perhaps with another message.
    pub(crate) fn outline(
        endpoint: Endpoint,
        small: &[(&str, Value)],
        prompts: usize,
        limits: &ParseLimits,
    ) -> Result<Self, ApiError> {
        let fields = Fields::few(small);
        unsupported::check(fields, endpoint, limits.scope)?;
        if endpoint == Endpoint::Chat {
            chat::turn_options(fields, limits.scope)?;
        }
        Self::from_fields(endpoint, fields, Input::Prompts(Vec::new()), prompts, limits)
    }

    /// Whether [`Self::outline`] reads a field with this name.
    pub(crate) fn reads(name: &str, scope: Scope) -> bool {
        let of_this_engine = || {
            ENGINE_FIELDS.contains(&name) || unsupported::is_unsupported(name) || Self::has_constraint(name)
        };
        SMALL_FIELDS.contains(&name) || (scope == Scope::ThisEngine && of_this_engine())
    }

    /// Whether a field with this name constrains the text.
    pub(crate) fn has_constraint(name: &str) -> bool {
        is_constraint(name)
    }

    fn from_fields(
        endpoint: Endpoint,
        fields: Fields<'_>,
        input: Input,
        prompts: usize,
        limits: &ParseLimits,
    ) -> Result<Self, ApiError> {
        let choices = 1..=limits.scope.n();
        let n = match limits.scope {
            Scope::ThisEngine => fields.count("n", choices)?,
            Scope::AnyEngine => fields.count_from("n", choices)?,
        };
        let n = n.unwrap_or(1);
        within_sequences(prompts, n, limits)?;
        let echo = endpoint == Endpoint::Completions && fields.boolean("echo")?.unwrap_or(false);
        let max_tokens = max_tokens(fields, echo)?;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        Ok(Self {
            endpoint,
            model: non_empty_string(fields, "model")?,
            n,
            max_tokens,
            min_tokens: min_tokens(fields, max_tokens)?,
            sampling: SamplingOptions::read(fields, limits)?,
            restrictions: TokenRestrictions::read(fields, limits)?,
            prompt: PromptOptions::read(fields, stream, limits.scope)?,
            structured: forced::constraint(&input, structured::read(fields, limits.scope)?, limits.scope)?,
            thinking_token_budget: thinking_token_budget(fields, endpoint, limits.scope)?,
            stop: stop(fields, limits.scope)?,
            stop_token_ids: stop_token_ids(fields, limits)?,
            include_stop_str_in_output: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            skip_special_tokens: fields.boolean("skip_special_tokens")?.unwrap_or(true),
            add_special_tokens: fields.boolean("add_special_tokens")?,
            logprobs: logprobs(fields, endpoint, limits.scope)?,
            echo,
            stream,
            stream_options: stream_options(fields, stream)?,
            return_token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
            cache_salt: non_empty_string(fields, "cache_salt")?,
            priority: priority(fields, limits.scope)?,
            user: fields.string("user")?.map(str::to_owned),
            kv_transfer_params: kv_transfer_params(fields)?,
            input,
        })
    }

    /// Number of alternatives with the log-probabilities of the prompt's tokens, for `prompt_logprobs` and for `echo`
    /// with `logprobs`; `None` for none.
    #[must_use]
    pub fn prompt_logprobs(&self) -> Option<u32> {
        self.prompt.logprobs.max(self.logprobs.filter(|_| self.echo))
    }

    /// Sequences of the request: prompts × n.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.input.prompts() * self.n as usize
    }
}

fn priority(fields: Fields<'_>, scope: Scope) -> Result<i32, ApiError> {
    if scope == Scope::AnyEngine {
        return Ok(0);
    }
    let number = fields.integer("priority", i32::MIN.into()..=i32::MAX.into())?;
    Ok(number.map_or(0, |number| i32::try_from(number).expect("within a range of i32")))
}

fn non_empty_string(fields: Fields<'_>, name: &str) -> Result<Option<String>, ApiError> {
    match fields.string(name)? {
        Some("") => Err(ApiError::invalid(name, format!("`{name}` must not be an empty string"))),
        text => Ok(text.map(str::to_owned)),
    }
}

fn within_sequences(prompts: usize, n: u32, limits: &ParseLimits) -> Result<(), ApiError> {
    let most = limits.sequences;
    if prompts.saturating_mul(n as usize) > most {
        let message =
            format!("{prompts} prompts times `n` {n} is over the limit of {most} sequences per request");
        return Err(ApiError::invalid("n", message));
    }
    Ok(())
}

/// `max_completion_tokens` is the newer name and has precedence, as in vLLM.
fn max_tokens(fields: Fields<'_>, echo: bool) -> Result<Option<u32>, ApiError> {
    let least = if echo { 0 } else { 1 };
    let older = fields.count_from("max_tokens", least..=TOKENS_MAX)?;
    Ok(fields.count_from("max_completion_tokens", least..=TOKENS_MAX)?.or(older))
}

fn min_tokens(fields: Fields<'_>, max_tokens: Option<u32>) -> Result<u32, ApiError> {
    let min = fields.count_from("min_tokens", 0..=TOKENS_MAX)?.unwrap_or(0);
    match max_tokens {
        Some(max) if min > max => {
            let message = format!("`min_tokens` {min} is more than `max_tokens` {max}");
            Err(ApiError::invalid("min_tokens", message))
        }
        _ => Ok(min),
    }
}

/// As in vLLM, -1 is no bound. Only an engine reads the field, and only of a chat.
fn thinking_token_budget(
    fields: Fields<'_>,
    endpoint: Endpoint,
    scope: Scope,
) -> Result<Option<u32>, ApiError> {
    if endpoint != Endpoint::Chat || scope == Scope::AnyEngine {
        return Ok(None);
    }
    let budget = fields.integer("thinking_token_budget", -1..=TOKENS_MAX.into())?;
    Ok(budget.and_then(|tokens| u32::try_from(tokens).ok()))
}

fn stop(fields: Fields<'_>, scope: Scope) -> Result<Vec<String>, ApiError> {
    let values = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(one @ Value::String(_)) => std::slice::from_ref(one),
        Some(Value::Array(_)) => fields.array("stop", scope.most(STOP_STRINGS_MAX))?.unwrap_or_default(),
        Some(other) => return Err(must_be("stop", "a string or an array of strings", other)),
    };
    let most = scope.most(STOP_STRING_BYTES_MAX);
    let expected = || match scope {
        Scope::ThisEngine => format!("a string of 1 to {most} bytes"),
        Scope::AnyEngine => "a string that is not empty".to_owned(),
    };
    let read = |(index, value): (usize, &Value)| {
        let fits = |text: &&str| (1..=most).contains(&text.len());
        let text = value.as_str().filter(fits).map(str::to_owned);
        text.ok_or_else(|| must_be(&format!("stop[{index}]"), &expected(), value))
    };
    values.iter().enumerate().map(read).collect()
}

fn stop_token_ids(fields: Fields<'_>, limits: &ParseLimits) -> Result<Vec<u32>, ApiError> {
    let values = fields.array("stop_token_ids", limits.scope.most(STOP_TOKENS_MAX))?.unwrap_or_default();
    let read = |(index, value)| token(value, limits.vocab, &format!("stop_token_ids[{index}]"));
    values.iter().enumerate().map(read).collect()
}

fn logprobs(fields: Fields<'_>, endpoint: Endpoint, scope: Scope) -> Result<Option<u32>, ApiError> {
    let number = |name| {
        let range = scope.logprobs();
        let number = match scope {
            Scope::ThisEngine => fields.integer(name, range)?,
            Scope::AnyEngine => fields.integer_from(name, range)?,
        };
        Ok(number.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
    };
    if endpoint == Endpoint::Completions {
        // A boolean is the form of the chat endpoint.
        if let Some(Value::Bool(enabled)) = fields.get("logprobs") {
            let message = format!(
                "`logprobs` must be a number of alternatives here, got {enabled}; true or false is of /v1/chat/completions"
            );
            return Err(ApiError::invalid("logprobs", message));
        }
        return number("logprobs");
    }
    let enabled = fields.boolean("logprobs")?.unwrap_or(false);
    match number("top_logprobs")? {
        Some(top) if top > 0 && !enabled => Err(ApiError::invalid(
            "top_logprobs",
            format!("`top_logprobs` {top} needs `logprobs` to be true"),
        )),
        top => Ok(enabled.then(|| top.unwrap_or(0))),
    }
}

fn stream_options(fields: Fields<'_>, stream: bool) -> Result<StreamOptions, ApiError> {
    let Some(options) = fields.object("stream_options")? else { return Ok(StreamOptions::default()) };
    if !stream {
        return Err(ApiError::invalid(
            "stream_options",
            "`stream_options` is only allowed when `stream` is true",
        ));
    }
    let options = Fields::under(options, "stream_options");
    Ok(StreamOptions {
        include_usage: options.boolean("include_usage")?.unwrap_or(false),
        continuous_usage_stats: options.boolean("continuous_usage_stats")?.unwrap_or(false),
    })
}

fn kv_transfer_params(fields: Fields<'_>) -> Result<Option<Value>, ApiError> {
    Ok(fields.object("kv_transfer_params")?.map(|object| Value::Object(object.clone())))
}
