//! The parts of a response: its items, its end, its usage. Whole responses and streams have the same.

use serde_json::{Value, json};

use super::RequestEcho;
use crate::error::ApiError;
use crate::translate::chat_reply::{bare_id, incomplete};

/// What all events of a response have in common.
#[derive(Clone, Debug)]
pub(super) struct ResponseHead {
    /// The chat's id, without its prefix.
    id: String,
    created: Value,
    model: Value,
}

/// The state of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    InProgress,
    Completed,
    /// With the reason.
    Incomplete(&'static str),
    Failed,
}

/// An item of the output. Its id contains its index.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Item {
    Reasoning(String),
    Message { text: String, logprobs: Vec<Value> },
    Call { id: Value, name: String, arguments: String },
}

impl Status {
    /// The end of a choice of a chat, or of its last chunk.
    ///
    /// # Errors
    /// 502 for an end that leaves the response incomplete.
    pub(super) fn of(choice: &Value) -> Result<Self, ApiError> {
        match choice["finish_reason"].as_str() {
            Some("stop" | "tool_calls" | "function_call") => Ok(Self::Completed),
            Some("length") => Ok(Self::Incomplete("max_output_tokens")),
            Some("content_filter") => Ok(Self::Incomplete("content_filter")),
            _ => Err(incomplete()),
        }
    }

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete(_) => "incomplete",
            Self::Failed => "failed",
        }
    }
}

impl ResponseHead {
    /// Of a chat, or of its first chunk.
    pub(super) fn of(chat: &Value) -> Self {
        let id = bare_id(chat).to_owned();
        Self { id, created: chat["created"].clone(), model: chat["model"].clone() }
    }

    /// The id of the item at an index of the output.
    pub(super) fn item_id(&self, item: &Item, index: usize) -> String {
        let prefix = match item {
            Item::Reasoning(_) => "rs",
            Item::Message { .. } => "msg",
            Item::Call { .. } => "fc",
        };
        format!("{prefix}_{}_{index}", self.id)
    }

    /// The response, with the fields of its request.
    pub(super) fn response(
        &self,
        echo: &RequestEcho,
        status: Status,
        output: &[Value],
        usage: Option<&Value>,
        error: Option<&ApiError>,
    ) -> Value {
        let details = match status {
            Status::Incomplete(reason) => json!({"reason": reason}),
            Status::InProgress | Status::Completed | Status::Failed => Value::Null,
        };
        let mut response = json!({
            "id": format!("resp_{}", self.id), "object": "response", "created_at": self.created,
            "status": status.word(), "error": error.map(failure), "incomplete_details": details,
            "model": self.model, "output": output, "usage": usage,
        });
        if let Value::Object(members) = &mut response {
            members.extend(echo.fields().clone());
        }
        response
    }
}

/// The `error` of a response. `code` is one of OpenAI's; `type` implies the status.
fn failure(error: &ApiError) -> Value {
    let code = match error.status {
        429 => "rate_limit_exceeded",
        400..500 => "invalid_prompt",
        _ => "server_error",
    };
    json!({"code": code, "message": error.message, "param": error.param, "type": error.kind.as_str()})
}

impl Item {
    /// The item with this id.
    pub(super) fn value(&self, id: &str, status: Status) -> Value {
        let status = status.word();
        match self {
            Self::Reasoning(_) => json!({
                "id": id, "type": "reasoning", "summary": [], "content": [self.part()],
                "encrypted_content": null, "status": status,
            }),
            Self::Message { .. } => json!({
                "id": id, "type": "message", "role": "assistant", "status": status, "content": [self.part()],
            }),
            Self::Call { id: call, name, arguments } => json!({
                "id": id, "type": "function_call", "call_id": call, "name": name, "arguments": arguments,
                "status": status,
            }),
        }
    }

    /// Its only part; `null` for a call.
    pub(super) fn part(&self) -> Value {
        match self {
            Self::Reasoning(text) => json!({"type": "reasoning_text", "text": text}),
            Self::Message { text, logprobs } => {
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
            }
            Self::Call { .. } => Value::Null,
        }
    }
}

/// The usage of a chat.
pub(super) fn usage(usage: &Value) -> Value {
    let tokens = |value: &Value| value.as_u64().unwrap_or(0);
    let (input, output) = (tokens(&usage["prompt_tokens"]), tokens(&usage["completion_tokens"]));
    let cached = tokens(&usage["prompt_tokens_details"]["cached_tokens"]);
    let reasoning = tokens(&usage["completion_tokens_details"]["reasoning_tokens"]);
    json!({
        "input_tokens": input,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": input.saturating_add(output),
    })
}

/// The log probabilities of a choice or a chunk, in the form of both APIs.
pub(super) fn logprobs(choice: &Value) -> &[Value] {
    choice["logprobs"]["content"].as_array().map_or(&[], Vec::as_slice)
}
