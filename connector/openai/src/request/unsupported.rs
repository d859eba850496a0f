//! Fields that would change the response, but that the engine does not implement. To ignore them would silently return
//! another response, so they are refused by name, unless their value requests the default behaviour.

use serde_json::Value;

use super::Endpoint;
use crate::code::Code;
use crate::error::ApiError;
use crate::field::Fields;
use crate::limits::Scope;

type NeutralCheck = fn(&Value) -> bool;

const NEVER: NeutralCheck = |_| false;
const FALSE: NeutralCheck = |value| value == &Value::Bool(false);
const EMPTY: NeutralCheck = |value| match value {
    Value::String(text) => text.is_empty(),
    Value::Array(array) => array.is_empty(),
    Value::Object(object) => object.is_empty(),
    _ => false,
};
/// vLLM's value for no bound.
const NONE: NeutralCheck = |value| value.as_i64() == Some(-1);
const ONE: NeutralCheck = |value| value.as_u64() == Some(1);
const TEXT_ONLY: NeutralCheck =
    |value| value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind.as_str() == Some("text")));

/// Names, and checks for values that request the default behaviour.
const BOTH: &[(&str, NeutralCheck)] =
    &[("use_beam_search", FALSE), ("best_of", ONE), ("logits_processors", EMPTY)];
const COMPLETIONS: &[(&str, NeutralCheck)] =
    &[("suffix", EMPTY), ("prompt_embeds", EMPTY), ("thinking_token_budget", NONE)];
const CHAT: &[(&str, NeutralCheck)] = &[
    ("audio", NEVER),
    ("modalities", TEXT_ONLY),
    ("functions", EMPTY),
    ("function_call", NEVER),
    ("chat_template", NEVER),
];

/// Whether the field is one of these.
pub(super) fn is_unsupported(name: &str) -> bool {
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
    for (name, is_neutral) in BOTH.iter().chain(own) {
        if fields.get(name).is_some_and(|value| !is_neutral(value)) {
            let message = format!("`{name}` is not supported here; leave it out");
            return Err(ApiError::invalid(*name, message).with_code(Code::UnsupportedParameter));
        }
    }
    Ok(())
}
