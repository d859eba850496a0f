//! Anthropic's Messages API: its errors, and its translation to chat completions and back.
//!
//! ```text
//! POST /v1/messages ─▶ chat ─▶ chat completion ─▶ engine
//! client ◀── reply (whole) or stream (events) ◀── chat
//! ```
//!
//! Facts are those of Anthropic's reference, of its SDK 2.14, and of vLLM 0.32's own endpoint.

mod chat;
mod content;
mod error;
mod reply;
mod stop;
mod stream;
mod system;

pub use chat::{THINKING_BUDGET, to_chat, to_tokenize};
pub use error::{error_body, error_event, is_at};
pub(crate) use reply::{to_count, to_message};
pub use stream::MessagesStream;
pub use system::compared_bytes;

use crate::translate::FieldName;

/// The path of Messages. Other paths of that API are below it.
pub const PATH: &str = "/v1/messages";
/// The path that counts the tokens of a prompt.
pub const COUNT_TOKENS: &str = "/v1/messages/count_tokens";

/// Fields of a chat in errors, and the fields that they are made of.
pub(crate) const FIELDS: [FieldName; 4] = [
    FieldName::same(THINKING_BUDGET, "thinking.budget_tokens"),
    FieldName::same("stop", "stop_sequences"),
    FieldName::other("response_format", "output_config.format"),
    FieldName::same("reasoning_effort", "output_config.effort"),
];
