//! The end of a response: `stop_reason`, `stop_sequence` and `usage`.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::translate::chat_reply::{bare_id, incomplete};

/// Why a response ended, as Messages has it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stop {
    pub reason: &'static str,
    /// The matched stop sequence, or `null`.
    pub sequence: Value,
}

/// The tool calls of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Calls {
    None,
    /// The arguments of the last one are whole.
    Complete,
    /// The arguments of the last one are no whole JSON. Only the last call can be cut.
    Cut,
}

impl Stop {
    /// Of a choice of a chat, or of its last chunk. `stop_reason` is vLLM's and has the matched stop string.
    ///
    /// # Errors
    /// 502 for an end that leaves the response incomplete, such as `abort`. Messages has no reason for it.
    pub(super) fn of(choice: &Value, calls: Calls) -> Result<Self, ApiError> {
        let sequence = match &choice["stop_reason"] {
            Value::String(text) => Value::from(text.as_str()),
            _ => Value::Null,
        };
        let reason = match choice["finish_reason"].as_str() {
            // A forced call ends with `stop` in vLLM. A call that a stop string has cut must not run
            // (vLLM 0.32, `entrypoints/anthropic/serving.py`).
            Some("stop" | "tool_calls" | "function_call") => match calls {
                Calls::Complete => "tool_use",
                Calls::Cut | Calls::None if sequence.is_string() => "stop_sequence",
                Calls::Cut => "tool_use",
                Calls::None => "end_turn",
            },
            Some("length") => "max_tokens",
            Some("content_filter") => "refusal",
            _ => return Err(incomplete()),
        };
        let sequence = if reason == "stop_sequence" { sequence } else { Value::Null };
        Ok(Self { reason, sequence })
    }
}

/// The usage of a chat. Cached tokens are no part of `input_tokens`.
pub(super) fn usage(usage: &Value) -> Value {
    let tokens = |value: &Value| value.as_u64().unwrap_or(0);
    let cached = tokens(&usage["prompt_tokens_details"]["cached_tokens"]);
    let mut found = json!({
        "input_tokens": tokens(&usage["prompt_tokens"]).saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": tokens(&usage["completion_tokens"]),
    });
    if let Some(reasoning) = usage["completion_tokens_details"]["reasoning_tokens"].as_u64() {
        found["output_tokens_details"] = json!({"thinking_tokens": reasoning});
    }
    found
}

/// The id of a message, from that of a chat.
pub(super) fn message_id(chat: &Value) -> String {
    format!("msg_{}", bare_id(chat))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_of_reasoning_are_counted_where_the_chat_counts_them() {
        let mut chat = json!({"prompt_tokens": 9, "completion_tokens": 4});
        assert_eq!(usage(&chat).get("output_tokens_details"), None);
        chat["completion_tokens_details"] = json!({"accepted_prediction_tokens": 2});
        assert_eq!(usage(&chat).get("output_tokens_details"), None, "Messages has no counts of drafts");
        chat["completion_tokens_details"] = json!({"reasoning_tokens": 3, "rejected_prediction_tokens": 1});
        assert_eq!(usage(&chat)["output_tokens_details"], json!({"thinking_tokens": 3}));
    }
}
