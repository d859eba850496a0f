//! A streamed answer whose decode engine died in the middle, continued by another. Pure: what is kept of a stream,
//! when it can be continued, what the next engine is asked, and how its frames become those of the first answer.
//!
//! ```text
//! D's frames ─▶ read (token ids taken out) ─▶ client
//!                 │ prompt's tokens, tokens whose text was sent, head of the first frame
//!                 ▼ D dies
//! another D ◀── /v1/completions with prompt = both token lists, `max_tokens` less those that were sent
//!     └─ frames ─▶ read and rewritten (id, created, model, shape, usage) ─▶ client
//! ```
//!
//! Token ids (`return_token_ids`, of vLLM and of Baton) make it exact: text that is tokenized again may become other
//! tokens, and then another answer. Chat is continued through the completions endpoint too, whatever the model's
//! template does with an unfinished message.
//!
//! Invariants:
//! - A token's text is sent at most once: the next engine begins after the last token whose text went out, and a
//!   token whose text was still held back is computed again.
//! - `finish_reason` and `[DONE]` are passed on once; `id`, `created` and `model` are those of the first frame.

mod allowed;

use baton_openai::{Endpoint, RawBody};
use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value, json};

use crate::exchange::ask::Ask;
use crate::message::path::Dialect;
use crate::message::sse;
use crate::message::usage::Usage;
use allowed::is_allowed;

/// Tokens of a prompt and an answer that are kept of one stream.
const TOKENS_MAX: usize = 1 << 20;
/// What completions generate at most where the client does not say; OpenAI's and vLLM's default.
const COMPLETION_TOKENS: u64 = 16;

/// What is kept of one stream.
#[derive(Debug)]
pub(crate) struct Transcript {
    endpoint: Endpoint,
    model: String,
    /// The sampling part of the client's body.
    sampling: Map<String, Value>,
    max_tokens: Option<u64>,
    min_tokens: u64,
    stream_options: Option<Value>,
    /// `id`, `created` and `model` of the first frame.
    head: Option<Head>,
    prompt: Option<Vec<u32>>,
    /// Tokens whose text was passed on.
    sent: Vec<u32>,
    /// Tokens since then, whose text the engine still holds back.
    held_back: Vec<u32>,
    /// Tokens of the answer that earlier engines computed.
    before: usize,
    /// Another engine has gone on after something was sent.
    continued: bool,
    finish: bool,
    /// The router asks for usage, and the client does not.
    usage_is_ours: bool,
    usage_sent: bool,
    /// Something was sent that cannot be continued.
    spoilt: bool,
}

#[derive(Clone, Debug)]
struct Head {
    id: Value,
    created: Value,
    model: Value,
}

/// What to do about a stream that broke off.
#[derive(Debug, PartialEq)]
pub(crate) enum Plan {
    /// Nothing was sent yet: the request as it is, at another engine.
    Again,
    /// Ask another engine for the rest, with this body for `/v1/completions`; `max_tokens` is missing where the
    /// client set none and the rest of the context is meant.
    Continue(Map<String, Value>),
    /// Everything but the end was sent: these are the last frames.
    Finish(Bytes),
    /// It cannot be continued.
    Impossible,
}

/// Fields besides the prompt of a request that may be resumed: they are parsed, which takes up to 200 times as much.
const FIELDS_BYTES_MAX: usize = 256 << 10;

impl Transcript {
    /// What is kept of a request's stream, where its model's streams may be resumed and it allows that: its engine is
    /// then asked for token ids.
    pub(crate) fn of(ask: &mut Ask) -> Option<Self> {
        let Dialect::OpenAi(endpoint) = ask.dialect else { return None };
        if !ask.model.resume || ask.aggregate {
            return None;
        }
        let mut begun = Self::begin(endpoint, &ask.model.name, &ask.body)?;
        begun.usage_is_ours = ask.owned.asks_for_usage();
        ask.owned.token_ids = true;
        Some(begun)
    }

    /// `None` for a body that does not allow it.
    fn begin(endpoint: Endpoint, model: &str, body: &RawBody) -> Option<Self> {
        let small = || body.names().filter(|name| !matches!(*name, "prompt" | "messages"));
        let bytes = |name: &str| body.field(name).map_or(0, <[u8]>::len);
        if small().map(bytes).sum::<usize>() > FIELDS_BYTES_MAX {
            return None;
        }
        let field = |name: &str| Some((name.to_owned(), serde_json::from_slice(body.field(name)?).ok()?));
        let fields: Map<String, Value> = small().map(field).collect::<Option<_>>()?;
        is_allowed(&fields).then(|| Self::new(endpoint, model, &fields))
    }

    /// Begins with the client's body, which [`is_allowed`] has let through.
    fn new(endpoint: Endpoint, model: &str, body: &Map<String, Value>) -> Self {
        let number = |name: &str| body.get(name).and_then(Value::as_u64);
        let default = if endpoint == Endpoint::Completions { Some(COMPLETION_TOKENS) } else { None };
        Self {
            endpoint,
            model: model.to_owned(),
            sampling: allowed::sampling(body),
            max_tokens: number("max_completion_tokens").or_else(|| number("max_tokens")).or(default),
            min_tokens: number("min_tokens").unwrap_or(0),
            stream_options: body.get("stream_options").filter(|options| !options.is_null()).cloned(),
            head: None,
            prompt: None,
            sent: Vec::new(),
            held_back: Vec::new(),
            before: 0,
            continued: false,
            finish: false,
            usage_is_ours: false,
            usage_sent: false,
            spoilt: false,
        }
    }

    /// Takes whole frames of the engine's and gives what the client is sent.
    pub(crate) fn pass(&mut self, chunk: &Bytes) -> Bytes {
        let mut out = BytesMut::with_capacity(chunk.len());
        let mut passed = 0;
        for frame in sse::frames(chunk) {
            let (bytes, data) = (&chunk[frame.start..frame.end], frame.data(chunk));
            passed = frame.end;
            match serde_json::from_slice::<Map<String, Value>>(&data).ok() {
                Some(mut data) => {
                    self.read(&mut data);
                    let is_kept = |line: &&[u8]| !line.is_empty() && sse::value(line, b"data").is_none();
                    for line in sse::lines(bytes).filter(is_kept) {
                        out.extend_from_slice(line);
                        out.extend_from_slice(b"\n");
                    }
                    out.extend_from_slice(b"data: ");
                    out.extend_from_slice(Value::Object(data).to_string().as_bytes());
                    out.extend_from_slice(b"\n\n");
                }
                None => {
                    self.spoilt |= frame.has_data() && data.trim_ascii() != b"[DONE]";
                    out.extend_from_slice(bytes);
                }
            }
        }
        // A piece of a frame that is too long to be held.
        self.spoilt |= passed < chunk.len();
        out.extend_from_slice(&chunk[passed..]);
        out.freeze()
    }

    fn read(&mut self, frame: &mut Map<String, Value>) {
        if frame.contains_key("error") {
            self.spoilt = true;
            return;
        }
        let prompt = frame.remove("prompt_token_ids");
        self.note_prompt(prompt);
        if let Some(Value::Array(choices)) = frame.get_mut("choices") {
            self.spoilt |= choices.len() > 1;
            if let Some(Value::Object(choice)) = choices.first_mut() {
                self.read_choice(choice);
            }
        }
        match &self.head {
            None => {
                let field = |name: &str| frame.get(name).cloned().unwrap_or(Value::Null);
                self.head = Some(Head { id: field("id"), created: field("created"), model: field("model") });
            }
            Some(head) if self.continued => {
                frame.insert("id".to_owned(), head.id.clone());
                frame.insert("created".to_owned(), head.created.clone());
                frame.insert("model".to_owned(), head.model.clone());
                if self.endpoint == Endpoint::Chat {
                    frame.insert("object".to_owned(), json!("chat.completion.chunk"));
                }
            }
            Some(_) => {}
        }
        if let Some(usage @ Value::Object(_)) = frame.get_mut("usage") {
            self.usage_sent |= self.finish;
            self.whole_usage(usage);
        }
    }

    fn note_prompt(&mut self, ids: Option<Value>) {
        // That of a continuation contains tokens of the answer.
        if self.prompt.is_none() && !self.continued {
            self.prompt = ids.as_ref().and_then(tokens);
        }
    }

    fn read_choice(&mut self, choice: &mut Map<String, Value>) {
        let prompt = choice.remove("prompt_token_ids");
        self.note_prompt(prompt);
        let ids = choice.remove("token_ids");
        if self.endpoint == Endpoint::Chat
            && let Some(text) = choice.remove("text")
        {
            choice.insert("delta".to_owned(), json!({"content": text}));
        }
        let text = match choice.get("delta") {
            Some(Value::Object(delta)) => {
                let known = |(name, value): (&String, &Value)| {
                    value.is_null() || matches!(name.as_str(), "role" | "content")
                };
                self.spoilt |= !delta.iter().all(known);
                delta.get("content").and_then(Value::as_str).unwrap_or_default()
            }
            _ => choice.get("text").and_then(Value::as_str).unwrap_or_default(),
        };
        self.finish |= choice.get("finish_reason").is_some_and(|reason| !reason.is_null());
        match ids.as_ref().map(tokens) {
            Some(Some(ids)) => self.held_back.extend(ids),
            // Text without its tokens: nobody knows where to go on.
            None => self.spoilt |= !text.is_empty(),
            Some(None) => self.spoilt = true,
        }
        if !text.is_empty() {
            self.sent.append(&mut self.held_back);
        }
        self.spoilt |= self.sent.len() + self.held_back.len() > TOKENS_MAX;
    }

    /// What the client is told of a whole answer.
    fn whole_usage(&self, usage: &mut Value) {
        let (Some(prompt), 1..) = (&self.prompt, self.before) else { return };
        let completion = usage["completion_tokens"].as_u64().unwrap_or(0) + self.before as u64;
        usage["prompt_tokens"] = json!(prompt.len());
        usage["completion_tokens"] = json!(completion);
        usage["total_tokens"] = json!(prompt.len() as u64 + completion);
    }

    /// Tokens of the whole answer, of which this is what the engine counts that goes on with it.
    pub(crate) fn whole(&self, usage: Usage) -> Usage {
        let (Some(prompt), 1..) = (&self.prompt, self.before) else { return usage };
        let (prompt, before) = (prompt.len() as u64, self.before as u64);
        let completion = usage.completion.saturating_add(before);
        Usage { prompt, cached: usage.cached.min(prompt), completion }
    }

    /// Tokens of an answer that has all but its end.
    pub(crate) fn counted(&self) -> Option<Usage> {
        let completion = (self.sent.len() + self.held_back.len()) as u64;
        self.prompt.as_ref().map(|prompt| Usage { prompt: prompt.len() as u64, cached: 0, completion })
    }

    /// The engine is gone: what now?
    pub(crate) fn broke(&mut self) -> Plan {
        if self.spoilt {
            return Plan::Impossible;
        }
        if self.head.is_none() {
            return Plan::Again;
        }
        let Some(prompt) = &self.prompt else { return Plan::Impossible };
        if self.finish {
            return Plan::Finish(self.last_frames());
        }
        self.held_back.clear();
        let sent = self.sent.len() as u64;
        if self.max_tokens.is_some_and(|most| most <= sent) {
            // The one frame that said so is missing.
            return Plan::Impossible;
        }
        let mut body = self.sampling.clone();
        body.insert("model".to_owned(), json!(self.model));
        body.insert("prompt".to_owned(), json!(prompt.iter().chain(&self.sent).collect::<Vec<_>>()));
        body.insert("stream".to_owned(), json!(true));
        body.insert("return_token_ids".to_owned(), json!(true));
        if self.usage_is_ours || self.stream_options.is_some() {
            let mut options = self.stream_options.clone().unwrap_or_else(|| json!({}));
            if self.usage_is_ours {
                options["include_usage"] = json!(true);
                options["continuous_usage_stats"] = json!(false);
            }
            body.insert("stream_options".to_owned(), options);
        }
        if let Some(most) = self.max_tokens {
            body.insert("max_tokens".to_owned(), json!(most - sent));
        }
        let min = self.min_tokens.saturating_sub(sent);
        if min > 0 {
            body.insert("min_tokens".to_owned(), json!(min));
        }
        Plan::Continue(body)
    }

    /// Another engine goes on.
    pub(crate) fn goes_on(&mut self) {
        self.before = self.sent.len();
        self.continued = self.head.is_some();
    }

    /// Whether the request itself is still needed for a continuation.
    pub(crate) fn needs_request(&self) -> bool {
        self.head.is_none()
    }

    /// Tokens whose text was sent.
    pub(crate) fn sent(&self) -> usize {
        self.sent.len()
    }

    /// Tokens of prompt and answer that a continuation begins with. Never more than a context holds.
    pub(crate) fn length(&self) -> usize {
        self.prompt.as_ref().map_or(0, Vec::len) + self.sent.len()
    }

    fn last_frames(&mut self) -> Bytes {
        let mut out = BytesMut::new();
        let wanted = self.stream_options.as_ref().is_some_and(|options| options["include_usage"] == true);
        if let (true, false, Some(head), Some(prompt)) = (wanted, self.usage_sent, &self.head, &self.prompt) {
            let (prompt, completion) = (prompt.len(), self.sent.len() + self.held_back.len());
            let object =
                if self.endpoint == Endpoint::Chat { "chat.completion.chunk" } else { "text_completion" };
            let frame = json!({
                "id": head.id, "object": object, "created": head.created, "model": head.model, "choices": [],
                "usage": {"prompt_tokens": prompt, "completion_tokens": completion,
                    "total_tokens": prompt + completion},
            });
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(frame.to_string().as_bytes());
            out.extend_from_slice(b"\n\n");
        }
        out.extend_from_slice(&baton_openai::sse::DONE);
        out.freeze()
    }
}

fn tokens(ids: &Value) -> Option<Vec<u32>> {
    let read = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    ids.as_array().filter(|ids| ids.len() <= TOKENS_MAX)?.iter().map(read).collect()
}

#[cfg(test)]
mod tests;
