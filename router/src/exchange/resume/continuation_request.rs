//! The request to the next engine: the client's fields that affect the rest of a response, and the tokens so far.

use baton_openai::Endpoint;
use serde_json::{Map, Value, json};

use super::eligibility;

/// Token limit of completions without one in the request; OpenAI's and vLLM's default.
const COMPLETION_TOKENS: u64 = 16;

/// The part of the client's request that a continuation needs.
#[derive(Debug)]
pub(super) struct ContinuationRequest {
    pub endpoint: Endpoint,
    model: String,
    /// The sampling fields of the client's body.
    sampling: Map<String, Value>,
    /// Constraints of the text.
    constraints: Map<String, Value>,
    max_tokens: Option<u64>,
    min_tokens: u64,
    stream_options: Option<Value>,
    /// The router requests usage, and the client does not.
    pub usage_is_internal: bool,
}

impl ContinuationRequest {
    /// Of a client's body that [`eligibility::is_allowed`] accepted.
    pub(super) fn new(endpoint: Endpoint, model: &str, body: &Map<String, Value>) -> Self {
        let number = |name: &str| body.get(name).and_then(Value::as_u64);
        let default = if endpoint == Endpoint::Completions { Some(COMPLETION_TOKENS) } else { None };
        Self {
            endpoint,
            model: model.to_owned(),
            sampling: eligibility::sampling(body),
            constraints: eligibility::constraints(body),
            max_tokens: number("max_completion_tokens").or_else(|| number("max_tokens")).or(default),
            min_tokens: number("min_tokens").unwrap_or(0),
            stream_options: body.get("stream_options").filter(|options| !options.is_null()).cloned(),
            usage_is_internal: false,
        }
    }

    /// Whether the client requests usage.
    pub(super) fn wants_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options["include_usage"] == true)
    }

    /// Whether the response has a constraint, which only Baton's engines continue.
    pub(super) fn is_constrained(&self) -> bool {
        !self.constraints.is_empty()
    }

    /// The `object` of a frame of the response.
    pub(super) fn chunk_object(&self) -> &'static str {
        if self.endpoint == Endpoint::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    /// The body for `/v1/completions` that requests the rest of the response; `None` if `max_tokens` were sent.
    pub(super) fn body(&self, prompt: &[u32], sent: &[u32]) -> Option<Map<String, Value>> {
        let sent_tokens = sent.len() as u64;
        if self.max_tokens.is_some_and(|most| most <= sent_tokens) {
            return None;
        }
        let tokens = [prompt, sent].concat();
        let mut body = self.sampling.clone();
        body.insert("model".to_owned(), json!(self.model));
        body.insert("prompt".to_owned(), json!(tokens));
        body.insert("stream".to_owned(), json!(true));
        body.insert("return_token_ids".to_owned(), json!(true));
        if self.usage_is_internal || self.stream_options.is_some() {
            let mut options = self.stream_options.clone().unwrap_or_else(|| json!({}));
            if self.usage_is_internal {
                options["include_usage"] = json!(true);
                options["continuous_usage_stats"] = json!(false);
            }
            body.insert("stream_options".to_owned(), options);
        }
        if let Some(most) = self.max_tokens {
            body.insert("max_tokens".to_owned(), json!(most - sent_tokens));
        }
        if self.is_constrained() && sent.is_empty() {
            body.extend(self.constraints.clone());
        } else if self.is_constrained() {
            // An engine that does not know this form refuses it, and sends no text without its constraint.
            let continued = json!({"continues": sent_tokens, "of": self.constraints});
            body.insert("structured_outputs".to_owned(), continued);
        }
        let min = self.min_tokens.saturating_sub(sent_tokens);
        if min > 0 {
            body.insert("min_tokens".to_owned(), json!(min));
        }
        Some(body)
    }
}
