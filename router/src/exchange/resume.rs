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

mod continuation_request;
mod eligibility;
mod state;
mod tokens;

use baton_openai::{Endpoint, RawBody};
use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value, json};

use crate::exchange::client_request::ClientRequest;
use crate::message::engine_abort::has_mark;
use crate::message::path::Dialect;
use crate::message::sse;
use crate::message::usage::Usage;
use continuation_request::ContinuationRequest;
use eligibility::is_allowed;
pub(crate) use state::ResumeState;
use tokens::{StreamTokens, token_ids};

/// The recorded state of one stream.
#[derive(Debug)]
pub(crate) struct Transcript {
    request: ContinuationRequest,
    pub tokens: StreamTokens,
    /// `id`, `created` and `model` of the first frame.
    head: Option<StreamHead>,
    /// Another engine has continued the stream after a part of it was sent.
    continued: bool,
    finish: bool,
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
        if !request.model.handoff.resume || request.shape.prompts > 1 {
            return None;
        }
        let mut transcript = Self::begin(endpoint, &request.model.name, &request.body)?;
        transcript.request.usage_is_internal = request.owned.asks_for_usage();
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
        Self {
            request: ContinuationRequest::new(endpoint, model, body),
            tokens: StreamTokens::default(),
            head: None,
            continued: false,
            finish: false,
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
                if self.request.endpoint == Endpoint::Chat {
                    frame.insert("object".to_owned(), json!(self.request.chunk_object()));
                }
            }
            Some(_) => {}
        }
        if let Some(usage @ Value::Object(_)) = frame.get_mut("usage") {
            self.usage_sent |= self.finish;
            self.tokens.rewrite_usage(usage);
        }
    }

    fn record_prompt(&mut self, ids: Option<Value>) {
        // The prompt of a continuation contains tokens of the response.
        if self.tokens.prompt.is_none() && !self.continued {
            self.tokens.prompt = ids.as_ref().and_then(token_ids);
        }
    }

    fn read_choice(&mut self, choice: &mut Map<String, Value>) {
        let prompt = choice.remove("prompt_token_ids");
        self.record_prompt(prompt);
        let ids = choice.remove("token_ids");
        if self.request.endpoint == Endpoint::Chat
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
        match ids.as_ref().map(token_ids) {
            Some(Some(ids)) => self.tokens.held_back.extend(ids),
            // Without the tokens of a text the position of a continuation is unknown.
            None => self.unresumable |= !text.is_empty(),
            Some(None) => self.unresumable = true,
        }
        if !text.is_empty() {
            self.tokens.mark_sent();
        }
        self.unresumable |= self.tokens.is_too_long();
    }

    /// Decides how to continue after the engine failed.
    pub(crate) fn plan_resume(&mut self) -> ResumePlan {
        if self.unresumable {
            return ResumePlan::Impossible;
        }
        if self.head.is_none() {
            return ResumePlan::Restart;
        }
        let Some(prompt) = &self.tokens.prompt else { return ResumePlan::Impossible };
        let is_batons = self.head.as_ref().is_some_and(|head| has_mark(&head.id));
        if self.request.is_constrained() && !is_batons {
            return ResumePlan::Impossible;
        }
        if self.finish {
            return ResumePlan::Finish(self.last_frames());
        }
        self.tokens.held_back.clear();
        // After the last permitted token, the one missing frame contains the end.
        self.request.body(prompt, &self.tokens.sent).map_or(ResumePlan::Impossible, ResumePlan::Continue)
    }

    /// Records that another engine continues.
    pub(crate) fn mark_continued(&mut self) {
        self.tokens.mark_continued();
        self.continued = self.head.is_some();
    }

    /// Whether a continuation still needs the client's body.
    pub(crate) fn needs_request(&self) -> bool {
        self.head.is_none()
    }

    fn last_frames(&self) -> Bytes {
        let mut out = BytesMut::new();
        if let (true, false, Some(head), Some(usage)) =
            (self.request.wants_usage(), self.usage_sent, &self.head, self.tokens.partial_usage())
        {
            let Usage { prompt, completion, .. } = usage;
            let object = self.request.chunk_object();
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

#[cfg(test)]
mod tests;
