//! What went wrong, as a client reads it: status, OpenAI envelope, retry headers, SSE frame.
//!
//! | kind | status | `type` | OpenAI SDKs retry |
//! |---|---|---|---|
//! | invalid, not found, method, payload | 400, 404, 405, 413 | `invalid_request_error` | no |
//! | unauthorized | 401 | `authentication_error` | no |
//! | request timeout | 408 | `timeout_error` | yes |
//! | rate limited, overloaded | 429 | `rate_limit_error`, `overloaded_error` | yes, after `Retry-After` |
//! | client gone | 499 | `client_closed_request` | nobody reads it; for logs |
//! | internal, bad gateway | 500, 502 | `server_error` | yes |
//! | unavailable, gateway timeout | 503, 504 | `service_unavailable_error`, `timeout_error` | yes |
//!
//! The SDKs' behaviour is read from openai-python and openai-node: they retry 408, 409, 429 and 5xx, obey
//! `retry-after-ms` before `Retry-After`, and obey `x-should-retry` before both. 429 means that capacity is
//! contended, 503 that there is none (llm-d's convention).

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

use crate::Code;

/// Bytes of a client's own words that a message repeats.
const ECHO_BYTES_MAX: usize = 128;
/// Between the two halves of what is said of a context that is too short.
const ASKS: &str = " and max_tokens asks for ";

/// An error that a client is told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status} {message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// What kind of error; says the envelope's `type`.
    pub kind: ErrorKind,
    /// For people. Never contains an upstream's address.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
    /// For programs.
    pub code: Option<Cow<'static, str>>,
    /// When to come back.
    pub retry_after: Option<Duration>,
    /// Overrides the SDKs' rule by status: `x-should-retry`.
    pub should_retry: Option<bool>,
    /// The methods that the path has, where the request's is not one of them.
    pub allowed: Option<&'static str>,
}

/// Whose fault, in the envelope's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The client's: change the request.
    InvalidRequest,
    /// The client's: bring a key.
    Authentication,
    /// Too many requests from this client.
    RateLimit,
    /// The engines are full for now.
    Overloaded,
    /// A deadline passed.
    Timeout,
    /// There is nothing to serve the request with.
    Unavailable,
    /// Ours.
    Server,
    /// The client hung up.
    ClientGone,
}

impl ErrorKind {
    /// The envelope's `type`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::RateLimit => "rate_limit_error",
            Self::Overloaded => "overloaded_error",
            Self::Timeout => "timeout_error",
            Self::Unavailable => "service_unavailable_error",
            Self::Server => "server_error",
            Self::ClientGone => "client_closed_request",
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
        }
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
        Self::new(400, ErrorKind::InvalidRequest, message).with_code(Code::MalformedBody)
    }

    /// 400: prompt and `max_tokens` do not fit the model's context.
    #[must_use]
    pub fn context_length(prompt_tokens: usize, max_tokens: usize, context_tokens: usize) -> Self {
        let message = format!(
            "the model's context is {context_tokens} tokens, but the prompt has {prompt_tokens}{ASKS}{max_tokens}"
        );
        Self::invalid("prompt", message).with_code(Code::ContextLengthExceeded)
    }

    /// 400: the prompt leaves no room for an answer, of whatever length.
    #[must_use]
    pub fn prompt_too_long(prompt_tokens: usize, context_tokens: usize) -> Self {
        let message = format!(
            "the model's context is {context_tokens} tokens, but the prompt has {prompt_tokens} and an answer at least 1"
        );
        Self::invalid("prompt", message).with_code(Code::ContextLengthExceeded)
    }

    /// What [`Self::context_length`] says, without the `max_tokens`: for somebody who asked for another number. `None`
    /// for what it did not write.
    #[must_use]
    pub fn without_max_tokens(message: &str) -> Option<&str> {
        let (said, asked) = message.split_once(ASKS)?;
        asked.parse::<usize>().is_ok().then_some(said)
    }

    /// 401: no key, or an unknown one.
    #[must_use]
    pub fn unauthorized() -> Self {
        Self::new(401, ErrorKind::Authentication, "missing or unknown API key").with_code(Code::InvalidApiKey)
    }

    /// 404: no such model here.
    #[must_use]
    pub fn model_not_found(name: &str) -> Self {
        let mut error = Self::invalid("model", format!("the model `{}` does not exist", shortened(name)));
        error.status = 404;
        error.with_code(Code::ModelNotFound)
    }

    /// 404: no such path.
    #[must_use]
    pub fn not_found(path: &str) -> Self {
        Self::new(404, ErrorKind::InvalidRequest, format!("no such path: {}", shortened(path)))
            .with_code(Code::NotFound)
    }

    /// 404: a path of a known API that is not served here.
    #[must_use]
    pub fn unsupported_endpoint(path: &str) -> Self {
        Self::new(404, ErrorKind::InvalidRequest, format!("this server does not have {}", shortened(path)))
            .with_code(Code::UnsupportedEndpoint)
    }

    /// 405. `allowed` is what `Allow` says: `GET, HEAD`.
    #[must_use]
    pub fn method_not_allowed(method: &str, allowed: &'static str) -> Self {
        let message = format!("method {} is not allowed here; use {allowed}", shortened(method));
        let error = Self::new(405, ErrorKind::InvalidRequest, message).with_code(Code::MethodNotAllowed);
        Self { allowed: Some(allowed), ..error }
    }

    /// 408: the request itself did not arrive in time.
    #[must_use]
    pub fn request_timeout(waited: Duration) -> Self {
        let message = format!("the request did not arrive within {} ms", waited.as_millis());
        Self::new(408, ErrorKind::Timeout, message).with_code(Code::RequestTimeout)
    }

    /// 413: the body is over the limit.
    #[must_use]
    pub fn payload_too_large(limit_bytes: usize) -> Self {
        let message = format!("the body is larger than the limit of {limit_bytes} bytes");
        Self::new(413, ErrorKind::InvalidRequest, message).with_code(Code::PayloadTooLarge)
    }

    /// 429: this client asks too often.
    #[must_use]
    pub fn rate_limited(message: impl Into<String>, retry_after: Duration) -> Self {
        Self::new(429, ErrorKind::RateLimit, message)
            .with_code(Code::RateLimitExceeded)
            .with_retry(retry_after)
    }

    /// 429: queues are full, for everybody.
    #[must_use]
    pub fn overloaded(message: impl Into<String>, retry_after: Duration) -> Self {
        Self::new(429, ErrorKind::Overloaded, message).with_code(Code::Overloaded).with_retry(retry_after)
    }

    /// 499, for logs and metrics: the client hung up first.
    #[must_use]
    pub fn client_gone() -> Self {
        Self::new(499, ErrorKind::ClientGone, "the client closed the connection").with_code(Code::ClientGone)
    }

    /// 500: our own mistake. `message` must not carry internals.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, ErrorKind::Server, message).with_code(Code::InternalError)
    }

    /// 502: an engine answered with something that is not an answer.
    #[must_use]
    pub fn bad_gateway(message: impl Into<String>) -> Self {
        Self::new(502, ErrorKind::Server, message).with_code(Code::BadGateway)
    }

    /// 503: nothing can serve this now.
    #[must_use]
    pub fn unavailable(message: impl Into<String>, retry_after: Duration) -> Self {
        Self::new(503, ErrorKind::Unavailable, message).with_code(Code::Unavailable).with_retry(retry_after)
    }

    /// 504: an engine did not answer in time.
    #[must_use]
    pub fn gateway_timeout(message: impl Into<String>) -> Self {
        Self::new(504, ErrorKind::Timeout, message).with_code(Code::GatewayTimeout)
    }

    /// The same error with another `code`, which goes with its status and kind.
    #[must_use]
    pub fn with_code(mut self, code: Code) -> Self {
        debug_assert!(
            code.statuses().contains(&self.status) && code.kind() == self.kind,
            "{self} does not go with {code:?}"
        );
        self.code = Some(code.into());
        self
    }

    /// The same error with a time to come back.
    #[must_use]
    pub fn with_retry(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// The same error, telling SDKs not to try again by themselves.
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

    /// Header names (lower case) and values that go with it, `content-type` included.
    #[must_use]
    pub fn headers(&self) -> Vec<(&'static str, String)> {
        let mut headers = vec![("content-type", "application/json".to_owned())];
        if let Some(after) = self.retry_after {
            let millis = after.as_millis().max(1);
            headers.push(("retry-after", millis.div_ceil(1000).to_string()));
            headers.push(("retry-after-ms", millis.to_string()));
        }
        headers.extend(self.allowed.map(|allowed| ("allow", allowed.to_owned())));
        if let Some(retry) = self.should_retry {
            headers.push(("x-should-retry", retry.to_string()));
        }
        headers
    }

    /// The error inside a stream that has begun, as vLLM sends it; `data: [DONE]` follows it.
    #[must_use]
    pub fn to_sse(&self) -> Bytes {
        crate::sse::frame(&self.to_bytes())
    }
}

/// A client's own words, cut to a length that fits a message.
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
    fn a_method_that_is_not_allowed_is_told_those_that_are() {
        let headers = ApiError::method_not_allowed("PUT", "GET, HEAD").headers();
        assert!(headers.contains(&("allow", "GET, HEAD".into())));
        assert!(!ApiError::not_found("/").headers().iter().any(|(name, _)| *name == "allow"));
    }

    #[test]
    fn the_max_tokens_of_a_context_that_is_too_short_can_be_left_out() {
        let ApiError { message, .. } = ApiError::context_length(9, 1, 8);
        assert!(message.ends_with("max_tokens asks for 1"), "{message}");
        let said = ApiError::without_max_tokens(&message);
        assert_eq!(said, Some("the model's context is 8 tokens, but the prompt has 9"));
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
