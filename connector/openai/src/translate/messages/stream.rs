//! The events of a chat stream as those of a Messages stream.
//!
//! ```text
//!         first chunk: message_start
//!               ▼
//!  ┌──▶ no block open ──────────── [DONE] ──▶ message_delta, message_stop
//!  │            │ reasoning, text or a call: content_block_start
//!  │            ▼
//!  └── block open ⟲ content_block_delta
//!   content_block_stop
//! ```
//!
//! Invariants:
//! - At most one block is open, and blocks are numbered in order.
//! - `message_stop` follows a finish reason and `[DONE]`. A stream that lacks either ends with the caller's error.
//! - Nothing is guessed or dropped: a chunk that has no counterpart is an error.

use bytes::BytesMut;
use serde_json::{Value, json};

use super::stop::{Calls, Stop, message_id, usage};
use crate::error::ApiError;
use crate::translate::chat_reply::{REPLY_BYTES_MAX, StreamUsage, calls, is_json, reasoning, untranslatable};
use crate::translate::events::{ChatEvents, event};

/// The kind of an open block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenBlock {
    Thinking,
    Text,
    /// The call with this index in the chat.
    Tool(u64),
}

/// The translation of one stream.
#[derive(Debug, Default)]
pub struct MessagesStream {
    /// The message's id, from the first chunk on.
    id: Option<String>,
    open: Option<OpenBlock>,
    /// Number of blocks so far.
    blocks: u64,
    /// The index of the last call.
    last_call: Option<u64>,
    /// Its arguments so far.
    last_arguments: String,
    /// The last choice with a finish reason.
    finished: Option<Value>,
    usage: StreamUsage,
}

impl ChatEvents for MessagesStream {
    /// In Messages an event keeps the connection alive.
    fn comment(&mut self, out: &mut BytesMut) {
        if self.id.is_some() {
            out.extend_from_slice(&event(&json!({"type": "ping"})));
        }
    }

    fn usage(&mut self) -> &mut StreamUsage {
        &mut self.usage
    }

    fn chunk(&mut self, chunk: &Value, out: &mut BytesMut) -> Result<(), ApiError> {
        if self.id.is_none() {
            let id = self.id.insert(message_id(chunk));
            let message = json!({
                "id": id, "type": "message", "role": "assistant", "model": chunk["model"], "content": [],
                "stop_reason": null, "stop_sequence": null,
                // A chat stream has its usage at the end.
                "usage": usage(self.usage.chat()),
            });
            out.extend_from_slice(&event(&json!({"type": "message_start", "message": message})));
        }
        let choice = &chunk["choices"][0];
        let delta = &choice["delta"];
        let thinking = reasoning(delta);
        if !thinking.is_empty() {
            self.begin(
                OpenBlock::Thinking,
                || json!({"type": "thinking", "thinking": "", "signature": ""}),
                out,
            );
            self.delta(&json!({"type": "thinking_delta", "thinking": thinking}), out);
        }
        if let Some(text) = delta["content"].as_str().filter(|text| !text.is_empty()) {
            self.begin(OpenBlock::Text, || json!({"type": "text", "text": ""}), out);
            self.delta(&json!({"type": "text_delta", "text": text}), out);
        }
        for call in calls(delta) {
            self.call(call, out)?;
        }
        if choice["finish_reason"].is_string() {
            let (finish, stop) = (&choice["finish_reason"], &choice["stop_reason"]);
            self.finished = Some(json!({"finish_reason": finish, "stop_reason": stop}));
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut BytesMut) -> Result<(), ApiError> {
        let Some(finished) = self.finished.take() else { return Err(untranslatable()) };
        let calls = match self.last_call {
            None => Calls::None,
            Some(_) if is_json(&self.last_arguments) => Calls::Complete,
            Some(_) => Calls::Cut,
        };
        let stop = Stop::of(&finished, calls)?;
        self.close(out);
        let delta = json!({"stop_reason": stop.reason, "stop_sequence": stop.sequence});
        let usage = usage(self.usage.chat());
        out.extend_from_slice(&event(&json!({"type": "message_delta", "delta": delta, "usage": usage})));
        out.extend_from_slice(&event(&json!({"type": "message_stop"})));
        Ok(())
    }
}

impl MessagesStream {
    /// A part of a tool call. The first part of each call has its name.
    fn call(&mut self, call: &Value, out: &mut BytesMut) -> Result<(), ApiError> {
        let index = call["index"].as_u64().unwrap_or(0);
        let function = &call["function"];
        let arguments = function["arguments"].as_str().unwrap_or_default();
        if self.open != Some(OpenBlock::Tool(index)) {
            if self.last_call.is_some_and(|last| index <= last) {
                // Its block has ended.
                return if arguments.is_empty() { Ok(()) } else { Err(untranslatable()) };
            }
            let Some(name) = function["name"].as_str() else { return Err(untranslatable()) };
            let id = match call["id"].as_str() {
                Some(id) => id.to_owned(),
                None => format!("{}-{index}", self.id.as_deref().unwrap_or_default()),
            };
            let block = || json!({"type": "tool_use", "id": id, "name": name, "input": {}});
            self.begin(OpenBlock::Tool(index), block, out);
            (self.last_call, self.last_arguments) = (Some(index), String::new());
        }
        if !arguments.is_empty() {
            if self.last_arguments.len() + arguments.len() > REPLY_BYTES_MAX {
                return Err(untranslatable());
            }
            self.last_arguments.push_str(arguments);
            self.delta(&json!({"type": "input_json_delta", "partial_json": arguments}), out);
        }
        Ok(())
    }

    /// Opens a block, unless it is open already.
    fn begin(&mut self, block: OpenBlock, content: impl FnOnce() -> Value, out: &mut BytesMut) {
        if self.open == Some(block) {
            return;
        }
        self.close(out);
        self.open = Some(block);
        let start = json!({"type": "content_block_start", "index": self.blocks, "content_block": content()});
        out.extend_from_slice(&event(&start));
        self.blocks += 1;
    }

    fn delta(&self, delta: &Value, out: &mut BytesMut) {
        let index = self.blocks.saturating_sub(1);
        out.extend_from_slice(&event(
            &json!({"type": "content_block_delta", "index": index, "delta": delta}),
        ));
    }

    fn close(&mut self, out: &mut BytesMut) {
        if self.open.take().is_some() {
            let stop = json!({"type": "content_block_stop", "index": self.blocks.saturating_sub(1)});
            out.extend_from_slice(&event(&stop));
        }
    }
}

#[cfg(test)]
mod tests;
