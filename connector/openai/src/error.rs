//! Errors for clients: status, OpenAI envelope, retry headers, SSE frame.
//!
//! | kind | status | `type` | OpenAI SDKs retry |
//! |---|---|---|---|
//! | invalid, not found, method, payload | 400, 404, 405, 413 | `invalid_request_error` | no |
//! | unauthorized | 401 | `authentication_error` | no |
//! | request timeout | 408 | `timeout_error` | yes |
//! | rate limited, overloaded | 429 | `rate_limit_error`, `overloaded_error` | yes, after `Retry-After` |
//! | client gone | 499 | `client_closed_request` | only in logs |
//! | internal, bad gateway | 500, 502 | `server_error` | yes |
//! | unavailable, gateway timeout | 503, 504 | `service_unavailable_error`, `timeout_error` | yes |
//!
//! The retry behaviour is that of openai-python and openai-node. They retry 408, 409, 429 and 5xx. `x-should-retry` has
//! precedence over `retry-after-ms`, and that over `Retry-After`. 429 means that capacity is contended, 503 that there
//! is none (llm-d's convention).

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

use crate::{Code, ErrorKind};

/// Bytes of client input that a message repeats.
const ECHO_BYTES_MAX: usize = 128;
/// The text before `max_tokens` in the message of a context that is too short.
const ASKS: &str = " and max_tokens asks for ";

/// An error for a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status} {message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// The kind of error: the envelope's `type`.
    pub kind: ErrorKind,
    /// The message. Never contains an upstream's address.
    pub message: String,
    /// The invalid field.
    pub param: Option<String>,
    /// The code for programs.
    pub code: Option<Cow<'static, str>>,
    /// Time until the client should retry.
    pub retry_after: Option<Duration>,
    /// Overrides the SDKs' rule by status: `x-should-retry`.
    pub should_retry: Option<bool>,
    /// The methods of the path, if the request has another one.
    pub allowed: Option<&'static str>,
    /// How to authenticate: `WWW-Authenticate` of a 401 (RFC 6750).
    pub challenge: Option<Challenge>,
}

/// How a client authenticates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Challenge {
    /// With a key or a token.
    Bearer,
    /// With another token: this one is not valid.
    InvalidToken,
}

impl Challenge {
    fn header(self) -> &'static str {
        match self {
            Self::Bearer => "Bearer",
            Self::InvalidToken => "Bearer error=\"invalid_token\"",
        }
    }
}

impl ApiError {
    fn new(status: u16, kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
            should_retry: None,
            allowed: None,
            challenge: None,
        }
    }

    /// An error with `code`, its kind and its first status.
    #[must_use]
    pub fn of(code: Code, message: impl Into<String>) -> Self {
        Self::new(code.statuses()[0], code.kind(), message).with_code(code)
    }

    /// 400: field `param` is not acceptable.
    #[must_use]
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = Self::new(400, ErrorKind::InvalidRequest, message);
        error.param = Some(param.into());
        error
    }

    /// 400: the body as a whole is not acceptable.
    #[must_use]
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::of(Code::MalformedBody, message)
    }

    /// 400: prompt and `max_tokens` do not fit the model's context. Clients recognize vLLM's words (LiteLLM, LangChain).
    #[must_use]
    pub fn context_length(prompt_tokens: usize, max_tokens: usize, context_tokens: usize) -> Self {
        let message = format!(
            "This model's maximum context length is {context_tokens} tokens, but the prompt has {prompt_tokens}{ASKS}{max_tokens}"
        );
        Self::invalid("prompt", message).with_code(Code::ContextLengthExceeded)
    }

    /// 400: the prompt fills the context, so that no token can be generated.
    #[must_use]
    pub fn prompt_too_long(prompt_tokens: usize, context_tokens: usize) -> Self {
        let message = format!(
            "This model's maximum context length is {context_tokens} tokens, and the prompt is too long: it has \
             {prompt_tokens}, and a response at least 1"
        );
        Self::invalid("prompt", message).with_code(Code::ContextLengthExceeded)
    }

    /// The message of [`Self::context_length`] without `max_tokens`, for a client that sent another number. `None` for
    /// another message.
    #[must_use]
    pub fn without_max_tokens(message: &str) -> Option<&str> {
        let (start, max_tokens) = message.split_once(ASKS)?;
        max_tokens.parse::<usize>().is_ok().then_some(start)
    }

    /// 401: no key, or an unknown one.
    #[must_use]
    pub fn unauthorized() -> Self {
        Self {
            challenge: Some(Challenge::Bearer),
            ..Self::of(Code::InvalidApiKey, "missing or unknown API key")
        }
    }

    /// 404: the model does not exist here.
    #[must_use]
    pub fn model_not_found(name: &str) -> Self {
        let mut error = Self::invalid("model", format!("the model `{}` does not exist", shortened(name)));
        error.status = 404;
        error.with_code(Code::ModelNotFound)
    }

    /// 404: the path does not exist.
    #[must_use]
    pub fn not_found(path: &str) -> Self {
        Self::of(Code::NotFound, format!("no such path: {}", shortened(path)))
    }

    /// 404: a path of a known API that is not served here.
    #[must_use]
    pub fn unsupported_endpoint(path: &str) -> Self {
        Self::of(Code::UnsupportedEndpoint, format!("this server does not have {}", shortened(path)))
    }

    /// 405. `allowed` is the value of `Allow`: `GET, HEAD`.
    #[must_use]
    pub fn method_not_allowed(method: &str, allowed: &'static str) -> Self {
        let message = format!("method {} is not allowed here; use {allowed}", shortened(method));
        Self { allowed: Some(allowed), ..Self::of(Code::MethodNotAllowed, message) }
    }

    /// 408: the request itself did not arrive in time.
    #[must_use]
    pub fn request_timeout(waited: Duration) -> Self {
        let message = format!("the request did not arrive within {} ms", waited.as_millis());
        Self::of(Code::RequestTimeout, message)
    }

    /// 413: the body is over the limit.
    #[must_use]
    pub fn payload_too_large(limit_bytes: usize) -> Self {
        let message = format!("the body is larger than the limit of {limit_bytes} bytes");
        Self::of(Code::PayloadTooLarge, message)
    }

    /// 429: this client exceeds its rate limit.
    #[must_use]
    pub fn rate_limited(message: impl Into<String>, retry_after: Duration) -> Self {
        Self::of(Code::RateLimitExceeded, message).with_retry(retry_after)
    }

    /// 429: queues are full, for all clients.
    #[must_use]
    pub fn overloaded(message: impl Into<String>, retry_after: Duration) -> Self {
        Self::of(Code::Overloaded, message).with_retry(retry_after)
    }

    /// 499, for logs and metrics: the client disconnected first.
    #[must_use]
    pub fn client_gone() -> Self {
        Self::of(Code::ClientGone, "the client closed the connection")
    }

    /// 500: a defect of the server. `message` must not contain internals.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::of(Code::InternalError, message)
    }

    /// 502: an engine returned an invalid response.
    #[must_use]
    pub fn bad_gateway(message: impl Into<String>) -> Self {
        Self::of(Code::BadGateway, message)
    }

    /// 503: no engine can serve the request now.
    #[must_use]
    pub fn unavailable(message: impl Into<String>, retry_after: Duration) -> Self {
        Self::of(Code::Unavailable, message).with_retry(retry_after)
    }

    /// 504: an engine did not respond in time.
    #[must_use]
    pub fn gateway_timeout(message: impl Into<String>) -> Self {
        Self::of(Code::GatewayTimeout, message)
    }

    /// The same error with another `code`, which must match its status and kind.
    #[must_use]
    pub fn with_code(mut self, code: Code) -> Self {
        debug_assert!(
            code.statuses().contains(&self.status) && code.kind() == self.kind,
            "{self} does not go with {code:?}"
        );
        self.code = Some(code.into());
        self
    }

    /// The same error with a time until the retry.
    #[must_use]
    pub fn with_retry(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// The same error with `x-should-retry: false`.
    #[must_use]
    pub fn do_not_retry(mut self) -> Self {
        self.should_retry = Some(false);
        self
    }

    /// The OpenAI envelope.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind.as_str(),
            "param": self.param,
            "code": self.code,
        }})
    }

    /// The envelope's bytes: the body of the reply.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        Bytes::from(self.to_json().to_string())
    }

    /// The header names (lower case) and values of the reply, with `content-type`.
    #[must_use]
    pub fn headers(&self) -> Vec<(&'static str, String)> {
        let mut headers = vec![("content-type", "application/json".to_owned())];
        if let Some(after) = self.retry_after {
            let millis = after.as_millis().max(1);
            headers.push(("retry-after", millis.div_ceil(1000).to_string()));
            headers.push(("retry-after-ms", millis.to_string()));
        }
        headers.extend(self.allowed.map(|allowed| ("allow", allowed.to_owned())));
        headers.extend(self.challenge.map(|challenge| ("www-authenticate", challenge.header().to_owned())));
        if let Some(retry) = self.should_retry {
            headers.push(("x-should-retry", retry.to_string()));
        }
        headers
    }

    /// The error as a frame of a started stream, as vLLM sends it. `data: [DONE]` follows.
    #[must_use]
    pub fn to_sse(&self) -> Bytes {
        crate::sse::frame(&self.to_bytes())
    }
}

/// Client input, truncated for a message.
pub(crate) fn shortened(text: &str) -> Cow<'_, str> {
    if text.len() <= ECHO_BYTES_MAX {
        return Cow::Borrowed(text);
    }
    Cow::Owned(format!("{}… ({} bytes)", &text[..text.floor_char_boundary(ECHO_BYTES_MAX)], text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_envelope_has_all_four_fields_even_when_empty() {
        let error = ApiError::not_found("/v2").to_json();
        let fields = error["error"].as_object().expect("an object");
        assert_eq!(fields.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"]);
        assert!(fields["param"].is_null());
    }

    #[test]
    fn retry_after_is_whole_seconds_rounded_up_beside_the_exact_milliseconds() {
        let headers = ApiError::overloaded("full", Duration::from_millis(1500)).headers();
        assert!(headers.contains(&("retry-after", "2".into())));
        assert!(headers.contains(&("retry-after-ms", "1500".into())));
        assert!(
            ApiError::overloaded("full", Duration::ZERO).headers().contains(&("retry-after", "1".into()))
        );
    }

    #[test]
    fn a_405_lists_the_allowed_methods() {
        let headers = ApiError::method_not_allowed("PUT", "GET, HEAD").headers();
        assert!(headers.contains(&("allow", "GET, HEAD".into())));
        assert!(!ApiError::not_found("/").headers().iter().any(|(name, _)| *name == "allow"));
    }

    #[test]
    fn a_context_length_error_may_omit_max_tokens() {
        let ApiError { message, .. } = ApiError::context_length(9, 1, 8);
        assert!(message.ends_with("max_tokens asks for 1"), "{message}");
        let start = ApiError::without_max_tokens(&message);
        assert_eq!(start, Some("This model's maximum context length is 8 tokens, but the prompt has 9"));
        assert_eq!(ApiError::without_max_tokens("anything else"), None);
    }

    #[test]
    fn a_megabyte_of_model_name_is_not_echoed() {
        let error = ApiError::model_not_found(&"é".repeat(1 << 19));
        assert_eq!((error.status, error.code.as_deref()), (404, Some("model_not_found")));
        assert!(error.message.len() < 300);
    }

    #[test]
    fn an_error_in_a_stream_is_one_data_frame() {
        let frame = ApiError::internal("x\ny").to_sse();
        let text = std::str::from_utf8(&frame).expect("utf-8");
        assert!(text.starts_with("data: {") && text.ends_with("}\n\n"));
        assert_eq!(text.matches('\n').count(), 2);
    }
}
