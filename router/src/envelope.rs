//! The form of errors towards a client: OpenAI's, or Anthropic's on its paths. Streams of Responses end in their own.

use baton_openai::ApiError;
use baton_openai::sse::DONE;
use baton_openai::translate::{messages, responses};
use bytes::Bytes;
use serde_json::{Value, json};

/// The form of errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Envelope {
    #[default]
    OpenAi,
    Anthropic,
    /// OpenAI's, but for the end of a stream.
    Responses,
    /// That of llm-d's sidecar for failures of engines (5xx), and the first or the second one for other errors.
    Sidecar {
        is_anthropic: bool,
    },
}

impl Envelope {
    /// The form for a request's path.
    pub(crate) fn at(path: &str) -> Self {
        match path {
            responses::PATH => Self::Responses,
            path if messages::is_at(path) => Self::Anthropic,
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
            Self::OpenAi | Self::Responses | Self::Sidecar { is_anthropic: false } => error.to_bytes(),
            Self::Anthropic | Self::Sidecar { is_anthropic: true } => messages::error_body(error),
        }
    }

    /// The last bytes of a stream that fails. OpenAI's streams end with `[DONE]` even then, but for those of Responses.
    pub(crate) fn last_event(self, error: &ApiError) -> Bytes {
        match self {
            Self::OpenAi | Self::Sidecar { is_anthropic: false } => [error.to_sse(), DONE].concat().into(),
            Self::Responses => responses::error_event(error),
            Self::Anthropic | Self::Sidecar { is_anthropic: true } => messages::error_event(error),
        }
    }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_form_of_an_error_follows_the_path() {
        assert_eq!(Envelope::at("/v1/messages/count_tokens"), Envelope::Anthropic);
        assert_eq!(Envelope::at("/v1/responses"), Envelope::Responses);
        assert_eq!(Envelope::at("/v1/chat/completions"), Envelope::OpenAi);
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
    fn a_failed_stream_of_messages_or_responses_ends_without_done() {
        let error = ApiError::bad_gateway("a");
        assert_eq!(Envelope::Anthropic.last_event(&error), messages::error_event(&error));
        assert_eq!(Envelope::Responses.last_event(&error), responses::error_event(&error));
        assert!(Envelope::OpenAi.last_event(&error).ends_with(b"data: [DONE]\n\n"));
    }
}
