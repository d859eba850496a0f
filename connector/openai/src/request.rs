//! What a client asks an engine to generate, checked field by field.
//!
//! One type serves `/v1/completions` and `/v1/chat/completions`; they differ in [`Input`]. Fields that have a
//! default in the model's `generation_config.json` stay `Option`s: the engine resolves them. Fields that nobody
//! here knows are ignored; fields that would change the answer and that no engine here implements are refused
//! by name (`refused.rs`).

mod chat;
mod completion;
mod refused;
mod sampling;
mod tokens;

pub use chat::{ChatInput, ToolChoice};
pub(crate) use chat::{ROLES, TOOL_CALLS_MAX};
pub use completion::Prompt;
pub use sampling::SamplingOptions;
pub use tokens::{DetokenizeRequest, TokenizeRequest};

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::field::{Fields, must_be, token};
use crate::limits::{
    ParseLimits, STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, STOP_TOKENS_MAX, Scope, TOKENS_MAX,
};

/// Which dialect of request and reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/chat/completions`.
    Chat,
}

impl Endpoint {
    /// The endpoint at a path, if it is one that generates.
    #[must_use]
    pub fn at(path: &str) -> Option<Self> {
        match path {
            "/v1/completions" => Some(Self::Completions),
            "/v1/chat/completions" => Some(Self::Chat),
            _ => None,
        }
    }

    /// Its path.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }

    /// What the reply's `id` starts with.
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
    /// Where it was sent.
    pub endpoint: Endpoint,
    /// The model it names; `None` means the default one.
    pub model: Option<String>,
    /// What to continue.
    pub input: Input,
    /// Completions of each prompt, 1..=[`N_MAX`](crate::limits::N_MAX); for any engine, up to 16,384 (vLLM's own bound).
    pub n: u32,
    /// Tokens to generate at most; `None`: see [`crate::limits::COMPLETIONS_MAX_TOKENS_DEFAULT`] for completions,
    /// the rest of the context for chat. 0 only with `echo`.
    pub max_tokens: Option<u32>,
    /// Tokens before which neither EOS nor a stop token or string ends the sequence.
    pub min_tokens: u32,
    /// How to choose tokens.
    pub sampling: SamplingOptions,
    /// Texts that end the sequence.
    pub stop: Vec<String>,
    /// Tokens that end the sequence, beside EOS.
    pub stop_token_ids: Vec<u32>,
    /// Whether the stop string that was found stays in the text.
    pub include_stop_str_in_output: bool,
    /// EOS is a token like any other.
    pub ignore_eos: bool,
    /// Special tokens are left out of the text. Default true.
    pub skip_special_tokens: bool,
    /// Whether encoding text adds BOS and the like; `None`: yes for completions, no for chat (the template
    /// writes them).
    pub add_special_tokens: Option<bool>,
    /// Log-probabilities of the chosen tokens and of this many alternatives, 0..=20; `None`: none. For any engine any
    /// number, and `u32::MAX` for all of them (vLLM's -1).
    pub logprobs: Option<u32>,
    /// Completions only: the prompt is part of the reply's text.
    pub echo: bool,
    /// Server-sent events.
    pub stream: bool,
    /// Of a stream.
    pub stream_options: StreamOptions,
    /// Token ids go into the reply (vLLM's extension).
    pub return_token_ids: bool,
    /// Separates prefix caches: only requests with the same salt share blocks (vLLM's extension).
    pub cache_salt: Option<String>,
    /// Opaque; for logs and quotas.
    pub user: Option<String>,
    /// The handoff, unread: a router removes a client's, an engine hands it to its connector.
    pub kv_transfer_params: Option<Value>,
}

/// What is read of a request besides what it continues and what goes with that.
const SMALL_FIELDS: [&str; 31] = [
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
    "add_generation_prompt",
    "continue_final_message",
];

/// What to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// One or more prompts; each is answered by `n` choices, in order.
    Prompts(Vec<Prompt>),
    /// A conversation, for the model's chat template.
    Chat(Box<ChatInput>),
}

impl Input {
    /// Prompts in it.
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
    /// A last chunk with usage and no choices.
    pub include_usage: bool,
    /// Usage in every chunk (vLLM's extension).
    pub continuous_usage_stats: bool,
}

impl GenerateRequest {
    /// Reads a request from a parsed body, which stays as it is.
    ///
    /// # Errors
    /// 400 that names the field.
    pub fn from_map(
        endpoint: Endpoint,
        map: &Map<String, Value>,
        limits: &ParseLimits,
    ) -> Result<Self, ApiError> {
        let fields = Fields::new(map);
        refused::check(fields, endpoint, limits.scope)?;
        let input = match endpoint {
            Endpoint::Completions => Input::Prompts(completion::prompts(fields, limits)?),
            Endpoint::Chat => Input::Chat(Box::new(chat::read(fields, limits)?)),
        };
        let prompts = input.prompts();
        Self::around(endpoint, fields, input, prompts, limits)
    }

    /// As [`Self::from_map`] without the large fields, whose shapes are right and which hold so many prompts. What goes
    /// wrong here goes wrong there too, though perhaps in other words.
    pub(crate) fn outline(
        endpoint: Endpoint,
        small: &[(&str, Value)],
        prompts: usize,
        limits: &ParseLimits,
    ) -> Result<Self, ApiError> {
        let fields = Fields::few(small);
        refused::check(fields, endpoint, limits.scope)?;
        if endpoint == Endpoint::Chat {
            chat::manner(fields, limits.scope)?;
        }
        Self::around(endpoint, fields, Input::Prompts(Vec::new()), prompts, limits)
    }

    /// Whether [`Self::outline`] reads a field of that name.
    pub(crate) fn reads(name: &str, scope: Scope) -> bool {
        SMALL_FIELDS.contains(&name) || (scope == Scope::ThisEngine && refused::knows(name))
    }

    fn around(
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
            model: model(fields)?,
            n,
            max_tokens,
            min_tokens: min_tokens(fields, max_tokens)?,
            sampling: SamplingOptions::read(fields, limits)?,
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
            user: fields.string("user")?.map(str::to_owned),
            kv_transfer_params: kv_transfer_params(fields)?,
            input,
        })
    }

    /// Sequences that it starts: prompts × n.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.input.prompts() * self.n as usize
    }
}

fn model(fields: Fields<'_>) -> Result<Option<String>, ApiError> {
    non_empty_string(fields, "model")
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

/// `max_completion_tokens` is the newer name and wins, as in vLLM.
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
        // As the other endpoint has it.
        if let Some(Value::Bool(wanted)) = fields.get("logprobs") {
            let message = format!(
                "`logprobs` must be a number of alternatives here, got {wanted}; true or false is of /v1/chat/completions"
            );
            return Err(ApiError::invalid("logprobs", message));
        }
        return number("logprobs");
    }
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    match number("top_logprobs")? {
        Some(top) if top > 0 && !wanted => Err(ApiError::invalid(
            "top_logprobs",
            format!("`top_logprobs` {top} needs `logprobs` to be true"),
        )),
        top => Ok(wanted.then(|| top.unwrap_or(0))),
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
