//! The requests that another engine can continue: all fields that affect the response are known here, and the rest of
//! the response depends only on the tokens so far.

use baton_openai::is_constraint;
use serde_json::{Map, Value};

/// Sampling parameters, and those of the queue and the cache, sent with the continuation unchanged unless the router sets
/// them. Frequency and presence penalties are missing: they apply to the response only, which is part of the prompt for
/// the next engine.
const SAMPLING: [&str; 13] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "cache_salt",
    "priority",
    "user",
];

/// Known fields that the continuation does not need.
const KNOWN: [&str; 12] = [
    "model",
    "prompt",
    "messages",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
];

/// Whether another engine may continue the response of a request.
///
/// Not permitted: responses that are not streamed; several choices; log probabilities and `echo`, whose frames contain
/// more than text; stop strings, of which a part may be held back; a seed with a temperature, because the random draws
/// would start again; tools, and any unknown field.
pub(super) fn is_allowed(body: &Map<String, Value>) -> bool {
    let neutral = |name: &str, value: &Value| match name {
        "n" | "best_of" => *value == 1,
        "logprobs" | "echo" | "return_token_ids" | "include_stop_str_in_output" | "use_beam_search" => {
            *value == false
        }
        "stop" | "tools" => value.as_array().is_some_and(Vec::is_empty),
        "tool_choice" => *value == "none",
        "presence_penalty" | "frequency_penalty" | "top_logprobs" => value.as_f64() == Some(0.0),
        _ => false,
    };
    let passes = |(name, value): (&String, &Value)| {
        let name = name.as_str();
        let known = SAMPLING.contains(&name) || KNOWN.contains(&name) || is_constraint(name);
        value.is_null() || known || neutral(name, value)
    };
    let streamed = body.get("stream") == Some(&Value::Bool(true));
    let drawn = body.get("temperature").and_then(Value::as_f64) != Some(0.0);
    let seeded = body.get("seed").is_some_and(|seed| !seed.is_null());
    streamed && !(drawn && seeded) && body.iter().all(passes)
}

/// The sampling parameters of a body.
pub(super) fn sampling(body: &Map<String, Value>) -> Map<String, Value> {
    let kept = |(name, value): (&String, &Value)| {
        (SAMPLING.contains(&name.as_str()) && !value.is_null()).then(|| (name.clone(), value.clone()))
    };
    body.iter().filter_map(kept).collect()
}

/// The constraints of a body's text; empty if all texts are permitted.
pub(super) fn constraints(body: &Map<String, Value>) -> Map<String, Value> {
    let constrains = |name: &str, value: &Value| match name {
        "response_format" => value["type"] != "text",
        _ => is_constraint(name),
    };
    let kept = |(name, value): (&String, &Value)| {
        (!value.is_null() && constrains(name, value)).then(|| (name.clone(), value.clone()))
    };
    body.iter().filter_map(kept).collect()
}
