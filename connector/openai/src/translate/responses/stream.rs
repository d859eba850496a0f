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
//! - The last event has the whole response: what the same chat in one piece is translated to, if no text follows a
//!   call. Such a text is an item of its own, and a chat in one piece does not show its place. The log probabilities of
//!   tokens after a message are left out.
//! - `response.completed` and `response.incomplete` follow a finish reason and `[DONE]`. A stream that lacks either ends
//!   with `response.failed`, or `error` before there is a response.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value, json};

use super::RequestEcho;
use super::json::{JsonArray, JsonObject};
use super::output::{Item, ResponseHead, Status, failure, logprobs, usage};
use crate::error::ApiError;
use crate::translate::chat_reply::{REPLY_BYTES_MAX, StreamUsage, calls, reasoning, untranslatable};
use crate::translate::events::ChatEvents;

/// Bytes of JSON of an item without its text, about.
const ITEM_BYTES: usize = 256;

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
    output: JsonArray,
    /// The index of the last call in the chat.
    last_call: Option<u64>,
    /// Log probabilities that no event has had.
    logprobs: JsonArray,
    /// The last choice with a finish reason.
    finished: Option<Value>,
    usage: StreamUsage,
    /// Bytes of JSON that the last event will repeat.
    bytes: usize,
}

/// An item to which deltas are added.
#[derive(Debug)]
struct OpenItem {
    id: String,
    item: Item,
}

impl ChatEvents for ResponsesStream {
    fn comment(&mut self, out: &mut BytesMut) {
        out.extend_from_slice(b": ka\n\n");
    }

    fn usage(&mut self) -> &mut StreamUsage {
        &mut self.usage
    }

    fn chunk(&mut self, chunk: &Value, out: &mut BytesMut) -> Result<(), ApiError> {
        if self.head.is_none() {
            self.begin(ResponseHead::of(chunk), out);
        }
        let choice = &chunk["choices"][0];
        let delta = &choice["delta"];
        let scored = logprobs(choice);
        self.count(delta, &scored)?;
        self.logprobs.append(&scored);
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

    fn finish(&mut self, out: &mut BytesMut) -> Result<(), ApiError> {
        let (Some(finished), Some(head)) = (self.finished.take(), self.head.clone()) else {
            return Err(untranslatable());
        };
        let status = Status::of(&finished)?;
        if self.open.is_none() && self.output.len() == 0 {
            self.open(Item::Message { text: String::new(), logprobs: JsonArray::default() }, out);
        }
        // The log probabilities of a text's last tokens, which have added nothing to it.
        let rest = std::mem::take(&mut self.logprobs);
        if let Some(OpenItem { item: Item::Message { logprobs, .. }, .. }) = &mut self.open {
            logprobs.append(&rest);
        }
        self.close(status, out);
        let usage = usage(self.usage.chat());
        let response = head.response(&self.echo, status, &self.output, Some(&usage), None);
        let kind = if status == Status::Completed { "response.completed" } else { "response.incomplete" };
        self.emit(kind, &JsonObject::default().with("response", response), out);
        Ok(())
    }
}

impl ResponsesStream {
    pub(crate) fn new(echo: Arc<RequestEcho>) -> Self {
        Self {
            echo,
            head: None,
            sequence: 0,
            open: None,
            output: JsonArray::default(),
            last_call: None,
            logprobs: JsonArray::default(),
            finished: None,
            usage: StreamUsage::default(),
            bytes: 0,
        }
    }

    /// Adds the end of a stream that fails. Without a response there is none that could fail: the event `error` has the
    /// fields of OpenAI's reference, and `error`, by which its SDKs know that the stream has failed.
    pub(crate) fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        let Some(head) = self.head.clone() else {
            let failure = failure(error);
            let text = |name: &str| failure[name].to_string();
            let members = JsonObject::default()
                .with("code", text("code"))
                .with("message", text("message"))
                .with("param", text("param"));
            return self.emit("error", &members.with("error", &failure), out);
        };
        if let Some(OpenItem { id, item }) = self.open.take() {
            self.output.push(item.json(&id, Status::Incomplete("")));
        }
        let usage = self.usage.known().map(usage);
        let response = head.response(&self.echo, Status::Failed, &self.output, usage.as_ref(), Some(error));
        self.emit("response.failed", &JsonObject::default().with("response", response), out);
    }

    /// Bounds what the last event will repeat, items of earlier chunks included.
    fn count(&mut self, delta: &Value, logprobs: &JsonArray) -> Result<(), ApiError> {
        let text = |value: &Value| if value.is_string() { value.to_string().len() } else { 0 };
        self.bytes += Value::from(reasoning(delta)).to_string().len() + text(&delta["content"]);
        for call in calls(delta) {
            self.bytes += text(&call["function"]["arguments"]) + text(&call["function"]["name"]);
        }
        self.bytes += logprobs.bytes();
        if self.bytes > REPLY_BYTES_MAX { Err(untranslatable()) } else { Ok(()) }
    }

    fn begin(&mut self, head: ResponseHead, out: &mut BytesMut) {
        let response = head.response(&self.echo, Status::InProgress, &JsonArray::default(), None, None);
        self.head = Some(head);
        let members = JsonObject::default().with("response", response);
        for kind in ["response.created", "response.in_progress"] {
            self.emit(kind, &members, out);
        }
    }

    fn reasoning(&mut self, added: &str, out: &mut BytesMut) {
        if !matches!(self.open, Some(OpenItem { item: Item::Reasoning(_), .. })) {
            self.open(Item::Reasoning(String::new()), out);
        }
        if let Some(OpenItem { item: Item::Reasoning(text), .. }) = &mut self.open {
            text.push_str(added);
        }
        self.delta("response.reasoning_text.delta", &in_part().with_text("delta", added), out);
    }

    fn text(&mut self, added: &str, out: &mut BytesMut) {
        if !matches!(self.open, Some(OpenItem { item: Item::Message { .. }, .. })) {
            self.open(Item::Message { text: String::new(), logprobs: JsonArray::default() }, out);
        }
        let new = std::mem::take(&mut self.logprobs);
        if let Some(OpenItem { item: Item::Message { text, logprobs }, .. }) = &mut self.open {
            text.push_str(added);
            logprobs.append(&new);
        }
        let fields = in_part().with_text("delta", added).with("logprobs", new);
        self.delta("response.output_text.delta", &fields, out);
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
        let fields = JsonObject::default().with_text("delta", added);
        self.delta("response.function_call_arguments.delta", &fields, out);
        Ok(())
    }

    /// Ends the open item and opens another one.
    fn open(&mut self, item: Item, out: &mut BytesMut) {
        self.close(Status::Completed, out);
        let Some(head) = &self.head else { return };
        let id = head.item_id(&item, self.output.len());
        let begun =
            JsonObject::default().with("output_index", self.output.len()).with("item", item.begun(&id));
        let part = item.part();
        self.open = Some(OpenItem { id, item });
        self.bytes += ITEM_BYTES;
        self.emit("response.output_item.added", &begun, out);
        if let Some(part) = part {
            self.delta("response.content_part.added", &in_part().with("part", part), out);
        }
    }

    /// Ends the open item.
    fn close(&mut self, status: Status, out: &mut BytesMut) {
        let Some(OpenItem { id, item }) = &self.open else { return };
        let (kind, fields) = match item {
            Item::Reasoning(text) => ("response.reasoning_text.done", in_part().with_text("text", text)),
            Item::Message { text, logprobs } => {
                let fields = in_part().with_text("text", text).with("logprobs", logprobs);
                ("response.output_text.done", fields)
            }
            Item::Call { name, arguments, .. } => {
                let fields = JsonObject::default().with_text("name", name).with_text("arguments", arguments);
                ("response.function_call_arguments.done", fields)
            }
        };
        let (part, item) = (item.part(), item.json(id, status));
        self.delta(kind, &fields, out);
        if let Some(part) = part {
            self.delta("response.content_part.done", &in_part().with("part", part), out);
        }
        self.open = None;
        let done = JsonObject::default().with("output_index", self.output.len()).with("item", &item);
        self.output.push(item);
        self.emit("response.output_item.done", &done, out);
    }

    /// An event of the open item.
    fn delta(&mut self, kind: &'static str, fields: &JsonObject, out: &mut BytesMut) {
        let id = self.open.as_ref().map(|open| open.id.as_str());
        let item =
            JsonObject::default().with("item_id", Value::from(id)).with("output_index", self.output.len());
        self.emit(kind, &item.with_all(fields), out);
    }

    fn emit(&mut self, kind: &'static str, fields: &JsonObject, out: &mut BytesMut) {
        let data = JsonObject::default().with_text("type", kind).with("sequence_number", self.sequence);
        self.sequence += 1;
        let data = data.with_all(fields);
        out.extend_from_slice(format!("event: {kind}\ndata: {data}\n\n").as_bytes());
    }
}

/// The only event of a stream that fails before it has a response.
#[must_use]
pub fn error_event(error: &ApiError) -> Bytes {
    let mut out = BytesMut::new();
    ResponsesStream::new(Arc::new(RequestEcho::of(&Map::new()))).fail(error, &mut out);
    out.freeze()
}

/// The field by which an event names the only part of its item.
fn in_part() -> JsonObject {
    JsonObject::default().with("content_index", 0)
}

#[cfg(test)]
mod tests;
