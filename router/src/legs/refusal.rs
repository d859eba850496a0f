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
/// An engine's words to a client are cut here.
const SAID_BYTES_MAX: usize = 1024;

/// An error on its way to the client.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Refusal(pub ApiError);

/// What an engine's answer other than 2xx means for the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The request itself is refused; another engine would refuse it too.
    Refused,
    /// The engine is in trouble: full, draining, failed. Another may do better, with the same handoff.
    Trouble,
    /// The engine says that it failed inside (500). As [`Self::Trouble`], and a stock decode engine says no more than
    /// this when the engine that lends is gone.
    FailedInside,
    /// The engine cannot use the handoff. Another may; if none can, the prompt is computed anew.
    CannotUseHandoff,
    /// Nobody can use the handoff any more: the prompt is computed anew.
    HandoffSpent,
    /// The engine does not accept this router's cluster secret, or its key for that engine. That is for the operator, not for the client.
    Misconfigured,
    /// The engine does not serve the model that the router's configuration says it serves. For the operator, too.
    WrongModel,
}

/// What an attempt that failed says of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blame {
    /// Nothing: it is full, or cannot use what another engine lends, or its health knows already.
    Nobody,
    /// It may be broken, or the request may be one that breaks engines.
    Engine,
    /// It answered nothing, not even whether it lives: to this request, or to anybody.
    Deaf,
    /// It is being emptied.
    Draining,
    /// It cannot read the blocks of the engine that lends.
    Layout,
}

impl Blame {
    pub(crate) fn of(answer: &Whole) -> Self {
        let body: Value = serde_json::from_slice(&answer.body).unwrap_or(Value::Null);
        match (answer.status.as_u16(), body["error"]["code"].as_str().unwrap_or_default()) {
            (_, "draining") => Self::Draining,
            (_, "kv_layout_mismatch") => Self::Layout,
            (_, "overloaded") => Self::Nobody,
            (404, "model_not_found") => Self::Engine,
            (404, _) if body["error"]["type"] == "NotFoundError" => Self::Engine,
            (_, code) if code.starts_with("kv_") => Self::Nobody,
            (500.., _) => Self::Engine,
            _ => Self::Nobody,
        }
    }
}

impl Meaning {
    pub(crate) fn of(answer: &Whole) -> Self {
        let body: Value = serde_json::from_slice(&answer.body).unwrap_or(Value::Null);
        match (answer.status.as_u16(), body["error"]["code"].as_str().unwrap_or_default()) {
            (401 | 403, "invalid_cluster_secret") => Self::Misconfigured,
            (401 | 403, _) if answer.own_key => Self::Misconfigured,
            // What a decode engine says of a handoff is never about the client's own words: it sent none.
            (_, "kv_gone" | "kv_unsupported") => Self::HandoffSpent,
            (_, "kv_handshake_failed" | "kv_transfer_failed" | "kv_unverified" | "kv_refused") => {
                Self::CannotUseHandoff
            }
            (_, "kv_layout_mismatch" | "kv_prompt_mismatch" | "kv_wrong_role") => Self::CannotUseHandoff,
            (_, "invalid_kv_transfer_params") => Self::CannotUseHandoff,
            (408 | 429, _) => Self::Trouble,
            // The router has found the model in its own configuration before it asked.
            (404, "model_not_found") => Self::WrongModel,
            (404, _) if body["error"]["type"] == "NotFoundError" => Self::WrongModel,
            (400..=499, _) => Self::Refused,
            (500, _) => Self::FailedInside,
            _ => Self::Trouble,
        }
    }

    /// What it is to the exchange; `None` for a refusal.
    pub(crate) fn failure(self) -> Option<Failure> {
        (self != Self::Refused).then_some(Failure::Answered)
    }
}

impl Refusal {
    pub(crate) fn unreachable() -> Self {
        Self(ApiError::unavailable("no engine could be reached for this model", COME_BACK))
    }

    pub(crate) fn none_left() -> Self {
        Self(ApiError::unavailable("no engine of this model is available", COME_BACK))
    }

    /// Engines are there, and busy.
    pub(crate) fn all_busy() -> Self {
        Self(ApiError::overloaded("all engines are busy", COME_BACK))
    }

    pub(crate) fn broken() -> Self {
        Self(ApiError::bad_gateway("an engine failed while it worked on the request"))
    }

    /// An engine does not accept this router's secret or key: the operator's to mend, so the client reads no more than 502.
    pub(crate) fn misconfigured() -> Self {
        Self(
            ApiError::bad_gateway("the router and an engine are not configured alike")
                .with_code("misconfigured"),
        )
    }

    /// An engine does not serve the model that it is configured for: the operator's to mend.
    pub(crate) fn wrong_model() -> Self {
        Self(
            ApiError::bad_gateway("the router and an engine are not configured alike")
                .with_code("misconfigured_model"),
        )
    }

    /// The request itself has taken longer than it may.
    pub(crate) fn out_of_time() -> Self {
        Self(ApiError::gateway_timeout("the request took longer than it may").with_code("request_timeout"))
    }

    pub(crate) fn silent() -> Self {
        Self(ApiError::gateway_timeout("an engine did not answer in time"))
    }

    /// A prefill engine's refusal as the client's: what the engine says of the one token that the router asked it for is
    /// not about anything that the client has asked.
    pub(crate) fn of_prefill(mut self) -> Self {
        let message = &self.0.message;
        let too_long = self.0.code.as_deref() == Some("context_length_exceeded")
            || message.contains("maximum context length")
            || message.contains("max_tokens");
        if too_long && self.0.status == 400 {
            // Ours: "the model's context is 8 tokens, but the prompt has 9 and max_tokens asks for 1"; vLLM's first
            // sentence: "This model's maximum context length is 8 tokens."
            let said = message.split_once(" and max_tokens asks").map(|(said, _)| said.to_owned());
            let said = said.or_else(|| {
                let (said, _) = message.split_once(". ")?;
                said.contains("context length").then(|| format!("{said}; the prompt is longer"))
            });
            self.0.message = said.unwrap_or_else(|| "the prompt does not fit the model's context".to_owned());
        }
        self
    }

    /// What an engine's answer other than 2xx means to the client.
    pub(crate) fn of(answer: &Whole) -> Self {
        let after = retry_after(answer).unwrap_or(COME_BACK);
        if Meaning::of(answer).failure().is_some() && answer.status.is_client_error() {
            // Not the client's doing, whatever the status says to a router.
            match Meaning::of(answer) {
                Meaning::Misconfigured => return Self::misconfigured(),
                Meaning::WrongModel => return Self::wrong_model(),
                _ => {}
            }
            if !matches!(answer.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT) {
                return Self::broken();
            }
        }
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
        message: cut(said.unwrap_or("an engine refused the request")).to_owned(),
        param: text("param").map(|param| cut(param).to_owned()),
        code: code.map(|code| Cow::Owned(cut(code.as_str().unwrap_or(&code.to_string())).to_owned())),
        retry_after: None,
        should_retry: None,
    }
}

/// The beginning, in whole characters.
fn cut(said: &str) -> &str {
    &said[..said.floor_char_boundary(SAID_BYTES_MAX)]
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
        Whole { status, headers: Default::default(), body: body.to_owned().into(), own_key: false }
    }

    #[test]
    fn an_engine_that_refuses_the_routers_own_key_is_misconfigured_and_the_clients_key_is_the_clients() {
        for status in [401, 403] {
            let body = r#"{"error":{"message":"Unauthorized","code":"invalid_api_key"}}"#;
            let of_client = answer(status, body);
            assert_eq!(Meaning::of(&of_client), Meaning::Refused);
            assert_eq!(Refusal::of(&of_client).0.status, status);
            let of_router = Whole { own_key: true, ..of_client };
            assert_eq!(Meaning::of(&of_router), Meaning::Misconfigured);
            assert_eq!(Refusal::of(&of_router), Refusal::misconfigured());
        }
    }

    #[test]
    fn an_engines_words_are_cut_in_whole_characters() {
        let long = "ä".repeat(2000);
        let body = serde_json::json!({"error": {"message": long, "param": long, "code": long}}).to_string();
        let Refusal(error) = Refusal::of(&answer(400, &body));
        assert_eq!(error.message, "ä".repeat(SAID_BYTES_MAX / 2));
        assert_eq!(error.param.as_deref(), Some(error.message.as_str()));
        assert_eq!(error.code.as_deref(), Some(error.message.as_str()));
        let odd = serde_json::json!({"error": {"message": format!("x{long}")}}).to_string();
        assert_eq!(Refusal::of(&answer(400, &odd)).0.message.len(), SAID_BYTES_MAX - 1);
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
    fn the_one_token_of_the_prefill_leg_is_not_told_to_the_client() {
        for (said, told) in [
            (
                "the model's context is 8 tokens, but the prompt has 9 and max_tokens asks for 1",
                "the model's context is 8 tokens, but the prompt has 9",
            ),
            (
                "This model's maximum context length is 8 tokens. However, you requested 10 tokens (9 in the \
                 messages, 1 in the completion).",
                "This model's maximum context length is 8 tokens; the prompt is longer",
            ),
            ("max_tokens=1 is too much", "the prompt does not fit the model's context"),
            ("`stop` is wrong", "`stop` is wrong"),
        ] {
            let body = serde_json::json!({"error": {"message": said}}).to_string();
            assert_eq!(Refusal::of(&answer(400, &body)).of_prefill().0.message, told);
        }
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
        for (status, code, meaning) in [
            (400, "x", Meaning::Refused),
            (422, "", Meaning::Refused),
            (401, "invalid_api_key", Meaning::Refused),
            (401, "invalid_cluster_secret", Meaning::Misconfigured),
            (429, "overloaded", Meaning::Trouble),
            (408, "", Meaning::Trouble),
            (500, "", Meaning::FailedInside),
            (502, "", Meaning::Trouble),
            (503, "draining", Meaning::Trouble),
            (503, "engine_failed", Meaning::Trouble),
            (503, "kv_handshake_failed", Meaning::CannotUseHandoff),
            (503, "kv_transfer_failed", Meaning::CannotUseHandoff),
            (503, "kv_unverified", Meaning::CannotUseHandoff),
            (503, "kv_refused", Meaning::CannotUseHandoff),
            (503, "kv_gone", Meaning::HandoffSpent),
            (400, "kv_layout_mismatch", Meaning::CannotUseHandoff),
            (400, "kv_prompt_mismatch", Meaning::CannotUseHandoff),
            (400, "kv_wrong_role", Meaning::CannotUseHandoff),
            (400, "invalid_kv_transfer_params", Meaning::CannotUseHandoff),
            (400, "kv_unsupported", Meaning::HandoffSpent),
            (404, "model_not_found", Meaning::WrongModel),
        ] {
            let said =
                answer(status, &serde_json::json!({"error": {"code": code, "message": "x"}}).to_string());
            assert_eq!(Meaning::of(&said), meaning, "{status} {code}");
            let Refusal(told) = Refusal::of(&said);
            let ours = meaning != Meaning::Refused && !matches!(status, 408 | 429);
            assert_eq!(told.status >= 500, ours, "{status} {code}: the client is told {told}");
        }
    }
}
