//! Translates an engine's error into the client's error. The engine's message is passed on if the request is at fault,
//! and replaced otherwise. It never contains an address.

use std::borrow::Cow;
use std::time::Duration;

use baton_connector::exchange::Failure;
use baton_openai::{ApiError, Code, ErrorKind};
use hyper::StatusCode;
use serde_json::Value;

use super::engine_error::{EngineError, context_and_prompt};
use crate::engines::http::WholeReply;
use crate::engines::redact::AddressRedactor;

/// The delay before a retry, if the engine returns none.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Limit on an engine's message to a client.
const MESSAGE_BYTES_MAX: usize = 1024;
/// Addresses are redacted up to here; the rest is cut off, however short the redacted addresses are.
const READ_BYTES_MAX: usize = 4 * MESSAGE_BYTES_MAX;

/// Dynamo's and Anthropic's status for shed load.
const OVERLOADED: u16 = 529;

/// An error response for the client.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Refusal(pub ApiError);

/// The interpretation of an error response.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// For the exchange.
    pub class: ErrorClass,
    /// For the engine.
    pub fault: Fault,
    /// For the client.
    pub refusal: Refusal,
}

/// The meaning of an error response for the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorClass {
    /// The request itself is refused; another engine would refuse it too.
    Refused,
    /// The engine is full, draining or has failed. Another engine may succeed with the same handoff.
    Retryable,
    /// The engine has cached too little of the prompt to serve the request. Otherwise like [`Self::Retryable`].
    PrefixMissing,
    /// The engine reports an internal error (500). Like [`Self::Retryable`], but a stock decode engine returns nothing
    /// else if the producer is gone.
    InternalError,
    /// The engine cannot use the handoff. Another one may; if none can, the prompt is computed again.
    CannotUseHandoff,
    /// No engine can use the handoff any more: the prompt is computed again.
    HandoffSpent,
    /// The engine does not accept this router's cluster secret or engine key. The operator has to fix it.
    Misconfigured,
    /// The engine does not serve the configured model. The operator has to fix it.
    WrongModel,
}

/// The fault attribution of a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No fault: the engine is full, cannot use a handoff, or its health has recorded the failure already.
    None,
    /// The engine may be broken, or the request may break engines.
    Engine,
    /// The engine did not respond, not even to a liveness probe. It may be unresponsive for this request only.
    Unresponsive,
    /// The engine is draining.
    Draining,
    /// The engine cannot read the blocks of the producer.
    Layout,
}

impl Verdict {
    /// Interprets an error response. `hosts` contains the addresses to redact.
    pub(crate) fn of(answer: &WholeReply, hosts: &AddressRedactor) -> Self {
        let body = serde_json::from_slice(&answer.body).unwrap_or(Value::Null);
        let error = EngineError::of(&body, &answer.body);
        let (class, fault) = error.classify(answer);
        Self { class, fault, refusal: Refusal::of(answer, class, &error, hosts) }
    }

    /// The failure for the exchange; `None` if the request itself is refused.
    pub(crate) fn failure(&self) -> Option<Failure> {
        (self.class != ErrorClass::Refused).then_some(Failure::Answered)
    }
}

impl EngineError<'_> {
    fn classify(&self, answer: &WholeReply) -> (ErrorClass, Fault) {
        let by_status = match answer.status.as_u16() {
            408 | 429 | OVERLOADED => (ErrorClass::Retryable, Fault::None),
            // Answered before inference, and not about the request: a vLLM engine changes its role (409, `pd_role`), or
            // the engine has cached too little of the prompt (412, also by llm-d's picker).
            409 => (ErrorClass::Retryable, Fault::None),
            412 => (ErrorClass::PrefixMissing, Fault::None),
            400..=499 => (ErrorClass::Refused, Fault::None),
            500 => (ErrorClass::InternalError, Fault::Engine),
            // The engine lacks the endpoint (vLLM's Rust front end).
            501 => (ErrorClass::Refused, Fault::None),
            502.. => (ErrorClass::Retryable, Fault::Engine),
            _ => (ErrorClass::Retryable, Fault::None),
        };
        match (answer.status.as_u16(), &*self.code) {
            (401 | 403, "invalid_cluster_secret") => (ErrorClass::Misconfigured, Fault::None),
            (401 | 403, _) if answer.own_key => (ErrorClass::Misconfigured, Fault::None),
            // The engine has ended the request at the deadline that the router sent. Any other would do the same.
            (504, "request_timeout") => (ErrorClass::Refused, Fault::None),
            (_, "draining") => (by_status.0, Fault::Draining),
            (_, "overloaded") => (by_status.0, Fault::None),
            // A decode engine's error about a handoff never concerns the client's request, which contains none.
            (_, "kv_gone" | "kv_unsupported") => (ErrorClass::HandoffSpent, Fault::None),
            (_, "kv_layout_mismatch") => (ErrorClass::CannotUseHandoff, Fault::Layout),
            (_, "kv_handshake_failed" | "kv_transfer_failed" | "kv_unverified" | "kv_refused") => {
                (ErrorClass::CannotUseHandoff, Fault::None)
            }
            (_, "kv_prompt_mismatch" | "kv_wrong_role") => (ErrorClass::CannotUseHandoff, Fault::None),
            (_, "invalid_kv_transfer_params") => (ErrorClass::CannotUseHandoff, by_status.1),
            // A code of a later version concerns the handoff, and so not the client's request.
            (_, code) if code.starts_with("kv_") => (ErrorClass::CannotUseHandoff, Fault::None),
            // The router has found the model in its own configuration before it sent the request.
            (404, code)
                if code == "model_not_found" || matches!(self.kind, "NotFoundError" | "not_found_error") =>
            {
                (ErrorClass::WrongModel, Fault::Engine)
            }
            _ => by_status,
        }
    }

    /// The client's error for a faulty request: without addresses, and shortened.
    fn client_error(&self, status: StatusCode, hosts: &AddressRedactor) -> ApiError {
        // A name that contains an address is useless to a client; a sentence is useful without the address.
        let visible = |text: &str| (!text.is_empty() && !hosts.occur_in(text)).then(|| cut(text).to_owned());
        let message = self.message.as_deref().and_then(|text| {
            let begun = &text[..text.floor_char_boundary(READ_BYTES_MAX)];
            Some(cut(&hosts.redact(begun)?).to_owned())
        });
        ApiError {
            status: status.as_u16(),
            kind: match status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ErrorKind::Authentication,
                _ => ErrorKind::InvalidRequest,
            },
            message: message.unwrap_or_else(|| "an engine refused the request".to_owned()),
            param: self.param.as_deref().and_then(visible),
            code: visible(&self.code).map(Cow::Owned),
            retry_after: None,
            should_retry: None,
            allowed: None,
            challenge: None,
        }
    }
}

impl Refusal {
    pub(crate) fn unreachable() -> Self {
        Self(ApiError::unavailable("no engine could be reached for this model", RETRY_AFTER))
    }

    pub(crate) fn none_left() -> Self {
        Self(ApiError::unavailable("no engine of this model is available", RETRY_AFTER))
    }

    /// All engines are full.
    pub(crate) fn all_busy() -> Self {
        Self(ApiError::overloaded("all engines are busy", RETRY_AFTER))
    }

    /// The budget for engine responses is exhausted.
    pub(crate) fn no_memory() -> Self {
        Self(ApiError::overloaded("the router is busy with other answers", RETRY_AFTER))
    }

    /// An engine's response has a content coding that cannot be decoded.
    pub(crate) fn unreadable() -> Self {
        Self(ApiError::bad_gateway("an engine's answer has a content coding that cannot be decoded"))
    }

    pub(crate) fn broken() -> Self {
        Self(ApiError::bad_gateway("an engine failed while it worked on the request"))
    }

    /// An engine does not accept this router's secret or key. Only the operator can fix it, so the client reads 502.
    pub(crate) fn misconfigured() -> Self {
        Self(ApiError::of(Code::Misconfigured, "the router and an engine are not configured alike"))
    }

    /// An engine does not serve the configured model. Only the operator can fix it.
    pub(crate) fn wrong_model() -> Self {
        Self(ApiError::of(Code::MisconfiguredModel, "the router and an engine are not configured alike"))
    }

    /// The engines of the model lack the endpoint.
    fn lacks_endpoint() -> Self {
        let message = "the engines of this model do not have this endpoint".to_owned();
        Self(ApiError { message, ..ApiError::unsupported_endpoint("") })
    }

    /// Whether an engine lacks the endpoint.
    pub(crate) fn is_unsupported_endpoint(&self) -> bool {
        self.0.code == Some(Code::UnsupportedEndpoint.into())
    }

    /// The request has exceeded its time limit.
    pub(crate) fn out_of_time() -> Self {
        Self(ApiError::gateway_timeout("the request took longer than it may").with_code(Code::RequestTimeout))
    }

    pub(crate) fn timed_out() -> Self {
        Self(ApiError::gateway_timeout("an engine did not answer in time"))
    }

    /// Adapts a prefill engine's refusal to the client's request: the client did not request the single token that the
    /// router requested, so the message must not mention it.
    pub(crate) fn of_prefill(mut self) -> Self {
        let message = &self.0.message;
        let too_long = self.0.code.as_deref() == Some("context_length_exceeded")
            || message.contains("context length")
            || message.contains("maximum model length")
            || message.contains("max_tokens");
        if too_long && self.0.status == 400 {
            let text = ApiError::without_max_tokens(message).map(str::to_owned);
            // vLLM's first sentence: "This model's maximum context length is 8 tokens."
            let text = text.or_else(|| {
                let (context, prompt) = context_and_prompt(message)?;
                Some(format!(
                    "This model's maximum context length is {context} tokens, but the prompt has {prompt}"
                ))
            });
            let text = text.or_else(|| {
                let (text, _) = message.split_once(". ")?;
                text.contains("context length").then(|| format!("{text}; the prompt is longer"))
            });
            self.0.message = text.unwrap_or_else(|| {
                "the prompt is too long: it exceeds the model's maximum context length".to_owned()
            });
        }
        self
    }

    fn of(answer: &WholeReply, class: ErrorClass, error: &EngineError<'_>, hosts: &AddressRedactor) -> Self {
        let after = || answer.retry_after.unwrap_or(RETRY_AFTER);
        Self(match (class, answer.status) {
            (ErrorClass::Misconfigured, _) => return Self::misconfigured(),
            (ErrorClass::WrongModel, _) => return Self::wrong_model(),
            (_, status) if matches!(status.as_u16(), 429 | OVERLOADED) => {
                ApiError::overloaded("every engine asked is full", after())
            }
            (_, StatusCode::SERVICE_UNAVAILABLE | StatusCode::CONFLICT | StatusCode::PRECONDITION_FAILED) => {
                ApiError::unavailable("no engine of this model is available", after())
            }
            (ErrorClass::Refused, StatusCode::GATEWAY_TIMEOUT) => return Self::out_of_time(),
            (ErrorClass::Refused, StatusCode::NOT_IMPLEMENTED) => return Self::lacks_endpoint(),
            (ErrorClass::Refused, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED)
                if error.lacks_path() =>
            {
                return Self::lacks_endpoint();
            }
            (ErrorClass::Refused, status) | (_, status @ StatusCode::REQUEST_TIMEOUT) => {
                error.client_error(status, hosts)
            }
            // Not the client's fault, whatever the status means to a router.
            (
                ErrorClass::Retryable
                | ErrorClass::PrefixMissing
                | ErrorClass::InternalError
                | ErrorClass::CannotUseHandoff
                | ErrorClass::HandoffSpent,
                _,
            ) => {
                return Self::broken();
            }
        })
    }
}

/// The beginning, in whole characters.
fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MESSAGE_BYTES_MAX)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &str) -> WholeReply {
        let status = StatusCode::from_u16(status).expect("a status");
        WholeReply { status, retry_after: None, body: body.to_owned().into(), own_key: false }
    }

    fn verdict(answer: &WholeReply) -> Verdict {
        let hosts = AddressRedactor::default();
        hosts.add("p-17");
        Verdict::of(answer, &hosts)
    }

    fn refusal(status: u16, body: &str) -> Refusal {
        verdict(&answer(status, body)).refusal
    }

    #[test]
    fn a_refused_router_key_is_a_misconfiguration_and_a_refused_client_key_is_not() {
        for status in [401, 403] {
            let body = r#"{"error":{"message":"Unauthorized","code":"invalid_api_key"}}"#;
            let of_client = answer(status, body);
            assert_eq!(verdict(&of_client).class, ErrorClass::Refused);
            assert_eq!(verdict(&of_client).refusal.0.status, status);
            let of_router = WholeReply { own_key: true, ..of_client };
            assert_eq!(verdict(&of_router).class, ErrorClass::Misconfigured);
            assert_eq!(verdict(&of_router).refusal, Refusal::misconfigured());
        }
    }

    #[test]
    fn an_engine_that_keeps_the_deadline_is_not_at_fault() {
        let late = r#"{"error":{"message":"late","type":"timeout_error","code":"request_timeout"}}"#;
        let of_deadline = verdict(&answer(504, late));
        assert_eq!((of_deadline.class, of_deadline.fault), (ErrorClass::Refused, Fault::None));
        assert_eq!(of_deadline.refusal, Refusal::out_of_time());
        let of_proxy = verdict(&answer(504, "upstream request timeout"));
        assert_eq!((of_proxy.class, of_proxy.fault), (ErrorClass::Retryable, Fault::Engine));
    }

    #[test]
    fn an_engine_error_is_cut_at_a_character_boundary() {
        let long = "ä".repeat(2000);
        let body = serde_json::json!({"error": {"message": long, "param": long, "code": long}}).to_string();
        let Refusal(error) = refusal(400, &body);
        assert_eq!(error.message, "ä".repeat(MESSAGE_BYTES_MAX / 2));
        assert_eq!(error.param.as_deref(), Some(error.message.as_str()));
        assert_eq!(error.code.as_deref(), Some(error.message.as_str()));
        let odd = serde_json::json!({"error": {"message": format!("x{long}")}}).to_string();
        assert_eq!(refusal(400, &odd).0.message.len(), MESSAGE_BYTES_MAX - 1);
    }

    #[test]
    fn the_engines_message_reaches_the_client_for_a_client_fault() {
        let ours = r#"{"error":{"message":"too long","type":"x","param":"prompt","code":"context_length_exceeded"}}"#;
        let Refusal(error) = refusal(400, ours);
        assert_eq!((error.status, error.message.as_str()), (400, "too long"));
        assert_eq!(error.code.as_deref(), Some("context_length_exceeded"));
        let older = r#"{"object":"error","message":"no such model","code":404}"#;
        let Refusal(error) = refusal(404, older);
        assert_eq!((error.message.as_str(), error.code.as_deref()), ("no such model", Some("404")));
        let Refusal(error) = refusal(422, "<html>");
        assert_eq!((error.status, error.message.as_str()), (422, "an engine refused the request"));
        let Refusal(error) = refusal(400, "the prompt is empty");
        assert_eq!((error.status, error.message.as_str()), (400, "the prompt is empty"));
        let list =
            r#"{"detail":[{"loc":["body","n"],"msg":"Input should be at least 1","url":"https://x.dev"}]}"#;
        let Refusal(error) = refusal(422, list);
        assert_eq!(error.message, "n: Input should be at least 1");
        assert_eq!((error.status, error.param.as_deref()), (422, Some("n")));
    }

    #[test]
    fn the_prefill_legs_max_tokens_is_hidden_from_the_client() {
        for (message, expected) in [
            (
                ApiError::context_length(9, 1, 8).message.as_str(),
                "This model's maximum context length is 8 tokens, but the prompt has 9",
            ),
            (
                "This model's maximum context length is 8 tokens. However, you requested 10 tokens (9 in the \
                 messages, 1 in the completion).",
                "This model's maximum context length is 8 tokens, but the prompt has 9",
            ),
            (
                "This model's maximum context length is 8 tokens. Please shorten the prompt.",
                "This model's maximum context length is 8 tokens; the prompt is longer",
            ),
            (
                "max_tokens=1 is too much",
                "the prompt is too long: it exceeds the model's maximum context length",
            ),
            ("`stop` is wrong", "`stop` is wrong"),
        ] {
            let body = serde_json::json!({"error": {"message": message}}).to_string();
            assert_eq!(refusal(400, &body).of_prefill().0.message, expected);
        }
    }

    #[test]
    fn an_address_reaches_the_client_in_no_field() {
        for (text, expected) in [
            ("cannot reach http://10.0.0.7:8000/v1", "cannot reach [address]"),
            ("host=10.0.0.7", "host=[address]"),
            ("decode0:8000", "an engine refused the request"),
            ("p-17 is gone", "[address] is gone"),
        ] {
            let body =
                serde_json::json!({"error": {"message": text, "param": text, "code": text}}).to_string();
            let Refusal(error) = refusal(400, &body);
            assert_eq!(error.message, expected, "{text}");
            assert_eq!((error.param, error.code), (None, None), "{text}");
        }
        let plain = "`stop[0]` must be a string of 1 to 1024 bytes: got 7";
        let body =
            serde_json::json!({"error": {"message": plain, "param": "stop.0", "code": 400}}).to_string();
        let Refusal(error) = refusal(400, &body);
        assert_eq!((error.message.as_str(), error.param.as_deref()), (plain, Some("stop.0")));
        assert_eq!(error.code.as_deref(), Some("400"));
    }

    #[test]
    fn only_an_engine_failure_counts_against_the_engine() {
        for (status, code, expected) in [
            (500, "", Fault::Engine),
            (503, "engine_failed", Fault::Engine),
            (404, "model_not_found", Fault::Engine),
            (503, "draining", Fault::Draining),
            (503, "overloaded", Fault::None),
            (503, "kv_gone", Fault::None),
            (503, "kv_something_new", Fault::None),
            (400, "kv_layout_mismatch", Fault::Layout),
            (401, "invalid_cluster_secret", Fault::None),
            (429, "", Fault::None),
            (529, "", Fault::None),
            (409, "", Fault::None),
            (412, "", Fault::None),
            (302, "", Fault::None),
        ] {
            let body = serde_json::json!({"error": {"code": code}}).to_string();
            assert_eq!(verdict(&answer(status, &body)).fault, expected, "{status} {code}");
        }
        let vllm =
            r#"{"error":{"type":"NotFoundError","code":404,"message":"The model `x` does not exist."}}"#;
        let Verdict { class, fault, .. } = verdict(&answer(404, vllm));
        assert_eq!((class, fault), (ErrorClass::WrongModel, Fault::Engine));
    }

    #[test]
    fn an_endpoint_that_the_engines_lack_is_no_typing_error_and_no_wrong_model() {
        for (status, body) in [
            (404, r#"{"detail":"Not Found"}"#),
            (404, "404 page not found"),
            (
                404,
                r#"{"error":{"message":"no such path: /v1/x","code":"not_found","type":"invalid_request_error"}}"#,
            ),
            (
                404,
                r#"{"error":{"message":"x","code":"unsupported_endpoint","type":"invalid_request_error"}}"#,
            ),
        ] {
            let Verdict { class, fault, refusal } = verdict(&answer(status, body));
            assert_eq!((class, fault), (ErrorClass::Refused, Fault::None), "{body}");
            assert!(refusal.is_unsupported_endpoint(), "{body}: {refusal:?}");
            assert_eq!(refusal.0.status, 404, "{body}");
        }
        // Errors about something that the request names.
        for body in
            [r#"{"detail":"no such adapter"}"#, r#"{"error":{"message":"Not Found","param":"file_id"}}"#]
        {
            let Verdict { class, refusal, .. } = verdict(&answer(404, body));
            assert_eq!(class, ErrorClass::Refused);
            assert!(!refusal.is_unsupported_endpoint(), "{body}");
        }
    }

    #[test]
    fn only_an_engine_failure_is_retried_elsewhere() {
        for (status, code, expected) in [
            (400, "x", ErrorClass::Refused),
            (422, "", ErrorClass::Refused),
            (401, "invalid_api_key", ErrorClass::Refused),
            (401, "invalid_cluster_secret", ErrorClass::Misconfigured),
            (429, "overloaded", ErrorClass::Retryable),
            (408, "", ErrorClass::Retryable),
            (529, "", ErrorClass::Retryable),
            (409, "", ErrorClass::Retryable),
            (412, "", ErrorClass::PrefixMissing),
            (500, "", ErrorClass::InternalError),
            (502, "", ErrorClass::Retryable),
            (503, "draining", ErrorClass::Retryable),
            (503, "engine_failed", ErrorClass::Retryable),
            (503, "kv_handshake_failed", ErrorClass::CannotUseHandoff),
            (503, "kv_transfer_failed", ErrorClass::CannotUseHandoff),
            (503, "kv_unverified", ErrorClass::CannotUseHandoff),
            (503, "kv_refused", ErrorClass::CannotUseHandoff),
            (503, "kv_gone", ErrorClass::HandoffSpent),
            (400, "kv_layout_mismatch", ErrorClass::CannotUseHandoff),
            (400, "kv_prompt_mismatch", ErrorClass::CannotUseHandoff),
            (400, "kv_wrong_role", ErrorClass::CannotUseHandoff),
            (400, "invalid_kv_transfer_params", ErrorClass::CannotUseHandoff),
            (400, "kv_unsupported", ErrorClass::HandoffSpent),
            (400, "kv_of_a_later_version", ErrorClass::CannotUseHandoff),
            (503, "kv_of_a_later_version", ErrorClass::CannotUseHandoff),
            (404, "model_not_found", ErrorClass::WrongModel),
        ] {
            let answer =
                answer(status, &serde_json::json!({"error": {"code": code, "message": "x"}}).to_string());
            let Verdict { class, refusal: Refusal(error), .. } = verdict(&answer);
            assert_eq!(class, expected, "{status} {code}");
            let is_server_error = expected != ErrorClass::Refused && !matches!(status, 408 | 429 | 529);
            assert_eq!(error.status >= 500, is_server_error, "{status} {code}: the client gets {error}");
        }
    }
}
