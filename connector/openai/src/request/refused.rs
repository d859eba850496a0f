//! Fields that would change the answer and that no engine here implements. Ignoring them would answer another
//! question than was asked, with 200; so they are refused by name, unless they ask for what happens anyway.

use serde_json::Value;

use super::Endpoint;
use crate::code::Code;
use crate::error::ApiError;
use crate::field::Fields;
use crate::limits::Scope;

type Harmless = fn(&Value) -> bool;

const NEVER: Harmless = |_| false;
const FALSE: Harmless = |value| value == &Value::Bool(false);
const EMPTY: Harmless = |value| match value {
    Value::String(text) => text.is_empty(),
    Value::Array(array) => array.is_empty(),
    Value::Object(object) => object.is_empty(),
    _ => false,
};
const ONE: Harmless = |value| value.as_u64() == Some(1);
const TEXT_FORMAT: Harmless = |value| value.get("type").and_then(Value::as_str) == Some("text");
const TEXT_ONLY: Harmless =
    |value| value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind.as_str() == Some("text")));

/// Name, and which of its values ask for nothing special.
const BOTH: &[(&str, Harmless)] = &[
    ("response_format", TEXT_FORMAT),
    ("structured_outputs", EMPTY),
    ("guided_json", NEVER),
    ("guided_regex", NEVER),
    ("guided_choice", NEVER),
    ("guided_grammar", NEVER),
    ("use_beam_search", FALSE),
    ("best_of", ONE),
    ("allowed_token_ids", NEVER),
    ("bad_words", EMPTY),
    ("logits_processors", EMPTY),
    ("prompt_logprobs", NEVER),
    ("truncate_prompt_tokens", NEVER),
];
const COMPLETIONS: &[(&str, Harmless)] = &[("suffix", EMPTY), ("prompt_embeds", EMPTY)];
const CHAT: &[(&str, Harmless)] = &[
    ("audio", NEVER),
    ("modalities", TEXT_ONLY),
    ("functions", EMPTY),
    ("function_call", NEVER),
    ("chat_template", NEVER),
];

/// Whether it is one of these.
pub(super) fn knows(name: &str) -> bool {
    [BOTH, COMPLETIONS, CHAT].into_iter().flatten().any(|(known, _)| *known == name)
}

pub(super) fn check(fields: Fields<'_>, endpoint: Endpoint, scope: Scope) -> Result<(), ApiError> {
    if scope == Scope::AnyEngine {
        return Ok(());
    }
    let own = match endpoint {
        Endpoint::Completions => COMPLETIONS,
        Endpoint::Chat => CHAT,
    };
    for (name, harmless) in BOTH.iter().chain(own) {
        if fields.get(name).is_some_and(|value| !harmless(value)) {
            let message = format!("`{name}` is not supported here; leave it out");
            return Err(ApiError::invalid(*name, message).with_code(Code::UnsupportedParameter));
        }
    }
    Ok(())
}
