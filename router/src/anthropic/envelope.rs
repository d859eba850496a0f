//! The form of errors towards a client: OpenAI's, or Anthropic's on its paths.

use baton_openai::ApiError;
use baton_openai::sse::DONE;
use bytes::Bytes;
use serde_json::{Value, json};

use crate::message::path::MESSAGES;

/// The form of errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Envelope {
    #[default]
    OpenAi,
    Anthropic,
    /// That of llm-d's sidecar for failures of engines (5xx), and the first or the second one for other errors.
    Sidecar {
        is_anthropic: bool,
    },
}

impl Envelope {
    /// The form for a request's path.
    pub(crate) fn at(path: &str) -> Self {
        match path.strip_prefix(MESSAGES) {
            Some(below) if below.is_empty() || below.starts_with('/') => Self::Anthropic,
            _ => Self::OpenAi,
        }
    }

    /// The same in a sidecar.
    pub(crate) fn of_sidecar(self) -> Self {
        Self::Sidecar { is_anthropic: self == Self::Anthropic }
    }

    /// The body of a response.
    pub(crate) fn body(self, error: &ApiError) -> Bytes {
        match self {
            Self::Sidecar { .. } if error.status >= 500 => gateway_error(error).to_string().into(),
            Self::Sidecar { is_anthropic: false } => Self::OpenAi.body(error),
            Self::Sidecar { is_anthropic: true } => Self::Anthropic.body(error),
            Self::OpenAi => error.to_bytes(),
            Self::Anthropic => envelope(error).to_string().into(),
        }
    }

    /// The last bytes of a stream that fails. OpenAI's streams end with `[DONE]` even then.
    pub(crate) fn last_event(self, error: &ApiError) -> Bytes {
        match self {
            Self::OpenAi | Self::Sidecar { is_anthropic: false } => [error.to_sse(), DONE].concat().into(),
            Self::Anthropic | Self::Sidecar { is_anthropic: true } => event(&envelope(error)),
        }
    }
}

/// An event of a stream, named by its `type`.
pub(super) fn event(data: &Value) -> Bytes {
    format!("event: {}\ndata: {data}\n\n", data["type"].as_str().unwrap_or_default()).into()
}

fn envelope(error: &ApiError) -> Value {
    json!({"type": "error", "error": {"type": kind(error.status), "message": error.message}})
}

/// An error of llm-d's routing sidecar (pkg/sidecar/proxy/errors.go), in vLLM's older form.
fn gateway_error(error: &ApiError) -> Value {
    let kind = match error.status {
        502 => "BadGateway",
        503 => "ServiceUnavailable",
        504 => "GatewayTimeout",
        _ => "InternalServerError",
    };
    json!({"object": "error", "message": error.message, "type": kind, "param": null, "code": error.status})
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
            assert_eq!(Envelope::at(path), Envelope::Anthropic, "{path}");
        }
        for path in ["/v1/messagesx", "/v1/chat/completions", "/", "/v1/message"] {
            assert_eq!(Envelope::at(path), Envelope::OpenAi, "{path}");
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
            let body: Value = serde_json::from_slice(&Envelope::Anthropic.body(&error)).expect("JSON");
            let expected = json!({"type": "error", "error": {"type": expected, "message": error.message}});
            assert_eq!(body, expected);
        }
    }

    #[test]
    fn a_sidecar_has_llmds_form_for_failures_of_engines_only() {
        let of = |path, error: &ApiError| -> Value {
            serde_json::from_slice(&Envelope::at(path).of_sidecar().body(error)).expect("JSON")
        };
        let unavailable = ApiError::unavailable("x", Duration::ZERO);
        let expected = json!(
            {"object": "error", "message": "x", "type": "ServiceUnavailable", "param": null, "code": 503}
        );
        for path in ["/v1/chat/completions", "/v1/messages", "/metrics"] {
            assert_eq!(of(path, &unavailable), expected, "{path}");
        }
        assert_eq!(of("/", &ApiError::bad_gateway("x"))["type"], "BadGateway");
        assert_eq!(of("/v1/messages", &ApiError::model_not_found("m"))["type"], "error");
        assert_eq!(of("/v1/completions", &ApiError::invalid("n", "x"))["error"]["param"], "n");
    }

    #[test]
    fn a_failed_stream_ends_with_a_named_event_and_without_done() {
        let last = Envelope::Anthropic.last_event(&ApiError::bad_gateway("a\nb"));
        let text = std::str::from_utf8(&last).expect("UTF-8");
        assert!(
            text.starts_with("event: error\ndata: {\"type\":\"error\"") && text.ends_with("}\n\n"),
            "{text}"
        );
        assert_eq!(text.matches('\n').count(), 3);
        let last = Envelope::OpenAi.last_event(&ApiError::bad_gateway("a"));
        assert!(last.ends_with(b"data: [DONE]\n\n"));
    }
}
