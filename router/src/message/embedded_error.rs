//! An engine's error in a reply with status 200: an event of a stream, or a whole reply.
//!
//! Forms: `{"error": {...}}`, vLLM's older `{"object": "error", ...}`, and those of responses: `{"type": "error",
//! ...}` and `{"type": "response.failed", "response": {"error": {...}}}`. The same checks find a whole reply that
//! is cut, empty, or a proxy's page.

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::HeaderValue;
use serde_json::Value;

use crate::message::usage::JsonScanner;

/// Maximum bytes of an engine's error that are parsed.
pub(crate) const ERROR_BYTES_MAX: usize = 64 << 10;

/// The error that stands for an engine's own abort (`message/engine_abort.rs`). By its code the next engine recomputes
/// the prompt.
pub(crate) const ABORT_ERROR: &str = r#"{"error":{"message":"the engine aborted the request","type":"service_unavailable_error","param":null,"code":"kv_gone"}}"#;

/// An error as its engine would have sent it with the right status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EmbeddedError {
    /// 500 where the error contains none.
    pub status: StatusCode,
    /// JSON; empty if it is too long.
    pub error: Bytes,
}

/// Why a whole 200 is no valid reply.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum InvalidReply {
    Error(EmbeddedError),
    /// Cut, empty, or not JSON where JSON is expected.
    Broken,
}

impl EmbeddedError {
    /// The error in data that is an error by its members.
    pub(crate) fn of(data: Bytes, scanner: &JsonScanner) -> Option<Self> {
        if !scanner.is_error() {
            return None;
        }
        let error = if data.len() <= ERROR_BYTES_MAX { data } else { Bytes::new() };
        let body: Value = serde_json::from_slice(&error).unwrap_or_default();
        let within = &body["response"]["error"];
        if within.is_object() && !body["error"].is_object() {
            return Some(Self { status: status(within), error: within.to_string().into() });
        }
        let members = if body["error"].is_object() { &body["error"] } else { &body };
        Some(Self { status: status(members), error })
    }

    /// The engine's own abort, in the middle of a stream or in a whole reply.
    pub(crate) fn of_abort() -> Self {
        Self { status: StatusCode::SERVICE_UNAVAILABLE, error: Bytes::from_static(ABORT_ERROR.as_bytes()) }
    }

    /// The error of an event that is named an error, whatever its data is.
    pub(crate) fn of_error_event(data: Bytes) -> Self {
        let value = serde_json::from_slice(&data).unwrap_or(Value::Null);
        let error = if value.is_object() && data.len() <= ERROR_BYTES_MAX { data } else { Bytes::new() };
        Self { status: status(&value), error }
    }
}

/// Whether a whole 200 is invalid. `kind` is its `Content-Type`. A reply that is not `generated` may have another
/// type than JSON.
pub(crate) fn check_reply(
    reply: &Bytes,
    scanner: &JsonScanner,
    kind: Option<&HeaderValue>,
    generated: bool,
) -> Option<InvalidReply> {
    if let Some(error) = EmbeddedError::of(reply.clone(), scanner) {
        return Some(InvalidReply::Error(error));
    }
    let fits = if generated {
        scanner.is_whole() && scanner.is_object()
    } else {
        !is_text(kind) || scanner.is_whole()
    };
    (!fits).then_some(InvalidReply::Broken)
}

/// Whether a response has no output and no output tokens: vLLM 0.32 reports an abort before the first token so, as
/// `completed` or `incomplete`. A model that ends at once has generated the token of the end. SGLang counts no tokens of
/// some responses, but they have output.
pub(crate) fn has_no_output(response: &Value) -> bool {
    response["output"].as_array().is_some_and(Vec::is_empty) && response["usage"]["output_tokens"] == 0
}

/// Whether the type is JSON, HTML or missing.
fn is_text(kind: Option<&HeaderValue>) -> bool {
    let Some(kind) = kind else { return true };
    let kind = kind.as_bytes().to_ascii_lowercase();
    let kind = kind.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    kind == b"application/json" || kind.ends_with(b"+json") || kind == b"text/html"
}

/// The status of an error. vLLM has it in `code`. Baton's engines have names there, and the type of error implies
/// the status.
fn status(error: &Value) -> StatusCode {
    let code = error["code"].as_u64().and_then(|code| u16::try_from(code).ok());
    let kind = match error["type"].as_str().unwrap_or_default() {
        "invalid_request_error" => 400,
        "authentication_error" => 401,
        "permission_error" => 403,
        "not_found_error" => 404,
        "request_too_large" => 413,
        "overloaded_error" | "rate_limit_error" => 429,
        "service_unavailable_error" => 503,
        "timeout_error" => 504,
        _ => 500,
    };
    let status = code.filter(|code| (400..600).contains(code)).unwrap_or(kind);
    StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unfit_of(text: &str, kind: Option<&str>, generated: bool) -> Option<InvalidReply> {
        let whole = Bytes::copy_from_slice(text.as_bytes());
        let kind = kind.map(|kind| HeaderValue::from_str(kind).expect("a value"));
        check_reply(&whole, &JsonScanner::of(&whole), kind.as_ref(), generated)
    }

    #[test]
    fn a_whole_answer_that_is_an_error_is_one_with_its_status() {
        for (text, status) in [
            (r#"{"error":{"message":"x","code":503}}"#, 503),
            (r#"{"error":{"message":"x","type":"invalid_request_error"},"choices":[]}"#, 400),
            (r#"{"error":"out of memory"}"#, 500),
            (r#"{"object":"error","message":"x","code":400}"#, 400),
            (r#"{"object":"error","message":"x","type":"BadRequestError","code":7}"#, 500),
        ] {
            for generated in [true, false] {
                let found = unfit_of(text, Some("application/json"), generated);
                let Some(InvalidReply::Error(found)) = found else { panic!("{text}: {found:?}") };
                assert_eq!((found.status.as_u16(), &*found.error), (status, text.as_bytes()));
            }
        }
        let long = format!(r#"{{"error":{{"message":"{}"}}}}"#, "x".repeat(ERROR_BYTES_MAX));
        let Some(InvalidReply::Error(found)) = unfit_of(&long, None, true) else { panic!("it is one") };
        assert_eq!((found.status.as_u16(), found.error.len()), (500, 0), "bounded");
    }

    #[test]
    fn a_response_that_failed_is_an_error_and_one_that_did_not_is_none() {
        let failed =
            r#"{"type":"response.failed","response":{"status":"failed","error":{"code":"server_error"}}}"#;
        let data = Bytes::from_static(failed.as_bytes());
        let found = EmbeddedError::of(data.clone(), &JsonScanner::of(&data)).expect("it failed");
        assert_eq!((found.status.as_u16(), &*found.error), (500, &br#"{"code":"server_error"}"#[..]));
        let data = Bytes::from_static(br#"{"type":"response.created","response":{"error":null}}"#);
        assert_eq!(EmbeddedError::of(data.clone(), &JsonScanner::of(&data)), None);
    }

    #[test]
    fn a_truncated_empty_or_html_body_is_no_response() {
        for text in
            ["", "{\"choices\":[{\"text\":\"a\"}]", "{\"choices\":[", "<html></html>", "Bad Gateway", "[]"]
        {
            for kind in [None, Some("application/json"), Some("text/html")] {
                assert_eq!(unfit_of(text, kind, true), Some(InvalidReply::Broken), "{text}");
            }
        }
        assert_eq!(unfit_of("{\"choices\":[]}", Some("application/json"), true), None);
    }

    #[test]
    fn a_response_that_is_not_generated_may_be_a_list_or_bytes() {
        for (text, kind) in [
            ("[{\"index\":0}]", None),
            ("{\"data\":[]}", Some("application/json; charset=utf-8")),
            ("", Some("application/octet-stream")),
            ("\u{7f}\u{1}", Some("application/octet-stream")),
        ] {
            assert_eq!(unfit_of(text, kind, false), None, "{text}");
        }
        for (text, kind) in [
            ("{\"data\":[", Some("Application/JSON; charset=utf-8")),
            ("", Some("application/json")),
            ("<html></html>", Some("text/html")),
            ("<html></html>", None),
        ] {
            assert_eq!(unfit_of(text, kind, false), Some(InvalidReply::Broken), "{text}");
        }
    }

    #[test]
    fn an_event_named_error_is_an_error() {
        let named = |text: &'static str| EmbeddedError::of_error_event(Bytes::from_static(text.as_bytes()));
        assert_eq!(
            named("10.0.0.7 is gone"),
            EmbeddedError { status: StatusCode::INTERNAL_SERVER_ERROR, error: Bytes::new() }
        );
        assert_eq!(named("{\"code\":503}").status.as_u16(), 503);
    }

    #[test]
    fn the_error_in_its_place_says_that_the_handoff_is_spent() {
        let error: Value = serde_json::from_str(ABORT_ERROR).unwrap();
        assert_eq!(
            (&error["error"]["code"], error["error"].as_object().unwrap().len()),
            (&Value::from("kv_gone"), 4)
        );
    }
}
