//! What all translations read of a chat's reply.

use serde_json::{Value, json};

use crate::error::ApiError;

/// Maximum bytes of a translated reply, which is parsed: a million tokens without log probabilities, or their ids. Also
/// the bound on the text and the log probabilities of one stream that a translation keeps.
pub(super) const REPLY_BYTES_MAX: usize = 8 << 20;

/// The id of a chat, without its prefix.
pub(super) fn bare_id(chat: &Value) -> &str {
    let id = chat["id"].as_str().unwrap_or_default();
    id.strip_prefix("chatcmpl-").unwrap_or(id)
}

/// The reasoning of a message or a delta: vLLM renamed the field.
pub(super) fn reasoning(message: &Value) -> &str {
    let text = |name: &str| message[name].as_str().filter(|text| !text.is_empty());
    text("reasoning_content").or_else(|| text("reasoning")).unwrap_or_default()
}

/// The calls of a message or a delta.
pub(super) fn calls(message: &Value) -> &[Value] {
    message["tool_calls"].as_array().map_or(&[], Vec::as_slice)
}

/// Whether a text is one JSON value.
pub(super) fn is_json(text: &str) -> bool {
    serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

/// The usage of a chat's stream.
#[derive(Debug, Default)]
pub(super) struct StreamUsage(Option<Value>);

impl StreamUsage {
    /// Reads a chunk. A later usage replaces an earlier one.
    pub(super) fn read(&mut self, chunk: &Value) {
        if chunk["usage"].is_object() {
            self.0 = Some(chunk["usage"].clone());
        }
    }

    /// Sets the tokens of the prompt, of its cached part and of the response, if the engine failed before it sent its
    /// own usage.
    pub(super) fn set_missing(&mut self, [prompt, cached, completion]: [u64; 3]) {
        self.0.get_or_insert_with(|| {
            let details = json!({"cached_tokens": cached});
            json!({"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details})
        });
    }

    /// The chat's usage, if it is known.
    pub(super) fn known(&self) -> Option<&Value> {
        self.0.as_ref()
    }

    /// The chat's usage, or null, which counts nothing.
    pub(super) fn chat(&self) -> &Value {
        self.known().unwrap_or(&Value::Null)
    }
}

/// Whether the last message of a chat has a text that can be continued.
pub(super) fn has_text_to_continue(messages: &[Value]) -> bool {
    let text = messages.last().and_then(|message| message["content"].as_str());
    text.is_some_and(|text| !text.trim().is_empty())
}

/// 502 for a reply that ended before it was complete, such as by `abort`. The APIs have no reason for it.
pub(super) fn incomplete() -> ApiError {
    ApiError::bad_gateway("an engine ended the response before it was complete")
}

/// 502 for a whole reply without a counterpart.
pub(super) fn unreadable(message: &str) -> ApiError {
    ApiError::bad_gateway(message)
}

/// 502 for an event without a counterpart.
pub(super) fn untranslatable() -> ApiError {
    ApiError::bad_gateway("an engine's stream cannot be translated")
}
