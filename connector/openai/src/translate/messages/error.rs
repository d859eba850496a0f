//! Errors in Anthropic's envelope.

use bytes::Bytes;
use serde_json::{Value, json};

use super::PATH;
use crate::error::ApiError;
use crate::translate::events::event;

/// Whether a path is of Anthropic's API, whose errors have this form.
#[must_use]
pub fn is_at(path: &str) -> bool {
    path.strip_prefix(PATH).is_some_and(|below| below.is_empty() || below.starts_with('/'))
}

/// The body of a reply.
#[must_use]
pub fn error_body(error: &ApiError) -> Bytes {
    envelope(error).to_string().into()
}

/// The last event of a stream that fails.
#[must_use]
pub fn error_event(error: &ApiError) -> Bytes {
    event(&envelope(error))
}

fn envelope(error: &ApiError) -> Value {
    json!({"type": "error", "error": {"type": kind(error.status), "message": error.message}})
}

/// The `type` of an error with this status, as vLLM 0.33 has it.
fn kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn paths_of_messages_have_anthropics_envelope() {
        for path in ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"] {
            assert!(is_at(path), "{path}");
        }
        for path in ["/v1/messagesx", "/v1/chat/completions", "/", "/v1/message"] {
            assert!(!is_at(path), "{path}");
        }
    }

    #[test]
    fn the_type_of_an_error_follows_its_status() {
        for (error, expected) in [
            (ApiError::invalid("max_tokens", "x"), "invalid_request_error"),
            (ApiError::unauthorized(), "authentication_error"),
            (ApiError::model_not_found("m"), "not_found_error"),
            (ApiError::payload_too_large(1), "request_too_large"),
            (ApiError::overloaded("x", Duration::ZERO), "rate_limit_error"),
            (ApiError::unavailable("x", Duration::ZERO), "overloaded_error"),
            (ApiError::bad_gateway("x"), "api_error"),
            (ApiError::gateway_timeout("x"), "api_error"),
        ] {
            let body: Value = serde_json::from_slice(&error_body(&error)).expect("JSON");
            let expected = json!({"type": "error", "error": {"type": expected, "message": error.message}});
            assert_eq!(body, expected);
        }
    }

    #[test]
    fn a_failed_stream_ends_with_a_named_event() {
        let last = error_event(&ApiError::bad_gateway("a\nb"));
        let text = std::str::from_utf8(&last).expect("UTF-8");
        assert!(
            text.starts_with("event: error\ndata: {\"type\":\"error\"") && text.ends_with("}\n\n"),
            "{text}"
        );
        assert_eq!(text.matches('\n').count(), 3);
    }
}
