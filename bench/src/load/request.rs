//! A request's path, headers and body, in either dialect.

use std::borrow::Cow;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::target::{TargetError, check_header};

/// One request, ready to be sent.
#[derive(Clone, Debug)]
pub(crate) struct PreparedRequest {
    /// Begins with a slash. The target's prefix is added before it.
    pub(crate) path: Cow<'static, str>,
    /// JSON. `None` makes a GET.
    pub(crate) body: Option<Bytes>,
    /// In addition to the target's headers.
    headers: Vec<(String, String)>,
}

impl PreparedRequest {
    pub(crate) fn new(path: impl Into<Cow<'static, str>>, body: impl Into<Bytes>) -> Self {
        Self { path: path.into(), body: Some(body.into()), headers: Vec::new() }
    }

    /// A GET request.
    pub(crate) fn get(path: impl Into<Cow<'static, str>>) -> Self {
        Self { path: path.into(), body: None, headers: Vec::new() }
    }

    /// Adds a header.
    ///
    /// # Errors
    /// If the header is invalid.
    pub(crate) fn with_header(mut self, name: &str, value: &str) -> Result<Self, TargetError> {
        check_header(name, value)?;
        self.headers.push((name.to_owned(), value.to_owned()));
        Ok(self)
    }

    pub(super) fn headers(&self) -> &[(String, String)] {
        &self.headers
    }
}

/// The dialect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Endpoint {
    /// /v1/completions
    #[default]
    #[value(alias = "/v1/completions")]
    Completions,
    /// /v1/chat/completions
    #[value(alias = "/v1/chat/completions")]
    Chat,
}

impl Endpoint {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// The input of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// Text.
    Text(String),
    /// Token ids, for an exact length; completions only.
    Ids(Vec<u32>),
}

/// How the response is delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Streaming {
    /// In one piece.
    Whole,
    /// Event by event. The last event contains the usage.
    #[default]
    Streamed,
    /// Event by event. Each event contains the usage so far (vLLM's `continuous_usage_stats`).
    Counted,
}

/// A completion request. [`Self::prepare`] writes it in the endpoint's dialect.
#[derive(Clone, Debug)]
pub(crate) struct CompletionSpec<'a> {
    pub(crate) endpoint: Endpoint,
    pub(crate) model: &'a str,
    pub(crate) prompt: &'a Prompt,
    pub(crate) max_tokens: u32,
    /// vLLM's. Omitted if `false`.
    pub(crate) ignore_eos: bool,
    pub(crate) streaming: Streaming,
    /// OpenAI's `user`: the tag by which engine events are found.
    pub(crate) user: Option<&'a str>,
    /// Fields that replace those of the request.
    pub(crate) extra: Option<&'a Map<String, Value>>,
}

impl<'a> CompletionSpec<'a> {
    /// A stream of at most `max_tokens` tokens.
    pub(crate) fn new(endpoint: Endpoint, model: &'a str, prompt: &'a Prompt, max_tokens: u32) -> Self {
        Self {
            endpoint,
            model,
            prompt,
            max_tokens,
            ignore_eos: false,
            streaming: Streaming::Streamed,
            user: None,
            extra: None,
        }
    }

    pub(crate) fn prepare(&self) -> PreparedRequest {
        let mut body = Map::new();
        body.insert("model".into(), self.model.into());
        match (self.endpoint, self.prompt) {
            (Endpoint::Completions, Prompt::Text(text)) => body.insert("prompt".into(), text.as_str().into()),
            (Endpoint::Completions, Prompt::Ids(ids)) => body.insert("prompt".into(), ids.as_slice().into()),
            (Endpoint::Chat, Prompt::Text(text)) => {
                body.insert("messages".into(), json!([{"role": "user", "content": text}]))
            }
            // Only completions accept ids. Options are checked before a run.
            (Endpoint::Chat, Prompt::Ids(ids)) => {
                let text: Vec<_> = ids.iter().map(u32::to_string).collect();
                body.insert("messages".into(), json!([{"role": "user", "content": text.join(" ")}]))
            }
        };
        body.insert("max_tokens".into(), self.max_tokens.into());
        if self.ignore_eos {
            body.insert("ignore_eos".into(), true.into());
        }
        if self.streaming != Streaming::Whole {
            body.insert("stream".into(), true.into());
            let mut options = json!({"include_usage": true});
            if self.streaming == Streaming::Counted {
                options["continuous_usage_stats"] = true.into();
            }
            body.insert("stream_options".into(), options);
        }
        if let Some(user) = self.user {
            body.insert("user".into(), user.into());
        }
        for (name, value) in self.extra.into_iter().flatten() {
            body.insert(name.clone(), value.clone());
        }
        PreparedRequest::new(self.endpoint.path(), Value::Object(body).to_string())
    }
}
