//! What is asked: a request's path, headers and body, in either dialect.

use std::borrow::Cow;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::target::{TargetError, check_header};

/// One request, ready to be sent.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    /// Begins with a slash; the target's prefix comes before it.
    pub(crate) path: Cow<'static, str>,
    /// JSON; `None` is a GET.
    pub(crate) body: Option<Bytes>,
    /// Besides the target's.
    headers: Vec<(String, String)>,
}

impl Ask {
    pub(crate) fn new(path: impl Into<Cow<'static, str>>, body: impl Into<Bytes>) -> Self {
        Self { path: path.into(), body: Some(body.into()), headers: Vec::new() }
    }

    /// Asks for what is there.
    pub(crate) fn get(path: impl Into<Cow<'static, str>>) -> Self {
        Self { path: path.into(), body: None, headers: Vec::new() }
    }

    /// With one more header.
    ///
    /// # Errors
    /// When it could not stand in a head.
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

/// What a model is to go on with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// Text.
    Text(String),
    /// Token ids, for an exact length; completions only.
    Ids(Vec<u32>),
}

/// How the answer comes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Streaming {
    /// In one piece.
    Whole,
    /// Event by event; the last says what was counted.
    #[default]
    Streamed,
    /// Event by event; every one says what was counted so far (vLLM's `continuous_usage_stats`).
    Counted,
}

/// A request in words of the benchmark; [`Self::ask`] writes it in the words of the endpoint.
#[derive(Clone, Debug)]
pub(crate) struct Wish<'a> {
    pub(crate) endpoint: Endpoint,
    pub(crate) model: &'a str,
    pub(crate) prompt: &'a Prompt,
    pub(crate) max_tokens: u32,
    /// vLLM's; left out when `None`.
    pub(crate) min_tokens: Option<u32>,
    /// vLLM's; left out when `false`.
    pub(crate) ignore_eos: bool,
    pub(crate) streaming: Streaming,
    /// OpenAI's `user`: the tag by which engines' events are found again.
    pub(crate) user: Option<&'a str>,
    /// Put over everything else, field by field.
    pub(crate) extra: Option<&'a Map<String, Value>>,
}

impl<'a> Wish<'a> {
    /// A stream of at most `max_tokens` tokens.
    pub(crate) fn new(endpoint: Endpoint, model: &'a str, prompt: &'a Prompt, max_tokens: u32) -> Self {
        Self {
            endpoint,
            model,
            prompt,
            max_tokens,
            min_tokens: None,
            ignore_eos: false,
            streaming: Streaming::Streamed,
            user: None,
            extra: None,
        }
    }

    pub(crate) fn ask(&self) -> Ask {
        let mut body = Map::new();
        body.insert("model".into(), self.model.into());
        match (self.endpoint, self.prompt) {
            (Endpoint::Completions, Prompt::Text(text)) => body.insert("prompt".into(), text.as_str().into()),
            (Endpoint::Completions, Prompt::Ids(ids)) => body.insert("prompt".into(), ids.as_slice().into()),
            (Endpoint::Chat, Prompt::Text(text)) => {
                body.insert("messages".into(), json!([{"role": "user", "content": text}]))
            }
            // Only completions take ids; options are checked before a run.
            (Endpoint::Chat, Prompt::Ids(ids)) => {
                let text: Vec<_> = ids.iter().map(u32::to_string).collect();
                body.insert("messages".into(), json!([{"role": "user", "content": text.join(" ")}]))
            }
        };
        body.insert("max_tokens".into(), self.max_tokens.into());
        if let Some(min_tokens) = self.min_tokens {
            body.insert("min_tokens".into(), min_tokens.into());
        }
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
        Ask::new(self.endpoint.path(), Value::Object(body).to_string())
    }
}
