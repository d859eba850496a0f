//! The parts of a response: its items, its end, its usage. Whole responses and streams have the same.

use serde_json::{Value, json};

use super::RequestEcho;
use super::json::{JsonArray, JsonObject};
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
    Message {
        text: String,
        /// One entry per token.
        logprobs: JsonArray,
    },
    Call {
        id: Value,
        name: String,
        arguments: String,
    },
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
        let known = |name: &str, is_type: fn(&Value) -> bool| {
            chat.get(name).filter(|&value| is_type(value)).cloned().unwrap_or_default()
        };
        Self { id, created: known("created", Value::is_number), model: known("model", Value::is_string) }
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
        output: &JsonArray,
        usage: Option<&Value>,
        error: Option<&ApiError>,
    ) -> String {
        let details = match status {
            Status::Incomplete(reason) => json!({"reason": reason}),
            Status::InProgress | Status::Completed | Status::Failed => Value::Null,
        };
        JsonObject::default()
            .with_text("id", &format!("resp_{}", self.id))
            .with_text("object", "response")
            .with("created_at", &self.created)
            .with_text("status", status.word())
            .with("error", error.map(failure).unwrap_or_default())
            .with("incomplete_details", details)
            .with("model", &self.model)
            .with("output", output)
            .with("usage", usage.unwrap_or(&Value::Null))
            .with_all(echo.fields())
            .to_string()
    }
}

/// The `error` of a response. `code` is one of OpenAI's; `type` implies the status.
pub(super) fn failure(error: &ApiError) -> Value {
    let code = match error.status {
        429 => "rate_limit_exceeded",
        400..500 => "invalid_prompt",
        _ => "server_error",
    };
    json!({"code": code, "message": error.message, "param": error.param, "type": error.kind.as_str()})
}

impl Item {
    /// The item with this id.
    pub(super) fn json(&self, id: &str, status: Status) -> String {
        let mut content = JsonArray::default();
        if let Some(part) = self.part() {
            content.push(part);
        }
        self.with_content(id, status, &content)
    }

    /// The same before its first part.
    pub(super) fn begun(&self, id: &str) -> String {
        self.with_content(id, Status::InProgress, &JsonArray::default())
    }

    fn with_content(&self, id: &str, status: Status, content: &JsonArray) -> String {
        let item = JsonObject::default().with_text("id", id).with_text("status", status.word());
        let item = match self {
            Self::Reasoning(_) => item
                .with_text("type", "reasoning")
                .with("summary", "[]")
                .with("content", content)
                .with("encrypted_content", Value::Null),
            Self::Message { .. } => {
                item.with_text("type", "message").with_text("role", "assistant").with("content", content)
            }
            Self::Call { id: call, name, arguments } => item
                .with_text("type", "function_call")
                .with("call_id", call)
                .with_text("name", name)
                .with_text("arguments", arguments),
        };
        item.to_string()
    }

    /// Its only part; `None` for a call.
    pub(super) fn part(&self) -> Option<JsonObject> {
        match self {
            Self::Reasoning(text) => {
                Some(JsonObject::default().with_text("type", "reasoning_text").with_text("text", text))
            }
            Self::Message { text, logprobs } => {
                let part = JsonObject::default().with_text("type", "output_text").with_text("text", text);
                Some(part.with("annotations", "[]").with("logprobs", logprobs))
            }
            Self::Call { .. } => None,
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

/// The log probabilities of a choice or a chunk, whose entries have the form of both APIs.
pub(super) fn logprobs(choice: &Value) -> JsonArray {
    let mut found = JsonArray::default();
    choice["logprobs"]["content"].as_array().into_iter().flatten().for_each(|entry| found.push(entry));
    found
}
