//! What a client is told when an engine said no: the engine's own words where they are the client's business,
//! ours where they are not. Never an address.

use std::borrow::Cow;
use std::time::Duration;

use baton_connector::exchange::Failure;
use baton_openai::{ApiError, Code, ErrorKind};
use hyper::StatusCode;
use serde_json::Value;

use super::said::{Said, context_and_prompt};
use crate::engines::http::Whole;
use crate::engines::redact::Hosts;

/// When to come back, where the engine does not say.
const COME_BACK: Duration = Duration::from_secs(1);
/// An engine's words to a client are cut here.
const SAID_BYTES_MAX: usize = 1024;
/// Addresses are looked for so far: what is behind it is cut off, however short an address becomes.
const READ_BYTES_MAX: usize = 4 * SAID_BYTES_MAX;

/// An error on its way to the client.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Refusal(pub ApiError);

/// All that an answer other than 2xx comes to.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// For the request.
    pub meaning: Meaning,
    /// For the engine.
    pub blame: Blame,
    /// For the client.
    pub refusal: Refusal,
}

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

impl Verdict {
    /// Reads an answer other than 2xx, once. `hosts` are those that the client must not hear of.
    pub(crate) fn of(answer: &Whole, hosts: &Hosts) -> Self {
        let body = serde_json::from_slice(&answer.body).unwrap_or(Value::Null);
        let said = Said::of(&body, &answer.body);
        let (meaning, blame) = said.judged(answer);
        Self { meaning, blame, refusal: Refusal::of(answer, meaning, &said, hosts) }
    }

    /// What it is to the exchange; `None` for a refusal of the request itself.
    pub(crate) fn failure(&self) -> Option<Failure> {
        (self.meaning != Meaning::Refused).then_some(Failure::Answered)
    }
}

impl Said<'_> {
    fn judged(&self, answer: &Whole) -> (Meaning, Blame) {
        let by_status = match answer.status.as_u16() {
            408 | 429 => (Meaning::Trouble, Blame::Nobody),
            400..=499 => (Meaning::Refused, Blame::Nobody),
            500 => (Meaning::FailedInside, Blame::Engine),
            501.. => (Meaning::Trouble, Blame::Engine),
            _ => (Meaning::Trouble, Blame::Nobody),
        };
        match (answer.status.as_u16(), &*self.code) {
            (401 | 403, "invalid_cluster_secret") => (Meaning::Misconfigured, Blame::Nobody),
            (401 | 403, _) if answer.own_key => (Meaning::Misconfigured, Blame::Nobody),
            (_, "draining") => (by_status.0, Blame::Draining),
            (_, "overloaded") => (by_status.0, Blame::Nobody),
            // What a decode engine says of a handoff is never about the client's own words: it sent none.
            (_, "kv_gone" | "kv_unsupported") => (Meaning::HandoffSpent, Blame::Nobody),
            (_, "kv_layout_mismatch") => (Meaning::CannotUseHandoff, Blame::Layout),
            (_, "kv_handshake_failed" | "kv_transfer_failed" | "kv_unverified" | "kv_refused") => {
                (Meaning::CannotUseHandoff, Blame::Nobody)
            }
            (_, "kv_prompt_mismatch" | "kv_wrong_role") => (Meaning::CannotUseHandoff, Blame::Nobody),
            (_, "invalid_kv_transfer_params") => (Meaning::CannotUseHandoff, by_status.1),
            // Of a later version: about the handoff, and so not about the client's own words.
            (_, code) if code.starts_with("kv_") => (Meaning::CannotUseHandoff, Blame::Nobody),
            // The router has found the model in its own configuration before it asked.
            (404, code) if code == "model_not_found" || self.kind == "NotFoundError" => {
                (Meaning::WrongModel, Blame::Engine)
            }
            _ => by_status,
        }
    }

    /// As the client is told it, where the fault is the client's: without what names an address, and cut.
    fn told(&self, status: StatusCode, hosts: &Hosts) -> ApiError {
        // A name with an address in it is of no use to a client; a sentence is, without the address.
        let told = |text: &str| (!text.is_empty() && !hosts.are_named_in(text)).then(|| cut(text).to_owned());
        let message = self.message.as_deref().and_then(|text| {
            let begun = &text[..text.floor_char_boundary(READ_BYTES_MAX)];
            Some(cut(&hosts.without(begun)?).to_owned())
        });
        ApiError {
            status: status.as_u16(),
            kind: match status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ErrorKind::Authentication,
                _ => ErrorKind::InvalidRequest,
            },
            message: message.unwrap_or_else(|| "an engine refused the request".to_owned()),
            param: self.param.as_deref().and_then(told),
            code: told(&self.code).map(Cow::Owned),
            retry_after: None,
            should_retry: None,
            allowed: None,
        }
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

    /// Too many answers of engines are held.
    pub(crate) fn spent() -> Self {
        Self(ApiError::overloaded("the router is busy with other answers", COME_BACK))
    }

    /// An engine's answer is compressed, and cannot be decoded.
    pub(crate) fn unreadable() -> Self {
        Self(ApiError::bad_gateway("an engine's answer has a content coding that cannot be decoded"))
    }

    pub(crate) fn broken() -> Self {
        Self(ApiError::bad_gateway("an engine failed while it worked on the request"))
    }

    /// An engine does not accept this router's secret or key: the operator's to mend, so the client reads no more than 502.
    pub(crate) fn misconfigured() -> Self {
        Self(
            ApiError::bad_gateway("the router and an engine are not configured alike")
                .with_code(Code::Misconfigured),
        )
    }

    /// An engine does not serve the model that it is configured for: the operator's to mend.
    pub(crate) fn wrong_model() -> Self {
        Self(
            ApiError::bad_gateway("the router and an engine are not configured alike")
                .with_code(Code::MisconfiguredModel),
        )
    }

    /// The engines of the model do not have the endpoint.
    fn lacks_endpoint() -> Self {
        let message = "the engines of this model do not have this endpoint".to_owned();
        Self(ApiError { message, ..ApiError::unsupported_endpoint("") })
    }

    /// Whether an engine does not have the endpoint.
    pub(crate) fn is_lack_of_endpoint(&self) -> bool {
        self.0.code == Some(Code::UnsupportedEndpoint.into())
    }

    /// The request itself has taken longer than it may.
    pub(crate) fn out_of_time() -> Self {
        Self(ApiError::gateway_timeout("the request took longer than it may").with_code(Code::RequestTimeout))
    }

    pub(crate) fn silent() -> Self {
        Self(ApiError::gateway_timeout("an engine did not answer in time"))
    }

    /// A prefill engine's refusal as the client's: what the engine says of the one token that the router asked it for is
    /// not about anything that the client has asked.
    pub(crate) fn of_prefill(mut self) -> Self {
        let message = &self.0.message;
        let too_long = self.0.code.as_deref() == Some("context_length_exceeded")
            || message.contains("context length")
            || message.contains("maximum model length")
            || message.contains("max_tokens");
        if too_long && self.0.status == 400 {
            let said = ApiError::without_max_tokens(message).map(str::to_owned);
            // vLLM's first sentence: "This model's maximum context length is 8 tokens."
            let said = said.or_else(|| {
                let (context, prompt) = context_and_prompt(message)?;
                Some(format!(
                    "This model's maximum context length is {context} tokens, but the prompt has {prompt}"
                ))
            });
            let said = said.or_else(|| {
                let (said, _) = message.split_once(". ")?;
                said.contains("context length").then(|| format!("{said}; the prompt is longer"))
            });
            self.0.message = said.unwrap_or_else(|| "the prompt does not fit the model's context".to_owned());
        }
        self
    }

    fn of(answer: &Whole, meaning: Meaning, said: &Said<'_>, hosts: &Hosts) -> Self {
        let after = || answer.retry_after.unwrap_or(COME_BACK);
        Self(match (meaning, answer.status) {
            (Meaning::Misconfigured, _) => return Self::misconfigured(),
            (Meaning::WrongModel, _) => return Self::wrong_model(),
            (_, StatusCode::TOO_MANY_REQUESTS) => ApiError::overloaded("every engine asked is full", after()),
            (_, StatusCode::SERVICE_UNAVAILABLE) => {
                ApiError::unavailable("no engine of this model is available", after())
            }
            (Meaning::Refused, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED)
                if said.lacks_path() =>
            {
                return Self::lacks_endpoint();
            }
            (Meaning::Refused, status) | (_, status @ StatusCode::REQUEST_TIMEOUT) => {
                said.told(status, hosts)
            }
            // Not the client's doing, whatever the status says to a router.
            (
                Meaning::Trouble | Meaning::FailedInside | Meaning::CannotUseHandoff | Meaning::HandoffSpent,
                _,
            ) => {
                return Self::broken();
            }
        })
    }
}

/// The beginning, in whole characters.
fn cut(said: &str) -> &str {
    &said[..said.floor_char_boundary(SAID_BYTES_MAX)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &str) -> Whole {
        let status = StatusCode::from_u16(status).expect("a status");
        Whole { status, retry_after: None, body: body.to_owned().into(), own_key: false }
    }

    fn verdict(answer: &Whole) -> Verdict {
        let hosts = Hosts::default();
        hosts.add("p-17");
        Verdict::of(answer, &hosts)
    }

    fn refusal(status: u16, body: &str) -> Refusal {
        verdict(&answer(status, body)).refusal
    }

    #[test]
    fn an_engine_that_refuses_the_routers_own_key_is_misconfigured_and_the_clients_key_is_the_clients() {
        for status in [401, 403] {
            let body = r#"{"error":{"message":"Unauthorized","code":"invalid_api_key"}}"#;
            let of_client = answer(status, body);
            assert_eq!(verdict(&of_client).meaning, Meaning::Refused);
            assert_eq!(verdict(&of_client).refusal.0.status, status);
            let of_router = Whole { own_key: true, ..of_client };
            assert_eq!(verdict(&of_router).meaning, Meaning::Misconfigured);
            assert_eq!(verdict(&of_router).refusal, Refusal::misconfigured());
        }
    }

    #[test]
    fn an_engines_words_are_cut_in_whole_characters() {
        let long = "ä".repeat(2000);
        let body = serde_json::json!({"error": {"message": long, "param": long, "code": long}}).to_string();
        let Refusal(error) = refusal(400, &body);
        assert_eq!(error.message, "ä".repeat(SAID_BYTES_MAX / 2));
        assert_eq!(error.param.as_deref(), Some(error.message.as_str()));
        assert_eq!(error.code.as_deref(), Some(error.message.as_str()));
        let odd = serde_json::json!({"error": {"message": format!("x{long}")}}).to_string();
        assert_eq!(refusal(400, &odd).0.message.len(), SAID_BYTES_MAX - 1);
    }

    #[test]
    fn the_engines_own_words_reach_the_client_when_the_fault_is_the_clients() {
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
    fn the_one_token_of_the_prefill_leg_is_not_told_to_the_client() {
        for (said, told) in [
            (
                ApiError::context_length(9, 1, 8).message.as_str(),
                "the model's context is 8 tokens, but the prompt has 9",
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
            ("max_tokens=1 is too much", "the prompt does not fit the model's context"),
            ("`stop` is wrong", "`stop` is wrong"),
        ] {
            let body = serde_json::json!({"error": {"message": said}}).to_string();
            assert_eq!(refusal(400, &body).of_prefill().0.message, told);
        }
    }

    #[test]
    fn an_address_reaches_the_client_in_no_field() {
        for (said, told) in [
            ("cannot reach http://10.0.0.7:8000/v1", "cannot reach [address]"),
            ("host=10.0.0.7", "host=[address]"),
            ("decode0:8000", "an engine refused the request"),
            ("p-17 is gone", "[address] is gone"),
        ] {
            let body =
                serde_json::json!({"error": {"message": said, "param": said, "code": said}}).to_string();
            let Refusal(error) = refusal(400, &body);
            assert_eq!(error.message, told, "{said}");
            assert_eq!((error.param, error.code), (None, None), "{said}");
        }
        let plain = "`stop[0]` must be a string of 1 to 1024 bytes: got 7";
        let body =
            serde_json::json!({"error": {"message": plain, "param": "stop.0", "code": 400}}).to_string();
        let Refusal(error) = refusal(400, &body);
        assert_eq!((error.message.as_str(), error.param.as_deref()), (plain, Some("stop.0")));
        assert_eq!(error.code.as_deref(), Some("400"));
    }

    #[test]
    fn an_engine_is_blamed_for_its_own_trouble_only() {
        for (status, code, blame) in [
            (500, "", Blame::Engine),
            (503, "engine_failed", Blame::Engine),
            (404, "model_not_found", Blame::Engine),
            (503, "draining", Blame::Draining),
            (503, "overloaded", Blame::Nobody),
            (503, "kv_gone", Blame::Nobody),
            (503, "kv_something_new", Blame::Nobody),
            (400, "kv_layout_mismatch", Blame::Layout),
            (401, "invalid_cluster_secret", Blame::Nobody),
            (429, "", Blame::Nobody),
            (302, "", Blame::Nobody),
        ] {
            let body = serde_json::json!({"error": {"code": code}}).to_string();
            assert_eq!(verdict(&answer(status, &body)).blame, blame, "{status} {code}");
        }
        let vllm =
            r#"{"error":{"type":"NotFoundError","code":404,"message":"The model `x` does not exist."}}"#;
        let Verdict { meaning, blame, .. } = verdict(&answer(404, vllm));
        assert_eq!((meaning, blame), (Meaning::WrongModel, Blame::Engine));
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
            let Verdict { meaning, blame, refusal } = verdict(&answer(status, body));
            assert_eq!((meaning, blame), (Meaning::Refused, Blame::Nobody), "{body}");
            assert!(refusal.is_lack_of_endpoint(), "{body}: {refusal:?}");
            assert_eq!(refusal.0.status, 404, "{body}");
        }
        // About what the request names.
        for body in
            [r#"{"detail":"no such adapter"}"#, r#"{"error":{"message":"Not Found","param":"file_id"}}"#]
        {
            let Verdict { meaning, refusal, .. } = verdict(&answer(404, body));
            assert_eq!(meaning, Meaning::Refused);
            assert!(!refusal.is_lack_of_endpoint(), "{body}");
        }
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
            (400, "kv_of_a_later_version", Meaning::CannotUseHandoff),
            (503, "kv_of_a_later_version", Meaning::CannotUseHandoff),
            (404, "model_not_found", Meaning::WrongModel),
        ] {
            let said =
                answer(status, &serde_json::json!({"error": {"code": code, "message": "x"}}).to_string());
            let Verdict { meaning: found, refusal: Refusal(told), .. } = verdict(&said);
            assert_eq!(found, meaning, "{status} {code}");
            let ours = meaning != Meaning::Refused && !matches!(status, 408 | 429);
            assert_eq!(told.status >= 500, ours, "{status} {code}: the client is told {told}");
        }
    }
}
