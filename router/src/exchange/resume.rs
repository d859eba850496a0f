//! Continues a streamed response at another engine after its decode engine failed. The module records the state of a
//! stream, decides whether it can be continued, builds the request to the next engine, and rewrites its frames. Pure.
//!
//! ```text
//! D's frames ─▶ read (token ids removed) ─▶ client
//!                 │ prompt's tokens, tokens whose text was sent, head of the first frame
//!                 ▼ D fails
//! another D ◀── /v1/completions with prompt = both token lists, `max_tokens` reduced by the sent tokens
//!     └─ frames ─▶ read and rewritten (id, created, model, shape, usage) ─▶ client
//! ```
//!
//! Token ids (`return_token_ids`, of vLLM and of Baton) make the continuation exact: tokenizing the text again may give
//! other tokens, and then another response. Chat is also continued through the completions endpoint, independent of the
//! model's template for an unfinished message.
//!
//! Invariants:
//! - A token's text is sent at most once. The next engine begins after the last token whose text was sent, and a token
//!   whose text was held back is computed again.
//! - `finish_reason` and `[DONE]` are sent once; `id`, `created` and `model` are those of the first frame.

mod eligibility;
mod state;

use baton_openai::{Endpoint, RawBody};
use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value, json};

use crate::exchange::client_request::ClientRequest;
use crate::message::path::Dialect;
use crate::message::sse;
use crate::message::usage::Usage;
use eligibility::is_allowed;
pub(crate) use state::ResumeState;

/// Limit on the recorded tokens of a prompt and a response.
const TOKENS_MAX: usize = 1 << 20;
/// Token limit of completions without one in the request; OpenAI's and vLLM's default.
const COMPLETION_TOKENS: u64 = 16;

/// The recorded state of one stream.
#[derive(Debug)]
pub(crate) struct Transcript {
    endpoint: Endpoint,
    model: String,
    /// The sampling fields of the client's body.
    sampling: Map<String, Value>,
    max_tokens: Option<u64>,
    min_tokens: u64,
    stream_options: Option<Value>,
    /// `id`, `created` and `model` of the first frame.
    head: Option<StreamHead>,
    prompt: Option<Vec<u32>>,
    /// Tokens whose text was sent.
    sent: Vec<u32>,
    /// Later tokens, whose text the engine still holds back.
    held_back: Vec<u32>,
    /// Tokens of the response that earlier engines computed.
    earlier_tokens: usize,
    /// Another engine has continued the stream after a part of it was sent.
    continued: bool,
    finish: bool,
    /// The router requests usage, and the client does not.
    usage_is_internal: bool,
    usage_sent: bool,
    /// A part was sent that cannot be continued.
    unresumable: bool,
}

#[derive(Clone, Debug)]
struct StreamHead {
    id: Value,
    created: Value,
    model: Value,
}

/// What to do with a broken stream.
#[derive(Debug, PartialEq)]
pub(crate) enum ResumePlan {
    /// Nothing was sent yet: send the same request to another engine.
    Restart,
    /// Request the rest at another engine, with this body for `/v1/completions`. Without a client's limit `max_tokens`
    /// is missing, which means the rest of the context.
    Continue(Map<String, Value>),
    /// Everything but the end was sent: these are the last frames.
    Finish(Bytes),
    /// The stream cannot be continued.
    Impossible,
}

/// Limit on the fields besides the prompt of a resumable request: parsing them takes up to 200 times their memory.
const FIELDS_BYTES_MAX: usize = 256 << 10;

impl Transcript {
    /// The transcript of a request's stream, if the model and the request permit a continuation. The engine must then
    /// return token ids.
    pub(crate) fn of(request: &mut ClientRequest) -> Option<Self> {
        let Dialect::OpenAi(endpoint) = request.dialect else { return None };
        if !request.model.resume || request.aggregate {
            return None;
        }
        let mut transcript = Self::begin(endpoint, &request.model.name, &request.body)?;
        transcript.usage_is_internal = request.owned.asks_for_usage();
        request.owned.token_ids = true;
        Some(transcript)
    }

    /// `None` for a body that does not permit a continuation.
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

    /// Begins with a client's body that [`is_allowed`] accepted.
    fn new(endpoint: Endpoint, model: &str, body: &Map<String, Value>) -> Self {
        let number = |name: &str| body.get(name).and_then(Value::as_u64);
        let default = if endpoint == Endpoint::Completions { Some(COMPLETION_TOKENS) } else { None };
        Self {
            endpoint,
            model: model.to_owned(),
            sampling: eligibility::sampling(body),
            max_tokens: number("max_completion_tokens").or_else(|| number("max_tokens")).or(default),
            min_tokens: number("min_tokens").unwrap_or(0),
            stream_options: body.get("stream_options").filter(|options| !options.is_null()).cloned(),
            head: None,
            prompt: None,
            sent: Vec::new(),
            held_back: Vec::new(),
            earlier_tokens: 0,
            continued: false,
            finish: false,
            usage_is_internal: false,
            usage_sent: false,
            unresumable: false,
        }
    }

    /// Reads whole frames of the engine and returns the frames for the client.
    pub(crate) fn rewrite_frames(&mut self, chunk: &Bytes) -> Bytes {
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
                    self.unresumable |= frame.has_data() && data.trim_ascii() != b"[DONE]";
                    out.extend_from_slice(bytes);
                }
            }
        }
        // A part of a frame that is too long for the buffer.
        self.unresumable |= passed < chunk.len();
        out.extend_from_slice(&chunk[passed..]);
        out.freeze()
    }

    fn read(&mut self, frame: &mut Map<String, Value>) {
        if frame.contains_key("error") {
            self.unresumable = true;
            return;
        }
        let prompt = frame.remove("prompt_token_ids");
        self.record_prompt(prompt);
        if let Some(Value::Array(choices)) = frame.get_mut("choices") {
            self.unresumable |= choices.len() > 1;
            if let Some(Value::Object(choice)) = choices.first_mut() {
                self.read_choice(choice);
            }
        }
        match &self.head {
            None => {
                let field = |name: &str| frame.get(name).cloned().unwrap_or(Value::Null);
                self.head =
                    Some(StreamHead { id: field("id"), created: field("created"), model: field("model") });
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
            self.rewrite_usage(usage);
        }
    }

    fn record_prompt(&mut self, ids: Option<Value>) {
        // The prompt of a continuation contains tokens of the response.
        if self.prompt.is_none() && !self.continued {
            self.prompt = ids.as_ref().and_then(tokens);
        }
    }

    fn read_choice(&mut self, choice: &mut Map<String, Value>) {
        let prompt = choice.remove("prompt_token_ids");
        self.record_prompt(prompt);
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
                self.unresumable |= !delta.iter().all(known);
                delta.get("content").and_then(Value::as_str).unwrap_or_default()
            }
            _ => choice.get("text").and_then(Value::as_str).unwrap_or_default(),
        };
        self.finish |= choice.get("finish_reason").is_some_and(|reason| !reason.is_null());
        match ids.as_ref().map(tokens) {
            Some(Some(ids)) => self.held_back.extend(ids),
            // Without the tokens of a text the position of a continuation is unknown.
            None => self.unresumable |= !text.is_empty(),
            Some(None) => self.unresumable = true,
        }
        if !text.is_empty() {
            self.sent.append(&mut self.held_back);
        }
        self.unresumable |= self.sent.len() + self.held_back.len() > TOKENS_MAX;
    }

    /// Rewrites the usage to that of the whole response.
    fn rewrite_usage(&self, usage: &mut Value) {
        let (Some(prompt), 1..) = (&self.prompt, self.earlier_tokens) else { return };
        let completion = usage["completion_tokens"].as_u64().unwrap_or(0) + self.earlier_tokens as u64;
        usage["prompt_tokens"] = json!(prompt.len());
        usage["completion_tokens"] = json!(completion);
        usage["total_tokens"] = json!(prompt.len() as u64 + completion);
    }

    /// The usage of the whole response, from that of the continuing engine.
    pub(crate) fn total_usage(&self, usage: Usage) -> Usage {
        let (Some(prompt), 1..) = (&self.prompt, self.earlier_tokens) else { return usage };
        let (prompt, before) = (prompt.len() as u64, self.earlier_tokens as u64);
        let completion = usage.completion.saturating_add(before);
        Usage { prompt, cached: usage.cached.min(prompt), completion }
    }

    /// The usage of a response that lacks only its end.
    pub(crate) fn partial_usage(&self) -> Option<Usage> {
        let completion = (self.sent.len() + self.held_back.len()) as u64;
        self.prompt.as_ref().map(|prompt| Usage { prompt: prompt.len() as u64, cached: 0, completion })
    }

    /// Decides how to continue after the engine failed.
    pub(crate) fn plan_resume(&mut self) -> ResumePlan {
        if self.unresumable {
            return ResumePlan::Impossible;
        }
        if self.head.is_none() {
            return ResumePlan::Restart;
        }
        let Some(prompt) = &self.prompt else { return ResumePlan::Impossible };
        if self.finish {
            return ResumePlan::Finish(self.last_frames());
        }
        self.held_back.clear();
        let sent = self.sent.len() as u64;
        if self.max_tokens.is_some_and(|most| most <= sent) {
            // The one missing frame contains the end.
            return ResumePlan::Impossible;
        }
        let mut body = self.sampling.clone();
        body.insert("model".to_owned(), json!(self.model));
        body.insert("prompt".to_owned(), json!(prompt.iter().chain(&self.sent).collect::<Vec<_>>()));
        body.insert("stream".to_owned(), json!(true));
        body.insert("return_token_ids".to_owned(), json!(true));
        if self.usage_is_internal || self.stream_options.is_some() {
            let mut options = self.stream_options.clone().unwrap_or_else(|| json!({}));
            if self.usage_is_internal {
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
        ResumePlan::Continue(body)
    }

    /// Records that another engine continues.
    pub(crate) fn mark_continued(&mut self) {
        self.earlier_tokens = self.sent.len();
        self.continued = self.head.is_some();
    }

    /// Whether a continuation still needs the client's body.
    pub(crate) fn needs_request(&self) -> bool {
        self.head.is_none()
    }

    /// Number of tokens whose text was sent.
    pub(crate) fn sent_tokens(&self) -> usize {
        self.sent.len()
    }

    /// Number of tokens in the prompt of a continuation. Never more than the context.
    pub(crate) fn token_count(&self) -> usize {
        self.prompt.as_ref().map_or(0, Vec::len) + self.sent.len()
    }

    fn last_frames(&mut self) -> Bytes {
        let mut out = BytesMut::new();
        let wants_usage =
            self.stream_options.as_ref().is_some_and(|options| options["include_usage"] == true);
        if let (true, false, Some(head), Some(prompt)) =
            (wants_usage, self.usage_sent, &self.head, &self.prompt)
        {
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
