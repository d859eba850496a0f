//! Which requests can be continued by another engine: those of which everything that shapes their answer is known
//! here, and of which the rest of the answer depends on nothing but the tokens so far.

use serde_json::{Map, Value};

/// How tokens are chosen; sent with the continuation as it is. Frequency and presence penalties are missing: they
/// look at the answer only, which for the next engine is a part of its prompt.
const SAMPLING: [&str; 12] = [
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
    "user",
];

/// Known, and not needed for the continuation.
const KNOWN: [&str; 13] = [
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
    "priority",
];

/// Whether a request's answer may be continued by another engine.
///
/// Not: answers that are not streamed; several choices; log-probabilities and `echo`, whose frames hold more than
/// text; stop strings, of which a part may be held back; a seed together with a temperature, because the draws begin
/// anew; tools, structured output, and any field that is not known here.
pub(super) fn is_allowed(body: &Map<String, Value>) -> bool {
    let neutral = |name: &str, value: &Value| match name {
        "n" | "best_of" => *value == 1,
        "logprobs" | "echo" | "return_token_ids" | "include_stop_str_in_output" | "use_beam_search" => {
            *value == false
        }
        "stop" | "tools" => value.as_array().is_some_and(Vec::is_empty),
        "tool_choice" => *value == "none",
        "response_format" => value["type"] == "text",
        "presence_penalty" | "frequency_penalty" | "top_logprobs" => value.as_f64() == Some(0.0),
        _ => false,
    };
    let passes = |(name, value): (&String, &Value)| {
        let name = name.as_str();
        value.is_null() || SAMPLING.contains(&name) || KNOWN.contains(&name) || neutral(name, value)
    };
    let streamed = body.get("stream") == Some(&Value::Bool(true));
    let drawn = body.get("temperature").and_then(Value::as_f64) != Some(0.0);
    let seeded = body.get("seed").is_some_and(|seed| !seed.is_null());
    streamed && !(drawn && seeded) && body.iter().all(passes)
}

/// The part of a body that says how tokens are chosen.
pub(super) fn sampling(body: &Map<String, Value>) -> Map<String, Value> {
    let kept = |(name, value): (&String, &Value)| {
        (SAMPLING.contains(&name.as_str()) && !value.is_null()).then(|| (name.clone(), value.clone()))
    };
    body.iter().filter_map(kept).collect()
}
