//! The events of a chat stream as those of a Responses stream.
//!
//! ```text
//!         first chunk: response.created, response.in_progress
//!               ▼
//!  ┌──▶ no item open ──────────── [DONE] ──▶ response.completed or response.incomplete
//!  │            │ reasoning, text or a call: response.output_item.added, response.content_part.added
//!  │            ▼
//!  └── item open ⟲ a delta
//!   done events of text, part and item
//! ```
//!
//! Invariants:
//! - At most one item is open. Events are numbered without a gap, and items in order.
//! - The last event has the whole response: what the same chat in one piece is translated to, but for the log
//!   probabilities of tokens after a message.
//! - `response.completed` and `response.incomplete` follow a finish reason and `[DONE]`. A stream that lacks either ends
//!   with `response.failed`.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value, json};

use super::RequestEcho;
use super::output::{Item, ResponseHead, Status, logprobs, usage};
use crate::error::ApiError;
use crate::sse::DONE;
use crate::translate::chat_reply::{REPLY_BYTES_MAX, calls, reasoning, untranslatable};
use crate::translate::events::{event, frames};

/// The translation of one stream.
#[derive(Debug)]
pub struct ResponsesStream {
    echo: Arc<RequestEcho>,
    /// From the first chunk on.
    head: Option<ResponseHead>,
    /// The number of the next event.
    sequence: u64,
    open: Option<OpenItem>,
    /// The items that have ended.
    output: Vec<Value>,
    /// The index of the last call in the chat.
    last_call: Option<u64>,
    /// Log probabilities that no event has had.
    logprobs: Vec<Value>,
    /// The last choice with a finish reason.
    finished: Option<Value>,
    usage: Option<Value>,
    /// Bytes of all chunks.
    bytes: usize,
}

/// An item to which deltas are added.
#[derive(Debug)]
struct OpenItem {
    id: String,
    item: Item,
}

impl ResponsesStream {
    pub(crate) fn new(echo: Arc<RequestEcho>) -> Self {
        Self {
            echo,
            head: None,
            sequence: 0,
            open: None,
            output: Vec::new(),
            last_call: None,
            logprobs: Vec::new(),
            finished: None,
            usage: None,
            bytes: 0,
        }
    }

    /// Translates whole frames.
    ///
    /// # Errors
    /// 502 for a chunk that cannot be translated, or a stream that ends early.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<Bytes, ApiError> {
        let (mut out, mut read) = (BytesMut::new(), 0);
        for frame in frames(bytes) {
            read = frame.end;
            match frame.data {
                // A comment keeps the connection alive.
                None => out.extend_from_slice(b": ka\n\n"),
                Some(data) if data.trim_ascii() == b"[DONE]" => self.finish(&mut out)?,
                Some(data) => {
                    let chunk = serde_json::from_slice(&data).ok().filter(Value::is_object);
                    self.chunk(&chunk.ok_or_else(untranslatable)?, &mut out)?;
                }
            }
        }
        // The rest is a part of a frame that is too long for the buffer.
        if read == bytes.len() { Ok(out.freeze()) } else { Err(untranslatable()) }
    }

    /// Sets the usage of a stream whose engine failed before it sent its own.
    pub(crate) fn set_usage(&mut self, [prompt, cached, completion]: [u64; 3]) {
        let details = json!({"cached_tokens": cached});
        let chat = json!({"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details});
        self.usage.get_or_insert_with(|| usage(&chat));
    }

    /// The end of a stream that fails. Without a response there is none that could fail.
    pub(crate) fn fail(&mut self, error: &ApiError) -> Bytes {
        let Some(head) = self.head.clone() else { return [error.to_sse(), DONE].concat().into() };
        let mut out = BytesMut::new();
        if let Some(open) = self.open.take() {
            self.output.push(open.item.value(&open.id, Status::Incomplete("")));
        }
        let usage = self.usage.as_ref();
        let response = head.response(&self.echo, Status::Failed, &self.output, usage, Some(error));
        self.emit("response.failed", json!({"response": response}), &mut out);
        out.freeze()
    }

    fn chunk(&mut self, chunk: &Value, out: &mut BytesMut) -> Result<(), ApiError> {
        if chunk["usage"].is_object() {
            self.usage = Some(usage(&chunk["usage"]));
        }
        if self.head.is_none() {
            self.begin(ResponseHead::of(chunk), out);
        }
        let choice = &chunk["choices"][0];
        let delta = &choice["delta"];
        self.count(choice)?;
        self.logprobs.extend_from_slice(logprobs(choice));
        let thinking = reasoning(delta);
        if !thinking.is_empty() {
            self.reasoning(thinking, out);
        }
        if let Some(text) = delta["content"].as_str().filter(|text| !text.is_empty()) {
            self.text(text, out);
        }
        for call in calls(delta) {
            self.call(call, out)?;
        }
        if choice["finish_reason"].is_string() {
            self.finished = Some(json!({"finish_reason": choice["finish_reason"]}));
        }
        Ok(())
    }

    /// Bounds what the last event will repeat.
    fn count(&mut self, choice: &Value) -> Result<(), ApiError> {
        let delta = &choice["delta"];
        let text = |value: &Value| value.as_str().map_or(0, str::len);
        self.bytes += reasoning(delta).len() + text(&delta["content"]);
        for call in calls(delta) {
            self.bytes += text(&call["function"]["arguments"]) + text(&call["function"]["name"]) + 64;
        }
        // An entry is about as large as its JSON.
        self.bytes += logprobs(choice).iter().map(|entry| entry.to_string().len()).sum::<usize>();
        if self.bytes > REPLY_BYTES_MAX { Err(untranslatable()) } else { Ok(()) }
    }

    fn begin(&mut self, head: ResponseHead, out: &mut BytesMut) {
        let response = head.response(&self.echo, Status::InProgress, &[], None, None);
        self.head = Some(head);
        for kind in ["response.created", "response.in_progress"] {
            self.emit(kind, json!({"response": response}), out);
        }
    }

    fn reasoning(&mut self, added: &str, out: &mut BytesMut) {
        if !matches!(self.open, Some(OpenItem { item: Item::Reasoning(_), .. })) {
            self.open(Item::Reasoning(String::new()), out);
        }
        if let Some(OpenItem { item: Item::Reasoning(text), .. }) = &mut self.open {
            text.push_str(added);
        }
        self.delta("response.reasoning_text.delta", json!({"content_index": 0, "delta": added}), out);
    }

    fn text(&mut self, added: &str, out: &mut BytesMut) {
        if !matches!(self.open, Some(OpenItem { item: Item::Message { .. }, .. })) {
            self.open(Item::Message { text: String::new(), logprobs: Vec::new() }, out);
        }
        let new = std::mem::take(&mut self.logprobs);
        let fields = json!({"content_index": 0, "delta": added, "logprobs": new});
        if let Some(OpenItem { item: Item::Message { text, logprobs }, .. }) = &mut self.open {
            text.push_str(added);
            logprobs.extend(new);
        }
        self.delta("response.output_text.delta", fields, out);
    }

    /// A part of a tool call. The first part of each call has its name.
    fn call(&mut self, call: &Value, out: &mut BytesMut) -> Result<(), ApiError> {
        let index = call["index"].as_u64().unwrap_or(0);
        let function = &call["function"];
        let added = function["arguments"].as_str().unwrap_or_default();
        let is_open = matches!(self.open, Some(OpenItem { item: Item::Call { .. }, .. }));
        if !(is_open && self.last_call == Some(index)) {
            if self.last_call.is_some_and(|last| index <= last) {
                // Its item has ended.
                return if added.is_empty() { Ok(()) } else { Err(untranslatable()) };
            }
            let Some(name) = function["name"].as_str() else { return Err(untranslatable()) };
            let id = match &call["id"] {
                Value::String(id) => Value::from(id.as_str()),
                _ => format!("call_{index}").into(),
            };
            self.open(Item::Call { id, name: name.to_owned(), arguments: String::new() }, out);
            self.last_call = Some(index);
        }
        if added.is_empty() {
            return Ok(());
        }
        if let Some(OpenItem { item: Item::Call { arguments, .. }, .. }) = &mut self.open {
            arguments.push_str(added);
        }
        self.delta("response.function_call_arguments.delta", json!({"delta": added}), out);
        Ok(())
    }

    /// Ends the open item and opens another one.
    fn open(&mut self, item: Item, out: &mut BytesMut) {
        self.close(Status::Completed, out);
        let Some(head) = &self.head else { return };
        let id = head.item_id(&item, self.output.len());
        let mut begun = item.value(&id, Status::InProgress);
        let has_part = begun["content"].is_array();
        if has_part {
            begun["content"] = json!([]);
        }
        let part = json!({"content_index": 0, "part": item.part()});
        self.open = Some(OpenItem { id, item });
        let added = json!({"output_index": self.output.len(), "item": begun});
        self.emit("response.output_item.added", added, out);
        if has_part {
            self.delta("response.content_part.added", part, out);
        }
    }

    /// Ends the open item.
    fn close(&mut self, status: Status, out: &mut BytesMut) {
        let done = match &self.open {
            None => return,
            Some(OpenItem { item, .. }) => match item {
                Item::Reasoning(text) => {
                    ("response.reasoning_text.done", json!({"content_index": 0, "text": text}))
                }
                Item::Message { text, logprobs } => (
                    "response.output_text.done",
                    json!({"content_index": 0, "text": text, "logprobs": logprobs}),
                ),
                Item::Call { name, arguments, .. } => {
                    ("response.function_call_arguments.done", json!({"name": name, "arguments": arguments}))
                }
            },
        };
        self.delta(done.0, done.1, out);
        let Some(part) = self.open.as_ref().map(|open| open.item.part()) else { return };
        if !part.is_null() {
            self.delta("response.content_part.done", json!({"content_index": 0, "part": part}), out);
        }
        let Some(OpenItem { id, item }) = self.open.take() else { return };
        let item = item.value(&id, status);
        let index = self.output.len();
        self.output.push(item.clone());
        self.emit("response.output_item.done", json!({"output_index": index, "item": item}), out);
    }

    fn finish(&mut self, out: &mut BytesMut) -> Result<(), ApiError> {
        let (Some(finished), Some(head)) = (self.finished.take(), self.head.clone()) else {
            return Err(untranslatable());
        };
        let status = Status::of(&finished)?;
        if self.open.is_none() && self.output.is_empty() {
            self.open(Item::Message { text: String::new(), logprobs: Vec::new() }, out);
        }
        // The log probabilities of a text's last tokens, which have added nothing to it.
        let rest = std::mem::take(&mut self.logprobs);
        if let Some(OpenItem { item: Item::Message { logprobs, .. }, .. }) = &mut self.open {
            logprobs.extend(rest);
        }
        self.close(status, out);
        let usage = self.usage.take().unwrap_or_else(|| usage(&Value::Null));
        let response = head.response(&self.echo, status, &self.output, Some(&usage), None);
        let kind = if status == Status::Completed { "response.completed" } else { "response.incomplete" };
        self.emit(kind, json!({"response": response}), out);
        Ok(())
    }

    /// An event of the open item.
    fn delta(&mut self, kind: &'static str, fields: Value, out: &mut BytesMut) {
        let id = self.open.as_ref().map(|open| open.id.clone());
        let mut all = Map::new();
        all.insert("item_id".to_owned(), id.into());
        all.insert("output_index".to_owned(), self.output.len().into());
        if let Value::Object(fields) = fields {
            all.extend(fields);
        }
        self.emit(kind, Value::Object(all), out);
    }

    fn emit(&mut self, kind: &'static str, fields: Value, out: &mut BytesMut) {
        let mut data = json!({"type": kind, "sequence_number": self.sequence});
        if let (Value::Object(data), Value::Object(fields)) = (&mut data, fields) {
            data.extend(fields);
        }
        self.sequence += 1;
        out.extend_from_slice(&event(&data));
    }
}

#[cfg(test)]
mod tests;
