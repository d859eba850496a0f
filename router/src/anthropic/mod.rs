//! Anthropic's Messages API: its errors, and its translation to chat completions and back. Pure.
//!
//! ```text
//! POST /v1/messages ─▶ chat::to_chat ─▶ chat completion ─▶ P, D
//! client ◀── reply::to_message (whole) or stream::MessagesStream (events) ◀── D
//! ```
//!
//! Facts are those of Anthropic's reference, of its SDK 2.14, and of vLLM 0.32's own endpoint.

pub(crate) mod chat;
pub(crate) mod content;
pub(crate) mod envelope;
pub(crate) mod reply;
pub(crate) mod stop;
pub(crate) mod stream;
pub(crate) mod system;

/// What an engine's reply is translated to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Translation {
    /// A chat completion to a message.
    Message,
    /// The reply of `/tokenize` to a count.
    TokenCount,
}
