//! OpenAI's Responses API without stored responses: its translation to chat completions and back.
//!
//! ```text
//! POST /v1/responses ─▶ request, items ─▶ chat completion ─▶ engine
//! client ◀── reply (whole) or stream (events) ◀── chat
//! ```
//!
//! Facts are those of OpenAI's reference, of openai-python 3.57, and of vLLM 0.33's own endpoint.

mod echo;
mod items;
mod json;
mod output;
mod reply;
mod request;
mod stream;

pub use echo::RequestEcho;
pub(crate) use reply::to_response;
pub use request::to_chat;
pub use stream::{ResponsesStream, error_event};

use crate::translate::FieldName;

/// The path of Responses.
pub const PATH: &str = "/v1/responses";

/// Fields of a chat in errors, and the fields that they are made of.
pub(crate) const FIELDS: [FieldName; 6] = [
    FieldName::same("max_tokens", "max_output_tokens"),
    FieldName::other("messages", "input"),
    FieldName::other("prompt", "input"),
    FieldName::same("reasoning_effort", "reasoning.effort"),
    FieldName::other("response_format", "text.format"),
    FieldName::other("logprobs", "include"),
];
