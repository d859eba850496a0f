//! What a client is told when an engine said no: the engine's own words where they are the client's business,
//! ours where they are not. Never an address.

use std::borrow::Cow;
use std::time::Duration;

use baton_connector::exchange::Failure;
use baton_openai::{ApiError, ErrorKind};
use hyper::StatusCode;
use serde_json::Value;

use crate::upstream::Whole;

/// When to come back, where the engine does not say.
const COME_BACK: Duration = Duration::from_secs(1);

/// An error on its way to the client.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Refusal(pub ApiError);

/// Whether a status says that another engine might do better; `None`: another would refuse it too.
pub(crate) fn failure_of(status: StatusCode) -> Option<Failure> {
    let elsewhere = status.is_server_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
        || !status.is_client_error();
    elsewhere.then_some(Failure::Answered)
}

impl Refusal {
    pub(crate) fn unreachable() -> Self {
        Self(ApiError::unavailable("no engine could be reached for this model", COME_BACK))
    }

    pub(crate) fn none_left() -> Self {
        Self(ApiError::unavailable("no engine of this model is available", COME_BACK))
    }

    pub(crate) fn broken() -> Self {
        Self(ApiError::bad_gateway("an engine failed while it worked on the request"))
    }

    pub(crate) fn silent() -> Self {
        Self(ApiError::gateway_timeout("an engine did not answer in time"))
    }

    /// What an engine's answer other than 2xx means to the client.
    pub(crate) fn of(answer: &Whole) -> Self {
        let after = retry_after(answer).unwrap_or(COME_BACK);
        Self(match answer.status {
            StatusCode::TOO_MANY_REQUESTS => ApiError::overloaded("every engine asked is full", after),
            StatusCode::SERVICE_UNAVAILABLE => {
                ApiError::unavailable("no engine of this model is available", after)
            }
            status if status.is_client_error() => clients_fault(status, &answer.body),
            _ => return Self::broken(),
        })
    }
}

/// The engine's own words: `{"error": {...}}`, or vLLM's older `{"object": "error", ...}`.
fn clients_fault(status: StatusCode, body: &[u8]) -> ApiError {
    let body: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
    let error = body.get("error").filter(|e| e.is_object()).unwrap_or(&body);
    let text = |name: &str| error.get(name).and_then(Value::as_str).filter(|t| !t.is_empty());
    let said = text("message").filter(|message| !names_an_address(message));
    let code = error.get("code").filter(|code| !code.is_null());
    ApiError {
        status: status.as_u16(),
        kind: match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ErrorKind::Authentication,
            _ => ErrorKind::InvalidRequest,
        },
        message: said.unwrap_or("an engine refused the request").to_owned(),
        param: text("param").map(str::to_owned),
        code: code.map(|code| Cow::Owned(code.as_str().map_or_else(|| code.to_string(), str::to_owned))),
        retry_after: None,
        should_retry: None,
    }
}

/// An engine that repeats where it lives is not repeated.
fn names_an_address(message: &str) -> bool {
    let address = |word: &str| {
        let word = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
        let (host, port) = word.rsplit_once(':').unwrap_or((word, ""));
        let host = host.trim_matches(['[', ']']);
        let named = port.parse::<u16>().is_ok() && host.contains(['.', '-']);
        named || [word, host].iter().any(|text| text.parse::<std::net::IpAddr>().is_ok())
    };
    message.contains("://") || message.split_ascii_whitespace().any(address)
}

fn retry_after(answer: &Whole) -> Option<Duration> {
    let header = |name: &str| answer.headers.get(name)?.to_str().ok()?.trim().parse::<u64>().ok();
    header("retry-after-ms")
        .map(Duration::from_millis)
        .or_else(|| header("retry-after").map(Duration::from_secs))
        .map(|after| after.min(Duration::from_secs(3600)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &str) -> Whole {
        let status = StatusCode::from_u16(status).expect("a status");
        Whole { status, headers: Default::default(), body: body.to_owned().into() }
    }

    #[test]
    fn the_engines_own_words_reach_the_client_when_the_fault_is_the_clients() {
        let ours = r#"{"error":{"message":"too long","type":"x","param":"prompt","code":"context_length_exceeded"}}"#;
        let Refusal(error) = Refusal::of(&answer(400, ours));
        assert_eq!((error.status, error.message.as_str()), (400, "too long"));
        assert_eq!(error.code.as_deref(), Some("context_length_exceeded"));
        let older = r#"{"object":"error","message":"no such model","code":404}"#;
        let Refusal(error) = Refusal::of(&answer(404, older));
        assert_eq!((error.message.as_str(), error.code.as_deref()), ("no such model", Some("404")));
        assert_eq!(Refusal::of(&answer(422, "<html>")).0.status, 422);
    }

    #[test]
    fn an_address_never_reaches_the_client() {
        for said in [
            "cannot reach http://10.0.0.7:8000/v1",
            "peer 10.0.0.7:5600 is gone",
            "from (10.0.0.7).",
            "prefill-0.svc:5600 is gone",
            "peer [fd00::7]:5600 is gone",
            "from fd00::7",
        ] {
            let body = serde_json::json!({"error": {"message": said}}).to_string();
            let Refusal(error) = Refusal::of(&answer(400, &body));
            assert_eq!(error.message, "an engine refused the request", "{said}");
        }
        let plain = "`stop[0]` must be a string of 1 to 1024 bytes: got 7";
        let body = serde_json::json!({"error": {"message": plain}}).to_string();
        let Refusal(error) = Refusal::of(&answer(400, &body));
        assert_eq!(error.message, plain);
    }

    #[test]
    fn only_an_engines_own_trouble_is_tried_elsewhere() {
        for (status, elsewhere) in
            [(400, false), (404, false), (422, false), (429, true), (500, true), (503, true)]
        {
            let status = StatusCode::from_u16(status).expect("a status");
            assert_eq!(failure_of(status).is_some(), elsewhere, "{status}");
        }
    }
}
