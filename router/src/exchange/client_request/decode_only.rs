//! Requests that a decode engine computes as a whole, whatever the configuration.

use baton_openai::{ApiError, RawBody, RequestOutline};
use serde::Deserialize;

use crate::message::path::Dialect;
use crate::metrics::routing::DisaggregationReason;

/// Types of a tool in `/v1/responses` that the client runs.
const CLIENT_TOOLS: [&str; 2] = ["function", "custom"];

/// Maximum bytes of `tools` that are parsed. A decode engine computes a request with more.
const TOOLS_BYTES_MAX: usize = 1 << 20;

/// A tool of `/v1/responses`.
#[derive(Deserialize)]
struct Tool<'a> {
    #[serde(rename = "type", borrow, default)]
    kind: std::borrow::Cow<'a, str>,
}

/// Why a decode engine computes the whole request:
///
/// - It has several prompts, and one handoff is one sequence of blocks.
/// - The response contains log probabilities of the prompt. A stock decode engine computes the whole prompt for them
///   even with a handoff, and a prefill engine's reply would hold all of them.
/// - It is a request of `/v1/responses` that depends on state of an engine.
///
/// # Errors
/// 400 if log probabilities of the prompt are requested of a stream, as at engines.
pub(super) fn reason(
    dialect: Dialect,
    body: &RawBody,
    outline: &RequestOutline,
) -> Result<Option<DisaggregationReason>, ApiError> {
    Ok(if outline.prompts > 1 {
        Some(DisaggregationReason::SeveralPrompts)
    } else if has_prompt_logprobs(body, outline.request.stream)? {
        Some(DisaggregationReason::PromptLogprobs)
    } else {
        (dialect == Dialect::Responses && needs_state(body)).then_some(DisaggregationReason::EngineState)
    })
}

/// Whether the response contains log probabilities of the prompt's tokens: `prompt_logprobs`, or `echo` with
/// `logprobs`.
fn has_prompt_logprobs(body: &RawBody, stream: bool) -> Result<bool, ApiError> {
    if let Some(number) = set(body, "prompt_logprobs") {
        if stream && number != b"0" {
            let message = "`prompt_logprobs` cannot be streamed; leave `stream` out";
            return Err(ApiError::invalid("prompt_logprobs", message));
        }
        return Ok(true);
    }
    Ok(set(body, "echo").is_some()
        && (set(body, "logprobs").is_some() || set(body, "top_logprobs").is_some()))
}

/// Whether a response depends on state of its engine: earlier responses, which no prefill engine has, work in the
/// background, or tools that the engine calls between several generations.
fn needs_state(body: &RawBody) -> bool {
    let has_state =
        ["previous_response_id", "conversation", "background"].iter().any(|name| set(body, name).is_some());
    has_state || set(body, "tools").is_some_and(|tools| !are_of_client(tools))
}

fn are_of_client(tools: &[u8]) -> bool {
    if tools.len() > TOOLS_BYTES_MAX {
        return false;
    }
    // The engine refuses another form.
    let tools: Vec<Tool<'_>> = serde_json::from_slice(tools).unwrap_or_default();
    tools.iter().all(|tool| CLIENT_TOOLS.contains(&&*tool.kind))
}

/// A field that is neither `null` nor `false`.
fn set<'a>(body: &'a RawBody, name: &str) -> Option<&'a [u8]> {
    body.field(name).filter(|value| *value != b"null" && *value != b"false")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn responses_that_depend_on_their_engine_are_not_split() {
        let needs_state = |body: Value| {
            let body = RawBody::any(body.to_string().into(), &Default::default(), &()).expect("an object");
            needs_state(&body)
        };
        for body in [
            json!({"previous_response_id": "resp_1"}),
            json!({"conversation": "conv_1"}),
            json!({"background": true}),
            json!({"tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]}),
            json!({"tools": [{"type": "mcp", "server_url": "x"}]}),
            json!({"tools": [{}]}),
            json!({"tools": [{"type": "function", "name": "f".repeat(TOOLS_BYTES_MAX)}]}),
        ] {
            assert!(needs_state(body.clone()), "{body}");
        }
        for body in [
            json!({}),
            json!({"previous_response_id": null, "background": false, "store": true}),
            json!({"tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]}),
            json!({"tools": []}),
        ] {
            assert!(!needs_state(body.clone()), "{body}");
        }
    }
}
