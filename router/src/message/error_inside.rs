//! An engine's error under a head that says 200: an event of a stream, or a whole answer.
//!
//! `{"error": {...}}`, vLLM's older `{"object": "error", ...}`, of responses `{"type": "error", ...}` and
//! `{"type": "response.failed", "response": {"error": {...}}}`. What else is no answer is found here too: a whole one that is
//! cut, empty, or a page of some proxy.

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::HeaderValue;
use serde_json::Value;

use crate::message::usage::Skim;

/// An engine's words are read up to this length.
pub(crate) const ERROR_BYTES_MAX: usize = 64 << 10;

/// An error as its engine would have answered it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ErrorInside {
    /// 500 where it does not say.
    pub status: StatusCode,
    /// JSON; empty where it is too long.
    pub error: Bytes,
}

/// What a whole 200 is, if it is no answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    Error(ErrorInside),
    /// Cut, empty, or not JSON where that is meant.
    Broken,
}

impl ErrorInside {
    /// Of data whose members say that it is one.
    pub(crate) fn of(data: Bytes, skim: &Skim) -> Option<Self> {
        if !skim.is_error() {
            return None;
        }
        let error = if data.len() <= ERROR_BYTES_MAX { data } else { Bytes::new() };
        let body: Value = serde_json::from_slice(&error).unwrap_or_default();
        let within = &body["response"]["error"];
        if within.is_object() && !body["error"].is_object() {
            return Some(Self { status: status(within), error: within.to_string().into() });
        }
        let said = if body["error"].is_object() { &body["error"] } else { &body };
        Some(Self { status: status(said), error })
    }

    /// Of an event whose name says that it is one, whatever its data is.
    pub(crate) fn named(data: Bytes) -> Self {
        let said = serde_json::from_slice(&data).unwrap_or(Value::Null);
        let error = if said.is_object() && data.len() <= ERROR_BYTES_MAX { data } else { Bytes::new() };
        Self { status: status(&said), error }
    }
}

/// Whether a whole 200 is no answer. `kind` is its `Content-Type`; what is not `generated` may be other things than JSON.
pub(crate) fn unfit(
    whole: &Bytes,
    skim: &Skim,
    kind: Option<&HeaderValue>,
    generated: bool,
) -> Option<Unfit> {
    if let Some(error) = ErrorInside::of(whole.clone(), skim) {
        return Some(Unfit::Error(error));
    }
    let fits =
        if generated { skim.is_whole() && skim.is_object() } else { !is_text(kind) || skim.is_whole() };
    (!fits).then_some(Unfit::Broken)
}

/// Whether something that says it is JSON, HTML or nothing at all.
fn is_text(kind: Option<&HeaderValue>) -> bool {
    let Some(kind) = kind else { return true };
    let kind = kind.as_bytes().to_ascii_lowercase();
    let kind = kind.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    kind == b"application/json" || kind.ends_with(b"+json") || kind == b"text/html"
}

/// vLLM says it in `code`; Baton's engines have names there, and the kind of error says it.
fn status(error: &Value) -> StatusCode {
    let code = error["code"].as_u64().and_then(|code| u16::try_from(code).ok());
    let kind = match error["type"].as_str().unwrap_or_default() {
        "invalid_request_error" => 400,
        "overloaded_error" => 429,
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

    fn unfit_of(text: &str, kind: Option<&str>, generated: bool) -> Option<Unfit> {
        let whole = Bytes::copy_from_slice(text.as_bytes());
        let kind = kind.map(|kind| HeaderValue::from_str(kind).expect("a value"));
        unfit(&whole, &Skim::of(&whole), kind.as_ref(), generated)
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
                let Some(Unfit::Error(found)) = found else { panic!("{text}: {found:?}") };
                assert_eq!((found.status.as_u16(), &*found.error), (status, text.as_bytes()));
            }
        }
        let long = format!(r#"{{"error":{{"message":"{}"}}}}"#, "x".repeat(ERROR_BYTES_MAX));
        let Some(Unfit::Error(found)) = unfit_of(&long, None, true) else { panic!("it is one") };
        assert_eq!((found.status.as_u16(), found.error.len()), (500, 0), "bounded");
    }

    #[test]
    fn a_response_that_failed_is_an_error_and_one_that_did_not_is_none() {
        let failed =
            r#"{"type":"response.failed","response":{"status":"failed","error":{"code":"server_error"}}}"#;
        let data = Bytes::from_static(failed.as_bytes());
        let found = ErrorInside::of(data.clone(), &Skim::of(&data)).expect("it failed");
        assert_eq!((found.status.as_u16(), &*found.error), (500, &br#"{"code":"server_error"}"#[..]));
        let data = Bytes::from_static(br#"{"type":"response.created","response":{"error":null}}"#);
        assert_eq!(ErrorInside::of(data.clone(), &Skim::of(&data)), None);
    }

    #[test]
    fn what_is_cut_empty_or_a_page_is_no_answer() {
        for text in
            ["", "{\"choices\":[{\"text\":\"a\"}]", "{\"choices\":[", "<html></html>", "Bad Gateway", "[]"]
        {
            for kind in [None, Some("application/json"), Some("text/html")] {
                assert_eq!(unfit_of(text, kind, true), Some(Unfit::Broken), "{text}");
            }
        }
        assert_eq!(unfit_of("{\"choices\":[]}", Some("application/json"), true), None);
    }

    #[test]
    fn what_is_not_generated_may_be_a_list_or_bytes() {
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
            assert_eq!(unfit_of(text, kind, false), Some(Unfit::Broken), "{text}");
        }
    }

    #[test]
    fn an_event_that_is_named_an_error_is_one_whatever_its_data_is() {
        let named = |text: &'static str| ErrorInside::named(Bytes::from_static(text.as_bytes()));
        assert_eq!(
            named("10.0.0.7 is gone"),
            ErrorInside { status: StatusCode::INTERNAL_SERVER_ERROR, error: Bytes::new() }
        );
        assert_eq!(named("{\"code\":503}").status.as_u16(), 503);
    }
}
